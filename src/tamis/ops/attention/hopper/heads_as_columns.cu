// Sparse attention of 16 or 32 heads per CTA with wgmma, on Hopper, over FP8 rows of 656 bytes, or of 528 without a rope.
// With more heads the grid has more CTAs along its y axis, which read the same rows.
//
// Computes, for each query token and head, softmax(scale * q . k) v over the selected rows, its lse and its largest logit.
// The products of a warpgroup have M = 64, so rows of the cache and columns of the values are M, and heads are N:
//   logits [64 rows, heads]      = keys [64 rows, 576] x queries [576, heads]    (512 without a rope)
//   outputs [512 columns, heads] = values [512 columns, 64 rows] x weights [64 rows, heads]
// The A operands come from registers: ldmatrix loads codes (transposed for values), which are converted to fp16 on the way,
// once for all heads, and are never written back. Queries and weights are the B operands, swizzled tiles in shared memory.
//
// Roles. CTAs are persistent and take one work item after the other (see `few_heads_items.cuh`). Four producer warps fill
// one ring of rows (see `row_ring.cuh`). Two consumer warpgroups alternate at taking 64 rows, two ring stages, each with its
// own softmax references and accumulators, so that one multiplies while the other computes weights. Two pairs of mbarriers
// fix the order in which they wait for keys and multiply values. Stages are then filled and freed in the order of the ring,
// which their mbarriers require, as a parity tells only two phases apart. At the end of a work item each warpgroup gets the
// other's accumulators of two of the four tiles, adds them to its own, and writes these tiles. Shared memory, 226 KiB, is laid
// out in `SharedMemoryPlan` below.
//
// Numbers. e4m3 values are exact in fp16; a tile's scale is applied to products and weights. Queries are multiplied with a
// power of two per head that brings them into fp16's range. Weights are exp2(logit - reference) in float32, where the
// reference of a warpgroup and head plays the part of the running max. A factor for each head and tile makes the largest
// weight times scale a number that fp16 holds in full. If something does not fit, the warpgroup raises its references,
// chooses new factors, and rescales its accumulators.
//
// Budget for 64 rows with 32 heads (H200), an estimate: 41,984 bytes of rows take 2,360 cycles at 17.8 bytes per cycle and
// SM, the products 1,090 cycles of the tensor cores. Measured: 4,150 cycles per 64 rows and SM (70.4 us for 128 tokens of
// 2,048 rows on 132 SMs at 1.83 GHz). The begin and end of a work item take 13,000 cycles, so splits are long.
//
// Defined by the host: HEADS (16 or 32), ROPE_COLUMNS (64 or 0), RING_STAGES, QUERY_FP16 (1: queries are fp16, 0: bf16),
// THREADS, SHARED_BYTES, PARAMS_BYTES.

#include "instructions.cuh"
#include "query_tiles.cuh"
#include "row_ring.cuh"
#include "softmax.cuh"
#include "warpgroups.cuh"

typedef unsigned short u16;

// ---- Shapes

// A row has four tiles of 128 e4m3 codes, a float32 scale per tile and 64 bf16 rope columns, or none.
constexpr int TILES = 4, TILE = 128, SCALES_AT = 512, ROPE_AT = 528;
constexpr int WARPGROUPS = 2, WARPS = 4, WARPGROUP = 32 * WARPS, CONSUMERS = WARPGROUPS * WARPGROUP;
constexpr int PASS_STAGES = 2;  // ring stages that a warpgroup takes at a time: 64 rows

struct RingShape {
    // The pitch is an odd multiple of 16 bytes, so that ldmatrix reads the rows of a matrix from different banks.
    static constexpr int ROW_BYTES = 528 + 2 * ROPE_COLUMNS, PITCH = ROW_BYTES;
    static constexpr int PRODUCERS = 4, SHARED_STAGES = 8;
    static constexpr int STAGES = RING_STAGES, STREAMS = 1, ROUND = PASS_STAGES * WARPGROUPS;
};
using Ring = RowRing<RingShape>;
constexpr int PITCH = RingShape::PITCH;

// In the accumulator layout of wgmma a lane has rows `row` and `row + 8` of its warp's 16, and heads 2 * pair and
// 2 * pair + 1 of every octet: index 4 * octet + 2 * (0 for `row`, 1 for `row + 8`) + (0 or 1 for the head).
constexpr int OCTETS = HEADS / 8, FRAGMENT = 4 * OCTETS;
constexpr int VALUE_BLOCKS = 2 * TILES;  // accumulators of 64 columns of the values each
using Queries = QueryTiles<HEADS, CONSUMERS, QUERY_FP16 ? FP16 : BF16, ROPE_COLUMNS>;
constexpr int ROPE_TERMS = Queries::ROPE_TERMS;
constexpr int HEAD_TILE = Queries::TILE_BYTES;  // bytes of a tile of a B operand: 64 elements for each head
// Codes are loaded this many steps before they are converted, since ldmatrix has a long latency while wgmma reads shared
// memory.
constexpr int KEYS_AHEAD = 2, VALUES_AHEAD = 2;

