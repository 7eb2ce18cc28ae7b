"""Kernels under values on the device that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones. What
is compared with is the definition (`reference.py`, which does without the checks as well) or float64.
"""

import random

import pytest
import torch
from attention_calls import attend_call, attend_slots_call, combine_call
from guarded import Guards
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.cache.layout import compressor_state, named
from tamis.lab.testing import oracle
from tamis.model.recipe import IndexRecipe
from tamis.ops.attention import triton_kernels as attend_kernels
from tamis.ops.combine import triton_kernels as combine_kernels
from tamis.ops.compress import reference as compress_reference
from tamis.ops.compress import triton_kernels as compress_kernels
from tamis.ops.gather import reference as gather_reference
from tamis.ops.gather import triton_kernels as gather_kernels
from tamis.ops.index import reference as index_reference
from tamis.ops.index import triton_kernels as index_kernels
from tamis.ops.rotate import reference as rotate_reference
from tamis.ops.rotate import triton_kernels as rotate_kernels
from tamis.ops.select import reference as select_reference
from tamis.ops.select import triton_kernels as select_kernels
from tamis.ops.translate import reference as translate_reference
from tamis.ops.translate import triton_kernels as translate_kernels
from tamis.ops.translate.operations import TranslatePositions
from tamis.ops.write import reference as write_reference
from tamis.ops.write import triton_kernels as write_kernels

LOWEST, HIGHEST = -(2**31), 2**31 - 1


def hostile(count: int, limit: int, seed: int, *, wide: bool = False) -> Tensor:
    """Integers of which every second is below `limit`, the others anything but."""
    rng = random.Random(seed)
    bad = [LOWEST, LOWEST + 1, -limit, -2, -1, limit, limit + 1, 2 * limit, 2**30, HIGHEST - 1, HIGHEST]
    bad += [2**32 + 1, 2**32 + 3, -(2**40), 2**62, 2**63 - 1, -(2**63)] if wide else []
    found = [rng.choice(bad) if rng.random() < 0.5 else rng.randrange(limit) for _ in range(count)]
    return torch.tensor(found, dtype=torch.int64 if wide else torch.int32)


def distinct(count: int, limit: int, seed: int) -> Tensor:
    """Slots of which no two of those inside are equal: two rows for one slot are a caller's error."""
    found, taken = hostile(count, limit, seed, wide=True), set()
    for place, slot in enumerate(found.tolist()):
        if 0 <= slot < limit:
            found[place] = -1 if slot in taken else slot
            taken.add(slot)
    return found


def filled(guards: Guards, layout: str, pages: int, page_size: int, kept: Tensor | None = None) -> PagedCache:
    """A cache of random rows; those that are not kept stay bytes of 0xFF, scales included: NaN."""
    cache = guards.cache(layout, pages, page_size)
    slots = torch.arange(cache.rows) if kept is None else kept
    host = PagedCache(cache.layout, pages, page_size)
    oracle.write(torch.randn(len(slots), cache.layout.width), host, slots)
    for field in (cache.layout.values, cache.layout.scales, cache.layout.tail):
        if field is not None:
            page, row = slots // page_size, slots % page_size
            cache.field(field)[page.to(cache.device), row.to(cache.device)] = host.field(field)[page, row].to(
                cache.device
            )
    return cache


@pytest.fixture
def guards(device: torch.device) -> Guards:
    """Around everything that a test hands over."""
    return Guards(device)


def same_bytes(found: PagedCache, wanted: PagedCache) -> bool:
    """Whether two caches hold the same, NaN included."""
    return torch.equal(
        found.storage.contiguous().view(torch.uint8).cpu(), wanted.storage.contiguous().view(torch.uint8)
    )


