// Sparse attention of 16 heads per CTA with mma.sync (m16n8k16), on Hopper, over FP8 rows of 656 bytes or bf16 rows of 1152,
// or over rows without a rope, of 528 and 1024 bytes.
// With more heads the grid has more CTAs along its y axis, which read the same rows.
//
// Computes, for each query token and head, softmax(scale * q . k) v over the selected rows, its lse and its largest logit.
// The first 512 columns of a row are values; all 576, or 512 without a rope, are keys.
//
// Roles. CTAs are persistent and take one work item after the other (see `few_heads_items.cuh`). A CTA has one or two
// streams. A stream is a ring of rows in shared memory (see `row_ring.cuh`) with two producer warps, which copy rows, and
// one consumer warpgroup. Two streams share the selected rows of a work item. At its end the second stream's warpgroup
// hands its accumulators to the first one's, which merges them with its own and writes the result.
//
// The 16 heads are the M dimension, so nothing is padded. Warp w of a warpgroup owns tile w of a row, 128 columns, as keys
// and as values: rows are read from shared memory as they came and are never written back. For a ring stage of 32 rows a
// consumer warp
//   1. multiplies queries with its 128 columns and with a quarter of the rope columns,
//   2. adds the partial products of the other three warps, through shared memory and one named barrier,
//   3. computes the softmax weights of all 32 rows, already in the layout of the A operand,
//   4. multiplies them with its 128 columns of the values.
//
// FP8 rows. e4m3 values are exact in fp16, so codes are converted in registers and multiplied without their scale; the
// scale of a tile is applied to its partial products and to its weights. Queries are multiplied with a power of two per
// head that brings them into fp16's range. A weight times its scale must be an fp16 number too. Weights are therefore
// exp2(logit - reference), where the reference of a warp and head plays the part of the running max but follows the largest
// weight times scale of the warp's tile. The sum of weights is float32 and has room for that.
//
// bf16 rows are multiplied with bf16 queries. A weight is the sum of two bf16 numbers, since one would lose more than the
// rounding of the output does. bf16 has the range of float32, so the reference follows the largest logit.
//
// Shared memory is laid out in `SharedMemoryPlan` below: 192 KiB with two streams of three stages of FP8 rows.
//
// Budget for 64 FP8 rows (H200), a stage of each of two streams: bulk copies from L2 take 23 cycles per row, 1,470 cycles.
// A consumer warp issues about 700 instructions per stage, and a scheduler has two of these warps: 1,400 issue slots. From
// 64 tokens on the issue slots are the bound.
//
// Defined by the host: BF16_ROWS (1: bf16, 0: FP8), ROPE_COLUMNS (64 or 0), RING_STREAMS, RING_STAGES, PER_SM (CTAs per SM),
// QUERY_FP16 (1: queries are fp16, for FP8 rows only; 0: bf16), KEEP_REST, THREADS, SHARED_BYTES, PARAMS_BYTES.

#include "instructions.cuh"
#include "row_ring.cuh"
#include "softmax.cuh"

typedef unsigned short u16;

// ---- Shapes

// A row has four tiles of 128 e4m3 codes, a float32 scale per tile and 64 bf16 rope columns, or 512 + 64 bf16 columns. Rows of
// models without a rope end before the rope columns.
constexpr int TILES = 4, TILE = 128, SCALES_AT = 512;
constexpr int TILE_BYTES = BF16_ROWS ? 2 * TILE : TILE, ROPE_AT = BF16_ROWS ? 1024 : 528;

struct RingShape {
    static constexpr int ROW_BYTES = (BF16_ROWS ? 1024 : 528) + 2 * ROPE_COLUMNS;
    // The pitch is an odd multiple of 16 bytes, so that ldmatrix reads the rows of a matrix from different banks.
    static constexpr int PITCH = ROW_BYTES / 16 % 2 ? ROW_BYTES : ROW_BYTES + 16;
    // A warp issues the copies of its lanes one by one, slower than memory delivers rows, so a stream has two warps for it.
    static constexpr int PRODUCERS = 2;
    // bf16 rows are long, so the producer warps share every stage of them.
    static constexpr int SHARED_STAGES = BF16_ROWS ? 1 << 30 : 2;
    static constexpr int STAGES = RING_STAGES, STREAMS = RING_STREAMS, ROUND = 1;
};
using Ring = RowRing<RingShape>;
constexpr int PITCH = RingShape::PITCH, STREAMS = RingShape::STREAMS;

