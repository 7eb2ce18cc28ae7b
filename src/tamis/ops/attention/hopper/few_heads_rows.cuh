// What few heads do with a stage of rows: products with keys, shared between warps, weights, and products with values. Comes
// after the shapes, seats and queries of `few_heads.cu`.

// A warp's share of an item: 16 heads times a tile of values.
struct State {
    // By 16 columns of the tile; a lane has two pairs of them for each of its two heads. Those of FP8 rows are at
    // [even or odd][2 * half of the heads + first or second pair], those of bf16 rows at
    // [first or second pair][2 * half of the heads + even or odd].
    float sums[STEPS][2][4];
    float reference[2], total[2];
    float top[2];  // largest product of query and key

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[step][0][i] = sums[step][1][i] = 0.0f;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            reference[half] = NO_REFERENCE;
            total[half] = 0.0f;
            top[half] = minus_infinity();
        }
    }

    __device__ __forceinline__ void multiply(int half, float factor) {
        total[half] *= factor;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[step][i / 2][2 * half + i % 2] *= factor;
        }
    }
};

// The rope part's share of the products of a stage's keys and queries.
__device__ __forceinline__ void multiply_rope(
    const Query& query, const Seat& seat, u32 rows, float (&products)[SLABS][4]) {
    const int row = seat.lane % 8, matrix = seat.lane / 8;
    const u32 rope = rows + (row + matrix / 2 * 8) * PITCH + ROPE + 32 * seat.warp + 16 * (matrix % 2);
#pragma unroll
    for (int slab = 0; slab < SLABS; slab += 2) {
        u32 keys[4];
        ldmatrix_x4(keys, rope + slab * 8 * PITCH);
#pragma unroll
        for (int part = 0; part < ROPE_PARTS; ++part) {
            mma_m16n8k16<BF16>(products[slab], query.rope[part], keys[0], keys[1]);
            mma_m16n8k16<BF16>(products[slab + 1], query.rope[part], keys[2], keys[3]);
        }
    }
}

// The share of a tile of bf16 numbers.
__device__ __forceinline__ void multiply_numbers(const Query& query, u32 tile, float (&products)[SLABS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            u32 keys[4];
            ldmatrix_x4(keys, tile + slab * 8 * PITCH + 32 * step);
            mma_m16n8k16<BF16>(products[slab], query.latent[step], keys[0], keys[1]);
            mma_m16n8k16<BF16>(products[slab], query.latent[step + 1], keys[2], keys[3]);
        }
    }
}

// The share of a tile of codes, without its scale.
__device__ __forceinline__ void multiply_codes(const Query& query, u32 tile, float (&products)[SLABS][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 codes[SLABS][4];
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) ldmatrix_x4(codes[slab], tile + slab * 8 * PITCH + 64 * half);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
                u32 first, second;
                e4m3x4_to_fp16(codes[slab][step], first, second);
                mma_m16n8k16<FP16>(products[slab], query.latent[4 * half + step], first, second);
            }
        }
    }
}

// This warp's share of the products of a stage's keys and queries.
__device__ __forceinline__ void multiply_keys(
    const Query& query, const Seat& seat, u32 rows, const float (&scales)[SLABS][2], float (&products)[SLABS][4]) {
    const u32 tile = rows + seat.lane % 8 * PITCH + TILE_BYTES * seat.warp + 16 * (seat.lane / 8);
    float latent_products[SLABS][4];
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
        for (int i = 0; i < 4; ++i) products[slab][i] = latent_products[slab][i] = 0.0f;
    }
    multiply_rope(query, seat, rows, products);
    if (BF16_ROWS) {
        multiply_numbers(query, tile, products);
        return;
    }
    multiply_codes(query, tile, latent_products);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            products[slab][i] = fmaf(latent_products[slab][i], scales[slab][i % 2], products[slab][i]);
        }
    }
}

// Adds up the shares of a team's warps, every warp for itself.
__device__ __forceinline__ void add_shares(const Seat& seat, u32 buffer, float (&products)[SLABS][4]) {
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
        const float(&p)[4] = products[slab];
        shared_store4(buffer + (seat.warp * SLABS + slab) * FRAGMENT + 16 * seat.lane, bits_of(p[0], p[1], p[2], p[3]));
    }
    seat.sync_team();
#pragma unroll
    for (int other = 1; other < TEAM_WARPS; ++other) {
        const u32 theirs = buffer + (seat.warp + other) % TEAM_WARPS * SLABS * FRAGMENT + 16 * seat.lane;
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
            const uint4 share = shared_load4(theirs + slab * FRAGMENT);
            products[slab][0] += __uint_as_float(share.x);
            products[slab][1] += __uint_as_float(share.y);
            products[slab][2] += __uint_as_float(share.z);
            products[slab][3] += __uint_as_float(share.w);
        }
    }
}

// Moves the references to where the largest weight of a stage is 2^START_BITS; they never move down.
__device__ __forceinline__ void move_references(
    State& state, const float (&products)[SLABS][4], const float (&scales)[SLABS][2], const float (&units)[2]) {
    float highest[2] = {NO_REFERENCE, NO_REFERENCE};
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scale_bits = fmaxf(fast_log2(fabsf(scales[slab][i % 2])), LEAST_SCALE_BITS);
            highest[i / 2] = fmaxf(highest[i / 2], fmaf(products[slab][i], units[i / 2], scale_bits));
        }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float moved = fmaxf(state.reference[half], max_of_head(highest[half]) - START_BITS);
        state.multiply(half, fast_exp2(state.reference[half] - moved));
        state.reference[half] = moved;
    }
}

