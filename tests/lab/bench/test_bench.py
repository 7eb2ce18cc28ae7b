"""`tamis bench`: jobs, rooflines, the CSV file, and when it refuses to give a time."""

import csv
import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

import tamis.cli.bench
from tamis.cache.layout import index_fp8, named
from tamis.cli import main
from tamis.lab.bench import jobs, peers, torch_baseline
from tamis.lab.bench.inputs import AttendSet, GatherSet, SelectSet, TranslateSet, WriteSet, prepare, worst_error
from tamis.lab.bench.jobs import Job, make_jobs
from tamis.lab.bench.record import COLUMNS, CsvFile
from tamis.lab.bench.roofline import (
    Ceiling,
    Cost,
    attend_cost,
    compress_cost,
    distinct_rows,
    gather_cost,
    select_cost,
    translate_cost,
    write_cost,
)
from tamis.lab.bench.v4_inputs import CompressSet
from tamis.lab.verify import CheckResult, Scope, run_checks
from tamis.lab.verify.check import Target

CPU = torch.device("cpu")
FP8 = named("v32-fp8")
H200 = Ceiling(4.3e12, 790e12, "measured on an H200")
SPECIFIED = (
    "time,gpu,driver,torch,triton,tamis,commit,backend,suite,shape,heads,topk,layout,median_us,p10,p90,bytes,flops,"
    "roofline_us,peer,peer_us,ratio"
)


def test_smoke_prints_rows_and_writes_them_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    assert main(["bench", "smoke", "--device", "cpu", "--repeats", "2", "--csv", str(path)]) == 0
    text = capsys.readouterr().out
    for words in ("attend", "write", "gather", "translate", "32+64", "TB/s", "roofline", "copy measured here"):
        assert words in text
    (absent,) = (line for line in text.splitlines() if "absent" in line)
    assert re.fullmatch("peers flashmla-sgl, flashmla-vllm, .* are absent: no kernels for cpu", absent)
    assert "torch" not in absent
    assert "speedup" in text
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert set(SPECIFIED.split(",")) <= set(rows[0])
    assert list(rows[0]) == COLUMNS
    stages = ["attend", "attend", "attend", "write", "gather", "translate", "scores", "topk", "index"]
    assert [row["stage"] for row in rows] == stages
    for row in rows:
        assert row["backend"] == "reference"
        assert row["torch"] == torch.__version__
        assert 0 < float(row["p10"]) <= float(row["median_us"]) <= float(row["p90"])
        assert float(row["roofline_us"]) > 0
        assert row["peer"] == "torch"
        assert float(row["ratio"]) == pytest.approx(float(row["peer_us"]) / float(row["median_us"]), rel=1e-4)
        assert float(row["error"]) < 5e-2
        assert row["note"] == ""
    assert int(rows[0]["flops"]) == 4 * 128 * 4 * 2 * (576 + 512)


