"""Launches of the Triton kernels of stage `select`, to compile without a GPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tamis.lab.offline.triton import OfflineCase
from tamis.ops.select.triton_kernels import (
    Launch,
    select_chosen,
    select_entries,
    select_gathered,
    select_mixed,
    select_window,
)


def triton_cases() -> Iterator[OfflineCase]:
    """Every function of the stage at usual sizes, and with one of everything."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="cpu")

    def case(label: str, launch: Launch) -> OfflineCase:
        return OfflineCase.of_launch(launch.kernel, launch.arguments | launch.constants, launch.options, label)

    def cases(label: str, tokens: int, requests: int, window: int, topk: int) -> Iterator[OfflineCase]:
        each, table, wide = ints(tokens), ints(requests, topk), ints(tokens, window)
        own, rows, long_rows = each.long(), ints(tokens, topk), ints(tokens, 5 * topk)
        two = (ints(requests), ints(requests))
        yield case(f"select window{label}", select_window.prepare(each, each, table, own, None, 64, window, wide, each))
        yield case(
            f"select window of blocks{label}",
            select_window.prepare(each, each, table, None, two, 64, window, wide, each),
        )
        numbers = (4, 64, topk, tokens)
        yield case(
            f"select entries by number{label}",
            select_entries.prepare(each, each, table, own, *numbers, own, each, each, None),
        )
        numbers = (128, 2, 5 * topk, 1)
        yield case(
            f"select every entry{label}",
            select_entries.prepare(each, each, table, own, *numbers, own, each, each, long_rows),
        )
        yield case(f"select chosen{label}", select_chosen.prepare(rows, each, table, own, 64, rows, each))
        sizes = (4, window, 36, 103, topk)
        for what, chosen in (("chosen", rows), ("all", None)):
            yield case(
                f"select gathered, {what}{label}",
                select_gathered.prepare(each, each, two[0], chosen, 0, *sizes, long_rows, each),
            )
        step = (ints(requests + 1), two[0], each, table)
        yield case(
            f"select mixed, window{label}",
            select_mixed.prepare(
                wide, None, None, None, rows[:, :0], *step, None, 64, 64, window, 1, 0, False, wide, each
            ),
        )
        for what, local in (("numbers", True), ("slots", False)):
            real = torch.zeros(tokens, dtype=torch.bool, device="cpu") if local else None
            inputs = (wide, rows, None if local else each, real, rows, *step, table)
            yield case(
                f"select mixed, {what}{label}",
                select_mixed.prepare(*inputs, 64, 2, window, 128, topk, local, long_rows, each),
            )

    yield from cases("", 64, 64, 128, 512)
    # Triton makes constants of arguments that are 1, which is another program.
    yield from cases(", one of everything", 1, 1, 1, 1)
