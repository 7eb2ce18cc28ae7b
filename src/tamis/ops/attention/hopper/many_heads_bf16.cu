// Sparse attention of 64 heads at a time over bf16 rows, on Hopper: persistent CTAs, one per SM, that take one work item
// after the other (see `items.cuh`).
//
// Computes, for each query token and head, softmax(scale * q . k) v over the selected rows, its lse and its largest logit.
// Rows are V3.2's: 576 bf16 columns, of which the first 512 are values.
//
// Roles of the three warpgroups, for every pair of slabs of 64 rows:
//   2     gather  Producer. Copies rows with cp.async straight into swizzled tiles, and the queries of the next item.
//   0, 1  attend  Consumers. Each scores the slab of its number, does the online softmax, publishes the weights, and holds
//                 half of the output's columns, to which it adds both slabs: its own with weights from registers, the
//                 other's with the published ones.
//
// So one warpgroup's softmax overlaps with the other's wgmma, and the output, half of all registers, is held once.
//
// Shared memory holds the queries, two slabs (72 KB each) and the published weights, 227 KB in all. A slab has five pieces
// with an mbarrier each. A piece is gathered anew as soon as nobody needs it: columns 512 and up, which are only keys,
// when they have been scored; a quarter of the values when the warpgroup that holds these output columns has added it.
//
// Budget for a pair of slabs: 4352 cycles of wgmma, 2304 of them with keys and 2048 with values, and 144 KB of rows.
//
// Weights are relative to the exact running max, which the warpgroups hand to one another with the weights: the largest
// weight is one, which rounding to bf16 leaves as it is. The output is divided by the sum of the rounded weights, the lse
// is that of the weights before rounding.
//
// Constants: SELECTIONS (1 or 2), THREADS, SHARED_BYTES, PARAMS_BYTES, and the registers per thread of the roles:
// ATTEND_REGISTERS, GATHER_REGISTERS.
#include "instructions.cuh"
#include "items.cuh"
#include "softmax.cuh"
#include "warpgroups.cuh"

// ---- Shapes

constexpr int WARPS = 4;  // of a warpgroup
constexpr int WIDTH = 576, TILES = WIDTH / 64, ROW_BYTES = WIDTH * 2;
constexpr int SLABS = 2, PIECES = 5;
constexpr int WARP_ROWS = BLOCK_ROWS / WARPS;  // rows of a slab that one producer warp copies

// The pieces of a slab in the order in which they are released: columns 512 and up; two quarters of the values that belong
// to the output columns of the other warpgroup, which adds them first; two of the warpgroup that scored the slab. They are
// handed over in three loads, the first three pieces together.
__device__ constexpr int piece_of(int slab, int half, int quarter) { return (half == slab ? 3 : 1) + quarter; }
__device__ constexpr int first_tile(int slab, int piece) {
    return piece == 0 ? 8 : (piece < 3 ? 1 - slab : slab) * 4 + (piece - 1) % 2 * 2;
}
__device__ constexpr int tiles_of(int piece) { return piece == 0 ? 1 : 2; }
constexpr int LOADS = 3;
__device__ constexpr int first_piece(int load) { return load == 0 ? 0 : load + 2; }
__device__ constexpr int last_piece(int load) { return load + 2; }

// ---- Shared memory

constexpr u32 TILE_BYTES = 64 * 128, SLAB_BYTES = TILES * TILE_BYTES;
constexpr u32 QUERIES = 0;                               // [TILES][64 heads][64 columns] bf16
constexpr u32 ROWS = QUERIES + SLAB_BYTES;               // [SLABS][TILES][64 rows][64 columns] bf16
constexpr u32 WEIGHTS = ROWS + SLABS * SLAB_BYTES;       // [WARPS][4][32] fragments; the warpgroups take turns to write
constexpr u32 CORRECTION = WEIGHTS + WARPS * 4 * 32 * 16;  // [WARPS][8][4] corrections and running maxima of two heads
constexpr u32 TOTALS = CORRECTION + WARPS * 8 * 16;      // [2][HEADS][4] sums and largest logits: see `total`
constexpr u32 PRESENT = TOTALS + 2 * HEADS * 16;         // [SLABS][WARPS] a bit for each row that exists
constexpr u32 PAIRS = PRESENT + SLABS * WARPS * 4;       // pairs of slabs of the work item whose queries are there
constexpr u32 FULL = PAIRS + 8;                          // [SLABS][LOADS] mbarriers, as all that follow
constexpr u32 EMPTY = FULL + SLABS * LOADS * 8;          // [SLABS][PIECES]
constexpr u32 QUERIES_FULL = EMPTY + SLABS * PIECES * 8;
constexpr u32 QUERIES_EMPTY = QUERIES_FULL + 8;
constexpr u32 PUBLISHED = QUERIES_EMPTY + 8;             // [2][WARPS] from a warp to the one of the same heads
constexpr u32 USED = PUBLISHED + 2 * WARPS * 8;
static_assert(USED <= SHARED_BYTES && PRESENT % 16 == 0 && FULL % 8 == 0, "shared memory is too small or not aligned");

