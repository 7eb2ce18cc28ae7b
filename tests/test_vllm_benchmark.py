"""What the benchmark of the real engine makes of its results, and how it shows vLLM the plugin."""

import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("vllm_engine", ROOT / "benchmarks/vllm_engine.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["vllm_engine"] = module
    spec.loader.exec_module(module)
    return module


def result(tokens: list[list[int]], shift: float = 0.0, seconds: float = 1.0) -> dict[str, Any]:
    logprobs = [[-1.0 - shift * number for number in range(len(row))] for row in tokens]
    margins = [[0.25 * token for token in row] for row in tokens]
    return {"tokens": tokens, "logprobs": logprobs, "margins": margins, "seconds": [seconds, 2.0], "start_seconds": 1.0}


def test_numbers(script: ModuleType) -> None:
    one, other = result([[1, 2, 3], [4, 5, 6]]), result([[1, 2, 3], [4, 7, 6]], shift=0.1)
    assert script.equal_share(one, other) == pytest.approx(5 / 6)
    # Up to the first difference: shifts 0, 0.1, 0.2 of the first prompt, 0 of the second.
    assert script.logprob_difference(one, other) == pytest.approx(0.3 / 4)
    assert script.first_differences(one, other) == "none, 1 (margin 1.250)"
    entries = {7: SimpleNamespace(logprob=-2.0), 8: SimpleNamespace(logprob=-0.5), 9: SimpleNamespace(logprob=-3.0)}
    assert script.margin(entries) == 1.5
    assert script.equal_share(one, None) is None
    assert script.logprob_difference(None, one) is None


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
        "FAIL graph, bf16: throughput over FLASHMLA_SPARSE: 0.6667 (>= 1)",
    ]


def test_the_entry_point_of_a_checkout_is_found(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script.write_entry_point(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    (point,) = entry_points(group="vllm.general_plugins")
    assert (point.name, point.value) == ("tamis", "tamis.integrations.vllm:register")
