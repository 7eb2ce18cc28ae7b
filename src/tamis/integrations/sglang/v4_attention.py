"""Attention of DeepSeek-V4's and V4.1's layers over SGLang's pages, in one call of tamis.

This module does not import SGLang.

The window and the compressed entries are two selections under one softmax. Decode, extend, target-verify and
draft-extend steps differ only in the slots that SGLang's metadata lists, so they are one function. Pages are read where
they lie: prefills need no workspace of dequantised rows. Heads are not padded in the call; where the query is padded,
the result has the same shape, with zeros for the padding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tamis import checks
from tamis.cache.layout import v4_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.choice import choose
from tamis.model.spec import LayerSpec
from tamis.ops import attend

_WINDOW = 128
_ENTRIES = {
    1: ("c1_sparse_page_indices", "c1_sparse_topk_lengths"),
    2: ("c2_sparse_page_indices", "c2_sparse_topk_lengths"),
    4: ("c4_sparse_page_indices", "c4_sparse_topk_lengths"),
    128: ("c128_page_indices", "c128_topk_lengths_clamp1"),
}
"""The names of slots and lengths in SGLang's metadata, by a layer's compression ratio."""


def describe(heads: int, device: torch.device | str, ratios: Sequence[int] = ()) -> str:
    """What is served, for the log. A device that no kernel of tamis runs on is refused, with every reason.

    Args:
        heads: the number of heads that a rank has.
        device: where the pool is.
        ratios: the compression ratios of the model's layers; entries of 1 or 2 tokens are V4.1's.
    """
    layout = v4_fp8()
    spec = LayerSpec(heads, layout.latent, layout.rope, window=_WINDOW, kind="window")
    kernels = choose(spec, device, layout=layout).name
    model = "DeepSeek-V4.1" if {1, 2}.intersection(ratios) else "DeepSeek-V4"
    return f"{model}: fp8 rows of {layout.row_bytes} bytes, {heads} heads, kernels {kernels}"


class Pages:
    """The caches of SGLang's pool, as tamis describes them. A description is made once per buffer."""

    def __init__(self, pool: Any) -> None:
        """Args: pool, SGLang's `DeepSeekV4TokenToKVPool`."""
        self._pool = pool
        self._known: dict[tuple[int, torch.Size, int], PagedCache] = {}

    def window(self, layer_id: int) -> PagedCache:
        """The raw tokens of a layer's window."""
        # The name of the page size differs between versions of SGLang.
        page_size = getattr(self._pool, "get_swa_key_page_size", None)
        size = self._pool.swa_window_size if page_size is None else page_size()
        return self._described(self._pool.get_swa_key_buffer_radix(layer_id), size)

    def entries(self, layer_id: int) -> PagedCache:
        """A layer's compressed entries."""
        size = self._pool.get_extra_key_page_size(layer_id)
        return self._described(self._pool.get_extra_key_buffer(layer_id), size)

    def _described(self, buffer: Tensor, page_size: int) -> PagedCache:
        key = (buffer.data_ptr(), buffer.shape, page_size)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = wrap_pages(buffer, page_size)
        return found


def wrap_pages(buffer: Tensor, page_size: int) -> PagedCache:
    """Describe pages of V4 rows: a tensor [pages, bytes of a page], which SGLang pads to a multiple of 576 bytes."""
    layout = v4_fp8()
    used = page_size * layout.row_bytes
    if buffer.dim() != 2 or buffer.shape[1] < used:
        expected = f"[pages, at least {used} bytes] for pages of {page_size} rows"
        raise checks.refuse("buffer", expected, list(buffer.shape), "pass a buffer of SGLang's pool")
    return PagedCache.wrap(buffer[:, :used].unflatten(1, (page_size, layout.row_bytes)), layout)


def selected(pages: Pages, core: Any, layer_id: int, ratio: int, tokens: int) -> list[Selection]:
    """What each token of a layer attends to: its window and, unless the ratio is 0, its entries.

    Args:
        pages: the caches.
        core: SGLang's `DSV4AttnMetadata` of this step.
        layer_id: the layer's number.
        ratio: the layer's compression ratio; 0 for a window only.
        tokens: rows of the query. SGLang may pad the query or the metadata; rows without metadata select nothing.
    """
    found = [_selection(pages.window(layer_id), core.swa_page_indices, core.swa_topk_lengths, tokens)]
    if ratio == 0:
        return found
    if ratio not in _ENTRIES:
        raise checks.refuse("compress_ratio", f"0 or one of {sorted(_ENTRIES)}", ratio, "this version is not supported")
    slots, lengths = (getattr(core, name, None) for name in _ENTRIES[ratio])
    if slots is None or lengths is None:
        name = _ENTRIES[ratio][0]
        raise checks.refuse("metadata", f"with {name} for a layer of ratio {ratio}", None, "build it for this ratio")
    return [*found, _selection(pages.entries(layer_id), slots, lengths, tokens)]


def _selection(cache: PagedCache, slots: Tensor, lengths: Tensor, tokens: int) -> Selection:
    # Lengths are at least 1 even for rows without entries; the slot there is -1, which attention skips.
    return Selection(cache, _matched(slots, tokens), _matched(lengths, tokens))


def _matched(rows: Tensor, count: int) -> Tensor:
    """As many rows as the query has. Rows that are missing become zeros, so their length says that they are empty."""
    missing = count - len(rows)
    if missing <= 0:
        return rows[:count] if missing else rows
    return functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))


def attend_layer(
    q: Tensor, selections: list[Selection], *, heads: int, scale: float, value_dim: int, sink: Tensor | None
) -> Tensor:
    """Attention of a layer: [T, heads of q, value_dim], with zeros for heads past `heads`.

    Args:
        q: [T, H, 512], rotated; heads past `heads` are padding, which is not read.
        selections: what each token attends to.
        heads: the number of heads that this rank has.
        scale: softmax scale.
        value_dim: the width of a value.
        sink: [H or more], one extra logit per head.
    """
    if not 1 <= heads <= q.shape[1]:
        raise checks.refuse("q", f"with at least the layer's {heads} heads", q.shape[1], "pass the layer's query")
    real = sink if sink is None or len(sink) == heads else sink[:heads]
    if heads == q.shape[1]:
        return attend(q, selections, scale=scale, value_dim=value_dim, sink=real).out
    out = q.new_empty((*q.shape[:2], value_dim), dtype=q.dtype)
    attend(q[:, :heads], selections, scale=scale, value_dim=value_dim, sink=real, out=out[:, :heads])
    out[:, heads:].zero_()
    return out
