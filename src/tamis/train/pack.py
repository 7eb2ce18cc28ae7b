"""`Pack`: which tokens of a flat batch belong to one request, and what each of them may see."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tamis import checks

INT = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Entries:
    """The compressed entries of a pack's requests, one request after another (V4)."""

    ratio: int
    """Tokens per span."""
    count: int
    """How many entries there are: one for each span that is complete. Entries of a trace are at least as many."""
    longest: int
    """At least how many of them a token sees."""
    spans: Tensor
    """int32 [count], the first token of each entry's span; -1 for entries that nobody sees, which are zeros."""
    before: Tensor
    """int32 [count], the first token of the span before; -1 where a request begins."""
    starts: Tensor
    """int32 [T], the first entry that each token sees."""
    ends: Tensor
    """int32 [T], one past its last: a span is seen from its own last token on."""
    positions: Tensor
    """int32 [count], the position of each entry's first token, at which it is rotated."""

    def slots(self) -> Tensor:
        """int32 [T, longest]: all entries that each token sees, then -1."""
        return _listed(self.starts, self.ends, self.longest)

    @classmethod
    def traced(cls, starts: Tensor, ends: Tensor, ratio: int, longest: int) -> Self:
        """The entries of a batch whose values are unknown, as under torch.compile: from operations on its device alone.

        Args:
            starts: int32 [T], the first row that each token sees.
            ends: int32 [T], one past the last; equal to the start for padding. Requests are in ascending order.
            ratio: tokens per span.
            longest: T is a multiple of it, and no request crosses a multiple of it: the number of columns of a batch.
        """
        tokens, device = len(starts), starts.device
        most, own = longest // ratio, torch.arange(tokens, dtype=torch.int32, device=device)
        count = tokens // max(1, longest) * most
        complete = (ends > starts) & ((ends - starts) % ratio == 0)
        seen = complete.cumsum(0, dtype=torch.int32)
        first = (seen - complete.int())[starts.long()]
        last = torch.where(ends > starts, seen, first)
        # Entry e ends with the first token by which e + 1 spans are complete.
        number = torch.arange(1, count + 1, dtype=torch.int32, device=device)
        end = torch.searchsorted(seen, number)
        known = end < tokens
        end = end.clamp_max(max(0, tokens - 1))
        spans = torch.where(known, own[end] - (ratio - 1), -1)
        positions = torch.where(known, spans - starts[end], 0)
        return cls(ratio, count, most, spans, torch.where(positions > 0, spans - ratio, -1), first, last, positions)


