// The k highest scores of each row, exactly, and the same on every run: one cluster of blocks per row.
//
// Scores become unsigned keys in the same order. Each block owns one slice of the row and keeps as many of its keys as
// fit in shared memory. The k-th highest key of the row is found digit by digit, from the top: the blocks count how
// often each value of a digit occurs, read each other's counts, and all reach the same decision. Then each block marks
// its winners in a bitmap, and keys equal to the k-th in another one. The counts also say how many winners lie in the
// slices before, so each block knows where its part of the output starts. A bitmap is read in the order of positions,
// so the lowest positions win among equal keys, whatever order threads ran in.
//
// Defined by the caller: THREADS per block, and SHARED_BYTES, the shared memory it reckons with besides bitmaps and keys.

typedef unsigned int u32;

constexpr int WARPS = THREADS / 32;
constexpr u32 EVERY_LANE = 0xFFFFFFFFu;
// The key of -inf, which NaN and places outside the row get as well: no candidate.
constexpr u32 LOWEST = 0x007FFFFFu;
// Digits of 12, 10 and 10 bits. The first one is wide because everything after it works on what shares its value.
constexpr int FIRST_BINS = 4096, LATER_BINS = 1024;
constexpr int FIRST_SHIFT = 20, SECOND_SHIFT = 10;
// Counts are searched in two steps: first among this many groups of bins, one for each lane of a warp.
constexpr int GROUPS = 32;
// Candidates that a block lists; with more of them it looks through its slice again. At least the largest k.
constexpr int LISTED = 4096;
// 16-byte loads in flight per thread.
constexpr int LOADS = 4;
constexpr int STEP = 4 * THREADS;

// ---- Instructions

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ u32 cluster_size() {
    u32 size;
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
}

// What a thread wrote before it arrives is visible to every thread of the cluster that has waited.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }

__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

// The word that another block of the cluster has at the place of ours.
__device__ __forceinline__ u32 read_peer(const u32* ours, u32 rank) {
    u32 address = static_cast<u32>(__cvta_generic_to_shared(ours)), theirs, value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(theirs) : "memory");
    return value;
}

// With programmatic dependent launch, the kernel before may still run up to here; otherwise these do nothing.
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- Keys

// Unsigned integers in the order of floats. Adding zero makes -0 and 0 one value; the maximum turns NaN into -inf.
__device__ __forceinline__ u32 key_of(float score) {
    const u32 bits = __float_as_uint(fmaxf(score + 0.0f, __uint_as_float(0xFF800000u)));
    return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}

struct Entry {
    u32 key;
    int place;
};

struct Found {
    int digit;  // of the k-th key; -1 if there are fewer than k
    u32 above;  // keys of the row whose digit is higher
    u32 above_before;  // those of them in slices before this one
    u32 equal;  // keys of the row with this digit
    u32 equal_before;
    u32 own;  // keys of this slice with this digit or a higher one
};

struct alignas(16) Shared {
    u32 first_counts[FIRST_BINS];  // how often each value of a digit occurs in the slice
    u32 second_counts[LATER_BINS];
    u32 third_counts[LATER_BINS];
    u32 group_counts[3][GROUPS];
    union {
        Entry list[LISTED];  // candidates, in any order
        int chosen[LISTED];  // after the marking: places of this slice that are part of the result, ascending
    };
    u32 warp_winners[WARPS];
    u32 warp_ties[WARPS];
    Found found;
    int listed;
};

static_assert(sizeof(Shared) == SHARED_BYTES, "the caller has another layout in mind");

// One block's part of a row. Places count from an address that is a multiple of 16 bytes, at or before the row's start.
struct Slice {
    const float* scores;  // at place 0
    u32* keys;  // in shared memory, of the places below `resident`
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

    __device__ __forceinline__ u32 key(int place) const {
        return place < resident ? keys[place] : key_of(score(place));
    }

