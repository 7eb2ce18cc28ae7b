"""Bytes and pages: byte formats of rows, paged storage, what is selected from it, and a page allocator."""
