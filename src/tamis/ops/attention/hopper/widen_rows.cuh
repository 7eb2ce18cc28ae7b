// Producers of `many_heads.cu`: FP8 rows from global memory to fp16 tiles in the stages of the ring.
//
// A producer warp has eight rows of every block, whose 1,024 bytes of each tile no other warp touches. It copies the codes of
// 128 columns into the first of the two tiles that they will fill, loads them into registers when they have arrived, and
// stores fp16 numbers over them, so that codes need no room of their own.
//
// Numbers. A row is stored as fp16 numbers that are multiplied with 2**E. E follows from the largest of the row's scales
// and, in V4, of its bf16 values, so that its largest values lie just below fp16's largest; an e4m3 value times a power of
// two is exact down to 2**-30 of that. V3.2's bf16 columns, which are only keys, stay bf16 and are multiplied with 2**-E,
// which is at most 2**66.
#pragma once
#ifndef POLL
#define POLL 0
#endif
#ifndef NOFENCE
#define NOFENCE 0
#endif
#ifndef AHEAD
#define AHEAD 0
#endif
#include "items.cuh"
#include "scaled_numbers.cuh"
#include "stages.cuh"
#include "tiles.cuh"

// ---- Copies

// Copies a producer warp's eight rows of a block. Eight lanes copy 128 bytes of a row at a time; a lane copies one 16-byte unit
// of the rows lane / 8 and lane / 8 + 4.
struct RowCopier {
    int warp, lane;
    RowWalker<SELECTIONS, ROW_BYTES> walker;  // of row lane % 8
    const unsigned char* row = nullptr;       // row lane % 8 of the block that is copied next
    u32 to_exponents = 0;                     // from that row to its scale exponents
    const unsigned char* from[2] = {};        // this lane's units of both rows; null if a row does not exist
    u32 present = 0;                          // a bit for each row that exists
    // Addresses for row lane / 8 of the first tile of the ring. All others differ from them by constants.
    u32 copied_to;   // where this lane copies 16 codes of 128 columns
    u32 codes_at[2];  // where it loads its unit of eight codes of each tile
    u32 units_at[2];  // where its unit of eight numbers is, for i = 0 and, less 512, for i = 1

    __device__ __forceinline__ RowCopier(u32 memory, const Work<SELECTIONS>& work, int warp, int lane)
        : warp(warp), lane(lane), walker(work, warp * WARP_ROWS + lane % WARP_ROWS) {
        // The codes of odd rows are swapped by 64 bytes, so that loads of two neighbouring rows lie in different banks.
        const u32 row = memory + RING + warp * 1024 + lane / 8 * 128, swap = lane / 8 % 2 * 64;
        copied_to = row + (lane % 8 * 16 ^ swap);
        codes_at[0] = row + (lane % 8 * 8 ^ swap);
        codes_at[1] = row + (lane % 8 * 8 ^ swap ^ 64);
        units_at[0] = row + (lane % 8 ^ lane / 8) * 16;
        units_at[1] = row + (lane % 8 ^ lane / 8 ^ 4) * 16;
    }

    const unsigned char* ahead = nullptr;
    u32 ahead_exponents = 0;
    __device__ __forceinline__ void fetch_ahead() {
        ahead = walker.next(ahead_exponents);
        if (ahead != nullptr) {
            prefetch_l2(ahead + lane / 8 * 128);
            if (lane / 8 * 128 + 512 < ROW_BYTES) prefetch_l2(ahead + lane / 8 * 128 + 512);
        }
    }

