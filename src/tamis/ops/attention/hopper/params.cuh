// The parameter structs that attention kernels share. Their Python twins in params.py have the same fields in the same order.
// T is the number of query tokens, H of heads, K of selected columns, S of splits.
#pragma once
#include "softmax.cuh"

// The queries and the softmax scale.
struct QueryParams {
    const unsigned short* q;      // [T, H, 576], bf16 or fp16
    long long token_stride;       // in elements
    long long head_stride;        // in elements
    int heads;                    // H
    float scale;                  // softmax scale
    const float* scale_factor;    // [1], or null; a second factor of the softmax scale, in device memory
};

// The destination of the results. The first `whole` tokens are written to `out`, `lse` and `max_logits`, the others as splits.
struct OutputParams {
    void* out;                    // [T, H, 512]
    int out_kind;                 // 0 float32, 1 bf16, 2 fp16
    long long token_stride;       // of out, in elements
    long long head_stride;        // of out, in elements
    long long rest;               // how far from a number of out what rounding cuts off it is written; with KEEP_REST only
    float* lse;                   // [T / group, H, group], contiguous
    float* max_logits;            // [T / group, H, group], contiguous
    int group;                    // query tokens that are neighbours in lse and max_logits
    float lse_factor;             // 1 for natural logarithms, log2(e) for base 2
    float empty_lse;              // the lse of a row that attends to nothing
    const float* sink;            // [H], or null; applied to whole tokens only
    float* split_out;             // [S, T - whole, H, 512], contiguous
    float* split_lse;             // [S, T - whole, H], contiguous
    float* split_max_logits;      // [S, T - whole, H], contiguous
    int whole;                    // tokens that are not split
    int split_tokens;             // T - whole
    int splits;                   // S
};

// The lse and max_logits of the heads of one token or split.
struct LogitRow {
    float *lse, *max_logits;      // of the first head
    int stride;                   // from one head to the next
    float lse_factor, empty_lse;  // see OutputParams; splits have natural logarithms and -inf

    // The same row from another head on.
    __device__ __forceinline__ LogitRow from(int head) const {
        const long long at = static_cast<long long>(head) * stride;
        return {lse + at, max_logits + at, stride, lse_factor, empty_lse};
    }

    // `natural_lse` is -inf for a row that attends to nothing.
    __device__ __forceinline__ void store(int head, float natural_lse, float max_logit) const {
        const bool empty = natural_lse == minus_infinity();
        lse[static_cast<long long>(head) * stride] = empty ? empty_lse : natural_lse * lse_factor;
        max_logits[static_cast<long long>(head) * stride] = empty ? minus_infinity() : max_logit;
    }
};

// The row of a whole token, in the caller's layout.
__device__ __forceinline__ LogitRow whole_logit_row(const OutputParams& to, long long token, int heads) {
    const u32 number = static_cast<u32>(token), group = static_cast<u32>(to.group);
    const long long at = static_cast<long long>(number / group) * heads * group + number % group;
    return {to.lse + at, to.max_logits + at, to.group, to.lse_factor, to.empty_lse};
}

// A row of `split_lse` and `split_max_logits`.
__device__ __forceinline__ LogitRow split_logit_row(const OutputParams& to, long long row, int heads) {
    return {to.split_lse + row * heads, to.split_max_logits + row * heads, 1, 1.0f, minus_infinity()};
}

// The rows of one cache that the query tokens attend to.
struct SelectionParams {
    const unsigned char* rows;    // [pages, page_size, row bytes]
    long long page_stride;        // in bytes
    int page_size;                // rows per page
    int pages;                    // pages of the cache; a slot beyond them selects nothing
    const int* slots;             // [T, K]: slots, or with a block table positions; -1 padded
    long long token_stride;       // of slots, in elements
    long long column_stride;      // of slots, in elements
    int columns;                  // K
    const int* lengths;           // [T], or null: how many columns of a token count
    const int* request_ids;       // [T], or null without a block table
    const int* block_table;       // [requests, table_width], or null
    long long table_stride;       // in elements
    int table_width;              // pages per request
    int requests;                 // rows of the block table
};

// One launch of `few_heads.cu` or `heads_as_columns.cu`.
struct AttendParams {
    int items;                    // work items: whole tokens, then splits of the others
    int split_columns;            // columns of a split
    QueryParams query;
    OutputParams output;
    SelectionParams selection;
};
