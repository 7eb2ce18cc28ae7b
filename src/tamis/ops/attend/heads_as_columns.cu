// Sparse attention of up to 16 or 32 heads over FP8 rows of 656 bytes, which enter shared memory once and stay as they
// are; each code is widened once for its product with queries and once as a value, whatever the number of heads.
//
// Heads are the columns of the products, since those of four warps have 64 rows: logits are keys [64, 576] times queries
// [576, heads], outputs are values [512, 64] times weights [64, heads]. Keys and values are the first factors, which
// come from registers: codes go from shared memory to registers as matrices, for values transposed, and are widened on
// the way. Queries and weights are the second factors, tiles in shared memory. No number of a row is ever written.
//
// A block works through items, each a query token, or a part of the columns of one, as `row_ring.cuh` has it. Four warps
// copy rows into one ring. Two teams of four warps take 128 rows at a time, four stages: each makes the weights of 64
// rows, and then adds up two of the four tiles of values of all 128, so that sums take few registers and nothing has to be
// merged.
//
// e4m3 numbers are exact in fp16; a tile's scale is applied to logits and weights. Queries are brought into fp16's range
// by a power of two per head. So are weights times scales: a head has a reference for its logits, from which weights
// are exp2(logit - reference) in float32, and a factor for each tile, which makes the largest weight times scale a number
// that fp16 holds in full, whatever the tile's scales are. Where something would not fit, all warps move references and
// factors.
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
constexpr int STREAMS = 1, PRODUCERS = 4, ROUND = 2 * TEAMS;

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
constexpr int REFERENCES = UNITS + PER_HEAD;  // of logits
constexpr int FACTORS = REFERENCES + PER_HEAD;  // of weights, for each tile
constexpr int CHANGES = FACTORS + TILES * PER_HEAD;  // of sums, for each tile, and of totals
constexpr int KINDS = TILES + 1;
constexpr int SHARES = CHANGES + KINDS * PER_HEAD;  // of each warp: largest of its rows; at the end totals and products
constexpr int BARRIERS = SHARES + CONSUMERS / 32 * KINDS * PER_HEAD;
constexpr int NOTES = BARRIERS + STAGES * 16;

static_assert(NOTES + STAGES * 8 == SHARED_BYTES, "the caller has another layout in mind");
static_assert(THREADS == CONSUMERS + 32 * PRODUCERS && (HEADS == 16 || HEADS == 32), "no plan for these");

constexpr u32 BOTH_TEAMS = 1;  // named barrier

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

struct Seat {
    int warp, lane, team, row, pair;
    u32 memory;

    __device__ __forceinline__ explicit Seat(u32 memory) : memory(memory) {
        lane = threadIdx.x % 32;
        warp = threadIdx.x / 32 % TEAM_WARPS;
        team = threadIdx.x / TEAM_THREADS;
        row = lane / 4;
        pair = lane % 4;
    }

    __device__ __forceinline__ void sync() const { named_sync(BOTH_TEAMS, CONSUMERS); }

    // Where this warp's numbers of a kind are, from the head of this lane's pair on.
    __device__ __forceinline__ u32 shares(int kind) const {
        return memory + SHARES + ((TEAM_WARPS * team + warp) * KINDS + kind) * PER_HEAD + 8 * pair;
    }

    // Numbers of this lane's two heads of an octet, where there is one for each head.
    __device__ __forceinline__ float2 own(int numbers, int octet) const {
        const uint2 two = shared_load2(memory + numbers + 32 * octet + 8 * pair);
        return {__uint_as_float(two.x), __uint_as_float(two.y)};
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
    const int head = threadIdx.x / SHARERS, share = threadIdx.x % SHARERS;
    const u16* from = q + head * head_stride;
    uint2 latent[GROUPS][4], rope[PIECES];
    float top = 0.0f;
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u16* at = from + 16 * (share + SHARERS * group) + 4 * i;
            latent[group][i] = head < heads ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
            top = largest(top, latent[group][i]);
        }
    }
#pragma unroll
    for (int piece = 0; piece < PIECES; ++piece) {
        const u16* at = from + TILES * TILE + 4 * (share + SHARERS * piece);
        rope[piece] = head < heads ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
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
        store_number(numbers + REFERENCES, NO_REFERENCE);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) store_number(numbers + FACTORS + tile * PER_HEAD, 1.0f);
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

// ---- A round of 128 rows

constexpr int OWN_TILES = TILES / TEAMS, BLOCKS = 2 * OWN_TILES;

