"""SGLang's pool of V4 pages and its metadata of a step, as plain objects, over random rows."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tamis.cache.layout import v4_fp8
from tamis.integrations.sglang.v4_attention import wrap_pages
from tamis.ops import write_kv

WINDOW_PAGE, ROWS, COLUMNS = 128, 256, 64
SIZES = {1: 256, 2: 128, 4: 64, 128: 2}
"""Rows of a page of entries, by ratio."""
NAMES = {
    1: ("c1_sparse_page_indices", "c1_sparse_topk_lengths"),
    2: ("c2_sparse_page_indices", "c2_sparse_topk_lengths"),
    4: ("c4_sparse_page_indices", "c4_sparse_topk_lengths"),
    128: ("c128_page_indices", "c128_topk_lengths_clamp1"),
}


def page_bytes(page_size: int) -> int:
    """SGLang pads a page to a multiple of 576 bytes."""
    return -(-page_size * 584 // 576) * 576


class Pool:
    """Pages of `ROWS` written rows and as many unwritten ones, which are NaN."""

    def __init__(self, ratio: int = 0, dtype: torch.dtype = torch.uint8) -> None:
        self.ratio, self.dtype = ratio, dtype
        self.raw = self._filled(WINDOW_PAGE)
        self.extra = self._filled(SIZES[ratio]) if ratio else None

    @staticmethod
    def _filled(size: int) -> Tensor:
        assert page_bytes(size) == v4_fp8().page_bytes(size)
        raw = torch.full((2 * ROWS // size, page_bytes(size)), 0xFF, dtype=torch.uint8)
        write_kv(torch.randn(ROWS, 512), wrap_pages(raw, size), torch.arange(ROWS))
        return raw

    def get_swa_key_page_size(self) -> int:
        return WINDOW_PAGE

    def get_swa_key_buffer_radix(self, layer_id: int) -> Tensor:
        assert layer_id == 7
        return self.raw.view(self.dtype)

    def get_extra_key_page_size(self, layer_id: int) -> int:
        assert layer_id == 7
        return SIZES[self.ratio]

    def get_extra_key_buffer(self, layer_id: int) -> Tensor:
        assert layer_id == 7
        assert self.extra is not None
        return self.extra.view(self.dtype)


def core_of(pool: Pool, tokens: int) -> SimpleNamespace:
    """Random slots with holes, and slots of unwritten rows past a row's length. A row without entries has length 1."""
    core: Any = SimpleNamespace()
    core.swa_page_indices, core.swa_topk_lengths = _selected(tokens, COLUMNS)
    if pool.ratio:
        slots, lengths = _selected(tokens, COLUMNS)
        slots[0], lengths[0] = -1, 1
        for name, value in zip(NAMES[pool.ratio], (slots, lengths), strict=True):
            setattr(core, name, value)
    return core


def _selected(tokens: int, columns: int) -> tuple[Tensor, Tensor]:
    lengths = torch.randint(1, columns, (tokens,), dtype=torch.int32)
    slots = torch.stack([torch.randperm(ROWS)[:columns] for _ in range(tokens)]).int()
    slots[torch.rand(tokens, columns) < 0.2] = -1
    past = torch.arange(columns) >= lengths[:, None]
    return torch.where(past, ROWS + 3, slots).int(), lengths


def seen(pool: Pool, core: Any, row: int) -> Tensor:
    """float64 rows that a token attends to, by byte offsets."""
    parts = [(pool.raw, WINDOW_PAGE, core.swa_page_indices[row][: core.swa_topk_lengths[row]])]
    if pool.ratio:
        slots, lengths = (getattr(core, name) for name in NAMES[pool.ratio])
        parts.append((pool.extra, SIZES[pool.ratio], slots[row][: lengths[row]]))
    rows = [decoded(buffer, size, int(slot)) for buffer, size, slots in parts for slot in slots if slot >= 0]
    return torch.stack(rows) if rows else torch.zeros(0, 512, dtype=torch.float64)


def decoded(buffer: Any, page_size: int, slot: int) -> Tensor:
    """A V4 row by its byte offsets: 448 e4m3 values and 64 bf16 values; the page's exponents follow all rows."""
    page, row = buffer.view(torch.uint8)[slot // page_size], slot % page_size
    values = page[row * 576 : row * 576 + 448].view(torch.float8_e4m3fn).double()
    rope = page[row * 576 + 448 : row * 576 + 576].view(torch.bfloat16).double()
    exponents = page[page_size * 576 + row * 8 : page_size * 576 + row * 8 + 7].double()
    return torch.cat((values * (2.0 ** (exponents - 127)).repeat_interleave(64), rope))
