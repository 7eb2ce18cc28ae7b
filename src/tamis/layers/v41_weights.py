"""The weights of a DeepSeek-V4.1 attention layer, under the names of the checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from tamis import checks
from tamis.layers.v4_weights import V4Weights
from tamis.model.spec import LayerSpec


@dataclass(frozen=True, eq=False)
class LatentWeights:
    """The weights that make the latents of a layer's entries."""

    values: Tensor
    """[D, hidden]"""
    scores: Tensor | None
    """[D, hidden]; None for entries of one token, which need no pooling."""
    norm: Tensor
    """[D]"""


@dataclass(frozen=True, eq=False)
class V41IndexerWeights:
    """The weights of a layer's indexer."""

    q: Tensor
    """[index heads * index dim, q rank]"""
    weights: Tensor
    """[index heads, hidden]"""
    keys: Tensor | None = None
    """[index dim, D], from latents to index keys; None if the layer reads another's keys."""
    key_norm: Tensor | None = None
    """[index dim], given with `keys`."""


@dataclass(frozen=True, eq=False)
class V41Weights:
    """The weights of one attention layer, for the heads of this rank. Matrices are [out, in]."""

    attention: V4Weights
    """Projections, norms, sinks and the output projection, without a compressor and an indexer."""
    compressor: LatentWeights | None = None
    """Given for a layer that makes entries."""
    indexer: V41IndexerWeights | None = None
    """Given for a layer that selects."""

    def check(self, spec: LayerSpec) -> None:
        """Refuse shapes that do not fit the layer, and weights on several devices."""
        self.attention.check(spec)
        indexed = spec.kind == "indexed"
        for name, needed in (
            ("compressor", indexed and not spec.reuse_entries),
            ("indexer", indexed and not spec.reuse_topk),
        ):
            if (getattr(self, name) is not None) != needed:
                expected = f"{'given' if needed else 'None'} for this layer"
                remedy = "match the spec's kind, reuse_entries and reuse_topk"
                raise checks.refuse(f"weights.{name}", expected, type(getattr(self, name)).__name__, remedy)
        if self.compressor is not None:
            self._check_compressor(self.compressor, spec)
        if self.indexer is not None:
            self._check_indexer(self.indexer, spec)
        checks.same_device(**self.named())

    def _check_compressor(self, weights: LatentWeights, spec: LayerSpec) -> None:
        checks.instance("compressor", weights, LatentWeights)
        hidden, width = self.attention.kv.shape[1], spec.head_dim
        checks.tensor("compressor.values", weights.values, "D X", checks.FLOATS, D=width, X=hidden)
        if (weights.scores is None) != (spec.compress == 1):
            expected = "None for entries of one token, and given otherwise"
            raise checks.refuse(
                "compressor.scores", expected, checks.describe(weights.scores), "match the spec's ratio"
            )
        if weights.scores is not None:
            checks.tensor("compressor.scores", weights.scores, "D X", checks.FLOATS, D=width, X=hidden)
        checks.tensor("compressor.norm", weights.norm, "D", checks.FLOATS, D=width)

    def _check_indexer(self, weights: V41IndexerWeights, spec: LayerSpec) -> None:
        checks.instance("indexer", weights, V41IndexerWeights)
        rank, hidden = self.attention.q_a.shape
        size = spec.index_heads * spec.index_dim
        checks.tensor("indexer.q", weights.q, "N R", checks.FLOATS, N=size, R=rank)
        checks.tensor("indexer.weights", weights.weights, "H X", checks.FLOATS, H=spec.index_heads, X=hidden)
        for name, pattern in (("keys", "I D"), ("key_norm", "I")):
            value = getattr(weights, name)
            if (value is None) != spec.reuse_entries:
                expected = f"{'None' if spec.reuse_entries else 'given'} for this layer"
                raise checks.refuse(
                    f"indexer.{name}", expected, checks.describe(value), "layers with entries make keys"
                )
            if value is not None:
                sizes = {"I": spec.index_dim, "D": spec.head_dim} if name == "keys" else {"I": spec.index_dim}
                checks.tensor(f"indexer.{name}", value, pattern, checks.FLOATS, **sizes)  # type: ignore[arg-type]

    def named(self) -> dict[str, Tensor]:
        """All tensors by name, for example `compressor.values`."""
        found = self.attention.named()
        for name in ("compressor", "indexer"):
            part = getattr(self, name)
            if part is not None:
                owned = {own: getattr(part, own) for own in part.__dataclass_fields__}
                found |= {f"{name}.{own}": value for own, value in owned.items() if value is not None}
        return found

    def with_fp8_output(self, tile: int = 128) -> Self:
        """The same weights with the first output projection in e4m3; see `V4Weights.with_fp8_output`."""
        return replace(self, attention=self.attention.with_fp8_output(tile))

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """The same weights on another device, with matrices in another dtype. Norms, sinks and FP8 matrices keep their
        dtype."""

        def moved(part: Any) -> Any:
            if part is None:
                return None
            held = {name: getattr(part, name) for name in part.__dataclass_fields__}
            tensors = {name: tensor for name, tensor in held.items() if tensor is not None}
            return replace(
                part, **{n: t.to(device, dtype) if t.dim() == 2 else t.to(device) for n, t in tensors.items()}
            )

        parts = {"compressor": moved(self.compressor), "indexer": moved(self.indexer)}
        return replace(self, attention=self.attention.to(device, dtype), **parts)

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor], *, groups: int, prefix: str = "") -> Self:
        """Read an attention module's tensors, named as in the checkpoint (`wq_a.weight`, `compressor.wkv.weight`).

        Args:
            tensors: unquantised tensors by name. The state dict of a whole model is accepted.
            groups: the number of groups of the output projection (`o_groups`).
            prefix: the prefix of the attention's names, such as `layers.0.attn.`.
        """
        checks.instance("prefix", prefix, str)
        if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
            expected = "a dictionary of tensors by name"
            raise checks.refuse_type("tensors", expected, checks.describe(tensors), "pass module.state_dict()")
        parts = tuple(prefix + part for part in ("compressor.", "indexer."))
        rest = {name: value for name, value in tensors.items() if not name.startswith(parts)}
        get = _reader(tensors, prefix)
        compressor, indexer = None, None
        if any(name.startswith(parts[0]) for name in tensors):
            gate = f"{prefix}compressor.wgate.weight" in tensors
            scores = get("compressor.wgate.weight") if gate else None
            compressor = LatentWeights(get("compressor.wkv.weight"), scores, get("compressor.norm.weight"))
        if any(name.startswith(parts[1]) for name in tensors):
            made = f"{prefix}indexer.wk.weight" in tensors
            keys = (get("indexer.wk.weight"), get("indexer.k_norm.weight")) if made else (None, None)
            indexer = V41IndexerWeights(get("indexer.wq_b.weight"), get("indexer.weights_proj.weight"), *keys)
        return cls(V4Weights.from_state_dict(rest, groups=groups, prefix=prefix), compressor, indexer)


def _reader(tensors: Mapping[str, Tensor], prefix: str) -> Callable[[str], Tensor]:
    def get(name: str) -> Tensor:
        if prefix + name not in tensors:
            raise checks.refuse("tensors", f"with {prefix + name!r}", f"{len(tensors)} others", "check the prefix")
        return checks.dense(f"tensors[{prefix + name!r}]", tensors[prefix + name], checks.FLOATS)

    return get
