"""Types of option values. They are checked while the command line is parsed, so that an error comes before torch loads.

Each is a function from the typed text to the value. Its errors begin with "must be" or "needs": `Parser.error` puts the
option's name before them.
"""

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from math import isfinite

LARGEST = 2**63 - 1
MOST_REQUESTS, LONGEST = 2**16, 2**31 - 1
"""Limits of a shape: requests in a group, and tokens of a request, whose positions are int32."""
_SHAPE = re.compile(r"(?P<count>\d+)?q(\d+)(k?)(?:s(\d+)(k?))?")
_UNITS = {"": 10**9, "GB": 10**9, "GIB": 2**30}


def whole(low: int, high: int = LARGEST) -> Callable[[str], int]:
    """An integer between two bounds, both allowed."""

    def value(text: str) -> int:
        expected = f"between {low} and {high}" if high < LARGEST else f">= {low}"
        try:
            number = int(text)
        except ValueError:
            raise ArgumentTypeError(f"must be a whole number {expected}, got {text!r}") from None
        if not low <= number <= high:
            # Far beyond the largest number, the digits would fill the screen.
            shown = str(number) if abs(number) <= 10**30 else f"{text[:20]}..."
            bounds = expected if number < low or high < LARGEST else f"<= {high}"
            raise ArgumentTypeError(f"must be {bounds}, got {shown}")
        return number

    return value


def tokens(text: str) -> int:
    """A number of tokens of at least 1: 131072, or 128k for 128 * 1024, as in shapes."""
    found = re.fullmatch(r"(\d{1,15})[kK]", text)
    try:
        return whole(1)(text if found is None else str(int(found[1]) * 1024))
    except ArgumentTypeError as error:
        told = str(error).replace("a whole number >= 1", "a whole number >= 1, or one such as 128k")
        raise ArgumentTypeError(told) from None


def wholes(low: int, high: int = LARGEST) -> Callable[[str], list[int]]:
    """Integers joined by commas."""
    one = whole(low, high)

    def value(text: str) -> list[int]:
        words = text.split(",")
        if not all(re.fullmatch(r"\s*[+-]?\d+\s*", word) for word in words):
            raise ArgumentTypeError(f"must be numbers joined by commas, got {text!r}; such as 1,2,3")
        return [one(word) for word in words]

    return value


def queries(text: str) -> list[int] | None:
    """Numbers of queries joined by commas; None for `all`."""
    return None if text == "all" else wholes(-LARGEST)(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (isfinite(number) and number > 0):
        raise ArgumentTypeError(f"must be a number above 0, got {text!r}")
    return number


def memory(text: str) -> int:
    """Bytes from a number of GB (10**9 bytes), or with its unit: 80, 80GB, 74.5GiB."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+) ?([A-Za-z]*)", text)
    size = float(found[1]) * _UNITS.get(found[2].upper(), 0) if found else 0.0
    if not 1 <= size <= LARGEST:
        raise ArgumentTypeError(f"must be a size above 0 such as 80, 80GB or 74.5GiB, got {text!r}")
    return int(size)


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Some of the known names, joined by commas."""

    def value(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise ArgumentTypeError(f"must be one of {', '.join(known)}; got {name!r}.")
        return found

    return value


def shapes(text: str) -> list[str]:
    """Shapes of batches such as 128q1s16k, joined by commas; the grammar is that of `tamis.step.batch.parse_shape`."""
    found = text.split(",")
    for shape in found:
        for group in shape.split("_"):
            parts = _SHAPE.fullmatch(group)
            if parts is None:
                remedy = "write [count]q<new tokens>[s<all tokens>]"
                raise ArgumentTypeError(f"must be groups like 32q1s1k joined by _, got {group!r}; {remedy}")
            if max(map(len, re.findall(r"\d+", group))) > 18:  # Python refuses to read thousands of digits
                raise ArgumentTypeError(f"must be of numbers below 10**18, got {group[:20]}...")
            count = int(parts["count"] or 1)
            new = int(parts[2]) * (1024 if parts[3] else 1)
            total = int(parts[4]) * (1024 if parts[5] else 1) if parts[4] else new
            if not 1 <= count <= MOST_REQUESTS:
                raise ArgumentTypeError(f"must be of 1 to {MOST_REQUESTS} requests, got {count} in {group!r}")
            if max(new, total) > LONGEST:
                raise ArgumentTypeError(f"must be of requests of up to {LONGEST} tokens, got {max(new, total)}")
            if new == 0:
                raise ArgumentTypeError(f"must be requests with new tokens, got {shape!r}; write q1 for a decode")
            if total < new:
                raise ArgumentTypeError(f"{shape}: total length (s={total}) must be >= new tokens (q={new}).")
    return found
