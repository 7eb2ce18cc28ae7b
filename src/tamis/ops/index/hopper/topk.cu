// The k highest scores of each row, exactly, and the same on every run: one cluster of blocks per row.
//
// Scores become unsigned keys in the same order. Each block owns one slice of the row and keeps as many of its keys as
// fit in shared memory. The k-th highest key of the row is found digit by digit, from the top: the blocks count how
// often each value of a digit occurs, add up their counts, and all reach the same decision. Then each block marks its
// winners in a bitmap, and keys equal to the k-th in another one. The counts also say how many winners lie in the
// slices before, so each block knows where its part of the output starts. A bitmap is read in the order of positions,
// so the lowest positions win among equal keys, whatever order threads ran in.
//
// Defined by the caller: THREADS per block, and SHARED_BYTES, the memory it reckons with besides bitmaps and keys.

#include "instructions.cuh"

constexpr int WARPS = THREADS / 32;
// The key of -inf, which NaN and places outside the row get as well: no candidate.
constexpr u32 LOWEST = 0x007FFFFFu;
// Digits of 12, 10 and 10 bits. The first one is wide because everything after it works on what shares its value.
constexpr int FIRST_BINS = 4096, LATER_BINS = 1024;
constexpr int FIRST_SHIFT = 20, SECOND_SHIFT = 10;
// Counts are searched in two steps: first among this many groups of bins, one for each lane of a warp.
constexpr int GROUPS = 32;
// Candidates that a block lists; with more of them it looks through its slice again.
constexpr int LISTED = 2048;
constexpr int LARGEST_K = 4096;
// Loads in flight per thread.
constexpr int LOADS = 4;
constexpr int STEP = 4 * THREADS;

// ---- Keys

// Unsigned integers in the order of floats. Adding zero makes -0 and 0 one value; the maximum turns NaN into -inf.
__device__ __forceinline__ u32 key_of(float score) {
    const u32 bits = __float_as_uint(fmaxf(score + 0.0f, __uint_as_float(0xFF800000u)));
    return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ uint4 keys_of(float4 s) {
    return make_uint4(key_of(s.x), key_of(s.y), key_of(s.z), key_of(s.w));
}

// Counts of one digit over the whole row, and over the slices before this one.
template <int BINS>
struct Digit {
    u32 counts[BINS];  // of this slice only
    u32 groups[GROUPS], groups_before[GROUPS];
    u32 bins[BINS / GROUPS], bins_before[BINS / GROUPS];  // of the group in which the search goes on
};

struct Digits {
    Digit<FIRST_BINS> first;
    Digit<LATER_BINS> second, third;
};

struct Entry {
    u32 key;
    int place;
};

struct alignas(16) Shared {
    Digits digits;
    union {
        Entry list[LISTED];  // candidates, in any order
        int chosen[LARGEST_K];  // after the marking: places of this slice that are part of the result, ascending
    };
    u32 warp_winners[WARPS], warp_ties[WARPS];
    u32 listed;  // candidates met so far; the list is not complete if they are more than it holds
};

static_assert(sizeof(Shared) == SHARED_BYTES, "the caller has another layout in mind");
static_assert(sizeof(Digits) % sizeof(uint4) == 0, "they are cleared in units of this");

// One block's part of a row. Places count from an address that is a multiple of 16 bytes, at or before the row's start.
struct Slice {
    const float* scores;  // at place 0
    u32 keys;  // address of the keys in shared memory, of the places below `resident`
    int resident;
    int begin, end;  // places that belong to the row
    int position;  // of place 0 in the row

    __device__ __forceinline__ float score(int place) const {
        return place >= begin && place < end ? scores[place] : __uint_as_float(0xFF800000u);
    }

    __device__ __forceinline__ float4 scores4(int place) const {
        if (place >= begin && place + 4 <= end) return *reinterpret_cast<const float4*>(scores + place);
        return make_float4(score(place), score(place + 1), score(place + 2), score(place + 3));
    }

    // Keys that lie `step` places apart. All loads from the row come first, so that they run at the same time.
    __device__ __forceinline__ void keys_apart(int place, int step, u32 (&found)[LOADS]) const {
        float loaded[LOADS];
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int at = place + i * step;
            loaded[i] = at < resident ? 0.0f : score(at);
        }
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const int at = place + i * step;
            found[i] = at >= resident ? key_of(loaded[i]) : at < end ? shared_load(keys + 4 * at) : LOWEST;
        }
    }
};

