"""Stage `index`: scores cached index keys for each query token and selects the best positions.

The score of position j for token t is `key_scale[j] * sum over heads of weights[t, h] * relu(q[t, h] . key[j])`. Keys
of `index-mxfp4` have one scale per 32 values, inside the product. Weights may be negative, and so may scores: positions
that a token cannot see score -inf, never 0.

Top-k is exact and deterministic: it selects the k highest scores above -inf, and among equal scores the lowest
positions. Positions are returned in ascending order and padded with -1, so the result does not depend on the backend's
algorithm. A NaN score counts as -inf, and -0.0 equals 0.0.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import index_mxfp4
from tamis.cache.paged import PagedCache
from tamis.cache.shard import Shard
from tamis.model.recipe import IndexRecipe
from tamis.ops.index import operations
from tamis.ops.index.break_even import SHARES
from tamis.ops.index.operations import IndexScores, IndexTopk, RaggedScores, TopkPositions
from tamis.ops.index.prepared import KNOWN, Given, PreparedTopk, new_positions, sign_topk

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tamis.ops.index.over_ranks import OverRanks

QUERY_DTYPES = (*checks.FLOATS, torch.float8_e4m3fn)
MAX_K = 4096
WORKSPACE_BYTES = 256 << 20


@dataclass(frozen=True, eq=False)
class IndexInputs:
    """The queries, weights and keys that a layer's indexer computed for the tokens of a step."""

    q: Tensor
    """[T, index_heads, index_dim], rotated; in e4m3 its scale is in the weights (`quantise_index_query`)."""
    weights: Tensor
    """[T, index_heads], with every constant factor folded in."""
    keys: Tensor | None = None
    """[T, index_dim] of the new tokens, prepared like q. The layer writes them to the index cache first. None means
    that they are there already."""
    recipe: IndexRecipe | None = None
    """How q and keys were prepared. It must be the cache's recipe if the cache records one."""
    gates: Tensor | None = None
    """[T, index_dim], only for a layer with pooled keys (`LayerSpec.kpool`): the weight of a key in its group's key is
    the softmax of its gates over the group, per channel. Such keys are given normed, but without Hadamard rotation: the
    layer applies that of the recipe to the group's key."""
    gate_bias: Tensor | None = None
    """[kpool, index_dim], given with the gates: row i is added to the gates of the i-th token of a group."""


def index_scores(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    *,
    width: int | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Scores of the cached keys of each token's request: float32 [T, width], -inf where there is nothing to see.

    Decode and prefill are the same call: a token sees the first `lengths[t]` positions of its request.

    Args:
        q: [T, H, D] in bf16, fp16, fp32, or e4m3 with its scale folded into the weights.
        weights: [T, H].
        cache: index keys, `index-fp8`, `index-mxfp4` or unquantised rows of width D.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W]; a negative page is absent and its positions score -inf.
        lengths: int32 [T], how many leading positions each token sees (its own position + 1); 0 or less: none.
        width: columns of the result, at least the longest length; by default as many as the block table holds.
        out: float32 [T, width] to write into, its rows contiguous.
        backend: a name from `tamis backends`, or "auto".
    """
    if width is None and isinstance(out, Tensor) and out.dim() == 2:
        width = out.shape[1]
    # The check sees `out` as it was given; memory for the result is allocated once the other arguments are right.
    call = IndexScores(q, weights, cache, request_ids, block_table, lengths, cast("Tensor", out), backend)
    check_index_scores(call, width)
    if out is None:
        columns = block_table.shape[1] * cache.page_size if width is None else width
        out = torch.empty(q.shape[0], columns, dtype=torch.float32, device=q.device)
        call = call._replace(out=out)
    operations.index_scores(call)
    return out


def check_index_scores(call: IndexScores, width: int | None) -> None:
    """Refuse what `index_scores` refuses; `out` may be None."""
    tokens = _check_paged(call)
    longest = call.block_table.shape[1] * call.cache.page_size
    width = longest if width is None else checks.integer("width", width, low=0)
    _check_lengths(call.lengths, min(longest, width), "the block table, or width, has no room for more")
    inputs = (call.q, call.weights, call.cache.storage, call.request_ids, call.block_table, call.lengths)
    _check_out(call.out, tokens, width, call.q.device, *inputs)
    operations.index_scores.check(call)


def ragged_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    starts: Tensor,
    ends: Tensor,
    *,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Scores of gathered keys: float32 [T, N], -inf outside of each token's keys [starts[t], ends[t]).

    Args:
        q: [T, H, D] in bf16, fp16, fp32, or e4m3 with its scale folded into the weights.
        weights: [T, H].
        keys: [N, D], the keys of all requests one after another, as `gather_index` gives them: e4m3 or unquantised, or
            e2m1 pairs, uint8 [N, D / 2].
        key_scales: float32 [N], or for e2m1 pairs the exponents, uint8 [N, D / 32]. None if all are 1.
        starts: int32 [T], the first key each token sees.
        ends: int32 [T], one past its last. Bounds are clamped to the keys; a token with end <= start sees none.
        out: float32 [T, N] to write into, its rows contiguous.
        backend: a name from `tamis backends`, or "auto".
    """
    call = RaggedScores(q, weights, keys, key_scales, starts, ends, cast("Tensor", out), backend)
    check_ragged_scores(call)
    if out is None:
        out = torch.empty(q.shape[0], keys.shape[0], dtype=torch.float32, device=q.device)
        call = call._replace(out=out)
    operations.ragged_scores(call)
    return out


