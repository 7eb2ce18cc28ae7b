// Sparse attention of few heads over rows that enter shared memory once and stay as they are: FP8 rows of 656 bytes, or
// bf16 rows of 1152. A block has 16 heads; others are for blocks beside it, numbered by y.
//
// A block works through items, each a query token, or a part of the columns of one: the first tokens of a launch are
// whole and go straight into the output, the others are cut into parts that another kernel merges. Two producer warps
// per stream of rows take turns in looking up slots and copying rows, 32 to a stage, into a ring: a lane's copies are
// issued one by one, and a single warp would be slower than the memory. Teams of four consumer warps do the
// rest: 16 heads are the rows of the small matrix instruction, so there is nothing to pad. Warp w of a team owns tile w
// of a row, 128 columns, as keys and as values. The warps of a team add up their shares of the logits through shared
// memory, in the layout of the matrix instruction, after which every warp has all weights where it needs them as an
// operand. Each warp keeps, per head, a reference r, and has exp2(logit - r) as weights.
//
// FP8 rows are multiplied as the e4m3 numbers they are, exact in fp16, and a tile's scale is applied to logits and
// weights. Queries are brought into fp16's range by a power of two per head. So are weights times scales: the reference
// follows their largest instead of the largest logit, so that they are numbers that fp16 holds in full, whatever the
// scales of this warp's tile are; exp2(logit - r), whose sum is in float32, has room for that.
//
// bf16 rows are multiplied as they are, with queries as they are and weights as the sum of two bf16 numbers, since one
// would lose more than the output's rounding does. Their range is that of float32: the reference follows the largest
// logit.
//
// There is a team for each stream of rows. Two streams share a token's columns, and are merged at the end of each item.
//
// Defined by the caller: BF16_ROWS (1: rows are bf16, 0: FP8), STREAMS, STAGES of a ring, PER_SM blocks on a
// multiprocessor, QUERY_HALF (1: queries are fp16, which takes FP8 rows, 0: bf16), and THREADS and SHARED_BYTES, which
// follow from them.

#include "instructions.cuh"
#include "params.cuh"
#include "softmax.cuh"

static_assert(sizeof(AttendParams) == PARAMS_BYTES, "AttendParams differs from its Python twin");

typedef unsigned short u16;

// A row: 512 codes in four tiles, a float32 scale for each tile, 64 bf16 numbers of the rope part; or 512 bf16 numbers
// and 64.
constexpr int TILES = 4, TILE = 128, SCALES = 512;
constexpr int ROW = BF16_ROWS ? 1152 : 656, TILE_BYTES = BF16_ROWS ? 2 * TILE : TILE, ROPE = BF16_ROWS ? 1024 : 528;
// From one row to the next in shared memory: an odd multiple of 16 bytes, so that the rows of a matrix are in different
// banks.
constexpr int PITCH = ROW / 16 % 2 ? ROW : ROW + 16;
// Long rows are shared by producers throughout.
constexpr int PRODUCERS = 2, SHARED_STAGES = BF16_ROWS ? 1 << 30 : 2, ROUND = 1;

#include "row_ring.cuh"

// Matrices of 8 rows of a stage; and bytes that the warp's share of one of their results takes.
constexpr int SLABS = STAGE / 8, FRAGMENT = 512;
constexpr int TEAM_WARPS = TILES, TEAM_THREADS = 32 * TEAM_WARPS;
constexpr int GROUP = 16;  // heads
constexpr int STEPS = TILE / 16;
// Of the 16 columns of a step, a lane has two pairs, the first from PAIR_STRIDE * pair on. Four neighbours are the codes
// of a word; numbers of 16 bits come in two matrices of eight columns.
constexpr int PAIR_STRIDE = BF16_ROWS ? 2 : 4, SECOND_PAIR = BF16_ROWS ? 8 : 2;
// An fp16 query has more digits than bf16, which the rope part is multiplied in: two numbers for one.
constexpr int ROPE_PARTS = QUERY_HALF ? 2 : 1;
constexpr int WEIGHT_PARTS = BF16_ROWS ? 2 : 1;

// In fp16, weights start at 2^10 and may grow to 2^15 before the reference moves; below, there is full precision to
// 2^-14. In bf16 they start at one, which is exact where a single row counts.
constexpr float START_BITS = BF16_ROWS ? 0.0f : 10.0f, LARGEST_BITS = BF16_ROWS ? 8.0f : 15.0f;
// A tile without a scale has weights of zero, whatever the reference; its tokens must not make the total overflow.
constexpr float LEAST_SCALE_BITS = -85.0f, LARGEST_TOTAL_BITS = 100.0f;
constexpr float NO_REFERENCE = -1e30f;

