"""Sparse attention of few heads over FP8 rows in CUDA C++: what it covers, how a launch is cut, and the launch."""

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tamis.cache import Selection
from tamis.cuda.compiler import Program
from tamis.cuda.launch import Launch, kernel
from tamis.layout import Layout, v32_fp8

if TYPE_CHECKING:
    from tamis.testing.offline_cuda import CudaCase

MAX_HEADS = 32
GROUP = 16
"""Heads that one team of warps works on: the rows of the matrix instruction."""
STAGE = 32
"""Rows that enter shared memory at a time."""
WIDTH, VALUE_DIM, ROW_BYTES = 576, 512, 656
COPY_ALIGNMENT = 16
"""Bytes that a row's address must be a multiple of."""
QUERY_DTYPES = (torch.bfloat16, torch.float16)
OUT_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
SIGNATURE = "PqqPqiiPqqiPPPqiiPiqqPPPPPPfPiiiii"
OVERHEAD_STEPS, MERGE_STEPS = 2, 2
"""What an item costs beside its stages, and what merging parts costs, in stages of all streams."""


class Variant(NamedTuple):
    """How a block is laid out."""

    streams: int
    """Rings of rows, each with a producer and a team: a token's columns are dealt out to them."""
    head_groups: int
    """Teams that read the same ring, 16 heads each."""
    stages: int
    """Of each ring."""
    per_sm: int
    """Blocks that share one multiprocessor."""

    @property
    def threads(self) -> int:
        """Per block: teams of four warps, then four warps of which one produces for each stream."""
        return 128 * (self.streams * self.head_groups + 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: rings, shares of logits, what streams hand over, query maxima, barriers, notes."""
        teams, stages = self.streams * self.head_groups, self.streams * self.stages
        merge = self.head_groups * 4 * 18 * 512 if self.streams > 1 else 0
        return stages * STAGE * ROW_BYTES + teams * 2 * 4 * 4 * 512 + merge + teams * 2 * 4 * 4 * GROUP + stages * 24


FEW_TOKENS, MANY_TOKENS, TWO_GROUPS = Variant(2, 1, 3, 1), Variant(1, 1, 4, 2), Variant(1, 2, 8, 1)


def refusal(q: Tensor, selections: Sequence[Selection], value_dim: int) -> str | None:
    """Why these kernels cannot do it, None if they can."""
    if q.dtype not in QUERY_DTYPES:
        return f"queries in {q.dtype}"
    if q.shape[1] > MAX_HEADS:
        return f"{q.shape[1]} heads, more than {MAX_HEADS}"
    if value_dim != VALUE_DIM:
        return f"values of {value_dim} columns, not {VALUE_DIM}"
    for selection in selections:
        held = selection.cache
        if not _known_rows(held.layout):
            return f"rows of the layout {held.layout.name}"
        if held.page_stride % COPY_ALIGNMENT or held.storage.data_ptr() % COPY_ALIGNMENT:
            return f"rows that do not start at a multiple of {COPY_ALIGNMENT} bytes"
    return None


@cache
def _known_rows(layout: Layout) -> bool:
    usual = v32_fp8()
    same = all(getattr(layout, part) == getattr(usual, part) for part in ("latent", "rope", "tile"))
    fields = (layout.values, layout.scales, layout.tail) == (usual.values, usual.scales, usual.tail)
    return same and fields and layout.scale_mode in ("pow2", "exact")


def usual_variant(tokens: int | None, heads: int, multiprocessors: int) -> Variant:
    """Two blocks on a multiprocessor overlap the ends of their items; where there is no second item, two streams of one
    block overlap better, and split a token into fewer parts. Without a number of tokens: one for all of them."""
    if heads > GROUP:
        return TWO_GROUPS
    return FEW_TOKENS if tokens is not None and tokens <= 2 * multiprocessors else MANY_TOKENS


class Cut(NamedTuple):
    """How a batch becomes items."""

    whole: int
    """Tokens, from the first on, that are one item each."""
    parts: int
    """Items that each of the other tokens is cut into."""


@lru_cache(1024)
def choose_cut(tokens: int, columns: int, variant: Variant, multiprocessors: int, *, direct: bool = True) -> Cut:
    """The cut that finishes soonest: rounds of blocks on the device, times the steps that each works through.

    Whole tokens fill whole rounds; those that are left over, fewer than there are blocks, are cut, so that one token
    more never costs a round more. Among equals the fewest parts win. Unless tokens can be stored directly, all are cut
    alike.
    """
    steps = max(1, -(-columns // (STAGE * variant.streams)))
    room = variant.per_sm * multiprocessors

    def duration(cut: Cut) -> int:
        left = tokens - cut.whole
        merged = -(-left * cut.parts // room) * (-(-steps // cut.parts) + OVERHEAD_STEPS) + (MERGE_STEPS if left else 0)
        return -(-cut.whole // room) * (steps + OVERHEAD_STEPS) + merged

    choices = [Cut(tokens, 1)] if direct else []
    for whole in sorted({0, tokens // room * room if direct else 0}):
        choices += [Cut(whole, parts) for parts in range(1, steps + 1)]
    return min(choices, key=duration)


def fits_directly(out: Tensor) -> bool:
    """Whether the kernel can write to it: four neighbours at a time."""
    strides = out.stride(2) == 1 and out.stride(0) % 4 == 0 and out.stride(1) % 4 == 0
    return out.dtype in OUT_KINDS and strides and out.data_ptr() % (4 * out.element_size()) == 0


class Target(NamedTuple):
    """Where results go: output [..., T, H, V], lse and maxima [..., T, H]."""

    out: Tensor
    lse: Tensor
    maxima: Tensor

    @classmethod
    def empty(cls, *shape: int, device: torch.device) -> "Target":
        """Room in float32 for the results of a shape [..., T, H]."""
        out = torch.empty(*shape, VALUE_DIM, device=device)
        lse = torch.empty(shape, device=device)
        return cls(out, lse, torch.empty_like(lse))

    def addresses(self) -> tuple[int, int, int]:
        """Where its memory is."""
        return self.out.data_ptr(), self.lse.data_ptr(), self.maxima.data_ptr()


def attend_items(
    q: Tensor,
    selection: Selection,
    variant: Variant,
    *,
    scale: float | Tensor,
    sink: Tensor | None,
    whole: Target | None,
    parts: Target,
) -> None:
    """Fill the first tokens' rows of `whole` [T, ...], and `parts` [P, t, ...] for the other t, contiguous in float32.

    Each part is normalised by its own sum; the sink counts only in whole tokens.
    """
    tokens, heads, _ = q.shape
    if tokens == 0:
        return
    if q.stride(2) != 1 or q.stride(0) % 4 or q.stride(1) % 4 or q.data_ptr() % 8:
        q = q.contiguous()
    cache, slots = selection.cache, selection.slots
    count, left = parts.lse.shape[0], parts.lse.shape[1]
    items, columns = tokens - left + left * count, slots.shape[1]
    # Held by name until the launch, so that nobody else gets their memory.
    lengths = None if selection.lengths is None else selection.lengths.contiguous()
    ids = None if selection.request_ids is None else selection.request_ids.contiguous()
    table = None if selection.block_table is None else selection.block_table.contiguous()
    factor = scale.float() if isinstance(scale, Tensor) else None
    pages = (0, 0, 0) if table is None else (table.stride(0), table.shape[1], table.shape[0])
    whole = whole or parts
    out, lse, maxima = whole.addresses()
    launch = _launch(q.device, variant, q.dtype)
    launch(
        (min(items, variant.per_sm * multiprocessors(q.device)), 1, 1),
        *(q.data_ptr(), q.stride(0), q.stride(1)),
        *(cache.storage.data_ptr(), cache.page_stride, cache.page_size, cache.pages),
        *(slots.data_ptr(), slots.stride(0), slots.stride(1), columns),
        *(_address(lengths), _address(ids), _address(table), *pages),
        *(out, OUT_KINDS[whole.out.dtype], whole.out.stride(-3), whole.out.stride(-2), lse, maxima, _address(sink)),
        *parts.addresses(),
        *(1.0 if isinstance(scale, Tensor) else scale, _address(factor)),
        *(tokens, heads, tokens - left, count, -(-columns // count)),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a CUDA device."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def program(variant: Variant, dtype: torch.dtype) -> Program:
    """The source for a variant and a dtype of queries."""
    constants = {
        "STREAMS": variant.streams,
        "HEAD_GROUPS": variant.head_groups,
        "STAGES": variant.stages,
        "PER_SM": variant.per_sm,
        "QUERY_HALF": int(dtype == torch.float16),
        "THREADS": variant.threads,
        "SHARED_BYTES": variant.shared,
    }
    return Program.packaged(__package__, "few_heads.cu", **constants)


@cache
def _launch(device: torch.device, variant: Variant, dtype: torch.dtype) -> Launch:
    index = torch.cuda.current_device() if device.index is None else device.index
    loaded = kernel(program(variant, dtype), "attend_few_heads", index)
    return Launch(loaded, SIGNATURE, threads=variant.threads, shared=variant.shared)


def offline_cases() -> Iterator["CudaCase"]:
    """Programs that `tamis.testing.offline_cuda` compiles."""
    from tamis.testing.offline_cuda import CudaCase

    for variant in (FEW_TOKENS, MANY_TOKENS, TWO_GROUPS):
        for dtype in QUERY_DTYPES:
            label = f"attend, few heads, {tuple(variant)}, {str(dtype).removeprefix('torch.')} queries"
            yield CudaCase(label, program(variant, dtype), variant.shared)