def test_json_and_a_shape_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "3q1s100,2q2s50", "--heads", "2", "--topk", "32", "--layout", "v32-bf16"]
    assert main(["bench", *arguments, "--device", "cpu", "--repeats", "1", "--against", "none", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["absent"] == {}
    assert found["limits"]["flops_per_second"] is None
    shown = [(r["suite"], r["shape"], r["heads"], r["topk"], r["layout"], r["peer"]) for r in found["rows"]]
    assert shown == [("custom", "3q1s100", 2, 32, "v32-bf16", ""), ("custom", "2q2s50", 2, 32, "v32-bf16", "")]
    assert all(0 < r["p10_us"] <= r["p90_us"] for r in found["rows"])
    assert all(r["of_roofline"] == pytest.approx(r["roofline_us"] / r["median_us"]) for r in found["rows"])


@pytest.mark.parametrize("as_json", [False, True])
def test_no_time_before_verify_passes(
    as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tamis.ops.translate import reference

    right = reference.translate_positions
    monkeypatch.setattr(reference, "translate_positions", lambda *a, **o: (right(*a, **o)[0] + 1, right(*a, **o)[1]))
    path = tmp_path / "rows.csv"
    arguments = ["bench", "smoke", "--device", "cpu", "--csv", str(path), *(["--json"] if as_json else [])]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert not path.exists()
    assert " us" not in text
    if as_json:
        found = json.loads(text)
        assert found["rows"] == []
        assert {c["stage"] for c in found["checks"]} >= {"translate"}
    else:
        assert text.splitlines()[-1] == "FAILED: no time is given for stages whose results are wrong"


def test_only_the_stages_to_be_timed_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run_checks(device, backend, stages, quick, progress, scopes=None):
        asked.append((stages, quick, scopes))
        return [CheckResult(stage, "", "", int(stage != missing or scopes is None), 0.0, 0.0, "ok") for stage in stages]

    monkeypatch.setattr("tamis.lab.verify.run_checks", run_checks)
    missing = ""
    assert len(tamis.cli.bench._verified(make_jobs("decode"), CPU, "auto")) == 2
    tamis.cli.bench._verified(make_jobs("write", layouts=["v4-fp8"]), CPU, "auto")
    tamis.cli.bench._verified(make_jobs("index"), CPU, "auto")
    wide = frozenset({torch.bfloat16})
    attend, moved = Scope(frozenset({"v32-fp8"}), wide), Scope(frozenset({"v4-fp8"}), wide)
    keys = Scope(frozenset({"index-fp8", "float32"}), frozenset({torch.float8_e4m3fn}))
    assert asked == [
        (["attend", "combine"], True, {"attend": attend, "combine": attend}),
        (["gather", "translate", "write"], True, {"gather": moved, "translate": moved, "write": moved}),
        (["index"], True, {"index": keys}),
    ]
    # A stage without a case in the format to be timed is checked in all of them.
    asked, missing = [], "attend"
    assert [r.cases for r in tamis.cli.bench._verified(make_jobs("v4"), CPU, "auto")] == [1] * 5
    assert [(stages, scopes is None) for stages, _, scopes in asked] == [
        (["attend", "combine", "compress", "rotate", "select"], False),
        (["attend"], True),
    ]
    monkeypatch.setattr("tamis.lab.verify.run_checks", lambda *a, **o: [CheckResult("write", "", "", 0, None, 0, "ok")])
    assert [r.state for r in tamis.cli.bench._verified(make_jobs("write"), CPU, "auto")] == ["FAILED"]


def test_checks_in_scope_have_the_formats_to_be_timed_and_no_others() -> None:
    def cases(stage: str, scope: Scope | None) -> int:
        return sum(r.cases for r in run_checks(CPU, "auto", [stage], True, None, {stage: scope} if scope else None))

    fp8, scope = torch.float8_e4m3fn, Scope(frozenset({"index-fp8"}), frozenset({torch.float8_e4m3fn}))
    target = Target(CPU, quick=True, scope=scope)
    assert target.covers(named("index-fp8"), fp8)
    assert not target.covers(named("index-fp8"), torch.bfloat16)
    assert not target.covers(FP8)
    assert 0 < cases("index", scope) < cases("index", None)
    assert 0 < cases("gather", scope) < cases("gather", None)
    assert cases("translate", scope) == cases("translate", None) > 0


def test_wrong_results_on_the_timed_inputs_give_no_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(AttendSet, "error", lambda self, result: float("nan"))
    assert main(["bench", "--shape", "2q1s64", "--device", "cpu", "--topk", "16", "--against", "none"]) == 1
    text = capsys.readouterr().out
    assert "FAILED: attend 2q1s64 is wrong on the inputs to be timed" in text
    assert "custom" not in text


def test_roofline_of_decode() -> None:
    # 128 tokens x 2048 rows x 656 bytes = 172 MB, which take 40.0 us at 4.3 TB/s; indices, queries and outputs add 3%.
    cost = attend_cost([(1, 16384)] * 128, heads=16, picks=[2048], layout=FP8, value_dim=512)
    rows = 128 * 2048 * 656
    assert rows == 171_966_464
    assert rows / 4.3e12 == pytest.approx(40.0e-6, rel=1e-3)
    assert cost.bytes == rows + 128 * 2048 * 4 + 128 * 16 * (576 + 512) * 2
    assert cost.flops == 128 * 2048 * 16 * 2 * (576 + 512)
    assert H200.seconds(cost) == pytest.approx(41.3e-6, rel=2e-3)
    # With 128 heads arithmetic is the limit: 73 GFLOP at 790 TFLOP/s.
    heavy = attend_cost([(1, 16384)] * 128, heads=128, picks=[2048], layout=FP8, value_dim=512)
    assert H200.seconds(heavy) == pytest.approx(92.4e-6, rel=1e-3)
    assert Ceiling(4.3e12, None, "").seconds(heavy) == pytest.approx(48.5e-6, rel=1e-3)


def test_rows_that_several_tokens_pick_count_once() -> None:
    assert distinct_rows(16384, 2048, 1) == 2048
    assert distinct_rows(100, 2048, 7) == 100
    assert distinct_rows(8192, 2048, 2) == pytest.approx(2048 + 2048 * 0.75)
    prefill = attend_cost([(4096, 8192)], heads=1, picks=[2048], layout=FP8, value_dim=512)
    assert prefill.bytes == 8192 * 656 + 4096 * 2048 * 4 + 4096 * 2 * (576 + 512)
    assert prefill.flops == 4096 * 2048 * 2 * (576 + 512)


def test_costs_of_moves() -> None:
    assert write_cost(65536, FP8) == Cost(65536 * (1152 + 8 + 656))
    assert gather_cost(65536, FP8, 64) == Cost(65536 * (656 + 1152) + 4 * 1024)
    assert translate_cost(128, 2048, 128 * 256) == Cost(128 * 2048 * 8 + 128 * 8 + 4 * 128 * 256)


def test_suites_are_those_of_the_command_and_hold_what_they_promise() -> None:
    assert tuple(jobs.SUITES) == tuple(tamis.cli.bench.SUITES)
    decode = make_jobs("decode")
    assert len(decode) == 25
    assert {job.shape for job in decode} == {f"{b}q1s16k" for b in (1, 8, 32, 64, 128)}
    assert {(job.layout, job.topk, job.page_size) for job in decode} == {("v32-fp8", 2048, 64)}
    assert {job.heads for job in make_jobs("decode", heads=[16])} == {16}
    assert {(job.stage, job.window, job.topk) for job in make_jobs("v4")} == {
        ("attend", 128, 512),
        ("select", 128, None),
        ("compress", 0, None),
    }
    assert len(make_jobs("prefill")) == 4 * 2 + 3 * 3
    replaced = make_jobs("prefill", layouts=["v32-fp8"], heads=[64])
    assert [job.shape for job in replaced] == ["1q512s8k", "1q4ks8k", "1q4ks32k", "1q4ks128k"]
    moves = {job.stage: job for job in make_jobs("write", layouts=["v32-fp8"])}
    assert {stage: job.shape for stage, job in moves.items()} == {
        "write": "8q8k",
        "gather": "8q8k",
        "translate": "128q1s16k",
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bake"], "suite must be one of smoke, "),
        (["--heads", "0"], "--heads must be between 1 and 128, got 0 (see"),
        (["--heads", "8,x"], "--heads must be numbers joined by commas, got '8,x'"),
        (["--topk", "0"], "--topk must be >= 1, got 0 (see"),
        (["decode", "--layout", "index-fp8"], "--layout must be one of"),
        (["--shape", "12"], "--shape must be groups"),
        (["--shape", "4q10s5"], "--shape 4q10s5: total length (s=5) must be >= new tokens (q=10)."),
        (["--shape", "4q0s9"], "--shape must be requests with new tokens"),
        (["--repeats", "0"], "--repeats must be >= 1"),
        (["write", "--heads", "4"], "--heads must be left out for the suite 'write'"),
        (["index", "--layout", "v32-fp8"], "--layout must be one of 'index-fp8', 'index-mxfp4'"),
        (["index", "--stage", "topk", "--layout", "index-fp8"], "--layout must be left out for the suite 'index'"),
        (["index", "--stage", "attend"], "--stage must be one of scores, topk, topk-ties, index for the suite 'index'"),
        (["door", "--stage", "index"], "--stage must be left out of `tamis bench door`"),
        (["--against", "cutlass"], "--against must be one of flashmla, "),
        (["--against", "flashmla", "--device", "cpu"], "--against flashmla needs a CUDA GPU; "),
        (["--against", "torch,vllm", "--device", "cpu"], "--against vllm needs a CUDA GPU; "),
        (["--csv", "/no/such/folder/x.csv"], "csv must be a file in an existing folder"),
        (["--backend", "flash", "--device", "cpu"], "--backend must be one of"),
    ],
)
def test_wrong_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_a_file_with_other_columns_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="one with the same columns"):
        CsvFile(path)
    assert path.read_text() == "a,b\n1,2\n"


def test_input_sets_share_no_row_and_errors_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tamis.lab.bench.inputs.set_count", lambda touched, device: 6)
    job = Job("test", "attend", "2q1s128", "v32-fp8", 2, 32)
    prepared = prepare(job, CPU)
    assert len(prepared.sets) == 6
    caches = {id(item.selections[0].cache) for item in prepared.sets}
    assert len(caches) == 2
    first = prepared.sets[0].selections[0].cache
    used = torch.cat([s.selections[0].slots for s in prepared.sets if s.selections[0].cache is first], dim=1)
    assert used.shape == (2, 128)
    assert len(used.unique()) == used.numel()
    item = prepared.sets[0]
    right = item.run("auto")
    assert worst_error(item, right) < 5e-3
    assert worst_error(item, right * 1.1) == pytest.approx(0.1, rel=0.1)
    assert worst_error(item, right * float("nan")) == float("inf")


@pytest.mark.parametrize(("stage", "kind"), [("gather", GatherSet), ("translate", TranslateSet), ("write", WriteSet)])
def test_moves_are_checked_on_the_inputs_to_be_timed(stage: str, kind: type) -> None:
    item = prepare(Job("test", stage, "2q100", topk=16), CPU).sets[0]
    assert isinstance(item, kind)
    result = item.run("auto")
    assert worst_error(item, result) <= item.bound
    if isinstance(item, WriteSet):
        result.storage[:, :, :200] = 0
    else:
        result += 1
    assert worst_error(item, result) > item.bound


@pytest.mark.parametrize("command", ["verify", "bench"])
def test_help_has_an_example_that_is_accepted(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert "exit codes: 0" in text
    example = text.split("examples:\n  tamis ")[1].splitlines()[0]
    accepted: list[object] = []
    monkeypatch.setattr(import_module(f"tamis.cli.{command}"), "run", lambda options: accepted.append(options) or 0)
    assert main([*example.split(), "--device", "cpu"]) == 0
    assert len(accepted) == 1


@pytest.mark.parametrize("shape", ["3q1s600", "2q1s128_1q40s300"])
def test_rows_of_a_v4_step(shape: str) -> None:
    prepared = prepare(Job("test", "select", shape, "v4-fp8", window=128), torch.device("cpu"))
    item = prepared.sets[0]
    assert isinstance(item, SelectSet)
    assert worst_error(item, item.run("auto")) == 0
    assert worst_error(item, torch_baseline.call_for(item)()) == 0
    windows, *others = item.run("auto")
    windows[0, 3] += 1
    assert worst_error(item, (windows, *others)) == 1
    with pytest.raises(peers.Unsupported, match="it has no select"):
        peers.VLLM(None, None, None, None).calls(prepared.job, [item])


@pytest.mark.parametrize("shape", ["8q1s600", "2q1s128_1q40s300"])
def test_small_launches_of_a_v4_layer(shape: str) -> None:
    prepared = prepare(Job("test", "compress", shape, "v4-fp8", heads=2), torch.device("cpu"))
    assert prepared.job.stages == ("rotate", "compress")
    item = prepared.sets[0]
    assert isinstance(item, CompressSet)
    assert 0 < (item.completed >= 0).sum() < len(item.completed) / 3
    assert worst_error(item, item.run("auto")) == 0
    low, q, *others = item.run("auto")
    assert worst_error(item, (low, q * 1.5, *others)) == pytest.approx(0.5, rel=1e-2)
    item.compressors[1].cache.storage.zero_()
    assert worst_error(item, (low, q, *others)) == pytest.approx(1.0)
    with pytest.raises(NotImplementedError, match="no torch baseline"):
        torch_baseline.call_for(item)


def test_cost_of_compressing() -> None:
    """Heads in and out dominate a decode: 64 of 512 twice and 64 of 128 once, read and written in bf16."""
    found = compress_cost(64, 16, 64, named("v4-fp8"), index_fp8(), 64, 1024).bytes
    heads = 64 * 64 * (2 * 512 + 128) * 4 + 64 * 1024 * 4
    rows = 64 * (1024 + 584)
    state = 64 * 2 * 1024 * 4 * 2 + 64 * 2 * 256 * 4 * 2
    entries = 16 * (16 * 512 * 4 + 584) + 16 * (16 * 128 * 4 + 132)
    assert found == heads + rows + state + entries


def test_cost_of_selecting() -> None:
    """Windows and rows of every entry dominate: 128 and 128 columns of 4 bytes per token."""
    assert select_cost(64, 128, 64 * 128, 128).bytes == 64 * (8 + 512 + 512 + 36) + 4 * (64 * 5 + 4096)
