// Sparse attention of 64 heads per CTA with wgmma, on Hopper, over bf16 rows. CTAs are persistent, one per SM, and take one
// work item after the other (see `items.cuh`).
//
// Computes, for each query token and head, softmax(scale * q . k) v over the selected rows, its lse and its largest logit.
// Rows have WIDTH bf16 columns, 576 in V3.2 and 512 in V4 or without a rope, of which the first 512 are values.
//
// Roles of the three warpgroups, for every pair of blocks of 64 rows, which fill the two stages of a ring:
//   2     gather  Producer. Copies rows with cp.async straight into swizzled tiles, and the queries of the next work item.
//   0, 1  attend  Consumers. Warpgroup g multiplies queries with the keys of stage g, does the online softmax, and publishes
//                 the weights. It holds half g of the output's columns as accumulators and adds both stages to them, stage
//                 0 first: stage g with weights from registers, the other one with the published weights.
//
// The softmax of one warpgroup thus overlaps with wgmma of the other, and the accumulators of the output, which are half of
// all registers, are not held twice. The order of a pair of blocks, left to right, where QK is the product with keys, PV the
// product with values, and what stands below one another runs at the same time:
//
//   warpgroup 0   softmax 0, publish    PV of stage 0                      PV of stage 1, next QK of stage 0
//   warpgroup 1   QK of stage 1         PV of stage 0 under softmax 1      PV of stage 1
//
// Warpgroup 0 issues its next QK behind products that still run. Both warpgroups rescale and issue the two quarters of their
// accumulators one after the other, so that products with the first run while the second is rescaled.
//
// Shared memory (227 KiB) holds the queries, the ring of two stages (72 KiB each) and the published weights. The columns of a
// stage are five chunks with an empty mbarrier each; the first has no columns if rows have 512. A chunk is refilled as soon as
// it has been read for the last time: columns 512 and up, which are only keys, after the product with queries; a quarter of
// the values after the warpgroup that holds these columns of the output has added it.
//
// Budget for a pair of blocks of 576 columns (H200): 4,352 cycles of wgmma, 2,304 with keys and 2,048 with values; 144 KiB of
// rows, 4,400 cycles from L2; 4,850 wavefronts of shared memory.
//
// Weights are relative to the exact running max, which the warpgroups pass to one another with the weights: the largest
// weight is one, which rounding to bf16 leaves as it is. The output is divided by the sum of the rounded weights; the lse
// is computed from the weights before rounding.
//
// Defined by the host: WIDTH, SELECTIONS (1 or 2), KEEP_REST (whether what rounding cuts off a bf16 output is written as well),
// THREADS, SHARED_BYTES, PARAMS_BYTES, and the registers per thread of the roles: ATTEND_REGISTERS, GATHER_REGISTERS.
#include "instructions.cuh"
#include "items.cuh"
#include "softmax.cuh"
#include "tile_copier.cuh"
#include "warpgroups.cuh"

// ---- Shapes

constexpr int TILES = WIDTH / 64, ROW_BYTES = WIDTH * 2;
static_assert(WIDTH == 576 || WIDTH == 512, "rows have 512 columns of values, and at most 64 more");
constexpr int STAGES = 2;  // of the ring; a stage holds a block of 64 rows
constexpr int CHUNKS = 5;  // of the columns of a stage

// The chunks of a stage in the order in which they are released: columns 512 and up; the two quarters of the values that the
// stage's own warpgroup adds, which has the weights first; the two that the other warpgroup adds. They are filled in three
// loads with a full mbarrier each, the first three chunks together.
__device__ constexpr int chunk_of(int stage, int half, int quarter) { return (half == stage ? 1 : 3) + quarter; }
__device__ constexpr int first_tile(int stage, int chunk) {
    return chunk == 0 ? 8 : (chunk < 3 ? stage : 1 - stage) * 4 + (chunk - 1) % 2 * 2;
}
__device__ constexpr int tiles_of(int chunk) { return chunk == 0 ? TILES - 8 : 2; }
constexpr int LOADS = 3;
__device__ constexpr int first_chunk(int load) { return load == 0 ? 0 : load + 2; }
__device__ constexpr int last_chunk(int load) { return load + 2; }

// ---- Shared memory

