"""Help texts that fit the terminal: paragraphs, lists and commands are wrapped at its width."""

import argparse
import re
import shutil
import textwrap
from typing import Any

_UNBROKEN = "\0"
"""Stands for a space where a line must not be broken, since it is inside of quotes."""
WIDEST = 120
"""Longer lines are hard to read, however wide the terminal is."""


class HelpFormatter(argparse.HelpFormatter):
    """Wraps what argparse would print as it is written, and keeps paragraphs, lists and examples apart."""

    def __init__(self, prog: str, **settings: Any) -> None:
        """Take the terminal's width, which the variable COLUMNS overrides."""
        width = min(shutil.get_terminal_size().columns - 2, WIDEST)
        super().__init__(prog, **{"max_help_position": max(width // 3, 8), "width": width} | settings)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(_paragraph(part, width) for part in text.split("\n\n"))

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _wrapped(text, width)


def _paragraph(text: str, width: int) -> str:
    """One paragraph, list or group of examples. Items of a list begin with "- ", and examples are indented commands."""
    lines = text.splitlines()
    if any(line.startswith("  ") for line in lines):
        return "\n".join(_command(line, width) if line.startswith("  ") else line for line in lines)
    items: list[str] = []
    for line in lines:
        if items and not line.startswith("- "):
            items[-1] += f" {line}"
        else:
            items.append(line)
    wrapped = (_wrapped(item, width, "  " if item.startswith("- ") else "") for item in items)
    return "\n".join(line for lines in wrapped for line in lines)


def _command(line: str, width: int) -> str:
    """A command over several lines, joined by backslashes so that it can still be copied."""
    if len(line) <= width:
        return line
    whole = re.sub("'[^']*'", lambda quoted: quoted[0].replace(" ", _UNBROKEN), line.strip())
    lines = _wrapped(whole, width - 2 - 2, " " * 4)
    return " \\\n".join(f"  {one}" for one in lines).replace(_UNBROKEN, " ")


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """The lines of a text; all but the first are indented. Words such as `--token-budget` stay whole."""
    return textwrap.wrap(
        " ".join(text.split()), width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
