"""The documents' pictures of the two HTML reports: `python -m tools.screenshots`, which needs Chromium and Pillow.

Reports are made from a tiny random model and from the results in the repository, opened in headless Chromium in the
light scheme, and cut off below the part that shows what a report offers.
"""

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tamis.cli import main as tamis

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH = 1200
LARGEST = 200_000
"""The most bytes of a picture."""
COLOURS = 96
"""Colours in a picture: enough for the ramp of a heat map, and a third of the bytes of true colour."""
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")


@dataclass(frozen=True)
class Picture:
    """One report and how much of it is shown."""

    name: str
    page: str
    """The report's file in the folder of the run."""
    command: tuple[str, ...]
    """The arguments of `tamis`, with the folder of the run as {folder}."""
    height: int


RESULTS = tuple(str(path) for path in sorted((ROOT / "benchmarks" / "results").glob("*.csv")))
REPORTS = (
    Picture(
        "report-inspect.png",
        "inspect.html",
        ("inspect", "--device", "cpu", "--html", "{folder}/inspect.html"),
        1720,
    ),
    Picture("report-bench.png", "bench/report.html", ("bench", "--report", "{folder}/bench", "--from", *RESULTS), 1660),
)


def take(report: Picture, folder: Path) -> Path:
    """Make a report, open it, and write its picture."""
    code = tamis([part.format(folder=folder) for part in report.command])
    if code:
        raise SystemExit(f"tamis {report.command[0]} ended with {code}")
    shot = folder / report.name
    size = f"--window-size={WIDTH},{report.height}"
    # The page unpacks its data and draws after it has loaded.
    more = ("--hide-scrollbars", "--virtual-time-budget=10000", f"--user-data-dir={folder / 'profile'}")
    page = (folder / report.page).as_uri()
    subprocess.run(["chromium", *FLAGS, *more, size, f"--screenshot={shot}", page], check=True, capture_output=True)
    picture = PICTURES / report.name
    with Image.open(shot) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(picture, optimize=True)
    if picture.stat().st_size > LARGEST:
        raise SystemExit(f"{picture} has {picture.stat().st_size} bytes, more than {LARGEST}: show less of the report")
    return picture


def main() -> None:
    """Take all pictures."""
    if shutil.which("chromium") is None:
        raise SystemExit("chromium not found: run `make browser`")
    with tempfile.TemporaryDirectory() as folder:
        for report in REPORTS:
            print(take(report, Path(folder)))


if __name__ == "__main__":
    main()
