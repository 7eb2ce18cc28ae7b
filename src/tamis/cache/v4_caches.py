"""`V4Caches`: the caches of one DeepSeek-V4 layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch

from tamis import checks
from tamis.cache.layout import Layout, compressor_state, named
from tamis.cache.paged import PagedCache
from tamis.model.recipe import IndexRecipe
from tamis.model.spec import LayerKind, LayerSpec

STATE_PAGE_SIZES: Mapping[LayerKind, int] = {"overlapping": 4, "plain": 8, "indexed": 8}
"""Tokens per page of compressor state, by the kind of the layer."""


@dataclass(frozen=True, eq=False)
class V4Caches:
    """The caches of one layer. Every layer has a window; compressed layers also have entries and state, and layers with
    overlapping spans have index keys. In V4.1 several layers read the entries and index keys of one."""

    window: PagedCache
    """Raw tokens."""
    entries: PagedCache | None = None
    """Compressed entries."""
    state: PagedCache | None = None
    """The state that the compressor of entries carries from token to token."""
    index: PagedCache | None = None
    """Index keys, one per entry."""
    index_state: PagedCache | None = None
    """The state that the compressor of index keys carries from token to token."""

    @classmethod
    def allocate(
        cls,
        spec: LayerSpec,
        *,
        pages: int,
        window_pages: int,
        state_pages: int,
        page_size: int = 256,
        window_page_size: int = 64,
        state_page_size: int | None = None,
        layout: str | Layout = "v4-fp8",
        index_layout: str | Layout = "index-fp8",
        hadamard: bool = False,
        device: torch.device | str = "cpu",
        source: "V4Caches | None" = None,
    ) -> Self:
        """Zeroed caches for a layer, in pages of the sizes that a `V4Plan` is made for.

        Args:
            spec: the layer.
            pages: the number of pages of entries (and index keys).
            window_pages: the number of pages of raw tokens.
            state_pages: the number of pages of compressor state.
            page_size: the number of tokens that a page of entries stands for.
            window_page_size: tokens per page of the window.
            state_page_size: tokens per page of state; 4 for overlapping spans and 8 for plain ones if not given.
            layout: the format of raw tokens and entries.
            index_layout: the format of index keys.
            hadamard: whether index keys, and the queries that are compared with them, are multiplied by the Hadamard
                matrix. Scores stay the same, and the quantisation error gets smaller.
            device: where the caches are.
            source: the caches of the layer whose entries this one reads, for a spec with `reuse_entries` (V4.1). Only
                a window is allocated then.
        """
        checks.instance("spec", spec, LayerSpec)
        checks.flag("hadamard", hadamard)
        layout, index_layout = named(layout), named(index_layout)
        sizes = {"pages": pages, "window_pages": window_pages, "state_pages": state_pages, "page_size": page_size}
        sizes |= {"window_page_size": window_page_size}
        sizes |= {} if state_page_size is None else {"state_page_size": state_page_size}
        for name, size in sizes.items():
            checks.integer(name, size, low=1)
        window = PagedCache(layout, window_pages, window_page_size, device)
        if spec.reuse_entries != (source is not None):
            expected = "given for a layer that reads another's entries" if spec.reuse_entries else "None for this layer"
            raise checks.refuse("source", expected, checks.describe(source), "see LayerSpec.reuse_entries")
        if source is not None:
            checks.instance("source", source, V4Caches)
            return cls(window, source.entries, index=source.index)
        if spec.kind == "window":
            return cls(window)
        entries_per_page, rest = divmod(checks.integer("page_size", page_size, low=1), spec.compress)
        if rest:
            raise checks.refuse("page_size", f"a multiple of the ratio {spec.compress}", page_size)
        overlapping = spec.kind == "overlapping"
        rows = state_page_size or STATE_PAGE_SIZES[spec.kind]

        def state(dim: int) -> PagedCache:
            return PagedCache(compressor_state(dim=dim, overlapping=overlapping), state_pages, rows, device)

        entries = PagedCache(layout, pages, entries_per_page, device)
        if spec.kind == "plain":
            return cls(window, entries, state(spec.head_dim))
        recipe = IndexRecipe.of_v4(spec.rope_dim, hadamard=hadamard)
        recipe.check_width(spec.index_dim, "spec.index_dim: width")
        index = PagedCache(index_layout, pages, entries_per_page, device, recipe=recipe)
        if spec.kind == "indexed":
            return cls(window, entries, state(spec.head_dim) if spec.compress > 1 else None, index)
        return cls(window, entries, state(spec.head_dim), index, state(spec.index_dim))
