"""What the kernels of top-k have in common on the host."""

from typing import NamedTuple

from tamis.cuda.params import Int, Long, Pointer

SHARED_PER_SM = 228 * 1024
SYSTEM_SHARED = 1024
"""Bytes of shared memory that the system reserves in every CTA."""


class TopkParams(NamedTuple):
    """The parameters of `topk.cu` and `topk_rows.cu`: T rows, B requests."""

    scores: Pointer
    """float32 [T, width]."""
    row_stride: Long
    width: Int
    lengths: Pointer
    """int32 [T], the lengths of the rows; positions beyond do not count."""
    k: Int
    request_ids: Pointer
    """int32 [T]; 0 without a block table."""
    block_table: Pointer
    """int32 [B, table_width]; 0 for none."""
    table_stride: Long
    requests: Int
    table_width: Int
    page_size: Int
    """Positions of a page; 0 without a block table."""
    out: Pointer
    """int32 [T, k], contiguous."""
    resident: Int
    """`topk.cu`: keys of a slice that are kept in shared memory; the others are read again. 0 for `topk_rows.cu`."""
    bitmap_words: Int
    """`topk.cu`: words of each of the two bitmaps. 0 for `topk_rows.cu`."""
