// Sparse attention of 64 heads at a time over bf16 rows, on Hopper. Blocks of threads stay on their multiprocessor and
// take one item after the other: a query token and 64 heads, or a part of the rows of one (see `items.cuh`).
//
// Three groups of four warps. `gather` copies rows straight into tiles that matrix products read, 64 rows to a slab, and
// the queries of the next item. The other two `attend`: each scores one of two slabs, does the softmax, publishes the
// weights and holds half the columns of the output, to which it adds both slabs: its own with weights from registers, the
// other's with the published ones. So one group's softmax falls into the other's products, and the output, half of all
// registers, is held once. A slab has five pieces, each gathered again as soon as nobody needs it any more, while the
// products with the others go on: the columns beyond 512, only keys, when they are scored, a quarter of the values when
// the group that holds these columns of the output has added it.
//
// Weights are relative to the largest logit so far, which groups hand to one another with them: the weight that counts
// most is one, which rounding to bf16 leaves alone. The output is divided by the sum of weights as rounded, the lse is
// that of the weights before.
//
// Constants: SELECTIONS (1 or 2), THREADS, SHARED_BYTES, registers per thread of the groups.
#include "instructions.cuh"
#include "warpgroups.cuh"

// ---- Shapes

constexpr int HEADS = 64;      // of an item
constexpr int STEP_ROWS = 64;  // of a slab
constexpr int TOGETHER = 2;    // slabs, one for each group that attends
constexpr int WARPS = 4;       // of a group
constexpr int WIDTH = 576, VALUES = 512, TILES = WIDTH / 64, ROW_BYTES = WIDTH * 2;
constexpr int SLABS = 2, PIECES = 5, OWN = STEP_ROWS / WARPS;  // rows of a slab that one warp copies

// Pieces of a slab in the order in which they are freed: columns from 512 on; quarters of the values that the other
// group holds, which adds them first; those of the group that scored it. The first three are handed over together.
__device__ constexpr int piece_of(int slab, int half, int quarter) { return (half == slab ? 3 : 1) + quarter; }
__device__ constexpr int first_tile(int slab, int piece) {
    return piece == 0 ? 8 : (piece < 3 ? 1 - slab : slab) * 4 + (piece - 1) % 2 * 2;
}
__device__ constexpr int tiles_of(int piece) { return piece == 0 ? 1 : 2; }
constexpr int LOADS = 3;
__device__ constexpr int first_piece(int load) { return load == 0 ? 0 : load + 2; }
__device__ constexpr int last_piece(int load) { return load + 2; }

#include "items.cuh"

// ---- Shared memory

constexpr u32 TILE_BYTES = 64 * 128, SLAB_BYTES = TILES * TILE_BYTES;
constexpr u32 QUERIES = 0;
constexpr u32 ROWS = QUERIES + SLAB_BYTES;
constexpr u32 WEIGHTS = ROWS + SLABS * SLAB_BYTES;       // [WARPS][4][32] fragments; groups take turns to write
constexpr u32 RELATIVE = WEIGHTS + WARPS * 4 * 32 * 16;  // [WARPS][8] factors of the output before, bases
constexpr u32 TOTALS = RELATIVE + WARPS * 8 * 16;        // [2][HEADS] of either group: see `Softmax`
constexpr u32 PRESENT = TOTALS + 2 * HEADS * 16;         // [SLABS][WARPS] bits of the rows that are there
constexpr u32 PAIRS = PRESENT + SLABS * WARPS * 4;       // of slabs, in the item whose queries are there
constexpr u32 READY = PAIRS + 8;                         // [SLABS][LOADS] barriers
constexpr u32 FREE = READY + SLABS * LOADS * 8;          // [SLABS][PIECES]
constexpr u32 QUERIES_READY = FREE + SLABS * PIECES * 8;
constexpr u32 QUERIES_FREE = QUERIES_READY + 8;
constexpr u32 PUBLISHED = QUERIES_FREE + 8;              // [2][WARPS] of a warp of a group, for the same warp of the other
constexpr u32 USED = PUBLISHED + 2 * WARPS * 8;
static_assert(USED <= SHARED_BYTES && PRESENT % 16 == 0 && READY % 8 == 0, "shared memory");

// A named barrier.
constexpr u32 ATTENDING = 1;

