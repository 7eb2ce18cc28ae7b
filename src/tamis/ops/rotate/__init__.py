"""Stage `rotate`: RMSNorm and rotary embedding of queries, index queries and raw rows, and the write of these rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.model.recipe import IndexRecipe, check_hadamard
from tamis.ops.rotate import operations
from tamis.ops.rotate.operations import NormRows, RotateAndWrite, RotateHeads, WriteRotated
from tamis.ops.write import check_slots


class Rotated(NamedTuple):
    """The queries of a step."""

    q: Tensor
    """[T, H, D]"""
    index_q: Tensor | None
    """[T, index heads, index dim]; None if no index queries were given."""


def norm_rows(x: Tensor, weight: Tensor, eps: float = 1e-6, *, backend: str = "auto") -> Tensor:
    """RMSNorm of rows [T, N] with a weight [N], computed in float32 and rounded once to x's dtype."""
    call = NormRows(x, weight, eps, backend)
    check_norm_rows(call)
    return operations.norm_rows(call)


def check_norm_rows(call: NormRows) -> None:
    """Refuse what `norm_rows` refuses."""
    sizes = checks.tensor("x", call.x, "T N", checks.FLOATS)
    checks.tensor("weight", call.weight, "N", checks.FLOATS, N=sizes["N"], device=call.x.device)
    checks.positive_number("eps", call.eps)
    operations.norm_rows.check(call)


