// `warpgroups.cuh` on the host. The products of a CTA run either all when they are issued, or all not before their thread
// waits for them. If operands are overwritten or accumulators read too early, one of the two gives wrong results.
#pragma once
#include "matrix_emulator.hpp"

#define TAMIS_WARPGROUPS
#include "tiles.cuh"

namespace emulator {

template <Operand TYPE>
float operand_value(u32 bits) {
    return TYPE == BF16 ? bf16_value(bits) : fp16_value(bits);
}

// One thread's share of a wgmma.
struct Product {
    float* result;            // the thread's accumulators
    int columns;              // N
    bool add;                 // to the accumulators, or overwrite them
    bool from_registers;      // whether a is a fragment in registers
    unsigned long long a, b;  // descriptors
    float (*value)(u32);      // converts an element of an operand
    float rows[2][32];        // the thread's two rows of a, if it is in registers
    int depth = 16;           // K
    int bytes = 2;            // of an element
    bool b_is_mn_major = false, a_is_mn_major = false;
};

// The products of each thread that are not committed yet, and the committed groups. `eager`: products run when issued.

inline std::vector<Product> uncommitted[CLUSTER_THREADS];
inline std::vector<std::vector<Product>> committed[CLUSTER_THREADS];
inline bool eager;

// The element at an address before swizzling. The swizzle depends on the address alone.
inline u32 element(u32 address, int bytes = 2) {
    u32 bits = 0;
    std::memcpy(&bits, shared_byte(address ^ (address >> 7 & 7) << 4), bytes);
    return bits;
}

// An operand in shared memory, as its descriptor says.
struct TileOperand {
    u32 start, leading, stride;

    explicit TileOperand(unsigned long long descriptor) {
        if (descriptor >> 62 != 1 || descriptor >> 46 & 0xFFFF) fail("the descriptor is not one of tiles in the 128-byte swizzle");
        start = ((descriptor & 0x3FFF) << 4) + current->cta->rank * RANK_UNIT;  // a product reads its own CTA's memory
        leading = (descriptor >> 16 & 0x3FFF) << 4;
        stride = (descriptor >> 32 & 0x3FFF) << 4;
    }

    // Addresses before swizzling.
    u32 k_major_address(int row, int inner, int bytes) const {
        return start + row / 8 * stride + row % 8 * 128 + inner * bytes;
    }
    u32 mn_major_address(int inner, int column) const {
        return start + column / 64 * leading + inner / 8 * stride + inner % 8 * 128 + column % 64 * 2;
    }

    u32 k_major(int row, int inner, int bytes = 2) const { return element(k_major_address(row, inner, bytes), bytes); }
    u32 mn_major(int inner, int column) const { return element(mn_major_address(inner, column)); }

    // Tells the race detector that rows or columns [begin, end) of an operand with `depth` elements each are read.
    void read(int begin, int end, int depth, int bytes, bool is_mn_major) const {
        const auto read_unit = [](u32 address) {
            races::product_reads(shared_word((address ^ (address >> 7 & 7) << 4) & ~15u), 16);
        };
        const int unit = 16 / bytes;
        if (is_mn_major) {
            for (int k = 0; k < depth; ++k) {
                for (int at = begin; at < end; at += unit) read_unit(mn_major_address(k, at));
            }
        } else {
            for (int at = begin; at < end; ++at) {
                for (int k = 0; k < depth; k += unit) read_unit(k_major_address(at, k, bytes));
            }
        }
    }
};

// A warp reads its 16 rows of a and all of b. Its first lane records that.
inline void record_reads(const Product& product) {
    if (current->thread_index.x % 32) return;
    const int row = current->thread_index.x / 32 % 4 * 16;
    if (!product.from_registers) {
        TileOperand(product.a).read(row, row + 16, product.depth, product.bytes, product.a_is_mn_major);
    }
    TileOperand(product.b).read(0, product.columns, product.depth, product.bytes, product.b_is_mn_major);
}

inline void run(const Product& product) {
    const races::Hidden hidden;
    const int lane = current->thread_index.x % 32, row = current->thread_index.x / 32 % 4 * 16 + lane / 4;
    float a[2][32];
    std::memcpy(a, product.rows, sizeof a);
    if (!product.from_registers) {
        const TileOperand from(product.a);
        for (int below = 0; below < 2; ++below) {
            for (int k = 0; k < product.depth; ++k) {
                const int m = row + 8 * below;
                a[below][k] = product.value(product.a_is_mn_major ? from.mn_major(k, m) : from.k_major(m, k, product.bytes));
            }
        }
    }
    const TileOperand from(product.b);
    for (int i = 0; i < product.columns / 4; ++i) {
        const int column = i / 2 * 8 + lane % 4 * 2 + i % 2;
        float* const upper = product.result + i / 2 * 4 + i % 2;
        float sums[2] = {0.0f, 0.0f};
        for (int k = 0; k < product.depth; ++k) {
            const float b = product.value(
                product.b_is_mn_major ? from.mn_major(k, column) : from.k_major(column, k, product.bytes));
            sums[0] += a[0][k] * b;
            sums[1] += a[1][k] * b;
        }
        upper[0] = product.add ? upper[0] + sums[0] : sums[0];
        upper[2] = product.add ? upper[2] + sums[1] : sums[1];
    }
}

inline void issue(const Product& product) {
    if (races::WANTED) record_reads(product);
    if (eager) run(product);
    else uncommitted[thread_in_cluster()].push_back(product);
}

inline void wait_for_products(size_t pending) {
    auto& groups = committed[thread_in_cluster()];
    while (groups.size() > pending) {
        for (const Product& product : groups.front()) run(product);
        groups.erase(groups.begin());
    }
}

// As `start_cta`, for kernels with wgmma.
inline void start_wgmma_cta(u32 grid) {
    start_cta(grid);
    for (int i = 0; i < CLUSTER_THREADS; ++i) uncommitted[i].clear(), committed[i].clear();
    eager = random_order() % 2;
}

inline void check_finished() {
    for (int i = 0; i < CLUSTER_THREADS; ++i) {
        if (!uncommitted[i].empty() || !committed[i].empty()) fail("a wgmma is still in flight");
    }
}

}  // namespace emulator

