// Work items of `few_heads.cu` and `heads_as_columns.cu`: where their rows begin and where their results go.
//
// A work item is a query token, or one split of its selected columns (split-KV). Items 0 to whole - 1 are whole tokens.
// Every other token has `splits` items in a row; `merge_splits.cu` merges their results.
#pragma once
#include "instructions.cuh"
#include "params.cuh"
#include "softmax.cuh"

static_assert(sizeof(AttendParams) == PARAMS_BYTES, "AttendParams differs from its Python twin");

// A failed assertion shows both numbers: the bytes that the kernel's SharedMemoryPlan needs and those of the launch.
template <int NEEDED, int GIVEN>
struct CheckSharedBytes {
    static_assert(NEEDED == GIVEN, "SharedMemoryPlan needs another number of bytes than the CTA shape gives");
};

constexpr int VALUES = 512;  // columns of an output

// The numbers of a launch's work items. They are copied so that the compiler keeps them in registers: it loads fields of the
// kernel's parameter again after every instruction that may write memory.
struct WorkItems {
    int count;          // work items of the launch
    int whole;          // tokens that are one item each
    int splits;         // items of every other token
    int split_columns;  // selected columns of a split

    __device__ __forceinline__ explicit WorkItems(const AttendParams& p)
        : count(p.items), whole(p.output.whole), splits(p.output.splits), split_columns(p.split_columns) {}

    __device__ __forceinline__ int token(int item) const {
        return item < whole ? item : whole + (item - whole) / splits;
    }

    __device__ __forceinline__ int split(int item) const { return item < whole ? 0 : (item - whole) % splits; }
};

// The factor that turns products of queries and keys into logits in base 2.
__device__ __forceinline__ float softmax_scale_log2(const AttendParams& p) {
    const float scale = p.query.scale;
    return (p.query.scale_factor == nullptr ? scale : scale * *p.query.scale_factor) * LOG2_E;
}

// The destination of a work item's results: a token's row of the output, or a row of the splits, which are float32 and get
// no sink.
struct OutputRow {
    void* out;                            // [rows, H, 512] of `kind`
    int kind;                             // 0 float32, 1 bf16, 2 fp16
    long long token_stride, head_stride;  // of out, in elements
    long long rest;                       // see OutputParams
    LogitRow logits;
    const float* sink;                    // [H], or null
    long long row;                        // of this work item in out

    __device__ __forceinline__ OutputRow(const AttendParams& p, const WorkItems& work, int item, int token) {
        const OutputParams& o = p.output;
        const bool whole = item < work.whole;
        out = whole ? o.out : o.split_out;
        kind = whole ? o.out_kind : 0;
        token_stride = whole ? o.token_stride : static_cast<long long>(p.query.heads) * VALUES;
        head_stride = whole ? o.head_stride : VALUES;
        rest = o.rest;
        sink = whole ? o.sink : nullptr;
        const long long split_row = static_cast<long long>(work.split(item)) * o.split_tokens + token - work.whole;
        row = whole ? token : split_row;
        logits = whole ? whole_logit_row(o, token, p.query.heads) : split_logit_row(o, split_row, p.query.heads);
    }
};

// ---- Numbers

// Two packed 16-bit query elements as float32.
template <Operand TYPE>
__device__ __forceinline__ float2 unpack(u32 packed) {
    if (TYPE == FP16) return unpack_fp16(packed);
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u)};
}

// Splits two numbers into sums of bf16 terms. Each term is the rounded remainder of those before it.
template <int TERMS>
__device__ __forceinline__ void bf16_terms(float2 rest, u32 (&terms)[TERMS]) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        terms[term] = pack_bf16(rest.x, rest.y);
        rest.x -= __uint_as_float(terms[term] << 16);
        rest.y -= __uint_as_float(terms[term] & 0xFFFF0000u);
    }
}

// The power of two that brings a head's query into fp16's range, and its inverse.
struct QueryScale {
    float factor, inverse;

    // `largest` is the bits of the largest magnitude of the query. That element is scaled to between 2^14 and 2^15, so that
    // fp16 loses nothing that counts. Bits of positive floats compare like the floats, with NaN above all; the bounds keep
    // both factors finite.
    __device__ __forceinline__ explicit QueryScale(u32 largest) {
        const u32 exponent = min(max(largest >> 23, 27u), 254u);
        factor = __uint_as_float((268 - exponent) << 23);
        inverse = __uint_as_float((exponent - 14) << 23);
    }
};
