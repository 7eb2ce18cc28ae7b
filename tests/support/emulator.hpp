// Runs a CUDA kernel on the host, exactly as written. Each thread is a coroutine; whenever one has to wait, another one is
// picked at random. So the orders that a missing barrier would allow do happen, and the same seed repeats them. Shared
// memory starts as garbage, and writes beyond its end are found. This file defines the functions of `instructions.cuh`
// that kernels without matrices need, and its guard.
#undef _FORTIFY_SOURCE  // its longjmp refuses to leave a stack for another
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <setjmp.h>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)

typedef unsigned int u32;
struct float4 { float x, y, z, w; };
struct alignas(16) uint4 { u32 x, y, z, w; };
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

namespace emulator {

constexpr int BLOCK_SIZE = THREADS;
constexpr size_t STACK = 64 * 1024, GUARD = 4096;

struct Index {
    u32 x, y = 0;
};

struct Barrier {
    u32 generation = 0, arrived = 0;
};

struct Warp {
    Barrier barrier;
    u32 values[2][32];
};

struct Block {
    std::vector<unsigned char> storage;
    uint4* memory;
    u32 index, rank;
    Barrier barrier;
    Warp warps[BLOCK_SIZE / 32];
    bool finished = false;
};

// Asynchronous operations, such as bulk copies: they may happen at any time, in any order.
inline std::vector<std::function<void()>> in_flight;

// A thread's stack, and where it continues. After the first time it is resumed by longjmp, because setcontext makes two
// system calls to restore signals.
struct Place {
    std::vector<char> stack = std::vector<char>(STACK);
    ucontext_t beginning;
    jmp_buf paused;
    bool begun;
};

// This struct is small because the scheduler looks at many of them.
struct Thread {
    Index thread_index;
    Block* block;
    Place* place;
    bool done = false;
    const Barrier* waiting = nullptr;
    u32 until = 0, cluster_turn = 0;
};

// splitmix64; the standard's generators take longer to compile than most kernels.
struct Random {
    uint64_t state = 0;

    void seed(uint64_t number) { state = number; }

    u32 operator()() {
        uint64_t bits = state += 0x9E3779B97F4A7C15u;
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9u;
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EBu;
        return bits >> 32;
    }
};

inline Thread* current;
inline jmp_buf scheduler;
inline std::vector<Block> blocks;
inline Barrier cluster;
inline Random random_order;
inline u32 grid_size = 1, block_y = 0;

inline void finish_one_in_flight() {
    std::swap(in_flight[random_order() % in_flight.size()], in_flight.back());
    const auto finish = std::move(in_flight.back());
    in_flight.pop_back();
    finish();
}

inline void fail(const char* what) {
    std::fprintf(stderr, "emulator: %s\n", what);
    std::abort();
}

__attribute__((noinline)) inline void pause() {
    if (_setjmp(current->place->paused) == 0) _longjmp(scheduler, 1);
}

// Runs a thread until it pauses or ends.
__attribute__((noinline)) inline void resume(Thread& thread) {
    current = &thread;
    if (_setjmp(scheduler) != 0) return;
    if (thread.place->begun) _longjmp(thread.place->paused, 1);
    thread.place->begun = true;
    setcontext(&thread.place->beginning);
}

// Called where threads touch shared memory: now and then it lets others run.
inline void maybe_pause() {
    if (random_order() % 8 == 0) pause();
}

inline u32 arrive(Barrier& barrier, u32 expected) {
    const u32 generation = barrier.generation;
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        ++barrier.generation;
    }
    return generation;
}

inline void wait(Barrier& barrier, u32 generation) {
    current->waiting = &barrier;
    current->until = generation + 1;
    pause();
    current->waiting = nullptr;
}

// The values of all lanes; returns when every lane has given its own.
inline const u32* exchange(u32 value) {
    Warp& warp = current->block->warps[current->thread_index.x / 32];
    u32* values = warp.values[warp.barrier.generation % 2];
    values[current->thread_index.x % 32] = value;
    wait(warp.barrier, arrive(warp.barrier, 32));
    return values;
}

}  // namespace emulator

