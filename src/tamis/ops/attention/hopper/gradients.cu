// Gradients of sparse attention over bf16 rows, on Hopper. `tamis.ops.attention.gradients` has the formulas.
//
// A CTA takes one query token and up to HEADS of its heads, and walks over the token's selected rows in blocks of 64. For a
// block it computes, with rows on the M axis of wgmma and heads on the N axis, the logits S = rows q^T and dP = rows dO^T,
// from these p and dz, and with both as bf16 operands the two gradients: dq += dz^T rows, which stays in registers until the
// token's last block, and drows = dz q + p dO, which leaves for memory at once.
//
// Roles of the three warpgroups:
//   2     gather   Producer. Copies the rows of a block with cp.async straight into swizzled tiles.
//   0, 1  compute  Consumers. Warpgroup 0 computes S and p, warpgroup 1 dP and, with p, dz. When p and dz are in shared
//                  memory as bf16 operands, each computes the columns of dq and drows that belong to it: 256 columns of the
//                  values, and half of the columns after them.
//
// Rows are read for the last time by dq, so that the next block is gathered while drows are computed and leave. With 64 heads
// there is no shared memory for a second stage of rows: queries take 72 KiB, output gradients 64, rows 72, dz and p 16.
//
// Gradients of rows are added to a float32 tensor by reductions (ORDERED 0), or stored by pair of token and row, from where
// `ordered_sums.cu` adds them up in order (ORDERED 1); see `row_gradients.cuh`.
//
// Budget for a block at 64 heads (H200): 5,504 cycles of wgmma; 147 KB of reductions, for which L2 takes 9,200 cycles when all
// SMs send them.
//
// Defined by the host: WIDTH (512 or 576), HEADS (16, 32 or 64), ORDERED, THREADS, SHARED_BYTES, PARAMS_BYTES, and the
// registers per thread of the roles: COMPUTE_REGISTERS, GATHER_REGISTERS.
#include "instructions.cuh"
#include "row_gradients.cuh"
#include "softmax.cuh"
#include "tile_copier.cuh"
#include "warpgroups.cuh"

struct GradientParams {
    const unsigned short* q;     // [T, H, WIDTH], bf16
    const unsigned short* dout;  // [T, H, 512], bf16, or null
    const unsigned short* rows;  // [N, WIDTH], bf16
    const int* slots;            // [T, K]
    const int* lengths;          // [T], or null
    const float* lse;            // [T, H]
    const float* delta;          // [T, H], or null
    const float* dlse;           // [T, H], or null
    const float* sink;           // [H], or null
    unsigned short* dq;          // [T, H, WIDTH], bf16, or null
    float* drows;                // [N, WIDTH], columns as in RowSums, or null; not read with ORDERED
    unsigned short* pairs;       // [places, K, parts, WIDTH], fp16, with ORDERED
    float* pair_scales;          // [places, K, parts, scales], with ORDERED
    long long q_token_stride;    // in elements, as all strides
    long long q_head_stride;
    long long dout_token_stride;
    long long dout_head_stride;
    long long row_stride;
    long long slots_token_stride;
    long long slots_column_stride;
    int heads;                   // H
    int parts;                   // CTAs of a token: H / HEADS, rounded up
    int columns;                 // K
    int row_count;               // N
    int first_token;             // of the launch
    float scale;                 // softmax scale
};

static_assert(sizeof(GradientParams) == PARAMS_BYTES, "GradientParams differs from its twin in gradients.py");

// ---- Shapes and shared memory

constexpr int BLOCK_ROWS = 64, VALUE_TILES = 512 / 64, TILES = WIDTH / 64;
constexpr int STAGES = HEADS == 64 ? 1 : 2;  // blocks of rows in shared memory
constexpr int CONSUMERS = 2 * WARPS * 32;    // threads
constexpr u32 STAGE_BYTES = TILES * TILE_BYTES, HEAD_TILE_BYTES = HEADS * 128;

