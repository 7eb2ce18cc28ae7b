"""`tamis` as a process: interrupted at any moment, with streams that are closed, full or no longer read."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

TAMIS = [sys.executable, "-m", "tamis"]
BACKENDS = ["backends", "--device", "cpu"]

INTERRUPTING = """
import os, signal, sys

class Interrupts:
    "Ctrl-C at the moment when a module is first imported."
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPT_AT"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
"""
"""The source of a `sitecustomize` module, which Python runs before anything else."""


def run(arguments: list[str], **settings: Any) -> "subprocess.CompletedProcess[str]":
    # A parent that runs the tests in the background may have made its children ignore the signal.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "timeout": 120} | settings
    return subprocess.run([*TAMIS, *arguments], check=False, preexec_fn=listening, **pipes)


def lines(text: str) -> list[str]:
    """The lines without those of the progress, which appear on a slow machine."""
    return [line for line in text.splitlines() if not line.endswith(" s")]


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("tamis.cli.commands", ["--version"]),
        ("tamis.cli.parser", ["--help"]),
        ("argparse", ["backends"]),
        ("tamis.cli.verify", ["backends"]),
        ("torch", BACKENDS),
        ("torch._C", BACKENDS),
        ("numpy", BACKENDS),
        ("tamis.backends", BACKENDS),
        ("transformers", ["generate", "--device", "cpu"]),
        ("matplotlib", ["bench", "--report", "nowhere", "--from", "benchmarks/results/h200_write.csv"]),
    ],
)
def test_an_interruption_while_modules_are_imported_is_one_line(
    module: str, arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTING)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "INTERRUPT_AT": module}
    found = run(arguments, env=environment, cwd=Path(__file__).parents[2])
    assert found.returncode == 130, found.stderr
    assert lines(found.stderr) == ["tamis: interrupted"]
    assert found.stdout == ""


def test_an_interruption_that_comes_back_as_another_error_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tamis.cli import commands, main

    def importing(argv: object) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("initialization failed") from None

    monkeypatch.setattr(commands, "_run", importing)
    assert main([]) == 130
    assert capsys.readouterr().err == "tamis: interrupted\n"


@pytest.mark.parametrize("command", [["doctor"], [*BACKENDS, "--json"], ["--help"], ["--version"]])
def test_a_closed_stdout_is_refused_in_one_line(command: list[str]) -> None:
    found = _closed(command, 1)
    assert found.returncode == 2
    assert lines(found.stderr) == [
        "tamis: error: stdout is closed, so there is nowhere to print to; use >/dev/null to see nothing"
    ]


@pytest.mark.parametrize("numbers", [(2,), (0, 2), (0,)])
def test_results_come_with_other_streams_closed(numbers: tuple[int, ...]) -> None:
    found = _closed([*BACKENDS, "--json"], *numbers)
    assert found.returncode == 0
    assert found.stdout.startswith("{")
    assert lines(found.stderr) == []


def test_everything_closed_is_an_exit_code() -> None:
    assert _closed(["doctor"], 0, 1, 2).returncode == 2


def _closed(arguments: list[str], *numbers: int) -> "subprocess.CompletedProcess[str]":
    """Run with these file descriptors closed, as a shell does with `>&-`."""
    closing = " ".join(f"{number}{'<' if number == 0 else '>'}&-" for number in numbers)
    command = ["sh", "-c", f'exec "$@" {closing}', "sh", *TAMIS, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["doctor"], [*BACKENDS, "--json"], ["--help"]])
def test_a_full_disk_behind_stdout_is_one_line(command: list[str]) -> None:
    with open("/dev/full", "w") as full:
        found = run(command, stdout=full)
    assert found.returncode == 2
    assert lines(found.stderr) == ["tamis: error: [Errno 28] No space left on device"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stderr_stops_nothing() -> None:
    code = "import sys; from tamis.cli import main, progress; progress.LOG_SECONDS = 0; sys.exit(main())"
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", code, "demo", "--requests", "1", "--max-prompt", "20", "--json"]
        found = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=120, check=False)
    assert found.returncode == 0
    assert found.stdout.startswith(b"{")


@pytest.mark.parametrize("command", [BACKENDS, ["--help"], ["doctor", "--json"]])
def test_a_reader_that_has_seen_enough_is_no_error(command: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        found = run(command, stdout=write)
    finally:
        os.close(write)
    assert found.returncode == 0
    assert lines(found.stderr) == []


def test_letters_that_the_terminal_lacks_are_no_error(tmp_path: Path) -> None:
    found = run([*BACKENDS, "--layout", "\udcff\x1b[2J"], env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert found.returncode == 2
    assert r"got '\udcff\x1b[2J'" in found.stderr