static_assert(THREADS == CONSUMERS + 32 * RingShape::PRODUCERS && (HEADS == 16 || HEADS == 32), "no such shape");

// ---- Range of weights, as exponents of two

// The largest weight times scale starts at 2^10, and the factors move when it is more than fp16 holds; fp16 has full
// precision down to 2^-14. Weights themselves, in float32, may grow to 2^20 before their reference moves.
constexpr float START_BITS = 10.0f, WEIGHT_BITS = 20.0f;
// A tile whose scale is zero has zero weight times scale whatever its factor is; this bound keeps the factor finite.
constexpr float LEAST_SCALE_BITS = -85.0f;
constexpr float NO_REFERENCE = -1e30f;  // before the first row; finite, so that differences are no NaN

// Registers per thread: producers release theirs to the consumers (setmaxnreg).
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

// ---- Shared memory

struct SharedMemoryPlan {
    static constexpr int PER_HEAD = 4 * HEADS;                // one float32 per head
    static constexpr int KINDS = TILES + 1;                   // one for each tile, then, at index TILES, one for all tiles
    static constexpr int PER_WARPGROUP = KINDS * PER_HEAD;
    static constexpr int WARPGROUP_WEIGHTS = TILES * HEAD_TILE;

    static constexpr int QUERY = 0;                                                // [8 + 2] tiles: latent columns, rope terms
    static constexpr int ROPE_TILES = ROPE_COLUMNS ? 2 : 0;
    static constexpr int WEIGHTS = QUERY + (Queries::LATENT_TILES + ROPE_TILES) * HEAD_TILE;  // [warpgroup][tile] weights times scales
    static constexpr int ROWS = WEIGHTS + WARPGROUPS * WARPGROUP_WEIGHTS;          // [stage][row]
    static constexpr int LOGIT_SCALES = ROWS + Ring::ALL_STAGES * Ring::STAGE_BYTES;  // [head] from products to logits
    static constexpr int REFERENCES = LOGIT_SCALES + PER_HEAD;                     // [warpgroup][kind][head]
    static constexpr int FACTORS = REFERENCES + WARPGROUPS * PER_WARPGROUP;        // [warpgroup][tile][head] factors of weights
    // The running max of each thread's products. It is here because registers have no room for it.
    static constexpr int RUNNING_MAX = FACTORS + WARPGROUPS * PER_WARPGROUP;       // [octets / 2][thread][4]
    static constexpr int BARRIERS = RUNNING_MAX + CONSUMERS * 2 * 4 * OCTETS;      // [stage] full, empty
    static constexpr int INFOS = BARRIERS + Ring::ALL_STAGES * Ring::BARRIER_BYTES;  // [stage] stage info
    static constexpr int KEYS_ORDER = INFOS + Ring::ALL_STAGES * Ring::INFO_BYTES;  // [warpgroup] mbarriers
    static constexpr int VALUES_ORDER = KEYS_ORDER + WARPGROUPS * 8;               // [warpgroup] mbarriers
    static constexpr int CONSUMERS_MET = VALUES_ORDER + WARPGROUPS * 8;            // mbarrier of all consumer threads
    static constexpr int VOTES = (CONSUMERS_MET + 8 + 15) / 16 * 16;               // [warpgroup][warp]
    static constexpr int BYTES = VOTES + WARPGROUPS * WARPS * 4;

    // Offsets in a warpgroup's WEIGHTS, which hold numbers of each head while no weights are there.
    static constexpr int PARTIALS = 0;                                 // [warp][kind][head] of the rows of a warp
    static constexpr int RESCALES = PARTIALS + WARPS * PER_WARPGROUP;  // [kind][head] of a tile's accumulators; of the sums
    // At the end of a work item QUERY and WEIGHTS hold accumulators for the other warpgroup.
    static constexpr int EXCHANGE = QUERY;
    static_assert(EXCHANGE + CONSUMERS * TILES / WARPGROUPS * 2 * 4 * FRAGMENT <= ROWS, "accumulators do not fit");
};
using Plan = SharedMemoryPlan;
template struct CheckSharedBytes<Plan::BYTES, SHARED_BYTES>;

// Named barriers: one for all consumers, then one per warpgroup (2 and 3).
constexpr u32 CONSUMER_BARRIER = 1, WARPGROUP_BARRIER = 2;

// ---- Consumers

// A thread of a consumer warpgroup.
struct Consumer {
    int warp;        // of the warpgroup
    int lane;
    int warpgroup;   // 0 or 1
    int row, pair;   // of the lane, 0 to 7 and 0 to 3
    u32 memory;      // address of shared memory