__device__ __forceinline__ u32 ready(u32 memory, int slab, int load) { return memory + READY + (slab * LOADS + load) * 8; }
__device__ __forceinline__ u32 free(u32 memory, int slab, int piece) { return memory + FREE + (slab * PIECES + piece) * 8; }

// Where a 16-byte unit of a row lies in a tile.
__device__ __forceinline__ u32 in_tile(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

// ---- Copies to tiles

// Of rows of 1152 bytes, or queries. A warp copies 16 of them, eight lanes 128 bytes at a time: a lane its unit of rows
// lane / 8 + 4 i.
struct Copier {
    u32 target[2];  // in a tile, of a row and that four further; eight rows are 1024 bytes
    const unsigned char* from[4];  // null: there is no row, and zeros are written

    __device__ __forceinline__ Copier() {
        const int row = threadIdx.x / 32 % WARPS * OWN + threadIdx.x % 32 / 8, unit = threadIdx.x % 8;
        target[0] = in_tile(row, unit);
        target[1] = in_tile(row + 4, unit);
    }

    // Lane i < 16 knows where row i is.
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

// Rows and queries of one item after the other. `query_of` tells where the queries of an item's head are; null: nowhere.
template <class WorkOf, class QueryOf>
__device__ __forceinline__ void gather(u32 memory, int items, const WorkOf& work_of, const QueryOf& query_of) {
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32, own = warp * OWN + lane % OWN;
    Copier rows;
    u32 parity = 1, item_parity = 1;  // of the phases that must have ended
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const unsigned char* const query = query_of(item, own);
        const Work work = work_of(item);
        const int pairs = (work.end - work.begin + 1) / 2;
        const auto announce = [&] {
            mbarrier_wait(memory + QUERIES_FREE, item_parity);
            if (threadIdx.x % (WARPS * 32) == 0) {
                shared_store(memory + PAIRS, pairs);
                mbarrier_arrive(memory + QUERIES_READY);
            }
        };
        Follower follower(work, own);
        const unsigned char* coming = follower.next();
        if (pairs == 0) {
            announce();
            cp_async_mbarrier_arrive(memory + QUERIES_READY);
        }
        for (int pair = 0; pair < pairs; ++pair) {
#pragma unroll
            for (int slab = 0; slab < SLABS; ++slab) {
                const u32 present = __ballot_sync(FULL_MASK, coming != nullptr) & (1u << OWN) - 1;
                rows.take(coming);
                coming = follower.next();
#pragma unroll
                for (int piece = 0; piece < PIECES; ++piece) {
                    // Queries are needed until the last slab is scored, the first pieces of the one before are not.
                    if (slab == 0 && piece == first_piece(1) && pair == 0) {
                        Copier heads;
                        heads.take(query);
                        announce();
                        heads.copy(memory + QUERIES, 0, TILES);
                        cp_async_mbarrier_arrive(memory + QUERIES_READY);
                    }
                    mbarrier_wait(free(memory, slab, piece), parity);
                    if (piece == 0 && lane == 0) {
                        shared_store(memory + PRESENT + (slab * WARPS + warp) * 4, present);
                        mbarrier_arrive(ready(memory, slab, 0));
                    }
                    rows.copy(memory + ROWS + slab * SLAB_BYTES, first_tile(slab, piece), tiles_of(piece));
                    if (piece >= last_piece(0)) cp_async_mbarrier_arrive(ready(memory, slab, piece - last_piece(0)));
                }
            }
            parity ^= 1;
        }
        item_parity ^= 1;
    }
}

// ---- Softmax

// Two heads of a lane: `upper` is lane / 4 of the warp's 16, `lower` eight further.
struct Softmax {
    float top = minus_infinity();   // largest logit that this group saw, with base 2
    float base = -1e30f;            // what weights are relative to
    float sum = 0.0f, rounded = 0.0f;  // of weights in this lane's columns, and of these weights as bf16

    __device__ __forceinline__ void multiply(float factor) {
        sum *= factor;
        rounded *= factor;
    }

    // The factor of everything so far.
    __device__ __forceinline__ float raise(float logit) {
        top = fmaxf(top, logit);
        if (!(logit > base)) return 1.0f;
        const float factor = fast_exp2(base - logit);
        base = logit;
        multiply(factor);
        return factor;
    }
};

__device__ __forceinline__ float over_lanes_of_head(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_MASK, x, 2));
}