// Registers per thread: producers leave theirs to the consumers.
constexpr int LAUNCHED_WITH = 65536 / (PER_SM * THREADS) / 8 * 8, PRODUCER_REGISTERS = 40;
constexpr int CONSUMER_REGISTERS = ((STREAMS + 1) * LAUNCHED_WITH - PRODUCER_REGISTERS) / STREAMS / 8 * 8;
static_assert(CONSUMER_REGISTERS > LAUNCHED_WITH && CONSUMER_REGISTERS <= 240, "no plan for so few threads");

// Shared memory.
constexpr int RINGS = 0;
constexpr int LOGITS = RINGS + STREAMS * STAGES * STAGE_BYTES;  // two buffers for each team
constexpr int LOGITS_BUFFER = TEAM_WARPS * SLABS * FRAGMENT;
constexpr int MERGE = LOGITS + STREAMS * 2 * LOGITS_BUFFER;
constexpr int MERGE_FRAGMENTS = 2 * STEPS + 2;  // sums; then references and totals; then largest logits
constexpr int MERGE_BYTES = STREAMS > 1 ? TEAM_WARPS * MERGE_FRAGMENTS * FRAGMENT : 0;
constexpr int QUERY_MAXIMA = MERGE + MERGE_BYTES;  // two buffers for each team
constexpr int QUERY_MAXIMA_BUFFER = BF16_ROWS ? 0 : 4 * TEAM_WARPS * GROUP;
constexpr int BARRIERS = QUERY_MAXIMA + STREAMS * 2 * QUERY_MAXIMA_BUFFER;  // full, then empty, for each stage
constexpr int NOTES = BARRIERS + STREAMS * STAGES * 16;  // which rows count, and whether the item ends here

static_assert(NOTES + STREAMS * STAGES * 8 == SHARED_BYTES, "the caller has another layout in mind");
static_assert(THREADS == (STREAMS + 1) * TEAM_THREADS && STREAMS * PRODUCERS <= 4, "four warps for producers");
static_assert(!(BF16_ROWS && QUERY_HALF), "bf16 rows are multiplied with bf16 queries");

__device__ __forceinline__ Place place_of(u32 memory, int stream) {
    return Place(memory + RINGS, memory + BARRIERS, memory + NOTES, stream);
}

// Named barriers: one for each team, and two for the hand-over between streams.
constexpr u32 TEAM_BARRIER = 1, MERGE_FULL = 3, MERGE_EMPTY = 4;

// ---- Consumer

// A warp's place; as the matrix instruction has it, a lane holds heads `row` and `row + 8` of the block's, and of eight
// columns the two from 2 * pair on.
struct Seat {
    int warp, lane, stream, row, pair;

    __device__ __forceinline__ Seat() {
        lane = threadIdx.x % 32;
        warp = threadIdx.x / 32 % TEAM_WARPS;
        stream = threadIdx.x / TEAM_THREADS;
        row = lane / 4;
        pair = lane % 4;
    }

    __device__ __forceinline__ void sync_team() const { named_barrier_sync(TEAM_BARRIER + stream, TEAM_THREADS); }
};

// The largest and the sum over the four lanes that share a head.
__device__ __forceinline__ float max_of_head(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}

__device__ __forceinline__ float sum_of_head(float x) {
    x += __shfl_xor_sync(FULL_MASK, x, 1);
    return x + __shfl_xor_sync(FULL_MASK, x, 2);
}

__device__ __forceinline__ float2 widen(u32 packed) {
    if (QUERY_HALF) return unpack_fp16(packed);
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u)};
}

__device__ __forceinline__ float largest(float so_far, u32 packed) {
    const float2 wide = widen(packed);
    return fmaxf(so_far, fmaxf(fabsf(wide.x), fabsf(wide.y)));
}

// Two queries of a head each; for FP8 rows, times powers of two.
struct Query {
    u32 latent[STEPS][4];
    u32 rope[ROPE_PARTS][4];
    float size[2];  // what the products must be multiplied with

