"""A tiny DeepSeek-V4.1: its config, random weights, and its attention as a slow definition in float64.

The definition has no pages, steps or kernels: it computes all tokens of one request at once, pair by pair where that is
clearest. It was written from the behaviour of vLLM's and SGLang's models, which have no such definition to import.
"""

from dataclasses import dataclass
from typing import Any

import torch
from seeds import seeded
from torch import Tensor

from tamis import LayerSpec
from tamis.layers.v41_weights import V41Weights
from tamis.model.rope import Rope

CONFIG: dict[str, Any] = {
    "model_type": "deepseek_v41",
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "hidden_size": 48,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 6,
    "index_n_heads": 32,
    "index_head_dim": 16,
    "index_topk": 7,
    "compress_ratios": [0, 1, 1, 1, 2, 2, 2, 0],
    "kv_source_layer_ids": [1, 4],
    "index_source_layer_ids": [1, 3, 4, 5],
    "candidate_source_layer_id": 4,
    "candidate_topk_blocks": 3,
    "candidate_block_size": 4,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 256,
}
"""Layer 2 takes layer 1's selection of layer 1's entries, and layer 3 selects from them by itself. Layer 4 selects
candidate blocks, layer 5 selects within them, and layer 6 takes layer 5's selection. Layers 0 and 7 have windows
only."""