__device__ __forceinline__ float added_over_lanes(float x) {
    x += __shfl_xor_sync(FULL_MASK, x, 1);
    return x + __shfl_xor_sync(FULL_MASK, x, 2);
}

__device__ __forceinline__ void rescale(float (&values)[2][64], float upper, float lower) {
    if (__ballot_sync(FULL_MASK, upper != 1.0f || lower != 1.0f) == 0) return;
#pragma unroll
    for (int i = 0; i < 128; ++i) values[i / 64][i % 64] *= i & 2 ? lower : upper;
}

// No weight for rows that are not there.
__device__ __forceinline__ void mask(float (&s)[32], uint4 present) {
    if ((present.x & present.y & present.z & present.w) == (1u << OWN) - 1) return;
    const u32 words[2] = {present.x | present.y << 16, present.z | present.w << 16};
    const int first = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; ++i) {
        if (!(words[i / 16] >> (i / 4 % 4 * 8 + i % 2 + first) & 1)) s[i] = minus_infinity();
    }
}

// Products of queries and rows to weights, as fragments; returns the factors of the output so far.
__device__ __forceinline__ float2 soften(float (&s)[32], float unit, Softmax& upper, Softmax& lower, u32 (&weights)[4][4]) {
    float tops[8];  // short chains: nothing hides their latency
#pragma unroll
    for (int i = 0; i < 8; ++i) tops[i] = fmaxf(fmaxf(s[i], s[8 + i]), fmaxf(s[16 + i], s[24 + i]));
    const float above = fmaxf(fmaxf(tops[0], tops[1]), fmaxf(tops[4], tops[5]));
    const float below = fmaxf(fmaxf(tops[2], tops[3]), fmaxf(tops[6], tops[7]));
    const float2 factor = {upper.raise(over_lanes_of_head(above) * unit), lower.raise(over_lanes_of_head(below) * unit)};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        Softmax& head = i % 2 ? lower : upper;
        const float a = fast_exp2(s[2 * i] * unit - head.base), b = fast_exp2(s[2 * i + 1] * unit - head.base);
        const u32 pair = weights[i / 4][i % 4] = pack_bf16(a, b);
        head.sum += a + b;
        head.rounded += __uint_as_float(pair << 16) + __uint_as_float(pair & 0xFFFF0000u);
    }
    return factor;
}

// ---- Products

// Scores the slab of its number, and holds the half of the output's columns of its number.
template <int GROUP>
struct Attending {
    u32 memory;
    float unit;  // of a logit with base 2, in products of rows and queries
    int lane, warp, head;
    u32 parity = 0;
    Softmax upper, lower;
    float values[2][64];

    __device__ __forceinline__ Attending(u32 memory, float unit) : memory(memory), unit(unit) {
        warp = threadIdx.x / 32 % WARPS;
        lane = threadIdx.x % 32;
        head = warp * 16 + lane / 4;
    }

    __device__ __forceinline__ void start() {
        upper = lower = Softmax();
#pragma unroll
        for (int i = 0; i < 128; ++i) values[i / 64][i % 64] = 0.0f;
    }

    // The products of queries with its slab, as it comes.
    __device__ __forceinline__ void score(float (&s)[32]) const {
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            mbarrier_wait(ready(memory, GROUP, load), parity);  // these copies, unlike stores, need no fence before products
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

    // Which rows are there, when all products with queries are.
    __device__ __forceinline__ uint4 scored(float (&s)[32]) const {
        const uint4 present = shared_load4(memory + PRESENT + GROUP * WARPS * 4);
        wgmma_wait<0>(s);
        __syncwarp();  // every lane knows what is present
        if (lane == 0) mbarrier_arrive(free(memory, GROUP, 0));
        return present;
    }

    // Weights are exchanged between warps of the same heads, as the fragments that both need.
    __device__ __forceinline__ u32 fragment(int step) const { return memory + WEIGHTS + ((warp * 4 + step) * 32 + lane) * 16; }
    __device__ __forceinline__ u32 relation() const { return memory + RELATIVE + (warp * 8 + lane / 4) * 16; }
    __device__ __forceinline__ u32 published(int group) const { return memory + PUBLISHED + (group * WARPS + warp) * 8; }

    // Its own slab, which waits until the other group has scored its next one, if it will: it is what the matrix units do
    // during that group's softmax.
    __device__ __forceinline__ void add_own(float (&s)[32], uint4 present, bool more) {
        u32 weights[4][4];
        mask(s, present);
        const float2 factor = soften(s, unit, upper, lower, weights);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            shared_store4(fragment(step), make_uint4(weights[step][0], weights[step][1], weights[step][2], weights[step][3]));
        }
        if (lane % 4 == 0) {
            shared_store4(relation(), make_uint4(__float_as_uint(factor.x), __float_as_uint(factor.y),
                                                 __float_as_uint(upper.base), __float_as_uint(lower.base)));
        }
        mbarrier_arrive(published(GROUP));
        rescale(values, factor.x, factor.y);
        if (more) mbarrier_wait(free(memory, 1 - GROUP, 0), parity ^ GROUP);
        begin_adding(weights, GROUP, 0);
        begin_adding(weights, GROUP, 1);
        finish_adding<1>(GROUP, 0);
        finish_adding<0>(GROUP, 1);
    }

