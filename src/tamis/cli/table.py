"""Tables of results on stdout, drawn by rich, and the notes below them.

On a terminal a table takes the terminal's width and its colours: columns of text wrap, and columns of numbers never do.
In a pipe or a file it is plain text of its natural width, one line per row, whatever COLUMNS says.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tamis.cli.text import one_line, printable

if TYPE_CHECKING:
    from rich.box import Box
    from rich.console import Console
    from rich.table import Table

NARROWEST = 12
"""Columns of text are not wrapped to fewer letters. On a narrower terminal, lines are longer than it is wide."""
STYLES = {
    **dict.fromkeys(("ok", "chosen"), "green"),
    **dict.fromkeys(("WRONG", "FAILED"), "bold red"),
    **dict.fromkeys(("missing", "too old", "refused", "broken", "left out", "not kept", "rejected"), "yellow"),
}
"""Words that have a colour on a terminal if they fill a cell."""


def render_table(header: Sequence[str], rows: Sequence[Sequence[object]], align: str = "") -> str:
    """A table as text for stdout, without a final newline.

    Args:
        header: names of the columns.
        rows: cells, converted with `str`. Control characters are escaped, except that a line break starts a new line
            in the same row.
        align: one letter per column, "l" (text, the default where letters are missing) or "r" (numbers).
    """
    for number, row in enumerate(rows):
        if len(row) != len(header):
            expected = f"of {len(header)} cells like the header"
            raise ValueError(f"rows[{number}] must be {expected}, got {len(row)}; add or drop cells")
    import sys

    from rich.console import Console

    console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
    table = _table(header, rows, align.ljust(len(header), "l"))
    console.width = _width(console, table)
    with console.capture() as captured:
        console.print(table)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def print_notes(notes: Sequence[str], wrong: Sequence[str]) -> None:
    """What stands below the table of a benchmark: notes and failed checks, each on one line and once."""
    for note in dict.fromkeys([*notes, *(f"FAILED: {line}" for line in wrong)]):
        print(one_line(note))


def _table(header: Sequence[str], rows: Sequence[Sequence[object]], align: str) -> "Table":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=_ruled(), show_edge=False, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name, side in zip(header, align, strict=True):
        if side == "r":
            table.add_column(name, justify="right", no_wrap=True)
        else:
            table.add_column(name, overflow="fold")
    for row in rows:
        cells = [printable(cell, keep="\n") for cell in row]
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in cells))
    return table


def _ruled() -> "Box":
    """A line of dashes under the header, and nothing else: it is the same in every encoding."""
    from rich.box import Box

    blank = "    \n"
    return Box(blank * 2 + " -  \n" + blank * 5, ascii=True)


def _width(console: "Console", table: "Table") -> int:
    """The width to draw a table at: the terminal's, unless numbers would not fit; without a terminal, the natural."""
    from rich.measure import Measurement

    unlimited = console.options.update(width=1 << 16, max_width=1 << 16)
    natural = Measurement.get(console, unlimited, table).maximum
    if not console.is_terminal:
        return natural
    needed = 0
    for column in table.columns:
        own = max(Measurement.get(console, unlimited, cell).maximum for cell in (column.header, *column.cells))
        needed += 2 + (own if column.no_wrap else min(own, NARROWEST))
    return max(console.width, min(needed, natural))
