// Sums over the lanes of a warp.
#pragma once
#include "instructions.cuh"

// The sum of the values of lanes 0 to this one.
__device__ __forceinline__ u32 inclusive_sum(u32 value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_MASK, value, step);
        if (lane >= step) value += other;
    }
    return value;
}
