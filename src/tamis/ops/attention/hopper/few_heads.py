"""Sparse attention of few heads over FP8 or bf16 rows in CUDA C++, for Hopper: two kernels and their launches.

Heads are the rows of small products in `few_heads.cu`, 16 in a block, and the columns of large ones in
`heads_as_columns.cu`, 16 or 32; both take the same arguments. More heads are more blocks, which read the same rows.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.layout import from_key, rows, v32_fp8
from tamis.cache.selection import Selection
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index, sm_count
from tamis.cuda.launch import Launch, kernel
from tamis.cuda.params import params_bytes
from tamis.ops.attention.hopper.params import AttendParams, output_params, query_params, selection_params
from tamis.ops.attention.hopper.splits import VALUE_DIM, Outputs, SplitPlan, can_store, choose_splits, merge_splits
from tamis.ops.combine.triton_kernels import combine_with_maxima

if TYPE_CHECKING:
    from tamis.lab.testing.offline_cuda import CudaCase

NAME = "few heads"
GROUP = 16
"""Heads that one team of warps works on: the rows of the matrix instruction."""
STAGE = 32
"""Rows that enter shared memory at a time."""
COPY_ALIGNMENT = 16
"""Bytes that a row's address must be a multiple of."""
QUERY_DTYPES = (torch.bfloat16, torch.float16)


class Variant(NamedTuple):
    """How a block of `few_heads.cu` is laid out."""

    streams: int
    """Rings of rows, each with two producers and a team: a token's columns are dealt out to them."""
    stages: int
    """Of each ring."""
    per_sm: int
    """Blocks that share one multiprocessor."""
    bf16_rows: bool = False
    """Whether rows are bf16 (1152 bytes) or FP8 (656)."""

    @property
    def source(self) -> str:
        """The kernel."""
        return "few_heads"

    @property
    def heads(self) -> int:
        """Of a block."""
        return GROUP

    @property
    def threads(self) -> int:
        """Per block: teams of four warps, then four warps of which two produce for each stream."""
        return 128 * (self.streams + 1)

    @property
    def shared(self) -> int:
        """Bytes of shared memory: rings, shares of logits, what streams hand over, query maxima, barriers, notes."""
        stages = self.streams * self.stages
        row = 1152 + 16 if self.bf16_rows else 656  # padded to an odd multiple of 16 bytes
        merge = 4 * 18 * 512 if self.streams > 1 else 0
        maxima = 0 if self.bf16_rows else self.streams * 2 * 4 * 4 * GROUP
        return stages * STAGE * row + self.streams * 2 * 4 * 4 * 512 + merge + maxima + stages * 24

    @property
    def rows_at_once(self) -> int:
        """Columns of a token that a block works on at a time."""
        return STAGE * self.streams

    @property
    def rows_per_step(self) -> int:
        """See `splits.choose_splits`."""
        return 800

    @property
    def steps_per_split(self) -> int:
        """See `splits.choose_splits`."""
        return 2

    @property
    def constants(self) -> dict[str, int]:
        """What the source wants to know."""
        return {
            "BF16_ROWS": int(self.bf16_rows),
            "STREAMS": self.streams,
            "STAGES": self.stages,
            "PER_SM": self.per_sm,
        }


class Columns(NamedTuple):
    """How a block of `heads_as_columns.cu` is laid out, which has FP8 rows: three groups of four warps."""

    heads: int
    """That there is room for: 16 or 32."""
    stages: int
    """Of its ring."""

    @property
    def source(self) -> str:
        """The kernel."""
        return "heads_as_columns"

    @property
    def threads(self) -> int:
        """Per block."""
        return 384

    @property
    def per_sm(self) -> int:
        """Blocks that share one multiprocessor."""
        return 1

    @property
    def rows_at_once(self) -> int:
        """Columns of a token that a block works on at a time."""
        return 4 * STAGE

    @property
    def rows_per_step(self) -> int:
        """See `splits.choose_splits`."""
        return 2500

    @property
    def steps_per_split(self) -> int:
        """See `splits.choose_splits`."""
        return 1

    @property
    def shared(self) -> int:
        """Bytes of shared memory: tiles of queries and weights, the ring, numbers of heads, barriers, answers."""
        tiles, numbers = (10 + 8) * 128 * self.heads, (21 + 64) * 4 * self.heads
        barriers = self.stages * 24 + 5 * 8  # with notes; four are for turns, one is for all
        answers = 2 * 16  # of each team, aligned to as many
        return tiles + self.stages * STAGE * 656 + numbers + ceil_div(barriers, 16) * 16 + answers

    @property
    def constants(self) -> dict[str, int]:
        """What the source wants to know."""
        return {"HEADS": self.heads, "STAGES": self.stages}


Layouts = Variant | Columns


