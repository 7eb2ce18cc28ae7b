"""Pooling of packed requests' tokens and its gradients, in plain torch: the definition of the compressor's training.

Per channel of an entry, over the tokens j of its span (if they overlap, the first channels of the span before and
the second channels of its own): wt = softmax over j of score + bias[place of j], y = sum over j of wt * value, and

    dvalue = wt * dy        dscore = wt * (value - y) * dy        dbias[place] = sum over entries of dscore

Every token and channel belongs to at most one entry, so nothing is added up but the bias's gradient. An entry without a
span is zeros and has no gradient.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tamis.ops.attention.operations import accumulator
from tamis.ops.compress.row_operations import CompressRows, CompressRowsBackward

WORKING_BYTES = 32 * 2**20
"""Values of some entries' tokens that are read at once."""


def compress_rows(call: CompressRows) -> Tensor:
    """Entries [E, D]; see `CompressRows.fake`."""
    entries = torch.zeros(len(call.spans), call.width, dtype=accumulator(call.values), device=call.values.device)
    for some, members in _chunks(call, call.width):
        entries[some] = (members.weights * members.values).sum(1)
    return entries


def compress_rows_backward(call: CompressRowsBackward) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of values, scores and bias; see `CompressRowsBackward.fake`."""
    width = call.dentries.shape[1]
    dvalues, dscores = torch.zeros_like(call.values), torch.zeros_like(call.scores)
    dbias = torch.zeros(call.bias.shape, dtype=accumulator(call.values), device=call.values.device)
    for some, members in _chunks(call, width):
        slope = call.dentries[some].unsqueeze(1)
        pooled = (members.weights * members.values).sum(1, keepdim=True)
        by_value, by_score = members.weights * slope, members.weights * (members.values - pooled) * slope
        for set_number, tokens in enumerate(members.tokens):
            own = slice(set_number * len(call.bias), (set_number + 1) * len(call.bias))
            channels = slice(set_number * width, (set_number + 1) * width)
            known = (tokens >= 0).all(1)
            dvalues[tokens[known].flatten(), channels] = by_value[known, own].flatten(0, 1).to(dvalues.dtype)
            dscores[tokens[known].flatten(), channels] = by_score[known, own].flatten(0, 1).to(dscores.dtype)
            dbias[:, channels] += by_score[:, own].sum(0)
    return dvalues, dscores, dbias.to(call.bias.dtype)


class _Members(NamedTuple):
    """The tokens that some entries are pooled from: `ratio` of them, or twice as many where spans overlap."""

    tokens: list[Tensor]
    """int64 [e, ratio] for each set of channels, -1 before the request."""
    values: Tensor
    """[e, S, D], zeros before the request."""
    weights: Tensor
    """[e, S, D], zeros before the request and for an entry without a span."""


def _chunks(call: CompressRows | CompressRowsBackward, width: int) -> Iterator[tuple[slice, _Members]]:
    ratio, dtype, device = len(call.bias), accumulator(call.values), call.values.device
    place = torch.arange(ratio, dtype=torch.int64, device=device)
    firsts = [call.spans] if call.before is None else [call.before, call.spans]
    step = max(1, WORKING_BYTES // (len(firsts) * ratio * width * dtype.itemsize))
    for start in range(0, len(call.spans), step):
        some = slice(start, min(start + step, len(call.spans)))
        sets = [first[some].long().unsqueeze(1) for first in firsts]
        tokens = [torch.where(first >= 0, first + place, -1) for first in sets]
        values, scores = [], []
        for number, found in enumerate(tokens):
            channels = slice(number * width, (number + 1) * width)
            absent = (found < 0).unsqueeze(2)
            at = found.clamp_min(0)
            # Absent tokens read some row, which may hold NaN, and 0 * NaN would make the whole sum NaN.
            values.append(call.values[:, channels][at].to(dtype).masked_fill_(absent, 0.0))
            biased = call.scores[:, channels][at].to(dtype) + call.bias[:, channels].to(dtype)
            scores.append(biased.masked_fill_(absent, -torch.inf))
        # The softmax of an entry without a span is over nothing.
        weights = torch.cat(scores, dim=1).softmax(1).masked_fill_((sets[-1] < 0).unsqueeze(2), 0.0)
        yield some, _Members(tokens, torch.cat(values, dim=1), weights)
