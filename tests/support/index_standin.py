"""A step of a lightning indexer as an engine sees it, and what an exact indexer selects, by rules of its own.

All numbers are small multiples of powers of two, so that every score is exact in any order of summation. Equal scores
are common, and only the rule for ties decides between them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import engine_standin as engine
import torch
from seeds import seeded
from torch import Tensor

from tamis.arithmetic import ceil_div

HEADS, DIM, PAGE = 4, 128, 64
ROW = DIM + 4
"""Bytes of a key: e4m3 values and a float32 scale."""


@dataclass(frozen=True, eq=False)
class IndexStep:
    """Keys of each request, and queries and weights of the new tokens."""

    lengths: tuple[int, ...]
    """Context and new tokens."""
    queries: tuple[int, ...]
    """New tokens."""
    keys: tuple[Tensor, ...]
    """float32 [length, DIM] per request, which e4m3 holds exactly under a scale of 1."""
    q: Tensor
    """e4m3 [tokens, heads, DIM]"""
    weights: Tensor
    """float32 [tokens, heads]"""
    table: Tensor
    """int32 [requests, pages], shuffled; page 0 is nobody's."""

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    @property
    def pages(self) -> int:
        return int(self.table.max()) + 1

    def slots(self, request: int) -> Tensor:
        """Where the keys of a request are."""
        position = torch.arange(self.lengths[request])
        return self.table[request].long()[position // PAGE] * PAGE + position % PAGE

    def new_slots(self) -> Tensor:
        return torch.cat([self.slots(r)[n - q :] for r, (n, q) in enumerate(self._sizes())])

    def new_keys(self) -> Tensor:
        return torch.cat([k[n - q :] for k, (n, q) in zip(self.keys, self._sizes(), strict=True)])

    def _sizes(self) -> list[tuple[int, int]]:
        return list(zip(self.lengths, self.queries, strict=True))

    def common(self, padded_tokens: int | None = None, padded_requests: int | None = None) -> SimpleNamespace:
        """The engine's record of the step."""
        return engine.common(
            self.lengths,
            self.queries,
            self.table,
            self.new_slots(),
            padded_tokens=padded_tokens,
            padded_requests=padded_requests,
        )

    def storage(self, *, new: bool) -> Tensor:
        """Pages with the keys of all tokens, or of all but the new ones, whose bytes are then those of NaN."""
        pages = torch.full((self.pages, PAGE, ROW), 0xFF, dtype=torch.uint8)
        for request, keys in enumerate(self.keys):
            known = len(keys) if new else len(keys) - self.queries[request]
            write_keys(keys[:known], pages, self.slots(request)[:known])
        return pages

    def selected(self, k: int, ratio: int = 1) -> Tensor:
        """int32 [tokens, k]: by score, then by position; ascending, then -1."""
        found = torch.full((self.tokens, k), -1, dtype=torch.int32)
        token = 0
        for keys, length, count in zip(self.keys, self.lengths, self.queries, strict=True):
            for position in range(length - count, length):
                q, weights = self.q[token].double(), self.weights[token].double()
                scores = ((keys[: (position + 1) // ratio].double() @ q.T).clamp_min(0) * weights).sum(1)
                best = sorted(range(len(scores)), key=lambda at: (-float(scores[at]), at))[:k]
                found[token, : len(best)] = torch.tensor(sorted(best), dtype=torch.int32)
                token += 1
        return found


def make_index_step(lengths: Sequence[int], queries: Sequence[int], heads: int = HEADS) -> IndexStep:
    """Random numbers of few values."""
    random = seeded(sum(lengths) + 17 * sum(queries))

    def few(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, generator=random).float()

    needed = [ceil_div(n, PAGE) for n in lengths]
    table = torch.zeros(len(lengths), max(needed), dtype=torch.int32)
    for request, mine in enumerate((1 + torch.randperm(sum(needed), generator=random)).split(needed)):
        table[request, : len(mine)] = mine
    keys = tuple(few(n, DIM) for n in lengths)
    total = sum(queries)
    # A largest magnitude of 448 gives a scale of 1, whatever the rest of the key is.
    for mine in keys:
        mine[:, 0] = 448.0
    q = few(total, heads, DIM)
    q[..., 0] = 0.0
    weights = torch.randint(-4, 9, (total, heads), generator=random) / 8
    return IndexStep(tuple(lengths), tuple(queries), keys, q.to(torch.float8_e4m3fn), weights, table)


def write_keys(keys: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write keys as vLLM documents its index cache: in a page all values in e4m3, then a float32 scale for each, the
    smallest power of two under which the key fits. Keys with a negative slot are skipped."""
    flat = pages.view(pages.shape[0], -1)
    for key, slot in zip(keys.float(), slots.tolist(), strict=True):
        if slot < 0:
            continue
        largest = max(float(key.abs().max()), 1e-4)
        scale = torch.tensor(2.0 ** float(torch.tensor(largest / 448.0).log2().ceil()))
        page, row = divmod(slot, PAGE)
        flat[page, row * DIM : (row + 1) * DIM] = (key / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        start = PAGE * DIM + 4 * row
        flat[page, start : start + 4] = scale.view(1).view(torch.uint8)