    __device__ __forceinline__ void load(const u16* q, long long head_stride, int heads, const Seat& seat, u32 maxima) {
        u32 tail[4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int head = seat.row + 8 * half;
            const bool here = head < heads;
            const u16* latent_at = q + head * head_stride + TILE * seat.warp + PAIR_STRIDE * seat.pair;
            const u16* rope_at = q + head * head_stride + TILES * TILE + 16 * seat.warp + 2 * seat.pair;
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const uint2 four = here ? four_at(latent_at + 16 * step) : make_uint2(0, 0);
                latent[step][half] = four.x;
                latent[step][half + 2] = four.y;
            }
            tail[half] = here ? two_at(rope_at) : 0;
            tail[half + 2] = here ? two_at(rope_at + 8) : 0;
        }
        if (BF16_ROWS) {
#pragma unroll
            for (int i = 0; i < 4; ++i) rope[0][i] = tail[i];
            size[0] = size[1] = 1.0f;
        } else {
            bring_into_range(tail, seat, maxima);
        }
    }

    __device__ __forceinline__ static u32 two_at(const u16* at) { return *reinterpret_cast<const u32*>(at); }

    __device__ __forceinline__ static uint2 four_at(const u16* at) {
        if (BF16_ROWS) return make_uint2(two_at(at), two_at(at + SECOND_PAIR));
        return *reinterpret_cast<const uint2*>(at);
    }

    __device__ __forceinline__ void bring_into_range(const u32 (&tail)[4], const Seat& seat, u32 maxima) {
        float top[2] = {0.0f, 0.0f};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                top[half] = largest(largest(top[half], latent[step][half]), latent[step][half + 2]);
            }
            top[half] = max_of_head(top[half]);
            if (seat.pair == 0) {
                shared_store(maxima + 4 * (GROUP * seat.warp + seat.row + 8 * half), __float_as_uint(top[half]));
            }
        }
        seat.sync_team();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32 bits = 0;  // positive floats are in the order of their bits, NaN above all
#pragma unroll
            for (int warp = 0; warp < TEAM_WARPS; ++warp) {
                bits = max(bits, shared_load(maxima + 4 * (GROUP * warp + seat.row + 8 * half)));
            }
            // The largest number of a head gets between 2^14 and 2^15, so that fp16 loses nothing that counts.
            const u32 exponent = min(max(bits >> 23, 27u), 254u);
            size[half] = __uint_as_float((exponent - 14) << 23);
            const float factor = __uint_as_float((268 - exponent) << 23);
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                const float2 first = widen(latent[step][half]), second = widen(latent[step][half + 2]);
                latent[step][half] = pack_fp16(first.x * factor, first.y * factor);
                latent[step][half + 2] = pack_fp16(second.x * factor, second.y * factor);
            }
#pragma unroll
            for (int side = half; side < 4; side += 2) {
                float2 wide = widen(tail[side]);
                wide = {wide.x * factor, wide.y * factor};
#pragma unroll
                for (int part = 0; part < ROPE_PARTS; ++part) {
                    const u32 packed = pack_bf16(wide.x, wide.y);
                    rope[part][side] = packed;
                    wide.x -= __uint_as_float(packed << 16);
                    wide.y -= __uint_as_float(packed & 0xFFFF0000u);
                }
            }
        }
    }
};

__device__ __forceinline__ uint4 bits_of(float a, float b, float c, float d) {
    return make_uint4(__float_as_uint(a), __float_as_uint(b), __float_as_uint(c), __float_as_uint(d));
}

#include "few_heads_rows.cuh"

// ---- The end of an item

// The second stream hands over its state...
__device__ __forceinline__ void hand_over(const State& state, u32 at) {
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
        const float(&s)[4] = state.sums[i / 2][i % 2];
        shared_store4(at + i * FRAGMENT, bits_of(s[0], s[1], s[2], s[3]));
    }
    const float *r = state.reference, *t = state.total;
    shared_store4(at + 2 * STEPS * FRAGMENT, bits_of(r[0], r[1], t[0], t[1]));
    shared_store4(at + (2 * STEPS + 1) * FRAGMENT, bits_of(state.top[0], state.top[1], 0.0f, 0.0f));
}