    __device__ __forceinline__ explicit Consumer(u32 memory) : memory(memory) {
        lane = threadIdx.x % 32;
        warp = warp_uniform(threadIdx.x / 32) % WARPS;
        warpgroup = warp_uniform(threadIdx.x / WARPGROUP);
        row = lane / 4;
        pair = lane % 4;
    }

    __device__ __forceinline__ static int first_head() { return blockIdx.y * HEADS; }
    __device__ __forceinline__ void sync() const { named_barrier_sync(CONSUMER_BARRIER, CONSUMERS); }
    __device__ __forceinline__ void sync_warpgroup() const { named_barrier_sync(WARPGROUP_BARRIER + warpgroup, WARPGROUP); }

    // As `sync`, with an mbarrier instead of a named barrier, where the warpgroups exchange data: racecheck follows an
    // mbarrier at which every thread arrives, but not a named barrier. Used twice per work item, with parity 0, then 1.
    __device__ __forceinline__ void sync_by_mbarrier(u32 parity) const {
        mbarrier_arrive(memory + Plan::CONSUMERS_MET);
        mbarrier_wait(memory + Plan::CONSUMERS_MET, parity);
    }

    // Whether any thread of the warpgroup votes yes. The warpgroup synchronises once more before it may vote again.
    __device__ __forceinline__ bool any_of_warpgroup(bool vote) const {
        const u32 votes = memory + Plan::VOTES + warpgroup * WARPS * 4;
        const bool here = __any_sync(FULL_MASK, vote);
        if (lane == 0) shared_store(votes + warp * 4, here);
        sync_warpgroup();
        const uint4 all = shared_load4(votes);
        return (all.x | all.y | all.z | all.w) != 0;
    }

    // The warpgroups alternate at KEYS_ORDER and at VALUES_ORDER (the ordered sequence barriers of CUTLASS): a warpgroup
    // waits at its own mbarrier until the other one has arrived there.
    __device__ __forceinline__ void order_wait(u32 order, u32 parity) const {
        mbarrier_wait(memory + order + warpgroup * 8, parity);
    }
    __device__ __forceinline__ void order_arrive(u32 order) const {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(memory + order + (1 - warpgroup) * 8);
    }

    // Addresses of this warpgroup's weights, and of its numbers of each head.
    __device__ __forceinline__ u32 weights() const { return memory + Plan::WEIGHTS + warpgroup * Plan::WARPGROUP_WEIGHTS; }
    __device__ __forceinline__ u32 references(int kind) const {
        return memory + Plan::REFERENCES + warpgroup * Plan::PER_WARPGROUP + kind * Plan::PER_HEAD;
    }
    __device__ __forceinline__ u32 factors(int tile) const {
        return memory + Plan::FACTORS + warpgroup * Plan::PER_WARPGROUP + tile * Plan::PER_HEAD;
    }
    __device__ __forceinline__ u32 rescales(int kind) const { return weights() + Plan::RESCALES + kind * Plan::PER_HEAD; }
    __device__ __forceinline__ u32 partials(int warp, int kind) const {
        return weights() + Plan::PARTIALS + warp * Plan::PER_WARPGROUP + kind * Plan::PER_HEAD;
    }

    // The numbers of this lane's two heads of an octet.
    __device__ __forceinline__ float2 own(u32 numbers, int octet) const {
        const uint2 two = shared_load2(numbers + 32 * octet + 8 * pair);
        return {__uint_as_float(two.x), __uint_as_float(two.y)};
    }

    // The address of this thread's running max of four heads, its heads of two octets.
    __device__ __forceinline__ u32 running_max(int octets) const {
        return memory + Plan::RUNNING_MAX + 16 * (octets * CONSUMERS + threadIdx.x);
    }
};

// Reductions over the eight lanes that have the same heads.
__device__ __forceinline__ float max_of_head(float x) { return max_over_lanes<4, 32>(x); }
__device__ __forceinline__ float sum_of_head(float x) { return sum_over_lanes<4, 32>(x); }

// Writes a token's queries, times a power of two per head, as B operands, and resets references and factors.
__device__ __forceinline__ void load_query(
    const u16* q, long long head_stride, int heads, float softmax_scale, const Consumer& me) {
    Queries query(opaque(threadIdx.x));
    const u16* from = q + (me.first_head() + query.head) * head_stride;
    const QueryScale scale(__float_as_uint(query.load(from, query.head < heads - me.first_head())));
    me.sync();  // all consumers have read the queries and numbers of the work item before
    if (query.share == 0) {
        const u32 numbers = me.memory + 4 * query.head;
        store_float(numbers + Plan::LOGIT_SCALES, scale.inverse * softmax_scale);
#pragma unroll
        for (int i = 0; i < WARPGROUPS * Plan::KINDS; ++i) {
            store_float(numbers + Plan::REFERENCES + i * Plan::PER_HEAD, NO_REFERENCE);
            store_float(numbers + Plan::FACTORS + i * Plan::PER_HEAD, 1.0f);
        }
    }
    query.store(me.memory + Plan::QUERY, scale.factor);
    fence_async_proxy();
    me.sync();
}

