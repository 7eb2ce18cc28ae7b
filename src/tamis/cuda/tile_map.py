"""Descriptions of pages of rows for copies of tiles into shared memory (the driver's tensor maps)."""

import ctypes
from functools import lru_cache

from tamis.cuda.launch import driver

# Constants of cuda.h.
UINT8 = 0
NO_INTERLEAVE = 0
SWIZZLE_128 = 3
PROMOTE_TO_256 = 3
FILL_WITH_ZEROS = 0

MAP_BYTES, MAP_ALIGNMENT = 128, 64
ROW_BYTES = 128


class TileMap:
    """A `TileMap` of `instructions.cuh`: pages of rows of 128 bytes, of which a copy takes a box of rows."""

    def __init__(self, content: bytes) -> None:
        """Keep the map's bytes, aligned as the driver wants them."""
        if len(content) != MAP_BYTES:
            raise ValueError(f"content must have {MAP_BYTES} bytes, got {len(content)}")
        self._memory = ctypes.create_string_buffer(MAP_BYTES + MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % MAP_ALIGNMENT
        """Where the map's bytes are on the host."""
        ctypes.memmove(self.address, content, MAP_BYTES)


@lru_cache(maxsize=1024)
def tile_map(address: int, rows: int, pages: int, page_stride: int, box_rows: int) -> TileMap:
    """The map of pages on the device. Nothing but these numbers is in it, so that maps are kept.

    Args:
        address: the first page's first row, a multiple of 16.
        rows: rows of a page, which lie side by side.
        pages: number of pages.
        page_stride: bytes from one page to the next, a multiple of 16.
        box_rows: rows that one copy takes, at most 256.
    """
    map_ = TileMap(bytes(MAP_BYTES))
    # A map of one page has a stride as well, which must be a multiple of 16 but is not used.
    strides = (ctypes.c_uint64 * 2)(ROW_BYTES, page_stride)
    driver().call(
        "cuTensorMapEncodeTiled",
        ctypes.c_void_p(map_.address),
        UINT8,
        3,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 3)(ROW_BYTES, rows, pages),
        strides,
        (ctypes.c_uint32 * 3)(ROW_BYTES, box_rows, 1),
        (ctypes.c_uint32 * 3)(1, 1, 1),
        NO_INTERLEAVE,
        SWIZZLE_128,
        PROMOTE_TO_256,
        FILL_WITH_ZEROS,
    )
    return map_
