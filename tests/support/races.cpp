// Finds races in the shared memory of an emulated kernel: two accesses of the same byte, at least one of them a write and not
// both atomic, that no barrier orders. It does not depend on the order in which the threads happened to run.
//
// The kernel is compiled with -fsanitize=thread, so that every access calls one of the functions at the end of this file,
// which take the place of the sanitizer's. Who accesses is an actor: a thread, the cp.async copies of a thread, the bulk
// copies of an mbarrier, the products of a warp. Each has a time that grows; a clock says up to which time of every actor
// what it did is known to be over. A barrier hands the clocks of those who arrive to those who go on.
#include "races.hpp"

#include <algorithm>
#include <cstdio>
#include <dlfcn.h>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace races {
namespace {

using u32 = uint32_t;
using Times = std::vector<u32>;  // by actor; those behind the end are 0

void raise(Times& to, size_t at, u32 time) {
    if (to.size() <= at) to.resize(at + 1);
    to[at] = std::max(to[at], time);
}

void raise(Times& to, const Times& from) {
    if (to.size() < from.size()) to.resize(from.size());
    for (size_t i = 0; i < from.size(); ++i) to[i] = std::max(to[i], from[i]);
}

u32 time_of(const Times& times, size_t actor) { return actor < times.size() ? times[actor] : 0; }

// What many threads know alike, and share. `fenced`: up to when an actor's writes are visible to asynchronous operations.
struct Clocks {
    Times seen, fenced;
    mutable std::weak_ptr<const Clocks> all_fenced;
};
using Shared = std::shared_ptr<const Clocks>;

struct News {
    u32 actor, seen, fenced;
};

// What one thread knows: the shared part, and what it alone has learnt since.
struct Clock {
    Shared base;
    std::vector<News> news;

    u32 seen(u32 actor) const {
        u32 time = time_of(base->seen, actor);
        for (const News& one : news) if (one.actor == actor) time = std::max(time, one.seen);
        return time;
    }

    u32 fenced(u32 actor) const {
        u32 time = time_of(base->fenced, actor);
        for (const News& one : news) if (one.actor == actor) time = std::max(time, one.fenced);
        return time;
    }

    void learn(u32 actor, u32 seen, u32 fenced) {
        for (News& one : news) {
            if (one.actor != actor) continue;
            one.seen = std::max(one.seen, seen), one.fenced = std::max(one.fenced, fenced);
            return;
        }
        news.push_back({actor, seen, fenced});
    }