constexpr u32 ROWS = 0;                                       // [STAGES][TILES][64 rows][64 columns] bf16
constexpr u32 QUERIES = ROWS + STAGES * STAGE_BYTES;          // [TILES][HEADS][64 columns] bf16
constexpr u32 UPSTREAM = QUERIES + TILES * HEAD_TILE_BYTES;   // [VALUE_TILES][HEADS][64 columns] bf16: dO
// dz and p, [64 rows][HEADS]: a tile each for 64 heads, else both in one, dz in the first columns.
constexpr u32 SLOPES = UPSTREAM + VALUE_TILES * HEAD_TILE_BYTES;
constexpr u32 WEIGHTS = HEADS == 64 ? SLOPES + TILE_BYTES : SLOPES + HEADS * 2;
constexpr u32 FACTORS = SLOPES + (HEADS == 64 ? 2 : 1) * TILE_BYTES;  // [HEADS][4] see `store_factors`
constexpr u32 SLOTS = FACTORS + HEADS * 16;                   // [STAGES][64] row numbers, -1 where there is none
constexpr u32 FULL = SLOTS + STAGES * BLOCK_ROWS * 4;         // [STAGES] mbarriers, as all that follow
constexpr u32 EMPTY = FULL + STAGES * 8;                      // [STAGES]
constexpr u32 LOADED = EMPTY + STAGES * 8;                    // queries and output gradients are there

// p in float32, from one warpgroup to the other: [HEADS / 8][128 threads][4]. Unless heads are few, it lies where dz and p
// go next.
constexpr u32 HANDED = HEADS > 16 ? SLOPES : (LOADED + 8 + 15) / 16 * 16, HANDED_STEP = WARPS * 32 * 16;
constexpr u32 USED = HEADS > 16 ? LOADED + 8 : HANDED + HEADS / 8 * HANDED_STEP;
static_assert(USED <= SHARED_BYTES && SLOPES % 1024 == 0 && FULL % 8 == 0, "shared memory is too small or not aligned");

// Named barriers of the consumers: the last block's dz and p have been read; p has been handed over; it has been taken; this
// block's dz and p have been written.
constexpr u32 FACTORS_FREE = 1, P_HANDED = 2, P_TAKEN = 3, FACTORS_WRITTEN = 4;

__device__ __forceinline__ u32 full(u32 memory, int stage) { return memory + FULL + stage * 8; }
__device__ __forceinline__ u32 empty(u32 memory, int stage) { return memory + EMPTY + stage * 8; }

// The token and the heads of a CTA.
struct Item {
    int place;        // of the token in the launch
    long long token;
    int part, first_head, heads;
    int end;          // selected columns
    int blocks;

    __device__ __forceinline__ explicit Item(const GradientParams& given) {
        // Opaque, so that roles compute these numbers anew instead of holding registers for them from the start.
        const int number = opaque(blockIdx.x);
        place = number / given.parts;
        token = given.first_token + place;
        part = number % given.parts;
        first_head = part * HEADS;
        heads = min(given.heads - first_head, HEADS);
        end = given.columns;
        if (given.lengths != nullptr) end = min(max(given.lengths[token], 0), end);
        blocks = (end + BLOCK_ROWS - 1) / BLOCK_ROWS;
    }
};

// ---- Loads

// Starts the copies of queries or output gradients, by all threads of the CTA. Heads that do not exist are zeros.
template <int HEAD_TILES>
__device__ __forceinline__ void load_heads(u32 tiles, const unsigned short* from, long long head_stride, int heads) {
    for (int i = threadIdx.x; i < HEADS * HEAD_TILES * 8; i += THREADS) {
        const int head = i / (HEAD_TILES * 8), unit = i % (HEAD_TILES * 8);
        const bool exists = from != nullptr && head < heads;
        const unsigned short* const source = exists ? from + head * head_stride + unit * 8 : nullptr;
        cp_async_zfill<16>(tiles + unit / 8 * HEAD_TILE_BYTES + swizzled(head, unit % 8), source, exists);
    }
}

// What p and dz of a head need beside the products. An empty row, and a head that does not exist, has share and constant 0.
__device__ __forceinline__ void store_factors(u32 memory, const GradientParams& given, const Item& item) {
    const int head = threadIdx.x;
    if (head >= HEADS) return;
    float base = 0.0f, share = 0.0f, constant = 0.0f;
    if (head < item.heads) {
        const long long at = item.token * given.heads + item.first_head + head;
        const float lse = given.lse[at];
        if (lse != minus_infinity()) {
            base = lse * LOG2_E;
            share = given.sink == nullptr ? 1.0f : 1.0f / (1.0f + fast_exp2((given.sink[item.first_head + head] - lse) * LOG2_E));
            if (given.delta != nullptr) constant -= share * given.delta[at];
            if (given.dlse != nullptr) constant += given.dlse[at];
        }
    }
    shared_store4(memory + FACTORS + head * 16,
                  make_uint4(__float_as_uint(base), __float_as_uint(share), __float_as_uint(constant), 0));
}

// ---- Producer

