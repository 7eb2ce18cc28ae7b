"""The table of times in docs/selecting.md, and what its picture shows."""

import csv
from pathlib import Path

import pytest

from tamis.lab.bench.record import COLUMNS
from tools.docs import results, selecting


def row(stage: str, shape: str, peer: str, time: float, ratio: float | None, **cells: object) -> dict[str, object]:
    given = {"stage": stage, "shape": shape, "peer": peer, "median_us": time, "ratio": ratio or ""}
    given |= {"roofline_us": time / 2, "gpu": "NVIDIA H200", "driver": "1", "torch": "2", "triton": "3"}
    return dict.fromkeys(COLUMNS, "") | given | {"commit": "abc", "time": "2026-11-16T00:00:00+00:00"} | cells


def test_each_shape_has_one_line_with_its_stages_and_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    rows = [
        row("scores", "1q4ks64k", "deepgemm", 3200.4, 1.17),
        row("scores", "1q4ks64k", "vllm-gather", 3200.4, 1.19),
        row("topk", "1q4ks64k", "vllm", 300.0, 3.3),
        row("index", "1q4ks64k", "vllm", 3500.0, 1.37, host_us=41.23),
        row("index", "1q4ks64k", "vllm-gather", 3500.0, 1.38, host_us=41.23),
        row("index", "128q1s64k", "vllm", 280.0, None),
    ]
    with (tmp_path / "h200_select.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    header, _, prompt, decode, _, range_ = selecting.costs().splitlines()[2:]
    assert range_ == "One call runs at 1.37 to 1.37 times the speed of both baselines together."
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (header, prompt, decode)]
    assert cells[0][:3] == ["tokens x keys", "scores", "vs. DeepGEMM"]
    assert cells[1][:5] == ["4096 x 64K", "3200 us", "1.17", "300.0 us", "3.30"]
    assert cells[1][5:] == ["-", "-", "3500 us", "1.37", "50%", "41.2 us"]
    assert cells[2] == ["128 decodes x 64K", *["-"] * 6, "280.0 us", "-", "50%", "-"]


def test_the_picture_shows_a_selection_with_ties() -> None:
    text = selecting.draw()
    # Of four scores equal to the threshold, the two lowest positions are taken.
    assert text.count(">tie<") == 4
    assert text.count(">win<") == 4
    assert "threshold: 5" in text
    assert "4 win, and 2 of 4 ties" in text
