"""V4 on a GPU: planning without waiting, the rows that the host gives, and rows that follow a graph's inputs."""

from dataclasses import replace

import pytest
import torch
from bounds import relative_error
from torch import Tensor
from v4_standin import QUERIES, RATIOS, SCALE, V4Step, limits, specs

from tamis import Batch, PagedCache, PageMap
from tamis.layers.v4_gathered import attend_gathered
from tamis.ops import attend, select_entries, select_window
from tamis.step.v4_plan import V4Plan
from tamis.step.v4_planner import V4Planner

pytestmark = pytest.mark.gpu


def to_gpu(batch: Batch) -> Batch:
    def moved(pages: PageMap) -> PageMap:
        return PageMap(pages.block_table.cuda(), pages.slots.cuda())

    return replace(
        batch,
        pages=moved(batch.pages),
        other_pages={name: moved(pages) for name, pages in batch.other_pages.items()},
        lengths=batch.lengths.cuda(),
        host_lengths=batch.lengths,
    )


def tensors(plan: V4Plan) -> list[Tensor]:
    parts = [plan.window, *plan.entries.values()]
    return [value for part in parts for value in vars(part).values() if isinstance(value, Tensor)]


@pytest.mark.parametrize("mode", ["mixed", "separate"])
def test_planning_waits_for_nothing_and_gives_what_the_host_gives(mode: str) -> None:
    planner = V4Planner(specs(), limits(), "cuda", mode=mode)
    addresses = set()
    for queries, lengths in ((QUERIES, [300, 1000, 70, 40, 170, 600]), ([1, 1], [5, 900]), ([60, 9], [60, 800])):
        step = V4Step("v4-fp8", queries, lengths)
        expected = V4Planner(specs(), limits(), mode=mode).plan(step.padded(2))
        batch = to_gpu(step.padded(2))
        planner.plan(batch)  # kernels are compiled, which waits
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan = planner.plan(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for number, (found, wanted) in enumerate(zip(tensors(plan), tensors(expected), strict=True)):
            assert torch.equal(found.cpu(), wanted), number
        addresses.add(tuple(value.data_ptr() for value in tensors(plan)))
    assert len(addresses) == 1


@pytest.mark.parametrize("ratio", RATIOS)
def test_both_ways_to_serve(ratio: int) -> None:
    step = V4Step("v4-fp8")
    window = PagedCache.wrap(step.window.storage.cuda(), "v4-fp8")
    entries = PagedCache.wrap(step.entries[ratio].storage.cuda(), "v4-fp8") if ratio > 1 else None
    q, sink = step.q.bfloat16(), step.sink.cuda()
    expected = step.oracle(ratio, q)
    plan = V4Planner(specs(), limits(), "cuda", mode="separate").plan(to_gpu(step.batch))
    chosen = step.chosen.cuda() if ratio == 4 else None
    selections = [plan.window.selection(window)]
    if entries is not None:
        selections.append(plan.entries[ratio].selection(entries, chosen))
    direct = attend(q.cuda(), selections, scale=SCALE, value_dim=512, sink=sink).out
    options = {"ratio": ratio, "scale": SCALE, "value_dim": 512, "sink": sink}
    gathered = attend_gathered(q.cuda(), plan, window, entries, chosen, **options)
    assert relative_error(direct.cpu(), expected) < 5e-3
    assert relative_error(gathered.cpu(), expected) < 5e-3


def test_rows_follow_the_inputs_of_a_captured_graph() -> None:
    positions = torch.tensor([5, 300, 255, -1], dtype=torch.int32, device="cuda")
    ids = torch.tensor([0, 1, 1, 0], dtype=torch.int32, device="cuda")
    table = torch.randperm(40, device="cuda").int().view(2, 20)
    slots = torch.empty(4, 128, dtype=torch.int32, device="cuda")
    every = torch.empty(4, 256, dtype=torch.int32, device="cuda")
    lengths, completed = (
        torch.empty(4, dtype=torch.int32, device="cuda"),
        torch.empty(4, dtype=torch.int64, device="cuda"),
    )

    def run() -> None:
        select_window(positions, ids, table, page_size=64, window=128, slots=slots, lengths=lengths)
        # A step may use fewer columns than the buffer has; what lies beyond is not touched.
        select_entries(positions, ids, table, ratio=128, page_size=2, completed=completed, every=every[:, :128])

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for new in ([5, 300, 255, -1], [127, -1, 1000, 383], [0, 1, 2, 3]):
        positions.copy_(torch.tensor(new, dtype=torch.int32))
        for output in (slots, every, lengths, completed):
            output.fill_(77)
        graph.replay()
        found = [output.clone() for output in (slots, every, lengths, completed)]
        run()
        assert all(
            torch.equal(one, other) for one, other in zip(found, (slots, every, lengths, completed), strict=True)
        )
        assert every[:, 128:].eq(77).all()
        assert lengths.tolist() == [min(p + 1, 128) if p >= 0 else 0 for p in new]
