"""Compressed entries against the sums written out in fp64, however the tokens were cut into steps."""

import bounds
import pytest
import torch
from compressing import C4, C16, C128, DIM, EXACT, KPOOL, PADDING, ROPE, Compressor
from seeds import reseed
from torch import Tensor

from tamis import IndexRecipe, Layout, PagedCache
from tamis.cache.layout import index_fp8, index_mxfp4, named, plain_fp8, rows
from tamis.ops import StatePages, compress_kv, write_index_keys, write_kv


@pytest.mark.parametrize(
    ("kind", "length"),
    [*((C4, n) for n in (4, 8, 32, 256, 1024)), *((C128, n) for n in (128, 256, 512)), (C16, 48)],
)
def test_prompts_in_one_step(kind, length: int) -> None:
    compressor = Compressor(**kind)
    compressor.step(("a", 0, length))
    compressor.check("a", length // compressor.ratio)


@pytest.mark.parametrize(
    "kind", [C4, C128, C16, KPOOL, {"ratio": 3, "overlapping": True}, {"ratio": 1, "overlapping": False}]
)
@pytest.mark.parametrize("chunk", [1, 37, 299])
def test_any_chunks_give_the_same_entries(kind, chunk: int) -> None:
    compressor = Compressor(**kind)
    compressor.run("a", 299, chunk)
    compressor.check("a", 299 // compressor.ratio)


@pytest.mark.parametrize("kind", [C4, C128, C16])
@pytest.mark.parametrize("prefix", [120, 128, 131, 255])
def test_prefix_then_decode_and_prefix_then_extension(kind, prefix: int) -> None:
    compressor = Compressor(**kind)
    compressor.step(("a", 0, prefix), ("b", 0, prefix - 3))
    compressor.run("a", prefix + 140, 1, start=prefix)
    compressor.step(("b", prefix - 3, prefix + 150))
    compressor.check("a", (prefix + 140) // compressor.ratio)
    compressor.check("b", (prefix + 150) // compressor.ratio)


@pytest.mark.parametrize("kind", [C4, C128])
def test_requests_share_steps_with_padding_between_and_after(kind) -> None:
    compressor = Compressor(**kind)
    compressor.step(("a", 0, 127), (PADDING, 0, 3), ("b", 0, 130), ("c", 0, 1))
    compressor.step(("a", 127, 128), ("b", 130, 131), ("c", 1, 2), (PADDING, 0, 5))
    compressor.step(("c", 2, 260), ("a", 128, 257), ("b", 131, 256))
    for request, length in (("a", 257), ("b", 256), ("c", 260)):
        compressor.check(request, length // compressor.ratio)


@pytest.mark.parametrize(("start", "count", "writes"), [(0, 127, 0), (0, 128, 1), (127, 1, 1), (128, 127, 0)])
def test_an_entry_appears_with_the_token_that_completes_it(start: int, count: int, writes: int) -> None:
    compressor = Compressor(**C128)
    if start:
        compressor.step(("a", 0, start))
    before = compressor.cache.storage.clone()
    compressor.step(("a", start, start + count))
    changed = (compressor.cache.storage != before).any(2).sum()
    assert changed == writes
    if writes:
        compressor.check("a", 1)


@pytest.mark.parametrize("kind", [C4, C128])
def test_a_preempted_request_resumes_from_copied_pages(kind) -> None:
    compressor = Compressor(**kind)
    compressor.step(("a", 0, 201))
    saved = [
        (pool, cache, cache.storage[pool.block_table(["a"])[0].long()].clone())
        for pool, cache in ((compressor.state_pool, compressor.state), (compressor.entry_pool, compressor.cache))
    ]
    for pool, cache, _ in saved:
        cache.storage[pool.block_table(["a"])[0].long()] = torch.nan
        pool.release("a")
    compressor.step(("b", 0, 300))
    for (pool, cache, pages), length in zip(saved, (201, 201 // compressor.ratio), strict=True):
        pool.extend("a", length)
        cache.storage[pool.block_table(["a"])[0].long()] = pages
    compressor.run("a", 300, 50, start=201)
    compressor.check("a", 300 // compressor.ratio)
    compressor.check("b", 300 // compressor.ratio)


@pytest.mark.parametrize("kind", [C4, C128])
def test_a_reused_prefix_needs_no_second_pass(kind) -> None:
    """A second request whose table begins with the first one's pages goes on with tokens of its own."""
    compressor = Compressor(**kind)
    compressor.step(("a", 0, 200))
    tail = compressor.tokens("b", 400)
    for mine, theirs in zip(tail, compressor.given["a"], strict=True):
        mine[:200] = theirs[:200]
    table = compressor.state_pool.block_table(["a"])
    compressor.state_pool.extend("b", 200)
    compressor.entry_pool.extend("b", 400)
    page = compressor.state_page
    table = torch.cat((table, compressor.state_pool.block_table(["b"])), dim=1)
    positions = torch.arange(200, 400)
    own = table[0, positions // page].long() * page + positions % page
    entries = torch.full((200,), -1)
    ends = (positions + 1) % compressor.ratio == 0
    entries[ends] = compressor.entry_pool.slots("b", 200 // compressor.ratio, 400 // compressor.ratio)
    pages = StatePages(own, torch.zeros(200, dtype=torch.int32), table)
    compressor.call(tail[0][200:400], tail[1][200:400], positions, pages, entries)
    first = 200 // compressor.ratio
    compressor.check("b", 400 // compressor.ratio, first=first)


@pytest.mark.parametrize("kind", [C4, C128])
@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_rejected_drafts_are_overwritten(kind, accepted: int) -> None:
    compressor = Compressor(**kind)
    compressor.step(("a", 0, 253))
    right = [part.clone() for part in compressor.tokens("a", 400)]
    for part in compressor.given["a"]:
        part[253 + accepted : 257] = torch.randn(4 - accepted, compressor.channels)
    compressor.step(("a", 253, 257))
    for part, restored in zip(compressor.given["a"], right, strict=True):
        part[:400] = restored
    compressor.run("a", 300, 3, start=253 + accepted)
    compressor.check("a", 300 // compressor.ratio)


@pytest.mark.parametrize("kind", [C4, C128])
def test_only_the_last_spans_of_state_are_needed(kind) -> None:
    """Pages that have left the window may be absent, or belong to someone else."""
    compressor = Compressor(**kind)
    compressor.step(("a", 0, 250))
    needed = compressor.ratio * (2 if compressor.overlapping else 1)
    held = compressor.state_pool.block_table(["a"])[0]
    first_kept = (250 - needed + 1) // compressor.state_page
    compressor.state.storage[held[:first_kept].long()] = torch.nan
    compressor.run("a", 270, 1, start=250)
    compressor.check("a", 270 // compressor.ratio)


def test_state_rows_hold_values_and_biased_scores() -> None:
    compressor = Compressor(**C4)
    compressor.step(("a", 0, 7))
    values, scores = compressor.tokens("a", 7)
    expected = torch.cat((values, scores + compressor.bias[torch.arange(7) % 4]), dim=1)
    assert torch.equal(compressor.state.read(compressor.state_pool.slots("a", 0, 7)), expected)


@pytest.mark.parametrize("kind", [C4, C128])
def test_hostile_slots_write_nothing(kind) -> None:
    compressor = Compressor(**kind)
    compressor.step(("a", 0, 128))
    entries, state = compressor.cache.storage.clone(), compressor.state.storage.clone()
    table = compressor.state_pool.block_table(["a"])
    ids = torch.zeros(4, dtype=torch.int32)
    values, scores = torch.randn(4, compressor.channels), torch.randn(4, compressor.channels)
    # Padding with slots left over from another step; a token that completes nothing, and one whose slot is -1.
    positions = torch.tensor([-1, -5, 128, 127])
    state_slots = torch.tensor([3, 5, -1, -1])
    slots = torch.tensor([2, 3, 4, -1])
    compressor.call(values, scores, positions, StatePages(state_slots, ids, table), slots)
    assert torch.equal(compressor.cache.storage, entries)
    assert torch.equal(compressor.state.storage.nan_to_num(7.0), state.nan_to_num(7.0))


def test_pages_that_a_table_lacks_take_no_part() -> None:
    """In a span of two pages, a page that is absent or unknown to the cache is left out. Without any page the entry is
    zeros."""
    compressor = Compressor(**C16, entry_page=1)
    compressor.step(("a", 0, 16))
    whole = compressor.state_pool.block_table(["a"])
    values, scores = compressor.tokens("a", 16)
    last = slice(15, 16)

    def again(table: Tensor) -> Tensor:
        pages = StatePages(torch.tensor([-1]), torch.zeros(1, dtype=torch.int32), table)
        compressor.call(values[last], scores[last], torch.tensor([15]), pages, torch.tensor([5]))
        return compressor.cache.read(torch.tensor([5]))[0]

    biased = scores.double() + compressor.bias.double()
    some, error = bounds.softmax_mean(biased[4:], values[4:].double())
    size = (some.square().mean() + 1e-6).sqrt()
    normed = some / size * compressor.norm.double()
    error = 2 * error.amax() / size * compressor.norm.amax() + bounds.rms_norm(normed)
    for missing in (-1, 700):
        table = whole.clone()
        table[0, 0] = missing
        # The span starts at position 0, where nothing is rotated.
        bounds.agree(again(table), normed, error)
    assert torch.equal(again(torch.full_like(whole, -1)), torch.zeros(DIM))
    assert torch.equal(again(whole[:, :0].new_full((1, 1), -1)), torch.zeros(DIM))


@pytest.mark.parametrize(
    ("layout", "rope", "scale", "bound"),
    [
        (named("v4-bf16"), 64, 1.0, 3e-3),
        (named("v4-fp16"), 64, 1.0, 5e-4),
        (named("v4-fp8"), 64, 1.0, 4e-2),
        (plain_fp8(latent=448, rope=64), 64, 0.5, 4e-2),
        (index_fp8(), 64, 1.0, 4e-2),
        (index_mxfp4(), 64, 1.0, 0.15),
        (rows(torch.float32, latent=128, rope=0), 64, 1.0, None),
    ],
    ids=lambda value: value.name if isinstance(value, Layout) else None,
)
def test_every_format_of_entries(layout: Layout, rope: int, scale: float, bound: float | None) -> None:
    compressor = Compressor(**C4, layout=layout, rope=rope, scale=scale, length=44)
    compressor.run("a", 42, 5)
    compressor.check("a", 10, bound)
    # What is stored is what `write_kv` stores for entries rounded once.
    stored = torch.bfloat16 if layout.quantised else layout.element
    other = Compressor(**C4, layout=layout, rope=rope, scale=scale, length=44)
    write_kv(compressor.expected("a", 10).to(stored), other.cache, torch.arange(10))
    gap = (other.cache.read(torch.arange(10)) - compressor.entries("a", 10)).abs()
    assert (gap > 1e-5).float().mean() < 0.02  # a sum that lies on a rounding boundary


@pytest.mark.parametrize(
    "layout", [index_fp8(), index_mxfp4(), named("v4-bf16", latent=64, rope=64)], ids=lambda x: x.name
)
def test_entries_turned_by_hadamard_are_those_of_index_keys(layout: Layout) -> None:
    """The bytes equal those of the same entries, exact and not rotated, written as keys under the cache's recipe."""
    reseed(3)
    exact = Compressor(**C4, layout=rows(torch.float32, latent=128, rope=0), rope=64, length=44)
    reseed(3)
    compressor = Compressor(**C4, layout=layout, rope=64, length=44, hadamard=True)
    for one in (exact, compressor):
        reseed(4)
        one.run("a", 42, 5)
    keys = PagedCache(layout, 600, compressor.entry_page, recipe=compressor.cache.recipe)
    write_index_keys(exact.entries("a", 10).bfloat16(), keys, compressor.entry_pool.slots("a", 0, 10))
    assert torch.equal(compressor.cache.storage, keys.storage)
    compressor.check("a", 10, {"index-fp8": 4e-2, "index-mxfp4": 0.15}.get(layout.name, 5e-3))


def test_exact_entries_turned_by_hadamard() -> None:
    compressor = Compressor(**C4, layout=rows(torch.float32, latent=32, rope=0), length=44, hadamard=True)
    compressor.run("a", 42, 5)
    compressor.check("a", 10)


def test_half_precision_inputs_are_widened_first() -> None:
    compressor = Compressor(**C4)
    compressor.given["a"] = tuple(part.bfloat16() for part in compressor.tokens("a", compressor.length))
    compressor.run("a", 40, 7)
    compressor.check("a", 10)


def test_empty_steps() -> None:
    compressor = Compressor(**C4)
    none = torch.zeros(0, dtype=torch.int64)
    pages = StatePages(none, none.int(), torch.zeros(1, 1, dtype=torch.int32))
    empty = torch.zeros(0, compressor.channels)
    compressor.call(empty, empty, none, pages, none)
    assert not compressor.cache.storage.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": torch.zeros(2, 30)}, "values must be 24 wide, or 48 where spans overlap, got 30"),
        ({"scores": torch.zeros(3, 48)}, "scores must be of shape"),
        ({"positions": torch.tensor([3, 2000])}, "make a longer cos_sin table"),
        ({"slots": torch.tensor([-1, 1200])}, "slots must be between .* and 1199"),
        ({"slots": torch.zeros(1, dtype=torch.int64)}, "slots must be of shape"),
        ({"bias": torch.zeros(0, 48)}, "bias must be at least one row"),
        ({"bias": torch.zeros(4, 24)}, "bias must be of shape"),
        ({"norm_weight": torch.ones(23)}, "norm_weight must be of shape"),
        ({"cos_sin": torch.zeros(9, 26)}, "cos_sin must be of an even width up to that of the rows, .* got 26"),
        ({"eps": 0.0}, "eps must be finite and > 0"),
        ({"state": PagedCache(EXACT, 2, 2)}, "state must be of float32 rows 96 wide"),
        (
            {"cache": PagedCache(EXACT, 600, 2, recipe=IndexRecipe(ROPE))},
            r"cache\.recipe must be IndexRecipe.*use a cache of",
        ),
        (
            {"cache": PagedCache(EXACT, 600, 2, recipe=IndexRecipe.of_v4(ROPE, hadamard=True))},
            "a power of two .* got 24",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(change, message: str) -> None:
    compressor = Compressor(**C4)
    table = torch.tensor([[1, 2]], dtype=torch.int32)
    arguments = {
        "values": torch.zeros(2, 48),
        "scores": torch.zeros(2, 48),
        "state": compressor.state,
        "cache": compressor.cache,
        "positions": torch.tensor([2, 3]),
        "pages": StatePages(torch.tensor([6, 7]), torch.zeros(2, dtype=torch.int32), table),
        "slots": torch.tensor([-1, 4]),
        "bias": compressor.bias,
        "norm_weight": compressor.norm,
        "cos_sin": compressor.cos_sin,
    } | change
    with pytest.raises(ValueError, match=message):
        compress_kv(**arguments)
    assert compressor.state.storage.isnan().all()