constexpr u32 STAGE_BYTES = TILES * TILE_BYTES;
constexpr u32 QUERIES = 0;                               // [TILES][64 heads][64 columns] bf16
constexpr u32 RING = QUERIES + STAGE_BYTES;              // [STAGES][TILES][64 rows][64 columns] bf16
constexpr u32 WEIGHTS = RING + STAGES * STAGE_BYTES;     // [WARPS][4][32] fragments, written by the warpgroups in turn
constexpr u32 RESCALE = WEIGHTS + WARPS * 4 * 32 * 16;   // [WARPS][8][4] rescale factors and running max of two heads
constexpr u32 TOTALS = RESCALE + WARPS * 8 * 16;         // [2][HEADS][4] sums and largest logits: see `total`
constexpr u32 PRESENT = TOTALS + 2 * HEADS * 16;         // [STAGES][WARPS] a bit for each row that exists
constexpr u32 PAIRS = PRESENT + STAGES * WARPS * 4;      // pairs of blocks of the work item whose queries are in QUERIES
constexpr u32 FULL = PAIRS + 8;                          // [STAGES][LOADS] mbarriers, as all that follow
constexpr u32 EMPTY = FULL + STAGES * LOADS * 8;         // [STAGES][CHUNKS]
constexpr u32 QUERIES_FULL = EMPTY + STAGES * CHUNKS * 8;
constexpr u32 QUERIES_EMPTY = QUERIES_FULL + 8;
constexpr u32 WEIGHTS_FULL = QUERIES_EMPTY + 8;          // [2][WARPS] one for each warp that publishes weights
constexpr u32 USED = WEIGHTS_FULL + 2 * WARPS * 8;
static_assert(USED <= SHARED_BYTES && PRESENT % 16 == 0 && FULL % 8 == 0, "shared memory is too small or not aligned");

// The named barrier of all consumers.
constexpr u32 CONSUMER_BARRIER = 1;

__device__ __forceinline__ u32 full(u32 memory, int stage, int load) { return memory + FULL + (stage * LOADS + load) * 8; }
__device__ __forceinline__ u32 empty(u32 memory, int stage, int chunk) { return memory + EMPTY + (stage * CHUNKS + chunk) * 8; }

// ---- Producer

// Copies the rows and queries of all work items of this CTA. `query_of` returns the address of a head's query, or null.
template <class WorkOf, class QueryOf>
__device__ __forceinline__ void gather(u32 memory, int items, const WorkOf& work_of, const QueryOf& query_of) {
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32, own = warp * WARP_ROWS + lane % WARP_ROWS;
    TileCopier rows;
    u32 parity = 1, item_parity = 1;  // of the empty mbarriers' phases that must have ended
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const unsigned char* const query = query_of(item, own);
        const Work<SELECTIONS> work = work_of(item);
        const int pairs = (work.end - work.begin + 1) / 2;
        const auto announce = [&] {
            mbarrier_wait(memory + QUERIES_EMPTY, item_parity);
            if (threadIdx.x % (WARPS * 32) == 0) {
                shared_store(memory + PAIRS, pairs);
                mbarrier_arrive(memory + QUERIES_FULL);
            }
        };
        RowWalker<SELECTIONS, ROW_BYTES> walker(work, own);
        const unsigned char* next = walker.next();
        if (pairs == 0) {
            announce();
            cp_async_mbarrier_arrive(memory + QUERIES_FULL);
        }
        for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
            for (int stage = 0; stage < STAGES; ++stage) {
                const u32 present = __ballot_sync(FULL_MASK, next != nullptr) & (1u << WARP_ROWS) - 1;
                rows.take(next);
                next = walker.next();
#pragma unroll
                for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                    // The queries of the work item before are in use until its last keys have been multiplied. The first
                    // load of this item's first stage does not have to wait for that.
                    if (stage == 0 && chunk == first_chunk(1) && pair == 0) {
                        TileCopier heads;
                        heads.take(query);
                        announce();
                        heads.copy(memory + QUERIES, 0, TILES);
                        cp_async_mbarrier_arrive(memory + QUERIES_FULL);
                    }
                    mbarrier_wait(empty(memory, stage, chunk), parity);
                    if (chunk == 0 && lane == 0) {
                        shared_store(memory + PRESENT + (stage * WARPS + warp) * 4, present);
                        mbarrier_arrive(full(memory, stage, 0));
                    }
                    rows.copy(memory + RING + stage * STAGE_BYTES, first_tile(stage, chunk), tiles_of(chunk));
                    if (chunk >= last_chunk(0)) cp_async_mbarrier_arrive(full(memory, stage, chunk - last_chunk(0)));
                }
            }
            parity ^= 1;
        }
        item_parity ^= 1;
    }
}

