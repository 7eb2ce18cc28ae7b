"""The command line: `tamis <command>`. One module per command, each with a `register` function.

Nothing here imports torch before a command runs, so that `--help` and `--version` answer at once.
"""

import sys
from collections.abc import Sequence

from tamis._version import __version__
from tamis.cli import backends, bench, demo, generate, inspect, verify
from tamis.cli.parser import EXIT_CODES, USAGE, Parser

COMMANDS = (demo, generate, inspect, backends, verify, bench)
"""In the order in which the help lists them."""

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0 all is well, 1 a check failed, 2 wrong usage or input."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit as stop:  # argparse has printed the help, the version or the error already
        return stop.code if isinstance(stop.code, int) else 0
    try:
        code: int = options.run(options)
    except (ValueError, TypeError) as error:
        print(f"tamis: error: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("tamis: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="tamis",
        description="Sparse latent attention for DeepSeek-V3.2, GLM-5 and DeepSeek-V4 style models.",
        epilog=f"example:\n  tamis demo\n\n{EXIT_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"tamis {__version__}")
    subcommands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for command in COMMANDS:
        command.register(subcommands)
    return parser
