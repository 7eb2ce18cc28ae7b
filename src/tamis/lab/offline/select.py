"""Launches of the Triton kernels of stage `select`, to compile without a GPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tamis.lab.offline.triton import OfflineCase
from tamis.ops.select.operations import SelectChosen, SelectEntries, SelectGathered, SelectGroups, SelectWindow
from tamis.ops.select.triton_kernels import (
    RowKernel,
    chosen_kernel,
    entry_kernel,
    gathered_kernel,
    group_kernel,
    window_kernel,
)


def triton_cases() -> Iterator[OfflineCase]:
    """Every function of the stage at usual sizes, and with all sizes 1."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="cpu")

    def case(label: str, launch: RowKernel) -> OfflineCase:
        return OfflineCase.of_launch(launch.kernel, launch.arguments | launch.constants, launch.options, label)

    def cases(label: str, tokens: int, requests: int, window: int, topk: int) -> Iterator[OfflineCase]:
        each, table, wide = ints(tokens), ints(requests, topk), ints(tokens, window)
        own, rows, long_rows = each.long(), ints(tokens, topk), ints(tokens, 5 * topk)
        two = (ints(requests), ints(requests))
        tokens_of = (each, each, table)
        windows = SelectWindow(*tokens_of, own, None, None, 64, window, wide, each, "triton")
        yield case(f"select window{label}", window_kernel(windows))
        blocks = SelectWindow(*tokens_of, None, *two, 64, window, wide, each, "triton")
        yield case(f"select window of blocks{label}", window_kernel(blocks))
        outputs = (own, each, each)
        entries = SelectEntries(*tokens_of, own, 4, 64, topk, tokens, *outputs, None, "triton")
        yield case(f"select entries by number{label}", entry_kernel(entries))
        entries = SelectEntries(*tokens_of, own, 128, 2, 5 * topk, 1, *outputs, long_rows, "triton")
        yield case(f"select every entry{label}", entry_kernel(entries))
        picked = SelectChosen(rows, each, table, own, 64, rows, each, "triton")
        yield case(f"select chosen{label}", chosen_kernel(picked))
        sizes = (0, 4, window, 36, 103, topk)
        for what, chosen in (("chosen", rows), ("all", None)):
            gathered = SelectGathered(each, each, two[0], chosen, *sizes, long_rows, each, "triton")
            yield case(f"select gathered, {what}{label}", gathered_kernel(gathered))
        for size in (4, 16):
            groups = SelectGroups(rows, each, size, ints(tokens, topk * size + size - 1), "triton")
            yield case(f"select groups of {size}{label}", group_kernel(groups))

    yield from cases("", 64, 64, 128, 512)
    # Triton turns arguments that are 1 into constants, which gives another program.
    yield from cases(", one of everything", 1, 1, 1, 1)
