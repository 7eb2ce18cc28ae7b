// Tiles in shared memory, the operands of warpgroup matrix instructions (wgmma).
//
// A tile has 64 rows of 128 bytes, 64 elements of 16 bits, in the 128-byte swizzle: 16-byte unit u of row r lies at
// u ^ (r % 8). It starts at a multiple of 1024 bytes. An operand is K-major if its rows run along the product's inner
// axis, so that 16 elements of it are 32 bytes, and MN-major if its rows are the inner axis, of which 16 are 2048 bytes.
#pragma once
#include "instructions.cuh"

// Where a 16-byte unit of a row lies in a tile.
__device__ __forceinline__ u32 swizzled(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

// Only the lower word is made uniform: the upper one is the same constant in all of the dozens of descriptors.
__device__ __forceinline__ unsigned long long smem_descriptor(u32 address, u32 tile_bytes) {
    const u32 lower = warp_uniform((address & 0x3FFFF) >> 4 | tile_bytes >> 4 << 16);
    return static_cast<unsigned long long>(1u << 30 | 1024 >> 4) << 32 | lower;
}

// The leading dimension of a swizzled K-major operand is not used.
__device__ __forceinline__ unsigned long long k_major(u32 address) { return smem_descriptor(address, 16); }

// `tile_bytes` leads from 64 columns to the next 64.
__device__ __forceinline__ unsigned long long mn_major(u32 address, u32 tile_bytes) {
    return smem_descriptor(address, tile_bytes);
}

__device__ __forceinline__ unsigned long long advance(unsigned long long start, u32 bytes) {
    return start & ~0xFFFFFFFFull | (static_cast<u32>(start) + (bytes >> 4));
}
