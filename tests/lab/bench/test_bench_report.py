"""`tamis bench --report`: limits implied by rows, figures, the page; from files and from a run."""

import csv
import json
import re
import struct
import sys
from dataclasses import replace
from pathlib import Path

import browser
import pytest

from tamis.cli import main
from tamis.lab.bench.record import COLUMNS, CsvFile, Row
from tamis.lab.bench.report import write_report
from tamis.lab.bench.report.data import MEASUREMENT, find_limits, geometric_mean, latest, once, read_rows

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[3]
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.csv"))
SCREENSHOTS = ROOT / "build" / "screenshots"
LANDED = [path for path in RESULTS if path.name.startswith("h200")]


def row(**changes: object) -> Row:
    """A row that moves 1000 bytes and computes nothing."""
    plain = read_rows(LANDED[:1])[0]
    return replace(plain, **({"bytes": 1000, "flops": 0, "roofline_us": 1.0} | changes))


def png_size(file: Path) -> tuple[int, int]:
    head = file.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_limits_are_those_the_rows_were_measured_by() -> None:
    limits = find_limits(read_rows(LANDED))
    assert limits.bytes_per_second == pytest.approx(4.3e12, rel=1e-4)
    assert limits.flops_per_second == pytest.approx(790e12, rel=1e-4)


def test_limits_without_rows_that_compute() -> None:
    assert find_limits([]).bytes_per_second is None
    assert find_limits([row(gpu="Some GPU")]).flops_per_second is None
    known = find_limits([row(gpu="NVIDIA H200")])
    assert (known.bytes_per_second, known.flops_per_second) == (1e9, 790e12)
    # FP8 products count twice, and a row limited by memory does not imply an arithmetic limit.
    rows = [row(gpu="x"), row(gpu="x", stage="scores", flops=8000, roofline_us=2.0), row(gpu="x", flops=10**6)]
    assert find_limits(rows).flops_per_second == 2e9


def test_files_read_back_what_was_written(tmp_path: Path) -> None:
    rows = [row(), row(heads=None, peer="", peer_us=None, ratio=None, note="why, not"), row(topk=None)]
    file = CsvFile(tmp_path / "rows.csv")
    file.add(rows)
    assert read_rows([tmp_path / "rows.csv"]) == rows


def test_the_newest_of_repeated_measurements_counts() -> None:
    old, new = row(time="2026-01-01", median_us=9.0), row(time="2026-01-02", median_us=5.0)
    other = row(peer="torch")
    assert latest([new, old, other]) == [new, other]
    assert once([new, other]) == [new]
    # A difference in any other column makes another measurement.
    several = [new, *(replace(new, **{name: "other"}) for name in MEASUREMENT)]
    assert latest(several) == once(several) == several
    assert geometric_mean([2.0, 8.0]) == pytest.approx(4.0)


def test_a_step_on_a_cpu_is_a_row_without_limits() -> None:
    step = read_rows([ROOT / "benchmarks/results/cpu_step.csv"])[0]
    assert (step.stage, step.shape, step.heads) == ("step", "32q1s4096", 16)
    assert step.ratio == pytest.approx(281.1 / 188.2)
    assert find_limits([step]).bytes_per_second is None


