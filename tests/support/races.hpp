// What the emulator tells the race detector (`races.cpp`) about the order of a kernel's accesses to shared memory. Without
// FIND_RACES every function here is empty.
#pragma once
#include <cstddef>
#include <cstdint>

namespace races {

// A barrier by its address in the emulator; a place in shared memory by its pointer on the host.
using Barrier = const void*;

#ifdef FIND_RACES

constexpr bool WANTED = true;

void start_cluster(uint32_t ctas, uint32_t cta_threads);
void memory(uint32_t rank, const void* start, size_t bytes);
void running(int thread);  // which thread of the cluster runs now; -1: the emulator
void hide(int more);       // accesses are the emulator's own until it is taken back with -1
void atomic(int more);     // accesses are atomic until it is taken back with -1

// A thread arrives at a barrier, the last thread has arrived, and a thread goes on after it.
void release(Barrier barrier);
void complete(Barrier barrier);
void acquire(Barrier barrier);
void fence_async_proxy();

// cp.async of the running thread. `hand_over_copies` returns what `copies_arrive` needs when they are done.
void copy_writes(const void* destination, size_t bytes);
void commit_copies();
void wait_for_copies(uint32_t pending);
uint64_t hand_over_copies();
void copies_arrive(Barrier barrier, uint64_t handed_over);

// Bulk copies, which complete at an mbarrier. `bulk_copy_starts` returns what `bulk_copy_ends` needs.
uint64_t bulk_copy_starts(Barrier barrier);
void bulk_copy_writes(uint64_t copy, const void* destination, size_t bytes);
void bulk_copy_ends(Barrier barrier, uint64_t copy);

// Products of a warp (wgmma), which read shared memory until they have been waited for. One lane says what is read.
void product_reads(const void* source, size_t bytes);
void commit_products();
void wait_for_products(uint32_t pending);

#else

constexpr bool WANTED = false;

inline void start_cluster(uint32_t, uint32_t) {}
inline void memory(uint32_t, const void*, size_t) {}
inline void running(int) {}
inline void hide(int) {}
inline void atomic(int) {}
inline void release(Barrier) {}
inline void complete(Barrier) {}
inline void acquire(Barrier) {}
inline void fence_async_proxy() {}
inline void copy_writes(const void*, size_t) {}
inline void commit_copies() {}
inline void wait_for_copies(uint32_t) {}
inline uint64_t hand_over_copies() { return 0; }
inline void copies_arrive(Barrier, uint64_t) {}
inline uint64_t bulk_copy_starts(Barrier) { return 0; }
inline void bulk_copy_writes(uint64_t, const void*, size_t) {}
inline void bulk_copy_ends(Barrier, uint64_t) {}
inline void product_reads(const void*, size_t) {}
inline void commit_products() {}
inline void wait_for_products(uint32_t) {}

#endif

struct Hidden {
    Hidden() { hide(1); }
    ~Hidden() { hide(-1); }
};

struct Atomic {
    Atomic() { atomic(1); }
    ~Atomic() { atomic(-1); }
};

}  // namespace races