constexpr int HEADS = 16;
constexpr int WARPS = TILES, WARPGROUP = 32 * WARPS;
constexpr int KEY_TILES = STAGE_ROWS / 8;  // MMAs that cover the keys of a stage, n = 8 rows each
constexpr int K_STEPS = TILE / 16;         // MMAs that cover the columns of a tile, k = 16 each
constexpr int FRAGMENT = 32 * 16;          // bytes of a warp's accumulator fragment, four float32 per lane
// A lane has two pairs of the 16 columns of a step. FP8 codes: four neighbours, one word. bf16: a pair from each of two
// matrices of eight columns.
constexpr int PAIR_STRIDE = BF16_ROWS ? 2 : 4, SECOND_PAIR = BF16_ROWS ? 8 : 2;
constexpr Operand QUERY_TYPE = QUERY_FP16 ? FP16 : BF16;
// Rope columns are multiplied in bf16, which has fewer bits than fp16: an fp16 query becomes the sum of two bf16 terms.
constexpr int ROPE_TERMS = QUERY_FP16 ? 2 : 1;
constexpr int WEIGHT_TERMS = BF16_ROWS ? 2 : 1;

static_assert(THREADS == (STREAMS + 1) * WARPGROUP && STREAMS * RingShape::PRODUCERS <= 4, "four warps for producers");
static_assert(!(BF16_ROWS && QUERY_FP16), "bf16 rows are multiplied with bf16 queries");

// ---- Range of weights, as exponents of two

// With fp16 weights the largest one starts at 2^10 and may grow to 2^15 before the reference moves; fp16 has full precision
// down to 2^-14. With bf16 weights it starts at one, which makes the result exact if a single row is selected.
constexpr float START_BITS = BF16_ROWS ? 0.0f : 10.0f, LARGEST_BITS = BF16_ROWS ? 8.0f : 15.0f;
// A tile whose scale is zero has zero weight times scale whatever the reference is; these bounds keep its sum finite.
constexpr float LEAST_SCALE_BITS = -85.0f, LARGEST_SUM_BITS = 100.0f;
constexpr float NO_REFERENCE = -1e30f;  // before the first row; finite, so that differences are no NaN

// ---- Registers per thread: producers release theirs to the consumers (setmaxnreg)

constexpr int LAUNCH_REGISTERS = 65536 / (PER_SM * THREADS) / 8 * 8, PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = ((STREAMS + 1) * LAUNCH_REGISTERS - PRODUCER_REGISTERS) / STREAMS / 8 * 8;
static_assert(CONSUMER_REGISTERS > LAUNCH_REGISTERS && CONSUMER_REGISTERS <= 240, "too many threads for the registers");

// ---- Shared memory

struct SharedMemoryPlan {
    // Bytes of a buffer or, for MERGE, its fragments.
    static constexpr int PRODUCTS_BUFFER = WARPS * KEY_TILES * FRAGMENT;
    static constexpr int MERGE_FRAGMENTS = 2 * K_STEPS + 2;  // accumulators; references and sums; running max
    static constexpr int QUERY_MAX_BUFFER = BF16_ROWS ? 0 : 4 * WARPS * HEADS;

    static constexpr int ROWS = 0;                                                   // [stream][stage][row]
    static constexpr int PRODUCTS = ROWS + Ring::ALL_STAGES * Ring::STAGE_BYTES;     // [stream][2][warp] partial products
    static constexpr int MERGE = PRODUCTS + STREAMS * 2 * PRODUCTS_BUFFER;           // [warp] of the second stream
    // [stream][2][warp][head] largest magnitudes of the queries
    static constexpr int QUERY_MAX = MERGE + (STREAMS > 1) * WARPS * MERGE_FRAGMENTS * FRAGMENT;
    static constexpr int BARRIERS = QUERY_MAX + STREAMS * 2 * QUERY_MAX_BUFFER;      // [stream][stage] full, empty
    static constexpr int INFOS = BARRIERS + Ring::ALL_STAGES * Ring::BARRIER_BYTES;  // [stream][stage] stage info
    static constexpr int BYTES = INFOS + Ring::ALL_STAGES * Ring::INFO_BYTES;
};
using Plan = SharedMemoryPlan;
template struct CheckSharedBytes<Plan::BYTES, SHARED_BYTES>;

__device__ __forceinline__ Ring::Cursor ring_of(u32 memory, int stream) {
    return Ring::Cursor(memory + Plan::ROWS, memory + Plan::BARRIERS, memory + Plan::INFOS, stream);
}

