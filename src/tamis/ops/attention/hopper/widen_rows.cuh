// Producers of `many_heads.cu`: FP8 rows from global memory to fp16 tiles in the stages of the ring.
//
// A warpgroup fills one stage. A warp has 16 rows of a block, whose 2,048 bytes of each tile no other warp touches. It copies the
// codes of 128 columns into the first of the two tiles that they will fill, loads them into registers when they have arrived,
// and stores fp16 numbers over them, so that codes need no room of their own.
//
// Numbers. A row is stored as fp16 numbers that are multiplied with 2**E. E follows from the largest of the row's scales
// and, in V4, of its bf16 values, so that its largest values lie just below fp16's largest; an e4m3 value times a power of
// two is exact down to 2**-30 of that. V3.2's bf16 columns, which are only keys, stay bf16 and are multiplied with 2**-E,
// which is at most 2**66.
#pragma once
#ifndef AHEAD
#define AHEAD 0
#endif
#include "items.cuh"
#include "scaled_numbers.cuh"
#include "stages.cuh"
#include "tiles.cuh"

constexpr int LANE_ROWS = WARP_ROWS / 4;  // rows of a lane: lane / 8 + 4 * i

// ---- Copies

// A producer warp's 16 rows of the blocks of stage STAGE. Eight lanes copy 128 bytes of a row at a time.
template <int STAGE>
struct WarpRows {
    int warp, lane;
    RowWalker<SELECTIONS, ROW_BYTES, STAGES> walker;  // of row lane % 16
    u32 present = 0;                                  // a bit for each row of the current block that exists
    // Addresses for row lane / 8 of the stage's first tile. All others differ from them by constants.
    u32 copied_to;    // where this lane copies 16 codes of 128 columns
    u32 codes_at[2];  // where it loads its unit of eight codes of each tile
    u32 units_at[2];  // where its unit of eight numbers is, for even i, and less 512 for odd i

    __device__ __forceinline__ WarpRows(u32 memory, const Work<SELECTIONS>& work, int warp, int lane)
        : warp(warp), lane(lane), walker(work, warp * WARP_ROWS + lane % WARP_ROWS, STAGE) {
        // The codes of odd rows are swapped by 64 bytes, so that loads of two neighbouring rows lie in different banks.
        const u32 row = stage_tiles(memory, STAGE) + warp * (WARP_ROWS * 128) + lane / 8 * 128, swap = lane / 8 % 2 * 64;
        copied_to = row + (lane % 8 * 16 ^ swap);
        codes_at[0] = row + (lane % 8 * 8 ^ swap);
        codes_at[1] = row + (lane % 8 * 8 ^ swap ^ 64);
        units_at[0] = row + (lane % 8 ^ lane / 8) * 16;
        units_at[1] = row + (lane % 8 ^ lane / 8 ^ 4) * 16;
    }

    // The quarter of the values in a chunk.
    static __device__ __forceinline__ constexpr int quarter_of(int chunk) { return first_tile(STAGE, chunk) / 2; }

    // The address of this lane's unit of row lane / 8 + 4 * i in a tile.
    __device__ __forceinline__ u32 unit(u32 tile, int i) const { return units_at[i % 2] + tile * TILE_BYTES + i * 512; }

    // The address of this lane's unit of bf16 columns.
    __device__ __forceinline__ u32 tail(int i) const {
        return V4 ? unit(0, i) + (TAILS - RING) + STAGE * TILE_BYTES - STAGE * STAGE_BYTES : unit(8, i);
    }

    // The address of the scales of row lane % 16. V3.2 keeps them in the second tile of chunk 1, until that is filled.
    __device__ __forceinline__ u32 scales(u32 memory, int row) const {
        if (V4) return memory + SCALES + (STAGE * BLOCK_ROWS + warp * WARP_ROWS + row) * SCALE_BYTES;
        return stage_tiles(memory, STAGE) + (first_tile(STAGE, 1) + 1) * TILE_BYTES + warp * (WARP_ROWS * 128) + row * SCALE_BYTES;
    }

