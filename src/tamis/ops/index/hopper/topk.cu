// Exact top-k of each row of scores, on GPUs with clusters: one cluster of CTAs per row. The result is deterministic.
//
// Scores become unsigned keys that compare like the scores. Each CTA of the cluster owns one slice of the row. The k-th
// highest key is found by a radix select over three digits, from the top:
//   1. Read the slice, keep as many keys in shared memory as fit, and count the first digit (12 bits).
//   2. Find the first digit of the k-th key: the CTAs add up their counts through distributed shared memory, and each CTA
//      searches the sums for itself.
//   3. Mark keys with a higher first digit as winners, list the candidates that are left, which have this digit, and count
//      their second digit (10 bits). Find the second digit of the k-th key as in step 2.
//   4. Do the same with the third digit (10 bits), unless the second one decides.
//   5. Mark winners in one bitmap and ties, the keys equal to the k-th, in another. Read the bitmaps in the order of
//      positions and write the result. The counts say how many winners and ties lie in the slices before, so each CTA knows
//      where its results start in the output. Among ties the lowest positions win, in whatever order threads ran.
// All warps do the same work. A row of up to k positions needs no search and is left to one CTA.
//
// Shared memory is `SharedMemory`, then the two bitmaps, a bit for each place of the slice, then the resident keys. Budget:
// scores are read once from global memory if the keys of the slice fit (46,000 with a whole SM), otherwise twice, or up to
// four times if there are more candidates than the list holds.
//
// Defined by the host: THREADS (per CTA); FIXED_BYTES, the bytes set aside for `SharedMemory`; PARAMS_BYTES.

#include "topk_parts.cuh"

static_assert(sizeof(TopkParams) == PARAMS_BYTES, "TopkParams differs from its twin in topk.py");

constexpr int WARPS = THREADS / 32;
// The first digit is wide because all later passes work only on keys that share its value.
constexpr int FIRST_BINS = 4096, LATER_BINS = 1024;
constexpr int FIRST_SHIFT = 20, SECOND_SHIFT = 10;
constexpr int GROUPS = 32;       // counts are searched in two steps, first among groups of bins, one per lane
constexpr int LISTED = 2048;     // candidates that a CTA can list; if it has more, it goes through its slice again
constexpr int LARGEST_K = 4096;
constexpr int LOADS = 4;         // loads in flight per thread
constexpr int STEP = 4 * THREADS;

// ---- Keys

__device__ __forceinline__ uint4 keys_of(float4 s) {
    return make_uint4(key_of(s.x), key_of(s.y), key_of(s.z), key_of(s.w));
}

// The counts of one digit. `_before` arrays count the slices before this one, the others the whole row.
template <int BINS>
struct Digit {
    u32 counts[BINS];  // of this slice only
    u32 groups[GROUPS], groups_before[GROUPS];            // of each group of bins
    u32 bins[BINS / GROUPS], bins_before[BINS / GROUPS];  // of each bin of the group that contains the k-th key
};

struct Digits {
    Digit<FIRST_BINS> first;
    Digit<LATER_BINS> second, third;
};

// A listed candidate.
struct Entry {
    u32 key;
    int place;
};

struct alignas(16) SharedMemory {
    Digits digits;
    union {
        Entry list[LISTED];     // candidates, in any order
        int chosen[LARGEST_K];  // after the bitmaps are complete: the places of this slice's results, ascending
    };
    u32 warp_winners[WARPS], warp_ties[WARPS];  // set bits of each warp's words of the bitmaps
    u32 listed;                                 // candidates so far; if above LISTED, the list is not complete
};

static_assert(sizeof(SharedMemory) <= FIXED_BYTES && FIXED_BYTES % 16 == 0, "FIXED_BYTES of topk.py is too small");
static_assert(sizeof(Digits) % sizeof(uint4) == 0, "digits are cleared 16 bytes at a time");