// Named barriers: one per warpgroup (1 and 2), then full and empty of the MERGE buffer.
constexpr u32 WARPGROUP_BARRIER = 1, MERGE_FULL = 3, MERGE_EMPTY = 4;

// ---- Consumers

// A thread of a consumer warpgroup. In the accumulator layout of m16n8k16 a lane has heads `row` and `row + 8` of the CTA,
// and columns 2 * pair and 2 * pair + 1 of every eight.
struct Consumer {
    int warp;       // of the warpgroup, and the tile that it owns
    int lane;
    int stream;
    int row, pair;  // of the lane, 0 to 7 and 0 to 3

    __device__ __forceinline__ Consumer() {
        lane = threadIdx.x % 32;
        warp = threadIdx.x / 32 % WARPS;
        stream = threadIdx.x / WARPGROUP;
        row = lane / 4;
        pair = lane % 4;
    }

    __device__ __forceinline__ void sync_warpgroup() const { named_barrier_sync(WARPGROUP_BARRIER + stream, WARPGROUP); }
};

// Reductions over the four lanes that have the same heads.
__device__ __forceinline__ float max_of_head(float x) { return max_over_lanes<1, 4>(x); }
__device__ __forceinline__ float sum_of_head(float x) { return sum_over_lanes<1, 4>(x); }

__device__ __forceinline__ float max_magnitude(float so_far, u32 packed) {
    const float2 two = unpack<QUERY_TYPE>(packed);
    return fmaxf(so_far, fmaxf(fabsf(two.x), fabsf(two.y)));
}

__device__ __forceinline__ uint4 bits_of(float a, float b, float c, float d) {
    return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}

// The A operands of a warp: the queries in the columns of its tile and in its quarter of the rope columns.
struct Query {
    u32 latent[K_STEPS][4];   // fp16 for FP8 rows, bf16 for bf16 rows
    u32 rope[ROPE_TERMS][4];  // bf16
    float inverse_scale[2];   // inverse of the power of two that each head's query was multiplied with

    // `max_buffer` is [warp][head] in shared memory; only FP8 rows need it.
    __device__ __forceinline__ void load(
        const u16* q, long long head_stride, int heads, const Consumer& me, u32 max_buffer) {
        u32 rope_in[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = me.row + 8 * half;
            const bool exists = head < heads;
            const u16* latent_at = q + head * head_stride + TILE * me.warp + PAIR_STRIDE * me.pair;
            const u16* rope_at = q + head * head_stride + TILES * TILE + 16 * me.warp + 2 * me.pair;
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step) {
                const uint2 four = exists ? load_four(latent_at + 16 * step) : make_uint2(0, 0);
                latent[step][half] = four.x;
                latent[step][half + 2] = four.y;
            }
            rope_in[half] = exists && ROPE_COLUMNS ? load_two(rope_at) : 0;
            rope_in[half + 2] = exists && ROPE_COLUMNS ? load_two(rope_at + 8) : 0;
        }
        if (BF16_ROWS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) rope[0][i] = rope_in[i];
            inverse_scale[0] = inverse_scale[1] = 1.0f;
        } else {
            bring_into_range(rope_in, me, max_buffer);
        }
    }

    __device__ __forceinline__ static u32 load_two(const u16* at) { return *reinterpret_cast<const u32*>(at); }

    __device__ __forceinline__ static uint2 load_four(const u16* at) {
        if (BF16_ROWS) return make_uint2(load_two(at), load_two(at + SECOND_PAIR));
        return *reinterpret_cast<const uint2*>(at);
    }

    // Multiplies the queries with a power of two per head and converts them to fp16, the rope columns to bf16 terms.
    __device__ __forceinline__ void bring_into_range(const u32 (&rope_in)[4], const Consumer& me, u32 max_buffer) {
        float largest[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step) {
                largest[half] = max_magnitude(max_magnitude(largest[half], latent[step][half]), latent[step][half + 2]);
            }
            largest[half] = max_of_head(largest[half]);
            if (me.pair == 0) {
                shared_store(max_buffer + 4 * (HEADS * me.warp + me.row + 8 * half), __float_as_uint(largest[half]));
            }
        }
        me.sync_warpgroup();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 bits = 0;
