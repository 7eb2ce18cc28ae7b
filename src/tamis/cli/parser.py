"""The argument parser that all commands share."""

import argparse
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

OK, FAILED, USAGE = 0, 1, 2
"""Exit codes: everything is as it should be; a check failed; wrong usage or input."""

EXIT_CODES = "exit codes: 0 all is well, 1 a check failed, 2 wrong usage or input, 130 interrupted"


class Parser(argparse.ArgumentParser):
    """Keeps the layout of descriptions and reports wrong usage in one line, like every other error."""

    def __init__(self, **settings: Any) -> None:
        """As argparse's own; abbreviated options are off, so that adding an option never changes what others mean."""
        standard = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
        super().__init__(**{**standard, **settings})

    def error(self, message: str) -> NoReturn:
        """Exit with code 2."""
        self.exit(USAGE, f"tamis: error: {message} (see '{self.prog} --help')\n")


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

    `--json` is there for every command.
    """
    parser = subcommands.add_parser(
        name,
        help=summary,
        description=f"{summary}.\n\n{details}",
        epilog=f"example:\n  {example}\n\n{EXIT_CODES}",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)
    return parser
