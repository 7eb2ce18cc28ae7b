"""The Triton selection kernels against the reference, position by position."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from seeds import seeded
from torch import Tensor

from tamis.ops.index import reference, triton_kernels
from tamis.ops.index.operations import TopkPositions
from tamis.ops.index.triton_topk import choose_topk_launch, select_rows
from tamis.ops.rows.triton_rows import interpreted

INF, NAN = float("inf"), float("nan")
ONE_PROGRAM, SOME, MANY = 1, 16, 1000
"""SMs of pretended devices, from which follows how many programs share a row."""


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(scores: Tensor, lengths: Tensor, k: int, device: torch.device, sms: int = SOME) -> None:
    """Select with kernels and reference: positions, then slots."""
    expected = reference.topk_positions(TopkPositions(scores, lengths, k, None, None, None, "reference"))
    given = torch.empty_strided(scores.shape, scores.stride(), device=device).copy_(scores)
    ids = torch.arange(len(scores), dtype=torch.int32) % 3
    table = torch.randperm(99)[: 3 * (scores.shape[1] // 64 + 1)].int().view(3, -1) if scores.shape[1] < 2000 else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels, "sm_count", lambda _: sms)
        found = triton_kernels.topk_positions(TopkPositions(given, lengths.to(device), k, None, None, None, "triton"))
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found.cpu(), expected), (found.cpu() != expected).nonzero()[:5]
        if table is not None:
            table[1, 0] = -1
            slots = reference.topk_positions(TopkPositions(scores, lengths, k, ids, table, 64, "reference"))
            moved = (t.to(device) for t in (given, lengths, ids, table))
            scores_there, lengths_there, ids_there, table_there = moved
            found = triton_kernels.topk_positions(
                TopkPositions(scores_there, lengths_there, k, ids_there, table_there, 64, "triton")
            )
            assert torch.equal(found.cpu(), slots)


def some(values: list[float], shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.tensor(values)[torch.randint(0, len(values), shape, generator=generator)]


MADE: dict[str, Callable[[tuple[int, int], torch.Generator], Tensor]] = {
    "random": lambda shape, g: torch.randn(shape, generator=g),
    "plateaus": lambda shape, g: (torch.randn(shape, generator=g) * 2).round().clamp_min(0),
    "one value": lambda shape, g: torch.full(shape, -3.5),
    "zeros and neighbours": lambda shape, g: some([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38], shape, g),
    "nothing": lambda shape, g: some([-INF, NAN, -NAN], shape, g),
    "holes": lambda shape, g: torch.randn(shape, generator=g) * some([1.0, 1.0, NAN, INF, -INF], shape, g),
    "ascending": lambda shape, g: torch.arange(shape[0] * shape[1]).view(shape).float(),
    "descending": lambda shape, g: -torch.arange(shape[0] * shape[1]).view(shape).float(),
    "any bits": lambda shape, g: torch.randint(-(2**31), 2**31, shape, generator=g).int().view(torch.float32),
}


@pytest.mark.parametrize("made", MADE)
@settings(
    deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(data=st.data())
def test_selections_agree_with_the_reference(made: str, data: st.DataObject, device: torch.device) -> None:
    draw = data.draw
    generator = seeded(draw(st.integers(0, 2**31)))
    tokens, width = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 17, 130, 1000, 1024, 1500]))
    k = draw(st.sampled_from([1, 2, 7, 64, 129, 1024]))
    scores = MADE[made]((tokens, width), generator)
    edges = [-5, 0, 1, k, k + 1, width // 2, width - 1, width]
    lengths = int32([min(draw(st.sampled_from(edges)), width) for _ in range(tokens)])
    check(scores, lengths, k, device, draw(st.sampled_from([ONE_PROGRAM, SOME, MANY])))


@pytest.mark.parametrize("made", ["random", "plateaus", "one value", "zeros and neighbours", "ascending", "descending"])
@pytest.mark.parametrize("sms", [ONE_PROGRAM, MANY])
def test_long_rows_whole_and_in_splits(made: str, sms: int, device: torch.device) -> None:
    scores = MADE[made]((4, 16000), seeded(7))
    assert choose_topk_launch(4, 16000, 300, sms).splits == {ONE_PROGRAM: 1, MANY: 4}[sms]
    assert choose_topk_launch(4, 16000, 300, SOME) == choose_topk_launch(4, 16000, 300, MANY)
    check(scores, int32([16000, 9001, 0, 3900]), 300, device, sms)


@pytest.mark.parametrize("k", [2048, 4096])
def test_large_selections(k: int, device: torch.device) -> None:
    scores = torch.randn(2, 20000)
    for sms in (ONE_PROGRAM, MANY):
        check(scores, int32([20000, k + 1]), k, device, sms)


@pytest.mark.parametrize("sms", [ONE_PROGRAM, MANY])
def test_scores_in_the_order_that_defeats_the_groups(sms: int, device: torch.device) -> None:
    k, width = 64, 4200
    launch = choose_topk_launch(3, width, k, sms)
    group = torch.arange(width) % (launch.groups // launch.splits)
    high = torch.where(group < (k - 1) // launch.splits, 1.0, 0.0)
    assert high.sum() > launch.block
    scores = high * (1 + torch.rand(3, width))
    scores[1] = high * torch.randint(1, 4, (width,))
    scores[2] = high
    check(scores, int32([width] * 3), k, device, sms)


def test_what_lies_behind_a_length_is_not_looked_at(device: torch.device) -> None:
    scores = torch.randn(4, 9000)
    lengths = int32([0, 100, 4096, 8999])
    for row, length in zip(scores, lengths.tolist(), strict=True):
        row[length:] = INF
    for sms in (ONE_PROGRAM, MANY):
        check(scores, lengths, 128, device, sms)


def test_lengths_past_the_row_end_with_it(device: torch.device) -> None:
    scores = torch.randn(2, 100)
    found = triton_kernels.topk_positions(
        TopkPositions(scores.to(device), int32([1000, 2**31 - 1]).to(device), 200, None, None, None, "triton")
    )
    assert torch.equal(
        found.cpu(),
        reference.topk_positions(TopkPositions(scores, int32([100, 100]), 200, None, None, None, "reference")),
    )


def test_strided_scores(device: torch.device) -> None:
    lengths = int32([50, 7, 33])
    check(torch.randn(80, 3).T[:, :50], lengths, 20, device)
    check(torch.randn(3, 99)[:, 13:63], lengths, 20, device)
    check(torch.randn(6, 50)[::2], lengths, 20, device)


def test_rows_without_scratch_memory_for_all_go_one_after_another(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores, lengths = torch.randn(5, 300), int32([300, 1, 0, 299, 64])
    monkeypatch.setattr(triton_kernels, "SCRATCH_BYTES", 2500)
    check(scores, lengths, 64, device, ONE_PROGRAM)
    monkeypatch.setattr(triton_kernels, "SCRATCH_BYTES", 1)
    check(scores, lengths, 64, device, ONE_PROGRAM)


def test_no_rows_and_no_columns(device: torch.device) -> None:
    check(torch.randn(0, 10), int32([]), 4, device)
    check(torch.randn(3, 0), int32([0, 0, 0]), 4, device)


def test_slots_of_unknown_requests_and_pages(device: torch.device) -> None:
    scores, lengths = torch.randn(4, 300), int32([300] * 4)
    ids, table = int32([-1, 0, 2, 1]), int32([[5, 2**30, -7], [2**25, 2**25 - 1, 0]])
    expected = reference.topk_positions(TopkPositions(scores, lengths, 250, ids, table, 64, "reference"))
    moved = [t.to(device) for t in (scores, lengths, ids, table)]
    found = triton_kernels.topk_positions(TopkPositions(moved[0], moved[1], 250, moved[2], moved[3], 64, "triton"))
    assert torch.equal(found.cpu(), expected)


def test_the_kernel_runs_as_meant(device: torch.device) -> None:
    assert interpreted(select_rows) == (device.type == "cpu")