// ---- Accumulators

struct Accumulators {
    // A warp has 32 columns of every tile, from 32 * warp on: 16 in each of two accumulators. In these a lane's `row` is
    // column 2 * row, and `row + 8` is column 2 * row + 1.
    float values[VALUE_BLOCKS][FRAGMENT];
    float sum[OCTETS][2];  // of the weights of this lane's rows, for its two heads of each octet

    __device__ __forceinline__ void clear(const Consumer& me) {
#pragma unroll
        for (int i = 0; i < VALUE_BLOCKS; ++i) {
#pragma unroll
            for (int j = 0; j < FRAGMENT; ++j) values[i][j] = 0.0f;
        }
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            sum[octet][0] = sum[octet][1] = 0.0f;
        }
        const u32 lowest = __float_as_uint(minus_infinity());
#pragma unroll
        for (int octets = 0; octets < OCTETS / 2; ++octets) {
            shared_store4(me.running_max(octets), make_uint4(lowest, lowest, lowest, lowest));
        }
    }

    // Multiplies the accumulators with the rescale factors of their head and tile.
    __device__ __forceinline__ void rescale(const Consumer& me) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int octet = 0; octet < OCTETS; ++octet) {
                const float2 factor = me.own(me.rescales(tile), octet);
#pragma unroll
                for (int i = 4 * octet; i < 4 * octet + 4; ++i) {
                    values[2 * tile][i] *= i % 2 ? factor.y : factor.x;
                    values[2 * tile + 1][i] *= i % 2 ? factor.y : factor.x;
                }
            }
        }
    }
};

// The scales of a tile in this lane's two rows.
__device__ __forceinline__ float2 scales_of(const Consumer& me, u32 keys, int tile) {
    const u32 at = keys + me.row * PITCH + SCALES_AT + 4 * tile;
    return {load_float(at), load_float(at + 8 * PITCH)};
}

// ---- Keys times queries

// Multiplies the 16 rows of a warp, which start at `keys`, with the queries of all heads. The codes of the next steps are
// loaded and converted while the tensor cores work on this one.
__device__ __forceinline__ void multiply_keys(const Consumer& me, u32 keys, float (&products)[FRAGMENT]) {
    constexpr int STEPS = 4 * TILES;  // 32 columns each
    const int lane = opaque(me.lane);
    const u32 at = keys + lane % 16 * PITCH + 16 * (lane / 16);
    const unsigned long long query = k_major(me.memory + Plan::QUERY);
    u32 codes[KEYS_AHEAD][4], fragments[2][2][4];
    const auto load = [&](int step) { ldmatrix_x4(codes[step % KEYS_AHEAD], at + 32 * step); };
    const auto dequantise = [&](int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32(&fragment)[4] = fragments[step % 2][i / 2];
            e4m3x4_to_fp16(codes[step % KEYS_AHEAD][i], fragment[i % 2], fragment[i % 2 + 2]);
        }
        if (step + KEYS_AHEAD < STEPS) load(step + KEYS_AHEAD);
    };
    // Without a rope the first group of products is empty, and they start at zero.
    constexpr int ROPE_STEPS = ROPE_COLUMNS / 16;
    u32 rope[4][4];
#pragma unroll
    for (int step = 0; step < ROPE_STEPS; ++step) ldmatrix_x4(rope[step], at + ROPE_AT + 32 * step);
#pragma unroll
    for (int i = 0; i < KEYS_AHEAD; ++i) load(i);
#pragma unroll
    for (int i = 0; i < FRAGMENT && ROPE_STEPS == 0; ++i) products[i] = 0.0f;
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < ROPE_STEPS; ++step) {
#pragma unroll
        for (int term = 0; term < ROPE_TERMS; ++term) {
            const u32 further = (Queries::LATENT_TILES + term) * HEAD_TILE + 32 * step;
            wgmma_rs<BF16>(products, rope[step], advance(query, further), step + term > 0);
        }
    }
    wgmma_commit();
    dequantise(0);
    float tile_products[FRAGMENT];
#pragma unroll
    for (int here = 0; here < STEPS; ++here) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 further = here / 2 * HEAD_TILE + 64 * (here % 2) + 32 * i;
            wgmma_rs<FP16>(tile_products, fragments[here % 2][i], advance(query, further), here % 4 + i > 0);
        }
        wgmma_commit();
        if (here + 1 < STEPS) {
            wgmma_wait<1>();  // the wgmma before this one has read the fragments that `dequantise` writes next
            dequantise(here + 1);
        }
        if (here % 4 < 3) continue;
        const float2 scales = scales_of(me, keys, here / 4);
        if (here == 3) wgmma_wait<0>(products);
        wgmma_wait<0>(tile_products);