class Variants(NamedTuple):
    """Those for one kind of rows."""

    few_tokens: Layouts
    many_tokens: Layouts
    more_heads: Layouts
    """Than one group, unless there are few tokens."""
    few_pairs: int
    """Of a token and 16 heads: up to so many, blocks of 16 heads are fastest however many heads there are."""


FP8_ROWS = Variants(Variant(2, 3, 1), Columns(16, 9), Columns(32, 7), few_pairs=32)
BF16_ROWS = Variants(Variant(2, 2, 1, True), Variant(1, 2, 2, True), Variant(1, 2, 2, True), few_pairs=16)


def refusal(q: Tensor, selections: Sequence[Selection], value_dim: int) -> str | None:
    """Why these kernels cannot do it, None if they can."""
    if q.dtype not in QUERY_DTYPES:
        return f"queries are {checks.dtype_name(q.dtype)}, not bfloat16 or float16"
    if value_dim != VALUE_DIM:
        return f"values are {value_dim} wide, not {VALUE_DIM}"
    for selection in selections:
        held = selection.cache
        bf16_rows = _rows_are_bf16(held.layout.key)
        if bf16_rows is None:
            return f"rows are {held.layout.name}, not v32-fp8 or v32-bf16"
        if bf16_rows and q.dtype != torch.bfloat16:
            return f"queries are {checks.dtype_name(q.dtype)}, not bfloat16, over {held.layout.name} rows"
        if held.page_stride % COPY_ALIGNMENT or held.storage.data_ptr() % COPY_ALIGNMENT:
            return f"rows do not start at multiples of {COPY_ALIGNMENT} bytes"
    return None


def source(q: Tensor, selections: Sequence[Selection], sms: int) -> str:
    """The file that runs a call which these kernels take."""
    tokens, heads, _ = q.shape
    names = [usual_variant(tokens, heads, sms, bool(_rows_are_bf16(s.cache.layout.key))).source for s in selections]
    return " and ".join(f"{name}.cu" for name in dict.fromkeys(names))


@cache
def _rows_are_bf16(key: str) -> bool | None:
    """Whether rows of a layout are those of v32-bf16 (True), of v32-fp8 (False), or neither."""
    layout = from_key(key)  # a string knows its hash, a layout works it out on every call
    for bf16_rows, usual, modes in ((True, rows(), ("none",)), (False, v32_fp8(), ("pow2", "exact"))):
        parts = ("latent", "rope", "tile", "values", "scales", "tail")
        if layout.scale_mode in modes and all(getattr(layout, part) == getattr(usual, part) for part in parts):
            return bf16_rows
    return None


def suits(tokens: int | None, heads: int, bf16_rows: bool) -> bool:
    """Whether these kernels are faster than those for many heads, where both can do it (see benchmarks/NOTES.md)."""
    return heads <= (GROUP if bf16_rows else 2 * GROUP) or _few_pairs(tokens, heads, bf16_rows)


def _few_pairs(tokens: int | None, heads: int, bf16_rows: bool) -> bool:
    variants = BF16_ROWS if bf16_rows else FP8_ROWS
    return tokens is not None and tokens * ceil_div(heads, GROUP) <= variants.few_pairs


def usual_variant(tokens: int | None, heads: int, sms: int, bf16_rows: bool) -> Layouts:
    """Two streams of one block split a token into fewer parts, and are best where there are few tokens.

    Without a number of tokens: one for all of them.
    """
    variants = BF16_ROWS if bf16_rows else FP8_ROWS
    if heads > GROUP and not _few_pairs(tokens, heads, bf16_rows):
        return variants.more_heads
    return variants.few_tokens if tokens is not None and tokens <= 2 * sms else variants.many_tokens


