"""The command line: `tamis <command>`. One module per command, each with a `register` function.

Nothing here imports torch before a command runs, so that `--help` and `--version` answer at once.
"""

import os
import sys
from collections.abc import Sequence

from tamis._version import __version__
from tamis.cli import backends, bench, demo, doctor, generate, inspect, verify
from tamis.cli.parser import EXIT_CODES, INTERRUPTED, OK, USAGE, Parser, example_text

COMMANDS = (demo, generate, inspect, doctor, backends, verify, bench)
"""In the order in which the help lists them."""

EXAMPLES = """\
tamis demo
tamis doctor
tamis verify --quick
tamis bench --help"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; see `tamis.cli.parser.MEANINGS`."""
    try:
        options = make_parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help, the version or the error already
        return stop.code if isinstance(stop.code, int) else 0
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough; what is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (ValueError, TypeError, OSError) as error:
        return _refuse(str(error))
    except ImportError as error:
        return _refuse(f"{error}; `tamis doctor` says what is missing and how to install it")
    except KeyboardInterrupt:
        print("tamis: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _refuse(message: str) -> int:
    print(f"tamis: error: {' '.join(message.split())}", file=sys.stderr)
    return USAGE


def make_parser() -> Parser:
    """The parser of all commands; it imports nothing heavy."""
    parser = Parser(
        prog="tamis",
        description="Sparse latent attention for DeepSeek-V3.2, GLM-5 and DeepSeek-V4 style models.",
        epilog=f"{example_text(EXAMPLES)}\n\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"tamis {__version__}")
    subcommands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in COMMANDS:
        command.register(subcommands)
    return parser
