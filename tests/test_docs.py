"""What the documents promise: code blocks run, what is generated is up to date, and what they name exists."""

import ast
import builtins
import contextlib
import io
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import pytest

import tamis
import tamis.train
from tamis.cli import main, make_parser
from tamis.integrations import deep_gemm, flash_mla, flashinfer, transformers
from tamis.lab import inspection

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
REFERENCE = sorted((ROOT / "docs/reference").glob("*.md"))
NOT_RUN = {
    "needs a network": ("pip", "git", "cd"),
    "without a network": ("pip",),
    "needs a GPU": ("tamis", "python", "pytest", "vllm", "curl"),
    "takes a minute": ("tamis", "make", "python"),
    "examples": ("tamis",),
}
"""Titles of blocks that are shown and not run, and the commands they may have. Arguments of `tamis` are parsed."""
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.M | re.S)


LONGEST = 80
"""Characters that a line of code may have: beside the site's menus it then fits without scrolling."""


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str
    line: int
    prints: str | None
    """The block of text that comes right after this one."""


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    found = []
    matches = list(FENCE.finditer(text))
    for match, after in zip_longest(matches, matches[1:]):
        language, _, rest = match[1].partition(" ")
        title = re.fullmatch(r'(?:title="([^"]*)")?', rest)
        assert title is not None, f"{page}: {match[1]}"
        next_to = after is not None and after[1] == "text" and not text[match.end() : after.start()].strip()
        line = text[: match.start(2)].count("\n")
        found.append(Block(language, title[1] or "", match[2], line, after[2] if next_to else None))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_block_is_of_a_kind_that_is_checked(page: str) -> None:
    for block in blocks(page):
        assert block.language in ("python", "sh", "text", "toml"), f"{page}:{block.line}"
        if block.language == "toml":
            tomllib.loads(block.text)
        assert not block.title or (block.language == "sh" and block.title in NOT_RUN), f"{page}:{block.line}"


@pytest.mark.parametrize("page", [page for page in PAGES if page.startswith("docs/")])
def test_lines_of_code_fit_the_page(page: str) -> None:
    for block in blocks(page):
        if block.language != "text":  # what programs print wraps
            long = [line for line in block.text.splitlines() if len(line) > LONGEST]
            assert not long, f"{page}:{block.line}"


TOUR = "docs/tour.md"
"""A notebook in Markdown; `tests/tools/test_tour.py` runs it."""


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != TOUR and any(b.language == "python" for b in blocks(page))]
)
def test_python_blocks_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is one program; a block of text right after one of Python is what it prints."""
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # so that what a block puts there goes away again
    names: dict[str, object] = {}
    for block in blocks(page):
        if block.language == "python":
            source = "\n" * block.line + block.text  # so that a traceback has the page's line numbers
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(source, page, "exec"), names)
            assert out.getvalue() == (block.prints or ""), f"{page}:{block.line}"


def commands(block: Block) -> Iterator[list[str]]:
    """The words of each command of a block of shell, without variables set for it, and up to a redirection."""
    for line in split_commands(block.text):
        words = shlex.split(line, comments=True)
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words:
            yield words[: words.index(">")] if ">" in words else words


def split_commands(text: str) -> list[str]:
    """Lines of shell, where a line that ends with a backslash, or inside of quotes, goes on in the next one."""
    found, open_line = [], ""
    for line in text.replace("\\\n", " ").splitlines():
        open_line += line
        try:
            shlex.split(open_line, comments=True)
        except ValueError:
            open_line += "\n"
        else:
            found.append(open_line)
            open_line = ""
    assert not open_line
    return found


RUN = [(page, block) for page in PAGES for block in blocks(page) if block.language == "sh" and not block.title]
LINES = sorted({(shlex.join(words), block.prints or "") for _, block in RUN for words in commands(block)})


@pytest.mark.parametrize(("line", "prints"), LINES, ids=[line for line, _ in LINES])
def test_shell_blocks_run(
    line: str, prints: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A block of text after one of shell is what it prints, with `...` for lines that are left out."""
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), flags=re.M), line
        return
    monkeypatch.chdir(tmp_path)
    if words[0] == "torchrun":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        words = [str(ROOT / "docs/tutorials" / word) if word.endswith(".py") else word for word in words[1:]]
        ranks = [sys.executable, "-m", "torch.distributed.run", *words]
        out = subprocess.run(ranks, check=True, stdout=subprocess.PIPE, text=True).stdout
    else:
        assert words[0] == "tamis", line
        assert main(words[1:]) == 0
        out = capsys.readouterr().out
    if prints:
        wanted = re.escape(prints).replace(re.escape("...\n"), r"(?:.*\n)*")
        assert re.fullmatch(wanted, out), line


def test_shell_blocks_that_are_not_run_would_be_accepted() -> None:
    found = [(page, block) for page in PAGES for block in blocks(page) if block.language == "sh" and block.title]
    assert found
    for page, block in found:
        for words in commands(block):
            assert words[0] in NOT_RUN[block.title], f"{page}:{block.line} {words}"
            if words[0] == "tamis" and "--help" not in words:
                make_parser().parse_args(words[1:])


def test_the_example_of_the_readme_is_short() -> None:
    first = next(block for block in blocks("README.md") if block.language == "python")
    assert len([line for line in first.text.splitlines() if line.strip()]) <= 20


def test_every_example_of_the_readme_imports_what_it_uses() -> None:
    """Readers copy one of them; on other pages the blocks are one program."""
    for block in blocks("README.md"):
        if block.language == "python":
            nodes = list(ast.walk(ast.parse(block.text)))
            names = [node for node in nodes if isinstance(node, ast.Name)]
            used = {node.id for node in names if isinstance(node.ctx, ast.Load)} - set(dir(builtins))
            made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
            imported = {
                (alias.asname or alias.name).partition(".")[0]
                for node in nodes
                if isinstance(node, ast.Import | ast.ImportFrom)
                for alias in node.names
            }
            assert used <= made | imported, f"README.md:{block.line}: {used - made - imported}"


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


def public_names() -> set[str]:
    """What programs import: the library, its stages, the drop-ins and the inspection."""
    modules = (tamis.ops, tamis.train, flash_mla, flashinfer, deep_gemm, transformers, inspection)
    names = set(tamis.__all__) | {name for module in modules for name in module.__all__}
    refused = {name for name in flash_mla.__all__ if name.startswith(("flash_attn_", "fused_"))}
    return names - refused - {"__version__", "ops"}


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text() for path in REFERENCE)
    listed = {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", text, flags=re.M)}
    assert public_names() - listed == set()


@pytest.mark.parametrize("page", REFERENCE, ids=lambda page: page.stem)
def test_every_name_of_the_reference_has_an_example(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks after a name use it and print something; `test_python_blocks_run` runs them."""
    monkeypatch.syspath_prepend(ROOT)
    from tools.docs.examples import examples

    for name, example in examples(page.read_text()).items():
        found = re.fullmatch(r"```python\n(.*)\n```\n\n```text\n.+\n```", example, flags=re.S)
        assert found is not None, f"{name}: a block of Python, then one of text with what it prints"
        code = [line for line in found[1].splitlines() if line]
        # A call with many arguments has a line for each of them.
        assert 2 <= len([line for line in code if not line.startswith((" ", ")", "}"))]) <= 12, name
        used = [line for line in code if re.search(rf"\b{name.rpartition('.')[2]}\b", line)]
        assert len(used) > len([line for line in used if "import" in line]), f"{name} is only imported"


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