// ---- Online softmax

// The state of one head of a lane, `upper` or `lower` (see `softmax.cuh`).
struct Softmax {
    float max_logit = minus_infinity();  // the largest logit of this warpgroup's stages, in base 2
    float running_max = -1e30f;          // of both warpgroups' stages; weights are exp2(logit - running_max)
    float sum = 0.0f;                    // of the weights in this lane's columns
    float rounded_sum = 0.0f;            // of the same weights, rounded to bf16

    __device__ __forceinline__ void rescale_sums(float factor) {
        sum *= factor;
        rounded_sum *= factor;
    }

    // Raises the running max to a block's largest logit, if that is higher; returns the rescale factor of the accumulators.
    __device__ __forceinline__ float raise(float logit) {
        max_logit = fmaxf(max_logit, logit);
        const float before = running_max;
        running_max = fmaxf(before, logit);
        const float factor = fast_exp2(before - running_max);
        rescale_sums(factor);
        return factor;
    }
};

// Sets the products of rows that do not exist to -inf.
__device__ __forceinline__ void mask(float (&s)[32], uint4 present) {
    if ((present.x & present.y & present.z & present.w) == (1u << WARP_ROWS) - 1) return;
    const u32 words[2] = {present.x | present.y << 16, present.z | present.w << 16};
    const int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        if (!(words[i / 16] >> (i / 4 % 4 * 8 + i % 2 + first) & 1)) s[i] = minus_infinity();
    }
}

// The online softmax of a block is in three parts, so that products are issued between them: `raise_max`, which returns the
// rescale factors of both heads; `exponentials`, which turns the products into weights, as float32 in place and as fragments;
// and `add_sums`, for which nobody waits. `scale` turns products of queries and rows into logits in base 2.
__device__ __forceinline__ float2 raise_max(const float (&s)[32], float scale, Softmax& upper, Softmax& lower) {
    float largest[8];  // several short chains of fmaxf, since nothing hides the latency of a long one
#pragma unroll
    for (int i = 0; i < 8; ++i) largest[i] = fmaxf(fmaxf(s[i], s[8 + i]), fmaxf(s[16 + i], s[24 + i]));
    const float above = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[4], largest[5]));
    const float below = fmaxf(fmaxf(largest[2], largest[3]), fmaxf(largest[6], largest[7]));
    return {upper.raise(max_over_lanes<1, 4>(above) * scale), lower.raise(max_over_lanes<1, 4>(below) * scale)};
}

__device__ __forceinline__ void exponentials(
    float (&s)[32], float scale, const Softmax& upper, const Softmax& lower, u32 (&weights)[4][4]) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        const float running_max = i % 2 ? lower.running_max : upper.running_max;
        s[2 * i] = fast_exp2(s[2 * i] * scale - running_max);
        s[2 * i + 1] = fast_exp2(s[2 * i + 1] * scale - running_max);
        weights[i / 4][i % 4] = pack_bf16(s[2 * i], s[2 * i + 1]);
    }
}

// Adds a block's weights to the sums of both heads.
__device__ __forceinline__ void add_sums(const float (&s)[32], const u32 (&weights)[4][4], Softmax& upper, Softmax& lower) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        Softmax& head = i % 2 ? lower : upper;
        const u32 pair = weights[i / 4][i % 4];
        head.sum += s[2 * i] + s[2 * i + 1];
        head.rounded_sum += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000u);
    }
}

// ---- Consumers

// A thread of consumer warpgroup GROUP, which multiplies the keys of stage GROUP and holds half GROUP of the output's columns.
template <int GROUP>
struct Consumer {
    u32 memory;            // address of shared memory
    float scale;           // turns products of queries and rows into logits in base 2
    int lane, warp, head;  // warp of the warpgroup; head `upper` of the lane
    u32 load_parity = 0;   // of the current pass over the ring
    u32 parity = 0;        // of the current exchange of weights
    Softmax upper, lower;
    float values[2][64];   // accumulators of the output: two quarters of its columns

