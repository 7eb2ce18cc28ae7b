"""Recorded selections in training: a rollout's rows are trained on, whoever recorded them."""

import pytest
import torch
from training import normal

from tamis import Batch, Caches, LayerSpec, Limits, PagedCache, PagePool, Planner, Recording, SparseMLA
from tamis.cache.layout import named, rows
from tamis.ops import IndexInputs
from tamis.train import Pack, Rows, attend_rows, select_rows

LENGTHS, TOPK, WIDTH, HEADS = {"a": 9, "b": 14}, 4, 24, 2
SIZES = {"latent": 16, "rope": 8}


class Rollout:
    """Two requests decoded in steps by a layer that selects for itself, recorded on the way."""

    def __init__(self) -> None:
        spec = LayerSpec(HEADS, 16, 8, 16, scale=0.3, topk=TOPK)
        limits = Limits(max_tokens=32, max_requests=2, max_length=32, page_size=4)
        layout = named("v32-fp32", **SIZES)
        planner, pool = Planner(spec, limits, layout=layout), PagePool(16, 4)
        index = PagedCache(rows(torch.float32, latent=8, rope=0), 16, 4)
        caches, layer, self.recording = Caches(PagedCache(layout, 16, 4), index), SparseMLA(spec), Recording(TOPK)
        shapes = ((HEADS, WIDTH), (WIDTH,), (3, 8), (3,), (8,))
        self.given = {
            name: [normal(length, *shape, dtype=torch.float32) for shape in shapes] for name, length in LENGTHS.items()
        }
        self.out = {name: torch.zeros(length, HEADS, 16) for name, length in LENGTHS.items()}
        done = dict.fromkeys(LENGTHS, 0)
        for new in ({"a": 5, "b": 3}, {"a": 1, "b": 8}, {"a": 3, "b": 1}, {"a": 0, "b": 2}):
            totals = [done[name] + new[name] for name in "ab"]
            plan = planner.plan(Batch.build([new[name] for name in "ab"], totals, pool))
            parts = [[x[done[name] : done[name] + new[name]] for x in self.given[name]] for name in "ab"]
            q, kv, index_q, weights, keys = (torch.cat(x) for x in zip(*parts, strict=True))
            found = layer(q, kv, caches, plan, index=IndexInputs(index_q, weights, keys))
            self.recording.record(0, ["a", "b"], plan, found.positions)
            for name, part in zip("ab", found.out.split([new[n] for n in "ab"]), strict=True):
                self.out[name][done[name] : done[name] + new[name]] = part
                done[name] += new[name]


@pytest.mark.own_settings(
    "has gradients, and is as exact as float32, to which autocast does not hold", without=("inference", "autocast")
)
def test_a_rollout_in_steps_is_trained_on_in_one_pass() -> None:
    rollout = Rollout()
    pack = Pack.of([0, 14, 23])
    q, kv, index_q, weights, keys = (torch.cat(x) for x in zip(rollout.given["b"], rollout.given["a"], strict=True))
    replayed = rollout.recording.packed(0, ["b", "a"], pack)
    own = select_rows(index_q, keys, weights, pack.starts, pack.ends, TOPK)
    assert torch.equal(replayed, own)
    results = []
    for slots in (replayed, own):
        leaves = [q.clone().requires_grad_(), kv.clone().requires_grad_()]
        found = attend_rows(leaves[0], Rows(leaves[1], slots), scale=0.3, value_dim=16)
        results.append([found.out, *torch.autograd.grad(found.out.square().sum(), leaves)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    served = torch.cat((rollout.out["b"], rollout.out["a"]))
    # Both sum 24 products and 4 rows in float32: some units of 2**-24, of numbers of this size.
    assert (results[0][0] - served).abs().max() < 64 * 2.0**-24 * served.abs().max()


def test_padding_has_no_rows() -> None:
    rollout = Rollout()
    mask = torch.zeros(2, 14, dtype=torch.int64)
    mask[0, 5:], mask[1, :] = 1, 1
    pack = Pack.of_mask(mask)
    found = rollout.recording.packed(0, ["a", "b"], pack)
    assert (found[:5] == -1).all()
    alone = rollout.recording.packed(0, ["a"], Pack.of([0, 9]))
    assert torch.equal(found[5:14], torch.where(alone >= 0, alone + 5, -1))


def test_what_an_engine_captured_is_loaded() -> None:
    rollout, loaded = Rollout(), Recording(TOPK)
    pack = Pack.of([0, 9])
    expected = rollout.recording.packed(0, ["a"], pack)
    captured = expected.flip(1).clone()
    loaded.load(0, "a", captured[6:], first=6)
    with pytest.raises(ValueError, match="positions must be 1 different positions up to 0 for token 0"):
        loaded.packed(0, ["a"], pack)
    loaded.load(0, "a", captured[:6])
    captured.fill_(0)
    assert torch.equal(loaded.packed(0, ["a"], pack).sort(1).values, expected.sort(1).values)
    with pytest.raises(ValueError, match="recording must be at least 10 tokens long, got 9 tokens of 'a' in layer 0"):
        loaded.packed(0, ["a"], Pack.of([0, 10]))
    with pytest.raises(ValueError, match="requests must be 1 different names, one per request of the pack"):
        loaded.packed(0, ["a", "b"], pack)
    with pytest.raises(ValueError, match="positions must be of shape"):
        loaded.load(0, "a", captured[:, :2])
    with pytest.raises(ValueError, match="positions must be 1 different positions up to 0"):
        loaded.load(0, "b", torch.full((1, TOPK), 3, dtype=torch.int32))
