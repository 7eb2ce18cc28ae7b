"""The walk through the library's functions in one call of a layer stays short."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tamis.arithmetic import ceil_div, round_up
from tools.walk import BOUNDS, Walk, walk

ROOT = Path(__file__).parents[2]


def test_a_walk_counts_calls_files_and_returns() -> None:
    found = walk(lambda: (round_up(5, 4), ceil_div(5, 4)))
    assert [name for _, name in found.steps] == ["round_up", "ceil_div", "ceil_div"]
    assert (found.files, found.switches, found.returns, found.depth) == (1, 0, 0, 2)
    there_and_back = Walk([("a", ""), ("b", ""), ("a", ""), ("c", ""), ("b", "")], 1)
    assert (there_and_back.files, there_and_back.switches, there_and_back.returns) == (3, 4, 2)


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which is not installed")
def test_layers_take_a_short_way() -> None:
    """In a process of its own, since interpreted kernels run line by line and cannot be replaced by stubs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = [sys.executable, "-m", "tools.walk"]
    done = subprocess.run(run, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(name in done.stdout for name in BOUNDS)
