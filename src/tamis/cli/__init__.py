"""The command line: `tamis <command>`. One module per command, each with a `register` function.

This module imports almost nothing, so that Ctrl-C is handled from the start, and nothing here imports torch before a
command runs, so that `--help` and `--version` answer at once.
"""

import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tamis.cli.parser import Parser

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; see `tamis.cli.parser.MEANINGS`."""
    try:
        from tamis.cli.commands import run_command

        return run_command(argv)
    except BaseException as error:
        if not was_interrupted(error):
            raise
        with contextlib.suppress(OSError):
            print("tamis: interrupted", file=sys.stderr)
        return INTERRUPTED


def make_parser() -> "Parser":
    """The parser of all commands; it imports nothing heavy."""
    from tamis.cli.commands import make_parser

    return make_parser()


def was_interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error: a package interrupted during its import may raise a different one."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None
