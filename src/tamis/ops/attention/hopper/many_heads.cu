// Sparse attention of 64 heads at a time over FP8 rows, on Hopper: one block of threads per item, a query token and 64
// heads, or a part of the rows of one (see `items.cuh`).
//
// Four groups of four warps. Two `widen`: each of their warps copies eight of a block's 64 rows into shared memory, makes
// them fp16 and hands them over in halves: first the columns from 256 on, whose bytes lie beside the scales, then those
// before; the bytes of the next block are on their way meanwhile. `score` multiplies queries with both halves, does the
// softmax, publishes the weights and multiplies them, from its registers, with the first quarter of the values. `weigh`
// multiplies them with the other three. Of three buffers for halves, one gets the next block's first half while this
// block is worked on; the second follows when the first half of this block has been multiplied.
//
// Numbers. A row is held as fp16 times 2**E, E from the largest of its scales and, where they are values, of its 16-bit
// columns, so that its largest values lie just below fp16's largest; every e4m3 value times a power of two is exact down to
// 2**-30 of that. 16-bit columns that are no values stay bf16, times 2**-E, which is at most 2**66. The products with
// queries (fp16 or bf16 times a power of two per head) are exact in float32, times 2**E they are logits.
//
// Weights carry 2**(E - reference) into the product with values, the reference being the largest E so far: the product
// weight * 2**E is what decides how much a row matters to the output, and fp16 holds it down to 2**-34 of the largest.
//
// Constants: V4 (rows of 448 e4m3 + 64 bf16 with exponent bytes in a plane of their own, all values; otherwise 512 e4m3,
// four float32 scales, 64 bf16, the first 512 values), SELECTIONS (1 or 2), THREADS, SHARED_BYTES, and registers per
// thread of the groups.
#include "instructions.cuh"
#include "warpgroups.cuh"

// ---- Shapes

constexpr int HEADS = 64;      // of a block
constexpr int STEP_ROWS = 64;  // selected rows that are worked on at a time
constexpr int TOGETHER = 1;
constexpr int WIDENERS = 8;  // warps
constexpr int OWN = STEP_ROWS / WIDENERS;  // rows of one of them
constexpr int WARPS = 4;    // of a group

constexpr int WIDTH = V4 ? 512 : 576, VALUES = 512, TILES = WIDTH / 64;
constexpr int LATENT = V4 ? 448 : 512;
constexpr int ROW_BYTES = V4 ? 576 : 656;  // of a row without exponent bytes
constexpr int SECOND_BYTES = 256;  // of a row: what the second half of the columns needs alone
constexpr int SCALES_AT = V4 ? 576 : 512, ROPE_AT = V4 ? 448 : 528;
// Whether the rows of the next block are looked up before those of this one are there, which is faster for short rows.
constexpr bool LOOKS_AHEAD = V4;
constexpr int RAW_BYTES = V4 ? 592 : 656;  // of a row as it came: four rows are 64 mod 128 bytes, which spreads banks

#include "items.cuh"

constexpr u32 TILE_BYTES = 64 * 128, HALF_BYTES = 4 * TILE_BYTES;
constexpr int HALVES = 3;     // buffers for half the columns of a block: those from 256 on, then those before
constexpr int LEFTOVERS = 2;  // buffers for the columns beyond 512, on which the weights are then written

// ---- Shared memory

constexpr u32 QUERIES = 0;
constexpr u32 HALF = QUERIES + TILES * TILE_BYTES;
constexpr u32 LEFTOVER = HALF + HALVES * HALF_BYTES;
constexpr u32 RAW = LEFTOVER + LEFTOVERS * TILE_BYTES;
constexpr u32 FACTOR = RAW + STEP_ROWS * RAW_BYTES;           // [LEFTOVERS][STEP_ROWS] 2**E, and 0 or, for no row, -inf
constexpr u32 RESCALE = FACTOR + LEFTOVERS * STEP_ROWS * 8;   // [LEFTOVERS][HEADS] of the output so far
constexpr u32 PER_HEAD = RESCALE + LEFTOVERS * HEADS * 4;     // [HEADS] scales of queries, at the end of the output
constexpr u32 READY = PER_HEAD + HEADS * 4;                   // [HALVES] barriers
constexpr u32 FREE = READY + HALVES * 8;                      // [HALVES]
constexpr u32 WEIGHTS_READY = FREE + HALVES * 8;              // [LEFTOVERS]
constexpr u32 FINISHED = WEIGHTS_READY + LEFTOVERS * 8;
constexpr u32 USED = FINISHED + 8;
static_assert(USED <= SHARED_BYTES && RAW % 128 == 0 && READY % 8 == 0, "shared memory");

