"""Shared by all tests: uninitialised memory is NaN, and random numbers repeat."""

from collections.abc import Iterator

import pytest
import torch

pytest_plugins = ("settings",)  # --under


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill `torch.empty` with NaN, so that a value that nobody wrote cannot pass a test by luck."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # tests run in parallel processes already
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes a minute comes first, so that it is not what one process does at the end while others have nothing."""
    items.sort(key=lambda item: item.path.name != "test_offline.py")