// From products to weights times scales, as operands; adds to the totals.
__device__ __forceinline__ void weigh(
    State& state, const float (&products)[SLABS][4], const float (&scales)[SLABS][2], const float (&units)[2],
    u32 (&weights)[SLABS / 2][WEIGHT_PARTS][4]) {
    // Looked at before anything depends on it, by bounds: the largest logit of a lane with its largest scale. Where these
    // belong to different rows, the references are looked at and stay.
    float highest[2] = {minus_infinity(), minus_infinity()}, largest_scale = 0.0f;
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
        for (int i = 0; i < 4; ++i) highest[i / 2] = fmaxf(highest[i / 2], products[slab][i]);
        largest_scale = fmaxf(largest_scale, fmaxf(fabsf(scales[slab][0]), fabsf(scales[slab][1])));
    }
    const float room = BF16_ROWS ? LARGEST_BITS : fminf(LARGEST_BITS - fast_log2(largest_scale), LARGEST_TOTAL_BITS);
    bool fits = true;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        state.top[half] = fmaxf(state.top[half], highest[half]);
        fits = fits && fmaf(highest[half], units[half], -state.reference[half]) <= room;
    }
    if (__any_sync(FULL_MASK, !fits)) move_references(state, products, scales, units);
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
        float scaled[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float weight = fast_exp2(fmaf(products[slab][i], units[i / 2], -state.reference[i / 2]));
            state.total[i / 2] += weight;
            scaled[i] = weight * scales[slab][i % 2];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            u32(&parts)[WEIGHT_PARTS][4] = weights[slab / 2];
            const int at = 2 * (slab % 2) + half;
            const float first = scaled[2 * half], second = scaled[2 * half + 1];
            if (BF16_ROWS) {
                const u32 most = pack_bf16(first, second);
                parts[0][at] = most;
                parts[WEIGHT_PARTS - 1][at] =
                    pack_bf16(first - __uint_as_float(most << 16), second - __uint_as_float(most & 0xFFFF0000u));
            } else {
                parts[0][at] = pack_fp16(first, second);
            }
        }
    }
}

// Rows of codes, read as 16-bit numbers, come transposed: a word has two columns of one row, then of the next. Put in
// order, they are two rows of the even column and two of the odd one.
__device__ __forceinline__ void add_codes(State& state, u32 tile, const u32 (&weights)[4]) {
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
        u32 codes[4];
        ldmatrix_x4_trans(codes, tile + 16 * step);
#pragma unroll
        for (int next = 0; next < 2; ++next) {
            u32 even[2], odd[2];
#pragma unroll
            for (int slab = 0; slab < 2; ++slab) {
                e4m3x4_to_fp16(__byte_perm(codes[2 * next + slab], 0, 0x3120), even[slab], odd[slab]);
            }
            mma_m16n8k16<FP16>(state.sums[step + next][0], weights, even[0], even[1]);
            mma_m16n8k16<FP16>(state.sums[step + next][1], weights, odd[0], odd[1]);
        }
    }
}

__device__ __forceinline__ void add_numbers(State& state, u32 tile, const u32 (&weights)[WEIGHT_PARTS][4]) {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        u32 values[4];
        ldmatrix_x4_trans(values, tile + 32 * step);
#pragma unroll
        for (int part = 0; part < WEIGHT_PARTS; ++part) {
            mma_m16n8k16<BF16>(state.sums[step][0], weights[part], values[0], values[1]);
            mma_m16n8k16<BF16>(state.sums[step][1], weights[part], values[2], values[3]);
        }
    }
}

__device__ __forceinline__ void add_values(
    State& state, const Seat& seat, u32 rows, const u32 (&weights)[SLABS / 2][WEIGHT_PARTS][4]) {
    const int row = seat.lane % 8, matrix = seat.lane / 8;
    const u32 tile = rows + (row + matrix % 2 * 8) * PITCH + TILE_BYTES * seat.warp + 16 * (matrix / 2);
#pragma unroll
    for (int slabs = 0; slabs < SLABS / 2; ++slabs) {
        if (BF16_ROWS) {
            add_numbers(state, tile + slabs * 16 * PITCH, weights[slabs]);
        } else {
            add_codes(state, tile + slabs * 16 * PITCH, weights[slabs][0]);
        }
    }
}

__device__ __forceinline__ void process_stage(
    State& state, const Query& query, const Seat& seat, u32 rows, u32 counted, u32 buffer, const float (&units)[2]) {
    float scales[SLABS][2], products[SLABS][4];  // bf16 rows have scales of one, of which the compiler leaves nothing
#pragma unroll
    for (int slab = 0; slab < SLABS; ++slab) {
        const u32 at = rows + (8 * slab + 2 * seat.pair) * PITCH + SCALES + 4 * seat.warp;
        scales[slab][0] = BF16_ROWS ? 1.0f : __uint_as_float(shared_load(at));
        scales[slab][1] = BF16_ROWS ? 1.0f : __uint_as_float(shared_load(at + PITCH));
    }
    multiply_keys(query, seat, rows, scales, products);
    add_shares(seat, buffer, products);
    if (counted != FULL_MASK) {
#pragma unroll
        for (int slab = 0; slab < SLABS; ++slab) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (!(counted >> (8 * slab + 2 * seat.pair + i % 2) & 1)) products[slab][i] = minus_infinity();
            }
        }
    }
    u32 weights[SLABS / 2][WEIGHT_PARTS][4];
    weigh(state, products, scales, units, weights);
    add_values(state, seat, rows, weights);
}
