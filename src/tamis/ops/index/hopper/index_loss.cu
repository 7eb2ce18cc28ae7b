// The indexer's loss over selected keys, and its gradients, on Hopper. `tamis.ops.index.gradients` has the formulas.
//
// A CTA takes one query token and walks over its selected keys twice, in blocks of 64. The first time it computes scores and,
// online, the softmax over all of them, which gives the loss. The second time it computes the scores again, their slopes, and
// from these the gradients of queries, keys and head weights.
//
// Products have keys on the M axis of wgmma and heads on the N axis. Slopes are rounded to two bf16 terms, a number and what
// rounding cuts off it: with one term, gradients would have errors of 2**-9 before they are rounded themselves.
//
// Roles of the three warpgroups:
//   2     gather   Producer. Copies the keys of a block with cp.async straight into swizzled tiles.
//   0, 1  compute  Consumers. They take blocks in turn, and each adds up its own share of the gradients of queries and weights.
//                  The gradients of keys leave for memory block by block (see `row_gradients.cuh`).
//
// Budget for a block at 64 heads (H200): 512 cycles of wgmma for scores, 1,024 for gradients, 32 KB of reductions, for which
// L2 takes 2,048 cycles when all SMs send them.
//
// Defined by the host: ORDERED (whether gradients of keys are stored by pair), THREADS, SHARED_BYTES, PARAMS_BYTES, and the
// registers per thread of the roles: COMPUTE_REGISTERS, GATHER_REGISTERS.
#include "instructions.cuh"
#include "row_gradients.cuh"
#include "softmax.cuh"
#include "tile_copier.cuh"
#include "warpgroups.cuh"

struct IndexLossParams {
    const unsigned short* q;     // [T, H, 128], bf16
    const unsigned short* keys;  // [N, 128], bf16
    const float* weights;        // [T, H], contiguous
    const int* slots;            // [T, K]
    const float* target;         // [T, K]
    const float* token_weights;  // [T], or null
    float* losses;               // [T]
    unsigned short* dq;          // [T, H, 128], bf16, or null if no gradients are wanted
    float* dweights;             // [T, H]
    float* dkeys;                // [N, 128]; not read with ORDERED
    unsigned short* pairs;       // [places, K, 128], fp16, with ORDERED
    float* pair_scales;          // [places, K, 2], with ORDERED
    long long q_token_stride;    // in elements, as all strides
    long long q_head_stride;
    long long key_stride;
    long long slots_token_stride;
    long long slots_column_stride;
    long long target_stride;
    int heads;                   // H
    int columns;                 // K
    int key_count;               // N
    int first_token;             // of the launch
};

static_assert(sizeof(IndexLossParams) == PARAMS_BYTES, "IndexLossParams differs from its twin in index_loss.py");

// ---- Shapes and shared memory

constexpr int HEADS = 64, DIM = 128, TILES = DIM / 64, BLOCK_KEYS = 64, STAGES = 6;
constexpr int CONSUMERS = 2 * WARPS * 32;  // threads
constexpr u32 STAGE_BYTES = TILES * TILE_BYTES;

constexpr u32 KEYS = 0;                                  // [STAGES][TILES][64 keys][64 columns] bf16
constexpr u32 QUERIES = KEYS + STAGES * STAGE_BYTES;     // [TILES][64 heads][64 columns] bf16
constexpr u32 SLOPES = QUERIES + TILES * TILE_BYTES;     // [2 warpgroups][2 terms][64 keys][64 heads] bf16
constexpr u32 WEIGHTS = SLOPES + 2 * 2 * TILE_BYTES;     // [HEADS] float32
constexpr u32 SLOTS = WEIGHTS + HEADS * 4;               // [STAGES][64] row numbers, -1 where there is none
constexpr u32 TARGET = SLOTS + STAGES * BLOCK_KEYS * 4;  // [STAGES][64] float32
constexpr u32 STATISTICS = TARGET + STAGES * BLOCK_KEYS * 4;  // [2 * WARPS][4] float32, of each warp: see `Statistics`
constexpr u32 WEIGHT_SUMS = STATISTICS + 2 * WARPS * 16;      // [2 * WARPS][HEADS] float32
constexpr u32 FULL = WEIGHT_SUMS + 2 * WARPS * HEADS * 4;     // [STAGES] mbarriers, as all that follow
constexpr u32 EMPTY = FULL + STAGES * 8;                 // [STAGES]
constexpr u32 LOADED = EMPTY + STAGES * 8;               // the queries are there
constexpr u32 USED = LOADED + 8;
static_assert(USED <= SHARED_BYTES && FULL % 8 == 0, "shared memory is too small or not aligned");
constexpr u32 QUERY_SUMS = KEYS;  // [HEADS][DIM] float32: the second warpgroup's sums, when the keys are no longer needed
static_assert(HEADS * DIM * 4 <= STAGES * STAGE_BYTES, "sums of queries do not fit");

