"""What one attention layer computes, as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from tamis import checks
from tamis.rope import Rope

LayerKind = Literal["tokens", "window", "overlapping", "plain"]
"""What a layer attends to: tokens that an indexer selects (V3.2); or a window of the last raw tokens (V4), alone, with
entries pooled from overlapping spans of which an indexer selects some (C4A), or with all entries of plain spans
(C128A)."""
_V4_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "overlapping",
    "heavily_compressed_attention": "plain",
}


@dataclass(frozen=True)
class LayerSpec:
    """One layer: widths of a cached row, how many of its columns are the value, heads on this rank, and selection."""

    heads: int
    latent_dim: int = 512
    rope_dim: int = 64
    value_dim: int = 512
    scale: float = 1.0
    """Softmax scale. There is no safe default for real models: use `from_hf`, or pass the model's."""
    topk: int | None = None
    """How many positions are selected per token; None where a layer has only a window."""
    index_heads: int = 0
    index_dim: int = 0
    reuse_topk: bool = False
    """The layer attends to the positions an earlier layer selected and runs no indexer of its own."""
    window: int | None = None
    """How many raw tokens, the query's own included, are attended besides compressed entries (V4)."""
    compress: int = 1
    """How many tokens one compressed entry stands for (V4: 1, 4 or 128)."""
    sink: bool = False
    kind: LayerKind = "tokens"

    def __post_init__(self) -> None:
        """Refuse numbers that describe no layer."""
        checks.integer("heads", self.heads, low=1, high=128)
        checks.integer("latent_dim", self.latent_dim, low=1)
        checks.integer("rope_dim", self.rope_dim, low=0)
        checks.integer("value_dim", self.value_dim, low=1, high=self.latent_dim + self.rope_dim)
        checks.positive_number("scale", self.scale)
        for name in ("topk", "window"):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), low=1)
        checks.integer("compress", self.compress, low=1)
        if self.topk is None and self.window is None:
            raise checks.refuse("topk", "given for a layer without a window", None, "pass topk= or window=")
        checks.option("kind", self.kind, get_args(LayerKind))
        if self.kind != "tokens" and self.window is None:
            raise checks.refuse("window", f"given for a layer of kind {self.kind!r}", None, "pass window=")
        if self.kind == "overlapping" and (self.topk is None or not self.index_heads or not self.index_dim):
            expected = "given, with index_heads and index_dim, for a layer of kind 'overlapping'"
            raise checks.refuse("topk", expected, self.topk, "its entries are selected by an indexer")

    @property
    def head_dim(self) -> int:
        """Width of a query head and of a cached row."""
        return self.latent_dim + self.rope_dim

    @classmethod
    def from_hf(cls, config: Any, layer: int = 0, *, tensor_parallel: int = 1) -> Self:
        """From a Hugging Face config (object or dict) of the V3.2 family (V3.2, GLM-5.x) or the V4 family.

        Args:
            config: the model's config.
            layer: index of the layer; layers differ in whether they share top-k and in how they compress.
            tensor_parallel: over how many ranks the heads are split.
        """
        fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        checks.integer("layer", layer, low=0)
        heads, rest = divmod(
            _need(fields, "num_attention_heads"), checks.integer("tensor_parallel", tensor_parallel, low=1)
        )
        if rest:
            raise checks.refuse(
                "tensor_parallel", "a divisor of num_attention_heads", tensor_parallel, "choose another size"
            )
        if "kv_lora_rank" in fields and fields.get("kv_lora_rank"):
            return cls._v32(fields, layer, heads)
        return cls._v4(fields, layer, heads)

    @classmethod
    def _v32(cls, fields: Mapping[str, Any], layer: int, heads: int) -> Self:
        latent, rope = _need(fields, "kv_lora_rank"), int(fields.get("qk_rope_head_dim") or 0)
        query = _need(fields, "qk_nope_head_dim") + rope
        return cls(
            heads,
            latent,
            rope,
            latent,
            Rope.from_hf(fields, rope).softmax_scale(query),
            topk=_need(fields, "index_topk"),
            index_heads=int(fields.get("index_n_heads") or 0),
            index_dim=int(fields.get("index_head_dim") or 0),
            reuse_topk=_reuses_topk(fields, layer),
        )

    @classmethod
    def _v4(cls, fields: Mapping[str, Any], layer: int, heads: int) -> Self:
        width = _need(fields, "head_dim")
        rope = int(fields.get("qk_rope_head_dim") or width * fields.get("partial_rotary_factor", 0.125))
        kind, ratio = _v4_kind(fields, layer)
        indexed = kind == "overlapping"
        return cls(
            heads,
            width - rope,
            rope,
            width,
            width**-0.5,
            topk=_need(fields, "index_topk") if indexed else None,
            index_heads=_need(fields, "index_n_heads") if indexed else 0,
            index_dim=_need(fields, "index_head_dim") if indexed else 0,
            window=_need(fields, "sliding_window"),
            compress=ratio,
            sink=True,
            kind=kind,
        )


def _need(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if value is None:
        raise checks.refuse("config", f"one with {name!r}", "none", "this is not a sparse-MLA model config")
    return int(value)


_KINDS = ("full", "shared")


def _reuses_topk(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer attends to an earlier layer's selection. A list or a pattern wins over the frequency rule."""
    if layer >= int(fields.get("num_hidden_layers") or layer + 1):
        return False  # speculative (MTP) layers always own an indexer
    kinds = fields.get("indexer_types")
    if kinds:
        return layer < len(kinds) and checks.option(f"indexer_types[{layer}]", kinds[layer], _KINDS) == "shared"
    pattern = fields.get("index_topk_pattern")
    if pattern:
        return layer < len(pattern) and pattern[layer] == "S"
    frequency = int(fields.get("index_topk_freq") or 1)
    offset = int(fields.get("index_skip_topk_offset", 2))
    return max(layer - offset + 1, 0) % frequency != 0


def _v4_kind(fields: Mapping[str, Any], layer: int) -> tuple[LayerKind, int]:
    """Kind and ratio of a layer; speculative (MTP) layers have a window only."""
    if layer >= int(fields.get("num_hidden_layers") or layer + 1):
        return "window", 1
    ratios = fields.get("compress_ratios")
    if ratios is not None:
        ratio = int(ratios[layer]) if layer < len(ratios) else 0
        known: dict[int, LayerKind] = {0: "window", 1: "window", 4: "overlapping", 128: "plain"}
        if ratio not in known:
            raise checks.refuse(f"compress_ratios[{layer}]", "0, 4 or 128", ratio, "this layer kind is unknown")
        return known[ratio], max(1, ratio)
    names = _need_list(fields, "layer_types")
    name = names[layer] if layer < len(names) else "sliding_attention"
    if name not in _V4_KINDS:
        expected = f"one of {', '.join(_V4_KINDS)}"
        raise checks.refuse(f"layer_types[{layer}]", expected, repr(name), "this layer kind is unknown")
    kind = _V4_KINDS[name]
    if kind == "window":
        return kind, 1
    rates = fields.get("compress_rates") or {}
    if name not in rates:
        raise checks.refuse("compress_rates", f"one with {name!r}", list(rates), "it says how many tokens an entry has")
    return kind, int(rates[name])


def _need_list(fields: Mapping[str, Any], name: str) -> list[Any]:
    value = fields.get(name)
    if not isinstance(value, list | tuple):
        raise checks.refuse("config", f"one with {name!r}", "none", "this is not a sparse-MLA model config")
    return list(value)
