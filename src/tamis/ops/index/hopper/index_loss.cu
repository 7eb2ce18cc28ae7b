// The indexer's loss over selected keys, and its gradients, on Hopper. `tamis.ops.index.gradients` has the formulas.
//
// A CTA takes one query token and walks over its selected keys twice, in blocks of 64. The first time it computes products
// y = keys q^T and from them scores, and keeps of every product one bit: whether it is positive. Then all scores are there, and
// with them the softmax, the loss and its slopes by the scores. The second time it computes the gradients from the bits, since
// relu'(y) is 0 or 1:
//
//   dkeys = slope * (bits (weights q)),      g = (bits slope)^T keys,      dq = weights * g,      dweights = q . g.
//
// Bits, as bf16 numbers 0 and 1, are exact. What they are multiplied with is rounded to two bf16 terms, a number and what
// rounding cuts off it: with one term, gradients would have errors of 2**-9 before they are rounded themselves. Both products
// take bits from registers, so that nothing is written to shared memory between them.
//
// Products of the first walk have keys on the M axis of wgmma and heads on the N axis; those of dkeys keys on the M axis, and
// those of g heads. So a warp's bits are kept transposed: for each of a lane's 32 products of a block a word with the bits of
// all lanes, from which both kinds of fragments are made.
//
// Roles of the two warpgroups:
//   0  compute  Consumer. The gradients of keys leave for memory block by block (see `row_gradients.cuh`), while g is computed.
//   1  gather   Producer. Copies the keys of a block with cp.async straight into swizzled tiles.
//
// An SM has two CTAs, so that one computes while the other one waits.
//
// Budget for a block at 64 heads (H200): 256 cycles of wgmma for scores, 1,024 for gradients; 1,300 cycles of shared memory;
// 32 KB of reductions, for which L2 takes 2,048 cycles when all SMs send them, and 32 KB of keys.
//
// Defined by the host: ORDERED (whether gradients of keys are stored by pair), THREADS, FIXED_BYTES and BLOCK_BYTES (of shared
// memory: for all calls, and for each block of keys), PARAMS_BYTES, and the registers per thread of the roles:
// COMPUTE_REGISTERS, GATHER_REGISTERS.
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
    float* dkeys;                // [N, 128], columns as in RowSums; not read with ORDERED
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

constexpr int HEADS = 64, DIM = 128, TILES = DIM / 64, BLOCK_KEYS = 64, STAGES = 3;
constexpr int CONSUMERS = WARPS * 32;  // threads
constexpr u32 STAGE_BYTES = TILES * TILE_BYTES, TERM_BYTES = TILES * TILE_BYTES;

constexpr u32 KEYS = 0;                                  // [STAGES][TILES][64 keys][64 columns] bf16
constexpr u32 QUERIES = KEYS + STAGES * STAGE_BYTES;     // [TILES][64 heads][64 columns] bf16; later weights * q, in two terms
constexpr u32 WEIGHTS = QUERIES + 2 * TERM_BYTES;        // [HEADS] float32
constexpr u32 SLOTS = WEIGHTS + HEADS * 4;               // [STAGES][64] row numbers, -1 where there is none
constexpr u32 STATISTICS = SLOTS + STAGES * BLOCK_KEYS * 4;  // [2][WARPS][4] float32, of each warp
constexpr u32 FULL = STATISTICS + 2 * WARPS * 16;        // [STAGES] mbarriers, as all that follow
constexpr u32 EMPTY = FULL + STAGES * 8;                 // [STAGES]
constexpr u32 LOADED = EMPTY + STAGES * 8;               // the queries are there
constexpr u32 BLOCKS = (LOADED + 8 + 15) / 16 * 16;      // what is kept of each block, as follows
constexpr u32 SCORES = 0;                                // [64] float32; later slopes, a bf16 number and what it cuts off
constexpr u32 BITS = SCORES + BLOCK_KEYS * 4;            // [WARPS][32 products of a lane], a word with a bit of each lane
static_assert(BLOCKS == FIXED_BYTES && BITS + WARPS * 32 * 4 == BLOCK_BYTES && FULL % 8 == 0, "shared memory is not as the host says");