#pragma unroll
        for (int i = 0; i < FRAGMENT; ++i) {
            products[i] = fmaf(tile_products[i], i / 2 % 2 ? scales.y : scales.x, products[i]);
        }
    }
}

// ---- Online softmax. A logit in base 2 is a product times its head's logit scale

// Takes this thread's products into its running max, which is in shared memory.
__device__ __forceinline__ void update_running_max(const Consumer& me, const float (&products)[FRAGMENT]) {
#pragma unroll
    for (int octets = 0; octets < OCTETS / 2; ++octets) {
        const uint4 before = shared_load4(me.running_max(octets));
        u32 max_bits[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32& one = max_bits[2 * (i / 4) + i % 2];
            one = __float_as_uint(fmaxf(__uint_as_float(one), products[8 * octets + i]));
        }
        shared_store4(me.running_max(octets), make_uint4(max_bits[0], max_bits[1], max_bits[2], max_bits[3]));
    }
}

// Computes the weights, and writes weights times factors and scales as B operands. Returns whether all are in range.
__device__ __forceinline__ bool write_weights(
    const Consumer& me, u32 keys, const float (&products)[FRAGMENT], float (&weights)[FRAGMENT]) {
    float largest = NO_REFERENCE;
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const float2 scale = me.own(me.memory + Plan::LOGIT_SCALES, octet);
        const float2 reference = me.own(me.references(TILES), octet);
#pragma unroll
        for (int i = 4 * octet; i < 4 * octet + 4; ++i) {
            const float logit = i % 2 ? fmaf(products[i], scale.y, -reference.y) : fmaf(products[i], scale.x, -reference.x);
            largest = fmaxf(largest, logit);
            weights[i] = fast_exp2(logit);
        }
    }
    u32 magnitudes = 0;
    // For stmatrix a lane gives the address of a row of one of four matrices: a head, eight of the warp's 16 rows.
    const int head = me.lane % 8 + me.lane / 16 * 8, unit = 2 * me.warp + me.lane / 8 % 2;
    const u32 to = me.weights() + 128 * head + 16 * (unit ^ head % 8);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const float2 scales = scales_of(me, keys, tile);
#pragma unroll
        for (int octets = 0; octets < OCTETS; octets += 2) {
            u32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 factor = me.own(me.factors(tile), octets + i / 2);
                const float scale = i % 2 ? scales.y : scales.x;
                const float(&w)[FRAGMENT] = weights;
                const int first = 4 * octets + 2 * i;
                packed[i] = pack_fp16(w[first] * factor.x * scale, w[first + 1] * factor.y * scale);
                magnitudes = max_abs_fp16x2(magnitudes, packed[i]);
            }
            stmatrix_x4_trans(to + tile * HEAD_TILE + octets * 8 * 128, packed);
        }
    }
    return largest <= WEIGHT_BITS && (magnitudes & 0x7C00) != 0x7C00 && (magnitudes >> 16 & 0x7C00) != 0x7C00;
}

// Writes, for each head, the largest of logit + scale_bits over the warp's rows; `scale_bits` are of this lane's two rows.
__device__ __forceinline__ void store_largest(
    const Consumer& me, const float (&products)[FRAGMENT], float2 scale_bits, int kind) {
    const u32 to = me.partials(me.warp, kind) + 8 * me.pair;
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const float2 scale = me.own(me.memory + Plan::LOGIT_SCALES, octet);
        const float* p = &products[4 * octet];
        const float one = max_of_head(fmaxf(fmaf(p[0], scale.x, scale_bits.x), fmaf(p[2], scale.x, scale_bits.y)));
        const float two = max_of_head(fmaxf(fmaf(p[1], scale.y, scale_bits.x), fmaf(p[3], scale.y, scale_bits.y)));
        if (me.row == 0) {
            store_float(to + 32 * octet, one);
            store_float(to + 32 * octet + 4, two);
        }
    }
}