// Named barriers: of all consumers, and of each warpgroup.
constexpr u32 BOTH = 1, OWN = 2;

__device__ __forceinline__ u32 full(u32 memory, int stage) { return memory + FULL + stage * 8; }
__device__ __forceinline__ u32 empty(u32 memory, int stage) { return memory + EMPTY + stage * 8; }

struct Item {
    int place, blocks, passes;
    long long token;

    __device__ __forceinline__ explicit Item(const IndexLossParams& given) {
        place = blockIdx.x;
        token = given.first_token + place;
        blocks = (given.columns + BLOCK_KEYS - 1) / BLOCK_KEYS;
        passes = given.dq == nullptr ? 1 : 2;
    }
};

// ---- Producer

__device__ __forceinline__ void gather(u32 memory, const IndexLossParams& given, const Item& item) {
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32, own = warp * WARP_ROWS + lane % WARP_ROWS;
    const int* const slots = given.slots + item.token * given.slots_token_stride;
    const float* const target = given.target + item.token * given.target_stride;
    const int visits = item.passes * item.blocks;
    // A key of a visit. Slots and targets are loaded AHEAD visits before they are used: a load takes longer than a visit.
    struct Key {
        int slot;  // -1: none
        float wanted;
    };
    const auto key_of = [&](int visit) -> Key {
        const int column = visit % item.blocks * BLOCK_KEYS + own;
        if (visit >= visits || column >= given.columns) return {-1, 0.0f};
        return {slots[column * given.slots_column_stride], target[column]};
    };
    constexpr int AHEAD = 3;
    Key keys[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) keys[i] = key_of(i);
    TileCopier copier;
    int stage = 0;
    u32 parity = 1;
    for (int visit = 0; visit < visits; ++visit) {
        const int slot = keys[0].slot >= 0 && keys[0].slot < given.key_count ? keys[0].slot : -1;
        const float wanted = slot >= 0 ? keys[0].wanted : 0.0f;
#pragma unroll
        for (int i = 1; i < AHEAD; ++i) keys[i - 1] = keys[i];
        keys[AHEAD - 1] = key_of(visit + AHEAD);
        copier.take(slot < 0 ? nullptr : reinterpret_cast<const unsigned char*>(given.keys + slot * given.key_stride));
        mbarrier_wait(empty(memory, stage), parity);
        if (lane < WARP_ROWS) {
            shared_store(memory + SLOTS + (stage * BLOCK_KEYS + own) * 4, slot);
            store_float(memory + TARGET + (stage * BLOCK_KEYS + own) * 4, wanted);
            mbarrier_arrive(full(memory, stage));
        }
        copier.copy(memory + KEYS + stage * STAGE_BYTES, 0, TILES);
        cp_async_mbarrier_arrive(full(memory, stage));
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// ---- Consumers

// The softmax over some scores and the target's share of the loss, combined without regard to the order of columns.
struct Statistics {
    float largest = minus_infinity();  // score
    float total = 0.0f;                // of exp(score - largest)
    float mass = 0.0f;                 // sum of the target
    float loss = 0.0f;                 // sum of target * (log(target) - score)

    __device__ __forceinline__ void scale_to(float top) {
        total = largest == minus_infinity() ? 0.0f : total * fast_exp2((largest - top) * LOG2_E);
        largest = top;
    }

    __device__ __forceinline__ void add(float score, float wanted) {
        if (!(score <= largest)) scale_to(score);  // also for NaN, which then stays
        total += fast_exp2((score - largest) * LOG2_E);
        mass += wanted;
        if (wanted > 0.0f) loss += wanted * (fast_log2(wanted) * LN_2 - score);
    }

    __device__ __forceinline__ void merge(float other_largest, float other_total, float other_mass, float other_loss) {
        mass += other_mass;
        loss += other_loss;
        if (other_largest == minus_infinity()) return;
        if (!(other_largest <= largest)) scale_to(other_largest);
        total += other_total * fast_exp2((other_largest - largest) * LOG2_E);
    }

    // Merges over the lanes whose numbers differ in the bits 4, 8 and 16.
    __device__ __forceinline__ void merge_lanes() {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
            const float a = __shfl_xor_sync(FULL_MASK, largest, step), b = __shfl_xor_sync(FULL_MASK, total, step);
            const float c = __shfl_xor_sync(FULL_MASK, mass, step), d = __shfl_xor_sync(FULL_MASK, loss, step);
            merge(a, b, c, d);
        }
    }
};

struct Consumer {
    u32 memory;
    int group, warp, lane;
    int upper;  // the lane's upper key of a block; the lower one is 8 further

    __device__ __forceinline__ explicit Consumer(u32 memory) : memory(memory) {
        group = threadIdx.x / (WARPS * 32);
        warp = threadIdx.x / 32 % WARPS;
        lane = threadIdx.x % 32;
        upper = warp * 16 + lane / 4;
    }

    // The products y of a block's keys with the queries.
    __device__ __forceinline__ void multiply(int stage, float (&y)[32]) const {
        const auto keys = k_major(memory + KEYS + stage * STAGE_BYTES), queries = k_major(memory + QUERIES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < TILES * 4; ++step) {
            const u32 at = step / 4 * TILE_BYTES + step % 4 * 32;
            wgmma_ss<BF16>(y, advance(keys, at), advance(queries, at), step > 0);
        }
        wgmma_commit();
        wgmma_wait<0>(y);
    }

    // The weights of the lane's heads 8 i + 2 * (lane % 4) and the next.
    __device__ __forceinline__ float2 weights(int i) const {
        const uint2 two = shared_load2(memory + WEIGHTS + (8 * i + lane % 4 * 2) * 4);
        return {__uint_as_float(two.x), __uint_as_float(two.y)};
    }

    // The scores of the lane's two keys, the same in the four lanes of a key.
    __device__ __forceinline__ float2 scores(const float (&y)[32]) const {
        float above = 0.0f, below = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float2 w = weights(i);
            above += w.x * relu(y[4 * i]) + w.y * relu(y[4 * i + 1]);
            below += w.x * relu(y[4 * i + 2]) + w.y * relu(y[4 * i + 3]);
        }
        return {sum_over_lanes<1, 4>(above), sum_over_lanes<1, 4>(below)};
    }

    __device__ __forceinline__ bool exists(int stage, int key) const {
        return static_cast<int>(shared_load(memory + SLOTS + (stage * BLOCK_KEYS + key) * 4)) >= 0;
    }
    __device__ __forceinline__ float target(int stage, int key) const {
        return load_float(memory + TARGET + (stage * BLOCK_KEYS + key) * 4);
    }

    __device__ __forceinline__ void release(int stage) const {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty(memory, stage));
    }

    // Turns the products of a block into slopes of the loss by y, in two bf16 terms, as fragments of the A operand and in shared
    // memory; adds to the gradients of the lane's heads' weights. `above` and `below` are the slopes by the two scores.
    __device__ __forceinline__ void differentiate(
        const float (&y)[32], float above, float below, u32 (&terms)[2][4][4], float (&dw)[16]) const {
        const u32 tiles = memory + SLOPES + group * 2 * TILE_BYTES;
#pragma unroll
        for (int step = 0; step < 4; ++step) {  // 16 heads
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const int i = 2 * step + k / 2, at = 4 * i + k % 2 * 2;
                const float2 w = weights(i);
                const float slope = k % 2 ? below : above, first = y[at], second = y[at + 1];
                dw[2 * i] += relu(first) * slope;
                dw[2 * i + 1] += relu(second) * slope;
                const float a = first > 0.0f ? w.x * slope : 0.0f, b = second > 0.0f ? w.y * slope : 0.0f;
                const u32 rounded = pack_bf16(a, b);
                terms[0][step][k] = rounded;
                terms[1][step][k] = pack_bf16(a - __uint_as_float(rounded << 16), b - __uint_as_float(rounded & 0xFFFF0000u));
            }
#pragma unroll
            for (int term = 0; term < 2; ++term) {
                stmatrix_x4(tiles + term * TILE_BYTES + swizzled(warp * 16 + lane % 16, 2 * step + lane / 16), terms[term][step]);
            }
        }
    }

    // Issues the gradients of queries, dq += slopes^T keys, and of the block's keys, slopes q.
    __device__ __forceinline__ void issue(int stage, const u32 (&terms)[2][4][4], float (&dq)[64], float (&dkeys)[64]) const {
        const auto keys = mn_major(memory + KEYS + stage * STAGE_BYTES, TILE_BYTES);
        const auto queries = mn_major(memory + QUERIES, TILE_BYTES);
        const auto slopes = mn_major(memory + SLOPES + group * 2 * TILE_BYTES, TILE_BYTES);
#pragma unroll
        for (int i = 0; i < 64; ++i) dkeys[i] = 0.0f;
        wgmma_fence();
#pragma unroll
        for (int term = 0; term < 2; ++term) {
#pragma unroll
            for (int step = 0; step < 4; ++step) {
                wgmma_ss_mn_mn<BF16>(dq, advance(slopes, term * TILE_BYTES + step * 2048), advance(keys, step * 2048));
                wgmma_rs<BF16>(dkeys, terms[term][step], advance(queries, step * 2048));
            }
        }
        wgmma_commit();
        wgmma_wait<0>(dq);
        wgmma_wait<0>(dkeys);
    }
};

