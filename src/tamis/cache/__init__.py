"""Paged caches: the byte formats of rows, their storage, selections of rows, and a page allocator."""