// ... which the first one adds to its own.
__device__ __forceinline__ void take_over(State& state, u32 at) {
    const uint4 scalars = shared_load4(at + 2 * STEPS * FRAGMENT);
    const uint4 tops = shared_load4(at + (2 * STEPS + 1) * FRAGMENT);
    const float reference[2] = {__uint_as_float(scalars.x), __uint_as_float(scalars.y)};
    const float total[2] = {__uint_as_float(scalars.z), __uint_as_float(scalars.w)};
    float theirs[2];
    state.top[0] = fmaxf(state.top[0], __uint_as_float(tops.x));
    state.top[1] = fmaxf(state.top[1], __uint_as_float(tops.y));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float moved = fmaxf(state.reference[half], reference[half]);
        state.multiply(half, fast_exp2(state.reference[half] - moved));
        theirs[half] = fast_exp2(reference[half] - moved);
        state.reference[half] = moved;
        state.total[half] += total[half] * theirs[half];
    }
#pragma unroll
    for (int i = 0; i < 2 * STEPS; ++i) {
        const uint4 s = shared_load4(at + i * FRAGMENT);
        float(&sums)[4] = state.sums[i / 2][i % 2];
        sums[0] += __uint_as_float(s.x) * theirs[0];
        sums[1] += __uint_as_float(s.y) * theirs[0];
        sums[2] += __uint_as_float(s.z) * theirs[1];
        sums[3] += __uint_as_float(s.w) * theirs[1];
    }
}

struct Result {
    void* out;
    int kind;  // of number: 0 float32, 1 bf16, 2 fp16
    long long token_stride, head_stride;
    float *lse, *maxima;  // of every token, one after the other
    const float* sink;
};

// A lane's columns of a step, in float32 or packed.
__device__ __forceinline__ void write_four(float* target, float a, float b, float c, float d) {
    if (BF16_ROWS) {
        *reinterpret_cast<float2*>(target) = make_float2(a, b);
        *reinterpret_cast<float2*>(target + SECOND_PAIR) = make_float2(c, d);
    } else {
        *reinterpret_cast<float4*>(target) = make_float4(a, b, c, d);
    }
}

__device__ __forceinline__ void write_four(u16* target, uint2 packed) {
    if (BF16_ROWS) {
        *reinterpret_cast<u32*>(target) = packed.x;
        *reinterpret_cast<u32*>(target + SECOND_PAIR) = packed.y;
    } else {
        *reinterpret_cast<uint2*>(target) = packed;
    }
}