    // Copies the next block of the stage, chunk by chunk as consumers release them, each as a cp.async group. `parity`: of the
    // phases of the empty mbarriers that must have ended.
    __device__ __forceinline__ void copy(u32 memory, u32 parity) {
        u32 to_exponents;
        const unsigned char* const row = walker.next(to_exponents);
#if AHEAD
        if (row != nullptr) {
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                if (k * 256 + 128 < ROW_BYTES || lane < 16) prefetch_l2(row + lane / 16 * 128 + k * 256);
            }
        }
#endif
        present = __ballot_sync(FULL_MASK, row != nullptr);
        const auto address = reinterpret_cast<unsigned long long>(row);
        const unsigned char* from[LANE_ROWS];  // this lane's 16 bytes of its rows; null if a row does not exist
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            const u32 low = __shfl_sync(FULL_MASK, static_cast<u32>(address), lane / 8 + 4 * i);
            const u32 high = __shfl_sync(FULL_MASK, static_cast<u32>(address >> 32), lane / 8 + 4 * i);
            const auto whole = static_cast<unsigned long long>(high) << 32 | low;
            from[i] = whole == 0 ? nullptr : reinterpret_cast<const unsigned char*>(whole) + lane % 8 * 16;
        }
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            // V4's scales and columns of 16 bits have room of their own, which this warp has read.
            if (chunk > 0 || TILES > 8) mbarrier_wait(empty(memory, STAGE, chunk), parity);
            if (chunk == !V4 && lane < WARP_ROWS) {
                if (V4) cp_async_zfill<8>(scales(memory, lane), row + to_exponents, row != nullptr);
                else cp_async_zfill<16>(scales(memory, lane), row + LATENT, row != nullptr);
            }
#pragma unroll
            for (int i = 0; i < LANE_ROWS; ++i) {
                if (chunk == 0) {
                    if (TAIL_COLUMNS) cp_async_zfill<16>(tail(i), from[i] + TAIL_AT, from[i] != nullptr);
                } else if (!V4 || quarter_of(chunk) != 3 || lane % 8 < 4) {
                    const u32 to = copied_to + quarter_of(chunk) * 2 * TILE_BYTES + i * 512;
                    cp_async_zfill<16>(to, from[i] + quarter_of(chunk) * 128, from[i] != nullptr);
                }
            }
            cp_async_commit();
        }
    }
};

// ---- Scales

// The scales of a row, relative to its power of two, as fp16 (V3.2) or as exponent bytes (V4). V3.2 stores a scale below
// fp16's range as -scale * 2**14; `finish_small` then multiplies its columns with -2**-14.
struct Scales {
    uint2 words;   // V3.2: four scales; V4: seven exponents
    int exponent;  // E + SCALE_EXPONENT, with float32's bias

    // The scale of a tile, in both halves of a word.
    __device__ __forceinline__ u32 of_tile(int tile) const {
        const u32 word = tile < 4 ? words.x : words.y;
        if (!V4) return __byte_perm(word, 0, tile % 4 < 2 ? 0x1010 : 0x3232);
        const int byte = word >> 8 * (tile % 4) & 0xFF;
        const float scale = power_of_two(max(127 + SCALE_EXPONENT + byte - exponent, 0));
        return pack_fp16(scale, scale);
    }

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

// The factor 2**E of a row, as bf16.
__device__ __forceinline__ u32 factor_of(const Scales& scales, bool exists) {
    // An exponent of 255 means infinity or NaN: it makes the row's logits NaN.
    const u32 factor = scales.exponent == 255 ? 0x7FC0 : __float_as_uint(scales.row_scale()) >> 16;
    return exists ? factor : NO_ROW;
}

// Stores the factors of a row of even number and of the next one. Consumers read the factors of a lane's 16 columns together.
template <int STAGE>
__device__ __forceinline__ void store_factors(u32 memory, const WarpRows<STAGE>& rows, int row, u32 first, u32 second) {
    const u32 at = memory + FACTORS + STAGE * FACTOR_BYTES + (row % 8 / 2 * 8 + rows.warp * 2 + row / 8) * 4;
    shared_store(at, second << 16 | first);
}

// Reads the scales of this lane's rows, and stores the factors of the warp's. Returns whether fp16 does not hold all of the warp's
// scales in full (V3.2).
template <int STAGE>
__device__ __forceinline__ bool read_scales(u32 memory, const WarpRows<STAGE>& rows, Scales (&scales)[LANE_ROWS]) {
    const int lane = rows.lane;
    if (!V4) {  // each lane does the work for row lane % 16
        const RawScales raw(rows.scales(memory, lane % WARP_ROWS));
        const bool small = __any_sync(FULL_MASK, !raw.fits(raw.largest));
        Scales own = raw.relative_to<false>(raw.largest);
        if (small) own = raw.relative_to<true>(raw.largest);
        const u32 factor = factor_of(own, rows.present >> lane % WARP_ROWS & 1), next = __shfl_xor_sync(FULL_MASK, factor, 1);
        if (lane < WARP_ROWS && lane % 2 == 0) store_factors(memory, rows, lane, factor, next);
#pragma unroll
        for (int i = 0; i < LANE_ROWS; ++i) {
            const int from = opaque(threadIdx.x) % 32 / 8 + 4 * i;  // computed again, since registers are scarce
            scales[i].words.x = __shfl_sync(FULL_MASK, own.words.x, from);
            scales[i].words.y = __shfl_sync(FULL_MASK, own.words.y, from);
            scales[i].exponent = __shfl_sync(FULL_MASK, static_cast<u32>(own.exponent), from);
        }
        return small;
    }
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
        const int row = lane / 8 + 4 * i;
        const RawScales raw(rows.scales(memory, row));
        u32 largest = max_abs(shared_load4(rows.tail(i)));
#pragma unroll
        for (int step = 1; step < 8; step *= 2) largest = max(largest, __shfl_xor_sync(FULL_MASK, largest, step));
        scales[i] = raw.relative_to<false>(max(raw.largest, static_cast<int>(largest >> 7) - (VALUE_EXPONENT - SCALE_EXPONENT)));
        const u32 factor = factor_of(scales[i], rows.present >> row & 1), next = __shfl_xor_sync(FULL_MASK, factor, 8);
        if (lane % 16 == 0) store_factors(memory, rows, row, factor, next);
    }
    return false;
}