constexpr u32 OWN = 1;               // the named barrier of the consumers
constexpr u32 NO_KEY = 0xFFFFFFFFu;  // in place of a score; arithmetic has other NaN

__device__ __forceinline__ u32 full(u32 memory, int stage) { return memory + FULL + stage * 8; }
__device__ __forceinline__ u32 empty(u32 memory, int stage) { return memory + EMPTY + stage * 8; }
__device__ __forceinline__ u32 kept(u32 memory, int block) { return memory + BLOCKS + block * BLOCK_BYTES; }

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
    const int visits = item.passes * item.blocks;
    // The slot of a key of a visit, -1 if there is none. It is loaded AHEAD visits before it is used: a load takes longer than
    // a visit.
    const auto slot_of = [&](int visit) {
        const int column = (visit < item.blocks ? visit : visit - item.blocks) * BLOCK_KEYS + own;
        return visit < visits && column < given.columns ? slots[column * given.slots_column_stride] : -1;
    };
    constexpr int AHEAD = 3;
    int next[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) next[i] = slot_of(i);
    TileCopier copier;
    int stage = 0;
    u32 parity = 1;
    for (int visit = 0; visit < visits; ++visit) {
        const int slot = next[0] >= 0 && next[0] < given.key_count ? next[0] : -1;
#pragma unroll
        for (int i = 1; i < AHEAD; ++i) next[i - 1] = next[i];
        next[AHEAD - 1] = slot_of(visit + AHEAD);
        copier.take(slot < 0 ? nullptr : reinterpret_cast<const unsigned char*>(given.keys + slot * given.key_stride));
        mbarrier_wait(empty(memory, stage), parity);
        if (lane < WARP_ROWS) {
            shared_store(memory + SLOTS + (stage * BLOCK_KEYS + own) * 4, slot);
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

// ---- Bits

// Transposes a matrix of bits: the result's bit i of lane k is bit k of lane i.
__device__ __forceinline__ u32 transposed(u32 bits) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const u32 low = step == 16 ? 0x0000FFFFu : step == 8 ? 0x00FF00FFu : step == 4 ? 0x0F0F0F0Fu : step == 2 ? 0x33333333u : 0x55555555u;
        const u32 other = __shfl_xor_sync(FULL_MASK, bits, step);
        bits = threadIdx.x & step ? other >> step & low | bits & ~low : bits & low | other << step & ~low;
    }
    return bits;
}

// ---- Consumers

struct Consumer {
    u32 memory;
    int warp, lane;
    int upper;  // the lane's upper key of a block; the lower one is 8 further

    __device__ __forceinline__ explicit Consumer(u32 memory) : memory(memory) {
        warp = threadIdx.x / 32;
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

    __device__ __forceinline__ bool exists(int stage, int key) const {
        return static_cast<int>(shared_load(memory + SLOTS + (stage * BLOCK_KEYS + key) * 4)) >= 0;
    }

    __device__ __forceinline__ void release(int stage) const {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(empty(memory, stage));
    }

    // The first walk: keeps scores and bits of all blocks. Returns the largest score of the lane's keys.
    __device__ __forceinline__ float score(const Item& item) const {
        float2 weights[8];  // of the lane's heads 8 i + 2 * (lane % 4) and the next
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const uint2 two = shared_load2(memory + WEIGHTS + (8 * i + lane % 4 * 2) * 4);
            weights[i] = {__uint_as_float(two.x), __uint_as_float(two.y)};
        }
        float largest = minus_infinity();
        int stage = 0;
        u32 parity = 0;
        for (int block = 0; block < item.blocks; ++block) {
            mbarrier_wait(full(memory, stage), parity);
            float y[32];
            multiply(stage, y);
            const bool has_above = exists(stage, upper), has_below = exists(stage, upper + 8);
            release(stage);
            float above = 0.0f, below = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                above += weights[i].x * relu(y[4 * i]) + weights[i].y * relu(y[4 * i + 1]);
                below += weights[i].x * relu(y[4 * i + 2]) + weights[i].y * relu(y[4 * i + 3]);
            }
            above = sum_over_lanes<1, 4>(above);
            below = sum_over_lanes<1, 4>(below);
            if (has_above) largest = fmaxf(largest, above);
            if (has_below) largest = fmaxf(largest, below);
            const u32 keep = kept(memory, block);
            if (lane % 4 == 0) {
                shared_store(keep + SCORES + upper * 4, has_above ? __float_as_uint(above) : NO_KEY);
                shared_store(keep + SCORES + (upper + 8) * 4, has_below ? __float_as_uint(below) : NO_KEY);
            }
            if (item.passes == 2) {
                // Bit r: of the second head of each two (16), of heads 8 i (2 i), of the lower key (1).
                u32 bits = 0;
#pragma unroll
                for (int r = 31; r >= 0; --r) bits = append_sign(bits, 0.0f - y[r % 16 / 2 * 4 + r % 2 * 2 + r / 16]);
                shared_store(keep + BITS + (warp * 32 + lane) * 4, transposed(bits));
            }
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
        return largest;
    }