// The named barrier of the consumers.
constexpr u32 CONSUMER_BARRIER = 1;

__device__ __forceinline__ u32 full(u32 memory, int slab, int load) { return memory + FULL + (slab * LOADS + load) * 8; }
__device__ __forceinline__ u32 empty(u32 memory, int slab, int piece) { return memory + EMPTY + (slab * PIECES + piece) * 8; }

// ---- Producer

// Copies 16 rows of 1152 bytes, or queries, into tiles. Eight lanes copy 128 bytes at a time: a lane copies its 16-byte
// unit of rows lane / 8 + 4 i.
struct TileCopier {
    u32 target[2];  // in a tile, of a row and of the one four further; eight rows are 1024 bytes
    const unsigned char* from[4];  // null: the row does not exist, and zeros are written

    __device__ __forceinline__ TileCopier() {
        const int row = threadIdx.x / 32 % WARPS * WARP_ROWS + threadIdx.x % 32 / 8, unit = threadIdx.x % 8;
        target[0] = swizzled(row, unit);
        target[1] = swizzled(row + 4, unit);
    }

    // Lane i < 16 gives the address of row i.
    __device__ __forceinline__ void take(const unsigned char* row) {
        const auto address = reinterpret_cast<unsigned long long>(row);
        const int unit = threadIdx.x % 8, first = threadIdx.x % 32 / 8;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const u32 low = __shfl_sync(FULL_MASK, static_cast<u32>(address), first + 4 * i);
            const u32 high = __shfl_sync(FULL_MASK, static_cast<u32>(address >> 32), first + 4 * i);
            const auto whole = static_cast<unsigned long long>(high) << 32 | low;
            from[i] = whole == 0 ? nullptr : reinterpret_cast<const unsigned char*>(whole) + unit * 16;
        }
    }

    __device__ __forceinline__ void copy(u32 tiles, int first, int count) const {
#pragma unroll
        for (int tile = first; tile < first + count; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const u32 to = tiles + tile * TILE_BYTES + target[i % 2] + i / 2 * 1024;
                cp_async_zfill<16>(to, from[i] + tile * 128, from[i] != nullptr);
            }
        }
    }
};

// Brings the rows and queries of all work items of this CTA. `query_of` returns the address of a head's query, or null.
template <class WorkOf, class QueryOf>
__device__ __forceinline__ void gather(u32 memory, int items, const WorkOf& work_of, const QueryOf& query_of) {
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32, own = warp * WARP_ROWS + lane % WARP_ROWS;
    TileCopier rows;
    u32 parity = 1, item_parity = 1;  // of the phases that must have ended
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
            for (int slab = 0; slab < SLABS; ++slab) {
                const u32 present = __ballot_sync(FULL_MASK, next != nullptr) & (1u << WARP_ROWS) - 1;
                rows.take(next);
                next = walker.next();
#pragma unroll
                for (int piece = 0; piece < PIECES; ++piece) {
                    // The last item's queries are needed until its last slab has been scored. Until then the first
                    // pieces of this item's first slab can be gathered already.
                    if (slab == 0 && piece == first_piece(1) && pair == 0) {
                        TileCopier heads;
                        heads.take(query);
                        announce();
                        heads.copy(memory + QUERIES, 0, TILES);
                        cp_async_mbarrier_arrive(memory + QUERIES_FULL);
                    }
                    mbarrier_wait(empty(memory, slab, piece), parity);
                    if (piece == 0 && lane == 0) {
                        shared_store(memory + PRESENT + (slab * WARPS + warp) * 4, present);
                        mbarrier_arrive(full(memory, slab, 0));
                    }
                    rows.copy(memory + ROWS + slab * SLAB_BYTES, first_tile(slab, piece), tiles_of(piece));
                    if (piece >= last_piece(0)) cp_async_mbarrier_arrive(full(memory, slab, piece - last_piece(0)));
                }
            }
            parity ^= 1;
        }
        item_parity ^= 1;
    }
}

