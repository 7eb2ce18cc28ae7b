// Sparse attention of up to 16 or 32 heads over FP8 rows of 656 bytes, which enter shared memory once and stay as they
// are; each code is widened once for its product with queries and once as a value, whatever the number of heads. More
// heads are for blocks beside it, numbered by y.
//
// Heads are the columns of the products, since those of four warps have 64 rows: logits are keys [64, 576] times queries
// [576, heads], outputs are values [512, 64] times weights [64, heads]. Keys and values are the first factors, which
// come from registers: codes go from shared memory to registers as matrices, for values transposed, and are widened on
// the way. Queries and weights are the second factors, tiles in shared memory. No number of a row is ever written.
//
// A block works through items, each a query token, or a part of the columns of one, as `row_ring.cuh` has it. Four warps
// copy rows into one ring, from which two teams of four warps take 64 rows, two stages, in turn. Each has references and
// sums of its own, so that one multiplies while the other one makes weights; when an item ends, each gets the other's sums
// of two of the four tiles. Turns with keys are taken in order, and so are those with values: stages are then filled and
// freed in order, which is what their barriers, with two phases to tell apart, ask for.
//
// e4m3 numbers are exact in fp16; a tile's scale is applied to logits and weights. Queries are brought into fp16's range
// by a power of two per head. So are weights times scales: a head has a reference for its logits, from which weights
// are exp2(logit - reference) in float32, and a factor for each tile, which makes the largest weight times scale a number
// that fp16 holds in full, whatever the tile's scales are. Where something would not fit, a team moves its references
// and factors.
//
// Defined by the caller: HEADS (16 or 32), STAGES of the ring, QUERY_HALF (1: queries are fp16, 0: bf16), and THREADS and
// SHARED_BYTES, which follow from them.

#include "instructions.cuh"
#include "warpgroups.cuh"
#include "params.cuh"
#include "softmax.cuh"

static_assert(sizeof(AttendParams) == PARAMS_BYTES, "AttendParams differs from its Python twin");

typedef unsigned short u16;

// A row: 512 codes in four tiles, a float32 scale for each tile, 64 bf16 numbers of the rope part. From one to the next
// it is an odd multiple of 16 bytes, so that the rows of a matrix are in different banks.
constexpr int TILES = 4, TILE = 128, SCALES = 512, ROPE = 528, ROW = 656, PITCH = ROW;
constexpr int TEAMS = 2, TEAM_WARPS = 4, TEAM_THREADS = 32 * TEAM_WARPS, CONSUMERS = TEAMS * TEAM_THREADS;
constexpr int TURN = 2;  // stages that a team takes at a time
constexpr int STREAMS = 1, PRODUCERS = 4, SHARED_STAGES = 8, ROUND = TURN * TEAMS;

#include "row_ring.cuh"

// Of a product with 64 rows, a lane has rows `row` and `row + 8` of its warp's 16, and of every octet of heads the two
// from 2 * pair on: results are at [4 * octet + 2 * (row or row + 8) + first or second head].
constexpr int OCTETS = HEADS / 8, RESULTS = 4 * OCTETS;
// An fp16 query has more digits than bf16, which the rope part is multiplied in: two numbers for one.
constexpr int ROPE_PARTS = QUERY_HALF ? 2 : 1;
constexpr int HEAD_TILE = HEADS * 128;  // bytes: a row of 64 numbers for each head

// The largest weight times scale starts at 2^10, and moves when it is more than fp16 holds; below, there is full
// precision to 2^-14. Weights themselves may grow more before their reference moves.
constexpr float START_BITS = 10.0f, WEIGHT_BITS = 20.0f;
// A tile without a scale has weights of zero, whatever its factor, which must be a number.
constexpr float LEAST_SCALE_BITS = -85.0f;
constexpr float NO_REFERENCE = -1e30f;

// Registers per thread: producers leave theirs to the consumers.
constexpr int PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

