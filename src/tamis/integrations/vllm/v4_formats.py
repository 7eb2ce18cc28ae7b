"""The cache format that a DeepSeek-V4 layer of an engine declares, and which entries a layer of its kind attends to.

A tensor's dtype does not determine its format, because engines sometimes hold e4m3 rows as bytes. And the presence of a
top-k buffer does not determine that a layer reads it, because all layers hold the buffer that the layers with an
indexer fill.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import Layout, plain_fp8, rows, v4_fp8
from tamis.cache.paged import PagedCache
from tamis.integrations.vllm.checked_cache import CheckedCache

E4M3 = torch.float8_e4m3fn
_LATENT, _ROPE = 448, 64
_ONE_BYTE = (torch.uint8, torch.int8, E4M3)
_CHOSEN, EVERY = 4, 128
"""vLLM's compression ratios: of layers whose indexer chooses entries, and of layers that attend to all of them."""


def declared_dtype(layer: Any, storage: Tensor) -> torch.dtype:
    """The layer's `kv_cache_torch_dtype`: uint8 means packed rows, e4m3 rows under one scale. Without this attribute it
    is derived from the tensor."""
    found: torch.dtype | None = getattr(layer, "kv_cache_torch_dtype", None)
    if found is not None:
        return found
    bare_bytes = storage.dtype in _ONE_BYTE and storage.shape[-1] == _LATENT + _ROPE
    return E4M3 if bare_bytes else storage.dtype


@cache
def _layout(dtype: torch.dtype) -> Layout:
    if dtype in checks.FLOATS:
        return rows(dtype, latent=_LATENT, rope=_ROPE)
    return plain_fp8(latent=_LATENT, rope=_ROPE) if dtype == E4M3 else v4_fp8()


def layout_of(name: str, storage: Tensor, layer: Any) -> Layout:
    """The format that the layer declares for this cache. A tensor that cannot have this format is refused."""
    declared = declared_dtype(layer, storage)
    layout = _layout(declared)
    allowed = _ONE_BYTE if layout.element.itemsize == 1 else (declared,)
    if storage.dtype not in allowed or storage.shape[-1] != layout.row_elements:
        expected = f"{checks.dtype_name(declared)} rows of {layout.row_elements}, as layer.kv_cache_torch_dtype says"
        received = f"{checks.dtype_name(storage.dtype)} rows of {storage.shape[-1]}"
        raise checks.refuse(name, expected, received, "pass the layer's own cache")
    return layout


class _Checked(NamedTuple):
    """A cache of a layer that passed the checks of `wrap`."""

    cache: CheckedCache
    declared: torch.dtype
    scale: float


def wrap(name: str, storage: Tensor, layer: Any) -> PagedCache:
    """The layer's cache in the format that the layer declares, with the layer's scale if all rows share one.

    The layer remembers that it was checked.
    """
    checked: dict[str, _Checked] = vars(layer).setdefault("_tamis_v4_caches", {})
    known, declared = checked.get(name), declared_dtype(layer, storage)
    scale = e4m3_scales(layer)[1] if declared == E4M3 else 1.0
    if known is not None and known.declared == declared and known.scale == scale:
        cache = known.cache.find(storage)
        if cache is not None:
            return cache
    found = PagedCache.wrap(storage, layout_of(name, storage, layer), scale=scale)
    if isinstance(found.scale, float) and found.storage.dtype == storage.dtype:
        checked[name] = _Checked(CheckedCache(storage, found), declared, found.scale)
    return found


def e4m3_scales(layer: Any) -> tuple[float, float]:
    """What the e4m3 numbers of a layer's queries and of its cache are multiplied with.

    vLLM's layers hold them in the two factors that it passes to FlashInfer: softmax scale * query scale * cache scale
    before the softmax, and the cache's scale after it. Other layers may have `_q_scale_float` and `_k_scale_float`,
    which are 1 where they are missing.
    """
    before, after = (getattr(layer, f"_flashinfer_fp8_bmm{number}_scale", None) for number in (1, 2))
    if before is None or after is None:
        return getattr(layer, "_q_scale_float", 1.0), getattr(layer, "_k_scale_float", 1.0)
    return before / (layer.scale * after), after


def sees_every_entry(layer: Any, record: Any) -> bool:
    """Whether a layer attends to all of its entries, which the record then lists. For ratios other than vLLM's, it does
    if the record lists them."""
    if layer.compress_ratio in (_CHOSEN, EVERY):
        return bool(layer.compress_ratio == EVERY)
    # Records of V4.1, whose layers all have an indexer, have no such lists.
    names = ("c128a_global_decode_topk_indices", "c128a_prefill_topk_indices")
    return any(getattr(record, name, None) is not None for name in names)


def listed(name: str, rows: Tensor | None) -> Tensor:
    """Rows of entries, which the record must have for a layer that attends to all of them."""
    if rows is None:
        raise checks.refuse("attn_metadata", f"a record with {name}", None, "build it for this layer's ratio")
    return rows