def checkpoint(config: dict[str, Any], layer: int) -> dict[str, Tensor]:
    """Random tensors of a layer's attention, under the checkpoint's names."""
    generator = seeded(100 + layer)
    spec = LayerSpec.from_hf(config, layer)
    hidden, rank, width, heads = config["hidden_size"], config["q_lora_rank"], spec.head_dim, spec.heads

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    def norm(size: int) -> Tensor:
        return torch.rand(size, generator=generator) + 0.5

    groups, low = config["o_groups"], config["o_lora_rank"]
    found = {
        "wq_a.weight": matrix(rank, hidden),
        "q_norm.weight": norm(rank),
        "wq_b.weight": 3 * matrix(heads * width, rank),
        "wkv.weight": matrix(width, hidden),
        "kv_norm.weight": norm(width),
        "attn_sink": torch.randn(heads, generator=generator),
        "wo_a.weight": matrix(groups * low, heads * width // groups),
        "wo_b.weight": matrix(hidden, groups * low),
    }
    if spec.kind == "indexed" and not spec.reuse_entries:
        found |= {"compressor.wkv.weight": matrix(width, hidden), "compressor.norm.weight": norm(width)}
        found |= {"indexer.wk.weight": matrix(spec.index_dim, width), "indexer.k_norm.weight": norm(spec.index_dim)}
        if spec.compress > 1:
            found["compressor.wgate.weight"] = 2 * matrix(width, hidden)
    if spec.kind == "indexed" and not spec.reuse_topk:
        found |= {"indexer.wq_b.weight": matrix(spec.index_heads * spec.index_dim, rank)}
        found |= {"indexer.weights_proj.weight": matrix(spec.index_heads, hidden)}
    return found


def weights_of(config: dict[str, Any], layer: int) -> V41Weights:
    return V41Weights.from_state_dict(checkpoint(config, layer), groups=config["o_groups"])


def table_of(config: dict[str, Any], layer: int, positions: int = 256) -> Tensor:
    spec = LayerSpec.from_hf(config, layer)
    return Rope.from_hf_v4(config, spec.rope_dim, compressed=spec.kind != "window").cos_sin_table(positions)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def turned(x: Tensor, angles: Tensor, sign: float = 1.0) -> Tensor:
    """The last columns of x rotated in pairs (2i, 2i+1), as complex numbers."""
    half = angles.shape[-1] // 2
    unit = torch.complex(angles[..., :half], sign * angles[..., half:])
    tail = torch.view_as_complex(x[..., -2 * half :].unflatten(-1, (half, 2)).contiguous())
    return torch.cat((x[..., : -2 * half], torch.view_as_real(tail * unit).flatten(-2)), -1)


@dataclass
class Shared:
    """What layers of one request share in the definition."""

    entries: Tensor | None = None
    """[entries, D] of the latest layer that made some."""
    keys: Tensor | None = None


class Definition:
    """The attention of one request's tokens, layer by layer."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.shared = config, Shared()

    def layer(self, number: int, hidden: Tensor, stored: "Stored | None" = None) -> "DefinedLayer":
        """Compute a layer up to its selection; layers must be asked for in order. `stored` replaces what was computed
        for the caches, for caches that round."""
        return DefinedLayer(self.config, number, hidden.double(), self.shared, stored)


@dataclass
class Stored:
    """What caches hold of one request and layer, dequantised."""

    raw: Tensor
    """[tokens, D]"""
    entries: Tensor | None
    """[entries, D]; None, like the keys, unless this layer makes them."""
    keys: Tensor | None


class DefinedLayer:
    """One layer for all tokens of a request."""

    def __init__(
        self, config: dict[str, Any], number: int, hidden: Tensor, shared: Shared, stored: Stored | None
    ) -> None:
        self.spec, self.config, self.hidden, self.shared = LayerSpec.from_hf(config, number), config, hidden, shared
        self.w = {name: tensor.double() for name, tensor in checkpoint(config, number).items()}
        self.table = table_of(config, number).double()
        self.low = normed(hidden @ self.w["wq_a.weight"].T, self.w["q_norm.weight"])
        self.ratio = self.spec.compress if self.spec.kind == "indexed" else 0
        if "compressor.wkv.weight" in self.w:
            self._make_entries()
        raw = normed(hidden @ self.w["wkv.weight"].T, self.w["kv_norm.weight"])
        self.raw = turned(raw, self.table[: len(hidden)])
        if stored is not None:
            self._replace(stored)
        if "indexer.wq_b.weight" in self.w:
            self.scores = self._scores()

    def _make_entries(self) -> None:
        values, count = self.hidden @ self.w["compressor.wkv.weight"].T, len(self.hidden) // self.ratio
        latents = torch.empty(count, values.shape[1], dtype=torch.float64)
        for entry in range(count):
            span = slice(entry * self.ratio, (entry + 1) * self.ratio)
            share = torch.ones(self.ratio, values.shape[1], dtype=torch.float64)
            if self.ratio > 1:
                share = (self.hidden[span] @ self.w["compressor.wgate.weight"].T).exp()
            latents[entry] = (values[span] * share / share.sum(0)).sum(0)
        latents = normed(latents, self.w["compressor.norm.weight"])
        angles = self.table[torch.arange(count) * self.ratio]
        self.shared.entries = turned(latents, angles)
        keys = normed(latents @ self.w["indexer.wk.weight"].T, self.w["indexer.k_norm.weight"])
        self.shared.keys = turned(keys, angles)

    def _replace(self, stored: Stored) -> None:
        """Take what the caches hold, which differs by no more than e4m3's rounding: 2**-4 of a value."""
        pairs = [("raw", self.raw, stored.raw)]
        if stored.entries is not None and stored.keys is not None:
            assert self.shared.entries is not None
            assert self.shared.keys is not None
            pairs += [("entries", self.shared.entries, stored.entries), ("keys", self.shared.keys, stored.keys)]
        for name, exact, held in pairs:
            assert (held - exact).norm() < 2**-4 * exact.norm(), name
            setattr(self if name == "raw" else self.shared, name, held.double())

    def _scores(self) -> Tensor:
        """[tokens, entries], -inf for entries that are not complete at the token."""
        tokens, spec = len(self.hidden), self.spec
        q = (self.low @ self.w["indexer.wq_b.weight"].T).view(tokens, spec.index_heads, spec.index_dim)
        q = turned(q, self.table[:tokens].unsqueeze(1))
        factors = self.hidden @ self.w["indexer.weights_proj.weight"].T
        assert self.shared.keys is not None
        scores = torch.einsum("thn,th->tn", torch.einsum("thd,nd->thn", q, self.shared.keys).relu(), factors)
        complete = (torch.arange(tokens) + 1) // self.ratio
        return scores.masked_fill(torch.arange(scores.shape[1]) >= complete.unsqueeze(1), -torch.inf)

    def output(self, chosen: list[list[int]]) -> Tensor:
        """[tokens, hidden], with the entries that each token attends to."""
        tokens, spec, w = len(self.hidden), self.spec, self.w
        q = (self.low @ w["wq_b.weight"].T).view(tokens, spec.heads, spec.head_dim)
        q = turned(q, self.table[:tokens].unsqueeze(1))
        out = torch.empty_like(q)
        for token in range(tokens):
            rows = self.raw[max(0, token + 1 - self.config["sliding_window"]) : token + 1]
            if self.ratio:
                assert self.shared.entries is not None
                rows = torch.cat((rows, self.shared.entries[chosen[token]]))
            logits = q[token] @ rows.T * spec.head_dim**-0.5
            weights = torch.cat((logits, w["attn_sink"].unsqueeze(1)), 1).softmax(1)[:, :-1]
            out[token] = weights @ rows
        out = turned(out, self.table[:tokens].unsqueeze(1), -1.0)
        groups = self.config["o_groups"]
        lower = w["wo_a.weight"].unflatten(0, (groups, -1))
        lowered = torch.einsum("tgd,grd->tgr", out.view(tokens, groups, -1), lower)
        return lowered.flatten(1) @ w["wo_b.weight"].T
