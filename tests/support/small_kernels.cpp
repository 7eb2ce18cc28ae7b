// Small kernels, each with or without what orders two accesses to shared memory. `ORDERED` have no race and `RACY` have one,
// whichever thread happens to run first.
#include "warpgroup_emulator.hpp"

namespace {

u32* words() { return reinterpret_cast<u32*>(shared_memory()); }
u32 at(int word) { return tile_memory() + 4 * word; }

constexpr int BARRIER = 4096, DATA = 1024, TILE = 16384;  // addresses
alignas(16) unsigned char global[16384];
volatile u32 read;  // a read whose result goes here is not optimised away

u32 barrier() { return tile_memory() + BARRIER; }
u32 data() { return tile_memory() + DATA; }

void init(u32 count) {
    if (threadIdx.x == 0) mbarrier_init(barrier(), count);
    __syncthreads();
}

// ---- Threads of a CTA

void neighbours(bool ordered) {
    words()[threadIdx.x] = threadIdx.x;
    if (ordered) __syncthreads();
    read = words()[(threadIdx.x + 1) % THREADS];
}

void lanes(bool ordered) {
    words()[threadIdx.x] = threadIdx.x;
    if (ordered) __syncwarp();
    read = words()[threadIdx.x ^ 1];
}

void lanes_that_shuffle() {
    words()[threadIdx.x] = threadIdx.x;
    __shfl_xor_sync(FULL_MASK, threadIdx.x, 1);
    read = words()[threadIdx.x ^ 1];
}

void read_then_written(bool ordered) {
    read = words()[0];
    if (ordered) __syncthreads();
    if (threadIdx.x == 64) words()[0] = 1;
}

void same_word_by_all() { words()[0] = 7; }

void bytes_of_one_word() { reinterpret_cast<unsigned char*>(shared_memory())[threadIdx.x] = 1; }

void sixteen_bytes_and_four(bool apart) {
    if (threadIdx.x == 0) shared_store4(data(), {});
    if (threadIdx.x == 40) shared_store(data() + (apart ? 16 : 12), 1);
}

void counted(bool atomically) {
    if (atomically) atomicAdd(words(), 1u);
    else words()[0] += 1;
}

void counted_and_read(bool ordered) {
    if (threadIdx.x == 40) atomicAdd(words(), 1u);
    if (ordered) __syncthreads();
    if (threadIdx.x == 3) read = words()[0];
}

void named() {
    if (threadIdx.x < 32) {
        words()[threadIdx.x] = 1;
        named_barrier_arrive(1, 64);
    } else if (threadIdx.x < 64) {
        named_barrier_sync(1, 64);
        read = words()[threadIdx.x - 32];
    }
}

// Two warps wait at the same barrier one after the other, and the second learns what has been written in between.
void named_twice() {
    const int warp = threadIdx.x / 32;
    __syncthreads();
    if (warp == 0) {
        named_barrier_arrive(1, 64);
        named_barrier_sync(2, 64);
        words()[threadIdx.x] = 1;
        named_barrier_arrive(1, 64);
    } else if (warp == 1) {
        named_barrier_sync(1, 64);
        named_barrier_arrive(2, 64);
        named_barrier_arrive(3, 64);
    } else if (warp == 2) {
        named_barrier_sync(3, 64);
        named_barrier_sync(1, 64);
        read = words()[threadIdx.x - 64];
    }
}

// The barrier orders what is before an arrival, not what is behind it.
void written_after_arrival() {
    if (threadIdx.x < 32) {
        named_barrier_arrive(1, 64);
        words()[threadIdx.x] = 1;
    } else if (threadIdx.x < 64) {
        named_barrier_sync(1, 64);
        read = words()[threadIdx.x - 32];
    }
}

// ---- mbarriers

void through_mbarrier(bool waits) {
    init(64);
    if (threadIdx.x < 64) {
        words()[threadIdx.x] = 1;
        mbarrier_arrive(barrier());
    } else {
        if (waits) mbarrier_wait(barrier(), 0);
        read = words()[threadIdx.x - 64];
    }
}

// A buffer is refilled when it has been read, or too early.
void refilled(bool waits) {
    if (threadIdx.x == 0) mbarrier_init(barrier(), 1), mbarrier_init(barrier() + 8, 32);
    __syncthreads();
    if (threadIdx.x == 0) {
        shared_store(data(), 1);
        mbarrier_arrive(barrier());
        if (waits) mbarrier_wait(barrier() + 8, 0);
        shared_store(data(), 2);
    } else if (threadIdx.x >= 32 && threadIdx.x < 64) {
        mbarrier_wait(barrier(), 0);
        read = shared_load(data());
        mbarrier_arrive(barrier() + 8);
    }
}

// One warp passes on to the next what it has been told, phase after phase.
void passed_on(bool throughout) {
    if (threadIdx.x == 0) mbarrier_init(barrier(), 1), mbarrier_init(barrier() + 8, 1), mbarrier_init(barrier() + 16, 1);
    __syncthreads();
    const int warp = threadIdx.x / 32;
    if (threadIdx.x % 32 != 0 || warp > 2) return;
    for (int i = 0; i < 3; ++i) {
        if (warp > 0) mbarrier_wait(barrier() + 8 * (warp - 1), i % 2);
        if (warp == 0 && i > 0) mbarrier_wait(barrier() + 16, (i - 1) % 2);
        if (warp == 0) shared_store(data(), i);
        if (warp == 2) read = shared_load(data());
        mbarrier_arrive(barrier() + 8 * warp);
    }
    if (warp == 0 && throughout) mbarrier_wait(barrier() + 16, 0);
    if (warp == 0) shared_store(data(), 3);
}

// ---- Asynchronous copies

void bulk(bool waits) {
    init(1);
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier(), 64);
        bulk_copy(data(), global, 64, barrier());
    }
    if (waits) mbarrier_wait(barrier(), 0);
    if (threadIdx.x < 16) read = shared_load(data() + 4 * threadIdx.x);
    if (!waits) mbarrier_wait(barrier(), 0);
}

