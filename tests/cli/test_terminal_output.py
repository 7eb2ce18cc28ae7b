"""What all commands share on stdout and stderr: tables, progress, JSON."""

import io
import json
import re
import sys
import time

import pytest

from tamis._version import __version__
from tamis.cli import progress
from tamis.cli.data import print_json
from tamis.cli.progress import Progress, progress_line
from tamis.cli.table import render_table

WIDE = "6,300,368,896,000"
ROWS = [("reference", WIDE, "a long explanation of what happened"), ("triton", 1, "ok")]
HEADER = ("backend", "bytes", "why")
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings of a terminal with colours, whatever the tests run in."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


def shown(columns: int, monkeypatch: pytest.MonkeyPatch) -> str:
    """The table as a terminal of this width gets it."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Terminal())
    return render_table(HEADER, ROWS, "lrl")


def test_a_table_in_a_pipe_is_plain_text_with_a_line_per_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    text = render_table(HEADER, ROWS, "lrl")
    assert text.splitlines() == [
        "backend                bytes  why",
        "---------- ------------------ -----------------------------------",
        "reference  6,300,368,896,000  a long explanation of what happened",
        "triton                     1  ok",
    ]
    assert render_table(("name", "n"), [("a", 1), ("long\nsecond", 23)], "lr").splitlines()[-2:] == [
        "long    23",
        "second",
    ]


def test_cells_are_text_and_never_markup_or_control_characters() -> None:
    text = render_table(("[red]x[/red]",), [("[bold]y[/]",), (":smile:",), ("\x1b[31mz\x9b",)])
    assert text.splitlines()[2:] == ["[bold]y[/]", ":smile:", "\\x1b[31mz\\x9b"]


def test_a_table_without_rows_and_with_a_wrong_row() -> None:
    assert render_table(("a", "bc"), []) == "a  bc\n-- --"
    with pytest.raises(ValueError, match=r"rows\[0\] must be of 2 cells"):
        render_table(("a", "b"), [("only",)])


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("columns", [8, 45, 55])
def test_a_narrow_terminal_wraps_texts_and_no_numbers(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [ESCAPES.sub("", line).rstrip() for line in shown(columns, monkeypatch).splitlines()]
    assert any(f" {WIDE} " in line for line in lines)
    assert not any("…" in line for line in lines)
    words = [word for line in lines[2:] for word in line.split()]
    assert [word for word in words if word in ROWS[0][2].split()] == ROWS[0][2].split()
    assert max(len(line) for line in lines) <= max(columns, (9 + 2) + (17 + 2) + (12 + 2))


@pytest.mark.usefixtures("terminal")
def test_colours_are_for_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "\x1b[32mok" in shown(80, monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not re.search(r"\x1b\[(?:\d+;)*3\d", shown(80, monkeypatch))
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert "\x1b" not in render_table(HEADER, ROWS)


def test_progress_lines() -> None:
    assert progress_line(420, 1000, 2.0, "tokens") == " 42% 420/1000 tokens, 210 tokens/s, eta 3 s"
    assert progress_line(999, 1000, 1.0, "tokens").startswith(" 99%")
    assert progress_line(0, 10, 0.0, "steps") == "  0% 0/10 steps, 0 steps/s, eta ?"
    assert progress_line(0, 0, 1.0, "steps").startswith("100%")


def test_a_log_gets_a_line_now_and_then() -> None:
    now, stream = [0.0], io.StringIO()
    shown = Progress("tokens", stream=stream, clock=lambda: now[0])
    for done in range(1, 101):
        now[0] = done / 8
        shown.update(done, 100)
    shown.close()
    assert stream.getvalue().splitlines() == [
        " 40% 40/100 tokens, 8 tokens/s, eta 8 s",
        " 80% 80/100 tokens, 8 tokens/s, eta 2 s",
    ]


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_progress_says_what_is_under_way_and_ends_with_it(stream: io.StringIO) -> None:
    with Progress("tokens", "loading", stream=stream, every=0.02) as shown:
        _wait_for(stream, "loading...")
        shown.update(1, 10)
        _wait_for(stream, "1/10 tokens")
        shown.close()
        shown.update(2, 10)
    ended = stream.getvalue()
    time.sleep(0.1)
    assert stream.getvalue() == ended
    assert "2/10" not in ended
    if stream.isatty():
        assert ended.rindex("\x1b[?25h") > ended.index("\x1b[?25l")  # the cursor is there again
        assert ended.endswith("\x1b[2K")  # and the line is empty
    else:
        assert "\x1b" not in ended


def _wait_for(stream: io.StringIO, words: str) -> None:
    end = time.monotonic() + 60  # for a test that hangs, not for a slow machine
    while words not in ESCAPES.sub("", stream.getvalue()):
        assert time.monotonic() < end, stream.getvalue()
        time.sleep(0.01)


def test_quick_work_leaves_no_trace_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work shorter than the pause between lines prints nothing, on a machine of any speed."""
    monkeypatch.setattr(progress, "LOG_SECONDS", 3600.0)
    stream = io.StringIO()
    with Progress("tokens", stream=stream) as shown:
        shown.update(1, 2)
    assert stream.getvalue() == ""


def test_json_begins_alike_and_has_only_numbers_that_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    print_json("bench", False, {"rows": [{"median_us": 1.5, "error": float("inf")}], "sizes": (1, float("nan"))})
    text = capsys.readouterr().out
    assert text.startswith(f'{{\n  "command": "bench",\n  "version": "{__version__}",\n  "ok": false,\n  "rows": [\n')
    assert json.loads(text)["rows"] == [{"median_us": 1.5, "error": None}]
    assert json.loads(text)["sizes"] == [1, None]
