// Sparse attention of 64 heads per CTA with wgmma, on Hopper, over FP8 rows: one CTA per work item (see `items.cuh`).
//
// Computes, for each query token and head, softmax(scale * q . k) v over the selected rows, its lse and its largest logit.
// Rows are V3.2's (512 e4m3, four float32 scales, 64 bf16 or none; the first 512 columns are values) or V4's (448 e4m3 and 64
// bf16, scale exponents in a plane of their own; all 512 columns are values).
//
// Roles of the four warpgroups, for every pair of blocks of 64 rows, which fill the two stages of a ring:
//   2, 3  dequantise  Producers. Each warp copies eight rows of a block into the stage's own room and turns them into fp16
//                     tiles there (`widen_rows.cuh`).
//   0, 1  attend      Consumers, as in `many_heads_bf16.cu`. Warpgroup g multiplies queries with the keys of stage g, does the
//                     online softmax, and publishes the weights. It holds half g of the output's columns as accumulators and
//                     adds both stages to them, stage 0 first.
//
// The order of a pair of blocks, left to right, where QK is the product with keys, PV the product with values, and what stands
// below one another runs at the same time:
//
//   warpgroup 0   softmax 0, publish    PV of stage 0                      PV of stage 1, next QK of stage 0
//   warpgroup 1   QK of stage 1         PV of stage 0 under softmax 1      PV of stage 1
//
// Numbers. Rows are fp16 numbers times a factor 2**E for each row. Products of rows with queries (fp16 or bf16, times a power of
// two per head) are exact in float32; times 2**E they are logits. In the product with values, weights carry the factor
// 2**(E - reference), where the reference is the largest E so far: weight * 2**E decides how much a row contributes, and fp16
// holds it down to 2**-34 of the largest.
//
// Splits of a token are merged by `merge_splits.cu`, or in a cluster of CTAs (`cluster_merge.cuh`).
//
// Defined by the host: V4 (0 or 1), ROPE_COLUMNS (64, or 0 for rows of 528 bytes), SELECTIONS (1 or 2), MERGE_IN_CLUSTER (0 or 1),
// THREADS, SHARED_BYTES, PARAMS_BYTES, and the registers per thread of the roles: ATTEND_REGISTERS, DEQUANTISE_REGISTERS.
#include "cluster_merge.cuh"
#include "instructions.cuh"
#include "items.cuh"
#include "scaled_numbers.cuh"
#include "softmax.cuh"
#include "stages.cuh"
#include "warpgroups.cuh"
#include "widen_rows.cuh"

// The named barrier of all consumers.
constexpr u32 CONSUMER_BARRIER = 1;

constexpr float NO_LOGIT = -1e30f;  // a running max that is finite, so that differences from it are

// ---- Queries

// The eight consumer warps convert the queries to fp16 tiles, times a power of two per head. HEAD_SCALE is its inverse times
// `scale`, so that it turns products of queries and rows into logits in base 2.
__device__ __forceinline__ void load_queries(
    u32 memory, const unsigned short* queries, long long head_stride, int heads, float scale) {
    constexpr int UNITS = WIDTH / 8, ROUNDS = (UNITS + 31) / 32, READERS = 2 * WARPS, AT_ONCE = 4;
    const int warp = threadIdx.x / 32 % READERS, lane = threadIdx.x % 32;
    for (int first = warp; first < HEADS; first += READERS * AT_ONCE) {
        uint4 words[AT_ONCE][ROUNDS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int head = first + i * READERS;
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const int unit = lane + 32 * round;
                words[i][round] = make_uint4(0, 0, 0, 0);
                if (head < heads && unit < UNITS) {
                    words[i][round] = *reinterpret_cast<const uint4*>(queries + head * head_stride + unit * 8);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int head = first + i * READERS;
            u32 largest = 0;
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) largest = max(largest, max_abs(words[i][round]));
            largest = __reduce_max_sync(FULL_MASK, largest);
            // The bounds keep the scale finite whatever the query holds, so that infinity and NaN show in the products.
            const int exponent = max(min(static_cast<int>(largest >> 7), 254), LOWEST_EXPONENT) - QUERY_EXPONENT;
            const float inverse = power_of_two(254 - exponent);
            if (lane == 0) store_float(memory + HEAD_SCALE + head * 4, power_of_two(exponent));
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const int unit = lane + 32 * round;
                const bool as_fp16 = V4 || 32 * round * 8 < VALUE_DIM;
                if (unit < UNITS) {
                    shared_store4(memory + QUERIES + unit / 8 * TILE_BYTES + swizzled(head, unit % 8),
                                  as_fp16 ? bf16_to_fp16(words[i][round], inverse) : scale_bf16(words[i][round], inverse));
                }
            }
        }
    }
    __syncwarp();
    if (lane < HEADS / READERS) {
        const u32 at = memory + HEAD_SCALE + (warp + lane * READERS) * 4;
        store_float(at, load_float(at) * scale);
    }
    fence_async_proxy();
    named_barrier_sync(CONSUMER_BARRIER, 2 * WARPS * 32);
}

