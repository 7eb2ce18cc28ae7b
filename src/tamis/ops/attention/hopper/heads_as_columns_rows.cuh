// What heads as columns do with a team's 64 rows: products with keys, weights, and products with values. Comes after the
// shapes, seats and queries of `heads_as_columns.cu`.

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
    const int lane = opaque(seat.lane);
    const u32 at = keys + lane % 16 * PITCH + 16 * (lane / 16);
    const unsigned long long query = k_major(seat.memory + QUERY);
    u32 codes[KEYS_AHEAD][4], fragments[2][2][4];
    const auto load = [&](int step) { ldmatrix_x4(codes[step % KEYS_AHEAD], at + 32 * step); };
    const auto widen_codes = [&](int step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            u32(&fragment)[4] = fragments[step % 2][i / 2];
            e4m3x4_to_fp16(codes[step % KEYS_AHEAD][i], fragment[i % 2], fragment[i % 2 + 2]);
        }
        if (step + KEYS_AHEAD < STEPS) load(step + KEYS_AHEAD);
    };
    {
        u32 rope[4][4];
#pragma unroll
        for (int step = 0; step < 4; ++step) ldmatrix_x4(rope[step], at + ROPE + 32 * step);
#pragma unroll
        for (int i = 0; i < KEYS_AHEAD; ++i) load(i);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int part = 0; part < ROPE_PARTS; ++part) {
                wgmma_rs<BF16>(
                    logits, rope[step], advance(query, (8 + part) * HEAD_TILE + 32 * step), step + part > 0);
            }
        }
        wgmma_commit();
        widen_codes(0);
    }
    float products[RESULTS];  // of a tile
#pragma unroll
    for (int here = 0; here < STEPS; ++here) {
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 further = here / 2 * HEAD_TILE + 64 * (here % 2) + 32 * i;
            wgmma_rs<FP16>(products, fragments[here % 2][i], advance(query, further), here % 4 + i > 0);
        }
        wgmma_commit();
        if (here + 1 < STEPS) {
            wgmma_wait<1>();  // with the fragments that come next
            widen_codes(here + 1);
        }
        if (here % 4 < 3) continue;
        const float2 scales = scales_of(seat, keys, here / 4);
        if (here == 3) wgmma_wait<0>(logits);
        wgmma_wait<0>(products);
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
                packed[i] = pack_fp16(w[first] * factor.x * scale, w[first + 1] * factor.y * scale);
                magnitudes = max_abs_fp16x2(magnitudes, packed[i]);
            }
            stmatrix_x4_trans(to + tile * HEAD_TILE + octets * 8 * 128, packed);
        }
    }
    return highest <= WEIGHT_BITS && (magnitudes & 0x7C00) != 0x7C00 && (magnitudes >> 16 & 0x7C00) != 0x7C00;
}

// The largest over the lanes that share a head.
__device__ __forceinline__ float max_of_head(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, step));
    return x;
}

__device__ __forceinline__ float sum_of_head(float x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(FULL_MASK, x, step);
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
    const int lane = opaque(seat.lane);
    const u32 offset = lane % 16 * PITCH + 32 * seat.warp + 16 * (lane / 16);
    const unsigned long long weights = k_major(seat.weights());
    u32 codes[VALUES_AHEAD][4];
    const auto load = [&](int step) {
        const u32 at = stages[step / STEPS].rows() + offset;
        ldmatrix_x4_trans(codes[step % VALUES_AHEAD], at + step / TILES % 2 * 16 * PITCH + TILE * (step % TILES));
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
            e4m3x4_to_fp16(ordered, fragment[2 * (i % 2)], fragment[2 * (i % 2) + 1]);
        }
        if (here + VALUES_AHEAD < TURN * STEPS) load(here + VALUES_AHEAD);
        if (here % STEPS == STEPS - 1) {
            __syncwarp();
            if (seat.lane == 0) mbarrier_arrive(stages[here / STEPS].empty());
        }
        const int tile = here % TILES, sixteen = here / TILES;
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 further = tile * HEAD_TILE + 32 * sixteen;
            wgmma_rs<FP16>(state.sums[2 * tile + i], fragments[i], advance(weights, further), 1);
        }
        wgmma_commit();
        wgmma_wait<2>();
    }
    seat.pass(VALUES_TURN);
#pragma unroll
    for (int i = 0; i < BLOCKS; ++i) wgmma_wait<0>(state.sums[i]);
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
    for (int i = 0; i < TURN; ++i) mbarrier_wait(stages[i].full(), stages[i].parity);
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
        fence_async_proxy();
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