// Named barriers.
constexpr u32 SCORING = 1, CONSUMERS = 2;

// ---- Arithmetic

// fp16 ends at 2**16. Rows: e4m3 ends at 448, so a scale below 2**7 fits; a bf16 below 2**16 does as it is.
constexpr int SCALE_EXPONENT = 6, VALUE_EXPONENT = 15, QUERY_EXPONENT = 14;
constexpr int LOWEST_EXPONENT = 127 - 60;  // of a row, with float32's bias: below 2**-44 all is zero
// Weights: a maximum is raised only when logits exceed it by more than LEEWAY; 2**(LEEWAY + HEADROOM) stays in fp16.
constexpr float LEEWAY = 4.0f, HEADROOM = 1024.0f;
constexpr float SPARE = 4.0f;  // by how much a raised reference exceeds the rows that raised it

__device__ __forceinline__ float power_of_two(int biased) { return __uint_as_float(static_cast<u32>(biased) << 23); }
__device__ __forceinline__ int biased_exponent(float x) { return __float_as_uint(x) >> 23 & 0xFF; }
__device__ __forceinline__ float load_float(u32 address) { return __uint_as_float(shared_load(address)); }
__device__ __forceinline__ void store_float(u32 address, float x) { shared_store(address, __float_as_uint(x)); }
__device__ __forceinline__ float low_bfloat(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bfloat(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Where a 16-byte unit of a row lies in a tile.
__device__ __forceinline__ u32 in_tile(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

// A place in the sequence of halves, and the parity of its buffer's barriers.
struct Half {
    int number = 0;
    u32 parity = 0;

    __device__ __forceinline__ Half after(int steps) const {
        const int next = number + steps;
        return next < HALVES ? Half{next, parity} : Half{next - HALVES, parity ^ 1};
    }

    __device__ __forceinline__ u32 tiles(u32 memory) const { return memory + HALF + number * HALF_BYTES; }
    __device__ __forceinline__ u32 ready(u32 memory) const { return memory + READY + number * 8; }
    __device__ __forceinline__ u32 free(u32 memory) const { return memory + FREE + number * 8; }
};

#include "many_heads_rows.cuh"

// ---- Queries

// bf16 to fp16 tiles, each head times a power of two that goes to PER_HEAD; by the eight warps that multiply.
__device__ __forceinline__ void load_queries(u32 memory, const unsigned short* queries, long long head_stride, int heads) {
    constexpr int UNITS = WIDTH / 8, ROUNDS = (UNITS + 31) / 32, READERS = 2 * WARPS, AT_ONCE = 4;
    const int warp = threadIdx.x / 32 % READERS, lane = threadIdx.x % 32;
    for (int first = warp; first < HEADS; first += READERS * AT_ONCE) {
        uint4 words[AT_ONCE][ROUNDS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int head = first + i * READERS;
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const int unit = lane + 32 * round;
                words[i][round] = make_uint4(0, 0, 0, 0);
                if (head < heads && unit < UNITS) {
                    words[i][round] = *reinterpret_cast<const uint4*>(queries + head * head_stride + unit * 8);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int head = first + i * READERS;
            u32 top = 0;
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) top = max(top, largest(words[i][round]));
            top = __reduce_max_sync(FULL_MASK, top);
            // Neither infinity nor NaN changes what the factor can be.
            const int exponent = max(min(static_cast<int>(top >> 7), 254), LOWEST_EXPONENT) - QUERY_EXPONENT;
            const float inverse = power_of_two(254 - exponent);
            if (lane == 0) store_float(memory + PER_HEAD + head * 4, power_of_two(exponent));
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const int unit = lane + 32 * round;
                const bool values = V4 || 32 * round * 8 < VALUES;
                if (unit < UNITS) {
                    shared_store4(memory + QUERIES + unit / 8 * TILE_BYTES + in_tile(head, unit % 8),
                                  values ? narrow(words[i][round], inverse) : times(words[i][round], inverse));
                }
            }
        }
    }
    fence_async_proxy();
    named_barrier_sync(CONSUMERS, 2 * WARPS * 32);
}

// ---- Softmax and products

// Two heads of a lane: `upper` is lane / 4 of the warp's 16, `lower` eight further.
struct Softmax {
    float unit;              // of a logit with base 2, in products of rows and queries
    float top = minus_infinity();   // largest logit
    float base = -1e30f;     // what weights are relative to
    float sum = 0.0f;        // of this lane's columns

    // The factor of everything so far.
    __device__ __forceinline__ float raise(float block_top) {
        const float logit = block_top * unit;
        top = fmaxf(top, logit);
        if (!(logit > base + LEEWAY)) return 1.0f;
        const float factor = fast_exp2(base - logit);
        base = logit;
        sum *= factor;
        return factor;
    }
};

__device__ __forceinline__ float over_lanes_of_head(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}

template <int N>
__device__ __forceinline__ void rescale(float (&values)[N][64], float upper, float lower) {
    if (__ballot_sync(FULL_MASK, upper != 1.0f || lower != 1.0f) == 0) return;
#pragma unroll
    for (int i = 0; i < N * 64; ++i) values[i / 64][i % 64] *= i & 2 ? lower : upper;
}

// Logits of a block to weights, as fragments; returns the factors of the output so far.
__device__ __forceinline__ float2 soften(float (&s)[32], u32 factors, Softmax& upper, Softmax& lower, float& reference,
                                         u32 (&weights)[4][4]) {
    const u32 own = factors + threadIdx.x % 4 * 16;  // of this lane's columns; read twice, as registers are few
    float highest = 0.0f, tops[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint4 pair = shared_load4(own + i * 64);
        const float factor[2] = {__uint_as_float(pair.x), __uint_as_float(pair.z)};
        const float added[2] = {__uint_as_float(pair.y), __uint_as_float(pair.w)};
        highest = fmaxf(highest, fmaxf(factor[0], factor[1]));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[4 * i + j] = fmaf(s[4 * i + j], factor[j % 2], added[j % 2]);
            tops[j / 2] = fmaxf(tops[j / 2], s[4 * i + j]);
        }
    }
    highest = over_lanes_of_head(highest);
    float2 scale = make_float2(upper.raise(over_lanes_of_head(tops[0])), lower.raise(over_lanes_of_head(tops[1])));
    if (highest > reference) {  // in all lanes of all warps alike
        const float raised = highest * SPARE;
        const float factor = reference * power_of_two(254 - biased_exponent(raised));
        scale.x *= factor;
        scale.y *= factor;
        reference = raised;
    }
    const float inverse = HEADROOM * power_of_two(254 - biased_exponent(reference));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 factor = {load_float(own + i * 64), load_float(own + i * 64 + 8)};
        const float a = fast_exp2(s[4 * i] * upper.unit - upper.base), b = fast_exp2(s[4 * i + 1] * upper.unit - upper.base);
        const float c = fast_exp2(s[4 * i + 2] * lower.unit - lower.base), d = fast_exp2(s[4 * i + 3] * lower.unit - lower.base);
        upper.sum += a + b;
        lower.sum += c + d;
        const float even = factor.x * inverse, odd = factor.y * inverse;
        weights[i / 2][i % 2 * 2] = pack_fp16(a * even, b * odd);
        weights[i / 2][i % 2 * 2 + 1] = pack_fp16(c * even, d * odd);
    }
    return scale;
}

