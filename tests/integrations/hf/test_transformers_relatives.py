"""A.X-K2, Hy4 and Mistral Large 4: what only they have; and, of all models, batches whose requests come and go.

What they share with other models is tested with those: logits, greedy tokens, padding, chunks and beams in
`test_transformers`, formats that round in `test_transformers_rounding`, gradients in `test_training`.
"""

import re
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import (
    PIXTRAL,
    RowsByThemselves,
    build,
    every_family,
    every_relative,
    logits,
    sum_token_by_token,
    tokens,
    transformers,
)
from hf_rounding import recorded_selections, rounded_logits

from tamis import LayerSpec
from tamis.integrations import transformers as attaching
from tamis.integrations.hf.forward import language_model
from tamis.integrations.hf.layers import v32_forward
from tamis.integrations.transformers import attach, detach, new_cache
from tamis.lab.inspection import describe_layers, inspect_model
from tamis.model.hf_config import is_linear
from tamis.model.known import KNOWN

# What transformers itself computes follows the default device, and an autocast or shorter products as they should.
pytestmark = pytest.mark.own_settings("the models' own", without=("meta", "cuda", "autocast", "tf32"))


def indexers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__.endswith("Indexer")]


@every_relative
def test_selections_are_those_of_the_untouched_model(model: Any) -> None:
    """At five times top-k: a position left out may have a higher score than one selected only by float32's noise."""
    ids = tokens(2, 160)
    attach(model, cache="fp32")
    with recorded_selections() as selections:
        logits(model, ids)
    detach(model)
    assert len(selections) == len(indexers(model))
    assert rounded_logits(model, ids, "fp32", selections)[1] < 1e-5


