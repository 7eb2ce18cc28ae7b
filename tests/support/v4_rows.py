"""V4 caches of plain rows, 512 numbers each in bf16 or in e4m3 under one scale, as vLLM's kernels write them.

Bytes and their values come from rules in numpy that share no code with the library. Pages lie as vLLM lays them: with
those of other layers between them.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from byte_formats import MAGNITUDES
from torch import Tensor
from v4_standin import PAGE, SCALE, WINDOW_PAGE, V4Step, layer_of

from tamis import PagedCache
from tamis.cache.layout import named, plain_fp8

E4M3 = torch.float8_e4m3fn
KINDS = ("bf16", "fp8")
ROW_DTYPES = {"bf16": torch.bfloat16, "fp8": E4M3}
Q_SCALE, KV_SCALE = 0.05, 0.021
BEFORE, BETWEEN = 512, 1536
"""Bytes before the first page and between two pages."""
_CODES = np.array([*MAGNITUDES, np.nan])
_VALUES = np.concatenate([_CODES, -_CODES])


def bf16_bits(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The nearest bf16 numbers, ties to even, as uint16."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def e4m3_codes(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The nearest e4m3 numbers, ties to the even code, saturating at 448, as uint8."""
    size, known = np.minimum(np.abs(x), 448.0), np.array(MAGNITUDES)
    low = np.searchsorted(known, size, side="right") - 1
    high = np.minimum(low + 1, len(known) - 1)
    below, above = size - known[low], known[high] - size
    low = np.where((above < below) | ((above == below) & (low % 2 == 1)), high, low)
    return (low + np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


def e4m3_values(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray(_VALUES[codes])


def encoded(x: Tensor, kind: str, scale: float) -> tuple[Tensor, Tensor]:
    """Bytes [rows, bytes of a row] of float32 rows, and their values in float64. The inverse of the scale is rounded to
    float32, and the product with it, as in vLLM's kernels."""
    numbers = x.float().numpy()
    if kind == "bf16":
        bits = bf16_bits(numbers)
        return torch.from_numpy(bits.view(np.uint8)), torch.from_numpy(bf16_values(bits))
    codes = e4m3_codes(numbers * (np.float32(1.0) / np.float32(scale)))
    return torch.from_numpy(codes), torch.from_numpy(e4m3_values(codes) * float(np.float32(scale)))


def page_memory(pages: int, rows: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows [pages, rows, 512] with gaps between pages, all of it NaN."""
    stride = rows * 512 + BETWEEN // dtype.itemsize
    memory = torch.full((BEFORE + pages * stride * dtype.itemsize,), 0xFF, dtype=torch.uint8, device=device)
    return memory.view(dtype).as_strided((pages, rows, 512), (stride, 512, 1), BEFORE // dtype.itemsize)


class PlainStep(V4Step):
    """A step whose rows were written by the rules above; `heads` replaces the usual number of heads."""

    def __init__(
        self,
        kind: str,
        queries: list[int] | None = None,
        lengths: list[int] | None = None,
        *,
        heads: int = 3,
        scale: float = KV_SCALE,
        seed: int = 0,
    ) -> None:
        """All of it on the host."""
        self.kind, self.kv_scale = kind, scale if kind == "fp8" else 1.0
        layout = plain_fp8(latent=448) if kind == "fp8" else named("v4-bf16")
        given = () if queries is None or lengths is None else (queries, lengths)
        super().__init__(layout, *given, seed=seed)
        self.window = PagedCache.wrap(page_memory(80, WINDOW_PAGE, ROW_DTYPES[kind]), layout, scale=self.kv_scale)
        self.exact = {1: torch.full((80 * WINDOW_PAGE, 512), torch.nan, dtype=torch.float64)}
        for ratio in self.entries:
            memory = page_memory(40, PAGE // ratio, ROW_DTYPES[kind])
            self.entries[ratio] = PagedCache.wrap(memory, layout, scale=self.kv_scale)
            self.exact[ratio] = torch.full((40 * PAGE // ratio, 512), torch.nan, dtype=torch.float64)
        for number, length in enumerate(self.lengths):
            self.write(1, self.raw.slots(number, 0, length), torch.randn(length, 512))
            for ratio in self.entries:
                slots = self.entry_slots(number, length // ratio, ratio)
                self.write(ratio, slots, torch.randn(len(slots), 512))
        self.q = torch.randn(len(self.tokens), heads, 512)
        self.sink = torch.randn(heads)

    def cache(self, ratio: int) -> PagedCache:
        """The window's cache for ratio 1."""
        return self.window if ratio == 1 else self.entries[ratio]

    def write(self, ratio: int, slots: Tensor, rows: Tensor) -> None:
        data, self.exact[ratio][slots] = encoded(rows, self.kind, self.kv_scale)
        storage = self.cache(ratio).storage.view(torch.uint8)
        storage[slots // storage.shape[1], slots % storage.shape[1]] = data

    def rows_seen(self, row: int, ratio: int) -> Tensor:
        """From the values that were written, not from the caches."""
        request, p = self.tokens[row]
        keys = self.exact[1][self.raw.slots(request, max(0, p - self.window_size + 1), p + 1)]
        if ratio == 1:
            return keys
        slots = self.entry_slots(request, (p + 1) // ratio, ratio)
        if ratio == 4:
            picked = self.chosen[row]
            slots = slots[picked[picked >= 0].long()]
        return torch.cat((keys, self.exact[ratio][slots]))

    def query(self) -> tuple[Tensor, Tensor]:
        """The queries as vLLM's kernel makes them for such a cache, and their values in float64."""
        if self.kind == "bf16":
            rounded = self.q.bfloat16()
            return rounded, rounded.double()
        codes, values = encoded(self.q.view(-1, 512), "fp8", Q_SCALE)
        return codes.view(E4M3).view(self.q.shape), values.view(self.q.shape)

    def layer(self, ratio: int, **more: Any) -> SimpleNamespace:
        """A layer with the attributes of vLLM's FlashInfer class, scales included."""
        fields: dict[str, Any] = {
            "prefix": "attn",
            "attn_sink": self.sink,
            "swa_cache_layer": SimpleNamespace(kv_cache=self.window.storage, prefix="window"),
        }
        if self.kind == "fp8":
            fields["_flashinfer_fp8_bmm1_scale"] = SCALE * Q_SCALE * self.kv_scale
            fields["_flashinfer_fp8_bmm2_scale"] = self.kv_scale
        return layer_of(self, ratio, **(fields | more))

    def positions(self, padding: int = 0) -> Tensor:
        return torch.tensor([p for _, p in self.tokens] + [0] * padding)

    def output(self, padding: int = 0) -> Tensor:
        """As vLLM allocates it: bf16, heads that are not padded."""
        return torch.full((len(self.tokens) + padding, *self.q.shape[1:]), 3.0, dtype=torch.bfloat16)
