"""The weights of a DeepSeek-V4 attention layer, under the names of transformers or of the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from tamis import checks
from tamis.model.spec import LayerSpec
from tamis.ops import quantise_blocks
from tamis.ops.combine import check_sink
from tamis.ops.output import check_block_scales, check_tile

_CHECKPOINT_NAMES = {
    "wq_a.weight": "q_a_proj.weight",
    "q_norm.weight": "q_a_norm.weight",
    "wq_b.weight": "q_b_proj.weight",
    "wkv.weight": "kv_proj.weight",
    "attn_sink": "sinks",
    "wo_a.weight": "o_a_proj.weight",
    "wo_b.weight": "o_b_proj.weight",
    "indexer.wq_b.weight": "compressor.indexer.q_b_proj.weight",
    "indexer.weights_proj.weight": "compressor.indexer.scorer.weights_proj.weight",
}
_CHECKPOINT_COMPRESSOR_NAMES = {
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "ape": "position_bias",
    "norm.weight": "kv_norm.weight",
}


@dataclass(frozen=True, eq=False)
class CompressorWeights:
    """The weights of a KV compressor. C is the width of an entry, or twice that if spans overlap."""

    values: Tensor
    """[C, hidden]"""
    scores: Tensor
    """[C, hidden]"""
    bias: Tensor
    """[ratio, C]; row i is added to the scores of the i-th token of a span."""
    norm: Tensor
    """[width of an entry]"""

    def check(self, name: str, spec: LayerSpec, width: int, hidden: int) -> None:
        """Refuse shapes that do not fit the layer."""
        channels = width * (2 if spec.kind == "overlapping" else 1)
        for part in ("values", "scores"):
            checks.tensor(f"{name}.{part}", getattr(self, part), "C X", checks.FLOATS, C=channels, X=hidden)
        checks.tensor(f"{name}.bias", self.bias, "r C", checks.FLOATS, r=spec.compress, C=channels)
        checks.tensor(f"{name}.norm", self.norm, "D", checks.FLOATS, D=width)


@dataclass(frozen=True, eq=False)
class IndexerWeights:
    """The weights of the indexer of a layer with overlapping spans."""

    q: Tensor
    """[index heads * index dim, q rank]"""
    weights: Tensor
    """[index heads, hidden]"""
    compressor: CompressorWeights
    """The compressor that makes the index keys."""


@dataclass(frozen=True, eq=False)
class V4Weights:
    """The weights of one attention layer, for the heads of this rank. Matrices are [out, in]."""

    q_a: Tensor
    """[q rank, hidden]"""
    q_norm: Tensor
    """[q rank]"""
    q_b: Tensor
    """[H * D, q rank]"""
    kv: Tensor
    """[D, hidden]"""
    kv_norm: Tensor
    """[D]"""
    sink: Tensor
    """float32 [H]"""
    o_a: Tensor
    """[groups, o rank, H / groups * D]; e4m3 if there are `o_a_scales`."""
    o_b: Tensor
    """[hidden, groups * o rank]"""
    compressor: CompressorWeights | None = None
    indexer: IndexerWeights | None = None
    o_a_scales: Tensor | None = None
    """float32 [groups, o rank / tile (rounded up), H / groups * D / tile]. If given, attention's output is quantised in
    tiles of the same width, and the first output projection runs in FP8."""

    def check(self, spec: LayerSpec) -> None:
        """Refuse shapes that do not fit the layer, and weights on several devices."""
        checks.instance("spec", spec, LayerSpec)
        width, heads = spec.head_dim, spec.heads
        rank, hidden = checks.tensor("q_a", self.q_a, "R X", checks.FLOATS).values()
        checks.tensor("q_norm", self.q_norm, "R", checks.FLOATS, R=rank)
        checks.tensor("q_b", self.q_b, "N R", checks.FLOATS, N=heads * width, R=rank, remedy="[heads * width, q rank]")
        checks.tensor("kv", self.kv, "D X", checks.FLOATS, D=width, X=hidden)
        checks.tensor("kv_norm", self.kv_norm, "D", checks.FLOATS, D=width)
        stored = checks.FLOATS if self.o_a_scales is None else (torch.float8_e4m3fn,)
        groups = checks.tensor("o_a", self.o_a, "G O N", stored)
        if groups["G"] * groups["N"] != heads * width:
            raise checks.refuse("o_a", f"[groups, rank, {heads * width} / groups]", list(self.o_a.shape), "reshape it")
        checks.tensor("o_b", self.o_b, "X N", checks.FLOATS, X=hidden, N=groups["G"] * groups["O"])
        if self.o_a_scales is not None:
            tiles = checks.tensor("o_a_scales", self.o_a_scales, "G M N", (torch.float32,), G=groups["G"])["N"]
            if tiles == 0 or groups["N"] % tiles or width % (groups["N"] // tiles):
                expected = f"in tiles that divide a head of {width}"
                raise checks.refuse("o_a_scales", expected, list(self.o_a_scales.shape), "use with_fp8_output")
            tile = check_block_scales(self.o_a_scales, groups["O"], groups["G"], groups["N"], tiles, "o_a_scales")
            check_tile(tile, width)
        check_sink(self.sink, heads, self.kv.device)
        self._check_parts(spec, rank, hidden)
        checks.same_device(**self.named())

    @property
    def output_tile(self) -> int | None:
        """How many columns of attention's output share a scale; None if it is not quantised."""
        return None if self.o_a_scales is None else self.o_a.shape[2] // self.o_a_scales.shape[2]

    def named(self) -> dict[str, Tensor]:
        """All tensors by name, for example `indexer.compressor.bias`."""
        found: dict[str, Tensor] = {}
        for name in self.__dataclass_fields__:
            part = getattr(self, name)
            if isinstance(part, Tensor):
                found[name] = part
            elif isinstance(part, CompressorWeights):
                found |= {f"{name}.{own}": getattr(part, own) for own in part.__dataclass_fields__}
            elif isinstance(part, IndexerWeights):
                found |= {f"{name}.q": part.q, f"{name}.weights": part.weights}
                keys = part.compressor
                found |= {f"{name}.compressor.{own}": getattr(keys, own) for own in keys.__dataclass_fields__}
        return found

    def _check_parts(self, spec: LayerSpec, rank: int, hidden: int) -> None:
        # The compressor and the indexer of V4.1 are others, which `V41Weights` holds.
        wanted = {"compressor": spec.kind in ("overlapping", "plain"), "indexer": spec.kind == "overlapping"}
        for name, needed in wanted.items():
            if (getattr(self, name) is not None) != needed:
                expected = f"{'given' if needed else 'None'} for a layer of kind {spec.kind!r}"
                raise checks.refuse(f"weights.{name}", expected, type(getattr(self, name)).__name__, "match the spec")
        if self.compressor is not None:
            compressor = checks.instance("compressor", self.compressor, CompressorWeights)
            compressor.check("compressor", spec, spec.head_dim, hidden)
        if self.indexer is not None:
            indexer, size = checks.instance("indexer", self.indexer, IndexerWeights), spec.index_heads * spec.index_dim
            checks.tensor("indexer.q", indexer.q, "N R", checks.FLOATS, N=size, R=rank)
            checks.tensor("indexer.weights", indexer.weights, "H X", checks.FLOATS, H=spec.index_heads, X=hidden)
            keys = checks.instance("indexer.compressor", indexer.compressor, CompressorWeights)
            keys.check("indexer.compressor", spec, spec.index_dim, hidden)

    def with_fp8_output(self, tile: int = 128) -> Self:
        """The same weights with `o_a` in e4m3, with a power of two as the scale of each `tile` x `tile` block."""
        values, scales = quantise_blocks(self.o_a, tile=tile)
        return replace(self, o_a=values, o_a_scales=scales)

    def to(self, device: torch.device | str, dtype: torch.dtype) -> Self:
        """The same weights on another device, with matrices in another dtype. Norms, biases, sinks and FP8 matrices
        keep their dtype."""

        def matrix(weight: Tensor) -> Tensor:
            return weight.to(device, dtype)

        def compressor(weights: CompressorWeights | None) -> CompressorWeights | None:
            if weights is None:
                return None
            bias, norm = weights.bias.to(device), weights.norm.to(device)
            return CompressorWeights(matrix(weights.values), matrix(weights.scores), bias, norm)

        indexer = self.indexer
        if indexer is not None:
            keys = compressor(indexer.compressor)
            assert keys is not None
            indexer = IndexerWeights(matrix(indexer.q), matrix(indexer.weights), keys)
        return type(self)(
            matrix(self.q_a),
            self.q_norm.to(device),
            matrix(self.q_b),
            matrix(self.kv),
            self.kv_norm.to(device),
            self.sink.to(device),
            matrix(self.o_a) if self.o_a_scales is None else self.o_a.to(device),
            matrix(self.o_b),
            compressor(self.compressor),
            indexer,
            None if self.o_a_scales is None else self.o_a_scales.to(device),
        )

    @classmethod
    def from_state_dict(cls, tensors: Mapping[str, Tensor], *, groups: int, prefix: str = "") -> Self:
        """Read an attention module's tensors, named as in Hugging Face transformers or as in the original checkpoint.

        Args:
            tensors: unquantised tensors by name. The state dict of a whole model is accepted.
            groups: the number of groups of the output projection (`o_groups`).
            prefix: the prefix of the attention's names, such as `model.layers.0.self_attn.`.
        """
        checks.integer("groups", groups, low=1)
        checks.instance("prefix", prefix, str)
        if not isinstance(tensors, Mapping) or not all(isinstance(name, str) for name in tensors):
            expected = "a dictionary of tensors by name"
            raise checks.refuse_type("tensors", expected, checks.describe(tensors), "pass module.state_dict()")
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        found = {_renamed(name): value for name, value in own.items()}

        def get(name: str) -> Tensor:
            if name not in found:
                raise checks.refuse("tensors", f"with {prefix + name!r}", f"{len(own)} others", "check the prefix")
            return checks.dense(f"tensors[{prefix + name!r}]", found[name], checks.FLOATS)

        has = {part: any(name.startswith(part) for name in found) for part in ("compressor.", "compressor.indexer.")}
        compressor = _compressor(get, "compressor.") if has["compressor."] else None
        indexer = None
        if has["compressor.indexer."]:
            indexer = IndexerWeights(
                get("compressor.indexer.q_b_proj.weight"),
                get("compressor.indexer.scorer.weights_proj.weight"),
                _compressor(get, "compressor.indexer."),
            )
        return cls(
            get("q_a_proj.weight"),
            get("q_a_norm.weight"),
            get("q_b_proj.weight"),
            get("kv_proj.weight"),
            get("kv_norm.weight"),
            get("sinks").float(),
            _grouped(get("o_a_proj.weight"), groups),
            get("o_b_proj.weight"),
            compressor,
            indexer,
        )


def _grouped(weight: Tensor, groups: int) -> Tensor:
    """[groups * o rank, N] as [groups, o rank, N]."""
    if weight.dim() != 2 or weight.shape[0] % groups:
        expected = f"a divisor of the rows of o_a_proj, {list(weight.shape)}"
        raise checks.refuse("groups", expected, groups, "pass the config's o_groups")
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1])


def _compressor(get: Any, prefix: str) -> CompressorWeights:
    names = ("kv_proj.weight", "gate_proj.weight", "position_bias", "kv_norm.weight")
    return CompressorWeights(*(get(prefix + name) for name in names))


def _renamed(name: str) -> str:
    """The name in transformers of a tensor of the original checkpoint. Names of transformers are returned unchanged."""
    for ours, theirs in (("compressor.indexer.", "indexer.compressor."), ("compressor.", "compressor.")):
        rest = name.removeprefix(theirs)
        if rest != name and rest in _CHECKPOINT_COMPRESSOR_NAMES:
            return ours + _CHECKPOINT_COMPRESSOR_NAMES[rest]
    return _CHECKPOINT_NAMES.get(name, name)