// Raises the references to the largest logit of these rows, chooses factors that make the largest weight times scale
// 2^START_BITS, and rescales sums and accumulators. References never move down.
__device__ __forceinline__ void raise_references(
    const Consumer& me, u32 keys, const float (&products)[FRAGMENT], Accumulators& accumulators) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        float2 bits = scales_of(me, keys, tile);
        bits.x = fmaxf(fast_log2(fabsf(bits.x)), LEAST_SCALE_BITS) - START_BITS;
        bits.y = fmaxf(fast_log2(fabsf(bits.y)), LEAST_SCALE_BITS) - START_BITS;
        store_largest(me, products, bits, tile);
    }
    store_largest(me, products, {0.0f, 0.0f}, TILES);
    const u32 head = 4 * me.lane;
    const float reference = me.lane < HEADS ? load_float(me.references(TILES) + head) : 0.0f;
    me.sync_warpgroup();
    if (me.lane < HEADS) {
        const int tile = me.warp;  // each warp moves the references of one tile
        const float tile_reference = load_float(me.references(tile) + head);
        float moved = reference, tile_moved = tile_reference;
#pragma unroll
        for (int warp = 0; warp < WARPS; ++warp) {
            moved = fmaxf(moved, load_float(me.partials(warp, TILES) + head));
            tile_moved = fmaxf(tile_moved, load_float(me.partials(warp, tile) + head));
        }
        store_float(me.references(tile) + head, tile_moved);
        store_float(me.factors(tile) + head, fast_exp2(moved - tile_moved));
        store_float(me.rescales(tile) + head, fast_exp2(tile_reference - tile_moved));
        if (tile == 0) {
            store_float(me.references(TILES) + head, moved);
            store_float(me.rescales(TILES) + head, fast_exp2(reference - moved));
        }
    }
    me.sync_warpgroup();
    accumulators.rescale(me);
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const float2 factor = me.own(me.rescales(TILES), octet);
        accumulators.sum[octet][0] *= factor.x;
        accumulators.sum[octet][1] *= factor.y;
    }
    me.sync_warpgroup();  // all warps have read the rescale factors, which weights overwrite
}

// ---- Values times weights

// ldmatrix.trans moves 16-bit units, so a word has two neighbouring codes of one row, then those of the next row. __byte_perm
// reorders it to the two rows of the even column, then the two rows of the odd one. A stage is released when its last codes
// are in registers.
__device__ __forceinline__ void multiply_values(
    Accumulators& accumulators, const Consumer& me, const Ring::Cursor (&stages)[PASS_STAGES]) {
    constexpr int STEPS = 2 * TILES;  // per stage: 16 rows of a tile each
    const int lane = opaque(me.lane);
    const u32 offset = lane % 16 * PITCH + 32 * me.warp + 16 * (lane / 16);
    const unsigned long long weights = k_major(me.weights());
    u32 codes[VALUES_AHEAD][4];
    const auto load = [&](int step) {
        const u32 at = stages[step / STEPS].rows() + offset;
        ldmatrix_x4_trans(codes[step % VALUES_AHEAD], at + step / TILES % 2 * 16 * PITCH + TILE * (step % TILES));
    };
#pragma unroll
    for (int i = 0; i < VALUES_AHEAD; ++i) load(i);
#pragma unroll
    for (int here = 0; here < PASS_STAGES * STEPS; ++here) {
        u32 fragments[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32(&fragment)[4] = fragments[i / 2];
            const u32 ordered = __byte_perm(codes[here % VALUES_AHEAD][i], 0, 0x3120);
            e4m3x4_to_fp16(ordered, fragment[2 * (i % 2)], fragment[2 * (i % 2) + 1]);
        }
        if (here + VALUES_AHEAD < PASS_STAGES * STEPS) load(here + VALUES_AHEAD);
        if (here % STEPS == STEPS - 1) {
            __syncwarp();
            if (me.lane == 0) mbarrier_arrive(stages[here / STEPS].empty());
        }
        const int tile = here % TILES, sixteen = here / TILES;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 further = tile * HEAD_TILE + 32 * sixteen;
            wgmma_rs<FP16>(accumulators.values[2 * tile + i], fragments[i], advance(weights, further), 1);
        }
        wgmma_commit();
        wgmma_wait<2>();
    }
    me.order_arrive(Plan::VALUES_ORDER);
#pragma unroll
    for (int i = 0; i < VALUE_BLOCKS; ++i) wgmma_wait<0>(accumulators.values[i]);
}

// Processes the warpgroup's next 64 rows. Returns whether they are its last ones of the work item. Advances `ring` to the
// next 64 and flips the parity of the ordering mbarriers.
__device__ __forceinline__ bool process_rows(
    Accumulators& accumulators, const Consumer& me, Ring::Cursor& ring, u32& parity) {
    Ring::Cursor stages[PASS_STAGES] = {ring, ring};
    stages[1].advance();
    ring.advance(RingShape::ROUND);
    me.order_wait(Plan::KEYS_ORDER, parity);
#pragma unroll
    for (int i = 0; i < PASS_STAGES; ++i) mbarrier_wait(stages[i].full(), stages[i].parity);
    me.order_arrive(Plan::KEYS_ORDER);
    const Ring::Cursor mine = me.warp < WARPS / 2 ? stages[0] : stages[1];
    const u32 keys = mine.rows() + me.warp % 2 * 16 * PITCH;
    const u32 valid_rows = mine.valid_rows() >> (16 * (me.warp % 2) + me.row);
    const bool last = mine.is_last();
    float products[FRAGMENT], weights[FRAGMENT];
    multiply_keys(me, keys, products);
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) {
        if (!(valid_rows >> 8 * (i / 2 % 2) & 1)) products[i] = minus_infinity();
    }
    update_running_max(me, products);
    me.sync_warpgroup();  // all warps have finished the products with the weights before these
