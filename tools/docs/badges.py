"""The badges of README, from what they claim: pyproject.toml, the Makefile and the measured rows."""

import re
import tomllib
from pathlib import Path

from tools.docs.hardware import measured
from tools.docs.svg import Picture

ROOT = Path(__file__).parents[2]
LETTER, PAD, HEIGHT, GAP = 6.4, 9, 22, 8
"""Pixels: a letter's width, the room at either side of a text, a badge's height, and the room between two."""


def claims() -> list[tuple[str, str]]:
    """What each badge says: its subject and its value."""
    file = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project = file["project"]
    torch = next(need for need in project["dependencies"] if need.startswith("torch"))
    found = [
        ("license", project["license"]),
        ("python", project["requires-python"].replace(">=", "") + "+"),
        ("torch", torch.removeprefix("torch>=") + "+"),
    ]
    if file["tool"]["mypy"]["strict"] and re.search(r"^types:", (ROOT / "Makefile").read_text(), re.M):
        found.append(("types", "mypy --strict"))
    return [*found, ("measured on", ", ".join(sorted(gpu.removeprefix("NVIDIA ") for gpu in measured())))]


def draw() -> str:
    """The badges side by side."""
    widths = [[2 * PAD + LETTER * len(words) for words in claim] for claim in claims()]
    picture = Picture(
        sum(map(sum, widths)) + GAP * (len(widths) + 1), HEIGHT + 8, "; ".join(": ".join(c) for c in claims())
    )
    x = float(GAP)
    for (subject, value), (left, right) in zip(claims(), widths, strict=True):
        picture.labelled(x, 4, left, HEIGHT, subject, "grey", "small")
        picture.labelled(x + left, 4, right, HEIGHT, value, "blue", "small")
        x += left + right + GAP
    return picture.render()