def on_host(cache: PagedCache) -> PagedCache:
    """The same cache for the definition."""
    return PagedCache.wrap(cache.storage.cpu().contiguous(), cache.layout, scale=cache.scale)


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8", "v32-bf16", "plain-fp8"])
@pytest.mark.parametrize(
    ("heads", "dtype", "translate"), [(3, torch.bfloat16, False), (3, torch.float16, True), (17, torch.float32, True)]
)
def test_attention_skips_what_does_not_exist(
    guards: Guards, layout: str, heads: int, dtype: torch.dtype, translate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, columns, page_size, pages = 5, 24, 8, 6
    cache = filled(guards, layout, pages, page_size, kept=torch.arange(0, 48, 2))
    guards.keep(cache)
    slots = hostile(tokens * columns, 48, heads).view(tokens, columns)
    slots[(slots >= 0) & (slots < 48)] &= ~1  # odd rows are NaN
    lengths = torch.tensor([columns, LOWEST, HIGHEST, columns + 1, -1], dtype=torch.int32)
    ids = torch.tensor([0, 1, 2, LOWEST, 1], dtype=torch.int32)  # of two
    table = torch.tensor([[5, 3, -1, LOWEST, HIGHEST, 6, 2**28, 0]] * 2, dtype=torch.int32)
    lookup = (guards.given(ids), guards.given(table)) if translate else (None, None)
    selection = Selection(cache, guards.given(slots), guards.given(lengths), *lookup)
    width = cache.layout.width
    q, sink = torch.randn(tokens, heads, width).to(dtype), torch.randn(heads)
    counted = lengths.clamp(0, columns)
    if translate:
        counted[(ids < 0) | (ids >= 2)] = 0
        ids = ids.clamp(0, 1)
    known = Selection(on_host(cache), slots, counted, *((ids, table) if translate else (None, None)))
    wanted, wanted_lse = oracle.attend(q, [known], scale=0.05, value_dim=512, sink=sink)
    for splits in (1, 3) if heads == 3 else (1,):
        out = guards.output(torch.zeros(tokens, heads, 512, dtype=torch.float32))
        with guards.allocations(monkeypatch):
            lse, _ = attend_kernels.attend(
                attend_call(guards.given(q), [selection], scale=0.05, splits=splits, sink=guards.given(sink), out=out)
            )
        guards.check()
        assert torch.equal(lse.cpu() == -torch.inf, wanted_lse == -torch.inf)
        some = wanted_lse > -torch.inf
        torch.testing.assert_close(lse.cpu().double()[some], wanted_lse[some], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(out.cpu().double(), wanted, rtol=2e-2, atol=2e-2)


def test_rows_of_nan_spoil_only_those_who_select_them(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = guards.keep(filled(guards, "v32-fp8", 2, 8, kept=torch.arange(15)))
    slots = torch.tensor([[0, 1, 2], [3, 15, 4], [5, 6, -1]], dtype=torch.int32)
    q = guards.given(torch.randn(3, 4, 576))
    with guards.allocations(monkeypatch):
        parts, _, _ = attend_kernels.attend_slots(
            attend_slots_call(q, [Selection(cache, guards.given(slots))], scale=0.1, value_dim=512, splits=1)
        )
    guards.check()
    assert parts[0].isnan().flatten(1).any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8", "plain-fp8", "index-mxfp4", "v32-bf16"])
def test_writes_go_to_slots_that_exist(guards: Guards, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = guards.cache(layout, 5, 7)
    wanted = on_host(cache)
    kv = torch.randn(40, cache.layout.width).bfloat16()
    kv[3], kv[5, 0], kv[9] = torch.nan, torch.inf, 0.0
    slots = distinct(40, 35, 1)
    with guards.allocations(monkeypatch):
        write_kernels.write_kv(guards.given(kv), cache, guards.given(slots))
    guards.check()
    write_reference.write_kv(kv, wanted, torch.where((slots >= 0) & (slots < 35), slots, -1))
    assert same_bytes(cache, wanted)


@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8", "v32-bf16"])
def test_reads_of_slots_that_do_not_exist_are_zeros(
    guards: Guards, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = guards.keep(filled(guards, layout, 5, 7))
    slots = hostile(60, 35, 2)
    with guards.allocations(monkeypatch):
        found = gather_kernels.read_kv(cache, guards.given(slots), torch.float32)
    guards.check()
    inside = (slots >= 0) & (slots < 35)
    wanted = oracle.rows_of(on_host(cache), torch.where(inside, slots, 0)).masked_fill(~inside[:, None], 0.0)
    assert torch.equal(found.cpu(), wanted.float())


@pytest.mark.parametrize("seed", range(4))
def test_gathering_leaves_rows_that_no_request_covers(
    guards: Guards, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = guards.keep(filled(guards, "v32-fp8", 5, 7))
    keys = guards.keep(filled(guards, "index-fp8", 5, 7))
    table = hostile(12, 5, seed).view(3, 4)
    lengths, first = hostile(3, 20, seed + 10), hostile(3, 20, seed + 20)
    starts = torch.tensor([0, 9, 21] if seed < 2 else [LOWEST, 4, HIGHEST - 2], dtype=torch.int32)
    given = [guards.given(t) for t in (table, lengths, starts, first)]
    out = guards.output(torch.full((30, 576), 7.0))
    wanted = out.cpu().clone()
    values = guards.output(torch.full((30, 128), 7, dtype=torch.uint8))
    scales = guards.output(torch.full((30,), 7.0))
    with guards.allocations(monkeypatch):
        gather_kernels.gather_kv(cache, *given, out)
        gather_kernels.gather_index(keys, *given, values, scales.unsqueeze(1))
    guards.check()
    covered = torch.zeros(30, dtype=torch.bool)
    host = on_host(cache)
    for row in range(30):
        begun = [r for r in range(3) if starts[r] <= row]
        if not begun:
            continue
        r = begun[-1]
        offset = row - int(starts[r])
        position = offset + int(first[r])
        if offset < int(lengths[r]) and 0 <= position < 28 and 0 <= table[r, position // 7] < 5:
            slot = torch.tensor([int(table[r, position // 7]) * 7 + position % 7])
            wanted[row] = oracle.rows_of(host, slot)[0].float()
            covered[row] = True
    assert torch.equal(out.cpu(), wanted)
    assert torch.equal((values != 7).any(1).cpu(), covered)
    assert torch.equal((scales != 7).cpu(), covered)


@pytest.mark.parametrize("options", [{}, {"compact": True}, {"shard": (3, 1, 4)}, {"workspace": True}])
def test_translation_of_anything(guards: Guards, options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    positions, ids = hostile(9 * 20, 40, 3).view(9, 20), hostile(9, 3, 4)
    table = hostile(3 * 10, 2**26, 5).view(3, 10)
    workspace = (hostile(9, 2, 6), torch.tensor([5, 60], dtype=torch.int32)) if options.get("workspace") else None
    rest = (options.get("shard", (1, 0, 1)), options.get("compact", False), "auto")
    call = TranslatePositions(positions, ids, table, 4, 9, *(workspace or (None, None)), *rest)
    held = TranslatePositions(*(guards.given(part) if isinstance(part, torch.Tensor) else part for part in call))
    with guards.allocations(monkeypatch):
        slots, counts = translate_kernels.translate_positions(held)
    guards.check()
    wanted = translate_reference.translate_positions(call)
    assert torch.equal(slots.cpu(), wanted[0])
    assert torch.equal(counts.cpu(), wanted[1])


@pytest.mark.parametrize("layout", ["index-fp8", "index-mxfp4"])
def test_scores_of_keys_that_do_not_exist_are_nothing(
    guards: Guards, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, heads, pages = 6, 5, 6
    cache = guards.keep(filled(guards, layout, pages, 8, kept=torch.arange(40)))
    table = hostile(2 * 7, 5, 7).view(2, 7)
    ids = torch.tensor([0, 1, LOWEST, 2, HIGHEST, 1], dtype=torch.int32)
    lengths = torch.tensor([56, HIGHEST, 9, 9, 9, LOWEST], dtype=torch.int32)
    q, weights = torch.randn(tokens, heads, 128), torch.randn(tokens, heads)
    out = guards.output(torch.zeros(tokens, 61))
    with guards.allocations(monkeypatch):
        index_kernels.index_scores(
            guards.given(q), guards.given(weights), cache, guards.given(ids), guards.given(table),
            guards.given(lengths), out,
        )  # fmt: skip
    guards.check()
    known = (ids >= 0) & (ids < 2)
    seen = torch.where(known, lengths.clamp(0, 56), 0)
    wanted = oracle.index_scores(q, weights, on_host(cache), ids.clamp(0, 1), table, seen)
    wanted = torch.cat((wanted, torch.full((tokens, 5), -torch.inf)), 1)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
    with guards.allocations(monkeypatch):
        found = index_kernels.index_topk(
            guards.given(q), guards.given(weights), cache, guards.given(ids), guards.given(table),
            guards.given(lengths), 60, 1 << 20,
        )  # fmt: skip
    guards.check()
    for token in range(tokens):
        expected = (wanted[token] > -torch.inf).nonzero().flatten().tolist()
        assert found[token].tolist() == expected + [-1] * (60 - len(expected))


def test_keys_of_a_list_beyond_its_ends(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    q, weights, keys = torch.randn(6, 3, 64), torch.randn(6, 3), torch.randn(20, 64)
    starts = torch.tensor([LOWEST, -1, 3, 0, HIGHEST, 19], dtype=torch.int32)
    ends = torch.tensor([HIGHEST, 5, LOWEST, 21, HIGHEST, HIGHEST], dtype=torch.int32)
    out = guards.output(torch.zeros(6, 20))
    given = [guards.given(t) for t in (q, weights, keys)]
    with guards.allocations(monkeypatch):
        index_kernels.ragged_scores(*given, None, guards.given(starts), guards.given(ends), out)
    guards.check()
    wanted = (torch.relu(q.double() @ keys.double().T) * weights.double().unsqueeze(2)).sum(1)
    place = torch.arange(20)
    seen = (place >= starts.unsqueeze(1)) & (place < ends.unsqueeze(1))
    torch.testing.assert_close(out.cpu().double(), wanted.masked_fill(~seen, -torch.inf), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("width", "k"), [(50, 8), (300, 512), (9000, 64)])
def test_selecting_from_lengths_and_pages_of_any_kind(
    guards: Guards, width: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = torch.randn(6, width)
    scores[1, ::2], scores[2], scores[3] = torch.nan, torch.inf, -torch.inf
    lengths = torch.tensor([HIGHEST, width + 1, width, width, LOWEST, width // 2], dtype=torch.int32)
    ids, table = torch.tensor([0, 1, 2, LOWEST, 1, 0], dtype=torch.int32), hostile(2 * 9, 2**20, 9).view(2, 9)
    for pages in (None, (ids, table)):
        held = (None, None) if pages is None else (guards.given(ids), guards.given(table))
        with guards.allocations(monkeypatch):
            found = index_kernels.topk_positions(guards.given(scores), guards.given(lengths), k, *held, 16)
        guards.check()
        for token in range(6):
            row = scores[token, : max(0, min(width, int(lengths[token])))]
            row = torch.where(row.isnan(), -torch.inf, row)
            order = sorted(range(len(row)), key=lambda n: (-row[n].item(), n))
            expected = sorted(n for n in order[:k] if row[n] > -torch.inf)
            if pages is not None:
                known = 0 <= int(ids[token]) < 2
                listed = table[int(ids[token])].tolist() if known else []
                expected = [oracle.slot_of(n, listed, 16) for n in expected]
            assert found[token].tolist() == expected + [-1] * (k - len(expected))


@pytest.mark.parametrize("layout", ["index-fp8", "index-mxfp4"])
def test_index_keys_and_queries_at_positions_without_angles(
    guards: Guards, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = guards.cache(layout, 5, 7)
    wanted = on_host(cache)
    recipe = IndexRecipe(interleaved=True, rope_first=False, hadamard=True)
    keys, table = torch.randn(30, 128), torch.randn(9, 64)
    positions, slots = hostile(30, 9, 11, wide=True), distinct(30, 35, 12)
    inside = (slots >= 0) & (slots < 35)
    at = torch.where((positions >= 0) & (positions < 9), positions, 9)
    angles = torch.cat((table, torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)))  # the last one turns nothing
    with guards.allocations(monkeypatch):
        index_kernels.write_index_keys(
            guards.given(keys), cache, guards.given(slots), None, None, 1e-6, guards.given(positions),
            guards.given(table), recipe,
        )  # fmt: skip
    guards.check()
    index_reference.write_index_keys(keys, wanted, torch.where(inside, slots, -1), None, None, 1e-6, at, angles, recipe)
    assert same_bytes(cache, wanted)
    if layout == "index-fp8":
        q, weights = torch.randn(30, 3, 128), torch.randn(30, 3)
        given = [guards.given(t) for t in (q, weights, positions, table)]
        with guards.allocations(monkeypatch):
            values, folded = index_kernels.quantise_index_query(*given, recipe, cache.layout, 0.5)
        guards.check()
        expected = index_reference.quantise_index_query(q, weights, at, angles, recipe, cache.layout, 0.5)
        assert torch.equal(values.view(torch.uint8).cpu(), expected[0].view(torch.uint8))
        assert torch.equal(folded.cpu(), expected[1])


@pytest.mark.parametrize("layout", ["v4-fp8", "v4-bf16"])
def test_rotation_at_positions_without_angles(guards: Guards, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = guards.cache(layout, 5, 7)
    q, kv, table, weight = torch.randn(20, 2, 512), torch.randn(20, 512), torch.randn(9, 64), torch.randn(512)
    positions, slots = hostile(20, 9, 13, wide=True), distinct(20, 35, 14)
    inside = (slots >= 0) & (slots < 35)
    at = torch.where((positions >= 0) & (positions < 9), positions, 9)
    angles = torch.cat((table, torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)))
    given = [guards.given(t) for t in (positions, table, weight)]
    with guards.allocations(monkeypatch):
        found, _ = rotate_kernels.rotate_and_write(
            guards.given(q), guards.given(kv), cache, guards.given(slots), *given, 1e-6, None, False
        )
        turned = rotate_kernels.rotate_heads(guards.given(q), *given[:2], None, True)
        codes, exponents = rotate_kernels.rotate_to_fp8(guards.given(q), *given[:2], 128, True)
    guards.check()
    host = PagedCache(cache.layout, 5, 7)
    written = torch.where(inside, slots, -1)
    wanted, _ = rotate_reference.rotate_and_write(q, kv, host, written, at, angles, weight, 1e-6, None, False)
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)
    expected = rotate_reference.rotate_heads(q, at, angles, None, True)
    torch.testing.assert_close(turned.cpu(), expected, rtol=1e-5, atol=1e-5)
    eight = codes.cpu().float().unflatten(2, (4, 128)) * torch.exp2(exponents.cpu().float() - 127).unsqueeze(3)
    torch.testing.assert_close(eight.flatten(2), expected, rtol=0.07, atol=0.02)
    rows = gather_reference.read_kv(on_host(cache), written[inside], torch.float32)
    torch.testing.assert_close(
        rows, gather_reference.read_kv(host, written[inside], torch.float32), rtol=0.07, atol=0.02
    )
    others = torch.tensor(sorted(set(range(35)) - set(written.tolist())))
    assert (
        cache.field(cache.layout.values).cpu().contiguous().view(torch.uint8)[others // 7, others % 7] == 0xFF
    ).all()


@pytest.mark.parametrize("seed", range(3))
def test_compression_of_spans_of_any_kind(guards: Guards, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ratio, tokens = 4, 24
    state = guards.cache(compressor_state(dim=512), 6, 4)
    state.storage.normal_()
    entries = guards.cache("v4-bf16", 3, 5)
    host_state, host_entries = on_host(state), on_host(entries)
    values, scores = torch.randn(tokens, 1024), torch.randn(tokens, 1024)
    positions = hostile(tokens, 24, seed, wide=True)
    positions[: tokens // 2] = torch.arange(tokens // 2)
    ids, table = hostile(tokens, 2, seed + 1), hostile(2 * 6, 6, seed + 2).view(2, 6)
    ids[: tokens // 2] = 0
    # Slots of the state are what the table says, or nothing: two answers for one row would be a caller's error.
    told = [
        oracle.slot_of(p, table[i].tolist(), 4) if 0 <= i < 2 and p < 24 else -1
        for p, i in zip(positions.tolist(), ids.tolist(), strict=True)
    ]
    state_slots = torch.tensor([s if 0 <= s < 24 else LOWEST for s in told])
    for place, slot in enumerate(state_slots.tolist()):
        if slot in state_slots[:place].tolist():
            state_slots[place] = -7
    slots = distinct(tokens, 15, seed + 3)
    bias, weight, angles = torch.randn(ratio, 1024), torch.randn(512), torch.randn(9, 64)
    given = [guards.given(t) for t in (positions, state_slots, ids, table, slots, bias, weight, angles)]
    with guards.allocations(monkeypatch):
        compress_kernels.compress_kv(guards.given(values), guards.given(scores), state, entries, *given, 1e-6, False)
    guards.check()
    turned = torch.cat((angles, torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1)))
    _reference_compress(
        values, scores, host_state, host_entries, positions, state_slots, ids, table, slots, bias, weight, turned
    )
    torch.testing.assert_close(state.storage.cpu(), host_state.storage, rtol=0, atol=0)
    wrote = (entries.storage.cpu().view(torch.uint8) != 0xFF).any(2)
    assert torch.equal(wrote, (host_entries.storage.view(torch.uint8) != 0xFF).any(2))
    torch.testing.assert_close(entries.storage.cpu()[wrote], host_entries.storage[wrote], rtol=2e-2, atol=2e-2)


def _reference_compress(
    values: Tensor, scores: Tensor, state: PagedCache, entries: PagedCache, positions: Tensor, state_slots: Tensor,
    ids: Tensor, table: Tensor, slots: Tensor, bias: Tensor, weight: Tensor, angles: Tensor,
) -> None:  # fmt: skip
    """The definition; a position without angles is that of the last row, which turns nothing."""
    ratio = len(bias)
    positions = torch.where(positions < 2**31, positions, -1)
    first = positions + 1 - ratio
    known = (first < len(angles) - 1) & (positions >= 0)
    inside = (slots >= 0) & (slots < entries.rows)
    far = torch.where(known | (positions < 0), slots, -1)
    near = torch.where(inside, far, -1)
    rest = (ids, table, near, bias, weight, angles, 1e-6, False)
    compress_reference.compress_kv(values, scores, state, entries, positions, state_slots, *rest)
    # Those beyond the table, as if their angles were the last.
    beyond = torch.where(inside & ~known & (positions >= 0), slots, -1)
    for token in (beyond >= 0).nonzero().flatten().tolist():
        if (int(positions[token]) + 1) % ratio:
            continue
        span = compress_reference.span_slots(state, positions[token, None], ids[token, None], table, 2 * ratio)
        pooled = compress_reference.pool_rows(state, span, 512)
        normed = pooled / (pooled.square().mean(1, keepdim=True) + 1e-6).sqrt() * weight
        write_reference.write_kv(normed, entries, beyond[token, None])


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_follow_from_positions_of_any_kind(
    guards: Guards, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, width = 12, 10
    positions, ids = hostile(tokens, 40, seed), hostile(tokens, 3, seed + 1)
    table, own = hostile(3 * 6, 2**26, seed + 2).view(3, 6), hostile(tokens, 40, seed + 3, wide=True)
    chosen = hostile(tokens * width, 12, seed + 4).view(tokens, width)
    first = hostile(3, 20, seed + 5)
    blocks = (hostile(3, 30, seed + 6), hostile(3, 30, seed + 7))

    def compare(name: str, inputs: list[object], outputs: list[Tensor]) -> None:
        held = [guards.given(i) if isinstance(i, Tensor) else i for i in inputs]
        held = [tuple(guards.given(t) for t in i) if isinstance(i, tuple) else i for i in held]
        found = [guards.output(o) for o in outputs]
        with guards.allocations(monkeypatch):
            getattr(select_kernels, name)(*held, *found)
        guards.check()
        wanted = [o.clone() for o in outputs]
        getattr(select_reference, name)(*inputs, *wanted)
        for place, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert torch.equal(one.cpu(), other), (name, place)

    rows, each = torch.full((tokens, width), 9, dtype=torch.int32), torch.full((tokens,), 9, dtype=torch.int32)
    for slots in (None, own):
        compare("select_window", [positions, ids, table, slots, None, 4, 7], [rows, each])
        compare("select_chosen", [chosen, ids, table, slots, 4], [rows, each])
        compare("select_entries", [positions, ids, table, slots, 4, 2, 8, 5], [each.long(), each, each, rows])
    compare("select_window", [positions, ids, table, None, blocks, 4, 7], [rows, each])
    wide = torch.full((tokens, 25), 9, dtype=torch.int32)
    for picked in (chosen, None):
        compare("select_gathered", [positions, ids, first, picked, 0, 4, 7, 9, 30, width], [wide, each])
    decodes = 5
    windows, entries = hostile(decodes * 7, 99, seed + 8).view(decodes, 7), chosen[:decodes]
    step = [hostile(4, 40, seed + 9), hostile(3, 40, seed + 10), ids, table]
    for local in (True, False):
        counts = None if local else hostile(decodes, 99, seed + 11) // 8
        inputs = [windows, entries, counts, None, chosen[decodes:], *step, table, 4, 2, 7, 4, width, local]
        compare("select_mixed", inputs, [wide[:, : 7 + width], each])


def test_parts_that_hold_nothing_are_left_out(guards: Guards, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, lses = torch.randn(3, 4, 2, 64), torch.randn(3, 4, 2)
    lses[0, 0], lses[:, 1], lses[1, 2] = -torch.inf, -torch.inf, -torch.inf
    parts[0, 0], parts[:, 1], parts[1, 2] = torch.nan, torch.inf, torch.nan
    sink = torch.tensor([torch.inf, -torch.inf])
    out = guards.output(torch.zeros(4, 2, 64))
    with guards.allocations(monkeypatch):
        lse = combine_kernels.combine_parts(
            combine_call(guards.given(parts), guards.given(lses), guards.given(sink), out)
        )
    guards.check()
    wanted, wanted_lse = oracle.combine(parts, lses, sink)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.cpu().double(), wanted_lse, rtol=1e-6, atol=1e-6)


def test_guards_notice_a_single_byte(device: torch.device) -> None:
    for spoil in range(4):
        guards = Guards(device)
        held, cache = guards.given(torch.zeros(3)), guards.keep(guards.cache("v32-fp8", 2, 4))
        raw = held.as_strided((1,), (1,), held.storage_offset() + (3 if spoil == 0 else -1 if spoil == 1 else 0))
        if spoil < 3:
            raw.fill_(1.0)
        else:
            cache.storage.as_strided((1,), (1,), cache.storage.storage_offset() + 656 * 4).fill_(0)
        with pytest.raises(AssertionError, match="written to"):
            guards.check()
    assert named("v32-fp8").row_bytes == 656
