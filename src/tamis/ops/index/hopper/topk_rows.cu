// Exact top-k of each row of scores, on Hopper: one CTA per row, for many rows. The result is deterministic.
//
// Selecting among scores in shared memory (`choose`) needs no count of all of them. Order statistics of a sample give an
// interval of scores that has the k-th highest one with near certainty, and few others. One pass tells scores above the
// interval, which are winners, from scores within it. Only these are counted by digits of their keys, in bins that divide the
// interval evenly, until the k-th key is known. If the interval was wrong the scores beside it are counted instead: the result
// never depends on the sample.
//
// A thread owns consecutive places, at most 32, so that a set of them is a word: a thread's winners follow those of the threads
// before it, and the result is in the order of positions.
//
// Rows of up to 32 * THREADS scores (STAGES 0) are copied to shared memory as a whole. Longer ones are streamed through a ring
// of tiles. A gate, below which no score is likely to be selected, comes from a sample of every 16th score or so. Scores that
// pass are appended to a list, in the order of positions, and the result is chosen from the list. If it fills up, the k best
// are kept and scores must be better than these, which is always right: the k-th highest of a part is not above the k-th
// highest of all. If fewer than k pass, the gate was too high and the row is streamed again with a lower one, or with none.
//
// Instructions bound rows that are in shared memory, latencies streamed ones: see benchmarks/NOTES.md.
//
// Defined by the host: THREADS; CTAS, per SM; MOST_K, the largest k; STAGES, tiles of the ring, 0 for none; QUADS, groups
// of four scores of a thread in a tile; SHARED_BYTES; PARAMS_BYTES.
#include "topk_parts.cuh"

static_assert(sizeof(TopkParams) == PARAMS_BYTES, "TopkParams differs from its twin in topk.py");

constexpr int WARPS = THREADS / 32;
constexpr int LOG_BINS = 10, BINS = 1 << LOG_BINS;  // of a digit
constexpr int SAMPLE_GROUPS = WARPS < 16 ? 16 / WARPS : 1;  // of 32 scores that a warp sorts
constexpr int SAMPLE = 32 * WARPS * SAMPLE_GROUPS;
constexpr float DEVIATIONS = 3.0f;          // of the sample, to each side of the k-th score
constexpr float GATE_DEVIATIONS = 3.5f;     // a gate that is too high costs another pass
constexpr int SHARE = 16;                   // the gate's sample has one score of so many
constexpr bool STREAMED = STAGES > 0;
constexpr int FULL_QUADS = 8;               // of a thread; others are odd, see `Span`
constexpr int TILE = STREAMED ? 4 * QUADS * THREADS : 32 * THREADS;  // places
constexpr u32 HIGHEST = 0xFF800000u;        // the key of +inf
constexpr u32 MINUS_ZERO = 0x7FFFFFFFu;     // between the keys of the highest negative number and of 0
constexpr float HUGEST = 3.402823466e38f;   // the largest finite number
constexpr int LISTED = MOST_K / 2 * 3;      // scores of the list

static_assert(!STREAMED || (QUADS % 2 == 1 && QUADS < FULL_QUADS), "threads' places would share banks");
static_assert(!STREAMED || LISTED <= 32 * THREADS, "a thread's places of the list do not fit in a word");
static_assert(WARPS <= 16, "half a warp has one lane for each warp");

// ---- Shared memory: bins, what warps tell each other, mbarriers, then the tiles, then the list's scores and positions

struct alignas(128) SharedMemory {
    union {
        u32 bins[BINS];                              // counts of a digit; all zero between searches
        unsigned short kept[STREAMED ? MOST_K : 1];  // places of the list, while it is shortened
    };
    u32 sums[2][WARPS];      // of warps, in odd and even sums over the CTA
    float pivots[2][WARPS];  // of the interval's high and low end
    u32 bin, above, equal;   // what a search has found
    alignas(8) unsigned long long full[STREAMED ? STAGES : 1];  // mbarriers
};

