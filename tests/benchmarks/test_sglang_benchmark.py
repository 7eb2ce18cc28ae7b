"""What the benchmarks of SGLang make of their results: conditions, tables, and what a kit that fails leaves."""

import csv
import gc
import importlib
import json
import weakref
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kit() -> ModuleType:
    return importlib.import_module("sglang_kit")


@pytest.fixture
def engine() -> ModuleType:
    return importlib.import_module("sglang_engine")


def rows_of(verdicts: dict[tuple[str, str, str, str], tuple[str, list[float]]]) -> Any:
    return {
        key: {"verdict": verdict, "why": "because", "errors": errors} for key, (verdict, errors) in verdicts.items()
    }


def test_tamis_must_pass_what_sglang_passes(kit: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(
        {
            ("dsa", "decode/fp8", "slots", "flashmla_kv"): ("PASS", [0.02]),
            ("dsa", "decode/fp8", "slots", "tamis"): ("PASS", [0.03]),
            ("dsa", "extend/bf16", "shipped", "flashmla_kv"): ("FAIL", [1.0]),
            ("dsa", "extend/bf16", "shipped", "tamis"): ("FAIL", [1.0]),
            ("dsa", "extend/bf16", "slots", "flashmla_kv"): ("ERROR", []),
            ("dsa", "extend/bf16", "slots", "tamis"): ("PASS", [0.001]),
        }
    )
    assert kit.missed(rows, "dsa") == {"extend/bf16 shipped": False}
    assert all(condition.passed for condition in kit.conditions(rows, "dsa"))
    assert "tamis does not pass extend/bf16 shipped, nor does one of SGLang's own" in capsys.readouterr().out
    rows |= rows_of({("dsa", "extend/bf16", "shipped", "flashmla_sparse"): ("PASS", [0.01])})
    assert kit.missed(rows, "dsa") == {"extend/bf16 shipped": True}
    found = kit.conditions(rows, "dsa")
    assert [condition.passed for condition in found] == [False, True, True]
    assert "but one of SGLang's own" in capsys.readouterr().out


def test_a_case_that_tamis_did_not_run_counts(kit: ModuleType) -> None:
    rows = rows_of(
        {
            ("v4", "c4_extend", "shipped", "flashmla_kv"): ("PASS", [0.02]),
            ("v4", "c4_extend_workspace", "shipped", "flashmla_kv"): ("PASS", [0.02]),
            ("v4", "c4_decode", "shipped", "flashmla_kv"): ("PASS", [0.02]),
            ("v4", "c4_decode", "shipped", "tamis"): ("CRASH", []),
        }
    )
    assert kit.missed(rows, "v4") == {"c4_extend shipped": True, "c4_decode shipped": True}
    assert [condition.found for condition in kit.conditions(rows, "v4")] == [2]
    assert [condition.passed for condition in kit.conditions(rows, "dsa")] == [False]


def test_errors_have_bounds(kit: ModuleType) -> None:
    rows = rows_of(
        {
            ("dsa", "decode/fp8", "slots", "tamis"): ("PASS", [0.02, 0.07]),
            ("dsa", "decode/bf16", "slots", "tamis"): ("PASS", [0.009]),
            # Positions taken for slots: only the verdict counts.
            ("dsa", "decode/bf16", "shipped", "tamis"): ("PASS", [1.0]),
        }
    )
    found = {condition.name: condition for condition in kit.conditions(rows, "dsa")}
    assert found["dsa fp8: largest relative error of tamis"].found == 0.07
    assert not found["dsa fp8: largest relative error of tamis"].passed
    assert found["dsa bf16: largest relative error of tamis"].passed


def test_the_kits_table(kit: ModuleType) -> None:
    rows = rows_of(
        {
            ("dsa", "decode/fp8", "slots", "flashmla_kv"): ("PASS", [0.01, 0.02]),
            ("dsa", "decode/fp8", "slots", "tamis"): ("ERROR", []),
        }
    )
    assert kit.table_rows(rows, {"sglang": "0.5.17"}) == [
        {
            "group": "dsa",
            "case": "decode/fp8",
            "setting": "slots",
            "flashmla_sparse": "",
            "flashmla_sparse_error": "",
            "flashmla_kv": "PASS",
            "flashmla_kv_error": "0.02",
            "flashmla_auto": "",
            "flashmla_auto_error": "",
            "tamis": "ERROR",
            "tamis_error": "",
            "sglang": "0.5.17",
        }
    ]


def test_what_the_kit_compares_is_recorded() -> None:
    cases = importlib.import_module("sglang_kit_cases")
    recorder = cases.Recorder()
    recorder(torch.tensor([3.0, 4.4]), torch.tensor([3.0, 4.0]), atol=0.5, rtol=0.0)
    recorder(torch.zeros(2), torch.zeros(2), atol=0.5, rtol=0.0)
    recorder(None, None, atol=0.5, rtol=0.0)
    assert recorder.errors == pytest.approx([0.08, 0.0])
    with pytest.raises(AssertionError):
        recorder(torch.ones(2), None, atol=0.5, rtol=0.0)
    with pytest.raises(AssertionError):
        recorder(torch.ones(2), torch.zeros(2), atol=0.5, rtol=0.0)


def test_a_kit_whose_processes_fail(
    kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kit.sys, "executable", "false")
    found = kit.run(tmp_path, tmp_path, list(kit.ENGINES), 10.0, 10.0)
    assert len(found) == 3
    assert not any(condition.passed for condition in found)
    assert "no decode step was timed" in capsys.readouterr().out


def test_decode_steps_are_judged(kit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode = importlib.import_module("sglang_decode")
    times = {"flashmla_kv": [20.0, 21.0, 22.0], "tamis": [10.0, 10.5, 11.0]}
    row = decode.row_of(["fp8", 16, 1, 2048, 8192], times, {"flashmla_kv": 2e-3, "tamis": 1.5e-3}, 2.5e-3)
    alone = decode.row_of(["fp8", 16, 1, 2048, 8192], {"flashmla_kv": [20.0, 21.0]}, {"flashmla_kv": 2e-3}, None)
    about = ["NVIDIA H200", "2.11.0", "0.5.17"]
    assert len(row) == len(alone) == len(decode.COLUMNS) - len(about)
    named = dict(zip(decode.COLUMNS, row, strict=False))
    assert (
        named
        | {
            "peer": "flashmla_kv",
            "turns": "3",
            "peer_us_median": "21.00",
            "tamis_us_lower_quartile": "10.25",
            "speedup": "2.000",
            "tamis_error": "1.50e-03",
            "difference": "2.50e-03",
        }
        == named
    )
    monkeypatch.setattr(kit.sys, "executable", "true")
    steps = kit.DecodeSteps(tmp_path, tmp_path, True, 10.0)
    with steps.table.open("w", newline="") as file:
        csv.writer(file).writerows([decode.COLUMNS, row + about])
    (condition,) = steps.finish()
    assert condition.passed
    assert (condition.found, condition.bound) == (0.0015, kit.STEP_BOUND)


def test_a_graph_keeps_what_its_replays_read(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = importlib.import_module("sglang_decode")
    for name in ("Stream", "current_stream", "stream", "CUDAGraph", "graph"):
        monkeypatch.setattr(decode.torch.cuda, name, MagicMock())
    slots = torch.arange(4)
    alive = weakref.ref(slots)
    captured = decode.Captured.of(lambda slots=slots: slots + 1)
    del slots
    gc.collect()
    assert alive() is not None
    assert captured.out.tolist() == [1, 2, 3, 4]


def result(tokens: list[list[int]], seconds: float) -> dict[str, Any]:
    logprobs = [[-1.0] * len(row) for row in tokens]
    turns = [seconds] * 9 + [9.0]
    facts = {"seconds": turns, "start_seconds": 1.0, "served": ""}
    return {"tokens": tokens, "logprobs": logprobs, "margins": logprobs} | facts


def test_engines_are_compared_with_their_own_cache(engine: ModuleType) -> None:
    same, other = [[1, 2, 3, 4]], [[1, 2, 3, 5]]
    results = {name: result(same, 2.0) for name in engine.ENGINES if not name.startswith("tamis")}
    results |= {name: result(same, 1.0) for name in engine.ENGINES if name.startswith("tamis")}
    found = engine.conditions(results)
    assert len(found) == 12
    assert all(condition.passed for condition in found)
    results["tamis-fp8-graph"] = result(other, 4.0)
    failed = [condition.name for condition in engine.conditions(results) if not condition.passed]
    assert failed == [
        "graph, fp8: tokens equal to flashmla_kv",
        "graph, fp8: throughput over flashmla_kv by medians",
    ]
    rows = {row["engine"]: row for row in engine.rows(results, {"sglang": "0.5.17"})}
    assert rows["tamis-fp8-graph"]["equal_to_own"] == "0.75000"
    assert rows["tamis-fp8-graph"]["throughput_over_own"] == "0.50000"
    assert rows["tamis-bf16-eager"]["equal_eager_graph"] == "1.00000"
    del results["flashmla_kv-fp8-eager"]
    assert sum(condition.found is None for condition in engine.conditions(results)) == 3


def test_answers_of_sglang(engine: ModuleType) -> None:
    meta = {
        "output_token_logprobs": [(-0.1, 7, None), (-0.2, 8, None)],
        "output_top_logprobs": [[(-0.1, 7, None), (-2.1, 3, None)], [(-0.2, 8, None), (-0.7, 4, None)]],
    }
    found = engine.answers([{"meta_info": meta}])
    assert found["tokens"] == [[7, 8]]
    assert found["logprobs"] == [[-0.1, -0.2]]
    assert found["margins"] == [pytest.approx([2.0, 0.5])]


def test_a_process_finds_the_plugin_and_the_engine(tmp_path: Path) -> None:
    process = importlib.import_module("sglang_process")
    process.prepare(tmp_path, None)
    environment = process.child_environment(3, tmp_path)
    path = environment["PYTHONPATH"].split(":")
    assert path[:3] == [str(tmp_path / "site"), str(ROOT / "src"), str(tmp_path / "engine")]
    points = (tmp_path / "site/tamis-0.dist-info/entry_points.txt").read_text()
    assert "[sglang.srt.plugins]\ntamis = tamis.integrations.sglang:register" in points
    assert environment["SGLANG_PLUGINS"] == "tamis"
    other = process.child_environment(4, tmp_path)
    assert environment["DG_JIT_CACHE_DIR"] == other["DG_JIT_CACHE_DIR"]
    assert environment["SGLANG_CACHE_DIR"] != other["SGLANG_CACHE_DIR"]


def test_the_last_line_about_a_case_counts(kit: ModuleType, tmp_path: Path) -> None:
    row = {"group": "dsa", "engine": "tamis", "case": "decode/fp8", "setting": "slots", "verdict": "CRASH"}
    lines = [json.dumps(row), json.dumps(row | {"verdict": "PASS"})]
    (tmp_path / "dsa-tamis.jsonl").write_text("\n".join(lines) + "\n")
    (found,) = kit.read(tmp_path).values()
    assert found["verdict"] == "PASS"
