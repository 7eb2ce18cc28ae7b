"""How the Hopper kernels cut a batch: whole query tokens first, then parts of the others, which are merged after."""

from collections.abc import Callable
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index
from tamis.cuda.launch import Launch, kernel

VALUE_DIM = 512
OUT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MERGED_AT_ONCE = (4, 16)
"""Parts that the merge reads before it adds: many hide latency, few leave room for more tokens and heads at a time."""
MERGE_SIGNATURE = "PPPiiiPPiqqPP"
OVERHEAD_STEPS, MERGE_STEPS = 2, 2
"""What an item costs beside its steps, and a launch that merges."""


class Cut(NamedTuple):
    """How a batch becomes items."""

    whole: int
    """Tokens, from the first on, that are one item each."""
    parts: int
    """Items that each of the other tokens is cut into."""


@lru_cache(1024)
def choose_cut(
    tokens: int,
    heads: int,
    steps: int,
    room: int,
    *,
    direct: bool = True,
    parts_per_step: int = 2200,
    steps_per_part: int = 1,
) -> Cut:
    """The cut that finishes soonest: rounds of `room` items on the device, times the steps that each works through, and
    the time to write and read the parts of heads, `parts_per_step` of them in the time of one step. A part has at least
    `steps_per_part`, where there are so many.

    Whole tokens fill whole rounds; those that are left over, fewer than there is room for, are cut, so that one token
    more never costs a round more. Among equals the fewest parts win. Unless tokens can be stored directly, all are cut
    alike.
    """

    def duration(cut: Cut) -> float:
        left = tokens - cut.whole
        rounds = ceil_div(cut.whole, room) * (steps + OVERHEAD_STEPS)
        rounds += ceil_div(left * cut.parts, room) * (ceil_div(steps, cut.parts) + OVERHEAD_STEPS)
        return rounds + (MERGE_STEPS + left * cut.parts * heads / parts_per_step if left else 0)

    choices = [Cut(tokens, 1)] if direct else []
    for whole in sorted({0, tokens // room * room if direct else 0}):
        choices += [Cut(whole, parts) for parts in range(1, max(1, steps // steps_per_part) + 1)]
    return min(choices, key=duration)


class Target(NamedTuple):
    """Where results go: output [..., T, H, V], lse and maxima [..., T, H]."""

    out: Tensor
    lse: Tensor
    maxima: Tensor

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> "Target":
        """Room in float32 for the results of a shape [..., T, H]."""
        lse = torch.empty(shape, dtype=torch.float32, device=device)
        return cls(torch.empty(*shape, VALUE_DIM, dtype=torch.float32, device=device), lse, torch.empty_like(lse))

    def addresses(self) -> tuple[int, int, int]:
        """Where its memory is."""
        return self.out.data_ptr(), self.lse.data_ptr(), self.maxima.data_ptr()


def fits_directly(out: Tensor) -> bool:
    """Whether the kernels can write to it: four neighbours at a time."""
    strides = out.stride(2) == 1 and out.stride(0) % 4 == 0 and out.stride(1) % 4 == 0
    return out.dtype in OUT_KINDS and strides and out.data_ptr() % (4 * out.element_size()) == 0


def attend_in_items(
    out: Tensor,
    sink: Tensor | None,
    cut: Cut,
    launch: Callable[[Target, Target], None],
) -> tuple[Tensor, Tensor]:
    """Fill `out` [T, H, V]; lse and maxima [T, H].

    `launch` fills the rows of whole tokens in its first argument, and the parts [P, t, ...] of the other t in its
    second, which are merged then.
    """
    tokens, heads, _ = out.shape
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=out.device)
    whole = Target(out, lse, torch.empty_like(lse))
    parts = Target.empty(cut.parts, tokens - cut.whole, heads, device=out.device)
    launch(whole, parts)
    if cut.whole < tokens:
        # Slicing takes as long as launching, so it is not done for nothing.
        merge_parts(parts, sink, Target(*(tensor[cut.whole :] for tensor in whole)) if cut.whole else whole)
    return whole.lse, whole.maxima


def merge_parts(parts: Target, sink: Tensor | None, whole: Target) -> None:
    """Merge parts [P, T, H, ...] into a target that they fit directly."""
    count, tokens, heads = parts.lse.shape
    out, lse, maxima = whole.addresses()
    at_once = MERGED_AT_ONCE[0 if count <= MERGED_AT_ONCE[0] else 1]
    _merge_launch(whole.out.device, at_once)(
        (tokens * heads, 1, 1),
        *(*parts.addresses(), count, tokens, heads, address(sink)),
        *(out, OUT_KINDS[whole.out.dtype], whole.out.stride(0), whole.out.stride(1), lse, maxima),
    )


@cache
def merge_program(at_once: int) -> Program:
    """The source of the merge, for a number of parts that are read at once."""
    return Program.packaged(__package__, "merge_parts.cu", AT_ONCE=at_once)


@cache
def _merge_launch(device: torch.device, at_once: int) -> Launch:
    loaded = kernel(merge_program(at_once), "merge_parts", device_index(device))
    return Launch(loaded, MERGE_SIGNATURE, threads=VALUE_DIM // 4, overlap=True)


def address(tensor: Tensor | None) -> int:
    """Of its memory; 0 where there is none."""
    return 0 if tensor is None else tensor.data_ptr()