// ---- Online softmax

// Raises a head's running max to a block's largest logit, if that is higher; returns the factor of everything that is relative
// to it. Logits are in base 2, and weights are exp2(logit - running_max).
__device__ __forceinline__ float raise_max(float& running_max, float logit) {
    const float before = running_max;
    running_max = fmaxf(before, logit);
    return fast_exp2(before - running_max);
}

// ---- Consumers

__device__ __forceinline__ ClusterMerge cluster_merge(u32 memory) {
    const u32 results = memory + WEIGHTS;
    return {memory + QUERIES, memory + HEAD_SCALE, results, results + HEADS * 16, results + HEADS * 20};
}

// A thread of consumer warpgroup GROUP, which multiplies the keys of stage GROUP and holds half GROUP of the output's columns.
template <int GROUP>
struct Consumer {
    u32 memory;      // address of shared memory
    int lane, warp;  // warp of the warpgroup
    float2 running_max = {NO_LOGIT, NO_LOGIT};  // of both warpgroups' logits, for the lane's heads `upper` and `lower`
    float reference = power_of_two(LOWEST_EXPONENT - SCALE_EXPONENT);  // the largest 2**E of a row, or a little more
    float values[2][64];   // accumulators of the output: two quarters of its columns

    __device__ __forceinline__ explicit Consumer(u32 memory) : memory(memory) {
        warp = threadIdx.x / 32 % WARPS;
        lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < 128; ++i) values[i / 64][i % 64] = 0.0f;
        if (lane % 4 == 0) {
            store_float(memory + TOTALS + GROUP * HEADS * 4 + head_offset(), 0.0f);
            store_float(memory + TOTALS + GROUP * HEADS * 4 + head_offset() + 32, 0.0f);
        }
    }

    __device__ __forceinline__ u32 head_offset() const { return (warp * 16 + lane / 4) * 4; }

    // Issues the products of queries with the keys of the warpgroup's stage that a load brings, once it is there. `parity` is that of
    // the pass over the ring.
    __device__ __forceinline__ void score(float (&s)[32], int load, u32 parity) const {
        mbarrier_wait(full(memory, GROUP, load), parity);
        const u32 base = opaque(memory);  // descriptors are made again every time, since registers are scarce
        const auto queries = k_major(base + QUERIES), keys = k_major(stage_tiles(base, GROUP));
        wgmma_fence();
#pragma unroll
        for (int chunk = first_chunk(load); chunk <= last_chunk(load); ++chunk) {
#pragma unroll
            for (int step = 0; step < 4 * tiles_of(chunk); ++step) {
                const u32 at = (first_tile(GROUP, chunk) + step / 4) * TILE_BYTES + step % 4 * 32;
                const bool accumulate = chunk + step > (TILES == 8);
                if (chunk == 0) wgmma_ss<BF16>(s, advance(queries, at), advance(keys, at), accumulate);
                else wgmma_ss<FP16>(s, advance(queries, at), advance(keys, at), accumulate);
            }
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void score(float (&s)[32], u32 parity) const {
#pragma unroll
        for (int load = 0; load < LOADS; ++load) score(s, load, parity);
    }

    // Loads the factors of this lane's columns, while the products run, and waits for these.
    __device__ __forceinline__ void finish_scores(float (&s)[32], u32 (&factors)[8], float2& scales) const {
        load_factors(factors);
        scales.x = load_float(memory + HEAD_SCALE + head_offset());
        scales.y = load_float(memory + HEAD_SCALE + head_offset() + 32);
        wgmma_wait<0>(s);
        if (TILES > 8 && lane == 0) mbarrier_arrive(empty(memory, GROUP, 0));
    }

    __device__ __forceinline__ void load_factors(u32 (&factors)[8]) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 words = shared_load4(memory + FACTORS + GROUP * FACTOR_BYTES + lane % 4 * 32 + i * 16);
            factors[4 * i] = words.x, factors[4 * i + 1] = words.y, factors[4 * i + 2] = words.z, factors[4 * i + 3] = words.w;
        }
    }

    // The online softmax of a block is in three parts, so that products are issued between them. `raise` multiplies the products
    // with their rows' factors, and raises the running max and the reference; it returns the rescale factors of the sums.
    __device__ __forceinline__ float2 raise(float (&s)[32], const u32 (&factors)[8], float2 scales, float& reference_factor) {
        u32 highest = factors[0], signs = factors[0];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            highest = __vmaxs2(highest, factors[i]);
            signs |= factors[i];
            const float even = low_bf16(factors[i]), odd = high_bf16(factors[i]);
            s[4 * i] *= even * scales.x, s[4 * i + 1] *= odd * scales.x;
            s[4 * i + 2] *= even * scales.y, s[4 * i + 3] *= odd * scales.y;
        }
        if (signs & 0x80008000) {  // some rows do not exist
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                if (factors[i / 4] & (i % 2 ? 0x80000000u : 0x8000u)) s[i] = minus_infinity();
            }
        }
        float largest[8];  // several short chains of fmaxf, since nothing hides the latency of a long one