#pragma unroll
            for (int warp = 0; warp < WARPS; ++warp) {
                bits = max(bits, shared_load(max_buffer + 4 * (HEADS * warp + me.row + 8 * half)));
            }
            const QueryScale scale(bits);
            inverse_scale[half] = scale.inverse;
            const float factor = scale.factor;
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step) {
                const float2 first = unpack<QUERY_TYPE>(latent[step][half]);
                const float2 second = unpack<QUERY_TYPE>(latent[step][half + 2]);
                latent[step][half] = pack_fp16(first.x * factor, first.y * factor);
                latent[step][half + 2] = pack_fp16(second.x * factor, second.y * factor);
            }
#pragma unroll
            for (int side = half; side < 4; side += 2) {
                u32 terms[ROPE_TERMS];
                const float2 two = unpack<QUERY_TYPE>(rope_in[side]);
                bf16_terms({two.x * factor, two.y * factor}, terms);
#pragma unroll
                for (int term = 0; term < ROPE_TERMS; ++term) rope[term][side] = terms[term];
            }
        }
    }
};

// The accumulators of a warp, 16 heads times 128 columns of the values, and the state of its online softmax. Index `half`
// is 0 for head `row` and 1 for head `row + 8`.
struct Accumulators {
    // For each 16 columns of the tile: FP8 rows [even or odd column][2 * half + first or second pair], bf16 rows
    // [first or second pair][2 * half + even or odd column].
    float values[K_STEPS][2][4];
    float reference[2];    // weights are exp2(logit - reference)
    float sum[2];          // of the weights of this lane's rows
    float running_max[2];  // of the products of query and key, without the softmax scale

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) values[step][0][i] = values[step][1][i] = 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            reference[half] = NO_REFERENCE;
            sum[half] = 0.0f;
            running_max[half] = minus_infinity();
        }
    }

    // Moves the reference of one half of the heads and rescales the sum and the accumulators to it.
    __device__ __forceinline__ void move_reference(int half, float moved) {
        const float factor = fast_exp2(reference[half] - moved);
        sum[half] *= factor;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) values[step][i / 2][2 * half + i % 2] *= factor;
        }
        reference[half] = moved;
    }
};

// ---- 1. Queries times keys: partial products of a warp, [KEY_TILES][2 * half + first or second row]

__device__ __forceinline__ void multiply_rope(
    const Query& query, const Consumer& me, u32 rows, float (&products)[KEY_TILES][4]) {
    const int row = me.lane % 8, matrix = me.lane / 8;
    const u32 rope = rows + (row + matrix / 2 * 8) * PITCH + ROPE_AT + 32 * me.warp + 16 * (matrix % 2);
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; tile += 2) {
        u32 keys[4];
        ldmatrix_x4(keys, rope + tile * 8 * PITCH);
#pragma unroll
        for (int term = 0; term < ROPE_TERMS; ++term) {
            mma_m16n8k16<BF16>(products[tile], query.rope[term], keys[0], keys[1]);
            mma_m16n8k16<BF16>(products[tile + 1], query.rope[term], keys[2], keys[3]);
        }
    }
}

__device__ __forceinline__ void multiply_bf16_keys(const Query& query, u32 columns, float (&products)[KEY_TILES][4]) {
#pragma unroll
    for (int step = 0; step < K_STEPS; step += 2) {
#pragma unroll
        for (int tile = 0; tile < KEY_TILES; ++tile) {
            u32 keys[4];
            ldmatrix_x4(keys, columns + tile * 8 * PITCH + 32 * step);
            mma_m16n8k16<BF16>(products[tile], query.latent[step], keys[0], keys[1]);
            mma_m16n8k16<BF16>(products[tile], query.latent[step + 1], keys[2], keys[3]);
        }
    }
}

// Multiplies the codes; the caller applies the tile's scale.
__device__ __forceinline__ void multiply_fp8_keys(const Query& query, u32 columns, float (&products)[KEY_TILES][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 codes[KEY_TILES][4];
#pragma unroll
        for (int tile = 0; tile < KEY_TILES; ++tile) ldmatrix_x4(codes[tile], columns + tile * 8 * PITCH + 64 * half);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int tile = 0; tile < KEY_TILES; ++tile) {
                u32 first, second;
                e4m3x4_to_fp16(codes[tile][step], first, second);
                mma_m16n8k16<FP16>(products[tile], query.latent[4 * half + step], first, second);
            }
        }
    }
}

