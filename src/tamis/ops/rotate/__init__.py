"""Stage `rotate`: rows normed, heads rotated in their last columns (DeepSeek-V4), the step's raw rows with them."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.model.recipe import IndexRecipe
from tamis.ops import old_library as library
from tamis.ops.rotate import registered
from tamis.ops.write import check_slots


class Rotated(NamedTuple):
    """The queries of a step."""

    q: Tensor
    """[T, H, D]"""
    index_q: Tensor | None
    """[T, index heads, index dim], where some were given."""


def norm_rows(x: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str = "auto") -> Tensor:
    """Rows [T, N] over their root mean square, times `weight` [N], in float32, rounded once to x's dtype."""
    check_norm_rows(x, weight, eps, backend)
    return registered.norm_rows(x, weight, eps, backend)


def check_norm_rows(x: Tensor, weight: Tensor, eps: float, backend: str) -> None:
    """Refuse what `norm_rows` refuses."""
    sizes = checks.tensor("x", x, "T N", checks.FLOATS)
    checks.tensor("weight", weight, "N", checks.FLOATS, N=sizes["N"], device=x.device)
    checks.positive_number("eps", eps)
    library.check_stage("rotate", backend, x.device, x=x, weight=weight)


def rotate_heads(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    eps: float | None = None,
    inverse: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The last columns of each head rotated in pairs (2i, 2i+1), in float32, rounded once.

    Args:
        x: [T, H, D] in bf16, fp16 or fp32.
        positions: integer [T], absolute; padding (negative) is not rotated.
        cos_sin: float32 [max_positions, R] from `tamis.model.rope.Rope.cos_sin_table`; R columns are rotated.
        eps: given, each head is first divided by its root mean square, with this added to the mean square.
        inverse: rotate back.
        backend: a name from `tamis backends`, or "auto".
    """
    checks.flag("inverse", inverse)
    check_rotate_heads(x, positions, cos_sin, eps, backend)
    return registered.rotate_heads(x, positions, cos_sin, eps, inverse, backend)


def check_rotate_heads(x: Tensor, positions: Tensor, cos_sin: Tensor, eps: float | None, backend: str) -> None:
    """Refuse what `rotate_heads` refuses."""
    sizes = checks.tensor("x", x, "T H D", checks.FLOATS)
    check_positions(positions, cos_sin, sizes["T"], sizes["D"], x.device)
    if eps is not None:
        checks.positive_number("eps", eps)
    library.check_stage("rotate", backend, x.device, x=x, cos_sin=cos_sin)


def rotate_and_write(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    slots: Tensor,
    *,
    positions: Tensor,
    cos_sin: Tensor,
    norm_weight: Tensor,
    eps: float = 1e-6,
    index_q: Tensor | None = None,
    index_hadamard: bool = False,
    backend: str = "auto",
) -> Rotated:
    """Queries normed without weight and rotated, and beside them the tokens' rows normed, rotated and written.

    Both norms run over all D columns and all rotations are those of `rotate_heads`. Rows are rounded once, to bf16
    before FP8, and queries to the dtype they came in.

    Args:
        q: [T, H, D] in bf16, fp16 or fp32.
        kv: [T, D], the projection's output before its norm.
        cache: of raw tokens, D wide, in any layout.
        slots: int32 or int64 [T'] with T' <= T. Rows with a negative slot, or past T', are not written.
        positions: integer [T], absolute; negative for padding.
        cos_sin: float32 [max_positions, R].
        norm_weight: [D], of the rows.
        eps: of both norms.
        index_q: [T, index heads, index dim], the indexer's queries, which are rotated without a norm.
        index_hadamard: turn these, once rotated and rounded, by the Hadamard matrix as well, and round them again; for
            index keys whose cache says so (`PagedCache.recipe`).
        backend: a name from `tamis backends`, or "auto".
    """
    arguments = (q, kv, cache, slots, positions, cos_sin, norm_weight, eps, index_q, index_hadamard, backend)
    check_rotate_and_write(*arguments)
    return rotate_unchecked(*arguments)


def check_rotate_and_write(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    norm_weight: Tensor,
    eps: float,
    index_q: Tensor | None,
    index_hadamard: bool,
    backend: str,
    name: str = "cache",
) -> None:
    """Refuse what `rotate_and_write` refuses; `name` is what the caller's cache is called."""
    checks.instance(name, cache, PagedCache)
    width, device = cache.layout.width, cache.device

    def remedy() -> str:
        return f"rows of {cache!r}"

    total = checks.tensor("q", q, "T H D", checks.FLOATS, D=width, device=device, remedy=remedy)["T"]
    checks.tensor("kv", kv, "T D", checks.FLOATS, T=total, D=width, device=device, remedy=remedy)
    check_slots(slots, cache, "kv", total, name)
    check_positions(positions, cos_sin, total, width, device)
    checks.tensor("norm_weight", norm_weight, "D", checks.FLOATS, D=width, device=device)
    checks.positive_number("eps", eps)
    checks.flag("index_hadamard", index_hadamard)
    if index_q is not None:
        sizes = checks.tensor("index_q", index_q, "T H D", checks.FLOATS, T=total, device=device)
        check_rotary(cos_sin.shape[1], sizes["D"])
        IndexRecipe(hadamard=index_hadamard).check_width(sizes["D"], "index_q: width")
    checks.changeable(name, cache.storage)
    given = {"q": q, "kv": kv, "index_q": index_q, "norm_weight": norm_weight, "cos_sin": cos_sin}
    library.check_stage("rotate", backend, device, **given)
    library.check_kernels("rotate", backend, device, "check_rows", cache)


def rotate_unchecked(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    slots: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    norm_weight: Tensor,
    eps: float,
    index_q: Tensor | None,
    index_hadamard: bool,
    backend: str,
) -> Rotated:
    """As `rotate_and_write`, for callers who know that its check would pass."""
    arguments = (q, kv, cache, slots, positions, cos_sin, norm_weight, eps, index_q, index_hadamard, backend)
    turned, turned_index = registered.rotate_and_write(*arguments)
    return Rotated(turned, None if index_q is None else turned_index)


def check_positions(positions: Tensor, cos_sin: Tensor, total: int, width: int, device: torch.device) -> None:
    """Refuse positions and a table that do not fit so many rows of this width."""
    checks.tensor("positions", positions, "T", checks.INTS, T=total, device=device, remedy="one per token")
    table = checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), device=device)
    check_rotary(table["R"], width)
    lowest = torch.iinfo(positions.dtype).min
    checks.values_between("positions", positions, lowest, table["P"] - 1, "make a longer cos_sin table")
    checks.finite_rows("cos_sin", cos_sin, positions)


def check_rotary(rotary: int, width: int) -> None:
    """Refuse a rotation that does not fit rows of this width."""
    if not 0 < rotary <= width or rotary % 2 or width % 2:
        expected = f"of an even width up to that of the rows, which must be even too ({width})"
        raise checks.refuse("cos_sin", expected, rotary, "pass Rope.cos_sin_table")