    void forget_what_the_base_knows() {
        std::erase_if(news, [&](const News& one) {
            return one.seen <= time_of(base->seen, one.actor) && one.fenced <= time_of(base->fenced, one.actor);
        });
    }
};

struct ThreadState {
    Clock clock;
    u32 time = 1, fenced = 0;        // its own
    u32 copies = 1;                  // time of its cp.async copies
    std::vector<u32> copy_groups;    // committed and not waited for: their times
    u32 products = 0;                // groups of products that it has committed
    std::vector<uintptr_t> callers;  // its stack of calls
};

// A barrier. Arrivals of all phases add up, since each of them is an atomic operation on the same word.
struct Sync {
    Times seen, fenced;                             // of all who have arrived
    std::vector<Shared> arrived;                    // bases that are part of it already
    Shared last;                                    // at the end of the last phase
    std::vector<std::pair<Shared, Shared>> joined;  // a base before and after it has learnt `last`
};

// COPIED: by cp.async. Once such a copy is known to be over, products read it without a fence of proxies, as they do in
// CUTLASS's main loop of wgmma behind cp.async. PTX asks for one, and so does this file with STRICT.
enum Kind : unsigned char { READS = 0, WRITES = 1, ATOMIC = 2, ASYNC = 4, COPIED = 8 };

#ifdef STRICT
constexpr unsigned char UNFENCED = ASYNC;
#else
constexpr unsigned char UNFENCED = ASYNC | COPIED;
#endif

struct Record {
    u32 actor, time, place;
    unsigned char bytes, kind;  // a mask of the four bytes
};

// Four bytes of shared memory: the accesses that later ones may race with.
struct Granule {
    std::vector<Record> writes, reads;
};

struct Area {
    uintptr_t start = 0, end = 0;
    std::vector<Granule> granules;
};

struct State {
    std::vector<ThreadState> threads;
    u32 cta_threads = 0, actors = 0;
    std::map<Barrier, u32> bulk_actors;
    std::map<u32, u32> product_actors;  // by warp
    std::vector<u32> times;             // of actors that are not threads
    std::unordered_map<Barrier, Sync> syncs;
    std::vector<Area> areas;
    Shared nothing = std::make_shared<const Clocks>();
};

State state;
int current = -1, hidden = 0, atomics = 0;
std::map<std::vector<uintptr_t>, u32> place_numbers;
std::vector<std::vector<uintptr_t>> places;
std::set<std::pair<u32, u32>> reported;
std::string report, handed_out;

ThreadState& self() { return state.threads[current]; }

// The stack of calls of who runs now. The emulator's is there before this file's variables and after them, since the
// constructors and destructors of the kernel's variables are watched as well.
std::vector<uintptr_t>& callers() {
    static auto& host = *new std::vector<uintptr_t>;
    return current < 0 ? host : self().callers;
}

u32 copies_actor(u32 thread) { return state.threads.size() + thread; }

u32 new_actor() {
    state.times.resize(state.actors + 1);
    state.times[state.actors] = 1;
    return state.actors++;
}

u32 products_actor(u32 thread) {
    const auto [found, added] = state.product_actors.try_emplace(thread / 32, 0);
    if (added) found->second = new_actor();
    return found->second;
}

// Where the program is: the access and the calls around it.
u32 place_of(uintptr_t pc) {
    std::vector<uintptr_t> place = {pc};
    const auto& stack = callers();
    place.insert(place.end(), stack.rbegin(), stack.rbegin() + std::min<size_t>(stack.size(), 6));
    const auto [found, added] = place_numbers.try_emplace(place, places.size());
    if (added) places.push_back(place);
    return found->second;
}

uintptr_t library_base() {
    Dl_info info;
    dladdr(reinterpret_cast<void*>(&library_base), &info);
    return reinterpret_cast<uintptr_t>(info.dli_fbase);
}

std::string named(const Record& record) {
    const u32 threads = state.threads.size();
    char name[160];
    if (record.actor < threads) {
        std::snprintf(name, sizeof name, "%s by thread %u of CTA %u", record.kind & WRITES ? "write" : "read",
                      record.actor % state.cta_threads, record.actor / state.cta_threads);
    } else if (record.actor < 2 * threads) {
        std::snprintf(name, sizeof name, "cp.async by thread %u of CTA %u", record.actor % threads % state.cta_threads,
                      record.actor % threads / state.cta_threads);
    } else {
        std::snprintf(name, sizeof name, "%s", record.kind & WRITES ? "bulk copy" : "wgmma");
    }
    std::string text = name;
    if (record.kind & ATOMIC) text += " (atomic)";
    text += " @";
    for (const uintptr_t pc : places[record.place]) {
        std::snprintf(name, sizeof name, "%llx,", static_cast<unsigned long long>(pc - 1 - library_base()));
        text += name;
    }
    return text;
}

void report_race(size_t rank, size_t offset, const Record& before, const Record& now, bool needs_fence) {
    if (!reported.insert({std::min(before.place, now.place), std::max(before.place, now.place)}).second) return;
    char head[160];
    std::snprintf(head, sizeof head, "byte %zu of CTA %zu%s\t", offset, rank, needs_fence ? ", no fence.proxy.async between" : "");
    report += head + named(before) + "\t" + named(now) + "\n";
}

bool is_known(const Record& before, u32 actor, bool& needs_fence, bool asynchronous) {
    needs_fence = false;
    // A thread is in order with itself; what it has started is not.
    if (before.actor == actor && static_cast<int>(actor) == current) return true;
    const bool own = static_cast<int>(before.actor) == current;
    const Clock& clock = self().clock;
    if (!own && clock.seen(before.actor) < before.time) return false;
    if (!asynchronous || !(before.kind & WRITES) || before.kind & UNFENCED) return true;
    needs_fence = (own ? self().fenced : clock.fenced(before.actor)) < before.time;
    return !needs_fence;
}

void access_granule(size_t rank, Area& area, size_t number, Record now) {
    Granule& granule = area.granules[number];
    const auto conflicts = [&](const Record& before) {
        return (before.bytes & now.bytes) && !(before.kind & now.kind & ATOMIC);
    };
    const auto check = [&](std::vector<Record>& records) {
        for (const Record& before : records) {
            bool needs_fence;
            if (!conflicts(before) || is_known(before, now.actor, needs_fence, now.kind & ASYNC)) continue;
            report_race(rank, number * 4, before, now, needs_fence);
        }
    };
    // An older access need not be kept if it is over, and whoever races with it races with this one as well.
    const auto is_superseded = [&](const Record& before) {
        bool needs_fence;
        return !(before.bytes & ~now.bytes) && (before.kind & ATOMIC) >= (now.kind & ATOMIC) &&
               is_known(before, now.actor, needs_fence, now.kind & ASYNC);
    };
    check(granule.writes);
    if (now.kind & WRITES) {
        check(granule.reads);
        std::erase_if(granule.writes, is_superseded);
        std::erase_if(granule.reads, is_superseded);
        granule.writes.push_back(now);
    } else {
        if (!granule.reads.empty()) {
            Record& last = granule.reads.back();
            if (last.actor == now.actor && last.time == now.time && last.kind == now.kind && !(now.bytes & ~last.bytes)) return;
        }
        std::erase_if(granule.reads, is_superseded);
        granule.reads.push_back(now);
    }
}

void access(uintptr_t address, size_t bytes, u32 actor, u32 time, unsigned kind, uintptr_t pc) {
    for (size_t rank = 0; rank < state.areas.size(); ++rank) {
        Area& area = state.areas[rank];
        if (address < area.start || address >= area.end) continue;
        const u32 place = place_of(pc);
        const uintptr_t end = std::min(address + bytes, area.end);
        while (address < end) {
            const size_t number = (address - area.start) / 4, first = (address - area.start) % 4;
            const size_t count = std::min<size_t>(4 - first, end - address);
            const auto mask = static_cast<unsigned char>(((1u << count) - 1) << first);
            access_granule(rank, area, number, {actor, time, place, mask, static_cast<unsigned char>(kind)});
            address += count;
        }
        return;
    }
}

void thread_access(const void* address, size_t bytes, bool writes, bool is_atomic, void* pc) {
    if (current < 0 || hidden) return;
    const unsigned kind = (writes ? WRITES : READS) | (is_atomic || atomics ? ATOMIC : 0);
    access(reinterpret_cast<uintptr_t>(address), bytes, current, self().time, kind, reinterpret_cast<uintptr_t>(pc));
}

uintptr_t caller(void* pc) { return reinterpret_cast<uintptr_t>(pc); }

}  // namespace