__device__ __forceinline__ void multiply_keys(
    const Query& query, const Consumer& me, u32 rows, const float (&scales)[KEY_TILES][2],
    float (&products)[KEY_TILES][4]) {
    const u32 columns = rows + me.lane % 8 * PITCH + TILE_BYTES * me.warp + 16 * (me.lane / 8);
    float latent_products[KEY_TILES][4];
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) products[tile][i] = latent_products[tile][i] = 0.0f;
    }
    if (ROPE_COLUMNS) multiply_rope(query, me, rows, products);
    if (BF16_ROWS) {
        multiply_bf16_keys(query, columns, products);
        return;
    }
    multiply_fp8_keys(query, columns, latent_products);
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            products[tile][i] = fmaf(latent_products[tile][i], scales[tile][i % 2], products[tile][i]);
        }
    }
}

// ---- 2. Every warp adds up the partial products of all four warps

__device__ __forceinline__ void reduce_products(const Consumer& me, u32 buffer, float (&products)[KEY_TILES][4]) {
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
        const float(&p)[4] = products[tile];
        shared_store4(buffer + (me.warp * KEY_TILES + tile) * FRAGMENT + 16 * me.lane, bits_of(p[0], p[1], p[2], p[3]));
    }
    me.sync_warpgroup();
#pragma unroll
    for (int other = 1; other < WARPS; ++other) {
        const u32 theirs = buffer + (me.warp + other) % WARPS * KEY_TILES * FRAGMENT + 16 * me.lane;
#pragma unroll
        for (int tile = 0; tile < KEY_TILES; ++tile) {
            const uint4 partial = shared_load4(theirs + tile * FRAGMENT);
            products[tile][0] += __uint_as_float(partial.x);
            products[tile][1] += __uint_as_float(partial.y);
            products[tile][2] += __uint_as_float(partial.z);
            products[tile][3] += __uint_as_float(partial.w);
        }
    }
}

// ---- 3. Online softmax. A logit in base 2 is a product times its head's logit_scale

// Raises the references so that the largest weight times scale of a stage is 2^START_BITS. References never move down.
__device__ __forceinline__ void raise_references(
    Accumulators& accumulators, const float (&products)[KEY_TILES][4], const float (&scales)[KEY_TILES][2],
    const float (&logit_scale)[2]) {
    float largest[2] = {NO_REFERENCE, NO_REFERENCE};
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scale_bits = fmaxf(fast_log2(fabsf(scales[tile][i % 2])), LEAST_SCALE_BITS);
            largest[i / 2] = fmaxf(largest[i / 2], fmaf(products[tile][i], logit_scale[i / 2], scale_bits));
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float moved = fmaxf(accumulators.reference[half], max_of_head(largest[half]) - START_BITS);
        accumulators.move_reference(half, moved);
    }
}

// Computes the weights of a stage, adds them to the sums, and packs weights times scales as A operands.
__device__ __forceinline__ void softmax(
    Accumulators& accumulators, const float (&products)[KEY_TILES][4], const float (&scales)[KEY_TILES][2],
    const float (&logit_scale)[2], u32 (&weights)[KEY_TILES / 2][WEIGHT_TERMS][4]) {
    // Whether weights fit is decided before the exponentials, from an upper bound: a lane's largest logit with its largest
    // scale. A branch after the exponentials would keep the compiler from overlapping them with the loads of values. If the
    // two belong to different rows, the bound is too high and `raise_references` may leave the references where they are.
    float largest[2] = {minus_infinity(), minus_infinity()}, largest_scale = 0.0f;
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < 4; ++i) largest[i / 2] = fmaxf(largest[i / 2], products[tile][i]);
        largest_scale = fmaxf(largest_scale, fmaxf(fabsf(scales[tile][0]), fabsf(scales[tile][1])));
    }
    const float limit = BF16_ROWS ? LARGEST_BITS : fminf(LARGEST_BITS - fast_log2(largest_scale), LARGEST_SUM_BITS);
    bool fits = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        accumulators.running_max[half] = fmaxf(accumulators.running_max[half], largest[half]);
        fits = fits && fmaf(largest[half], logit_scale[half], -accumulators.reference[half]) <= limit;
    }
    if (__any_sync(FULL_MASK, !fits)) raise_references(accumulators, products, scales, logit_scale);
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
        float scaled[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float logit = fmaf(products[tile][i], logit_scale[i / 2], -accumulators.reference[i / 2]);
            const float weight = fast_exp2(logit);
            accumulators.sum[i / 2] += weight;
            scaled[i] = weight * scales[tile][i % 2];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32(&terms)[WEIGHT_TERMS][4] = weights[tile / 2];
            const int at = 2 * (tile % 2) + half;
            const float first = scaled[2 * half], second = scaled[2 * half + 1];
            if (BF16_ROWS) {
                u32 both[WEIGHT_TERMS];
                bf16_terms({first, second}, both);
#pragma unroll
                for (int term = 0; term < WEIGHT_TERMS; ++term) terms[term][at] = both[term];
            } else {
                terms[0][at] = pack_fp16(first, second);
            }
        }
    }
}

