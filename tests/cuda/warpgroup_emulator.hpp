// What `warpgroups.cuh` has in assembly, on the host; comes after `emulator.hpp`. Bulk copies arrive in any order, as
// late as threads wait for them. Products run when they are issued, or not before somebody waits for them: what was
// freed, overwritten or read too early gives wrong results in one of the two.
#include <map>

struct uint2 { u32 x, y; };
struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace emulator {

struct CountingBarrier {
    Barrier phases;  // its generation is the number of phases that have ended
    u32 arrivals = 0, missing = 0;
    long long bytes = 0;

    void settle() {
        if (missing || bytes) return;
        missing = arrivals;
        ++phases.generation;
    }
};

struct Copy {
    u32 target, bytes, barrier;
    const void* source;
};

struct Product {
    float* result;
    int columns;
    bool add, from_registers;
    unsigned long long a, b;
    float rows[2][16];  // of a in registers
};

inline std::map<u32, CountingBarrier> counting;
inline Barrier named[16];
inline std::vector<Copy> under_way;
inline std::vector<Product> open[BLOCK_SIZE];
inline std::vector<std::vector<Product>> committed[BLOCK_SIZE];
inline bool eager;
inline long long products_done;

inline char* shared_byte(u32 address) { return reinterpret_cast<char*>(current->block->memory) + address; }

inline CountingBarrier& counting_barrier(u32 address) {
    const auto found = counting.find(address);
    if (found == counting.end()) fail("a barrier that was not initialised");
    return found->second;
}

inline bool deliver() {
    if (under_way.empty()) return false;
    const size_t at = random_order() % under_way.size();
    const Copy copy = under_way[at];
    under_way[at] = under_way.back();
    under_way.pop_back();
    std::memcpy(reinterpret_cast<char*>(blocks[0].memory) + copy.target, copy.source, copy.bytes);
    CountingBarrier& barrier = counting_barrier(copy.barrier);
    barrier.bytes -= copy.bytes;
    barrier.settle();
    return true;
}

inline float of_half(unsigned short bits) {
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return static_cast<float>(value);
}

inline u32 to_half(float value) {
    const _Float16 half = static_cast<_Float16>(value);
    unsigned short bits;
    std::memcpy(&bits, &half, 2);
    return bits;
}

inline u32 to_bfloat(float value) {
    const u32 bits = __float_as_uint(value);
    if (value != value) return 0x7FC0;
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}

inline float element(u32 address) {
    // The exchange of 16-byte units depends on the address alone.
    unsigned short bits;
    std::memcpy(&bits, shared_byte(address ^ (address >> 7 & 7) << 4), 2);
    return of_half(bits);
}

struct Operand {
    u32 start, leading, stride;

    explicit Operand(unsigned long long descriptor) {
        if (descriptor >> 62 != 1 || descriptor >> 46 & 0xFFFF) fail("not a descriptor of tiles of 128-byte rows");
        start = (descriptor & 0x3FFF) << 4;
        leading = (descriptor >> 16 & 0x3FFF) << 4;
        stride = (descriptor >> 32 & 0x3FFF) << 4;
    }

    float along_rows(int row, int inner) const { return element(start + row / 8 * stride + row % 8 * 128 + inner * 2); }
    float down_rows(int inner, int column) const {
        return element(start + column / 64 * leading + inner / 8 * stride + inner % 8 * 128 + column % 64 * 2);
    }
};

inline void run(const Product& product) {
    const int lane = current->thread_index.x % 32, row = current->thread_index.x / 32 % 4 * 16 + lane / 4;
    float a[2][16];
    std::memcpy(a, product.rows, sizeof a);
    if (!product.from_registers) {
        const Operand from(product.a);
        for (int below = 0; below < 2; ++below) {
            for (int k = 0; k < 16; ++k) a[below][k] = from.along_rows(row + 8 * below, k);
        }
    }
    const Operand from(product.b);
    const bool down = product.columns == 256;
    for (int i = 0; i < product.columns / 4; ++i) {
        const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        float* const upper = product.result + i / 2 * 4 + i % 2;
        float sums[2] = {0.0f, 0.0f};
        for (int k = 0; k < 16; ++k) {
            const float b = down ? from.down_rows(k, column) : from.along_rows(column, k);
            sums[0] += a[0][k] * b;
            sums[1] += a[1][k] * b;
        }
        upper[0] = product.add ? upper[0] + sums[0] : sums[0];
        upper[2] = product.add ? upper[2] + sums[1] : sums[1];
    }
    ++products_done;
}

inline void issue(const Product& product) {
    if (eager) run(product);
    else open[current->thread_index.x].push_back(product);
}

inline void wait_for_products(size_t pending) {
    auto& groups = committed[current->thread_index.x];
    while (groups.size() > pending) {
        for (const Product& product : groups.front()) run(product);
        groups.erase(groups.begin());
    }
}

// Before a block.
inline void restart() {
    counting.clear();
    under_way.clear();
    for (auto& barrier : named) barrier = Barrier{};
    for (int i = 0; i < BLOCK_SIZE; ++i) open[i].clear(), committed[i].clear();
    eager = random_order() % 2;
    something_arrives = deliver;
}

// After it.
inline void check_finished() {
    if (!under_way.empty()) fail("a copy is still under way");
    for (int i = 0; i < BLOCK_SIZE; ++i) {
        if (!open[i].empty() || !committed[i].empty()) fail("a product is still under way");
    }
}

}  // namespace emulator

