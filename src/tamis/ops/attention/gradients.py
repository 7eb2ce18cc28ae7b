"""Attention over rows of tensors, its gradients and the indexer's target, in plain torch: the definition of training.

For token t, head h and column j with row r = slots[t, j], over valid columns only:

    z = scale * q[t, h] . row[r]        L = logsumexp over j of z        p = exp(z - L)
    g = sigmoid(L - sink[h])            out = g * sum over j of p * row[r, :V]

and with dO and dL, the gradients of out and L:

    delta = sum over v of dO * out      dz = p * (g * (dO . row[r, :V]) + dL - g * delta)
    dq = scale * sum over j of dz * row[r]
    drow[r] = sum over the (t, j) that chose r, sum over h of scale * dz * q + g * p * dO (in the first V columns)
    dsink[h] = -sum over t of delta * sigmoid(sink[h] - L)

This form is finite for any sink; with one exponential against logaddexp(L, sink) it would divide by g.
"""

import torch
from torch import Tensor

from tamis.arithmetic import float32_products
from tamis.cache.selection import Rows
from tamis.ops.attention.operations import accumulator
from tamis.ops.attention.row_operations import AttendRows, AttendRowsBackward, IndexTarget
from tamis.ops.rows.torch_rows import Gatherer, RowSums, multiply, padded, widened

WORKING_BYTES = 32 * 2**20
"""Rows held at once: small enough to stay in the last-level cache, large enough for full matrix speed."""