void bulk_twice(bool waits) {
    init(1);
    for (int i = 0; i < 2; ++i) {
        __syncthreads();
        if (threadIdx.x == 0) {
            mbarrier_arrive_expect_tx(barrier(), 64);
            bulk_copy(data(), global, 64, barrier());
        }
        if (waits || i == 0) mbarrier_wait(barrier(), i);
        if (threadIdx.x < 16) read = shared_load(data() + 4 * threadIdx.x);
    }
    if (!waits) mbarrier_wait(barrier(), 1);
}

void bulk_over_reads(bool ordered) {
    init(1);
    read = shared_load(data() + threadIdx.x % 16 * 4);
    if (ordered) __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier(), 64);
        bulk_copy(data(), global, 64, barrier());
    }
    mbarrier_wait(barrier(), 0);
}

void bulk_over_writes(bool fenced) {
    init(1);
    if (threadIdx.x < 16) shared_store(data() + 4 * threadIdx.x, 1);
    if (fenced) fence_async_proxy();
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(barrier(), 64);
        bulk_copy(data(), global, 64, barrier());
    }
    mbarrier_wait(barrier(), 0);
}

void copied_by_threads(bool waits, bool meets) {
    cp_async_zfill<16>(data() + 16 * threadIdx.x, global, true);
    cp_async_commit();
    if (waits) cp_async_wait<0>();
    if (meets) __syncthreads();
    read = shared_load(data() + 16 * ((threadIdx.x + 1) % THREADS));
    cp_async_wait<0>();
}

void older_of_two_groups(bool newer) {
    for (int i = 0; i < 2; ++i) {
        cp_async_zfill<16>(data() + 16 * (2 * threadIdx.x + i), global, true);
        cp_async_commit();
    }
    cp_async_wait<1>();
    read = shared_load(data() + 16 * (2 * threadIdx.x + newer));
    cp_async_wait<0>();
}

void copies_that_arrive(bool waits) {
    init(32);
    if (threadIdx.x < 32) {
        cp_async_zfill<16>(data() + 16 * threadIdx.x, global, true);
        cp_async_mbarrier_arrive(barrier());
    }
    if (waits) mbarrier_wait(barrier(), 0);
    if (threadIdx.x >= 64 && threadIdx.x < 96) read = shared_load(data() + 16 * (threadIdx.x - 64));
    if (!waits) mbarrier_wait(barrier(), 0);
}

// ---- Products

constexpr u32 TILE_BYTES = 64 * 128;

void multiply_tiles(bool fenced, bool waits) {
    const u32 tiles = tile_memory() + TILE;
    for (u32 word = threadIdx.x; word < 2 * TILE_BYTES / 4; word += THREADS) shared_store(tiles + 4 * word, 0);
    if (fenced) fence_async_proxy();
    __syncthreads();
    float sums[32];
    wgmma_ss<BF16>(sums, k_major(tiles), k_major(tiles + TILE_BYTES), 0);
    wgmma_commit();
    if (waits) wgmma_wait<0>();
    __syncthreads();
    if (threadIdx.x == 127) shared_store(tiles + TILE_BYTES, 1);
    if (!waits) wgmma_wait<0>();
}

void multiply_copies(bool fenced) {
    const u32 tiles = tile_memory() + TILE;
    init(THREADS);
    for (u32 unit = threadIdx.x; unit < 2 * TILE_BYTES / 16; unit += THREADS) cp_async_zfill<16>(tiles + 16 * unit, global, true);
    cp_async_mbarrier_arrive(barrier());
    mbarrier_wait(barrier(), 0);
    if (fenced) fence_async_proxy();
    float sums[32];
    wgmma_ss<BF16>(sums, k_major(tiles), k_major(tiles + TILE_BYTES), 0);
    wgmma_commit();
    wgmma_wait<0>();
}

