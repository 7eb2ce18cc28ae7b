"""Ranks that hold a part of every request's keys select from their own, and merge what they found exactly.

A candidate is one number of 64 bits: its score above its position, so that the larger of two is the one with the higher
score, or with the lower position if the scores are equal. No two candidates are equal, and so the k largest of all
ranks are the same set whatever sorts them. A position among the k best of all keys is among the k best of its rank's.
"""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.shard import Shard
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepared import run_remembered

NOTHING = -(2**63)
"""The candidate of an empty place. Its position is the highest number of 31 bits, which no key can have."""


def select_candidates(call: IndexTopk, shard: Shard) -> Tensor:
    """The candidates of this rank, int64 [T, k]. Lengths, keys and block table are those of the rank."""
    shape, device = (call.q.shape[0], call.k), call.q.device
    out = torch.empty(shape, dtype=torch.int32, device=device)
    scores = torch.empty(shape, dtype=torch.float32, device=device)
    run_remembered(call._replace(out=out, scores=scores))
    return encode(scores, shard.global_positions(out), out < 0)


def encode(scores: Tensor, positions: Tensor, absent: Tensor) -> Tensor:
    """Candidates int64 from scores float32, positions int32 and places without a candidate."""
    # Adding 0.0 makes -0.0 positive. Negative floats are ordered by the complement of their lower bits.
    bits = (scores + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ checks.INT32_MAX, bits)
    return ((ordered.long() << 32) + (checks.INT32_MAX - positions)).masked_fill_(absent, NOTHING)


def merge(every: Tensor, out: Tensor) -> None:
    """Write the positions of the k best candidates to `out`, int32 [T, k], ascending, then -1.

    Args:
        every: int64 [ranks, T, k], the candidates of all ranks.
        out: int32 [T, k], contiguous.
    """
    ranks, tokens, k = every.shape
    best = every.transpose(0, 1).reshape(tokens, ranks * k).topk(k, dim=1, sorted=False).values
    positions = (checks.INT32_MAX - (best & checks.INT32_MAX)).int().sort(dim=1).values
    out.copy_(positions.masked_fill_(positions == checks.INT32_MAX, -1))


def merge_bytes(k: int, ranks: int) -> int:
    """Bytes per token of a merge at worst: candidates of all ranks twice, their own scores, indices and positions, and
    what sorting the selected ones takes."""
    return k * (16 * ranks + 8 + 8 + 8 + 4 + 16 + 32)
