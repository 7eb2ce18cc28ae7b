"""What counts as an operation, a view and an allocation where the benchmark counts what a call costs the host."""

from collections.abc import Callable

import pytest
import torch

from benchmarks.host_profile import Launches, functions_of, profile

GIVEN = torch.arange(6, dtype=torch.int32)


def inner() -> int:
    return GIVEN.dim()


def nested() -> int:
    return inner() + inner()


@pytest.mark.parametrize(
    ("run", "counts"),
    [
        (lambda: GIVEN + 1, (1, 0, 0)),
        (lambda: GIVEN.clone().mul_(2), (2, 0, 0)),
        (lambda: GIVEN[1:].view(5, 1), (0, 0, 2)),
        (lambda: torch.empty(3, dtype=torch.int32).copy_(GIVEN[:3]), (1, 1, 1)),
        (lambda: GIVEN.int(), (0, 0, 0)),
        (lambda: (GIVEN > 2).int(), (2, 0, 0)),
        (nested, (0, 0, 0)),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_operations_are_counted_by_kind(
    run: Callable[[], object], counts: tuple[int, int, int], inference: bool
) -> None:
    with torch.inference_mode(inference):
        found = profile(run, Launches(), lambda calls: None)
    assert (found.operations, found.allocations, found.views) == counts
    assert found.launches == 0
    assert found.us > 0


def test_functions_are_those_of_the_call() -> None:
    assert functions_of(nested) == ["test_host_profile.py:inner"] * 2
