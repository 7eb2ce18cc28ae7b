"""The indexer in training: exact selection for packed sequences, and the losses that teach it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.codec import decode_e2m1, encode_rows
from tamis.cache.layout import Layout
from tamis.ops.attention.operations import accumulator
from tamis.ops.index import MAX_K, WORKSPACE_BYTES, loss_operations, ragged_scores, topk_positions
from tamis.ops.index.loss_operations import IndexLoss, WarmupLoss
from tamis.train.arguments import (
    DTYPES,
    deterministic_mode,
    in_autocast,
    recorded,
    refuse_transforms,
    same_dtype,
    widened_in_autocast,
)
from tamis.train.quantise import layout_of_width

BYTES_PER_SCORE = 40
"""Memory for selecting from one score in plain torch, at worst; kernels need less."""


@torch.no_grad()
def select_rows(
    index_q: Tensor,
    index_keys: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    k: int,
    *,
    layout: str | Layout | None = None,
    workspace_bytes: int = WORKSPACE_BYTES,
    backend: str = "auto",
) -> Tensor:
    """The k best keys of each token among those that it sees: row numbers int32 [T, k], ascending, then -1.

    The set is that of `topk_positions` over the scores of `ragged_scores`, bit for bit, but scores of all tokens are
    never in memory at once. There is no gradient. Under autocast, queries and keys of different dtypes are converted to
    float32.

    Args:
        index_q: [T, H, D], rotated; bf16, fp16 or fp32 (fp64 is rounded to fp32).
        index_keys: [N, D], rotated, the keys of all requests one after another, in the same dtype.
        weights: [T, H], every constant factor folded in.
        starts: int32 [T], the first key that each token sees; on q's device, or on the host, which saves work where
            several requests are packed.
        ends: int32 [T], one past its last, on the device of `starts`.
        k: how many to select, 1 to 4096.
        layout: the format in which an engine would serve: `index-fp8` or `index-mxfp4`. Queries and keys are encoded in
            it first, so that the same rows are selected as from a cache of that format. None: as they are.
        workspace_bytes: how much memory scores and other intermediate results may take. If one token needs more, tokens
            are handled one at a time.
        backend: a name from `tamis backends`, or "auto".
    """
    index_q, index_keys = widened_in_autocast(index_q, index_keys)
    tokens, total = _check_index(index_q, index_keys, weights)
    checks.integer("k", k, low=1, high=MAX_K)
    checks.integer("workspace_bytes", workspace_bytes, low=1, high=checks.INT64_MAX)
    _check_bounds(starts, ends, tokens, index_q.device)
    if starts.device != ends.device:
        raise checks.refuse("ends", f"on {starts.device} like starts", ends.device, "keep both on one device")
    q, keys, factors, key_scales = _encoded(index_q, index_keys, weights, layout)
    result = torch.empty(tokens, k, dtype=torch.int32, device=q.device)
    low = starts.clamp(0, total)
    # A token that sees nothing may have its bounds anywhere, also past the keys that the tokens beside it see.
    high = torch.maximum(low, ends.clamp(0, total))
    for some, first, last in _chunks(low, high, total, workspace_bytes):
        begin, end = ((bound[some] - first).clamp(0, last - first).to(q.device) for bound in (low, high))
        scales = None if key_scales is None else key_scales[first:last]
        scores = ragged_scores(q[some], factors[some], keys[first:last], scales, begin, end, backend=backend)
        chosen = topk_positions(scores, end, k, backend=backend)
        result[some] = torch.where(chosen >= 0, chosen + first, -1)
    return result


def index_loss(
    index_q: Tensor,
    index_keys: Tensor,
    weights: Tensor,
    slots: Tensor,
    target: Tensor,
    *,
    token_weights: Tensor | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """How far the indexer's distribution over the selected rows is from a target: a scalar, summed over tokens.

    For each token it is the divergence KL(target || softmax of its scores), times its weight, in natural logarithms. A
    token whose target is all zeros, or whose slots are all skipped, adds nothing. The result is differentiable in
    `index_q`, `index_keys` and `weights`, once; its gradients are computed with it, and nothing of the size of the
    selection is kept. Fold a coefficient into `token_weights`: then 16-bit gradients are rounded only once.

    Args:
        index_q: [T, H, D] in bf16, fp16, fp32 or fp64, rotated.
        index_keys: [N, D] in the same dtype, rotated.
        weights: [T, H], every constant factor folded in.
        slots: int32 [T, K], row numbers of keys, from `select_rows`; others are skipped.
        target: float32 [T, K] from `index_target` (fp64 for fp64 queries); values of skipped columns do not count.
        token_weights: float32 [T] (fp64 for fp64 queries); 1 for every token if not given.
        deterministic: whether the keys' gradient is added up in one order, as in `attend_rows`.
        backend: a name from `tamis backends`, or "auto".
    """
    index_q, index_keys = in_autocast(index_q, index_keys)
    tokens, _ = _check_index(index_q, index_keys, weights)
    dtype, device = accumulator(index_q), index_q.device
    columns = checks.tensor("slots", slots, "T K", (torch.int32,), T=tokens, device=device)["K"]
    checks.tensor("target", target, "T K", (dtype,), T=tokens, K=columns, device=device)
    if checks.visible(target) and not bool(((target.detach() >= 0) & target.detach().isfinite()).all()):
        remedy = "pass what index_target returns"
        raise checks.refuse("target", "free of negative numbers, infinity and NaN", "others", remedy)
    _check_token_weights(token_weights, tokens, dtype, device)
    refuse_transforms("index_loss", index_q=index_q, index_keys=index_keys, weights=weights)
    wanted = recorded(index_q, index_keys, weights)
    mode = deterministic_mode(deterministic)
    constants = (slots, target.detach(), None if token_weights is None else token_weights.detach())
    call = IndexLoss(index_q, index_keys, weights, *constants, wanted, mode, backend)
    loss_operations.index_loss.check(call)
    return loss_operations.index_loss(call)[0]


def warmup_loss(
    q: Tensor,
    keys: Tensor,
    lse: Tensor | None,
    index_q: Tensor,
    index_keys: Tensor,
    weights: Tensor,
    starts: Tensor,
    ends: Tensor,
    *,
    scale: float,
    token_weights: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """How far the indexer's distribution over all visible keys is from dense attention's: a scalar, summed over tokens.

    This is `index_loss` before there are selections: the target is attention's probabilities over all keys that a token
    sees, summed over heads and normalised. Both distributions are computed in blocks, twice, so nothing of T x N is in
    memory. The result is differentiable in `index_q`, `index_keys` and `weights`, once; everything else counts as
    constant.

    Args:
        q: [T, H, D], attention's queries.
        keys: [N, D], or [N, H, D] with keys for each head, in q's dtype. Keys that are not absorbed are narrower.
        lse: [T, H] of dense attention: the logarithm of its denominator, with whatever else is in it (a window, a
            sink); float32, or float64 for float64 queries. None: the denominator of these keys alone.
        index_q: [T, H_I, D_I], rotated.
        index_keys: [N, D_I] in the same dtype, rotated.
        weights: [T, H_I], every constant factor folded in.
        starts: int32 [T], the first key that each token sees.
        ends: int32 [T], one past its last.
        scale: softmax scale of attention.
        token_weights: as in `index_loss`.
        backend: a name from `tamis backends`, or "auto".
    """
    q, keys = in_autocast(q, keys)
    index_q, index_keys = in_autocast(index_q, index_keys)
    tokens, total = _check_index(index_q, index_keys, weights)
    dtype, device = accumulator(index_q), index_q.device
    sizes = checks.tensor("q", q, "T H D", DTYPES, T=tokens, device=device)
    shape = "N H D" if isinstance(keys, Tensor) and keys.dim() == 3 else "N D"
    known = {"N": total, "D": sizes["D"]} | ({"H": sizes["H"]} if shape == "N H D" else {})
    checks.tensor("keys", keys, shape, DTYPES, device=device, remedy="one row per index key, as wide as q", **known)
    same_dtype("q", q, keys=keys)
    if lse is not None:
        checks.tensor("lse", lse, "T H", (dtype,), T=tokens, H=sizes["H"], device=device)
        lse = lse.detach()
    _check_bounds(starts, ends, tokens, device)
    checks.positive_number("scale", scale)
    _check_token_weights(token_weights, tokens, dtype, device)
    constants = (q.detach(), keys.detach(), lse, starts.to(device), ends.to(device))
    factors = None if token_weights is None else token_weights.detach()
    refuse_transforms("warmup_loss", index_q=index_q, index_keys=index_keys, weights=weights)
    wanted = recorded(index_q, index_keys, weights)
    call = WarmupLoss(index_q, index_keys, weights, *constants, factors, scale, wanted, backend)
    loss_operations.warmup_loss.check(call)
    return loss_operations.warmup_loss(call)[0]


def _check_index(index_q: Tensor, index_keys: Tensor, weights: Tensor) -> tuple[int, int]:
    """Refuse index queries, keys and weights that do not fit each other; return the numbers of tokens and keys."""
    checks.same_device(index_q=index_q, index_keys=index_keys, weights=weights)
    sizes = checks.tensor("index_q", index_q, "T H D", DTYPES)
    if sizes["H"] == 0 or sizes["D"] == 0:
        raise checks.refuse("index_q", "of at least one head and one column", list(index_q.shape))
    remedy = "keys are as wide as index_q"
    total = checks.tensor("index_keys", index_keys, "N D", DTYPES, D=sizes["D"], remedy=remedy)["N"]
    same_dtype("index_q", index_q, index_keys=index_keys)
    checks.tensor("weights", weights, "T H", DTYPES, T=sizes["T"], H=sizes["H"], remedy="one per token and index head")
    return sizes["T"], total


def _check_bounds(starts: Tensor, ends: Tensor, tokens: int, device: torch.device) -> None:
    for name, bound in (("starts", starts), ("ends", ends)):
        checks.tensor(name, bound, "T", (torch.int32,), T=tokens, remedy="pass one per query token")
        if bound.device.type != "cpu" and bound.device != device:
            raise checks.refuse(name, f"on {device} or the host", bound.device, "keep it with the queries")


def _check_token_weights(value: Tensor | None, tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    if value is not None:
        checks.tensor("token_weights", value, "T", (dtype,), T=tokens, device=device, remedy="pass one per token")


def _encoded(
    q: Tensor, keys: Tensor, weights: Tensor, layout: str | Layout | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, keys, weights and key scales as `ragged_scores` takes them, in the numbers that a cache would hold."""
    q, keys, weights = (x.float() if x.dtype == torch.float64 else x for x in (q, keys, weights))
    if layout is None:
        return q, keys, weights, None
    tokens, heads, dim = q.shape
    layout = layout_of_width(layout, dim)
    per_row = layout.scales is not None and layout.tile == layout.width
    if layout.quantised and not layout.packed and not per_row:
        expected = "index-fp8, index-mxfp4 or unquantised rows"
        raise checks.refuse("layout", expected, layout.name, "choose the index cache's format")
    values, scales, _ = encode_rows(keys, layout)
    queries, query_scales, _ = encode_rows(q.reshape(-1, dim), layout)
    if scales is None or query_scales is None:
        return queries.view(q.shape), values, weights, None
    if layout.packed:
        # The scales of packed queries, one per 32 values, are not folded into the weights; bf16 holds the products.
        return decode_e2m1(queries, query_scales).bfloat16().view(q.shape), values, weights, scales
    queries, values = (x.view(torch.float8_e4m3fn) for x in (queries, values))
    return queries.view(q.shape), values, weights.float() * query_scales.view(tokens, heads), scales.squeeze(1)


def _chunks(low: Tensor, high: Tensor, total: int, workspace_bytes: int) -> Iterator[tuple[slice, int, int]]:
    """Tokens whose scores fit the workspace together, and the first and last key that any of them sees.

    Bounds on a device are not looked at, which would wait for it: every chunk then scores all keys.
    """
    tokens, start = len(low), 0
    most = max(1, workspace_bytes // BYTES_PER_SCORE)
    if low.device.type != "cpu" or torch.compiler.is_compiling():
        step = max(1, most // max(1, total))
        yield from ((slice(at, min(at + step, tokens)), 0, total) for at in range(0, tokens, step))
        return
    while start < tokens:
        end = min(tokens, start + most)
        while True:
            first, last = _reach(low[start:end], high[start:end])
            if end - start == 1 or (end - start) * (last - first) <= most:
                break
            end = start + (end - start) // 2
        yield slice(start, end), first, last
        start = end


def _reach(low: Tensor, high: Tensor) -> tuple[int, int]:
    """The first key that any token sees, and one past the last; 0 and 0 if none sees any."""
    seen = low < high
    return (int(low[seen].min()), int(high[seen].max())) if bool(seen.any()) else (0, 0)