struct State {
    // Weights times values of the team's tiles, in blocks of 64 columns: from a tile, a warp has those from 32 * warp on,
    // 16 in each of two blocks, of which a lane's `row` stands for column 2 * row, and `row + 8` for the one after.
    float sums[BLOCKS][RESULTS];
    float total[OCTETS][2], top[OCTETS][2];  // of weights; largest product of query and key; both of this lane's rows
    // In the first team: of the head with this lane's number, for logits, and for the tile with this warp's number.
    float reference, tile_reference;

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int i = 0; i < BLOCKS; ++i) {
#pragma unroll
            for (int j = 0; j < RESULTS; ++j) sums[i][j] = 0.0f;
        }
#pragma unroll
        for (int octet = 0; octet < OCTETS; ++octet) {
            total[octet][0] = total[octet][1] = 0.0f;
            top[octet][0] = top[octet][1] = minus_infinity();
        }
        reference = tile_reference = NO_REFERENCE;
    }

    // Sums with what their head and tile has among the changes.
    __device__ __forceinline__ void multiply(const Seat& seat) {
#pragma unroll
        for (int tile = 0; tile < OWN_TILES; ++tile) {
#pragma unroll
            for (int octet = 0; octet < OCTETS; ++octet) {
                const float2 change = seat.own(CHANGES + (OWN_TILES * seat.team + tile) * PER_HEAD, octet);
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

__device__ __forceinline__ void add_scaled(
    float (&logits)[RESULTS], const float (&products)[RESULTS], float2 scales) {
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) logits[i] = fmaf(products[i], i / 2 % 2 ? scales.y : scales.x, logits[i]);
}

// Products of this warp's 16 keys and the queries, times the scales of keys.
__device__ __forceinline__ void multiply_keys(const Seat& seat, u32 keys, float (&logits)[RESULTS]) {
    const u32 at = keys + seat.lane % 16 * PITCH + 16 * (seat.lane / 16);
    const unsigned long long query = along_rows(seat.memory + QUERY);
    {
        u32 rope[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) load_matrices(rope[step], at + ROPE + 32 * step);
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
    }
    float products[2][RESULTS];  // of a tile, and of the one before
    u32 codes[4];  // of 32 columns, always loaded before the products that come before theirs
    load_matrices(codes, at);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int steps = 0; steps < 4; ++steps) {
            const int here = 4 * tile + steps;
            u32 fragments[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) e4m3_to_half(codes[i], fragments[i / 2][i % 2], fragments[i / 2][i % 2 + 2]);
            if (here + 1 < 4 * TILES) load_matrices(codes, at + 32 * (here + 1));
            products_begin();
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 further = here / 2 * HEAD_TILE + 64 * (here % 2) + 32 * i;
                multiply_narrow_half(products[tile % 2], fragments[i], advance(query, further), steps + i > 0);
            }
            products_commit();
            if (steps != 1) {
                products_wait<2>();
            } else if (tile == 0) {
                products_wait<2>(logits);
            } else {
                products_wait<2>(products[(tile + 1) % 2]);
                add_scaled(logits, products[(tile + 1) % 2], scales_of(seat, keys, tile - 1));
            }
        }
    }
    products_wait<0>(products[(TILES - 1) % 2]);
    add_scaled(logits, products[(TILES - 1) % 2], scales_of(seat, keys, TILES - 1));
}