    // Finds the rows of the next block, and lets every lane know those that it copies.
    __device__ __forceinline__ void look_up() {
#if AHEAD
        row = ahead;
        to_exponents = ahead_exponents;
#else
        row = walker.next(to_exponents);
#endif
        present = __ballot_sync(FULL_MASK, row != nullptr);
        const auto address = reinterpret_cast<unsigned long long>(row);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const u32 low = __shfl_sync(FULL_MASK, static_cast<u32>(address), lane / 8 + 4 * i);
            const u32 high = __shfl_sync(FULL_MASK, static_cast<u32>(address >> 32), lane / 8 + 4 * i);
            const auto whole = static_cast<unsigned long long>(high) << 32 | low;
            from[i] = whole == 0 ? nullptr : reinterpret_cast<const unsigned char*>(whole) + lane % 8 * 16;
        }
    }

    // Copies scales and bf16 columns. V3.2's columns go where they stay.
    __device__ __forceinline__ void copy_first(u32 memory, int stage) const {
        const u32 scales = memory + SCALES + (stage % SCALE_STAGES * BLOCK_ROWS + warp * WARP_ROWS + lane) * SCALE_BYTES;
        if (lane < WARP_ROWS) {
            if (V4) cp_async_zfill<8>(scales, row + to_exponents, row != nullptr);
            else cp_async_zfill<16>(scales, row + LATENT, row != nullptr);
        }
#pragma unroll
        for (int i = 0; i < (TAIL_COLUMNS ? 2 : 0); ++i) {
            cp_async_zfill<16>(tail(stage, i), from[i] + TAIL_AT, from[i] != nullptr);
        }
        cp_async_commit();
    }

    // Copies the codes of a quarter of the values.
    __device__ __forceinline__ void copy_quarter(int stage, int quarter) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (V4 && quarter == 3 && lane % 8 >= 4) continue;
            cp_async_zfill<16>(copied_to + tile(stage, quarter * 2) + i * 512, from[i] + quarter * 128, from[i] != nullptr);
        }
        cp_async_commit();
    }

    // The offset of a tile in the ring.
    static __device__ __forceinline__ u32 tile(int stage, int tile) { return stage * STAGE_BYTES + tile * TILE_BYTES; }

    __device__ __forceinline__ uint2 codes(int stage, int quarter, int half, int i) const {
        return shared_load2(codes_at[half] + tile(stage, quarter * 2) + i * 512);
    }

    // The address of this lane's unit of row lane / 8 + 4 * i in a tile.
    __device__ __forceinline__ u32 unit(u32 tile, int i) const { return units_at[i] + tile + i * 512; }

    // The address of this lane's unit of bf16 columns.
    __device__ __forceinline__ u32 tail(int stage, int i) const {
        return unit(V4 ? TAILS - RING + stage * TILE_BYTES : tile(stage, 8), i);
    }
};

// ---- Scales

// The scales of a row, relative to its power of two, as fp16 (V3.2) or as exponent bytes (V4). V3.2 stores a scale below
// fp16's range as -scale * 2**14; `Codes::store` then multiplies its columns with -2**-14.
struct Scales {
    uint2 words;   // V3.2: four scales; V4: seven exponents
    int exponent;  // E + SCALE_EXPONENT, with float32's bias

    // The scale of a tile, in both halves of a word. Without SMALL, V4's exponents are converted in pairs.
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
    __device__ __forceinline__ float row_scale() const { return power_of_two(exponent - SCALE_EXPONENT); }
    __device__ __forceinline__ float inverse() const { return power_of_two(254 + SCALE_EXPONENT - exponent); }
};

// The scales of a row as they are in the cache: four float32 or seven exponent bytes.
struct RawScales {
    uint4 bits;
    int largest, smallest;  // exponents of the largest and the smallest scale, with float32's bias

    __device__ __forceinline__ explicit RawScales(u32 address) {
        if (V4) {
            const uint2 bytes = shared_load2(address);
            const u32 a = __byte_perm(bytes.x, 0, 0x4140), b = __byte_perm(bytes.x, 0, 0x4342);
            const u32 c = __byte_perm(bytes.y, 0, 0x4140), last = bytes.y >> 16 & 0xFF;
            const u32 above = __vmaxu2(__vmaxu2(a, b), __vmaxu2(c, last));
            const u32 below = __vminu2(__vminu2(a, b), __vminu2(c, last * 0x10001));
            bits = make_uint4(bytes.x, bytes.y, 0, 0);
            largest = max(above & 0xFFFF, above >> 16);
            smallest = min(below & 0xFFFF, below >> 16);
        } else {
            bits = shared_load4(address);
            largest = max(max(bits.x, bits.y), max(bits.z, bits.w)) >> 23;
            smallest = min(min(bits.x, bits.y), min(bits.z, bits.w)) >> 23;
        }
        largest = max(largest, LOWEST_EXPONENT);
    }

