"""Measures of a selection, as pure functions of scores, logits and positions.

Shapes: n queries, H heads, S candidates (the tokens of a prompt, or V4's compressed entries). A candidate stands for
`ratio` tokens, and its distance from a query is that of its last token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

DISTANCE_BINS = 24
"""Bins of distance 0, 1, 2 to 3, 4 to 7 and so on: enough for eight million tokens."""


class Shares(NamedTuple):
    """How much of dense attention a selection covers: float32 [n], NaN where a query sees nothing."""

    recall: Tensor
    """The share of dense attention's weights on selected candidates, mean over heads."""
    top1: Tensor
    """The share of heads whose highest weight is on a selected candidate."""
    effective: Tensor
    """Perplexity (exp of entropy) of the heads' mean weights over the selected candidates."""
    weights: Tensor
    """float32 [n, S]: dense attention's weights, mean over heads; zeros where a query sees nothing."""


def selected_mask(positions: Tensor, width: int) -> Tensor:
    """bool [n, width] from positions int [n, k]; negative positions are padding."""
    mask = torch.zeros(len(positions), width + 1, dtype=torch.bool, device=positions.device)
    mask.scatter_(1, torch.where(positions >= 0, positions, width).long(), True)
    return mask[:, :width]


def dense_shares(logits: Tensor, chosen: Tensor) -> Shares:
    """Compare dense attention with a selection.

    Args:
        logits: float32 [n, H, S], scaled; -inf for candidates that a query does not see.
        chosen: bool [n, S].
    """
    weights = logits.softmax(-1)
    empty = weights.isnan().any(-1).any(-1)
    weights = weights.nan_to_num(0.0)
    recall = (weights * chosen.unsqueeze(1)).sum(-1).mean(1)
    top1 = chosen.gather(1, weights.argmax(-1)).float().mean(1)
    mean = weights.mean(1)
    inside = mean * chosen
    share = inside / inside.sum(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    effective = torch.special.entr(share).sum(1).exp()
    recall, top1, effective = (part.masked_fill(empty, torch.nan) for part in (recall.clamp_max(1.0), top1, effective))
    return Shares(recall, top1, effective, mean)


def tied_at_cut(scores: Tensor, positions: Tensor) -> Tensor:
    """int64 [n]: how many candidates have exactly the lowest selected score, where some of them are selected and others
    are not, so that position broke the tie; 0 where the cutoff falls between two different scores.

    Args:
        scores: float32 [n, S]; -inf for candidates that a query does not see.
        positions: int [n, k], the positions selected by these scores.
    """
    chosen = selected_mask(positions, scores.shape[1])
    cut = scores.masked_fill(~chosen, torch.inf).amin(1, keepdim=True)
    level = (scores == cut) & (cut < torch.inf)
    return torch.where((level & ~chosen).any(1), level.sum(1), 0)


def distance_counts(positions: Tensor, own: Tensor, ratio: int = 1) -> Tensor:
    """int64 [DISTANCE_BINS]: the number of selected candidates by their distance from the query.

    Args:
        positions: int [n, k], negative ones are padding.
        own: int [n], the positions of the queries.
        ratio: tokens per candidate.
    """
    distance = (own.unsqueeze(1) - (positions * ratio + ratio - 1))[positions >= 0].double()
    # frexp gives d = m * 2**e with 0.5 <= m < 1, so e is the number of binary digits: the bin.
    return torch.bincount(torch.frexp(distance).exponent.long(), minlength=DISTANCE_BINS)


def visible_counts(own: Tensor, ratio: int = 1) -> Tensor:
    """int64 [DISTANCE_BINS]: the number of candidates visible to the queries at `own`, by distance."""
    edges = torch.tensor([0, *(2**n for n in range(DISTANCE_BINS))], dtype=torch.int64, device=own.device)
    # The number of candidates at or beyond each edge; the last edge is beyond any prompt.
    at_least = (own.long().unsqueeze(1) + 1 - edges).clamp_min(0) // ratio
    return (at_least[:, :-1] - at_least[:, 1:]).sum(0)


def mean_overlap(chosen: Tensor) -> Tensor:
    """float64 [L, L]: intersection over union of two layers' selections, mean over queries.

    Args:
        chosen: bool [L, n, S]; a query for which two layers select nothing counts as 1.
    """
    layers, queries, _ = chosen.shape
    total = torch.zeros(layers, layers, dtype=torch.float64, device=chosen.device)
    for query in range(queries):
        rows = chosen[:, query].double()  # no precision setting rounds float64 products
        both = rows @ rows.T
        count = both.diagonal()
        either = count.unsqueeze(1) + count - both
        total += torch.where(either > 0, both / either.clamp_min(1), 1.0)
    return total / max(queries, 1)


def evenly_spaced(total: int, count: int) -> Tensor:
    """int64: at most `count` evenly spaced numbers below `total`, including the last."""
    if count >= total:
        return torch.arange(total, dtype=torch.int64, device="cpu")
    return (torch.arange(1, count + 1, dtype=torch.float64, device="cpu") * total / count).ceil().long() - 1
