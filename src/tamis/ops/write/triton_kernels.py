"""Quantises and inserts rows in Triton: each program handles a few rows, which it reads once and writes once.

The bytes are those of the reference on every device: maxima, scales and codes are computed in exact or correctly
rounded arithmetic, and NaN and infinities end up where the reference puts them. There is one difference: rows of one
call that name the same slot race, and the slot may end up with the values of one and the scales of the other. Two rows
for one slot are a caller's error on a GPU.
"""

from collections.abc import Callable
from functools import cache as remember
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tamis.cache.fields import from_key
from tamis.cuda.device import current_stream
from tamis.ops.rows.triton_launch import TritonLaunch, can_prepare
from tamis.ops.rows.triton_rows import (
    copy_rounded,
    decode_bf16,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    interpreted,
    launching_on,
    layout_constants,
    load_wide,
    round_to_bf16,
    row_arguments,
    row_block,
    row_start,
)
from tamis.ops.write.operations import WriteKv

BLOCK_VALUES = 2048
"""Values that one program handles: 64 per thread of a single warp, which needs no barrier to find a maximum."""
NUM_WARPS = 1


@triton.jit
def _load_tiles(
    kv, row, wanted,
    LATENT: tl.constexpr, TILE: tl.constexpr, ROUND_INPUT: tl.constexpr, NATIVE_BF16: tl.constexpr,
    TILES_BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """The latent part [rows, tiles, values of a tile], zeros where there is none."""
    tile = tl.arange(0, TILES_BLOCK)
    lane = tl.arange(0, TILE_BLOCK)
    column = tile[None, :, None] * TILE + lane[None, None, :]
    inside = wanted[:, None, None] & (tile < LATENT // TILE)[None, :, None] & (lane < TILE)[None, None, :]
    x = load_wide(kv + row[:, None, None] + column, inside)
    if ROUND_INPUT and kv.dtype.element_ty != tl.bfloat16:
        x = decode_bf16(round_to_bf16(x, NATIVE_BF16))
    return x


@triton.jit
def quantise_tiles(x, MODE: tl.constexpr, SCALE_FLOOR: tl.constexpr):
    """Codes of tiles [rows, tiles, values of a tile], in pairs if "packed" or "packed_e4m3", and their scales
    [rows, tiles]: powers of two but for "exact" and, rounded to e4m3, for "packed_e4m3"."""
    PACKED: tl.constexpr = (MODE == "packed") or (MODE == "packed_e4m3")
    # The maximum ignores NaN; a tile of NaN alone counts as 0. An infinity counts as the largest finite number.
    amax = tl.max(tl.abs(x), axis=2)
    amax = tl.where(amax == amax, tl.minimum(amax, 3.4028234663852886e38), 0.0)
    scale = tl.maximum(tl.div_rn(amax, 6.0 if PACKED else 448.0), SCALE_FLOOR)
    if MODE == "exact":
        codes = encode_e4m3(tl.div_rn(x, scale[:, :, None]))
    elif MODE == "packed_e4m3":
        scale = decode_e4m3(encode_e4m3(scale), False).to(tl.float32)
        codes = encode_e2m1(tl.div_rn(x, scale[:, :, None]))
    else:
        # The scale's bits give the next power of two. Multiplying by its inverse equals dividing by it exactly.
        exponent = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        scaled = x * inverse[:, :, None]
        codes = encode_e2m1(scaled) if MODE == "packed" else encode_e4m3(scaled)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    return codes, scale


@triton.jit
def encode_tiles(
    x, wanted, cache, values_at, scales_at,
    MODE: tl.constexpr, LATENT: tl.constexpr, TILE: tl.constexpr, SCALES: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    TILES_BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write values and scales of the latent part [rows, tiles, values of a tile], which is zero beyond its tiles."""
    TILES: tl.constexpr = LATENT // TILE
    tile = tl.arange(0, TILES_BLOCK)
    lane = tl.arange(0, TILE_BLOCK)
    column = tile[None, :, None] * TILE + lane[None, None, :]
    inside = wanted[:, None, None] & (tile < TILES)[None, :, None] & (lane < TILE)[None, None, :]
    codes, stored = quantise_tiles(x, MODE, SCALE_FLOOR)
    if MODE == "packed" or MODE == "packed_e4m3":
        pair = tl.arange(0, TILE_BLOCK // 2)
        column = tile[None, :, None] * (TILE // 2) + pair[None, None, :]
        inside = wanted[:, None, None] & (tile < TILES)[None, :, None] & (pair < TILE // 2)[None, None, :]
    tl.store(cache + values_at[:, None, None] + column, codes, mask=inside)
    pointers = cache + scales_at
    if MODE == "exponent" or MODE == "packed":
        exponent = stored.to(tl.int32, bitcast=True) >> 23
        if MODE == "packed":
            exponent = tl.where(tl.max((x != x).to(tl.int32), axis=2) != 0, 255, exponent)
        stored = tl.where((tile < TILES)[None, :], exponent, 0).to(tl.uint8)
        if SCALES > TILES_BLOCK:
            pad = tl.arange(0, SCALES)  # the layout pads exponents to a multiple of 8, which is 8 for so few tiles
            tl.store(pointers[:, None] + pad[None, :], 0, mask=wanted[:, None] & (pad >= TILES)[None, :])
    elif MODE == "packed_e4m3":
        stored = tl.where(tl.max((x != x).to(tl.int32), axis=2) != 0, 0x7F, encode_e4m3(stored)).to(tl.uint8)
    else:
        pointers = pointers.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(pointers[:, None] + tile[None, :], stored, mask=wanted[:, None] & (tile < SCALES)[None, :])


@triton.jit
def _write_columns(
    kv, row, wanted, destination, scale,
    MODE: tl.constexpr, COUNT: tl.constexpr, SCALE_IN_MEMORY: tl.constexpr,
    NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Columns that need no maximum: copied, converted, or divided by the cache's one scale."""
    column = tl.arange(0, BLOCK)
    inside = wanted[:, None] & (column < COUNT)[None, :]
    source = kv + row[:, None] + column[None, :]
    target = destination[:, None] + column[None, :]
    if MODE == "tensor":
        if SCALE_IN_MEMORY:
            factor = tl.load(scale)
        else:
            factor = scale
        tl.store(target, encode_e4m3(tl.div_rn(load_wide(source, inside), factor)), mask=inside)
    else:
        copy_rounded(source, target, inside, inside, NATIVE_BF16)


# do_not_specialize: otherwise Triton recompiles when one of these is 1 or a multiple of 16.
@triton.jit(do_not_specialize=["count", "cache_rows"])
def write_rows(
    kv, kv_stride, rope, rope_stride, slots, slots_stride, cache, page_stride, scale, count, cache_rows,
    PAGE_SIZE: tl.constexpr, MODE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    VALUES_START: tl.constexpr, VALUES_STRIDE: tl.constexpr, SCALES: tl.constexpr, SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, TAIL_START: tl.constexpr, TAIL_STRIDE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    ROUND_INPUT: tl.constexpr, SCALE_IN_MEMORY: tl.constexpr, NATIVE_BF16: tl.constexpr,
    ROWS: tl.constexpr, LATENT_BLOCK: tl.constexpr, ROPE_BLOCK: tl.constexpr, TILES_BLOCK: tl.constexpr,
    TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows [count, LATENT + ROPE] of kv, or [count, LATENT] of kv and [count, ROPE], to their slots. Distances inside
    the cache are in its elements: bytes for FP8 layouts, else numbers."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = index < count
    slot = tl.load(slots + index.to(tl.int64) * slots_stride, mask=here, other=-1)
    wanted = here & (slot >= 0) & (slot < cache_rows)
    slot = tl.where(wanted, slot, 0).to(tl.int32)
    row = index.to(tl.int64) * kv_stride
    if rope is not None:
        tail_row = index.to(tl.int64) * rope_stride
        tail_source = rope
    else:
        tail_row = row
        tail_source = kv + LATENT
    values_at = row_start(slot, page_stride, VALUES_STRIDE, PAGE_SIZE, False) + VALUES_START
    if MODE == "none" or MODE == "tensor":
        values = cache + values_at
        _write_columns(kv, row, wanted, values, scale, MODE, LATENT, SCALE_IN_MEMORY, NATIVE_BF16, LATENT_BLOCK)
        if ROPE:
            _write_columns(
                tail_source, tail_row, wanted, values + LATENT, scale, MODE, ROPE, SCALE_IN_MEMORY, NATIVE_BF16,
                ROPE_BLOCK,
            )  # fmt: skip
    else:
        scales_at = row_start(slot, page_stride, SCALES_STRIDE, PAGE_SIZE, False) + SCALES_START
        x = _load_tiles(kv, row, wanted, LATENT, TILE, ROUND_INPUT, NATIVE_BF16, TILES_BLOCK, TILE_BLOCK)
        encode_tiles(
            x, wanted, cache, values_at, scales_at, MODE, LATENT, TILE, SCALES, SCALE_FLOOR, TILES_BLOCK, TILE_BLOCK
        )
        if ROPE:
            tail_at = row_start(slot, page_stride, TAIL_STRIDE, PAGE_SIZE, False) + TAIL_START
            tail = (cache + tail_at).to(tl.pointer_type(tl.bfloat16), bitcast=True)
            _write_columns(tail_source, tail_row, wanted, tail, scale, "none", ROPE, False, NATIVE_BF16, ROPE_BLOCK)


def write_kv(call: WriteKv) -> None:
    """As `reference.write_kv`, except that no two rows may name the same slot."""
    if call.slots.shape[0] == 0:
        return
    arguments = launch_arguments(call)
    with launching_on(call.kv.device):
        write_rows[(triton.cdiv(call.slots.shape[0], arguments["ROWS"]),)](**arguments, num_warps=NUM_WARPS)


def prepare_write_kv(call: WriteKv) -> Callable[[WriteKv], None] | None:
    """A launch for calls like this one, if it needs no copies."""
    kv, rope, slots = call[:3]
    copied = kv.stride(1) != 1 or (rope is not None and rope.stride(1) != 1)
    if copied or not slots.shape[0] or not can_prepare(write_rows):
        return None
    arguments = launch_arguments(call)
    changing = ["kv", "slots", "cache"]
    changing += ["rope"] if rope is not None else []
    changing += ["scale"] if arguments["SCALE_IN_MEMORY"] else []
    grid, device = (triton.cdiv(slots.shape[0], arguments["ROWS"]),), kv.get_device()
    launch = TritonLaunch(write_rows, grid, arguments, changing, num_warps=NUM_WARPS)

    def run(call: WriteKv) -> None:
        kv, rope, slots, cache, _ = call
        addresses = [kv.data_ptr(), slots.data_ptr(), cache.storage.data_ptr()]
        if rope is not None:
            addresses.append(rope.data_ptr())
        if isinstance(cache.scale, Tensor):
            addresses.append(cache.scale.data_ptr())
        launch(current_stream(device), addresses)

    return run


def launch_arguments(call: WriteKv) -> dict[str, Any]:
    """The arguments of `write_rows`."""
    kv, rope, slots, cache, _ = call
    if kv.stride(1) != 1:
        kv = kv.contiguous()
    if rope is not None and rope.stride(1) != 1:
        rope = rope.contiguous()
    return {
        **row_arguments(cache),
        **_constants(cache.layout.key, cache.page_size),
        "NATIVE_BF16": not interpreted(write_rows),
        "kv": kv,
        "kv_stride": kv.stride(0),
        "rope": rope,
        "rope_stride": None if rope is None else rope.stride(0),
        "slots": slots,
        "slots_stride": slots.stride(0),
        "count": slots.shape[0],
        "cache_rows": cache.rows,
    }


@remember
def _constants(key: str, page_size: int) -> dict[str, Any]:
    """The kernel's constants that follow from a layout alone, beyond `layout_constants`."""
    layout = from_key(key)
    return {
        "SCALES": layout.scales.count if layout.scales is not None else 0,
        "SCALE_FLOOR": layout.scale_floor,
        "ROUND_INPUT": layout.rounding == "bf16",
        "ROWS": max(1, BLOCK_VALUES // row_block(layout_constants(key, page_size))),
    }