    // Whether fp16 holds all scales in full, relative to the row's power of two.
    __device__ __forceinline__ bool fits(int exponent) const { return smallest >= exponent - SCALE_EXPONENT - 14; }

    template <bool SMALL>
    __device__ __forceinline__ Scales relative_to(int exponent) const {
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

// The address of the scales of row lane / 8; those of the lane's other row are four rows on.
__device__ __forceinline__ u32 scales_of(u32 memory, const RowCopier& rows, int stage) {
    return memory + SCALES + (stage % SCALE_STAGES * BLOCK_ROWS + rows.warp * WARP_ROWS + rows.lane / 8) * SCALE_BYTES;
}

// Reads the scales of this lane's two rows. Returns whether fp16 does not hold all of the warp's scales in full.
__device__ __forceinline__ bool read_scales(u32 memory, const RowCopier& rows, int stage, Scales (&scales)[2]) {
    const u32 from = scales_of(memory, rows, stage);
    const RawScales raw[2] = {RawScales(from), RawScales(from + 4 * SCALE_BYTES)};
    int exponents[2] = {raw[0].largest, raw[1].largest};
    if (V4) {
        u32 largest = max_abs(shared_load4(rows.tail(stage, 0)));
        largest |= max_abs(shared_load4(rows.tail(stage, 1))) << 16;
#pragma unroll
        for (int step = 1; step < 8; step *= 2) largest = __vmaxu2(largest, __shfl_xor_sync(FULL_MASK, largest, step));
        exponents[0] = max(exponents[0], static_cast<int>(largest >> 7 & 0x1FF) - (VALUE_EXPONENT - SCALE_EXPONENT));
        exponents[1] = max(exponents[1], static_cast<int>(largest >> 23) - (VALUE_EXPONENT - SCALE_EXPONENT));
    }
    const bool small = __any_sync(FULL_MASK, !raw[0].fits(exponents[0]) || !raw[1].fits(exponents[1]));
#pragma unroll
    for (int i = 0; i < 2; ++i) scales[i] = raw[i].relative_to<false>(exponents[i]);
    if (!V4 && small) {
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] = raw[i].relative_to<true>(exponents[i]);
    }
    return small;
}

// ---- From codes to fp16

// The codes of a quarter of the values: this lane's unit of eight columns, in both tiles and both rows.
struct Codes {
    uint2 bytes[2][2];

    __device__ __forceinline__ Codes(const RowCopier& rows, int stage, int quarter) {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (tile == 0 || !V4 || quarter != 3) bytes[tile][i] = rows.codes(stage, quarter, tile, i);
            }
        }
    }

    template <bool SMALL>
    __device__ __forceinline__ void store(const RowCopier& rows, const Scales (&scales)[2], int stage, int quarter) const {
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const u32 to = rows.unit(rows.tile(stage, quarter * 2 + tile), i);
                if (V4 && quarter == 3 && tile == 1) {
                    shared_store4(to, bf16_to_fp16(shared_load4(rows.tail(stage, i)), scales[i].inverse()));
                    continue;
                }
                uint4 numbers = dequantise(bytes[tile][i], scales[i].template of_tile<SMALL>(quarter * 2 + tile));
                if (!V4 && SMALL && static_cast<int>(scales[i].template of_tile<true>(quarter * 2)) < 0) {
                    numbers = mul_fp16x8(numbers, 0x84008400);  // -2**-14
                }
                shared_store4(to, numbers);
            }
        }
    }
};

// Turns the codes of a quarter into fp16. `small`: whether fp16 does not hold all scales in full.
__device__ __forceinline__ void widen_quarter(
    u32 memory, const RowCopier& rows, Scales (&scales)[2], int stage, int quarter, bool small) {
    const Codes codes(rows, stage, quarter);
#pragma unroll
    for (int i = 0; i < (V4 ? 2 : 0); ++i) {  // again, since registers are scarce
        scales[i].words = shared_load2(scales_of(opaque(memory), rows, stage) + 4 * i * SCALE_BYTES);
    }
    __syncwarp();  // all lanes have read the codes, which are overwritten
    if (small) codes.store<true>(rows, scales, stage, quarter);
    else codes.store<false>(rows, scales, stage, quarter);
}

