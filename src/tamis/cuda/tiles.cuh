// Tiles in shared memory, the operands of warpgroup matrix instructions (wgmma), and their descriptors.
//
// A tile has 64 rows of 128 bytes, 64 elements of 16 bits, in the 128-byte swizzle: 16-byte unit u of row r lies at
// unit u ^ (r % 8) of the row. A tile starts at a multiple of 1024 bytes. An operand is K-major if the K dimension runs along
// the rows of its tiles, so that a K step of 16 is 32 bytes, and MN-major if K runs across the rows, so that it is 2048 bytes.
#pragma once
#include "instructions.cuh"

// The offset of a 16-byte unit of a row in a tile.
__device__ __forceinline__ u32 swizzled(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

// A descriptor of 128-byte swizzled tiles: eight rows are 1024 bytes, and `tile_bytes` is the leading dimension. Only the
// lower word is made uniform, since the upper one is the same constant in all of a kernel's dozens of descriptors.
__device__ __forceinline__ unsigned long long smem_descriptor(u32 address, u32 tile_bytes) {
    const u32 lower = warp_uniform((address & 0x3FFFF) >> 4 | tile_bytes >> 4 << 16);
    return static_cast<unsigned long long>(1u << 30 | 1024 >> 4) << 32 | lower;
}

// The hardware does not use the leading dimension of a swizzled K-major operand.
__device__ __forceinline__ unsigned long long k_major(u32 address) { return smem_descriptor(address, 16); }

// `tile_bytes` is the distance from a tile of 64 columns to the next one.
__device__ __forceinline__ unsigned long long mn_major(u32 address, u32 tile_bytes) {
    return smem_descriptor(address, tile_bytes);
}

// The descriptor of an operand that starts `bytes` further.
__device__ __forceinline__ unsigned long long advance(unsigned long long start, u32 bytes) {
    return start & ~0xFFFFFFFFull | (static_cast<u32>(start) + (bytes >> 4));
}
