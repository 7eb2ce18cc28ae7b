// Merges the splits of a token in a cluster, at the end of a work item of `many_heads.cu` (split-KV without a second kernel): CTA
// `rank` of the cluster has attended to split `rank` of the same 64 heads.
//
//   1. Each CTA publishes the results of its heads; the cluster synchronises.
//   2. Each CTA reads those of all splits, multiplies its accumulators with the weight of its split, and stages them in its own
//      shared memory, as fp16 numbers with a scale for each head; the cluster synchronises.
//   3. Each CTA adds up a share of the columns over all CTAs, in the order of their ranks, and writes it.
//
// The result does not depend on which CTA is first. A last barrier keeps shared memory alive until all CTAs have read it.
//
// Shared memory of other CTAs gives about 15 bytes per cycle, so fp16 halves the time; its rounding, 2**-12, is small beside that
// of a 16-bit output. Float32 outputs are merged by `merge_splits.cu`.
#pragma once
#include "items.cuh"

constexpr int MAX_CLUSTER = 16;
constexpr int STAGED_COLUMNS = VALUE_DIM + 8;  // of a staged head: with 8 more, eight heads lie in different banks
constexpr float LARGEST_STAGED = 60000.0f;     // a little less than fp16 holds, since `size` is rounded
constexpr u32 STAGED_BYTES = HEADS * STAGED_COLUMNS * 2;

// The results of one head of a work item.
struct HeadResult {
    float lse;        // in base 2; -inf for no row
    float max_logit;  // natural
    float factor;     // normalises the accumulators
};

// The shared memory of the merge, at the same addresses in all CTAs of a cluster. It is free when all products are done.
struct ClusterMerge {
    u32 staged;     // [HEADS][STAGED_COLUMNS] fp16
    u32 factors;    // [HEADS] float32: of the accumulators, when they are staged
    u32 published;  // [HEADS][4] float32: lse in base 2, largest logit, factor, largest accumulator of warpgroup 0
    u32 largest;    // [HEADS] float32: the largest accumulator of warpgroup 1
    u32 scales;     // [HEADS] float32: the factor of the sums of staged numbers

    __device__ __forceinline__ void sync_cluster() const {
        cluster_arrive();
        cluster_wait();
    }

    // The largest magnitude of a thread's accumulators of one of its heads, over the four lanes that share the head.
    template <int N>
    static __device__ __forceinline__ float largest_of(const float (&accumulators)[N][64], int below) {
        float found = 0.0f;
#pragma unroll
        for (int i = 0; i < N * 32; ++i) {
            found = fmaxf(found, fabsf(accumulators[i / 32][i % 32 / 2 * 4 + 2 * below + i % 2]));
        }
        return max_over_lanes<1, 4>(found);
    }

    // Step 1, by the four lanes of a head in warpgroup 0 and in warpgroup 1.
    __device__ __forceinline__ void publish(int head, const HeadResult& result, float largest_here) const {
        if (threadIdx.x % 4 != 0) return;
        shared_store4(published + head * 16, make_uint4(__float_as_uint(result.lse), __float_as_uint(result.max_logit),
                                                        __float_as_uint(result.factor), __float_as_uint(largest_here)));
    }

    __device__ __forceinline__ void publish(int head, float largest_here) const {
        __syncwarp();  // all lanes have read the rescale factors, which are overwritten
        if (threadIdx.x % 4 == 0) store_float(largest + head * 4, largest_here);
    }

    // By consumers: the first barrier, and the wait until the producers have weighed the split.
    __device__ __forceinline__ void wait_for_factors() const {
        sync_cluster();
        __syncthreads();
    }

