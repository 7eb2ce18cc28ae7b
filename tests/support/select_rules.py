"""The rules of stage `select`, token by token in plain Python, and random steps to compare with."""

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from seeds import seeded
from torch import Tensor


def int32(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


@dataclass
class Expected:
    """Rows and lengths as lists."""

    rows: list[list[int]] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    visible: list[int] = field(default_factory=list)
    completed: list[int] = field(default_factory=list)

    def add(self, row: list[int], width: int, length: int) -> None:
        self.rows.append(row + [-1] * (width - len(row)))
        self.lengths.append(length)


@dataclass
class RandomStep:
    """Requests with some new tokens, padding, absent pages, and tokens without a slot."""

    queries: list[int]
    lengths: list[int]
    positions: Tensor
    ids: Tensor
    own: Tensor
    table: Tensor
    chosen: Tensor
    page_size: int
    window: int
    width: int
    decodes: int
    """Decode tokens."""

    @property
    def tokens(self) -> int:
        return len(self.positions)

    def slot(self, request: int, position: int, page_size: int | None = None) -> int:
        size = page_size or self.page_size
        if position < 0 or position // size >= self.table.shape[1]:
            return -1
        page = int(self.table[request, position // size])
        return page * size + position % size if page >= 0 else -1

    def real(self, token: int) -> bool:
        known = 0 <= int(self.ids[token]) < len(self.lengths)
        return int(self.positions[token]) >= 0 and known and int(self.own[token]) >= 0

    def mixed_inputs(self, form: str) -> dict[str, Any]:
        decodes = self.decodes
        window = torch.randint(-1, 40, (decodes, self.window + 1), dtype=torch.int32)
        entries = None if form == "window" else self.chosen[:decodes]
        lengths = int32([int((row >= 0).sum()) for row in self.chosen[:decodes]]) if form == "slots" else None
        self.decode_window = window
        return {
            "decode_swa_indices": window,
            "decode_compressed_indices": entries,
            "decode_compressed_topk_lens": lengths,
            "prefill_topk_indices": self.chosen[decodes:],
            "query_start_loc": int32([0, *self.queries]).cumsum(0, dtype=torch.int32),
            "seq_lens": int32(self.lengths),
            "token_to_req_indices": self.ids,
            "swa_block_table": self.table,
            "compressed_block_table": None if form == "window" else self.table,
        }

    def mixed_options(self, form: str) -> dict[str, Any]:
        if form != "numbers":
            return {}
        valid = self.own[: self.decodes] >= 0
        return {"decode_compressed_indices_are_local": True, "decode_is_valid_token": valid}


@st.composite
def random_step(draw: Any, prefill: bool = False) -> RandomStep:
    """With `prefill`, all tokens are real and stand in the order of their requests."""
    requests = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 60)), min_size=1, max_size=4))
    queries, lengths = [q for q, _ in requests], [q + c for q, c in requests]
    random = seeded(draw(st.integers(0, 2**31)))

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random, dtype=torch.int32)

    page_size = draw(st.sampled_from([1, 2, 16, 64]))
    positions = [n - q + i for q, n in zip(queries, lengths, strict=True) for i in range(q)]
    ids = [r for r, q in enumerate(queries) for _ in range(q)]
    pad = 0 if prefill else draw(st.integers(0, 3))
    total = len(positions) + pad
    decode_requests = draw(st.integers(0, len(queries)))
    own = ints(-1, 2, total).long() if draw(st.booleans()) else torch.ones(total, dtype=torch.int64)
    return RandomStep(
        queries,
        lengths,
        int32(positions + [-1] * pad),
        int32(ids + [0] * pad) if draw(st.booleans()) or prefill else ints(-1, len(queries) + 1, total),
        own,
        ints(-1, 50, len(queries), draw(st.integers(1, 5)) if not prefill else 70),
        ints(-1, 20, total, draw(st.integers(0, 6))),
        page_size,
        window=draw(st.integers(1, 20)),
        width=draw(st.integers(20, 24)),
        decodes=sum(queries[:decode_requests]),
    )


def window_rows(step: RandomStep) -> Expected:
    expected = Expected()
    for token in range(step.tokens):
        p, request = int(step.positions[token]), int(step.ids[token])
        seen = range(max(0, p - step.window + 1), p + 1) if step.real(token) else range(0)
        expected.add([step.slot(request, x) for x in seen], step.width, len(seen))
    return expected


def entry_rows(step: RandomStep, ratio: int) -> Expected:
    expected = Expected()
    for token in range(step.tokens):
        p, request = int(step.positions[token]), int(step.ids[token])
        count = (p + 1) // ratio if step.real(token) else 0
        numbers = range(min(count, step.width))
        local = token >= step.decodes
        expected.add([n if local else step.slot(request, n) for n in numbers], step.width, len(numbers))
        expected.visible.append(count)
        ends = step.real(token) and (p + 1) % ratio == 0
        expected.completed.append(step.slot(request, p // ratio) if ends else -1)
    return expected


def chosen_rows(step: RandomStep) -> Expected:
    expected = Expected()
    for token in range(step.tokens):
        # There is no position here: a token is padding if it has no slot.
        request = int(step.ids[token])
        real = 0 <= request < len(step.lengths) and int(step.own[token]) >= 0
        slots = [step.slot(request, n) for n in step.chosen[token].tolist()] if real else []
        valid = [s for s in slots if s >= 0]
        expected.add(valid, step.chosen.shape[1], len(valid))
    return expected


def gathered_rows(
    step: RandomStep,
    chosen: Tensor | None,
    columns: int,
    first: list[int],
    width: int,
    *,
    ratio: int,
    window: int,
    entries: int,
    rows: int,
) -> Expected:
    expected = Expected()
    for token in range(step.tokens):
        p, k = int(step.positions[token]), int(step.ids[token])
        picked = min((p + 1) // ratio, columns)
        numbers = list(range(picked)) if chosen is None else chosen[token, :picked].tolist()
        row = [k * rows + n if 0 <= n < entries else -1 for n in numbers]
        recent = range(max(0, p - window + 1), p + 1)
        row += [k * rows + entries + x - first[k] for x in recent]
        expected.add(row, width, len(row))
    return expected


def mixed_rows(step: RandomStep, form: str, columns: int, *, window: int, ratio: int, topk: int) -> Expected:
    expected, width = Expected(), step.window + 1
    for token in range(step.tokens):
        p, request = int(step.positions[token]), int(step.ids[token])
        if token < step.decodes:
            row, count = step.decode_window[token].tolist(), 0
            given = step.chosen[token].tolist()
            if form == "numbers":
                real = int(step.own[token]) >= 0
                row += (entries := [step.slot(request, n, 2) if real else -1 for n in given])
                count = sum(e >= 0 for e in entries)
            elif form != "window":
                row += given
                count = len(given) if form == "counted" else sum(e >= 0 for e in given)
        else:
            row = [step.slot(request, x) for x in range(max(0, p - window + 1), p + 1)]
            row += [-1] * (width - len(row))
            count = min((p + 1) // ratio, topk)
            row += [step.slot(request, n, 2) for n in step.chosen[token, :count].tolist()]
        expected.add(row, columns, width + count)
    return expected
