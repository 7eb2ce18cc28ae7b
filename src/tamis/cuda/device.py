"""What the library asks of a CUDA device, each asked once."""

from functools import cache

import torch


@cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors (SMs) of a CUDA device; 1 for the host, where kernels are interpreted."""
    if device.type == "cpu":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def device_index(device: torch.device) -> int:
    """The number of a CUDA device; the current one's where it has none."""
    return torch.cuda.current_device() if device.index is None else device.index
