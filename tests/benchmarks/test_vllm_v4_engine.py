"""What the benchmark of DeepSeek-V4 makes of its results, and what it measures beside vLLM's own attention."""

import dataclasses
import importlib
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return importlib.import_module("vllm_v4_engine")


def result(script: ModuleType, tokens: list[int], seconds: float = 1.0) -> dict[str, Any]:
    logprobs = [[-1.0] * len(tokens)]
    one = {"tokens": [tokens], "again": [tokens], "logprobs": logprobs, "margins": logprobs, "seconds": [seconds] * 10}
    return {"start_seconds": 2.0, "sets": {name: dict(one) for name in script.PROMPTS}}


def results(script: ModuleType) -> dict[str, Any]:
    names = [script.Engine(who, 8, mode).name for who in ("own", "tamis") for mode in script.MODES]
    return {name: result(script, [1] * 20) for name in names}


def test_names(script: ModuleType) -> None:
    engine = script.Engine("tamis", 64, "graph")
    assert script.Engine.named(engine.name) == engine


def test_conditions_of_the_race(script: ModuleType) -> None:
    found = results(script)
    assert all(condition.passed for condition in script.race_conditions(found, [8]))
    found["tamis-8-graph"] = result(script, [1] * 18 + [2, 2], seconds=1.25)
    del found["own-8-eager"]
    failed = [str(condition) for condition in script.race_conditions(found, [8]) if not condition.passed]
    assert len(failed) == 3 * len(script.PROMPTS) + 2 * len(script.PROMPTS)
    assert "FAIL 8 heads, eager, short: turns: nothing, an engine failed (>= 10)" in failed
    assert "FAIL 8 heads, graph, long: tokens equal to FlashMLA's: 0.9 (>= 0.95)" in failed
    assert "FAIL 8 heads, graph, long: throughput over FlashMLA's by medians: 0.8 (>= 1)" in failed


def test_tables_and_floors(script: ModuleType) -> None:
    found = results(script)
    found["tamis-8-graph"]["sets"]["short"]["again"] = [[1] * 15 + [3] * 5]
    rows = {(row["attention"], row["mode"], row["prompts"]): row for row in script.race_rows(found, {"device": "none"})}
    assert len(rows) == 4 * len(script.PROMPTS)
    assert rows["tamis", "graph", "short"]["equal_again"] == "0.75000"
    assert rows["tamis", "graph", "short"]["tokens_per_s_median"] == "256.00"
    assert rows["own", "eager", "long"]["throughput_over_own"] == "1.00000"
    del found["own-8-eager"]
    lines = script.floors(found, [8])
    assert (
        "tamis with itself, 8 heads, short: eager and graph 1.00000, eager twice 1.00000, graph twice 0.75000" in lines
    )
    assert "own and tamis, 8 heads, graph, long part at: none" in lines


def test_conditions_of_check(script: ModuleType) -> None:
    line = {"calls": 40, "calls_from_python": 4, "own_to_tamis": 0.002, "own_to_tamis_worst_token": 0.003}
    line |= {"exact_calls": 3, "own_to_exact": 0.0018, "tamis_to_exact": 0.0017}
    lines = [line | {"ratio": ratio, "phase": phase} for ratio in (0, 4, 128) for phase in ("decode", "prefill")]
    engine = script.Engine("check", 16, "graph")
    assert all(c.passed for c in script.check_conditions({engine.name: {"check": lines}}, [engine]))
    lines[0] = lines[0] | {"calls_from_python": 40, "own_to_tamis": 0.02, "tamis_to_exact": 0.01}
    failed = [str(c) for c in script.check_conditions({engine.name: {"check": lines[:5]}}, [engine]) if not c.passed]
    assert failed == [
        "FAIL check-16-graph: kinds of layers and phases: 5 (>= 6)",
        "FAIL check-16-graph, ratio 0, decode: own to tamis: 0.02 (<= 0.004)",
        "FAIL check-16-graph, ratio 0, decode: error of tamis over that of own: 5.556 (<= 1.25)",
        "FAIL check-16-graph, ratio 0, decode: calls within replayed graphs: 0 (>= 1)",
    ]
    assert not script.check_conditions({}, [engine])[0].passed
    assert script.check_rows({engine.name: {"check": lines}}, {"device": "none"})[1]["own_to_tamis"] == "0.002000"


@dataclass(frozen=True)
class Selection:
    slots: Tensor
    lengths: Tensor | None = None
    request_ids: Tensor | None = None
    block_table: Tensor | None = None


def test_both_attentions_are_compared_on_the_same_inputs(script: ModuleType) -> None:
    module = importlib.import_module("vllm_v4_check")
    check = module.Check(rows=2)
    check.allocate(torch.device("cpu"))
    exact = torch.ones(6, 4, 8, dtype=torch.float64)
    seen = []

    def attend(q: Tensor, selections: list[Selection], *, out: Tensor | None = None, **options: Any) -> Any:
        if out is not None:
            out.copy_(1.02 * exact)
        else:
            seen.append((q.dtype, selections[0].slots[:, 0].tolist(), options["backend"]))
        return SimpleNamespace(out=exact[: len(q)])

    def usual(layer: Any, *, q: Tensor, output: Tensor) -> None:
        output.copy_(1.01 * exact)

    def ours(layer: Any, *, q: Tensor, output: Tensor) -> None:
        assert not output.any()  # not where vLLM's own attention has written
        check.attend_beside(q, [Selection(torch.arange(6)[:, None])], out=output, sink=torch.zeros(4))

    check.attend = attend
    layer = SimpleNamespace(prefix="layers.1.attn", compress_ratio=4)
    output = torch.zeros(6, 4, 8)
    check.both("decode", usual, ours)(layer, q=torch.zeros(6, 4, 8), output=output)
    (line,) = check.report()
    assert torch.allclose(output, torch.tensor(1.01))
    assert seen == [(torch.float64, [0, 5], "reference")]
    assert (line["ratio"], line["phase"], line["calls"], line["calls_from_python"]) == (4, "decode", 1, 1)
    assert line["own_to_tamis"] == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert line["own_to_tamis_worst_token"] == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert (line["own_to_exact"], line["tamis_to_exact"]) == (
        pytest.approx(0.01, rel=1e-3),
        pytest.approx(0.02, rel=1e-3),
    )
    check.reset()
    assert check.report() == []


def test_a_kept_selection_is_a_copy(script: ModuleType) -> None:
    module = importlib.import_module("vllm_v4_check")
    selection = Selection(torch.arange(4)[:, None], torch.ones(4), block_table=torch.zeros(1, 2))
    copy = module.copied(selection)
    selection.slots.fill_(9)
    assert copy.slots[:, 0].tolist() == [0, 1, 2, 3]
    assert copy.request_ids is None
    assert module.rows_of(copy, torch.tensor([1, 3])).slots[:, 0].tolist() == [1, 3]
    assert [field.name for field in dataclasses.fields(copy)] == ["slots", "lengths", "request_ids", "block_table"]
