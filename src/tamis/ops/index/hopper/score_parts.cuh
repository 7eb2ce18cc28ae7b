// What the scorers share: how work is divided, tokens into tiles and the tiles' blocks of keys among the CTAs; pages, parts and
// weights. Included after the constants of the kernel, its `block_cost`, and its part of shared memory up to WEIGHTS.
#pragma once
#include "warp_sums.cuh"

// ---- Shared memory from WEIGHTS: [BUFFERS][COLUMNS / 16][4 lanes][4] floats

constexpr u32 BOUNDS = WEIGHTS + BUFFERS * COLUMNS * 4;          // [BUFFERS][BOUNDED][2] first and last key of each token
constexpr u32 PARTS = BOUNDS + BUFFERS * BOUNDED * 8;            // [BUFFERS] Part
constexpr u32 PRESENT = PARTS + BUFFERS * sizeof(Part);          // [STAGES] a bit for each 16 keys that exist
constexpr u32 COSTS = PRESENT + (STAGES + 3) / 4 * 16;           // [MOST_GROUPS + 1] costs of the groups before
constexpr u32 WARP_COSTS = COSTS + (MOST_GROUPS + 4) * 4;        // [32] costs of the groups of each warp
constexpr u32 FULL = WARP_COSTS + 128;                           // [STAGES] mbarriers, as all that follow
constexpr u32 EMPTY = FULL + STAGES * 8;
constexpr u32 QUERIES_FULL = EMPTY + STAGES * 8;                 // [BUFFERS]
constexpr u32 QUERIES_EMPTY = QUERIES_FULL + BUFFERS * 8;
constexpr u32 USED = QUERIES_EMPTY + BUFFERS * 8;
static_assert(USED <= SHARED_BYTES && FULL % 8 == 0, "shared memory is too small or not aligned");
static_assert(PARTS % 16 == 0 && BOUNDS % 8 == 0, "parts are stored 16 bytes at a time, bounds 8");
static_assert(STAGES % CONSUMERS == 0, "each consumer has its own stages");
// A CTA has the registers that it is launched with, as many for every thread. More than these would be waited for in vain.
static_assert(PRODUCE_REGISTERS + CONSUMERS * SCORE_REGISTERS <= THREADS / 128 * (65536 / THREADS / 8 * 8), "too many registers");

// ---- Tiles

// A run of tokens of one request, and the keys that they see.
struct Tile {
    int first, count;  // tokens
    int request;
    int begin, end;    // blocks of keys
};

// The keys that a token sees: none if its request does not exist.
struct Bounds {
    int request, start, end;

    __device__ __forceinline__ Bounds(const ScoreParams& params, int token) {
        request = params.request_ids == nullptr ? 0 : params.request_ids[token];
        start = params.starts == nullptr ? 0 : max(params.starts[token], 0);
        end = min(params.ends[token], params.listed_keys);
        if (params.request_ids != nullptr && (request < 0 || request >= params.requests)) end = 0;
        if (end <= start) start = 0x7FFFFFFF, end = 0;  // it does not widen what the other tokens of a tile see
    }
};

__device__ __forceinline__ u32 cost_of(int count, int start, int end) {
    return end <= start ? 0 : ((end + BLOCK - 1) / BLOCK - start / BLOCK) * block_cost(count);
}

// The cost of all tiles of a group, by one thread.
__device__ __forceinline__ u32 group_cost(const ScoreParams& params, int group) {
    const int first = group * params.group, last = min(first + params.group, params.tokens);
    u32 cost = 0;
    int request = 0, count = 0, start = 0x7FFFFFFF, end = 0;
#pragma unroll 8
    for (int token = first; token < last; ++token) {
        const Bounds own(params, token);
        if (count > 0 && own.request != request) {
            cost += cost_of(count, start, end);
            count = 0, start = 0x7FFFFFFF, end = 0;
        }
        request = own.request, ++count;
        start = min(start, own.start), end = max(end, own.end);
    }
    return cost + cost_of(count, start, end);
}