def check_ragged_scores(call: RaggedScores) -> None:
    """Refuse what `ragged_scores` refuses; `out` may be None."""
    q, weights, keys, key_scales, starts, ends, out, _ = call
    device = checks.same_device(
        q=q, weights=weights, keys=keys, key_scales=key_scales, starts=starts, ends=ends, out=out
    )
    total = checks.tensor("keys", keys, "N D", (*QUERY_DTYPES, torch.uint8))
    packed = keys.dtype == torch.uint8
    width = 2 * total["D"] if packed else total["D"]
    sizes = checks.tensor("q", q, "T H D", QUERY_DTYPES, D=width, remedy="it is as wide as the keys")
    checks.tensor("weights", weights, "T H", checks.FLOATS, T=sizes["T"], H=sizes["H"])
    if packed:
        if total["D"] % 16:
            remedy = "pass 16 bytes per 32 values, as gather_index gives them"
            raise checks.refuse("keys", "of shape [N, D / 2] with D a multiple of 32", list(keys.shape), remedy)
        groups = index_mxfp4(dim=width).scales
        assert groups is not None
        remedy = "pass one byte per 32 values, as gather_index gives them"
        checks.tensor("key_scales", key_scales, "N G", (torch.uint8,), N=total["N"], G=groups.count, remedy=remedy)
    elif key_scales is not None:
        checks.tensor("key_scales", key_scales, "N", (torch.float32,), N=total["N"], remedy="pass one per key")
    for name, bound in (("starts", starts), ("ends", ends)):
        checks.tensor(name, bound, "T", (torch.int32,), T=sizes["T"], remedy="pass one per query token")
    _check_out(out, sizes["T"], total["N"], device, q, weights, keys, key_scales, starts, ends)
    operations.ragged_scores.check(call)


def topk_positions(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    *,
    request_ids: Tensor | None = None,
    block_table: Tensor | None = None,
    page_size: int | None = None,
    backend: str = "auto",
) -> Tensor:
    """The k best positions of each row: int32 [T, k] in ascending order, then -1.

    With `request_ids`, `block_table` and `page_size` each position becomes its slot, in the same column, by the rules
    of `translate_positions`: a position whose page is absent becomes -1.

    Args:
        scores: float32 [T, S].
        lengths: int32 [T], how many leading columns of each row count; 0 or less: none. Later columns may hold
            anything.
        k: how many to select, 1 to 4096.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W].
        page_size: positions per page.
        backend: a name from `tamis backends`, or "auto".
    """
    call = TopkPositions(scores, lengths, k, request_ids, block_table, page_size, backend)
    check_topk_positions(call)
    return operations.topk_positions(call)


def check_topk_positions(call: TopkPositions) -> None:
    """Refuse what `topk_positions` refuses."""
    scores, lengths, k, request_ids, block_table, page_size, _ = call
    checks.same_device(scores=scores, lengths=lengths, request_ids=request_ids, block_table=block_table)
    total = checks.tensor("scores", scores, "T S", (torch.float32,))
    checks.tensor("lengths", lengths, "T", (torch.int32,), T=total["T"], remedy="pass one per row of scores")
    checks.integer("k", k, low=1, high=MAX_K)
    _check_lengths(lengths, total["S"], "there are no more scores")
    given = [value is not None for value in (request_ids, block_table, page_size)]
    if any(given) and not all(given):
        raise checks.refuse(
            "request_ids, block_table and page_size", "given together", f"{sum(given)} of 3", "pass all, or none"
        )
    if request_ids is not None and block_table is not None:
        _check_requests(request_ids, block_table, total["T"], "one per row of scores")
        checks.integer("page_size", page_size, low=1)
    operations.topk_positions.check(call)


