"""Options of the reliability tests. They are known when pytest is given a path under this folder; `make soak` is."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("reliability")
    group.addoption("--calls", type=int, help="how many fuzzed calls to make in all")
    group.addoption("--first", type=int, help="number of the first fuzzed call")
    group.addoption("--fuzz-seed", type=int, help="run this seed alone, instead of the fixed and the rolling one")
    group.addoption("--device", help="where the fuzzed calls run (cpu, cuda); on a device only calls that are right")
    group.addoption("--tokens", type=int, help="tokens through all isolation storms together")
    group.addoption("--steps", type=int, help="over how many steps memory must stay flat")
