"""Training steps of tiny models, and what the untouched model computes in their place."""

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from bounds import relative_error
from hf_models import build, tokens
from hf_rounding import collected
from torch import Tensor

from tamis.integrations.hf import train_v4, train_v32

BOUND = 1e-5
"""Of a gradient's norm: float32 sums of different orders, through three layers; a missing term is orders larger."""
SEPARATE = 1e-4
"""The bound for sums over several sequences of V4: gradients of its few mixing scalars cancel over tokens, and two of
the untouched model's own sums differ by 1e-5 there. A token that sees another sequence changes them by 1e-1."""
MIXING = 1e-3
"""The bound for the scalars that mix Hy4's streams, whose gradients cancel over tokens and streams: with other random
numbers the float32 noise of the layers moves them by 3e-4."""
FLIPPED = 1e-3
"""The bound for gradients of an indexer whose inputs differ by float32's noise: now and then that carries one of its
products over the edge of its ReLU, which changes a gradient by 1e-4."""
Gradients = dict[str, Tensor | None]


def trainable(name: str, **changes: Any) -> Any:
    """A tiny model whose attention is peaked: near-uniform attention would teach an indexer nothing."""
    return build(name, **{"initializer_range": 0.1, **changes}).train()


shared = cache(trainable)


def step(model: Any, **inputs: Any) -> tuple[Tensor, Gradients]:
    """The loss of one step and the gradient of every parameter."""
    model.train()
    model.zero_grad(set_to_none=True)
    loss = model(**inputs).loss
    loss.backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


def trained_selections() -> AbstractContextManager[list[Tensor]]:
    """Collects the selections of training steps, layer by layer."""
    return collected((train_v32, train_v4), "select")


def batches(columns: int = 90) -> dict[str, dict[str, Any]]:
    """Inputs with labels: whole sequences, padding on either side, and two sequences packed in every row.

    The first real label after padding is ignored as well: padding predicts it.
    """
    ids, columns_of = tokens(2, columns), torch.arange(columns)
    half = columns // 3
    left = (columns_of >= torch.tensor([[0], [half]])).long()
    right = (columns_of < torch.tensor([[columns], [2 * half]])).long()
    after = (columns_of > torch.tensor([[-1], [half]])).long()
    position_ids = torch.cat((torch.arange(columns - half), torch.arange(half))).expand(2, -1)
    return {
        "whole": {"input_ids": ids, "labels": ids},
        "left": {"input_ids": ids, "attention_mask": left, "labels": ids.where(after != 0, -100)},
        "right": {"input_ids": ids, "attention_mask": right, "labels": ids.where(right != 0, -100)},
        # Untouched models see that sequences are packed only if they make no cache.
        "packed": {"input_ids": ids, "position_ids": position_ids, "labels": ids, "use_cache": False},
    }


def assert_agree(found: Gradients, expected: Gradients, bound: float = BOUND, *, but: str = ".indexer.") -> None:
    """Every gradient within the bound of the expected one; names that contain `but` are left out."""
    assert found.keys() == expected.keys()
    wrong = {}
    for name, gradient in expected.items():
        other = found[name]
        if but and but in name:
            continue
        if gradient is None or other is None:
            assert gradient is other, name
        elif relative_error(other, gradient) >= bound:
            wrong[name] = relative_error(other, gradient)
    assert not wrong, wrong


def assert_same(found: Gradients, expected: Gradients) -> None:
    """Every gradient the same, bit for bit."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        other = found[name]
        assert (gradient is None) == (other is None), name
        assert gradient is None or other is None or torch.equal(other, gradient), name
