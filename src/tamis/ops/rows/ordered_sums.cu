// Adds up the contributions of pairs of token and row to the rows' gradients, in the order of tokens and columns.
//
// `row_gradients.cuh` stores the pairs of some tokens at a time as fp16 numbers with scales. A sort has listed the pairs of every
// row in order; a CTA continues the list of one row up to the last pair that is stored, eight columns per thread. Sums are
// those of `torch_rows.RowSums`: blocks of 256 pairs one after the other, then the blocks. Additions wait for each other, but
// the loads of eight pairs do not.
//
// Defined by the host: WIDTH, VALUES (columns that have a scale for every 64; those after them have one for every 32), PARTS
// (summands of a pair), THREADS, PARAMS_BYTES.
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
constexpr int BLOCK_PAIRS = 256, UNROLLED = 8, COLUMNS = 8;

// Eight sums of a thread.
struct Sums {
    float numbers[COLUMNS];

    __device__ __forceinline__ void load(const float* from) {
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 4) {
            const float4 four = *reinterpret_cast<const float4*>(from + i);
            numbers[i] = four.x, numbers[i + 1] = four.y, numbers[i + 2] = four.z, numbers[i + 3] = four.w;
        }
    }
    __device__ __forceinline__ void store(float* to) const {
#pragma unroll
        for (int i = 0; i < COLUMNS; i += 4) {
            *reinterpret_cast<float4*>(to + i) = make_float4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]);
        }
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) ordered_sums(const __grid_constant__ SumParams given) {
    const int row = blockIdx.x, column = threadIdx.x * COLUMNS;
    const long long end = given.ends[row];
    long long at = given.cursors[row];
    int count = given.counts[row];
    __syncthreads();  // the first thread writes these numbers at the end
    if (at >= end || given.order[at] >= given.last_pair || column >= WIDTH) return;
    const int group = column < VALUES ? column / 64 : VALUES / 64 + (column - VALUES) / 32;
    const long long place = static_cast<long long>(row) * WIDTH + column;
    Sums total, block;
    total.load(given.total + place);
    block.load(given.block + place);
    // Numbers of the next pairs, counted from the first stored one; NONE after the last. They are loaded while the numbers
    // before them are used, since the address of a pair depends on its number.
    constexpr int NONE = -1;
    const auto pair_at = [&](long long place_in_list) -> int {
        if (place_in_list >= end) return NONE;
        const long long pair = given.order[place_in_list];
        return pair < given.last_pair ? static_cast<int>(pair - given.first_pair) : NONE;
    };
    int next[UNROLLED];
#pragma unroll
    for (int i = 0; i < UNROLLED; ++i) next[i] = pair_at(at + i);
    bool more = true;
    while (more) {
        uint4 words[UNROLLED][PARTS];
        float scales[UNROLLED][PARTS];
        bool here[UNROLLED];
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            here[i] = next[i] != NONE;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const long long number = static_cast<long long>(next[i]) * PARTS + part;
                if (here[i]) {
                    words[i][part] = *reinterpret_cast<const uint4*>(given.pairs + number * WIDTH + column);
                    scales[i][part] = given.scales[number * SCALES + group];
                }
            }
        }
        more = here[UNROLLED - 1];
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) next[i] = more ? pair_at(at + UNROLLED + i) : NONE;
#pragma unroll
        for (int i = 0; i < UNROLLED; ++i) {
            if (!here[i]) continue;
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                float2 sum = {0.0f, 0.0f};
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    const uint4& of = words[i][part];
                    const float2 two = unpack_fp16(word == 0 ? of.x : word == 1 ? of.y : word == 2 ? of.z : of.w);
                    sum.x += two.x * scales[i][part];
                    sum.y += two.y * scales[i][part];
                }
                block.numbers[2 * word] += sum.x;
                block.numbers[2 * word + 1] += sum.y;
            }
            if (++count % BLOCK_PAIRS == 0) {
#pragma unroll
                for (int k = 0; k < COLUMNS; ++k) {
                    total.numbers[k] += block.numbers[k];
                    block.numbers[k] = 0.0f;
                }
            }
            ++at;
        }
    }
    total.store(given.total + place);
    block.store(given.block + place);
    if (threadIdx.x == 0) {
        given.cursors[row] = at;
        given.counts[row] = count;
    }
}
