// Work items of `many_heads.cu` and `many_heads_bf16.cu`: which rows they attend to, and where their results go.
//
// A work item is 64 heads of a query token, or of one split of its selected columns (split-KV). The first tokens of a launch
// are whole: their results go straight into the output. The other tokens are split: the results of a split go into
// split_out, split_lse and split_max_logits, and `merge_splits.cu` merges them.
//
// The selected rows of a token are processed in blocks of 64 rows, those of the first selection before those of the second.
// A split consists of whole blocks.
#pragma once
#include "instructions.cuh"
#include "params.cuh"

constexpr int HEADS = 64;       // heads of a work item: the M dimension of wgmma
constexpr int BLOCK_ROWS = 64;  // selected rows of a block
constexpr int VALUE_DIM = 512;  // columns of a row that are values

// One launch of `many_heads.cu` or `many_heads_bf16.cu`.
struct ManyHeadsParams {
    QueryParams query;
    OutputParams output;
    SelectionParams first;
    SelectionParams second;  // read only if SELECTIONS is 2
};

static_assert(sizeof(ManyHeadsParams) == PARAMS_BYTES, "ManyHeadsParams differs from its twin in many_heads.py");

// ---- Rows

// A selection of one query token.
struct TokenSelection {
    SelectionParams params;
    int page_shift;    // log2 of the page size; -1 if it is no power of two
    int length;        // selected columns
    const int* slots;  // the token's row of the slots
    const int* table;  // the request's row of the block table; null if the columns are slots, not positions
};

// The selection of a token. A token whose request the block table does not have selects nothing.
__device__ __forceinline__ TokenSelection selection_of(const SelectionParams& of, long long token) {
    const int page_shift = of.page_size & of.page_size - 1 ? -1 : __ffs(of.page_size) - 1;
    TokenSelection made = {of, page_shift, of.columns, of.slots + token * of.token_stride, nullptr};
    if (of.columns > 0 && of.lengths != nullptr) made.length = min(max(of.lengths[token], 0), of.columns);
    if (of.columns > 0 && of.block_table != nullptr) {
        const int request = of.request_ids[token];
        const bool known = request >= 0 && request < of.requests;
        made.table = of.block_table + (known ? request : 0) * of.table_stride;
        if (!known) made.length = 0;
    }
    return made;
}

// The rows of a work item, from N selections (1 or 2).
template <int N>
struct Work {
    TokenSelection first, second;
    int first_blocks;  // blocks of the first selection
    int begin, end;    // range of blocks of this work item

    // Blocks of the token.
    __device__ __forceinline__ int blocks() const {
        return first_blocks + (N > 1 ? (second.length + BLOCK_ROWS - 1) / BLOCK_ROWS : 0);
    }

    __device__ __forceinline__ bool is_second(int block) const { return N > 1 && block >= first_blocks; }
};

// Walks over one column of every block of a work item and returns its rows. It loads the slot two blocks ahead and the page
// one block ahead, since the address of a row depends on its page and the page on the slot.
//
// A block belongs to the same selection in all lanes. `pick` chooses the operands of a load by it, so that there is a single
// load: with one in each branch, the second would wait for the first, which has the same destination register.
template <int N, int ROW_BYTES>
struct RowWalker {
    const Work<N>& work;
    int column;                      // within a block
    int block;                       // the block of `slot`
    int slot;                        // a slot, or with a block table a position; -1: none
    int page = -1, row_in_page = 0;  // of the block before `block`, which `next` returns; page -1: none
    bool page_in_second = false;     // whether that block belongs to the second selection

    // Loads the first two slots together, since all warps wait for them at the beginning.
    __device__ __forceinline__ RowWalker(const Work<N>& work, int column)
        : work(work), column(column), block(work.begin + 1) {
        const int first = load_slot(work.begin);
        slot = load_slot(block);
        find_page(first, work.begin);
    }

    template <class T>
    __device__ __forceinline__ T pick(bool second, T SelectionParams::*field) const {
        return second ? work.second.params.*field : work.first.params.*field;
    }

    template <class T>
    __device__ __forceinline__ T pick(bool second, T TokenSelection::*field) const {
        return second ? work.second.*field : work.first.*field;
    }

