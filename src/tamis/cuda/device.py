"""Properties of CUDA devices."""

from functools import cache

import torch


@cache
def sm_count(device: torch.device) -> int:
    """The number of streaming multiprocessors (SMs) of a CUDA device; 1 for the CPU, where kernels are interpreted."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def device_index(device: torch.device) -> int:
    """The index of a CUDA device; that of the current device if it has none."""
    return torch.cuda.current_device() if device.index is None else device.index
