// Merges the splits of query tokens (split-KV): out = sum over splits s of exp(lse_s - lse) * out_s.
//
// One CTA of 128 threads per token and head; a thread has four of the 512 columns. Every warp reduces the lse of all splits
// redundantly, so no shared memory is needed. The kernel is bound by reading the splits, 2 KiB each, so BATCH of them are
// loaded before any is added.
//
// Defined by the host: BATCH, PARAMS_BYTES.
#include "instructions.cuh"
#include "softmax.cuh"

constexpr int VALUES = 512;
// With PDL the next kernel may start early if there are at most this many rows of splits (splits times tokens times heads);
// with more, its CTAs would compete for the SMs.
constexpr int EARLY_LAUNCH_SPLITS = 4096;

// S splits of T tokens and H heads.
struct MergeParams {
    const float* split_out;         // [S, T, H, 512]
    const float* split_lse;         // [S, T, H]
    const float* split_max_logits;  // [S, T, H]
    int splits;                     // S
    int tokens;                     // T
    int heads;                      // H
    const float* sink;              // [H], or null
    void* out;                      // [whole + T, H, 512]
    int out_kind;                   // 0 float32, 1 bf16, 2 fp16
    long long token_stride;         // of out, in elements
    long long head_stride;          // of out, in elements
    long long rest;                 // how far from a number of bf16 out what rounding cuts off it is written; 0: nowhere
    int whole;                      // tokens of out, lse and max_logits before the first split token
    float* lse;                     // [(whole + T) / group, H, group], contiguous
    float* max_logits;              // [(whole + T) / group, H, group], contiguous
    int group;                      // query tokens that are neighbours in lse and max_logits
    float lse_factor;               // 1 for natural logarithms, log2(e) for base 2
    float empty_lse;                // the lse of a row that attends to nothing
};
static_assert(sizeof(MergeParams) == PARAMS_BYTES, "MergeParams differs from its Python twin");

extern "C" __global__ void __launch_bounds__(VALUES / 4) merge_splits(const __grid_constant__ MergeParams p) {
    const int splits = p.splits;
    const long long row = blockIdx.x, rows = static_cast<long long>(p.tokens) * p.heads;
    const int head = row % p.heads;
    if (rows * splits <= EARLY_LAUNCH_SPLITS) let_next_kernel_start();
    wait_for_previous_kernel();
    // Lane i takes splits i, i + 32, and so on. fmaxf drops NaN, so `nan` is NaN if any lse or max_logit is, and else 0.
    const int lane = threadIdx.x % 32;
    float max_lse = minus_infinity(), max_logit = minus_infinity(), nan = 0.0f;
    for (int split = lane; split < splits; split += 32) {
        const float lse = p.split_lse[split * rows + row], logit = p.split_max_logits[split * rows + row];
        max_lse = fmaxf(max_lse, lse);
        max_logit = fmaxf(max_logit, logit);
        if (lse != lse || logit != logit) nan = lse + logit;
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        max_lse = fmaxf(max_lse, __shfl_xor_sync(FULL_MASK, max_lse, step));
        max_logit = fmaxf(max_logit, __shfl_xor_sync(FULL_MASK, max_logit, step));
        nan += __shfl_xor_sync(FULL_MASK, nan, step);
    }
    const float base = max_lse == minus_infinity() ? 0.0f : max_lse;
    float total = nan, sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    const float* from = p.split_out + row * VALUES + threadIdx.x * 4;
    for (int first = 0; first < splits; first += BATCH) {
        float4 values[BATCH];
        float lses[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const int split = first + i;
            lses[i] = split < splits ? p.split_lse[split * rows + row] : minus_infinity();
            values[i] = split < splits ? *reinterpret_cast<const float4*>(from + split * rows * VALUES)
                                         : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < BATCH; ++i) {
            const float weight = fast_exp2((lses[i] - base) * LOG2_E);
            total += weight;
            sums[0] += weight * values[i].x;
            sums[1] += weight * values[i].y;
            sums[2] += weight * values[i].z;
            sums[3] += weight * values[i].w;
        }
    }
    const bool empty = total == 0.0f;
    const float lse = empty ? minus_infinity() : base + fast_log2(total) * LN_2;
    float factor = empty ? 0.0f : 1.0f / total;
    if (p.sink != nullptr && !empty) factor *= 1.0f / (1.0f + fast_exp2((p.sink[head] - lse) * LOG2_E));
    const long long token = p.whole + row / p.heads;
    const long long at = token * p.token_stride + head * p.head_stride + threadIdx.x * 4;
    const float a = sums[0] * factor, b = sums[1] * factor, c = sums[2] * factor, d = sums[3] * factor;
    if (p.out_kind == 0) {
        *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(a, b, c, d);
    } else {
        const uint2 packed = p.out_kind == 1 ? make_uint2(pack_bf16(a, b), pack_bf16(c, d))
                                             : make_uint2(pack_fp16(a, b), pack_fp16(c, d));
        unsigned short* const to = static_cast<unsigned short*>(p.out) + at;
        *reinterpret_cast<uint2*>(to) = packed;
        if (p.rest != 0) *reinterpret_cast<uint2*>(to + p.rest) = make_uint2(cut_off(a, b, packed.x), cut_off(c, d, packed.y));
    }
    if (threadIdx.x == 0) {
        const u32 number = static_cast<u32>(token), group = static_cast<u32>(p.group);
        const long long to = (static_cast<long long>(number / group) * p.heads + head) * group + number % group;
        p.lse[to] = empty ? p.empty_lse : lse * p.lse_factor;
        p.max_logits[to] = max_logit + nan;
    }
}