// Stores the factors of the warp's rows. Consumers read the factors of a lane's 16 columns together.
__device__ __forceinline__ void store_factors(u32 memory, const RowCopier& rows, const Scales (&scales)[2], int stage) {
    const int row = rows.lane / 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // An exponent of 255 means infinity or NaN: it makes the row's logits NaN.
        u32 own = scales[i].exponent == 255 ? 0x7FC0 : __float_as_uint(scales[i].row_scale()) >> 16;
        if (!(rows.present >> (row + 4 * i) & 1)) own = NO_ROW;
        const u32 next = __shfl_xor_sync(FULL_MASK, own, 8);
        if (rows.lane % 16 == 0) shared_store(memory + FACTORS + stage * FACTOR_BYTES + ((row + 4 * i) / 2 * 8 + rows.warp) * 4, next << 16 | own);
    }
}

// Warpgroups 2 and 3.
__device__ __forceinline__ void dequantise_rows(u32 memory, const Work<SELECTIONS>& work) {
    const int warp = threadIdx.x / 32 % PRODUCER_WARPS, lane = threadIdx.x % 32, pairs = (work.end - work.begin + 1) / STAGES;
    RowCopier rows(memory, work, warp, lane);
    u32 parity = 1;  // of the empty mbarriers' phases that must have ended before the next block is copied
    int copied = 0;
    const auto copy_chunk = [&](int stage, int chunk) {
        if (chunk == 0) rows.copy_first(memory, stage);
        else rows.copy_quarter(stage, first_tile(stage, chunk) / 2);
    };
    const auto poll = [&](int stage) {
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            if (copied != chunk) continue;
            if ((chunk > 0 || TILES > 8) && __ballot_sync(FULL_MASK, mbarrier_test(empty(memory, stage, chunk), parity)) != FULL_MASK) break;
            copy_chunk(stage, chunk);
            ++copied;
        }
    };
    const auto copy = [&](int stage) {
        if (!POLL) rows.look_up();
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            if (POLL && chunk < copied) continue;
            // V4's columns and all scales have room of their own, which this warp has read.
            if (chunk > 0 || TILES > 8) mbarrier_wait(empty(memory, stage, chunk), parity);
            copy_chunk(stage, chunk);
        }
        copied = 0;
#if AHEAD
        rows.fetch_ahead();
#endif
    };
    const auto arrive = [&](int stage, int load) {
#if !NOFENCE
        fence_async_proxy();
#endif
        __syncwarp();
        if (lane % 8 == 0) mbarrier_arrive(full(memory, stage, load));
    };
    if (pairs == 0) return;
#if AHEAD
    rows.fetch_ahead();
#endif
    if (POLL) rows.look_up();
    copy(0);
    for (int left = pairs; left > 0; --left) {
#pragma unroll
        for (int stage = 0; stage < STAGES; ++stage) {
            cp_async_wait<4>();
            __syncwarp();
            Scales scales[2];
            const bool small = read_scales(memory, rows, stage, scales);
            store_factors(memory, rows, scales, stage);
#pragma unroll
            for (int i = 0; i < (TILES > 8 ? 2 : 0); ++i) {
                const u32 at = rows.tail(stage, i);
                shared_store4(at, scale_bf16(shared_load4(at), scales[i].inverse()));
            }
            const auto widen = [&](int chunk) {
                __syncwarp();
                widen_quarter(memory, rows, scales, stage, first_tile(stage, chunk) / 2, small);
            };
            cp_async_wait<3>();
            widen(1);
            cp_async_wait<2>();
            widen(2);
            arrive(stage, 0);
            if (POLL) {
                cp_async_wait<0>();
                if (stage == 1) parity ^= 1;
                if (stage == 0 || left > 1) {
                    rows.look_up();
                    poll(1 - stage);
                }
                widen(3);
                arrive(stage, 1);
                if (stage == 0 || left > 1) poll(1 - stage);
                widen(4);
                arrive(stage, 2);
                if (stage == 0 || left > 1) copy(1 - stage);
                continue;
            }
            cp_async_wait<1>();
            widen(3);
            arrive(stage, 1);
            cp_async_wait<0>();
            widen(4);
            arrive(stage, 2);
            if (stage == 1) parity ^= 1;
            if (stage == 0 || left > 1) copy(1 - stage);
        }
    }
}