// Shared memory.
constexpr int QUERY = 0;  // 64 columns at a time; then one or two of the rope part
constexpr int WEIGHTS = QUERY + (8 + 2) * HEAD_TILE;  // times scales: of each team's rows, for each tile of values
constexpr int RING = WEIGHTS + TEAMS * TILES * HEAD_TILE;
// Numbers of each head.
constexpr int PER_HEAD = 4 * HEADS;
constexpr int UNITS = RING + STAGES * STAGE_BYTES;  // what products are multiplied with
// Of each team, for each tile and then for what tiles have in common.
constexpr int KINDS = TILES + 1, PER_TEAM = KINDS * PER_HEAD;
constexpr int REFERENCES = UNITS + PER_HEAD;  // of weights times scales; of logits
constexpr int FACTORS = REFERENCES + TEAMS * PER_TEAM;  // of weights, for tiles alone
// Of each thread: the largest product of each of its heads' queries and its rows, which registers have no room for.
constexpr int TOPS = FACTORS + TEAMS * PER_TEAM;
constexpr int BARRIERS = TOPS + CONSUMERS * 2 * 4 * OCTETS;
constexpr int NOTES = BARRIERS + STAGES * 16;
constexpr int TURNS = NOTES + STAGES * 8;  // [2][TEAMS] barriers: at keys, and at values
constexpr int MEETING = TURNS + 2 * TEAMS * 8;  // barrier of all consumers
constexpr int ANSWERS = (MEETING + 8 + 15) / 16 * 16;  // [TEAMS][TEAM_WARPS]

static_assert(ANSWERS + TEAMS * TEAM_WARPS * 4 == SHARED_BYTES, "the caller has another layout in mind");
static_assert(THREADS == CONSUMERS + 32 * PRODUCERS && (HEADS == 16 || HEADS == 32), "no plan for these");

// While a team has no use for its weights, numbers of each head are there.
constexpr int TEAM_WEIGHTS = TILES * HEAD_TILE;
constexpr int SHARES = 0;  // of each warp: largest of its rows; at the end totals and products
constexpr int CHANGES = SHARES + TEAM_WARPS * PER_TEAM;  // of sums, for each tile, and of totals
// At the end of an item, in place of queries and weights: sums on their way to the other team.
constexpr int HANDED_OVER = QUERY;
static_assert(HANDED_OVER + CONSUMERS * TILES / TEAMS * 2 * 4 * RESULTS <= RING, "sums do not fit");

// Named barriers; the last is one for each team.
constexpr u32 BOTH_TEAMS = 1, ONE_TEAM = 2;

constexpr u32 KEYS_TURN = TURNS, VALUES_TURN = TURNS + TEAMS * 8;

struct Seat {
    int warp, lane, team, row, pair;
    u32 memory;

    __device__ __forceinline__ explicit Seat(u32 memory) : memory(memory) {
        lane = threadIdx.x % 32;
        warp = warp_uniform(threadIdx.x / 32) % TEAM_WARPS;
        team = warp_uniform(threadIdx.x / TEAM_THREADS);
        row = lane / 4;
        pair = lane % 4;
    }

    __device__ __forceinline__ static int first_head() { return blockIdx.y * HEADS; }
    __device__ __forceinline__ void sync() const { named_barrier_sync(BOTH_TEAMS, CONSUMERS); }

    // The same, twice for each item, with parity 0 and then 1. Where teams read what the other has written, racecheck does
    // not follow a named barrier; it does follow this one, at which every thread arrives.
    __device__ __forceinline__ void meet(u32 parity) const {
        mbarrier_arrive(memory + MEETING);
        mbarrier_wait(memory + MEETING, parity);
    }

    __device__ __forceinline__ void sync_team() const { named_barrier_sync(ONE_TEAM + team, TEAM_THREADS); }

