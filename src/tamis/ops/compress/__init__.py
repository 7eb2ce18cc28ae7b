"""Stage `compress`: pools spans of tokens into single entries of a paged cache. The pooling state is paged, too."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.ops.compress import operations
from tamis.ops.compress.operations import CompressKv, PoolKv
from tamis.ops.rotate import check_recipe, check_rotary
from tamis.ops.write import called


@dataclass(frozen=True, eq=False)
class StatePages:
    """The state rows of a step's tokens, and the pages with the state of the tokens before them."""

    slots: Tensor
    """int32 or int64 [T], the slot of each token's own row; negative for padding, which is not written."""
    request_ids: Tensor
    """int32 [T], the block-table row of each token."""
    block_table: Tensor
    """int32 [B, W] pages of the state cache; negative for absent pages."""


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
    norm_weight: Tensor | None = None,
    cos_sin: Tensor | None = None,
    eps: float = 1e-6,
    backend: str = "auto",
) -> None:
    """Store the new tokens' state, and write an entry for each span of tokens that one of them ends.

    A span has r tokens, and entry j of a request stands for tokens r*j .. r*j + r - 1: per channel, the mean of their
    values weighted by a softmax over their scores, where row i of `bias` is added to the scores of a span's i-th token.
    If spans overlap, every token has two sets of D channels: the second goes into its own span's entry, the first into
    the next one's, so that 2r tokens are pooled. The result is RMS-normalised, rotated in its last channels at the
    position of the span's first token, rounded once (to bf16 before FP8), and written. If the cache records a recipe
    with a Hadamard rotation (index keys), the rounded entry is multiplied by the Hadamard matrix and rounded again.
    GLM-5.3-Flash pools index keys without norm and rotation: both are optional.

    An entry depends on positions alone, not on how tokens were divided into steps: what earlier steps computed is read
    from the state pages, of which the last r (2r) tokens of each request must be kept. Running a token again overwrites
    its row and its entry, so rejected drafts need no undoing.

    Args:
        values: [T, C] in bf16, fp16 or fp32; C is D, or 2D where spans overlap.
        scores: [T, C], without the bias.
        state: a cache of `tamis.cache.layout.compressor_state`, 2C wide.
        cache: the entries, D wide, in any layout; a recipe that it records must be V4's, or without `cos_sin` one of no
            rotated column, with or without Hadamard.
        positions: integer [T], absolute; negative for padding. Tokens of one request are in ascending order.
        pages: where the state is.
        slots: int32 or int64 [T], the slot of the entry that each token completes. Only tokens with
            (position + 1) % r == 0 and a slot that is not negative write one.
        bias: [r, C].
        norm_weight: [D]; None if entries are not normalised.
        cos_sin: float32 [max_positions, R] from `tamis.model.rope.Rope.cos_sin_table`; the last R channels are rotated,
            in pairs (2i, 2i+1). None if entries are not rotated.
        eps: epsilon of the norm.
        backend: a name from `tamis backends`, or "auto".
    """
    checks.instance("state", state, PagedCache)
    checks.instance("cache", cache, PagedCache)
    checks.instance("pages", pages, StatePages)
    where = (positions, pages.slots, pages.request_ids, pages.block_table, slots)
    hadamard = has_hadamard(cache)
    call = CompressKv(values, scores, state, cache, *where, bias, norm_weight, cos_sin, eps, hadamard, backend)
    check_compress_kv(call)
    check_recipe(cache, 0 if cos_sin is None else cos_sin.shape[1], "cache")
    operations.compress_kv(call)


def check_compress_kv(call: CompressKv, names: tuple[str, str] = ("state", "cache")) -> None:
    """Refuse what `compress_kv` refuses, except for the cache's recipe. Errors use `names` for the two caches."""
    state, cache, device = call.state, call.cache, call.state.device
    width = cache.layout.width
    sizes = checks.tensor("values", call.values, "T C", checks.FLOATS, device=device)
    total, channels = sizes["T"], sizes["C"]
    if channels not in (width, 2 * width):
        expected = f"{width} wide, or {2 * width} where spans overlap"
        raise checks.refuse("values", expected, channels, f"entries go to {cache!r}")
    checks.tensor("scores", call.scores, "T C", checks.FLOATS, T=total, C=channels, device=device)
    _check_state(state, channels, names[0])
    if cache.device != device:
        raise checks.refuse(names[1], f"on {device} like {names[0]}", cache.device, "keep both on one device")
    _check_slots(call, total, names)
    ratio = checks.tensor("bias", call.bias, "r C", checks.FLOATS, C=channels, device=device)["r"]
    if ratio == 0:
        raise checks.refuse("bias", "at least one row", list(call.bias.shape), "one row for each token of a span")
    if call.norm_weight is not None:
        checks.tensor("norm_weight", call.norm_weight, "D", checks.FLOATS, D=width, device=device)
    if call.cos_sin is not None:
        _check_angles(call, call.cos_sin, ratio, width)
    checks.positive_number("eps", call.eps)
    checks.changeable(names[0], state.storage)
    checks.changeable(names[1], cache.storage)
    operations.compress_kv.check(call)


