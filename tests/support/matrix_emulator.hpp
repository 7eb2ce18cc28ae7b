// The other functions of `instructions.cuh` on the host: matrix fragments of a warp, mbarriers, asynchronous copies, named
// barriers. Copies complete late and in any order, so that a thread that does not wait for them reads old bytes.
#pragma once
#include "emulator.hpp"

#include <map>

struct float2 { float x, y; };
struct alignas(8) uint2 { u32 x, y; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulator {

template <class T>
struct Shuffled {
    T values[2][32];
};

// As `exchange`, for values of any type.
template <class T>
const T* exchange_all(const T& value) {
    static std::map<const Warp*, Shuffled<T>> all;
    Warp& warp = current->cta->warps[current->thread_index.x / 32];
    T* values = all[&warp].values[warp.barrier.generation % 2];
    values[current->thread_index.x % 32] = value;
    wait(warp.barrier, arrive(warp.barrier, 32, DOES_NOT_ORDER), DOES_NOT_ORDER);
    return values;
}

struct Mbarrier {
    Barrier phase;
    u32 count, arrived = 0;  // arrivals that end a phase, and arrivals in the current one
    long long bytes = 0;     // expected but not copied yet

    void end_phase_if_complete() {
        if (arrived < count || bytes != 0) return;
        arrived = 0;
        ++phase.generation;
        races::complete(&phase);
    }
};

// The mbarriers of a cluster by address, and the named barriers of each CTA. They are cleared when the next cluster starts.
inline std::map<u32, Mbarrier> mbarriers;
inline std::map<u32, Barrier> named_barriers;

inline Mbarrier& mbarrier_at(u32 address) {
    const auto found = mbarriers.find(address);
    if (found == mbarriers.end()) fail("an mbarrier was not initialised");
    return found->second;
}

// Bytes of a copy have arrived, and `copy` is the race detector's number of it.
inline void count_bytes(u32 address, u32 bytes, uint64_t copy) {
    Mbarrier& one = mbarrier_at(address);
    races::bulk_copy_ends(&one.phase, copy);
    one.bytes -= bytes;
    one.end_phase_if_complete();
}

inline void count_arrival(u32 address, u32 bytes) {
    Mbarrier& one = mbarrier_at(address);
    if (one.arrived == one.count) fail("more arrivals at an mbarrier than its count");
    ++one.arrived;
    one.bytes += bytes;
    one.end_phase_if_complete();
}

// The cp.async copies of a thread. A copy is done either at once or not before the thread waits for it.
struct ThreadCopies {
    std::vector<std::function<void()>> open;                 // not committed yet
    std::vector<std::vector<std::function<void()>>> groups;  // committed
};

inline ThreadCopies thread_copies[CLUSTER_THREADS];

// Copies, or without a source writes zeros.
inline void start_copy(u32 destination, const void* source, u32 bytes) {
    races::copy_writes(shared_word(destination), bytes);
    const auto copy = [=] {
        const races::Hidden hidden;
        if (source) std::memcpy(shared_word(destination), source, bytes);
        else std::memset(shared_word(destination), 0, bytes);
    };
    if (random_order() % 2) copy();
    else thread_copies[thread_in_cluster()].open.push_back(copy);
}

// Forgets the state of the CTA before; `grid` is gridDim.x.
inline void start_cta(u32 grid) {
    grid_size = grid;
    is_mbarrier = [](u32 address) { return mbarriers.count(address & ~7u) > 0; };
    for (auto& own : thread_copies) own = {};
    mbarriers.clear();
    named_barriers.clear();
}

// In integers: g++ has _Float16 on x86-64 from version 12 and on arm64 from version 13.
inline float fp16_value(u32 bits) {
    const u32 sign = (bits & 0x8000) << 16, rest = bits & 0x7FFF;
    if (rest > 0x7C00) return __uint_as_float(sign | 0x7FC00000 | rest << 13);  // a NaN becomes quiet
    if (rest == 0x7C00) return __uint_as_float(sign | 0x7F800000);
    if (rest >= 0x400) return __uint_as_float(sign | ((rest << 13) + (112u << 23)));
    return __uint_as_float(sign | __float_as_uint(static_cast<float>(rest) * 0x1p-24f));  // subnormal or zero
}

inline u32 fp16_bits(float value) {
    const u32 all = __float_as_uint(value), sign = all >> 16 & 0x8000, rest = all & 0x7FFFFFFF;
    if (rest > 0x7F800000) return sign | 0x7E00 | (rest >> 13 & 0x3FF);
    if (rest >= 0x477FF000) return sign | 0x7C00;  // from half a unit above the largest number
    if (rest >= 0x38800000) return sign | (rest + 0xFFF + (rest >> 13 & 1) - (112u << 23)) >> 13;
    // Subnormal numbers are multiples of 2^-24, to which the sum with 0.5 is rounded.
    return sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3F000000);
}

inline float bf16_value(u32 bits) { return __uint_as_float(bits << 16); }

inline u32 bf16_bits(float value) {
    const u32 bits = __float_as_uint(value);
    return value != value ? 0x7FFFu : (bits + 0x7FFFu + (bits >> 16 & 1)) >> 16;
}

inline u32 e4m3_to_fp16(u32 code) {
    const u32 exponent = code >> 3 & 15, digits = code & 7;
    float value = exponent == 0 ? std::ldexp(digits / 8.0f, -6)
                                : std::ldexp(1.0f + digits / 8.0f, static_cast<int>(exponent) - 7);
    if ((code & 0x7F) == 0x7F) value = NAN;
    return fp16_bits(code & 0x80 ? -value : value);
}

struct Operands {
    u32 a[4], b[2];
};

// m16n8k16: every lane computes its four elements from the registers of all lanes.
template <class Value>
void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1, const Value& value) {
    const Operands* lanes = exchange_all(Operands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
    const int lane = current->thread_index.x % 32;
    for (int i = 0; i < 4; ++i) {
        const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
        double total = sum[i];
        for (int k = 0; k < 16; ++k) {
            const u32 left = lanes[4 * (row % 8) + k / 2 % 4].a[row / 8 + 2 * (k / 8)];
            const u32 right = lanes[4 * column + k / 2 % 4].b[k / 8];
            total += static_cast<double>(value(left >> 16 * (k % 2) & 0xFFFF)) * value(right >> 16 * (k % 2) & 0xFFFF);
        }
        sum[i] = static_cast<float>(total);
    }
}

inline char* shared_byte(u32 address) { return reinterpret_cast<char*>(shared_word(address & ~3u)) + (address & 3); }

inline uint16_t matrix_element(const u32* rows, int matrix, int row, int column) {
    const u32 address = rows[8 * matrix + row];
    if (address % 16) fail("a matrix row is not aligned");
    uint16_t element;
    std::memcpy(&element, reinterpret_cast<const char*>(shared_word(address)) + 2 * column, 2);
    return element;
}

inline void ldmatrix_x4(u32 (&m)[4], u32 address, bool transposed) {
    const u32* rows = exchange_all(address);
    const int lane = current->thread_index.x % 32, major = lane / 4, minor = 2 * (lane % 4);
    for (int i = 0; i < 4; ++i) {
        m[i] = 0;
        for (int e = 0; e < 2; ++e) {
            const u32 element = transposed ? matrix_element(rows, i, minor + e, major)
                                           : matrix_element(rows, i, major, minor + e);
            m[i] |= element << 16 * e;
        }
    }
    exchange_all(0u);  // no lane returns, and possibly writes, before all have read
}

}  // namespace emulator