    // Whether any thread of the team has said so. The team waits once more before it may ask again.
    __device__ __forceinline__ bool any_of_team(bool said) const {
        const u32 answers = memory + ANSWERS + team * TEAM_WARPS * 4;
        const bool here = __any_sync(FULL_MASK, said);
        if (lane == 0) shared_store(answers + warp * 4, here);
        sync_team();
        const uint4 all = shared_load4(answers);
        return (all.x | all.y | all.z | all.w) != 0;
    }

    // A team's turn comes when the other one has passed it on.
    __device__ __forceinline__ void await(u32 turn, u32 parity) const { mbarrier_wait(memory + turn + team * 8, parity); }
    __device__ __forceinline__ void pass(u32 turn) const {
        __syncwarp();
        if (lane == 0) mbarrier_arrive(memory + turn + (1 - team) * 8);
    }

    __device__ __forceinline__ u32 weights() const { return memory + WEIGHTS + team * TEAM_WEIGHTS; }

    // Where this team's numbers of a kind are.
    __device__ __forceinline__ u32 references(int kind) const {
        return memory + REFERENCES + team * PER_TEAM + kind * PER_HEAD;
    }
    __device__ __forceinline__ u32 factors(int tile) const {
        return memory + FACTORS + team * PER_TEAM + tile * PER_HEAD;
    }
    __device__ __forceinline__ u32 changes(int kind) const { return weights() + CHANGES + kind * PER_HEAD; }
    __device__ __forceinline__ u32 shares(int warp, int kind) const {
        return weights() + SHARES + warp * PER_TEAM + kind * PER_HEAD;
    }

    // Numbers of this lane's two heads of an octet.
    __device__ __forceinline__ float2 own(u32 numbers, int octet) const {
        const uint2 two = shared_load2(numbers + 32 * octet + 8 * pair);
        return {__uint_as_float(two.x), __uint_as_float(two.y)};
    }

    // Where this thread has the largest products of four heads.
    __device__ __forceinline__ u32 tops(int four) const {
        return memory + TOPS + 16 * (four * CONSUMERS + threadIdx.x);
    }
};

__device__ __forceinline__ float load_number(u32 at) { return __uint_as_float(shared_load(at)); }
__device__ __forceinline__ void store_number(u32 at, float number) { shared_store(at, __float_as_uint(number)); }

// ---- Queries

__device__ __forceinline__ float2 widen(u32 packed) {
    if (QUERY_HALF) return unpack_fp16(packed);
    return {__uint_as_float(packed << 16), __uint_as_float(packed & 0xFFFF0000u)};
}

__device__ __forceinline__ float largest(float so_far, uint2 four) {
    const float2 a = widen(four.x), b = widen(four.y);
    return fmaxf(so_far, fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y))));
}

// A token's queries become tiles, in fp16 and in bf16, times powers of two. Of 16 columns, those whose codes are in the
// first half of a word come first, as in the keys' fragments.
__device__ __forceinline__ void load_query(
    const u16* q, long long head_stride, int heads, float logit_scale, const Seat& seat) {
    constexpr int SHARERS = CONSUMERS / HEADS;  // threads of a head, neighbours
    constexpr int GROUPS = 32 / SHARERS, PIECES = 16 / SHARERS;
    const int thread = opaque(threadIdx.x), head = thread / SHARERS, share = thread % SHARERS;
    const u16* from = q + (seat.first_head() + head) * head_stride;
    uint2 latent[GROUPS][4], rope[PIECES];
    float top = 0.0f;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u16* at = from + 16 * (share + SHARERS * group) + 4 * i;
            latent[group][i] = head < heads - seat.first_head() ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
            top = largest(top, latent[group][i]);
        }
    }
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const u16* at = from + TILES * TILE + 4 * (share + SHARERS * piece);
        rope[piece] = head < heads - seat.first_head() ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
    }
