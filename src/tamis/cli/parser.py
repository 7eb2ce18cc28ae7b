"""The argument parser that all commands share."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from tamis.cli import INTERRUPTED
from tamis.cli.text import one_line

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

OK, FAILED, USAGE = 0, 1, 2
"""Exit codes of all commands, beside `INTERRUPTED`; see `MEANINGS`."""

MEANINGS = {
    OK: "success",
    FAILED: "a check failed",
    USAGE: "wrong usage or input, or not enough memory or disk space",
    INTERRUPTED: "interrupted",
}
EXIT_CODES = "exit codes: " + ", ".join(f"{code} {meaning}" for code, meaning in MEANINGS.items())


class Parser(argparse.ArgumentParser):
    """Keeps the layout of descriptions and reports wrong usage in one line, like every other error."""

    def __init__(self, **settings: Any) -> None:
        """As argparse's own; abbreviated options are off, so that adding an option never changes what others mean."""
        standard = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**standard, **settings})

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(USAGE, f"tamis: error: {one_line(message)} (see '{self.prog} --help')\n")

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """As argparse's own, which hides that a disk is full or that nobody reads."""
        if message:
            (sys.stderr if file is None else file).write(message)


Subcommands: TypeAlias = "argparse._SubParsersAction[Parser]"


def add_command(
    subcommands: Subcommands,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    details: str,
    example: str,
) -> Parser:
    """Add a command and return its parser for the options; `run` gets them parsed and returns the exit code.

    `--json` is there for every command. `example` may be several, one to a line.
    """
    parser = subcommands.add_parser(
        name,
        help=summary,
        description=f"{summary}.\n\n{details}",
        epilog=f"{example_text(example)}\n\n{EXIT_CODES}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)
    return parser


def example_text(example: str) -> str:
    """One or more command lines, as a help text shows them."""
    lines = [line.strip() for line in example.splitlines()]
    return "\n  ".join(["example:" if len(lines) == 1 else "examples:", *lines])