def attend_rows(call: AttendRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output, lse, max_logits and the rest of the output; see `AttendRows.fake`."""
    q, value_dim, (tokens, heads, _) = call.q, call.value_dim, call.q.shape
    dtype, wide = accumulator(q), _product_dtype(q)
    out = torch.zeros(tokens, heads, value_dim, dtype=q.dtype, device=q.device)
    rest = torch.zeros_like(out) if call.has_rest else out.new_zeros(0, dtype=q.dtype)
    lse = torch.full((tokens, heads), -torch.inf, dtype=dtype, device=q.device)
    max_logits = torch.full_like(lse, -torch.inf)
    gather = _Gather(q, call.selections, deterministic=call.deterministic)
    for start, end in _chunks(q, call.selections):
        keys, _, valid = gather(start, end)
        if keys.shape[1] == 0:
            continue
        logits = multiply(widened(q[start:end], wide), keys.transpose(1, 2), alone=call.deterministic) * call.scale
        logits = logits.masked_fill_(~valid.unsqueeze(1), -torch.inf)
        largest = logits.amax(-1)
        # An empty row has a maximum of -inf; subtracting 0 instead keeps its weights at exp(-inf) = 0.
        weights = torch.exp(logits - largest.masked_fill(largest == -torch.inf, 0.0).unsqueeze(-1))
        total = weights.sum(-1)
        found = multiply(weights, keys, alone=call.deterministic)[..., :value_dim]
        found = found / total.masked_fill(total == 0, 1.0).unsqueeze(-1)
        seen = torch.where(total > 0, largest + total.log(), largest)
        found = (found * _share(seen, call.sink).unsqueeze(-1)).to(dtype)
        out[start:end], lse[start:end], max_logits[start:end] = found, seen, largest
        if call.has_rest:
            rest[start:end] = found - out[start:end].to(dtype)
    return out, lse, max_logits, rest


def attend_rows_backward(call: AttendRowsBackward) -> tuple[Tensor, list[Tensor], Tensor]:
    """Gradients of queries, rows and sink; see `AttendRowsBackward.fake`."""
    q, value_dim, dtype, wide = call.q, call.out.shape[2], accumulator(call.q), _product_dtype(call.q)
    dq = torch.zeros(q.shape if call.q_wanted else 0, dtype=q.dtype, device=q.device)
    mode = call.deterministic
    sums = [RowSums(s.rows, dtype, deterministic=mode) for s in call.selections if call.rows_wanted]
    deltas = torch.zeros_like(call.lse)
    gather = _Gather(q, call.selections, deterministic=mode)
    for start, end in _chunks(q, call.selections):
        keys, slots, valid = gather(start, end)
        if keys.shape[1] == 0:
            continue
        valid, lse = valid.unsqueeze(1), call.lse[start:end].to(wide)
        empty, share = lse == -torch.inf, _share(lse, call.sink)
        query = widened(q[start:end], wide)
        logits = multiply(query, keys.transpose(1, 2), alone=mode) * call.scale
        p = torch.exp(logits - lse.masked_fill(empty, 0.0).unsqueeze(-1)).masked_fill_(~valid, 0.0)
        constant = torch.zeros_like(lse) if call.dlse is None else call.dlse[start:end].to(wide)
        # The gradient of the output, times the sink's share and as wide as a row.
        dout = torch.zeros_like(query)
        if call.dout is not None:
            dout[..., :value_dim] = call.dout[start:end]
            whole = call.out[start:end].to(wide)
            whole = whole + call.rest[start:end] if call.rest.numel() else whole
            delta = (dout[..., :value_dim] * whole).sum(-1).masked_fill_(empty, 0.0)
            deltas[start:end] = delta
            constant = constant - share * delta
            dout *= share.unsqueeze(-1)
        dz = multiply(dout, keys.transpose(1, 2), alone=mode) + constant.unsqueeze(-1)
        dz = (p * dz).masked_fill_(~valid, 0.0) * call.scale
        if call.q_wanted:
            dq[start:end] = multiply(dz, keys, alone=mode)[..., : q.shape[2]]
        if call.rows_wanted:
            drows = multiply(dz.transpose(1, 2), query, alone=mode)
            drows = drows + multiply(p.transpose(1, 2), dout, alone=mode)
            widths = [found.shape[1] for found in slots]
            for one, found, part in zip(sums, slots, drows.split(widths, dim=1), strict=True):
                one.add(found.flatten(), part.flatten(0, 1))
    return dq, _row_gradients(call, sums), _sink_gradient(call, deltas)


def index_target(call: IndexTarget) -> Tensor:
    """Probabilities of the selection's columns, summed over heads; see `IndexTarget.fake`."""
    (selection,), q, wide = call.selection, call.q, _product_dtype(call.q)
    found = torch.zeros(selection.slots.shape, dtype=accumulator(q), device=q.device)
    gather = Gatherer(selection, wide)
    for start, end in _chunks(q, call.selection):
        keys, _, valid = gather(start, end)
        if keys.shape[1] == 0:
            continue
        lse = _joint_lse(call.lse[start:end].to(wide), call.sink)
        # Where nothing is valid, or the sink takes everything, no row has a probability.
        none = ~lse.isfinite()
        logits = multiply(widened(q[start:end], wide), keys.transpose(1, 2), alone=True) * call.scale
        p = torch.exp(logits - lse.masked_fill(none, 0.0).unsqueeze(-1)).masked_fill_(none.unsqueeze(-1), 0.0)
        found[start:end] = p.sum(1).masked_fill_(~valid, 0.0)
    if call.normalise:
        total = found.sum(1, keepdim=True)
        found /= total.masked_fill_(total == 0, 1.0)
    return found


def _product_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else float32_products(q.device)


def _chunks(q: Tensor, selections: list[Rows]) -> list[tuple[int, int]]:
    tokens, _, width = q.shape
    wide = _product_dtype(q)
    columns = sum(s.slots.shape[1] for s in selections)
    step = max(1, WORKING_BYTES // max(1, columns * padded(width, wide) * wide.itemsize))
    return [(start, min(start + step, tokens)) for start in range(0, tokens, step)]


class _Gather:
    """Reads the rows of all selections, some tokens at a time."""

    def __init__(self, q: Tensor, selections: list[Rows], *, deterministic: bool) -> None:
        # Trimming saves time where short contexts leave most of a wide selection empty. On a device it would wait for
        # the values, and the bits of a token must not depend on the others' lengths.
        trim = not deterministic and q.device.type == "cpu"
        self._all = [Gatherer(selection, _product_dtype(q), trim=trim) for selection in selections]

    def __call__(self, start: int, end: int) -> tuple[Tensor, list[Tensor], Tensor]:
        """Rows [t, K, width] of tokens start..end, row numbers of each selection, and which columns count [t, K]."""
        keys, slots, valid = zip(*(one(start, end) for one in self._all), strict=True)
        if len(keys) == 1:
            return keys[0], list(slots), valid[0]
        return torch.cat(keys, dim=1), list(slots), torch.cat(valid, dim=1)


def _share(lse: Tensor, sink: Tensor | None) -> Tensor:
    """The share of the softmax that the sink leaves to the rows: 1 without a sink, 0 where there are no rows.

    torch.sigmoid and torch.logaddexp compute the last few numbers of a tensor by other code than the rest, so that bits
    would depend on the size of the batch; exponentials and logarithms do not.
    """
    share = torch.ones_like(lse) if sink is None else 1 / (1 + torch.exp(sink.to(lse.dtype) - lse))
    return share.masked_fill_(lse == -torch.inf, 0.0)


def _joint_lse(lse: Tensor, sink: Tensor | None) -> Tensor:
    """The lse of rows and sink; not finite where there is neither, or where the sink is infinite."""
    if sink is None:
        return lse
    logit = sink.to(lse.dtype)
    largest = torch.maximum(lse, logit)
    return largest + torch.log1p(torch.exp(torch.minimum(lse, logit) - largest))


def _row_gradients(call: AttendRowsBackward, sums: list[RowSums]) -> list[Tensor]:
    if not call.rows_wanted:
        return [s.rows.new_zeros(0, dtype=call.q.dtype) for s in call.selections]
    return [one.result().to(call.q.dtype) for one in sums]


def _sink_gradient(call: AttendRowsBackward, deltas: Tensor) -> Tensor:
    if call.sink is None:
        return deltas.new_zeros(0, dtype=deltas.dtype)
    # An empty row has no share in the sink's gradient; its delta is 0, and -inf - -inf would be NaN.
    lse = call.lse.masked_fill(call.lse == -torch.inf, 0.0)
    return -(deltas / (1 + torch.exp(lse - call.sink))).sum(0)