@dataclass(frozen=True, eq=False)
class Pack:
    """The requests of a flat batch of T tokens. Row t of a tensor of rows belongs to token t.

    Made on the host, from host values alone; `to` copies it to a device. Tokens of padding belong to no request: they
    see nothing, and nothing sees them.
    """

    tokens: int
    """T, with padding."""
    first_rows: tuple[int, ...]
    """The row of each request's first token."""
    lengths: tuple[int, ...]
    """The number of tokens of each request."""
    starts: Tensor
    """int32 [T], the first row that each token sees: that of its request's first token."""
    ends: Tensor
    """int32 [T], one past the last row that each token sees, its own; equal to the start for padding."""
    positions: Tensor
    """int32 [T], the position in the request; -1 for padding."""
    request_ids: Tensor
    """int32 [T], the number of the request; -1 for padding."""

    @classmethod
    def of(cls, cu_seqlens: Tensor | Sequence[int]) -> Self:
        """From the boundaries of requests in the batch: 0, then the end of each request, without padding.

        Values of a tensor on a device are copied to the host.
        """
        if isinstance(cu_seqlens, Tensor):
            checks.tensor("cu_seqlens", cu_seqlens, "B", checks.INTS)
            cu_seqlens = cu_seqlens.tolist()
        bounds = [checks.integer("cu_seqlens", bound, low=0) for bound in checks.sequence("cu_seqlens", cu_seqlens)]
        if not bounds or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
            raise checks.refuse("cu_seqlens", "0 and then ascending ends of requests", bounds, "begin with 0")
        return cls._of_requests(bounds[-1], list(pairwise(bounds)))

    @classmethod
    def of_mask(cls, mask: Tensor) -> Self:
        """From a padding mask [B, S], 1 or True for real tokens: every row is one request, padded left or right."""
        found = _host_mask(mask)
        requests = []
        for number, row in enumerate(found):
            real = np.flatnonzero(row)
            if len(real) and real[-1] - real[0] + 1 != len(real):
                received = f"a gap in row {number}"
                raise checks.refuse("mask", "one run of real tokens per row", received, "pack with Pack.of_positions")
            begin = number * found.shape[1]
            requests += [(begin + int(real[0]), begin + int(real[-1]) + 1)] if len(real) else []
        return cls._of_requests(found.size, requests)

    @classmethod
    def of_positions(cls, position_ids: Tensor, mask: Tensor | None = None) -> Self:
        """From `position_ids` [B, S] that start again with every request, and a padding mask of the same shape.

        A request goes on as long as the next token's position is the next position. Positions need not start at 0.
        """
        checks.tensor("position_ids", position_ids, "B S", checks.INTS)
        positions = position_ids.cpu().numpy().astype(np.int64)
        real = np.ones(positions.shape, bool) if mask is None else _host_mask(mask)
        if real.shape != positions.shape:
            raise checks.refuse("mask", f"of shape {list(positions.shape)}", list(real.shape), "pass one per token")
        follows = np.zeros(positions.shape, bool)
        follows[:, 1:] = (positions[:, 1:] == positions[:, :-1] + 1) & real[:, :-1]
        begins = np.flatnonzero(real & ~follows)
        # A request ends where another begins, where padding begins, and at the end of its row.
        last = np.ones(positions.shape, bool)
        last[:, :-1] = ~(real[:, 1:] & follows[:, 1:])
        ends = np.flatnonzero(real & last) + 1
        return cls._of_requests(positions.size, list(zip(begins.tolist(), ends.tolist(), strict=True)))

    @classmethod
    def _of_requests(cls, tokens: int, requests: list[tuple[int, int]]) -> Self:
        checks.integer("tokens", tokens, low=0)
        starts, ends = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
        positions, ids = np.full(tokens, -1, np.int32), np.full(tokens, -1, np.int32)
        for number, (begin, end) in enumerate(requests):
            starts[begin:end], ids[begin:end] = begin, number
            positions[begin:end] = np.arange(end - begin)
            ends[begin:end] = np.arange(begin, end) + 1
        tensors = (torch.from_numpy(values) for values in (starts, ends, positions, ids))
        return cls(tokens, tuple(b for b, _ in requests), tuple(e - b for b, e in requests), *tensors)

    def to(self, device: torch.device | str) -> Self:
        """The same pack with its tensors on a device."""
        names = ("starts", "ends", "positions", "request_ids")
        return replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})

    def window_slots(self, window: int) -> Tensor:
        """int32 [T, window]: the rows of the last `window` tokens up to each token's own, ascending, then -1."""
        checks.integer("window", window, low=1)
        return window_slots(self.starts, self.ends, window)

    def visible_slots(self) -> Tensor:
        """int32 [T, longest request]: all rows that each token sees, then -1, for dense attention."""
        return _listed(self.starts, self.ends, max(self.lengths, default=0))

    def entries(self, ratio: int) -> Entries:
        """The entries of spans of `ratio` tokens. Spans begin with each request and never cross it."""
        checks.integer("ratio", ratio, low=1)
        counts = [length // ratio for length in self.lengths]
        bases, device = np.cumsum([0, *counts]), self.starts.device
        # Padding has request -1, which takes the base at the end.
        base = torch.from_numpy(np.append(bases[:-1], 0).astype(np.int32)).to(device)
        starts = base[self.request_ids.long()]
        ends = starts + torch.where(self.positions >= 0, (self.positions + 1) // ratio, 0).int()
        places = np.concatenate([np.zeros(0, np.int64), *(np.arange(count) * ratio for count in counts)])
        spans = places + np.repeat(np.asarray(self.first_rows, np.int64), counts)
        before = np.where(places > 0, spans - ratio, -1)
        on_device = (torch.from_numpy(x.astype(np.int32)).to(device) for x in (spans, before, places))
        first, previous, positions = on_device
        return Entries(ratio, int(bases[-1]), max(counts, default=0), first, previous, starts, ends, positions)

    def slots_of(self, positions: Tensor) -> Tensor:
        """Rows int32 [T, K] of positions int32 [T, K] in each token's request; -1 for what the token does not see:
        negative positions, later ones than its own, and everything for padding."""
        checks.tensor("positions", positions, "T K", (torch.int32,), T=self.tokens, device=self.starts.device)
        known = (positions >= 0) & (positions < (self.ends - self.starts).unsqueeze(1))
        return torch.where(known, positions + self.starts.unsqueeze(1), -1)


def window_slots(starts: Tensor, ends: Tensor, window: int) -> Tensor:
    """int32 [T, window]: the last rows of those from each start to before its end, ascending, then -1."""
    return _listed(torch.maximum(starts, ends - window), ends, window)


def _host_mask(mask: Tensor) -> NDArray[np.bool_]:
    allowed = (torch.bool, *checks.INTS, *checks.FLOATS)
    checks.tensor("mask", mask, "B S", allowed, remedy="pass a padding mask, 1 for real tokens")
    found: NDArray[np.bool_] = (mask.detach() != 0).cpu().numpy()
    return found


def _listed(starts: Tensor, ends: Tensor, width: int) -> Tensor:
    """int32 [T, width]: the numbers from each start to before its end, then -1."""
    column = torch.arange(width, dtype=torch.int32, device=starts.device)
    listed = starts.unsqueeze(1) + column
    return torch.where(listed < ends.unsqueeze(1), listed, -1)
