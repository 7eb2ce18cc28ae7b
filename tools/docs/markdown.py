"""Tables in Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], lines: Sequence[Sequence[str]], align: str) -> str:
    """A table with one letter of alignment per column: "l" or "r"."""
    rule = ["--:" if side == "r" else "---" for side in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))


def sortable(text: str) -> str:
    """A table that readers can sort and filter (`docs/scripts/sort.js`), of which searches find nothing."""
    return f'<div class="sortable" data-search-exclude markdown>\n\n{text}\n\n</div>'
