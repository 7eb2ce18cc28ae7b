"""Seeded adversarial steps for stage `select`, and their expected rows, computed token by token in plain Python."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tamis.lab.testing import oracle
from tamis.lab.testing.cases import INT_MAX, INT_MIN, Draw


@dataclass(frozen=True, eq=False)
class SelectCase:
    """Tokens of a few requests in random order, with padding, invalid requests, and tokens without a slot."""

    name: str
    positions: Tensor
    request_ids: Tensor
    own: Tensor
    block_table: Tensor
    chosen: Tensor
    """int32 [T, K] entry numbers, some of them out of range."""
    page_size: int
    ratio: int
    window: int
    columns: int
    """Width of the rows that hold every entry."""

    @property
    def requests(self) -> int:
        """The number of requests."""
        return len(self.block_table)

    @property
    def group_size(self) -> int:
        """Tokens per group of `select_groups`."""
        return min(self.ratio, 16)

    @property
    def groups(self) -> Tensor:
        """int32 [T, K], the groups that are chosen in `select_groups`."""
        return self.chosen[:, :70]

    def slot(self, token: int, position: int) -> int:
        """The slot of a position of a token's request."""
        return oracle.slot_of(position, self.block_table[int(self.request_ids[token])].tolist(), self.page_size)

    def real(self, token: int, *, placed: bool = True) -> bool:
        """Whether a token selects anything; with `placed` it must also have a slot."""
        known = 0 <= int(self.request_ids[token]) < self.requests and int(self.own[token]) >= 0
        return known and (not placed or int(self.positions[token]) >= 0)


def select_cases(*, quick: bool = False) -> Iterator[SelectCase]:
    """Page sizes, ratios and widths from 1 to more than one program's block; absent and huge pages."""
    shapes = [(64, 4, 128, 512, 9), (2, 128, 128, 128, 9), (1, 1, 1, 1, 5)]
    shapes += [] if quick else [(256, 4, 1500, 3000, 12), (61, 3, 17, 65, 33), (2, 128, 8, 1025, 7), (16, 1, 64, 64, 1)]
    for page_size, ratio, window, columns, tokens in shapes:
        name = f"pages of {page_size}, ratio {ratio}, window {window}, {columns} columns, {tokens} tokens"
        draw = Draw(name)
        pages = 40
        table = draw.integers(-1, 500, 3, pages)
        table[0, pages - 1] = INT_MAX
        table[1, 0] = INT_MIN
        positions = draw.integers(0, page_size * pages + 50, tokens)
        positions[0] = -1
        ids, own = draw.integers(0, 3, tokens), draw.integers(0, 3, tokens) - 1
        if tokens > 4:
            ids[1:4] = torch.tensor([-1, 3, INT_MAX], dtype=torch.int32, device="cpu")
        chosen = draw.integers(-1, page_size * pages, tokens, columns)
        chosen.view(-1)[:2] = torch.tensor([INT_MIN, INT_MAX], dtype=torch.int32, device="cpu")[: chosen.numel()]
        yield SelectCase(name, positions, ids, own.long(), table, chosen, page_size, ratio, window, columns)


def expected_rows(case: SelectCase) -> list[Tensor]:
    """The expected results of all functions of the stage, in this order.

    Windows and their lengths; completed entries, visible entries, lengths and slots of all entries; chosen slots and
    lengths; gathered rows and lengths, for a workspace of 50 rows per request: 20 entries, then raw tokens from
    position 3; positions of the tokens of chosen groups.
    """
    found: list[list[list[int]]] = [[] for _ in range(11)]
    for token in range(len(case.positions)):
        position, real = int(case.positions[token]), case.real(token)
        seen = range(max(0, position + 1 - case.window), position + 1) if real else range(0)
        count = (position + 1) // case.ratio if real else 0
        shown = min(count, case.columns)
        ends = real and (position + 1) % case.ratio == 0
        slots = []
        if case.real(token, placed=False):
            slots = [case.slot(token, n) for n in case.chosen[token].tolist()]
            slots = [slot for slot in slots if slot >= 0]
        gathered = _gathered_row(case, token)
        rows = (
            _padded([case.slot(token, x) for x in seen], case.window),
            [len(seen)],
            [case.slot(token, position // case.ratio) if ends else -1],
            [count],
            [shown],
            _padded([case.slot(token, n) for n in range(shown)], case.columns),
            _padded(slots, case.columns),
            [len(slots)],
            _padded(gathered, case.columns + case.window),
            [len(gathered)],
            _group_row(case, token),
        )
        for rows_so_far, row in zip(found, rows, strict=True):
            rows_so_far.append(row)
    tensors = [torch.tensor(rows, dtype=torch.int64, device="cpu") for rows in found]
    single = (1, 2, 3, 4, 7, 9)
    return [t[:, 0] if n in single else t for n, t in enumerate(tensors)]


def _gathered_row(case: SelectCase, token: int) -> list[int]:
    position, request = int(case.positions[token]), int(case.request_ids[token])
    if position < 0 or not 0 <= request < case.requests:
        return []
    numbers = case.chosen[token, : min((position + 1) // case.ratio, case.columns)].tolist()
    raw = [x - 3 for x in range(max(0, position + 1 - case.window), position + 1)]
    row = [request * 50 + n if 0 <= n < 20 else -1 for n in numbers]
    return row + [request * 50 + 20 + x if 0 <= x < 30 else -1 for x in raw]


def _group_row(case: SelectCase, token: int) -> list[int]:
    size, seen, chosen = case.group_size, int(case.positions[token]) + 1, case.groups[token].tolist()
    row = [n * size + inside for n in chosen if 0 <= n < seen // size for inside in range(size)]
    return _padded([*row, *range(seen // size * size, seen)], len(chosen) * size + size - 1)


def _padded(row: list[int], width: int) -> list[int]:
    return row + [-1] * (width - len(row))
