"""Measures of a trained model as it is served: right answers, and the share of dense attention that it selects."""

from typing import Any, Literal

import torch
from torch import Tensor

from tamis.integrations.hf.layers import CacheKind
from tamis.integrations.transformers import attach, detach
from tamis.lab.inspection import describe_layers, inspect_model
from tamis.lab.training.model import demo_of
from tamis.lab.training.task import make_batch
from tamis.layers.mla import SparseMLA
from tamis.layers.v4 import SparseV4
from tamis.layers.v4_checks import V4Call
from tamis.ops import Rotated, topk_positions
from tamis.ops.index.operations import IndexTopk

Selecting = Literal["indexer", "random"]


def right_answers(
    model: Any,
    *,
    tokens: int,
    cache: CacheKind = "fp8",
    selecting: Selecting = "indexer",
    seed: int = 0,
) -> float:
    """The share of right answers to questions at the end of a prompt whose answers stand in its first quarter.

    Args:
        model: one that is not attached.
        tokens: the length of the prompt, which has a question for every eighth token, at most 96.
        cache: the format of the cache.
        selecting: who selects the tokens to attend to: the model's indexers, or nobody ("random").
        seed: of the prompt.
    """
    batch = make_batch(torch.Generator("cpu").manual_seed(seed), 1, tokens, far=True, room=demo_of(model).room)
    draws = torch.Generator("cpu").manual_seed(seed)
    model.eval()
    attach(model, cache=cache, wrap_layer=lambda _, layer: _at_random(layer, draws) if selecting == "random" else layer)
    try:
        with torch.no_grad():
            logits = model(input_ids=batch.tokens.to(model.device), use_cache=False).logits
    finally:
        detach(model)
    return float(batch.right(logits).float().mean())


def attention_recall(model: Any, *, tokens: int, compared: int = 2048, seed: int = 0) -> list[float]:
    """The share of dense attention's weight that each layer with an indexer selects, as `tamis inspect` computes it."""
    batch = make_batch(torch.Generator("cpu").manual_seed(seed), 1, tokens, room=demo_of(model).room)
    model.eval()
    inspection = inspect_model(model, batch.tokens[0].tolist(), cache="fp8", compared_queries=compared)
    return [layer["recall"] for layer in describe_layers(inspection) if "recall" in layer]


def _at_random(layer: Any, draws: torch.Generator) -> Any:
    return _RandomV4(layer, draws) if isinstance(layer, SparseV4) else _Random(layer, draws)


class _Random(SparseMLA):
    """A layer that selects at random among the visible tokens."""

    def __init__(self, layer: SparseMLA, draws: torch.Generator) -> None:
        super().__init__(layer.spec, backend=layer.backend)
        self._draws = draws

    def _select(self, call: IndexTopk, plan: object, known: object = None) -> Tensor:
        return _drawn(call, self._draws)


class _RandomV4(SparseV4):
    """The same for entries."""

    def __init__(self, layer: SparseV4, draws: torch.Generator) -> None:
        super().__init__(layer.spec, layer.weights, layer.cos_sin, eps=layer.eps, backend=layer.backend)
        self._draws = draws

    def _select(self, call: V4Call, queries: Rotated) -> Tensor:
        assert call.index_topk is not None
        return _drawn(call.index_topk, self._draws)


def _drawn(call: IndexTopk, draws: torch.Generator) -> Tensor:
    """Random positions in place of those that an indexer selects."""
    width = int(call.lengths.max())
    scores = torch.rand(len(call.lengths), width, generator=draws, dtype=torch.float32, device="cpu")
    return topk_positions(scores.to(call.lengths.device), call.lengths, call.k, backend=call.backend)
