"""`tamis cache`, `tamis size` and `tamis completion`."""

import argparse
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tamis.cli import main, make_parser
from tamis.cuda import cubins

NAME = "attend-sm_90a-" + 32 * "0" + ".cubin"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder with kernels for two architectures and a file of someone else."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = tmp_path / "tamis" / "cubin"
    for name in (NAME, NAME.replace("attend", "merge"), NAME.replace("90a", "100a")):
        cubins.write(found, name, b"key", b"cubin")
    (found / "notes.txt").write_text("mine")
    return found


def data(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_cache_info(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info"]) == 0
    text = capsys.readouterr().out
    assert f"folder: {folder}\nfiles:  3, 111 bytes\n" in text
    assert "sm_90a            2     74\n" in text
    assert "XDG_CACHE_HOME" in text
    assert main(["cache", "info", "--json"]) == 0
    found = data(capsys)
    assert (found["command"], found["ok"], found["folder"]) == ("cache", True, str(folder))
    assert found["architectures"] == [
        {"name": "sm_100a", "files": 1, "bytes": 37},
        {"name": "sm_90a", "files": 2, "bytes": 74},
    ]
    assert found["kernels"][0] == {
        "name": NAME.replace("90a", "100a"),
        "program": "attend",
        "architecture": "sm_100a",
        "bytes": 37,
        "unfinished": False,
    }


@pytest.mark.parametrize(("answer", "left"), [("n\n", 4), ("", 4), ("y\n", 1)])
def test_cache_clear_asks(
    answer: str, left: int, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = io.StringIO(answer)
    monkeypatch.setattr(asked, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", asked)
    assert main(["cache", "clear"]) == (0 if left == 1 else 1)
    found = capsys.readouterr()
    assert f"Remove 3 files, 111 bytes, from {folder}? [y/N] " in found.err
    assert ("removed 3 files" in found.out) == (left == 1)
    assert len(list(folder.iterdir())) == left


def test_cache_clear_without_a_person(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear"]) == 2
    assert "nobody can answer here; use --yes" in capsys.readouterr().err
    assert main(["cache", "clear", "--yes", "--json"]) == 0
    found = data(capsys)
    assert (found["removed"]["files"], found["removed"]["bytes"], found["files"]) == (3, 111, 0)
    assert [file.name for file in folder.iterdir()] == ["notes.txt"]
    assert main(["cache", "clear"]) == 0  # there is nothing to ask about
    assert "removed 0 files" in capsys.readouterr().out


def test_a_folder_that_is_not_used_is_left_alone(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.chmod(0o777)
    assert main(["cache", "info", "--json"]) == 1
    assert "other users can write to it" in data(capsys)["refusal"]
    assert main(["cache", "clear", "--yes"]) == 2
    assert len(list(folder.iterdir())) == 4


def size(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["size", *arguments, "--json"]) == 0
    return data(capsys)


def test_size_of_v32(capsys: pytest.CaptureFixture[str]) -> None:
    found = size(capsys, "--model", "deepseek-v3.2", "--context", "1000", "--tp", "8", "--memory", "1GiB")
    assert [(one["cache"], one["layers"], one["bytes_per_token_and_layer"]) for one in found["caches"]] == [
        ("latent rows", 61, 656),
        ("index keys", 61, 132),
    ]
    assert found["bytes_per_token"] == (656 + 132) * 61 == 48068
    assert found["bytes_per_request"] == 16 * 64 * 48068  # 1000 tokens are 16 pages of 64
    assert found["bytes_per_request_on_all_ranks"] == 8 * found["bytes_per_request"]
    assert found["requests_that_fit"] == 2**30 // (16 * 64 * 48068)
    assert found["tokens_that_fit"] == 2**30 // (64 * 48068) * 64
    assert found["heads_per_rank"] == 16
    assert "holds all of these bytes" in found["notes"][0]
    assert main(["size", "--model", "deepseek-v3.2", "--memory", "40"]) == 0
    text = capsys.readouterr().out
    assert "bytes per token: 48,068\n" in text
    assert "requests of 131,072 tokens in 40,000,000,000 bytes: 6\n" in text
    assert "transformers' DeepseekV32Config" in text


def test_size_of_v4(capsys: pytest.CaptureFixture[str]) -> None:
    found = size(capsys, "--model", "deepseek-v4-flash", "--context", "256")
    rows = {(one["kind"], one["cache"]): one for one in found["caches"]}
    page = 65 * 576  # 64 rows of 584 bytes, padded
    assert rows["overlapping", "entries of 4 tokens"]["bytes_per_token_and_layer"] == page / 256 == 146.25
    assert rows["plain", "entries of 128 tokens"]["bytes_per_token_and_layer"] == 3 * 576 / 256  # 2 rows, padded
    assert rows["overlapping", "index keys"]["bytes_per_token_and_layer"] == 132 / 4
    assert found["bytes_per_token"] == 21 * (146.25 + 33) + 20 * 6.75
    states = 21 * 3 * 4 * (8192 + 2048) + 20 * 17 * 8 * 4096
    entries = 21 * (page + 64 * 132) + 20 * 3 * 576
    assert found["bytes_per_request"] == 43 * 3 * page + states + entries
    assert [one["layers"] for one in found["caches"] if one["cache"] == "window of 128"] == [2, 21, 20]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--cache", "bf16"], (1152 + 132) * 78),
        (["--index-cache", "mxfp4"], (656 + 68) * 78),
        (["--mtp-layers", "1"], (656 + 132) * 79),
    ],
)
def test_size_with_other_formats(options: list[str], expected: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert size(capsys, "--model", "glm-5", *options)["bytes_per_token"] == expected


def test_size_of_a_local_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"num_hidden_layers": 4, "num_attention_heads": 8, "kv_lora_rank": 128, "qk_rope_head_dim": 32}
    config |= {"qk_nope_head_dim": 64, "index_topk": 64, "index_n_heads": 4, "index_head_dim": 128}
    config |= {"max_position_embeddings": 1000}
    (tmp_path / "config.json").write_text(json.dumps(config | {"indexer_types": ["full", "shared", "shared", "full"]}))
    found = size(capsys, "--model", str(tmp_path))
    assert found["bytes_per_token"] == 4 * 208 + 2 * 132  # only layers that select have keys
    assert "ends at 1,000 tokens" in found["notes"][0]
    assert main(["size", "--model", str(tmp_path), "--tp", "3"]) == 2
    assert capsys.readouterr().err.endswith("--tp must be a divisor of num_attention_heads=8, got 3\n")
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**9}))
    assert main(["size", "--model", str(tmp_path)]) == 2  # at once: layers are looked at one by one
    assert "config.num_hidden_layers must be between 1 and 10000, got 1000000000" in capsys.readouterr().err
    for text in ("[]", "{", "{}"):
        (tmp_path / "config.json").write_text(text)
        assert main(["size", "--model", str(tmp_path)]) == 2
        assert capsys.readouterr().err.startswith("tamis: error: ")


def test_known_models_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from tamis.model.known import KNOWN

    for name, kind in (("deepseek-v3.2", "DeepseekV32"), ("glm-5", "GlmMoeDsa"), ("deepseek-v4-flash", "DeepseekV4")):
        config = getattr(transformers, f"{kind}Config")().to_dict()
        own = {field: value for field, value in KNOWN[name].config.items() if field != "compress_ratios"}
        if kind == "DeepseekV4":
            del own["qk_rope_head_dim"]
        assert {field: config[field] for field in own} == own
    flash = dict(KNOWN["glm-5.3-flash"].config)
    assert flash.pop("index_kpool") == 4  # the checkpoint's; the class has another default
    config = transformers.Glm5NextTextConfig().to_dict()
    assert {field: config[field] for field in flash} == flash
    for name in ("deepseek-v4-flash", "deepseek-v4-pro"):
        config = KNOWN[name].config
        assert len(config["compress_ratios"]) == config["num_hidden_layers"]


COMPLETING = """
eval "$($1 -m tamis completion bash)"
complete -p tamis >/dev/null || exit 3
COMP_WORDS=("${@:2}") COMP_CWORD=$(($# - 2))
$(complete -p tamis | sed -E 's/.*-F ([^ ]+).*/\\1/')
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["tamis", "in"], {"inspect"}),
        (["tamis", "demo", "--token"], {"--token-budget"}),
        (["tamis", "generate", "--cache", "f"], {"fp8", "fp32"}),
        (["tamis", "cache", ""], {"info", "clear"}),
    ],
)
def test_bash_completes_commands_options_and_values(typed: list[str], offered: set[str]) -> None:
    command = ["bash", "-c", COMPLETING, "bash", sys.executable, *typed]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    assert offered <= set(found.stdout.split())


@pytest.mark.parametrize(("shell", "words"), [("zsh", "#compdef tamis"), ("fish", "complete -c tamis")])
def test_other_shells_have_scripts(shell: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert words in text
    assert "token-budget" in text


def test_no_help_of_an_option_could_be_run_by_a_shell() -> None:
    """Scripts quote these texts with double quotes, in which a shell still runs what backticks and `$(...)` enclose."""
    (commands,) = [action for action in make_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    actions = [action for parser in commands.choices.values() for action in parser._actions]
    texts = [action.help or "" for action in (*actions, *commands._choices_actions)]
    assert len(texts) > 60
    assert [text for text in texts if set(text) & set('`$"\\')] == []


def test_sizes_of_pooled_index_keys() -> None:
    """Rows of 528 bytes, a key of 132 for 4 tokens, and keys and gates of the last 4 tokens in two pages of 8."""
    from tamis.cache.sizes import cache_sizes
    from tamis.model.known import KNOWN

    sizes = cache_sizes(KNOWN["glm-5.3-flash"].config)
    assert (sizes.layers, sizes.heads, sizes.bytes_per_token) == (11, 64, 11 * (528 + 33))
    assert sizes.bytes_per_request(6400) == 11 * (6400 * (528 + 33) + 2 * 8 * 1024)
    with pytest.raises(ValueError, match="page_size must be a multiple of kpool=4, got 6"):
        cache_sizes(KNOWN["glm-5.3-flash"].config, page_size=6)


def test_sizes_of_shared_entries() -> None:
    """V4.1: layers 1 and 4 own the entries, of 1 and 2 tokens; 256 of 584 bytes are padded to whole 576s in a page."""
    from v41_model import CONFIG

    from tamis.cache.sizes import cache_sizes

    wide = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128}
    sizes = cache_sizes({**CONFIG, **wide})
    assert 260 * 576 == 256 * 585
    assert sizes.bytes_per_token == (585 + 132) * 1.5
