"""The command line: help, exit codes, errors, JSON; the commands `demo` and `backends`."""

import json
import re
import shlex
import signal
import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tamis.backends
import tamis.cli.commands
from tamis._version import __version__
from tamis.backends import STAGES, TRAINED, Backend
from tamis.choice import choose
from tamis.cli import main, make_parser
from tamis.model.spec import LayerSpec

SMALL = ["--requests", "3", "--max-prompt", "40", "--layers", "1", "--heads", "2", "--topk", "8", "--new-tokens", "3"]
GPU_ONLY = Backend(
    "picky",
    "picky",
    "refuses most things",
    devices=("cuda",),
    query_dtypes=(torch.float16,),
    max_latent=256,
    max_rope=32,
    heads=(1, 4),
)


def one_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tamis: error: ")
    assert captured.err.count("\n") == 1
    assert captured.err.endswith("\n")
    return captured.err


COMMANDS = [module.__name__.rpartition(".")[2].replace("_", "-") for module in tamis.cli.commands.COMMANDS]


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("arguments", [["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_fits_the_terminal_and_has_examples_that_parse(
    arguments: list[str], columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(arguments) == 0
    text = capsys.readouterr().out
    # Only a word that cannot be broken may be longer than the line.
    assert [line for line in text.splitlines() if len(line) > columns and " " in line.strip()] == []
    assert tamis.cli.parser.EXIT_CODES in " ".join(text.split())
    examples = re.search(r"examples?:\n((?:  .*\n)+)", text)
    assert examples is not None
    for line in examples[1].replace("\\\n", "").splitlines():
        words = shlex.split(line)[1:]
        if "--help" not in words:
            parsed = make_parser().parse_args(words)
            assert parsed.command == arguments[0] or arguments == ["--help"]
            assert not getattr(parsed, "json", False) or "--json" in words


def test_example_in_help_is_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("backends", "demo"):
        main([command, "--help"])
        example = capsys.readouterr().out.split("examples:\n  tamis ")[1].splitlines()[0]
        small = ["--layers", "1", "--max-prompt", "20"] if command == "demo" else ["--device", "cpu"]
        assert main([*example.split(), *small]) == 0


def test_version_and_module_entry_do_not_need_torch() -> None:
    script = "import sys; sys.modules['torch'] = None; sys.argv = ['tamis', '--version']; import runpy; "
    script += "runpy.run_module('tamis', run_name='__main__')"
    for command in ([sys.executable, "-m", "tamis", "--version"], [sys.executable, "-c", script]):
        found = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert found.returncode == 0, found.stderr
        assert found.stdout.strip() == f"tamis {__version__}"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "command"),
        (["sieve"], "sieve"),
        (["demo", "--heads", "many"], "--heads must be a whole number between 1 and 128, got 'many'"),
        (["demo", "--heads", "0"], "--heads must be between 1 and 128"),
        (["demo", "--layers", "0"], "--layers must be between 1 and 64, got 0"),
        (["demo", "--requests", "0"], "--requests must be between 1 and 4096, got 0 (see 'tamis demo --help')"),
        (["demo", "--max-prompt", "0"], "--max-prompt"),
        (["demo", "--new-tokens", "0"], "--new-tokens"),
        (["demo", "--topk", "0"], "--topk must be >= 1, got 0"),
        (["demo", "--page-size", "0"], "--page-size"),
        (["demo", "--token-budget", "7"], "--token-budget must be at least the number of requests (8), got 7"),
        (["demo", "--yarn-factor", "-1"], "--yarn-factor"),
        (["demo", "--seed", "-1"], "--seed must be >= 0, got -1"),
        (["demo", "--seed", "9" * 5000], "--seed must be"),
        (["demo", "--page-size", "9223372036854775808"], "--page-size must be <= 9223372036854775807"),
        (["demo", "--yarn-factor", "nan"], "--yarn-factor must be a number above 0, got 'nan'"),
        (["demo", "--model", "v4", "--heads", "3"], "--heads must be a multiple of 2 for --model v4, got 3"),
        (["demo", "--model", "v4", "--page-size", "64"], "--page-size must be a multiple of 128"),
        (["demo", "--cache", "v4-fp8"], "--cache must be one of v32-fp8, v32-bf16, v32-fp32 for --model v32"),
        (["demo", "--cache", "v32-bf16", "--mode", "separate"], "--mode separate only applies to FP8 caches"),
        (["demo", "--head", "2"], "arguments: --head 2; did you mean --heads? (see 'tamis demo --help')"),
        (["size", "--model", "glm-5", "--contxt=3"], "arguments: --contxt=3; did you mean --context? (see 'tamis size"),
        (["cache", "info", "all", "--sieve"], "unrecognized arguments: all --sieve (see 'tamis cache --help')"),
        (["backends", "--heads", "129"], "--heads must be between 1 and 128, got 129"),
        (["backends", "--layout", "v5"], "--layout must be one of"),
        (["backends", "--layout", "index-fp8"], "--layout must be one of"),
        (["backends", "--page-size", "0"], "--page-size"),
        (["backends", "--topk", "0"], "--topk must be >= 1, got 0"),
        (["backends", "--dtype", "fp64"], "--dtype must be one of bf16, fp16, fp32; got 'fp64'."),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in one_error_line(capsys)


@pytest.mark.parametrize("command", ["demo", "backends"])
def test_absent_device_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([command, "--device", "cuda"]) == 2
    assert "use --device cpu" in one_error_line(capsys)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "results.csv"), "Permission denied: 'results.csv'"),
        (MemoryError(), "out of memory: no details; use a smaller model"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            "Tried to allocate 2 GiB; use a smaller",
        ),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
            "error: out of memory: ",
        ),
        (OSError(12, "Cannot allocate memory"), "out of memory: [Errno 12]"),
        (OSError(28, "No space left on device", "page.html"), "No space left on device: 'page.html'"),
        (ValueError("from\x1b[31m outside\r\n\x9b2J\u202e"), "error: from\\x1b[31m outside \\x9b2J\\u202e"),
        (ImportError("No module named 'triton'"), "No module named 'triton'; `tamis doctor` says what is missing"),
    ],
)
def test_what_the_machine_refuses_is_one_line(
    error: Exception, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(options: object) -> int:
        raise error

    def register(subcommands: tamis.cli.parser.Subcommands) -> None:
        subcommands.add_parser("fail").set_defaults(run=failing)

    monkeypatch.setattr(tamis.cli.commands, "COMMANDS", (SimpleNamespace(register=register),))
    assert main(["fail"]) == 2
    assert words in one_error_line(capsys)


def test_a_closed_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "tamis", "backends", "--device", "cpu"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()  # on a slow machine, that torch is being loaded
    assert "error" not in said
    assert "Broken" not in said
    assert process.returncode == 0


def test_interruption(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    def register(subcommands: tamis.cli.parser.Subcommands) -> None:
        subcommands.add_parser("wait").set_defaults(run=interrupted)

    monkeypatch.setattr(tamis.cli.commands, "COMMANDS", (SimpleNamespace(register=register),))
    assert main(["wait"]) == 130
    assert capsys.readouterr().err == "tamis: interrupted\n"


def test_interrupting_a_command_gives_one_line() -> None:
    code = "import sys; from tamis.cli import main, progress; progress.LOG_SECONDS = 0.5; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "demo", "--requests", "64", "--token-budget", "64"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A parent that runs the tests in the background may have made its children ignore the signal.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, preexec_fn=listening, **pipes) as process:
        assert process.stderr is not None
        first = next(line for line in process.stderr if "model" in line or "tokens" in line)  # it has started
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=600)
    assert process.returncode == 130, first + rest
    assert out == ""
    assert rest.splitlines()[-1] == "tamis: interrupted"
    assert "Traceback" not in rest


def test_backends_table_agrees_with_choose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reference = tamis.backends.BACKENDS[-1]
    other = Backend("spare", "spare", "a second choice")
    monkeypatch.setattr(tamis.backends, "BACKENDS", (GPU_ONLY, reference, other))
    assert main(["backends", "--device", "cpu", "--heads", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["torch"] == torch.__version__
    assert found["machine"]["compute_capability"] is None
    assert found["layer"] == {"heads": 16, "layout": "v32-fp8", "page_size": 64, "dtype": "bf16", "topk": 2048}
    assert {b["name"]: b["state"] for b in found["backends"]} == {
        "picky": "rejected",
        reference.name: "chosen",
        "spare": "possible",
    }
    choice = choose(LayerSpec(16, topk=2048), "cpu", layout="v32-fp8", backends=tamis.backends.BACKENDS)
    assert found["backends"][0]["reasons"] == choice.rejected["picky"]
    assert found["backends"][0]["kernels"] == []
    assert {k["stage"]: k["runs"] for k in found["backends"][1]["kernels"]} == dict.fromkeys(STAGES, reference.name)
    assert len(choice.rejected["picky"]) == 5
    assert main(["backends", "--device", "cpu", "--heads", "16"]) == 0
    text = capsys.readouterr().out
    assert all(reason in text for reason in choice.rejected["picky"])
    assert f"torch {torch.__version__}, cpu:" in text
    assert f"{reference.name} runs\n  rotate: {reference.name}\n" in text
    assert [one["backend"] for one in found["training"]] == ["picky", reference.name, "spare"]
    assert found["training"][1] == {"backend": reference.name, "runs": list(TRAINED), "reasons": []}
    assert "\ntraining (tamis.train)\n  picky: nothing (needs a cuda device, not cpu; no kernels" in text


def test_backends_fails_when_none_fits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tamis.backends, "BACKENDS", (GPU_ONLY,))
    assert main(["backends", "--device", "cpu"]) == 1
    assert "rejected" in capsys.readouterr().out


@pytest.mark.parametrize("layout", ["v32-bf16", "v4-fp8", "plain-fp8"])
def test_backends_takes_every_latent_layout(layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backends", "--device", "cpu", "--layout", layout, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layer"]["layout"] == layout


def test_demo_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL]) == 0
    text = capsys.readouterr().out
    for words in ("prefill", "mixed", "decode", "tokens/s", "in context", "656", "1152", "dense attention", "bound"):
        assert words in text
    assert text.splitlines()[-1].startswith("storing rows as v32-fp8 costs")


