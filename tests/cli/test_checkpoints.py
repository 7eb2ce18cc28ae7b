"""Untrusted checkpoints: none of their code is run, and each error is one line and exit code 2."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tamis.cli import main

transformers = pytest.importorskip("transformers")
from cli.test_generate import TINY  # noqa: E402

GENERATE = ("generate", "--device", "cpu", "--max-new-tokens", "2", "--checkpoint")
INSPECT = ("inspect", "--device", "cpu", "--checkpoint")
MALICIOUS = """
import pathlib
pathlib.Path({marker!r}).write_text("it ran")
from transformers import PreTrainedConfig, PreTrainedTokenizerFast
class Config(PreTrainedConfig):
    model_type = "deepseek_v32"
class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
ESCAPES = "\x1b]0;title\x07\x1b[31m"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer, one of whose tokens would change the terminal's title."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(3)
    transformers.DeepseekV32ForCausalLM(transformers.DeepseekV32Config(**TINY)).save_pretrained(folder)
    words = {f"{ESCAPES}{letter}": number for number, letter in enumerate("abcdefghijkl")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"{ESCAPES}a"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.fixture
def checkpoint(saved: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that the test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoint"))


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refused(folder: Path, capsys: pytest.CaptureFixture[str], command: tuple[str, ...] = GENERATE) -> str:
    """The error line of a command, which must be its only output."""
    assert main([*command, str(folder)]) == 2
    found = capsys.readouterr()
    (line,) = (line for line in found.err.splitlines() if not line.endswith(" s"))
    assert line.startswith("tamis: error: --checkpoint ")
    assert found.out == ""
    return line


@pytest.mark.parametrize(("command", "where"), [(GENERATE, "config"), (GENERATE, "tokenizer"), (INSPECT, "both")])
def test_python_files_of_a_checkpoint_are_never_run(
    command: tuple[str, ...], where: str, checkpoint: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    (checkpoint / "code.py").write_text(MALICIOUS.format(marker=str(marker)))
    models = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM", "AutoModel"), "code.Config")
    if where != "tokenizer":
        change(checkpoint / "config.json", auto_map=models)
    if where != "config":
        tokenizers = {"AutoTokenizer": ["code.Tokenizer", "code.Tokenizer"]}
        change(checkpoint / "tokenizer_config.json", auto_map=tokenizers, tokenizer_class="Tokenizer")
    home = {"HF_HOME": str(tmp_path / "home"), "HOME": str(tmp_path / "home")}
    found = subprocess.run(
        [sys.executable, "-m", "tamis", *command, str(checkpoint)],
        input="y\n" * 9,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | home,
    )
    assert not marker.exists()
    assert "[y/N]" not in found.stdout + found.stderr
    assert "Traceback" not in found.stderr
    assert "\x1b" not in found.stdout + found.stderr
    if where == "config":
        assert found.returncode == 0, found.stderr
        # The model's classes are those of transformers, whatever the config names.
    else:
        assert found.returncode == 2
        assert "a tokenizer that is a Python file; tamis never runs it" in found.stderr.splitlines()[-1]


def test_pickled_weights_are_refused(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "marker"),)

    (checkpoint / "model.safetensors").unlink()
    torch.save({"lm_head.weight": Malicious()}, checkpoint / "pytorch_model.bin")
    assert "model.safetensors" in refused(checkpoint, capsys)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", ["attn_implementation", "experts_implementation"])
def test_a_checkpoint_names_no_code_to_fetch(
    name: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fetched(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a kernel was asked for")

    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", fetched)
    monkeypatch.setattr(transformers.integrations.hub_kernels, "get_kernel", fetched)
    monkeypatch.setattr(transformers.integrations.hub_kernels, "lazy_load_kernel", fetched)
    value = {"attn_implementation": "someone/kernels", "experts_implementation": "sonicmoe"}[name]
    change(checkpoint / "config.json", **{name: value, f"_{name}": value})
    assert main([*GENERATE, str(checkpoint)]) == 0
    from tamis.lab.generation import load_model

    config = load_model(checkpoint, torch.device("cpu"))[0].config
    assert config._attn_implementation == "eager"
    assert config._experts_implementation != "sonicmoe"


def test_every_loading_call_says_what_is_trusted() -> None:
    """Every call in the package or its documents that loads a checkpoint or a tokenizer is explicit about trust."""
    root = Path(__file__).parents[2]
    places = [path for folder in ("src", "benchmarks", "docs") for path in (root / folder).rglob("*.[pm][yd]")]
    loading = [path for path in places if ".from_pretrained(" in path.read_text()]
    assert {path.name for path in loading} == {"generation.py", "ranks.py", "training.md", "transformers.md"}
    for path in loading:
        text = path.read_text().replace('": ', "=").replace('"', "")
        for words in ("trust_remote_code=False", "use_safetensors=True", "local_files_only=True"):
            assert words in text, path
        assert "attn_implementation=eager" in text, path


@pytest.mark.parametrize("size", [0, 7, 8, 100, 5000, -1])
def test_truncated_weights(size: int, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    assert "cannot be loaded" in refused(checkpoint, capsys)


def test_weights_that_are_missing_are_not_made_up(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(checkpoint / "model.safetensors")
    del weights["lm_head.weight"]
    weights[f"{ESCAPES}unknown"] = torch.zeros(1)
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    assert "one without 1 of them, such as lm_head.weight; copy the whole checkpoint" in refused(checkpoint, capsys)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "\x00\xff", "[" * 100_000, '{"model_type": []}', '{"model_type": "\x1b[31m"}'),
        json.dumps(TINY | {"model_type": "deepseek_v32", "hidden_size": "many"}),
        json.dumps(TINY | {"model_type": "deepseek_v32", "vocab_size": -1}),
        json.dumps(TINY | {"model_type": "deepseek_v32", "num_hidden_layers": 3}),
        json.dumps(TINY | {"model_type": "deepseek_v32", "hidden_size": 64}),
    ],
    ids=range(12),
)
def test_configs_of_garbage(text: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / "config.json").write_text(text, encoding="latin-1")
    assert "\x1b" not in refused(checkpoint, capsys)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "--checkpoint must be a directory whose config.json has fields, got list"),
        ({"num_hidden_layers": 10**9}, "--checkpoint must be a model of up to 10000 layers, got 1000000000"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "--checkpoint must be a model of up to 10000 layers"),
    ],
)
def test_configs_that_transformers_would_not_refuse(
    changes: Any, message: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """transformers makes a list with an entry per layer, whatever their number."""
    config = TINY | {"model_type": "deepseek_v32"} | changes if changes else changes
    (checkpoint / "config.json").write_text(json.dumps(config))
    assert message in refused(checkpoint, capsys)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": "1.0", "model": {"type": "WordLevel"}}'])
def test_tokenizers_of_garbage(name: str, text: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (checkpoint / name).write_text(text)
    code = main([*GENERATE, str(checkpoint)])
    found = capsys.readouterr()
    # Some of these are still valid configurations; then the tokenizer's other file is enough.
    assert code == 0 or (code == 2 and found.err.count("tamis: error: --checkpoint") == 1)
    assert "Traceback" not in found.err


def test_escapes_in_tokens_are_shown_and_not_sent(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*GENERATE, str(checkpoint), "--prompt-ids", "1,2,3"]) == 0
    found = capsys.readouterr()
    assert "\\x1b]0;title\\x07\\x1b[31m" in found.out
    assert main([*INSPECT, str(checkpoint), "--prompt-ids", "1,2,3,4"]) == 0
    shown = capsys.readouterr()
    assert "token \\x1b]0;title\\x07\\x1b[31me" in shown.out
    assert main([*INSPECT, str(checkpoint), "--prompt-ids", "1,2", "--json"]) == 0
    data = capsys.readouterr()
    for text in (found.out, found.err, shown.out, shown.err, data.out, data.err):
        assert "\x1b" not in text
        assert "\x07" not in text


def test_escapes_in_names_of_files_are_shown(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page\x1b[2J\udcff.html"
    options = [*INSPECT, str(saved), "--prompt-ids", "1,2,3", "--html", str(page)]
    assert main(options) == 0
    assert "page\\x1b[2J\\udcff.html" in capsys.readouterr().out
    assert page.is_file()
    assert main([*GENERATE, str(tmp_path / "no\x1b[2J")]) == 2
    assert "no\\x1b[2J" in capsys.readouterr().err


def test_a_checkpoint_that_does_not_fit_into_memory(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: object, **keywords: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr(transformers.DeepseekV32ForCausalLM, "from_pretrained", full)
    assert main([*GENERATE, str(checkpoint)]) == 2
    assert "tamis: error: out of memory: " in capsys.readouterr().err
