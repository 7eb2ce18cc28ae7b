"""Which byte format the rows of a call's caches have, and the caches in it.

FlashMLA tells formats apart by the width of q and by the bytes of a row. Rows of 528 bytes are V3.2's without rope if
`kv_format="V32_NO_ROPE"` says so, and otherwise DeepSeek-V4.1's.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import Layout, plain_fp8, rows, v4_fp8, v32_fp8
from tamis.cache.paged import PagedCache
from tamis.integrations import _arguments
from tamis.integrations.flash_mla.metadata import check_flags

E4M3 = torch.float8_e4m3fn

PACKED = {"V32": v32_fp8(), "V32_NO_ROPE": v32_fp8(rope=0), "V4": v4_fp8()}
"""The packed FP8 formats by FlashMLA's names."""

V41 = {"V41": 528, "V41_FP4": 288}
"""Bytes of a row in the formats of DeepSeek-V4.1, which are not served."""

_USUAL = {layout.width: layout for layout in (PACKED["V32"], PACKED["V4"])}
"""The packed format of each width of q, unless `kv_format` names another."""


class RowFormat(NamedTuple):
    """How the rows of both caches of a call are stored."""

    packed: bool
    """Whether they are FP8 rows (`is_fp8_kvcache`)."""
    kv_format: str | None
    q_scale: float | Tensor = 1.0
    """The factor of an FP8 q (`descale_q`)."""
    scale: float | Tensor = 1.0
    """The factor of plain FP8 rows (`descale_k`), which an FP8 q goes with."""

    def wrap(self, name: str, storage: Tensor, q: Tensor) -> PagedCache:
        """A cache tensor [NB, BS, 1, C] as pages; errors name the argument."""
        allowed = _arguments.ONE_BYTE if self.packed else checks.FLOATS
        if isinstance(storage, Tensor) and storage.dtype not in allowed:
            expected = f"{' or '.join(checks.dtype_name(d) for d in allowed)} with is_fp8_kvcache={self.packed}"
            remedy = "is_fp8_kvcache is True exactly for FP8 rows"
            raise checks.refuse_type(name, expected, checks.describe(storage), remedy)
        layout = self._layout(name, storage, q)
        remedy = f"queries of width {q.shape[-1]} need rows of {layout.row_elements}"
        checks.tensor(name, storage, "NB BS 1 C", allowed, device=q.device, remedy=remedy, C=layout.row_elements)
        return _arguments.wrap_pages(name, storage, layout, self.scale)

    def _layout(self, name: str, storage: object, q: Tensor) -> Layout:
        width = q.shape[-1]
        if not self.packed:
            return plain_rows(storage.dtype if isinstance(storage, Tensor) else torch.bfloat16, width)
        if q.dtype == E4M3:
            return plain_fp8_rows(width)
        if width not in _USUAL:
            expected = f"{' or '.join(str(w) for w in _USUAL)} wide with is_fp8_kvcache"
            raise checks.refuse("q", expected, width, "use an unquantised cache")
        if self.kv_format is not None:
            return PACKED[self.kv_format]
        layout = _USUAL[width]
        row_bytes = storage.shape[-1] if isinstance(storage, Tensor) and storage.dim() else 0
        if width == 512 and row_bytes in V41.values():
            raise checks.refuse(
                name,
                f"of rows of {layout.row_bytes} bytes for queries of width {width}",
                f"rows of {row_bytes} bytes",
                "without kv_format these are DeepSeek-V4.1's, which FlashMLA's SM100 kernels alone read; pass "
                "kv_format='V32_NO_ROPE' if they are V3.2's rows without rope (528 bytes)",
            )
        return layout


def row_format(
    q: Tensor, k_cache: object, is_fp8_kvcache: bool | None, kv_format: str | None, descale_q: object, descale_k: object
) -> RowFormat:
    """The format that a call names, with every argument about it checked."""
    if is_fp8_kvcache is None:
        # FlashMLA infers this from indices, since its sparse kernels read FP8 rows alone. The dtype says the same
        # wherever FlashMLA has a kernel, and unquantised rows work in sparse mode too.
        packed = isinstance(k_cache, Tensor) and k_cache.dtype in _arguments.ONE_BYTE
    else:
        check_flags(is_fp8_kvcache=is_fp8_kvcache)
        packed = is_fp8_kvcache
    if kv_format is not None:
        _check_kv_format(kv_format, q, packed)
    if q.dtype != E4M3:
        for name, value in (("descale_q", descale_q), ("descale_k", descale_k)):
            if value is not None:
                remedy = "packed rows bring their own scales; other caches have none"
                raise checks.refuse(name, "None unless q is float8_e4m3fn", checks.describe(value), remedy)
        return RowFormat(packed, kv_format)
    if not packed:
        remedy = "convert q, or keep both in FP8"
        raise checks.refuse_type("q", "bfloat16 or float16 or float32 over an unquantised cache", q.dtype, remedy)
    factors = (_factor("descale_q", descale_q, q.device), _factor("descale_k", descale_k, q.device))
    return RowFormat(packed, None, *factors)


@lru_cache(64)
def plain_rows(dtype: torch.dtype, width: int) -> Layout:
    """The layout of unquantised rows. Building one takes as long as some launches, so it is kept."""
    latent = _latent(width)
    return rows(dtype, latent=latent, rope=width - latent)


@lru_cache(64)
def plain_fp8_rows(width: int) -> Layout:
    """The layout of e4m3 rows that share one factor."""
    latent = _latent(width)
    return plain_fp8(latent=latent, rope=width - latent)


def _latent(width: int) -> int:
    """The latent part of a row. The rope part is known for the row widths of the two model families."""
    return {576: 512, 512: 448}.get(width, width)


def _check_kv_format(kv_format: str, q: Tensor, packed: bool) -> None:
    checks.option("kv_format", kv_format, (*PACKED, *V41))
    if kv_format in V41:
        reason = f"{kv_format} is a format of DeepSeek-V4.1, which FlashMLA's SM100 kernels alone read"
        raise checks.refuse("kv_format", f"one of {', '.join(PACKED)}", repr(kv_format), reason)
    layout = PACKED[kv_format]
    if not packed or q.dtype == E4M3:
        remedy = "it tells packed rows apart, which have scales of their own and are attended to by 16-bit queries"
        raise checks.refuse("kv_format", "None unless the cache holds packed FP8 rows", repr(kv_format), remedy)
    if q.shape[-1] != layout.width:
        fitting = " or ".join(name for name, one in PACKED.items() if one.width == q.shape[-1])
        expected = f"{fitting or 'None'} for queries of width {q.shape[-1]}"
        raise checks.refuse("kv_format", expected, repr(kv_format), f"{kv_format} rows are {layout.width} wide")


def _factor(name: str, value: object, device: torch.device) -> float | Tensor:
    if value is None:
        raise checks.refuse(name, "given with an FP8 q", None, "pass one float32 factor; 1.0 if nothing was scaled")
    factor = checks.scale_factor(name, value)
    if isinstance(factor, Tensor):
        checks.no_gradient(**{name: factor})
        if factor.device != device:
            raise checks.refuse(name, f"on {device} like q", f"a tensor on {factor.device}", "keep it with q")
    return factor