#pragma unroll
        for (int i = 0; i < 8; ++i) largest[i] = fmaxf(fmaxf(s[i], s[8 + i]), fmaxf(s[16 + i], s[24 + i]));
        const float above = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[4], largest[5]));
        const float below = fmaxf(fmaxf(largest[2], largest[3]), fmaxf(largest[6], largest[7]));
        const float of_rows = max_over_lanes<1, 4>(fmaxf(low_bf16(highest), high_bf16(highest)));
        const float2 rescales = {raise_max(running_max.x, max_over_lanes<1, 4>(above)),
                                 raise_max(running_max.y, max_over_lanes<1, 4>(below))};
        reference_factor = set_reference(of_rows > reference ? of_rows * SPARE : reference);  // the same in all lanes of all warps
        return rescales;
    }

    // Changes the reference; returns the factor of the accumulators that follows.
    __device__ __forceinline__ float set_reference(float changed) {
        const float factor = reference * power_of_two(254 - biased_exponent(changed));
        reference = changed;
        return factor;
    }

    // Turns logits over their heads' scales into weights, as fragments times their rows' factors; returns the sums of this
    // lane's weights of both heads. Factors are loaded again, since
    // registers are scarce here.
    __device__ __forceinline__ float2 exponentials(const float (&s)[32], u32 (&weights)[4][4]) const {
        const float inverse = HEADROOM * power_of_two(254 - biased_exponent(reference));
        float above = 0.0f, below = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const uint4 words = shared_load4(memory + FACTORS + GROUP * FACTOR_BYTES + lane % 4 * 32 + i * 4);
            const u32 factors[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int at = 4 * (i + j);
                const float even = low_bf16(factors[j]) * inverse, odd = high_bf16(factors[j]) * inverse;
                const float a = fast_exp2(s[at] - running_max.x);
                const float b = fast_exp2(s[at + 1] - running_max.x);
                const float c = fast_exp2(s[at + 2] - running_max.y);
                const float d = fast_exp2(s[at + 3] - running_max.y);
                above += a + b;
                below += c + d;
                weights[(i + j) / 2][j % 2 * 2] = pack_fp16(a * even, b * odd);
                weights[(i + j) / 2][j % 2 * 2 + 1] = pack_fp16(c * even, d * odd);
            }
        }
        return {above, below};
    }

    // The sums of both heads over this warpgroup's stages are in shared memory, since registers are scarce. They are multiplied
    // with a factor, and a lane's weights of a block are added.
    __device__ __forceinline__ void rescale_sums(float2 factors, float2 added) const {
        const u32 at = memory + TOTALS + GROUP * HEADS * 4 + head_offset();
        if (lane % 4 != 0) return;
        store_float(at, load_float(at) * factors.x + added.x);
        store_float(at + 32, load_float(at + 32) * factors.y + added.y);
    }

    __device__ __forceinline__ void add_sums(float2 factors, float2 weights) const {
        rescale_sums(factors, make_float2(sum_over_lanes<1, 4>(weights.x), sum_over_lanes<1, 4>(weights.y)));
    }

    // Weights pass between the two warps of the same heads, one of each warpgroup, as fragments of the A operand.
    __device__ __forceinline__ u32 fragment(int step) const { return memory + WEIGHTS + ((warp * 4 + step) * 32 + lane) * 16; }
    __device__ __forceinline__ u32 rescale_of_head() const { return memory + RESCALE + (warp * 8 + lane / 4) * 16; }
    __device__ __forceinline__ u32 weights_full(int group) const { return memory + WEIGHTS_FULL + (group * WARPS + warp) * 8; }

    // Publishes the weights of the warpgroup's own stage. The other warpgroup has received what was there before: it is the one
    // that published last.
    __device__ __forceinline__ void publish(const u32 (&weights)[4][4], float2 rescales) const {
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            shared_store4(fragment(step), make_uint4(weights[step][0], weights[step][1], weights[step][2], weights[step][3]));
        }
        if (lane % 4 == 0) {
            shared_store4(rescale_of_head(), make_uint4(__float_as_uint(rescales.x), __float_as_uint(rescales.y),
                                                        __float_as_uint(running_max.x), __float_as_uint(running_max.y)));
        }
        if (lane == 0) store_float(memory + REFERENCE + warp * 4, reference);
        mbarrier_arrive(weights_full(GROUP));
    }

    // What the other warpgroup has published beside its weights.
    struct Published {
        uint4 heads;
        float reference;
    };

    __device__ __forceinline__ Published receive(u32 (&weights)[4][4], u32 parity) const {
        mbarrier_wait(weights_full(1 - GROUP), parity);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint4 words = shared_load4(fragment(step));
            weights[step][0] = words.x, weights[step][1] = words.y, weights[step][2] = words.z, weights[step][3] = words.w;
        }
        return {shared_load4(rescale_of_head()), load_float(memory + REFERENCE + warp * 4)};
    }

    // Adopts the other warpgroup's running max and reference; returns the rescale factors of the accumulators.
    __device__ __forceinline__ float2 follow(const Published& published) {
        const float2 rescales = {__uint_as_float(published.heads.x), __uint_as_float(published.heads.y)};
        running_max.x = __uint_as_float(published.heads.z);
        running_max.y = __uint_as_float(published.heads.w);
        rescale_sums(rescales, make_float2(0.0f, 0.0f));
        const float factor = set_reference(published.reference);
        return {rescales.x * factor, rescales.y * factor};
    }

    // Rescales a quarter of the accumulators. A test whether the factors are 1 would be a branch between wgmma and their wait.
    __device__ __forceinline__ void rescale_quarter(int quarter, float2 rescales) {
#pragma unroll
        for (int i = 0; i < 64; ++i) values[quarter][i] *= i & 2 ? rescales.y : rescales.x;
    }

    // Rescales the accumulators and issues the products of weights with a stage's values in this warpgroup's columns, as two
    // groups.
    __device__ __forceinline__ void issue_values(const u32 (&weights)[4][4], int stage, float2 rescales) {
        rescale_quarter(0, rescales);
        issue_quarter(weights, stage, 0);
        rescale_quarter(1, rescales);
        issue_quarter(weights, stage, 1);
    }

    // Waits for these products, while PENDING later groups are in flight, and releases their chunks.
    template <int PENDING>
    __device__ __forceinline__ void finish_values(int stage) {
        finish_quarter<PENDING + 1>(stage, 0);
        finish_quarter<PENDING>(stage, 1);
    }

    __device__ __forceinline__ void issue_quarter(const u32 (&weights)[4][4], int stage, int quarter) {
        const u32 tiles = stage_tiles(opaque(memory), stage) + first_tile(stage, chunk_of(stage, GROUP, quarter)) * TILE_BYTES;
        const auto rows = mn_major(tiles, TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_rs<FP16>(values[quarter], weights[step], advance(rows, step * 2048));
        wgmma_commit();
    }

    // Waits for the product with a quarter, while PENDING later ones are in flight, and releases its chunk.
    template <int PENDING>
    __device__ __forceinline__ void finish_quarter(int stage, int quarter) {
        wgmma_wait<PENDING>(values[quarter]);
        if (lane == 0) mbarrier_arrive(empty(memory, stage, chunk_of(stage, GROUP, quarter)));
    }

    // The results of head `upper` or `lower`, after the last block.
    __device__ __forceinline__ HeadResult result_of(float running_max, u32 offset) const {
        const u32 at = memory + TOTALS + offset;
        const float sum = load_float(at) + load_float(at + HEADS * 4);
        const bool empty = sum == 0.0f;
        const float max_logit = sum == sum ? running_max * LN_2 : sum;  // fmaxf drops NaN
        return {empty ? minus_infinity() : running_max + fast_log2(sum), max_logit, empty ? 0.0f : reference / HEADROOM / sum};
    }

    // Merges the sums of both warpgroups and writes the results.
    template <class OutputOf>
    __device__ __forceinline__ void store(const OutputOf& output_of) {
        named_barrier_sync(CONSUMER_BARRIER, 2 * WARPS * 32);
        const int head = warp * 16 + lane / 4;
        const HeadResult results[2] = {result_of(running_max.x, head * 4), result_of(running_max.y, head * 4 + 32)};
        if (MERGE_IN_CLUSTER) {
            const ClusterMerge end = cluster_merge(memory);
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (GROUP == 0) end.publish(head + 8 * i, results[i], end.largest_of(values, i));
                else end.publish(head + 8 * i, end.largest_of(values, i));
            }
            end.wait_for_factors();
#pragma unroll
            for (int i = 0; i < 2; ++i) end.stage(values[i], column(i));
            end.merge<8>(output_of());
            return;
        }
        const ItemOutput out = output_of();
        float factors[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int own = head + 8 * i;
            factors[i] = results[i].factor;
            if (own >= out.heads) continue;
            if (out.sink != nullptr && factors[i] != 0.0f) {
                factors[i] *= 1.0f / (1.0f + fast_exp2(out.sink[own] * LOG2_E - results[i].lse));
            }
            if (GROUP == 0 && lane % 4 == 0) out.logits.store(own, results[i].lse * LN_2, results[i].max_logit);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) out.store(values[i], column(i), factors[0], factors[1]);
    }

    static __device__ __forceinline__ int column(int quarter) { return GROUP * VALUE_DIM / 2 + quarter * VALUE_DIM / 4; }
};