    __device__ __forceinline__ Consumer(u32 memory, float scale) : memory(memory), scale(scale) {
        warp = threadIdx.x / 32 % WARPS;
        lane = threadIdx.x % 32;
        head = warp * 16 + lane / 4;
    }

    __device__ __forceinline__ void start_item() {
        upper = lower = Softmax();
#pragma unroll
        for (int i = 0; i < 128; ++i) values[i / 64][i % 64] = 0.0f;
    }

    // Issues the products of queries with the keys of the warpgroup's stage that a load brings, once it has arrived.
    __device__ __forceinline__ void score(float (&s)[32], int load) {
        mbarrier_wait(full(memory, GROUP, load), load_parity);  // no fence: see cp_async_zfill
        const auto queries = k_major(memory + QUERIES), keys = k_major(memory + RING + GROUP * STAGE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int chunk = first_chunk(load); chunk <= last_chunk(load); ++chunk) {
#pragma unroll
            for (int step = 0; step < 4 * tiles_of(chunk); ++step) {
                const u32 at = (first_tile(GROUP, chunk) + step / 4) * TILE_BYTES + step % 4 * 32;
                wgmma_ss<BF16>(s, advance(queries, at), advance(keys, at), chunk + step > (TILES == 8));
            }
        }
        wgmma_commit();
        if (load == LOADS - 1) load_parity ^= 1;
    }

    __device__ __forceinline__ void score(float (&s)[32]) {
#pragma unroll
        for (int load = 0; load < LOADS; ++load) score(s, load);
    }

