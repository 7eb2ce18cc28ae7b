"""The bars at the top of `benchmarks/NOTES.md`: those that the newest rows miss, by how much, and no others."""

import pytest

from tools.docs import open_bars
from tools.docs.open_bars import Bar, Cell


def lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_a_missed_bar_says_where_it_is_missed_most(monkeypatch: pytest.MonkeyPatch) -> None:
    missed = Bar("scores", 1.05, [Cell("a", 1.2, us=10.0), Cell("b", 0.84, us=200.0), Cell("c", 1.0, us=20.0)])
    host = Bar("host", 60, [Cell("a", 60.0), Cell("b", 152.7)], at_most=True)
    reached = [Bar("reached", 1.05, [Cell("a", 1.05)]), Bar("short", 0.2, [Cell("a", 0.2)], at_most=True)]
    monkeypatch.setattr(open_bars, "bars", lambda: [missed, *reached, host])
    assert lines(open_bars.open_bars()) == [
        ["scores", ">= 1.05", "0.840 to 1.200", "2 of 3", "b: 200.0 us, 160.0 asked"],
        ["host", "<= 60", "60.0 to 152.7", "1 of 2", "b"],
    ]


def test_a_bar_without_rows_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_bars, "bars", lambda: [Bar("scores", 1.05, [])])
    with pytest.raises(ValueError, match="is about 'scores'; correct its condition"):
        open_bars.open_bars()


def test_the_newest_row_of_a_shape_counts() -> None:
    def row(ratio: str, time: str, heads: str) -> dict[str, str]:
        return {"shape": "32q1s16k", "heads": heads, "ratio": ratio, "time": time, "median_us": "1"}

    rows = [row("1.2", "2026-11-18T22:49", "64"), row("1.1", "2026-11-18T22:48", "64"), row("0.9", "2026-11-18", "128")]
    assert [(cell.shape, cell.value) for cell in open_bars._cells(rows)] == [
        ("32 x 1 of 16384, 64 heads", 1.2),
        ("32 x 1 of 16384, 128 heads", 0.9),
    ]