// Warpgroup 0. `output_of` computes the destination of the results, at the end, when registers are free.
//
// The compiler serialises all wgmma of a kernel if a branch, a loop's exit included, lies between wgmma and a wait for some of
// them. The last pair is therefore told apart before its last products are issued.
template <class OutputOf>
__device__ __forceinline__ void attend_first(u32 memory, int pairs, const OutputOf& output_of) {
    Consumer<0> consumer(memory);
    float s[32];
    if (pairs > 0) {
        u32 parity = 0;  // of the pass over the ring
        consumer.score(s, parity);
        wgmma_wait<0>(s);
        for (int left = pairs;; --left) {
            u32 weights[4][4], factors[8];
            float2 scales;
            float reference_factor;
            consumer.finish_scores(s, factors, scales);
            const float2 rescales = consumer.raise(s, factors, scales, reference_factor);
            const float2 sums = consumer.exponentials(s, weights);
            consumer.publish(weights, rescales);
            consumer.issue_values(weights, 0, make_float2(rescales.x * reference_factor, rescales.y * reference_factor));
            consumer.add_sums(rescales, sums);
            consumer.template finish_values<0>(0);
            const float2 others = consumer.follow(consumer.receive(weights, parity));
            if (left == 1) {
                consumer.issue_values(weights, 1, others);
                consumer.template finish_values<0>(1);
                break;
            }
            consumer.issue_values(weights, 1, others);
            parity ^= 1;
            consumer.score(s, 0, parity);
            consumer.template finish_values<1>(1);
#pragma unroll
            for (int load = 1; load < LOADS; ++load) consumer.score(s, load, parity);
        }
    }
    let_next_kernel_start();
    consumer.store(output_of);
}

