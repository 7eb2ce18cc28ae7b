"""Rewrites the library's error messages so that they name the option that the user typed."""

import argparse
import re

_PARAMETERS = {"prefer": "backend", "tensor_parallel": "tp", "topks": "topk"}
"""Parameters of the library whose option has another name."""
_REPEATED = re.compile(r"; choose (a value .*|one of these)$")
"""Remedies that only repeat the message."""


def name_option(message: str, options: argparse.Namespace) -> str:
    """The message with an argument's name at its start replaced by the option that gave it.

    `heads must be between 1 and 128, got 200; choose a value between 1 and 128` becomes
    `--heads must be between 1 and 128, got 200`.
    """
    word, space, rest = message.partition(" ")
    name = _PARAMETERS.get(word, word)
    if rest.startswith("must be ") and name != "suite" and hasattr(options, name):
        word = f"--{name.replace('_', '-')}"
    return _REPEATED.sub("", word + space + rest) if word.startswith("--") else message
