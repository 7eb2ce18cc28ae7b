"""`inspect_model` against Hugging Face's dense attention and indexers, and the summary, packing and page."""

import base64
import copy
import dataclasses
import zlib
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from seeds import numpy_seeded, seeded

transformers = pytest.importorskip("transformers")

from tamis.integrations.hf.forward import language_model  # noqa: E402
from tamis.integrations.transformers import attach, detach, is_attached  # noqa: E402
from tamis.lab.generation import make_model  # noqa: E402
from tamis.lab.inspection import (  # noqa: E402
    Inspection,
    collect,
    describe_layers,
    describe_needle,
    describe_query,
    inspect_model,
    layer_overlap,
)
from tamis.lab.inspection.needle import needle_sentence  # noqa: E402
from tamis.lab.inspection.notes import Extent, LayerNotes  # noqa: E402
from tamis.lab.inspection.packing import pack_layer  # noqa: E402
from tamis.model.spec import LayerSpec  # noqa: E402

TOKENS = 400
NEEDLE = 77


@cache
def model(name: Any) -> Any:
    return make_model(name, torch.device("cpu"), 0)


@cache
def prompt() -> list[int]:
    return torch.randint(4096, (TOKENS,), generator=seeded(1)).tolist()


@cache
def inspected(name: str) -> Inspection:
    return inspect_model(model(name), prompt(), cache="fp32", needle=NEEDLE)


def dense_weights(name: str, layer: int) -> torch.Tensor:
    """Weights [H, T, S] of transformers' attention when its indexer may select everything."""
    other = copy.deepcopy(model(name))
    other.set_attn_implementation("eager")
    attention = language_model(other).layers[layer].self_attn
    indexer = attention.indexer if hasattr(attention, "indexer") else attention.compressor.indexer
    indexer.index_topk = TOKENS
    with torch.no_grad():
        return language_model(other)(torch.tensor([prompt()]), output_attentions=True).attentions[layer][0]


def chosen_by_transformers(name: str, layer: int) -> torch.Tensor:
    """The selection of the unattached model's indexer."""
    attention = language_model(model(name)).layers[layer].self_attn
    indexer = attention.indexer if hasattr(attention, "indexer") else attention.compressor.indexer
    found = []
    hook = indexer.register_forward_hook(lambda module, args, output: found.append(output))
    try:
        with torch.no_grad():
            language_model(model(name))(torch.tensor([prompt()]))
    finally:
        hook.remove()
    return found[0][0]


@pytest.mark.parametrize(
    ("name", "layer", "ratio"),
    [("v32", 0, 1), ("glm", 0, 1), ("v4", 1, 4), ("axk2", 0, 1), ("hy4", 0, 1), ("mistral-large4", 1, 1)],
)
def test_selections_and_recall_are_those_of_transformers(name: str, layer: int, ratio: int) -> None:
    notes = inspected(name).layer(layer)
    theirs = chosen_by_transformers(name, layer).tolist()
    weights = dense_weights(name, layer).double()
    places = weights[:, :, -notes.candidates :] if ratio > 1 else weights
    for query in range(TOKENS):
        visible = (query + 1) // ratio
        chosen = {place for place in notes.rows[query].tolist() if place >= 0}
        # float32 sums may order two nearly equal scores at the cutoff differently.
        for place in chosen - set(theirs[query]):
            score = notes.scores[query, notes.rows[query].tolist().index(place)]
            assert score - notes.cut[query] <= 1e-5 * np.abs(notes.scores[query]).max()
        assert notes.selected[query] == len(chosen) == min(64, visible)
        if not visible:
            assert np.isnan(notes.recall[query])
            continue
        mine = places[:, query, :visible]
        mine = mine / mine.sum(1, keepdim=True)
        assert float(mine[:, sorted(chosen)].sum(1).mean()) == pytest.approx(notes.recall[query], abs=2e-5)
        hits = [int(top) in chosen for top in mine.argmax(1)]
        assert sum(hits) / len(hits) == pytest.approx(notes.top1[query], abs=1e-6)
        if ratio > 1:
            entries, inside = weights[:, query, -notes.candidates :], sorted(chosen)
            near, on_entries = (float(part.sum(1).mean()) for part in (weights[:, query, : -notes.candidates], entries))
            selected = float(entries[:, inside].sum(1).mean())
            parts = [near, selected, on_entries - selected, 1 - near - on_entries]
            assert parts == pytest.approx(notes.parts[:, query].tolist(), abs=2e-5)


