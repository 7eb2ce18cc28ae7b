"""Unattached Hugging Face models whose caches round: the expected results of an attached model with a quantised cache.

A format only adds rounding, so the rows that the model itself writes to its cache are rounded here with torch's e4m3
and none of the library's code. Positions are taken from the attached model, since two positions with almost equal
scores may be swapped by the last bit of a float32. How far these positions are from the highest scores, after the
rounding of index keys and queries, is returned as a separate number.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import gcd
from typing import Any

import pytest
import torch
from hf_indexers import index_rows
from hf_models import transformers
from torch import Tensor

from tamis.layers.mla import SparseMLA
from tamis.layers.v4 import SparseV4


def bf16(x: Tensor) -> Tensor:
    return x.bfloat16().float()


def e4m3(x: Tensor, tile: int) -> Tensor:
    """Round x to e4m3 with the smallest power-of-two scale per tile that avoids overflow beyond 448."""
    tiles = x.float().unflatten(-1, (-1, tile))
    scale = torch.exp2((tiles.abs().amax(-1, keepdim=True).double() / 448).clamp_min(1e-30).log2().ceil()).float()
    return ((tiles / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def hadamard(x: Tensor) -> Tensor:
    """Multiply by the orthonormal Hadamard matrix of Sylvester's construction, which is its own inverse."""
    matrix = torch.ones(1, 1)
    while len(matrix) < x.shape[-1]:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]]))
    return x.float() @ matrix * len(matrix) ** -0.5


class RoundedCache(transformers.DynamicCache):
    """A cache that rounds rows, compressed entries and V4's index keys as a format of `attach` does."""

    def __init__(self, config: Any, kind: str) -> None:
        super().__init__(config=config)
        self.kind = kind
        self.v4 = "compress_rates" in config.to_dict()
        self.rope = config.qk_rope_head_dim
        """Columns of V4's rows; the others come in two parts."""
        for layer in self.layers:
            if hasattr(layer, "update_compressor_states"):
                layer.update_compressor_states = self._rounding_entries(layer.update_compressor_states)

    def _rounding_entries(self, update: Any) -> Any:
        return lambda name, entries: update(
            name, self.keys(entries) if name == "indexer" else self.rows(entries, self.rope)
        )

    def rows(self, x: Tensor, rope_dim: int) -> Tensor:
        """The latent part in tiles (V4: rounded to bf16 first), the rope in bf16."""
        if self.kind != "fp8":
            return x if self.kind == "fp32" else bf16(x).to(x.dtype)
        latent, rope = x.split([x.shape[-1] - rope_dim, rope_dim], dim=-1)
        tile = gcd(latent.shape[-1], 64 if self.v4 else 128)
        return torch.cat((e4m3(bf16(latent) if self.v4 else latent, tile), bf16(rope)), dim=-1).to(x.dtype)

    def keys(self, x: Tensor) -> Tensor:
        """One scale per key; beside bf16 rows they stay as they are."""
        return e4m3(bf16(x), x.shape[-1]).to(x.dtype) if self.kind == "fp8" else x

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """V4 has one tensor for both; the others have the latent part for keys and the rope for values."""
        if keys is values:
            rounded = self.rows(keys, self.rope)
            return super().update(rounded, rounded, layer_idx, *args, **kwargs)
        both = self.rows(torch.cat((keys, values), dim=-1), values.shape[-1])
        return super().update(*both.split([keys.shape[-1], values.shape[-1]], dim=-1), layer_idx, *args, **kwargs)


@contextmanager
def collected(places: Sequence[Any], name: str) -> Iterator[list[Tensor]]:
    """Collects what the functions of this name return, in the order of their calls."""
    found: list[Tensor] = []

    def recording(function: Any) -> Any:
        def record(*args: Any) -> Tensor:
            found.append(function(*args))
            return found[-1]

        return record

    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            patch.setattr(place, name, recording(getattr(place, name)))
        yield found


def recorded_selections() -> AbstractContextManager[list[Tensor]]:
    """Collects the selections of attached models, layer by layer."""
    return collected((SparseMLA, SparseV4), "_select")