template <class T>
T __shfl_xor_sync(u32, T value, int mask) {
    return emulator::exchange_all(value)[threadIdx.x % 32 ^ mask];
}

inline bool __any_sync(u32 lanes, bool predicate) { return __ballot_sync(lanes, predicate) != 0; }
inline void __syncwarp() { emulator::exchange(0, emulator::ORDERS); }

inline u32 __vminu2(u32 a, u32 b) { return min(a & 0xFFFF, b & 0xFFFF) | min(a >> 16, b >> 16) << 16; }
inline u32 __vmaxu2(u32 a, u32 b) { return max(a & 0xFFFF, b & 0xFFFF) | max(a >> 16, b >> 16) << 16; }

inline u32 __byte_perm(u32 a, u32 b, u32 selector) {
    const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; ++i) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}

// ---- The functions of `instructions.cuh`

inline void mbarrier_init(u32 barrier, u32 count) {
    if (barrier % 8) emulator::fail("an mbarrier is not aligned");
    emulator::mbarriers[barrier] = {{}, count};
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
    emulator::maybe_pause();
    races::release(&emulator::mbarrier_at(barrier).phase);
    emulator::count_arrival(barrier, bytes);
}

inline void mbarrier_arrive(u32 barrier) { mbarrier_arrive_expect_tx(barrier, 0); }

inline void mbarrier_arrive(u32 barrier, u32 count) {
    emulator::maybe_pause();
    races::release(&emulator::mbarrier_at(barrier).phase);
    for (u32 i = 0; i < count; ++i) emulator::count_arrival(barrier, 0);
}

inline void mbarrier_wait(u32 barrier, u32 parity) {
    emulator::maybe_pause();
    emulator::Mbarrier& one = emulator::mbarrier_at(barrier);
    while (one.phase.generation % 2 == parity) emulator::wait(one.phase, one.phase.generation, emulator::DOES_NOT_ORDER);
    races::acquire(&one.phase);
}