#pragma unroll 1
    for (bool moved = false;; moved = true) {
        // NaN and infinity never fit, so the references move at most once.
        const bool fits = write_weights(me, keys, products, weights) || moved;
        fence_async_proxy();
        if (!me.any_of_warpgroup(!fits)) break;
        raise_references(me, keys, products, accumulators);
    }
#pragma unroll
    for (int i = 0; i < FRAGMENT; ++i) accumulators.sum[i / 4][i % 2] += weights[i];
    me.order_wait(Plan::VALUES_ORDER, parity);
    parity ^= 1;
    multiply_values(accumulators, me, stages);
    return last;
}

// ---- The end of a work item

// Writes each warp's sums of weights (kind 0) and running max (kind 1) of every head, for both warpgroups.
__device__ __forceinline__ void store_sums(const Accumulators& accumulators, const Consumer& me) {
    const u32 to = me.partials(me.warp, 0) + 8 * me.pair;
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const uint2 max_bits = shared_load2(me.running_max(octet / 2) + octet % 2 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float sum = sum_of_head(accumulators.sum[octet][i]);
            const float running_max = max_of_head(__uint_as_float(i ? max_bits.y : max_bits.x));
            if (me.row == 0) {
                store_float(to + 32 * octet + 4 * i, sum);
                store_float(to + Plan::PER_HEAD + 32 * octet + 4 * i, running_max);
            }
        }
    }
}

// Merges the sums of all warps. A lane has one head, a warp one tile: the lane stores the rescale factor that normalises
// this warpgroup's accumulators of that head and tile. The first warp writes lse and max_logits.
__device__ __forceinline__ void normalise(const Consumer& me, const OutputRow& output, int heads) {
    if (me.lane >= HEADS) return;
    const int head = me.first_head() + me.lane;
    const u32 numbers = me.memory + 4 * me.lane;
    float references[WARPGROUPS], reference = NO_REFERENCE, sum = 0.0f, running_max = minus_infinity();
#pragma unroll
    for (int group = 0; group < WARPGROUPS; ++group) {
        references[group] =
            load_float(numbers + Plan::REFERENCES + group * Plan::PER_WARPGROUP + TILES * Plan::PER_HEAD);
        reference = fmaxf(reference, references[group]);
    }
#pragma unroll
    for (int warp = 0; warp < CONSUMERS / 32; ++warp) {
        const float factor = fast_exp2(references[warp / WARPS] - reference);
        const u32 partials = numbers + Plan::WEIGHTS + warp / WARPS * Plan::WARPGROUP_WEIGHTS + Plan::PARTIALS +
                             warp % WARPS * Plan::PER_WARPGROUP;
        sum = fmaf(load_float(partials), factor, sum);
        running_max = fmaxf(running_max, load_float(partials + Plan::PER_HEAD));
    }
    const bool empty = sum == 0.0f, exists = head < heads;
    const float lse = empty ? minus_infinity() : (reference + fast_log2(sum)) * LN_2;
    const float own = fast_exp2((me.warpgroup == 0 ? references[0] : references[1]) - reference);
    float factor = empty ? 0.0f : own / (sum * load_float(me.factors(me.warp) + 4 * me.lane));
    if (output.sink != nullptr && !empty && exists) {
        factor *= 1.0f / (1.0f + fast_exp2((output.sink[head] - lse) * LOG2_E));
    }
    store_float(me.rescales(me.warp) + 4 * me.lane, factor);
    if (exists && me.warpgroup == 0 && me.warp == 0) {
        const float max_logit = running_max * load_float(numbers + Plan::LOGIT_SCALES) * LN_2;
        output.logits.store(head, lse, max_logit);
    }
}

constexpr int KEPT_TILES = TILES / WARPGROUPS, KEPT_BLOCKS = 2 * KEPT_TILES;

