"""How many bytes a model's caches take: per token, per request, and how much fits into a memory.

Latent rows, entries and index keys are the same for all heads, so every rank of tensor parallelism holds all of them.
Data parallelism divides requests among ranks, and context parallelism divides a request's tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, compressor_state, index_fp8, index_mxfp4, rows, v4_fp8, v32_fp8
from tamis.cache.v4_caches import STATE_PAGE_SIZES
from tamis.model import hf_config
from tamis.model.spec import LayerKind, LayerSpec

RowFormat = Literal["fp8", "bf16", "fp16", "fp32"]
IndexFormat = Literal["fp8", "mxfp4"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_WINDOW_PAGE = 64
_PAGES = {"tokens": 64, "v4": 256}
"""Tokens per page if not given: those of V3.2's caches, and of V4's entries and index keys."""


@dataclass(frozen=True)
class CachePart:
    """One cache of one layer."""

    what: str
    layout: Layout
    tokens_per_row: int
    """Tokens that a row stands for: 4 or 128 for V4's entries, those of a group for pooled keys, 1 otherwise."""
    page_size: int
    """Tokens that a page stands for."""
    kept: int | None = None
    """How many of a request's last tokens the cache holds; None: all of them."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, its padding included."""
        return self.layout.page_bytes(self.page_size // self.tokens_per_row)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes by which the cache grows per token; 0 if it holds a bounded number of tokens."""
        return Fraction(self.page_bytes, self.page_size) if self.kept is None else Fraction(0)

    def bytes_per_request(self, context: int) -> int:
        """Bytes of a request with this many tokens, in whole pages.

        A bounded number of tokens may begin anywhere in a page, so it can touch one page more than it fills.
        """
        pages = ceil_div(context, self.page_size)
        if self.kept is not None:
            pages = min(pages, ceil_div(self.kept - 1, self.page_size) + 1)
        return pages * self.page_bytes


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose caches are alike."""

    kind: LayerKind
    count: int
    parts: tuple[CachePart, ...]


@dataclass(frozen=True)
class CacheSizes:
    """The caches of a model on one rank."""

    groups: tuple[LayerGroup, ...]
    heads: int
    """Query heads on one rank."""

    @property
    def layers(self) -> int:
        """The number of layers with caches."""
        return sum(group.count for group in self.groups)

    @property
    def bytes_per_token(self) -> Fraction:
        """Bytes by which all layers grow per token."""
        return sum((group.count * part.bytes_per_token for group in self.groups for part in group.parts), Fraction(0))

    def bytes_per_request(self, context: int) -> int:
        """Bytes of a request with this many tokens, in all layers."""
        checks.integer("context", context, low=1, high=checks.INT64_MAX)
        return sum(group.count * part.bytes_per_request(context) for group in self.groups for part in group.parts)

    def requests_that_fit(self, memory: int, context: int) -> int:
        """How many requests with this many tokens each fit into a number of bytes."""
        return checks.integer("memory", memory, low=0, high=checks.INT64_MAX) // self.bytes_per_request(context)

    def tokens_that_fit(self, memory: int) -> int:
        """The longest context of one request that fits into a number of bytes."""
        checks.integer("memory", memory, low=0, high=checks.INT64_MAX)
        low, high = 0, 1
        while self.bytes_per_request(high) <= memory:
            low, high = high, 2 * high
            if high > checks.INT64_MAX:  # nothing grows with the context
                break
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.bytes_per_request(middle) <= memory else (low, middle)
        return low


def layer_caches(
    spec: LayerSpec, *, cache: RowFormat = "fp8", index: IndexFormat = "fp8", page_size: int | None = None
) -> tuple[CachePart, ...]:
    """The caches of one layer.

    Args:
        spec: the layer.
        cache: the format of latent rows, raw tokens and entries. fp8 is the family's own: `v32-fp8` or `v4-fp8`.
        index: the format of index keys.
        page_size: tokens per page, in V4 those of entries and index keys; 64, or 256 in V4, if not given.
    """
    checks.option("cache", cache, ("fp8", *_DTYPES))
    checks.option("index", index, ("fp8", "mxfp4"))
    size = _PAGES["tokens" if spec.kind == "tokens" else "v4"] if page_size is None else page_size
    checks.integer("page_size", size, low=1)
    return (_token_caches if spec.kind == "tokens" else _v4_caches)(spec, _row_layout(spec, cache), index, size)


def _row_layout(spec: LayerSpec, cache: RowFormat) -> Layout:
    v4, latent, rope = spec.kind != "tokens", spec.latent_dim, spec.rope_dim
    if cache == "fp8":
        return v4_fp8(latent=latent, rope=rope) if v4 else v32_fp8(latent=latent, rope=rope)
    return rows(_DTYPES[cache], latent=latent, rope=rope, name=f"{'v4' if v4 else 'v32'}-{cache}")


def _index_keys(spec: LayerSpec, index: IndexFormat, tokens: int, size: int) -> CachePart:
    return CachePart("index keys", (index_fp8 if index == "fp8" else index_mxfp4)(dim=spec.index_dim), tokens, size)


def _token_caches(spec: LayerSpec, layout: Layout, index: IndexFormat, size: int) -> tuple[CachePart, ...]:
    latent = () if spec.reuse_rows else (CachePart("latent rows", layout, 1, size),)
    if spec.reuse_topk or not spec.index_dim:
        return latent
    if size % spec.kpool:
        raise checks.refuse("page_size", f"a multiple of kpool={spec.kpool}", size)
    keys = _index_keys(spec, index, spec.kpool, size)
    if spec.kpool == 1:
        return (*latent, keys)
    single = compressor_state(dim=spec.index_dim, overlapping=False)
    return (*latent, keys, CachePart("index state", single, 1, STATE_PAGE_SIZES["plain"], spec.kpool))


def _v4_caches(spec: LayerSpec, layout: Layout, index: IndexFormat, size: int) -> tuple[CachePart, ...]:
    assert spec.window is not None  # as LayerSpec has checked
    window = CachePart(f"window of {spec.window}", layout, 1, _WINDOW_PAGE, spec.window)
    if spec.kind == "window" or spec.reuse_entries:
        return (window,)
    if size % spec.compress:
        raise checks.refuse("page_size", f"a multiple of the ratio {spec.compress}", size)
    parts = [window, CachePart(f"entries of {spec.compress} tokens", layout, spec.compress, size)]
    overlapping = spec.kind == "overlapping"
    span, page = spec.compress * (2 if overlapping else 1), STATE_PAGE_SIZES[spec.kind]

    def state(what: str, dim: int) -> CachePart:
        return CachePart(what, compressor_state(dim=dim, overlapping=overlapping), 1, page, span)

    if spec.kind != "plain":
        parts.append(_index_keys(spec, index, spec.compress, size))
    if spec.compress > 1 or spec.kind != "indexed":  # an entry of one token needs no state
        parts.append(state("compressor state", spec.head_dim))
    if overlapping:
        parts.append(state("index state", spec.index_dim))
    return tuple(parts)


def cache_sizes(
    config: Any,
    *,
    cache: RowFormat = "fp8",
    index: IndexFormat = "fp8",
    page_size: int | None = None,
    tensor_parallel: int = 1,
    mtp_layers: int = 0,
) -> CacheSizes:
    """The caches of a model, from its Hugging Face config. The states of linear attention are not among them.

    Args:
        config: the config (object or dict) of a model of the V3.2 or the V4 family.
        cache: see `layer_caches`, as for `index` and `page_size`.
        index: the format of index keys.
        page_size: tokens per page.
        tensor_parallel: the number of ranks that share the heads. It changes `heads` and no cache.
        mtp_layers: how many speculative (MTP) layers are served as well.
    """
    fields: Mapping[str, Any] = hf_config.fields_of(config)
    layers = hf_config.whole(fields, "num_hidden_layers")
    checks.integer("config.num_hidden_layers", layers, low=1, high=hf_config.MOST_LAYERS)
    checks.integer("mtp_layers", mtp_layers, low=0, high=layers)
    found: dict[tuple[LayerKind, tuple[CachePart, ...]], int] = {}
    heads = 0
    for number in range(layers + mtp_layers):
        if hf_config.is_linear(fields, number):
            continue
        spec = LayerSpec.from_hf(fields, number, tensor_parallel=tensor_parallel)
        heads = spec.heads
        key = (spec.kind, layer_caches(spec, cache=cache, index=index, page_size=page_size))
        found[key] = found.get(key, 0) + 1
    return CacheSizes(tuple(LayerGroup(kind, count, parts) for (kind, parts), count in found.items()), heads)