// Merges the statistics of all lanes of the consumers.
__device__ __forceinline__ Statistics merged(u32 memory, Statistics own, const Consumer& consumer) {
    own.merge_lanes();
    const u32 place = memory + STATISTICS + (consumer.group * WARPS + consumer.warp) * 16;
    if (consumer.lane == 0) {
        shared_store4(place, make_uint4(__float_as_uint(own.largest), __float_as_uint(own.total), __float_as_uint(own.mass),
                                        __float_as_uint(own.loss)));
    }
    named_barrier_sync(BOTH, CONSUMERS);
    Statistics all;
#pragma unroll
    for (int i = 0; i < 2 * WARPS; ++i) {
        const uint4 one = shared_load4(memory + STATISTICS + i * 16);
        all.merge(__uint_as_float(one.x), __uint_as_float(one.y), __uint_as_float(one.z), __uint_as_float(one.w));
    }
    return all;
}

// Adds up what both warpgroups have of the gradients of queries and weights, and writes the results.
__device__ __forceinline__ void store(
    const Consumer& consumer, const IndexLossParams& given, const Item& item, float (&dq)[64], float (&dw)[16]) {
    const u32 memory = consumer.memory;
    const int lane = consumer.lane, warp = consumer.warp;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        dw[i] = sum_over_lanes<4, 32>(dw[i]);
        if (lane < 4) {
            const int head = i / 2 * 8 + lane * 2 + i % 2;
            store_float(memory + WEIGHT_SUMS + ((consumer.group * WARPS + warp) * HEADS + head) * 4, dw[i]);
        }
    }
    // Both warpgroups have waited for their last products, so that nothing reads keys any more.
    named_barrier_sync(BOTH, CONSUMERS);
    const u32 sums = memory + QUERY_SUMS + (warp * 32 + lane) * 16;
    if (consumer.group == 1) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            shared_store4(sums + i * WARPS * 32 * 16, make_uint4(__float_as_uint(dq[4 * i]), __float_as_uint(dq[4 * i + 1]),
                                                                  __float_as_uint(dq[4 * i + 2]), __float_as_uint(dq[4 * i + 3])));
        }
    }
    named_barrier_sync(BOTH, CONSUMERS);
    if (consumer.group == 1) return;
    const long long first = item.token * given.heads;
    if (threadIdx.x < given.heads) {
        float sum = 0.0f;
        for (int i = 0; i < 2 * WARPS; ++i) sum += load_float(memory + WEIGHT_SUMS + (i * HEADS + threadIdx.x) * 4);
        given.dweights[first + threadIdx.x] = sum;
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const uint4 other = shared_load4(sums + i * WARPS * 32 * 16);
        const int head = consumer.upper, column = i * 8 + lane % 4 * 2;
        unsigned short* const row = given.dq + (first + head) * DIM + column;
        const u32 above = pack_bf16(dq[4 * i] + __uint_as_float(other.x), dq[4 * i + 1] + __uint_as_float(other.y));
        const u32 below = pack_bf16(dq[4 * i + 2] + __uint_as_float(other.z), dq[4 * i + 3] + __uint_as_float(other.w));
        if (head < given.heads) *reinterpret_cast<u32*>(row) = above;
        if (head + 8 < given.heads) *reinterpret_cast<u32*>(row + 8 * DIM) = below;
    }
}

