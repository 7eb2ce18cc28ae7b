"""The CTA shapes of the kernels for few heads, and the kinds of rows that have them."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from tamis.cache.fields import from_key
from tamis.cache.layout import rows, v32_fp8

MMA_HEADS = 16
"""Heads of a CTA of `few_heads.cu`."""
STAGE_ROWS = 32
"""Rows of one ring stage in shared memory."""


@dataclass(frozen=True, eq=False)
class CtaShape:
    """The shape of a CTA: how a kernel is compiled and launched, and what its splits cost.

    Shapes are compared by identity, since they are keys of caches that every call looks into.
    """

    source: str
    """The file without its suffix; the kernel is `attend_<source>`."""
    heads: int
    """Heads of a CTA."""
    threads: int
    per_sm: int
    """CTAs that share an SM."""
    shared: int
    """Bytes of shared memory per CTA. The source computes the number in its SharedMemoryPlan and does not compile with
    another one; the error shows the right one."""
    columns: int
    """Columns of a token that a CTA works on at a time: a step of `choose_splits`."""
    rows_per_step: int
    """See `choose_splits`."""
    steps_per_split: int
    """See `choose_splits`."""
    defines: tuple[tuple[str, int], ...]
    """Other preprocessor constants of the source."""
    microseconds: tuple[float, float, float]
    """The duration of a launch, of a work item outside its loop, and of a step, on an H200; see `estimate`."""


def mma_shape(
    streams: int, stages: int, *, per_sm: int, shared: int, bf16_rows: bool = False, rope: int = 64
) -> CtaShape:
    """A shape of `few_heads.cu` with a number of streams, each a ring of `stages` stages and a consumer warpgroup."""
    defines = (
        ("BF16_ROWS", int(bf16_rows)),
        ("ROPE_COLUMNS", rope),
        ("RING_STREAMS", streams),
        ("RING_STAGES", stages),
        ("PER_SM", per_sm),
    )
    threads = 128 * (streams + 1)  # a consumer warpgroup for each stream, one warpgroup of producers
    columns = streams * STAGE_ROWS
    return CtaShape("few_heads", MMA_HEADS, threads, per_sm, shared, columns, 800, 2, defines, (2.7, 2.3, 1.55))


def wgmma_shape(heads: int, stages: int, *, shared: int, rope: int = 64) -> CtaShape:
    """A shape of `heads_as_columns.cu`, for FP8 rows, with 16 or 32 heads and a ring of `stages` stages."""
    defines = (("HEADS", heads), ("ROPE_COLUMNS", rope), ("RING_STAGES", stages))
    # Two consumer warpgroups, which take 64 rows each at a time, and one warpgroup of producers.
    times = (7.4, 5.6, 3.45) if heads == 32 else (5.4, 3.0, 3.0)
    return CtaShape("heads_as_columns", heads, 384, 1, shared, 4 * STAGE_ROWS, 2500, 1, defines, times)


class Shapes(NamedTuple):
    """The shapes for one kind of rows; the choice is measured in benchmarks/NOTES.md."""

    few_tokens: CtaShape
    many_tokens: CtaShape
    more_heads: CtaShape
    """For more than 16 heads and many tokens or columns."""
    few_pairs: int | None
    """If tokens * ceil(heads / 16) is at most this, CTAs of 16 heads are fastest at any number of heads. None if both
    shapes are estimated."""


FP8_ROWS = Shapes(
    few_tokens=mma_shape(2, 3, per_sm=1, shared=196_752),
    many_tokens=wgmma_shape(16, 9, shared=231_520),
    more_heads=wgmma_shape(32, 7, shared=231_792),
    few_pairs=None,
)
_TWO_PER_SM = mma_shape(1, 2, per_sm=2, shared=91_184, bf16_rows=True)
BF16_ROWS = Shapes(
    few_tokens=mma_shape(2, 2, per_sm=1, shared=219_232, bf16_rows=True),
    many_tokens=_TWO_PER_SM,
    more_heads=_TWO_PER_SM,
    few_pairs=16,
)
# Rows without a rope (GLM-5.3-Flash) have the shapes of rows with one, and need less shared memory.
FP8_NO_ROPE = Shapes(
    few_tokens=mma_shape(2, 3, per_sm=1, shared=172_176, rope=0),
    many_tokens=wgmma_shape(16, 9, shared=190_560, rope=0),
    more_heads=wgmma_shape(32, 7, shared=194_928, rope=0),
    few_pairs=None,
)
_TWO_PER_SM_NO_ROPE = mma_shape(1, 2, per_sm=2, shared=82_992, bf16_rows=True, rope=0)
BF16_NO_ROPE = Shapes(
    few_tokens=mma_shape(2, 2, per_sm=1, shared=202_848, bf16_rows=True, rope=0),
    many_tokens=_TWO_PER_SM_NO_ROPE,
    more_heads=_TWO_PER_SM_NO_ROPE,
    few_pairs=16,
)


class RowKind(NamedTuple):
    """Rows that these kernels read."""

    bf16: bool
    """Whether they are bf16; otherwise they are FP8."""
    rope: int
    """Rope columns: 64 or 0."""

    @property
    def shapes(self) -> Shapes:
        """The shapes for these rows."""
        if self.rope:
            return BF16_ROWS if self.bf16 else FP8_ROWS
        return BF16_NO_ROPE if self.bf16 else FP8_NO_ROPE


@cache
def row_kind(key: str) -> RowKind | None:
    """The kind of a layout's rows; None if these kernels do not read them.

    The layout is given by its key, since a string's hash is computed once and a layout's on every call.
    """
    layout = from_key(key)
    for kind in (RowKind(bf16, rope) for bf16 in (True, False) for rope in (64, 0)):
        usual = rows(rope=kind.rope) if kind.bf16 else v32_fp8(rope=kind.rope)
        modes = ("none",) if kind.bf16 else ("pow2", "exact")
        fields = ("latent", "rope", "tile", "values", "scales", "tail")
        if layout.scale_mode in modes and all(getattr(layout, field) == getattr(usual, field) for field in fields):
            return kind
    return None