def pool_kv(
    values: Tensor,
    scores: Tensor,
    state: PagedCache,
    *,
    positions: Tensor,
    pages: StatePages,
    norm_weight: Tensor,
    ratio: int,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.bfloat16,
    backend: str = "auto",
) -> Tensor:
    """Store the new tokens' state; return latents [T, D], zeros for tokens that end no span (DeepSeek-V4.1).

    A latent is what `compress_kv` would write as an entry of plain spans without a bias, before it is rotated: per
    channel, the mean of the values of `ratio` tokens weighted by a softmax over their scores, RMS-normalised, and
    rounded to `dtype`. V4.1 makes both the entry and the index key of a span from it. What earlier steps computed is
    read from the state pages, of which the last `ratio` tokens of each request must be kept.

    Args:
        values: [T, D] in bf16, fp16 or fp32.
        scores: [T, D].
        state: a cache of `tamis.cache.layout.compressor_state` without overlap, 2D wide.
        positions: integer [T], absolute; negative for padding. Tokens of one request are in ascending order.
        pages: where the state is.
        norm_weight: [D].
        ratio: tokens per span.
        eps: epsilon of the norm.
        dtype: the dtype of the latents.
        backend: a name from `tamis backends`, or "auto".
    """
    checks.instance("state", state, PagedCache)
    checks.instance("pages", pages, StatePages)
    where = (positions, pages.slots, pages.request_ids, pages.block_table)
    call = PoolKv(values, scores, state, *where, norm_weight, ratio, eps, dtype, backend)
    check_pool_kv(call)
    return operations.pool_kv(call)


def check_pool_kv(call: PoolKv, name: str = "state") -> None:
    """Refuse what `pool_kv` refuses. Errors use `name` for the cache of state."""
    device = call.state.device
    total, width = checks.tensor("values", call.values, "T D", checks.FLOATS, device=device).values()
    checks.tensor("scores", call.scores, "T D", checks.FLOATS, T=total, D=width, device=device)
    _check_state(call.state, width, name)
    _check_tokens(call, total, name)
    checks.tensor("norm_weight", call.norm_weight, "D", checks.FLOATS, D=width, device=device)
    checks.integer("ratio", call.ratio, low=1)
    checks.positive_number("eps", call.eps)
    checks.option("dtype", call.dtype, checks.FLOATS)
    checks.changeable(name, call.state.storage)
    operations.pool_kv.check(call)


def has_hadamard(cache: PagedCache | None) -> bool:
    """Whether the cache records a recipe with a Hadamard rotation."""
    return cache is not None and cache.recipe is not None and cache.recipe.hadamard


def _check_state(state: PagedCache, channels: int, name: str) -> None:
    """Refuse a cache that does not hold the state of this many channels."""
    if state.layout.quantised or state.layout.element != torch.float32 or state.layout.width != 2 * channels:
        expected = f"of float32 rows {2 * channels} wide"
        raise checks.refuse(name, expected, repr(state), "make its layout with tamis.cache.layout.compressor_state")


def _check_slots(call: CompressKv, total: int, names: tuple[str, str]) -> None:
    """Refuse slots and a block table that do not fit the tokens and the two caches."""
    cache, device, lowest = call.cache, call.state.device, -(2**62)
    checks.tensor(
        "slots", call.slots, "T", checks.INTS, T=total, device=device, remedy="pass one per token, -1 for none"
    )
    _check_tokens(call, total, names[0])
    remedy = f"{called(names[1])} has {cache.rows} rows; use -1 to skip"
    checks.values_between("slots", call.slots, lowest, cache.rows - 1, remedy)


def _check_tokens(call: CompressKv | PoolKv, total: int, name: str) -> None:
    """Refuse positions, slots of state and a block table that do not fit the tokens and the state."""
    state, device = call.state, call.state.device
    checks.tensor("positions", call.positions, "T", checks.INTS, T=total, device=device)
    checks.tensor(
        "pages.slots", call.state_slots, "T", checks.INTS, T=total, device=device, remedy="pass one per token"
    )
    checks.tensor("pages.request_ids", call.request_ids, "T", (torch.int32,), T=total, device=device)
    table = checks.tensor("pages.block_table", call.block_table, "B W", (torch.int32,), device=device)
    if table["W"] == 0:
        raise checks.refuse("pages.block_table", "at least one page wide", [*table.values()], "pass the page table")
    remedy = f"{called(name)} has {state.rows} rows"
    checks.values_between("pages.slots", call.state_slots, -(2**62), state.rows - 1, remedy)
    remedy = "each must name a block-table row"
    checks.values_between("pages.request_ids", call.request_ids, 0, table["B"] - 1, remedy)


def _check_angles(call: CompressKv, cos_sin: Tensor, ratio: int, width: int) -> None:
    """Refuse a table of angles that does not fit the entries, ends before the positions, or is not finite."""
    positions = call.positions
    table = checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), device=call.state.device)
    check_rotary(table["R"], width)
    checks.values_between("positions", positions, -(2**62), table["P"] - 1, "make a longer cos_sin table")
    # An entry is rotated at the position of its span's first token.
    first = torch.where(positions >= ratio - 1, positions + 1 - ratio, -1) if checks.visible(positions) else positions
    checks.finite_rows("cos_sin", cos_sin, first)
