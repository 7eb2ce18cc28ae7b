// Helpers of the softmax that attention and the loss of the indexer share. Logits are in base 2, so that exp2 gives the weights.
#pragma once
#include "instructions.cuh"

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

__device__ __forceinline__ float load_float(u32 address) { return __uint_as_float(shared_load(address)); }
__device__ __forceinline__ void store_float(u32 address, float x) { shared_store(address, __float_as_uint(x)); }

// What rounding to bf16 cuts off two numbers, as bf16 as well.
__device__ __forceinline__ u32 cut_off(float first, float second, u32 rounded) {
    return pack_bf16(first - __uint_as_float(rounded << 16), second - __uint_as_float(rounded & 0xFFFF0000u));
}

// Butterfly reductions over the lanes whose numbers differ in the bits FIRST, 2 * FIRST, ... below END.
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

// ---- Accumulators of wgmma with heads as rows: four neighbouring lanes have the same two heads
//
// Lane i of a warp has columns of head i / 4 of the warp's 16, called `upper`, and of the head 8 further, called `lower`. Of
// every four accumulators the first two belong to the upper head. max_over_lanes<1, 4> reduces over the lanes of a head.

// Multiplies accumulators with the rescale factors of both heads, unless these are 1 in the whole warp.
template <int N>
__device__ __forceinline__ void rescale(float (&accumulators)[N][64], float upper, float lower) {
    if (__ballot_sync(FULL_MASK, upper != 1.0f || lower != 1.0f) == 0) return;
#pragma unroll
    for (int i = 0; i < N * 64; ++i) accumulators[i / 64][i % 64] *= i & 2 ? lower : upper;
}
