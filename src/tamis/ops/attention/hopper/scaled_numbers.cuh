// Constants and conversions of numbers that are multiplied with powers of two, for `many_heads.cu`.
#pragma once
#include "instructions.cuh"

// fp16 ends at 2**16. An e4m3 value is at most 448, so it fits with a scale below 2**7; a bf16 value fits below 2**16.
constexpr int SCALE_EXPONENT = 6, VALUE_EXPONENT = 15, QUERY_EXPONENT = 14;
constexpr int LOWEST_EXPONENT = 127 - 60;  // least exponent of scales and queries, with float32's bias: 2**-E stays finite
// The running max rises only for logits more than LEEWAY above it: weights, up to 2**LEEWAY, times HEADROOM fit fp16.
constexpr float LEEWAY = 4.0f, HEADROOM = 1024.0f;
constexpr float SPARE = 4.0f;  // a raised reference exceeds the row that raised it by this factor

__device__ __forceinline__ float power_of_two(int biased) { return __uint_as_float(static_cast<u32>(biased) << 23); }
__device__ __forceinline__ int biased_exponent(float x) { return __float_as_uint(x) >> 23 & 0xFF; }
__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

__device__ __forceinline__ uint4 mul_fp16x8(uint4 v, u32 factor) {
    return make_uint4(mul_fp16x2(v.x, factor), mul_fp16x2(v.y, factor), mul_fp16x2(v.z, factor), mul_fp16x2(v.w, factor));
}

// Converts eight e4m3 codes to fp16 and multiplies them with a scale.
__device__ __forceinline__ uint4 dequantise(uint2 codes, u32 scale) {
    uint4 v;
    e4m3x4_to_fp16(codes.x, v.x, v.y);
    e4m3x4_to_fp16(codes.y, v.z, v.w);
    return mul_fp16x8(v, scale);
}

__device__ __forceinline__ u32 bf16_to_fp16(u32 pair, float factor) {
    return pack_fp16(low_bf16(pair) * factor, high_bf16(pair) * factor);
}

// Multiply eight bf16 numbers with a power of two and convert them to fp16, or leave them bf16.
__device__ __forceinline__ uint4 bf16_to_fp16(uint4 v, float factor) {
    return make_uint4(bf16_to_fp16(v.x, factor), bf16_to_fp16(v.y, factor), bf16_to_fp16(v.z, factor), bf16_to_fp16(v.w, factor));
}

__device__ __forceinline__ uint4 scale_bf16(uint4 v, float factor) {
    const u32 pair = __byte_perm(__float_as_uint(factor), 0, 0x3232);
    return make_uint4(mul_bf16x2(v.x, pair), mul_bf16x2(v.y, pair), mul_bf16x2(v.z, pair), mul_bf16x2(v.w, pair));
}

// The largest magnitude of eight bf16 numbers, as 15 bits. Bits compare like the magnitudes, with NaN above all.
__device__ __forceinline__ u32 max_abs(uint4 v) {
    constexpr u32 MAGNITUDES = 0x7FFF7FFF;
    const u32 pairs = __vmaxu2(__vmaxu2(v.x & MAGNITUDES, v.y & MAGNITUDES), __vmaxu2(v.z & MAGNITUDES, v.w & MAGNITUDES));
    return max(pairs & 0xFFFF, pairs >> 16);
}