inline u32 tile_memory() { return cluster_rank() * RANK_UNIT; }

inline void wgmma_fence() { emulator::maybe_pause(); }

inline void wgmma_commit() {
    auto& products = emulator::uncommitted[emulator::thread_in_cluster()];
    emulator::committed[emulator::thread_in_cluster()].push_back(std::move(products));
    products.clear();
    races::commit_products();
}

template <int PENDING, class Results>
void wgmma_wait(Results&) {
    emulator::maybe_pause();
    emulator::wait_for_products(PENDING);
    races::wait_for_products(PENDING);
    // A warp waits as one, with what its lanes have read in registers: one lane may then arrive at a barrier for all of them.
    emulator::exchange(0, emulator::ORDERS);
}

template <int PENDING>
void wgmma_wait() {
    int nothing;
    wgmma_wait<PENDING>(nothing);
}

template <Operand TYPE, int N>
void wgmma_ss(float (&d)[N], unsigned long long a, unsigned long long b, int accumulate) {
    emulator::issue({d, 2 * N, accumulate != 0, false, a, b, emulator::operand_value<TYPE>});
}

template <Operand TYPE, int N>
void wgmma_ss_k_mn(float (&d)[N], unsigned long long a, unsigned long long b, int accumulate) {
    emulator::Product product = {d, 2 * N, accumulate != 0, false, a, b, emulator::operand_value<TYPE>};
    product.b_is_mn_major = true;
    emulator::issue(product);
}

template <Operand TYPE, int N>
void wgmma_ss_mn_mn(float (&d)[N], unsigned long long a, unsigned long long b) {
    emulator::Product product = {d, 2 * N, true, false, a, b, emulator::operand_value<TYPE>};
    product.b_is_mn_major = product.a_is_mn_major = true;
    emulator::issue(product);
}

template <Operand TYPE>
void wgmma_ss(float (&d)[64], unsigned long long a, unsigned long long b) {
    emulator::Product product = {d, 128, true, false, a, b, emulator::operand_value<TYPE>};
    product.b_is_mn_major = true;
    emulator::issue(product);
}

template <Operand TYPE, int N>
void wgmma_rs(float (&d)[N], const u32 (&a)[4], unsigned long long b, int accumulate, bool b_is_mn_major = false) {
    emulator::Product product = {d, 2 * N, accumulate != 0, true, 0, b, emulator::operand_value<TYPE>};
    product.b_is_mn_major = b_is_mn_major;
    for (int i = 0; i < 4; ++i) {
        const u32* all = emulator::exchange(a[i]);
        for (int k = 0; k < 8; ++k) {
            const u32 pair = all[threadIdx.x % 32 / 4 * 4 + k / 2];
            product.rows[i % 2][i / 2 * 8 + k] = product.value(k % 2 ? pair >> 16 : pair & 0xFFFF);
        }
    }
    emulator::issue(product);
}

template <Operand TYPE>
void wgmma_rs(float (&d)[64], const u32 (&a)[4], unsigned long long b) {
    wgmma_rs<TYPE>(d, a, b, 1, true);
}

namespace emulator {

inline float e4m3_value(u32 code) {
    static const std::vector<float> values = [] {
        std::vector<float> all;
        for (u32 each = 0; each < 256; ++each) all.push_back(fp16_value(e4m3_to_fp16(each)));
        return all;
    }();
    return values[code];
}

}  // namespace emulator

template <int N>
void wgmma_ss_e4m3(float (&d)[N], unsigned long long a, unsigned long long b, int accumulate) {
    emulator::Product product = {d, 2 * N, accumulate != 0, false, a, b, emulator::e4m3_value};
    product.depth = 32;
    product.bytes = 1;
    emulator::issue(product);
}