def rotate_heads(
    x: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    *,
    eps: float | None = None,
    inverse: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Rotate the last columns of each head in pairs (2i, 2i+1), in float32, and round once.

    Args:
        x: [T, H, D] in bf16, fp16 or fp32.
        positions: integer [T], absolute; heads of padding (a negative position) are not rotated.
        cos_sin: float32 [max_positions, R] from `tamis.model.rope.Rope.cos_sin_table`; the last R columns are rotated.
        eps: if given, each head is first RMS-normalised without a weight, with this eps.
        inverse: rotate by the negative angle.
        backend: a name from `tamis backends`, or "auto".
    """
    call = RotateHeads(x, positions, cos_sin, eps, inverse, backend)
    check_rotate_heads(call)
    return operations.rotate_heads(call)


def check_rotate_heads(call: RotateHeads) -> None:
    """Refuse what `rotate_heads` refuses."""
    checks.flag("inverse", call.inverse)
    sizes = checks.tensor("x", call.x, "T H D", checks.FLOATS)
    check_positions(call.positions, call.cos_sin, sizes["T"], sizes["D"], call.x.device)
    if call.eps is not None:
        checks.positive_number("eps", call.eps)
    operations.rotate_heads.check(call)


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
    norm_q: bool = True,
    backend: str = "auto",
) -> Rotated:
    """RMS-normalise and rotate the queries; RMS-normalise, rotate and write the tokens' raw rows, in one launch.

    Both norms run over all D columns, that of the queries without a weight, and all rotations are those of
    `rotate_heads`. Rows are rounded once, to bf16 before FP8, and queries to the dtype they came in.

    Args:
        q: [T, H, D] in bf16, fp16 or fp32.
        kv: [T, D], the projection's output before its norm.
        cache: the pool of raw tokens, D wide, in any layout.
        slots: int32 or int64 [T'] with T' <= T. Rows with a negative slot, or past T', are not written.
        positions: integer [T], absolute; negative for padding.
        cos_sin: float32 [max_positions, R].
        norm_weight: [D], the weight of the rows' norm.
        eps: epsilon of both norms.
        index_q: [T, index heads, index dim], the indexer's queries, which are rotated without a norm.
        index_hadamard: after rotating and rounding the index queries, multiply them by the Hadamard matrix and round
            again. Set it if the cache of index keys was written so (`PagedCache.recipe`).
        norm_q: whether the queries are normalised; DeepSeek-V4.1 leaves that out.
        backend: a name from `tamis backends`, or "auto".
    """
    call = RotateAndWrite(
        q, kv, cache, slots, positions, cos_sin, norm_weight, eps, index_q, index_hadamard, norm_q, backend
    )  # fmt: skip
    check_rotate_and_write(call)
    return run_rotate_and_write(call)


def run_rotate_and_write(call: RotateAndWrite) -> Rotated:
    """Run a call that was checked; no index queries come back if none were given."""
    q, index_q = operations.rotate_and_write(call)
    return Rotated(q, None if call.index_q is None else index_q)


def check_rotate_and_write(call: RotateAndWrite, name: str = "cache") -> None:
    """Refuse what `rotate_and_write` refuses. Errors use `name` for the cache."""
    cache = call.cache
    checks.instance(name, cache, PagedCache)
    width, device = cache.layout.width, cache.device

    def remedy() -> str:
        return f"the rows go to {cache!r}"

    total = checks.tensor("q", call.q, "T H D", checks.FLOATS, D=width, device=device, remedy=remedy)["T"]
    checks.tensor("kv", call.kv, "T D", checks.FLOATS, T=total, D=width, device=device, remedy=remedy)
    check_slots(call.slots, cache, "kv", total, name)
    check_positions(call.positions, call.cos_sin, total, width, device)
    checks.tensor("norm_weight", call.norm_weight, "D", checks.FLOATS, D=width, device=device)
    checks.positive_number("eps", call.eps)
    checks.flag("index_hadamard", call.index_hadamard)
    checks.flag("norm_q", call.norm_q)
    if call.index_q is not None:
        sizes = checks.tensor("index_q", call.index_q, "T H D", checks.FLOATS, T=total, device=device)
        check_rotary(call.cos_sin.shape[1], sizes["D"])
        if call.index_hadamard:
            check_hadamard(sizes["D"], "index_q: width")
    checks.changeable(name, cache.storage)
    operations.rotate_and_write.check(call)


def write_rotated(
    rows: Tensor,
    cache: PagedCache,
    slots: Tensor,
    *,
    positions: Tensor,
    cos_sin: Tensor,
    norm_weight: Tensor | None = None,
    eps: float = 1e-6,
    span: int = 1,
    backend: str = "auto",
) -> None:
    """Rotate rows and write them to a cache: the entries of DeepSeek-V4.1 and, with a norm, its index keys.

    A row is RMS-normalised if there is a weight, rotated as by `rotate_heads` at the first position of its span,
    rounded once (to bf16 before FP8), and written. If the cache records a recipe with a Hadamard rotation, the rounded
    row is multiplied by the Hadamard matrix and rounded again.

    Args:
        rows: [T, D] in bf16, fp16 or fp32.
        cache: rows of D numbers, in any layout; a recipe that it records must be V4's, with or without Hadamard.
        slots: int32 or int64 [T'] with T' <= T. Rows with a negative slot, or past T', are not written.
        positions: integer [T], absolute; negative for padding.
        cos_sin: float32 [max_positions, R]; the last R columns are rotated.
        norm_weight: [D]; None for rows that are not normalised.
        eps: epsilon of the norm.
        span: how many tokens a row stands for.
        backend: a name from `tamis backends`, or "auto".
    """
    checks.instance("cache", cache, PagedCache)
    rotation = cache.recipe is not None and cache.recipe.hadamard
    call = WriteRotated(rows, cache, slots, positions, cos_sin, norm_weight, eps, span, rotation, backend)
    check_write_rotated(call)
    check_recipe(cache, cos_sin.shape[1], "cache")
    operations.write_rotated(call)


def check_write_rotated(call: WriteRotated, name: str = "cache") -> None:
    """Refuse what `write_rotated` refuses, except for the cache's recipe. Errors use `name` for the cache."""
    cache = call.cache
    width, device = cache.layout.width, cache.device
    remedy = f"they go to {cache!r}"
    total = checks.tensor("rows", call.rows, "T D", checks.FLOATS, D=width, device=device, remedy=remedy)["T"]
    check_slots(call.slots, cache, "rows", total, name)
    checks.integer("span", call.span, low=1)
    check_positions(call.positions, call.cos_sin, total, width, device)
    if call.norm_weight is not None:
        checks.tensor("norm_weight", call.norm_weight, "D", checks.FLOATS, D=width, device=device)
    checks.positive_number("eps", call.eps)
    checks.changeable(name, cache.storage)
    operations.write_rotated.check(call)


def check_recipe(cache: PagedCache, rotary: int, name: str) -> None:
    """Refuse a cache that records another recipe than that of V4's rows. Errors use `name` for the cache."""
    if cache.recipe is None:
        return
    made = IndexRecipe.of_v4(rotary, hadamard=cache.recipe.hadamard)
    same = cache.recipe == made if rotary else cache.recipe.rope_dim == 0  # without a rope there are no pairs to choose
    if not same:
        raise checks.refuse(f"{name}.recipe", f"{made}, as entries are rotated", cache.recipe, "use a cache of V4 keys")
    cache.recipe.check_width(cache.layout.width, f"{name}: width")


def check_positions(positions: Tensor, cos_sin: Tensor, total: int, width: int, device: torch.device) -> None:
    """Refuse positions and a table of angles that do not fit `total` rows of this width."""
    checks.tensor("positions", positions, "T", checks.INTS, T=total, device=device, remedy="pass one per token")
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
