"""Remembered launches of a whole selection: which calls they may run."""

import pytest
import torch
from torch import Tensor

from tamis.cache.layout import index_fp8
from tamis.cache.paged import PagedCache
from tamis.ops.index import hopper
from tamis.ops.index.hopper.scores import PreparedScores
from tamis.ops.index.operations import IndexTopk


def call_of(q: Tensor, workspace_bytes: int = 1 << 20) -> IndexTopk:
    """A call for these queries over one page of 64 keys, with k = 3."""
    tokens = len(q)
    ones = torch.ones(tokens, dtype=torch.int32, device="cpu")
    return IndexTopk(
        q,
        torch.ones(tokens, 64, dtype=torch.float32, device="cpu"),
        PagedCache(index_fp8(), 1, 64),
        torch.zeros_like(ones),
        torch.zeros(1, 1, dtype=torch.int32, device="cpu"),
        ones,
        3,
        workspace_bytes,
        tokens,
        torch.zeros(tokens, 3, dtype=torch.int32, device="cpu"),
        None,
        "hopper",
    )


def test_unaligned_addresses_leave_the_remembered_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one signature differ in their addresses, and the launch reads 16 bytes at a time."""
    ran: list[str] = []
    monkeypatch.setattr(hopper, "device_index", lambda device: 0)
    monkeypatch.setattr(hopper, "current_stream", lambda index: 0)
    score = PreparedScores(lambda *given: ran.append("scores"), None)
    monkeypatch.setattr(hopper.scores, "prepare_scores", lambda call, out: score)
    monkeypatch.setattr(hopper.topk, "prepare_topk", lambda *shape: lambda stream, given: ran.append("top-k"))
    monkeypatch.setattr(hopper, "index_topk", lambda call: ran.append("all"))
    held = torch.zeros(64 * 128 + 16, dtype=torch.uint8, device="cpu")
    queries = [held[first : first + 64 * 128].view(torch.float8_e4m3fn).view(1, 64, 128) for first in (0, 1, 16)]
    call = call_of(queries[0])
    run = hopper.prepare_index_topk(call)
    assert run is not None
    for q in queries:
        run(call._replace(q=q))
    assert ran == ["scores", "top-k", "all", "scores", "top-k"]
    pages = torch.zeros(64 * 132 + 8, dtype=torch.uint8, device="cpu")[8:].view(1, 64, 132)
    assert pages.data_ptr() % 16
    run(call._replace(cache=PagedCache.wrap(pages, index_fp8())))
    assert ran[5:] == ["all"]


@pytest.mark.parametrize(
    ("room", "sizes"),
    [(1, [1] * 5), (2 * 64 * 4, [2, 2, 1]), (4 * 64 * 4 - 1, [3, 2]), (5 * 64 * 4 - 1, [4, 1]), (5 * 64 * 4, [5])],
)
def test_a_small_workspace_takes_several_launches(room: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Five tokens, of which the workspace holds the scores of some. Each launch gets the addresses of its tokens."""
    ran: list[tuple[int, ...]] = []

    def prepare_scores(some: IndexTopk, out: Tensor):
        size = len(some.q)
        assert out.shape == (size, 64)
        return PreparedScores(lambda stream, given, factor, key_map: ran.append((size, *given)), None)

    def prepare_topk(tokens: int, width: int, k: int, device: torch.device):
        return lambda stream, given: ran.append((tokens, *given))

    monkeypatch.setattr(hopper, "device_index", lambda device: 0)
    monkeypatch.setattr(hopper, "current_stream", lambda index: 0)
    monkeypatch.setattr(hopper.scores, "prepare_scores", prepare_scores)
    monkeypatch.setattr(hopper.topk, "prepare_topk", prepare_topk)
    q = torch.zeros(5, 64, 128, dtype=torch.float8_e4m3fn, device="cpu")
    call = call_of(q, workspace_bytes=room)
    run = hopper.prepare_index_topk(call)
    assert run is not None
    run(call)
    scored, selected = ran[::2], ran[1::2]
    tensors = q, call.weights, call.request_ids, call.lengths
    firsts = [sum(sizes[:number]) for number in range(len(sizes))]
    for first, size, score, select in zip(firsts, sizes, scored, selected, strict=True):
        queries, weights, ids, lengths = (t[first:].data_ptr() for t in tensors)
        assert (score[0], score[1], score[2]) == (size, queries, weights)
        assert (score[5], score[6], score[7]) == (ids, call.block_table.data_ptr(), lengths)
        assert select == (size, score[8], lengths, call.out[first:].data_ptr())


def test_scores_of_triton_are_prepared_for_a_single_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their launch scores all tokens, so it may not be given memory for some of them."""
    rows: list[int] = []
    monkeypatch.setattr(hopper.scores, "serves", lambda call: False)
    monkeypatch.setattr(hopper, "_prepare_triton", lambda call, rooms: rows.append(len(rooms()[0])) or "prepared")
    q = torch.zeros(5, 64, 128, dtype=torch.float8_e4m3fn, device="cpu")
    found = [hopper.prepare_index_topk(call_of(q, workspace_bytes=room)) for room in (1, 5 * 64 * 4 - 1, 5 * 64 * 4)]
    assert found == [None, None, "prepared"]
    assert rows == [5]
