"""Stage `compress`: spans of tokens pooled into single entries of a paged cache, with the state for it in pages too."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.model.recipe import IndexRecipe
from tamis.ops import old_library as library
from tamis.ops.compress import registered
from tamis.ops.rotate import check_rotary
from tamis.ops.write import called


@dataclass(frozen=True, eq=False)
class StatePages:
    """Where each token's state row is, and where to look for those of the tokens before it."""

    slots: Tensor
    """int32 or int64 [T], the slot of each token's own row; negative: padding, nothing is written."""
    request_ids: Tensor
    """int32 [T], the block-table row of each token."""
    block_table: Tensor
    """int32 [B, W] pages of the state cache; negative: absent."""


def compress_kv(
    values: Tensor,
    scores: Tensor,
    state: PagedCache,
    cache: PagedCache,
    *,
    positions: Tensor,
    pages: StatePages,
    slots: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    eps: float = 1e-6,
    backend: str = "auto",
) -> None:
    """Remember the new tokens in the state cache, and write an entry for each span of tokens that one of them ends.

    A span has r tokens, and entry j of a request is that of tokens r*j .. r*j + r - 1: per channel, their values
    weighted by a softmax over their scores, to which `bias` is added by place in the span. Where spans overlap, every
    token has two sets of D channels: the second goes into its own span's entry, the first into the next one's, so that
    2r tokens are pooled. The result is RMS-normalised, rotated in its last channels at the position of the span's first
    token, rounded once (to bf16 before FP8), and written. Where the cache records a recipe with a Hadamard rotation
    (index keys), the rounded entry is turned by it and rounded again.

    An entry depends on positions alone, not on how tokens were cut into steps: what earlier steps computed is read from
    the state pages, of which the last r (2r) tokens of each request must be kept. To run a token again overwrites its
    row and its entry, so rejected drafts need no undoing.

    Args:
        values: [T, C] in bf16, fp16 or fp32; C is D, or 2D where spans overlap.
        scores: [T, C], without the bias.
        state: a cache of `tamis.cache.layout.compressor_state`, 2C wide.
        cache: of the entries, D wide, in any layout; a recipe that it records must be V4's, with or without Hadamard.
        positions: integer [T], absolute; negative for padding. Tokens of one request stand in rising order.
        pages: of the state.
        slots: int32 or int64 [T], the slot of the entry that each token completes. Only tokens with
            (position + 1) % r == 0 write one; negative: do not.
        bias: [r, C].
        norm_weight: [D].
        cos_sin: float32 [max_positions, R] from `tamis.model.rope.Rope.cos_sin_table`; the last R channels are rotated,
            in pairs (2i, 2i+1).
        eps: of the norm.
        backend: a name from `tamis backends`, or "auto".
    """
    arguments = (values, scores, state, cache, positions, pages, slots, bias, norm_weight, cos_sin, eps, backend)
    check_compress_kv(*arguments)
    compress_unchecked(*arguments)