    // The sums of four numbers over all lanes of the consumers.
    __device__ __forceinline__ float4 sums(float a, float b, float c) const {
        const u32 at = memory + STATISTICS + WARPS * 16;
        const float4 own = {sum_over_lanes<1, 32>(a), sum_over_lanes<1, 32>(b), sum_over_lanes<1, 32>(c), 0.0f};
        if (lane == 0) {
            shared_store4(at + warp * 16, make_uint4(__float_as_uint(own.x), __float_as_uint(own.y), __float_as_uint(own.z), 0));
        }
        named_barrier_sync(OWN, CONSUMERS);
        float4 all = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < WARPS; ++i) {
            const uint4 one = shared_load4(at + i * 16);
            all.x += __uint_as_float(one.x);
            all.y += __uint_as_float(one.y);
            all.z += __uint_as_float(one.z);
        }
        return all;
    }

    // Computes the loss from all scores, and puts slopes in their place.
    __device__ __forceinline__ void differentiate(const IndexLossParams& given, const Item& item, float largest) const {
        const float own = max_over_lanes<1, 32>(largest);
        if (lane == 0) store_float(memory + STATISTICS + warp * 16, own);
        named_barrier_sync(OWN, CONSUMERS);  // scores and bits are there as well, and nobody reads the queries any more
#pragma unroll
        for (int i = 0; i < WARPS; ++i) largest = fmaxf(largest, load_float(memory + STATISTICS + i * 16));
        const float* const target = given.target + item.token * given.target_stride;
        const int end = item.blocks * BLOCK_KEYS;
        const auto place = [&](int key) { return kept(memory, key / BLOCK_KEYS) + SCORES + key % BLOCK_KEYS * 4; };
        float total = 0.0f, mass = 0.0f, loss = 0.0f;  // of exp(score - largest), target, target * (log(target) - score)
#pragma unroll 4
        for (int key = threadIdx.x; key < end; key += CONSUMERS) {
            const u32 bits = shared_load(place(key));
            const float wanted = key < given.columns ? target[key] : 0.0f;
            if (bits == NO_KEY) continue;
            const float score = __uint_as_float(bits);
            total += fast_exp2((score - largest) * LOG2_E);
            mass += wanted;
            if (wanted > 0.0f) loss += wanted * (fast_log2(wanted) * LN_2 - score);
        }
        const float4 all = sums(total, mass, loss);
        const float unit = given.token_weights == nullptr ? 1.0f : given.token_weights[item.token];
        const float lse = largest == minus_infinity() ? 0.0f : largest + fast_log2(all.x) * LN_2;
        if (threadIdx.x == 0) given.losses[item.token] = unit * (all.z + all.y * lse);
        if (item.passes == 1) return;
#pragma unroll 4
        for (int key = threadIdx.x; key < end; key += CONSUMERS) {
            const u32 bits = shared_load(place(key));
            const float wanted = key < given.columns ? target[key] : 0.0f;
            const float p = all.y * fast_exp2((__uint_as_float(bits) - lse) * LOG2_E);
            const float slope = bits == NO_KEY ? 0.0f : (p - wanted) * unit;
            const u32 rounded = pack_bf16(slope, 0.0f);
            shared_store(place(key), rounded | pack_bf16(0.0f, slope - __uint_as_float(rounded << 16)));
        }
    }

    // Multiplies the queries with the heads' weights, in two bf16 terms.
    __device__ __forceinline__ void weight_queries() const {
#pragma unroll 2
        for (int i = threadIdx.x; i < HEADS * TILES * 8; i += CONSUMERS) {
            const int head = i / (TILES * 8), unit = i % (TILES * 8);
            const u32 at = memory + QUERIES + unit / 8 * TILE_BYTES + swizzled(head, unit % 8);
            const float weight = load_float(memory + WEIGHTS + head * 4);
            const uint4 eight = shared_load4(at);
            const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
            u32 terms[2][4];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float a = weight * __uint_as_float(words[k] << 16), b = weight * __uint_as_float(words[k] & 0xFFFF0000u);
                const u32 rounded = pack_bf16(a, b);
                terms[0][k] = rounded;
                terms[1][k] = pack_bf16(a - __uint_as_float(rounded << 16), b - __uint_as_float(rounded & 0xFFFF0000u));
            }
#pragma unroll
            for (int term = 0; term < 2; ++term) {
                shared_store4(at + term * TERM_BYTES, make_uint4(terms[term][0], terms[term][1], terms[term][2], terms[term][3]));
            }
        }
    }

    // A block's bits as fragments of bf16 numbers 0 and 1, for 16 heads at a time.
    __device__ __forceinline__ void bits_of_keys(int block, u32 (&ones)[4][4]) const {
        const u32 bits = transposed(shared_load(kept(memory, block) + BITS + (warp * 32 + lane) * 4));
#pragma unroll
        for (int i = 0; i < 16; ++i) ones[i / 4][i % 4] = (bits >> i & 0x00010001u) * 0x3F80u;
    }

    // Slopes of a block, 0 where the bit is, as fragments with heads on the M axis, in two terms, for 16 keys at a time.
    __device__ __forceinline__ void slopes_of_heads(int block, u32 (&slopes)[2][4][4]) const {
        const u32 keep = kept(memory, block);
        // The lane's heads are row lane / 4 of the warp's 16 and the one 8 further; `two` is which two of each eight heads
        // they belong to. In a word, a key has four bits, and the lane needs those of keys 2 * (lane % 4) and the next.
        const int two = lane / 8, second = lane / 4 % 2, keys = lane % 4;
        const u32 selector = (8 | keys) * 0x11u | (12 | keys) * 0x1100u;  // copies of the sign bit of a byte of both operands
#pragma unroll
        for (int step = 0; step < 4; ++step) {  // the keys of a warp of the first walk
            const uint4 bits = shared_load4(keep + BITS + (step * 32 + second * 16 + warp * 4) * 4);
            const u32 words[4] = {bits.x, bits.z, bits.y, bits.w};  // upper keys of both heads, then lower ones
#pragma unroll
            for (int k = 0; k < 4; k += 2) {
                const uint2 found = shared_load2(keep + SCORES + (step * 16 + k * 4 + keys * 2) * 4);
                const u32 terms[2] = {permute_bytes(found.x, found.y, 0x5410), permute_bytes(found.x, found.y, 0x7632)};
#pragma unroll
                for (int head = 0; head < 2; ++head) {
                    const u32 word = words[k + head], mask = permute_bytes(word << 7 - two, word << 3 - two, selector);
                    slopes[0][step][k + head] = terms[0] & mask;
                    slopes[1][step][k + head] = terms[1] & mask;
                }
            }
        }
    }

    // The slope of a key.
    __device__ __forceinline__ float slope(int block, int key) const {
        const u32 terms = shared_load(kept(memory, block) + SCORES + key * 4);
        return __uint_as_float(terms << 16) + __uint_as_float(terms & 0xFFFF0000u);
    }
};