// What is left to do to a head's output; its lse and largest logit are written on the way.
__device__ __forceinline__ float finish(Softmax& head, float reference, int number, const Output& out) {
    head.sum += __shfl_xor_sync(FULL_MASK, head.sum, 1);
    head.sum += __shfl_xor_sync(FULL_MASK, head.sum, 2);
    const bool empty = head.sum == 0.0f;
    const float whole = empty ? minus_infinity() : (head.base + fast_log2(head.sum)) * LN_2;
    float factor = empty ? 0.0f : reference / HEADROOM / head.sum;
    if (number < out.heads) {
        if (out.sink != nullptr) factor *= 1.0f / (1.0f + fast_exp2((out.sink[number] - whole) * LOG2_E));
        if (threadIdx.x % 4 == 0) {
            out.lse[number] = whole;
            out.tops[number] = head.sum == head.sum ? head.top * LN_2 : head.sum;  // NaN has no place in an order
        }
    }
    return empty ? 0.0f : factor;
}

// `place` tells where results go, at the end, when registers are free.
template <class Place>
__device__ __forceinline__ void score(u32 memory, int blocks, float scale, const Place& place) {
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 * 16 + lane / 4;
    Softmax upper = {load_float(memory + PER_HEAD + head * 4) * scale * LOG2_E};
    Softmax lower = {load_float(memory + PER_HEAD + head * 4 + 32) * scale * LOG2_E};
    float reference = power_of_two(LOWEST_EXPONENT - SCALE_EXPONENT);  // no row has less
    float s[32], values[1][64];
#pragma unroll
    for (int i = 0; i < 64; ++i) values[0][i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = 0.0f;
    // Rows of the matrices that this lane addresses when it stores weights.
    const u32 target = in_tile(threadIdx.x / 32 * 16 + lane % 16, lane / 16);
    Half here;
    const auto at = [](int step) { return step / 4 * TILE_BYTES + step % 4 * 32; };
    // In two pieces: issuing products takes as long as they do, and others wait for what came before them.
    const auto multiply_first_keys = [&] {
        mbarrier_wait(here.ready(memory), here.parity);
        const auto queries = k_major(memory + QUERIES + HALF_BYTES), keys = k_major(here.tiles(memory));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_ss<FP16>(s, advance(queries, at(step)), advance(keys, at(step)), step > 0);
        wgmma_commit();
    };
    const auto multiply_more_keys = [&](u32 slot) {
        const auto queries = k_major(memory + QUERIES + HALF_BYTES), keys = k_major(here.tiles(memory));
        const auto rest = k_major(memory + LEFTOVER + slot * TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 4; step < 16; ++step) wgmma_ss<FP16>(s, advance(queries, at(step)), advance(keys, at(step)), 1);
#pragma unroll
        for (int step = 16; step < TILES * 4 - 16; ++step) {
            wgmma_ss<BF16>(s, advance(queries, at(step)), advance(rest, at(step - 16)), 1);
        }
        wgmma_commit();
    };
    const auto multiply_second_keys = [&] {
        const Half second = here.after(1);
        mbarrier_wait(second.ready(memory), second.parity);
        const auto queries = k_major(memory + QUERIES), keys = k_major(second.tiles(memory));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 16; ++step) wgmma_ss<FP16>(s, advance(queries, at(step)), advance(keys, at(step)), 1);
        wgmma_commit();
        wgmma_wait<0>(s);
    };
    // Softmax of a block's logits, and the product with the first quarter of the values under way.
    const auto weigh_first = [&](u32 slot) {
        const u32 leftover = memory + LEFTOVER + slot * TILE_BYTES;
        u32 weights[4][4];
        const float2 factor = soften(s, memory + FACTOR + slot * STEP_ROWS * 8, upper, lower, reference, weights);
        if (!V4) named_barrier_sync(SCORING, WARPS * 32);  // all four warps have read what the weights take the place of
#pragma unroll
        for (int step = 0; step < 4; ++step) stmatrix_x4(leftover + (target ^ step * 32), weights[step]);
        if (lane % 4 == 0) {
            store_float(memory + RESCALE + (slot * HEADS + head) * 4, factor.x);
            store_float(memory + RESCALE + (slot * HEADS + head) * 4 + 32, factor.y);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane % 4 == 0) mbarrier_arrive(memory + WEIGHTS_READY + slot * 8);
        rescale(values, factor.x, factor.y);
        const auto rows = mn_major(here.tiles(memory), TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_rs<FP16>(values[0], weights[step], advance(rows, step * 2048));
        wgmma_commit();
    };
    if (blocks > 0) {
        multiply_first_keys();
        multiply_more_keys(0);
        multiply_second_keys();
        u32 slot = 0;
        // The compiler gives up overlapping products where a branch leaves while one of them is under way, hence the
        // last block by itself.
        for (int block = 1; block < blocks; ++block) {
            weigh_first(slot);
            const u32 used = here.free(memory);
            slot = block % LEFTOVERS;
            here = here.after(2);
            multiply_first_keys();
            wgmma_wait<1>(values[0]);
            if (lane == 0) mbarrier_arrive(used);
            multiply_more_keys(slot);
            multiply_second_keys();
        }
        weigh_first(slot);
        wgmma_wait<0>(values[0]);
    }
    let_next_kernel_start();
    const Output out = place();
    const float above = finish(upper, reference, head, out), below = finish(lower, reference, head + 8, out);
    __syncwarp();  // every lane has read the queries' scales that lie there
    if (lane % 4 == 0) {
        store_float(memory + PER_HEAD + head * 4, above);
        store_float(memory + PER_HEAD + head * 4 + 32, below);
    }
    if (lane % 4 == 0) mbarrier_arrive(memory + FINISHED);
    out.store(values[0], VALUES / 2, above, below);
}

template <class Place>
__device__ __forceinline__ void weigh(u32 memory, int blocks, const Place& place) {
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % WARPS * 16 + lane / 4;
    float values[3][64];
#pragma unroll
    for (int i = 0; i < 192; ++i) values[i / 64][i % 64] = 0.0f;
    Half here;
    int leftover = 0;
    u32 parity = 0;
    for (int block = 0; block < blocks; ++block) {
        mbarrier_wait(memory + WEIGHTS_READY + leftover * 8, parity);
        const u32 factors = memory + RESCALE + (leftover * HEADS + head) * 4;
        rescale(values, load_float(factors), load_float(factors + 32));
        const auto weights = k_major(memory + LEFTOVER + leftover * TILE_BYTES);
        const auto upper = mn_major(here.tiles(memory) + 2 * TILE_BYTES, TILE_BYTES);
        const auto lower = mn_major(here.after(1).tiles(memory), TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_ss<FP16>(values[0], advance(weights, step * 32), advance(upper, step * 2048));
        wgmma_commit();
        // `widen` waits for this half: it is freed before more products are issued, which takes as long as they do.
        wgmma_wait<0>(values[0]);
        if (lane == 0) mbarrier_arrive(here.free(memory));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma_ss<FP16>(values[1], advance(weights, step * 32), advance(lower, step * 2048));
            wgmma_ss<FP16>(values[2], advance(weights, step * 32), advance(lower, step * 2048 + 2 * TILE_BYTES));
        }
        wgmma_commit();
        wgmma_wait<0>(values[1]);
        wgmma_wait<0>(values[2]);
        if (lane < 2) mbarrier_arrive(here.after(1).free(memory));  // the second time for `score`
        here = here.after(2);
        if (++leftover == LEFTOVERS) leftover = 0, parity ^= 1;
    }
    mbarrier_wait(memory + FINISHED, 0);
    const Output out = place();
    const float above = load_float(memory + PER_HEAD + head * 4), below = load_float(memory + PER_HEAD + head * 4 + 32);
#pragma unroll
    for (int i = 0; i < 3; ++i) out.store(values[i], (VALUES * 3 / 4 + i * VALUES / 4) % VALUES, above, below);
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_many_heads(
    const unsigned short* queries, long long query_token_stride, long long query_head_stride, int tokens, int heads,
    float scale, const float* scale_factor, const float* sink, void* out, int out_kind, long long out_token_stride,
    long long out_head_stride, float* lse, float* tops, float* parts_out, float* parts_lse, float* parts_tops, int whole,
    int parts, SELECTION(0), SELECTION(1)) {
    const u32 memory = tile_memory();
    const Items items = {tokens, heads, whole, parts};
    if (threadIdx.x == 0) {
        for (int i = 0; i < HALVES; ++i) {
            mbarrier_init(memory + READY + i * 8, WIDENERS * 4);
            mbarrier_init(memory + FREE + i * 8, 2 * WARPS);
        }
        for (int i = 0; i < LEFTOVERS; ++i) mbarrier_init(memory + WEIGHTS_READY + i * 8, WARPS * 8);
        mbarrier_init(memory + FINISHED, WARPS * 8);
        fence_mbarrier_init();
    }
    wait_for_previous_kernel();
    const int first_head = items.first_head(blockIdx.x);
    const long long token = items.token(blockIdx.x);
    const Work work = items.work(blockIdx.x, selection_of(token, SELECTION_VALUES(0)),
                                 SELECTIONS > 1 ? selection_of(token, SELECTION_VALUES(1)) : Selection());
    __syncthreads();

    const auto place = [&] {
        return items.place(opaque(blockIdx.x), {out, out_kind, out_token_stride, out_head_stride, lse, tops,
                                                         parts_out, parts_lse, parts_tops, sink});
    };
    const int group = threadIdx.x / (WARPS * 32);
    if (group >= 2) {
        warpgroup_reg_dealloc<WIDEN_REGISTERS>();
        widen_rows(memory, work);
        return;
    }
    load_queries(memory, queries + token * query_token_stride + first_head * query_head_stride, query_head_stride,
                 min(heads - first_head, HEADS));
    if (group == 0) {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        if (scale_factor != nullptr) scale *= *scale_factor;
        score(memory, work.end - work.begin, scale, place);
    } else {
        warpgroup_reg_alloc<WEIGH_REGISTERS>();
        weigh(memory, work.end - work.begin, place);
    }
}
