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
// bytes of float32, with errors of 2**-12 of the largest number. Four lanes store 32 columns of a row at a time.
template <int ROW_WIDTH, int VALUES>
struct RowPairs {
    static constexpr int SCALES = VALUES / 64 + (ROW_WIDTH - VALUES) / 32;  // of a pair
    bool exists[2];            // whether the lane's upper and lower rows do
    unsigned short* pairs[2];  // [ROW_WIDTH] their places
    float* scales[2];          // [SCALES]

    // `first` is the number of the place of the block's first row, and `step` the distance to that of the next.
    __device__ __forceinline__ RowPairs(unsigned short* all, float* all_scales, u32 block_slots, long long first, int step) {
        const int row = threadIdx.x / 32 % WARPS * 16 + threadIdx.x % 32 / 4;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const long long number = first + (row + 8 * i) * step;
            exists[i] = static_cast<int>(shared_load(block_slots + (row + 8 * i) * 4)) >= 0;
            pairs[i] = all + number * ROW_WIDTH;
            scales[i] = all_scales + number * SCALES;
        }
    }

    // As above; the columns have one scale. The largest number of a row becomes 2**14 or more.
    template <int N>
    __device__ __forceinline__ void emit(const float (&drows)[N], int first) const {
        const int lane = threadIdx.x % 32, group = first < VALUES ? first / 64 : VALUES / 64 + (first - VALUES) / 32;
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            float largest = 0.0f;
#pragma unroll
            for (int i = 0; i < N; ++i) {
                if (i / 2 % 2 == row) largest = fmaxf(largest, fabsf(drows[i]));
            }
            const u32 exponent = max(__float_as_uint(max_over_lanes<1, 4>(largest)) >> 23, 15u);
            const float factor = __uint_as_float(268 - exponent << 23);
            if (exists[row] && lane % 4 == 0) scales[row][group] = __uint_as_float(exponent - 14 << 23);
#pragma unroll
            for (int half = 0; half < N / 16; ++half) {  // 32 columns, of which a lane stores eight
                u32 words[4], swapped[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int at = half * 16 + i * 4 + row * 2;
                    words[i] = pack_fp16(drows[at] * factor, drows[at + 1] * factor);
                }
                // A transposition of four words over four lanes, in two steps.
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const u32 got = __shfl_xor_sync(FULL_MASK, lane & 1 ? words[2 * i] : words[2 * i + 1], 1);
                    swapped[2 * i] = lane & 1 ? got : words[2 * i];
                    swapped[2 * i + 1] = lane & 1 ? words[2 * i + 1] : got;
                }
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const u32 got = __shfl_xor_sync(FULL_MASK, lane & 2 ? swapped[i] : swapped[2 + i], 2);
                    words[i] = lane & 2 ? got : swapped[i];
                    words[2 + i] = lane & 2 ? swapped[2 + i] : got;
                }
                const uint4 eight = make_uint4(words[0], words[1], words[2], words[3]);
                if (exists[row]) *reinterpret_cast<uint4*>(pairs[row] + first + half * 32 + lane % 4 * 8) = eight;
            }
        }
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
