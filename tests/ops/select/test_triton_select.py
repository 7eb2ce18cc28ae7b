"""The Triton kernels of stage `select` against the reference, entry by entry."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from select_rules import RandomStep, int32, random_step
from torch import Tensor

from tamis.lab.testing.cases import to_device
from tamis.lab.testing.select_cases import SelectCase, expected_rows, select_cases
from tamis.ops.rows.triton_rows import interpreted
from tamis.ops.select import reference, triton_kernels
from tamis.ops.select.operations import SelectChosen, SelectEntries, SelectGathered, SelectGroups, SelectWindow
from tamis.ops.select.triton_device import window_rows

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
CALLS: dict[str, Any] = {
    "select_window": SelectWindow,
    "select_entries": SelectEntries,
    "select_chosen": SelectChosen,
    "select_gathered": SelectGathered,
    "select_groups": SelectGroups,
}


def check(name: str, device: torch.device, inputs: tuple[Any, ...], outputs: tuple[Tensor | None, ...]) -> None:
    """Run reference and kernel into buffers that hold the same garbage; everything must be equal afterwards."""
    expected = [None if o is None else torch.randint(5, 99, o.shape, dtype=o.dtype) for o in outputs]
    found = [None if e is None else e.to(device, copy=True) for e in expected]
    moved = [_to(device, i) for i in inputs]
    call = CALLS[name]
    getattr(reference, name)(call(*inputs, *expected, "reference"))
    getattr(triton_kernels, name)(call(*moved, *found, "triton"))
    for at, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is not None and other is not None:
            assert torch.equal(one.cpu(), other), (name, at, one, other)


def _to(device: torch.device, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


@given(random_step(), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_windows(device: torch.device, step: RandomStep, owned: bool, blocks: bool) -> None:
    tokens = (step.positions, step.ids, step.table, step.own if owned else None)
    spans = (int32([n - q for n, q in zip(step.lengths, step.queries, strict=True)]), int32(step.lengths))
    inputs = (*tokens, *(spans if blocks else (None, None)), step.page_size, step.window)
    check("select_window", device, inputs, (empty(step.tokens, step.width), empty(step.tokens)))


@given(random_step(), st.sampled_from([1, 3, 4, 16]), st.booleans(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_entries(device: torch.device, step: RandomStep, ratio: int, owned: bool, table: bool) -> None:
    tokens = (step.positions, step.ids, step.table, step.own if owned else None)
    vectors = (empty(step.tokens, dtype=torch.int64), empty(step.tokens), empty(step.tokens))
    every = empty(step.tokens, step.width) if table else None
    inputs = (*tokens, ratio, step.page_size, 7, step.decodes)
    check("select_entries", device, inputs, (*vectors, every))
    check("select_entries", device, inputs, (None, None, None, empty(step.tokens, step.width)))


@pytest.mark.parametrize("width", [1, 128, 1024, 1025, 2500])
def test_rows_of_any_width(width: int, device: torch.device) -> None:
    positions, ids = int32([-1, 0, 5, width, 4 * width + 3]), int32([0, 1, 0, 1, 1])
    table = torch.randperm(2 * 2560).int().view(2, 2560)
    tokens = (positions, ids, table, None)
    vectors = (empty(5, dtype=torch.int64), empty(5), empty(5))
    check("select_entries", device, (*tokens, 4, 2, width, 3), (*vectors, empty(5, width)))
    check("select_window", device, (*tokens, None, None, 2, width), (empty(5, width + 3), empty(5)))
    chosen = torch.randint(-1, 5000, (5, width), dtype=torch.int32)
    check("select_groups", device, (chosen, positions + 1, 4), (empty(5, 4 * width + 3),))
    check("select_chosen", device, (chosen, ids, table, None, 2), (empty(5, width), empty(5)))
    check("select_chosen", device, (chosen.T.contiguous().T, ids, table, None, 2), (empty(5, width), empty(5)))


def test_a_narrower_rebuild_leaves_the_columns_beyond_alone(device: torch.device) -> None:
    buffer = torch.full((2, 256), 77, dtype=torch.int32, device=device)
    tokens = (int32([20000, 255]).to(device), int32([0, 0]).to(device), int32([[4]]).to(device), None)
    call = SelectEntries(*tokens, 128, 512, 128, 2, None, None, None, buffer[:, :128], "triton")
    triton_kernels.select_entries(call)
    assert buffer[0, :128].tolist() == list(range(2048, 2048 + 128))
    assert buffer[1, :128].tolist() == [2048, 2049] + [-1] * 126
    assert buffer[:, 128:].eq(77).all()


@given(random_step(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_chosen_entries(device: torch.device, step: RandomStep, owned: bool) -> None:
    inputs = (step.chosen, step.ids, step.table, step.own if owned else None, step.page_size)
    check("select_chosen", device, inputs, (empty(*step.chosen.shape), empty(step.tokens)))


@given(random_step(prefill=True), st.integers(1, 5), st.booleans(), st.integers(0, 1))
@settings(max_examples=40, deadline=None)
def test_gathered_rows(device: torch.device, step: RandomStep, ratio: int, indexed: bool, skipped: int) -> None:
    """With `skipped`, the call includes tokens of a request before the group, which select nothing."""
    columns = step.chosen.shape[1]
    first = int32([max(0, n - q - 3) for n, q in zip(step.lengths, step.queries, strict=True)])
    sizes = (skipped, ratio, step.window, 4, 4 + max(step.lengths), columns)
    inputs = (step.positions, step.ids, first, step.chosen if indexed else None, *sizes)
    check("select_gathered", device, inputs, (empty(step.tokens, columns + step.window + 3), empty(step.tokens)))


@given(random_step(), st.sampled_from([1, 3, 4, 16]), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_groups(device: torch.device, step: RandomStep, size: int, more: int) -> None:
    width = step.chosen.shape[1] * size + size - 1 + more
    check("select_groups", device, (step.chosen, step.positions + 1, size), (empty(step.tokens, width),))
    turned = step.chosen.T.contiguous().T
    check("select_groups", device, (turned, step.positions + 1, size), (empty(step.tokens, width),))


def test_hostile_groups(device: torch.device) -> None:
    chosen = int32([[INT_MAX, 0, INT_MIN, 3, INT_MAX // 4, 1]] * 5)
    check("select_groups", device, (chosen, int32([INT_MAX, INT_MIN, 0, 13, 16]), 4), (empty(5, 27),))


def test_hostile_tables_and_requests(device: torch.device) -> None:
    table = int32([[2**29, 3, INT_MAX, INT_MIN], [2**25, 2**25 - 1, -1, 0]])
    positions, ids = int32([255, 200, 255, 130, 7, 7]), int32([0, 1, INT_MAX, INT_MIN, -1, 2])
    tokens = (positions, ids, table, None)
    check("select_window", device, (*tokens, None, None, 64, 256), (empty(6, 256), empty(6)))
    vectors = (empty(6, dtype=torch.int64), empty(6), empty(6))
    check("select_entries", device, (*tokens, 1, 64, 256, 6), (*vectors, empty(6, 256)))
    chosen = int32([[INT_MAX, 0, INT_MIN, 64, 128, 255]] * 6)
    check("select_chosen", device, (chosen, ids, table, None, 64), (empty(6, 6), empty(6)))
    sizes = (0, 4, 4, 2, 6, 6)
    check("select_gathered", device, (positions, ids, int32([250, 0]), chosen, *sizes), (empty(6, 10), empty(6)))


@pytest.mark.parametrize("case", list(select_cases()), ids=lambda case: case.name)
def test_the_cases_of_the_installed_checks(device: torch.device, case: SelectCase) -> None:
    """This compares with plain Python; the other tests compare with the reference."""
    here = to_device(case, device)
    tokens = (here.positions, here.request_ids, here.block_table, here.own)
    expected = expected_rows(case)
    outputs = [torch.full_like(e, 77, dtype=torch.int32, device=device) for e in expected]
    window, lengths, _, visible, shown, every, slots, counts, rows, row_lengths, of_groups = outputs
    completed = outputs[2] = outputs[2].long()
    spans = (None, None, case.page_size, case.window)
    triton_kernels.select_window(SelectWindow(*tokens, *spans, window, lengths, "triton"))
    numbers = (case.ratio, case.page_size, case.columns, len(case.positions))
    written = (completed, visible, shown, every)
    triton_kernels.select_entries(SelectEntries(*tokens, *numbers, *written, "triton"))
    triton_kernels.select_chosen(SelectChosen(here.chosen, *tokens[1:], case.page_size, slots, counts, "triton"))
    first = torch.full((case.requests,), 3, dtype=torch.int32, device=device)
    sizes = (0, case.ratio, case.window, 20, 50, case.columns)
    gathered = SelectGathered(*tokens[:2], first, here.chosen, *sizes, rows, row_lengths, "triton")
    triton_kernels.select_gathered(gathered)
    seen = here.positions + 1
    triton_kernels.select_groups(SelectGroups(here.groups, seen, case.group_size, of_groups, "triton"))
    for number, (found, wanted) in enumerate(zip(outputs, expected, strict=True)):
        assert torch.equal(found.cpu().long(), wanted), number


def test_no_tokens(device: torch.device) -> None:
    none, table = int32([]), int32([[1]])
    check("select_window", device, (none, none, table, None, None, None, 64, 4), (empty(0, 4), empty(0)))


def test_the_kernels_run_as_meant(device: torch.device) -> None:
    assert interpreted(window_rows) == (device.type == "cpu")
