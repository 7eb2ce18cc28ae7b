// Merges the parts of query tokens: one block per token and head, four of the 512 columns per thread. Constant: AT_ONCE,
// parts that are read before any is added.
#include "instructions.cuh"

constexpr int VALUES = 512, FEW_PARTS = 4096;
constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// parts [count, tokens, heads, 512], lses and tops [count, tokens, heads]; kind of numbers in out: 0 float32, 1 bf16, 2
// fp16.
extern "C" __global__ void __launch_bounds__(VALUES / 4) merge_parts(
    const float* parts, const float* lses, const float* tops, int count, int tokens, int heads, const float* sink,
    void* out, int kind, long long token_stride, long long head_stride, float* lse, float* top) {
    const long long row = blockIdx.x, rows = static_cast<long long>(tokens) * heads;
    const int head = row % heads;
    // What comes next may take its places, unless there is so much to merge that it would rather be in the way.
    if (rows * count <= FEW_PARTS) let_next_kernel_start();
    wait_for_previous_kernel();
    // Every warp for itself: a lane's parts are 32 apart. Comparisons would lose NaN, sums of what is beyond do not.
    const int lane = threadIdx.x % 32;
    float peak = minus_infinity(), highest = minus_infinity(), wrong = 0.0f;
    for (int part = lane; part < count; part += 32) {
        const float one = lses[part * rows + row], logit = tops[part * rows + row];
        peak = fmaxf(peak, one);
        highest = fmaxf(highest, logit);
        if (one != one || logit != logit) wrong = one + logit;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        peak = fmaxf(peak, __shfl_xor_sync(FULL_MASK, peak, step));
        highest = fmaxf(highest, __shfl_xor_sync(FULL_MASK, highest, step));
        wrong += __shfl_xor_sync(FULL_MASK, wrong, step);
    }
    const float base = peak == minus_infinity() ? 0.0f : peak;
    float total = wrong, sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const float* from = parts + row * VALUES + threadIdx.x * 4;
    for (int first = 0; first < count; first += AT_ONCE) {
        float4 values[AT_ONCE];
        float weights[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int part = first + i;
            weights[i] = part < count ? lses[part * rows + row] : minus_infinity();
            values[i] = part < count ? *reinterpret_cast<const float4*>(from + part * rows * VALUES) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const float weight = fast_exp2((weights[i] - base) * LOG2_E);
            total += weight;
            sums[0] += weight * values[i].x;
            sums[1] += weight * values[i].y;
            sums[2] += weight * values[i].z;
            sums[3] += weight * values[i].w;
        }
    }
    const bool empty = total == 0.0f;
    const float whole = empty ? minus_infinity() : base + fast_log2(total) * LN_2;
    float factor = empty ? 0.0f : 1.0f / total;
    if (sink != nullptr && !empty) factor *= 1.0f / (1.0f + fast_exp2((sink[head] - whole) * LOG2_E));
    const long long at = row / heads * token_stride + head * head_stride + threadIdx.x * 4;
    const float a = sums[0] * factor, b = sums[1] * factor, c = sums[2] * factor, d = sums[3] * factor;
    if (kind == 0) {
        *reinterpret_cast<float4*>(static_cast<float*>(out) + at) = make_float4(a, b, c, d);
    } else {
        const uint2 packed = kind == 1 ? make_uint2(pack_bf16(a, b), pack_bf16(c, d)) : make_uint2(pack_fp16(a, b), pack_fp16(c, d));
        *reinterpret_cast<uint2*>(static_cast<unsigned short*>(out) + at) = packed;
    }
    if (threadIdx.x == 0) {
        lse[row] = whole;
        top[row] = highest + wrong;
    }
}