// Warpgroup 1.
template <class OutputOf>
__device__ __forceinline__ void attend_second(u32 memory, int pairs, const OutputOf& output_of) {
    Consumer<1> consumer(memory);
    float s[32];
    u32 parity = 0;  // of the pass over the ring
    for (int left = pairs; left > 0; --left, parity ^= 1) {
        u32 first[4][4], second[4][4], factors[8];
        float2 scales;
        float reference_factor;
        consumer.score(s, parity);
        const auto published = consumer.receive(first, parity);  // while the products run
        consumer.finish_scores(s, factors, scales);
        const float2 others = consumer.follow(published);
        const float2 raised = consumer.raise(s, factors, scales, reference_factor);
        consumer.issue_values(first, 0, others);
        const float2 sums = consumer.exponentials(s, second);
        consumer.publish(second, raised);
        consumer.add_sums(raised, sums);
        const float2 rescales = {raised.x * reference_factor, raised.y * reference_factor};
        consumer.template finish_quarter<1>(0, 0);
        consumer.rescale_quarter(0, rescales);
        consumer.issue_quarter(second, 1, 0);
        consumer.template finish_quarter<1>(0, 1);
        consumer.rescale_quarter(1, rescales);
        consumer.issue_quarter(second, 1, 1);
        consumer.template finish_values<0>(1);
    }
    let_next_kernel_start();
    consumer.store(output_of);
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_many_heads(const __grid_constant__ ManyHeadsParams given) {
    const ManyHeadsParams params = given;  // the compiler would load fields of the parameter again after every barrier
    const u32 memory = tile_memory();
    const Items items = {params};
    const QueryParams& query = params.query;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            for (int load = 0; load < LOADS; ++load) mbarrier_init(full(memory, stage, load), WARPS * 4);
            for (int chunk = 0; chunk < CHUNKS; ++chunk) mbarrier_init(empty(memory, stage, chunk), WARPS);
        }
        for (int i = 0; i < 2 * WARPS; ++i) mbarrier_init(memory + WEIGHTS_FULL + i * 8, 32);
        fence_mbarrier_init();
    }
    const Place place = items.place(blockIdx.x);
    if (threadIdx.x == 0) shared_store4(memory + PLACE, make_uint4(place.token, place.first_head, place.split, 0));
    wait_for_previous_kernel();
    const Work<SELECTIONS> work = items.work<SELECTIONS, STAGES>(place);
    const unsigned short* const start = query.q + place.token * query.token_stride + place.first_head * query.head_stride;
    __syncthreads();

    // The end reads the place from shared memory and the parameter itself, so that they hold no registers until then.
    const auto output_of = [&] {
        const uint4 stored = shared_load4(memory + PLACE);
        return Items{given}.output({static_cast<int>(stored.x), static_cast<int>(stored.y), static_cast<int>(stored.z)});
    };
    const int warpgroup = threadIdx.x / (WARPS * 32);
    if (warpgroup >= 2) {
        warpgroup_reg_dealloc<DEQUANTISE_REGISTERS>();
        if (warpgroup == 2) dequantise_rows<0>(memory, work);
        else dequantise_rows<1>(memory, work);
        if (!MERGE_IN_CLUSTER) return;
        const ClusterMerge end = cluster_merge(memory);
        end.weigh_split(threadIdx.x % (2 * WARPS * 32), output_of());
        end.merge<4>(output_of());  // producers have few registers
        return;
    }
    const float scale = query.scale * (query.scale_factor == nullptr ? 1.0f : *query.scale_factor) * LOG2_E;
    load_queries(memory, start, query.head_stride, min(query.heads - place.first_head, HEADS), scale);
    warpgroup_reg_alloc<ATTEND_REGISTERS>();
    const int pairs = (work.end - work.begin + 1) / STAGES;
    if (warpgroup == 0) attend_first(memory, pairs, output_of);
    else attend_second(memory, pairs, output_of);
}
