// Gradients of a block of 64 selected rows on their way from registers to memory.
//
// They are accumulators of wgmma with rows on the M axis: a lane has pairs of columns of two rows, `upper` and `lower`, and the
// four lanes of a row all of its columns. Lanes exchange numbers first, so that one instruction covers more of a row.
#pragma once
#include "instructions.cuh"
#include "softmax.cuh"
#include "tile_copier.cuh"

// Exchanges half of two groups of four words with the lane whose number differs in bit MASK. Each lane keeps the first group
// if its own bit is not set, else the second; the words that it gets are the other lane's of the same group.
template <int MASK, class T>
__device__ __forceinline__ void exchange(const T (&first)[4], const T (&second)[4], T (&own)[4], T (&got)[4]) {
    const bool set = threadIdx.x & MASK;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        got[i] = __shfl_xor_sync(FULL_MASK, set ? first[i] : second[i], MASK);
        own[i] = set ? second[i] : first[i];
    }
}

// Adds gradients to float32 sums [rows, ROW_WIDTH]. Eight lanes, which have rows 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 of the warp's
// 16, add 32 columns of one of them at a time: 128 bytes, since L2 takes as long for a request of one sector as of four. The
// columns of every 32 are in another order, that of the lanes' accumulators, which saves half of the exchanges: number
// 16 i + 4 j + 2 k + l is column 16 i + 8 k + 2 j + l, with j < 4 and the others < 2 (`natural_columns` in row_sums.py).
template <int ROW_WIDTH>
struct RowSums {
    float* sums;
    int slots[4];  // of these rows; -1 if a row does not exist

    // `block_slots` is the shared-memory address of the slots of the block's 64 rows. Without sums nothing is added.
    __device__ __forceinline__ RowSums(float* sums, u32 block_slots) : sums(sums) {
        const u32 first = block_slots + (threadIdx.x / 32 % WARPS * 16 + threadIdx.x % 32 / 8 * 2) * 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            slots[i] = sums == nullptr ? -1 : static_cast<int>(shared_load(first + (i / 2 * 8 + i % 2) * 4));
        }
    }

    // Hands over 2 * N columns, 32 or 64, from `first` on.
    template <int N>
    __device__ __forceinline__ void emit(const float (&drows)[N], int first) {
        const int lane = threadIdx.x % 32, column = first + lane / 4 % 2 * 16 + lane % 4 * 4;
        const bool second = lane & 4;
#pragma unroll
        for (int half = 0; half < N / 16; ++half) {  // 32 columns
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                const float* const at = &drows[half * 16 + 2 * below];
                const float low[4] = {at[0], at[1], at[4], at[5]}, high[4] = {at[8], at[9], at[12], at[13]};
                float own[4], got[4], one[4], other[4];
                exchange<4>(low, high, own, got);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    one[k] = second ? got[k] : own[k];
                    other[k] = second ? own[k] : got[k];
                }
                add(slots[2 * below], column + half * 32, one);
                add(slots[2 * below + 1], column + half * 32, other);
            }
        }
    }

    // Nothing is left to hand over; see RowPairs.
    __device__ __forceinline__ void finish(int, int) const {}

    __device__ __forceinline__ void add(int slot, int column, const float (&four)[4]) const {
        float* const to = sums + static_cast<long long>(slot) * ROW_WIDTH + column;
        reduce_add4(to, make_float4(four[0], four[1], four[2], four[3]), slot >= 0);
    }
};

// Stores the gradient of every pair of token and row at a place of its own, [pairs, ROW_WIDTH], for `ordered_sums.cu`: fp16
// numbers relative to a scale, which is a power of two, for 64 columns up to VALUES and for 32 after that. That is half of the
// bytes of float32, with errors of 2**-12 of the largest number. Of every 32 columns, the eight that a lane has lie beside each
// other, which saves exchanges; eight lanes store 64 columns of a row at a time: 128 bytes, for the same reason as above.
template <int ROW_WIDTH, int VALUES>
struct RowPairs {
    static constexpr int SCALES = VALUES / 64 + (ROW_WIDTH - VALUES) / 32;  // of a pair
    unsigned short* pairs;
    float* scales;          // [pairs, SCALES]
    int place;              // of the first of the rows that the lane stores: as in RowSums, 2 i, 2 i + 1 and 8 further
    int step;               // the distance of rows, in places
    u32 state;              // bits 0 to 3: which of the four rows exist; bits 8 and 16 on: exponents of the scales that `finish` stores