def index_topk(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    request_ids: Tensor,
    block_table: Tensor,
    lengths: Tensor,
    k: int,
    *,
    workspace_bytes: int = WORKSPACE_BYTES,
    out: Tensor | None = None,
    group: "ProcessGroup | None" = None,
    shard: Shard | None = None,
    share: str = "auto",
    backend: str = "auto",
) -> Tensor:
    """The k best request-local positions of each token: int32 [T, k] in ascending order, then -1.

    The selection is bit for bit that of `topk_positions(index_scores(...), ...)` of the same backend, but the scores of
    all tokens are never in memory at once. A token's row does not depend on the rest of the batch.

    Args:
        q: [T, H, D] in bf16, fp16, fp32, or e4m3 with its scale folded into the weights.
        weights: [T, H].
        cache: index keys, `index-fp8`, `index-mxfp4` or unquantised rows of width D.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W]; positions of an absent (negative) page are never selected.
        lengths: int32 [T], how many leading positions each token sees (its own position + 1); 0 or less: none.
        k: how many to select, 1 to 4096.
        workspace_bytes: how much memory scores and other intermediate results may take, whatever the context length.
            If one token needs more, tokens are handled one at a time.
        out: int32 [T, k], contiguous, to write into.
        group: ranks that all make this call with the same tokens, and all get the whole result, with the bits that one
            rank alone would give. Without a shard they hold the same keys, and each selects for a part of the tokens.
        shard: the part of each request's keys that this rank holds, with `group`; block table and cache are its own,
            and `lengths` count the positions of all ranks. Each rank selects from its keys for all tokens, and the
            candidates are merged exactly.
        share: whether ranks with the same keys divide the tokens: "always", or "auto" for only where it saves time
            (`tamis.ops.index.break_even`).
        backend: a name from `tamis backends`, or "auto".

    A rank that refuses its arguments, or fails before its positions travel, makes all ranks of the group raise. On the
    host that holds for every call; on a device for the first call of each size, because later ones and those that a
    CUDA graph captures do not wait for the device: there the group's timeout ends the others.
    """
    given = (q, weights, cache, request_ids, block_table, lengths, k, workspace_bytes)
    if group is not None or shard is not None or type(share) is not str or share != "auto":
        from tamis.ops.index.over_ranks import OverRanks  # which programs on one GPU need not load

        over = OverRanks.of(group, shard, share)
        if over is not None:
            return _select_over_ranks(over, given, out, backend)
    signature = None
    if not torch.compiler.is_compiling():
        with torch._C.DisableTorchFunction():
            signature = sign_topk(*given, out, backend)
            known = KNOWN.find(signature)
            if known is not None:
                found = known.rooms()[0] if out is None else out
                call = IndexTopk(*given, q.shape[0], found, None, backend)
                if known.apart is None or known.apart(found, *call.read):
                    known.run(call)
                    return found
    # The check sees `out` as it was given; memory for the result is allocated once the other arguments are right.
    call = IndexTopk(*given, 0, cast("Tensor", out), None, backend)
    check_index_topk(call)
    call = call._replace(batch=q.shape[0], out=new_positions(q, k) if out is None else out)
    operations.index_topk(call)
    if signature is not None:
        KNOWN.keep(signature, PreparedTopk.of(call, given_out=out is not None))
    return call.out


def _select_over_ranks(over: "OverRanks", given: Given, out: Tensor | None, backend: str) -> Tensor:
    """`index_topk` with a group of several ranks."""
    q, k, given_out = given[0], given[6], out is not None
    with over.telling():
        with torch._C.DisableTorchFunction():
            signature = sign_topk(*given, out, backend)
        call = over.local(IndexTopk(*given, 0, cast("Tensor", out), None, backend))
        if not over.knows(signature, call):
            check_index_topk(call)
            over.keep(signature, call)
        call = call._replace(batch=q.shape[0], out=call.out if given_out else new_positions(q, k))
    over.run(call)
    return call.out