inline void barrier_init(u32 barrier, u32 arrivals) {
    if (barrier % 8) emulator::fail("a barrier out of line");
    emulator::counting[barrier] = {{}, arrivals, arrivals, 0};
}

inline void barrier_init_done() {}

inline void barrier_arrive_expecting(u32 barrier, u32 bytes) {
    emulator::maybe_pause();
    emulator::CountingBarrier& found = emulator::counting_barrier(barrier);
    found.bytes += bytes;
    --found.missing;
    found.settle();
}

inline void barrier_arrive(u32 barrier) { barrier_arrive_expecting(barrier, 0); }

inline void barrier_wait(u32 barrier, u32 parity) {
    emulator::CountingBarrier& found = emulator::counting_barrier(barrier);
    if (emulator::random_order() % 4 == 0) emulator::deliver();
    const u32 ended = found.phases.generation;
    if (ended % 2 == parity) emulator::wait(found.phases, ended);
    // A waiter that lets a phase pass would take the next one of the same parity for it.
    if (found.phases.generation % 2 == parity) emulator::fail("a phase was missed");
}

inline void group_sync(u32 name, u32 threads) {
    emulator::wait(emulator::named[name], emulator::arrive(emulator::named[name], threads));
}

inline void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier) {
    if (target % 16 || bytes % 16 || reinterpret_cast<uintptr_t>(source) % 16) emulator::fail("a copy out of line");
    emulator::under_way.push_back({target, bytes, barrier, source});
}

inline void fence_for_copies_and_products() {}
inline void __syncwarp() { emulator::exchange(0); }

inline float __shfl_xor_sync(u32, float value, int mask) {
    return __uint_as_float(emulator::exchange(__float_as_uint(value))[threadIdx.x % 32 ^ mask]);
}

inline u32 halves(float low, float high) { return emulator::to_half(low) | emulator::to_half(high) << 16; }
inline u32 bfloats(float low, float high) { return emulator::to_bfloat(low) | emulator::to_bfloat(high) << 16; }

inline u32 multiply_halves(u32 a, u32 b) {
    return halves(emulator::of_half(a) * emulator::of_half(b), emulator::of_half(a >> 16) * emulator::of_half(b >> 16));
}