    // Waits for these products, and masks them. `last`: of the work item.
    __device__ __forceinline__ void finish_scores(float (&s)[32], bool last) const {
        const uint4 present = shared_load4(memory + PRESENT + GROUP * WARPS * 4);
        wgmma_wait<0>(s);
        __syncwarp();  // every lane has read `present`
        if (lane == 0) mbarrier_arrive(empty(memory, GROUP, 0));
        if (last) release_queries();
        mask(s, present);
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
                                                        __float_as_uint(upper.running_max), __float_as_uint(lower.running_max)));
        }
        mbarrier_arrive(weights_full(GROUP));
    }

    // Receives what the other warpgroup has published: the weights, and the factors and running max for `follow`.
    __device__ __forceinline__ uint4 receive(u32 (&weights)[4][4]) {
        mbarrier_wait(weights_full(1 - GROUP), parity);
        parity ^= 1;
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint4 words = shared_load4(fragment(step));
            weights[step][0] = words.x, weights[step][1] = words.y, weights[step][2] = words.z, weights[step][3] = words.w;
        }
        return shared_load4(rescale_of_head());
    }

    // Adopts the other warpgroup's running max; returns the rescale factors of both heads.
    __device__ __forceinline__ float2 follow(uint4 published) {
        const float2 rescales = {__uint_as_float(published.x), __uint_as_float(published.y)};
        upper.running_max = __uint_as_float(published.z);
        lower.running_max = __uint_as_float(published.w);
        upper.rescale_sums(rescales.x);
        lower.rescale_sums(rescales.y);
        return rescales;
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
        const u32 tiles = memory + RING + stage * STAGE_BYTES + first_tile(stage, chunk_of(stage, GROUP, quarter)) * TILE_BYTES;
        const auto rows = mn_major(tiles, TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_rs<BF16>(values[quarter], weights[step], advance(rows, step * 2048));
        wgmma_commit();
    }

    // Waits for the product with a quarter, while PENDING later ones are in flight, and releases its chunk.
    template <int PENDING>
    __device__ __forceinline__ void finish_quarter(int stage, int quarter) {
        wgmma_wait<PENDING>(values[quarter]);
        if (lane == 0) mbarrier_arrive(empty(memory, stage, chunk_of(stage, GROUP, quarter)));
    }

    __device__ __forceinline__ void release_queries() const {
        __syncwarp();  // every lane has read the number of pairs
        if (lane == 0) mbarrier_arrive(memory + QUERIES_EMPTY);
    }

    // Adds up a head's sums over its lanes, and writes them and its largest logit for the other warpgroup.
    __device__ __forceinline__ void total(Softmax& own, int number) const {
        own.sum = sum_over_lanes<1, 4>(own.sum);
        own.rounded_sum = sum_over_lanes<1, 4>(own.rounded_sum);
        if (lane % 4 == 0) {
            shared_store4(memory + TOTALS + (GROUP * HEADS + number) * 16,
                          make_uint4(__float_as_uint(own.sum), __float_as_uint(own.rounded_sum), __float_as_uint(own.max_logit), 0));
        }
    }

    // Adds the other warpgroup's sums of a head, once it has written them.
    __device__ __forceinline__ void add_total(Softmax& own, int number) const {
        const uint4 other = shared_load4(memory + TOTALS + ((1 - GROUP) * HEADS + number) * 16);
        own.sum += __uint_as_float(other.x);
        own.rounded_sum += __uint_as_float(other.y);
        own.max_logit = fmaxf(own.max_logit, __uint_as_float(other.z));
    }

    // Writes the lse and max_logits of a head; returns the factor that normalises its accumulators.
    __device__ __forceinline__ float finish(const Softmax& all, int number, const ItemOutput& out) const {
        const bool empty = all.sum == 0.0f;
        const float lse = empty ? minus_infinity() : (all.running_max + fast_log2(all.sum)) * LN_2;
        float factor = empty ? 0.0f : 1.0f / all.rounded_sum;
        if (number < out.heads) {
            if (out.sink != nullptr && !empty) factor *= 1.0f / (1.0f + fast_exp2((out.sink[number] - lse) * LOG2_E));
            if (GROUP == 0 && lane % 4 == 0) {
                out.logits.store(number, lse, all.sum == all.sum ? all.max_logit * LN_2 : all.sum);  // fmaxf drops NaN
            }
        }
        return factor;
    }

    // Merges the sums of both warpgroups and writes the results. `no_rows`: nothing was selected, so all sums are zero.
    __device__ __forceinline__ void store(bool no_rows, const ItemOutput& out) {
        // TOTALS may be overwritten: since the other warpgroup read them, it has published weights, which this one received.
        if (!no_rows) {
            total(upper, head);
            total(lower, head + 8);
            named_barrier_sync(CONSUMER_BARRIER, 2 * WARPS * 32);
            add_total(upper, head);
            add_total(lower, head + 8);
        }
        const float above = finish(upper, head, out), below = finish(lower, head + 8, out);
#pragma unroll
        for (int quarter = 0; quarter < 2; ++quarter) {
            out.store(values[quarter], GROUP * VALUE_DIM / 2 + quarter * VALUE_DIM / 4, above, below);
        }
    }
};

// The queries of a work item: waits for them, and returns the item's pairs of blocks. An item without any releases them.
template <int GROUP>
__device__ __forceinline__ int next_item(const Consumer<GROUP>& consumer, u32& item_parity) {
    mbarrier_wait(consumer.memory + QUERIES_FULL, item_parity);
    item_parity ^= 1;
    const int pairs = warp_uniform(shared_load(consumer.memory + PAIRS));
    if (pairs == 0) consumer.release_queries();
    return pairs;
}

// Warpgroup 0. `output_of` computes the destination of an item's results, at its end, when registers are free.
//
// The compiler serialises all wgmma of a kernel if a branch, a loop's exit included, lies between wgmma and a wait for some of
// them. The last pair is therefore told apart before its last products are issued.
template <class OutputOf>
__device__ __forceinline__ void attend_first(u32 memory, int items, float scale, const OutputOf& output_of) {
    Consumer<0> consumer(memory, scale);
    float s[32];
    u32 item_parity = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int pairs = next_item(consumer, item_parity);
        consumer.start_item();
        if (pairs > 0) {
            consumer.score(s);
            wgmma_wait<0>(s);
            for (int left = pairs;; --left) {
                u32 weights[4][4];
                consumer.finish_scores(s, left == 1);
                const float2 rescales = raise_max(s, scale, consumer.upper, consumer.lower);
                exponentials(s, scale, consumer.upper, consumer.lower, weights);
                consumer.publish(weights, rescales);
                consumer.issue_values(weights, 0, rescales);
                add_sums(s, weights, consumer.upper, consumer.lower);
                consumer.finish_values<0>(0);
                const float2 others = consumer.follow(consumer.receive(weights));
                if (left == 1) {
                    consumer.issue_values(weights, 1, others);
                    consumer.finish_values<0>(1);
                    break;
                }
                consumer.issue_values(weights, 1, others);
                consumer.score(s, 0);
                consumer.finish_values<1>(1);
#pragma unroll
                for (int load = 1; load < LOADS; ++load) consumer.score(s, load);
            }
        }
        if (item + gridDim.x >= items) let_next_kernel_start();
        consumer.store(pairs == 0, output_of(item));
    }
}

