"""Tests of training under settings (`pytest --under`): inference mode records nothing, so it has no gradients."""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave inference mode out of every test of this folder; pytest calls this with the items of all folders."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(
                pytest.mark.own_settings("there are no gradients in inference mode", without=("inference",))
            )