#pragma unroll
    for (int step = 1; step < SHARERS; step *= 2) top = fmaxf(top, __shfl_xor_sync(FULL_MASK, top, step));
    // The largest number of a head gets between 2^14 and 2^15, so that fp16 loses nothing that counts.
    const u32 exponent = min(max(__float_as_uint(top) >> 23, 27u), 254u);
    const float factor = __uint_as_float((268 - exponent) << 23);
    seat.sync();  // nobody needs what is there
    if (share == 0) {
        const u32 numbers = seat.memory + 4 * head;
        store_number(numbers + UNITS, __uint_as_float((exponent - 14) << 23) * logit_scale);
#pragma unroll
        for (int i = 0; i < TEAMS * KINDS; ++i) {
            store_number(numbers + REFERENCES + i * PER_HEAD, NO_REFERENCE);
            store_number(numbers + FACTORS + i * PER_HEAD, 1.0f);
        }
    }
    const u32 row = seat.memory + QUERY + 128 * head;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
        const int sixteen = share + SHARERS * group;
        u32 packed[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 first = widen(latent[group][i].x), second = widen(latent[group][i].y);
            packed[0][i] = pack_fp16(first.x * factor, first.y * factor);
            packed[1][i] = pack_fp16(second.x * factor, second.y * factor);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const u32(&p)[4] = packed[half];
            const int unit = (2 * (sixteen % 4) + half) ^ head % 8;
            shared_store4(row + sixteen / 4 * HEAD_TILE + 16 * unit, make_uint4(p[0], p[1], p[2], p[3]));
        }
    }
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const int four = share + SHARERS * piece;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            float2 wide = widen(pair ? rope[piece].y : rope[piece].x);
            wide = {wide.x * factor, wide.y * factor};
#pragma unroll
            for (int part = 0; part < ROPE_PARTS; ++part) {
                const u32 two = pack_bf16(wide.x, wide.y);
                shared_store(row + (8 + part) * HEAD_TILE + 16 * (four / 2 ^ head % 8) + 8 * (four % 2) + 4 * pair, two);
                wide.x -= __uint_as_float(two << 16);
                wide.y -= __uint_as_float(two & 0xFFFF0000u);
            }
        }
    }
    fence_async_proxy();
    seat.sync();
}

#include "heads_as_columns_rows.cuh"

// ---- The end of an item

// What each warp knows about totals and largest products, for everybody.
__device__ __forceinline__ void share_totals(const State& state, const Seat& seat) {
    const u32 to = seat.shares(seat.warp, 0) + 8 * seat.pair;
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const uint2 tops = shared_load2(seat.tops(octet / 2) + octet % 2 * 8);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float total = sum_of_head(state.total[octet][i]);
            const float top = max_of_head(__uint_as_float(i ? tops.y : tops.x));
            if (seat.row == 0) {
                store_number(to + 32 * octet + 4 * i, total);
                store_number(to + PER_HEAD + 32 * octet + 4 * i, top);
            }
        }
    }
}

struct Result {
    void* out;
    int kind;  // of number: 0 float32, 1 bf16, 2 fp16
    long long token_stride, head_stride;
    float *lse, *maxima;  // of every token, one after the other
    const float* sink;
};

