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

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
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

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

struct Seat {
    int warp, lane, team, row, pair;
    u32 memory;

    __device__ __forceinline__ explicit Seat(u32 memory) : memory(memory) {
        lane = threadIdx.x % 32;
        warp = uniform(threadIdx.x / 32) % TEAM_WARPS;
        team = uniform(threadIdx.x / TEAM_THREADS);
        row = lane / 4;
        pair = lane % 4;
    }

    __device__ __forceinline__ static int first_head() { return blockIdx.y * HEADS; }
    __device__ __forceinline__ void sync() const { named_sync(BOTH_TEAMS, CONSUMERS); }

    // The same, twice for each item, with parity 0 and then 1. Where teams read what the other has written, racecheck does
    // not follow a named barrier; it does follow this one, at which every thread arrives.
    __device__ __forceinline__ void meet(u32 parity) const {
        barrier_arrive(memory + MEETING);
        barrier_wait(memory + MEETING, parity);
    }

    __device__ __forceinline__ void sync_team() const { named_sync(ONE_TEAM + team, TEAM_THREADS); }

    // Whether any thread of the team has said so. The team waits once more before it may ask again.
    __device__ __forceinline__ bool any_of_team(bool said) const {
        const u32 answers = memory + ANSWERS + team * TEAM_WARPS * 4;
        const bool here = __any_sync(EVERY_LANE, said);
        if (lane == 0) shared_store(answers + warp * 4, here);
        sync_team();
        const uint4 all = shared_load4(answers);
        return (all.x | all.y | all.z | all.w) != 0;
    }

    // A team's turn comes when the other one has passed it on.
    __device__ __forceinline__ void await(u32 turn, u32 parity) const { barrier_wait(memory + turn + team * 8, parity); }
    __device__ __forceinline__ void pass(u32 turn) const {
        __syncwarp();
        if (lane == 0) barrier_arrive(memory + turn + (1 - team) * 8);
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
    if (QUERY_HALF) return unpack_half(packed);
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
    const int thread = worked_out_here(threadIdx.x), head = thread / SHARERS, share = thread % SHARERS;
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
    for (int step = 1; step < SHARERS; step *= 2) top = fmaxf(top, __shfl_xor_sync(EVERY_LANE, top, step));
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
            packed[0][i] = pack_half(first.x * factor, first.y * factor);
            packed[1][i] = pack_half(second.x * factor, second.y * factor);
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
    fence_for_copies_and_products();
    seat.sync();
}

// ---- A team's 64 rows

constexpr int BLOCKS = 2 * TILES;

struct State {
    // Weights times values, in blocks of 64 columns: from a tile, a warp has those from 32 * warp on, 16 in each of two
    // blocks, of which a lane's `row` stands for column 2 * row, and `row + 8` for the one after.
    float sums[BLOCKS][RESULTS];
    float total[OCTETS][2];  // of the weights of this lane's rows

    __device__ __forceinline__ void clear(const Seat& seat) {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
#pragma unroll
            for (int j = 0; j < RESULTS; ++j) sums[i][j] = 0.0f;
        }
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            total[octet][0] = total[octet][1] = 0.0f;
        }
        const u32 lowest = __float_as_uint(minus_infinity());
#pragma unroll
        for (int four = 0; four < OCTETS / 2; ++four) {
            shared_store4(seat.tops(four), make_uint4(lowest, lowest, lowest, lowest));
        }
    }

    // Sums with what their head and tile has among the changes.
    __device__ __forceinline__ void multiply(const Seat& seat) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int octet = 0; octet < OCTETS; ++octet) {
                const float2 change = seat.own(seat.changes(tile), octet);
#pragma unroll
                for (int i = 4 * octet; i < 4 * octet + 4; ++i) {
                    sums[2 * tile][i] *= i % 2 ? change.y : change.x;
                    sums[2 * tile + 1][i] *= i % 2 ? change.y : change.x;
                }
            }
        }
    }
};