@pytest.mark.parametrize("name", ["v32", "glm", "v4"])
def test_looking_on_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, plain = [], []
    for method, found in (("watched", watched), ("plain", plain)):
        with monkeypatch.context() as patch:
            if method == "plain":
                patch.setattr(collect._Watch, "wrap", lambda self, number, layer: layer)
            hook = model(name).model.register_forward_hook(lambda m, a, out, found=found: found.append(out[0]))
            try:
                inspect_model(model(name), prompt()[:150])
            finally:
                hook.remove()
    assert torch.equal(watched[0], plain[0])
    assert not is_attached(model(name))


def test_chunks_and_few_elements_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "SCORE_ELEMENTS", 3000)
    monkeypatch.setattr(collect, "LOGIT_ELEMENTS", 20000)
    original = collect.attach
    monkeypatch.setattr(collect, "attach", lambda *args, **more: original(*args, chunk_tokens=90, **more))
    reports: list[tuple[int, int]] = []
    for name in ("v32", "v4"):
        found = inspect_model(model(name), prompt(), cache="fp32", report=lambda *done: reports.append(done))
        for notes, whole in zip(found.layers, inspected(name).layers, strict=True):
            assert np.array_equal(notes.rows, whole.rows)
            assert np.allclose(notes.recall, whole.recall, atol=1e-5, equal_nan=True)
            assert np.array_equal(notes.counts, whole.counts)
            assert np.allclose(notes.mass, whole.mass, atol=1e-5)
            assert np.array_equal(notes.distances, whole.distances)
        done, total = reports[-1]
        assert done == total == TOKENS * len(found.layers)


def test_maps_and_summaries_agree_with_the_rows() -> None:
    found = inspected("glm")
    layers = describe_layers(found)
    assert [layer["shares"] for layer in layers] == [None, 0, None]
    for notes, layer in zip(found.layers, layers, strict=True):
        rows = [{place for place in row if place >= 0} for row in found.source(notes).rows.tolist()]
        assert np.array_equal(notes.rows, found.source(notes).rows)
        # A map with one cell per pair is the selection itself.
        assert [set(np.flatnonzero(row)) for row in notes.counts] == rows
        assert np.allclose(notes.mass.sum(1), 1, atol=1e-5)
        later = notes.recall[64:]
        assert layer["recall"] == pytest.approx(later.mean(), abs=1e-6)
        assert layer["recall_p10"] == pytest.approx(np.quantile(later, 0.1), abs=1e-6)
        assert (layer["choosing"], layer["selected"]) == (TOKENS - 64, 64)
        assert sum(layer["distances"]) == sum(len(row) for row in rows)
        assert sum(layer["possible_distances"]) == TOKENS * (TOKENS + 1) // 2
    overlap = layer_overlap(found)
    assert overlap["iou"][0][1] == 1.0
    assert overlap["queries"] == 256
    rows = [{int(p) for p in found.layer(n).rows[399]} for n in (0, 2)]
    assert 0 < overlap["iou"][0][2] < 1
    assert overlap["iou"][0][2] == overlap["iou"][2][0]
    assert len(rows[0] & rows[1]) < 64
    query = describe_query(found, 399, str)
    assert query["token"] == str(prompt()[399])
    scores = [place["score"] for place in query["layers"][0]["selected"]]
    assert scores == sorted(scores, reverse=True)
    assert {place["position"] for place in query["layers"][1]["selected"]} == rows[0]


