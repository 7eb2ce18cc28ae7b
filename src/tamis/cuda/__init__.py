"""CUDA C++ kernels without a build step: `compiler` turns a source into a cubin, `launch` runs it on torch's stream.

A kernel is one `.cu` file inside the package. It is compiled at first use for the device at hand by NVRTC, which comes
with PyTorch, and the result is kept on disk. NVRTC and the driver are called through ctypes: their C interfaces have
not changed for years, while the Python packages around them differ from release to release.
"""
