"""The indexer's losses and their gradients, in plain torch: the definition of its training.

The score of key s for token t is I[t, s] = sum over h of w[t, h] * relu(y), y = q[t, h] . k[s]. With pi the softmax of
the scores over the columns that count, and P the target, the loss is the sum over t of u[t] * sum over s of
P * log(P / pi), and with m[t] the sum of P over s (1, or 0 for a token without a target)

    dI = u[t] * (m[t] * pi - P)
    dw[t, h] = sum over s of dI * relu(y)
    dq[t, h] = sum over s of dI * w[t, h] * [y > 0] * k[s]
    dk[s] = sum over t and h of dI * w[t, h] * [y > 0] * q[t, h]
"""

import torch
from torch import Tensor

from tamis.arithmetic import float32_products
from tamis.cache.selection import Rows
from tamis.ops.attention.operations import accumulator
from tamis.ops.index.loss_operations import IndexLoss, WarmupLoss
from tamis.ops.rows.torch_rows import Gatherer, RowSums, multiply, padded, widened

WORKING_BYTES = 32 * 2**20
"""Gathered keys, or logits of all heads, held at once."""
QUERY_BLOCK, KEY_BLOCK = 128, 512
"""Tokens and keys of one block of the dense loss. They are fixed, so that the order of sums is."""


def index_loss(call: IndexLoss) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and its gradients; see `IndexLoss.fake`."""
    q, keys, (tokens, heads, dim), columns = call.index_q, call.index_keys, call.index_q.shape, call.slots.shape[1]
    dtype, wide = accumulator(q), _product_dtype(q)
    losses = torch.zeros(tokens, dtype=dtype, device=q.device)
    dq, dw = (torch.zeros(x.shape if call.gradients else 0, dtype=x.dtype, device=q.device) for x in (q, call.weights))
    sums = RowSums(keys if call.gradients else keys[:0], dtype, deterministic=call.deterministic)
    step = max(1, WORKING_BYTES // max(1, columns * max(heads, padded(dim, wide)) * wide.itemsize))
    gather = Gatherer(Rows(keys, call.slots), wide)
    for start in range(0, tokens if columns else 0, step):
        some = slice(start, min(start + step, tokens))
        found, slots, valid = gather(some.start, some.stop)
        factors = call.weights[some].to(wide)
        query = widened(q[some], wide)
        y = multiply(query, found.transpose(1, 2), alone=call.deterministic)
        relu = y.clamp_min(0)
        scores = multiply(factors.unsqueeze(1), relu, alone=call.deterministic).squeeze(1)
        scores = scores.masked_fill_(~valid, -torch.inf)
        target = call.target[some].to(wide).masked_fill(~valid, 0.0)
        unit = torch.ones(1, dtype=wide, device=q.device)
        unit = unit if call.token_weights is None else call.token_weights[some].to(wide)
        # A token without a target has no loss, even if it sees nothing and its softmax is NaN.
        mass = target.sum(1, keepdim=True)
        log_pi = scores.log_softmax(1).masked_fill_(~valid, 0.0)
        losses[some] = unit * (torch.xlogy(target, target) - target * log_pi).sum(1)
        if not call.gradients:
            continue
        slopes = (mass * log_pi.exp() - target).masked_fill_(~valid, 0.0) * unit.unsqueeze(1)
        dw[some] = multiply(relu, slopes.unsqueeze(2), alone=call.deterministic).squeeze(2)
        dy = (factors.unsqueeze(2) * slopes.unsqueeze(1)).masked_fill_(y <= 0, 0.0)
        dq[some] = multiply(dy, found, alone=call.deterministic)[..., :dim]
        pairs = multiply(dy.transpose(1, 2), query, alone=call.deterministic)
        sums.add(slots.flatten(), pairs.flatten(0, 1))
    dk = sums.result().to(keys.dtype) if call.gradients else keys.new_zeros(0, dtype=keys.dtype)
    return losses.sum(), dq, dk, dw


def warmup_loss(call: WarmupLoss) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and its gradients; see `WarmupLoss.fake`. Two passes over blocks of tokens and keys: the first sums up
    both distributions, the second computes them again, compares them, and adds to the gradients."""
    q, keys, tokens = call.index_q, call.index_keys, call.index_q.shape[0]
    dtype, wide, inputs = accumulator(q), _product_dtype(q), (call.index_q, call.index_keys, call.weights)
    losses = torch.zeros(tokens, dtype=dtype, device=q.device)
    # Gradients are summed in the accumulator's dtype and rounded once.
    dq, dk, dw = (torch.zeros(x.shape if call.gradients else 0, dtype=wide, device=q.device) for x in inputs)
    for start in range(0, tokens, QUERY_BLOCK):
        block = _Block(call, start, wide)
        block.sum_up()
        for first in block.first_keys:
            target, log_pi, valid = block.compare(first)
            some = slice(start, start + len(target))
            losses[some] += block.unit * (torch.xlogy(target, target) - target * log_pi).sum(1)
            if call.gradients:
                slopes = (block.mass * log_pi.exp() - target).masked_fill_(~valid, 0.0) * block.unit.unsqueeze(1)
                block.add_gradients(slopes, first, dq[some], dk, dw[some])
    return losses.sum(), dq.to(q.dtype), dk.to(keys.dtype), dw.to(call.weights.dtype)


