"""Options of the long forms, which `make soak` uses."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    for name, what in (("--tokens", "through all isolation storms together"),):
        parser.addoption(name, type=int, default=None, help=f"how many {what[:7]} go {what}")
