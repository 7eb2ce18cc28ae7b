"""The operations of stage `gather`; see `tamis.ops.library`."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.library import Operation, Written


class ReadKv(NamedTuple):
    """Dequantise rows by their slots."""

    slots: Tensor
    """int32 or int64 [...]; those outside the cache read zeros."""
    cache: PagedCache
    """A cache of any layout."""
    dtype: torch.dtype
    """The dtype of the result: bf16, fp16 or fp32."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> Tensor:
        """Rows [..., width]."""
        return self.slots.new_empty((*self.slots.shape, self.cache.layout.width), dtype=self.dtype)


class GatherKv(NamedTuple):
    """Dequantise whole requests into a workspace. Workspace rows that belong to no request keep their content."""

    block_table: Tensor
    """int32 [B, W], page ids; negative for absent pages."""
    lengths: Tensor
    """int32 [B], rows of each request."""
    starts: Tensor
    """int32 [B], ascending: the first workspace row of each request."""
    first: Tensor
    """int32 [B], the position of each request's first row."""
    cache: PagedCache
    """A cache of any layout."""
    out: Written[Tensor]
    """[N, width] in bf16, fp16 or fp32."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> None:
        """Nothing is returned."""


class GatherIndex(NamedTuple):
    """Copy the index keys of whole requests as they are stored. Rows that belong to no request are zeros."""

    block_table: Tensor
    """int32 [B, W], page ids; negative for absent pages."""
    lengths: Tensor
    """int32 [B], rows of each request."""
    starts: Tensor
    """int32 [B], ascending: the first row of each request in the result."""
    first: Tensor
    """int32 [B], the position of each request's first row."""
    cache: PagedCache
    """Index keys in `index-fp8` or `index-mxfp4`."""
    rows: int
    """Rows of the result."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def zeros(self) -> tuple[Tensor, Tensor]:
        """A zeroed result: e4m3 [rows, dim] and float32 scales [rows] for `index-fp8`, e2m1 pairs uint8 [rows, dim / 2]
        and exponents uint8 [rows, dim / 32] for `index-mxfp4`."""
        layout = self.cache.layout
        assert layout.scales is not None
        values = self.block_table.new_zeros((self.rows, layout.values.count), dtype=torch.uint8)
        scales = self.block_table.new_zeros((self.rows, layout.scales.count), dtype=layout.scales.dtype)
        return (values, scales) if layout.packed else (values.view(torch.float8_e4m3fn), scales.squeeze(1))

    def fake(self) -> tuple[Tensor, Tensor]:
        """Keys and scales, as in `zeros`."""
        return self.zeros()


read_kv = Operation("gather", ReadKv, ReadKv.fake)
gather_kv = Operation("gather", GatherKv, GatherKv.fake)
gather_index = Operation("gather", GatherIndex, GatherIndex.fake)
