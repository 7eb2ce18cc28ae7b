"""Runs all commands, and turns their errors into one line on stderr and an exit code."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence

from tamis._version import __version__
from tamis.cli import (
    backends,
    bench,
    cache,
    completion,
    demo,
    doctor,
    generate,
    inspect,
    size,
    train_demo,
    verify,
    was_interrupted,
)
from tamis.cli.errors import name_option
from tamis.cli.memory import out_of_memory
from tamis.cli.parser import EXIT_CODES, OK, USAGE, Parser, example_text
from tamis.cli.text import one_line

COMMANDS = (demo, generate, inspect, train_demo, doctor, backends, verify, bench, size, cache, completion)
"""The commands in the order of the help."""

EXAMPLES = """\
tamis demo
tamis doctor
tamis verify --quick
tamis size --model deepseek-v3.2 --memory 40
tamis bench --help"""


def make_parser() -> Parser:
    """The parser of all commands; it imports nothing heavy."""
    parser = Parser(
        prog="tamis",
        usage="tamis command [options]",
        description="Sparse latent attention for DeepSeek-V3.2, GLM-5 and DeepSeek-V4 style models.",
        epilog=f"{example_text(EXAMPLES)}\n\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"tamis {__version__}")
    subcommands = parser.add_subparsers(prog="tamis", dest="command", metavar="command", required=True)
    for command in COMMANDS:
        command.register(subcommands)
    return parser


def run_command(argv: Sequence[str] | None) -> int:
    """Parse, run, and turn expected errors into a line and an exit code. Other errors are bugs and are raised."""
    if sys.stderr is None:  # closed by the parent; file descriptor 2 must not be reused for another file
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        return _refuse("stdout is closed, so there is nowhere to print to; use >/dev/null to see nothing")
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a token may contain letters that the terminal lacks
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, such as `head`, has stopped reading
        return OK
    except Exception as error:
        if was_interrupted(error):
            raise
        if out_of_memory(error):
            return _refuse(f"out of memory: {str(error) or 'no details'}; use a smaller model, prompt or batch")
        if isinstance(error, ImportError):
            return _refuse(f"{error}; `tamis doctor` says what is missing and how to install it")
        if isinstance(error, ValueError | TypeError | OverflowError | OSError):
            return _refuse(str(error))
        raise
    finally:
        _settle_output()


def _run(argv: Sequence[str] | None) -> int:
    try:
        options = make_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help, the version or the error already
        return stop.code if isinstance(stop.code, int) else OK
    try:
        code: int = options.run(options)
    except ValueError as error:
        told = name_option(str(error), options)
        if told == str(error):
            raise
        raise ValueError(told) from error
    return code


def _refuse(message: str) -> int:
    with contextlib.suppress(OSError):
        print(f"tamis: error: {one_line(message)}", file=sys.stderr)
    return USAGE


def _settle_output() -> None:
    """Flush stdout; if that fails, discard the rest, so that Python does not report the failure again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