// Warpgroup 1.
template <class OutputOf>
__device__ __forceinline__ void attend_second(u32 memory, int items, float scale, const OutputOf& output_of) {
    Consumer<1> consumer(memory, scale);
    float s[32];
    u32 item_parity = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int pairs = next_item(consumer, item_parity);
        consumer.start_item();
        for (int left = pairs; left > 0; --left) {
            u32 first[4][4], second[4][4];
            consumer.score(s);
            const uint4 published = consumer.receive(first);  // while the products run
            consumer.finish_scores(s, left == 1);
            const float2 others = consumer.follow(published);
            const float2 rescales = raise_max(s, scale, consumer.upper, consumer.lower);
            consumer.issue_values(first, 0, others);
            exponentials(s, scale, consumer.upper, consumer.lower, second);
            consumer.publish(second, rescales);
            consumer.finish_quarter<1>(0, 0);
            consumer.rescale_quarter(0, rescales);
            consumer.issue_quarter(second, 1, 0);
            consumer.finish_quarter<1>(0, 1);
            consumer.rescale_quarter(1, rescales);
            consumer.issue_quarter(second, 1, 1);
            add_sums(s, second, consumer.upper, consumer.lower);
            consumer.finish_values<0>(1);
        }
        if (item + gridDim.x >= items) let_next_kernel_start();
        consumer.store(pairs == 0, output_of(item));
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_many_heads(const __grid_constant__ ManyHeadsParams given) {
    const ManyHeadsParams params = given;  // the compiler would load fields of the parameter again after every barrier
    const u32 memory = tile_memory();
    const Items items = {params};
    const QueryParams& query = params.query;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            for (int load = 0; load < LOADS; ++load) mbarrier_init(full(memory, stage, load), WARPS * 32 + (load == 0 ? WARPS : 0));
            for (int chunk = 0; chunk < CHUNKS; ++chunk) mbarrier_init(empty(memory, stage, chunk), WARPS);
        }
        mbarrier_init(memory + QUERIES_FULL, WARPS * 32 + 1);
        mbarrier_init(memory + QUERIES_EMPTY, 2 * WARPS);
        for (int i = 0; i < 2 * WARPS; ++i) mbarrier_init(memory + WEIGHTS_FULL + i * 8, 32);
        fence_mbarrier_init();
    }
    wait_for_previous_kernel();
    __syncthreads();

    const auto work_of = [&](int item) { return items.work<SELECTIONS, STAGES>(items.place(item)); };
    const auto query_of = [&](int item, int head) -> const unsigned char* {
        const Place place = items.place(item);
        const int number = place.first_head + head;
        if (number >= query.heads) return nullptr;
        const unsigned short* const start = query.q + place.token * query.token_stride + number * query.head_stride;
        return reinterpret_cast<const unsigned char*>(start);
    };
    const auto output_of = [&](int item) { return items.output(items.place(item)); };
    const int warpgroup = threadIdx.x / (WARPS * 32);
    if (warpgroup == 2) {
        warpgroup_reg_dealloc<GATHER_REGISTERS>();
        gather(memory, items.count(), work_of, query_of);
        return;
    }
    warpgroup_reg_alloc<ATTEND_REGISTERS>();
    const float scale = query.scale * (query.scale_factor == nullptr ? 1.0f : *query.scale_factor) * LOG2_E;
    if (warpgroup == 0) attend_first(memory, items.count(), scale, output_of);
    else attend_second(memory, items.count(), scale, output_of);
}
