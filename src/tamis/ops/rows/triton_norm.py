"""Device functions for rows in registers: RMS norm, rope, Hadamard rotation, and insertion into a cache."""

from typing import Any

import triton
import triton.language as tl

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.ops.rows.triton_rows import (
    decode_bf16,
    encode_e4m3,
    load_wide,
    round_to_bf16,
    row_arguments,
    row_start,
    store_rounded,
)
from tamis.ops.write.triton_kernels import encode_tiles


@triton.jit
def norm_row(x, weight, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A row [BLOCK], zero from WIDTH on, divided by its root mean square and, if given, multiplied by `weight`."""
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / WIDTH + eps)
    if weight is not None:
        column = tl.arange(0, BLOCK)
        normed = normed * load_wide(weight + column, column < WIDTH)
    return normed


@triton.jit
def rotate_row(
    x, cos_sin, position, table_rows,
    WIDTH: tl.constexpr, ROTARY: tl.constexpr, INVERSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row [BLOCK], its last ROTARY of WIDTH columns rotated by row `position` of the table; see `rotate_pairs`."""
    one = tl.zeros([1], tl.int64) + position
    row = tl.reshape(x, [1, BLOCK])
    return tl.reshape(rotate_pairs(row, cos_sin, one, table_rows, WIDTH - ROTARY, ROTARY, INVERSE, 1, BLOCK), [BLOCK])


@triton.jit
def rotate_pairs(
    x, cos_sin, position, table_rows,
    START: tl.constexpr, ROTARY: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows [ROWS, BLOCK] whose ROTARY columns from START on, which is even, are rotated in pairs (2i, 2i+1) by rows
    `position` [ROWS] of the table. Rows whose position the table does not have stay as they are."""
    pair = tl.arange(0, BLOCK // 2) - START // 2
    known = (position >= 0) & (position < table_rows)
    turning = known[:, None] & ((pair >= 0) & (pair < ROTARY // 2))[None, :]
    angles = cos_sin + (position.to(tl.int64) * ROTARY)[:, None] + pair[None, :]
    cos = tl.load(angles, mask=turning, other=1.0)
    sin = tl.load(angles + ROTARY // 2, mask=turning, other=0.0)
    if INVERSE:
        sin = -sin
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    # Other columns are not multiplied by 1 and 0: an infinity would make its neighbour NaN, and -0.0 would become 0.0.
    first = tl.where(turning, even * cos - odd * sin, even)
    second = tl.where(turning, odd * cos + even * sin, odd)
    return tl.reshape(tl.join(first, second), [ROWS, BLOCK])


@triton.jit
def hadamard_rows(x, STEPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [ROWS, BLOCK] times the orthonormal Hadamard matrix, with STEPS = log2(BLOCK).

    Each step adds and subtracts neighbours and puts all sums before all differences; after the last step the columns
    are in their original order again.
    """
    for _ in tl.static_range(STEPS):
        first, second = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 2, 1]), [ROWS, BLOCK])
    return x * BLOCK**-0.5


@triton.jit
def hadamard_row(x, pointers, STEPS: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr):
    """A row [BLOCK] rounded to the type that `pointers` point to and multiplied by the Hadamard matrix; with STEPS 0
    the row itself."""
    if STEPS:
        x = tl.reshape(round_like(x, pointers, NATIVE_BF16), [1, BLOCK])
        x = tl.reshape(hadamard_rows(x, STEPS, 1, BLOCK), [BLOCK])
    return x


@triton.jit
def round_like(x, pointers, NATIVE_BF16: tl.constexpr):
    """fp32 numbers rounded to the floating-point type that `pointers` point to; to bf16 for bytes, since codes are made
    from bf16."""
    if pointers.dtype.element_ty == tl.float32:
        rounded = x
    elif pointers.dtype.element_ty == tl.float16:
        rounded = x.to(tl.float16).to(tl.float32)
    else:
        rounded = decode_bf16(round_to_bf16(x, NATIVE_BF16))
    return rounded


@triton.jit
def insert_row(
    x, slot, cache, page_stride, scale,
    PAGE_SIZE: tl.constexpr, MODE: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, TILE: tl.constexpr,
    VALUES_START: tl.constexpr, VALUES_STRIDE: tl.constexpr, SCALES: tl.constexpr, SCALES_START: tl.constexpr,
    SCALES_STRIDE: tl.constexpr, TAIL_START: tl.constexpr, TAIL_STRIDE: tl.constexpr, SCALE_FLOOR: tl.constexpr,
    SCALE_IN_MEMORY: tl.constexpr, NATIVE_BF16: tl.constexpr, BLOCK: tl.constexpr, TILE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write a row [BLOCK] of fp32 numbers to a slot of the cache; they are rounded once, and for FP8 first to bf16."""
    column = tl.arange(0, BLOCK)
    inside = column < LATENT + ROPE
    values_at = row_start(slot, page_stride, VALUES_STRIDE, PAGE_SIZE, False) + VALUES_START
    if MODE == "none":
        store_rounded(cache + values_at + column, x, inside, NATIVE_BF16)
    else:
        rounded = decode_bf16(round_to_bf16(x, NATIVE_BF16))
        if MODE == "tensor":
            if SCALE_IN_MEMORY:
                factor = tl.load(scale)
            else:
                factor = scale
            tl.store(cache + values_at + column, encode_e4m3(tl.div_rn(rounded, factor)), mask=inside)
        else:
            TILES_BLOCK: tl.constexpr = BLOCK // TILE_BLOCK
            one = tl.zeros([1], tl.int64)
            scales_at = row_start(slot, page_stride, SCALES_STRIDE, PAGE_SIZE, False) + SCALES_START
            latent = tl.reshape(tl.where(column < LATENT, rounded, 0.0), [1, TILES_BLOCK, TILE_BLOCK])
            encode_tiles(
                latent, one == 0, cache, one + values_at, one + scales_at, MODE, LATENT, TILE, SCALES, SCALE_FLOOR,
                TILES_BLOCK, TILE_BLOCK,
            )  # fmt: skip
            if ROPE:
                tail_at = row_start(slot, page_stride, TAIL_STRIDE, PAGE_SIZE, False) + TAIL_START
                tail = (cache + tail_at).to(tl.pointer_type(tl.bfloat16), bitcast=True)
                store_rounded(tail + column - LATENT, rounded, inside & (column >= LATENT), NATIVE_BF16)


def hadamard_steps(width: int) -> int:
    """How many steps `hadamard_rows` takes for rows of this width, a power of two."""
    return width.bit_length() - 1


def check_rows(cache: PagedCache) -> None:
    """Refuse a cache whose rows `insert_row` cannot write."""
    tile = cache.layout.tile
    # Triton's blocks are powers of two, so a tile of another size must be the whole latent part.
    if tile & (tile - 1) and tile != cache.layout.latent:
        raise checks.refuse("cache", "in tiles of a power of two", f"tiles of {tile}", "choose another layout")


def insert_arguments(cache: PagedCache) -> dict[str, Any]:
    """Arguments of `insert_row` for a cache, and the size BLOCK of a row in registers."""
    layout = cache.layout
    block = max(2, triton.next_power_of_2(layout.width))
    tile = layout.tile or block
    if tile & (tile - 1):
        tile = block  # the whole row: `check_rows` has refused the others
    known = row_arguments(cache)
    return {name: value for name, value in known.items() if not name.endswith("_BLOCK")} | {
        "SCALES": layout.scales.count if layout.scales is not None else 0,
        "SCALE_FLOOR": layout.scale_floor,
        "BLOCK": block,
        "TILE_BLOCK": tile,
    }