// ---- Search

struct Found {
    int digit;  // of the k-th key; -1 if there are fewer than k
    u32 above, above_before;  // keys whose digit is higher: in the row, and in the slices before this one
    u32 equal, equal_before;  // keys with this digit
};

// The first lane at which the counts of the lanes so far reach `wanted`, 32 if none does; what lies before it is added
// to `above` and `above_before`.
__device__ __forceinline__ int reach(u32 count, u32 before, u32 wanted, u32& above, u32& above_before) {
    const int lane = threadIdx.x % 32;
    u32 so_far = count;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_MASK, so_far, step);
        if (lane >= step) so_far += other;
    }
    const u32 reached = __ballot_sync(FULL_MASK, above + so_far >= wanted);
    const int first = reached ? __ffs(reached) - 1 : 32;
    above += __reduce_add_sync(FULL_MASK, lane < first ? count : 0);
    above_before += __reduce_add_sync(FULL_MASK, lane < first ? before : 0);
    return first;
}

// Once this block has counted a digit: where the `wanted`-th highest key of the row is, the same in every thread. Bins
// below `ignored` hold no candidates. Every warp searches for itself, lanes going from high digits to low ones.
template <int BINS>
__device__ __forceinline__ Found agree(Digit<BINS>& digit, int ignored, u32 wanted, u32 rank, u32 blocks) {
    constexpr int GROUP = BINS / GROUPS, PER_LANE = GROUP / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // every thread has counted
    const u32 groups = shared_address(digit.groups);
    for (int group = warp; group < GROUPS; group += WARPS) {
        u32 sum = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int bin = group * GROUP + i * 32 + lane;
            sum += bin < ignored ? 0 : digit.counts[bin];
        }
        sum = __reduce_add_sync(FULL_MASK, sum);
        // One lane for each block of the cluster.
        if (lane < blocks) {
            const u32 theirs = peer_address(groups + 4 * group, lane);
            peer_add(theirs, sum);
            if (lane > rank) peer_add(theirs + 4 * GROUPS, sum);
        }
    }
    cluster_arrive();
    cluster_wait();  // the counts of every block are complete, and so are the sums of groups in this one
    Found found = {-1, 0, 0, 0, 0};
    const int mine = GROUPS - 1 - lane;
    const int from_top = reach(digit.groups[mine], digit.groups_before[mine], wanted, found.above, found.above_before);
    if (from_top == 32) return found;
    const int group = GROUPS - 1 - from_top;
    const u32 counts = shared_address(digit.counts + group * GROUP + lane);
#pragma unroll 1
    for (int peer = warp; peer < blocks; peer += WARPS) {
        u32 loaded[PER_LANE];
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) loaded[i] = peer_load(peer_address(counts + 128 * i, peer));
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            atomicAdd(&digit.bins[lane + 32 * i], loaded[i]);
            if (peer < rank) atomicAdd(&digit.bins_before[lane + 32 * i], loaded[i]);
        }
    }
    __syncthreads();  // the sums of the group's bins are complete
    u32 count[PER_LANE], before[PER_LANE], sum = 0, sum_before = 0;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        sum += count[i] = digit.bins[GROUP - 1 - lane * PER_LANE - i];
        sum_before += before[i] = digit.bins_before[GROUP - 1 - lane * PER_LANE - i];
    }
    const int at = reach(sum, sum_before, wanted, found.above, found.above_before);
    bool passed = true;  // the bins so far, as all lanes before, do not reach `wanted`
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
        const u32 equal = __shfl_sync(FULL_MASK, count[i], at), equal_before = __shfl_sync(FULL_MASK, before[i], at);
        if (!passed) continue;
        passed = found.above + equal < wanted;
        if (passed) {
            found.above += equal;
            found.above_before += equal_before;
        } else {
            found.digit = (group + 1) * GROUP - 1 - at * PER_LANE - i;
            found.equal = equal;
            found.equal_before = equal_before;
        }
    }
    return found;
}

// ---- Passes over a slice

