"""What the benchmark of the V3.2 engine makes of its results, its checkpoint, and how it shows vLLM the plugin."""

import importlib
import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

CONFIG = {
    "hidden_size": 160,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "rope_theta": 10000,
    "rope_scaling": {"factor": 40, "mscale_all_dim": 1.0},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("vllm_engine")


@pytest.fixture(scope="module")
def tensors(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made") / "model"
    (source / "config.json").write_text(json.dumps(CONFIG))
    script.write_checkpoint(source, folder)
    assert json.loads((folder / "config.json").read_text()) == CONFIG
    found: dict[str, Tensor] = load_file(folder / "model.safetensors")
    return found


def result(tokens: list[list[int]], shift: float = 0.0, seconds: float = 1.0) -> dict[str, Any]:
    logprobs = [[-1.0 - shift * number for number in range(len(row))] for row in tokens]
    margins = [[0.25 * token for token in row] for row in tokens]
    turns = [seconds] * 9 + [9.0]
    return {"tokens": tokens, "logprobs": logprobs, "margins": margins, "seconds": turns, "start_seconds": 1.0}


def test_conditions(script: ModuleType) -> None:
    results = {name: result([[1] * 20]) for name in script.ENGINES}
    assert all(condition.passed for condition in script.conditions(results))
    results["tamis-bf16-graph"] = result([[1] * 18 + [2, 2]], seconds=1.5)
    del results["tamis-fp8_ds_mla-eager"]
    failed = [str(condition) for condition in script.conditions(results) if not condition.passed]
    assert failed == [
        "FAIL eager, fp8_ds_mla: tokens equal to bf16: nothing, an engine failed (>= 0.8)",
        "FAIL eager, fp8_ds_mla: logprob difference to bf16: nothing, an engine failed (<= 0.05)",
        "FAIL graph, bf16: tokens equal to FLASHMLA_SPARSE: 0.9 (>= 0.95)",
        "FAIL graph, bf16: throughput over FLASHMLA_SPARSE by medians: 0.6667 (>= 1)",
    ]


def test_the_entry_point_of_a_checkout_is_found(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_entry_point(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (point,) = entry_points(group="vllm.general_plugins")
    assert (point.name, point.value) == ("tamis", "tamis.integrations.vllm:register")


def test_the_checkpoint_has_the_tensors_of_the_model(tensors: dict[str, Tensor]) -> None:
    layer = {
        "input_layernorm": (160,),
        "post_attention_layernorm": (160,),
        "self_attn.q_a_proj": (64, 160),
        "self_attn.q_a_layernorm": (64,),
        "self_attn.q_b_proj": (4 * 128, 64),
        "self_attn.kv_a_proj_with_mqa": (192, 160),
        "self_attn.kv_a_layernorm": (128,),
        "self_attn.kv_b_proj": (4 * 128, 128),
        "self_attn.o_proj": (160, 4 * 64),
        "self_attn.indexer.wq_b": (4 * 128, 64),
        "self_attn.indexer.wk": (128, 160),
        "self_attn.indexer.k_norm": (128,),
        "self_attn.indexer.weights_proj": (4, 160),
        "mlp.gate_proj": (48, 160),
        "mlp.up_proj": (48, 160),
        "mlp.down_proj": (160, 48),
    }
    expected = {"model.embed_tokens.weight": (512, 160), "model.norm.weight": (160,), "lm_head.weight": (512, 160)}
    expected |= {f"model.layers.{n}.{name}.weight": shape for n in range(3) for name, shape in layer.items()}
    expected |= {f"model.layers.{n}.self_attn.indexer.k_norm.bias": (128,) for n in range(3)}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == expected
    assert {t.dtype for name, t in tensors.items() if "k_norm" not in name} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in tensors.values())


def test_few_candidates_of_one_class_each(tensors: dict[str, Tensor]) -> None:
    head = tensors["lm_head.weight"].float()
    candidates = head.abs().sum(1).nonzero()[:, 0]
    assert len(candidates) == 12
    directions = torch.nn.functional.normalize(head[candidates])
    torch.testing.assert_close(directions @ directions.T, torch.eye(12), atol=0.01, rtol=0)


def test_index_and_attention_look_for_the_same_tokens(tensors: dict[str, Tensor]) -> None:
    """In the first layer, where every query is the same: scores of all tokens, without the rotated parts."""
    embedded = tensors["model.embed_tokens.weight"].float()
    layer = {name.split("self_attn.")[1][:-7]: t.float() for name, t in tensors.items() if "layers.0.self_attn" in name}
    hidden = torch.nn.functional.rms_norm(embedded, (160,))
    query = torch.nn.functional.rms_norm(hidden[:1] @ layer["q_a_proj"].T, (64,))
    latent = torch.nn.functional.rms_norm(hidden @ layer["kv_a_proj_with_mqa"][:128].T, (128,))
    head = (query @ layer["q_b_proj"].T).view(4, 128)[0, :64]
    attended = latent @ (head @ layer["kv_b_proj"].view(4, 128, 128)[0, :64])
    keys = torch.nn.functional.layer_norm(hidden @ layer["indexer.wk"].T, (128,))[:, 64:]
    products = (query @ layer["indexer.wq_b"].T).view(4, 128)[:, 64:] @ keys.T
    indexed = (hidden[:1] @ layer["indexer.weights_proj"].T) @ products.relu()
    salient = 512 // 16
    best = attended.topk(salient).indices
    assert set(best.tolist()) == set(indexed[0].topk(salient).indices.tolist())
    others = torch.ones(512, dtype=torch.bool).index_fill(0, best, False)
    assert attended[best].min() > attended[others].max() + 0.5 * (attended[best].mean() - attended[others].mean())


def test_modes_that_agree_are_in_the_table(script: ModuleType, tmp_path: Path) -> None:
    results = {name: result([[1, 2, 3, 4]]) for name in script.ENGINES if "fp8" not in name}
    results["flashmla_sparse-bf16-graph"] = result([[1, 2, 3, 5]])
    assert script.own_modes_agree(results, script.PEERS["graph"]) == 0.75
    assert script.own_modes_agree(results, script.OWN["fp8_ds_mla", "eager"]) is None
    rows = {row["engine"]: row for row in script.rows(results, {"device": "none"})}
    assert rows["flashmla_sparse-bf16-eager"]["equal_eager_graph"] == "0.75000"
    assert rows["tamis-bf16-eager"]["equal_eager_graph"] == "1.00000"
    assert rows["tamis-bf16-eager"]["device"] == "none"
    # 8 prompts of 32 tokens in the median of one second; one turn of ten took nine.
    assert rows["tamis-bf16-eager"]["tokens_per_s_median"] == "256.00"
    assert rows["tamis-bf16-eager"]["seconds_highest"] == "9"


def test_too_few_turns_fail(script: ModuleType) -> None:
    results = {name: result([[1] * 20]) for name in script.ENGINES}
    results["flashmla_sparse-bf16-eager"]["seconds"] = [1.0] * 9
    failed = [str(condition) for condition in script.conditions(results) if not condition.passed]
    assert failed == ["FAIL eager: turns: 9 (>= 10)"]


def test_indexers_race_on_the_same_attention_and_cache(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    race = script.indexer_race
    raced = race.engines(["auto"])
    assert list(raced)[:2] == ["tamis-bf16-eager", "tamis-bf16-eager-tamis_indexer"]
    assert len(raced) == 8
    assert len(race.engines()) == 12
    results = {name: result([[1] * 20]) for name in raced}
    results["flashmla_sparse-bf16-graph-tamis_indexer"] = result([[1] * 18 + [2, 2]], seconds=2.0)
    assert race.report(results, list(raced.values()), tmp_path, {"device": "none"}) == 1
    printed = capsys.readouterr().out
    failed = [line for line in printed.splitlines() if line.startswith("FAIL")]
    assert failed == [
        "FAIL flashmla_sparse-bf16-graph: tokens equal to those of vLLM's indexer: 0.9 (>= 0.95)",
        "FAIL flashmla_sparse-bf16-graph: throughput over vLLM's indexer by medians: 0.5 (>= 1)",
    ]
    assert printed.count("PASS") == 10
    assert "flashmla_sparse-bf16-graph: indexers part at: 18 (margin 0.500)" in printed
    lines = (tmp_path / "h200_vllm_indexer_bf16.csv").read_text().splitlines()
    assert len(lines) == 9
    assert not (tmp_path / "h200_vllm_indexer_fp8_ds_mla.csv").exists()
    assert race.report({}, list(race.engines(["fp8_ds_mla"]).values()), tmp_path, {}) == 1
