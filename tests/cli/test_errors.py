"""The library's messages on the command line name the option that the user typed."""

from argparse import Namespace

import pytest

from tamis.cli.errors import name_option

OPTIONS = Namespace(heads=200, page_size=0, backend="foo", suite="smoke")


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        (
            "heads must be between 1 and 128, got 200; choose a value between 1 and 128",
            "--heads must be between 1 and 128, got 200",
        ),
        ("page_size must be >= 1, got 0; choose a value >= 1", "--page-size must be >= 1, got 0"),
        ("prefer must be one of 'auto', got 'foo'; choose one of these", "--backend must be one of 'auto', got 'foo'"),
        ("page_size must be even, got 3; use 4", "--page-size must be even, got 3; use 4"),
        ("--from must be given with --report, got alone; name a folder", None),
        ("suite must be one of 'smoke', got 'x'; choose one of these", None),
        ("positions must be int32, got int64; call .int()", None),
        ("heads of the model are odd", None),
        ("", None),
    ],
)
def test_the_option_is_named(message: str, shown: str | None) -> None:
    assert name_option(message, OPTIONS) == (message if shown is None else shown)
