"""Disturbed engines and drafts: the drafting layers' weights, what is counted, and what is made of the results."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

CONFIG = {
    "hidden_size": 160,
    "num_hidden_layers": 3,
    "vocab_size": 512,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "rope_theta": 10000,
    "num_nextn_predict_layers": 0,
    "first_k_dense_replace": 3,
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("vllm_disturbed")


@pytest.fixture(scope="module")
def drafts(script: ModuleType) -> ModuleType:
    return importlib.import_module("vllm_drafts")


def test_the_v32_checkpoint_has_a_drafting_layer(drafts: ModuleType, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "made"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(CONFIG))
    drafts.write_v32(source, folder)
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    # Otherwise vLLM would give the drafting layer experts.
    assert (config["num_nextn_predict_layers"], config["first_k_dense_replace"]) == (1, 4)
    plain = importlib.import_module("vllm_model").Weights(config, 20).tensors()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in plain.items())
    start = "model.layers.3."
    found = {name.removeprefix(start) for name in tensors if name.startswith(start)}
    # What vLLM's `DeepSeekMTP` loads for a drafting layer beside its block.
    parts = {"enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "embed_tokens"}
    block = {name.removeprefix("model.layers.2.") for name in plain if name.startswith("model.layers.2.")}
    assert found == block | {f"{name}.weight" for name in parts}
    assert set(tensors) == set(plain) | {start + name for name in found}
    assert torch.equal(tensors[f"{start}embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert torch.equal(tensors[f"{start}shared_head.head.weight"], tensors["lm_head.weight"])


def test_a_drafting_layer_sees_the_token_and_what_was_found_before(drafts: ModuleType) -> None:
    weights = importlib.import_module("vllm_model").Weights(drafts.v32_config(CONFIG), 20)
    tensors = drafts.v32_tensors(drafts.v32_config(CONFIG))
    embedding = tensors["model.embed_tokens.weight"][7].float()
    votes, codes = weights.found[-1][:, 3], weights.found[0][:, 1]
    hidden = embedding + 10 * votes + 10 * codes
    normed = [torch.nn.functional.rms_norm(part, (160,)) for part in (embedding, hidden)]
    seen = tensors["model.layers.3.eh_proj.weight"].float() @ torch.cat(normed)
    for direction in (weights.constant[:, 0], weights.key[:, 2], weights.classes[:, 5]):
        assert seen @ direction == pytest.approx(float(embedding @ direction), rel=0.2, abs=0.5)
    assert seen @ votes == pytest.approx(10, rel=0.3)
    assert seen @ codes == pytest.approx(10, rel=0.3)


def test_vllms_v4_drafting_model_is_filled(drafts: ModuleType) -> None:
    made = importlib.import_module("vllm_v4_model")
    config = drafts.v4_config(8)
    assert config["num_nextn_predict_layers"] == 1
    tensors = drafts.v4_tensors(config)
    plain = made.Weights(made.tiny_config(8)).tensors()
    assert all(torch.equal(tensors[name], tensor) for name, tensor in plain.items())
    wide, narrow = torch.float32, torch.float8_e4m3fn
    start = "model.layers.3."
    # Names and shapes of vLLM's `DeepSeekV4MTP`.
    shapes = {
        "model.embed_tokens.weight": ((1024, 1024), torch.bfloat16),
        f"{start}enorm.weight": ((1024,), torch.bfloat16),
        f"{start}hnorm.weight": ((1024,), torch.bfloat16),
        f"{start}e_proj.weight": ((1024, 1024), narrow),
        f"{start}e_proj.weight_scale_inv": ((8, 8), wide),
        f"{start}h_proj.weight": ((1024, 1024), narrow),
        f"{start}h_proj.weight_scale_inv": ((8, 8), wide),
        f"{start}hc_head_fn": ((4, 4096), wide),
        f"{start}hc_head_base": ((4,), wide),
        f"{start}hc_head_scale": ((1,), wide),
        f"{start}shared_head.norm.weight": ((1024,), torch.bfloat16),
        f"{start}shared_head.head.weight": ((1024, 1024), torch.bfloat16),
        f"{start}mtp_block.hc_attn_fn": ((24, 4096), wide),
        f"{start}mtp_block.attn_norm.weight": ((1024,), torch.bfloat16),
        f"{start}mtp_block.attn.attn_sink": ((64,), wide),
        f"{start}mtp_block.attn.fused_wqa_wkv.weight": ((1024, 1024), narrow),
        f"{start}mtp_block.attn.fused_wqa_wkv.weight_scale_inv": ((8, 8), wide),
        f"{start}mtp_block.ffn.gate.e_score_correction_bias": ((8,), wide),
        f"{start}mtp_block.ffn.experts.routed_experts.w2_weight": ((8, 1024, 256), narrow),
        f"{start}mtp_block.ffn.shared_experts.down_proj.weight": ((1024, 256), wide),
    }
    parameters = {
        name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
        for name, (shape, dtype) in shapes.items()
    }
    made.fill(SimpleNamespace(named_parameters=parameters.items), tensors)
    assert all(parameter.float().abs().sum() > 0 for name, parameter in parameters.items() if "bias" not in name)
    projection = made.restored(parameters[f"{start}h_proj.weight"], parameters[f"{start}h_proj.weight_scale_inv"])
    votes = made.Weights(config).votes
    gain = made.Weights(config).length(3) / 32
    torch.testing.assert_close(votes.T @ projection @ votes, torch.eye(12) * gain, atol=0.06 * gain, rtol=0)
    # vLLM gives a drafting layer a window only.
    assert not any("mtp_block.attn.compressor" in name or "mtp_block.attn.indexer" in name for name in tensors)


def test_the_ngram_drafter_runs_without_numba(drafts: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "numba", None)
    drafts.install_interpreted_numba()
    numba = sys.modules["numba"]

    @numba.njit(parallel=True)
    def first(count: int) -> list[int]:
        return list(numba.prange(count))

    @numba.jit
    def second(value: int) -> int:
        return value + 1

    numba.set_num_threads(numba.get_num_threads())
    assert (first(3), second(1)) == ([0, 1, 2], 2)


class Pool:
    def __init__(self, free: int) -> None:
        self.free = free

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_new_blocks(self, count: int) -> None:
        self.free -= count


class Impl:
    def forward_mqa(self, q: Any, cache: Any, metadata: Any, layer: Any) -> str:
        return "attended"


class Layer:
    prefix = "model.layers.0.attn"

    def _forward_decode(self, *, swa_metadata: Any) -> str:
        return "decoded"


def engine(pool: Pool, layers: dict[str, Any], metrics: dict[str, int], needs: list[int]) -> Any:
    def schedule() -> Any:
        pool.free -= needs[0]
        return SimpleNamespace(total_num_scheduled_tokens=needs.pop(0))

    scheduler = SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool), schedule=schedule)
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    return SimpleNamespace(
        llm_engine=SimpleNamespace(engine_core=core, vllm_config=config),
        get_metrics=lambda: [SimpleNamespace(name=name, value=value) for name, value in metrics.items()],
    )


def test_an_engine_is_observed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, metrics = Pool(100), {"vllm:num_preemptions": 3}
    monkeypatch.setattr(Impl, "forward_mqa", Impl.forward_mqa)  # restored afterwards
    impl = Impl()
    layers = {"model.layers.0.attn": SimpleNamespace(impl=impl), "cache": SimpleNamespace()}
    observed = script.Observed(engine(pool, layers, metrics, [30, 20, 0]))

    def work() -> str:
        for _ in range(3):
            observed.scheduler.schedule()
        pool.free += 50
        metrics["vllm:num_preemptions"] += 2
        for name, requests, tokens, longest in (
            ("model.layers.0.attn", 4, 12, 3),
            ("model.layers.0.attn", 4, 10, 3),
            ("model.layers.0.attn", 4, 4, 1),
            ("model.layers.0.attn", 4, 512, 300),  # with a prompt
            ("model.layers.3.attn", 4, 12, 3),  # the drafting layer
        ):
            record = SimpleNamespace(num_reqs=requests, num_actual_tokens=tokens, max_query_len=longest)
            assert impl.forward_mqa(None, None, record, SimpleNamespace(layer_name=name)) == "attended"
        return "done"

    found, counts = observed.during(work)
    assert found == "done"
    expected = {"preemptions": 2, "steps": 2, "blocks": 50, "free": 100}
    expected |= {"steps_with_drafts": 2, "steps_of_drafts_only": 1, "accepted_tokens": 0}
    assert {name: counts[name] for name in expected} == expected
    observed.leave(40)
    assert pool.free == 40
    observed.leave(60)
    assert pool.free == 40


def test_tokens_found_in_the_prefix_cache_are_counted(script: ModuleType) -> None:
    assert script.cached_tokens([SimpleNamespace(num_cached_tokens=count) for count in (64, None, 128)]) == 192


def test_v4_layers_are_observed(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "_forward_decode", Layer._forward_decode)
    layer = Layer()
    observed = script.Observed(engine(Pool(1), {"model.layers.0.attn": layer}, {}, []))
    for requests, tokens in ((2, 6), (2, 4), (2, 2), (0, 0)):
        record = SimpleNamespace(num_decodes=requests, num_decode_tokens=tokens)
        assert layer._forward_decode(swa_metadata=record) == "decoded"
    assert (observed.counts["steps_with_drafts"], observed.counts["steps_of_drafts_only"]) == (2, 1)


@pytest.mark.parametrize("model", ["v32", "v4"])
def test_prompts_begin_alike(script: ModuleType, drafts: ModuleType, model: str, tmp_path: Path) -> None:
    config = CONFIG if model == "v32" else drafts.v4_config(8)
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompts = [request["prompt_token_ids"] for request in script.requests(model, tmp_path)]
    shared, (shortest, longest) = script.SHARED[model], script.LENGTHS[model]
    assert len(prompts) == 8
    assert all(shortest <= len(prompt) <= longest for prompt in prompts)
    begins = [tuple(prompt[:shared]) for prompt in prompts]
    assert begins[:4] == [begins[0]] * 4
    assert begins[4:] == [begins[4]] * 4
    assert begins[0] != begins[4]


def test_options(script: ModuleType, tmp_path: Path) -> None:
    options = {engine.name: script.engine_options(engine, tmp_path) for engine in script.ENGINES}
    assert len(options) == 16
    assert options["v4-tamis-mtp"]["speculative_config"]["attention_backend"] == "CUSTOM"
    assert options["v4-own-mtp"]["speculative_config"]["attention_backend"] is None
    assert options["v32-own-mtp"]["speculative_config"]["attention_backend"] == "FLASHMLA_SPARSE"
    assert all(option["enable_prefix_caching"] == ("disturbed" in name) for name, option in options.items())
    chunked = options["v4-own-disturbed"]
    assert not chunked["scheduler_reserve_full_isl"]
    assert chunked["long_prefill_token_threshold"] * script.PROMPTS <= chunked["max_num_batched_tokens"]
    assert {script.Engine.named(name).name for name in options} == set(options)


def test_disturbances_go_on_until_requests_are_preempted(script: ModuleType) -> None:
    left, labels = [], []

    def run(label: str) -> dict[str, int]:
        labels.append(label)
        return {"blocks": 100, "preemptions": int(len(left) == 2)}

    engine = SimpleNamespace(reset_prefix_cache=lambda: labels.append("reset"))
    script.disturb(engine, SimpleNamespace(leave=left.append), run)
    assert left == [55, 42]
    assert labels == ["chunked", "cached", "reset", "small", "small", "small again"]


def results(script: ModuleType) -> dict[str, Any]:
    found = {}
    for engine in script.ENGINES:
        names = (*importlib.import_module("vllm_observed").COUNTERS, "prefix_hits", "steps", "steps_with_drafts")
        counts = dict.fromkeys((*names, "steps_of_drafts_only"), 4)
        run = {"tokens": [[1] * 20], "margins": [[0.5] * 20], "counts": counts}
        found[engine.name] = {
            "start_seconds": 2.0,
            "runs": {label: run | {"counts": dict(counts)} for label in script.labels(engine.kind)},
        }
    return found


def test_conditions(script: ModuleType) -> None:
    found = results(script)
    assert all(condition.passed for condition in script.conditions(found, script.ENGINES))
    found["v32-tamis-disturbed"]["runs"]["small"]["tokens"] = [[1] * 18 + [2] * 2]
    found["v4-own-disturbed"]["runs"]["small"]["counts"]["preemptions"] = 0
    found["v4-tamis-mtp"]["runs"]["first"]["counts"]["steps_of_drafts_only"] = 0
    # As often as vLLM's own attention differs from itself, tamis may.
    for name in ("v4-own-ngram", "v4-tamis-ngram"):
        found[name]["runs"]["again"]["tokens"] = [[1] * 17 + [3] * 3]
    del found["v32-own-ngram"]
    failed = [str(condition) for condition in script.conditions(found, script.ENGINES) if not condition.passed]
    assert failed == [
        "FAIL v32-own-ngram, first: steps_with_drafts: nothing, an engine failed (>= 1)",
        "FAIL v32-own-ngram, first: accepted_tokens: nothing, an engine failed (>= 1)",
        "FAIL v32-tamis-disturbed, small: tokens equal to the plain run's: 0.9 (>= 0.95)",
        "FAIL v4-own-disturbed, small: preemptions: 0 (>= 1)",
        "FAIL v4-tamis-mtp, first: steps_of_drafts_only: 0 (>= 1)",
    ]
    assert script.places(found)[0] == "v32-tamis-disturbed, small parts from the plain run at: 18 (margin 0.500)"


def test_the_table(script: ModuleType) -> None:
    found = results(script)
    found["v4-tamis-mtp"]["runs"]["first"]["counts"] |= {"draft_tokens": 16, "accepted_tokens": 4}
    found["v4-tamis-mtp"]["runs"]["first"]["tokens"] = [[1] * 15 + [2] * 5]
    table = {
        (row["model"], row["attention"], row["kind"], row["run"]): row for row in script.rows(found, {"vllm": "0"})
    }
    assert len(table) == 2 * 2 * (2 + 4 + 2 + 2)
    row = table["v4", "tamis", "mtp", "first"]
    assert (row["acceptance"], row["equal_to_plain"], row["equal_to_own"]) == ("0.25000", "0.75000", "0.75000")
    assert row["vllm"] == "0"
    assert len({tuple(row) for row in table.values()}) == 1
