// Runs a CUDA kernel on the host, exactly as written. Each thread is a coroutine; whenever one has to wait, the scheduler
// resumes another one at random. Orders that only a missing barrier allows therefore occur, and the same seed repeats them.
// Shared memory starts as random bytes, and writes beyond its end are detected. This file defines the include guard of
// `instructions.cuh` and the functions of it that kernels without matrix products need.
#undef _FORTIFY_SOURCE  // its longjmp refuses to switch to another stack
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

#include "races.hpp"

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

constexpr int CTA_THREADS = THREADS;
constexpr size_t STACK = 64 * 1024, GUARD = 4096;
constexpr int CLUSTER_THREADS = 16 * CTA_THREADS;  // of the largest cluster

struct Index {
    u32 x, y = 0;
};

struct Barrier {
    u32 generation = 0;  // phases that have ended
    u32 arrived = 0;     // in the current phase
};

struct Warp {
    Barrier barrier;
    u32 values[2][32];  // of all lanes, in exchanges of even and odd generations
};

struct Cta {
    std::vector<unsigned char> storage;
    uint4* memory;    // shared memory, in `storage`
    u32 index, rank;  // blockIdx.x, and the rank in the cluster
    Barrier barrier;  // of __syncthreads
    Warp warps[CTA_THREADS / 32];
    bool finished = false;
};

// Asynchronous operations, such as bulk copies. They may complete at any time, in any order.
inline std::vector<std::function<void()>> in_flight;

// A thread's stack and saved state. It is started by setcontext and later resumed by longjmp, since setcontext makes two
// system calls to restore signals.
struct Coroutine {
    std::vector<char> stack = std::vector<char>(STACK);
    ucontext_t beginning;
    jmp_buf paused;
    bool begun;
};

// A CUDA thread. This struct is small because the scheduler looks at many of them.
struct Thread {
    Index thread_index;
    Cta* cta;
    Coroutine* coroutine;
    bool done = false;
    const Barrier* waiting = nullptr;  // the barrier that it waits at
    u32 until = 0;                     // the generation of that barrier that it waits for
    u32 cluster_generation = 0;        // of the cluster barrier, at this thread's last arrival
};

// splitmix64; the generators of the standard library take longer to compile than most kernels.
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
inline std::vector<Cta> ctas;
inline Barrier cluster;
inline Random random_order;
inline u32 grid_size = 1, cta_y = 0;
inline bool (*is_mbarrier)(u32 address) = nullptr;  // where the kernel has any

// The number of the current thread in its cluster.
inline u32 thread_in_cluster() { return current->cta->rank * CTA_THREADS + current->thread_index.x; }

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
    if (_setjmp(current->coroutine->paused) == 0) _longjmp(scheduler, 1);
}

// Runs a thread until it pauses or ends.
__attribute__((noinline)) inline void resume(Thread& thread) {
    current = &thread;
    if (_setjmp(scheduler) != 0) {
        races::running(-1);
        return;
    }
    races::running(thread_in_cluster());
    if (thread.coroutine->begun) _longjmp(thread.coroutine->paused, 1);
    thread.coroutine->begun = true;
    setcontext(&thread.coroutine->beginning);
}

// Called where threads access shared memory: one time in eight it lets others run.
inline void maybe_pause() {
    if (random_order() % 8 == 0) pause();
}

// What a barrier does to accesses before it, as a race detector is told: it orders them before those behind it, or this
// thread's arrival does not, or the barrier is one of the emulator alone.
enum Order { ORDERS, RELAXED, DOES_NOT_ORDER };

// Arrives at a barrier of `expected` threads; returns the generation to wait for the end of.
inline u32 arrive(Barrier& barrier, u32 expected, Order order = ORDERS) {
    const u32 generation = barrier.generation;
    if (order == ORDERS) races::release(&barrier);
    if (++barrier.arrived == expected) {
        barrier.arrived = 0;
        ++barrier.generation;
        if (order != DOES_NOT_ORDER) races::complete(&barrier);
    }
    return generation;
}

inline void wait(Barrier& barrier, u32 generation, Order order = ORDERS) {
    current->waiting = &barrier;
    current->until = generation + 1;
    pause();
    current->waiting = nullptr;
    if (order != DOES_NOT_ORDER) races::acquire(&barrier);
}