def test_demo_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert found["failures"] == []
    assert found["tokens"]["prefill"] == sum(found["workload"]["prompt_lengths"])
    assert found["tokens"]["decode"] == 3 * 2
    assert found["steps"]["total"] == sum(found["steps"][kind] for kind in ("prefill", "mixed", "decode"))
    assert 0 < found["tokens"]["attended"] < found["tokens"]["in_context"]
    assert len(found["layers"]) == 1
    assert found["layers"][0]["quantisation_error"] < found["quantisation_error_bound"]
    assert [(size["stored"], size["bf16"]) for size in found["cache_bytes_per_token_and_layer"]] == [
        (656, 1152),
        (132, 256),
        (788, 1408),
    ]
    assert found["pages"]["free_at_end"] == found["pages"]["total"]
    assert [len(tokens) for tokens in found["generated"]] == [3, 3, 3]
    assert found["tokens_per_second"] > 0


def test_demo_without_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *SMALL, "--no-check"]) == 0
    assert "not checked" in capsys.readouterr().out.splitlines()[-1]
    assert main(["demo", *SMALL, "--no-check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] is None


@pytest.mark.parametrize("bound", [1e-9, float("nan")])
def test_demo_fails_beyond_its_bound(
    bound: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tamis.lab.demo.shape import ERROR_BOUNDS

    monkeypatch.setitem(ERROR_BOUNDS, "v32-fp8", bound)
    assert main(["demo", *SMALL]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("FAILED: layer 0: quantisation error")
