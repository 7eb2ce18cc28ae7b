"""Checks of stage `index`: prepared keys and queries, scores, top-k, and scores with top-k in one call."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tamis.backends import compute_capability
from tamis.lab.testing import index_cases, oracle
from tamis.lab.testing.index_cases import IndexCase, KeysCase, TopkCase, best_positions
from tamis.lab.verify.check import Check, Target, Trial, named_calls
from tamis.lab.verify.index_blocks import block_checks, levels_again, levels_of
from tamis.lab.verify.index_steps import step_checks, steps_taken
from tamis.lab.verify.repeat import Replays, count_differences, graph_check, repeat_check
from tamis.ops import index_scores, index_topk, quantise_index_query, ragged_scores, topk_positions, write_index_keys

SCORE_BOUND = 1e-5
"""Largest error of a score, and largest excess of an unselected score over a selected one, for sums in float32. Both
are relative to the largest score that the token would have if no two heads cancelled."""
FP8_BOUND = 4 * 2.0**-13
"""The same bound where tensor cores multiply e4m3, relative to the sum of the products' absolute values. Hopper's
tensor cores align the 32 products of a step and the accumulator to the largest of them and keep 13 bits below it; a key
of 128 numbers takes four steps. Every kernel that multiplies FP8 there has this error."""
KEY_BOUND = 1e-5
"""Relative error of a key's norm and rotations in float32."""
QUERY_BOUND = 2**-4 + KEY_BOUND
"""Relative error of a rotated query's numbers in e4m3: half a step of three mantissa bits."""


def index_checks(target: Target) -> Iterator[Check]:
    """Scores are close to float64; top-k of given scores is exact, and the fused call selects the same."""
    stage = "index"
    if target.runs(stage) is None:
        yield Check(stage, "best scores", SCORE_BOUND, reason=f"{target.backend} does not have this stage")
        return
    keys = [case for case in index_cases.keys_cases(quick=target.quick) if target.covers(case.cache.layout)]
    yield Check(stage, "keys", KEY_BOUND, named_calls(_keys, target, keys))
    yield Check(stage, "queries", QUERY_BOUND, named_calls(_queries, target, keys))
    found = [case for case in index_cases.index_cases(quick=target.quick) if _takes(target, case)]
    yield from _score_checks(target, "", SCORE_BOUND, [case for case in found if not _multiplies_fp8(target, case)])
    if fp8 := [case for case in found if _multiplies_fp8(target, case)]:
        yield from _score_checks(target, ", FP8 products", FP8_BOUND, fp8)
    yield Check(stage, "top-k", 0.0, named_calls(_topk, target, index_cases.topk_cases(quick=target.quick)))
    yield Check(stage, "ties", 0.0, named_calls(_index, target, [case for case in found if case.exact]))
    steps = steps_taken(target)
    yield from step_checks(target, steps)
    yield from block_checks(target, steps if target.quick else steps[::3])
    yield Check(stage, "fused call matches two-step result", 0.0, named_calls(_fused, target, found))
    some, levels = found[::4], steps[::4]
    repeated = [*named_calls(_indexed, target, some), *named_calls(levels_of, target, levels)]
    yield repeat_check(stage, repeated)
    again = named_calls(_index_again, target, some)
    replays: Replays = [*again, *named_calls(levels_again, target, levels)]
    yield graph_check(target, stage, [stage], replays)


def _takes(target: Target, case: IndexCase) -> bool:
    layout = case.cache.layout
    return target.takes("index", layout, page_size=case.cache.page_size) and target.covers(layout, case.q.dtype)


def _score_checks(target: Target, suffix: str, bound: float, some: list[IndexCase]) -> Iterator[Check]:
    drawn = [case for case in some if not case.exact]
    yield Check("index", f"scores{suffix}", bound, named_calls(_scores, target, some))
    yield Check("index", f"gathered scores{suffix}", bound, named_calls(_ragged, target, some[::2]))
    yield Check("index", f"best scores{suffix}", bound, named_calls(_index, target, drawn))


def _keys(target: Target, case: KeysCase) -> Trial:
    moved = target.here(case)
    cache, recipe = moved.cache, case.cache.recipe
    assert recipe is not None
    write_index_keys(
        moved.keys,
        cache,
        moved.slots,
        norm_weight=moved.norm_weight,
        norm_bias=moved.norm_bias,
        positions=moved.positions,
        cos_sin=moved.cos_sin,
        backend=target.backend,
    )
    ready = oracle.index_keys(case.keys, case.norm_weight, case.norm_bias, case.cos_sin[case.positions.long()], recipe)
    expected = torch.zeros(cache.rows, case.keys.shape[1], dtype=torch.float64, device="cpu")
    kept = case.slots >= 0
    expected[case.slots[kept]] = ready[: len(case.slots)][kept]
    found = oracle.rows_of(cache, torch.arange(cache.rows, dtype=torch.int64, device="cpu"))
    return Trial(float((found - expected).abs().max() / expected.abs().max()))


