// What the kernels of top-k have in common: parameters, keys, and slots of positions.
#pragma once
#include "instructions.cuh"
#include "warp_sums.cuh"

// The parameters of a launch. T is the number of rows, B of requests.
struct TopkParams {
    const float* scores;      // [T, width]
    long long row_stride;     // of scores, in elements
    int width;                // scores of a row
    const int* lengths;       // [T], lengths of the rows; positions beyond do not count
    int k;                    // results of a row, at most 4096
    const int* request_ids;   // [T], or null without a block table
    const int* block_table;   // [B, table_width], or null: the results are positions
    long long table_stride;   // in elements
    int requests;             // B
    int table_width;          // pages of a request
    int page_size;            // positions of a page; 0 without a block table
    int* out;                 // [T, k], contiguous
    int resident;             // topk.cu: keys of a slice that are kept in shared memory; the others are read again
    int bitmap_words;         // topk.cu: words of each of the two bitmaps
};

// ---- Keys

// The key of -inf. NaN and places outside the row get it as well: they are no candidates.
constexpr u32 LOWEST = 0x007FFFFFu;

// The key of a score: unsigned integers compare like the floats. Adding zero makes -0 and 0 equal; fmaxf turns NaN to -inf.
__device__ __forceinline__ u32 key_of(float score) {
    const u32 bits = __float_as_uint(fmaxf(score + 0.0f, __uint_as_float(0xFF800000u)));
    return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

// The score of a key.
__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key ^ (static_cast<u32>(~static_cast<int>(key) >> 31) | 0x80000000u));
}

// ---- Sums

// The sum of the first `count` elements of `warps`, which has one for each warp.
__device__ __forceinline__ u32 sum_of_warps(const u32* warps, int count) {
    const int lane = threadIdx.x % 32;
    return __reduce_add_sync(FULL_MASK, lane < count ? warps[lane] : 0);
}

// ---- Slots

// The pages of a row's request.
struct Pages {
    const int* table;  // the request's row of the block table, or null
    int width;         // pages in that row
    int page_size;     // positions of a page

    // The slot of a position; -1 if it has no page.
    __device__ __forceinline__ int slot(int position) const {
        const int column = position / page_size;
        const int page = table != nullptr && column < width ? table[column] : -1;
        const long long slot = static_cast<long long>(page) * page_size + position % page_size;
        return page >= 0 && slot < 0x80000000ll ? static_cast<int>(slot) : -1;
    }
};

// With a block table only.
__device__ __forceinline__ Pages pages_of(const TopkParams& params, int row) {
    const int request = params.request_ids[row];
    const bool exists = request >= 0 && request < params.requests;
    return {exists ? params.block_table + request * params.table_stride : nullptr, params.table_width, params.page_size};
}
