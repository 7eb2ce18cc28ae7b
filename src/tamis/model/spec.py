"""`LayerSpec`: the sizes and options of one attention layer, as plain numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from tamis import checks
from tamis.model import hf_config
from tamis.model.rope import Rope

if TYPE_CHECKING:
    from tamis.model.v41 import Candidates

LayerKind = Literal["tokens", "window", "overlapping", "plain", "indexed"]
"""The rows that a layer attends to. "tokens": tokens that an indexer selects (V3.2). The others are V4's, with a window
of the last raw tokens: "window" has nothing else, "overlapping" adds entries of overlapping spans that an indexer
selects (C4A), "plain" adds all entries of plain spans (C128A), and "indexed" adds entries of plain spans that an
indexer selects (V4.1)."""
_V4_KINDS: dict[str, LayerKind] = {
    "sliding_attention": "window",
    "compressed_sparse_attention": "overlapping",
    "heavily_compressed_attention": "plain",
}


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer on this rank: its heads, the widths of a cached row, and how many rows it selects."""

    heads: int
    latent_dim: int = 512
    rope_dim: int = 64
    value_dim: int = 512
    scale: float = 1.0
    """Softmax scale. The default suits no real model: use `from_hf`, or pass the model's."""
    topk: int | None = None
    """Positions, or entries in V4, that are selected per token; None for layers that select none."""
    index_heads: int = 0
    index_dim: int = 0
    reuse_topk: bool = False
    """Whether the layer attends to the positions that an earlier layer selected, without an indexer of its own."""
    window: int | None = None
    """Raw tokens in the window (V4), the query's own included."""
    compress: int = 1
    """Tokens that one compressed entry stands for (V4: 1, 4 or 128; V4.1: 1 or 2)."""
    sink: bool = False
    kind: LayerKind = "tokens"
    reuse_rows: bool = False
    """Whether the layer attends to the rows that an earlier layer wrote, and writes none of its own."""
    kpool: int = 1
    """Tokens per pooled index key. The indexer selects `topk / kpool` groups of so many tokens, and every token also
    attends to the last tokens, which are in no whole group (GLM-5.3-Flash)."""
    reuse_entries: bool = False
    """Whether the layer reads entries that an earlier layer makes, without a compressor of its own (V4.1)."""
    candidates: "Candidates | None" = None
    """How the layer's indexer selects in two levels (V4.1); None if it selects from all entries alone."""

    def __post_init__(self) -> None:
        """Refuse numbers that do not describe a layer."""
        checks.integer("heads", self.heads, low=1, high=128)
        checks.integer("latent_dim", self.latent_dim, low=1)
        checks.integer("rope_dim", self.rope_dim, low=0)
        checks.integer("value_dim", self.value_dim, low=1, high=self.latent_dim + self.rope_dim)
        checks.positive_number("scale", self.scale)
        for name in ("topk", "window"):
            if getattr(self, name) is not None:
                checks.integer(name, getattr(self, name), low=1)
        checks.integer("compress", self.compress, low=1)
        checks.integer("index_heads", self.index_heads, low=0)
        checks.integer("index_dim", self.index_dim, low=0)
        checks.flag("reuse_topk", self.reuse_topk)
        checks.flag("reuse_rows", self.reuse_rows)
        checks.flag("sink", self.sink)
        if self.topk is None and self.window is None:
            raise checks.refuse("topk", "given for a layer without a window", None, "pass topk= or window=")
        checks.option("kind", self.kind, get_args(LayerKind))
        checks.integer("kpool", self.kpool, low=1)
        if self.kpool > 1 and (self.kind != "tokens" or self.topk is None or self.topk % self.kpool):
            expected = f"a multiple of kpool={self.kpool}, in a layer of kind 'tokens'"
            raise checks.refuse("topk", expected, f"{self.topk} of kind {self.kind!r}", "pooled keys select groups")
        if self.kind != "tokens" and self.window is None:
            raise checks.refuse("window", f"given for a layer of kind {self.kind!r}", None, "pass window=")
        if self.kind == "overlapping" and (self.topk is None or not self.index_heads or not self.index_dim):
            expected = "given, with index_heads and index_dim, for a layer of kind 'overlapping'"
            raise checks.refuse("topk", expected, self.topk, "its entries are selected by an indexer")
        self._check_sharing()

    def _check_sharing(self) -> None:
        indexed = self.kind == "indexed"
        checks.flag("reuse_entries", self.reuse_entries)
        if self.reuse_rows and self.kind != "tokens":
            expected = f"False for a layer of kind {self.kind!r}"
            raise checks.refuse("reuse_rows", expected, True, "such a layer has a window of its own")
        if indexed and (self.topk is None or not self.index_heads or not self.index_dim):
            expected = "given, with index_heads and index_dim, for a layer of kind 'indexed'"
            raise checks.refuse("topk", expected, self.topk, "an indexer selects its entries")
        if self.reuse_entries and not indexed:
            expected = f"False for a layer of kind {self.kind!r}"
            raise checks.refuse("reuse_entries", expected, True, "pass kind='indexed'")
        if indexed and self.reuse_topk and not self.reuse_entries:
            remedy = "a layer that makes entries selects from them"
            raise checks.refuse("reuse_topk", "False for a layer that makes entries", True, remedy)
        if self.candidates is not None:
            from tamis.model.v41 import Candidates  # which other models need not load

            checks.instance("candidates", self.candidates, Candidates)
            if not indexed or self.reuse_topk:
                expected = "None for a layer without an indexer of V4.1"
                raise checks.refuse("candidates", expected, self.candidates, "only layers that select have candidates")

    @property
    def head_dim(self) -> int:
        """The width of a query head and of a cached row."""
        return self.latent_dim + self.rope_dim

    @property
    def columns(self) -> int | None:
        """The most positions that a token attends to, which is the width of a selection: `topk`, and with pooled index
        keys the tokens of an incomplete group besides. None for layers that select nothing."""
        return None if self.topk is None else self.topk + self.kpool - 1

    @property
    def index_topk(self) -> int | None:
        """How many index keys are selected per token: `topk`, or the groups of that many tokens."""
        return None if self.topk is None else self.topk // self.kpool

    @classmethod
    def from_hf(cls, config: Any, layer: int = 0, *, tensor_parallel: int = 1) -> Self:
        """From a Hugging Face config (object or dict) of the V3.2 family (V3.2, GLM-5.x, A.X-K2, Hy4, Mistral Large 4)
        or the V4 family (V4, V4.1).

        Args:
            config: the model's config, or one that has it as its `text_config`.
            layer: index of the layer. Layers differ in whether they reuse a selection and in how they compress.
            tensor_parallel: the number of ranks that share the heads.
        """
        fields = hf_config.fields_of(config)
        checks.integer("layer", layer, low=0)
        checks.integer("tensor_parallel", tensor_parallel, low=1)
        total = hf_config.whole(fields, "num_attention_heads")
        heads, rest = divmod(total, tensor_parallel)
        if rest:
            raise checks.refuse("tensor_parallel", f"a divisor of num_attention_heads={total}", tensor_parallel)
        if hf_config.is_v32(fields):
            return cls._v32(fields, layer, heads)
        if hf_config.listed(fields, "kv_source_layer_ids"):
            return cls._v41(fields, layer, heads)
        return cls._v4(fields, layer, heads)

    @classmethod
    def _v32(cls, fields: Mapping[str, Any], layer: int, heads: int) -> Self:
        latent = hf_config.whole(fields, "kv_lora_rank")
        rope = hf_config.v32_rope_width(fields)
        query = hf_config.whole(fields, "qk_nope_head_dim") + rope
        index_heads, index_dim = _index_sizes(fields)
        return cls(
            heads,
            latent,
            rope if hf_config.has_rope(fields, layer) else 0,
            latent,
            # Without a rope, settings of one have no say in the scale either.
            Rope.from_hf(fields, rope).softmax_scale(query) if rope else query**-0.5,
            topk=hf_config.whole(fields, "index_topk"),
            index_heads=index_heads,
            index_dim=index_dim,
            reuse_topk=_reuses_topk(fields, layer),
            sink=fields.get("model_type") == hf_config.HY4,
            reuse_rows=_reuses_rows(fields, layer),
            kpool=_kpool(fields, layer),
        )

    @classmethod
    def _v4(cls, fields: Mapping[str, Any], layer: int, heads: int) -> Self:
        width, rope = hf_config.whole(fields, "head_dim"), hf_config.rope_width(fields)
        if rope >= width:
            raise checks.refuse("config.qk_rope_head_dim", f"below head_dim, {width}", rope, "fix the config")
        kind, ratio = _v4_kind(fields, layer)
        indexed = kind == "overlapping"
        return cls(
            heads,
            width - rope,
            rope,
            width,
            width**-0.5,
            topk=hf_config.whole(fields, "index_topk") if indexed else None,
            index_heads=hf_config.whole(fields, "index_n_heads") if indexed else 0,
            index_dim=hf_config.whole(fields, "index_head_dim") if indexed else 0,
            window=hf_config.whole(fields, "sliding_window"),
            compress=ratio,
            sink=True,
            kind=kind,
        )

    @classmethod
    def _v41(cls, fields: Mapping[str, Any], layer: int, heads: int) -> Self:
        from tamis.model import v41

        width, rope = hf_config.whole(fields, "head_dim"), hf_config.rope_width(fields)
        if rope >= width:
            raise checks.refuse("config.qk_rope_head_dim", f"below head_dim, {width}", rope, "fix the config")
        found = v41.sharing(fields, layer)
        shape = (heads, width - rope, rope, width, width**-0.5)
        window = hf_config.whole(fields, "sliding_window")
        if found.ratio == 0:
            return cls(*shape, window=window, sink=True, kind="window")
        return cls(
            *shape,
            topk=hf_config.whole(fields, "index_topk"),
            index_heads=hf_config.whole(fields, "index_n_heads"),
            index_dim=hf_config.whole(fields, "index_head_dim"),
            reuse_topk=found.selection_of != layer,
            window=window,
            compress=found.ratio,
            sink=True,
            kind="indexed",
            reuse_entries=found.entries_of != layer,
            candidates=found.candidates,
        )