// ---- 4. Weights times values

// ldmatrix.trans moves 16-bit units, so a word has two neighbouring codes of one row, then those of the next row. __byte_perm
// reorders it to the two rows of the even column, then the two rows of the odd one.
__device__ __forceinline__ void multiply_fp8_values(Accumulators& accumulators, u32 columns, const u32 (&weights)[4]) {
#pragma unroll
    for (int step = 0; step < K_STEPS; step += 2) {
        u32 codes[4];
        ldmatrix_x4_trans(codes, columns + 16 * step);
#pragma unroll
        for (int next = 0; next < 2; ++next) {
            u32 even[2], odd[2];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
                e4m3x4_to_fp16(__byte_perm(codes[2 * next + tile], 0, 0x3120), even[tile], odd[tile]);
            }
            mma_m16n8k16<FP16>(accumulators.values[step + next][0], weights, even[0], even[1]);
            mma_m16n8k16<FP16>(accumulators.values[step + next][1], weights, odd[0], odd[1]);
        }
    }
}

__device__ __forceinline__ void multiply_bf16_values(
    Accumulators& accumulators, u32 columns, const u32 (&weights)[WEIGHT_TERMS][4]) {
#pragma unroll
    for (int step = 0; step < K_STEPS; ++step) {
        u32 values[4];
        ldmatrix_x4_trans(values, columns + 32 * step);
#pragma unroll
        for (int term = 0; term < WEIGHT_TERMS; ++term) {
            mma_m16n8k16<BF16>(accumulators.values[step][0], weights[term], values[0], values[1]);
            mma_m16n8k16<BF16>(accumulators.values[step][1], weights[term], values[2], values[3]);
        }
    }
}

__device__ __forceinline__ void multiply_values(
    Accumulators& accumulators, const Consumer& me, u32 rows, const u32 (&weights)[KEY_TILES / 2][WEIGHT_TERMS][4]) {
    const int row = me.lane % 8, matrix = me.lane / 8;
    const u32 columns = rows + (row + matrix % 2 * 8) * PITCH + TILE_BYTES * me.warp + 16 * (matrix / 2);
#pragma unroll
    for (int sixteen = 0; sixteen < KEY_TILES / 2; ++sixteen) {
        if (BF16_ROWS) {
            multiply_bf16_values(accumulators, columns + sixteen * 16 * PITCH, weights[sixteen]);
        } else {
            multiply_fp8_values(accumulators, columns + sixteen * 16 * PITCH, weights[sixteen][0]);
        }
    }
}

// One stage of the ring: steps 1 to 4. `buffer` is for the exchange of partial products.
__device__ __forceinline__ void process_stage(
    Accumulators& accumulators, const Query& query, const Consumer& me, u32 rows, u32 valid_rows, u32 buffer,
    const float (&logit_scale)[2]) {
    float scales[KEY_TILES][2], products[KEY_TILES][4];  // bf16 rows have scales of one, which the compiler folds
#pragma unroll
    for (int tile = 0; tile < KEY_TILES; ++tile) {
        const u32 at = rows + (8 * tile + 2 * me.pair) * PITCH + SCALES_AT + 4 * me.warp;
        scales[tile][0] = BF16_ROWS ? 1.0f : load_float(at);
        scales[tile][1] = BF16_ROWS ? 1.0f : load_float(at + PITCH);
    }
    multiply_keys(query, me, rows, scales, products);
    reduce_products(me, buffer, products);
    if (valid_rows != FULL_MASK) {
#pragma unroll
        for (int tile = 0; tile < KEY_TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (!(valid_rows >> (8 * tile + 2 * me.pair + i % 2) & 1)) products[tile][i] = minus_infinity();
            }
        }
    }
    u32 weights[KEY_TILES / 2][WEIGHT_TERMS][4];
    softmax(accumulators, products, scales, logit_scale, weights);
    multiply_values(accumulators, me, rows, weights);
}

// ---- The end of a work item

