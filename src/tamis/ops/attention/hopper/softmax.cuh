// What the online softmax of every attention kernel shares. Logits are kept in base 2, so that exp2 gives the weights.
#pragma once
#include "instructions.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// Reductions over lanes whose numbers differ in the bits FIRST, 2 * FIRST, ... below END.
template <int FIRST, int END>
__device__ __forceinline__ float max_over_lanes(float x) {
#pragma unroll
    for (int step = FIRST; step < END; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
    return x;
}

template <int FIRST, int END>
__device__ __forceinline__ float sum_over_lanes(float x) {
#pragma unroll
    for (int step = FIRST; step < END; step *= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
    return x;
}
