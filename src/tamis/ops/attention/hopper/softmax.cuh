// What the online softmax of every attention kernel shares. Logits are kept in base 2, so that exp2 gives the weights.
#pragma once

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }
