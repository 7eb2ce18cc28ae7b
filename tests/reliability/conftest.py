"""Options of the reliability tests. They are known when pytest is given a path under this folder; `make soak` is."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reliability")
    group.addoption("--tokens", type=int, help="how many tokens each storm sends through")
