"""`tamis bench door`: every function is checked and timed, beside its peers, and a wrong result gets no time."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tamis.cli import main
from tamis.integrations import flash_mla
from tamis.lab.bench import peers
from tamis.lab.bench.door import attention, cells, record, run
from tamis.lab.bench.door.cells import DOORS, make_cells, pages_needed
from tamis.lab.bench.door.record import DOOR_COLUMNS, DoorRow
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.random_inputs import SharedInputs
from tamis.lab.bench.record import Machine
from tamis.lab.bench.report.data import read_rows

CPU = torch.device("cpu")
MACHINE = Machine("a GPU", "1", "2.11", "3.6", "0.1.0", "abc")
SMALL = cells.Cell("attend", Job("door", "attend", "2q1s128", "v32-fp8", 4, 64))


def bench(*found: peers.Peer, doors: tuple[str, ...] = DOORS) -> run.DoorBench:
    return run.DoorBench(CPU, 2, MACHINE, found, SharedInputs(CPU, 0, 64), doors, "a processor")


def test_every_function_is_timed_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "door.csv"
    assert main(["bench", "door", "--device", "cpu", "--repeats", "1", "--csv", str(file)]) == 0
    text = capsys.readouterr().out
    assert "FAILED" not in text
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert list(rows[0]) == DOOR_COLUMNS
    assert {row["door"] for row in rows} == set(DOORS)
    for row in rows:
        assert float(row["eager_us"]) > 0
        assert float(row["host_us"]) > 0
        assert float(row["error"]) < 5e-2
        assert (row["graph_us"], row["kernels"], row["ratio"]) == ("", "", "")
        assert row["cpu"]
    # Where two of our ways do the same work, both are shown, and the automatic one is named.
    ways = [row for row in rows if row["door"] == "SparseMLA" and row["shape"] == "1q8s128"]
    assert [row["version"] for row in ways] == ["tamis direct", "tamis gathered"]
    assert [row["note"] for row in ways].count("what auto takes") == 1
    # The files of this suite are left out of a report of the stages.
    assert read_rows([file]) == []


def test_doors_heads_and_batches_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "door", "--device", "cpu", "--repeats", "1", "--doors", "attend", "--heads", "16", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert {(row["door"], row["heads"]) for row in found["rows"]} == {("attend", 16)}
    assert "no kernels for cpu" in found["absent"]["flashmla-sgl"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["door", "--shape", "2q1s64"], "--shape must be left out of `tamis bench door`"),
        (["door", "--report", "out"], "--report must be left out"),
        (["smoke", "--quick"], "--quick must be given with `tamis bench door` only"),
        (["door", "--doors", "window"], "doors"),
        (["door", "--doors", "attend", "--heads", "7"], "such that a cell is left"),
        (["door", "--repeats", "0"], "--repeats"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *arguments, "--device", "cpu"]) == 2
    assert words in capsys.readouterr().err


def test_the_full_set_has_every_cell_of_the_comparison() -> None:
    found = {
        (c.job.layout, c.job.topk, c.job.window, c.job.heads, c.requests) for c in make_cells() if c.kind == "attend"
    }
    for b in (1, 2, 8, 32, 128):
        assert {("v32-fp8", 2048, 0, heads, b) for heads in (16, 64, 128)} <= found
        assert {("v4-fp8", topk, 128, heads, b) for topk in (512, 1024) for heads in (64, 128)} <= found
    assert {("v32-fp8", 192, 0, heads, 5) for heads in (3, 16, 96)} <= found
    assert {("v32-fp8", 192, 0, 32, 133), ("v32-fp8", 2176, 0, 128, 37)} <= found
    prompts = {(c.job.layout, c.job.heads, c.job.shape) for c in make_cells() if c.prefill}
    assert prompts == {(layout, h, "1q4ks8k") for layout in ("v32-bf16", "v32-fp8") for h in (16, 64, 128)}
    assert {c.job.shape for c in make_cells(long=True) if c.prefill} == {"1q4ks8k", "1q4ks128k"}
    assert len(make_cells(quick=True)) < len(make_cells()) / 2
    assert {door for c in make_cells(quick=True) for door in c.doors} == set(DOORS)
    # Counting the launches of a plan slows what comes after it.
    assert [c.kind for c in make_cells()][-5:] == ["plan"] * 5


def test_chosen_heads_and_batches_replace_a_grids_own() -> None:
    found = make_cells(doors=["attend_positions"], heads=[8, 96], batches=[3, 5])
    assert {(c.job.heads, c.requests, c.job.topk) for c in found} == {
        *((h, b, 2048) for h in (8, 96) for b in (3, 5)),
        (96, 5, 192),
    }


def test_shared_caches_are_filled_once_and_tables_share_no_pages() -> None:
    drawn = SharedInputs(CPU, 0, 8)
    layout = attention.prepare(SMALL.job, CPU).sets[0].selections[0].cache.layout
    cache = drawn.cache(layout, 3, 64)
    assert cache.pages == 8
    assert bool(cache.storage.any())
    assert drawn.cache(layout, 5, 64) is cache
    assert drawn.cache(layout, 2, 64, filled=False).pages == 2
    first, second = (drawn.block_table([64, 128], 64)[0] for _ in range(2))
    used = torch.cat((first, second)).flatten()
    used = used[used >= 0].tolist()
    assert len(used) == len(set(used)) == 6
    # The list of pages starts again where the rest is too short.
    assert drawn.block_table([64 * 8], 64)[0].sort().values.tolist() == [list(range(8))]
    with pytest.raises(ValueError, match="at most 8 pages together, got 9"):
        drawn.block_table([64 * 9], 64)


def test_the_largest_cell_has_pages() -> None:
    assert pages_needed(make_cells()) == 133 * 256
    assert pages_needed(make_cells()) * 64 * 656 < 2**31


@pytest.mark.parametrize(("name", "build"), [("flashmla-sgl", "sgl-flash-mla 1.0.0"), ("flashmla-vllm", "vllm 0.25.0")])
def test_peers_run_beside_ours_with_nothing_around_their_call(name: str, build: str) -> None:
    peer = peers.FlashMLA(flash_mla, name, build)
    found = bench(peer, doors=("flash_mla_with_kvcache", "attend")).measure(SMALL)
    assert [(row.door, row.version, row.build) for row in found.rows] == [
        ("flash_mla_with_kvcache", "tamis", ""),
        ("attend", "tamis", ""),
        ("flash_mla_with_kvcache", name, build),
    ]
    assert found.rows[-1].note == "heads padded to 64 before its time"
    assert all(row.error is not None and row.error < 5e-3 for row in found.rows)


def test_a_wrong_result_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object, **options: object) -> tuple[torch.Tensor, None]:
        return torch.zeros(2, 1, 4, 512), None

    monkeypatch.setattr(attention.flash_mla, "flash_mla_with_kvcache", wrong)
    peer = peers.FlashMLA(flash_mla, "flashmla-sgl", "sgl-flash-mla 1.0.0")
    found = bench(peer, doors=("flash_mla_with_kvcache", "attend")).measure(SMALL)
    ours = [row for row in found.rows if row.ours]
    assert [row.door for row in ours] == ["attend"]
    assert len(found.wrong) == 1
    assert "flash_mla_with_kvcache (tamis) on 2q1s128" in found.wrong[0]
    assert "its result is wrong: error 1.00e+00" in found.wrong[0]
    # A peer keeps its row, with the reason in place of times.
    (theirs,) = (row for row in found.rows if not row.ours)
    assert theirs.eager_us is None
    assert "its result" in theirs.note or "shape" in theirs.note


def test_a_function_that_fails_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(attention, "attend", fails)
    found = bench(doors=("flash_mla_with_kvcache", "attend")).measure(SMALL)
    assert [row.door for row in found.rows] == ["flash_mla_with_kvcache"]
    assert found.wrong == ["attend (tamis) on 2q1s128, v32-fp8, 4 heads, top-k 64: RuntimeError: no kernel"]


def test_inputs_that_cannot_be_made_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise MemoryError("too large")

    monkeypatch.setitem(run.MAKERS, "index", fails)
    found = bench().measure(cells.Cell("index", Job("door", "index", "2q1s128", "index-fp8", 8, 64)))
    assert (found.rows, found.wrong) == (
        [],
        ["index_topk on 2q1s128, index-fp8, 8 heads, top-k 64: MemoryError: too large"],
    )


def test_versions_that_fail_together_are_timed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that cannot be captured must not take the times of the others with it."""
    timed = run.time_doors

    def fussy(versions: list, device: torch.device, repeats: int) -> list:
        if any(calls[0].func is attention.attend for calls, _ in versions):
            raise RuntimeError("capture failed")
        return timed(versions, device, repeats)

    monkeypatch.setattr(run, "time_doors", fussy)
    found = bench(doors=("flash_mla_with_kvcache", "attend")).measure(SMALL)
    assert [row.door for row in found.rows] == ["flash_mla_with_kvcache"]
    assert found.wrong[0].endswith("RuntimeError: capture failed")


def test_ratios_are_against_the_fastest_build() -> None:
    row = DoorRow(
        *("2026", "gpu", "1", "2", "3", "0.1", "c", "cpu", "attend", "8q1s16k"),
        *(64, 2048, 0, "v32-fp8", 64, "tamis", "", 9, 15, 1e-3),
    )
    ours = replace(row, graph_us=20.0, eager_us=60.0)
    sgl = replace(row, version="flashmla-sgl", build="sgl-flash-mla 1.0.0", graph_us=18.0, eager_us=50.0)
    vllm = replace(row, version="flashmla-vllm", build="vllm 0.25.0", graph_us=23.0, eager_us=45.0)
    failed = replace(row, version="flashmla-plain", build="flash_mla 2", note="it failed")
    found, *rest = record.compared([ours, sgl, vllm, failed])
    assert (found.against, found.ratio, found.eager_ratio) == ("sgl-flash-mla 1.0.0", 0.9, 0.75)
    assert rest == [sgl, vllm, failed]
    assert record.compared([ours, failed]) == [ours, failed]
