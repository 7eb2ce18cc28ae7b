"""Attention and top-k on a GPU under hostile device values, between guard zones, against float64.

    python tests/reliability/hostile_gpu.py                  # every case
    python tests/reliability/hostile_gpu.py --reduced        # a few dozen launches, for compute-sanitizer
    python tests/reliability/hostile_gpu.py --beside 120     # while another process multiplies matrices for so long

The other process ends by itself. `test_hostile_gpu.py` runs the same cases.
"""

import argparse
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from attention_calls import attend_call
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import pytest
from guarded import Guards

from tamis import PagedCache, Selection
from tamis.lab.testing import oracle
from tamis.ops.attention import hopper, triton_kernels
from tamis.ops.index.hopper.topk import topk_positions

LOWEST, HIGHEST = -(2**31), 2**31 - 1
HEADS = (1, 8, 16, 17, 24, 32, 64, 100, 128)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Case(NamedTuple):
    """One call of attention."""

    layout: str
    heads: int
    tokens: int
    dtype: torch.dtype = BF16
    splits: int | None = None
    translate: bool = False
    columns: int = 200


def attend_cases() -> Iterator[Case]:
    """Every Hopper kernel at every number of heads, cut into parts and not; queries that portable kernels get."""
    for layout in ("v32-fp8", "v4-fp8", "v32-bf16"):
        for heads in HEADS:
            for tokens, splits in ((3, None), (3, 5), (40, 1)):
                yield Case(layout, heads, tokens, splits=splits, translate=tokens == 40)
        for heads in (24, 32, 64, 100, 128):
            for dtype in (FP16, FP32):
                yield Case(layout, heads, 3, dtype)
                yield Case(layout, heads, 3, dtype, splits=3, translate=True)
    for heads in (8, 16):
        yield Case("v32-fp8", heads, 300)  # of more tokens than fit the multiprocessors twice, heads are columns
        yield Case("v32-bf16", heads, 300)


def reduced_cases() -> Iterator[Case]:
    """One of each source and kind of rows."""
    for heads in (1, 16, 24, 64, 128):
        for layout in ("v32-fp8", "v4-fp8", "v32-bf16"):
            yield Case(layout, heads, 2, splits=2, columns=70)
        yield Case("v32-fp8", heads, 2, FP16, columns=70, translate=True)
    yield Case("v4-fp8", 24, 2, FP16, columns=70)
    yield Case("v32-bf16", 64, 2, FP16, columns=70)
    yield Case("v32-fp8", 16, 300, columns=70)


def hostile(count: int, limit: int, rng: random.Random) -> Tensor:
    """Slots or pages of which every second does not exist."""
    bad = [LOWEST, LOWEST + 1, -limit, -1, limit, limit + 1, 2**30, HIGHEST - 1, HIGHEST]
    return torch.tensor(
        [rng.choice(bad) if rng.random() < 0.5 else rng.randrange(limit) for _ in range(count)], dtype=torch.int32
    )


def filled(guards: Guards, layout: str, pages: int, page_size: int) -> tuple[PagedCache, PagedCache]:
    """Random rows at even slots on the device and on the host; the others, scales included, are NaN."""
    cache = guards.cache(layout, pages, page_size)
    host = PagedCache.wrap(torch.full_like(cache.storage, 0, device="cpu").contiguous(), cache.layout)
    host.storage.view(torch.uint8).fill_(0xFF)
    slots = torch.arange(0, host.rows, 2)
    oracle.write(torch.randn(len(slots), host.layout.width, dtype=FP32), host, slots)
    cache.storage.view(torch.uint8).copy_(host.storage.view(torch.uint8))
    return guards.keep(cache), host


def attend(case: Case, seed: int = 0, device: str = "cuda") -> str:
    """Run a case and compare; the name of what ran. On the host that is the portable kernel, interpreted."""
    torch.manual_seed(seed)
    rng = random.Random(seed + case.heads)
    guards, page_size, pages, tokens, columns = Guards(device), 61, 7, case.tokens, case.columns
    cache, host = filled(guards, case.layout, pages, page_size)
    slots = hostile(tokens * columns, host.rows, rng).view(tokens, columns)
    lengths = torch.tensor([rng.choice((columns, columns + 1, HIGHEST, LOWEST, -1, 9)) for _ in range(tokens)]).int()
    lengths[0] = columns
    ids = torch.tensor([rng.choice((0, 1, 1, 2, LOWEST, HIGHEST, -1)) for _ in range(tokens)]).int()
    table = hostile(2 * pages, pages, rng).view(2, pages)
    slots[0, 0] = ids[0] = table[:, 0] = 0  # somebody selects something
    if case.translate:
        slots = _even_rows(slots, table, page_size)
    else:
        slots[(slots >= 0) & (slots < host.rows)] &= ~1
    counted = lengths.clamp(0, columns)
    lookup: tuple[Tensor | None, Tensor | None] = (None, None)
    known = Selection(host, slots, counted)
    if case.translate:
        counted[(ids < 0) | (ids >= 2)] = 0
        known = Selection(host, slots, counted, ids.clamp(0, 1), table)
        lookup = guards.given(ids), guards.given(table)
    q = torch.randn(tokens, case.heads, host.layout.width, dtype=FP32).to(case.dtype)
    sink = torch.randn(case.heads, dtype=FP32)
    wanted, wanted_lse = oracle.attend(q, [known], scale=0.05, value_dim=512, sink=sink)
    selection = Selection(cache, guards.given(slots), guards.given(lengths), *lookup)
    out = guards.empty(tokens, case.heads, 512, dtype=FP32, name="out")
    given = guards.given(q)
    stage = hopper if device == "cuda" else triton_kernels
    with guards.allocations(pytest.MonkeyPatch):
        lse, _ = stage.attend(
            attend_call(given, [selection], scale=0.05, splits=case.splits, sink=guards.given(sink), out=out)
        )
    guards.check()
    kernels = hopper.kernels_for(given, [selection], 512, case.splits) if device == "cuda" else triton_kernels
    ran = "triton" if kernels is triton_kernels else kernels.source(given, [selection], 132)
    empty = wanted_lse == -torch.inf
    assert torch.equal(lse.cpu() == -torch.inf, empty), f"{case}: lse of rows without anything, by {ran}"
    # A logit is a sum of 576 products of numbers that are exact in what is multiplied, in float32.
    worst = (lse.cpu().double() - wanted_lse)[~empty].abs().max().item()
    assert worst < 576 * 2.0**-23 * _largest_sum(q, host) * 0.05, f"{case}: lse differs by {worst}, by {ran}"
    # Weights and rows are bf16 at worst, half a unit of 2**-8 each, and an output is a mean of rows weighed by them.
    error = (out.cpu().double() - wanted).norm(dim=2)
    unit = 2.0**-8 if case.dtype != FP32 else 2.0**-18
    allowed = unit * _largest_row(host)
    assert error.max().item() < allowed, f"{case}: output differs by {error.max().item()}, by {ran}"
    assert (out.cpu()[empty] == 0).all()
    return ran


