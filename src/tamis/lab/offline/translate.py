"""Launches of the Triton kernel of stage `translate`, to compile without a GPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tamis.lab.offline.triton import OfflineCase
from tamis.ops.translate.operations import TranslatePositions
from tamis.ops.translate.triton_kernels import launch_arguments, launch_options, translate_rows


def triton_cases() -> Iterator[OfflineCase]:
    """Plain, with a workspace, sharded and compact, and with all sizes 1."""

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device="cpu")

    def case(
        label: str, tokens: int, columns: int, workspaces: int, shard: tuple[int, int, int], compact: bool
    ) -> OfflineCase:
        positions, table = ints(tokens, columns), ints(tokens, columns // 64 + 1)
        ids, starts = (ints(tokens), ints(workspaces)) if workspaces else (None, None)
        call = TranslatePositions(positions, ints(tokens), table, 64, 64, ids, starts, shard, compact, "triton")
        arguments = launch_arguments(call, torch.empty_like(positions), ints(tokens))
        return OfflineCase.of_launch(translate_rows, arguments, launch_options(arguments["BLOCK"]), label)

    yield case("translate", 128, 2048, 0, (1, 0, 1), False)
    yield case("translate, workspace", 128, 2048, 16, (1, 0, 1), False)
    yield case("translate, sharded and compact", 128, 5000, 0, (8, 3, 16), True)
    # Triton turns arguments that are 1 into constants, which gives another program.
    yield case("translate, one of everything", 1, 1, 1, (1, 0, 1), True)