@every_family
@pytest.mark.parametrize("kind", ["fp32", "fp8"])
def test_requests_join_and_leave_a_running_batch(model: Any, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Continuous batching: prompts and single tokens in one step, a request that begins late, one that ends early."""
    attach(model, cache=kind)
    if fragile := kind == "fp8" and bool(new_cache(model).states):
        sum_token_by_token(model, monkeypatch)  # as in `test_chunks_and_single_tokens_give_what_the_whole_gives`
    with RowsByThemselves() if fragile else nullcontext():
        join_and_leave(model)


def join_and_leave(model: Any) -> None:
    ids = tokens(3, 90)
    alone = [logits(model, ids[row : row + 1])[0] for row in range(3)]
    held = new_cache(model)
    # The new tokens of each request, by step. The third request joins in the second step, as the others decode.
    taken, steps = [0, 0, 0], ((50, 41, 0), (1, 1, 40), (1, 1, 1), (3, 0, 20))
    kept = torch.zeros(3, 0, dtype=torch.int64)
    for counts in steps:
        width = max(counts)
        columns = torch.zeros(3, width, dtype=torch.int64)
        new = torch.zeros(3, width, dtype=torch.int64)
        own = torch.zeros(3, width, dtype=torch.int64)
        for row, count in enumerate(counts):
            columns[row, :count] = ids[row, taken[row] : taken[row] + count]
            own[row, :count] = torch.arange(taken[row], taken[row] + count)
            new[row, :count] = 1
        kept = torch.cat((kept, new), dim=1)
        found = logits(model, columns, attention_mask=kept, position_ids=own, past_key_values=held)
        for row, count in enumerate(counts):
            expected = alone[row][taken[row] : taken[row] + count]
            assert count == 0 or relative_error(found[row, :count], expected) < 1e-4
            taken[row] += count
    held.batch_select_indices(torch.tensor([2, 0]))
    own = torch.tensor([[taken[2]], [taken[0]]])
    last = torch.stack((ids[2, taken[2]], ids[0, taken[0]])).unsqueeze(1)
    mask = torch.cat((kept[[2, 0]], torch.ones(2, 1, dtype=torch.int64)), dim=1)
    found = logits(model, last, attention_mask=mask, position_ids=own, past_key_values=held)
    for row, request in enumerate((2, 0)):
        assert relative_error(found[row, 0], alone[request][taken[request]]) < 1e-4


@every_relative
def test_inspection_reports_every_layer(model: Any) -> None:
    prompt = tokens(1, 90)[0].tolist()
    found = describe_layers(inspect_model(model, prompt, cache="fp32"))
    assert [layer["layer"] for layer in found] == list(range(len(found)))
    attach(model, cache="fp32")
    with recorded_selections() as selections:
        logits(model, torch.tensor([prompt]))
    assert sum(layer["shares"] is None for layer in found) == len(selections) == len(indexers(model))
    for layer in found:
        assert layer["choosing"] == 90 - 32
        assert layer["selected"] == 32
        assert 0.2 < layer["recall"] < 1


@every_relative
def test_specs_are_those_of_the_config(model: Any) -> None:
    attach(model)
    found = language_model(model)._tamis.family.specs
    for layer, spec in enumerate(found):
        expected = LayerSpec.from_hf(model.config, layer)
        assert abs(spec.scale - expected.scale) < 1e-12
        assert replace(spec, scale=expected.scale) == expected


@pytest.mark.parametrize(
    ("name", "kind"), [("a.x-k2-light", "AXK2"), ("hy4", "HYV4"), ("mistral-large-4", "MistralLarge4Text")]
)
def test_known_sizes_are_the_defaults_of_transformers(name: str, kind: str) -> None:
    config, known = getattr(transformers, f"{kind}Config")(), KNOWN[name].config
    assert (config.num_hidden_layers, config.max_position_embeddings) == (
        known["num_hidden_layers"],
        known["max_position_embeddings"],
    )
    for layer in range(config.num_hidden_layers):
        assert LayerSpec.from_hf(known, layer) == LayerSpec.from_hf(config, layer)


LETTERS = {"index_topk_pattern": "FFSSFSSS"}
WORDS = {"index_topk_pattern": ["full", "full", "shared", "shared", "full", "shared", "shared", "shared"]}
FREQUENCY = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
SHARED_ROWS = {"no_rope_layer_interval": 2, "kv_source_layers": [0, 1, 0, 1, 4, 5, 6, 7]}
KINDS = {"layer_types": ["full_attention", "linear_attention"] * 4, "index_kpool": 8}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("GlmMoeDsa", ({}, LETTERS, WORDS, FREQUENCY)),
        ("HYV4", ({},)),
        ("MistralLarge4Text", ({}, LETTERS, WORDS, FREQUENCY, SHARED_ROWS)),
        ("Glm5NextText", ({}, LETTERS, WORDS, FREQUENCY, KINDS)),
    ],
)
def test_files_that_leave_settings_out_mean_what_transformers_reads(
    kind: str, changes: tuple[dict[str, Any], ...]
) -> None:
    """`tamis size` reads config.json by itself: what a layer is must not depend on who fills in the defaults."""
    rope = 0 if kind == "Glm5NextText" else 8
    sizes = {"num_hidden_layers": 8, "num_attention_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 16}
    for change in changes:
        given = sizes | {"qk_rope_head_dim": rope, "index_topk": 32, **change}
        config = getattr(transformers, f"{kind}Config")(num_key_value_heads=4, **given)
        named = given | {"model_type": config.model_type, "index_n_heads": 4, "index_head_dim": 32}
        for layer in range(8):
            linear = config.layer_types[layer] == "linear_attention"
            assert is_linear(named, layer) == linear
            if linear:
                continue
            spec = LayerSpec.from_hf(named, layer)
            assert spec.reuse_topk == (config.indexer_types[layer] == "shared")
            assert spec.kpool == getattr(config, "index_kpool", 1)
            assert spec.reuse_rows == (getattr(config, "kv_source_layers", range(8))[layer] != layer)
            assert spec.rope_dim == rope * getattr(config, "no_rope_layers", [1] * 8)[layer]


def test_the_class_in_the_documents_is_all_of_ax_k2(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.S)
    names: dict[str, Any] = {"torch": torch}
    exec(next(block for block in blocks if "class AxK2Family" in block), names)
    model, ids = build("axk2"), tokens(1, 100)
    expected = logits(model, ids)
    monkeypatch.setitem(attaching._MODELS, "AXK2ForCausalLM", (names["AxK2Family"], v32_forward))
    attach(model, cache="fp32")
    assert type(model.model._tamis.family) is names["AxK2Family"]
    assert relative_error(logits(model, ids), expected) < 1e-5


def bytes_per_token(model: Any) -> list[dict[str, int]]:
    return [{name: held.layout.row_bytes for name, held in layer.items()} for layer in new_cache(model).shape.layers]


def test_rows_of_full_width_have_their_published_sizes() -> None:
    """By hand. A.X-K2: 128 values, a scale, 32 columns of rope in bf16, up to a multiple of 16. Mistral Large 4: 512
    values and four scales, with 64 columns of rope or none; a layer that reads another's rows holds none."""
    sizes = {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "index_head_dim": 128}
    model = build("axk2", num_hidden_layers=1, mlp_layer_types=["dense"], **sizes)
    attach(model)
    assert bytes_per_token(model) == [{"latent": 208, "index": 132}]
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    model = build("mistral-large4", **sizes)
    attach(model)
    expected = [{"latent": 656, "index": 132}, {"latent": 528, "index": 132}, {"latent": 656}, {}, {"index": 132}]
    assert bytes_per_token(model) == [*expected, {"latent": 656}]


def test_many_heads_gather_prefills_of_both_widths() -> None:
    """From 32 heads on, FP8 prefills go through a workspace, which is as wide as the rows of its layers."""
    model = build("mistral-large4", num_attention_heads=32, num_key_value_heads=32)
    ids = tokens(1, 90)
    attach(model, cache="fp8")
    held = new_cache(model)
    plans = model.model.language_model._tamis.family.plan(held.batch(torch.ones(1, 2, dtype=torch.bool)))
    assert {rope: plan.mode for rope, plan in plans.items()} == {8: "separate", 0: "separate"}
    whole = logits(model, ids)
    held = new_cache(model)
    parts = [logits(model, ids[:, a:b], past_key_values=held) for a, b in ((0, 60), (60, 61), (61, 90))]
    assert relative_error(torch.cat(parts, dim=1), whole) < 1e-4


def test_a_prompt_with_an_image() -> None:
    """The language model gets embeddings, some of which are those of an image's patches."""
    model, ids = build("mistral-large4"), tokens(1, 100)
    size = PIXTRAL["image_size"]
    patches = (size // PIXTRAL["patch_size"] // model.config.spatial_merge_size) ** 2
    ids[0, 10 : 10 + patches] = model.config.image_token_index
    image = {"pixel_values": torch.linspace(-1, 1, 3 * size * size).view(1, 3, size, size)}
    image["image_sizes"] = torch.tensor([[size, size]])
    expected = logits(model, ids, **image)
    assert (
        relative_error(
            logits(model, ids, pixel_values=-image["pixel_values"], image_sizes=image["image_sizes"]), expected
        )
        > 1e-2
    )
    attach(model, cache="fp32", chunk_tokens=30)
    assert relative_error(logits(model, ids, **image), expected) < 1e-5


def test_rows_of_a_layer_that_transformers_would_not_read_are_refused() -> None:
    with pytest.raises(ValueError, match=r"kv_source_layers\[4\] must be 2, the latest layer with rope .*, got 0"):
        attach(build("mistral-large4", kv_source_layers=[0, 1, 2, 1, 0, 2]))


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("indexer", [True, False])
def test_hy4_with_adjacent_pairs(attention: bool, indexer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The config turns adjacent pairs on, as an untouched model computes them whose rotation is replaced."""
    model, ids = build("hy4"), tokens(1, 120)
    library: Any = sys.modules[type(model).__module__]
    interleave = transformers.models.glm_moe_dsa.modeling_glm_moe_dsa.apply_rotary_pos_emb_interleave
    halves = library.apply_rotary_pos_emb

    def rotation(q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        adjacent = indexer if unsqueeze_dim == 2 else attention
        return (interleave if adjacent else halves)(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)

    usual = logits(model, ids)
    monkeypatch.setattr(library, "apply_rotary_pos_emb", rotation)
    expected = logits(model, ids)
    assert (relative_error(expected, usual) > 1e-4) == (attention or indexer)
    model.config.rope_interleave, model.config.indexer_rope_interleave = attention, indexer
    attach(model, cache="fp32")
    assert relative_error(logits(model, ids), expected) < 1e-5
    detach(model)
    model.config.rope_interleave = "yes"
    with pytest.raises(TypeError, match="rope_interleave"):
        attach(model)