// ---- Online softmax

// One head of a lane, `upper` or `lower`.
struct Softmax {
    float max_logit = minus_infinity();  // the largest logit that this warpgroup saw, in base 2
    float running_max = -1e30f;          // what weights are relative to
    float sum = 0.0f, rounded_sum = 0.0f;  // of the weights in this lane's columns, and of these weights as bf16

    __device__ __forceinline__ void rescale_sums(float correction) {
        sum *= correction;
        rounded_sum *= correction;
    }

    // Takes in a slab's largest logit; returns the correction of the accumulators.
    __device__ __forceinline__ float raise(float logit) {
        max_logit = fmaxf(max_logit, logit);
        if (!(logit > running_max)) return 1.0f;
        const float correction = fast_exp2(running_max - logit);
        running_max = logit;
        rescale_sums(correction);
        return correction;
    }
};

// Rows that do not exist get no weight.
__device__ __forceinline__ void mask(float (&s)[32], uint4 present) {
    if ((present.x & present.y & present.z & present.w) == (1u << WARP_ROWS) - 1) return;
    const u32 words[2] = {present.x | present.y << 16, present.z | present.w << 16};
    const int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        if (!(words[i / 16] >> (i / 4 % 4 * 8 + i % 2 + first) & 1)) s[i] = minus_infinity();
    }
}

// Products of a slab to softmax weights, as fragments; returns the corrections of the accumulators for both heads. `scale`
// leads from products of queries and rows to logits in base 2.
__device__ __forceinline__ float2 online_softmax(float (&s)[32], float scale, Softmax& upper, Softmax& lower, u32 (&weights)[4][4]) {
    float largest[8];  // short chains: nothing hides their latency
#pragma unroll
    for (int i = 0; i < 8; ++i) largest[i] = fmaxf(fmaxf(s[i], s[8 + i]), fmaxf(s[16 + i], s[24 + i]));
    const float above = fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[4], largest[5]));
    const float below = fmaxf(fmaxf(largest[2], largest[3]), fmaxf(largest[6], largest[7]));
    const float2 correction = {upper.raise(max_over_lanes<1, 4>(above) * scale), lower.raise(max_over_lanes<1, 4>(below) * scale)};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        Softmax& head = i % 2 ? lower : upper;
        const float a = fast_exp2(s[2 * i] * scale - head.running_max), b = fast_exp2(s[2 * i + 1] * scale - head.running_max);
        const u32 pair = weights[i / 4][i % 4] = pack_bf16(a, b);
        head.sum += a + b;
        head.rounded_sum += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000u);
    }
    return correction;
}

// ---- Consumers

// Warpgroup GROUP scores slab GROUP and holds half GROUP of the output's columns.
template <int GROUP>
struct Consumer {
    u32 memory;
    float scale;  // from products of queries and rows to logits in base 2
    int lane, warp, head;
    u32 parity = 0;
    Softmax upper, lower;
    float values[2][64];  // accumulators of the output

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

