"""Options of the long forms, which `make soak` uses."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tokens", type=int, default=None, help="tokens through all isolation storms together")
    parser.addoption("--steps", type=int, default=None, help="over how many steps memory must stay flat")
