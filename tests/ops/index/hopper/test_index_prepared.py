"""Remembered launches of a whole selection: which calls they may run."""

import pytest
import torch

from tamis.cache.layout import index_fp8
from tamis.cache.paged import PagedCache
from tamis.ops.index import hopper
from tamis.ops.index.operations import IndexTopk


def test_unaligned_addresses_leave_the_remembered_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one signature differ in their addresses, and the launch reads 16 bytes at a time."""
    ran: list[str] = []
    monkeypatch.setattr(hopper, "device_index", lambda device: 0)
    monkeypatch.setattr(hopper, "current_stream", lambda index: 0)
    monkeypatch.setattr(hopper.scores, "prepare_scores", lambda call, out: lambda stream, given: ran.append("scores"))
    monkeypatch.setattr(hopper.topk, "prepare_topk", lambda *shape: lambda stream, given: ran.append("top-k"))
    monkeypatch.setattr(hopper, "index_topk", lambda call: ran.append("all"))
    one, cpu = torch.ones(1, dtype=torch.int32, device="cpu"), torch.device("cpu")
    room = torch.zeros(64 * 128 + 16, dtype=torch.uint8, device=cpu)
    queries = [room[first : first + 64 * 128].view(torch.float8_e4m3fn).view(1, 64, 128) for first in (0, 1, 16)]
    call = IndexTopk(
        queries[0],
        torch.ones(1, 64, dtype=torch.float32, device=cpu),
        PagedCache(index_fp8(), 1, 64),
        torch.zeros_like(one),
        torch.zeros(1, 1, dtype=torch.int32, device=cpu),
        one,
        1,
        1 << 20,
        1,
        torch.zeros(1, 1, dtype=torch.int32, device=cpu),
        None,
        "hopper",
    )
    run = hopper.prepare_index_topk(call)
    assert run is not None
    for q in queries:
        run(call._replace(q=q))
    assert ran == ["scores", "top-k", "all", "scores", "top-k"]