    __device__ __forceinline__ int load_slot(int block) const {
        const bool second = work.is_second(block);
        const int at = (block - (second ? work.first_blocks : 0)) * BLOCK_ROWS + column;
        const int length = block < work.end ? pick(second, &TokenSelection::length) : 0;
        const int* const slots = pick(second, &TokenSelection::slots);
        const long long stride = pick(second, &SelectionParams::column_stride);
        return at < length ? slots[at * stride] : -1;
    }

    // Finds the page of a block's slot or position.
    __device__ __forceinline__ void find_page(int slot, int block) {
        const bool second = page_in_second = work.is_second(block);
        const int size = pick(second, &SelectionParams::page_size);
        const int shift = pick(second, &TokenSelection::page_shift);
        const int width = pick(second, &SelectionParams::table_width);
        const int* const table = pick(second, &TokenSelection::table);
        const int number = shift >= 0 ? slot >> shift : slot / size;  // negative or zero where the slot is negative
        row_in_page = slot - number * size;
        page = slot < 0 ? -1 : number;
        if (table != nullptr && slot >= 0) page = number < width ? table[number] : -1;
    }

    // Returns the row in the next block, or null if there is none. `to_exponents` becomes the distance to the row's eight scale
    // bytes, which V4 keeps in a plane behind all rows of the page.
    __device__ __forceinline__ const unsigned char* next(u32& to_exponents) {
        const bool second = page_in_second;
        const long long stride = pick(second, &SelectionParams::page_stride);
        const unsigned char* const start = pick(second, &SelectionParams::rows) + page * stride;
        const bool exists = static_cast<u32>(page) < static_cast<u32>(pick(second, &SelectionParams::pages));
        const u32 size = pick(second, &SelectionParams::page_size);
        const unsigned char* const row = exists ? start + row_in_page * static_cast<long long>(ROW_BYTES) : nullptr;
        to_exponents = size * ROW_BYTES - row_in_page * (ROW_BYTES - 8u);
        find_page(slot, block);
        slot = load_slot(++block);
        return row;
    }

    __device__ __forceinline__ const unsigned char* next() {
        u32 to_exponents;
        return next(to_exponents);
    }
};

// ---- Results

// The destination of a work item's results, starting at its first head.
struct ItemOutput {
    void* out;                // [heads, 512] of `kind`
    long long head_stride;    // of out, in elements
    int heads;                // of this work item, at most 64
    int kind;                 // 0 float32, 1 bf16, 2 fp16
    const float* sink;        // [heads], or null
    LogitRow logits;

    // Stores a warpgroup's accumulators of 64 heads and of 128 columns from `column` on, times a factor for each of the
    // thread's heads, `upper` and `lower` (see `softmax.cuh`).
    __device__ __forceinline__ void store(const float (&accumulators)[64], int column, float upper, float lower) const {
        if (kind == 0) store_float(accumulators, column, upper, lower);
        else if (kind == 1) store_16_bit<BF16>(accumulators, column, upper, lower);
        else store_16_bit<FP16>(accumulators, column, upper, lower);
    }

    __device__ __forceinline__ void store_float(const float (&accumulators)[64], int column, float upper, float lower) const {
        const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            if (head + 8 * below >= heads) continue;
            const float factor = below ? lower : upper;
            float* const at = static_cast<float*>(out) + (head + 8 * below) * head_stride + column + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                *reinterpret_cast<float2*>(at + 8 * i) =
                    make_float2(accumulators[4 * i + 2 * below] * factor, accumulators[4 * i + 2 * below + 1] * factor);
            }
        }
    }

    // A lane has two neighbouring columns in each of two groups of eight. It swaps one pair with its neighbour lane, so that
    // it has four neighbouring columns of one group and memory is written in whole sectors.
    template <Operand TYPE>
    __device__ __forceinline__ void store_16_bit(const float (&accumulators)[64], int column, float upper, float lower) const {
        const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane / 4, odd = lane % 2;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const float factor = below ? lower : upper;
            uint2 columns[8];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                u32 words[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float a = accumulators[4 * (2 * i + j) + 2 * below] * factor;
                    const float b = accumulators[4 * (2 * i + j) + 2 * below + 1] * factor;
                    words[j] = TYPE == BF16 ? pack_bf16(a, b) : pack_fp16(a, b);
                }
                const u32 other = __shfl_xor_sync(FULL_MASK, odd ? words[0] : words[1], 1);
                columns[i] = odd ? make_uint2(other, words[1]) : make_uint2(words[0], other);
            }
            if (head + 8 * below >= heads) continue;
            const long long first = (head + 8 * below) * head_stride + column + odd * 8 + lane % 4 / 2 * 4;
            unsigned short* const at = static_cast<unsigned short*>(out) + first;
