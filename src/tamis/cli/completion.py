"""`tamis completion`: a script that lets a shell complete commands and options."""

import argparse

from tamis.cli.parser import OK, Subcommands, add_command

SHELLS = ("bash", "zsh", "fish")

DETAILS = """\
Writes the script to stdout. Load it once per session, or from the shell's own folder of completions:

- bash: eval "$(tamis completion bash)", in ~/.bashrc
- zsh: tamis completion zsh > "${fpath[1]}/_tamis", then start a new shell
- fish: tamis completion fish > ~/.config/fish/completions/tamis.fish"""

EXAMPLES = """\
tamis completion bash
tamis completion zsh"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "completion",
        run,
        summary="Print a script that completes commands and options in bash, zsh or fish",
        details=DETAILS,
        example=EXAMPLES,
        usage="bash|zsh|fish",
        has_json=False,
    )
    parser.add_argument("shell", choices=SHELLS, metavar="shell", help="bash, zsh or fish")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    import shtab

    from tamis.cli.commands import make_parser

    print(shtab.complete(make_parser(), shell=options.shell))
    return OK