void start_cluster(u32 ctas, u32 cta_threads) {
    state.threads.assign(ctas * cta_threads, ThreadState{});
    for (ThreadState& thread : state.threads) thread.clock.base = state.nothing;
    state.cta_threads = cta_threads;
    state.actors = 2 * state.threads.size();
    state.times.clear();
    state.bulk_actors.clear();
    state.product_actors.clear();
    state.syncs.clear();
    state.areas.assign(ctas, Area{});
    current = -1;
    hidden = atomics = 0;
}

void memory(u32 rank, const void* start, size_t bytes) {
    Area& area = state.areas[rank];
    area.start = reinterpret_cast<uintptr_t>(start);
    area.end = area.start + bytes;
    area.granules.assign((bytes + 3) / 4, Granule{});
}

void running(int thread) { current = thread; }
void hide(int more) { hidden += more; }
void atomic(int more) { atomics += more; }

void release(Barrier barrier) {
    Sync& sync = state.syncs[barrier];
    ThreadState& thread = self();
    const Shared& base = thread.clock.base;
    if (std::find(sync.arrived.begin(), sync.arrived.end(), base) == sync.arrived.end()) {
        raise(sync.seen, base->seen);
        raise(sync.fenced, base->fenced);
        sync.arrived.push_back(base);
    }
    for (const News& one : thread.clock.news) {
        raise(sync.seen, one.actor, one.seen);
        raise(sync.fenced, one.actor, one.fenced);
    }
    raise(sync.seen, current, thread.time);
    raise(sync.fenced, current, thread.fenced);
    ++thread.time;  // what it does from here on is not known to those who go on after the barrier
}