// Reads the slice, keeps what fits, and counts the first digit.
__device__ __forceinline__ void count_first_digit(const Slice& slice, Shared& shared) {
    const u32 counts = shared_address(shared.digits.first.counts);
    for (int place = 4 * threadIdx.x; place < slice.end; place += STEP * LOADS) {
        float4 scores[LOADS];
        if (place >= slice.begin && place + STEP * (LOADS - 1) + 4 <= slice.end) {
#pragma unroll
            for (int load = 0; load < LOADS; ++load) {
                scores[load] = *reinterpret_cast<const float4*>(slice.scores + place + load * STEP);
            }
        } else {
#pragma unroll
            for (int load = 0; load < LOADS; ++load) scores[load] = slice.scores4(place + load * STEP);
        }
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            const int at = place + load * STEP;
            const uint4 keys = keys_of(scores[load]);
            if (at < slice.resident) shared_store4(slice.keys + 4 * at, keys);
            if (at >= slice.end) break;
            shared_increment(counts + 4 * (keys.x >> FIRST_SHIFT));
            shared_increment(counts + 4 * (keys.y >> FIRST_SHIFT));
            shared_increment(counts + 4 * (keys.z >> FIRST_SHIFT));
            shared_increment(counts + 4 * (keys.w >> FIRST_SHIFT));
        }
    }
}

// Marks keys whose first digit is higher than `first`; lists those that have it, and counts their second digit.
__device__ __forceinline__ void consider(
    uint4 four, int place, u32 first, u32 second_counts, Shared& shared, u32* winners) {
    const u32 keys[4] = {four.x, four.y, four.z, four.w};
    if (max(max(keys[0], keys[1]), max(keys[2], keys[3])) < first << FIRST_SHIFT) return;
    u32 higher = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (keys[i] >> FIRST_SHIFT > first) higher |= 1u << i;
        if (keys[i] >> FIRST_SHIFT != first) continue;
        shared_increment(second_counts + 4 * (keys[i] >> SECOND_SHIFT & (LATER_BINS - 1)));
        // On a plateau everybody would wait for one counter, whose value has become useless.
        if (*const_cast<volatile u32*>(&shared.listed) > LISTED) continue;
        const u32 at = atomicAdd(&shared.listed, 1u);
        if (at < LISTED) shared.list[at] = {keys[i], place + i};
    }
    if (higher) atomicOr(&winners[place / 32], higher << place % 32);
}

__device__ __forceinline__ void count_second_digit(const Slice& slice, Shared& shared, u32 first, u32* winners) {
    const u32 counts = shared_address(shared.digits.second.counts);
    int place = 4 * threadIdx.x;
    for (; place < min(slice.resident, slice.end); place += STEP) {
        consider(shared_load4(slice.keys + 4 * place), place, first, counts, shared, winners);
    }
    // What was not kept is read again, two loads ahead.
    float4 next = slice.scores4(place), after = slice.scores4(place + STEP);
    for (; place < slice.end; place += STEP) {
        const float4 scores = next;
        next = after;
        after = slice.scores4(place + 2 * STEP);
        consider(keys_of(scores), place, first, counts, shared, winners);
    }
}

// Counts the third digit of the keys that start with `prefix`.
__device__ __forceinline__ void count_third_digit(const Slice& slice, Shared& shared, u32 prefix, bool listing) {
    const u32 counts = shared_address(shared.digits.third.counts);
    if (listing) {
        for (int i = threadIdx.x; i < shared.listed; i += THREADS) {
            const u32 key = shared.list[i].key;
            if (key >> SECOND_SHIFT == prefix) shared_increment(counts + 4 * (key & (LATER_BINS - 1)));
        }
        return;
    }
    for (int place = threadIdx.x; place < slice.end; place += THREADS * LOADS) {
        u32 keys[LOADS];
        slice.keys_apart(place, THREADS, keys);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            if (keys[i] >> SECOND_SHIFT == prefix) shared_increment(counts + 4 * (keys[i] & (LATER_BINS - 1)));
        }
    }
}

