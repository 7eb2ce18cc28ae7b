"""Limits of a planner."""

from typing import Any

import pytest

from tamis import Limits


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be >= 1"),
        ({"page_size": 0}, "page_size must be >= 1"),
        ({"workspace_rows": 0}, "workspace_rows must be >= 1"),
        ({"other_page_sizes": {"window": 0}}, "other_page_sizes"),
    ],
)
def test_bad_limits_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Limits(**({"max_tokens": 64, "max_requests": 8, "max_length": 200} | fields))