inline void fence_async_proxy() { races::fence_async_proxy(); }
inline void prefetch_l2(const void*) {}

inline void bulk_copy(u32 destination, const void* source, u32 bytes, u32 barrier) {
    if ((destination | reinterpret_cast<uintptr_t>(source) | bytes) % 16) emulator::fail("a copy is not aligned");
    const uint64_t copy = races::bulk_copy_starts(&emulator::mbarrier_at(barrier).phase);
    races::bulk_copy_writes(copy, shared_word(destination), bytes);
    emulator::in_flight.push_back([=] {
        std::memcpy(shared_word(destination), source, bytes);
        emulator::count_bytes(barrier, bytes, copy);
    });
    emulator::maybe_pause();
}

// What the tests put into a map: five numbers of 64 bits.
struct alignas(64) TileMap {
    unsigned char bytes[128];
};

namespace emulator {

struct PagesOfRows {
    uint64_t address, rows, pages, page_stride, box_rows;
};

}  // namespace emulator

inline void copy_tile(u32 destination, const TileMap& map, int row, int page, u32 barrier) {
    emulator::PagesOfRows from;
    std::memcpy(&from, map.bytes, sizeof from);
    if ((from.address | from.page_stride) % 16) emulator::fail("a tile map is not aligned");
    if (destination % 1024 % (from.box_rows * 128)) emulator::fail("a tile is not aligned");
    const uint64_t copy = races::bulk_copy_starts(&emulator::mbarrier_at(barrier).phase);
    races::bulk_copy_writes(copy, shared_word(destination), from.box_rows * 128);
    emulator::in_flight.push_back([=] {
        for (u32 i = 0; i < from.box_rows; ++i) {
            const bool inside = row >= 0 && page >= 0 && row + i < from.rows && static_cast<uint64_t>(page) < from.pages;
            const u32 target = destination + i * 128;
            for (u32 unit = 0; unit < 8; ++unit) {
                void* const to = shared_word(target + (unit ^ (target >> 7 & 7)) * 16);
                const uint64_t source = from.address + page * from.page_stride + (row + i) * 128 + unit * 16;
                if (inside) std::memcpy(to, reinterpret_cast<const void*>(source), 16);
                else std::memset(to, 0, 16);
            }
        }
        emulator::count_bytes(barrier, from.box_rows * 128, copy);
    });
    emulator::maybe_pause();
}

inline void prefetch_tile_map(const TileMap&) {}

template <int BYTES>
void cp_async_zfill(u32 destination, const void* source, bool valid) {
    if (destination % BYTES || (valid && reinterpret_cast<uintptr_t>(source) % BYTES)) {
        emulator::fail("a copy is not aligned");
    }
    emulator::maybe_pause();
    emulator::start_copy(destination, valid ? source : nullptr, BYTES);
}

inline void cp_async_commit() {
    auto& own = emulator::thread_copies[emulator::thread_in_cluster()];
    own.groups.push_back(std::move(own.open));
    own.open.clear();
    races::commit_copies();
}

template <int PENDING>
void cp_async_wait() {
    emulator::maybe_pause();
    auto& own = emulator::thread_copies[emulator::thread_in_cluster()];
    while (own.groups.size() > PENDING) {
        for (const auto& copy : own.groups.front()) copy();
        own.groups.erase(own.groups.begin());
    }
    races::wait_for_copies(PENDING);
}

// The thread's pending copies are done before the arrival.
inline void cp_async_mbarrier_arrive(u32 barrier) {
    auto& own = emulator::thread_copies[emulator::thread_in_cluster()];
    emulator::in_flight.push_back([barrier, number = races::hand_over_copies(), copies = std::move(own.open)] {
        for (const auto& copy : copies) copy();
        races::copies_arrive(&emulator::mbarrier_at(barrier).phase, number);
        emulator::count_arrival(barrier, 0);
    });
    own.open.clear();
    emulator::maybe_pause();
}

inline uint2 peer_load2(u32 theirs) { return peer_load_as<uint2>(theirs); }

inline void shared_store2(u32 address, uint2 value) { *reinterpret_cast<uint2*>(shared_word(address)) = value; }

inline uint2 shared_load2(u32 address) { return {*shared_word(address), *shared_word(address + 4)}; }

inline void named_barrier_sync(u32 name, u32 threads) {
    emulator::Barrier& barrier = emulator::named_barriers[name + cluster_rank() * RANK_UNIT];
    emulator::wait(barrier, emulator::arrive(barrier, threads));
}

inline void named_barrier_arrive(u32 name, u32 threads) {
    emulator::arrive(emulator::named_barriers[name + cluster_rank() * RANK_UNIT], threads);
    emulator::maybe_pause();
}