// One CTA's slice of a row. Places number its scores from an address that is a multiple of 16 bytes, at or up to three
// scores before the start of the slice.
struct Slice {
    const float* scores;  // address of place 0
    u32 keys;             // address of the resident keys in shared memory
    int resident;         // places below this have their keys in shared memory
    int begin, end;       // places that belong to the row
    int position;         // of place 0 in the row; negative if place 0 lies before the row

    __device__ __forceinline__ float score(int place) const {
        return place >= begin && place < end ? scores[place] : __uint_as_float(0xFF800000u);
    }

    __device__ __forceinline__ float4 scores4(int place) const {
        if (place >= begin && place + 4 <= end) return *reinterpret_cast<const float4*>(scores + place);
        return make_float4(score(place), score(place + 1), score(place + 2), score(place + 3));
    }

    // Reads LOADS keys that lie `step` places apart. All loads from global memory come first, so that they overlap.
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

// The result of the search for a digit.
struct Found {
    int digit;                // of the wanted key; -1 if there are fewer keys
    u32 above, above_before;  // keys with a higher digit, in the row and in the slices before this one
    u32 equal, equal_before;  // keys with this digit, likewise
};

// The first lane at which `above` plus the counts of lanes 0 to that one reach `wanted`; 32 if none does. The counts of the
// lanes before it are added to `above` and `above_before`.
__device__ __forceinline__ int first_reaching(u32 count, u32 before, u32 wanted, u32& above, u32& above_before) {
    const int lane = threadIdx.x % 32;
    const u32 so_far = inclusive_sum(count);
    const u32 reached = __ballot_sync(FULL_MASK, above + so_far >= wanted);
    const int first = reached ? __ffs(reached) - 1 : 32;
    above += __reduce_add_sync(FULL_MASK, lane < first ? count : 0);
    above_before += __reduce_add_sync(FULL_MASK, lane < first ? before : 0);
    return first;
}

// Finds the digit of the row's `wanted`-th highest key, after each CTA has counted its slice. Every thread of the cluster gets
// the same result. Bins below `ignored` have no candidates. Every warp searches for itself; lanes go from high to low bins.
template <int BINS>
__device__ __forceinline__ Found find_digit(Digit<BINS>& digit, int ignored, u32 wanted, u32 rank, u32 ctas) {
    constexpr int GROUP = BINS / GROUPS, PER_LANE = GROUP / 32;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // all threads have counted
    const u32 groups = shared_address(digit.groups);
    for (int group = warp; group < GROUPS; group += WARPS) {
        u32 sum = 0;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) {
            const int bin = group * GROUP + i * 32 + lane;
            sum += bin < ignored ? 0 : digit.counts[bin];
        }
        sum = __reduce_add_sync(FULL_MASK, sum);
        // Each lane adds to the sums of one CTA of the cluster.
        if (lane < ctas) {
            const u32 theirs = peer_address(groups + 4 * group, lane);
            peer_add(theirs, sum);
            if (lane > rank) peer_add(theirs + 4 * GROUPS, sum);
        }
    }
    cluster_arrive();
    cluster_wait();  // the counts of all CTAs are complete, and so are the sums of groups in this one
    Found found = {-1, 0, 0, 0, 0};
    const int mine = GROUPS - 1 - lane;
    const int from_top = first_reaching(digit.groups[mine], digit.groups_before[mine], wanted, found.above, found.above_before);
    if (from_top == 32) return found;
    const int group = GROUPS - 1 - from_top;
    const u32 counts = shared_address(digit.counts + group * GROUP + lane);
#pragma unroll 1
    for (int peer = warp; peer < ctas; peer += WARPS) {
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
    const int at = first_reaching(sum, sum_before, wanted, found.above, found.above_before);
    bool passed = true;  // the bins so far do not reach `wanted`
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

// Reads the slice, keeps as many keys in shared memory as fit, and counts the first digit.
__device__ __forceinline__ void count_first_digit(const Slice& slice, SharedMemory& shared) {
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

// Marks keys whose first digit is higher than `first`, lists those with this digit, and counts their second digit.
__device__ __forceinline__ void mark_and_list(
    uint4 four, int place, u32 first, u32 second_counts, SharedMemory& shared, u32* winners) {
    const u32 keys[4] = {four.x, four.y, four.z, four.w};
    if (max(max(keys[0], keys[1]), max(keys[2], keys[3])) < first << FIRST_SHIFT) return;
    u32 higher = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (keys[i] >> FIRST_SHIFT > first) higher |= 1u << i;
        if (keys[i] >> FIRST_SHIFT != first) continue;
        shared_increment(second_counts + 4 * (keys[i] >> SECOND_SHIFT & (LATER_BINS - 1)));
        // Once the list is full its length does not matter, and with many equal scores all threads would queue for the atomic.
        if (*const_cast<volatile u32*>(&shared.listed) > LISTED) continue;
        const u32 at = atomicAdd(&shared.listed, 1u);
        if (at < LISTED) shared.list[at] = {keys[i], place + i};
    }
    if (higher) atomicOr(&winners[place / 32], higher << place % 32);
}

__device__ __forceinline__ void count_second_digit(const Slice& slice, SharedMemory& shared, u32 first, u32* winners) {
    const u32 counts = shared_address(shared.digits.second.counts);
    int place = 4 * threadIdx.x;
    for (; place < min(slice.resident, slice.end); place += STEP) {
        mark_and_list(shared_load4(slice.keys + 4 * place), place, first, counts, shared, winners);
    }
    // Scores whose keys are not resident are read again, two loads ahead.
    float4 next = slice.scores4(place), after = slice.scores4(place + STEP);
    for (; place < slice.end; place += STEP) {
        const float4 scores = next;
        next = after;
        after = slice.scores4(place + 2 * STEP);
        mark_and_list(keys_of(scores), place, first, counts, shared, winners);
    }
}

// Counts the third digit of the keys that start with `prefix`. `listing`: whether the list has all candidates.
__device__ __forceinline__ void count_third_digit(const Slice& slice, SharedMemory& shared, u32 prefix, bool listing) {
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

// Marks keys above `prefix` in `winners` and keys that start with it in `ties`. If the list is complete (`listing`), winners
// that are not on it have been marked already.
__device__ __forceinline__ void mark(
    const Slice& slice, const SharedMemory& shared, u32 prefix, int shift, bool listing, u32* winners, u32* ties) {
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

// Writes the places of the winners and of the first `quota` ties to `shared.chosen`, ascending; returns how many.
__device__ __forceinline__ u32 collect(
    const Slice& slice, SharedMemory& shared, u32 quota, const u32* winners, const u32* ties) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int words = (slice.end + 31) / 32;
    const int run = (words + THREADS - 1) / THREADS;
    const int first = min(static_cast<int>(threadIdx.x) * run, words), last = min(first + run, words);
    u32 own_winners = 0, own_ties = 0;
    for (int word = first; word < last; ++word) {
        own_winners += __popc(winners[word]);
        own_ties += __popc(ties[word]);
    }
    const u32 winners_so_far = inclusive_sum(own_winners), ties_so_far = inclusive_sum(own_ties);
    if (lane == 31) {
        shared.warp_winners[warp] = winners_so_far;
        shared.warp_ties[warp] = ties_so_far;
    }
    __syncthreads();  // all warps have written their sums and read the list, which `chosen` overwrites
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

// Writes to out[row, :] the positions j < lengths[row] of the k highest scores above -inf, ascending, then -1. With a block
// table it writes the slots of these positions, -1 for positions without a page.
extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) topk_positions(const __grid_constant__ TopkParams params) {
    uint4* const memory = shared_memory();
    SharedMemory& shared = *reinterpret_cast<SharedMemory*>(memory);
    u32* winners = reinterpret_cast<u32*>(memory) + FIXED_BYTES / sizeof(u32);
    u32* ties = winners + params.bitmap_words;
    const u32 rank = cluster_rank(), ctas = cluster_size();
    const int row = blockIdx.x / ctas, k = params.k;

    wait_for_previous_kernel();
    const int length = min(max(params.lengths[row], 0), params.width);
    for (int i = threadIdx.x; i < sizeof(Digits) / sizeof(uint4); i += THREADS) memory[i] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x == 0) shared.listed = 0;
    cluster_arrive();  // this CTA runs and has cleared its counts; the load of the length overlaps
    const bool everything = length <= k;  // the same in the whole cluster; CTA 0 does the row alone and reads it once
    if (everything && rank > 0) {
        cluster_wait();
        return;
    }
    const float* start = params.scores + row * params.row_stride;
    const int skipped = static_cast<int>(reinterpret_cast<unsigned long long>(start) / sizeof(float) % 4);
    const int slices = everything ? 1 : ctas;
    const int size = ((skipped + length + slices - 1) / slices + 127) / 128 * 128;
    Slice slice;
    slice.position = static_cast<int>(rank) * size - skipped;
    slice.scores = start + slice.position;
    slice.keys = shared_address(ties + params.bitmap_words);
    slice.resident = everything ? 0 : params.resident;
    slice.begin = rank == 0 ? skipped : 0;
    slice.end = max(min(length - slice.position, size), 0);

    // The k-th highest key starts with `prefix`. Keys above it are winners. Of the ties, which start with it, the first
    // `wanted` of the row belong to the result: these are the first `quota` of this slice.
    u32 prefix = LOWEST, wanted = 0, quota = 0;
    u32 column = 0, total = 0;  // columns of the output at which this CTA's results and the padding start
    int shift = 0;
    bool listing = false;
    if (!everything) {
        for (int word = threadIdx.x; word * 32 < slice.end; word += THREADS) winners[word] = ties[word] = 0;
        __syncthreads();  // the counts are cleared
        count_first_digit(slice, shared);
        cluster_wait();  // the other CTAs have cleared their counts as well
        Found found = find_digit(shared.digits.first, (LOWEST >> FIRST_SHIFT) + 1, k, rank, ctas);
        column = found.above_before;
        total = found.above;  // all candidates, if they are fewer than k
        if (found.digit >= 0) {
            total = k;
            prefix = found.digit;
            wanted = k - found.above;
            count_second_digit(slice, shared, prefix, winners);
            found = find_digit(shared.digits.second, 0, wanted, rank, ctas);
            listing = shared.listed <= LISTED;
            column += found.above_before;
            wanted -= found.above;
            prefix = prefix << (FIRST_SHIFT - SECOND_SHIFT) | found.digit;
            shift = SECOND_SHIFT;
            if (wanted < found.equal) {
                count_third_digit(slice, shared, prefix, listing);
                found = find_digit(shared.digits.third, 0, wanted, rank, ctas);
                column += found.above_before;
                wanted -= found.above;
                prefix = prefix << SECOND_SHIFT | found.digit;
                shift = 0;
            }
            quota = wanted - min(wanted, found.equal_before);
            column += min(wanted, found.equal_before);
        }
        cluster_arrive_relaxed();  // this CTA does not read the counts of other CTAs any more
    }
    let_next_kernel_start();

    mark(slice, shared, prefix, shift, listing, winners, ties);
    __syncthreads();  // the bitmaps are complete
    const u32 count = collect(slice, shared, quota, winners, ties);
    __syncthreads();  // `chosen` is complete

    int* result = params.out + static_cast<long long>(row) * k;
    if (params.page_size == 0) {
#pragma unroll 4
        for (u32 i = threadIdx.x; i < count; i += THREADS) result[column + i] = shared.chosen[i] + slice.position;
    } else {
        const Pages pages = pages_of(params, row);
        for (u32 i = threadIdx.x; i < count; i += THREADS) result[column + i] = pages.slot(shared.chosen[i] + slice.position);
    }
    if (everything) total = count;
    for (u32 i = total + rank * THREADS + threadIdx.x; i < k; i += slices * THREADS) result[i] = -1;
    cluster_wait();  // no CTA exits while others may read its counts
}