void complete(Barrier barrier) {
    Sync& sync = state.syncs[barrier];
    sync.last = std::make_shared<const Clocks>(Clocks{sync.seen, sync.fenced, {}});
    sync.joined.clear();
    sync.arrived.assign(1, sync.last);  // older bases are rare from now on
}

void acquire(Barrier barrier) {
    Sync& sync = state.syncs[barrier];
    if (!sync.last) return;
    Clock& clock = self().clock;
    const auto found = std::find_if(sync.joined.begin(), sync.joined.end(), [&](const auto& one) { return one.first == clock.base; });
    if (found != sync.joined.end()) {
        clock.base = found->second;
    } else {
        const auto within = [](const Times& part, const Times& whole) {
            for (size_t i = 0; i < part.size(); ++i) if (part[i] > time_of(whole, i)) return false;
            return true;
        };
        Shared after = sync.last;
        if (!within(clock.base->seen, after->seen) || !within(clock.base->fenced, after->fenced)) {
            Clocks both = {clock.base->seen, clock.base->fenced, {}};
            raise(both.seen, sync.last->seen);
            raise(both.fenced, sync.last->fenced);
            after = std::make_shared<const Clocks>(std::move(both));
        }
        sync.joined.emplace_back(clock.base, after);
        clock.base = after;
    }
    clock.forget_what_the_base_knows();
}

// What the thread has seen, its own writes and those of others, is from now on visible to asynchronous operations.
void fence_async_proxy() {
    ThreadState& thread = self();
    const Shared base = thread.clock.base;
    Shared fenced = base->all_fenced.lock();
    if (!fenced) {
        fenced = base->seen == base->fenced ? base : std::make_shared<const Clocks>(Clocks{base->seen, base->seen, {}});
        base->all_fenced = fenced;
    }
    thread.clock.base = fenced;
    for (News& one : thread.clock.news) one.fenced = one.seen;
    thread.fenced = thread.time++;
}

void copy_writes(const void* destination, size_t bytes) {
    access(reinterpret_cast<uintptr_t>(destination), bytes, copies_actor(current), self().copies, WRITES | COPIED,
           caller(__builtin_return_address(0)));
}

void commit_copies() {
    ThreadState& thread = self();
    thread.copy_groups.push_back(thread.copies++);
}

void wait_for_copies(u32 pending) {
    ThreadState& thread = self();
    auto& groups = thread.copy_groups;
    if (groups.size() <= pending) return;
    const size_t done = groups.size() - pending;
    thread.clock.learn(copies_actor(current), groups[done - 1], 0);
    groups.erase(groups.begin(), groups.begin() + done);
}

uint64_t hand_over_copies() {
    return static_cast<uint64_t>(copies_actor(current)) << 32 | self().copies++;
}

