"""README's table of the drop-ins: from rows of `tamis bench door`, against the fastest build, losses in bold."""

import csv
from pathlib import Path

import pytest

from tamis.lab.bench.door.record import DOOR_COLUMNS
from tools.docs import doors

ROW = dict.fromkeys(DOOR_COLUMNS, "") | {
    "time": "2026-11-16T11:00:00+00:00",
    "gpu": "NVIDIA H200",
    "driver": "580",
    "torch": "2.11",
    "triton": "3.6",
    "commit": "0123456789abcdef",
    "door": "flash_mla_with_kvcache",
    "shape": "8q1s16k",
    "heads": "64",
    "topk": "2048",
    "window": "0",
    "layout": "v32-fp8",
    "version": "tamis",
    "error": "0.0016",
}
SGL = {"version": "flashmla-sgl", "build": "sgl-flash-mla 1.0.0"}
VLLM = {"version": "flashmla-vllm", "build": "vllm 0.25.0"}


def times(graph: float, host: float) -> dict[str, str]:
    return {"graph_us": str(graph), "eager_us": str(host), "host_us": str(host), "kernels": "2", "copies": "0"}


def cell(**changed: str) -> list[dict[str, str]]:
    """A cell where we take 20 us, and the builds of FlashMLA 18 and 23."""
    base = ROW | changed
    return [
        base | times(20, 40) | {"ratio": "0.9", "against": SGL["build"]},
        base | SGL | times(18, 50),
        base | VLLM | times(23, 70),
    ]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write(rows: list[dict[str, str]]) -> None:
        with (tmp_path / "h200_door.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, DOOR_COLUMNS)
            writer.writeheader()
            writer.writerows(rows)

    monkeypatch.setattr(doors, "FILE", tmp_path / "h200_door.csv")
    return write


def test_without_rows_nothing_is_claimed(written) -> None:
    assert doors.headline() == doors.NOTHING
    assert doors.everything() == ""


def test_speedups_by_requests_with_losses_in_bold_and_host_times(written) -> None:
    won = [row | ({"ratio": "1.21"} if row["version"] == "tamis" else {}) for row in cell(shape="128q1s16k")]
    v4 = cell(layout="v4-fp8", topk="512", window="128")
    written([*cell(), *won, *v4, ROW | times(3, 30) | {"door": "attend"}])
    lines = doors.headline().splitlines()
    assert "sgl-flash-mla 1.0.0, vllm 0.25.0" in lines[0]
    assert "NVIDIA H200" in lines[0]
    assert lines[2].startswith("| `flash_mla_with_kvcache`, speedup by requests | 8 | 128 |")
    assert lines[4] == "| V3.2, FP8, top-k 2048, 64 heads | **0.90** | 1.21 | 40 / 50 |"
    # A decode measured with one number of requests is no series.
    assert lines[-1].startswith("| V4, FP8, top-k 128 + 512, 64 heads, 8 x 1 of 16384 | `flash_mla_with_kvcache` |")
    assert len(lines) == 9


def test_prefills_have_a_table_of_their_own(written) -> None:
    written(cell(shape="1q4ks8k", layout="v32-bf16", door="flash_mla_sparse_fwd"))
    line = doors.headline().splitlines()[-1]
    assert line.startswith(
        "| V3.2, bf16, top-k 2048, 64 heads, 1 x 4096 of 8192 | `flash_mla_sparse_fwd` | 20.0 | 18.0 |"
    )
    assert line.endswith("| **0.90** | 40 / 50 |")


def test_the_newest_row_is_shown_and_every_version_has_a_line(written) -> None:
    older = [row | {"time": "2026-11-15T11:00:00+00:00"} | times(99, 99) for row in cell()]
    written([*cell(), *older])
    text = doors.everything()
    assert "99" not in text
    assert text.count("| `flash_mla_with_kvcache` |") == 3
    assert "| sgl-flash-mla 1.0.0 | 18.0 | - | 50.0 | 50.0 | 2 + 0 | 1.6e-03 |" in text
