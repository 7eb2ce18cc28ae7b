"""The indexer under values that checks on the host would refuse: skipped, and no byte elsewhere is touched.

Every tensor that a kernel is given, every output, every scratch tensor and every cache lies between guard zones.
"""

import pytest
import torch
from guarded import Guards
from hostile import HIGHEST, LOWEST, distinct, filled, hostile, on_host, same_bytes

from tamis.lab.testing import oracle
from tamis.model.recipe import IndexRecipe
from tamis.ops.index import reference as index_reference
from tamis.ops.index import triton_kernels as index_kernels
from tamis.ops.index.operations import (
    IndexScores,
    IndexTopk,
    QuantiseIndexQuery,
    RaggedScores,
    TopkPositions,
    WriteIndexKeys,
)


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
            IndexScores(
                guards.given(q),
                guards.given(weights),
                cache,
                guards.given(ids),
                guards.given(table),
                guards.given(lengths),
                out,
                "triton",
            )
        )
    guards.check()
    known = (ids >= 0) & (ids < 2)
    seen = torch.where(known, lengths.clamp(0, 56), 0)
    wanted = oracle.index_scores(q, weights, on_host(cache), ids.clamp(0, 1), table, seen)
    wanted = torch.cat((wanted, torch.full((tokens, 5), -torch.inf)), 1)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
    with guards.allocations(monkeypatch):
        found = torch.empty(tokens, 60, dtype=torch.int32, device=guards.device)
        index_kernels.index_topk(
            IndexTopk(
                guards.given(q),
                guards.given(weights),
                cache,
                guards.given(ids),
                guards.given(table),
                guards.given(lengths),
                60,
                1 << 20,
                tokens,
                found,
                "triton",
            )
        )
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
        index_kernels.ragged_scores(RaggedScores(*given, None, guards.given(starts), guards.given(ends), out, "triton"))
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
            found = index_kernels.topk_positions(
                TopkPositions(guards.given(scores), guards.given(lengths), k, *held, 16, "triton")
            )
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
            WriteIndexKeys(
                guards.given(keys),
                cache,
                guards.given(slots),
                None,
                None,
                1e-6,
                guards.given(positions),
                guards.given(table),
                recipe,
                "triton",
            )
        )
    guards.check()
    index_reference.write_index_keys(
        WriteIndexKeys(keys, wanted, torch.where(inside, slots, -1), None, None, 1e-6, at, angles, recipe, "reference")
    )
    assert same_bytes(cache, wanted)
    if layout == "index-fp8":
        q, weights = torch.randn(30, 3, 128), torch.randn(30, 3)
        given = [guards.given(t) for t in (q, weights, positions, table)]
        with guards.allocations(monkeypatch):
            values, folded = index_kernels.quantise_index_query(
                QuantiseIndexQuery(*given, recipe, cache.layout, 0.5, "triton")
            )
        guards.check()
        expected = index_reference.quantise_index_query(
            QuantiseIndexQuery(q, weights, at, angles, recipe, cache.layout, 0.5, "reference")
        )
        assert torch.equal(values.view(torch.uint8).cpu(), expected[0].view(torch.uint8))
        assert torch.equal(folded.cpu(), expected[1])