def _multiplies_fp8(target: Target, case: IndexCase) -> bool:
    """Whether the device multiplies the case's e4m3 values on its tensor cores without converting them."""
    capability = compute_capability(target.device)
    return case.q.dtype == torch.float8_e4m3fn and case.cache.layout.quantised and (capability or (0, 0)) >= (8, 9)


def _queries(target: Target, case: KeysCase) -> Trial:
    """Quantised queries, from tiny to huge: their values, and their scales, which are folded into the weights."""
    recipe, tokens = case.cache.recipe, len(case.keys) // 2
    assert recipe is not None
    rows = case.keys * torch.logspace(-2, 3, 2 * tokens, dtype=torch.float32, device="cpu").unsqueeze(1)
    weights = torch.tensor([4.0, -0.5], dtype=torch.float32, device="cpu").repeat(tokens, 1)
    positions = case.positions[:tokens]
    q, moved, at, table = target.here([rows.view(tokens, 2, -1), weights, positions, case.cos_sin])
    values, folded = quantise_index_query(
        q, moved, recipe, positions=at, cos_sin=table, scale=0.25, rounding="none", backend=target.backend
    )
    exact = oracle.index_rows(rows, case.cos_sin[positions.long().repeat_interleave(2)], recipe)
    scale = torch.exp2((exact.abs().amax(1, keepdim=True) / 448).log2().ceil())
    if not torch.equal(folded.cpu().double() / (weights * 0.25), scale.view(tokens, 2)):
        return Trial(math.inf, "other scales")
    found = values.cpu().double().view(exact.shape) * scale
    # Below 2**-6 e4m3 is subnormal: its steps no longer shrink with the number.
    return Trial(float(((found - exact).abs() / torch.maximum(exact.abs(), scale * 2**-6)).max()))


def _scores(target: Target, case: IndexCase) -> Trial:
    moved = target.here(case)
    paged = moved.q, moved.weights, moved.cache, moved.request_ids, moved.block_table, moved.lengths
    found = index_scores(*paged, backend=target.backend).cpu().double()
    return _score_error(found, _exact(case), _size(target, case))


