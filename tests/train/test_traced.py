"""The torch ops behind `tamis.train`: schemas, fakes, autograd and torch.compile."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from traced_ops import traced
from training import hostile_slots, normal

from tamis import IndexRecipe
from tamis.train import (
    Pack,
    Rows,
    attend_rows,
    compress_rows,
    fake_quantise,
    index_loss,
    index_target,
    normalise_target,
    select_rows,
    warmup_loss,
)

pytestmark = pytest.mark.own_settings("compiles, where torch cannot trace a mode")
PACK = Pack.of([0, 2, 5])
SPANS = PACK.entries(2)


def leaf(*shape: int) -> Tensor:
    return normal(*shape, dtype=torch.float32).requires_grad_()


def attention(**given) -> Callable[[], Tensor]:
    slots, lengths = hostile_slots(5, 4, 6), torch.tensor([4, 0, 2, 4, 3]).int()
    q, rows, others, sink = leaf(5, 2, 8), leaf(6, 8), leaf(3, 8), leaf(2)
    selections = [Rows(rows, slots, lengths), Rows(others, hostile_slots(5, 2, 3))]
    return lambda: attend_rows(q, selections, scale=0.3, value_dim=6, sink=sink, **given).out


def loss() -> Tensor:
    target = normalise_target(torch.rand(5, 4))
    return index_loss(leaf(5, 2, 8), leaf(6, 8), leaf(5, 2), hostile_slots(5, 4, 6), target)


def warm_up() -> Tensor:
    q, keys = normal(5, 2, 6, dtype=torch.float32), normal(5, 6, dtype=torch.float32)
    return warmup_loss(q, keys, None, leaf(5, 2, 8), leaf(5, 8), leaf(5, 2), PACK.starts, PACK.ends, scale=0.3)


def target() -> Tensor:
    q, rows = normal(5, 2, 8, dtype=torch.float32), normal(6, 8, dtype=torch.float32)
    return index_target(q, Rows(rows, hostile_slots(5, 4, 6)), torch.randn(5, 2), scale=0.3, sink=torch.randn(2))


def quantise() -> Tensor:
    recipe = IndexRecipe(rope_dim=4, hadamard=True)
    return fake_quantise(leaf(5, 2, 8), "index-fp8", recipe, positions=PACK.positions, cos_sin=torch.randn(6, 4))


CASES = {
    "attend_rows": attention(),
    "attend_rows in any order": attention(deterministic=False),
    "compress_rows": lambda: compress_rows(leaf(5, 6), leaf(5, 6), leaf(2, 6), SPANS, overlapping=True),
    "fake_quantise": quantise,
    "index_loss": loss,
    "index_target": target,
    "warmup_loss": warm_up,
}


@pytest.mark.parametrize("name", CASES)
def test_ops(name: str) -> None:
    func, arguments = traced(CASES[name])
    assert func.name() == f"tamis::{name.split()[0]}"
    torch.library.opcheck(func, arguments)


def layer(q: Tensor, rows: Tensor, index: tuple[Tensor, ...], sink: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    """Everything that a V4 layer trains with, in one graph."""
    slots = select_rows(*index, PACK.starts, PACK.ends, 3, layout="index-fp8")
    entries = compress_rows(rows, rows * 0.5, bias, SPANS)
    window = Rows(fake_quantise(rows, "index-fp8"), slots)
    selections = [Rows(entries, torch.stack((SPANS.starts, SPANS.ends - 1), 1)), window]
    found = attend_rows(q, selections, scale=0.3, value_dim=8, sink=sink)
    wanted = index_target(q, selections, found.lse, scale=0.3, sink=sink)
    return found.out, index_loss(*index, slots, wanted)


def test_a_compiled_layer_has_the_bits_of_eager() -> None:
    index = (leaf(5, 2, 8), leaf(5, 8), leaf(5, 2))
    given = (leaf(5, 2, 8), leaf(5, 8), index, leaf(2), leaf(2, 8))
    leaves = [given[0], given[1], *index, *given[3:]]
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    results = []
    for run in (layer, compiled):
        out, kl = run(*given)
        results.append([out, kl, *torch.autograd.grad(out.square().sum() + kl, leaves)])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
