"""Tables in Markdown."""

from collections.abc import Sequence


def table(header: Sequence[str], lines: Sequence[Sequence[str]], align: str) -> str:
    """A table with one letter of alignment per column: "l" or "r"."""
    rule = ["--:" if side == "r" else "---" for side in align]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, rule, *lines))
