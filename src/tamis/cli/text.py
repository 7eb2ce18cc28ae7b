"""Texts from outside (tokens, file names, models' names, errors of other packages) as a terminal may show them."""

import re

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, with which a text could move the cursor, change the title or type for the user; characters that
turn the direction of writing; and bytes of file names that are no text."""


def printable(text: object, keep: str = "") -> str:
    """A text whose control characters, but for those to keep, are shown instead of sent, such as `\\x1b` for escape."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _shown(found[0]), str(text))


def one_line(text: object) -> str:
    """The same, without line breaks."""
    return printable(" ".join(str(text).split()))


def _shown(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