// Writes row `at` of a result.
__device__ __forceinline__ void store(
    const State& state, const Result& result, const Seat& seat, long long at, int heads, const float (&units)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int head = GROUP * blockIdx.y + seat.row + 8 * half;
        if (head >= heads) continue;
        const float total = state.total[half];
        const bool empty = total == 0.0f;
        const float lse = empty ? minus_infinity() : (state.reference[half] + fast_log2(total)) * LN_2;
        float factor = empty ? 0.0f : 1.0f / total;
        if (result.sink != nullptr && !empty) {
            factor *= 1.0f / (1.0f + fast_exp2((result.sink[head] - lse) * LOG2_E));
        }
        if (seat.warp == 0 && seat.pair == 0) {
            result.lse[at * heads + head] = lse;
            result.maxima[at * heads + head] = empty ? minus_infinity() : state.top[half] * units[half] * LN_2;
        }
        const int column = TILE * seat.warp + PAIR_STRIDE * seat.pair;
        const long long offset = at * result.token_stride + head * result.head_stride + column;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const float(&sums)[2][4] = state.sums[step];
            const float a = sums[0][2 * half] * factor;
            const float b = (BF16_ROWS ? sums[0][2 * half + 1] : sums[1][2 * half]) * factor;
            const float c = (BF16_ROWS ? sums[1][2 * half] : sums[0][2 * half + 1]) * factor;
            const float d = sums[1][2 * half + 1] * factor;
            if (result.kind == 0) {
                write_four(static_cast<float*>(result.out) + offset + 16 * step, a, b, c, d);
            } else {
                const uint2 packed = result.kind == 1 ? make_uint2(pack_bf16(a, b), pack_bf16(c, d))
                                                      : make_uint2(pack_fp16(a, b), pack_fp16(c, d));
                write_four(static_cast<u16*>(result.out) + offset + 16 * step, packed);
            }
        }
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, PER_SM) attend_few_heads(const __grid_constant__ AttendParams p) {
    const u32 memory = shared_address(shared_memory());
    if (threadIdx.x < STREAMS * STAGES) {
        mbarrier_init(memory + BARRIERS + 16 * threadIdx.x, FILLING);
        mbarrier_init(memory + BARRIERS + 16 * threadIdx.x + 8, TEAM_WARPS);
        fence_mbarrier_init();
    }
    __syncthreads();
    const SelectionParams& from = p.selection;
    const Work work = {from.rows, from.page_stride, from.page_size, from.pages, from.slots, from.token_stride,
                       from.column_stride, from.columns, from.lengths, from.request_ids, from.block_table,
                       from.table_stride, from.table_width, from.requests, p.output.whole, p.items, p.output.splits,
                       p.split_columns};
    const int heads = p.query.heads;
    if (threadIdx.x >= STREAMS * TEAM_THREADS) work.prefetch_first(threadIdx.x - STREAMS * TEAM_THREADS);
    wait_for_previous_kernel();
    if (threadIdx.x >= STREAMS * TEAM_THREADS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        const int producer = threadIdx.x / 32 - STREAMS * TEAM_WARPS, stream = producer / PRODUCERS;
        if (stream < STREAMS) produce(work, stream, producer % PRODUCERS, place_of(memory, stream));
        return;
    }
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    const Seat seat;
    const u32 logits = memory + LOGITS + seat.stream * 2 * LOGITS_BUFFER;
    const u32 query_maxima = memory + QUERY_MAXIMA + seat.stream * 2 * QUERY_MAXIMA_BUFFER;
    const u32 merge = memory + MERGE + seat.warp * MERGE_FRAGMENTS * FRAGMENT + 16 * seat.lane;
    const float logit_scale = (p.query.scale_factor == nullptr ? p.query.scale : p.query.scale * *p.query.scale_factor) * LOG2_E;
    Place place = place_of(memory, seat.stream);
    // A buffer is written again only after a barrier that follows its last use: with two of them, one is enough.
    u32 logits_turn = 0, query_turn = 0;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        const int token = work.token_of(item);
        Query query;
        const u32 maxima_buffer = query_maxima + query_turn * QUERY_MAXIMA_BUFFER;
        const int first_head = GROUP * blockIdx.y;
        query.load(p.query.q + token * p.query.token_stride + first_head * p.query.head_stride, p.query.head_stride, heads - first_head, seat,
                   maxima_buffer);
        query_turn ^= 1;
        const float units[2] = {query.size[0] * logit_scale, query.size[1] * logit_scale};
        State state;
        state.clear();
        bool last;
#pragma unroll 1
        do {
            mbarrier_wait(place.full(), place.parity);
            const u32 counted = shared_load(place.note());
            last = shared_load(place.note() + 4);
            if (counted) {
                process_stage(state, query, seat, place.rows(), counted, logits + logits_turn * LOGITS_BUFFER, units);
                logits_turn ^= 1;
            }
            __syncwarp();
            if (seat.lane == 0) mbarrier_arrive(place.empty());
            place.advance();
        } while (!last);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            state.total[half] = sum_of_head(state.total[half]);
            state.top[half] = max_of_head(state.top[half]);
        }
        if (STREAMS > 1) {
            const bool another = item + gridDim.x < p.items;
            if (seat.stream == 1) {
                if (item != blockIdx.x) named_barrier_sync(MERGE_EMPTY, STREAMS * TEAM_THREADS);
                hand_over(state, merge);
                named_barrier_arrive(MERGE_FULL, STREAMS * TEAM_THREADS);
                continue;
            }
            named_barrier_sync(MERGE_FULL, STREAMS * TEAM_THREADS);
            take_over(state, merge);
            if (another) named_barrier_arrive(MERGE_EMPTY, STREAMS * TEAM_THREADS);
        }
        if (item + gridDim.x >= p.items) let_next_kernel_start();
        // Parts are float32 [parts, tokens that are not whole, heads, values]; the sink is for whoever merges them.
        const bool direct = item < p.output.whole;
        const Result result = {direct ? p.output.out : p.output.split_out,
                               direct ? p.output.out_kind : 0,
                               direct ? p.output.token_stride : static_cast<long long>(heads) * TILES * TILE,
                               direct ? p.output.head_stride : TILES * TILE,
                               direct ? p.output.lse : p.output.split_lse,
                               direct ? p.output.max_logits : p.output.split_max_logits,
                               direct ? p.output.sink : nullptr};
        const long long row = static_cast<long long>(work.part_of(item)) * p.output.split_tokens + token - p.output.whole;
        store(state, result, seat, direct ? token : row, heads, units);
    }
}