def ranks_of_layer(group: "ProcessGroup | None", shard: Shard | None, share: str) -> "OverRanks | None":
    """The ranks with which a layer selects; None if there is no other. Options are checked now, and errors have the
    names of a layer's arguments: `index_group` and `index_share`."""
    if group is None:
        checks.option("index_share", share, SHARES)
        return None
    from tamis.ops.index.over_ranks import OverRanks  # which programs on one GPU need not load

    return OverRanks.checked(group, shard, share, "index_")


def check_index_topk(call: IndexTopk, sizes: Mapping[str, int] | None = None, **names: str) -> None:
    """Refuse what `index_topk` refuses.

    Args:
        call: the arguments; `out` may be None, and `batch` is not looked at.
        sizes: sizes that the query must have (T, H), where a layer knows them.
        **names: the layer's names for `q`, `weights` and `cache`, for errors.
    """
    tokens = _check_paged(call, sizes, **names)
    checks.integer("k", call.k, low=1, high=MAX_K)
    checks.integer("workspace_bytes", call.workspace_bytes, low=1, high=checks.INT64_MAX)
    longest = call.block_table.shape[1] * call.cache.page_size
    _check_lengths(call.lengths, longest, "the block table has no page for more")
    if call.out is not None:
        checks.tensor("out", call.out, "T K", (torch.int32,), T=tokens, K=call.k, device=call.q.device)
        if not call.out.is_contiguous():
            raise checks.refuse("out", "contiguous", f"strides {call.out.stride()}", "allocate it as [T, k]")
        checks.writable("out", call.out, *call.read)
    operations.index_topk.check(call, **names)


def check_layout(cache: PagedCache, name: str = "cache") -> None:
    """Refuse a cache that cannot hold index keys."""
    checks.instance(name, cache, PagedCache)
    layout = cache.layout
    one_each = layout.scales is not None and layout.tile == layout.width and not layout.packed
    if layout.quantised and not one_each and not (layout.packed and layout.scale_mode == "exponent"):
        expected = "index-fp8, index-mxfp4 or unquantised rows"
        raise checks.refuse(name, expected, repr(cache), "index keys have one scale per row, or are packed")


def _check_paged(call: IndexScores | IndexTopk, known: Mapping[str, int] | None = None, **names: str) -> int:
    """Check queries against the cache and the block table, and return the number of tokens."""
    q, weights, cache, lengths = call.q, call.weights, call.cache, call.lengths
    q_name, weights_name, cache_name = (names.get(name, name) for name in ("q", "weights", "cache"))
    check_layout(cache, cache_name)
    own = {q_name: q, weights_name: weights, cache_name: cache.storage}
    checks.same_device(**own, request_ids=call.request_ids, block_table=call.block_table, lengths=lengths)
    expected = {**(known or {}), "D": cache.layout.width}
    sizes = checks.tensor(q_name, q, "T H D", QUERY_DTYPES, remedy=lambda: f"keys are in {cache!r}", **expected)  # type: ignore[arg-type]
    checks.tensor(weights_name, weights, "T H", checks.FLOATS, T=sizes["T"], H=sizes["H"])
    checks.tensor("lengths", lengths, "T", (torch.int32,), T=sizes["T"], remedy="pass one per query token")
    _check_requests(call.request_ids, call.block_table, sizes["T"], "one per query token")
    return sizes["T"]


def _check_requests(request_ids: Tensor, block_table: Tensor, tokens: int, remedy: str) -> None:
    checks.tensor("request_ids", request_ids, "T", (torch.int32,), T=tokens, remedy=remedy)
    requests = checks.tensor("block_table", block_table, "B W", (torch.int32,))["B"]
    checks.values_between("request_ids", request_ids, 0, requests - 1, "each must name a block-table row")


def _check_lengths(lengths: Tensor, longest: int, remedy: str) -> None:
    if checks.visible(lengths):
        # Engines give padded requests negative lengths, which see nothing.
        checks.values_between("lengths", lengths.clamp_min(0), 0, longest, remedy)


def _check_out(out: Tensor | None, tokens: int, width: int, device: torch.device, *inputs: Tensor | None) -> None:
    if out is None:
        return
    checks.tensor("out", out, "T S", (torch.float32,), T=tokens, S=width, device=device)
    if out.stride(1) != 1 and width > 1:
        raise checks.refuse("out", "contiguous along its rows", out.stride(), "allocate it as [T, width]")
    checks.writable("out", out, *inputs)