    __device__ __forceinline__ void add_other() {
        u32 weights[4][4];
        mbarrier_wait(published(1 - GROUP), parity);
        const uint4 relative = shared_load4(relation());
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint4 words = shared_load4(fragment(step));
            weights[step][0] = words.x, weights[step][1] = words.y, weights[step][2] = words.z, weights[step][3] = words.w;
        }
        const float above = __uint_as_float(relative.x), below = __uint_as_float(relative.y);
        upper.base = __uint_as_float(relative.z);
        lower.base = __uint_as_float(relative.w);
        upper.multiply(above);
        lower.multiply(below);
        rescale(values, above, below);
        begin_adding(weights, 1 - GROUP, 0);
        begin_adding(weights, 1 - GROUP, 1);
        finish_adding<1>(1 - GROUP, 0);
        finish_adding<0>(1 - GROUP, 1);
    }

    // A quarter of the values of a slab under its weights, to half of this half of the output.
    __device__ __forceinline__ void begin_adding(const u32 (&weights)[4][4], int slab, int quarter) {
        const u32 tiles = memory + ROWS + slab * SLAB_BYTES + first_tile(slab, piece_of(slab, GROUP, quarter)) * TILE_BYTES;
        const auto rows = mn_major(tiles, TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_rs<BF16>(values[quarter], weights[step], advance(rows, step * 2048));
        wgmma_commit();
    }

    // When it has been added, with as many others under way, its place is free.
    template <int OTHERS>
    __device__ __forceinline__ void finish_adding(int slab, int quarter) {
        wgmma_wait<OTHERS>(values[quarter]);
        if (lane == 0) mbarrier_arrive(free(memory, slab, piece_of(slab, GROUP, quarter)));
    }

    __device__ __forceinline__ void free_queries() const {
        __syncwarp();  // every lane knows the number of pairs
        if (lane == 0) mbarrier_arrive(memory + QUERIES_FREE);
    }

    // The sums over all lanes, for the other group.
    __device__ __forceinline__ void total(Softmax& own, int number) const {
        own.sum = added_over_lanes(own.sum);
        own.rounded = added_over_lanes(own.rounded);
        if (lane % 4 == 0) {
            shared_store4(memory + TOTALS + (GROUP * HEADS + number) * 16,
                          make_uint4(__float_as_uint(own.sum), __float_as_uint(own.rounded), __float_as_uint(own.top), 0));
        }
    }

    __device__ __forceinline__ void add_total(Softmax& own, int number) const {
        const uint4 other = shared_load4(memory + TOTALS + ((1 - GROUP) * HEADS + number) * 16);
        own.sum += __uint_as_float(other.x);
        own.rounded += __uint_as_float(other.y);
        own.top = fmaxf(own.top, __uint_as_float(other.z));
    }

    // What is left to do to a head's output; its lse and largest logit are written on the way.
    __device__ __forceinline__ float finish(const Softmax& all, int number, const Output& out) const {
        const bool empty = all.sum == 0.0f;
        const float whole = empty ? minus_infinity() : (all.base + fast_log2(all.sum)) * LN_2;
        float factor = empty ? 0.0f : 1.0f / all.rounded;
        if (number < out.heads) {
            if (out.sink != nullptr && !empty) factor *= 1.0f / (1.0f + fast_exp2((out.sink[number] - whole) * LOG2_E));
            if (GROUP == 0 && lane % 4 == 0) {
                out.lse[number] = whole;
                out.tops[number] = all.sum == all.sum ? all.top * LN_2 : all.sum;  // NaN has no place in an order
            }
        }
        return factor;
    }

    __device__ __forceinline__ void store(bool nothing, const Output& out) {
        // A group writes totals only when the other has read the last ones, before it published weights since.
        if (!nothing) {
            total(upper, head);
            total(lower, head + 8);
            named_barrier_sync(ATTENDING, 2 * WARPS * 32);
            add_total(upper, head);
            add_total(lower, head + 8);
        }
        const float above = finish(upper, head, out), below = finish(lower, head + 8, out);
#pragma unroll
        for (int quarter = 0; quarter < 2; ++quarter) {
            out.store(values[quarter], GROUP * VALUES / 2 + quarter * VALUES / 4, above, below);
        }
    }
};