inline u32 half_of_e4m3(u32 byte) {
    const u32 sign = (byte & 0x80) << 8, magnitude = byte & 0x7F;
    if (magnitude == 0x7F) return sign | 0x7FFF;
    const float value = magnitude < 8 ? std::ldexp(magnitude, -9) : std::ldexp(8 + magnitude % 8, static_cast<int>(magnitude / 8) - 10);
    return sign | emulator::to_half(value);
}

inline void widen_e4m3(u32 bytes, u32& low, u32& high) {
    low = half_of_e4m3(bytes & 0xFF) | half_of_e4m3(bytes >> 8 & 0xFF) << 16;
    high = half_of_e4m3(bytes >> 16 & 0xFF) | half_of_e4m3(bytes >> 24) << 16;
}

inline float exp2_fast(float x) { return std::exp2(x); }
inline float log2_fast(float x) { return std::log2(x); }

inline u32 tiles_start() { return 0; }

inline uint2 shared_load2(u32 address) { return {*shared_word(address), *shared_word(address + 4)}; }
inline float shared_load_float(u32 address) { return __uint_as_float(*shared_word(address)); }
inline float2 shared_load_floats(u32 address) { return {shared_load_float(address), shared_load_float(address + 4)}; }
inline void shared_store(u32 address, u32 value) { *shared_word(address) = value; }
inline void shared_store_float(u32 address, float value) { *shared_word(address) = __float_as_uint(value); }

inline void store_matrices(u32 address, const u32 (&fragment)[4]) {
    if (address % 16) emulator::fail("a matrix row out of line");
    const int lane = threadIdx.x % 32;
    u32 rows[32];
    std::memcpy(rows, emulator::exchange(address), sizeof rows);
    for (int i = 0; i < 4; ++i) *shared_word(rows[8 * i + lane / 4] + lane % 4 * 4) = fragment[i];
}

template <int REGISTERS>
void take_registers() {}
template <int REGISTERS>
void give_registers() {}

inline unsigned long long descriptor(u32 address, u32 tile_bytes) {
    const u32* all = emulator::exchange(address);
    for (int lane = 0; lane < 32; ++lane) {
        if (all[lane] != address) emulator::fail("lanes that differ in a descriptor");
    }
    const u32 lower = (address & 0x3FFFF) >> 4 | tile_bytes >> 4 << 16;
    return static_cast<unsigned long long>(1u << 30 | 1024 >> 4) << 32 | lower;
}

inline unsigned long long along_rows(u32 address) { return descriptor(address, 16); }
inline unsigned long long down_rows(u32 address, u32 tile_bytes) { return descriptor(address, tile_bytes); }

inline unsigned long long advance(unsigned long long start, u32 bytes) {
    return start & ~0xFFFFFFFFull | (static_cast<u32>(start) + (bytes >> 4));
}

inline void products_begin() { emulator::maybe_pause(); }

inline void products_commit() {
    auto& products = emulator::open[threadIdx.x];
    emulator::committed[threadIdx.x].push_back(std::move(products));
    products.clear();
}

template <int PENDING, int N>
void products_wait(float (&)[N]) {
    emulator::maybe_pause();
    emulator::wait_for_products(PENDING);
    emulator::exchange(0);  // a warp waits as a whole
}

inline void multiply_64(float (&d)[32], unsigned long long a, unsigned long long b, int add) {
    emulator::issue({d, 64, add != 0, false, a, b});
}

inline void multiply_256(float (&d)[128], unsigned long long a, unsigned long long b) {
    emulator::issue({d, 256, true, false, a, b});
}

inline void multiply_256(float (&d)[128], const u32 (&a)[4], unsigned long long b) {
    emulator::Product product = {d, 256, true, true, 0, b};
    for (int i = 0; i < 4; ++i) {
        const u32* all = emulator::exchange(a[i]);
        for (int k = 0; k < 8; ++k) {
            const u32 pair = all[threadIdx.x % 32 / 4 * 4 + k / 2];
            product.rows[i % 2][i / 2 * 8 + k] = emulator::of_half(k % 2 ? pair >> 16 : pair);
        }
    }
    emulator::issue(product);
}
