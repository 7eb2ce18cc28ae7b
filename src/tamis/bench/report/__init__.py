"""Results of `tamis bench` as pictures: one HTML file, and the same figures as PNG."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from tamis import checks
from tamis.bench.record import Row
from tamis.bench.report.data import latest, most_measured_first, read_rows

__all__ = ["check_place", "read_rows", "write_report"]
PAGE = "report.html"


def check_place(folder: Path) -> None:
    """Refuse, before anything is measured, a place that cannot hold a report, and a machine that cannot draw."""
    if find_spec("matplotlib") is None:
        raise ValueError("--report needs matplotlib to draw: pip install 'tamis[report]'")
    if (folder.exists() and not folder.is_dir()) or not folder.resolve().parent.is_dir():
        raise checks.refuse("--report", "a folder, or a new one in an existing folder", str(folder), "choose another")


def write_report(
    rows: Sequence[Row], folder: Path, report: Callable[[int, int], None] = lambda done, total: None
) -> list[Path]:
    """Draw what rows show; the files that were written, the page first.

    Args:
        rows: of one run, or of several files; of repeated measurements the newest counts.
        folder: made if it is not there.
        report: gets how many figures of how many are drawn.
    """
    from tamis.bench.report.figures import FIGURES, LIGHT, THEMED, draw
    from tamis.bench.report.page import render_page

    newest = most_measured_first(latest(rows))
    if not newest:
        raise checks.refuse("rows", "at least one", "none", "measure something first")
    folder.mkdir(exist_ok=True)
    written, drawings = [folder / PAGE], {}
    for number, figure in enumerate(FIGURES):
        drawing, picture = draw(figure, newest, THEMED, "svg"), draw(figure, newest, LIGHT, "png")
        file = folder / f"{figure.name}.png"
        if drawing is None or picture is None:
            file.unlink(missing_ok=True)  # of an earlier report, whose rows had more
        else:
            drawings[figure] = drawing.decode("utf-8")
            file.write_bytes(picture)
            written.append(file)
        report(number + 1, len(FIGURES))
    written[0].write_text(render_page(newest, drawings), encoding="utf-8")
    return written