    // `first` is the number of the place of the block's first row, and `step` the distance to that of the next.
    __device__ __forceinline__ RowPairs(unsigned short* pairs, float* scales, u32 block_slots, int first, int step)
        : pairs(pairs), scales(scales), step(step), state(0) {
        const int row = threadIdx.x / 32 % WARPS * 16 + threadIdx.x % 32 / 8 * 2;
        place = first + row * step;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            state |= static_cast<u32>(static_cast<int>(shared_load(block_slots + (row + i / 2 * 8 + i % 2) * 4)) >= 0) << i;
        }
    }

    // As above; the columns have one scale. The largest number of a row becomes 2**14 or more.
    template <int N>
    __device__ __forceinline__ void emit(const float (&drows)[N], int first) {
        const int lane = threadIdx.x % 32, group = first < VALUES ? first / 64 : VALUES / 64 + (first - VALUES) / 32;
        const bool second = lane & 4;  // whether the lane has columns of the second of two rows
        // All numbers are packed before the first exchange, since that halves the registers that they take.
        u32 words[2][N / 16][4];       // [upper or lower row][32 columns]
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i / 2 % 2 == below) largest = fmaxf(largest, fabsf(drows[i]));
            }
            const u32 exponent = max(__float_as_uint(max_over_lanes<1, 4>(largest)) >> 23, 15u);
            const float factor = __uint_as_float(268 - exponent << 23);
            if (N == 32) state = lane % 4 == group % 4 ? permute_bytes(state, exponent, below ? 0x3410 : 0x3240) : state;
            else if (lane % 4 == 0) store_scale(below, group, exponent);
#pragma unroll
            for (int i = 0; i < N / 4; ++i) {
                words[below][i / 4][i % 4] = pack_fp16(drows[4 * i + 2 * below] * factor, drows[4 * i + 2 * below + 1] * factor);
            }
        }
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const u32 both = state >> 2 * below;
            unsigned short* const to = pairs + static_cast<long long>(place + below * 8 * step) * ROW_WIDTH + first + lane % 4 * 8;
            if constexpr (N == 32) {
                u32 own[4], got[4];
                exchange<4>(words[below][0], words[below][1], own, got);
                unsigned short* const half = to + (second ? 32 : 0);
                store(half, second, got, own, both & 1);
                store(half + step * ROW_WIDTH, second, own, got, both & 2);
            } else {
                const auto& own = words[below][0];
                store(to + (second ? step * ROW_WIDTH : 0), true, own, own, both >> (second ? 1 : 0) & 1);
            }
        }
    }

    // Stores the scales of `count` times 64 columns, at most four, from `first` on, a multiple of 256.
    __device__ __forceinline__ void finish(int first, int count) const {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            if (lane % 4 < count) store_scale(below, first / 64 + lane % 4, state >> 8 + 8 * below & 0xFF);
        }
    }

    // Stores a scale of the row whose columns the lane has, from the exponent of its largest number.
    __device__ __forceinline__ void store_scale(int below, int group, u32 exponent) const {
        const int second = threadIdx.x & 4 ? 1 : 0;
        const long long row = place + (8 * below + second) * step;
        if (state >> 2 * below + second & 1) scales[row * SCALES + group] = __uint_as_float(exponent - 14 << 23);
    }

    // Stores the first eight numbers or the other ones.
    __device__ __forceinline__ static void store(
        unsigned short* to, bool first, const u32 (&one)[4], const u32 (&other)[4], bool valid) {
        u32 eight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) eight[i] = first ? one[i] : other[i];
        if (valid) *reinterpret_cast<uint4*>(to) = make_uint4(eight[0], eight[1], eight[2], eight[3]);
    }
};

// One of the two.
template <bool IN_ORDER, int ROW_WIDTH, int VALUES>
struct RowGradients : RowSums<ROW_WIDTH> {
    __device__ __forceinline__ RowGradients(float* sums, unsigned short*, float*, u32 block_slots, int, int)
        : RowSums<ROW_WIDTH>(sums, block_slots) {}
};

template <int ROW_WIDTH, int VALUES>
struct RowGradients<true, ROW_WIDTH, VALUES> : RowPairs<ROW_WIDTH, VALUES> {
    __device__ __forceinline__ RowGradients(
        float*, unsigned short* pairs, float* scales, u32 block_slots, int first, int step)
        : RowPairs<ROW_WIDTH, VALUES>(pairs, scales, block_slots, first, step) {}
};
