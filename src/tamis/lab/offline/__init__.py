"""Compile the kernels for GPUs that are not there.

`triton` and `cuda` compile; each of the other modules names the launches of one stage.
"""