// The second stream's warpgroup stores its accumulators in the MERGE buffer.
__device__ __forceinline__ void store_accumulators(const Accumulators& accumulators, u32 at) {
#pragma unroll
    for (int i = 0; i < 2 * K_STEPS; ++i) {
        const float(&v)[4] = accumulators.values[i / 2][i % 2];
        shared_store4(at + i * FRAGMENT, bits_of(v[0], v[1], v[2], v[3]));
    }
    const float *r = accumulators.reference, *s = accumulators.sum, *m = accumulators.running_max;
    shared_store4(at + 2 * K_STEPS * FRAGMENT, bits_of(r[0], r[1], s[0], s[1]));
    shared_store4(at + (2 * K_STEPS + 1) * FRAGMENT, bits_of(m[0], m[1], 0.0f, 0.0f));
}

// The first stream's warpgroup adds them to its own, both relative to the larger reference.
__device__ __forceinline__ void merge_accumulators(Accumulators& accumulators, u32 at) {
    const uint4 scalars = shared_load4(at + 2 * K_STEPS * FRAGMENT);
    const uint4 max_bits = shared_load4(at + (2 * K_STEPS + 1) * FRAGMENT);
    const float reference[2] = {__uint_as_float(scalars.x), __uint_as_float(scalars.y)};
    const float sum[2] = {__uint_as_float(scalars.z), __uint_as_float(scalars.w)};
    float factor[2];
    accumulators.running_max[0] = fmaxf(accumulators.running_max[0], __uint_as_float(max_bits.x));
    accumulators.running_max[1] = fmaxf(accumulators.running_max[1], __uint_as_float(max_bits.y));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float moved = fmaxf(accumulators.reference[half], reference[half]);
        accumulators.move_reference(half, moved);
        factor[half] = fast_exp2(reference[half] - moved);
        accumulators.sum[half] += sum[half] * factor[half];
    }
#pragma unroll
    for (int i = 0; i < 2 * K_STEPS; ++i) {
        const uint4 theirs = shared_load4(at + i * FRAGMENT);
        float(&ours)[4] = accumulators.values[i / 2][i % 2];
        ours[0] += __uint_as_float(theirs.x) * factor[0];
        ours[1] += __uint_as_float(theirs.y) * factor[0];
        ours[2] += __uint_as_float(theirs.z) * factor[1];
        ours[3] += __uint_as_float(theirs.w) * factor[1];
    }
}

// Store a lane's four columns of a step, in float32 or as packed 16-bit numbers.
__device__ __forceinline__ void store_four(float* target, float a, float b, float c, float d) {
    if (BF16_ROWS) {
        *reinterpret_cast<float2*>(target) = make_float2(a, b);
        *reinterpret_cast<float2*>(target + SECOND_PAIR) = make_float2(c, d);
    } else {
        *reinterpret_cast<float4*>(target) = make_float4(a, b, c, d);
    }
}

__device__ __forceinline__ void store_four(u16* target, uint2 packed) {
    if (BF16_ROWS) {
        *reinterpret_cast<u32*>(target) = packed.x;
        *reinterpret_cast<u32*>(target + SECOND_PAIR) = packed.y;
    } else {
        *reinterpret_cast<uint2*>(target) = packed;
    }
}

