"""Both ways to serve V4 (prefills that read pages, prefills gathered into a workspace) against fp64 and each other."""

import bounds
import pytest
import torch
from bounds import relative_error
from seeds import seed_of
from v4_standin import HEADS, LENGTHS, QUERIES, RATIOS, SCALE, V4Step, limits, specs

from tamis import Batch, LayerSpec, Limits, PagedCache, PagePool
from tamis.cache.layout import Layout, named, plain_fp8
from tamis.layers.v4_gathered import attend_gathered
from tamis.ops import attend, write_kv
from tamis.step.v4_planner import V4Planner

BATCHES = {
    "mixed": (QUERIES, LENGTHS),
    "decodes": ([1, 2, 1], [129, 700, 3]),
    "prefills": ([30, 64, 3], [30, 400, 127]),
    "one token": ([1], [1]),
}
BF16 = bounds.unit(torch.bfloat16)
OPTIONS = {"scale": SCALE, "value_dim": 512}


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("layout", ["v4-fp8", "v4-bf16", "v4-fp32"])
def test_prefills_through_a_workspace_agree_with_prefills_through_pages(layout: str, batch: str, ratio: int) -> None:
    step = V4Step(layout, *BATCHES[batch])
    plan = step.planner().plan(step.batch)
    core = attend(step.q, step.selections(plan, ratio), sink=step.sink, **OPTIONS)
    step.agrees(core.out, ratio)
    plan = step.planner(mode="separate").plan(step.batch)
    entries = step.entries.get(ratio)
    chosen = step.chosen_for(ratio)
    gathered = attend_gathered(step.q, plan, step.window, entries, chosen, ratio=ratio, sink=step.sink, **OPTIONS)
    # Rows of v4-fp8 and v4-bf16 are bf16 numbers: the workspace holds them exactly, and only sums differ.
    step.agrees(gathered, ratio, row_unit=BF16 if layout == "v4-fp32" else 0.0)


def test_a_small_workspace_takes_several_groups_and_keeps_nothing_of_the_one_before() -> None:
    step = V4Step("v4-fp8")
    plan = step.planner(mode="separate").plan(step.batch)
    assert [len(plan.gathers[r].groups) for r in RATIOS] == [1, 1, 1]
    small = limits(workspace_rows=330)
    plan = V4Planner(specs(), small, layout="v4-fp8", mode="separate").plan(step.batch)
    assert [len(plan.gathers[r].groups) for r in RATIOS] == [2, 3, 2]
    assert plan.workspace is not None
    plan.workspace.fill_(torch.nan)
    for ratio in RATIOS:
        out = attend_gathered(
            step.q,
            plan,
            step.window,
            step.entries.get(ratio),
            step.chosen_for(ratio),
            ratio=ratio,
            sink=step.sink,
            **OPTIONS,
        )
        step.agrees(out, ratio)


@pytest.mark.parametrize("batch", ["mixed", "decodes"])
def test_padding_comes_out_as_zeros(batch: str) -> None:
    step = V4Step("v4-bf16", *BATCHES[batch])
    total = len(step.tokens)
    plan = step.planner(mode="separate").plan(step.padded(3))
    q = torch.cat((step.q, torch.full((3, HEADS, 512), 2.0)))
    out = attend_gathered(q, plan, step.window, sink=step.sink, **OPTIONS)
    step.agrees(out[:total], 1)
    assert out[total:].eq(0).all()


def test_one_scale_for_the_whole_cache() -> None:
    layout: Layout = plain_fp8(latent=448)
    step = V4Step(layout, scale=0.03)
    plan = step.planner(mode="separate").plan(step.batch)
    for ratio in RATIOS:
        entries, chosen = step.entries.get(ratio), step.chosen_for(ratio)
        out = attend_gathered(step.q, plan, step.window, entries, chosen, ratio=ratio, sink=step.sink, **OPTIONS)
        step.agrees(out, ratio, row_unit=BF16)  # e4m3 times a scale, rounded to bf16 in the workspace


def test_refusals() -> None:
    step = V4Step("v4-bf16", [1], [5])
    with pytest.raises(ValueError, match="plan must be one with a workspace, got None; make the V4Planner with mode"):
        attend_gathered(step.q, step.planner().plan(step.batch), step.window, **OPTIONS)
    plan = step.planner(mode="separate").plan(step.batch)
    with pytest.raises(ValueError, match="entries must be given for ratio 4"):
        attend_gathered(step.q, plan, step.window, ratio=4, **OPTIONS)
    with pytest.raises(ValueError, match=r"q must be of shape \[T=1, H, D\]"):
        attend_gathered(step.q[:0], plan, step.window, **OPTIONS)


@pytest.mark.parametrize("window", [8, 128])
@pytest.mark.parametrize("block", [4, 5])
@pytest.mark.parametrize(("layout", "bound"), [("v4-bf16", 1e-2), ("v4-fp8", 6.5e-2)])
def test_draft_blocks_without_a_causal_mask(window: int, block: int, layout: str, bound: float) -> None:
    """Every token of a block attends to the window before the block and to the whole block, later tokens included."""
    spec = LayerSpec(HEADS, 448, 64, 512, SCALE, window=window, kind="window")
    sizes = {"window": 16}
    planner = V4Planner(
        [spec], Limits(32, 4, 400, 256, sizes, speculative_tokens=block - 1), layout=layout, draft_tokens=block
    )
    lengths, pool, others = [300, block, 40], PagePool(8, 256), {"window": PagePool(60, 16, seed=seed_of(3))}
    batch = Batch.build([block] * 3, lengths, pool, other_pools=others)
    cache = PagedCache(named(layout), 60, 16)
    kept = [torch.randn(length, 512).bfloat16() for length in lengths]
    for request, rows in enumerate(kept):
        write_kv(rows, cache, others["window"].slots(request, 0, len(rows)))
    q = torch.randn(3 * block, HEADS, 512).bfloat16()
    found, causal = (
        attend(q, [planner.plan(batch, causal=causal).window.selection(cache)], **OPTIONS).out
        for causal in (False, True)
    )
    for token in range(3 * block):
        rows = kept[token // block].double()
        seen = rows[max(len(rows) - block - window, 0) :]
        weights = torch.softmax(q[token].double() @ seen.T * SCALE, dim=-1)
        assert relative_error(found[token], weights @ seen) < bound
    assert relative_error(found, causal) > 0.1