@pytest.mark.parametrize(("name", "layer"), [("v32", 1), ("glm", 1), ("v4", 1)])
def test_a_needle_is_followed_through_the_layers(name: str, layer: int) -> None:
    found = inspected(name)
    notes, source = found.layer(layer), found.source(found.layer(layer))
    candidate = NEEDLE // notes.ratio
    seen = np.arange(TOKENS) >= candidate * notes.ratio + notes.ratio - 1
    chosen = (source.rows == candidate).any(1)
    needle, ranks = notes.needle, source.needle.rank
    assert np.array_equal(needle.visible, seen)
    assert np.array_equal(needle.selected, chosen)
    assert 0 < chosen.sum() < seen.sum()
    assert np.array_equal((ranks > 0) & (ranks <= notes.topk), chosen)
    mine = np.where(source.rows == candidate, source.scores, -np.inf).max(1, keepdims=True)
    higher = ((source.rows >= 0) & (source.scores > mine)).sum(1) + 1
    assert np.array_equal(ranks[chosen], higher[chosen])
    assert source.needle.score[chosen] == pytest.approx(source.scores[source.rows == candidate])
    # A map with one cell per pair is dense attention itself.
    assert needle.weight[seen] == pytest.approx(notes.mass[seen, candidate], abs=1e-6)
    assert np.isnan(needle.weight[~seen]).all()
    described = describe_needle(found)
    (told,) = [one for one in described["layers"] if one["layer"] == layer]
    later = seen & notes.choosing
    assert (told["selected"], told["rank"]) == (bool(chosen[-1]), ranks[-1])
    assert told["later_selected"] == pytest.approx(chosen[later].mean())
    assert described["selected_by"] == [one["layer"] for one in described["layers"] if one["selected"]]
    assert describe_needle(dataclasses.replace(found, needle=None)) is None


def test_a_needle_that_no_query_can_see() -> None:
    """The last tokens of a prompt may not fill an entry yet."""
    found = describe_needle(inspect_model(model("v4"), prompt()[:22], needle=-1))
    assert found["selected_by"] == []
    (layer,) = found["layers"]
    assert (layer["visible"], layer["rank"], layer["weight"]) == (False, None, None)
    assert needle_sentence(found) == "The needle at position 21 is selected by no layer for the last query."


def test_layers_without_a_selection_are_told() -> None:
    layers = describe_layers(inspected("v4"))
    assert [layer["attends_to"] for layer in layers] == [
        "a window of 128 tokens",
        "a window of 128 tokens and entries of 4",
        "a window of 128 tokens and every entry of 128",
    ]
    assert ["recall" in layer for layer in layers] == [False, True, False]
    place = describe_query(inspected("v4"), 399, str)["layers"][0]["selected"][0]
    assert place["position"] == 4 * place["entry"]
    assert place["token"].split() == [str(token) for token in prompt()[place["position"] : place["position"] + 4]]