// The scale of a tile, in this lane's two rows.
__device__ __forceinline__ float2 scales_of(const Seat& seat, u32 keys, int tile) {
    const u32 at = keys + seat.row * PITCH + SCALES + 4 * tile;
    return {load_number(at), load_number(at + 8 * PITCH)};
}

// Matrices of codes are loaded this many steps before they are widened, since they take long while others multiply.
constexpr int KEYS_AHEAD = 2, VALUES_AHEAD = 2;

// Products of this warp's 16 keys and the queries, times the scales of keys.
__device__ __forceinline__ void multiply_keys(const Seat& seat, u32 keys, float (&logits)[RESULTS]) {
    constexpr int STEPS = 4 * TILES;  // 32 columns each
    const int lane = worked_out_here(seat.lane);
    const u32 at = keys + lane % 16 * PITCH + 16 * (lane / 16);
    const unsigned long long query = along_rows(seat.memory + QUERY);
    u32 codes[KEYS_AHEAD][4], fragments[2][2][4];
    const auto load = [&](int step) { load_matrices(codes[step % KEYS_AHEAD], at + 32 * step); };
    const auto widen_codes = [&](int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32(&fragment)[4] = fragments[step % 2][i / 2];
            e4m3_to_half(codes[step % KEYS_AHEAD][i], fragment[i % 2], fragment[i % 2 + 2]);
        }
        if (step + KEYS_AHEAD < STEPS) load(step + KEYS_AHEAD);
    };
    {
        u32 rope[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) load_matrices(rope[step], at + ROPE + 32 * step);
#pragma unroll
        for (int i = 0; i < KEYS_AHEAD; ++i) load(i);
        products_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int part = 0; part < ROPE_PARTS; ++part) {
                multiply_narrow_bf16(
                    logits, rope[step], advance(query, (8 + part) * HEAD_TILE + 32 * step), step + part > 0);
            }
        }
        products_commit();
        widen_codes(0);
    }
    float products[RESULTS];  // of a tile
#pragma unroll
    for (int here = 0; here < STEPS; ++here) {
        products_begin();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 further = here / 2 * HEAD_TILE + 64 * (here % 2) + 32 * i;
            multiply_narrow_half(products, fragments[here % 2][i], advance(query, further), here % 4 + i > 0);
        }
        products_commit();
        if (here + 1 < STEPS) {
            products_wait<1>();  // with the fragments that come next
            widen_codes(here + 1);
        }
        if (here % 4 < 3) continue;
        const float2 scales = scales_of(seat, keys, here / 4);
        if (here == 3) products_wait<0>(logits);
        products_wait<0>(products);
#pragma unroll
        for (int i = 0; i < RESULTS; ++i) logits[i] = fmaf(products[i], i / 2 % 2 ? scales.y : scales.x, logits[i]);
    }
}

// Weights from logits, and weights times scales as tiles of each head's 64 numbers; whether all of them are in range.
__device__ __forceinline__ bool write_weights(
    const Seat& seat, u32 keys, const float (&logits)[RESULTS], float (&weights)[RESULTS]) {
    float highest = NO_REFERENCE;
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const float2 unit = seat.own(seat.memory + UNITS, octet);
        const float2 reference = seat.own(seat.references(TILES), octet);
#pragma unroll
        for (int i = 4 * octet; i < 4 * octet + 4; ++i) {
            const float bits = i % 2 ? fmaf(logits[i], unit.y, -reference.y) : fmaf(logits[i], unit.x, -reference.x);
            highest = fmaxf(highest, bits);
            weights[i] = fast_exp2(bits);
        }
    }
    u32 magnitudes = 0;
    // A lane gives the row of a head for one of four matrices: eight heads times eight tokens, of the first or second
    // octet of heads, and of the warp's first or second eight tokens.
    const int head = seat.lane % 8 + seat.lane / 16 * 8, unit = 2 * seat.warp + seat.lane / 8 % 2;
    const u32 to = seat.weights() + 128 * head + 16 * (unit ^ head % 8);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const float2 scales = scales_of(seat, keys, tile);