#pragma unroll
            for (int i = 0; i < 8; ++i) *reinterpret_cast<uint2*>(at + 16 * i) = columns[i];
        }
    }
};

// ---- The work items of a launch

// The token, heads and split of a work item.
struct Place {
    int token;
    int first_head;
    int split;  // -1 for a whole token
};

// The numbering of work items: groups of 64 heads vary fastest, then the splits of a token, then tokens.
//
// In a launch that merges in clusters (MERGE_IN_CLUSTER) all tokens from `whole` on are split, and splits vary fastest: those of
// a token's 64 heads are the CTAs of a cluster, whose results go into the output.
struct Items {
    const ManyHeadsParams& params;

    __device__ __forceinline__ bool two_groups() const { return params.query.heads > HEADS; }  // 128 heads are the most

    __device__ __forceinline__ int count() const {
        return (params.output.whole + params.output.split_tokens * params.output.splits) << two_groups();
    }

    __device__ __forceinline__ Place place(int item) const {
        const int whole = params.output.whole, two = two_groups();
        const u32 splits = params.output.splits;
        if (MERGE_IN_CLUSTER) {
            const u32 number = item / splits;
            return {whole + static_cast<int>(number >> two), two && number % 2 ? HEADS : 0, static_cast<int>(item % splits)};
        }
        const int first_head = two && item % 2 ? HEADS : 0, number = (item >> two) - whole;
        if (number < 0) return {whole + number, first_head, -1};
        const u32 token = number / splits;
        return {whole + static_cast<int>(token), first_head, static_cast<int>(number - token * splits)};
    }

    // The rows of an item. Splits begin and end at multiples of UNIT_BLOCKS blocks, which a CTA processes together.
    template <int N, int UNIT_BLOCKS>
    __device__ __forceinline__ Work<N> work(const Place& place) const {
        const TokenSelection first = selection_of(params.first, place.token);
        const TokenSelection second = N > 1 ? selection_of(params.second, place.token) : TokenSelection();
        Work<N> work = {first, second, (first.length + BLOCK_ROWS - 1) / BLOCK_ROWS};
        const int blocks = work.blocks();
        work.begin = 0;
        work.end = blocks;
        if (place.split < 0) return work;
        // The first splits have one unit more if units do not divide evenly. (64-bit divisions would take as long as a load.)
        const u32 splits = params.output.splits, split = place.split;
        const u32 units = (blocks + UNIT_BLOCKS - 1) / UNIT_BLOCKS, each = units / splits, more = units - each * splits;
        const u32 begin = split * each + min(split, more);
        work.begin = begin * UNIT_BLOCKS;
        work.end = min(static_cast<int>((begin + each + (split < more)) * UNIT_BLOCKS), blocks);
        return work;
    }

    __device__ __forceinline__ ItemOutput output(const Place& place) const {
        const OutputParams& to = params.output;
        const int first = place.first_head, heads = params.query.heads, here = min(heads - first, HEADS);
        if (MERGE_IN_CLUSTER || place.split < 0) {
            const long long at = place.token * to.token_stride + first * to.head_stride;
            void* const start = static_cast<char*>(to.out) + at * (to.out_kind == 0 ? 4 : 2);
            const float* const sink = to.sink == nullptr ? nullptr : to.sink + first;
            const LogitRow logits = whole_logit_row(to, place.token, heads).from(first);
            return {start, to.head_stride, here, to.out_kind, sink, logits};
        }
        const long long row = static_cast<long long>(place.split) * to.split_tokens + place.token - to.whole;
        float* const start = to.split_out + (row * heads + first) * VALUE_DIM;
        return {start, VALUE_DIM, here, 0, nullptr, split_logit_row(to, row, heads).from(first)};
    }
};