// What this team's sums of the tile with this warp's number are to be multiplied with, for the head with this lane's
// number; and row `at` of lse and maxima.
__device__ __forceinline__ void normalise(const Seat& seat, const Result& result, long long at, int heads) {
    if (seat.lane >= HEADS) return;
    const int head = seat.first_head() + seat.lane;
    const u32 numbers = seat.memory + 4 * seat.lane;
    float references[TEAMS], reference = NO_REFERENCE, total = 0.0f, top = minus_infinity();
#pragma unroll
    for (int team = 0; team < TEAMS; ++team) {
        references[team] = load_number(numbers + REFERENCES + team * PER_TEAM + TILES * PER_HEAD);
        reference = fmaxf(reference, references[team]);
    }
#pragma unroll
    for (int warp = 0; warp < CONSUMERS / 32; ++warp) {
        const float part = fast_exp2(references[warp / TEAM_WARPS] - reference);
        const u32 shares = numbers + WEIGHTS + warp / TEAM_WARPS * TEAM_WEIGHTS + SHARES + warp % TEAM_WARPS * PER_TEAM;
        total = fmaf(load_number(shares), part, total);
        top = fmaxf(top, load_number(shares + PER_HEAD));
    }
    const bool empty = total == 0.0f, exists = head < heads;
    const float lse = empty ? minus_infinity() : (reference + fast_log2(total)) * LN_2;
    const float part = fast_exp2((seat.team == 0 ? references[0] : references[1]) - reference);
    float factor = empty ? 0.0f : part / (total * load_number(seat.factors(seat.warp) + 4 * seat.lane));
    if (result.sink != nullptr && !empty && exists) {
        factor *= 1.0f / (1.0f + fast_exp2((result.sink[head] - lse) * LOG2_E));
    }
    store_number(seat.changes(seat.warp) + 4 * seat.lane, factor);
    if (exists && seat.team == 0 && seat.warp == 0) {
        result.lse[at * heads + head] = lse;
        result.maxima[at * heads + head] = empty ? minus_infinity() : top * load_number(numbers + UNITS) * LN_2;
    }
}

constexpr int KEPT_TILES = TILES / TEAMS, KEPT_BLOCKS = 2 * KEPT_TILES;

// Each team keeps its sums of two tiles, the second one those that come last, and adds the other's; they become the first.
__device__ __forceinline__ void hand_over(State& state, const Seat& seat) {
    const u32 at = seat.memory + HANDED_OVER;
    const auto place = [&](int block, int i, u32 thread) {
        return at + 16 * ((block * RESULTS + i) / 4 * CONSUMERS + thread);
    };
#pragma unroll
    for (int block = 0; block < KEPT_BLOCKS; ++block) {
        float(&low)[RESULTS] = state.sums[block];
        float(&high)[RESULTS] = state.sums[block + KEPT_BLOCKS];
#pragma unroll
        for (int i = 0; i < RESULTS; i += 4) {
            u32 given[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                given[j] = __float_as_uint(seat.team == 0 ? high[i + j] : low[i + j]);
                low[i + j] = seat.team == 0 ? low[i + j] : high[i + j];
            }
            shared_store4(place(block, i, threadIdx.x), make_uint4(given[0], given[1], given[2], given[3]));
        }
    }
    seat.meet(1);
#pragma unroll
    for (int block = 0; block < KEPT_BLOCKS; ++block) {
#pragma unroll
        for (int i = 0; i < RESULTS; i += 4) {
            const uint4 got = shared_load4(place(block, i, threadIdx.x ^ TEAM_THREADS));
            float* const sums = &state.sums[block][i];
            sums[0] += __uint_as_float(got.x);
            sums[1] += __uint_as_float(got.y);
            sums[2] += __uint_as_float(got.z);
            sums[3] += __uint_as_float(got.w);
        }
    }
}