#pragma unroll
        for (int octets = 0; octets < OCTETS; octets += 2) {
            u32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 factor = seat.own(seat.factors(tile), octets + i / 2);
                const float scale = i % 2 ? scales.y : scales.x;
                const float(&w)[RESULTS] = weights;
                const int first = 4 * octets + 2 * i;
                packed[i] = pack_half(w[first] * factor.x * scale, w[first + 1] * factor.y * scale);
                magnitudes = larger_halves(magnitudes, packed[i]);
            }
            store_matrices_transposed(to + tile * HEAD_TILE + octets * 8 * 128, packed);
        }
    }
    return highest <= WEIGHT_BITS && (magnitudes & 0x7C00) != 0x7C00 && (magnitudes >> 16 & 0x7C00) != 0x7C00;
}

// The largest over the lanes that share a head.
__device__ __forceinline__ float max_of_head(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, step));
    return x;
}

__device__ __forceinline__ float sum_of_head(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(EVERY_LANE, x, step);
    return x;
}

// The largest of a warp's rows for each head: of logits, plus the bits of this lane's two scales.
__device__ __forceinline__ void share_largest(
    const Seat& seat, const float (&logits)[RESULTS], float2 scale_bits, int kind) {
    const u32 to = seat.shares(seat.warp, kind) + 8 * seat.pair;
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const float2 unit = seat.own(seat.memory + UNITS, octet);
        const float* l = &logits[4 * octet];
        const float one = max_of_head(fmaxf(fmaf(l[0], unit.x, scale_bits.x), fmaf(l[2], unit.x, scale_bits.y)));
        const float two = max_of_head(fmaxf(fmaf(l[1], unit.y, scale_bits.x), fmaf(l[3], unit.y, scale_bits.y)));
        if (seat.row == 0) {
            store_number(to + 32 * octet, one);
            store_number(to + 32 * octet + 4, two);
        }
    }
}

// Moves references to the largest logit of these rows, and factors to where the largest weight times scale is
// 2^START_BITS; references never move down.
__device__ __forceinline__ void move_references(
    const Seat& seat, u32 keys, const float (&logits)[RESULTS], State& state) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        float2 bits = scales_of(seat, keys, tile);
        bits.x = fmaxf(fast_log2(fabsf(bits.x)), LEAST_SCALE_BITS) - START_BITS;
        bits.y = fmaxf(fast_log2(fabsf(bits.y)), LEAST_SCALE_BITS) - START_BITS;
        share_largest(seat, logits, bits, tile);
    }
    share_largest(seat, logits, {0.0f, 0.0f}, TILES);
    const u32 head = 4 * seat.lane;
    const float reference = seat.lane < HEADS ? load_number(seat.references(TILES) + head) : 0.0f;
    seat.sync_team();
    if (seat.lane < HEADS) {
        // Of the tile with this warp's number.
        const int tile = seat.warp;
        const float tile_reference = load_number(seat.references(tile) + head);
        float moved = reference, tile_moved = tile_reference;
#pragma unroll
        for (int warp = 0; warp < TEAM_WARPS; ++warp) {
            moved = fmaxf(moved, load_number(seat.shares(warp, TILES) + head));
            tile_moved = fmaxf(tile_moved, load_number(seat.shares(warp, tile) + head));
        }
        store_number(seat.references(tile) + head, tile_moved);
        store_number(seat.factors(tile) + head, fast_exp2(moved - tile_moved));
        store_number(seat.changes(tile) + head, fast_exp2(tile_reference - tile_moved));
        if (tile == 0) {
            store_number(seat.references(TILES) + head, moved);
            store_number(seat.changes(TILES) + head, fast_exp2(reference - moved));
        }
    }
    seat.sync_team();
    state.multiply(seat);
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const float2 change = seat.own(seat.changes(TILES), octet);
        state.total[octet][0] *= change.x;
        state.total[octet][1] *= change.y;
    }
    seat.sync_team();  // nobody needs the changes, where weights go
}

