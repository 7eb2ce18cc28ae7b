"""Programs of the kernels to compile for GPUs that are not there."""
