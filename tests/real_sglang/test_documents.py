"""What the documents say about SGLang's command line and messages, asked of SGLang itself."""

import argparse
import re
import shlex
import sys
from importlib import import_module
from inspect import getsource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.version
from sglang.srt import plugins
from sglang.srt.server_args import ServerArgs

DOCUMENTS = Path(__file__).parents[2] / "docs"
NEWER = sglang.version.__version__ == "0.5.23"


def commands(start: str) -> list[list[str]]:
    """The arguments of every command that starts so, in the guide and in the tutorial."""
    found = []
    for page in ("sglang.md", "tutorials/sglang.md"):
        text = (DOCUMENTS / page).read_text().replace("\\\n", " ")
        found += [shlex.split(line) for line in re.findall(rf"^{re.escape(start)} (.*)$", text, flags=re.MULTILINE)]
    return found


def test_sglang_accepts_every_server() -> None:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    wanted = commands("python -m sglang.launch_server")
    assert len(wanted) == 4
    for words in wanted:
        if NEWER or "--dsv4-attn-backend" not in words:  # an option that 0.5.17 does not have
            assert parser.parse_args(words).tp_size == 8


@pytest.mark.skipif(not NEWER, reason="0.5.17 parses in the program itself")
def test_sglang_accepts_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = commands("python -m sglang.bench_serving")
    # A package for data of other benchmarks, which is not installed here.
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=None))
    module: Any = import_module("sglang.benchmark.serving")
    found: list[argparse.Namespace] = []
    monkeypatch.setattr(module, "run_benchmark", found.append)
    monkeypatch.setattr(sys, "argv", ["bench_serving", *words])
    module.cli_main()
    assert (found[0].random_input_len, found[0].num_prompts, found[0].random_range_ratio) == (8000, 64, 1.0)


def test_sglang_has_the_messages_of_plugins_and_options() -> None:
    assert "Failed to load plugin" in getsource(plugins)
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    with pytest.raises(argparse.ArgumentError, match="invalid choice: 'tammis'"):
        parser.parse_args(["--model-path", "some-model", "--dsa-decode-backend", "tammis"])