// Weights from logits, and weights times scales as tiles of each head's 64 numbers; whether all of them are in range.
__device__ __forceinline__ bool write_weights(
    const Seat& seat, u32 keys, const float (&logits)[RESULTS], float (&weights)[RESULTS]) {
    float highest = NO_REFERENCE;
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const float2 unit = seat.own(UNITS, octet), reference = seat.own(REFERENCES, octet);
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
    const u32 to = seat.memory + WEIGHTS + seat.team * TILES * HEAD_TILE + 128 * head + 16 * (unit ^ head % 8);
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
        const float2 scales = scales_of(seat, keys, tile);
#pragma unroll
        for (int octets = 0; octets < OCTETS; octets += 2) {
            u32 packed[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 factor = seat.own(FACTORS + tile * PER_HEAD, octets + i / 2);
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
    const u32 to = seat.shares(kind);
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const float2 unit = seat.own(UNITS, octet);
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
    seat.sync();
    if (seat.team == 0 && seat.lane < HEADS) {
        const u32 numbers = seat.memory + 4 * seat.lane, tile = seat.warp * PER_HEAD;
        float moved = state.reference, tile_moved = state.tile_reference;
#pragma unroll
        for (int warp = 0; warp < CONSUMERS / 32; ++warp) {
            const u32 shares = numbers + SHARES + warp * KINDS * PER_HEAD;
            moved = fmaxf(moved, load_number(shares + TILES * PER_HEAD));
            tile_moved = fmaxf(tile_moved, load_number(shares + tile));
        }
        store_number(numbers + FACTORS + tile, fast_exp2(moved - tile_moved));
        store_number(numbers + CHANGES + tile, fast_exp2(state.tile_reference - tile_moved));
        if (seat.warp == 0) {
            store_number(numbers + REFERENCES, moved);
            store_number(numbers + CHANGES + TILES * PER_HEAD, fast_exp2(state.reference - moved));
        }
        state.reference = moved;
        state.tile_reference = tile_moved;
    }
    seat.sync();
    state.multiply(seat);
#pragma unroll
    for (int octet = 0; octet < OCTETS; ++octet) {
        const float2 change = seat.own(CHANGES + TILES * PER_HEAD, octet);
        state.total[octet][0] *= change.x;
        state.total[octet][1] *= change.y;
    }
}

// Rows of codes, read as 16-bit numbers, come transposed: a word has two columns of one row, then of the next. Put in
// order, they are two rows of the even column and two of the odd one.
__device__ __forceinline__ void add_values(State& state, const Seat& seat, Place& place) {
    const int column = TILE * OWN_TILES * seat.team + 32 * seat.warp;
    const u32 offset = seat.lane % 16 * PITCH + column + 16 * (seat.lane / 16);
    const unsigned long long weights = along_rows(seat.memory + WEIGHTS + OWN_TILES * seat.team * HEAD_TILE);
    u32 codes[4];  // of 16 rows of a tile
    barrier_wait(place.full(), place.parity);
    load_matrices_transposed(codes, place.rows() + offset);
#pragma unroll
    for (int here = 0; here < 4 * ROUND; ++here) {
        const int tile = here % 2, rows = here / 2 % 2, stage = here / 4;
        u32 fragments[2][4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32(&fragment)[4] = fragments[i / 2];
            e4m3_to_half(__byte_perm(codes[i], 0, 0x3120), fragment[2 * (i % 2)], fragment[2 * (i % 2) + 1]);
        }
        if (here % 4 < 3) {
            const int next = here + 1;
            load_matrices_transposed(codes, place.rows() + offset + next / 2 % 2 * 16 * PITCH + TILE * (next % 2));
        } else {
            __syncwarp();
            if (seat.lane == 0) barrier_arrive(place.empty());
            place.advance();
            if (stage + 1 < ROUND) {
                barrier_wait(place.full(), place.parity);
                load_matrices_transposed(codes, place.rows() + offset);
            }
        }
        const u32 further = (stage / 2 * TILES + tile) * HEAD_TILE + 64 * (stage % 2) + 32 * rows;
        products_begin();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            multiply_narrow_half(state.sums[2 * tile + i], fragments[i], advance(weights, further), 1);
        }
        products_commit();
        products_wait<2>();
    }
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) products_wait<0>(state.sums[i]);
}

// Returns whether the item ends here; `place` moves on. In an item's first round there are no references yet.
__device__ __forceinline__ bool process(State& state, const Seat& seat, Place& place, bool first) {
    Place mine = place;
    mine.advance(2 * seat.team + seat.warp / 2);
    barrier_wait(mine.full(), mine.parity);
    const u32 keys = mine.rows() + seat.warp % 2 * 16 * PITCH;
    const u32 counted = shared_load(mine.note()) >> (16 * (seat.warp % 2) + seat.row);
    const bool last = shared_load(mine.note() + 4);
    float logits[RESULTS], weights[RESULTS];
    multiply_keys(seat, keys, logits);
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) {
        if (!(counted >> 8 * (i / 2 % 2) & 1)) logits[i] = minus_infinity();
        state.top[i / 4][i % 2] = fmaxf(state.top[i / 4][i % 2], logits[i]);
    }
    seat.sync();  // nobody multiplies with the weights that were there
    const bool fits = !first && write_weights(seat, keys, logits, weights);
    fence_for_copies_and_products();
    if (named_any(BOTH_TEAMS, CONSUMERS, !fits)) {
        move_references(seat, keys, logits, state);
        write_weights(seat, keys, logits, weights);
        fence_for_copies_and_products();
        seat.sync();
    }
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) state.total[i / 4][i % 2] += weights[i];
    add_values(state, seat, place);
    return last;
}

// ---- The end of an item