    __device__ __forceinline__ uint4 keys4(int place) const {
        if (place < resident && place < end) return *reinterpret_cast<const uint4*>(keys + place);
        const float4 s = scores4(place);
        return make_uint4(key_of(s.x), key_of(s.y), key_of(s.z), key_of(s.w));
    }
};

// ---- Search

struct Tally {
    u32 row, before, own;  // counts in the whole row, in the slices before this one, in this slice
};

__device__ __forceinline__ Tally tally(const u32* count, u32 rank, u32 blocks) {
    Tally sum = {0, 0, *count};
#pragma unroll 4
    for (u32 peer = 0; peer < blocks; ++peer) {
        const u32 value = read_peer(count, peer);
        sum.row += value;
        sum.before += peer < rank ? value : 0;
    }
    return sum;
}

// The first lane at which the counts of the lanes so far reach `wanted`, or -1; what lies before it is added to `above`.
__device__ __forceinline__ int reach(const Tally& here, u32 wanted, Tally& above) {
    const int lane = threadIdx.x % 32;
    u32 so_far = here.row;
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(EVERY_LANE, so_far, step);
        if (lane >= step) so_far += other;
    }
    const u32 reached = __ballot_sync(EVERY_LANE, above.row + so_far >= wanted);
    const int first = reached ? __ffs(reached) - 1 : 32;
    above.row += __reduce_add_sync(EVERY_LANE, lane < first ? here.row : 0);
    above.before += __reduce_add_sync(EVERY_LANE, lane < first ? here.before : 0);
    above.own += __reduce_add_sync(EVERY_LANE, lane < first ? here.own : 0);
    return first < 32 ? first : -1;
}

// Where the `wanted`-th highest of the counted keys is. One whole warp runs this; lanes go from high digits to low ones.
template <int COUNT>
__device__ __forceinline__ Found search(const u32* counts, const u32* group_counts, u32 wanted, u32 rank, u32 blocks) {
    constexpr int GROUP = COUNT / GROUPS;
    constexpr int ROUNDS = GROUP / 32;
    const int lane = threadIdx.x % 32;
    Tally above = {0, 0, 0};
    const int group_lane = reach(tally(group_counts + GROUPS - 1 - lane, rank, blocks), wanted, above);
    if (group_lane < 0) return {-1, above.row, above.before, 0, 0, above.own};
    const int highest = (GROUPS - group_lane) * GROUP - 1;
    Tally bins[ROUNDS];
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) bins[round] = tally(counts + highest - round * 32 - lane, rank, blocks);
    Found found = {};
    bool missing = true;
#pragma unroll
    for (int round = 0; round < ROUNDS; ++round) {
        if (!missing) continue;
        const int at = reach(bins[round], wanted, above);
        if (at < 0) continue;
        missing = false;
        found.digit = highest - round * 32 - at;
        found.equal = __shfl_sync(EVERY_LANE, bins[round].row, at);
        found.equal_before = __shfl_sync(EVERY_LANE, bins[round].before, at);
        found.own = above.own + __shfl_sync(EVERY_LANE, bins[round].own, at);
    }
    found.above = above.row;
    found.above_before = above.before;
    return found;
}

// Once every block has counted a digit: where the `wanted`-th highest key is. Each thread returns the same.
template <int COUNT>
__device__ __forceinline__ Found agree(
    const u32 (&counts)[COUNT], u32 (&group_counts)[GROUPS], Found& shared_found, u32 wanted, u32 rank, u32 blocks) {
    constexpr int GROUP = COUNT / GROUPS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    __syncthreads();  // every thread has counted
    for (int group = warp; group < GROUPS; group += WARPS) {
        u32 sum = 0;
#pragma unroll
        for (int bin = lane; bin < GROUP; bin += 32) sum += counts[group * GROUP + bin];
        sum = __reduce_add_sync(EVERY_LANE, sum);
        if (lane == 0) group_counts[group] = sum;
    }
    cluster_arrive();
    cluster_wait();  // the counts of every block are complete; nobody changes them from here on
    if (warp == 0) {
        const Found found = search<COUNT>(counts, group_counts, wanted, rank, blocks);
        if (lane == 0) shared_found = found;
    }
    __syncthreads();  // `found` is there; it is written again only after the first barrier of the next digit
    return shared_found;
}