inline void reduce_add4(float* address, float4 v, bool valid) {
    if (!valid) return;
    if (reinterpret_cast<uintptr_t>(address) % 16) emulator::fail("a reduction is not aligned");
    const float four[4] = {v.x, v.y, v.z, v.w};
    for (int i = 0; i < 4; ++i) atomicAdd(address + i, four[i]);
}

template <int REGISTERS>
void warpgroup_reg_dealloc() {}

template <int REGISTERS>
void warpgroup_reg_alloc() {}

inline void ldmatrix_x4(u32 (&m)[4], u32 address) { emulator::ldmatrix_x4(m, address, false); }
inline void ldmatrix_x4_trans(u32 (&m)[4], u32 address) { emulator::ldmatrix_x4(m, address, true); }

inline void stmatrix_x4(u32 address, const u32 (&fragment)[4]) {
    if (address % 16) emulator::fail("a matrix row is not aligned");
    const int lane = threadIdx.x % 32;
    u32 rows[32];
    std::memcpy(rows, emulator::exchange(address), sizeof rows);
    for (int i = 0; i < 4; ++i) *shared_word(rows[8 * i + lane / 4] + lane % 4 * 4) = fragment[i];
}

inline void stmatrix_x4_trans(u32 address, const u32 (&fragment)[4]) {
    if (address % 16) emulator::fail("a matrix row is not aligned");
    const int lane = threadIdx.x % 32;
    u32 rows[32];
    std::memcpy(rows, emulator::exchange(address), sizeof rows);
    for (int i = 0; i < 4; ++i) {
        for (int e = 0; e < 2; ++e) {
            const auto half = static_cast<unsigned short>(fragment[i] >> 16 * e);
            std::memcpy(emulator::shared_byte(rows[8 * i + lane % 4 * 2 + e] + lane / 4 * 2), &half, 2);
        }
    }
}

inline u32 warp_uniform(u32 same) {
    const u32* all = emulator::exchange(same);
    for (int lane = 0; lane < 32; ++lane) {
        if (all[lane] != same) emulator::fail("lanes differ in a value that should be uniform");
    }
    return same;
}

template <Operand TYPE>
void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    emulator::multiply(d, a, b0, b1, TYPE == BF16 ? emulator::bf16_value : emulator::fp16_value);
}

inline void e4m3x4_to_fp16(u32 codes, u32& first, u32& second) {
    u32 half[4];
    for (int i = 0; i < 4; ++i) half[i] = emulator::e4m3_to_fp16(codes >> 8 * i & 0xFF);
    first = half[0] | half[1] << 16;
    second = half[2] | half[3] << 16;
}

inline u32 mul_fp16x2(u32 a, u32 b) {
    const auto product = [](u32 x, u32 y) { return emulator::fp16_bits(emulator::fp16_value(x) * emulator::fp16_value(y)); };
    return product(a & 0xFFFF, b & 0xFFFF) | product(a >> 16, b >> 16) << 16;
}

inline u32 mul_bf16x2(u32 a, u32 b) {
    const auto product = [](u32 x, u32 y) { return emulator::bf16_bits(emulator::bf16_value(x) * emulator::bf16_value(y)); };
    return product(a & 0xFFFF, b & 0xFFFF) | product(a >> 16, b >> 16) << 16;
}

inline u32 max_abs_fp16x2(u32 a, u32 b) {
    const auto larger = [](u32 x, u32 y) {
        return emulator::fp16_bits(std::fmax(std::fabs(emulator::fp16_value(x)), std::fabs(emulator::fp16_value(y))));
    };
    return larger(a & 0xFFFF, b & 0xFFFF) | larger(a >> 16, b >> 16) << 16;
}

inline u32 pack_fp16(float first, float second) {
    return emulator::fp16_bits(first) | emulator::fp16_bits(second) << 16;
}

inline u32 pack_bf16(float first, float second) {
    return emulator::bf16_bits(first) | emulator::bf16_bits(second) << 16;
}

inline float2 unpack_fp16(u32 packed) {
    return {emulator::fp16_value(packed & 0xFFFF), emulator::fp16_value(packed >> 16)};
}

inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const uint64_t all = static_cast<uint64_t>(b) << 32 | a;
    u32 four = 0;
    for (int i = 0; i < 4; ++i) {
        const u32 nibble = selector >> 4 * i & 15, byte = all >> nibble % 8 * 8 & 0xFF;
        four |= (nibble < 8 ? byte : byte >> 7 ? 0xFFu : 0u) << 8 * i;
    }
    return four;
}

inline u32 append_sign(u32 bits, float number) { return bits << 1 | __float_as_uint(number) >> 31; }

inline float fast_exp2(float x) { return std::exp2(x); }
inline float fast_log2(float x) { return std::log2(x); }
inline float relu(float x) { return x <= 0 ? 0.0f : x; }  // NaN stays NaN
