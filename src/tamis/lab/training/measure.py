"""Measures of a trained model as it is served: right answers, and the share of dense attention that it selects."""

from typing import Any, Literal

import torch
from torch import Tensor

from tamis.integrations.hf.layers import CacheKind
from tamis.integrations.transformers import attach, detach
from tamis.lab.inspection import describe_layers, inspect_model
from tamis.lab.training.task import make_batch
from tamis.layers.mla import SparseMLA
from tamis.ops import topk_positions
from tamis.ops.index.operations import IndexTopk

Selecting = Literal["indexer", "random"]


def right_answers(
    model: Any,
    *,
    tokens: int,
    prompts: int = 1,
    cache: CacheKind = "fp8",
    selecting: Selecting = "indexer",
    seed: int = 0,
) -> float:
    """The share of right answers to questions at the end of prompts whose answers stand in the first quarter.

    Args:
        model: one that is not attached.
        tokens: the length of the prompts.
        prompts: how many; each has a question for every eighth token, at most 96.
        cache: the format of the cache.
        selecting: who selects the tokens to attend to: the model's indexers, or nobody ("random").
        seed: of the prompts.
    """
    batch = make_batch(torch.Generator("cpu").manual_seed(seed), prompts, tokens, far=True)
    draws = torch.Generator("cpu").manual_seed(seed)
    model.eval()
    attach(model, cache=cache, wrap_layer=lambda _, layer: _Random(layer, draws) if selecting == "random" else layer)
    try:
        with torch.no_grad():
            logits = model(input_ids=batch.tokens.to(model.device), use_cache=False).logits
    finally:
        detach(model)
    return float(batch.right(logits).float().mean())


def attention_recall(
    model: Any, *, tokens: int, cache: CacheKind = "fp8", compared: int = 2048, seed: int = 0
) -> list[float]:
    """The share of dense attention's weight that each layer selects, as `tamis inspect` computes it."""
    batch = make_batch(torch.Generator("cpu").manual_seed(seed), 1, tokens)
    model.eval()
    inspection = inspect_model(model, batch.tokens[0].tolist(), cache=cache, compared_queries=compared)
    return [layer["recall"] for layer in describe_layers(inspection)]


class _Random(SparseMLA):
    """A layer that selects at random among the visible tokens."""

    def __init__(self, layer: SparseMLA, draws: torch.Generator) -> None:
        super().__init__(layer.spec, backend=layer.backend)
        self._draws = draws

    def _select(self, call: IndexTopk, known: object = None) -> Tensor:
        assert self.spec.topk is not None
        width = int(call.lengths.max())
        scores = torch.rand(len(call.lengths), width, generator=self._draws, dtype=torch.float32, device="cpu")
        return topk_positions(scores.to(call.lengths.device), call.lengths, self.spec.topk, backend=call.backend)