void copies_arrive(Barrier barrier, uint64_t handed_over) {
    raise(state.syncs[barrier].seen, handed_over >> 32, static_cast<u32>(handed_over));
}

uint64_t bulk_copy_starts(Barrier barrier) {
    const auto [found, added] = state.bulk_actors.try_emplace(barrier, 0);
    if (added) found->second = new_actor();
    return static_cast<uint64_t>(found->second) << 32 | state.times[found->second]++;
}

void bulk_copy_writes(uint64_t copy, const void* destination, size_t bytes) {
    access(reinterpret_cast<uintptr_t>(destination), bytes, copy >> 32, static_cast<u32>(copy), WRITES | ASYNC,
           caller(__builtin_return_address(0)));
}

// Copies end in any order. A phase ends after all of its copies, and one who waits for it knows the last.
void bulk_copy_ends(Barrier barrier, uint64_t copy) { copies_arrive(barrier, copy); }

void product_reads(const void* source, size_t bytes) {
    access(reinterpret_cast<uintptr_t>(source), bytes, products_actor(current), self().products + 1, READS | ASYNC,
           caller(__builtin_return_address(0)));
}

void commit_products() { ++self().products; }

void wait_for_products(u32 pending) {
    ThreadState& thread = self();
    if (thread.products > pending) thread.clock.learn(products_actor(current), thread.products - pending, 0);
}

}  // namespace races

#define EXPORT extern "C" __attribute__((visibility("default")))

// Races since the last call, one per line: where, and the two accesses with the addresses of their code; null if none.
EXPORT const char* races_found() {
    using namespace races;
    handed_out = std::move(report);
    report.clear();
    reported.clear();
    return handed_out.empty() ? nullptr : handed_out.c_str();
}

#define HERE __builtin_return_address(0)
#define HOOKS(BYTES)                                                                                                    \
    EXPORT void __tsan_read##BYTES(void* at) { races::thread_access(at, BYTES, false, false, HERE); }                   \
    EXPORT void __tsan_write##BYTES(void* at) { races::thread_access(at, BYTES, true, false, HERE); }                   \
    EXPORT void __tsan_unaligned_read##BYTES(void* at) { races::thread_access(at, BYTES, false, false, HERE); }         \
    EXPORT void __tsan_unaligned_write##BYTES(void* at) { races::thread_access(at, BYTES, true, false, HERE); }         \
    EXPORT void __tsan_volatile_read##BYTES(void* at) { races::thread_access(at, BYTES, false, true, HERE); }           \
    EXPORT void __tsan_volatile_write##BYTES(void* at) { races::thread_access(at, BYTES, true, true, HERE); }           \
    EXPORT void __tsan_unaligned_volatile_read##BYTES(void* at) { races::thread_access(at, BYTES, false, true, HERE); } \
    EXPORT void __tsan_unaligned_volatile_write##BYTES(void* at) { races::thread_access(at, BYTES, true, true, HERE); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

EXPORT void __tsan_read_range(void* at, size_t bytes) { races::thread_access(at, bytes, false, false, HERE); }
EXPORT void __tsan_write_range(void* at, size_t bytes) { races::thread_access(at, bytes, true, false, HERE); }
EXPORT void __tsan_init() {}
EXPORT void __tsan_vptr_update(void**, void*) {}
EXPORT void __tsan_vptr_read(void**) {}
EXPORT void __tsan_func_entry(void* pc) { races::callers().push_back(races::caller(pc)); }
EXPORT void __tsan_func_exit() {
    if (!races::callers().empty()) races::callers().pop_back();
}
// Whether a static variable of a function is there already: a byte on x86-64, a word on arm64.
EXPORT char __tsan_atomic8_load(const volatile char* at, int) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
EXPORT int64_t __tsan_atomic64_load(const volatile int64_t* at, int) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
