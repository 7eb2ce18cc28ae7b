"""GLM-5.3-Flash: what the tests that it shares with other models do not cover."""

from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import GLM5_NEXT, base_of, build, greedy, logits, tokens

from tamis import LayerSpec
from tamis.integrations.transformers import attach, detach, is_attached, new_cache, recording
from tamis.lab.inspection import describe_layers, describe_query, inspect_model
from tamis.layers.mla import SparseMLA
from tamis.layers.recording import Recording

# What transformers itself computes follows the default device, and an autocast or shorter products as they should.
pytestmark = pytest.mark.own_settings("the models' own", without=("meta", "cuda", "autocast", "tf32"))
glm5_next = pytest.mark.parametrize("model", ["glm5-next"], indirect=True)


def indexers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == "Glm5NextTextIndexer"]


@pytest.mark.parametrize("model", ["glm5-next", "glm5-next-16"], indirect=True)
def test_selections_are_the_models_own(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past its top-k, with padding: the same tokens, whatever their order; the gaps of the model's rows are skipped."""
    ids, mask = tokens(2, 150), torch.ones(2, 150, dtype=torch.int64)
    mask[1, :43] = 0
    expected: list[torch.Tensor] = []
    hooks = [indexer.register_forward_hook(lambda *args: expected.append(args[-1])) for indexer in indexers(model)]
    logits(model, ids, attention_mask=mask)
    for hook in hooks:
        hook.remove()
    found: list[torch.Tensor] = []
    own = SparseMLA._selected
    monkeypatch.setattr(SparseMLA, "_selected", lambda *args: found.append(own(*args)) or found[-1])
    attach(model, cache="fp32")
    logits(model, ids, attention_mask=mask)
    columns = LayerSpec.from_hf(model.config, 1).columns
    assert columns == 32 + base_of(model).config.index_kpool - 1
    assert len(found) == len(expected) > 0
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape[1] == theirs.shape[-1] == columns
        for row, first in enumerate((0, 43)):
            packed = ours[150 * row :][: 150 - first]
            for mine, raw in zip(packed.tolist(), theirs[row, first:].tolist(), strict=True):
                assert [p for p in mine if p >= 0] == sorted(p - first for p in raw if p >= 0)


@glm5_next
def test_a_recording_of_its_selections(model: Any) -> None:
    ids = tokens(2, 90)
    attach(model, cache="fp32")
    recorded = Recording(topk=32, kpool=4)
    with recording(model, recorded, ["a", "b"]):
        greedy(model, ids, 8)
    plan = base_of(model)._tamis.family.plan(new_cache(model).batch(torch.ones(2, 97, dtype=torch.bool)))
    rows = recorded.replay(1, ["a", "b"], plan)
    assert rows.shape == (194, 35)
    assert (rows[96] >= 0).sum() == 33  # eight groups of four, and one token after the last of 24
    with pytest.raises(ValueError, match="recording must be"):
        recorded.replay(2, ["a", "b"], plan)


@glm5_next
@pytest.mark.parametrize(
    "steps", [((1, 70), (30, 2), (1, 1)), ((40, 9), (1, 0), (0, 1), (1, 1)), ((0, 5), (3, 1), (2, 2))]
)
def test_padding_leaves_states_as_they_are(model: Any, steps: tuple[tuple[int, ...], ...]) -> None:
    """Padding after one token, and steps in which a request has no token at all."""
    ids, taken = tokens(2, 90), [0, 0]
    attach(model, cache="fp32", chunk_tokens=2 * 16)
    alone = [logits(model, ids[row : row + 1])[0] for row in range(2)]
    held, kept = new_cache(model), torch.zeros(2, 0, dtype=torch.int64)
    for counts in steps:
        new = torch.arange(max(counts)) < torch.tensor(counts).unsqueeze(1)
        columns = torch.zeros_like(new, dtype=torch.int64)
        for row, count in enumerate(counts):
            columns[row, :count] = ids[row, taken[row] : taken[row] + count]
        kept = torch.cat((kept, new.long()), dim=1)
        found = logits(model, columns, attention_mask=kept, past_key_values=held)
        for row, count in enumerate(counts):
            expected = alone[row][taken[row] : taken[row] + count]
            assert count == 0 or relative_error(found[row, :count], expected) < 1e-5
            taken[row] += count


@glm5_next
def test_parts_of_the_model_are_attached_by_themselves(model: Any) -> None:
    ids = tokens(2, 90)
    with torch.no_grad():
        expected = base_of(model)(ids).last_hidden_state
        for part in (model.model.language_model, model.model):
            attach(part, cache="fp32")
            assert is_attached(model)
            assert relative_error(part(input_ids=ids).last_hidden_state, expected) < 1e-5
            detach(part)
    assert not is_attached(model)


@glm5_next
def test_images(model: Any) -> None:
    """The vision model and the places of its embeddings are the model's own."""
    config = model.config
    image = config.vision_config
    grid = torch.tensor([[1, 4, 4]])
    pixels = torch.randn(16, image.in_channels * image.temporal_patch_size * image.patch_size**2)
    ids = tokens(1, 100)
    config.image_token_id, config.video_start_token_id, config.video_end_token_id = 7, 1000, 1001
    ids[ids == 7] = 8
    ids[0, 60:64] = 7
    given = {"pixel_values": pixels, "image_grid_thw": grid}
    expected, generated = logits(model, ids, **given), greedy(model, ids, 8, **given)
    without = logits(model, ids)
    attach(model, cache="fp32", chunk_tokens=32)
    assert relative_error(logits(model, ids, **given), expected) < 1e-5
    assert relative_error(without, expected) > 1e-3
    assert torch.equal(greedy(model, ids, 8, **given), generated)


@glm5_next
def test_what_it_keeps(model: Any) -> None:
    """528 bytes a token at full width; keys of single tokens and the states of linear attention do not grow."""
    wide = build("glm5-next", kv_lora_rank=512)
    attach(wide)
    held = new_cache(wide)
    logits(wide, tokens(1, 40), past_key_values=held)
    assert held.paged[0] == {}
    assert [held.paged[1][name].layout.row_bytes for name in ("latent", "index")] == [528, 36]
    assert "index" not in held.paged[2]  # a layer that shares the selection of layer 1
    attach(model)
    held = new_cache(model)
    logits(model, tokens(1, 40), past_key_values=held)
    before = held.depths["state4"]
    sizes = [held.get_recurrent_state(layer).numel() for layer in (0, 3)]
    for _ in range(5):
        logits(model, tokens(1, 40), past_key_values=held)
    assert held.depths["state4"] <= before + 1
    assert [held.get_recurrent_state(layer).numel() for layer in (0, 3)] == sizes
    with pytest.raises(ValueError, match="start again"):
        held.crop(-1)
    held.reset()
    assert held.get_conv_state(0) is None
    assert held.get_recurrent_state(0) is None


@glm5_next
def test_a_model_without_a_cache_still_runs_in_chunks(model: Any) -> None:
    ids = tokens(2, 90)
    expected = logits(model, ids)
    attach(model, cache="fp32", chunk_tokens=40)
    with torch.no_grad():
        found = model(ids, use_cache=False)
    assert found.past_key_values is None
    assert relative_error(found.logits, expected) < 1e-5


@glm5_next
def test_refusals(model: Any) -> None:
    with pytest.raises(ValueError, match="indexer must be 'frozen' or 'sparse' for pooled index keys"):
        attach(model, train=True, indexer="warmup")
    with pytest.raises(ValueError, match="to train, got Glm5NextModel"):
        attach(model.model, train=True)
    assert not is_attached(model)
    with pytest.raises(ValueError, match="index_kpool_always_select_tail must be True"):
        attach(build("glm5-next", index_kpool_always_select_tail=False))
    with pytest.raises(ValueError, match=r"layer_types\[0\] must be a layer with a latent cache"):
        LayerSpec.from_hf(model.config, 0)
    attach(model)
    with pytest.raises(ValueError, match=r"Recording\(topk=32, kpool=4\)"), recording(model, Recording(topk=32), ["a"]):
        logits(model, tokens(1, 8))


@glm5_next
def test_inspection(model: Any) -> None:
    """Selections, scores and recall against the model's own indexer and its attention without a selection."""
    ids = tokens(1, 120)
    chosen: list[torch.Tensor] = []
    hook = indexers(model)[0].register_forward_hook(lambda *args: chosen.append(args[-1][0]))
    logits(model, ids)
    hook.remove()
    other = build("glm5-next")
    other.set_attn_implementation("eager")
    for indexer in indexers(other):
        indexer.index_topk = 200
    with torch.no_grad():
        weights = other(ids, output_attentions=True).attentions[0][0]
    found = inspect_model(model, ids[0].tolist(), cache="fp32", needle=40)
    assert [notes.number for notes in found.layers] == [1, 2]
    assert [layer["attends_to"][:6] for layer in describe_layers(found)] == ["a stat", "groups", "groups", "a stat"]
    notes = found.layer(1)
    for query in range(120):
        own = {p for p in notes.rows[query].tolist() if p >= 0}
        assert own == {p for p in chosen[0][query].tolist() if p >= 0}
        dense = weights[:, query, : query + 1]
        assert float(dense[:, sorted(own)].sum(1).mean()) == pytest.approx(notes.recall[query], abs=2e-5)
        scores = dict(zip(notes.rows[query].tolist(), notes.scores[query].tolist(), strict=True))
        for token in own:
            group = token // 4 * 4
            alike = scores[group] if group + 4 <= query + 1 else notes.cut[query]
            assert scores[token] == pytest.approx(alike)
    assert describe_query(found, 119, str)["layers"][0]["selected"]


def test_a_pool_of_one_token_is_no_pool() -> None:
    model, ids = build("glm5-next", index_kpool=1), tokens(2, 120)
    expected = logits(model, ids)
    attach(model, cache="fp32")
    assert relative_error(logits(model, ids), expected) < 1e-5
    detach(model)
    attach(model, cache="fp8")
    assert relative_error(logits(model, ids), expected) < 0.1


def test_settings_of_a_rope_that_it_does_not_have_change_nothing() -> None:
    """YaRN would scale the softmax of other models of the family."""
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}
    model, ids = build("glm5-next", rope_parameters=yarn | {"mscale": 1.0, "mscale_all_dim": 1.0}), tokens(1, 90)
    expected = logits(model, ids)
    attach(model, cache="fp32")
    assert relative_error(logits(model, ids), expected) < 1e-5


def test_the_published_sizes() -> None:
    """As the checkpoint and the wrapper's config have them."""
    text = GLM5_NEXT | {"num_attention_heads": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 256, "index_topk": 2048}
    spec = LayerSpec.from_hf({"text_config": text | {"index_head_dim": 128}, "vision_config": {}}, 1)
    assert (spec.heads, spec.head_dim, spec.value_dim, spec.scale) == (64, 512, 512, 256**-0.5)
    assert (spec.topk, spec.kpool, spec.columns, spec.index_topk) == (2048, 4, 2051, 512)