@torch.no_grad()
def rounded_logits(model: Any, ids: Tensor, kind: str, selections: list[Tensor]) -> tuple[Tensor, float]:
    """Logits of an untouched model with rounded rows and given selections, one for each of its indexers; and by how
    much a position was preferred to another of a higher score, at worst, in units of the token's largest score."""
    lacks: list[float] = []
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    hooks = []
    for indexer, selection in zip(indexers, selections, strict=True):
        chosen = selection.view(*ids.shape, -1)
        if hasattr(indexer, "scorer"):
            hooks.append(indexer.scorer.register_forward_hook(_judge_entries(chosen, indexer.compress_rate, lacks)))
            hooks.append(indexer.register_forward_hook(lambda *_, chosen=chosen: chosen.long()))
        elif hasattr(indexer, "index_kpool"):
            hooks.append(indexer.register_forward_hook(_judge_groups(chosen, kind, lacks), with_kwargs=True))
        else:
            hooks.append(indexer.register_forward_hook(_judge_tokens(chosen, kind, lacks), with_kwargs=True))
    try:
        found = model(ids, past_key_values=RoundedCache(model.config.get_text_config(), kind)).logits
    finally:
        for hook in hooks:
            hook.remove()
    assert len(lacks) == len(indexers)
    return found, max(lacks)


def _judge_tokens(chosen: Tensor, kind: str, lacks: list[float]) -> Any:
    def hook(indexer: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        lacks.append(_lack(_token_scores(indexer, kind, *args, **kwargs), 1, chosen))
        return chosen.masked_fill(chosen < 0, chosen.shape[1] - 1)  # short rows name the last token, which is masked

    return hook


def _judge_groups(chosen: Tensor, kind: str, lacks: list[float]) -> Any:
    def hook(indexer: Any, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        size = indexer.index_kpool
        lacks.append(_lack(_group_scores(indexer, kind, **kwargs), size, chosen))
        inside = torch.where(chosen.unsqueeze(-1) < 0, -1, chosen.unsqueeze(-1) * size + torch.arange(size))
        seen = torch.arange(1, chosen.shape[1] + 1).unsqueeze(1)
        tail = seen // size * size + torch.arange(size - 1)
        tail = torch.where(tail < seen, tail, -1).expand(len(chosen), -1, -1)
        return torch.cat((inside.flatten(-2), tail), dim=-1).int()

    return hook


def _judge_entries(chosen: Tensor, ratio: int, lacks: list[float]) -> Any:
    return lambda scorer, args, scores: lacks.append(_lack(scores, ratio, chosen))


def _lack(scores: Tensor, ratio: int, chosen: Tensor) -> float:
    """By how much the best visible row left out exceeds the worst one chosen."""
    seen = torch.arange(scores.shape[-1]) < (torch.arange(scores.shape[1]).unsqueeze(1) + 1) // ratio
    taken = torch.zeros(*scores.shape[:2], scores.shape[-1] + 1, dtype=torch.bool)
    taken = taken.scatter(-1, chosen.long() % taken.shape[-1], True)[..., :-1]  # -1 is the column that is cut off
    assert bool((taken <= seen).all())
    assert torch.equal(taken.sum(-1), seen.sum(-1).clamp_max(chosen.shape[-1]).expand(len(scores), -1))
    best_left = scores.masked_fill(taken | ~seen, -torch.inf).amax(-1)
    worst_taken = scores.masked_fill(~taken, torch.inf).amin(-1)
    size = scores.abs().masked_fill(~seen, 0.0).amax(-1)
    return float(((best_left - worst_taken) / size.clamp_min(1e-30)).amax())


def _token_scores(indexer: Any, kind: str, hidden_states: Tensor, *args: Any, **_: Any) -> Tensor:
    """The scores of all pairs of tokens in models without compression, with keys and queries as FP8 leaves them."""
    q, k = (x.float() for x in index_rows(indexer, hidden_states, *args))
    if kind == "fp8":
        q, k = (e4m3(bf16(hadamard(bf16(x))), indexer.head_dim) for x in (q, k))
    weights = indexer.weights_proj(hidden_states).float()
    return torch.einsum("bsh,bsht->bst", weights, torch.einsum("bshd,btd->bsht", q, k).relu())


def _group_scores(indexer: Any, kind: str, hidden_states: Tensor, q_resid: Tensor, **_: Any) -> Tensor:
    """GLM-5.3-Flash's scores of all whole groups of tokens, with their keys and the queries as FP8 leaves them."""
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, indexer.head_dim)).float()
    groups = hidden_states.shape[1] // indexer.index_kpool
    k = indexer.k_norm(indexer.wk(hidden_states)).float()
    gates = torch.nn.functional.linear(hidden_states, indexer.index_kpool_compress_gate).float()
    k, gates = (x[:, : groups * indexer.index_kpool].unflatten(1, (groups, -1)) for x in (k, gates))
    k = ((gates + indexer.index_kpool_compress_ape.float()).softmax(2) * k).sum(2)
    if kind == "fp8":
        q, k = (e4m3(bf16(hadamard(bf16(x))), indexer.head_dim) for x in (q, k))
    weights = indexer.weights_proj(hidden_states).float()
    return torch.einsum("bsh,bsht->bst", weights, torch.einsum("bshd,btd->bsht", q, k).relu())