// Marks keys that start with more than `prefix` in one bitmap and those that start with it in the other. Where there is
// a list, what is not on it has been marked before.
__device__ __forceinline__ void mark(
    const Slice& slice, const Shared& shared, u32 prefix, int shift, bool listing, u32* winners, u32* ties) {
    if (listing) {
        for (int i = threadIdx.x; i < shared.listed; i += THREADS) {
            const Entry entry = shared.list[i];
            const u32 start = entry.key >> shift;
            if (start >= prefix) atomicOr(&(start > prefix ? winners : ties)[entry.place / 32], 1u << entry.place % 32);
        }
        return;
    }
    // A warp's 32 places are one word of a bitmap.
    for (int place = threadIdx.x; place - static_cast<int>(threadIdx.x % 32) < slice.end; place += THREADS * LOADS) {
        u32 keys[LOADS];
        slice.keys_apart(place, THREADS, keys);
#pragma unroll
        for (int i = 0; i < LOADS; ++i) {
            const u32 higher = __ballot_sync(FULL_MASK, keys[i] >> shift > prefix);
            const u32 equal = __ballot_sync(FULL_MASK, keys[i] >> shift == prefix);
            const int word = (place + i * THREADS) / 32;
            if (threadIdx.x % 32 == 0 && word * 32 < slice.end) {
                winners[word] = higher;
                ties[word] = equal;
            }
        }
    }
}

// The sum over the lanes up to this one.
__device__ __forceinline__ u32 sum_in_warp(u32 value) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(FULL_MASK, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

// The sum of the first `count` warps, whose own sums are in `warps`.
__device__ __forceinline__ u32 sum_of_warps(const u32* warps, int count) {
    const int lane = threadIdx.x % 32;
    return __reduce_add_sync(FULL_MASK, lane < count ? warps[lane] : 0);
}

// Writes the places of the winners and of the first `quota` ties to `shared.chosen`, ascending; returns how many.
__device__ __forceinline__ u32 collect(
    const Slice& slice, Shared& shared, u32 quota, const u32* winners, const u32* ties) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int words = (slice.end + 31) / 32;
    const int run = (words + THREADS - 1) / THREADS;
    const int first = min(static_cast<int>(threadIdx.x) * run, words), last = min(first + run, words);
    u32 own_winners = 0, own_ties = 0;
    for (int word = first; word < last; ++word) {
        own_winners += __popc(winners[word]);
        own_ties += __popc(ties[word]);
    }
    const u32 winners_so_far = sum_in_warp(own_winners), ties_so_far = sum_in_warp(own_ties);
    if (lane == 31) {
        shared.warp_winners[warp] = winners_so_far;
        shared.warp_ties[warp] = ties_so_far;
    }
    __syncthreads();  // the sums of all warps are there, and nobody reads the list any more: `chosen` takes its place
    const u32 ties_before = sum_of_warps(shared.warp_ties, warp) + ties_so_far - own_ties;
    u32 column = sum_of_warps(shared.warp_winners, warp) + winners_so_far - own_winners + min(ties_before, quota);
    u32 left = quota - min(ties_before, quota);
    for (int word = first; word < last; ++word) {
        const u32 sure = winners[word];
        u32 bits = sure | (left ? ties[word] : 0);
        while (bits) {
            const u32 bit = bits & -bits;
            bits ^= bit;
            if (!(sure & bit)) {
                if (left == 0) continue;
                --left;
            }
            shared.chosen[column++] = word * 32 + __ffs(bit) - 1;
        }
    }
    return sum_of_warps(shared.warp_winners, WARPS) + min(sum_of_warps(shared.warp_ties, WARPS), quota);
}

// ---- Kernel

struct Pages {
    const int* table;  // of the row's request; null: positions are the result
    int width;
    int page_size;

    __device__ __forceinline__ int slot(int position) const {
        if (page_size == 0) return position;
        const int column = position / page_size;
        const int page = table != nullptr && column < width ? table[column] : -1;
        const long long slot = static_cast<long long>(page) * page_size + position % page_size;
        return page >= 0 && slot < 0x80000000ll ? static_cast<int>(slot) : -1;
    }
};