    // Issues the products of queries with its slab as it arrives.
    __device__ __forceinline__ void score(float (&s)[32]) const {
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            mbarrier_wait(full(memory, GROUP, load), parity);  // cp.async, unlike stores, needs no fence before wgmma
            const auto queries = k_major(memory + QUERIES), keys = k_major(memory + ROWS + GROUP * SLAB_BYTES);
            wgmma_fence();
#pragma unroll
            for (int piece = first_piece(load); piece <= last_piece(load); ++piece) {
#pragma unroll
                for (int step = 0; step < 4 * tiles_of(piece); ++step) {
                    const u32 at = (first_tile(GROUP, piece) + step / 4) * TILE_BYTES + step % 4 * 32;
                    wgmma_ss<BF16>(s, advance(queries, at), advance(keys, at), piece + step > 0);
                }
            }
            wgmma_commit();
        }
    }

    // Waits for these products; returns which rows exist.
    __device__ __forceinline__ uint4 wait_for_scores(float (&s)[32]) const {
        const uint4 present = shared_load4(memory + PRESENT + GROUP * WARPS * 4);
        wgmma_wait<0>(s);
        __syncwarp();  // every lane has read `present`
        if (lane == 0) mbarrier_arrive(empty(memory, GROUP, 0));
        return present;
    }

    // Weights pass between the two warps of the same heads, as the fragments that both need.
    __device__ __forceinline__ u32 fragment(int step) const { return memory + WEIGHTS + ((warp * 4 + step) * 32 + lane) * 16; }
    __device__ __forceinline__ u32 correction_of_head() const { return memory + CORRECTION + (warp * 8 + lane / 4) * 16; }
    __device__ __forceinline__ u32 published(int group) const { return memory + PUBLISHED + (group * WARPS + warp) * 8; }

    // Softmax and values of its own slab. If the other warpgroup has a next slab (`more`), the products wait until that
    // has been scored, so that they fill the tensor cores during the other's softmax.
    __device__ __forceinline__ void add_own(float (&s)[32], uint4 present, bool more) {
        u32 weights[4][4];
        mask(s, present);
        const float2 correction = online_softmax(s, scale, upper, lower, weights);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            shared_store4(fragment(step), make_uint4(weights[step][0], weights[step][1], weights[step][2], weights[step][3]));
        }
        if (lane % 4 == 0) {
            shared_store4(correction_of_head(), make_uint4(__float_as_uint(correction.x), __float_as_uint(correction.y),
                                                           __float_as_uint(upper.running_max), __float_as_uint(lower.running_max)));
        }
        mbarrier_arrive(published(GROUP));
        rescale(values, correction.x, correction.y);
        if (more) mbarrier_wait(empty(memory, 1 - GROUP, 0), parity ^ GROUP);
        add_values(weights, GROUP);
    }

    __device__ __forceinline__ void add_other() {
        u32 weights[4][4];
        mbarrier_wait(published(1 - GROUP), parity);
        const uint4 correction = shared_load4(correction_of_head());
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint4 words = shared_load4(fragment(step));
            weights[step][0] = words.x, weights[step][1] = words.y, weights[step][2] = words.z, weights[step][3] = words.w;
        }
        const float above = __uint_as_float(correction.x), below = __uint_as_float(correction.y);
        upper.running_max = __uint_as_float(correction.z);
        lower.running_max = __uint_as_float(correction.w);
        upper.rescale_sums(above);
        lower.rescale_sums(below);
        rescale(values, above, below);
        add_values(weights, 1 - GROUP);
    }

    // Adds a slab's values in this warpgroup's columns, and releases them.
    __device__ __forceinline__ void add_values(const u32 (&weights)[4][4], int slab) {
        issue_quarter(weights, slab, 0);
        issue_quarter(weights, slab, 1);
        finish_quarter<1>(slab, 0);
        finish_quarter<0>(slab, 1);
    }

    __device__ __forceinline__ void issue_quarter(const u32 (&weights)[4][4], int slab, int quarter) {
        const u32 tiles = memory + ROWS + slab * SLAB_BYTES + first_tile(slab, piece_of(slab, GROUP, quarter)) * TILE_BYTES;
        const auto rows = mn_major(tiles, TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_rs<BF16>(values[quarter], weights[step], advance(rows, step * 2048));
        wgmma_commit();
    }

    // Waits for a quarter, while PENDING others are in flight, and releases its piece.
    template <int PENDING>
    __device__ __forceinline__ void finish_quarter(int slab, int quarter) {
        wgmma_wait<PENDING>(values[quarter]);
        if (lane == 0) mbarrier_arrive(empty(memory, slab, piece_of(slab, GROUP, quarter)));
    }

    __device__ __forceinline__ void release_queries() const {
        __syncwarp();  // every lane has read the number of pairs
        if (lane == 0) mbarrier_arrive(memory + QUERIES_EMPTY);
    }

    // Adds up a head's sums over its lanes and shares them with the other warpgroup.
    __device__ __forceinline__ void total(Softmax& own, int number) const {
        own.sum = sum_over_lanes<1, 4>(own.sum);
        own.rounded_sum = sum_over_lanes<1, 4>(own.rounded_sum);
        if (lane % 4 == 0) {
            shared_store4(memory + TOTALS + (GROUP * HEADS + number) * 16,
                          make_uint4(__float_as_uint(own.sum), __float_as_uint(own.rounded_sum), __float_as_uint(own.max_logit), 0));
        }
    }

    __device__ __forceinline__ void add_total(Softmax& own, int number) const {
        const uint4 other = shared_load4(memory + TOTALS + ((1 - GROUP) * HEADS + number) * 16);
        own.sum += __uint_as_float(other.x);
        own.rounded_sum += __uint_as_float(other.y);
        own.max_logit = fmaxf(own.max_logit, __uint_as_float(other.z));
    }

    // Writes the lse and largest logit of a head; returns the factor that makes its accumulators the output.
    __device__ __forceinline__ float finish(const Softmax& all, int number, const ItemOutput& out) const {
        const bool empty = all.sum == 0.0f;
        const float lse = empty ? minus_infinity() : (all.running_max + fast_log2(all.sum)) * LN_2;
        float factor = empty ? 0.0f : 1.0f / all.rounded_sum;
        if (number < out.heads) {
            if (out.sink != nullptr && !empty) factor *= 1.0f / (1.0f + fast_exp2((out.sink[number] - lse) * LOG2_E));
            if (GROUP == 0 && lane % 4 == 0) {
                out.lse[number] = lse;
                out.max_logits[number] = all.sum == all.sum ? all.max_logit * LN_2 : all.sum;  // fmaxf has dropped NaN
            }
        }
        return factor;
    }

    __device__ __forceinline__ void store(bool nothing, const ItemOutput& out) {
        // Totals may be overwritten: the other warpgroup read the last ones before it published weights since.
        if (!nothing) {
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

// `output_of` computes where an item's results go, at its end, when registers are free.
template <int GROUP, class OutputOf>
__device__ __forceinline__ void attend(u32 memory, int items, float scale, const OutputOf& output_of) {
    Consumer<GROUP> consumer(memory, scale);
    float s[32];
    u32 item_parity = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        mbarrier_wait(memory + QUERIES_FULL, item_parity);
        item_parity ^= 1;
        const int pairs = shared_load(memory + PAIRS);
        consumer.start_item();
        if (pairs == 0) consumer.release_queries();
        for (int pair = 0; pair < pairs; ++pair) {
            if (GROUP == 1) consumer.add_other();
            consumer.score(s);
            const uint4 present = consumer.wait_for_scores(s);
            if (pair == pairs - 1) consumer.release_queries();
            consumer.add_own(s, present, GROUP == 0 || pair < pairs - 1);
            if (GROUP == 0) consumer.add_other();
            consumer.parity ^= 1;
        }
        if (item + gridDim.x >= items) let_next_kernel_start();
        consumer.store(pairs == 0, output_of(item));
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_many_heads(const __grid_constant__ ManyHeadsParams given) {
    const ManyHeadsParams params = given;  // from the parameter itself, the compiler would load again after every barrier
    const u32 memory = tile_memory();
    const Items items = {params};
    const QueryParams& query = params.query;
    if (threadIdx.x == 0) {
        for (int slab = 0; slab < SLABS; ++slab) {
            for (int load = 0; load < LOADS; ++load) mbarrier_init(full(memory, slab, load), WARPS * 32 + (load == 0 ? WARPS : 0));
            for (int piece = 0; piece < PIECES; ++piece) mbarrier_init(empty(memory, slab, piece), WARPS);
        }
        mbarrier_init(memory + QUERIES_FULL, WARPS * 32 + 1);
        mbarrier_init(memory + QUERIES_EMPTY, 2 * WARPS);
        for (int i = 0; i < 2 * WARPS; ++i) mbarrier_init(memory + PUBLISHED + i * 8, 32);
        fence_mbarrier_init();
    }
    wait_for_previous_kernel();
    __syncthreads();

    const auto work_of = [&](int item) { return items.work<SELECTIONS, SLABS>(item); };
    const auto query_of = [&](int item, int head) -> const unsigned char* {
        const int number = items.first_head(item) + head;
        if (number >= query.heads) return nullptr;
        const unsigned short* const start = query.q + items.token(item) * query.token_stride + number * query.head_stride;
        return reinterpret_cast<const unsigned char*>(start);
    };
    const auto output_of = [&](int item) { return items.output(item); };
    const int warpgroup = threadIdx.x / (WARPS * 32);
    if (warpgroup == 2) {
        warpgroup_reg_dealloc<GATHER_REGISTERS>();
        gather(memory, items.count(), work_of, query_of);
        return;
    }
    warpgroup_reg_alloc<ATTEND_REGISTERS>();
    const float scale = query.scale * (query.scale_factor == nullptr ? 1.0f : *query.scale_factor) * LOG2_E;
    if (warpgroup == 0) attend<0>(memory, items.count(), scale, output_of);
    else attend<1>(memory, items.count(), scale, output_of);
}