    // Step 2, by the 256 producers, four neighbours for each head: the first barrier, and the factor of this split.
    __device__ __forceinline__ void weigh_split(int thread, const ItemOutput& out) const {
        constexpr int LANES = 4, EACH = MAX_CLUSTER / LANES;
        sync_cluster();
        const int head = thread / LANES, lane = thread % LANES;
        const u32 ranks = cluster_size();
        float lses[EACH], sizes[EACH], max_lse = minus_infinity(), max_logit = minus_infinity(), nan = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const u32 rank = lane + LANES * i;
            lses[i] = minus_infinity();
            sizes[i] = 0.0f;
            float logit = minus_infinity();
            if (rank < ranks) {
                const uint4 theirs = peer_load4(peer_address(published + head * 16, rank));
                lses[i] = __uint_as_float(theirs.x);
                logit = __uint_as_float(theirs.y);
                const float other = __uint_as_float(peer_load(peer_address(largest + head * 4, rank)));
                sizes[i] = fmaxf(__uint_as_float(theirs.w), other) * __uint_as_float(theirs.z);
            }
            // fmaxf drops NaN, so `nan` is NaN if any lse or logit is, and else 0.
            max_lse = fmaxf(max_lse, lses[i]);
            max_logit = fmaxf(max_logit, logit);
            if (lses[i] != lses[i] || logit != logit) nan = lses[i] + logit;
        }
        max_lse = max_over_lanes<1, LANES>(max_lse);
        max_logit = max_over_lanes<1, LANES>(max_logit);
        nan = sum_over_lanes<1, LANES>(nan);
        const float base = max_lse == minus_infinity() ? 0.0f : max_lse;
        float total = 0.0f, size = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const float weight = fast_exp2(lses[i] - base);
            total += weight;
            size = fmaxf(size, weight * sizes[i]);
        }
        total = sum_over_lanes<1, LANES>(total) + nan;
        size = max_over_lanes<1, LANES>(size);
        if (lane == 0) store_factor(head, base, total, size, max_logit + nan, out);
        __syncthreads();
    }

    // Stores the factor of this split, and the scale of the sums. `size` is the largest weighted output of any split, times
    // `total`. It is staged as LARGEST_STAGED, so that fp16 also holds columns that are a billion times smaller.
    __device__ __forceinline__ void store_factor(
        int head, float base, float total, float size, float max_logit, const ItemOutput& out) const {
        const uint4 own = shared_load4(published + head * 16);
        const bool empty = total == 0.0f;
        const float own_lse = __uint_as_float(own.x), lse = empty ? minus_infinity() : (base + fast_log2(total)) * LN_2;
        const float unit = fminf(fmaxf(size, 1e-30f), 1e30f) / LARGEST_STAGED;
        float scale = empty ? 0.0f : unit / total;
        if (head < out.heads) {
            if (out.sink != nullptr && !empty) scale *= 1.0f / (1.0f + fast_exp2((out.sink[head] - lse) * LOG2_E));
            if (cluster_rank() == 0) out.logits.store(head, lse, max_logit);
        }
        // A split without rows adds zeros.
        const float factor = __uint_as_float(own.z) / unit * fast_exp2(own_lse - base);
        store_float(factors + head * 4, own_lse == minus_infinity() ? 0.0f : factor);
        store_float(scales + head * 4, scale);
    }

    // Stages a warpgroup's accumulators of 128 columns from `column` on, times the factors of the thread's two heads (see
    // `softmax.cuh`).
    __device__ __forceinline__ void stage(const float (&accumulators)[64], int column) const {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const int head = first + 8 * below;
            const float factor = load_float(factors + head * 4);
            const u32 at = staged + (head * STAGED_COLUMNS + column + lane % 4 * 2) * 2;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const float a = accumulators[4 * i + 2 * below] * factor, b = accumulators[4 * i + 2 * below + 1] * factor;
                shared_store(at + i * 16, pack_fp16(a, b));
            }
        }
    }

    // Step 3, by all threads: both other barriers, and this CTA's share of the sums.
    template <int BATCH>
    __device__ __forceinline__ void merge(const ItemOutput& out) const {
        sync_cluster();
        add_share<BATCH>(out);
        sync_cluster();
    }

    // BATCH splits are loaded before any is added.
    template <int BATCH>
    __device__ __forceinline__ void add_share(const ItemOutput& out) const {
        constexpr int UNITS = HEADS * VALUE_DIM / 8;  // of eight columns
        const u32 ranks = cluster_size(), rank = cluster_rank();
        const auto address = reinterpret_cast<unsigned long long>(out.out);
        const bool whole_units = (address | out.head_stride * 2) % 16 == 0;
        const int end = min(static_cast<int>((rank + 1) * UNITS / ranks), out.heads * VALUE_DIM / 8);
        for (int unit = rank * UNITS / ranks + threadIdx.x; unit < end; unit += THREADS) {
            const int head = unit / (VALUE_DIM / 8), column = unit % (VALUE_DIM / 8) * 8;
            const u32 at = staged + (head * STAGED_COLUMNS + column) * 2;
            const float factor = load_float(scales + head * 4);
            float sums[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            for (u32 first = 0; first < ranks; first += BATCH) {
                uint4 values[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    values[i] = make_uint4(0, 0, 0, 0);
                    if (first + i < ranks) values[i] = peer_load4(peer_address(at, first + i));
                }
#pragma unroll
                for (int i = 0; i < BATCH; ++i) {
                    const u32 words[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float2 two = unpack_fp16(words[j]);
                        sums[2 * j] += two.x;
                        sums[2 * j + 1] += two.y;
                    }
                }
            }
            u32 packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float a = sums[2 * j] * factor, b = sums[2 * j + 1] * factor;
                packed[j] = out.kind == 1 ? pack_bf16(a, b) : pack_fp16(a, b);
            }
            unsigned short* const to = static_cast<unsigned short*>(out.out) + head * out.head_stride + column;
            if (whole_units) {
                *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            } else {
                *reinterpret_cast<uint2*>(to) = make_uint2(packed[0], packed[1]);
                *reinterpret_cast<uint2*>(to + 4) = make_uint2(packed[2], packed[3]);
            }
        }
    }
};