// Normalises by the sums, applies the sink, and writes output, lse and max_logits.
__device__ __forceinline__ void store_output(
    const Accumulators& accumulators, const OutputRow& output, const Consumer& me, int heads,
    const float (&logit_scale)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = HEADS * blockIdx.y + me.row + 8 * half;
        if (head >= heads) continue;
        const float sum = accumulators.sum[half];
        const bool empty = sum == 0.0f;
        const float lse = empty ? minus_infinity() : (accumulators.reference[half] + fast_log2(sum)) * LN_2;
        float factor = empty ? 0.0f : 1.0f / sum;
        if (output.sink != nullptr && !empty) {
            factor *= 1.0f / (1.0f + fast_exp2((output.sink[head] - lse) * LOG2_E));
        }
        if (me.warp == 0 && me.pair == 0) {
            const float max_logit = accumulators.running_max[half] * logit_scale[half] * LN_2;
            output.logits.store(head, lse, max_logit);
        }
        const int column = TILE * me.warp + PAIR_STRIDE * me.pair;
        const long long offset = output.row * output.token_stride + head * output.head_stride + column;
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step) {
            const float(&values)[2][4] = accumulators.values[step];
            const float a = values[0][2 * half] * factor;
            const float b = (BF16_ROWS ? values[0][2 * half + 1] : values[1][2 * half]) * factor;
            const float c = (BF16_ROWS ? values[1][2 * half] : values[0][2 * half + 1]) * factor;
            const float d = values[1][2 * half + 1] * factor;
            if (output.kind == 0) {
                store_four(static_cast<float*>(output.out) + offset + 16 * step, a, b, c, d);
            } else {
                const uint2 packed = output.kind == 1 ? make_uint2(pack_bf16(a, b), pack_bf16(c, d))
                                                      : make_uint2(pack_fp16(a, b), pack_fp16(c, d));
                u16* const to = static_cast<u16*>(output.out) + offset + 16 * step;
                store_four(to, packed);
                if (KEEP_REST) store_four(to + output.rest, make_uint2(cut_off(a, b, packed.x), cut_off(c, d, packed.y)));
            }
        }
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) attend_few_heads(const __grid_constant__ AttendParams p) {
    const u32 memory = shared_address(shared_memory());
    if (threadIdx.x < Ring::ALL_STAGES) {
        Ring::init_barriers(memory + Plan::BARRIERS, threadIdx.x, WARPS);
        fence_mbarrier_init();
    }
    __syncthreads();
    const WorkItems work(p);
    constexpr int CONSUMERS = STREAMS * WARPGROUP;
    if (threadIdx.x >= CONSUMERS) Ring::prefetch_first(work, p.selection, threadIdx.x - CONSUMERS);
    wait_for_previous_kernel();
    if (threadIdx.x >= CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        const int producer = threadIdx.x / 32 - STREAMS * WARPS;
        const int stream = producer / RingShape::PRODUCERS, warp = producer % RingShape::PRODUCERS;
        if (stream < STREAMS) Ring::produce(work, p.selection, stream, warp, ring_of(memory, stream));
        return;
    }
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    const Consumer me;
    const u32 products = memory + Plan::PRODUCTS + me.stream * 2 * Plan::PRODUCTS_BUFFER;
    const u32 query_max = memory + Plan::QUERY_MAX + me.stream * 2 * Plan::QUERY_MAX_BUFFER;
    const u32 merge = memory + Plan::MERGE + me.warp * Plan::MERGE_FRAGMENTS * FRAGMENT + 16 * me.lane;
    const float scale = softmax_scale_log2(p);
    const int heads = p.query.heads, first_head = HEADS * blockIdx.y;
    Ring::Cursor ring = ring_of(memory, me.stream);
    // Each exchange through shared memory alternates between two buffers, so that one barrier per exchange is enough.
    u32 products_buffer = 0, query_buffer = 0;
    for (int item = blockIdx.x; item < work.count; item += gridDim.x) {
        const int token = work.token(item);
        Query query;
        const u16* const q = p.query.q + token * p.query.token_stride + first_head * p.query.head_stride;
        query.load(q, p.query.head_stride, heads - first_head, me, query_max + query_buffer * Plan::QUERY_MAX_BUFFER);
        query_buffer ^= 1;
        const float logit_scale[2] = {query.inverse_scale[0] * scale, query.inverse_scale[1] * scale};
        Accumulators accumulators;
        accumulators.clear();
        bool last;
#pragma unroll 1
        do {
            mbarrier_wait(ring.full(), ring.parity);
            const u32 valid_rows = ring.valid_rows();
            last = ring.is_last();
            if (valid_rows) {
                const u32 buffer = products + products_buffer * Plan::PRODUCTS_BUFFER;
                process_stage(accumulators, query, me, ring.rows(), valid_rows, buffer, logit_scale);
                products_buffer ^= 1;
            }
            __syncwarp();
            if (me.lane == 0) mbarrier_arrive(ring.empty());
            ring.advance();
        } while (!last);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            accumulators.sum[half] = sum_of_head(accumulators.sum[half]);
            accumulators.running_max[half] = max_of_head(accumulators.running_max[half]);
        }
        if (STREAMS > 1) {
            const bool another = item + gridDim.x < work.count;
            if (me.stream == 1) {
                if (item != blockIdx.x) named_barrier_sync(MERGE_EMPTY, CONSUMERS);
                store_accumulators(accumulators, merge);
                named_barrier_arrive(MERGE_FULL, CONSUMERS);
                continue;
            }
            named_barrier_sync(MERGE_FULL, CONSUMERS);
            merge_accumulators(accumulators, merge);
            if (another) named_barrier_arrive(MERGE_EMPTY, CONSUMERS);
        }
        if (item + gridDim.x >= work.count) let_next_kernel_start();
        store_output(accumulators, OutputRow(p, work, item, token), me, heads, logit_scale);
    }
}
