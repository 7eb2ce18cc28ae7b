"""The built site in a browser, opened from disk: search, sorting with the keyboard, and pages on a narrow screen."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pytest

pytest.importorskip("material")

from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.utils.yaml import yaml_load

ROOT = Path(__file__).parents[2]
PAGES = ("performance", "measurements", "parallelism", "coverage", "troubleshooting", "vllm", "sglang", "concepts")
TUTORIALS = tuple(f"tutorials/{name}" for name in ("vllm", "sglang", "transformers", "flash_mla", "engine"))
ENTER = "\ue007"

pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "there is one")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some pages, built with the settings of `mkdocs.yml`, without those that document the code: they take long."""
    folder = tmp_path_factory.mktemp("site")
    with (ROOT / "mkdocs.yml").open() as file:
        settings: dict[str, Any] = yaml_load(file)
    plugins = [plugin for plugin in settings["plugins"] if "mkdocstrings" not in plugin]
    extensions = [extension for extension in settings["markdown_extensions"] if "pymdownx.snippets" not in extension]
    settings |= {"plugins": plugins, "markdown_extensions": extensions, "strict": False, "nav": None, "validation": {}}
    settings["hooks"] = []  # for pages that document the code
    (folder / "mkdocs.yml").write_text(json.dumps(settings))
    for name in ("scripts", "pictures"):
        shutil.copytree(ROOT / "docs" / name, folder / "docs" / name)
    (folder / "docs" / "tutorials").mkdir()
    for name in ("extra.css", *(f"{page}.md" for page in (*PAGES, *TUTORIALS))):
        shutil.copy(ROOT / "docs" / name, folder / "docs" / name)
    build(load_config(str(folder / "mkdocs.yml"), site_dir=str(folder / "built")))
    return folder / "built"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Browser]:
    with browser.open_browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def found(window: browser.Browser, words: str) -> list[str]:
    """The addresses that a search gives, by typing the words into its field."""
    window.press("input.md-search__input", words)
    window.wait("document.querySelector('.md-search-result__item a')", seconds=120)
    links = window.run("return [...document.querySelectorAll('.md-search-result__item a')].map(link => link.href)")
    return [str(link) for link in links]


def test_search_works_from_disk(site: Path, window: browser.Browser) -> None:
    window.open(site / "performance.html")
    links = found(window, "interleaved baselines")
    assert any("performance.html#how-it-is-measured" in link for link in links), links
    # Tables of numbers would bury everything else.
    assert not any("measurements.html#" in link for link in links), links
    assert window.console() == []
    # A part of a name in code is a word: flash_mla_with_kvcache.
    window.open(site / "parallelism.html")
    links = found(window, "kvcache")
    assert any("performance.html#the-functions-a-program-calls" in link for link in links), links


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    for page in PAGES:
        text = (site / f"{page}.html").read_text()
        assert 'src="http' not in text
        assert '<link rel="stylesheet" href="http' not in text


def test_rows_are_sorted_and_hidden_with_the_keyboard(site: Path, window: browser.Browser) -> None:
    window.open(site / "measurements.html")
    table = "document.querySelector('.sortable table')"
    headings = window.run(f"return [...{table}.tHead.rows[0].cells].map(cell => cell.textContent)")
    column = headings.index("graph")
    read = f"return [...{table}.tBodies[0].rows].map(row => row.cells[{column}].textContent)"
    before = window.run(read)

    def numbers() -> list[float]:
        return [float(cell) for cell in window.run(read) if cell != "-"]

    heading = f".sortable th:nth-child({column + 1})"
    window.press(f"{heading} button", ENTER)
    assert numbers() == sorted(float(cell) for cell in before if cell != "-")
    assert window.run(f"return document.querySelector('{heading}').ariaSort") == "ascending"
    window.press(f"{heading} button", " ")
    assert numbers() == sorted((float(cell) for cell in before if cell != "-"), reverse=True)
    assert window.run(f"return document.querySelector('{heading}').ariaSort") == "descending"

    # A number is a word of a cell: 16 is not 16384.
    window.press(".sortable input", "16 v32-bf16")
    shown = window.run(f"return [...{table}.tBodies[0].rows].filter(row => !row.hidden).map(row => row.innerText)")
    assert 0 < len(shown) < len(before)
    assert all("v32-bf16\t16\t" in row for row in shown)
    assert window.run("return document.querySelector('.sortable output').textContent").startswith(f"{len(shown)} of ")
    assert window.console() == []


def resize(window: browser.Browser, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    window.devtools("Emulation.setDeviceMetricsOverride", **metrics)


@pytest.mark.parametrize("page", ["vllm", "sglang", "concepts", "troubleshooting", *TUTORIALS])
def test_code_needs_no_scrolling(page: str, site: Path, window: browser.Browser) -> None:
    """From 800 pixels on: at 1230 both menus are shown, which leaves the least room. On a phone only commands and what
    programs print."""
    window.open(site / f"{page}.html")
    for width, blocks in ((1400, ""), (1230, ""), (800, ""), (400, ":is(.language-sh, .language-text) ")):
        resize(window, width)
        code = f"[...document.querySelectorAll('{blocks}pre > code')]"
        # Menus move for a moment when the width changes.
        window.wait(f"{code}.length && {code}.every(block => block.scrollWidth <= block.clientWidth)", seconds=20)


@pytest.mark.parametrize("page", [*PAGES, *TUTORIALS])
def test_no_page_is_wider_than_the_screen(page: str, site: Path, window: browser.Browser) -> None:
    """Tables and pictures that do not fit scroll inside their own boxes."""
    window.open(site / f"{page}.html")
    for width in (400, 800, 1400):
        resize(window, width)
        # Bars and menus move for a moment when the width changes.
        window.wait(f"document.documentElement.scrollWidth <= {width}", seconds=20)
