"""`Pack`: requests of a flat batch, from boundaries, masks and positions."""

import pytest
import torch

from tamis.train import Entries, Pack


def listed(pack: Pack | Entries) -> list[list[int]]:
    """What each token sees."""
    return [list(range(a, b)) for a, b in zip(pack.starts.tolist(), pack.ends.tolist(), strict=True)]


@pytest.mark.parametrize("bounds", [[0, 3, 3, 5], torch.tensor([0, 3, 3, 5]), torch.tensor([0, 3, 3, 5]).int()])
def test_boundaries(bounds: object) -> None:
    pack = Pack.of(bounds)
    assert (pack.tokens, pack.first_rows, pack.lengths) == (5, (0, 3, 3), (3, 0, 2))
    assert listed(pack) == [[0], [0, 1], [0, 1, 2], [3], [3, 4]]
    assert pack.positions.tolist() == [0, 1, 2, 0, 1]
    assert pack.request_ids.tolist() == [0, 0, 0, 2, 2]
    assert pack.window_slots(2).tolist() == [[0, -1], [0, 1], [1, 2], [3, -1], [3, 4]]
    assert pack.visible_slots().tolist() == [[0, -1, -1], [0, 1, -1], [0, 1, 2], [3, -1, -1], [3, 4, -1]]
    positions = torch.tensor([[0, -1], [1, 0], [2, 0], [0, -1], [1, 0]]).int()
    assert pack.slots_of(positions).tolist() == [[0, -1], [1, 0], [2, 0], [3, -1], [4, 3]]
    # Positions after a token's own are none that it sees; those past its request's end would be rows of the next one.
    later = torch.tensor([[1, 3], [2, -7], [2, 2**31 - 1], [1, 0], [2, 1]]).int()
    assert pack.slots_of(later).tolist() == [[-1, -1], [-1, -1], [2, -1], [-1, 3], [-1, 4]]


def test_masks_padded_left_and_right() -> None:
    pack = Pack.of_mask(torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]))
    assert (pack.tokens, pack.first_rows, pack.lengths) == (16, (2, 4, 12), (2, 3, 4))
    assert listed(pack)[:8] == [[], [], [2], [2, 3], [4], [4, 5], [4, 5, 6], []]
    assert pack.positions.tolist()[:8] == [-1, -1, 0, 1, 0, 1, 2, -1]
    assert pack.window_slots(1)[:, 0].tolist() == [-1, -1, 2, 3, 4, 5, 6, -1, -1, -1, -1, -1, 12, 13, 14, 15]
    assert pack.slots_of(torch.zeros(16, 1).int())[:, 0].tolist()[:4] == [-1, -1, 2, 2]
    with pytest.raises(ValueError, match="mask must be one run of real tokens per row, got a gap in row 1"):
        Pack.of_mask(torch.tensor([[1, 1, 1], [1, 0, 1]]))


def test_positions_that_start_again() -> None:
    ids = torch.tensor([[0, 1, 2, 0, 1, 0], [5, 6, 7, 8, 0, 1]])
    pack = Pack.of_positions(ids)
    assert (pack.first_rows, pack.lengths) == ((0, 3, 5, 6, 10), (3, 2, 1, 4, 2))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1]])
    pack = Pack.of_positions(ids, mask)
    assert (pack.first_rows, pack.lengths) == ((0, 3, 7, 10), (3, 1, 3, 2))
    assert pack.request_ids.tolist() == [0, 0, 0, 1, -1, -1, -1, 2, 2, 2, 3, 3]
    with pytest.raises(ValueError, match=r"mask must be of shape \[2, 6\]"):
        Pack.of_positions(ids, mask[:1])


def test_padding_with_positions_that_go_on() -> None:
    """Right padding often counts on; left padding has positions of 0 or 1. Only the mask tells."""
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]])
    for ids in ([[0, 1, 2, 3], [0, 0, 0, 1]], [[0, 1, 1, 1], [1, 1, 0, 1]]):
        pack = Pack.of_positions(torch.tensor(ids), mask)
        assert (pack.first_rows, pack.lengths) == ((0, 6), (2, 2))


def test_entries_restart_with_each_request() -> None:
    pack = Pack.of([0, 5, 6, 10])
    entries = pack.entries(2)
    assert entries.count == 4
    assert listed(entries) == [[], [0], [0], [0, 1], [0, 1], [], [], [2], [2], [2, 3]]
    assert entries.positions.tolist() == [0, 2, 0, 2]
    assert (entries.spans.tolist(), entries.before.tolist()) == ([0, 2, 6, 8], [-1, 0, -1, 6])
    assert entries.slots().tolist()[3] == [0, 1]
    assert entries.slots().tolist()[7] == [2, -1]
    padded = Pack.of_mask(torch.tensor([[0, 1, 1], [1, 1, 0]])).entries(2)
    assert listed(padded) == [[], [], [0], [], [1], []]
    assert Pack.of([0]).entries(4).slots().shape == (0, 0)


BATCHES = {
    "whole": torch.ones(2, 11),
    "left and right": torch.tensor([[0] * 5 + [1] * 6, [1] * 8 + [0] * 3]),
    "too short": torch.tensor([[0] * 9 + [1] * 2, [1] + [0] * 10]),
    "nothing real": torch.zeros(2, 11),
}


@pytest.mark.parametrize("ratio", [1, 3, 4, 12])
@pytest.mark.parametrize("batch", [*BATCHES, "packed"])
def test_entries_of_a_trace_are_those_of_the_host(batch: str, ratio: int) -> None:
    """A trace has room for as many entries as there can be; those that nobody sees have no span."""
    if batch == "packed":
        pack = Pack.of_positions(torch.tensor([[*range(7), *range(4)], [*range(2), *range(3), *range(6)]]))
    else:
        pack = Pack.of_mask(BATCHES[batch])
    expected, found = pack.entries(ratio), Entries.traced(pack.starts, pack.ends, ratio, 11)
    assert found.count == 2 * (11 // ratio)
    assert found.longest == 11 // ratio >= expected.longest
    assert listed(found) == listed(expected)
    room = found.count - expected.count
    for name, filling in (("spans", -1), ("before", -1), ("positions", 0)):
        one = getattr(found, name)
        assert one.dtype == torch.int32
        assert one.tolist() == getattr(expected, name).tolist() + [filling] * room
    seen = expected.ends > expected.starts
    assert torch.equal(found.starts[seen], expected.starts[seen])
    assert torch.equal(found.slots()[:, : expected.longest], expected.slots())
    assert (found.slots()[:, expected.longest :] == -1).all()


def test_a_pack_moves_to_a_device() -> None:
    moved = Pack.of([0, 2]).to("meta")
    assert {getattr(moved, name).device.type for name in ("starts", "ends", "positions", "request_ids")} == {"meta"}
    assert moved.lengths == (2,)


@pytest.mark.parametrize("bounds", [[], [1, 2], [0, 3, 2], [0, -1]])
def test_wrong_boundaries_are_refused(bounds: list[int]) -> None:
    with pytest.raises(ValueError, match="cu_seqlens must be"):
        Pack.of(bounds)