// Rows of codes, read as 16-bit numbers, come transposed: a word has two columns of one row, then of the next. Put in
// order, they are two rows of the even column and two of the odd one.
__device__ __forceinline__ void add_values(State& state, const Seat& seat, const Place (&stages)[TURN]) {
    constexpr int STEPS = 2 * TILES;  // of a stage: 16 rows of a tile
    const int lane = worked_out_here(seat.lane);
    const u32 offset = lane % 16 * PITCH + 32 * seat.warp + 16 * (lane / 16);
    const unsigned long long weights = along_rows(seat.weights());
    u32 codes[VALUES_AHEAD][4];
    const auto load = [&](int step) {
        const u32 at = stages[step / STEPS].rows() + offset;
        load_matrices_transposed(codes[step % VALUES_AHEAD], at + step / TILES % 2 * 16 * PITCH + TILE * (step % TILES));
    };
#pragma unroll
    for (int i = 0; i < VALUES_AHEAD; ++i) load(i);
#pragma unroll
    for (int here = 0; here < TURN * STEPS; ++here) {
        u32 fragments[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32(&fragment)[4] = fragments[i / 2];
            const u32 ordered = __byte_perm(codes[here % VALUES_AHEAD][i], 0, 0x3120);
            e4m3_to_half(ordered, fragment[2 * (i % 2)], fragment[2 * (i % 2) + 1]);
        }
        if (here + VALUES_AHEAD < TURN * STEPS) load(here + VALUES_AHEAD);
        if (here % STEPS == STEPS - 1) {
            __syncwarp();
            if (seat.lane == 0) barrier_arrive(stages[here / STEPS].empty());
        }
        const int tile = here % TILES, sixteen = here / TILES;
        products_begin();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 further = tile * HEAD_TILE + 32 * sixteen;
            multiply_narrow_half(state.sums[2 * tile + i], fragments[i], advance(weights, further), 1);
        }
        products_commit();
        products_wait<2>();
    }
    seat.pass(VALUES_TURN);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) products_wait<0>(state.sums[i]);
}

__device__ __forceinline__ void raise_tops(const Seat& seat, const float (&logits)[RESULTS]) {
#pragma unroll
    for (int four = 0; four < OCTETS / 2; ++four) {
        const uint4 before = shared_load4(seat.tops(four));
        u32 tops[4] = {before.x, before.y, before.z, before.w};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            u32& top = tops[2 * (i / 4) + i % 2];
            top = __float_as_uint(fmaxf(__uint_as_float(top), logits[8 * four + i]));
        }
        shared_store4(seat.tops(four), make_uint4(tops[0], tops[1], tops[2], tops[3]));
    }
}

// Returns whether the item ends here; `place` and the parity of turns move on.
__device__ __forceinline__ bool process(State& state, const Seat& seat, Place& place, u32& parity) {
    Place stages[TURN] = {place, place};
    stages[1].advance();
    place.advance(ROUND);
    seat.await(KEYS_TURN, parity);
#pragma unroll
    for (int i = 0; i < TURN; ++i) barrier_wait(stages[i].full(), stages[i].parity);
    seat.pass(KEYS_TURN);
    const Place mine = seat.warp < TEAM_WARPS / 2 ? stages[0] : stages[1];
    const u32 keys = mine.rows() + seat.warp % 2 * 16 * PITCH;
    const u32 counted = shared_load(mine.note()) >> (16 * (seat.warp % 2) + seat.row);
    const bool last = shared_load(mine.note() + 4);
    float logits[RESULTS], weights[RESULTS];
    multiply_keys(seat, keys, logits);
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) {
        if (!(counted >> 8 * (i / 2 % 2) & 1)) logits[i] = minus_infinity();
    }
    raise_tops(seat, logits);
    seat.sync_team();  // nobody multiplies with the weights that were there