// out[row, :] = the positions j < lengths[row] of the k highest scores above -inf, ascending, then -1. With a block
// table (page_size > 0) the slots of these positions instead, -1 in the columns of positions that have none.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) topk_positions(
    const float* scores, long long row_stride, int width, const int* lengths, int k, const int* request_ids,
    const int* block_table, long long table_stride, int requests, int table_width, int page_size, int* out,
    int resident, int bitmap_words) {
    uint4* const memory = shared_memory();
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    u32* winners = reinterpret_cast<u32*>(memory) + sizeof(Shared) / sizeof(u32);
    u32* ties = winners + bitmap_words;
    const u32 rank = cluster_rank(), blocks = cluster_size();
    const int row = blockIdx.x / blocks;

    wait_for_previous_kernel();
    const int length = min(max(lengths[row], 0), width);
    for (int i = threadIdx.x; i < sizeof(Digits) / sizeof(uint4); i += THREADS) memory[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) shared.listed = 0;
    cluster_arrive();  // this block runs, and its counts are zero; meanwhile the length arrives
    const bool everything = length <= k;  // in the whole cluster: then one block does it, and reads the row once
    if (everything && rank > 0) {
        cluster_wait();
        return;
    }
    const float* start = scores + row * row_stride;
    const int skipped = static_cast<int>(reinterpret_cast<unsigned long long>(start) / sizeof(float) % 4);
    const int parts = everything ? 1 : blocks;
    const int size = ((skipped + length + parts - 1) / parts + 127) / 128 * 128;
    Slice slice;
    slice.position = static_cast<int>(rank) * size - skipped;
    slice.scores = start + slice.position;
    slice.keys = shared_address(ties + bitmap_words);
    slice.resident = everything ? 0 : resident;
    slice.begin = rank == 0 ? skipped : 0;
    slice.end = max(min(length - slice.position, size), 0);

    // What is known of the k-th highest key: it starts with `prefix`. All keys that start with more are winners; of
    // those that start with the same, the first `wanted` of the row, of which the first `quota` of this slice.
    u32 prefix = LOWEST, wanted = 0, quota = 0;
    u32 column = 0, total = 0;  // of the output: where this block's part starts, and where everything ends
    int shift = 0;
    bool listing = false;
    if (!everything) {
        for (int word = threadIdx.x; word * 32 < slice.end; word += THREADS) winners[word] = ties[word] = 0;
        __syncthreads();  // counts are zero
        count_first_digit(slice, shared);
        cluster_wait();  // the other blocks are ready as well
        Found found = agree(shared.digits.first, (LOWEST >> FIRST_SHIFT) + 1, k, rank, blocks);
        column = found.above_before;
        total = found.above;  // all of them, if they are fewer than k
        if (found.digit >= 0) {
            total = k;
            prefix = found.digit;
            wanted = k - found.above;
            count_second_digit(slice, shared, prefix, winners);
            found = agree(shared.digits.second, 0, wanted, rank, blocks);
            listing = shared.listed <= LISTED;
            column += found.above_before;
            wanted -= found.above;
            prefix = prefix << (FIRST_SHIFT - SECOND_SHIFT) | found.digit;
            shift = SECOND_SHIFT;
            if (wanted < found.equal) {
                count_third_digit(slice, shared, prefix, listing);
                found = agree(shared.digits.third, 0, wanted, rank, blocks);
                column += found.above_before;
                wanted -= found.above;
                prefix = prefix << SECOND_SHIFT | found.digit;
                shift = 0;
            }
            quota = wanted - min(wanted, found.equal_before);
            column += min(wanted, found.equal_before);
        }
        cluster_arrive_relaxed();  // this block has read the counts of the others for the last time
    }
    let_next_kernel_start();

    mark(slice, shared, prefix, shift, listing, winners, ties);
    __syncthreads();  // the bitmaps are complete
    const u32 count = collect(slice, shared, quota, winners, ties);
    __syncthreads();  // `chosen` is complete

    Pages pages = {nullptr, table_width, page_size};
    if (page_size > 0) {
        const int request = request_ids[row];
        if (request >= 0 && request < requests) pages.table = block_table + request * table_stride;
    }
    int* result = out + static_cast<long long>(row) * k;
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        result[column + i] = pages.slot(shared.chosen[i] + slice.position);
    }
    if (everything) total = count;
    for (u32 i = total + rank * THREADS + threadIdx.x; i < k; i += parts * THREADS) result[i] = -1;
    cluster_wait();  // nobody leaves while others may read its counts
}
