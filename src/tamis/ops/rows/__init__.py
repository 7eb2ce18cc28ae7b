"""Triton device functions and launch helpers that the kernels of several stages share."""
