"""What training holds in memory: nothing of the size of tokens times keys, or tokens times selected rows."""

import csv
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training import WITH_GRADIENTS, normal

from tamis.ops.attention import gradients as attention
from tamis.ops.index import gradients as index
from tamis.ops.index import reference as scoring
from tamis.ops.rows.ordered_sums import PAIR_BYTES
from tamis.train import Pack, Rows, attend_rows, index_loss, index_target, select_rows, warmup_loss

pytestmark = WITH_GRADIENTS
TOKENS, TOPK = 600, 16


class Largest(TorchDispatchMode):
    """The most elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // max(1, tensor.element_size()))
        return found


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "WORKING_BYTES", 64 << 10)
    monkeypatch.setattr(index, "WORKING_BYTES", 64 << 10)
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 64 << 10)
    monkeypatch.setattr(index, "QUERY_BLOCK", 32)
    monkeypatch.setattr(index, "KEY_BLOCK", 64)


def test_no_tensor_has_an_element_for_every_token_and_key() -> None:
    pack = Pack.of([0, TOKENS])
    index_q, keys, weights = (normal(*s, dtype=torch.float32) for s in ((TOKENS, 2, 8), (TOKENS, 8), (TOKENS, 2)))
    q, rows = normal(TOKENS, 2, 16, dtype=torch.float32), normal(TOKENS, 16, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (index_q, keys, weights, q, rows)]
    with Largest() as seen:
        slots = select_rows(index_q, keys, weights, pack.starts, pack.ends, TOPK, workspace_bytes=1 << 20)
        found = attend_rows(q, Rows(rows, slots), scale=0.2, value_dim=16)
        target = index_target(q, Rows(rows, slots), found.lse, scale=0.2)
        sparse = index_loss(index_q, keys, weights, slots, target)
        dense = warmup_loss(q, rows, found.lse, index_q, keys, weights, pack.starts, pack.ends, scale=0.2)
        torch.autograd.grad(found.out.sum() + sparse + dense, leaves)
    assert seen.elements < TOKENS * TOKENS / 4
    assert seen.elements < TOKENS * TOPK * 16  # gathered rows of all tokens


def test_nothing_of_the_size_of_the_selection_is_kept_for_the_loss() -> None:
    """The backward pass multiplies gradients that the forward pass computed; without gradients there are none."""
    kept: list[int] = []
    shapes = ((TOKENS, 2, 8), (TOKENS, 8), (TOKENS, 2))
    leaves = [normal(*s, dtype=torch.float32).requires_grad_() for s in shapes]
    slots = torch.randint(0, TOKENS, (TOKENS, 64), dtype=torch.int32)
    target = torch.rand(TOKENS, 64)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = index_loss(*leaves, slots, target)
    assert sorted(kept) == sorted(x.numel() for x in leaves)
    loss.backward()
    with Largest() as seen:
        index_loss(*(x.detach() for x in leaves), slots, target)
    assert seen.elements <= max(target.numel(), 64 << 10)


def test_what_attention_keeps_for_its_backward_pass() -> None:
    """The formula of the page about training, in bytes."""
    kept: dict[int, int] = {}
    tokens, heads, width, value_dim, columns = 40, 3, 24, 16, 12
    q, rows = (normal(*s, dtype=torch.bfloat16).requires_grad_() for s in ((tokens, heads, width), (tokens, width)))
    slots = torch.randint(0, tokens, (tokens, columns), dtype=torch.int32)

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        attend_rows(q, Rows(rows, slots), scale=0.2, value_dim=value_dim)
    numbers = heads * (width + 2 * value_dim) + width
    assert sum(kept.values()) == tokens * (2 * numbers + 4 * columns + 4 * heads)


def test_what_a_backward_pass_makes_is_what_was_measured() -> None:
    """The other formula of that page, against the peaks on an H200: 64K tokens are as many more bytes."""
    path = Path(__file__).parents[2] / "benchmarks/results/h200_train.csv"
    measured = [row for row in csv.DictReader(path.read_text().splitlines()) if row["stage"] == "backward"]
    assert len(measured) >= 6
    for row in measured:
        tokens, heads, count = (int(row[name]) for name in ("tokens", "heads", "rows"))
        made = tokens * (2 * heads * 576 + 4 * heads) + 6 * count * 576
        assert made / 1e6 == pytest.approx(float(row["peak_mb"]), rel=0.01)


def test_the_contributions_on_the_page_are_those_of_the_kernels() -> None:
    page = (Path(__file__).parents[2] / "docs/training.md").read_text()
    assert f"{PAIR_BYTES / 1e9:.1f} GB of contributions" in page