// A warp multiplies 16 rows, and another may write them when only its own product is over.
void write_rows_of(int warp) {
    const u32 tiles = tile_memory() + TILE;
    for (u32 word = threadIdx.x; word < 2 * TILE_BYTES / 4; word += THREADS) shared_store(tiles + 4 * word, 0);
    fence_async_proxy();
    __syncthreads();
    float sums[32];
    wgmma_ss<BF16>(sums, k_major(tiles), k_major(tiles + TILE_BYTES), 0);
    wgmma_commit();
    wgmma_wait<0>();
    if (threadIdx.x == 0) shared_store(tiles + warp * 16 * 128, 1);
    __syncthreads();
}

// ---- Clusters of two CTAs

void of_the_other_cta(bool ordered) {
    shared_store(data() + 4 * threadIdx.x, 1);
    if (ordered) cluster_arrive();
    else cluster_arrive_relaxed();
    cluster_wait();
    read = peer_load(peer_address(data() + 4 * threadIdx.x, cluster_rank() ^ 1));
    cluster_arrive();
    cluster_wait();
}

void added_by_both(bool read_early) {
    if (threadIdx.x == 0) shared_store(data(), 0);
    cluster_arrive(), cluster_wait();
    peer_add(peer_address(data(), 0), 1);
    if (read_early && cluster_rank() == 0) read = shared_load(data());
    cluster_arrive(), cluster_wait();
    read = shared_load(data());
}

struct Case {
    const char* name;
    int ctas;
    void (*kernel)();
};

const Case ORDERED[] = {
    {"neighbours", 1, [] { neighbours(true); }},
    {"lanes", 1, [] { lanes(true); }},
    {"read, then written", 1, [] { read_then_written(true); }},
    {"bytes of one word", 1, bytes_of_one_word},
    {"16 bytes and the next four", 1, [] { sixteen_bytes_and_four(true); }},
    {"counted atomically", 1, [] { counted(true); }},
    {"counted, then read", 1, [] { counted_and_read(true); }},
    {"named barrier", 1, named},
    {"named barrier twice", 1, named_twice},
    {"mbarrier", 1, [] { through_mbarrier(true); }},
    {"refilled", 1, [] { refilled(true); }},
    {"passed on", 1, [] { passed_on(true); }},
    {"bulk copy", 1, [] { bulk(true); }},
    {"two bulk copies", 1, [] { bulk_twice(true); }},
    {"bulk copy over reads", 1, [] { bulk_over_reads(true); }},
    {"bulk copy over writes", 1, [] { bulk_over_writes(true); }},
    {"copies by threads", 1, [] { copied_by_threads(true, true); }},
    {"older of two groups", 1, [] { older_of_two_groups(false); }},
    {"copies that arrive", 1, [] { copies_that_arrive(true); }},
    {"product", 1, [] { multiply_tiles(true, true); }},
    {"product of copies", 1, [] { multiply_copies(true); }},
    {"product of copies without fence", 1, [] { multiply_copies(false); }},
    {"own rows of a product", 1, [] { write_rows_of(0); }},
    {"the other CTA's", 2, [] { of_the_other_cta(true); }},
    {"added by both CTAs", 2, [] { added_by_both(false); }},
};

const Case RACY[] = {
    {"neighbours", 1, [] { neighbours(false); }},
    {"lanes", 1, [] { lanes(false); }},
    {"lanes that shuffle", 1, lanes_that_shuffle},
    {"read, then written", 1, [] { read_then_written(false); }},
    {"same word by all", 1, same_word_by_all},
    {"16 bytes and four of them", 1, [] { sixteen_bytes_and_four(false); }},
    {"counted", 1, [] { counted(false); }},
    {"counted and read", 1, [] { counted_and_read(false); }},
    {"written after arrival", 1, written_after_arrival},
    {"mbarrier not waited for", 1, [] { through_mbarrier(false); }},
    {"refilled too early", 1, [] { refilled(false); }},
    {"passed on, and written again", 1, [] { passed_on(false); }},
    {"second bulk copy not waited for", 1, [] { bulk_twice(false); }},
    {"bulk copy not waited for", 1, [] { bulk(false); }},
    {"bulk copy over reads", 1, [] { bulk_over_reads(false); }},
    {"bulk copy without fence", 1, [] { bulk_over_writes(false); }},
    {"copies by threads that do not wait", 1, [] { copied_by_threads(false, true); }},
    {"copies by threads that do not meet", 1, [] { copied_by_threads(true, false); }},
    {"newer of two groups", 1, [] { older_of_two_groups(true); }},
    {"copies that arrive, not waited for", 1, [] { copies_that_arrive(false); }},
    {"product not waited for", 1, [] { multiply_tiles(true, false); }},
    {"product without fence", 1, [] { multiply_tiles(false, true); }},
    {"another warp's rows of a product", 1, [] { write_rows_of(1); }},
    {"the other CTA's, relaxed", 2, [] { of_the_other_cta(false); }},
    {"added by both CTAs and read", 2, [] { added_by_both(true); }},
};

}  // namespace

extern "C" __attribute__((visibility("default"))) void run(int racy, int number, int seed) {
    const Case& one = racy ? RACY[number] : ORDERED[number];
    emulator::random_order.seed(seed);
    emulator::start_wgmma_cta(one.ctas);
    emulator::run_cluster(0, one.ctas, 40960, [&] { one.kernel(); });
    emulator::check_finished();
}