constexpr u32 TILES = sizeof(SharedMemory);
constexpr u32 TILE_BYTES = TILE * 4;
constexpr u32 LIST = TILES + (STREAMED ? STAGES : 1) * TILE_BYTES;  // scores, then positions
static_assert(LIST + (STREAMED ? LISTED * 8 : 0) <= SHARED_BYTES, "SHARED_BYTES of topk_rows.py is too small");
static_assert((STREAMED ? STAGES : 1) * TILE >= MOST_K, "the result does not fit where tiles are");

// ---- Sums over the CTA

// Sums alternate between two arrays, so that one barrier suffices: who writes an array again has passed the barrier of the sum
// between, and so has everybody who read it.
struct Sums {
    SharedMemory& shared;
    int turn;

    // The sum of the values of the threads before this one, and of all.
    __device__ __forceinline__ u32 before(u32 value, u32& total) {
        const u32 so_far = inclusive_sum(value);
        u32* sums = next();
        if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = so_far;
        __syncthreads();
        total = sum_of_warps(sums, WARPS);
        return sum_of_warps(sums, threadIdx.x / 32) + so_far - value;
    }

    __device__ __forceinline__ u32 all(u32 value) {
        const u32 sum = __reduce_add_sync(FULL_MASK, value);
        u32* sums = next();
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        return sum_of_warps(sums, WARPS);
    }

    __device__ __forceinline__ u32* next() {
        turn ^= 1;
        return shared.sums[turn];
    }
};

// ---- Places

// A word with the lowest `count` bits set.
__device__ __forceinline__ u32 lowest_bits(int count) { return count >= 32 ? FULL_MASK : (1u << max(count, 0)) - 1; }

// Quads per thread for so many places.
__device__ __forceinline__ int quads_for(int places) {
    const int needed = (places + 4 * THREADS - 1) / (4 * THREADS);
    return needed < FULL_QUADS ? needed | 1 : FULL_QUADS;
}

// The places of a thread in an array of scores in shared memory. A place's bit in a word is its number in the span.
//
// Eight lanes read 16 bytes each at a time. With an odd number of quads per thread they hit different banks; with 8 each lane
// starts with another of its quads, and words that are made in the order of reading are rotated.
struct Span {
    u32 scores;    // the address of the first one
    int first;     // place
    int quads;
    u32 rotation;  // bytes
    u32 valid;     // places that exist

    __device__ __forceinline__ Span(u32 array, int quads, int begin, int end) : quads(quads) {
        first = threadIdx.x * 4 * quads;
        scores = array + 4 * first;
        rotation = quads == FULL_QUADS ? threadIdx.x % 8 * 16 : 0;
        valid = lowest_bits(end - first) & ~lowest_bits(begin - first);
    }

    __device__ __forceinline__ float score(int bit) const { return __uint_as_float(shared_load(scores + 4 * bit)); }

    // Calls `look(score, bit of an unrotated word)` for all places, also for those that do not exist.
    template <class Look>
    __device__ __forceinline__ void each(const Look& look) const {
#pragma unroll
        for (int quad = 0; quad < FULL_QUADS; ++quad) {
            if (quad >= quads) break;
            const uint4 four = shared_load4(scores + ((16 * quad + rotation) & 127));
            look(__uint_as_float(four.x), 1u << 4 * quad);
            look(__uint_as_float(four.y), 2u << 4 * quad);
            look(__uint_as_float(four.z), 4u << 4 * quad);
            look(__uint_as_float(four.w), 8u << 4 * quad);
        }
    }

    __device__ __forceinline__ u32 rotated(u32 word) const {
        const u32 bits = rotation / 4;
        return (word << bits | word >> ((32 - bits) & 31)) & valid;
    }

    // All scores, where there are fewer than eight quads.
    template <int COUNT>
    __device__ __forceinline__ void load(float (&all)[COUNT]) const {
#pragma unroll
        for (int quad = 0; quad < COUNT / 4; ++quad) {
            const uint4 four = shared_load4(scores + 16 * quad);
            all[4 * quad] = __uint_as_float(four.x);
            all[4 * quad + 1] = __uint_as_float(four.y);
            all[4 * quad + 2] = __uint_as_float(four.z);
            all[4 * quad + 3] = __uint_as_float(four.w);
        }
    }