def _ragged(target: Target, case: IndexCase) -> Trial:
    """Scores of the gathered keys of the longest context; every token sees a range of them."""
    total = int(case.lengths.max())
    table = case.block_table[1].tolist()
    slots = torch.tensor(
        [oracle.slot_of(position, table, case.cache.page_size) for position in range(total)],
        dtype=torch.int64,
        device="cpu",
    )
    page, row = slots // case.cache.page_size, slots % case.cache.page_size
    layout = case.cache.layout
    keys, scales = case.cache.field(layout.values)[page, row], None
    if layout.scales is not None:
        scales = case.cache.field(layout.scales)[page, row]
        keys, scales = (keys, scales) if layout.packed else (keys.view(torch.float8_e4m3fn), scales.squeeze(1))
    ends = case.lengths
    starts = (ends // 3).int()
    q, weights, *bounds = target.here([case.q, case.weights, starts, ends])
    scales = None if scales is None else scales.to(target.device)
    found = ragged_scores(q, weights, keys.to(target.device), scales, *bounds, backend=target.backend)
    wide = oracle.rows_of(case.cache, slots)
    cancelling = not _multiplies_fp8(target, case)
    exact = torch.full((len(ends), total), -torch.inf, dtype=torch.float64, device="cpu")
    size = torch.zeros(len(ends), dtype=torch.float64, device="cpu")
    for token in range(len(ends)):
        seen = slice(max(0, int(starts[token])), max(0, int(ends[token])))
        logits = torch.relu(case.q[token].double() @ wide[seen].T)
        exact[token, seen] = case.weights[token].double() @ logits
        if not cancelling:
            logits = case.q[token].double().abs() @ wide[seen].abs().T
        largest = case.weights[token].double().abs() @ logits
        size[token] = largest.max() if largest.numel() else 0.0
    return _score_error(found.cpu().double(), exact, size)


def _topk(target: Target, case: TopkCase) -> Trial:
    moved = target.here(case)
    # Scores are copied into a wider buffer on the device, since moving a tensor may remove the gaps between its rows.
    block = torch.full(
        (len(case.scores), case.scores.shape[1] + 5), torch.inf, dtype=torch.float32, device=target.device
    )
    scores = block[:, : case.scores.shape[1]]
    scores.copy_(moved.scores)
    positions = topk_positions(scores, moved.lengths, case.k, backend=target.backend)
    slots = topk_positions(
        scores,
        moved.lengths,
        case.k,
        request_ids=moved.request_ids,
        block_table=moved.block_table,
        page_size=case.page_size,
        backend=target.backend,
    )
    best = [best_positions(case.scores[t], int(case.lengths[t]), case.k) for t in range(len(case.scores))]
    tables = [case.block_table[int(request)].tolist() for request in case.request_ids]
    there = [[oracle.slot_of(p, tables[t], case.page_size) for p in row] for t, row in enumerate(best)]
    expected = [torch.tensor(one, dtype=torch.int32, device="cpu").view(-1, case.k) for one in (best, there)]
    return count_differences([positions, slots], expected)


def _exact(case: IndexCase) -> Tensor:
    return oracle.index_scores(case.q, case.weights, case.cache, case.request_ids, case.block_table, case.lengths)


def _size(target: Target, case: IndexCase) -> Tensor:
    """Per token, the largest score if heads (and with FP8 products, single products) could not cancel."""
    paged = case.request_ids, case.block_table, case.lengths
    fp8 = _multiplies_fp8(target, case)
    largest = oracle.index_scores(case.q, case.weights.abs(), case.cache, *paged, absolute=fp8)
    return (
        largest.amax(1).clamp_min(0)
        if largest.shape[1]
        else torch.zeros(len(largest), dtype=torch.float64, device="cpu")
    )


def _score_error(found: Tensor, exact: Tensor, size: Tensor) -> Trial:
    hidden = exact == -torch.inf
    wrong = hidden != (found == -torch.inf)
    if bool(wrong.any()):
        token, position = wrong.nonzero()[0].tolist()
        return Trial(math.inf, f"token {token}, position {position}: {found[token, position]}")
    error = (found - exact).masked_fill(hidden, 0.0).abs() / size.clamp_min(1e-30).unsqueeze(1)
    return Trial(float(error.max()) if error.numel() else 0.0)


def _index_call(target: Target, case: IndexCase, q: Tensor, weights: Tensor, lengths: Tensor) -> list[Tensor]:
    ids, table = case.request_ids, case.block_table
    return [index_topk(q, weights, case.cache, ids, table, lengths, case.k, backend=target.backend)]


def _indexed(target: Target, case: IndexCase) -> list[Tensor]:
    moved = target.here(case)
    return _index_call(target, moved, moved.q, moved.weights, moved.lengths)


def _fused(target: Target, case: IndexCase) -> Trial:
    """The fused call selects the same as scores and top-k, with any workspace, and for each token alone."""
    moved, backend = target.here(case), target.backend
    ids, table, lengths = moved.request_ids, moved.block_table, moved.lengths
    scores = index_scores(moved.q, moved.weights, moved.cache, ids, table, lengths, backend=backend)
    expected = topk_positions(scores, lengths, case.k, backend=backend)
    found = []
    for size in (1 << 28, 1 << 16, 1):
        rest = moved.cache, ids, table, lengths, case.k
        found.append(index_topk(moved.q, moved.weights, *rest, workspace_bytes=size, backend=backend))
    alone = [
        index_topk(moved.q[o], moved.weights[o], moved.cache, ids[o], table, lengths[o], case.k, backend=backend)
        for o in (slice(t, t + 1) for t in range(len(ids)))
    ]
    return count_differences([*found, torch.cat(alone)], [expected] * 4)


def _index(target: Target, case: IndexCase) -> Trial:
    found = _indexed(target, case)[0].cpu()
    scores, size = _exact(case), _size(target, case)
    worst, note = 0.0, ""
    for token in range(len(found)):
        error, told = _row_error(found[token].tolist(), scores[token], float(size[token]), case)
        if error > worst:
            worst, note = error, f"token {token}: {told}"
    return Trial(worst, note)


def _row_error(row: list[int], scores: Tensor, size: float, case: IndexCase) -> tuple[float, str]:
    visible = int((scores > -math.inf).sum())
    count = min(case.k, visible)
    chosen, rest = row[:count], row[count:]
    if any(position != -1 for position in rest):
        return math.inf, f"{sum(p != -1 for p in rest)} positions after the {count} there are"
    if any(not 0 <= p < len(scores) or scores[p] == -math.inf for p in chosen):
        return math.inf, "a position that the token cannot see"
    if chosen != sorted(set(chosen)):
        return math.inf, "positions that are not in ascending order"
    if case.exact:
        # A stable sort leaves equal scores in the order of their positions.
        best = set(scores.argsort(descending=True, stable=True)[:count].tolist())
        wrong = len(set(chosen) - best)
        return float(wrong), f"{wrong} of {count} positions are not the lowest of the best"
    if count in (0, visible):
        return 0.0, ""
    left = scores.clone()
    left[chosen] = -math.inf
    excess = float(left.max() - scores[chosen].min())
    return max(0.0, excess / size), f"a score of {float(left.max()):.6g} was left out"


def _index_again(target: Target, case: IndexCase) -> tuple[list[Tensor], list[Tensor], "partial[list[Tensor]]"]:
    moved = target.here(case)
    first = [moved.q, moved.weights, moved.lengths]
    # Some devices cannot flip FP8 tensors, so bytes are flipped.
    turned = moved.q.view(torch.uint8).flip(0).view(moved.q.dtype) if moved.q.element_size() == 1 else moved.q.flip(0)
    second = [turned, moved.weights.flip(0), (moved.lengths - 7).clamp_min(0)]
    return first, second, partial(_index_call, target, moved)
