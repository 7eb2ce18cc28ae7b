// FP8 rows to fp16 tiles: the warps that copy rows and widen them. Comes after the shapes, shared memory and arithmetic of
// `many_heads.cu`, and `items.cuh`.

// Brings the eight rows of a warp, in two pieces: the second is the first 256 bytes.
struct Fetch {
    u32 raw;  // where they go
    int lane;
    Follower follower;  // of row lane % 8
    const unsigned char *row, *exponents;  // that come next
    const unsigned char* from[2];  // of rows lane / 8 and lane / 8 + 4: eight lanes copy 128 bytes
    u32 present;  // a bit for each row

    template <int START, int UNITS>
    __device__ __forceinline__ void copy() const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // One address for all units, which differ by constants.
            const u32 target = raw + (lane / 8 + 4 * i) * RAW_BYTES + lane % 8 * 16;
            const unsigned char* const source = from[i] + lane % 8 * 16;
            const bool there = from[i] != nullptr;
#pragma unroll
            for (int unit = 0; unit < UNITS; unit += 8) {
                const int at = START + unit * 16;
                if (unit + 8 <= UNITS || unit + lane % 8 < UNITS) cp_async_zfill<16>(target + at, source + at, there);
            }
        }
    }

    __device__ __forceinline__ void look_up() { row = follower.next(exponents); }

    __device__ __forceinline__ void first() {
        if (!LOOKS_AHEAD) look_up();
        present = __ballot_sync(FULL_MASK, row != nullptr);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto address = reinterpret_cast<unsigned long long>(row);
            const u32 low = __shfl_sync(FULL_MASK, static_cast<u32>(address), lane / 8 + 4 * i);
            const u32 high = __shfl_sync(FULL_MASK, static_cast<u32>(address >> 32), lane / 8 + 4 * i);
            from[i] = reinterpret_cast<const unsigned char*>(static_cast<unsigned long long>(high) << 32 | low);
        }
        copy<SECOND_BYTES, (ROW_BYTES - SECOND_BYTES) / 16>();
        if (V4 && lane < OWN) cp_async_zfill<8>(raw + lane * RAW_BYTES + SCALES_AT, exponents, row != nullptr);
        cp_async_commit();
    }

    __device__ __forceinline__ void second() {
        copy<0, SECOND_BYTES / 16>();
        cp_async_commit();
    }
};

// Eight e4m3 to fp16 under a scale.
__device__ __forceinline__ uint4 widen(uint2 bytes, u32 scale) {
    uint4 v;
    e4m3x4_to_fp16(bytes.x, v.x, v.y);
    e4m3x4_to_fp16(bytes.y, v.z, v.w);
    return make_uint4(mul_fp16x2(v.x, scale), mul_fp16x2(v.y, scale), mul_fp16x2(v.z, scale),
                      mul_fp16x2(v.w, scale));
}

__device__ __forceinline__ u32 narrow(u32 bfloat_pair, float factor) {
    return pack_fp16(low_bfloat(bfloat_pair) * factor, high_bfloat(bfloat_pair) * factor);
}

// Eight bf16 to fp16, and as they are, times a power of two.
__device__ __forceinline__ uint4 narrow(uint4 bfloats, float factor) {
    return make_uint4(narrow(bfloats.x, factor), narrow(bfloats.y, factor), narrow(bfloats.z, factor), narrow(bfloats.w, factor));
}

__device__ __forceinline__ uint4 times(uint4 bfloats, float factor) {
    const u32 pair = __byte_perm(__float_as_uint(factor), 0, 0x3232);
    return make_uint4(mul_bf16x2(bfloats.x, pair), mul_bf16x2(bfloats.y, pair), mul_bf16x2(bfloats.z, pair),
                      mul_bf16x2(bfloats.w, pair));
}

// The largest magnitude of eight bf16, as 15 bits; they are in the order of their bits, NaN above all.
__device__ __forceinline__ u32 largest(uint4 bfloats) {
    constexpr u32 MAGNITUDES = 0x7FFF7FFF;
    const u32 pairs = __vmaxu2(__vmaxu2(bfloats.x & MAGNITUDES, bfloats.y & MAGNITUDES),
                               __vmaxu2(bfloats.z & MAGNITUDES, bfloats.w & MAGNITUDES));
    return max(pairs & 0xFFFF, pairs >> 16);
}

// What a lane knows of a row: scales as fp16, or exponent bytes, and the power of two that they leave out. Where a scale is
// far below the row's others, fp16 would not hold it: a negative one is to be multiplied with -2**-14.
struct Scales {
    uint2 words;    // two scales in each, or four exponents
    int exponent;   // biased, of the row's power of two plus SCALE_EXPONENT