    // Scores of at least `low`, which is not NaN.
    __device__ __forceinline__ u32 from(float low) const {
        u32 found = 0;
        each([&](float score, u32 bit) {
            if (score >= low) found |= bit;
        });
        return rotated(found);
    }

    // Scores above `high`, and those from `low` to `high`.
    __device__ __forceinline__ void divide(float low, float high, u32& above, u32& within) const {
        u32 over = 0, least = 0;
        each([&](float score, u32 bit) {
            if (score > high) over |= bit;
            if (score >= low) least |= bit;
        });
        above = rotated(over);
        within = rotated(least & ~over);
    }
};

// Takes the lowest bit out of a word and returns its number.
__device__ __forceinline__ int take_bit(u32& word) {
    const int bit = __ffs(word) - 1;
    word &= word - 1;
    return bit;
}

// ---- Choosing

__device__ __forceinline__ void clear_bins(SharedMemory& shared) {
    for (int bin = 4 * threadIdx.x; bin < BINS; bin += 4 * THREADS) {
        shared_store4(shared_address(shared.bins + bin), make_uint4(0, 0, 0, 0));
    }
}

// The lane's key of 32, in descending order: a bitonic sort whose runs all descend, since the second one is read backwards.
__device__ __forceinline__ u32 sorted(u32 key) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int run = 2; run <= 32; run *= 2) {
#pragma unroll
        for (int step = run / 2; step > 0; step /= 2) {
            const u32 other = __shfl_xor_sync(FULL_MASK, key, step == run / 2 ? run - 1 : step);
            key = lane & step ? min(key, other) : max(key, other);
        }
    }
    return key;
}

// An interval of keys, from `low` to `high`, that is likely to have the k-th highest of the scores from place `begin` to `end`.
// Groups of 32 scores from all over the row are sorted, and the scores at two ranks of each, around the wanted one, are averaged.
// That is as good as ranks of the whole sample, and takes a fifth of its sort.
__device__ __forceinline__ void guess(SharedMemory& shared, u32 array, int begin, int end, int k, u32& low, u32& high) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, count = end - begin;
    u32 keys[SAMPLE_GROUPS];
#pragma unroll
    for (int group = 0; group < SAMPLE_GROUPS; ++group) {
        // Lanes look at different places of their parts of the row, since equal ones would often share a bank.
        const u32 part = (lane * SAMPLE_GROUPS + group) * WARPS + warp;
        const u32 place = begin + (part * 32 + lane) * static_cast<u32>(count) / (SAMPLE * 32);
        keys[group] = key_of(__uint_as_float(shared_load(array + 4 * place)));
    }
    // Half of the lanes look for the high end, half for the low one. Of 32 keys the one at rank r, from 0, has (r + 1) / 33 of all
    // above it. Ranks are rounded differently in each group. The outermost two ranks, whose scores scatter most, are used on
    // the side away from the wanted score only. Beyond them the highest score of all groups counts, or the lowest.
    const bool is_low = lane >= 16;
    const float share = static_cast<float>(k) / count;
    const float error = DEVIATIONS * sqrtf(share * (1.0f - share) / SAMPLE);
    const float rank = 33.0f * (is_low ? share + error : share - error);
    const bool outside = is_low ? rank > 32.0f : rank < 1.0f;
    const auto joined = [&](float one, float other) {
        return !outside ? one + other : is_low ? fminf(one, other) : fmaxf(one, other);
    };
    float score = outside ? (is_low ? HUGEST : -HUGEST) : 0.0f;
