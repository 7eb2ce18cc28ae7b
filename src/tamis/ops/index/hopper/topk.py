"""Exact top-k of index scores in CUDA C++ on Hopper: one CTA per row (`topk_rows.cu`), or a cluster (`topk.cu`)."""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div, round_up
from tamis.cuda.compiler import Program
from tamis.cuda.device import device_index, sm_count
from tamis.cuda.launch import Launch, PreparedLaunch, kernel
from tamis.cuda.params import params_bytes
from tamis.ops.index.hopper import topk_rows
from tamis.ops.index.hopper.topk_params import SHARED_PER_SM, SYSTEM_SHARED, TopkParams

MAX_K = 4096
SLICE_UNIT = 128
"""The number of places of a slice is a multiple of this, 16 bytes of a bitmap."""
FIXED_BYTES = 43_536
"""Bytes set aside for the source's `SharedMemory`, enough for 1024 threads. The source checks the number."""


class Variant(NamedTuple):
    """The shape of a launch of `topk.cu`."""

    cluster: int
    """CTAs per row: 1, 2, 4, 8 or 16."""
    threads: int
    """Threads per CTA: 512 or 1024."""
    per_sm: int
    """CTAs that share an SM."""

    @property
    def shared(self) -> int:
        """Bytes of shared memory per CTA: its share of the SM, even if rows need less."""
        return SHARED_PER_SM // self.per_sm - SYSTEM_SHARED


def topk_positions(
    scores: Tensor,
    lengths: Tensor,
    k: int,
    request_ids: Tensor | None = None,
    block_table: Tensor | None = None,
    page_size: int = 0,
    *,
    out: Tensor | None = None,
    variant: Variant | topk_rows.Form | None = None,
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
        variant: the shape of the launch; None for the usual one.
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
        aligned = (scores.data_ptr() | 4 * scores.stride(0)) % 16 == 0
        variant = usual_variant(tokens, width, k, sm_count(scores.device), aligned=aligned)
    planned = _planned(scores.device.index, variant, width, k)
    ids = table = table_stride = requests = table_width = 0
    if block_table is not None and request_ids is not None:
        # These names and `lengths` keep the copies alive until the launch.
        block_table, request_ids = block_table.contiguous(), request_ids.contiguous()
        ids, table, table_stride = request_ids.data_ptr(), block_table.data_ptr(), block_table.stride(0)
        requests, table_width = block_table.shape
    lengths = lengths.contiguous()
    params = TopkParams(
        scores.data_ptr(),
        scores.stride(0),
        width,
        lengths.data_ptr(),
        k,
        ids,
        table,
        table_stride,
        requests,
        table_width,
        page_size,
        out.data_ptr(),
        *planned.memory,
    )
    planned.launch((tokens * planned.cluster, 1, 1), params)
    return out


def prepare_topk(tokens: int, width: int, k: int, device: torch.device) -> PreparedLaunch:
    """A launch for contiguous scores float32 [tokens, width] and lengths int32 [tokens] on the current device, without
    a block table: call it with the stream and the addresses of scores, lengths and result."""
    variant = usual_variant(tokens, width, k, sm_count(device), aligned=width % 4 == 0)
    planned = _planned(device_index(device), variant, width, k)
    params = TopkParams(0, width, width, 0, k, 0, 0, 0, 0, 0, 0, 0, *planned.memory)
    return planned.launch.prepared((tokens * planned.cluster, 1, 1), params, ("scores", "lengths", "out"))


@lru_cache(maxsize=1024)
def usual_variant(tokens: int, width: int, k: int, sms: int, *, aligned: bool) -> Variant | topk_rows.Form:
    """The fastest variant.

    Args:
        tokens: rows.
        width: scores of a row.
        k: results of a row.
        sms: SMs of the device.
        aligned: whether every row starts at a multiple of 16 bytes.
    """
    form = topk_rows.usual_form(tokens, width, k, sms, aligned=aligned)
    if form is not None:
        return form
    variant = cluster_variant(tokens, width, sms)
    # Rows too long to be divided are streamed, which takes shared memory of one size.
    return variant if _room_for_keys(variant, width, k)[1] >= 0 else topk_rows.streamed_form(k)


def cluster_variant(tokens: int, width: int, sms: int) -> Variant:
    """The fastest variant of `topk.cu`: at most one CTA per SM if slices are long enough, since the exchange between
    the CTAs of a row costs more than a second CTA on an SM gains. Long slices get the whole shared memory of an SM."""
    cluster = 1
    while cluster < 16 and tokens * cluster * 2 <= sms and width >= cluster * 16384:
        cluster *= 2
    alone = tokens * cluster <= sms and width >= cluster * 49152
    variant, largest = Variant(cluster, 1024, 1) if alone else Variant(cluster, 512, 2), Variant(16, 1024, 1)
    return variant if _room_for_keys(variant, width, MAX_K)[1] > 0 else largest


@lru_cache(maxsize=1024)
def memory_of(variant: Variant, width: int, k: int) -> tuple[int, int]:
    """How a CTA's shared memory is divided for rows of a width: resident keys, and words of each bitmap."""
    longest, room = _room_for_keys(variant, width, k)
    if room < 0:
        raise checks.refuse("scores", "narrower", f"rows of {width}", "split them; about 11 million fit")
    return min(longest, room // 4 // SLICE_UNIT * SLICE_UNIT), longest // 32


def _room_for_keys(variant: Variant, width: int, k: int) -> tuple[int, int]:
    """The number of places of the longest slice, and the bytes that its two bitmaps leave for keys."""
    # A row's places begin up to three scores before it, for aligned loads. A row of up to k positions is one slice.
    longest = round_up(max(ceil_div(width + 3, variant.cluster), min(k, width) + 3), SLICE_UNIT)
    return longest, variant.shared - FIXED_BYTES - 2 * longest // 8


@cache
def program(threads: int) -> Program:
    """The program `topk.cu` for CTAs of a number of threads."""
    constants = {"THREADS": threads, "FIXED_BYTES": FIXED_BYTES, "PARAMS_BYTES": params_bytes(TopkParams)}
    return Program.packaged(__package__, "topk.cu", **constants)


class _Planned(NamedTuple):
    launch: Launch
    cluster: int
    memory: tuple[int, int]
    """The last two parameters of the kernel."""


@lru_cache(maxsize=1024)
def _planned(device: int, variant: Variant | topk_rows.Form, width: int, k: int) -> _Planned:
    if isinstance(variant, topk_rows.Form):
        return _Planned(topk_rows.launch(device, variant), 1, (0, 0))
    return _Planned(_launch(device, variant), variant.cluster, memory_of(variant, width, k))


@cache
def _launch(device: int, variant: Variant) -> Launch:
    loaded = kernel(program(variant.threads), "topk_positions", device)
    threads, shared, cluster = variant.threads, variant.shared, variant.cluster
    return Launch(loaded, TopkParams, threads=threads, shared=shared, cluster=cluster, overlap=True)