#define threadIdx (emulator::current->thread_index)
#define blockIdx (emulator::Index{emulator::current->block->index, emulator::block_y})
#define gridDim (emulator::Index{emulator::grid_size})

inline void __syncthreads() {
    emulator::Barrier& barrier = emulator::current->block->barrier;
    emulator::wait(barrier, emulator::arrive(barrier, emulator::BLOCK_SIZE));
}

inline u32 __ballot_sync(u32, bool predicate) {
    const u32* values = emulator::exchange(predicate);
    u32 mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= values[lane] << lane;
    return mask;
}

inline u32 __reduce_add_sync(u32, u32 value) {
    const u32* values = emulator::exchange(value);
    u32 sum = 0;
    for (int lane = 0; lane < 32; ++lane) sum += values[lane];
    return sum;
}

inline u32 __shfl_sync(u32, u32 value, int lane) { return emulator::exchange(value)[lane]; }

inline u32 __shfl_up_sync(u32, u32 value, int step) {
    const u32* values = emulator::exchange(value);
    const int lane = threadIdx.x % 32;
    return values[lane >= step ? lane - step : lane];
}

template <class T>
T atomicAdd(T* place, T value) {
    emulator::maybe_pause();
    const T old = *place;
    *place = old + value;
    return old;
}

inline void atomicOr(u32* place, u32 value) {
    emulator::maybe_pause();
    *place |= value;
}

inline int __popc(u32 value) { return __builtin_popcount(value); }
inline int __ffs(u32 value) { return __builtin_ffs(static_cast<int>(value)); }
inline float __uint_as_float(u32 bits) { float value; std::memcpy(&value, &bits, 4); return value; }
inline u32 __float_as_uint(float value) { u32 bits; std::memcpy(&bits, &value, 4); return bits; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }

// ---- The functions of `instructions.cuh`

#define TAMIS_INSTRUCTIONS

constexpr u32 FULL_MASK = 0xFFFFFFFFu;
enum Operand { FP16, BF16 };

inline uint4* shared_memory() { return emulator::current->block->memory; }

inline u32 opaque(u32 number) { return number; }

inline u32 cluster_rank() { return emulator::current->block->rank; }
inline u32 cluster_size() { return emulator::blocks.size(); }

inline void cluster_arrive() {
    emulator::maybe_pause();
    emulator::current->cluster_turn =
        emulator::arrive(emulator::cluster, emulator::blocks.size() * emulator::BLOCK_SIZE);
}

inline void cluster_arrive_relaxed() { cluster_arrive(); }

inline void cluster_wait() { emulator::wait(emulator::cluster, emulator::current->cluster_turn); }

// An address is the offset in a CTA's shared memory plus the CTA's rank times this.
constexpr u32 RANK_UNIT = 1u << 24;

inline u32 shared_address(const void* pointer) {
    emulator::Block* block = emulator::current->block;
    const auto offset = static_cast<const char*>(pointer) - reinterpret_cast<char*>(block->memory);
    return offset + block->rank * RANK_UNIT;
}

inline u32* shared_word(u32 address) {
    emulator::Block& block = emulator::blocks[address / RANK_UNIT];
    if (block.finished) emulator::fail("touched the shared memory of a CTA that has exited");
    return reinterpret_cast<u32*>(reinterpret_cast<char*>(block.memory) + address % RANK_UNIT);
}

inline void shared_increment(u32 address) { atomicAdd(shared_word(address), 1u); }
inline u32 shared_load(u32 address) { return *shared_word(address); }
inline uint4 shared_load4(u32 address) { return *reinterpret_cast<uint4*>(shared_word(address)); }
inline void shared_store4(u32 address, uint4 value) { *reinterpret_cast<uint4*>(shared_word(address)) = value; }
inline u32 peer_address(u32 ours, u32 rank) { return ours % RANK_UNIT + rank * RANK_UNIT; }

