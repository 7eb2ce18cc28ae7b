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
// 16, add 32 columns of one of them at a time: 128 bytes, since L2 takes as long for a request of one sector as of four.
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
    __device__ __forceinline__ void emit(const float (&drows)[N], int first) const {
        const int lane = threadIdx.x % 32;
        const int column = first + (lane / 4 % 2 * 2 + lane % 2) * 8 + lane / 2 % 2 * 4;
#pragma unroll
        for (int half = 0; half < N / 16; ++half) {  // 32 columns
            float quads[2][2][4];  // [16 columns][upper or lower row]: four neighbouring columns of this lane
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float(&at)[16] = *reinterpret_cast<const float(*)[16]>(&drows[half * 16]);
                const float even[4] = {at[8 * i], at[8 * i + 1], at[8 * i + 2], at[8 * i + 3]};
                const float odd[4] = {at[8 * i + 4], at[8 * i + 5], at[8 * i + 6], at[8 * i + 7]};
                float own[4], got[4];
                exchange<1>(even, odd, own, got);
#pragma unroll
                for (int row = 0; row < 2; ++row) {
#pragma unroll
                    for (int k = 0; k < 2; ++k) {
                        quads[i][row][k] = lane & 1 ? got[2 * row + k] : own[2 * row + k];
                        quads[i][row][2 + k] = lane & 1 ? own[2 * row + k] : got[2 * row + k];
                    }
                }
            }
#pragma unroll
            for (int row = 0; row < 2; ++row) {
                float own[4], got[4];
                exchange<4>(quads[0][row], quads[1][row], own, got);
                float first_row[4], second_row[4];
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    first_row[k] = lane & 4 ? got[k] : own[k];
                    second_row[k] = lane & 4 ? own[k] : got[k];
                }
                add(slots[2 * row], column + half * 32, first_row);
                add(slots[2 * row + 1], column + half * 32, second_row);
            }
        }
    }

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
    unsigned short* pairs;  // the place of the first of the rows that the lane stores: as in RowSums, 2 i, 2 i + 1 and 8 further
    float* scales;          // [SCALES] of the first of the rows whose columns the lane has; the other one is 8 further
    int step;               // the distance of rows, in places
    u32 exists;             // bits: which of the four rows do

    // `first` is the number of the place of the block's first row, and `step` the distance to that of the next.
    __device__ __forceinline__ RowPairs(unsigned short* all, float* all_scales, u32 block_slots, long long first, int step)
        : step(step), exists(0) {
        const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % WARPS * 16 + lane / 8 * 2;
        pairs = all + (first + row * step) * ROW_WIDTH;
        scales = all_scales + (first + (row + lane / 4 % 2) * step) * SCALES;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            exists |= static_cast<u32>(static_cast<int>(shared_load(block_slots + (row + i / 2 * 8 + i % 2) * 4)) >= 0) << i;
        }
    }

    // As above; the columns have one scale. The largest number of a row becomes 2**14 or more.
    template <int N>
    __device__ __forceinline__ void emit(const float (&drows)[N], int first) const {
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
            if (lane % 4 == 0 && exists >> (2 * below + (second ? 1 : 0)) & 1) {
                scales[below * 8 * step * SCALES + group] = __uint_as_float(exponent - 14 << 23);
            }
#pragma unroll
            for (int i = 0; i < N / 4; ++i) {
                words[below][i / 4][i % 4] = pack_fp16(drows[4 * i + 2 * below] * factor, drows[4 * i + 2 * below + 1] * factor);
            }
        }
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const u32 both = exists >> 2 * below;
            unsigned short* const to = pairs + below * 8 * step * ROW_WIDTH + first + lane % 4 * 8;
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
    __device__ __forceinline__ RowGradients(float* sums, unsigned short*, float*, u32 block_slots, long long, int)
        : RowSums<ROW_WIDTH>(sums, block_slots) {}
};

template <int ROW_WIDTH, int VALUES>
struct RowGradients<true, ROW_WIDTH, VALUES> : RowPairs<ROW_WIDTH, VALUES> {
    __device__ __forceinline__ RowGradients(
        float*, unsigned short* pairs, float* scales, u32 block_slots, long long first, int step)
        : RowPairs<ROW_WIDTH, VALUES>(pairs, scales, block_slots, first, step) {}
};
