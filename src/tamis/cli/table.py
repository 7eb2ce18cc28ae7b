"""Plain-text tables: aligned columns, a rule under the header, cells of one or more lines."""

from collections.abc import Sequence
from itertools import zip_longest

from tamis.cli.text import printable

GAP = "  "


def render_table(header: Sequence[str], rows: Sequence[Sequence[object]], align: str = "") -> str:
    """A table as text, without a final newline.

    Args:
        header: names of the columns.
        rows: cells, converted with `str`. Control characters are escaped, except that a line break starts a new line
            in the same row.
        align: one letter per column, "l" (the default where letters are missing) or "r".
    """
    columns = len(header)
    for number, row in enumerate(rows):
        if len(row) != columns:
            raise ValueError(f"rows[{number}] must be of {columns} cells like the header, got {len(row)}; add or drop")
    lines = [line for row in [header, *rows] for line in _lines(row)]
    widths = [max(len(line[column]) for line in lines) for column in range(columns)]
    sides = align.ljust(columns, "l")

    def text(cells: Sequence[str]) -> str:
        padded = (
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(cells, widths, sides, strict=True)
        )
        return GAP.join(padded).rstrip()

    under_header = len(_lines(header))
    printed = [text(line) for line in lines]
    return "\n".join([*printed[:under_header], GAP.join("-" * w for w in widths), *printed[under_header:]])


def _lines(row: Sequence[object]) -> list[list[str]]:
    cells = [printable(cell, keep="\n").split("\n") for cell in row]
    return [list(line) for line in zip_longest(*cells, fillvalue="")]