// Computes the costs before each group, by all threads of the CTA.
__device__ __forceinline__ void sum_costs(const ScoreParams& params, u32 memory, int groups) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int run = (groups + THREADS - 1) / THREADS, first = min(static_cast<int>(threadIdx.x) * run, groups);
    const int last = min(first + run, groups);
    u32 own = 0;
    for (int group = first; group < last; ++group) {
        const u32 cost = group_cost(params, group);
        shared_store(memory + COSTS + group * 4, own);
        own += cost;
    }
    const u32 so_far = inclusive_sum(own);
    if (lane == 31) shared_store(memory + WARP_COSTS + warp * 4, so_far);
    __syncthreads();  // the sums of all warps are there
    const u32 before = lane < warp ? shared_load(memory + WARP_COSTS + lane * 4) : 0;
    const u32 offset = __reduce_add_sync(FULL_MASK, before) + so_far - own;
    for (int group = first; group < last; ++group) {
        shared_store(memory + COSTS + group * 4, shared_load(memory + COSTS + group * 4) + offset);
    }
    if (threadIdx.x == THREADS - 1) shared_store(memory + COSTS + groups * 4, offset + own);
    __syncthreads();  // the costs are complete
}

// Calls `visit(tile, first block, last block)` for the parts of tiles that belong to this CTA, in order, by a whole warp.
template <class Visit>
__device__ __forceinline__ void for_each_part(const ScoreParams& params, u32 memory, int groups, const Visit& visit) {
    const u32 total = shared_load(memory + COSTS + groups * 4);
    const int lane = threadIdx.x % 32;
    const u32 low = static_cast<unsigned long long>(total) * blockIdx.x / gridDim.x;
    const u32 high = static_cast<unsigned long long>(total) * (blockIdx.x + 1) / gridDim.x;
    if (low == high) return;
    // The last group whose costs before are at most `low`.
    int group = 0;
    for (int step = MOST_GROUPS; step > 0; step /= 2) {
        if (group + step < groups && shared_load(memory + COSTS + (group + step) * 4) <= low) group += step;
    }
    for (; group < groups && shared_load(memory + COSTS + group * 4) < high; ++group) {
        u32 before = shared_load(memory + COSTS + group * 4);
        const int first = group * params.group, count = min(params.group, params.tokens - first);
        int request = -1, start = 0x7FFFFFFF, end = 0;
        if (lane < count) {
            const Bounds own(params, first + lane);
            request = own.request, start = own.start, end = own.end;
        }
        const int left = __shfl_up_sync(FULL_MASK, static_cast<u32>(request), 1);
        u32 begins = __ballot_sync(FULL_MASK, lane < count && (lane == 0 || left != request));
        while (begins != 0) {
            const int begin = __ffs(begins) - 1;
            begins &= begins - 1;
            const int stop = begins != 0 ? __ffs(begins) - 1 : count;
            const bool inside = lane >= begin && lane < stop;
            Tile tile;
            tile.first = first + begin;
            tile.count = stop - begin;
            tile.request = static_cast<int>(__shfl_sync(FULL_MASK, static_cast<u32>(request), begin));
            const int latest = __reduce_max_sync(FULL_MASK, inside ? end : 0);
            const int earliest = 0x7FFFFFFF - __reduce_max_sync(FULL_MASK, inside ? 0x7FFFFFFF - start : 0);
            if (latest <= earliest) continue;
            tile.begin = earliest / BLOCK;
            tile.end = (latest + BLOCK - 1) / BLOCK;
            const u32 unit = block_cost(tile.count);
            const int from = low > before ? (low - before + unit - 1) / unit : 0;
            const int to = high > before ? (high - before + unit - 1) / unit : 0;
            const int from_block = tile.begin + from, to_block = min(tile.begin + to, tile.end);
            before += (tile.end - tile.begin) * unit;
            if (from_block < to_block) visit(tile, from_block, to_block);
        }
    }
}

// ---- Memory

// The pages of a block of keys, -1 where there is none.
struct BlockPages {
    int page[4];

    __device__ __forceinline__ void look_up(const ScoreParams& params, const int* table, int block, int count, int rows) {
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            page[part] = -1;
            if (part >= count) continue;
            const int key = block * BLOCK + part * rows, column = key / params.page_size;
            if (table == nullptr) page[part] = key < params.listed_keys ? column : -1;
            else if (column < params.table_width) page[part] = table[column];
            if (table != nullptr && page[part] >= params.pages) page[part] = -1;
        }
    }
};

// A block of keys that is to be copied into a stage of the ring.
struct BlockCopy {
    int block;          // its number in the request, or in the list
    bool listed;        // whether keys are one list
    BlockPages pages;
    int rows;           // keys of one of the pages
    int present;        // those that exist, fewer at the end of a list
    u32 stage;

    // The number of the first key of `part` in its page.
    __device__ __forceinline__ int within(const ScoreParams& params, int part) const {
        return listed ? 0 : (block * BLOCK + part * rows) % params.page_size;
    }

    // Waits for room in the stage; `number` is the block's in the CTA's sequence of blocks.
    __device__ __forceinline__ void wait(u32 memory, u32 number) const {
        mbarrier_wait(memory + EMPTY + stage * 8, number / STAGES % 2 ^ 1);
    }

