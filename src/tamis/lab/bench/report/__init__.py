"""Figures of `tamis bench` results: one HTML file, and the same figures as PNG files."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from tamis import checks
from tamis._extras import install_command
from tamis.lab.bench.record import Row
from tamis.lab.bench.report.data import latest, most_measured_first, read_rows
from tamis.lab.html import write_whole

__all__ = ["check_place", "read_rows", "write_report"]
PAGE = "report.html"


def check_place(folder: Path) -> None:
    """Refuse, before anything is measured, a folder that cannot be made, and a machine without matplotlib."""
    if find_spec("matplotlib") is None:
        raise ValueError(f"--report needs matplotlib to draw: {install_command('report')}")
    if (folder.exists() and not folder.is_dir()) or not folder.resolve().parent.is_dir():
        raise checks.refuse("--report", "a folder, or a new one in an existing folder", str(folder), "choose another")


def write_report(
    rows: Sequence[Row], folder: Path, report: Callable[[int, int], None] = lambda done, total: None
) -> list[Path]:
    """Write the report and return the paths of its files, the page first.

    Args:
        rows: measurements of one run or of several files. Of repeated measurements only the newest is shown, and the
            page says how many were left out.
        folder: where the files go; created if it does not exist.
        report: called with the number of figures drawn and the number of all figures.
    """
    from tamis.lab.bench.report.figures import draw_png, draw_svg
    from tamis.lab.bench.report.kinds import FIGURES
    from tamis.lab.bench.report.page import render_page

    newest = most_measured_first(latest(rows))
    if not newest:
        raise checks.refuse("rows", "at least one", "none", "measure something first")
    drawings, pictures = {}, {}
    for number, figure in enumerate(FIGURES):
        panels = figure.panels(newest)
        if panels:
            drawings[figure] = draw_svg(figure, panels)
            pictures[folder / f"{figure.name}.png"] = draw_png(figure, panels)
        report(number + 1, len(FIGURES))
    page = render_page(newest, drawings, superseded=len(rows) - len(newest))
    # Files are written only after everything is drawn; each is replaced as a whole, the page last.
    folder.mkdir(exist_ok=True)
    for file, picture in pictures.items():
        write_whole(file, picture)
    write_whole(folder / PAGE, page)
    for figure in FIGURES:
        if figure not in drawings:
            (folder / f"{figure.name}.png").unlink(missing_ok=True)  # left by an earlier report
    return [folder / PAGE, *pictures]