// Writes row `at` of a result.
__device__ __forceinline__ void store(const State& state, const Seat& seat, const Result& result, long long at, int heads) {
    const int first_column = TILE * KEPT_TILES * seat.team + 32 * seat.warp + 2 * seat.row;
    const int first_head = seat.first_head() + 2 * seat.pair;
    const long long start = at * result.token_stride + first_head * result.head_stride + first_column;
#pragma unroll
    for (int head = 0; head < 2 * OCTETS; ++head) {
        const int octet = head / 2, next = head % 2;
        if (first_head + 8 * octet + next >= heads) continue;
        const long long offset = start + (8 * octet + next) * result.head_stride;
#pragma unroll
        for (int block = 0; block < KEPT_BLOCKS; ++block) {
            const int column = TILE * (block / 2) + 16 * (block % 2);
            const float a = state.sums[block][4 * octet + next], b = state.sums[block][4 * octet + next + 2];
            if (result.kind == 0) {
                *reinterpret_cast<float2*>(static_cast<float*>(result.out) + offset + column) = make_float2(a, b);
            } else {
                *reinterpret_cast<u32*>(static_cast<u16*>(result.out) + offset + column) =
                    result.kind == 1 ? pack_bf16(a, b) : pack_fp16(a, b);
            }
        }
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_heads_as_columns(const __grid_constant__ AttendParams p) {
    const u32 memory = tile_memory();
    if (threadIdx.x < STAGES) {
        mbarrier_init(memory + BARRIERS + 16 * threadIdx.x, FILLING);
        mbarrier_init(memory + BARRIERS + 16 * threadIdx.x + 8, TEAM_WARPS);
        if (threadIdx.x < 2 * TEAMS) mbarrier_init(memory + TURNS + 8 * threadIdx.x, TEAM_WARPS);
        if (threadIdx.x == 0) mbarrier_init(memory + MEETING, CONSUMERS);
        fence_mbarrier_init();
    }
    __syncthreads();
    const SelectionParams& from = p.selection;
    const Work work = {from.rows, from.page_stride, from.page_size, from.pages, from.slots, from.token_stride,
                       from.column_stride, from.columns, from.lengths, from.request_ids, from.block_table,
                       from.table_stride, from.table_width, from.requests, p.output.whole, p.items, p.output.splits,
                       p.split_columns};
    const int heads = p.query.heads;
    if (threadIdx.x >= CONSUMERS) work.prefetch_first(threadIdx.x - CONSUMERS);
    wait_for_previous_kernel();
    Place place(memory + RING, memory + BARRIERS, memory + NOTES, 0);
    if (threadIdx.x >= CONSUMERS) {
        warpgroup_reg_dealloc<PRODUCER_REGISTERS>();
        produce(work, 0, threadIdx.x / 32 - CONSUMERS / 32, place);
        return;
    }
    warpgroup_reg_alloc<CONSUMER_REGISTERS>();
    const Seat seat(memory);
    place.advance(TURN * seat.team);
    if (seat.team == 1) {
        seat.pass(KEYS_TURN);
        seat.pass(VALUES_TURN);
    }
    const float logit_scale = (p.query.scale_factor == nullptr ? p.query.scale : p.query.scale * *p.query.scale_factor) * LOG2_E;
    u32 parity = 0;
    for (int item = blockIdx.x; item < p.items; item += gridDim.x) {
        State state;
        state.clear(seat);
        load_query(p.query.q + work.token_of(item) * p.query.token_stride, p.query.head_stride, heads, logit_scale, seat);
        while (!process(state, seat, place, parity)) {}
        // Parts are float32 [parts, tokens that are not whole, heads, values]; the sink is for whoever merges them.
        const int token = work.token_of(opaque(item));
        const bool direct = item < p.output.whole;
        const Result result = {direct ? p.output.out : p.output.split_out,
                               direct ? p.output.out_kind : 0,
                               direct ? p.output.token_stride : static_cast<long long>(heads) * TILES * TILE,
                               direct ? p.output.head_stride : TILES * TILE,
                               direct ? p.output.lse : p.output.split_lse,
                               direct ? p.output.max_logits : p.output.split_max_logits,
                               direct ? p.output.sink : nullptr};
        const long long row = static_cast<long long>(work.part_of(item)) * p.output.split_tokens + token - p.output.whole;
        const long long at = direct ? token : row;
        if (item + gridDim.x >= p.items) let_next_kernel_start();
        seat.sync_team();  // nobody needs the weights
        share_totals(state, seat);
        seat.meet(0);
        normalise(seat, result, at, heads);
        seat.sync();
        state.multiply(seat);
        seat.sync();
        hand_over(state, seat);
        store(state, seat, result, at, heads);
    }
}
