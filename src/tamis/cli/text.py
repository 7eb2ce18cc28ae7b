"""Makes untrusted texts (tokens, file names, model names, errors of other packages) safe to print."""

import re

_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, which could move the cursor, change the title or type for the user; characters that change the
direction of writing; and surrogates, which stand for undecodable bytes of file names."""


def printable(text: object, keep: str = "") -> str:
    """The text with control characters, except those in `keep`, escaped: `\\x1b` for escape."""
    return _UNSAFE.sub(lambda found: found[0] if found[0] in keep else _shown(found[0]), str(text))


def one_line(text: object) -> str:
    """The text as one line, with control characters escaped."""
    return printable(" ".join(str(text).split()))


def _shown(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
