"""Rows of a cache as the stages' Triton kernels read and write them."""