def _index_sizes(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Heads and width of an indexer of the V3.2 family. A config may leave out both, for a layer that is given its
    positions, but not one of them."""
    names = ("index_n_heads", "index_head_dim")
    low, default = (1, None) if any(fields.get(name) for name in names) else (0, 0)
    heads, dim = (hf_config.whole(fields, name, low=low, default=default) for name in names)
    return heads, dim


def _kpool(fields: Mapping[str, Any], layer: int) -> int:
    """Tokens per pooled index key. Layers of linear attention (KDA) are refused."""
    if hf_config.is_linear(fields, layer):
        remedy = "its state is the model's own; ask for a layer of indexed attention"
        raise checks.refuse(f"config.layer_types[{layer}]", "a layer with a latent cache", "'linear_attention'", remedy)
    kpool = hf_config.whole(fields, "index_kpool", default=16 if fields.get("model_type") == hf_config.GLM5_NEXT else 1)
    tail = fields.get("index_kpool_always_select_tail")
    if kpool > 1 and tail is not None and not checks.flag("config.index_kpool_always_select_tail", tail):
        remedy = "without the tail, a token before the first whole group would attend to nothing"
        raise checks.refuse("config.index_kpool_always_select_tail", "True", tail, remedy)
    return kpool


_KINDS = ("full", "shared")
_PATTERN = ("F", "S", *_KINDS)


def _reuses_topk(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer attends to an earlier layer's selection. A list or pattern overrides the frequency rule, by which
    every layer selects unless the config says more; in Hy4, every fourth."""
    if layer >= hf_config.whole(fields, "num_hidden_layers", low=0, default=layer + 1):
        return False  # speculative (MTP) layers always own an indexer
    kinds = hf_config.listed(fields, "indexer_types")
    if kinds:
        return layer < len(kinds) and checks.option(f"config.indexer_types[{layer}]", kinds[layer], _KINDS) == "shared"
    pattern = hf_config.listed(fields, "index_topk_pattern")
    if pattern:
        if layer >= len(pattern):
            return False
        return checks.option(f"config.index_topk_pattern[{layer}]", pattern[layer], _PATTERN) in ("S", "shared")
    usual = 4 if fields.get("model_type") == hf_config.HY4 else 1
    frequency = hf_config.whole(fields, "index_topk_freq", low=0, default=usual) or 1
    offset = hf_config.whole(fields, "index_skip_topk_offset", low=0, default=2)
    return max(layer - offset + 1, 0) % frequency != 0


def _reuses_rows(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer attends to an earlier layer's rows."""
    sources = hf_config.listed(fields, "kv_source_layers")
    if sources is None or layer >= len(sources):
        return False
    return checks.integer(f"config.kv_source_layers[{layer}]", sources[layer], low=0, high=layer) != layer


def _v4_kind(fields: Mapping[str, Any], layer: int) -> tuple[LayerKind, int]:
    """Kind and ratio of a layer. Speculative (MTP) layers have only a window."""
    if layer >= hf_config.whole(fields, "num_hidden_layers", low=0, default=layer + 1):
        return "window", 1
    ratios = hf_config.listed(fields, "compress_ratios")
    if ratios is not None:
        ratio = checks.integer(f"config.compress_ratios[{layer}]", ratios[layer], low=0) if layer < len(ratios) else 0
        known: dict[int, LayerKind] = {0: "window", 1: "window", 4: "overlapping", 128: "plain"}
        if ratio not in known:
            raise checks.refuse(f"config.compress_ratios[{layer}]", "0, 4 or 128", ratio, "this layer kind is unknown")
        return known[ratio], max(1, ratio)
    names = hf_config.listed(fields, "layer_types")
    if names is None:
        raise checks.refuse("config", "one with 'layer_types'", "none", "this is not a sparse-MLA model config")
    name = names[layer] if layer < len(names) else "sliding_attention"
    kind = _V4_KINDS[checks.option(f"config.layer_types[{layer}]", name, tuple(_V4_KINDS))]
    if kind == "window":
        return kind, 1
    rates = hf_config.group(fields, "compress_rates")
    if name not in rates:
        expected = f"one with {name!r}"
        raise checks.refuse("config.compress_rates", expected, list(rates), "it says how many tokens an entry has")
    return kind, hf_config.whole(rates, name)