// ---- Passes over a slice

// Reads the slice, keeps what fits, and counts the first digit.
__device__ __forceinline__ void count_first_digit(const Slice& slice, Shared& shared) {
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
            const float4 s = scores[load];
            const uint4 keys = make_uint4(key_of(s.x), key_of(s.y), key_of(s.z), key_of(s.w));
            const int at = place + load * STEP;
            if (at < slice.resident) *reinterpret_cast<uint4*>(slice.keys + at) = keys;
            // Adding one is a single instruction for all lanes that meet in a bin, as on a plateau of equal scores.
            if (keys.x > LOWEST) atomicAdd(&shared.first_counts[keys.x >> FIRST_SHIFT], 1u);
            if (keys.y > LOWEST) atomicAdd(&shared.first_counts[keys.y >> FIRST_SHIFT], 1u);
            if (keys.z > LOWEST) atomicAdd(&shared.first_counts[keys.z >> FIRST_SHIFT], 1u);
            if (keys.w > LOWEST) atomicAdd(&shared.first_counts[keys.w >> FIRST_SHIFT], 1u);
        }
    }
}

// Counts the second digit of the keys whose first one is `first`; lists these and all higher keys if told to.
__device__ __forceinline__ void count_second_digit(const Slice& slice, Shared& shared, u32 first, bool listing) {
    const u32 least = first << FIRST_SHIFT;
    for (int place = 4 * threadIdx.x; place < slice.end; place += STEP * LOADS) {
        uint4 loaded[LOADS];
#pragma unroll
        for (int load = 0; load < LOADS; ++load) loaded[load] = slice.keys4(place + load * STEP);
#pragma unroll
        for (int load = 0; load < LOADS; ++load) {
            const u32 keys[4] = {loaded[load].x, loaded[load].y, loaded[load].z, loaded[load].w};
            if (max(max(keys[0], keys[1]), max(keys[2], keys[3])) < least) continue;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                if (keys[i] < least) continue;
                if (listing) shared.list[atomicAdd(&shared.listed, 1)] = {keys[i], place + load * STEP + i};
                if (keys[i] >> FIRST_SHIFT == first) {
                    atomicAdd(&shared.second_counts[keys[i] >> SECOND_SHIFT & (LATER_BINS - 1)], 1u);
                }
            }
        }
    }
}

// Counts the third digit of the keys that start with `prefix`.
__device__ __forceinline__ void count_third_digit(const Slice& slice, Shared& shared, u32 prefix, bool listing) {
    const int candidates = listing ? shared.listed : slice.end;
    for (int i = threadIdx.x; i < candidates; i += THREADS) {
        const u32 key = listing ? shared.list[i].key : slice.key(i);
        if (key >> SECOND_SHIFT == prefix) atomicAdd(&shared.third_counts[key & (LATER_BINS - 1)], 1u);
    }
}

// Marks keys that start with more than `prefix` in one bitmap and those that start with it in the other.
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
    const int lane = threadIdx.x % 32;
    for (int word = threadIdx.x / 32; word * 32 < slice.end; word += WARPS) {
        const int place = word * 32 + lane;
        const u32 start = (place < slice.end ? slice.key(place) : LOWEST) >> shift;
        const u32 higher = __ballot_sync(EVERY_LANE, start > prefix);
        const u32 equal = __ballot_sync(EVERY_LANE, start == prefix);
        if (lane == 0) {
            winners[word] = higher;
            ties[word] = equal;
        }
    }
}

// The sum over threads before this one in the block, and over all; `warps` holds the sum of each warp.
__device__ __forceinline__ u32 sum_in_warp(u32 value) {
    const int lane = threadIdx.x % 32;
    for (int step = 1; step < 32; step *= 2) {
        const u32 other = __shfl_up_sync(EVERY_LANE, value, step);
        if (lane >= step) value += other;
    }
    return value;
}

