"""Exact top-k of index scores in CUDA C++, for GPUs with thread-block clusters."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div, round_up
from tamis.cuda.compiler import Program
from tamis.cuda.device import sm_count
from tamis.cuda.launch import ListLaunch, kernel

MAX_K = 4096
SIGNATURE = "PqiPiPPqiiiPii"
SLICE_UNIT = 128
"""Slices are a multiple of this: whole bitmap words, and 16 bytes of bitmap."""
SHARED_PER_SM = 228 * 1024
SYSTEM_SHARED = 1024
"""Of each block's shared memory."""


class Variant(NamedTuple):
    """How a launch is cut."""

    cluster: int
    """Blocks per row: 1, 2, 4, 8 or 16."""
    threads: int
    """Per block: 512 or 1024."""
    per_sm: int
    """Blocks that share one multiprocessor's memory."""
    overlap: bool = False
    """Whether a launch may start while the kernel before it ends."""

    @property
    def shared(self) -> int:
        """Bytes of shared memory per block: its part of a multiprocessor's, whatever the rows need of it."""
        return SHARED_PER_SM // self.per_sm - SYSTEM_SHARED


class Memory(NamedTuple):
    """What a block keeps in shared memory."""

    resident: int
    """Keys of the slice that stay there; the others are read again."""
    bitmap_words: int
    """Of each of the two bitmaps."""


def topk_positions(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    request_ids: Tensor | None = None,
    block_table: Tensor | None = None,
    page_size: int = 0,
    *,
    out: Tensor | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """The k highest-scored positions of each row: int32 [T, k], ascending, then -1.

    Only positions below the row's length with a score above -inf count; NaN counts as -inf. Among equal scores the
    lowest position wins. With a block table the result is the slots of these positions, each in its position's
    column, -1 where the table has no page.

    Args:
        scores: float32 [T, S], any row stride.
        lengths: int32 [T].
        k: 1 to 4096.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W].
        page_size: positions per page; 0 without a block table.
        out: int32 [T, k], contiguous, to write into.
        variant: how to cut the launch, if not as usual.
    """
    checks.integer("k", k, low=1, high=MAX_K)
    tokens, width = scores.shape
    if out is None:
        out = torch.empty((tokens, k), dtype=torch.int32, device=scores.device)
    if tokens == 0:
        return out
    if width > 1 and scores.stride(1) != 1:
        scores = scores.contiguous()
    if variant is None:
        variant = usual_variant(tokens, width, sm_count(scores.device))
    memory = memory_of(variant, width, k)
    pages, table = (0, 0), (0, 0, 0)
    if block_table is not None and request_ids is not None:
        # Held by name until the launch, so that nobody else gets their memory.
        block_table, request_ids = block_table.contiguous(), request_ids.contiguous()
        pages = request_ids.data_ptr(), block_table.data_ptr()
        table = block_table.stride(0), block_table.shape[0], block_table.shape[1]
    lengths = lengths.contiguous()
    launch = _launch(scores.device.index, variant)
    launch(
        (tokens * variant.cluster, 1, 1),
        *(scores.data_ptr(), scores.stride(0), width, lengths.data_ptr(), k, *pages, *table, page_size),
        *(out.data_ptr(), memory.resident, memory.bitmap_words),
    )
    return out


@lru_cache(maxsize=1024)
def usual_variant(tokens: int, width: int, sms: int) -> Variant:
    """One block per multiprocessor, of slices worth a block each: what blocks of a row tell each other costs more than
    a second one on the same multiprocessor gains. Long slices get a multiprocessor's whole memory."""
    cluster = 1
    while cluster < 16 and tokens * cluster * 2 <= sms and width >= cluster * 16384:
        cluster *= 2
    alone = tokens * cluster <= sms and width >= cluster * 49152
    variant, largest = Variant(cluster, 1024, 1) if alone else Variant(cluster, 512, 2), Variant(16, 1024, 1)
    return variant if _room_for_keys(variant, width, MAX_K)[1] > 0 else largest


@lru_cache(maxsize=1024)
def memory_of(variant: Variant, width: int, k: int) -> Memory:
    """How a block's shared memory is divided for rows of a width."""
    longest, room = _room_for_keys(variant, width, k)
    if room < 0:
        raise checks.refuse("scores", "narrower", f"rows of {width}", "split them; about 11 million fit")
    return Memory(min(longest, room // 4 // SLICE_UNIT * SLICE_UNIT), longest // 32)


def _room_for_keys(variant: Variant, width: int, k: int) -> tuple[int, int]:
    """How many places a block may have to look at, and the bytes that its two bitmaps of them leave for keys."""
    # Up to three places before a row's start make its loads aligned. Rows of up to k go to one block as a whole.
    longest = max(_whole_units(ceil_div(width + 3, variant.cluster)), _whole_units(min(k, width) + 3))
    return longest, variant.shared - _fixed_bytes(variant.threads) - 2 * longest // 8


def _whole_units(places: int) -> int:
    return round_up(places, SLICE_UNIT)


def _fixed_bytes(threads: int) -> int:
    """Size of the source's `Shared`: counts of three digits and their sums, the list, and sums of each warp."""
    digits = sum(4 * (bins + 2 * 32 + 2 * bins // 32) for bins in (4096, 1024, 1024))
    return round_up(digits + 4 * MAX_K + 2 * 4 * (threads // 32) + 4, 16)


@cache
def program(threads: int) -> Program:
    """`topk.cu` for CTAs of so many threads."""
    return Program.packaged(__package__, "topk.cu", THREADS=threads, SHARED_BYTES=_fixed_bytes(threads))


@cache
def _launch(device: int, variant: Variant) -> ListLaunch:
    loaded = kernel(program(variant.threads), "topk_positions", device)
    cluster, threads, _, overlap = variant
    return ListLaunch(loaded, SIGNATURE, threads=threads, shared=variant.shared, cluster=cluster, overlap=overlap)
