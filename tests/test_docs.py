"""What the documents promise: code blocks run, and paths they name exist."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_blocks_of_the_readme_run(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", None)  # so that what a block puts there goes away again
    exec(compile(BLOCKS[number], f"README block {number}", "exec"), {})


def test_the_example_is_short() -> None:
    assert len(BLOCKS) >= 2
    assert len([line for line in BLOCKS[0].splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize(
    "name", ["README.md", "DESIGN.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/coverage.md", "docs/vllm.md"]
)
def test_links_to_files_resolve(name: str) -> None:
    document = ROOT / name
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
        assert (document.parent / target).exists(), target


def test_every_test_named_in_the_coverage_table_exists() -> None:
    text = (ROOT / "docs/coverage.md").read_text()
    named = set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))
    assert named
    for path, test in named:
        assert re.search(rf"^def {test}\(", (ROOT / path).read_text(), flags=re.M), f"{path}::{test}"
