// Queries as B operands of wgmma, swizzled tiles in shared memory, for `heads_as_columns.cu`.
//
// A tile has 64 elements of 16 bits, 128 bytes, for each head. Tiles 0 to 7 are the 512 latent columns in fp16. Within 16
// columns, those whose codes are in the lower half of a word come first, as in the fragments of the keys. The next tile is
// the 64 rope columns in bf16. An fp16 query has more bits than bf16 holds, so its rope columns are the sum of two tiles. Rows
// without a rope (ROPE 0 instead of 64) need none of them.
#pragma once
#include "few_heads_items.cuh"

template <int N_HEADS, int N_THREADS, Operand TYPE, int ROPE>
struct QueryTiles {
    static constexpr int ROPE_TERMS = TYPE == FP16 ? 2 : 1;
    static constexpr int TILE_BYTES = N_HEADS * 128, LATENT_TILES = 8;
    static constexpr int HEAD_THREADS = N_THREADS / N_HEADS;  // neighbouring threads that load one head
    static constexpr int GROUPS = 32 / HEAD_THREADS;          // groups of 16 latent columns that a thread loads
    static constexpr int ROPE_GROUPS = ROPE / 4 / HEAD_THREADS;  // groups of 4 rope columns that a thread loads

    const int head;   // that this thread loads
    const int share;  // number of this thread among those of the head
    uint2 latent[GROUPS][4], rope[ROPE_GROUPS ? ROPE_GROUPS : 1];

    __device__ __forceinline__ explicit QueryTiles(int thread)
        : head(thread / HEAD_THREADS), share(thread % HEAD_THREADS) {}

    // Loads this thread's share of a head's query, and returns the head's largest latent magnitude.
    __device__ __forceinline__ float load(const unsigned short* q, bool exists) {
        float largest = 0.0f;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const unsigned short* at = q + 16 * (share + HEAD_THREADS * group) + 4 * i;
                latent[group][i] = exists ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
                const float2 a = unpack<TYPE>(latent[group][i].x), b = unpack<TYPE>(latent[group][i].y);
                const float four = fmaxf(fmaxf(fabsf(a.x), fabsf(a.y)), fmaxf(fabsf(b.x), fabsf(b.y)));
                largest = fmaxf(largest, four);
            }
        }
#pragma unroll
        for (int group = 0; group < ROPE_GROUPS; ++group) {
            const unsigned short* at = q + VALUES + 4 * (share + HEAD_THREADS * group);
            rope[group] = exists ? *reinterpret_cast<const uint2*>(at) : make_uint2(0, 0);
        }
        return max_over_lanes<1, HEAD_THREADS>(largest);
    }

    // Multiplies this thread's share with a factor and writes it to the tiles.
    __device__ __forceinline__ void store(u32 tiles, float factor) const {
        const u32 row = tiles + 128 * head;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int sixteen = share + HEAD_THREADS * group;
            u32 packed[2][4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 first = unpack<TYPE>(latent[group][i].x), second = unpack<TYPE>(latent[group][i].y);
                packed[0][i] = pack_fp16(first.x * factor, first.y * factor);
                packed[1][i] = pack_fp16(second.x * factor, second.y * factor);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const u32(&p)[4] = packed[half];
                const int unit = (2 * (sixteen % 4) + half) ^ head % 8;
                shared_store4(row + sixteen / 4 * TILE_BYTES + 16 * unit, make_uint4(p[0], p[1], p[2], p[3]));
            }
        }
#pragma unroll
        for (int group = 0; group < ROPE_GROUPS; ++group) {
            const int four = share + HEAD_THREADS * group;
            const u32 at = row + LATENT_TILES * TILE_BYTES + 16 * (four / 2 ^ head % 8) + 8 * (four % 2);
#pragma unroll
            for (int pair = 0; pair < 2; ++pair) {
                u32 terms[ROPE_TERMS];
                const float2 two = unpack<TYPE>(pair ? rope[group].y : rope[group].x);
                bf16_terms({two.x * factor, two.y * factor}, terms);
#pragma unroll
                for (int term = 0; term < ROPE_TERMS; ++term) shared_store(at + term * TILE_BYTES + 4 * pair, terms[term]);
            }
        }
    }
};