// Warpgroups 0 and 1.
__device__ __forceinline__ void compute(u32 memory, const IndexLossParams& given, const Item& item) {
    const Consumer consumer(memory);
    const int upper = consumer.upper;
    Statistics own;
    mbarrier_wait(memory + LOADED, 0);
    for (int block = consumer.group; block < item.blocks; block += 2) {
        const int stage = block % STAGES;
        mbarrier_wait(full(memory, stage), block / STAGES & 1);
        float y[32];
        consumer.multiply(stage, y);
        const float2 score = consumer.scores(y);
        if (consumer.exists(stage, upper)) own.add(score.x, consumer.target(stage, upper));
        if (consumer.exists(stage, upper + 8)) own.add(score.y, consumer.target(stage, upper + 8));
        consumer.release(stage);
    }
    const Statistics all = merged(memory, own, consumer);
    const float unit = given.token_weights == nullptr ? 1.0f : given.token_weights[item.token];
    const float lse = all.largest == minus_infinity() ? 0.0f : all.largest + fast_log2(all.total) * LN_2;
    if (threadIdx.x == 0) given.losses[item.token] = unit * (all.loss + all.mass * lse);
    if (item.passes == 1) return;
    float dq[64], dw[16];
#pragma unroll
    for (int i = 0; i < 64; ++i) dq[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) dw[i] = 0.0f;
    for (int block = consumer.group; block < item.blocks; block += 2) {
        const int visit = item.blocks + block, stage = visit % STAGES;
        mbarrier_wait(full(memory, stage), visit / STAGES & 1);
        u32 terms[2][4][4];
        {
            float y[32];
            consumer.multiply(stage, y);
            const float2 score = consumer.scores(y);
            const auto slope = [&](float one, int key) {
                const float p = all.mass * fast_exp2((one - lse) * LOG2_E);
                return consumer.exists(stage, key) ? (p - consumer.target(stage, key)) * unit : 0.0f;
            };
            const float above = slope(score.x, upper), below = slope(score.y, upper + 8);
            named_barrier_sync(OWN + consumer.group, WARPS * 32);  // the last block's slopes have been read
            consumer.differentiate(y, above, below, terms, dw);
        }
        fence_async_proxy();
        named_barrier_sync(OWN + consumer.group, WARPS * 32);
        float dkeys[64];
        consumer.issue(stage, terms, dq, dkeys);
        const long long first_pair = static_cast<long long>(item.place) * given.columns + block * BLOCK_KEYS;
        const RowGradients<ORDERED, DIM, DIM> gradients(
            given.dkeys, given.pairs, given.pair_scales, memory + SLOTS + stage * BLOCK_KEYS * 4, first_pair, 1);
        consumer.release(stage);
        gradients.emit(*reinterpret_cast<const float(*)[32]>(&dkeys[0]), 0);
        gradients.emit(*reinterpret_cast<const float(*)[32]>(&dkeys[32]), 64);
    }
    store(consumer, given, item, dq, dw);
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) index_loss(const __grid_constant__ IndexLossParams given) {
    const u32 memory = tile_memory();
    const Item item(given);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full(memory, stage), WARPS * (WARP_ROWS + 32));
            mbarrier_init(empty(memory, stage), WARPS);
        }
        mbarrier_init(memory + LOADED, THREADS);
        fence_mbarrier_init();
    }
    if (threadIdx.x < HEADS) {
        const float weight = threadIdx.x < given.heads ? given.weights[item.token * given.heads + threadIdx.x] : 0.0f;
        store_float(memory + WEIGHTS + threadIdx.x * 4, weight);
    }
    __syncthreads();
    const unsigned short* const q = given.q + item.token * given.q_token_stride;
    for (int i = threadIdx.x; i < HEADS * TILES * 8; i += THREADS) {
        const int head = i / (TILES * 8), unit = i % (TILES * 8);
        const bool exists = head < given.heads;
        cp_async_zfill<16>(memory + QUERIES + unit / 8 * TILE_BYTES + swizzled(head, unit % 8),
                           exists ? q + head * given.q_head_stride + unit * 8 : nullptr, exists);
    }
    cp_async_mbarrier_arrive(memory + LOADED);
    if (threadIdx.x / (WARPS * 32) == 2) {
        warpgroup_reg_dealloc<GATHER_REGISTERS>();
        gather(memory, given, item);
    } else {
        warpgroup_reg_alloc<COMPUTE_REGISTERS>();
        compute(memory, given, item);
    }
}