// Exchanges a value among the lanes of a warp; returns the values of all lanes when every lane has called it. Shuffles and
// votes do not order accesses to memory.
inline const u32* exchange(u32 value, Order order = DOES_NOT_ORDER) {
    Warp& warp = current->cta->warps[current->thread_index.x / 32];
    u32* values = warp.values[warp.barrier.generation % 2];
    values[current->thread_index.x % 32] = value;
    wait(warp.barrier, arrive(warp.barrier, 32, order), order);
    return values;
}

}  // namespace emulator

#define threadIdx (emulator::current->thread_index)
#define blockIdx (emulator::Index{emulator::current->cta->index, emulator::cta_y})
#define gridDim (emulator::Index{emulator::grid_size})

inline void __syncthreads() {
    emulator::Barrier& barrier = emulator::current->cta->barrier;
    emulator::wait(barrier, emulator::arrive(barrier, emulator::CTA_THREADS));
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

inline u32 __reduce_max_sync(u32, u32 value) {
    const u32* values = emulator::exchange(value);
    u32 highest = 0;
    for (int lane = 0; lane < 32; ++lane) highest = values[lane] > highest ? values[lane] : highest;
    return highest;
}

inline u32 __shfl_sync(u32, u32 value, int lane) { return emulator::exchange(value)[lane]; }

inline u32 __shfl_up_sync(u32, u32 value, int step) {
    const u32* values = emulator::exchange(value);
    const int lane = threadIdx.x % 32;
    return values[lane >= step ? lane - step : lane];
}

template <class T>
T atomicAdd(T* address, T value) {
    emulator::maybe_pause();
    const races::Atomic atomic;
    const T old = *address;
    *address = old + value;
    return old;
}

inline void atomicOr(u32* address, u32 value) {
    emulator::maybe_pause();
    const races::Atomic atomic;
    *address |= value;
}

inline int __popc(u32 value) { return __builtin_popcount(value); }
inline int __clz(u32 value) { return value ? __builtin_clz(value) : 32; }
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

inline uint4* shared_memory() { return emulator::current->cta->memory; }

inline u32 opaque(u32 number) { return number; }

inline u32 cluster_rank() { return emulator::current->cta->rank; }
inline u32 cluster_size() { return emulator::ctas.size(); }

inline void cluster_arrive(emulator::Order order = emulator::ORDERS) {
    emulator::maybe_pause();
    emulator::current->cluster_generation =
        emulator::arrive(emulator::cluster, emulator::ctas.size() * emulator::CTA_THREADS, order);
}

inline void cluster_arrive_relaxed() { cluster_arrive(emulator::RELAXED); }

inline void cluster_wait() { emulator::wait(emulator::cluster, emulator::current->cluster_generation); }

// A shared-memory address is the offset in a CTA's shared memory plus the CTA's rank times this.
constexpr u32 RANK_UNIT = 1u << 24;

inline u32 shared_address(const void* pointer) {
    emulator::Cta* cta = emulator::current->cta;
    const auto offset = static_cast<const char*>(pointer) - reinterpret_cast<char*>(cta->memory);
    return offset + cta->rank * RANK_UNIT;
}

inline u32* shared_word(u32 address, size_t bytes = 4) {
    emulator::Cta& cta = emulator::ctas[address / RANK_UNIT];
    if (cta.finished) emulator::fail("accessed the shared memory of a CTA that has exited");
    const size_t end = cta.storage.size() - emulator::GUARD - 16;
    if (address % RANK_UNIT + bytes > end) emulator::fail("accessed memory beyond the end of shared memory");
    return reinterpret_cast<u32*>(reinterpret_cast<char*>(cta.memory) + address % RANK_UNIT);
}

inline void shared_store(u32 address, u32 value) {
    if (emulator::is_mbarrier && emulator::is_mbarrier(address)) emulator::fail("an mbarrier is overwritten");
    *shared_word(address) = value;
}
inline void shared_increment(u32 address) { atomicAdd(shared_word(address), 1u); }
inline u32 shared_load(u32 address) { return *shared_word(address); }
inline uint4 shared_load4(u32 address) { return *reinterpret_cast<uint4*>(shared_word(address, 16)); }
inline void shared_store4(u32 address, uint4 value) { *reinterpret_cast<uint4*>(shared_word(address, 16)) = value; }
inline u32 peer_address(u32 ours, u32 rank) { return ours % RANK_UNIT + rank * RANK_UNIT; }

inline u32 peer_load(u32 theirs) {
    emulator::maybe_pause();
    return *shared_word(theirs);
}

template <class T>
T peer_load_as(u32 theirs) {
    emulator::maybe_pause();
    return *reinterpret_cast<T*>(shared_word(theirs));
}

inline uint4 peer_load4(u32 theirs) { return peer_load_as<uint4>(theirs); }

inline void peer_add(u32 theirs, u32 value) { atomicAdd(shared_word(theirs), value); }

inline void wait_for_previous_kernel() {}
inline void let_next_kernel_start() {}

namespace emulator {

// Runs one cluster of `size` CTAs to its end, with `shared` bytes of dynamic shared memory each.
template <class Kernel>
void run_cluster(u32 index, u32 size, size_t shared, const Kernel& kernel) {
    static const Kernel* running;
    running = &kernel;
    cluster = Barrier{};
    ctas.assign(size, Cta{});
    races::start_cluster(size, CTA_THREADS);
    std::vector<Thread> threads(size * CTA_THREADS);
    static std::vector<Coroutine> coroutines;
    if (coroutines.size() < threads.size()) coroutines.resize(threads.size());
    for (u32 rank = 0; rank < size; ++rank) {
        Cta& cta = ctas[rank];
        cta.storage.resize(shared + GUARD + 16);
        for (auto& byte : cta.storage) byte = random_order();
        std::memset(cta.storage.data() + cta.storage.size() - GUARD, 0xA5, GUARD);
        const auto address = reinterpret_cast<uintptr_t>(cta.storage.data());
        cta.memory = reinterpret_cast<uint4*>((address + 15) / 16 * 16);
        cta.index = index * size + rank;
        cta.rank = rank;
        races::memory(rank, cta.memory, shared);
    }
    std::vector<u32> left(size, CTA_THREADS), alive;
    for (u32 i = 0; i < threads.size(); ++i) {
        Thread& thread = threads[i];
        thread.cta = &ctas[i / CTA_THREADS];
        thread.thread_index.x = i % CTA_THREADS;
        thread.coroutine = &coroutines[i];
        thread.coroutine->begun = false;
        ucontext_t& beginning = thread.coroutine->beginning;
        getcontext(&beginning);
        beginning.uc_stack.ss_sp = thread.coroutine->stack.data();
        beginning.uc_stack.ss_size = STACK;
        const auto whole = [] {
            (*running)();
            current->done = true;
            _longjmp(scheduler, 1);
        };
        makecontext(&beginning, static_cast<void (*)()>(whole), 0);
        alive.push_back(i);
    }
    // Most of the time one CTA (`favourite`) runs ahead of the others and one warp of each CTA (`slow`) lags behind. Both
    // change at random.
    u32 favourite = 0, slow = random_order() % (CTA_THREADS / 32);
    while (!alive.empty()) {
        if (!in_flight.empty() && random_order() % 64 == 0) finish_one_in_flight();
        if (random_order() % 4096 == 0) favourite = random_order() % size;
        u32 tried, at = random_order() % alive.size();
        for (u32 again = 0; again < 2 * size && threads[alive[at]].cta->rank != favourite; ++again) {
            at = random_order() % alive.size();
        }
        if (random_order() % 16384 == 0) slow = random_order() % (CTA_THREADS / 32);
        // The slow warp runs when no other thread can.
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
        for (u32 i = 0; i < GUARD; ++i) {
            if (current->coroutine->stack[i] != 0) fail("a thread's stack is too small");
        }
        if (--left[current->cta->rank] == 0) current->cta->finished = true;
        alive[at] = alive.back();
        alive.pop_back();
    }
    if (!in_flight.empty()) fail("a CTA has exited before copies into it have completed");
    for (const Cta& cta : ctas) {
        const unsigned char* end = cta.storage.data() + cta.storage.size();
        for (const unsigned char* byte = end - GUARD; byte < end; ++byte) {
            if (*byte != 0xA5) fail("wrote beyond the end of shared memory");
        }
    }
}

}  // namespace emulator
