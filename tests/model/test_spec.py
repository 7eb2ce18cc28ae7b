"""Layer specs from Hugging Face configs."""

import pytest

from tamis import LayerSpec

V32 = {
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": 2048,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "num_hidden_layers": 61,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
V4 = {
    "num_attention_heads": 64,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_topk": 512,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "compress_ratios": [0, 4, 128],
}


def test_v32() -> None:
    spec = LayerSpec.from_hf(V32, 3, tensor_parallel=8)
    assert (spec.heads, spec.latent_dim, spec.rope_dim, spec.value_dim, spec.head_dim) == (16, 512, 64, 512, 576)
    assert spec.scale == pytest.approx(0.1352338, abs=1e-7)
    assert (spec.topk, spec.index_heads, spec.index_dim, spec.reuse_topk) == (2048, 64, 128, False)
    assert not spec.sink
    assert spec.window is None


def test_scale_without_yarn_and_with_the_new_config_form() -> None:
    plain = {**V32, "rope_scaling": None}
    assert LayerSpec.from_hf(plain).scale == pytest.approx(192**-0.5)
    new = {**plain, "rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 40, "mscale_all_dim": 1.0}}
    assert LayerSpec.from_hf(new).scale == pytest.approx(0.1352338, abs=1e-7)
    with pytest.raises(ValueError, match=r"config.rope_type must be 'default' or 'yarn', got 'longrope'"):
        LayerSpec.from_hf({**plain, "rope_parameters": {"rope_type": "longrope"}})


def test_which_layers_share_top_k() -> None:
    every_fourth = {**V32, "index_topk_freq": 4}
    own = [layer for layer in range(12) if not LayerSpec.from_hf(every_fourth, layer).reuse_topk]
    assert own == [0, 1, 5, 9]
    pattern = {**V32, "index_topk_pattern": "FSSF"}
    assert [LayerSpec.from_hf(pattern, layer).reuse_topk for layer in range(5)] == [False, True, True, False, False]
    words = {**V32, "index_topk_pattern": ["full", "shared"]}
    assert [LayerSpec.from_hf(words, layer).reuse_topk for layer in range(3)] == [False, True, False]
    with pytest.raises(ValueError, match=r"index_topk_pattern\[1\] must be one of 'F', 'S', 'full', 'shared', got 's'"):
        LayerSpec.from_hf({**V32, "index_topk_pattern": "Fs"}, 1)
    assert not LayerSpec.from_hf({**every_fourth, "num_hidden_layers": 3}, 3).reuse_topk  # a speculative layer


def test_glm_5_3_flash_without_a_rope() -> None:
    """Settings of a rope that it does not have change nothing, and its own defaults hold where the config is silent."""
    text = {**V32, "qk_rope_head_dim": 0, "num_hidden_layers": 8}
    for config in (
        {**text, "model_type": "glm5_next_text"},
        {"text_config": text, "model_type": "glm5_next"},
    ):
        spec = LayerSpec.from_hf(config, 7)
        assert (spec.scale, spec.kpool, spec.rope_dim) == (128**-0.5, 16, 0)
        for layer in (0, 4, 6):
            with pytest.raises(ValueError, match=rf"layer_types\[{layer}\] must be a layer with a latent cache"):
                LayerSpec.from_hf(config, layer)
        assert LayerSpec.from_hf(config, 8).kpool == 16  # a speculative layer
    assert LayerSpec.from_hf({**text, "index_kpool": 4}, 0).kpool == 4


def test_layers_of_mistral_large_4() -> None:
    """Every fourth layer has no rope, if the config says nothing else; its scale counts all columns all the same."""
    text = {**V32, "model_type": "mistral_large4_text", "rope_scaling": None, "num_hidden_layers": 8}
    for config in (text, {"text_config": text, "model_type": "mistral_large4"}):
        specs = [LayerSpec.from_hf(config, layer) for layer in range(8)]
        assert [spec.rope_dim for spec in specs] == [64, 64, 64, 0] * 2
        assert {spec.scale for spec in specs} == {192**-0.5}
        assert not any(spec.reuse_rows or spec.sink for spec in specs)
    listed = {**text, "no_rope_layers": [0, 1], "kv_source_layers": [0, 1, 1]}
    assert [LayerSpec.from_hf(listed, layer).rope_dim for layer in range(3)] == [0, 64, 64]
    assert [LayerSpec.from_hf(listed, layer).reuse_rows for layer in range(4)] == [False, False, True, False]
    with pytest.raises(ValueError, match=r"config.kv_source_layers\[0\] must be between 0 and 0, got 1"):
        LayerSpec.from_hf({**text, "kv_source_layers": [1]})
    with pytest.raises(ValueError, match=r"config.no_rope_layers\[0\] must be between 0 and 1, got 2"):
        LayerSpec.from_hf({**text, "no_rope_layers": [2]})


def test_hy4_has_sinks() -> None:
    assert LayerSpec.from_hf({**V32, "model_type": "hy_v4"}).sink
    assert not LayerSpec.from_hf({**V32, "model_type": "axk2"}).sink


def test_v4_layer_kinds() -> None:
    window, indexed, plain = (LayerSpec.from_hf(V4, layer) for layer in range(3))
    for spec in (window, indexed, plain):
        assert (spec.latent_dim, spec.rope_dim, spec.value_dim, spec.window, spec.sink) == (448, 64, 512, 128, True)
        assert spec.scale == pytest.approx(512**-0.5)
    assert (window.kind, window.compress, window.topk) == ("window", 1, None)
    assert (indexed.kind, indexed.compress, indexed.topk, indexed.index_heads) == ("overlapping", 4, 512, 64)
    assert (plain.kind, plain.compress, plain.topk) == ("plain", 128, None)
    named = {k: v for k, v in V4.items() if k != "compress_ratios"} | {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
    }
    assert [LayerSpec.from_hf(named, layer).compress for layer in range(3)] == [1, 4, 16]
    assert [LayerSpec.from_hf(named, layer).kind for layer in range(3)] == ["window", "overlapping", "plain"]
    speculative = LayerSpec.from_hf({**V4, "num_hidden_layers": 1}, 1)
    assert (speculative.kind, speculative.compress) == ("window", 1)
    with pytest.raises(ValueError, match=r"config.compress_ratios\[0\] must be 0, 4 or 128, got 7"):
        LayerSpec.from_hf({**V4, "compress_ratios": [7]})
    with pytest.raises(ValueError, match=r"config.layer_types\[0\] must be one of 'sliding_attention', .*got 'linear'"):
        LayerSpec.from_hf(named | {"layer_types": ["linear"]})
    with pytest.raises(ValueError, match=r"config.compress_rates must be one with 'heavily_compressed_attention'"):
        LayerSpec.from_hf(named | {"compress_rates": {}}, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 0}, "heads must be between 1 and 128, got 0"),
        ({"heads": 129}, "heads must be between 1 and 128, got 129"),
        ({"value_dim": 577}, "value_dim must be between 1 and 576"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"topk": 0}, "topk must be >= 1"),
        ({"topk": None}, "topk must be given for a layer without a window"),
        ({"rope_dim": -1}, "rope_dim must be >= 0"),
        ({"compress": 0}, "compress must be >= 1"),
        ({"kind": "linear"}, "kind must be one of 'tokens', 'window', 'overlapping', 'plain', 'indexed', got 'linear'"),
        ({"kind": "window", "window": 8, "reuse_rows": True}, "reuse_rows must be False for a layer of kind 'window'"),
        ({"kind": "window", "window": 8, "reuse_entries": True}, "reuse_entries must be False for a layer of kind"),
        ({"kpool": 4}, "topk must be a multiple of kpool=4, in a layer of kind 'tokens', got 5"),
        ({"kind": "plain"}, "window must be given for a layer of kind 'plain'"),
        ({"kind": "overlapping", "window": 8}, "topk must be given, with index_heads and index_dim"),
    ],
)
def test_impossible_layers_are_refused(fields, message) -> None:
    with pytest.raises(ValueError, match=message):
        LayerSpec(**({"heads": 16, "topk": 5} | fields))


def test_other_configs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"config must be one with 'index_topk'"):
        LayerSpec.from_hf({k: v for k, v in V32.items() if k != "index_topk"})
    with pytest.raises(ValueError, match=r"config must be one with 'num_attention_heads'"):
        LayerSpec.from_hf({})
    for missing in ("kv_lora_rank", "qk_rope_head_dim", "index_n_heads", "index_head_dim"):
        with pytest.raises(ValueError, match=f"config must be one with '{missing}', got none"):
            LayerSpec.from_hf({k: v for k, v in V32.items() if k != missing} | {"head_dim": 64})
    for zero in ("index_n_heads", "index_head_dim", "kv_lora_rank"):
        with pytest.raises(ValueError, match=f"config.{zero} must be >= 1, got 0"):
            LayerSpec.from_hf({**V32, zero: 0})
    without = LayerSpec.from_hf({k: v for k, v in V32.items() if k not in ("index_n_heads", "index_head_dim")})
    assert (without.index_heads, without.index_dim) == (0, 0)  # positions come from elsewhere
    with pytest.raises(ValueError, match="tensor_parallel must be a divisor"):
        LayerSpec.from_hf(V32, tensor_parallel=3)