// The second walk: sends the gradients of keys, and computes g.
__device__ __forceinline__ void send_keys(
    const Consumer& consumer, const IndexLossParams& given, const Item& item, float (&g)[64]) {
    const u32 memory = consumer.memory;
    const auto queries = mn_major(memory + QUERIES, TILE_BYTES);
#pragma unroll
    for (int i = 0; i < 64; ++i) g[i] = 0.0f;
    int stage = item.blocks % STAGES;
    u32 parity = item.blocks / STAGES & 1;
    for (int block = 0; block < item.blocks; ++block) {
        float dkeys[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) dkeys[i] = 0.0f;
        u32 ones[4][4], slopes[2][4][4];
        consumer.bits_of_keys(block, ones);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_rs<BF16>(dkeys, ones[i % 4], advance(queries, i / 4 * TERM_BYTES + i % 4 * 2048));
        wgmma_commit();
        consumer.slopes_of_heads(block, slopes);
        mbarrier_wait(full(memory, stage), parity);
        const auto keys = mn_major(memory + KEYS + stage * STAGE_BYTES, TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 8; ++i) wgmma_rs<BF16>(g, slopes[i / 4][i % 4], advance(keys, i % 4 * 2048));
        wgmma_commit();
        const int first_pair = item.place * given.columns + block * BLOCK_KEYS;
        RowGradients<ORDERED, DIM, DIM> gradients(
            given.dkeys, given.pairs, given.pair_scales, memory + SLOTS + stage * BLOCK_KEYS * 4, first_pair, 1);
        const float above = consumer.slope(block, consumer.upper), below = consumer.slope(block, consumer.upper + 8);
        wgmma_wait<1>(dkeys);
#pragma unroll
        for (int i = 0; i < 64; ++i) dkeys[i] *= i & 2 ? below : above;
        gradients.emit(*reinterpret_cast<const float(*)[32]>(&dkeys[0]), 0);
        gradients.emit(*reinterpret_cast<const float(*)[32]>(&dkeys[32]), 64);
        gradients.finish(0, DIM / 64);
        wgmma_wait<0>(g);
        consumer.release(stage);
        if (++stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
}

// Writes the gradients of queries and weights.
__device__ __forceinline__ void store(
    const Consumer& consumer, const IndexLossParams& given, const Item& item, const float (&g)[64]) {
#pragma unroll
    for (int below = 0; below < 2; ++below) {
        const int head = consumer.upper + 8 * below, column = consumer.lane % 4 * 2;
        const bool exists = head < given.heads;
        const long long number = item.token * given.heads + head;
        const float weight = load_float(consumer.memory + WEIGHTS + head * 4);
        float dweight = 0.0f;
        if (exists) {
            const unsigned short* const q = given.q + item.token * given.q_token_stride + head * given.q_head_stride + column;
            u32* const dq = reinterpret_cast<u32*>(given.dq + number * DIM + column);
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const u32 two = *reinterpret_cast<const u32*>(q + 8 * i);
                const float first = g[4 * i + 2 * below], second = g[4 * i + 2 * below + 1];
                dweight += __uint_as_float(two << 16) * first + __uint_as_float(two & 0xFFFF0000u) * second;
                dq[4 * i] = pack_bf16(weight * first, weight * second);
            }
        }
        dweight = sum_over_lanes<1, 4>(dweight);
        if (exists && consumer.lane % 4 == 0) given.dweights[number] = dweight;
    }
}

// Warpgroup 0.
__device__ __forceinline__ void compute(u32 memory, const IndexLossParams& given, const Item& item) {
    const Consumer consumer(memory);
    mbarrier_wait(memory + LOADED, 0);
    const float largest = consumer.score(item);
    consumer.differentiate(given, item, largest);
    if (item.passes == 1) return;
    consumer.weight_queries();
    fence_async_proxy();
    named_barrier_sync(OWN, CONSUMERS);
    float g[64];
    send_keys(consumer, given, item, g);
    store(consumer, given, item, g);
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 2) index_loss(const __grid_constant__ IndexLossParams given) {
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
    if (threadIdx.x / (WARPS * 32) == 1) {
        warpgroup_reg_dealloc<GATHER_REGISTERS>();
        gather(memory, given, item);
    } else {
        warpgroup_reg_alloc<COMPUTE_REGISTERS>();
        compute(memory, given, item);
    }
}
