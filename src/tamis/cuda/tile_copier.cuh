// Copies of bf16 rows from global memory straight into swizzled tiles, by the four warps of a producer warpgroup.
#pragma once
#include "instructions.cuh"
#include "tiles.cuh"

constexpr int WARPS = 4;              // warps of a warpgroup
constexpr int WARP_ROWS = 64 / WARPS;  // rows of a block of 64 that one producer warp copies
constexpr u32 TILE_BYTES = 64 * 128;

// Copies a warp's 16 rows of bf16 numbers, or the queries of 16 heads, into tiles. Eight lanes copy 128 bytes of a row at a
// time; a lane copies one 16-byte unit of the rows lane / 8 + 4 * i.
struct TileCopier {
    u32 target[2];                 // offsets in a tile for i = 0 and 1; those for i = 2 and 3 are eight rows, 1024 bytes, on
    const unsigned char* from[4];  // null if the row does not exist: zeros are written

    __device__ __forceinline__ TileCopier() {
        const int row = threadIdx.x / 32 % WARPS * WARP_ROWS + threadIdx.x % 32 / 8, unit = threadIdx.x % 8;
        target[0] = swizzled(row, unit);
        target[1] = swizzled(row + 4, unit);
    }

    // Sets the rows to copy: lane i < 16 gives the address of row i.
    __device__ __forceinline__ void take(const unsigned char* row) {
        const auto address = reinterpret_cast<unsigned long long>(row);
        const int unit = threadIdx.x % 8, first = threadIdx.x % 32 / 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 low = __shfl_sync(FULL_MASK, static_cast<u32>(address), first + 4 * i);
            const u32 high = __shfl_sync(FULL_MASK, static_cast<u32>(address >> 32), first + 4 * i);
            const auto whole = static_cast<unsigned long long>(high) << 32 | low;
            from[i] = whole == 0 ? nullptr : reinterpret_cast<const unsigned char*>(whole) + unit * 16;
        }
    }

    __device__ __forceinline__ void copy(u32 tiles, int first, int count) const {
#pragma unroll
        for (int tile = first; tile < first + count; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 to = tiles + tile * TILE_BYTES + target[i % 2] + i / 2 * 1024;
                cp_async_zfill<16>(to, from[i] + tile * 128, from[i] != nullptr);
            }
        }
    }
};