// What each warp knows about totals and largest products, for everybody.
__device__ __forceinline__ void share_totals(const State& state, const Seat& seat) {
#pragma unroll
    for (int i = 0; i < 2 * OCTETS; ++i) {
        const float total = sum_of_head(state.total[i / 2][i % 2]), top = max_of_head(state.top[i / 2][i % 2]);
        if (seat.row == 0) {
            store_number(seat.shares(0) + 32 * (i / 2) + 4 * (i % 2), total);
            store_number(seat.shares(1) + 32 * (i / 2) + 4 * (i % 2), top);
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

// What sums of the tile with this warp's number are to be multiplied with, for the head with this lane's number; and row
// `at` of lse and maxima.
__device__ __forceinline__ void normalise(const Seat& seat, const Result& result, long long at, int heads) {
    if (seat.team != 0 || seat.lane >= HEADS) return;
    const u32 numbers = seat.memory + 4 * seat.lane, tile = seat.warp * PER_HEAD;
    float total = 0.0f, top = minus_infinity();
#pragma unroll
    for (int warp = 0; warp < CONSUMERS / 32; ++warp) {
        total += load_number(numbers + SHARES + warp * KINDS * PER_HEAD);
        top = fmaxf(top, load_number(numbers + SHARES + (warp * KINDS + 1) * PER_HEAD));
    }
    const bool empty = total == 0.0f, exists = seat.lane < heads;
    const float reference = load_number(numbers + REFERENCES);
    const float lse = empty ? minus_infinity() : (reference + fast_log2(total)) * LN_2;
    float factor = empty ? 0.0f : 1.0f / (total * load_number(numbers + FACTORS + tile));
    if (result.sink != nullptr && !empty && exists) {
        factor *= 1.0f / (1.0f + fast_exp2((result.sink[seat.lane] - lse) * LOG2_E));
    }
    store_number(numbers + CHANGES + tile, factor);
    if (exists && seat.warp == 0) {
        result.lse[at * heads + seat.lane] = lse;
        result.maxima[at * heads + seat.lane] = empty ? minus_infinity() : top * load_number(numbers + UNITS) * LN_2;
    }
}

// Writes row `at` of a result.
__device__ __forceinline__ void store(const State& state, const Seat& seat, const Result& result, long long at, int heads) {
    const int first_column = TILE * OWN_TILES * seat.team + 32 * seat.warp + 2 * seat.row;
    const long long start = at * result.token_stride + 2 * seat.pair * result.head_stride + first_column;
#pragma unroll
    for (int head = 0; head < 2 * OCTETS; ++head) {
        const int octet = head / 2, next = head % 2;
        if (8 * octet + 2 * seat.pair + next >= heads) continue;
        const long long offset = start + (8 * octet + next) * result.head_stride;
#pragma unroll
        for (int block = 0; block < BLOCKS; ++block) {
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
    const float* scale_factor, int tokens, int heads, int whole, int parts, int part_columns) {
    const u32 memory = tiles_start();
    if (threadIdx.x < STAGES) {
        barrier_init(memory + BARRIERS + 16 * threadIdx.x, 1);
        barrier_init(memory + BARRIERS + 16 * threadIdx.x + 8, CONSUMERS / 32);
        publish_barriers();
    }
    __syncthreads();
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int items = whole + (tokens - whole) * parts;
    const Work work = {rows, page_stride, page_size, pages, slots, slots_token_stride, slots_column_stride, columns,
                       lengths, request_ids, block_table, table_stride, table_width, requests, whole, items, parts,
                       part_columns};
    Place place(memory + RING, memory + BARRIERS, memory + NOTES, 0);
    if (threadIdx.x >= CONSUMERS) {
        give_registers<PRODUCER_REGISTERS>();
        produce(work, 0, threadIdx.x / 32 - CONSUMERS / 32, place);
        return;
    }
    take_registers<CONSUMER_REGISTERS>();
    const Seat seat(memory);
    const float logit_scale = (scale_factor == nullptr ? scale : scale * *scale_factor) * LOG2_E;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int token = work.token_of(item);
        State state;
        state.clear();
        load_query(q + token * q_token_stride, q_head_stride, heads, logit_scale, seat);
        bool first = true;
        while (!process(state, seat, place, first)) first = false;
        // Parts are float32 [parts, tokens that are not whole, heads, values]; the sink is for whoever merges them.
        const bool direct = item < whole;
        const Result result = {direct ? out : parts_out,
                               direct ? out_kind : 0,
                               direct ? out_token_stride : static_cast<long long>(heads) * TILES * TILE,
                               direct ? out_head_stride : TILES * TILE,
                               direct ? lse : parts_lse,
                               direct ? maxima : parts_maxima,
                               direct ? sink : nullptr};
        const long long row = static_cast<long long>(work.part_of(item)) * (tokens - whole) + token - whole;
        const long long at = direct ? token : row;
        share_totals(state, seat);
        seat.sync();
        normalise(seat, result, at, heads);
        seat.sync();
        state.multiply(seat);
        store(state, seat, result, at, heads);
    }
}