class _Block:
    """Some tokens of the dense loss."""

    def __init__(self, call: WarmupLoss, start: int, wide: torch.dtype) -> None:
        self._call, self._wide, device = call, wide, call.index_q.device
        some = slice(start, start + QUERY_BLOCK)
        self._query, self._weights = call.index_q[some].detach().to(wide), call.weights[some].detach().to(wide)
        self._attention_query = call.q[some].detach().to(wide)
        total = len(call.index_keys)
        self._starts = call.starts[some].long().clamp_min(0).unsqueeze(1)
        self._ends = call.ends[some].long().clamp_max(total).unsqueeze(1)
        first, last = 0, total
        if device.type == "cpu":
            # On a device this would wait for the values, so all blocks of keys are visited there.
            seen = self._starts < self._ends
            first = int(self._starts[seen].min()) if bool(seen.any()) else 0
            last = int(self._ends[seen].max()) if bool(seen.any()) else 0
        # Blocks start at multiples of their size, whichever tokens see them.
        self.first_keys = range(first // KEY_BLOCK * KEY_BLOCK, last, KEY_BLOCK)
        tokens = len(self._query)
        self.unit = torch.ones(tokens, dtype=wide, device=device)
        if call.token_weights is not None:
            self.unit = call.token_weights[some].to(wide)
        shape = (tokens, call.q.shape[1])
        self._lse = torch.full(shape, -torch.inf, dtype=wide, device=device)
        if call.lse is not None:
            self._lse = call.lse[some].detach().to(wide)
        self._norm = torch.zeros(tokens, 1, dtype=wide, device=device)
        self._scores_lse = torch.full((tokens,), -torch.inf, dtype=wide, device=device)

    @property
    def mass(self) -> Tensor:
        """The sum of each token's target [t, 1]: 1, or 0 for a token that sees nothing."""
        return (self._norm > 0).to(self._wide)

    def sum_up(self) -> None:
        """The first pass: the denominators of both distributions."""
        if self._call.lse is None:
            for first in self.first_keys:
                logits = self._logits(first)
                self._lse = torch.logaddexp(self._lse, logits.logsumexp(2))
        for first in self.first_keys:
            self._norm += self._probabilities(first).sum(1, keepdim=True)
            self._scores_lse = torch.logaddexp(self._scores_lse, self._scores(first)[1].logsumexp(1))

    def compare(self, first: int) -> tuple[Tensor, Tensor, Tensor]:
        """Target, logarithm of the indexer's probability (0 for hidden keys), and which keys a token sees: [t, n]."""
        valid = self._valid(first)
        target = self._probabilities(first) / self._norm.masked_fill(self._norm == 0, 1.0)
        log_pi = self._scores(first)[1] - self._scores_lse.unsqueeze(1)
        return target, log_pi.masked_fill_(~valid, 0.0), valid

    def add_gradients(self, slopes: Tensor, first: int, dq: Tensor, dk: Tensor, dw: Tensor) -> None:
        """Add what the gradients of a block's scores [t, n] give to those of queries, keys and weights."""
        keys = self._keys(first)
        y, _ = self._scores(first)
        dw += torch.bmm(y.clamp_min(0), slopes.unsqueeze(2)).squeeze(2)
        dy = (self._weights.unsqueeze(2) * slopes.unsqueeze(1)).masked_fill_(y <= 0, 0.0)
        dq += dy @ keys
        dk[first : first + len(keys)] += dy.flatten(0, 1).T @ self._query.flatten(0, 1)

    def _keys(self, first: int) -> Tensor:
        """Index keys [n, D_I] of a block; zeros where no token sees them, since those may hold NaN."""
        keys = self._call.index_keys[first : first + KEY_BLOCK].detach().to(self._wide)
        return keys.masked_fill(~self._valid(first).any(0).unsqueeze(1), 0.0)

    def _valid(self, first: int) -> Tensor:
        last = min(first + KEY_BLOCK, len(self._call.index_keys))
        column = torch.arange(first, last, dtype=torch.int64, device=self._query.device)
        return (column >= self._starts) & (column < self._ends)

    def _scores(self, first: int) -> tuple[Tensor, Tensor]:
        """Products [t, H_I, n] and scores [t, n], -inf for hidden keys."""
        y = self._query @ self._keys(first).T
        scores = torch.bmm(self._weights.unsqueeze(1), y.clamp_min(0)).squeeze(1)
        return y, scores.masked_fill_(~self._valid(first), -torch.inf)

    def _logits(self, first: int) -> Tensor:
        """Attention's logits [t, H, n], -inf for hidden keys."""
        keys = self._call.keys[first : first + KEY_BLOCK].detach().to(self._wide)
        query = self._attention_query
        logits = query @ keys.T if keys.dim() == 2 else torch.einsum("thd,nhd->thn", query, keys)
        return (logits * self._call.scale).masked_fill_(~self._valid(first).unsqueeze(1), -torch.inf)

    def _probabilities(self, first: int) -> Tensor:
        """Attention's probabilities [t, n], summed over heads."""
        none = self._lse.isinf()
        logits = self._logits(first) - self._lse.masked_fill(none, 0.0).unsqueeze(2)
        return logits.exp().masked_fill_(none.unsqueeze(2), 0.0).sum(1)


def _product_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else float32_products(q.device)