// ---- From codes to fp16

// Turns the codes of a quarter of the values of eight rows into fp16: a lane's unit of eight columns of both tiles, in its rows
// 2 * half and 2 * half + 1.
template <int STAGE>
__device__ __forceinline__ void widen_rows(
    u32 memory, const WarpRows<STAGE>& rows, const Scales (&scales)[LANE_ROWS], int quarter, int half) {
    const bool has_tail = V4 && quarter == 3;
    uint2 codes[2][2];
#pragma unroll
    for (int tile = 0; tile < (has_tail ? 1 : 2); ++tile) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            codes[tile][i] = shared_load2(rows.codes_at[tile] + quarter * 2 * TILE_BYTES + half * 1024 + i * 512);
        }
    }
    __syncwarp();  // all lanes have read the codes, which are overwritten
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        Scales own = scales[2 * half + i];
        if (V4) own.words = shared_load2(rows.scales(opaque(memory), rows.lane / 8 + 8 * half + 4 * i));  // saves registers
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
            const u32 to = rows.unit(quarter * 2 + tile, 2 * half + i);
            if (has_tail && tile == 1) {
                shared_store4(to, bf16_to_fp16(shared_load4(rows.tail(2 * half + i)), own.inverse()));
                continue;
            }
            shared_store4(to, dequantise(codes[tile][i], own.of_tile(quarter * 2 + tile)));
        }
    }
}

// V3.2: multiplies this lane's units of a quarter with -2**-14 where their scale is negative (see `Scales`).
template <int STAGE>
__device__ __forceinline__ void finish_small(const WarpRows<STAGE>& rows, const Scales (&scales)[LANE_ROWS], int quarter) {
#pragma unroll
    for (int i = 0; i < LANE_ROWS; ++i) {
        if (static_cast<int>(scales[i].of_tile(quarter * 2)) >= 0) continue;
        constexpr u32 STEP = 0x84008400;  // -2**-14
#pragma unroll 1
        for (int tile = quarter * 2; tile < quarter * 2 + 2; ++tile) {
            const u32 at = rows.unit(tile, i);
            shared_store4(at, mul_fp16x8(shared_load4(at), STEP));
        }
    }
}

// Fills stage STAGE: warpgroup 2 + STAGE.
template <int STAGE>
__device__ __forceinline__ void dequantise_rows(u32 memory, const Work<SELECTIONS>& work) {
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32;
    WarpRows<STAGE> rows(memory, work, warp, lane);
    u32 parity = 1;
    const auto arrive = [&](int load) {
        fence_async_proxy();
        __syncwarp();
        if (lane % 8 == 0) mbarrier_arrive(full(memory, STAGE, load));
    };
    for (int left = (work.end - work.begin + 1) / STAGES; left > 0; --left, parity ^= 1) {
        rows.copy(memory, parity);
        cp_async_wait<3>();
        __syncwarp();
        Scales scales[LANE_ROWS];
        const bool small = read_scales(memory, rows, scales);
#pragma unroll
        for (int i = 0; i < (TILES > 8 ? LANE_ROWS : 0); ++i) {
            const u32 at = rows.tail(i);
            shared_store4(at, scale_bf16(shared_load4(at), scales[i].inverse()));
        }
        const auto widen = [&](int chunk) {
            __syncwarp();
            const int quarter = rows.quarter_of(chunk);
            widen_rows(memory, rows, scales, quarter, 0);
            widen_rows(memory, rows, scales, quarter, 1);
            if (!V4 && small) finish_small(rows, scales, quarter);
        };
        widen(1);
        cp_async_wait<2>();
        widen(2);
        arrive(0);
        cp_async_wait<1>();
        widen(3);
        arrive(1);
        cp_async_wait<0>();
        widen(4);
        arrive(2);
    }
}