def attend_slots(
    q: Tensor, selections: Sequence[Selection], *, scale: float | Tensor, value_dim: int, splits: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.attend_slots`; each selection is cut into parts of its own, one launch per selection."""
    variants = [_variant(q, s, splits) for s in selections]
    counts = [_cut(q, s, v, splits, direct=False).splits for s, v in zip(selections, variants, strict=True)]
    found = Outputs.empty(sum(counts), *q.shape[:2], device=q.device)
    first = 0
    for selection, variant, count in zip(selections, variants, counts, strict=True):
        part = Outputs(*(tensor[first : first + count] for tensor in found))
        attend_items(q, selection, variant, scale=scale, sink=None, whole=part, parts=part)
        first += count
    return found


def attend_into(
    q: Tensor,
    selections: Sequence[Selection],
    *,
    scale: float | Tensor,
    splits: int | None,
    sink: Tensor | None,
    out: Tensor,
) -> tuple[Tensor, Tensor]:
    """As `reference.attend_into`; tokens that are not cut go straight into `out`."""
    if len(selections) > 1 or not can_store(out):
        parts = attend_slots(q, selections, scale=scale, value_dim=out.shape[2], splits=splits)
        return combine_with_maxima(*parts, sink, out)
    variant = _variant(q, selections[0], splits)
    plan = _cut(q, selections[0], variant, splits, direct=True)
    tokens, heads, _ = q.shape
    whole = Outputs.into(out)
    split = Outputs.empty(plan.splits, tokens - plan.whole, heads, device=q.device)
    attend_items(q, selections[0], variant, scale=scale, sink=sink, whole=whole, parts=split)
    if plan.whole < tokens:
        merge_splits(split, sink, whole)
    return whole.lse, whole.max_logits


def _variant(q: Tensor, selection: Selection, splits: int | None) -> Layouts:
    """How blocks are laid out: part of what fixes a row's bits, so with a number of parts the same for all batches."""
    bf16_rows = bool(_rows_are_bf16(selection.cache.layout.key))
    return usual_variant(q.shape[0] if splits is None else None, q.shape[1], sm_count(q.device), bf16_rows)


def _cut(q: Tensor, selection: Selection, variant: Layouts, splits: int | None, *, direct: bool) -> SplitPlan:
    tokens, columns = q.shape[0], selection.slots.shape[1]
    if splits is None:
        steps = max(1, ceil_div(columns, variant.rows_at_once))
        room, heads = _room(q, variant)[0], max(q.shape[1], GROUP)
        costs = {"rows_per_step": variant.rows_per_step, "steps_per_split": variant.steps_per_split}
        return choose_splits(tokens, heads, steps, room, direct=direct, **costs)
    parts = min(splits, max(1, columns))
    return SplitPlan(tokens, 1) if parts == 1 and direct else SplitPlan(0, parts)


def _room(q: Tensor, variant: Layouts) -> tuple[int, int]:
    """How many items the device works on at a time, and how many blocks share the heads of each."""
    sharing = ceil_div(q.shape[1], variant.heads)
    return max(1, variant.per_sm * sm_count(q.device) // sharing), sharing


def attend_items(
    q: Tensor,
    selection: Selection,
    variant: Layouts,
    *,
    scale: float | Tensor,
    sink: Tensor | None,
    whole: Outputs,
    parts: Outputs,
) -> None:
    """Fill the first tokens' rows of `whole` [T, ...], and `parts` [P, t, ...] for the other t, contiguous in float32.

    Each part is normalised by its own sum; the sink counts only in whole tokens.
    """
    tokens = q.shape[0]
    if tokens == 0:
        return
    if q.stride(2) != 1 or q.stride(0) % 4 or q.stride(1) % 4 or q.data_ptr() % 8:
        q = q.contiguous()
    columns = selection.slots.shape[1]
    count, left = parts.lse.shape[:2]
    items = tokens - left + left * count
    held = [q]  # until the launch, so that nobody else gets the memory of copies
    params = AttendParams(
        items,
        ceil_div(columns, count),
        query_params(q, scale, held),
        output_params(whole, parts, sink),
        selection_params(selection, held),
    )
    room, sharing = _room(q, variant)
    _launch(q.device, variant, q.dtype)((min(items, room), sharing, 1), params)


@cache
def program(variant: Layouts, dtype: torch.dtype) -> Program:
    """The source for a variant and a dtype of queries."""
    size = {
        "THREADS": variant.threads,
        "SHARED_BYTES": variant.shared,
        "PARAMS_BYTES": params_bytes(AttendParams),
    }
    constants = variant.constants | size | {"QUERY_HALF": int(dtype == torch.float16)}
    return Program.packaged(__package__, f"{variant.source}.cu", **constants)


@cache
def _launch(device: torch.device, variant: Layouts, dtype: torch.dtype) -> Launch:
    loaded = kernel(program(variant, dtype), f"attend_{variant.source}", device_index(device))
    return Launch(loaded, AttendParams, threads=variant.threads, shared=variant.shared, overlap=True)


def offline_cases() -> Iterator["CudaCase"]:
    """Programs that `tamis.lab.testing.offline_cuda` compiles."""
    from tamis.lab.testing.offline_cuda import CudaCase

    for kind, variants, dtypes in (("fp8", FP8_ROWS, QUERY_DTYPES), ("bf16", BF16_ROWS, (torch.bfloat16,))):
        layouts = dict.fromkeys((variants.few_tokens, variants.many_tokens, variants.more_heads))
        for variant, dtype in product(layouts, dtypes):
            name = variant.source.replace("_", " ")
            label = f"attend, {name}, {kind} rows, {variant[:3]}, {str(dtype).removeprefix('torch.')} queries"
            yield CudaCase(label, program(variant, dtype), variant.shared)
