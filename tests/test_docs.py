"""What the documents promise: code blocks run, what is generated is up to date, and what they name exists."""

import contextlib
import io
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import tamis
from tamis.cli import main, make_parser

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
NOT_RUN = {
    "needs a network": ("pip", "git", "cd"),
    "without a network": ("pip",),
    "needs a GPU": ("tamis", "python", "pytest", "vllm"),
    "takes a minute": ("tamis", "make", "python"),
    "examples": ("tamis",),
}
"""Titles of blocks that are shown and not run, and the commands they may have. Arguments of `tamis` are parsed."""
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str
    line: int


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    for match in FENCE.finditer(text):
        language, _, rest = match[1].partition(" ")
        title = re.fullmatch(r'(?:title="([^"]*)")?', rest)
        assert title is not None, f"{page}: {match[1]}"
        found.append(Block(language, title[1] or "", match[2], text[: match.start(2)].count("\n")))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_checked(page: str) -> None:
    for block in blocks(page):
        assert block.language in ("python", "sh", "text", "toml"), f"{page}:{block.line}"
        if block.language == "toml":
            tomllib.loads(block.text)
        assert not block.title or (block.language == "sh" and block.title in NOT_RUN), f"{page}:{block.line}"


TOUR = "docs/tour.md"
"""A notebook in Markdown; `tests/tools/test_tour.py` runs it."""


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != TOUR and any(b.language == "python" for b in blocks(page))]
)
def test_python_blocks_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is one program; a block of text after one of Python is what it prints."""
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # so that what a block puts there goes away again
    names: dict[str, object] = {}
    printed = None
    for block in blocks(page):
        if block.language == "python":
            source = "\n" * block.line + block.text  # so that a traceback has the page's line numbers
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, page, "exec"), names)
            printed = out.getvalue()
        elif block.language == "text" and printed is not None:
            assert printed == block.text, f"{page}:{block.line}"
            printed = None


def commands(title: str) -> Iterator[tuple[str, list[str]]]:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "sh" and (block.title in NOT_RUN if title == "any" else block.title == title):
                for line in block.text.replace("\\\n", " ").splitlines():
                    if words := shlex.split(line, comments=True):
                        yield f"{page}:{block.line} {block.title}", words


@pytest.mark.parametrize("line", sorted({shlex.join(words) for _, words in commands("")}))
def test_shell_blocks_run(line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M), line
        return
    assert words[0] == "tamis", line
    monkeypatch.chdir(tmp_path)
    assert main(words[1:]) == 0


def test_shell_blocks_that_are_not_run_would_be_accepted() -> None:
    found = list(commands("any"))
    assert found
    for where, words in found:
        title = where.split(" ", 1)[1]
        assert words[0] in NOT_RUN[title], f"{where}: {words}"
        if words[0] == "tamis" and "--help" not in words:
            make_parser().parse_args(words[1:])


def test_the_example_of_the_readme_is_short() -> None:
    first = next(block for block in blocks("README.md") if block.language == "python")
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("name", ["DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", *PAGES])
def test_links_to_files_resolve(name: str) -> None:
    document = ROOT / name
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_feature_names_tests_that_exist() -> None:
    text = (ROOT / "docs/coverage.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))
    for path, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), flags=re.M), f"{path}::{test}"
    features = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| feature |")]
    assert len(features) > 50
    for line in features:
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        assert len(cells) == 4, line
        assert all(cells), line
        count, tests = re.fullmatch(r"<details><summary>(\d+) tests?</summary>(.*)</details>", cells[3]).groups()
        assert len(re.findall(r"(?:^|<br>)`tests/[\w/]+\.py::\w+`", tests)) == int(count) > 0, line


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    listed = {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", text, flags=re.M)}
    assert set(tamis.__all__) - {"__version__", "ops"} <= listed
    assert set(tamis.ops.__all__) <= listed


def test_what_is_generated_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures, tables and the page of commands are what `make generate` writes from code and results."""
    monkeypatch.syspath_prepend(ROOT)
    from tools.docs.__main__ import outputs

    stale = [str(path.relative_to(ROOT)) for path, text in outputs().items() if path.read_text() != text]
    assert not stale, "run `make generate`"


def test_highlights_show_the_newest_run_and_its_fastest_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from tools.docs import results

    def row(backend: str, time: str, ours: str, peer: str, theirs: str, topk: str = "512") -> dict[str, str]:
        wanted = {"stage": "attend", "shape": "1q1s1k", "heads": "16", "layout": "v32-bf16", "commit": time[:1]}
        return wanted | {
            "topk": topk,
            "backend": backend,
            "time": time,
            "median_us": ours,
            "peer": peer,
            "peer_build": "vllm 0.25.0" if peer == "fa3" else "",
            "peer_us": theirs,
            "ratio": str(float(theirs) / float(ours)) if theirs else "",
        }

    rows = [
        row("hopper", "1a", "60", "deepgemm", "20"),
        row("hopper", "2a", "50", "flashmla-sgl", "100"),
        row("hopper", "2a", "50", "fa3", "75"),
        row("hopper", "2b", "50", "vllm", ""),
        row("hopper", "4a", "40", "flashmla-sgl", "80", topk="1024"),
        row("triton", "3a", "90", "torch", "10"),
    ]
    monkeypatch.setattr(results, "HIGHLIGHTS", {"decode": ("some", "attend", "1q1s1k", "16", "512", "v32-bf16")})
    monkeypatch.setattr(results, "read", lambda name: rows)
    expected = "| decode | hopper | 50.0 us | FlashAttention 3 (vLLM 0.25.0): 75.0 us | 1.50 |"
    assert results.highlights().splitlines()[-1] == expected


def test_no_picture_is_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from tools.docs.__main__ import PICTURES

    assert {path.stem for path in (ROOT / "docs/pictures").glob("*.svg")} == set(PICTURES)
    shown = "".join((ROOT / page).read_text() for page in PAGES)
    assert not [name for name in PICTURES if f"pictures/{name}.svg" not in shown]


def test_the_pictures_of_both_reports_are_shown_and_small(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("PIL")
    monkeypatch.syspath_prepend(ROOT)
    from tools.screenshots import LARGEST, REPORTS, WIDTH

    shown = "".join((ROOT / page).read_text() for page in PAGES)
    taken = sorted((ROOT / "docs/pictures").glob("*.png"))
    assert [path.name for path in taken] == sorted(report.name for report in REPORTS)
    for path in taken:
        assert f"pictures/{path.name})" in shown
        assert path.stat().st_size < LARGEST
        assert int.from_bytes(path.read_bytes()[16:20], "big") == WIDTH
