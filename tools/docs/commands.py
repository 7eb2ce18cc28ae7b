"""The page of commands, from their argument parsers."""

import argparse
from collections.abc import Iterator

from tamis.cli.commands import make_parser
from tamis.cli.parser import MEANINGS


def commands() -> str:
    """Every command with its description, examples and options."""
    parts = []
    for name, parser in _subparsers().items():
        parts += [f"## tamis {name}", *_command(parser)]
    return "\n\n".join(parts)


def exit_codes() -> str:
    """The table of exit codes."""
    return "\n".join(["| code | meaning |", "|--:|---|", *(f"| {code} | {text} |" for code, text in MEANINGS.items())])


def _subparsers() -> dict[str, argparse.ArgumentParser]:
    (action,) = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(action.choices)


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield parser.description or ""
    examples = (parser.epilog or "").split("\n\n")[0].splitlines()[1:]
    yield "\n".join(['```sh title="examples"', *(line.strip() for line in examples), "```"])
    rows = [f"| {_names(action)} | {_text(action)} |" for action in parser._actions if action.dest != "help"]
    yield "\n".join(["| option | what it does |", "|---|---|", *rows])


def _names(action: argparse.Action) -> str:
    value = action.metavar if isinstance(action.metavar, str) else None
    if value is None and action.choices is not None:
        value = "{" + ",".join(str(choice) for choice in action.choices) + "}"
    if action.nargs == "+" and value:
        value = f"{value} ..."
    shown = [f"{option} {value}" if value else option for option in action.option_strings] or [value or action.dest]
    return ", ".join(f"`{option}`" for option in shown).replace("|", "\\|")


def _text(action: argparse.Action) -> str:
    return (action.help or "").replace("|", "\\|")