    // Where fp16 holds all of them in full, two exponents become those of fp16 at a time.
    template <bool SMALL>
    __device__ __forceinline__ u32 of_tile(int tile) const {
        const u32 word = tile < 4 ? words.x : words.y;
        if (!V4) return __byte_perm(word, 0, tile % 4 < 2 ? 0x1010 : 0x3232);
        if (SMALL) {
            const int byte = word >> 8 * (tile % 4) & 0xFF;
            const float scale = power_of_two(max(127 + SCALE_EXPONENT + byte - exponent, 0));
            return pack_fp16(scale, scale);
        }
        const u32 two = __byte_perm(word, 0, tile % 4 < 2 ? 0x4140 : 0x4342) - (exponent - SCALE_EXPONENT - 15) * 0x10001;
        return __byte_perm(two << 10, 0, tile % 2 ? 0x3232 : 0x1010);
    }

    __device__ __forceinline__ bool any_negative() const { return ((words.x | words.y) & 0x80008000u) != 0; }
    __device__ __forceinline__ float left_out() const { return power_of_two(exponent - SCALE_EXPONENT); }
    __device__ __forceinline__ float inverse() const { return power_of_two(254 + SCALE_EXPONENT - exponent); }
};

// The four scales of a row, or its seven exponents, as they lie there.
struct RawScales {
    uint4 bits;
    int largest, smallest;  // exponents, with float32's bias

    __device__ __forceinline__ explicit RawScales(u32 row) {
        if (V4) {
            const uint2 bytes = shared_load2(row + SCALES_AT);
            const u32 a = __byte_perm(bytes.x, 0, 0x4140), b = __byte_perm(bytes.x, 0, 0x4342);
            const u32 c = __byte_perm(bytes.y, 0, 0x4140), last = bytes.y >> 16 & 0xFF;
            const u32 above = __vmaxu2(__vmaxu2(a, b), __vmaxu2(c, last));
            const u32 below = __vminu2(__vminu2(a, b), __vminu2(c, last * 0x10001));
            bits = make_uint4(bytes.x, bytes.y, 0, 0);
            largest = max(above & 0xFFFF, above >> 16);
            smallest = min(below & 0xFFFF, below >> 16);
        } else {
            bits = shared_load4(row + SCALES_AT);
            largest = max(max(bits.x, bits.y), max(bits.z, bits.w)) >> 23;
            smallest = min(min(bits.x, bits.y), min(bits.z, bits.w)) >> 23;
        }
        largest = max(largest, LOWEST_EXPONENT);
    }

    // Whether fp16 holds all scales, times the row's power of two, in full.
    __device__ __forceinline__ bool fits(int exponent) const { return smallest >= exponent - SCALE_EXPONENT - 14; }

    template <bool SMALL>
    __device__ __forceinline__ Scales times(int exponent) const {
        Scales scales = {make_uint2(bits.x, bits.y), exponent};
        if (V4) return scales;
        const float inverse = scales.inverse();
        const auto kept = [&](u32 word) {
            const float scale = __uint_as_float(word) * inverse;
            return SMALL && scale > 0.0f && scale < power_of_two(127 - 14) ? scale * -power_of_two(127 + 14) : scale;
        };
        scales.words = make_uint2(pack_fp16(kept(bits.x), kept(bits.y)), pack_fp16(kept(bits.z), kept(bits.w)));
        return scales;
    }
};

// Of a lane's two rows, its unit of 8 columns in four tiles or fewer, as they came.
template <int TILES>
struct Codes {
    uint2 bytes[TILES][2];

    __device__ __forceinline__ void load(const u32 (&source)[2], int first) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) bytes[tile][i] = shared_load2(source[i] + (first + tile) * 64);
        }
    }

    template <bool SMALL>
    __device__ __forceinline__ void store_wide(u32 to, const u32 (&target)[2], const Scales (&scales)[2], int first) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                shared_store4(to + tile * TILE_BYTES + target[i], widen(bytes[tile][i], scales[i].template of_tile<SMALL>(first + tile)));
            }
        }
    }
};

// What is left to do to a lane's units in a half, where their scales are negative.
__device__ __forceinline__ void finish_small(u32 to, const u32 (&target)[2], const Scales (&scales)[2], int first) {
    if (!scales[0].any_negative() && !scales[1].any_negative()) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int tile = 0; tile < 4; tile += 2) {
            if (static_cast<int>(scales[i].template of_tile<true>(first + tile)) >= 0) continue;
            constexpr u32 STEP = 0x84008400;  // -2**-14
            const u32 end = to + (tile + 2) * TILE_BYTES;
#pragma unroll 1
            for (u32 at = to + tile * TILE_BYTES + target[i]; at < end; at += TILE_BYTES) {
                const uint4 v = shared_load4(at);
                shared_store4(at, make_uint4(mul_fp16x2(v.x, STEP), mul_fp16x2(v.y, STEP), mul_fp16x2(v.z, STEP),
                                             mul_fp16x2(v.w, STEP)));
            }
        }
    }
}