def _largest_sum(q: Tensor, host: PagedCache) -> float:
    """The largest sum of absolute products of a query and a row."""
    rows = oracle.rows_of(host, torch.arange(0, host.rows, 2)).abs()
    return (q.double().abs().flatten(0, 1) @ rows.T).max().item()


def _largest_row(host: PagedCache) -> float:
    """The largest norm of a row's value."""
    return oracle.rows_of(host, torch.arange(0, host.rows, 2))[:, :512].norm(dim=1).max().item()


def _even_rows(positions: Tensor, table: Tensor, page_size: int) -> Tensor:
    """Positions whose slots are even in every request, or that have none: NaN rows lie at odd slots."""
    odd = [p for p in range(table.shape[1] * page_size) for row in table.tolist() if _is_odd(p, row, page_size)]
    return torch.where(torch.isin(positions, torch.tensor(odd, dtype=torch.int32)), -1, positions)


def _is_odd(position: int, row: list[int], page_size: int) -> bool:
    slot = oracle.slot_of(position, row, page_size)
    return slot >= 0 and slot % 2 == 1


def topk(tokens: int, width: int, k: int, translate: bool, seed: int = 0) -> None:
    """Top-k of rows with NaN, infinities and lengths of any kind."""
    torch.manual_seed(seed)
    rng, guards = random.Random(seed), Guards("cuda")
    scores = torch.randn(tokens, width, dtype=FP32)
    scores[tokens // 2, ::3], scores[-1, ::2] = torch.nan, torch.inf
    lengths = torch.tensor(
        [rng.choice((width, width + 1, HIGHEST, LOWEST, -1, width // 2)) for _ in range(tokens)]
    ).int()
    ids = torch.tensor([rng.choice((0, 1, 2, LOWEST, HIGHEST)) for _ in range(tokens)]).int()
    table = hostile(2 * (width // 64 + 1), 2**22, rng).view(2, -1)
    out = guards.empty(tokens, k, dtype=torch.int32, name="positions")
    pages = (guards.given(ids), guards.given(table), 64) if translate else ()
    with guards.allocations(pytest.MonkeyPatch):
        topk_positions(guards.given(scores), guards.given(lengths), k, *pages, out=out)
    guards.check()
    for token in range(tokens):
        row = scores[token, : max(0, min(width, int(lengths[token])))]
        row = torch.where(row.isnan(), -torch.inf, row)
        order = torch.sort(row, descending=True, stable=True).indices[:k]
        expected = sorted(n for n in order.tolist() if row[n] > -torch.inf)
        if translate:
            listed = table[int(ids[token])].tolist() if 0 <= int(ids[token]) < 2 else []
            expected = [oracle.slot_of(n, listed, 64) for n in expected]
        assert out[token].tolist() == expected + [-1] * (k - len(expected)), (tokens, width, k, token)


TOPK = ((1, 300, 64, False), (3, 5000, 2048, True), (2, 70000, 2048, False), (140, 900, 512, True))


def occupy(seconds: float) -> None:
    """Multiply matrices until the time is over."""
    a = torch.randn(4096, 4096, dtype=BF16, device="cuda")
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(50):
            a @ a
        torch.cuda.synchronize()


def main() -> int:
    """Run the cases and print what ran how often."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reduced", action="store_true")
    parser.add_argument("--beside", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--occupy", type=float, default=0.0, metavar="SECONDS", help="be that other process")
    options = parser.parse_args()
    if options.occupy:
        occupy(options.occupy)
        return 0
    other = None
    if options.beside:
        other = subprocess.Popen([sys.executable, __file__, "--occupy", str(options.beside)])
    ran: dict[str, int] = {}
    try:
        for case in reduced_cases() if options.reduced else attend_cases():
            name = attend(case)
            ran[name] = ran.get(name, 0) + 1
        for shape in TOPK[:2] if options.reduced else TOPK:
            topk(*shape)
            ran["topk.cu"] = ran.get("topk.cu", 0) + 1
    finally:
        if other is not None:
            other.terminate()
            other.wait()
    print("guards intact and results right:", ", ".join(f"{name} {count}" for name, count in sorted(ran.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
