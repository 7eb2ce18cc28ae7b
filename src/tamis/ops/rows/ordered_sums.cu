// Adds up the contributions of pairs of token and row to the rows' gradients, in the order of tokens and columns.
//
// `row_gradients.cuh` stores the pairs of some tokens at a time as fp16 numbers with scales. A sort has listed the pairs of every
// row in order; a CTA continues the list of one row up to the last pair that is stored, eight columns per thread. Sums are
// those of `torch_rows.RowSums`: blocks of 256 pairs one after the other, then the blocks.
//
// Additions wait for each other, loads do not: each thread copies its columns of the next PAIRS pairs into its own part of shared
// memory, and waits only for the oldest of its copies. All that is read once comes from memory: what counts is bytes in flight,
// here 18 KB for a CTA at 576 columns, and seven CTAs on an SM.
//
// Defined by the host: WIDTH, VALUES (columns that have a scale for every 64; those after them have one for every 32), PARTS
// (summands of a pair), PAIRS, THREADS, SHARED_BYTES, PARAMS_BYTES.
#include "instructions.cuh"

struct SumParams {
    const unsigned short* pairs;  // [pairs, PARTS, WIDTH], fp16
    const float* scales;          // [pairs, PARTS, SCALES]
    const long long* order;       // [listed pairs], numbers of pairs, each row's in ascending order
    const long long* ends;        // [N], where the list of a row ends
    long long* cursors;           // [N], where it continues
    int* counts;                  // [N], pairs that have been added
    float* total;                 // [N, WIDTH], sums of whole blocks
    float* block;                 // [N, WIDTH], the sum of the last block
    long long first_pair;         // the number of the first stored pair
    long long last_pair;          // one past that of the last
};

static_assert(sizeof(SumParams) == PARAMS_BYTES, "SumParams differs from its twin in ordered_sums.py");

constexpr int SCALES = VALUES / 64 + (WIDTH - VALUES) / 32;
constexpr int BLOCK_PAIRS = 256, COLUMNS = 8;
constexpr int TOGETHER = 4;           // pairs whose copies are one group
constexpr int GROUPS = PAIRS / TOGETHER;
constexpr int NONE = -1;              // no pair
constexpr u32 PART_BYTES = THREADS * 16, SCALE_BYTES = THREADS * 4;
constexpr u32 NUMBERS = 0;                                         // [PAIRS][PARTS][THREADS][COLUMNS] fp16
constexpr u32 FACTORS = NUMBERS + PAIRS * PARTS * PART_BYTES;      // [PAIRS][PARTS][THREADS] float32: their scales
static_assert(FACTORS + PAIRS * PARTS * SCALE_BYTES == SHARED_BYTES, "shared memory is not as the host says");
static_assert(PAIRS % TOGETHER == 0 && PAIRS <= 32, "copies are issued at most 32 pairs ahead");

// Eight sums of a thread. Their columns are those that a lane has in `row_gradients.cuh`: two of every eight.
struct Sums {
    float numbers[COLUMNS];

    __device__ __forceinline__ void load(const float* from) {
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 2) {
            const float2 two = *reinterpret_cast<const float2*>(from + i * 4);
            numbers[i] = two.x, numbers[i + 1] = two.y;
        }
    }
    __device__ __forceinline__ void store(float* to) const {
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 2) *reinterpret_cast<float2*>(to + i * 4) = {numbers[i], numbers[i + 1]};
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) ordered_sums(const __grid_constant__ SumParams given) {
    const int row = blockIdx.x, lane = threadIdx.x % 32;
    const long long start = given.cursors[row], end = given.ends[row];
    int count = given.counts[row];
    // Lane i has the number of the pair i places further in the list, counted from the first stored one.
    const auto pairs_at = [&](long long place) -> int {
        if (place + lane >= end) return NONE;
        const long long pair = given.order[place + lane];
        return pair < given.last_pair ? static_cast<int>(pair - given.first_pair) : NONE;
    };
    int listed = NONE, next = pairs_at(start);
    __syncthreads();  // the first thread writes what has been read, at the end
    if (__shfl_sync(FULL_MASK, next, 0) == NONE) return;
    const bool inside = threadIdx.x * COLUMNS < WIDTH;
    const int column = min(static_cast<int>(threadIdx.x) * COLUMNS, WIDTH - COLUMNS);
    const int group = column < VALUES ? column / 64 : VALUES / 64 + (column - VALUES) / 32;
    const long long place = static_cast<long long>(row) * WIDTH + column / 32 * 32 + column / COLUMNS % 4 * 2;
    Sums block;
    block.load(given.block + place);
    const u32 memory = shared_address(shared_memory());
    const u32 numbers = memory + NUMBERS + threadIdx.x * 16, factors = memory + FACTORS + threadIdx.x * 4;
    int issued = 0, known = 0;  // pairs; that are known to exist
    // Starts the copies of the next TOGETHER pairs.
    const auto copy = [&] {
        if (issued % 32 == 0) {
            listed = next;
            known += __popc(__ballot_sync(FULL_MASK, listed != NONE));
            next = pairs_at(start + issued + 32);
        }
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            const int pair = __shfl_sync(FULL_MASK, listed, issued % 32 + i), slot = (issued + i) % PAIRS;
            if (pair == NONE || !inside) continue;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const long long number = static_cast<long long>(pair) * PARTS + part;
                const u32 at = slot * PARTS + part;
                cp_async_zfill<16>(numbers + at * PART_BYTES, given.pairs + number * WIDTH + column, true);
                cp_async_zfill<4>(factors + at * SCALE_BYTES, given.scales + number * SCALES + group, true);
            }
        }
        issued += TOGETHER;
        cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < GROUPS - 1; ++i) copy();
    int added = 0;
    do {
        copy();
        cp_async_wait<GROUPS - 1>();
#pragma unroll
        for (int i = 0; i < TOGETHER; ++i) {
            if (added + i >= known) break;
            const u32 slot = (added + i) % PAIRS;
            uint4 words[PARTS];
            float scales[PARTS];
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                words[part] = shared_load4(numbers + (slot * PARTS + part) * PART_BYTES);
                scales[part] = __uint_as_float(shared_load(factors + (slot * PARTS + part) * SCALE_BYTES));
            }
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                float2 sum = {0.0f, 0.0f};
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const uint4& of = words[part];
                    const float2 two = unpack_fp16(word == 0 ? of.x : word == 1 ? of.y : word == 2 ? of.z : of.w);
                    sum.x += two.x * scales[part];
                    sum.y += two.y * scales[part];
                }
                block.numbers[2 * word] += sum.x;
                block.numbers[2 * word + 1] += sum.y;
            }
            if (++count % BLOCK_PAIRS == 0 && inside) {
                Sums total;
                total.load(given.total + place);
#pragma unroll
                for (int k = 0; k < COLUMNS; ++k) {
                    total.numbers[k] += block.numbers[k];
                    block.numbers[k] = 0.0f;
                }
                total.store(given.total + place);
            }
        }
        added += TOGETHER;
    } while (added < known);
    cp_async_wait<0>();
    if (!inside) return;
    block.store(given.block + place);
    if (threadIdx.x == 0) {
        given.cursors[row] = start + known;
        given.counts[row] = count;
    }
}