def check_compress_kv(
    values: Tensor,
    scores: Tensor,
    state: PagedCache,
    cache: PagedCache,
    positions: Tensor,
    pages: StatePages,
    slots: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    eps: float,
    backend: str,
    names: tuple[str, str] = ("state", "cache"),
) -> None:
    """Refuse what `compress_kv` refuses; `names` are what the caller's two caches are called."""
    checks.instance(names[0], state, PagedCache)
    checks.instance(names[1], cache, PagedCache)
    checks.instance("pages", pages, StatePages)
    width = cache.layout.width
    device = state.device
    sizes = checks.tensor("values", values, "T C", checks.FLOATS, device=device)
    total, channels = sizes["T"], sizes["C"]
    if channels not in (width, 2 * width):
        expected = f"{width} wide, or {2 * width} where spans overlap"
        raise checks.refuse("values", expected, channels, f"entries go to {cache!r}")
    checks.tensor("scores", scores, "T C", checks.FLOATS, T=total, C=channels, device=device)
    if state.layout.quantised or state.layout.element != torch.float32 or state.layout.width != 2 * channels:
        expected = f"of float32 rows {2 * channels} wide"
        raise checks.refuse(names[0], expected, repr(state), "make its layout with tamis.cache.layout.compressor_state")
    if cache.device != device:
        raise checks.refuse(names[1], f"on {device} like {names[0]}", cache.device, "keep both on one device")
    checks.tensor("positions", positions, "T", checks.INTS, T=total, device=device)
    checks.tensor("slots", slots, "T", checks.INTS, T=total, device=device, remedy="one per token, -1 for none")
    checks.tensor("pages.slots", pages.slots, "T", checks.INTS, T=total, device=device, remedy="one per token")
    checks.tensor("pages.request_ids", pages.request_ids, "T", (torch.int32,), T=total, device=device)
    table = checks.tensor("pages.block_table", pages.block_table, "B W", (torch.int32,), device=device)
    if table["W"] == 0:
        raise checks.refuse("pages.block_table", "at least one page wide", [*table.values()], "pass the page table")
    ratio = checks.tensor("bias", bias, "r C", checks.FLOATS, C=channels, device=device)["r"]
    if ratio == 0:
        raise checks.refuse("bias", "at least one row", list(bias.shape), "one row for each token of a span")
    checks.tensor("norm_weight", norm_weight, "D", checks.FLOATS, D=width, device=device)
    rotary = checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), device=device)
    check_rotary(rotary["R"], width)
    _check_recipe(cache, rotary["R"], names[1])
    checks.positive_number("eps", eps)
    _check_values(state, cache, positions, pages, slots, rotary["P"], names)
    # An entry is turned at the position of its span's first token.
    first = torch.where(positions >= ratio - 1, positions + 1 - ratio, -1) if checks.visible(positions) else positions
    checks.finite_rows("cos_sin", cos_sin, first)
    checks.changeable(names[0], state.storage)
    checks.changeable(names[1], cache.storage)
    given = {"values": values, "scores": scores, "bias": bias, "norm_weight": norm_weight, "cos_sin": cos_sin}
    library.check_stage("compress", backend, device, **given)
    library.check_kernels("compress", backend, device, "check_rows", cache)


def compress_unchecked(
    values: Tensor,
    scores: Tensor,
    state: PagedCache,
    cache: PagedCache,
    positions: Tensor,
    pages: StatePages,
    slots: Tensor,
    bias: Tensor,
    norm_weight: Tensor,
    cos_sin: Tensor,
    eps: float,
    backend: str,
) -> None:
    """As `compress_kv`, for callers who know that its check would pass."""
    where = (positions, pages.slots, pages.request_ids, pages.block_table, slots)
    hadamard = cache.recipe is not None and cache.recipe.hadamard
    registered.compress_kv(values, scores, state, cache, *where, bias, norm_weight, cos_sin, eps, hadamard, backend)


def _check_recipe(cache: PagedCache, rotary: int, name: str) -> None:
    if cache.recipe is None:
        return
    made = IndexRecipe.of_v4(rotary, hadamard=cache.recipe.hadamard)
    if cache.recipe != made:
        raise checks.refuse(f"{name}.recipe", f"{made}, as entries are rotated", cache.recipe, "use a cache of V4 keys")
    cache.recipe.check_width(cache.layout.width, f"{name}: width")


def _check_values(
    state: PagedCache,
    cache: PagedCache,
    positions: Tensor,
    pages: StatePages,
    slots: Tensor,
    longest: int,
    names: tuple[str, str],
) -> None:
    lowest = -(2**62)
    checks.values_between("positions", positions, lowest, longest - 1, "make a longer cos_sin table")
    checks.values_between(
        "slots", slots, lowest, cache.rows - 1, f"{called(names[1])} has {cache.rows} rows; use -1 to skip"
    )
    checks.values_between(
        "pages.slots", pages.slots, lowest, state.rows - 1, f"{called(names[0])} has {state.rows} rows"
    )
    requests = pages.block_table.shape[0]
    checks.values_between("pages.request_ids", pages.request_ids, 0, requests - 1, "each must name a block-table row")