__device__ __forceinline__ void gather(u32 memory, const GradientParams& given, const Item& item) {
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32, own = warp * WARP_ROWS + lane % WARP_ROWS;
    const int* const slots = given.slots + item.token * given.slots_token_stride;
    // The slot of a block's row, -1 if it does not exist.
    const auto slot_of = [&](int block) {
        const int column = block * BLOCK_ROWS + own;
        if (column >= item.end) return -1;
        const int slot = slots[column * given.slots_column_stride];
        return slot >= 0 && slot < given.row_count ? slot : -1;
    };
    TileCopier copier;
    int next = slot_of(0);
    for (int block = 0; block < item.blocks; ++block) {
        const int stage = block % STAGES, slot = next;
        copier.take(slot < 0 ? nullptr : reinterpret_cast<const unsigned char*>(given.rows + slot * given.row_stride));
        next = slot_of(block + 1);
        mbarrier_wait(empty(memory, stage), (block / STAGES & 1) ^ 1);
        if (lane < WARP_ROWS) {
            shared_store(memory + SLOTS + (stage * BLOCK_ROWS + own) * 4, slot);
            mbarrier_arrive(full(memory, stage));
        }
        copier.copy(memory + ROWS + stage * STAGE_BYTES, 0, TILES);
        cp_async_mbarrier_arrive(full(memory, stage));
    }
}

// ---- Consumers

// A thread of consumer warpgroup GROUP.
template <int GROUP>
struct Consumer {
    static constexpr bool HAS_TAIL = TILES > VALUE_TILES;      // whether rows have columns after the values
    static constexpr int OWN_TILES = 4;                        // tiles of the values' columns of dq and drows

    u32 memory;
    float scale;           // softmax scale
    int lane, warp;        // warp of the warpgroup
    float dq[2][64];       // accumulators: two quarters of the values' columns,
    float dq_tail[16];     // and half of the columns after the values

