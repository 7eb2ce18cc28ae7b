"""The deterministic mode: one order of sums whatever the chunks, the batch and the run."""

import pytest
import torch
from torch import Tensor
from training import WITH_GRADIENTS, normal, relative

from tamis.ops.attention import gradients as attention
from tamis.ops.index import gradients as index
from tamis.ops.rows.torch_rows import BLOCK, RowSums
from tamis.train import Pack, Rows, attend_rows, index_loss, index_target

pytestmark = WITH_GRADIENTS
LENGTHS = (5, 21, 1, 14)
ALL = (0, 1, 2, 3)


class Step:
    """A pack in float32, where every order of sums has other bits."""

    def __init__(self) -> None:
        tokens = sum(LENGTHS)
        self.q, self.rows = normal(tokens, 3, 20, dtype=torch.float32), normal(tokens, 20, dtype=torch.float32)
        shapes = ((tokens, 2, 12), (tokens, 12), (tokens, 2))
        self.index = [normal(*shape, dtype=torch.float32) for shape in shapes]
        self.dout, self.sink = normal(tokens, 3, 16, dtype=torch.float32), normal(3, dtype=torch.float32)
        self.positions = [torch.arange(n) for n in LENGTHS]

    def run(self, requests: tuple[int, ...], deterministic: bool | None = True) -> list[Tensor]:
        """Output and gradients of some requests in one pack, put back where they are in the whole."""
        bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
        tokens = torch.cat([torch.arange(bounds[r], bounds[r + 1]) for r in requests])
        pack = Pack.of(torch.tensor([0, *(LENGTHS[r] for r in requests)]).cumsum(0))
        # Everybody's first row is chosen by all later tokens; other rows by some.
        slots = pack.visible_slots()[:, : max(LENGTHS)]
        slots = torch.nn.functional.pad(slots, (0, max(LENGTHS) - slots.shape[1]), value=-1)
        leaves = [x[tokens].requires_grad_() for x in (self.q, self.rows, *self.index)]
        q, rows, *indexer = leaves
        found = attend_rows(q, Rows(rows, slots), scale=0.3, value_dim=16, sink=self.sink, deterministic=deterministic)
        target = index_target(q, Rows(rows, slots), found.lse, scale=0.3, sink=self.sink)
        loss = index_loss(*indexer, slots, target, deterministic=deterministic)
        results = [found.out, found.lse, target]
        results += torch.autograd.grad((found.out * self.dout[tokens]).sum() + loss, leaves)
        places = []
        for result in results:
            whole = torch.zeros(len(self.q), *result.shape[1:], dtype=result.dtype)
            whole[tokens] = result.detach()
            places.append(whole)
        return places


@pytest.fixture(scope="module")
def step() -> Step:
    torch.manual_seed(3)
    return Step()


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 40, 41])
def test_any_chunk_size(tokens: int, step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = step.run(ALL)
    monkeypatch.setattr(attention, "WORKING_BYTES", tokens * 21 * 32 * 4)
    monkeypatch.setattr(index, "WORKING_BYTES", tokens * 21 * 16 * 4)
    assert same(step.run(ALL), expected)


def test_requests_alone_in_any_order_and_in_every_run(step: Step) -> None:
    expected = step.run(ALL)
    alone = [step.run((request,)) for request in range(4)]
    assert same([sum(parts) for parts in zip(*alone, strict=True)], expected)
    assert same(step.run((3, 0, 2, 1)), expected)
    assert all(same(step.run(ALL), expected) for _ in range(10))


@pytest.mark.own_settings("is as exact as float32, to which autocast does not hold", without=("autocast",))
def test_the_mode_follows_torch(step: Step) -> None:
    expected = step.run(ALL)
    assert same(step.run(ALL, None), expected)  # tests run with deterministic algorithms
    torch.use_deterministic_algorithms(False)
    loose = step.run(ALL, None)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert same(loose, step.run(ALL, False))
    # 40 tokens, 21 columns and 20 numbers: float32's unit, times the roots of the numbers of terms, with room.
    assert all(relative(one, other) < 1e-5 for one, other in zip(loose, expected, strict=True))


@pytest.mark.parametrize("chunks", [[2000], [1, 255, 1, 700, 256, 787], [256] * 7 + [208]])
def test_sums_by_row_are_sums_of_blocks(chunks: list[int]) -> None:
    """Against the definition, one addition at a time; row 0 has more than two blocks."""
    slots = torch.where(torch.rand(2000) < 0.4, 0, torch.randint(0, 9, (2000,)))
    values = torch.randn(2000, 3)
    sums = RowSums(torch.zeros(8, 3), torch.float32, deterministic=True)
    loose = RowSums(torch.zeros(8, 3), torch.float32, deterministic=False)
    at = 0
    for count in chunks:
        sums.add(slots[at : at + count], values[at : at + count])
        loose.add(slots[at : at + count], values[at : at + count])
        at += count
    found, other = sums.result(), loose.result()
    for row in range(8):
        own = values[slots == row]
        blocks = []
        for block in own.split(BLOCK):
            total = torch.zeros(3)
            for value in block:
                total = total + value
            blocks.append(total)
        whole = torch.zeros(3)
        for block in blocks:
            whole = whole + block
        assert torch.equal(found[row], whole)
    assert len(values[slots == 0]) > 2 * BLOCK
    assert relative(other, found) < 1e-4
