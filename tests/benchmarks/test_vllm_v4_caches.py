"""What the benchmark of V4 caches in plain rows makes of its results, and how it compares attention with float64."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from v4_rows import KINDS, PlainStep
from v4_standin import Records

from tamis.integrations.vllm import v4_forward


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("vllm_v4_caches")


def result(script: ModuleType, tokens: list[int]) -> dict[str, Any]:
    numbers = [[-1.0] * len(tokens)]
    one = {"tokens": [tokens], "again": [tokens], "logprobs": numbers, "margins": numbers, "seconds": [1.0] * 3}
    return {"start_seconds": 2.0, "sets": {name: dict(one) for name in script.PROMPTS}}


def test_engines_have_the_cache_of_their_name(script: ModuleType) -> None:
    known = {
        "own": ("fp8_ds_mla", False),
        "check": ("fp8_ds_mla", False),
        "tamis": ("fp8_ds_mla", True),
        "bf16": ("bfloat16", True),
        "fp8": ("fp8_e4m3", True),
        "bf16exact": ("bfloat16", True),
        "fp8exact": ("fp8_e4m3", True),
    }
    options = importlib.import_module("vllm_v4_engine").engine_options
    for attention, (cache, custom) in known.items():
        engine = script.Engine.named(f"{attention}-8-graph")
        assert (engine.cache, engine.custom) == (cache, custom)
        given = options(engine, Path("model"))
        assert (given["kv_cache_dtype"], given["attention_backend"]) == (cache, "CUSTOM" if custom else None)


def test_conditions_and_table(script: ModuleType) -> None:
    lines = [
        {"ratio": ratio, "phase": phase, "calls": 9, "calls_from_python": 3, "tamis_to_exact": 0.0017}
        for ratio in (0, 4, 128)
        for phase in ("decode", "prefill")
    ]
    engine = script.Engine("bf16exact", 8, "graph")
    found = {
        engine.name: result(script, [1] * 20) | {"check": lines},
        "own-8-eager": result(script, [1] * 15 + [2] * 5),
    }
    assert all(condition.passed for condition in script.exact_conditions(found, [engine]))
    rows = {(row["attention"], row["prompts"]): row for row in script.table(found, {"device": "none"})}
    assert rows["bf16exact", "long"]["equal_to_own_eager"] == "0.75000"
    assert rows["bf16exact", "short"]["worst_error_to_float64"] == "0.00170"
    assert rows["own", "short"]["worst_error_to_float64"] == ""
    lines[0] |= {"tamis_to_exact": 0.01, "calls_from_python": 9}
    failed = [str(c) for c in script.exact_conditions(found, [engine]) if not c.passed]
    assert failed == [
        "FAIL bf16exact-8-graph, ratio 0, decode: error to float64: 0.01 (<= 0.004)",
        "FAIL bf16exact-8-graph, ratio 0, decode: calls within replayed graphs: 0 (>= 1)",
    ]
    served = script.served_conditions(found, [script.Engine("own", 8, "eager"), script.Engine("fp8", 8, "eager")])
    assert [condition.passed for condition in served] == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_is_compared_with_float64(script: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("vllm_v4_check")
    for name in ("attend", "forward_decode", "forward_prefill"):
        monkeypatch.setattr(v4_forward, name, getattr(v4_forward, name))
    check = module.Exact(rows=4)
    check.allocate(torch.device("cpu"))
    check.install()
    step = PlainStep(kind, [1, 2, 5], [300, 20, 40])
    for ratio in (1, 128):
        records, output = Records(step, ratio), step.output()
        metadata = {"window": records.window, "attn": records.main}
        v4_forward.forward_step(step.layer(ratio), step.query()[0], step.positions(), output, metadata)
        step.agrees(output, ratio, step.query()[1])
    found = {(line["ratio"], line["phase"]): line["tamis_to_exact"] for line in check.report()}
    assert set(found) == {(ratio, phase) for ratio in (0, 128) for phase in ("decode", "prefill")}
    assert all(0.0005 < error < 0.003 for error in found.values()), "what rounding the output to bf16 leaves"
