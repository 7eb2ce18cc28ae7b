"""The Triton translation kernel against the reference, entry by entry."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeds import seeded
from torch import Tensor

from tamis.ops.rows.triton_rows import interpreted
from tamis.ops.translate import reference
from tamis.ops.translate.operations import TranslatePositions
from tamis.ops.translate.triton_kernels import translate_positions, translate_rows

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
PLAIN: dict[str, Any] = {"shard": (1, 0, 1), "compact": False, "backend": "auto"}


def int32(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check(positions: Tensor, request_ids: Tensor, table: Tensor, device: torch.device, **options: Any) -> None:
    """Translate with kernel and reference, in order and compacted."""
    page_size = options.get("page_size", 64)
    ids, starts = options.pop("workspace", None) or (None, None)
    options = PLAIN | {"page_size": page_size, "rows_per_page": page_size} | options
    workspace = {"workspace_ids": ids, "workspace_starts": starts}
    moved = {name: None if t is None else t.to(device) for name, t in workspace.items()}
    given = [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t) for t in (positions, table)
    ]
    for compact in (False, True):
        options["compact"] = compact
        expected = reference.translate_positions(
            TranslatePositions(positions, request_ids, table, **options, **workspace)
        )
        found = translate_positions(TranslatePositions(given[0], request_ids.to(device), given[1], **options, **moved))
        for name, one, other in zip(("slots", "counts"), found, expected, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape), name
            assert torch.equal(one.cpu(), other), (name, compact)
    assert torch.equal(given[0].cpu(), positions)


@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_translation_agrees_with_the_reference(data: st.DataObject, device: torch.device) -> None:
    draw = data.draw
    page_size = draw(st.sampled_from([1, 2, 16, 61, 64, 128]))
    width, requests = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    tokens, k = draw(st.integers(0, 6)), draw(st.integers(0, 40))
    generator = seeded(draw(st.integers(0, 2**31)))

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    table = ints(-1, 50, requests, width)
    positions = ints(-3, width * page_size + 20, tokens, k)
    if positions.numel():
        positions.view(-1)[0] = draw(st.sampled_from([INT_MIN, INT_MAX, -1, 0]))
    ranks = draw(st.sampled_from([1, 2, 3]))
    check(
        positions,
        ints(-1, requests + 1, tokens),
        table,
        device,
        page_size=page_size,
        rows_per_page=page_size + draw(st.sampled_from([0, 3])),
        workspace=(ints(-2, 3, tokens), int32([0, 100])) if draw(st.booleans()) else None,
        shard=(ranks, draw(st.integers(0, ranks - 1)), draw(st.sampled_from([1, 4]))),
    )


@pytest.mark.parametrize("k", [0, 1, 15, 17, 127, 2047, 2048, 2049, 5000])
def test_any_number_of_columns(k: int, device: torch.device) -> None:
    table = torch.randperm(40).int().view(4, 10)
    positions = torch.randint(-1, 64 * 12, (5, k), dtype=torch.int32)
    positions[3] = -1
    check(positions, torch.randint(0, 4, (5,), dtype=torch.int32), table, device)


def test_strided_positions_and_tables(device: torch.device) -> None:
    table = torch.randperm(40).int().view(10, 4).T
    positions = torch.randint(-1, 700, (33, 5), dtype=torch.int32).T
    ids = torch.randint(0, 4, (10,), dtype=torch.int32)[::2]
    check(positions, ids, table, device)
    wide = torch.randint(-1, 700, (5, 50), dtype=torch.int32)
    starts = torch.arange(12, dtype=torch.int32)[::3] * 50
    workspace = (torch.tensor([0, 9, -1, 9, 3, 9, 2, 9, -1, 9], dtype=torch.int32)[::2], starts)
    check(wide[:, 7:40], ids, table, device, workspace=workspace)


def test_page_ids_that_nobody_looked_at_never_become_valid_slots(device: torch.device) -> None:
    table = int32([[2**29, 3, INT_MAX, INT_MIN, 2**25, 2**25 - 1]])
    positions = int32([[5, 64 + 5, 128, 192, 256, 383]])
    check(positions, int32([0]), table, device)
    check(positions, int32([0]), table, device, rows_per_page=2**33)
    check(positions, int32([0]), table, device, workspace=(int32([0]), int32([INT_MAX - 100])))


def test_unknown_requests_and_workspaces(device: torch.device) -> None:
    table = torch.arange(6, dtype=torch.int32).view(2, 3)
    positions = torch.arange(0, 192, 24, dtype=torch.int32).repeat(6, 1)
    ids = int32([0, 1, 2, -5, INT_MAX, INT_MIN])
    check(positions, ids, table, device)
    for starts in (int32([]), int32([7]), int32([7, -1000])):
        check(positions, ids, table, device, workspace=(int32([0, 1, 5, -1, 0, 0]), starts))
        check(positions, ids.clamp(0, 1), table, device, workspace=(int32([0, 1, 5, -1, INT_MAX, INT_MIN]), starts))


@pytest.mark.parametrize(("page_size", "shard"), [(2**40, (1, 0, 1)), (64, (2, 1, 2**31)), (2**31, (3, 0, 2**30))])
def test_divisors_that_leave_32_bits(page_size: int, shard: tuple[int, int, int], device: torch.device) -> None:
    positions = int32([[0, 5, 100, 2**30, INT_MAX, -1, INT_MIN, 2**30 - 1]])
    check(positions, int32([0]), int32([[0, 1]]), device, page_size=page_size, shard=shard)


@pytest.mark.parametrize("ranks", [2, 8])
def test_shards_of_all_ranks_cover_every_position_once(ranks: int, device: torch.device) -> None:
    positions, ids = torch.randperm(256).int().view(2, 128), int32([0, 1])
    table = torch.arange(64, dtype=torch.int32).view(2, 32)
    owned = []
    for rank in range(ranks):
        check(positions, ids, table, device, page_size=8, shard=(ranks, rank, 4))
        given = (t.to(device) for t in (positions, ids, table))
        call = TranslatePositions(*given, 8, 8, None, None, (ranks, rank, 4), False, "auto")
        owned.append(translate_positions(call)[0])
    assert (torch.stack(owned) >= 0).sum(0).eq(1).all()


def test_the_kernel_runs_as_meant(device: torch.device) -> None:
    assert interpreted(translate_rows) == (device.type == "cpu")