inline u32 peer_load(u32 theirs) {
    emulator::maybe_pause();
    return *shared_word(theirs);
}

inline void peer_add(u32 theirs, u32 value) { atomicAdd(shared_word(theirs), value); }

inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

namespace emulator {

// Runs one cluster to its end.
template <class Kernel>
void run_cluster(u32 index, u32 size, size_t shared, const Kernel& kernel) {
    static const Kernel* running;
    running = &kernel;
    cluster = Barrier{};
    blocks.assign(size, Block{});
    std::vector<Thread> threads(size * BLOCK_SIZE);
    static std::vector<Place> places;
    if (places.size() < threads.size()) places.resize(threads.size());
    for (u32 rank = 0; rank < size; ++rank) {
        Block& block = blocks[rank];
        block.storage.resize(shared + GUARD + 16);
        for (auto& byte : block.storage) byte = random_order();
        std::memset(block.storage.data() + block.storage.size() - GUARD, 0xA5, GUARD);
        const auto address = reinterpret_cast<uintptr_t>(block.storage.data());
        block.memory = reinterpret_cast<uint4*>((address + 15) / 16 * 16);
        block.index = index * size + rank;
        block.rank = rank;
    }
    std::vector<u32> left(size, BLOCK_SIZE), alive;
    for (u32 i = 0; i < threads.size(); ++i) {
        Thread& thread = threads[i];
        thread.block = &blocks[i / BLOCK_SIZE];
        thread.thread_index.x = i % BLOCK_SIZE;
        thread.place = &places[i];
        thread.place->begun = false;
        ucontext_t& beginning = thread.place->beginning;
        getcontext(&beginning);
        beginning.uc_stack.ss_sp = thread.place->stack.data();
        beginning.uc_stack.ss_size = STACK;
        const auto whole = [] {
            (*running)();
            current->done = true;
            _longjmp(scheduler, 1);
        };
        makecontext(&beginning, static_cast<void (*)()>(whole), 0);
        alive.push_back(i);
    }
    // Most of the time one CTA runs ahead of the others and one warp of each CTA lags behind; both change at random.
    u32 favourite = 0, slow = random_order() % (BLOCK_SIZE / 32);
    while (!alive.empty()) {
        if (!in_flight.empty() && random_order() % 64 == 0) finish_one_in_flight();
        if (random_order() % 4096 == 0) favourite = random_order() % size;
        u32 tried, at = random_order() % alive.size();
        for (u32 again = 0; again < 2 * size && threads[alive[at]].block->rank != favourite; ++again) {
            at = random_order() % alive.size();
        }
        if (random_order() % 16384 == 0) slow = random_order() % (BLOCK_SIZE / 32);
        // The slow warp runs when nobody else can.
        const auto can_run = [&](bool slow_as_well) {
            const Thread& thread = threads[alive[at]];
            if (thread.thread_index.x / 32 == slow && !slow_as_well) return false;
            return !thread.waiting || static_cast<int>(thread.waiting->generation - thread.until) >= 0;
        };
        const auto find = [&](bool slow_as_well) {
            for (tried = 0; tried < alive.size() && !can_run(slow_as_well); ++tried) at = at + 1 < alive.size() ? at + 1 : 0;
        };
        find(random_order() % 256 == 0);
        if (tried == alive.size()) find(true);
        if (tried == alive.size()) {
            if (in_flight.empty()) fail("every thread waits");
            finish_one_in_flight();
            continue;
        }
        resume(threads[alive[at]]);
        if (!current->done) continue;
        if (--left[current->block->rank] == 0) current->block->finished = true;
        alive[at] = alive.back();
        alive.pop_back();
    }
    if (!in_flight.empty()) fail("copies into a CTA that has exited");
    for (const Block& block : blocks) {
        const unsigned char* end = block.storage.data() + block.storage.size();
        for (const unsigned char* byte = end - GUARD; byte < end; ++byte) {
            if (*byte != 0xA5) fail("wrote past the shared memory");
        }
    }
}

}  // namespace emulator