__device__ __forceinline__ u32 sum_of_warps(const u32* warps, int count) {
    const int lane = threadIdx.x % 32;
    return __reduce_add_sync(EVERY_LANE, lane < count ? warps[lane] : 0);
}

// Writes the places of the winners and of the first `quota` ties to `shared.chosen`, ascending; returns how many.
__device__ __forceinline__ u32 collect(const Slice& slice, Shared& shared, u32 quota, const u32* winners, const u32* ties) {
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
    extern __shared__ uint4 memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    u32* winners = reinterpret_cast<u32*>(memory) + sizeof(Shared) / sizeof(u32);
    u32* ties = winners + bitmap_words;
    u32* keys = ties + bitmap_words;
    const u32 rank = cluster_rank(), blocks = cluster_size();
    const int row = blockIdx.x / blocks;

    for (int bin = threadIdx.x; bin < FIRST_BINS; bin += THREADS) shared.first_counts[bin] = 0;
    for (int bin = threadIdx.x; bin < LATER_BINS; bin += THREADS) shared.second_counts[bin] = shared.third_counts[bin] = 0;
    if (threadIdx.x == 0) shared.listed = 0;
    wait_for_previous_kernel();

    const int length = min(max(lengths[row], 0), width);
    const bool everything = length <= k;  // then one block does it, and reads the row once
    if (everything && rank > 0) return;  // the whole cluster takes this way, on which nobody waits for anybody
    const float* start = scores + row * row_stride;
    const int skipped = static_cast<int>(reinterpret_cast<unsigned long long>(start) / sizeof(float) % 4);
    const int parts = everything ? 1 : blocks;
    const int size = ((skipped + length + parts - 1) / parts + 127) / 128 * 128;
    Slice slice;
    slice.position = static_cast<int>(rank) * size - skipped;
    slice.scores = start + slice.position;
    slice.keys = keys;
    slice.resident = everything ? 0 : resident;
    slice.begin = rank == 0 ? skipped : 0;
    slice.end = max(min(length - slice.position, size), 0);

    // What is known of the k-th highest key: its upper bits. Keys that start with more are `above`; of those that
    // start with the same, the first `wanted` are taken.
    u32 prefix = LOWEST, wanted = 0, total = k, column = 0, quota = 0;
    int shift = 0;
    bool listing = false;
    if (everything) {
        total = 0;
    } else {
        for (int word = threadIdx.x; word * 32 < slice.end; word += THREADS) winners[word] = ties[word] = 0;
        __syncthreads();  // counts are zero
        count_first_digit(slice, shared);
        Found found = agree(shared.first_counts, shared.group_counts[0], shared.found, k, rank, blocks);
        column = found.above_before;
        if (found.digit < 0) {
            total = found.above;  // fewer than k: all of them
        } else {
            listing = found.own <= LISTED;
            prefix = found.digit;
            wanted = k - found.above;
            shift = FIRST_SHIFT;
            count_second_digit(slice, shared, prefix, listing);
            found = agree(shared.second_counts, shared.group_counts[1], shared.found, wanted, rank, blocks);
            column += found.above_before;
            wanted -= found.above;
            prefix = prefix << (FIRST_SHIFT - SECOND_SHIFT) | found.digit;
            shift = SECOND_SHIFT;
            if (wanted < found.equal) {
                count_third_digit(slice, shared, prefix, listing);
                found = agree(shared.third_counts, shared.group_counts[2], shared.found, wanted, rank, blocks);
                column += found.above_before;
                wanted -= found.above;
                prefix = prefix << SECOND_SHIFT | found.digit;
                shift = 0;
            }
            quota = wanted - min(wanted, found.equal_before);
            column += min(wanted, found.equal_before);
        }
        cluster_arrive();  // this block has read the counts of the others for the last time
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
    if (!everything) cluster_wait();  // nobody leaves while others may read its counts
}