    // Says which keys exist, and how many bytes are going to be copied: `page_bytes` for each page.
    __device__ __forceinline__ void announce(u32 memory, u32 page_bytes) const {
        const u32 sixteens = (1u << rows / 16) - 1;  // a bit for each 16 keys of a page
        u32 exist = 0, bytes = 0;
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            if (pages.page[part] < 0) continue;
            exist |= sixteens << part * (rows / 16), bytes += page_bytes;
        }
        shared_store(memory + PRESENT + stage * 4, exist);
        mbarrier_arrive_expect_tx(memory + FULL + stage * 8, bytes);
    }
};

// Calls `copy(block, number)` for the blocks of keys of all parts, by one warp: a lane copies a block. Half of the stages are
// filled at once, while consumers work on the other half.
template <class Copy>
__device__ __forceinline__ void for_each_block(const ScoreParams& params, u32 memory, int groups, const Copy& copy) {
    constexpr int BATCH = STAGES / 2;
    const int lane = threadIdx.x % 32;
    const int count = params.page_size < BLOCK ? BLOCK / params.page_size : 1, rows = BLOCK / count;  // pages; their keys
    u32 number = lane;  // of this lane's block
    for_each_part(params, memory, groups, [&](const Tile& tile, int from, int to) {
        const bool listed = params.block_table == nullptr;
        const int* const table = listed ? nullptr : params.block_table + tile.request * params.table_stride;
        BlockPages next;
        next.look_up(params, table, from + lane, count, rows);
#pragma unroll 1
        for (int first = from; first < to; first += BATCH) {
            const int block = first + lane;
            const BlockPages own = next;
            next.look_up(params, table, block + BATCH, count, rows);
            if (lane < BATCH && block < to) {
                const int present = listed ? min(rows, params.listed_keys - block * BLOCK) : rows;
                copy(BlockCopy{block, listed, own, rows, present, number % STAGES}, number);
            }
            __syncwarp();
            number += min(BATCH, to - first);
        }
    });
}

// Publishes the tiles of all parts to the consumers, by LOADERS threads, numbered by `thread`; `copy(first token, tokens,
// buffer)` copies queries and weights.
template <class Copy>
__device__ __forceinline__ void publish_parts(const ScoreParams& params, u32 memory, int groups, int thread, const Copy& copy) {
    int part = 0, number = 0;
    const auto publish = [&](int first, int count, int position, int blocks) {
        const int buffer = part % BUFFERS;
        mbarrier_wait(memory + QUERIES_EMPTY + buffer * 8, part / BUFFERS % 2 ^ 1);
        if (thread == 0) {
            const u32 own = memory + PARTS + buffer * sizeof(Part);
            shared_store4(own, make_uint4(first, count, position, blocks));
            shared_store(own + 16, number);
        }
        copy(first, count, buffer);
        if (thread < count) {
            const Bounds own(params, first + thread);
            shared_store2(memory + BOUNDS + (buffer * BOUNDED + thread) * 8, make_uint2(own.start, own.end));
        }
        fence_async_proxy();
        mbarrier_arrive(memory + QUERIES_FULL + buffer * 8);
        ++part;
        number += blocks;
    };
    for_each_part(params, memory, groups, [&](const Tile& tile, int from, int to) {
        publish(tile.first, tile.count, from * BLOCK, to - from);
    });
    publish(0, 0, 0, 0);
}

// A weight of any of the types, as float32.
__device__ __forceinline__ float load_weight(const ScoreParams& params, long long at) {
    if (params.weight_type == 0) return static_cast<const float*>(params.weights)[at];
    const u32 bits = static_cast<const unsigned short*>(params.weights)[at];
    return params.weight_type == 1 ? __uint_as_float(bits << 16) : unpack_fp16(bits).x;
}

// Writes -inf past the block of each token's last key. Rows are divided among the CTAs, and among `threads` threads.
__device__ __forceinline__ void fill_rows(const ScoreParams& params, int thread, int threads) {
    for (int token = blockIdx.x; token < params.tokens; token += gridDim.x) {
        const Bounds own(params, token);
        float* const row = params.out + token * params.out_stride;
        const int before = own.end > 0 ? own.start / BLOCK * BLOCK : 0;
        for (int at = thread; at < before; at += threads) row[at] = __uint_as_float(MINUS_INFINITY);
        for (int at = (own.end + BLOCK - 1) / BLOCK * BLOCK + thread; at < params.width; at += threads) {
            row[at] = __uint_as_float(MINUS_INFINITY);
        }
    }
}
