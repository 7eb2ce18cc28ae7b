"""Values of options are checked before torch is loaded, and the names that the command line knows are the library's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import tamis.backends
from tamis.cache.layout import NAMES
from tamis.cli import bench, bench_door, demo, options, size, values
from tamis.integrations.hf import names
from tamis.lab import generation
from tamis.lab.bench import jobs, peers
from tamis.lab.bench.door import cells
from tamis.lab.demo import shape
from tamis.model.known import KNOWN
from tamis.step.batch import parse_shape

WRONG = {
    "demo --requests 0": "--requests must be between 1 and 4096, got 0",
    "demo --token-budget 7": "--token-budget must be at least the number of requests (8), got 7",
    "demo --token-budget x": "--token-budget must be a whole number >= 1, got 'x'",
    "demo --mode separate --cache v32-bf16": "--mode separate only applies to FP8 caches; drop it",
    "demo --device tpu": "--device must be one of cpu, cuda; got 'tpu'.",
    "backends --heads 200": "--heads must be between 1 and 128, got 200",
    "backends --layout v5": "--layout must be one of v32-bf16, ",
    "verify --stage sieve": "--stage must be one of rotate, ",
    "verify --backend foo": "--backend must be one of auto, hopper, triton, reference; got 'foo'.",
    "bench bake": "suite must be one of smoke, ",
    "bench --heads 8,0": "--heads must be between 1 and 128, got 0",
    "bench --topk 1,x": "--topk must be numbers joined by commas, got '1,x'",
    "bench --repeats 0": "--repeats must be >= 1, got 0",
    "bench --against cutlass": "--against must be one of flashmla, ",
    "bench --shape 4q10s5": "--shape 4q10s5: total length (s=5) must be >= new tokens (q=10).",
    "bench decode --stage write": "--stage must be one of attend for the suite 'decode'; got 'write'.",
    "bench door --doors x": "--doors must be one of flash_mla_with_kvcache, ",
    "bench --batch 3": "--batch must be given with `tamis bench door` only",
    "bench --from x.csv": "--from must be given with --report",
    "bench --csv nowhere/x.csv": "--csv must be a file in an existing folder",
    "generate --max-new-tokens 0": "--max-new-tokens must be >= 1, got 0",
    "generate --prompt-ids 1,-2": "--prompt-ids must be >= 0, got -2",
    "generate --checkpoint nowhere": "--checkpoint must be a directory with a config.json, got nowhere",
    "generate --revision main": "--revision must be given with --checkpoint",
    "inspect --compared-queries 0": "--compared-queries must be >= 1, got 0",
    "inspect --query last": "--query must be numbers joined by commas, got 'last'",
    "inspect --prompt-file nowhere.txt": "--prompt-file nowhere.txt cannot be read",
    "inspect --html nowhere/x.html": "--html must be a file in an existing folder",
    "size --model gpt-2": "--model must be one of deepseek-v3.2, glm-5, ",
    "size --model glm-5 --memory 0": "--memory must be a size above 0 such as 80, 80GB or 74.5GiB, got '0'",
    "size --model glm-5 --revision x": "--revision must be given with the id of a model on the Hub",
    "size --model glm-5 --context 1m": "--context must be a whole number >= 1, or one such as 128k, got '1m'",
    "size --model glm-5 --context 0k": "--context must be >= 1, got 0",
    "size": "--model must be given (see 'tamis size --help')",
    "cache": "action must be given; one of info, clear (see 'tamis cache --help')",
    "": "command must be given; one of demo, generate, ",
    "cache empty": "action must be one of info, clear; got 'empty'.",
    "completion tcsh": "shell must be one of bash, zsh, fish; got 'tcsh'.",
}
SCRIPT = f"""
import contextlib, io, sys
from tamis.cli import main
for command, words in {WRONG!r}.items():
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        assert main(command.split()) == 2, command
    assert said.getvalue().startswith("tamis: error: " + words), (command, said.getvalue())
    assert said.getvalue().count("\\n") == 1, said.getvalue()
    assert "torch" not in sys.modules, command
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["completion", "bash"]) == main(["cache", "info"]) == main(["bench", "--help"]) == 0
heavy = {{"torch", "numpy", "transformers"}} & set(sys.modules)
assert not heavy, heavy
"""


def test_wrong_values_are_named_before_torch_is_loaded() -> None:
    found = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr


def test_help_and_version_import_no_library_of_the_commands() -> None:
    code = "import sys; from tamis.cli import main; main(sys.argv[1:]); "
    code += "heavy = {'rich', 'torch', 'numpy', 'shtab', 'packaging', 'platformdirs'} & set(sys.modules); "
    code += "assert not heavy, heavy"
    for argument in ("--version", "--help"):
        subprocess.run([sys.executable, "-c", code, argument], check=True, capture_output=True)


def test_names_are_those_of_the_library() -> None:
    assert ("auto", *(backend.name for backend in tamis.backends.BACKENDS)) == options.BACKENDS
    assert set(options.LATENT_LAYOUTS + options.INDEX_LAYOUTS) == set(NAMES)
    assert demo.CACHES == shape.CACHES
    assert shape.V4Shape().o_groups == demo.V4_GROUPS
    suites = {name: tuple(dict.fromkeys(grid.stage for grid in grids)) for name, grids in jobs.SUITES.items()}
    assert suites == bench.SUITES
    assert set(bench.PEERS) == {*peers.GROUPS, *peers.NAMES, "none"}
    assert cells.DOORS == bench_door.DOORS
    assert list(generation._SIZES) == [known.short for known in names.MODELS.values()]
    assert tuple(KNOWN) == size.MODELS


@pytest.mark.parametrize("text", ["1q1", "q1", "32q1s1k_2q1k", "128q1s16k", "1q4ks8k"])
def test_shapes_follow_the_grammar_of_batches(text: str) -> None:
    assert values.shapes(f"{text},{text}") == [text, text]
    assert parse_shape(text)[0]
    for wrong in (f"{text}_", f"x{text}", text.replace("q", "s")):
        with pytest.raises(Exception, match="groups like"):
            values.shapes(wrong)
        with pytest.raises(ValueError, match="groups like"):
            parse_shape(wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0q1s64", "must be of 1 to 65536 requests, got 0 in '0q1s64'"),
        ("99999999999999q1", "must be of 1 to 65536 requests, got 99999999999999 in"),
        ("q1_1q1s2097152k", "must be of requests of up to 2147483647 tokens, got 2147483648"),
        ("q9999999999", "must be of requests of up to 2147483647 tokens, got 9999999999"),
        (f"{'9' * 5000}q1", "must be of numbers below 10**18, got 99999999999999999999..."),
    ],
)
def test_shapes_that_nothing_could_run_are_refused_at_once(text: str, message: str) -> None:
    """Otherwise the checks of the stages would run first, for a minute on a CPU."""
    with pytest.raises(Exception, match=re.escape(message)):
        values.shapes(text)


@pytest.mark.parametrize(("text", "count"), [("1", 1), ("131072", 1 << 17), ("128k", 1 << 17), ("1024K", 1 << 20)])
def test_tokens_may_be_counted_in_thousands_of_1024(text: str, count: int) -> None:
    assert values.tokens(text) == count


@pytest.mark.parametrize(
    ("text", "size"), [("80", 80 * 10**9), ("80GB", 80 * 10**9), ("1.5 gib", 3 << 29), (".5", 5 * 10**8)]
)
def test_memory_has_units(text: str, size: int) -> None:
    assert values.memory(text) == size


def test_an_unknown_backend_is_left_to_the_package_that_may_add_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tamis.backends")
    monkeypatch.setattr(options.metadata, "entry_points", lambda group: [group])
    assert options.backend("other") == "other"


def test_layouts_without_a_rope_are_those_of_the_benchmark() -> None:
    from tamis.cli.options import NO_ROPE_LAYOUTS
    from tamis.lab.bench.jobs import WITHOUT_ROPE, make_jobs

    assert tuple(WITHOUT_ROPE) == NO_ROPE_LAYOUTS
    (job,) = make_jobs(None, shapes=["4q1s512"], layouts=["v32-fp8-512"])
    assert (job.row_layout.row_bytes, job.row_layout.width) == (528, 512)


def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def refuse(path: Path, mode: int) -> bool:
        asked.append(Path(path))
        return False

    monkeypatch.setattr(options.os, "access", refuse)
    (tmp_path / "link.html").symlink_to(tmp_path / "folder" / "page.html")
    (tmp_path / "folder").mkdir()
    for name in ("page.html", "link.html", "/dev/full"):
        with pytest.raises(ValueError, match="--html must be a file that can be written, got"):
            options.check_file("--html", tmp_path / name)
    assert asked == [tmp_path.resolve(), tmp_path.resolve() / "folder", Path("/dev/full")]
    monkeypatch.undo()
    options.check_file("--html", tmp_path / "page.html")
    options.check_file("--html", None)