#pragma unroll 1
    for (bool moved = false;; moved = true) {
        const bool fits = write_weights(seat, keys, logits, weights) || moved;  // what is no number never does
        fence_for_copies_and_products();
        if (!seat.any_of_team(!fits)) break;
        move_references(seat, keys, logits, state);
    }
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) state.total[i / 4][i % 2] += weights[i];
    seat.await(VALUES_TURN, parity);
    parity ^= 1;
    add_values(state, seat, stages);
    return last;
}

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
                    result.kind == 1 ? pack_bf16(a, b) : pack_half(a, b);
            }
        }
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_heads_as_columns(
    const u16* q, long long q_token_stride, long long q_head_stride, const unsigned char* rows, long long page_stride,
    int page_size, int pages, const int* slots, long long slots_token_stride, long long slots_column_stride,
    int columns, const int* lengths, const int* request_ids, const int* block_table, long long table_stride,
    int table_width, int requests, void* out, int out_kind, long long out_token_stride, long long out_head_stride,
    float* lse, float* maxima, const float* sink, float* parts_out, float* parts_lse, float* parts_maxima, float scale,
    const float* scale_factor, int items, int cut_tokens, int heads, int whole, int parts, int part_columns) {
    const u32 memory = tiles_start();
    if (threadIdx.x < STAGES) {
        barrier_init(memory + BARRIERS + 16 * threadIdx.x, FILLING);
        barrier_init(memory + BARRIERS + 16 * threadIdx.x + 8, TEAM_WARPS);
        if (threadIdx.x < 2 * TEAMS) barrier_init(memory + TURNS + 8 * threadIdx.x, TEAM_WARPS);
        if (threadIdx.x == 0) barrier_init(memory + MEETING, CONSUMERS);
        publish_barriers();
    }
    __syncthreads();
    const Work work = {rows, page_stride, page_size, pages, slots, slots_token_stride, slots_column_stride, columns,
                       lengths, request_ids, block_table, table_stride, table_width, requests, whole, items, parts,
                       part_columns};
    if (threadIdx.x >= CONSUMERS) work.prefetch_first(threadIdx.x - CONSUMERS);
    wait_for_previous_kernel();
    Place place(memory + RING, memory + BARRIERS, memory + NOTES, 0);
    if (threadIdx.x >= CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        produce(work, 0, threadIdx.x / 32 - CONSUMERS / 32, place);
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    const Seat seat(memory);
    place.advance(TURN * seat.team);
    if (seat.team == 1) {
        seat.pass(KEYS_TURN);
        seat.pass(VALUES_TURN);
    }
    const float logit_scale = (scale_factor == nullptr ? scale : scale * *scale_factor) * LOG2_E;
    u32 parity = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        State state;
        state.clear(seat);
        load_query(q + work.token_of(item) * q_token_stride, q_head_stride, heads, logit_scale, seat);
        while (!process(state, seat, place, parity)) {}
        // Parts are float32 [parts, tokens that are not whole, heads, values]; the sink is for whoever merges them.
        const int token = work.token_of(worked_out_here(item));
        const bool direct = item < whole;
        const Result result = {direct ? out : parts_out,
                               direct ? out_kind : 0,
                               direct ? out_token_stride : static_cast<long long>(heads) * TILES * TILE,
                               direct ? out_head_stride : TILES * TILE,
                               direct ? lse : parts_lse,
                               direct ? maxima : parts_maxima,
                               direct ? sink : nullptr};
        const long long row = static_cast<long long>(work.part_of(item)) * cut_tokens + token - whole;
        const long long at = direct ? token : row;
        if (item + gridDim.x >= items) let_next_kernel_start();
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