    __device__ __forceinline__ Consumer(u32 memory, float scale) : memory(memory), scale(scale) {
        warp = threadIdx.x / 32 % WARPS;
        lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 128; ++i) dq[i / 64][i % 64] = 0.0f;
#pragma unroll
        for (int i = 0; i < 16; ++i) dq_tail[i] = 0.0f;
    }

    // Computes the products of the block's rows with queries (GROUP 0) or with output gradients (GROUP 1).
    __device__ __forceinline__ void multiply(u32 rows, float (&products)[HEADS / 2]) const {
        constexpr int STEPS = (GROUP == 0 ? TILES : VALUE_TILES) * 4;
        const auto keys = k_major(rows), heads = k_major(memory + (GROUP == 0 ? QUERIES : UPSTREAM));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const u32 tile = step / 4, at = step % 4 * 32;
            wgmma_ss<BF16>(
                products, advance(keys, tile * TILE_BYTES + at), advance(heads, tile * HEAD_TILE_BYTES + at), step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>(products);
    }

    // Turns the products of both warpgroups into p and dz times the softmax scale, and publishes them. `upper` and `lower` say
    // whether the lane's two rows exist. Warpgroup 0 hands p over in float32, each thread to the one with the same products.
    __device__ __forceinline__ void publish_factors(float (&x)[HEADS / 2], bool upper, bool lower) const {
        const u32 factors = memory + FACTORS + lane % 4 * 2 * 16, handed = memory + HANDED + (warp * 32 + lane) * 16;
        if constexpr (GROUP == 0) {
#pragma unroll
            for (int i = 0; i < HEADS / 4; ++i) {  // the lane's heads
                const float base = load_float(factors + (i / 2 * 8 + i % 2) * 16);
                const int above = i / 2 * 4 + i % 2, below = above + 2;
                x[above] = upper ? fast_exp2(x[above] * (scale * LOG2_E) - base) : 0.0f;
                x[below] = lower ? fast_exp2(x[below] * (scale * LOG2_E) - base) : 0.0f;
            }
        }
        named_barrier_sync(FACTORS_FREE, CONSUMERS);
        if constexpr (GROUP == 0) {
#pragma unroll
            for (int i = 0; i < HEADS / 8; ++i) {
                shared_store4(handed + i * HANDED_STEP, make_uint4(__float_as_uint(x[4 * i]), __float_as_uint(x[4 * i + 1]),
                                                                  __float_as_uint(x[4 * i + 2]), __float_as_uint(x[4 * i + 3])));
            }
        }
        named_barrier_sync(P_HANDED, CONSUMERS);
#pragma unroll
        for (int i = 0; i < HEADS / 8; ++i) {
            uint4 p;
            if constexpr (GROUP == 1) p = shared_load4(handed + i * HANDED_STEP);
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                const uint4 of = shared_load4(factors + (i * 8 + k) * 16);
                const float share = __uint_as_float(of.y), constant = __uint_as_float(of.z);
                float &above = x[4 * i + k], &below = x[4 * i + 2 + k];
                if constexpr (GROUP == 0) {
                    above *= share;
                    below *= share;
                } else {
                    above = upper ? __uint_as_float(k ? p.y : p.x) * (share * above + constant) * scale : 0.0f;
                    below = lower ? __uint_as_float(k ? p.w : p.z) * (share * below + constant) * scale : 0.0f;
                }
            }
        }
        if (HANDED == SLOPES) named_barrier_sync(P_TAKEN, CONSUMERS);
        publish(x);
        fence_async_proxy();
        named_barrier_sync(FACTORS_WRITTEN, CONSUMERS);
    }

    // Writes p (GROUP 0) or dz (GROUP 1) of all heads as bf16.
    __device__ __forceinline__ void publish(const float (&numbers)[HEADS / 2]) const {
        constexpr u32 FIRST = GROUP == 0 ? WEIGHTS - SLOPES : 0;
        const u32 tile = memory + SLOPES + FIRST / TILE_BYTES * TILE_BYTES;
        const int row = warp * 16 + lane % 16, unit = FIRST % TILE_BYTES / 16 + lane / 16;
#pragma unroll
        for (int i = 0; i < HEADS / 16; ++i) {
            u32 four[4];
#pragma unroll
            for (int k = 0; k < 4; ++k) four[k] = pack_bf16(numbers[8 * i + 2 * k], numbers[8 * i + 2 * k + 1]);
            stmatrix_x4(tile + swizzled(row, unit + 2 * i), four);
        }
    }

    // Issues dq += dz^T rows.
    __device__ __forceinline__ void issue_queries(u32 rows) {
        const auto slopes = mn_major(memory + SLOPES, TILE_BYTES), values = mn_major(rows + GROUP * 4 * TILE_BYTES, TILE_BYTES);
        const auto tail = mn_major(rows + VALUE_TILES * TILE_BYTES + GROUP * 64, TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int quarter = 0; quarter < 2; ++quarter) {
                const u32 at = quarter * 2 * TILE_BYTES + step * 2048;
                wgmma_ss_mn_mn<BF16>(dq[quarter], advance(slopes, step * 2048), advance(values, at));
            }
            if constexpr (HAS_TAIL) {
                wgmma_ss_mn_mn<BF16>(dq_tail, advance(slopes, step * 2048), advance(tail, step * 2048));
            }
        }
        wgmma_commit();
    }

    // Waits for this product, while PENDING later groups are in flight.
    template <int PENDING>
    __device__ __forceinline__ void finish_queries() {
        wgmma_wait<PENDING>(dq[0]);
        wgmma_wait<PENDING>(dq[1]);
        if constexpr (HAS_TAIL) wgmma_wait<PENDING>(dq_tail);
    }

    // Issues the gradient of the block's rows in one tile of the values' columns: dz q + p dO.
    __device__ __forceinline__ void issue_rows(float (&drows)[32], int tile) const {
        const auto slopes = k_major(memory + SLOPES), weights = k_major(memory + WEIGHTS);
        const auto queries = mn_major(memory + QUERIES + tile * HEAD_TILE_BYTES, HEAD_TILE_BYTES);
        const auto upstream = mn_major(memory + UPSTREAM + tile * HEAD_TILE_BYTES, HEAD_TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEADS / 16; ++step) {
            wgmma_ss_k_mn<BF16>(drows, advance(slopes, step * 32), advance(queries, step * 2048), step > 0);
        }
#pragma unroll
        for (int step = 0; step < HEADS / 16; ++step) {
            wgmma_ss_k_mn<BF16>(drows, advance(weights, step * 32), advance(upstream, step * 2048), 1);
        }
        wgmma_commit();
    }

    // The same for this warpgroup's half of the columns after the values: dz q.
    __device__ __forceinline__ void issue_tail(float (&drows)[16]) const {
        const auto slopes = k_major(memory + SLOPES);
        const auto queries = mn_major(memory + QUERIES + VALUE_TILES * HEAD_TILE_BYTES + GROUP * 64, HEAD_TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < HEADS / 16; ++step) {
            wgmma_ss_k_mn<BF16>(drows, advance(slopes, step * 32), advance(queries, step * 2048), step > 0);
        }
        wgmma_commit();
    }

    // Writes the gradient of the queries.
    __device__ __forceinline__ void store_queries(unsigned short* to, int heads) const {
        const int head = warp * 16 + lane / 4;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            if (head + 8 * below >= heads) break;
            unsigned short* const row = to + (head + 8 * below) * WIDTH + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const float* const two = &dq[i / 16][i % 16 * 4 + 2 * below];
                *reinterpret_cast<u32*>(row + GROUP * 256 + i * 8) = pack_bf16(two[0], two[1]);
            }
            if constexpr (HAS_TAIL) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const u32 two = pack_bf16(dq_tail[4 * i + 2 * below], dq_tail[4 * i + 2 * below + 1]);
                    *reinterpret_cast<u32*>(row + VALUE_TILES * 64 + GROUP * 32 + i * 8) = two;
                }
            }
        }
    }
};