template <int TILES>
__device__ __forceinline__ void store_half(
    const Codes<TILES>& codes, u32 to, const u32 (&target)[2], const Scales (&scales)[2], int first, bool small) {
    if (V4 && small) codes.template store_wide<true>(to, target, scales, first);
    else codes.template store_wide<false>(to, target, scales, first);
    if (!V4 && small) finish_small(to, target, scales, first);
}

__device__ __forceinline__ void widen_rows(u32 memory, const Work& work) {
    const int warp = threadIdx.x / 32 % WIDENERS, lane = threadIdx.x % 32, blocks = work.end - work.begin;
    const u32 raw = memory + RAW + warp * OWN * RAW_BYTES;
    Fetch fetch = {raw, lane, Follower(work, warp * OWN + lane % OWN)};
    if (LOOKS_AHEAD) fetch.look_up();
    fetch.first();
    fetch.second();
    // A lane works on two rows, on the unit of 8 columns that is its own in every tile. Rows 4 apart share a wave of loads.
    const int unit = lane % 8, row = 4 * (lane / 8 % 2) + lane / 16;
    u32 source[2], target[2];  // of its rows as they came, of its units in a tile
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        source[i] = raw + (row + 2 * i) * RAW_BYTES + unit * 8;
        target[i] = in_tile(warp * OWN + row + 2 * i, unit);
    }
    Half here;
    const auto take = [&] { mbarrier_wait(here.free(memory), here.parity ^ 1); };
    const auto hand_over = [&] {
        fence_async_proxy();
        __syncwarp();
        if (unit == 0) mbarrier_arrive(here.ready(memory));  // the lanes that write factors
        here = here.after(1);
    };
    for (int block = 0; block < blocks; ++block) {
        const u32 leftover = block % LEFTOVERS, present = fetch.present;
        if (LOOKS_AHEAD) fetch.look_up();
        cp_async_wait<1>();
        __syncwarp();
        const RawScales raw_scales[2] = {RawScales(source[0] - unit * 8), RawScales(source[1] - unit * 8)};
        int exponents[2] = {raw_scales[0].largest, raw_scales[1].largest};
        if (V4) {
            u32 tops = largest(shared_load4(source[0] + ROPE_AT + 8 * unit));
            tops |= largest(shared_load4(source[1] + ROPE_AT + 8 * unit)) << 16;
#pragma unroll
            for (int step = 1; step < 8; step *= 2) tops = __vmaxu2(tops, __shfl_xor_sync(FULL_MASK, tops, step));
            exponents[0] = max(exponents[0], static_cast<int>(tops >> 7 & 0x1FF) - (VALUE_EXPONENT - SCALE_EXPONENT));
            exponents[1] = max(exponents[1], static_cast<int>(tops >> 23) - (VALUE_EXPONENT - SCALE_EXPONENT));
        }
        const bool small = __any_sync(FULL_MASK, !raw_scales[0].fits(exponents[0]) || !raw_scales[1].fits(exponents[1]));
        Scales scales[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] = raw_scales[i].times<false>(exponents[i]);
        if (!V4 && small) {
#pragma unroll
            for (int i = 0; i < 2; ++i) scales[i] = raw_scales[i].times<true>(exponents[i]);
        }

        // The weights of two blocks ago may lie where the columns beyond 512 go; they are freed with this half.
        Codes<LATENT / 64 - 4> upper;
        if (!V4) upper.load(source, 4);
        take();
        if (unit == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int own = row + 2 * i;
                const u32 at = memory + FACTOR + (leftover * STEP_ROWS + warp * OWN + own) * 8;
                // An exponent of 255 is no number; neither are the row's logits, then.
                store_float(at, scales[i].exponent == 255 ? __uint_as_float(0x7FC00000u) : scales[i].left_out());
                store_float(at + 4, present >> own & 1 ? 0.0f : minus_infinity());
            }
        }
        const u32 rope_to = V4 ? here.tiles(memory) + 3 * TILE_BYTES : memory + LEFTOVER + leftover * TILE_BYTES;
        if (V4) upper.load(source, 4);
        store_half(upper, here.tiles(memory), target, scales, 4, small);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 x = shared_load4(source[i] + ROPE_AT + 8 * unit);  // in V4 again, as registers are few
            shared_store4(rope_to + target[i], V4 ? narrow(x, scales[i].inverse()) : times(x, scales[i].inverse()));
        }
        hand_over();

        if (block + 1 < blocks) fetch.first();
        else cp_async_commit();
        cp_async_wait<1>();
        __syncwarp();
        Codes<4> lower;
        lower.load(source, 0);
        take();
        store_half(lower, here.tiles(memory), target, scales, 0, small);
        hand_over();
        if (block + 1 < blocks) fetch.second();
        else cp_async_commit();
    }
    cp_async_wait<0>();
}
