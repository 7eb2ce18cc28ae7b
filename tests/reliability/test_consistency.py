"""Every line of docs/consistency.md: what must match is refused by name, and no cache changes."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from consistency import CELLS, Attempt, Cell, mla, table, v4
from small_v4 import OVERLAPPING, PLAIN, WINDOW
from torch import Tensor

from tamis import LayerSpec, PagedCache

PAGE = Path(__file__).parents[2] / "docs" / "consistency.md"
REFUSED = [cell for cell in CELLS if cell.argument]


def name_of(cell: Cell) -> str:
    return f"{cell.quantity}: {cell.one}, {cell.other}"


@pytest.mark.parametrize("cell", REFUSED, ids=name_of)
def test_a_mismatch_is_refused_by_name(cell: Cell) -> None:
    assert cell.attempt is not None
    refusal, changed = tried(cell.attempt)
    assert re.match(re.escape(cell.argument) + r"[ \[.].*, got ", refusal), refusal
    assert not changed, "a refused call changed a cache"


def tried(attempt: Callable[[], Attempt]) -> tuple[str, bool]:
    """How a call was refused, and whether a cache changed. Some parts are refused when made, others when they meet."""
    caches: list[PagedCache] = []
    before: list[Tensor] = []
    try:
        call, caches = attempt()
        before = [cache.storage.clone() for cache in caches]
        call()
    except ValueError as error:
        return str(error), not all(c.storage.equal(kept) for c, kept in zip(caches, before, strict=True))
    return "nothing was refused", False


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("mode", ["mixed", "separate"])
def test_parts_that_match_run(indexed: bool, mode: str) -> None:
    call, caches = mla(indexed=indexed, mode=mode)
    call()
    assert caches[0].storage.any()


@pytest.mark.parametrize("spec", [WINDOW, OVERLAPPING, PLAIN], ids=lambda s: s.kind)
def test_parts_of_v4_that_match_run(spec: LayerSpec) -> None:
    call, caches = v4(spec)
    call()
    assert caches[0].storage.any()


def test_every_line_says_one_thing_once() -> None:
    names = [name_of(cell) for cell in CELLS]
    assert len(set(names)) == len(names)
    assert all((cell.attempt is None) == (cell.argument == "") for cell in CELLS)


def test_the_page_shows_this_table() -> None:
    text = PAGE.read_text()
    assert table() in text, f"write this into docs/consistency.md:\n{table()}"
