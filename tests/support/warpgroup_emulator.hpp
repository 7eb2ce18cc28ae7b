// `warpgroups.cuh` on the host. In a CTA, products run either when they are issued or not before somebody waits for them:
// operands that are overwritten, or accumulators that are read, too early give wrong results in one of the two.
#pragma once
#include "matrix_emulator.hpp"

#define TAMIS_WARPGROUPS
#include "tiles.cuh"

namespace emulator {

template <Operand TYPE>
float operand_value(u32 bits) {
    return TYPE == BF16 ? bf16_value(bits) : half_value(bits);
}

struct Product {
    float* result;
    int columns;
    bool add, from_registers;
    unsigned long long a, b;
    float (*value)(u32);  // of an element of an operand
    float rows[2][16];    // of a in registers
};

inline std::vector<Product> open[BLOCK_SIZE];
inline std::vector<std::vector<Product>> committed[BLOCK_SIZE];
inline bool eager;

inline u32 element(u32 address) {
    // The swizzle depends on the address alone.
    unsigned short bits;
    std::memcpy(&bits, shared_byte(address ^ (address >> 7 & 7) << 4), 2);
    return bits;
}

struct TileOperand {
    u32 start, leading, stride;

    explicit TileOperand(unsigned long long descriptor) {
        if (descriptor >> 62 != 1 || descriptor >> 46 & 0xFFFF) fail("not a descriptor of tiles in the 128-byte swizzle");
        start = (descriptor & 0x3FFF) << 4;
        leading = (descriptor >> 16 & 0x3FFF) << 4;
        stride = (descriptor >> 32 & 0x3FFF) << 4;
    }

    u32 k_major(int row, int inner) const { return element(start + row / 8 * stride + row % 8 * 128 + inner * 2); }
    u32 mn_major(int inner, int column) const {
        return element(start + column / 64 * leading + inner / 8 * stride + inner % 8 * 128 + column % 64 * 2);
    }
};

inline void run(const Product& product) {
    const int lane = current->thread_index.x % 32, row = current->thread_index.x / 32 % 4 * 16 + lane / 4;
    float a[2][16];
    std::memcpy(a, product.rows, sizeof a);
    if (!product.from_registers) {
        const TileOperand from(product.a);
        for (int below = 0; below < 2; ++below) {
            for (int k = 0; k < 16; ++k) a[below][k] = product.value(from.k_major(row + 8 * below, k));
        }
    }
    const TileOperand from(product.b);
    const bool down = product.columns == 128;
    for (int i = 0; i < product.columns / 4; ++i) {
        const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        float* const upper = product.result + i / 2 * 4 + i % 2;
        float sums[2] = {0.0f, 0.0f};
        for (int k = 0; k < 16; ++k) {
            const float b = product.value(down ? from.mn_major(k, column) : from.k_major(column, k));
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
        if (!open[i].empty() || !committed[i].empty()) fail("a wgmma is still in flight");
    }
}

}  // namespace emulator

inline u32 tile_memory() { return 0; }

inline void wgmma_fence() { emulator::maybe_pause(); }

inline void wgmma_commit() {
    auto& products = emulator::open[threadIdx.x];
    emulator::committed[threadIdx.x].push_back(std::move(products));
    products.clear();
}

template <int PENDING, class Results>
void wgmma_wait(Results&) {
    emulator::maybe_pause();
    emulator::wait_for_products(PENDING);
    emulator::exchange(0);  // a warp waits as a whole
}

template <int PENDING>
void wgmma_wait() {
    int nothing;
    wgmma_wait<PENDING>(nothing);
}

template <Operand TYPE>
void wgmma_ss(float (&d)[32], unsigned long long a, unsigned long long b, int accumulate) {
    emulator::issue({d, 64, accumulate != 0, false, a, b, emulator::operand_value<TYPE>});
}

template <Operand TYPE>
void wgmma_ss(float (&d)[64], unsigned long long a, unsigned long long b) {
    emulator::issue({d, 128, true, false, a, b, emulator::operand_value<TYPE>});
}

template <Operand TYPE, int N>
void wgmma_rs(float (&d)[N], const u32 (&a)[4], unsigned long long b, int accumulate = 1) {
    emulator::Product product = {d, 2 * N, accumulate != 0, true, 0, b, emulator::operand_value<TYPE>};
    for (int i = 0; i < 4; ++i) {
        const u32* all = emulator::exchange(a[i]);
        for (int k = 0; k < 8; ++k) {
            const u32 pair = all[threadIdx.x % 32 / 4 * 4 + k / 2];
            product.rows[i % 2][i / 2 * 8 + k] = product.value(k % 2 ? pair >> 16 : pair & 0xFFFF);
        }
    }
    emulator::issue(product);
}