#pragma unroll
    for (int group = 0; group < SAMPLE_GROUPS; ++group) {
        const u32 key = sorted(keys[group]);
        const float fraction = (group * WARPS + warp + 0.5f) / (SAMPLE_GROUPS * WARPS);
        const int rounded = static_cast<int>(rank + fraction) - 1;
        const int usual = is_low ? max(min(rounded, 31), 2) : max(min(rounded, 29), 0);
        const float own = score_of(__shfl_sync(FULL_MASK, key, outside ? is_low * 31 : usual));
        score = joined(score, fminf(fmaxf(own, -HUGEST), HUGEST) / (outside ? 1 : SAMPLE_GROUPS * WARPS));
    }
    if (lane % 16 == 0) shared.pivots[is_low][warp] = score;
    __syncthreads();
    score = shared.pivots[is_low][lane % WARPS];
#pragma unroll
    for (int step = WARPS / 2; step > 0; step /= 2) score = joined(score, __shfl_xor_sync(FULL_MASK, score, step));
    const u32 end_key = max(key_of(score), LOWEST + 1);
    high = __shfl_sync(FULL_MASK, end_key, 0);
    low = min(__shfl_sync(FULL_MASK, end_key, 16), high);
}

// Finds the bin of the `wanted`-th highest of the counted keys, and clears the bins. One warp does so, since each of them would
// take as many instructions.
__device__ __forceinline__ void search(SharedMemory& shared, u32 wanted) {
    __syncthreads();  // all threads have counted
    if (threadIdx.x < 32) {
        const u32 bins = shared_address(shared.bins) + 16 * (31 - threadIdx.x);  // lanes go from high to low bins
        u32 above = 0;
        int block = BINS / 128 - 1;  // of 128 bins
#pragma unroll 1
        for (; block > 0; --block) {
            const uint4 four = shared_load4(bins + 512 * block);
            const u32 sum = __reduce_add_sync(FULL_MASK, four.x + four.y + four.z + four.w);
            if (above + sum >= wanted) break;
            above += sum;
        }
        const uint4 four = shared_load4(bins + 512 * block);
        const u32 own = four.x + four.y + four.z + four.w;
        above += inclusive_sum(own) - own;
        if (above < wanted && wanted <= above + own) {
            const u32 counts[4] = {four.w, four.z, four.y, four.x};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (above < wanted && wanted <= above + counts[i]) {
                    shared.bin = 128 * block + 127 - 4 * threadIdx.x - i;
                    shared.above = above;
                    shared.equal = counts[i];
                }
                above += counts[i];
            }
        }
#pragma unroll
        for (block = 0; block < BINS / 128; ++block) shared_store4(bins + 512 * block, make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
}

// What a thread knows of a choice.
struct Choice {
    u32 places;  // chosen ones of this thread
    u32 key;     // every chosen score has at least this key, and no other score has a higher one
};

// Chooses the k highest scores above -inf from place `begin` to `end`, all if there are fewer. Of equal ones, the first.
__device__ __forceinline__ Choice choose(SharedMemory& shared, Sums& sums, u32 array, int begin, int end, int k) {
    const Span span(array, quads_for(end), begin, end);
    const float lowest = score_of(LOWEST + 1);
    if (end - begin <= k) return {span.from(lowest), LOWEST + 1};

    u32 low, high;
    guess(shared, array, begin, end, k, low, high);
    u32 winners, within;
    span.divide(score_of(low), score_of(high), winners, within);
    u32 counts = sums.all(__popc(winners) | __popc(within) << 16);
    u32 won = counts & 0xFFFF, held = counts >> 16;
    if (won >= k) {
        low = high + 1;
        high = HIGHEST;
        within = winners;
        winners = 0;
        held = won;
        won = 0;
    } else if (won + held < k) {
        winners |= within;
        won += held;
        within = span.from(lowest) & ~winners;
        held = sums.all(__popc(within));
        if (won + held <= k) return {winners | within, LOWEST + 1};
        high = low - 1;
        low = LOWEST + 1;
    }

    // Here won < k <= won + held.
    const u32 bins = shared_address(shared.bins);
    while (won + held > k) {
        const u32 range = high - low;
        if (range == 0) {
            u32 total;
            const int left = max(static_cast<int>(k - won - sums.before(__popc(within), total)), 0);
            if (left == 0) within = 0;
            for (int extra = __popc(within) - left; extra > 0; --extra) within ^= 0x80000000u >> __clz(within);
            return {winners | within, low};
        }
        const int shift = max(32 - LOG_BINS - __clz(range), 0);
        for (u32 rest = within; rest;) {
            shared_increment(bins + 4 * ((key_of(span.score(take_bit(rest))) - low) >> shift));
        }
        search(shared, k - won);
        low += shared.bin << shift;
        high = low + min(lowest_bits(shift), high - low);
        high -= high == MINUS_ZERO;  // as a score it would not be below 0, and no score has this key
        won += shared.above;
        held = shared.equal;
        const float bottom = score_of(low), top = score_of(high);
        u32 rest = within;
        within = 0;
        while (rest) {
            const int bit = take_bit(rest);
            const float score = span.score(bit);
            if (score > top) winners |= 1u << bit;
            else if (score >= bottom) within |= 1u << bit;
        }
    }
    return {winners | within, low};
}

// ---- Rows

// A row of scores. Place 0 is at an address that is a multiple of 16 bytes, at or up to three scores before the row.
struct Row {
    const float* scores;  // of place 0
    int begin, end;       // places of the row

    __device__ __forceinline__ Row(const TopkParams& params, int number) {
        const float* start = params.scores + number * params.row_stride;
        begin = static_cast<int>(reinterpret_cast<unsigned long long>(start) / sizeof(float) % 4);
        end = begin + min(max(params.lengths[number], 0), params.width);
        scores = start - begin;
    }

    // Starts copying the whole quads of a tile. One thread calls this.
    __device__ __forceinline__ void copy(u32 tile, int first, u32 full) const {
        const int from = max(first, (begin + 3) / 4 * 4), to = min(first + TILE, end / 4 * 4);
        const u32 bytes = max(to - from, 0) * 4;
        mbarrier_arrive_expect_tx(full, bytes);
        if (bytes) bulk_copy(tile + 4 * (from - first), scores + from, bytes, full);
    }

    // Copies the other scores of a tile, which share a quad with what is not the row's. Those in a thread's span are its own.
    __device__ __forceinline__ void complete(u32 tile, int first) const {
        if (begin > 0) complete(tile, first, begin, min(end, 4));
        if (end % 4) complete(tile, first, max(begin, end / 4 * 4), end);
    }

    __device__ __forceinline__ void complete(u32 tile, int first, int from, int to) const {
        const int own = STREAMED ? 4 * QUADS : 32;
        if ((from - first) / own != threadIdx.x || from < first) return;
#pragma unroll 1
        for (int place = from; place < to; ++place) shared_store(tile + 4 * (place - first), __float_as_uint(scores[place]));
        fence_async_proxy();
    }
};

// Writes a row's result: `count` positions that lie in shared memory, then -1.
__device__ __forceinline__ void write_result(const TopkParams& params, int row, u32 chosen, int count) {
    int* result = params.out + static_cast<long long>(row) * params.k;
    if (params.page_size > 0) {
        const Pages pages = pages_of(params, row);
        for (int i = threadIdx.x; i < params.k; i += THREADS) {
            result[i] = i < count ? pages.slot(static_cast<int>(shared_load(chosen + 4 * i))) : -1;
        }
        return;
    }
    if (reinterpret_cast<unsigned long long>(result) % 16 == 0 && params.k % 4 == 0) {
        for (int i = 4 * threadIdx.x; i < params.k; i += 4 * THREADS) {
            uint4 four = shared_load4(chosen + 4 * i);
            if (i + 3 >= count) four.w = FULL_MASK;
            if (i + 2 >= count) four.z = FULL_MASK;
            if (i + 1 >= count) four.y = FULL_MASK;
            if (i >= count) four.x = FULL_MASK;
            *reinterpret_cast<uint4*>(result + i) = four;
        }
        return;
    }
    for (int i = threadIdx.x; i < params.k; i += THREADS) {
        result[i] = i < count ? static_cast<int>(shared_load(chosen + 4 * i)) : -1;
    }
}

// ---- The list of a streamed row

// The largest sample for the gate. Spans, which have an odd number of quads or 8, do not reach beyond scores and positions.
constexpr int ROOM = 2 * LISTED / (4 * THREADS);
constexpr int MOST_SAMPLED = 4 * THREADS * (ROOM >= FULL_QUADS ? FULL_QUADS : (ROOM - 1) | 1);

struct List {
    SharedMemory& shared;
    u32 scores, positions;  // addresses
    int count;

    __device__ __forceinline__ void put(int place, float score, int position) const {
        shared_store(scores + 4 * place, __float_as_uint(score));
        shared_store(positions + 4 * place, position);
    }

    // Copies pairs of quads of the row, 32 bytes each, as a sample: its scores are then the list,
    // and may lie where positions are as well.
    __device__ __forceinline__ void sample(const Row& row) {
        int first = (row.begin + 3) / 4;
        first += reinterpret_cast<unsigned long long>(row.scores + 4 * first) / 16 % 2;
        const int quads = row.end / 4 - first;
        const int pairs = min(MOST_SAMPLED / 8, quads / (2 * SHARE)), step = quads / pairs / 2 * 2;
#pragma unroll 4
        for (int i = threadIdx.x; i < 2 * pairs; i += THREADS) {
            const float4 four = reinterpret_cast<const float4*>(row.scores)[first + i / 2 * step + i % 2];
            shared_store4(scores + 16 * i, make_uint4(
                __float_as_uint(four.x), __float_as_uint(four.y), __float_as_uint(four.z), __float_as_uint(four.w)));
        }
        count = 8 * pairs;
    }

    // Keeps the k chosen entries of a full list. Others are overwritten, so their places are collected first, where bins are.
    __device__ __forceinline__ void keep(Sums& sums, u32 places, int k) {
        u32 total;
        u32 column = sums.before(__popc(places), total);
        const int first = threadIdx.x * 4 * quads_for(LISTED);
        while (places) shared.kept[column++] = first + take_bit(places);
        __syncthreads();
        for (int begin = 0; begin < k; begin += THREADS) {
            const int i = begin + threadIdx.x, from = i < k ? shared.kept[i] : i;
            const u32 score = shared_load(scores + 4 * from), position = shared_load(positions + 4 * from);
            __syncthreads();  // entries move to lower places, where this round has read and later ones do not
            if (i < k) {
                shared_store(scores + 4 * i, score);
                shared_store(positions + 4 * i, position);
            }
        }
        clear_bins(shared);
        count = k;
    }
};

// ---- Kernels

// Writes to out[row, :] the positions j < lengths[row] of the k highest scores above -inf, ascending, then -1. With a block
// table it writes the slots of these positions, -1 for positions without a page.
extern "C" __global__ void __launch_bounds__(THREADS, CTAS) topk_rows(const __grid_constant__ TopkParams params) {
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(shared_memory());
    const u32 tiles = shared_address(&shared) + TILES, full = shared_address(shared.full);
    const int k = params.k;
    if (threadIdx.x == 0) {
#pragma unroll
        for (int stage = 0; stage < (STREAMED ? STAGES : 1); ++stage) mbarrier_init(full + 8 * stage, 1);
        fence_mbarrier_init();
    }
    clear_bins(shared);
    wait_for_previous_kernel();
    const Row row(params, blockIdx.x);
    Sums sums = {shared, 0};

#if STAGES == 0
    if (threadIdx.x == 0) row.copy(tiles, 0, full);
    let_next_kernel_start();
    row.complete(tiles, 0);
    __syncthreads();  // the mbarrier is initialised, the bins are cleared and the tile is complete but for the copy
    mbarrier_wait(full, 0);
    u32 places = choose(shared, sums, tiles, row.begin, row.end, k).places;
    u32 total, column = sums.before(__popc(places), total);  // nobody reads scores any more
    const int first = threadIdx.x * 4 * quads_for(row.end) - row.begin;
    while (places) shared_store(tiles + 4 * column++, first + take_bit(places));
#else
    const int count = (row.end + TILE - 1) / TILE;  // tiles of the row
    if (threadIdx.x == 0) {
        for (int tile = 0; tile < min(count, STAGES); ++tile) row.copy(tiles + tile * TILE_BYTES, tile * TILE, full + 8 * tile);
    }
    let_next_kernel_start();
    const u32 memory = shared_address(&shared);
    List list = {shared, memory + LIST, memory + LIST + 4 * LISTED, 0};
    const float lowest = score_of(LOWEST + 1);
    float gate = lowest;
    bool sampled = row.end - row.begin > LISTED;  // the list is a sample
    float admitted = 1.0f;                        // how many scores the gate lets pass, in units of k, but for the sample's error

    int tile = 0, stage = 0, parity = 0;
    bool resumed = false;  // a part of the tile is on the list already
    u32 left = 0;          // places of the tile that are not
    Choice choice;
    while (true) {
        if (sampled) list.sample(row);
        while (!sampled && tile < count) {
            const u32 memory = tiles + stage * TILE_BYTES;
            const Span span(memory, QUADS, row.begin - tile * TILE, row.end - tile * TILE);
            if (!resumed) {
                if (tile == 0) __syncthreads();  // the mbarriers are initialised
                row.complete(memory, tile * TILE);
                mbarrier_wait(full + 8 * stage, parity);
                left = span.valid;
            }
            float scores[4 * QUADS];
            span.load(scores);
            u32 passing = 0;
#pragma unroll
            for (int i = 0; i < 4 * QUADS; ++i) passing |= scores[i] >= gate ? 1u << i : 0;
            passing &= left;
            u32 total;
            int place = list.count + sums.before(__popc(passing), total);
            const int position = tile * TILE + span.first - row.begin;
            list.count += total;
            resumed = list.count > LISTED;
            if (resumed) {
                for (; passing && place < LISTED; ++place) {
                    const int bit = take_bit(passing);
                    list.put(place, span.score(bit), position + bit);
                }
                list.count = LISTED;
                left = passing;
                break;
            }
            // All threads have their scores of the tile in registers.
            if (threadIdx.x == 0 && tile + STAGES < count) row.copy(memory, (tile + STAGES) * TILE, full + 8 * stage);
#pragma unroll
            for (int i = 0; i < 4 * QUADS; ++i) {
                if (passing >> i & 1) list.put(place++, scores[i], position + i);
            }
            ++tile;
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        __syncthreads();  // the list is complete, and nobody reads tiles any more
        if (!sampled && !resumed && list.count < k && gate != lowest) {  // the gate was too high
            sampled = true;
            admitted *= 4.0f;
            tile = 0;
            if (threadIdx.x == 0) {
                for (int i = 0; i < min(count, STAGES); ++i) {
                    const int at = (stage + i) % STAGES;
                    row.copy(tiles + at * TILE_BYTES, i * TILE, full + 8 * at);
                }
            }
            continue;
        }
        // The sample's threshold is the gate: enough scores pass even if the sample has a few more of the best than its share.
        const float expected = admitted * k / (row.end - row.begin) * list.count;
        const int wanted = sampled ? static_cast<int>(expected + GATE_DEVIATIONS * sqrtf(expected)) + 1 : k;
        choice = choose(shared, sums, list.scores, 0, list.count, wanted);
        if (sampled) {
            sampled = false;
            list.count = 0;
            gate = score_of(choice.key);
        } else if (resumed) {
            list.keep(sums, choice.places, k);
            gate = score_of(choice.key + 1);  // later scores equal to the lowest one that was kept are behind it
        } else {
            break;
        }
    }
    u32 places = choice.places, total, column = sums.before(__popc(places), total);
    const int first = threadIdx.x * 4 * quads_for(list.count);
    while (places) shared_store(tiles + 4 * column++, shared_load(list.positions + 4 * (first + take_bit(places))));
#endif
    __syncthreads();  // the result is complete
    write_result(params, blockIdx.x, tiles, total);
}
