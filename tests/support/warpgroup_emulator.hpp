// What `warpgroups.cuh` has in assembly, on the host. Products run when they are issued, or not before somebody waits for
// them: what was freed, overwritten or read too early gives wrong results in one of the two.
#pragma once
#include "matrix_emulator.hpp"

#ifndef PRODUCT_OPERANDS
#define PRODUCT_OPERANDS "f16.f16"
#endif

namespace emulator {

inline float operand_value(u32 bits) { return PRODUCT_OPERANDS[0] == 'b' ? bf16_value(bits) : half_value(bits); }

struct Product {
    float* result;
    int columns;
    bool add, from_registers;
    unsigned long long a, b;
    float rows[2][16];  // of a in registers
    float (*widen)(u32) = operand_value;
};

inline std::vector<Product> open[BLOCK_SIZE];
inline std::vector<std::vector<Product>> committed[BLOCK_SIZE];
inline bool eager;

inline char* shared_byte(u32 address) { return reinterpret_cast<char*>(shared_word(address & ~3u)) + (address & 3); }

inline u32 element(u32 address) {
    // The exchange of 16-byte units depends on the address alone.
    unsigned short bits;
    std::memcpy(&bits, shared_byte(address ^ (address >> 7 & 7) << 4), 2);
    return bits;
}

struct Operand {
    u32 start, leading, stride;

    explicit Operand(unsigned long long descriptor) {
        if (descriptor >> 62 != 1 || descriptor >> 46 & 0xFFFF) fail("not a descriptor of tiles of 128-byte rows");
        start = (descriptor & 0x3FFF) << 4;
        leading = (descriptor >> 16 & 0x3FFF) << 4;
        stride = (descriptor >> 32 & 0x3FFF) << 4;
    }

    u32 along_rows(int row, int inner) const { return element(start + row / 8 * stride + row % 8 * 128 + inner * 2); }
    u32 down_rows(int inner, int column) const {
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
            for (int k = 0; k < 16; ++k) a[below][k] = product.widen(from.along_rows(row + 8 * below, k));
        }
    }
    const Operand from(product.b);
    const bool down = product.columns == 128;
    for (int i = 0; i < product.columns / 4; ++i) {
        const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        float* const upper = product.result + i / 2 * 4 + i % 2;
        float sums[2] = {0.0f, 0.0f};
        for (int k = 0; k < 16; ++k) {
            const float b = product.widen(down ? from.down_rows(k, column) : from.along_rows(column, k));
            sums[0] += a[0][k] * b;
            sums[1] += a[1][k] * b;
        }
        upper[0] = product.add ? upper[0] + sums[0] : sums[0];
        upper[2] = product.add ? upper[2] + sums[1] : sums[1];
    }
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

inline void start_block_of_products(u32 grid) {
    start_block(grid);
    for (int i = 0; i < BLOCK_SIZE; ++i) open[i].clear(), committed[i].clear();
    eager = random_order() % 2;
}

inline void check_finished() {
    for (int i = 0; i < BLOCK_SIZE; ++i) {
        if (!open[i].empty() || !committed[i].empty()) fail("a product is still under way");
    }
}

}  // namespace emulator

inline void fence_for_copies_and_products() {}
inline u32 tiles_start() { return 0; }

inline void store_matrices(u32 address, const u32 (&fragment)[4]) {
    if (address % 16) emulator::fail("a matrix row out of line");
    const int lane = threadIdx.x % 32;
    u32 rows[32];
    std::memcpy(rows, emulator::exchange(address), sizeof rows);
    for (int i = 0; i < 4; ++i) *shared_word(rows[8 * i + lane / 4] + lane % 4 * 4) = fragment[i];
}

inline void store_matrices_transposed(u32 address, const u32 (&fragment)[4]) {
    if (address % 16) emulator::fail("a matrix row out of line");
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

inline u32 uniform(u32 same) {
    const u32* all = emulator::exchange(same);
    for (int lane = 0; lane < 32; ++lane) {
        if (all[lane] != same) emulator::fail("lanes that differ in what should be the same");
    }
    return same;
}

inline unsigned long long descriptor(u32 address, u32 tile_bytes) {
    const u32 lower = uniform((address & 0x3FFFF) >> 4 | tile_bytes >> 4 << 16);
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

template <int PENDING, class Results>
void products_wait(Results&) {
    emulator::maybe_pause();
    emulator::wait_for_products(PENDING);
    emulator::exchange(0);  // a warp waits as a whole
}

template <int PENDING>
void products_wait() {
    int nothing;
    products_wait<PENDING>(nothing);
}

inline void multiply_64(float (&d)[32], unsigned long long a, unsigned long long b, int add) {
    emulator::issue({d, 64, add != 0, false, a, b});
}

inline void multiply_64_bf16(float (&d)[32], unsigned long long a, unsigned long long b, int add) {
    emulator::issue({d, 64, add != 0, false, a, b, {}, emulator::bf16_value});
}

inline void multiply_128(float (&d)[64], unsigned long long a, unsigned long long b) {
    emulator::issue({d, 128, true, false, a, b});
}

namespace emulator {

inline void issue(Product product, const u32 (&a)[4]) {
    for (int i = 0; i < 4; ++i) {
        const u32* all = exchange(a[i]);
        for (int k = 0; k < 8; ++k) {
            const u32 pair = all[threadIdx.x % 32 / 4 * 4 + k / 2];
            product.rows[i % 2][i / 2 * 8 + k] = product.widen(k % 2 ? pair >> 16 : pair & 0xFFFF);
        }
    }
    issue(product);
}

}  // namespace emulator

inline void multiply_128(float (&d)[64], const u32 (&a)[4], unsigned long long b) {
    emulator::issue({d, 128, true, true, 0, b}, a);
}

template <int N>
void multiply_narrow_half(float (&d)[N], const u32 (&a)[4], unsigned long long b, int add) {
    emulator::issue({d, 2 * N, add != 0, true, 0, b}, a);
}

template <int N>
void multiply_narrow_bf16(float (&d)[N], const u32 (&a)[4], unsigned long long b, int add) {
    emulator::issue({d, 2 * N, add != 0, true, 0, b, {}, emulator::bf16_value}, a);
}
