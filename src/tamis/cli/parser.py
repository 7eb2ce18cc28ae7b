"""The argument parser that all commands share: its help wraps at any width, its errors are one line."""

import argparse
import re
import sys
from collections.abc import Callable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from tamis.cli import INTERRUPTED
from tamis.cli.help import HelpFormatter
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
    """A parser that reports wrong usage in one line, in the words of the options."""

    def __init__(self, **settings: Any) -> None:
        """Take the arguments of argparse. Abbreviated options are off: a new option could make one ambiguous."""
        standard = {"formatter_class": HelpFormatter, "allow_abbrev": False}
        super().__init__(**{**standard, **settings})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse what the command does not know with a hint at its own help.

        argparse would leave that to the parser of all commands, whose help has none of this command's options.
        """
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            typed = unknown[0].partition("=")[0]
            near = get_close_matches(typed, self._option_string_actions, n=1, cutoff=0.75)
            hint = f"; did you mean {near[0]}?" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Exit with code 2. `argument --heads: must be ...` becomes `--heads must be ...`."""
        message = re.sub(r"^argument (?:\S+/)?(\S+): (?=must |needs |\S+: )", r"\1 ", message).removeprefix("argument ")
        message = re.sub(r"^the following arguments are required: ([^,]+).*", self._missing, message)
        self.exit(USAGE, f"tamis: error: {one_line(message)} (see '{self.prog} --help')\n")

    def _missing(self, found: "re.Match[str]") -> str:
        """What to say of an argument that was left out: what it may be, if that is a short list."""
        action = next(one for one in self._actions if found[1] in (*one.option_strings, one.metavar, one.dest))
        known = f"; one of {', '.join(map(str, action.choices))}" if action.choices is not None else ""
        return f"{found[1]} must be given{known}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not among the choices, in the wording that all errors share."""
        if action.choices is not None and value not in action.choices:
            known = ", ".join(str(choice) for choice in action.choices)
            raise argparse.ArgumentError(action, f"must be one of {known}; got {value!r}.")

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Write a message. Unlike argparse, this raises the error of a full disk or a closed pipe."""
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
    usage: str = "[options]",
    has_json: bool = True,
) -> Parser:
    """Add a command with the option `--json`, and return its parser.

    `run` gets the parsed options and returns the exit code. `example` has one command per line. `usage` is what follows
    the command's name in the first line of the help.
    """
    parser = subcommands.add_parser(
        name,
        help=summary,
        usage=f"tamis {name} {usage}",
        description=f"{summary}.\n\n{details}",
        epilog=f"{example_text(example)}\n\n{EXIT_CODES}",
    )
    if has_json:
        parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)
    return parser


def example_text(example: str) -> str:
    """The examples as a help text shows them."""
    lines = [line.strip() for line in example.splitlines()]
    return "\n  ".join(["example:" if len(lines) == 1 else "examples:", *lines])