def test_short_prompts_are_selected_whole() -> None:
    found = inspect_model(model("v32"), prompt()[:20])
    layer = describe_layers(found)[0]
    assert (layer["choosing"], layer["recall"], layer["top1"], layer["tied_queries"]) == (0, 1.0, 1.0, 0)
    assert layer_overlap(found)["queries"] == 0
    assert describe_layers(inspect_model(model("v4"), prompt()[:2]))[1]["recall"] is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": []}, "tokens must be at least one"),
        ({"queries": [20]}, "queries must be between -20 and 19"),
        ({"needle": 20}, "needle must be between -20 and 19"),
        ({"compared_queries": 0}, "compared_queries must be >= 1"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect_model(model("v32"), **({"tokens": prompt()[:20]} | options))
    assert not is_attached(model("v32"))


def test_attached_models_are_refused_and_stay_attached() -> None:
    attach(model("v32"))
    try:
        with pytest.raises(ValueError, match="call detach"):
            inspect_model(model("v32"), prompt()[:20])
        assert is_attached(model("v32"))
    finally:
        detach(model("v32"))


def unpacked(
    about: dict[str, Any], text: str, kept: int
) -> tuple[list[np.ndarray], list[list[int]], list[list[float]]]:
    """The decoding of the page's script in plain Python."""
    stream = zlib.decompress(base64.b64decode(text))
    area = about["grid"] * about["columns"]
    kinds = [("u1", area), ("u1", area), ("<f4", about["grid"]), ("<u2", area)]
    kinds += [("<u2", kept), ("<f4", kept), ("<f4", kept)]
    kinds += [("u1", about["gapBytes"]), ("<u2", about["selectedCount"])]
    parts, at = [], 0
    for kind, count in kinds:
        parts.append(np.frombuffer(stream, kind, count, at))
        at += parts[-1].nbytes
    assert at == len(stream)
    counts, low, high, gaps, levels = parts[4:]
    rows: list[list[int]] = []
    scores: list[list[float]] = []
    read = iter(gaps.tolist())
    level = iter(levels.tolist())
    for row in range(kept):
        place, places = -1, []
        for _ in range(counts[row]):
            gap = shift = 0
            while True:
                byte = next(read)
                gap |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            place += gap + 1
            places.append(place)
        rows.append(places)
        scores.append([low[row] + (high[row] - low[row]) * next(level) / 65535 for _ in places])
    return parts[:4], rows, scores


def test_packed_layers_hold_what_was_noted() -> None:
    found = inspected("v32")
    notes = found.layers[1]
    maps, rows, scores = unpacked(*pack_layer(notes, notes), TOKENS)
    assert rows == [[place for place in row if place >= 0] for row in notes.rows.tolist()]
    for mine, theirs in zip(scores, notes.scores, strict=True):
        span = np.ptp(theirs[: len(mine)])
        assert np.abs(np.array(mine) - theirs[: len(mine)]).max() <= span / 65535
    assert np.array_equal(maps[0].reshape(TOKENS, TOKENS) > 0, notes.counts > 0)
    assert maps[0].max() == 255  # every pair of the first rows
    weights = (maps[3].reshape(TOKENS, TOKENS) / 65535) ** 2 * maps[2][:, None]
    assert np.allclose(weights, notes.mass, rtol=1e-3, atol=1e-7)
    shared = inspected("glm").layers[1]
    about, _ = pack_layer(shared, inspected("glm").layers[0])
    assert (about["selectedCount"], about["gapBytes"]) == (0, 0)


def test_long_prompts_keep_some_rows_only() -> None:
    spec = LayerSpec(heads=2, topk=2048, index_heads=2, index_dim=128)
    extent = Extent.plan([spec] * 61, 131072, 2048, [5])
    assert (len(extent.compared), len(extent.kept), extent.grid) == (2048, 257, 256)
    assert 5 in extent.kept[extent.shown].tolist()
    assert 8 < len(extent.shown) < 40
    notes = LayerNotes(0, spec, extent)
    arrays = [value for value in vars(notes).values() if isinstance(value, np.ndarray)]
    assert sum(array.nbytes for array in arrays) < 12e6


def test_a_page_of_many_layers_stays_small() -> None:
    spec = LayerSpec(heads=2, topk=2048, index_heads=2, index_dim=128)
    extent = Extent.plan([spec] * 61, 16384, 2048, [])
    notes = LayerNotes(0, spec, extent)
    chance = numpy_seeded(0)
    # Random selections compress worst.
    notes.rows = np.sort(chance.permuted(np.tile(np.arange(16384, dtype=np.int32), (256, 1)), axis=1)[:, :2048], axis=1)
    notes.scores = chance.random(notes.rows.shape, np.float32)
    lower = np.tri(256, dtype=bool)
    notes.counts = np.where(lower, chance.integers(0, 64, (256, 256)), 0)
    notes.best = np.where(lower, chance.random((256, 256)), -np.inf).astype(np.float32)
    notes.mass = np.where(lower, chance.random((256, 256)), 0)
    notes.visible = np.arange(1, 16385, dtype=np.int32)
    assert 61 * len(pack_layer(notes, notes)[1]) < 20e6