// Each warpgroup keeps two of the four tiles, the first warpgroup the first two, and adds the other's accumulators of them.
// Afterwards the tiles that it keeps are in values[0] to values[KEPT_BLOCKS - 1].
__device__ __forceinline__ void exchange_accumulators(Accumulators& accumulators, const Consumer& me) {
    const u32 at = me.memory + Plan::EXCHANGE;
    const auto address = [&](int block, int i, u32 thread) {
        return at + 16 * ((block * FRAGMENT + i) / 4 * CONSUMERS + thread);
    };
#pragma unroll
    for (int block = 0; block < KEPT_BLOCKS; ++block) {
        float(&low)[FRAGMENT] = accumulators.values[block];
        float(&high)[FRAGMENT] = accumulators.values[block + KEPT_BLOCKS];
#pragma unroll
        for (int i = 0; i < FRAGMENT; i += 4) {
            u32 given[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                given[j] = __float_as_uint(me.warpgroup == 0 ? high[i + j] : low[i + j]);
                low[i + j] = me.warpgroup == 0 ? low[i + j] : high[i + j];
            }
            shared_store4(address(block, i, threadIdx.x), make_uint4(given[0], given[1], given[2], given[3]));
        }
    }
    me.sync_by_mbarrier(1);
#pragma unroll
    for (int block = 0; block < KEPT_BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < FRAGMENT; i += 4) {
            const uint4 theirs = shared_load4(address(block, i, threadIdx.x ^ WARPGROUP));
            float* const ours = &accumulators.values[block][i];
            ours[0] += __uint_as_float(theirs.x);
            ours[1] += __uint_as_float(theirs.y);
            ours[2] += __uint_as_float(theirs.z);
            ours[3] += __uint_as_float(theirs.w);
        }
    }
}

// Writes the tiles that this warpgroup keeps, which are normalised already.
__device__ __forceinline__ void store_output(
    const Accumulators& accumulators, const Consumer& me, const OutputRow& output, int heads) {
    const int first_column = TILE * KEPT_TILES * me.warpgroup + 32 * me.warp + 2 * me.row;
    const int first_head = me.first_head() + 2 * me.pair;
    const long long start = output.row * output.token_stride + first_head * output.head_stride + first_column;
#pragma unroll
    for (int head = 0; head < 2 * OCTETS; ++head) {
        const int octet = head / 2, next = head % 2;
        if (first_head + 8 * octet + next >= heads) continue;
        const long long offset = start + (8 * octet + next) * output.head_stride;
#pragma unroll
        for (int block = 0; block < KEPT_BLOCKS; ++block) {
            const int column = TILE * (block / 2) + 16 * (block % 2);
            const float(&values)[FRAGMENT] = accumulators.values[block];
            const float a = values[4 * octet + next], b = values[4 * octet + next + 2];
            if (output.kind == 0) {
                *reinterpret_cast<float2*>(static_cast<float*>(output.out) + offset + column) = make_float2(a, b);
            } else {
                *reinterpret_cast<u32*>(static_cast<u16*>(output.out) + offset + column) =
                    output.kind == 1 ? pack_bf16(a, b) : pack_fp16(a, b);
            }
        }
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_heads_as_columns(const __grid_constant__ AttendParams p) {
    const u32 memory = tile_memory();
    if (threadIdx.x < Ring::STAGES) {
        Ring::init_barriers(memory + Plan::BARRIERS, threadIdx.x, WARPS);
        if (threadIdx.x < 2 * WARPGROUPS) mbarrier_init(memory + Plan::KEYS_ORDER + 8 * threadIdx.x, WARPS);
        if (threadIdx.x == 0) mbarrier_init(memory + Plan::CONSUMERS_MET, CONSUMERS);
        fence_mbarrier_init();
    }
    __syncthreads();
    const WorkItems work(p);
    if (threadIdx.x >= CONSUMERS) Ring::prefetch_first(work, p.selection, threadIdx.x - CONSUMERS);
    wait_for_previous_kernel();
    Ring::Cursor ring(memory + Plan::ROWS, memory + Plan::BARRIERS, memory + Plan::INFOS, 0);
    if (threadIdx.x >= CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        Ring::produce(work, p.selection, 0, threadIdx.x / 32 - CONSUMERS / 32, ring);
        return;
    }
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    const Consumer me(memory);
    ring.advance(PASS_STAGES * me.warpgroup);
    if (me.warpgroup == 1) {  // lets warpgroup 0 go first
        me.order_arrive(Plan::KEYS_ORDER);
        me.order_arrive(Plan::VALUES_ORDER);
    }
    const float scale = softmax_scale_log2(p);
    const int heads = p.query.heads;
    u32 parity = 0;
    for (int item = blockIdx.x; item < work.count; item += gridDim.x) {
        Accumulators accumulators;
        accumulators.clear(me);
        load_query(p.query.q + work.token(item) * p.query.token_stride, p.query.head_stride, heads, scale, me);
        while (!process_rows(accumulators, me, ring, parity)) {}
        const OutputRow output(p, work, item, work.token(opaque(item)));
        if (item + gridDim.x >= work.count) let_next_kernel_start();
        me.sync_warpgroup();  // all warps have finished the products with the weights, which sums overwrite
        store_sums(accumulators, me);
        me.sync_by_mbarrier(0);
        normalise(me, output, heads);
        me.sync();
        accumulators.rescale(me);
        me.sync();
        exchange_accumulators(accumulators, me);
        store_output(accumulators, me, output, heads);
    }
}