// `place` tells where an item's results go, when registers are free.
template <int GROUP, class Place>
__device__ __forceinline__ void attend(u32 memory, int items, float unit, const Place& place) {
    Attending<GROUP> group(memory, unit);
    float s[32];
    u32 item_parity = 0;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        mbarrier_wait(memory + QUERIES_READY, item_parity);
        item_parity ^= 1;
        const int pairs = shared_load(memory + PAIRS);
        group.start();
        if (pairs == 0) group.free_queries();
        for (int pair = 0; pair < pairs; ++pair) {
            if (GROUP == 1) group.add_other();
            group.score(s);
            const uint4 present = group.scored(s);
            if (pair == pairs - 1) group.free_queries();
            group.add_own(s, present, GROUP == 0 || pair < pairs - 1);
            if (GROUP == 0) group.add_other();
            group.parity ^= 1;
        }
        if (item + gridDim.x >= items) let_next_kernel_start();
        group.store(pairs == 0, place(item));
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_many_heads(
    const unsigned short* queries, long long query_token_stride, long long query_head_stride, int tokens, int heads,
    float scale, const float* scale_factor, const float* sink, void* out, int out_kind, long long out_token_stride,
    long long out_head_stride, float* lse, float* tops, float* parts_out, float* parts_lse, float* parts_tops, int whole,
    int parts, SELECTION(0), SELECTION(1)) {
    const u32 memory = tile_memory();
    const Items items = {tokens, heads, whole, parts};
    if (threadIdx.x == 0) {
        for (int slab = 0; slab < SLABS; ++slab) {
            for (int load = 0; load < LOADS; ++load) mbarrier_init(ready(memory, slab, load), WARPS * 32 + (load == 0 ? WARPS : 0));
            for (int piece = 0; piece < PIECES; ++piece) mbarrier_init(free(memory, slab, piece), WARPS);
        }
        mbarrier_init(memory + QUERIES_READY, WARPS * 32 + 1);
        mbarrier_init(memory + QUERIES_FREE, 2 * WARPS);
        for (int i = 0; i < 2 * WARPS; ++i) mbarrier_init(memory + PUBLISHED + i * 8, 32);
        fence_mbarrier_init();
    }
    wait_for_previous_kernel();
    __syncthreads();

    const auto work_of = [&](int item) {
        const long long token = items.token(item);
        return items.work(item, selection_of(token, SELECTION_VALUES(0)),
                          SELECTIONS > 1 ? selection_of(token, SELECTION_VALUES(1)) : Selection());
    };
    const auto query_of = [&](int item, int head) -> const unsigned char* {
        const int number = items.first_head(item) + head;
        if (number >= heads) return nullptr;
        const unsigned short* const query = queries + items.token(item) * query_token_stride + number * query_head_stride;
        return reinterpret_cast<const unsigned char*>(query);
    };
    const auto place = [&](int item) {
        return items.place(item, {out, out_kind, out_token_stride, out_head_stride, lse, tops, parts_out, parts_lse, parts_tops, sink});
    };
    const int group = threadIdx.x / (WARPS * 32);
    if (group == 2) {
        warpgroup_reg_dealloc<GATHER_REGISTERS>();
        gather(memory, items.count(), work_of, query_of);
        return;
    }
    warpgroup_reg_alloc<ATTEND_REGISTERS>();
    const float unit = scale * (scale_factor == nullptr ? 1.0f : *scale_factor) * LOG2_E;
    if (group == 0) attend<0>(memory, items.count(), unit, place);
    else attend<1>(memory, items.count(), unit, place);
}