// Warpgroups 0 and 1.
template <int GROUP>
__device__ __forceinline__ void compute(u32 memory, const GradientParams& given, const Item& item) {
    Consumer<GROUP> consumer(memory, given.scale);
    const int lane = consumer.lane, upper = consumer.warp * 16 + lane / 4;
    mbarrier_wait(memory + LOADED, 0);
    for (int block = 0; block < item.blocks; ++block) {
        const int stage = block % STAGES;
        const u32 rows = memory + ROWS + stage * STAGE_BYTES;
        mbarrier_wait(full(memory, stage), block / STAGES & 1);
        const u32 slots = memory + SLOTS + stage * BLOCK_ROWS * 4;
        const bool above = static_cast<int>(shared_load(slots + upper * 4)) >= 0;
        const bool below = static_cast<int>(shared_load(slots + (upper + 8) * 4)) >= 0;
        {
            float products[HEADS / 2];
            consumer.multiply(rows, products);
            consumer.publish_factors(products, above, below);
        }
        float drows[32];
        consumer.issue_queries(rows);
        consumer.issue_rows(drows, GROUP * 4);
        consumer.template finish_queries<1>();
        const int first_pair = item.place * given.columns + block * BLOCK_ROWS;
        RowGradients<ORDERED, WIDTH, VALUE_TILES * 64> target(
            given.drows, given.pairs, given.pair_scales, slots, first_pair * given.parts + item.part, given.parts);
        __syncwarp();  // every lane has read its slots
        if (lane == 0) mbarrier_arrive(empty(memory, stage));
#pragma unroll 1
        for (int i = 0; i < consumer.OWN_TILES; ++i) {
            if (i > 0) consumer.issue_rows(drows, GROUP * 4 + i);
            wgmma_wait<0>(drows);
            target.emit(drows, (GROUP * 4 + i) * 64);
        }
        target.finish(GROUP * 256, consumer.OWN_TILES);
        if constexpr (consumer.HAS_TAIL) {
            float tail[16];
            consumer.issue_tail(tail);
            wgmma_wait<0>(tail);
            target.emit(tail, VALUE_TILES * 64 + GROUP * 32);
        }
    }
    if (given.dq != nullptr) {
        consumer.store_queries(given.dq + (item.token * given.heads + item.first_head) * WIDTH, item.heads);
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention_gradients(const __grid_constant__ GradientParams given) {
    const u32 memory = tile_memory();
    const Item item(given);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full(memory, stage), WARPS * (WARP_ROWS + 32));
            mbarrier_init(empty(memory, stage), 2 * WARPS);
        }
        mbarrier_init(memory + LOADED, THREADS);
        fence_mbarrier_init();
    }
    store_factors(memory, given, item);
    __syncthreads();
    load_heads<TILES>(memory + QUERIES, given.q + item.token * given.q_token_stride + item.first_head * given.q_head_stride,
                      given.q_head_stride, item.heads);
    const unsigned short* const dout = given.dout == nullptr ? nullptr
        : given.dout + item.token * given.dout_token_stride + item.first_head * given.dout_head_stride;
    load_heads<VALUE_TILES>(memory + UPSTREAM, dout, given.dout_head_stride, item.heads);
    cp_async_mbarrier_arrive(memory + LOADED);
    const int warpgroup = threadIdx.x / (WARPS * 32);
    if (warpgroup == 2) {
        warpgroup_reg_dealloc<GATHER_REGISTERS>();
        gather(memory, given, Item(given));
    } else {
        warpgroup_reg_alloc<COMPUTE_REGISTERS>();
        if (warpgroup == 0) compute<0>(memory, given, Item(given));
        else compute<1>(memory, given, Item(given));
    }
}
