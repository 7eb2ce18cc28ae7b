"""The indexer's loss in CUDA C++: the source runs on the host, warps in random order, against float64."""

import functools
from collections.abc import Callable
from pathlib import Path

import bounds
import pytest
import torch
from gradients_emulated import Emulated
from seeds import reseed
from training import hostile_slots, normal

from tamis.cuda.compiler import Program
from tamis.ops.index import gradients as exact
from tamis.ops.index.hopper import gradients as kernels
from tamis.ops.index.loss_operations import IndexLoss
from tamis.ops.rows import ordered_sums
from tamis.ops.rows.ordered_sums import OrderedSums

# Gradients are sums of 128 products or of 64 heads and 300 columns in float32, with slopes of two bf16 terms (2**-16).
ERROR = 2.0**-15


@pytest.fixture(scope="session")
def emulated(host_folder: Path) -> Callable[[Program], Emulated]:
    return functools.cache(lambda program: Emulated(host_folder, program))


def call_of(heads: int, columns: int, *, tokens: int = 3, count: int = 50, half: bool = True) -> IndexLoss:
    reseed(heads + columns)
    dtype = torch.bfloat16 if half else torch.float32
    q, keys = (normal(*s, dtype=torch.bfloat16) for s in ((tokens, heads, 128), (count, 128)))
    weights = normal(tokens, heads, dtype=dtype) * 0.02
    keys[7] = 0.0  # its products are zero, where the ReLU has no slope
    slots, target = hostile_slots(tokens, columns, count), torch.rand(tokens, columns)
    slots[0, 2] = 7
    target /= target.sum(1, keepdim=True)
    target[-1] = 0.0
    return IndexLoss(q, keys, weights, slots, target, torch.rand(tokens), True, False, "auto")


def check(found: tuple[torch.Tensor, ...], call: IndexLoss) -> None:
    wide = [x.cpu().double() if x is not None and x.is_floating_point() else x.cpu() for x in call[:6]]
    for one, other in zip(found, exact.index_loss(IndexLoss(*wide, True, False, "")), strict=True):
        size = float(other.abs().max()) + (0.0 if one.dim() else 10.0)
        bounds.agree(one.cpu(), other, ERROR * size, one.dtype if one.dim() else None)


@pytest.mark.parametrize(("heads", "columns"), [(64, 130), (5, 64), (33, 3)])
def test_the_loss_on_the_host(emulated, heads: int, columns: int) -> None:
    call = call_of(heads, columns, half=heads != 64)
    found = kernels.run_at_once(call, emulated(kernels.program(ordered=False)))
    check(found, call)
    alone = kernels.run_at_once(call._replace(gradients=False), emulated(kernels.program(ordered=False)))
    assert torch.equal(alone[0], found[0])
    assert [x.numel() for x in alone[1:]] == [0, 0, 0]


def test_ordered_gradients_of_keys_on_the_host(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_of(64, 70)
    found = []
    for size in (1, 1 << 30):  # a token at a time, and all of them
        monkeypatch.setattr(ordered_sums, "PAIR_BYTES", size)
        monkeypatch.setattr(ordered_sums, "LISTED_PAIRS", size)
        sums = OrderedSums(call.index_keys, emulated(ordered_sums.program(kernels.FORM)))
        found.append(kernels.run_in_order(call, emulated(kernels.program(ordered=True)), sums, sms=2))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    for one, other in zip(found[0], kernels.run_at_once(call, emulated(kernels.program(ordered=False))), strict=True):
        # Pairs are fp16 relative to the largest number of 64, and the results bf16.
        assert torch.allclose(one.double(), other.double(), rtol=2.0**-7, atol=2.0**-11 * float(other.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("heads", "columns"), [(64, 300), (32, 64), (1, 1)])
def test_the_loss_on_a_device(heads: int, columns: int, deterministic: bool, device: torch.device) -> None:
    call = call_of(heads, columns, tokens=300)
    on_device = [None if x is None else x.to(device) for x in call[:6]]
    call = IndexLoss(*on_device, True, deterministic, "auto")
    found = kernels.index_loss(call)
    if not deterministic:
        check(found, call)
    for one, other in zip(found, exact.index_loss(call), strict=True):
        assert float((one.double() - other.double()).norm()) <= 3e-3 * float(other.double().norm())
    for _ in range(10 if deterministic else 0):
        assert all(torch.equal(one, other) for one, other in zip(found, kernels.index_loss(call), strict=True))
