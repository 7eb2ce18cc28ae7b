"""Compiles the kernels without a GPU.

`triton` and `cuda` compile; each of the other modules lists the launches of one stage.
"""