@pytest.fixture(scope="module")
def landed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of all results in the repository."""
    folder = tmp_path_factory.mktemp("bench") / "report"
    assert main(["bench", "--report", str(folder), "--from", *map(str, RESULTS)]) == 0
    return folder


def test_report_of_the_landed_results(landed: Path) -> None:
    assert sorted(file.name for file in landed.iterdir()) == [
        "latency.png",
        "peers.png",
        "report.html",
        "roofline.png",
    ]
    for file in landed.glob("*.png"):
        width, height = png_size(file)
        assert width in (1176, 1764)
        assert height > 500
    html = (landed / "report.html").read_text(encoding="utf-8")
    rows = latest(read_rows(RESULTS))
    assert html.count("<tr><td") == len(rows)
    assert f"Rows: {len(read_rows(RESULTS))} read, {len(rows)} shown" in html
    assert latest(read_rows(LANDED)) == read_rows(LANDED)
    # Rows of all backends against a peer count.
    against = [row.ratio for row in rows if row.peer == "flashmla-vllm" and row.ratio is not None]
    ahead = sum(ratio >= 1 for ratio in against)
    assert len({row.backend for row in rows if row.peer == "flashmla-vllm"}) > 1
    mean = f"{geometric_mean(against):.2f}x"
    assert f'<span class="value">{mean}</span><span class="name">Speedup over flashmla-vllm</span>' in html
    assert f"tamis is faster in {ahead} of {len(against)}" in html
    assert html.count('<td class="n behind">') == sum((row.ratio or 1) < 1 for row in rows) >= len(against) - ahead > 0
    assert "4.3 TB/s" in html
    assert "790 TFLOP/s" in html
    names = re.findall(r'id="([^"]+)"', html)
    assert len(names) == len(set(names))
    # Colours are the page's variables, and every point has a tip.
    assert not re.search(r"#0000|#0001", html)
    assert "mathdefault" not in html  # a tick that is a formula
    assert "<pattern" in html  # of the bars that are slower
    assert html.count("<title>") > 2 * len(rows)
    addresses = set(re.findall(r"https?://[\w./-]+", re.sub(r"<metadata>.*?</metadata>", "", html, flags=re.S)))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is one")
def test_the_page_in_a_browser(landed: Path, tmp_path: Path) -> None:
    with browser.open_browser(tmp_path / "profile") as window:
        window.open(landed / "report.html")
        for figure in ("roofline", "peers", "latency"):
            assert window.run(f"return document.querySelectorAll('#{figure} svg').length") > 1
        light = window.run("return getComputedStyle(document.querySelector('#roofline text')).fill")
        window.screenshot(SCREENSHOTS / "bench.png")
        window.dark()
        assert window.run("return getComputedStyle(document.querySelector('#roofline text')).fill") != light
        window.screenshot(SCREENSHOTS / "bench-dark.png")
        for width in (400, 800, 1400):
            assert window.faults(width) == [], width
        assert window.console() == []


def test_every_bar_has_a_label_of_its_own() -> None:
    from tamis.lab.bench.report.speedups import bar_labels

    rows = latest(read_rows(RESULTS))
    kinds = {(row.stage, row.layout, row.backend, row.peer) for row in rows if row.ratio is not None}
    for kind in kinds:
        own = [row for row in rows if (row.stage, row.layout, row.backend, row.peer) == kind and row.ratio is not None]
        names, parts = bar_labels(own)
        assert len(set(names)) == len(own), kind
        assert ("top-k" in parts) == (len({row.topk for row in own}) > 1), kind


def test_report_of_a_fresh_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "peers.png").write_bytes(b"of an earlier run")
    options = ["bench", "--shape", "2q1s64", "--heads", "2", "--topk", "8", "--against", "none", "--repeats", "1"]
    assert main([*options, "--device", "cpu", "--report", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == [str(folder / "report.html"), str(folder / "roofline.png")]
    assert sorted(file.name for file in folder.iterdir()) == ["report.html", "roofline.png"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--from", "rows.csv"], "--from must be given with --report"),
        (["--report", "nowhere/out"], "--report must be a folder"),
        (["--report", "out", "--from", "nowhere.csv"], "--from nowhere.csv cannot be read"),
        (["--report", "out", "--from", str(ROOT / "README.md")], "with other columns"),
    ],
)
def test_wrong_input(
    options: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *options]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_rows_that_newer_ones_replace_are_counted(tmp_path: Path) -> None:
    rows = [row(time=f"2026-01-0{day}", median_us=float(day), ratio=0.5, peer_us=1.0) for day in (1, 3, 2)]
    write_report([*rows, row(backend="triton", ratio=0.5)], tmp_path / "out")
    html = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "Rows: 4 read, 2 shown, 2 superseded by newer rows of the same measurement" in html
    assert "tamis is slower in 2 of 2 comparisons" in html
    assert html.count("<tr><td") == 2


HEADER, FIRST = LANDED[0].read_text().splitlines()[:2]


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(("heads", value) for value in ("many", "1.5", "9" * 5000)),
        *(("shape", value) for value in ("", "128x", "2q10s5")),
        *(("median_us", value) for value in ("", "0", "-1", "nan", "inf", "1e999")),
        *(("bytes", value) for value in ("-1", "1.5", "")),
        *(("ratio", value) for value in ("0", "nan", "-2")),
        *(("gpu", value) for value in ("x" * 200_000,)),
    ],
)
def test_a_broken_row_is_named(column: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells = next(csv.reader([FIRST]))
    cells[COLUMNS.index(column)] = value
    _refused(",".join(cells), tmp_path, capsys)


@pytest.mark.parametrize("cells", [1, 5, 20, HEADER.count(",")])
def test_a_row_that_ends_early_is_named(cells: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _refused(",".join(FIRST.split(",")[:cells]), tmp_path, capsys)


def _refused(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text(f"{HEADER}\n{line}\n")
    assert main(["bench", "--report", str(tmp_path / "out"), "--from", str(tmp_path / "rows.csv")]) == 2
    found = capsys.readouterr().err
    assert "has a row that is no measurement" in found
    assert found.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_without_matplotlib_the_command_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--report", str(tmp_path / "out"), "--from", *map(str, LANDED)]) == 2
    assert "pip install 'matplotlib>=3.9'" in capsys.readouterr().err
