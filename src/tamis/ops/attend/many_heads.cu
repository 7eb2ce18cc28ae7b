// Sparse attention of 64 heads at a time over FP8 rows, on Hopper: one block per (query token, 64 heads, part).
//
// Three groups of four warps. `dequantise` brings rows by bulk copies into a ring, widens them to fp16 and hands them
// over in halves: first the columns from 256 on, whose bytes lie beside the scales, so that one copy brings all that
// they need, then those before. `score` multiplies queries with both halves, does the softmax, publishes the weights and
// multiplies them, from its registers, with the first half. `weigh` multiplies them with the second half.
//
// Numbers. A row is held as fp16 times 2**E, E from the largest of its scales and of its 16-bit columns, so that its
// largest values lie just below fp16's largest; every e4m3 value times a power of two is exact down to 2**-30 of that.
// The products with queries (fp16 times a power of two per head) are exact in float32, times 2**E they are logits.
// Weights carry 2**(E - reference) into the product with values, the reference being the largest E so far: the product
// weight * 2**E is what decides how much a row matters to the output, and fp16 holds it down to 2**-34 of the largest.
//
// Constants: V4 (rows of 448 e4m3 + 64 bf16 with exponent bytes in a plane of their own, all values; otherwise 512 e4m3,
// four float32 scales, 64 bf16, the first 512 values), HALVES (buffers for halves: 2 or 3), RING (blocks of raw rows in
// shared memory), LAG (weights are handed over one block late, so that `weigh` multiplies under the next softmax).
#include "instructions.cuh"
#include "warpgroups.cuh"

// ---- Shapes

constexpr int HEADS = 64;   // of a block
constexpr int TOKENS = 64;  // selected rows that are worked on at a time
constexpr int OWN = 16;     // of these, those of one warp of `dequantise`
constexpr int WARPS = 4;    // of a group

constexpr int WIDTH = V4 ? 512 : 576, VALUES = 512, TILES = WIDTH / 64;
constexpr int LATENT = V4 ? 448 : 512;
constexpr int ROW_BYTES = V4 ? 576 : 656;  // of a row without exponent bytes
constexpr int SECOND_BYTES = 256;  // of a row: what the second half of the columns needs alone
constexpr int SCALES_AT = V4 ? 576 : 512, ROPE_AT = V4 ? 448 : 528;
constexpr int RAW_BYTES = V4 ? 592 : 656;  // of a row in the ring: four rows are 64 mod 128 bytes, which spreads banks

constexpr u32 TILE_BYTES = 64 * 128, HALF_BYTES = 4 * TILE_BYTES;
constexpr int LEFTOVERS = HALVES - 1;  // buffers for the columns beyond 512, on which the weights are then written

// ---- Shared memory

constexpr u32 QUERIES = 0;
constexpr u32 HALF = QUERIES + TILES * TILE_BYTES;
constexpr u32 LEFTOVER = HALF + HALVES * HALF_BYTES;
constexpr u32 RAW = LEFTOVER + LEFTOVERS * TILE_BYTES;
constexpr u32 FACTOR = RAW + RING * TOKENS * RAW_BYTES;       // [LEFTOVERS][TOKENS] 2**E; negative: no row
constexpr u32 RESCALE = FACTOR + LEFTOVERS * TOKENS * 4;      // [LEFTOVERS][HEADS] of the output so far
constexpr u32 PER_HEAD = RESCALE + LEFTOVERS * HEADS * 4;     // [HEADS] scales of queries, at the end of the output
constexpr u32 FLAGS = PER_HEAD + HEADS * 4;                   // [RING][WARPS] which rows are there; which are odd
constexpr u32 RAW_READY = FLAGS + RING * WARPS * 4;           // [RING][WARPS][2] barriers
constexpr u32 HALF_READY = RAW_READY + RING * WARPS * 16;     // [HALVES]
constexpr u32 HALF_FREE = HALF_READY + HALVES * 8;            // [HALVES]
constexpr u32 WEIGHTS_READY = HALF_FREE + HALVES * 8;         // [LEFTOVERS]
constexpr u32 FINISHED = WEIGHTS_READY + LEFTOVERS * 8;
constexpr u32 USED = FINISHED + 8;
static_assert(USED <= SHARED_BYTES && RAW % 128 == 0 && RAW_READY % 8 == 0, "shared memory");
static_assert(HALVES == 3 || (HALVES == 2 && !LAG), "with two halves the second is needed for the next block");

// Named barriers.
constexpr u32 SCORING = 1, CONSUMERS = 2;

// ---- Arithmetic

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
// fp16 ends at 2**16. Rows: e4m3 ends at 448, so a scale below 2**7 fits; a bf16 below 2**16 does as it is.
constexpr int SCALE_EXPONENT = 6, VALUE_EXPONENT = 15, QUERY_EXPONENT = 14;
constexpr int LOWEST_EXPONENT = 127 - 60;  // of a row, with float32's bias: below 2**-44 all is zero
// Weights: a maximum is raised only when logits exceed it by more than LEEWAY; 2**(LEEWAY + HEADROOM) stays in fp16.
constexpr float LEEWAY = 4.0f, HEADROOM = 1024.0f;
constexpr float SPARE = 4.0f;  // by how much a raised reference exceeds the rows that raised it

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }
__device__ __forceinline__ float power_of_two(int biased) { return __uint_as_float(static_cast<u32>(biased) << 23); }
__device__ __forceinline__ int biased_exponent(float x) { return __float_as_uint(x) >> 23 & 0xFF; }
__device__ __forceinline__ float low_bfloat(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bfloat(u32 pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// Where a 16-byte unit of a row lies in a tile.
__device__ __forceinline__ u32 in_tile(int row, int unit) { return row * 128 + ((unit ^ (row & 7)) << 4); }

// ---- What to attend to

struct Selection {
    const unsigned char* pages;
    long long page_stride;
    int page_size, rows;
    const int* slots;  // of the query token
    long long column_stride;
    int length;
    const int* table;  // of the token's request; null: slots are no positions
    int table_width;
};

struct Work {
    Selection first, second;
    int first_blocks;
    int begin, end;  // blocks of this part
};

// Follows one column of every block: the slot two blocks ahead, its page one block ahead.
struct Follower {
    const Work& work;
    int column;  // within a block; negative: none
    int block;   // whose slot is `slot`
    int slot = -1, page = -1, within = 0;
    bool in_second = false, page_in_second = false;

    __device__ __forceinline__ Follower(const Work& work, int column)
        : work(work), column(column), block(work.begin - 1) {
        load_slot();
        find_page();
    }

    __device__ __forceinline__ void load_slot() {
        ++block;
        slot = -1;
        in_second = block >= work.first_blocks;
        const int at = (block - (in_second ? work.first_blocks : 0)) * TOKENS + column;
        if (column < 0 || block >= work.end) return;
        if (!in_second && at < work.first.length) slot = work.first.slots[at * work.first.column_stride];
        if (in_second && at < work.second.length) slot = work.second.slots[at * work.second.column_stride];
    }

    __device__ __forceinline__ void find_page() {
        page_in_second = in_second;
        page = -1;
        if (slot >= 0) {
            const int size = in_second ? work.second.page_size : work.first.page_size;
            const int width = in_second ? work.second.table_width : work.first.table_width;
            const int* const table = in_second ? work.second.table : work.first.table;
            page = slot / size;
            within = slot - page * size;
            if (table != nullptr) page = page < width ? table[page] : -1;
        }
        load_slot();
    }

    // Of the next block, and its exponents; null where there is no row.
    __device__ __forceinline__ const unsigned char* next(const unsigned char*& exponents) {
        const int size = page_in_second ? work.second.page_size : work.first.page_size;
        const int rows = page_in_second ? work.second.rows : work.first.rows;
        const long long stride = page_in_second ? work.second.page_stride : work.first.page_stride;
        const bool there = page >= 0 && static_cast<long long>(page) * size + within < rows;
        const unsigned char* start = (page_in_second ? work.second.pages : work.first.pages) + page * stride;
        const unsigned char* row = there ? start + within * static_cast<long long>(ROW_BYTES) : nullptr;
        exponents = start + size * static_cast<long long>(ROW_BYTES) + within * 8ll;
        find_page();
        return row;
    }
};

// ---- Rows to tiles

struct Ring {
    u32 memory;
    int warp, lane;
    Follower follower;
    const unsigned char* row = nullptr;
    const unsigned char* exponents = nullptr;
    u32 present = 0;

    __device__ __forceinline__ u32 raw(int stage) const { return memory + RAW + (stage * TOKENS + warp * OWN) * RAW_BYTES; }
    __device__ __forceinline__ u32 flags(int stage) const { return memory + FLAGS + (stage * WARPS + warp) * 4; }
    __device__ __forceinline__ u32 ready(int stage, int piece) const {
        return memory + RAW_READY + (stage * WARPS + warp) * 16 + piece * 8;
    }

    // Rows that are not there become zeros: what the products would find there could be NaN.
    __device__ __forceinline__ void clear(int stage, u32 start, u32 bytes) const {
        for (u32 absent = ~present & 0xFFFF; absent; absent &= absent - 1) {
            const u32 target = raw(stage) + (__ffs(absent) - 1) * RAW_BYTES + start;
            for (u32 at = lane * 16; at < bytes; at += 32 * 16) shared_store4(target + at, make_uint4(0, 0, 0, 0));
        }
        __syncwarp();  // no barrier counts these stores
    }

    __device__ __forceinline__ void fetch_first(int stage) {
        row = follower.next(exponents);
        present = __ballot_sync(EVERY_LANE, row != nullptr);
        const u32 odd = __ballot_sync(EVERY_LANE, V4 && row != nullptr && reinterpret_cast<unsigned long long>(exponents) & 8);
        if (lane == 0) {
            shared_store(flags(stage), present | odd << 16);
            barrier_arrive_expecting(ready(stage, 0), __popc(present) * (RAW_BYTES - SECOND_BYTES));
        }
        __syncwarp();
        if (row != nullptr) {
            const u32 target = raw(stage) + lane * RAW_BYTES;
            bulk_copy(target + SECOND_BYTES, row + SECOND_BYTES, ROW_BYTES - SECOND_BYTES, ready(stage, 0));
            // Two rows' exponents, as copies are aligned to 16 bytes.
            const auto pair = reinterpret_cast<const unsigned char*>(reinterpret_cast<unsigned long long>(exponents) & ~8ull);
            if (V4) bulk_copy(target + SCALES_AT, pair, 16, ready(stage, 0));
        }
        clear(stage, SECOND_BYTES, RAW_BYTES - SECOND_BYTES);
    }

    __device__ __forceinline__ void fetch_second(int stage) {
        if (lane == 0) barrier_arrive_expecting(ready(stage, 1), __popc(present) * SECOND_BYTES);
        __syncwarp();
        if (row != nullptr) bulk_copy(raw(stage) + lane * RAW_BYTES, row, SECOND_BYTES, ready(stage, 1));
        clear(stage, 0, SECOND_BYTES);
    }
};

// Eight e4m3 to fp16 under a scale.
__device__ __forceinline__ uint4 widen(uint2 bytes, u32 scale) {
    uint4 v;
    widen_e4m3(bytes.x, v.x, v.y);
    widen_e4m3(bytes.y, v.z, v.w);
    return make_uint4(multiply_halves(v.x, scale), multiply_halves(v.y, scale), multiply_halves(v.z, scale),
                      multiply_halves(v.w, scale));
}

__device__ __forceinline__ u32 narrow(u32 bfloat_pair, float factor) {
    return halves(low_bfloat(bfloat_pair) * factor, high_bfloat(bfloat_pair) * factor);
}

__device__ __forceinline__ float largest(uint4 bfloats) {
    // The lower halves only add to mantissas of the upper ones: the exponent is right.
    const u32 words[4] = {bfloats.x, bfloats.y, bfloats.z, bfloats.w};
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) top = fmaxf(top, fmaxf(fabsf(__uint_as_float(words[i])), fabsf(low_bfloat(words[i]))));
    return top;
}

// What a lane knows of a row: scales as pairs of halves, or exponent bytes, and the power of two that they leave out.
struct Scales {
    uint4 words;    // V4: x and y are exponent bytes
    int exponent;   // biased, of the row's power of two plus SCALE_EXPONENT

    __device__ __forceinline__ u32 of_tile(int tile) const {
        if (!V4) return tile < 2 ? words.x : tile < 4 ? words.y : tile < 6 ? words.z : words.w;
        const int byte = (tile < 4 ? words.x >> 8 * tile : words.y >> 8 * (tile - 4)) & 0xFF;
        const float scale = power_of_two(max(127 + SCALE_EXPONENT + byte - exponent, 0));
        return halves(scale, scale);
    }

    __device__ __forceinline__ float left_out() const { return power_of_two(exponent - SCALE_EXPONENT); }
    __device__ __forceinline__ float inverse() const { return power_of_two(254 + SCALE_EXPONENT - exponent); }
};

__device__ __forceinline__ Scales scales_of(u32 row, bool odd, float rope_top) {
    Scales scales;
    int exponent = max(biased_exponent(rope_top) - (VALUE_EXPONENT - SCALE_EXPONENT), LOWEST_EXPONENT);
    if (V4) {
        const uint2 bytes = shared_load2(row + SCALES_AT + (odd ? 8 : 0));
        scales.words = make_uint4(bytes.x, bytes.y, 0, 0);
#pragma unroll
        for (int i = 0; i < 7; ++i) exponent = max(exponent, static_cast<int>((i < 4 ? bytes.x : bytes.y) >> 8 * (i & 3) & 0xFF));
        scales.exponent = exponent;
    } else {
        const uint4 bits = shared_load4(row + SCALES_AT);
        exponent = max(exponent, static_cast<int>(max(max(bits.x, bits.y), max(bits.z, bits.w)) >> 23));
        scales.exponent = exponent;
        const float inverse = scales.inverse();
        const auto pair = [&](u32 word) { const float s = __uint_as_float(word) * inverse; return halves(s, s); };
        scales.words = make_uint4(pair(bits.x), pair(bits.y), pair(bits.z), pair(bits.w));
    }
    return scales;
}

__device__ __forceinline__ void dequantise(u32 memory, const Work& work) {
    const int warp = threadIdx.x / 32 % WARPS, lane = threadIdx.x % 32, blocks = work.end - work.begin;
    Ring ring = {memory, warp, lane, Follower(work, lane < OWN ? warp * OWN + lane : -1)};
#pragma unroll
    for (int stage = 0; stage < RING; ++stage) {
        ring.fetch_first(stage);
        ring.fetch_second(stage);
    }
    // Of the 16 rows, a lane works on four, on the unit of 8 columns that is its own in every tile. Rows 4 apart share
    // a wave of loads.
    const int unit = lane % 8, row = 4 * (lane / 8 % 2) + lane / 16;
    u32 source[4], target[4];  // offsets of the lane's rows in the ring, of its units in a tile
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int own = row + 8 * (i / 2) + 2 * (i % 2);
        source[i] = own * RAW_BYTES;
        target[i] = in_tile(warp * OWN + own, unit);
    }
    int stage = 0, half = 0;
    u32 stage_parity = 0, half_parity = 1;
    const auto next_half = [&] {
        if (++half == HALVES) half = 0, half_parity ^= 1;
    };
    for (int block = 0; block < blocks; ++block) {
        const u32 raw = ring.raw(stage), leftover = block % LEFTOVERS;
        barrier_wait(ring.ready(stage, 0), stage_parity);
        const u32 flags = shared_load(ring.flags(stage));
        float top[4];
        Scales scales[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) top[i] = largest(shared_load4(raw + source[i] + ROPE_AT + 16 * unit));
#pragma unroll
        for (int step = 1; step < 8; step *= 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(EVERY_LANE, top[i], step));
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int own = row + 8 * (i / 2) + 2 * (i % 2);
            scales[i] = scales_of(raw + source[i], flags >> (16 + own) & 1, top[i]);
        }

        barrier_wait(memory + HALF_FREE + half * 8, half_parity);
        // The weights of the last block may lie where the columns beyond 512 go; with three halves, they are freed here.
        if (HALVES == 2) barrier_wait(memory + HALF_FREE + 8, half_parity);
        if (unit == 0) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int own = row + 8 * (i / 2) + 2 * (i % 2);
                // An exponent of 255 is no number; neither are the row's logits, then.
                const float factor = scales[i].exponent == 255 ? __uint_as_float(0x7FC00000u) : scales[i].left_out();
                shared_store_float(memory + FACTOR + (leftover * TOKENS + warp * OWN + own) * 4,
                                   flags >> own & 1 ? factor : -1.0f);
            }
        }
        u32 to = memory + HALF + half * HALF_BYTES;
#pragma unroll
        for (int tile = 4; tile < LATENT / 64; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint2 bytes = shared_load2(raw + source[i] + tile * 64 + unit * 8);
                shared_store4(to + (tile - 4) * TILE_BYTES + target[i], widen(bytes, scales[i].of_tile(tile)));
            }
        }
        to = V4 ? to + 3 * TILE_BYTES : memory + LEFTOVER + leftover * TILE_BYTES;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float inverse = scales[i].inverse();
            const uint4 x = shared_load4(raw + source[i] + ROPE_AT + 16 * unit);
            shared_store4(to + target[i], make_uint4(narrow(x.x, inverse), narrow(x.y, inverse), narrow(x.z, inverse),
                                                     narrow(x.w, inverse)));
        }
        fence_for_copies_and_products();
        __syncwarp();
        if (lane == 0) barrier_arrive(memory + HALF_READY + half * 8);
        if (block + RING < blocks) ring.fetch_first(stage);
        next_half();

        barrier_wait(ring.ready(stage, 1), stage_parity);
        barrier_wait(memory + HALF_FREE + half * 8, half_parity);
        to = memory + HALF + half * HALF_BYTES;
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint2 bytes = shared_load2(raw + source[i] + tile * 64 + unit * 8);
                shared_store4(to + tile * TILE_BYTES + target[i], widen(bytes, scales[i].of_tile(tile)));
            }
        }
        fence_for_copies_and_products();
        __syncwarp();
        if (lane == 0) barrier_arrive(memory + HALF_READY + half * 8);
        if (block + RING < blocks) ring.fetch_second(stage);
        next_half();
        if (++stage == RING) stage = 0, stage_parity ^= 1;
    }
}

// ---- Queries

// bf16 to fp16 tiles, each head times a power of two that goes to PER_HEAD; by the eight warps that multiply.
__device__ __forceinline__ void load_queries(u32 memory, const unsigned short* queries, long long head_stride, int heads) {
    constexpr int UNITS = WIDTH / 8, ROUNDS = (UNITS + 31) / 32, READERS = 2 * WARPS, AT_ONCE = 4;
    const int warp = threadIdx.x / 32 % READERS, lane = threadIdx.x % 32;
    for (int first = warp; first < HEADS; first += READERS * AT_ONCE) {
        uint4 words[AT_ONCE][ROUNDS];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int head = first + i * READERS;
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const int unit = lane + 32 * round;
                words[i][round] = make_uint4(0, 0, 0, 0);
                if (head < heads && unit < UNITS) {
                    words[i][round] = *reinterpret_cast<const uint4*>(queries + head * head_stride + unit * 8);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int head = first + i * READERS;
            float top = 0.0f;
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) top = fmaxf(top, largest(words[i][round]));
#pragma unroll
            for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(EVERY_LANE, top, step));
            const int exponent = max(biased_exponent(top), LOWEST_EXPONENT) - QUERY_EXPONENT;
            const float inverse = power_of_two(254 - exponent);
            if (lane == 0) shared_store_float(memory + PER_HEAD + head * 4, power_of_two(exponent));
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const int unit = lane + 32 * round;
                const uint4 x = words[i][round];
                if (unit < UNITS) {
                    shared_store4(memory + QUERIES + unit / 8 * TILE_BYTES + in_tile(head, unit % 8),
                                  make_uint4(narrow(x.x, inverse), narrow(x.y, inverse), narrow(x.z, inverse), narrow(x.w, inverse)));
                }
            }
        }
    }
    fence_for_copies_and_products();
    group_sync(CONSUMERS, 2 * WARPS * 32);
}

// ---- Output

struct Output {
    void* start;  // of the part, token and first head
    long long head_stride;
    int heads;   // of this block
    bool whole;  // bf16 and final; otherwise float32
    const float* sink;
    float *lse, *tops;

    // A fragment of 256 columns, each head times a factor.
    __device__ __forceinline__ void store(const float (&values)[128], int column, float upper, float lower) const {
        const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % WARPS * 16 + lane / 4;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            if (head + 8 * below >= heads) continue;
            const float factor = below ? lower : upper;
            const long long at = (head + 8 * below) * head_stride + column + lane % 4 * 2;
            // Nothing times NaN: a head that attends to nothing gives zeros.
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const float a = values[4 * i + 2 * below] * factor, b = values[4 * i + 2 * below + 1] * factor;
                if (whole) {
                    static_cast<u32*>(start)[(at + 8 * i) / 2] = bfloats(a, b);
                } else {
                    *reinterpret_cast<float2*>(static_cast<float*>(start) + at + 8 * i) = make_float2(a, b);
                }
            }
        }
    }
};

// ---- Softmax and products

// Two heads of a lane: `upper` is lane / 4 of the warp's 16, `lower` eight further.
struct Softmax {
    float unit;              // of a logit with base 2, in products of rows and queries
    float top = minus_infinity();   // largest logit
    float base = -1e30f;     // what weights are relative to
    float sum = 0.0f;        // of this lane's columns

    // The factor of everything so far.
    __device__ __forceinline__ float raise(float block_top) {
        const float logit = block_top * unit;
        top = fmaxf(top, logit);
        if (!(logit > base + LEEWAY)) return 1.0f;
        const float factor = exp2_fast(base - logit);
        base = logit;
        sum *= factor;
        return factor;
    }
};

__device__ __forceinline__ float over_lanes_of_head(float x) {
    x = fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 1));
    return fmaxf(x, __shfl_xor_sync(EVERY_LANE, x, 2));
}

__device__ __forceinline__ void rescale(float (&values)[128], float upper, float lower) {
    if (__ballot_sync(EVERY_LANE, upper != 1.0f || lower != 1.0f) == 0) return;
#pragma unroll
    for (int i = 0; i < 128; ++i) values[i] *= i & 2 ? lower : upper;
}

// Logits of a block to weights, as fragments; returns the factors of the output so far.
__device__ __forceinline__ float2 soften(float (&s)[32], u32 factors, Softmax& upper, Softmax& lower, float& reference,
                                         u32 (&weights)[4][4]) {
    const u32 own = factors + threadIdx.x % 4 * 8;  // of this lane's columns; read twice, as registers are few
    float highest = 0.0f, tops[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 factor = shared_load_floats(own + i * 32);
        highest = fmaxf(highest, fmaxf(factor.x, factor.y));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j % 2 ? factor.y : factor.x;
            s[4 * i + j] = one < 0.0f ? minus_infinity() : s[4 * i + j] * one;
            tops[j / 2] = fmaxf(tops[j / 2], s[4 * i + j]);
        }
    }
    highest = over_lanes_of_head(highest);
    float2 scale = make_float2(upper.raise(over_lanes_of_head(tops[0])), lower.raise(over_lanes_of_head(tops[1])));
    if (highest > reference) {  // in all lanes of all warps alike
        const float raised = highest * SPARE;
        const float factor = reference * power_of_two(254 - biased_exponent(raised));
        scale.x *= factor;
        scale.y *= factor;
        reference = raised;
    }
    const float inverse = HEADROOM * power_of_two(254 - biased_exponent(reference));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 factor = shared_load_floats(own + i * 32);
        const float a = exp2_fast(s[4 * i] * upper.unit - upper.base), b = exp2_fast(s[4 * i + 1] * upper.unit - upper.base);
        const float c = exp2_fast(s[4 * i + 2] * lower.unit - lower.base), d = exp2_fast(s[4 * i + 3] * lower.unit - lower.base);
        upper.sum += a + b;
        lower.sum += c + d;
        const float even = factor.x * inverse, odd = factor.y * inverse;
        weights[i / 2][i % 2 * 2] = halves(a * even, b * odd);
        weights[i / 2][i % 2 * 2 + 1] = halves(c * even, d * odd);
    }
    return scale;
}

// What is left to do to a head's output; its lse and largest logit are written on the way.
__device__ __forceinline__ float finish(Softmax& head, float reference, int number, const Output& out) {
    head.sum += __shfl_xor_sync(EVERY_LANE, head.sum, 1);
    head.sum += __shfl_xor_sync(EVERY_LANE, head.sum, 2);
    const bool empty = head.sum == 0.0f;
    const float whole = empty ? minus_infinity() : (head.base + log2_fast(head.sum)) * LN_2;
    float factor = empty ? 0.0f : reference / HEADROOM / head.sum;
    if (number < out.heads) {
        if (out.sink != nullptr) factor *= 1.0f / (1.0f + exp2_fast((out.sink[number] - whole) * LOG2_E));
        if (threadIdx.x % 4 == 0) {
            out.lse[number] = whole;
            out.tops[number] = head.sum == head.sum ? head.top * LN_2 : head.sum;  // NaN has no place in an order
        }
    }
    return empty ? 0.0f : factor;
}

// A position in the sequence of halves, and the parity of its buffer's barriers.
struct Half {
    int number;
    u32 parity = 0;

    __device__ __forceinline__ void skip() {
        number += 2;
        if (number >= HALVES) number -= HALVES, parity ^= 1;
    }
};

// `place` tells where results go, at the end, when registers are free.
template <class Place>
__device__ __forceinline__ void score(u32 memory, int blocks, float scale, const Place& place) {
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 * 16 + lane / 4;
    Softmax upper = {shared_load_float(memory + PER_HEAD + head * 4) * scale * LOG2_E};
    Softmax lower = {shared_load_float(memory + PER_HEAD + head * 4 + 32) * scale * LOG2_E};
    float reference = power_of_two(LOWEST_EXPONENT - SCALE_EXPONENT);  // no row has less
    float s[32], values[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) values[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; ++i) s[i] = 0.0f;
    // Rows of the matrices that this lane addresses when it stores weights.
    const u32 target = in_tile(threadIdx.x / 32 * 16 + lane % 16, lane / 16);
    Half first = {0}, second = {1};
    const auto at = [](int step) { return step / 4 * TILE_BYTES + step % 4 * 32; };
    const auto multiply_first = [&](u32 leftover) {
        barrier_wait(memory + HALF_READY + first.number * 8, first.parity);
        const auto queries = along_rows(memory + QUERIES + HALF_BYTES), rest = along_rows(leftover);
        const auto keys = along_rows(memory + HALF + first.number * HALF_BYTES);
        products_begin();
#pragma unroll
        for (int step = 0; step < 16; ++step) multiply_64(s, advance(queries, at(step)), advance(keys, at(step)), step > 0);
#pragma unroll
        for (int step = 16; step < TILES * 4 - 16; ++step) {
            multiply_64(s, advance(queries, at(step)), advance(rest, at(step - 16)), 1);
        }
        products_commit();
    };
    const auto multiply_second = [&] {
        barrier_wait(memory + HALF_READY + second.number * 8, second.parity);
        const auto queries = along_rows(memory + QUERIES), keys = along_rows(memory + HALF + second.number * HALF_BYTES);
        products_begin();
#pragma unroll
        for (int step = 0; step < 16; ++step) multiply_64(s, advance(queries, at(step)), advance(keys, at(step)), 1);
        products_commit();
        products_wait<0>(s);
    };
    const auto hand_over = [&](u32 slot) {
        __syncwarp();
        if (lane == 0) barrier_arrive(memory + WEIGHTS_READY + slot * 8);
    };
    // Softmax of a block's logits, and the product with the first half of the values under way.
    const auto weigh_first = [&](u32 slot) {
        const u32 leftover = memory + LEFTOVER + slot * TILE_BYTES, from = memory + HALF + first.number * HALF_BYTES;
        u32 weights[4][4];
        const float2 factor = soften(s, memory + FACTOR + slot * TOKENS * 4, upper, lower, reference, weights);
        if (!V4) group_sync(SCORING, WARPS * 32);  // all four warps have read what the weights take the place of
#pragma unroll
        for (int step = 0; step < 4; ++step) store_matrices(leftover + (target ^ step * 32), weights[step]);
        if (lane % 4 == 0) {
            shared_store_float(memory + RESCALE + (slot * HEADS + head) * 4, factor.x);
            shared_store_float(memory + RESCALE + (slot * HEADS + head) * 4 + 32, factor.y);
        }
        fence_for_copies_and_products();
        if (!LAG) hand_over(slot);
        rescale(values, factor.x, factor.y);
        const auto rows = down_rows(from, TILE_BYTES);
        products_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step) multiply_256(values, weights[step], advance(rows, step * 2048));
        products_commit();
    };
    if (blocks > 0) {
        multiply_first(memory + LEFTOVER);
        multiply_second();
        u32 slot = 0;
        // The compiler gives up overlapping products where a branch leaves while one of them is under way, hence the
        // last block by itself.
        for (int block = 1; block < blocks; ++block) {
            weigh_first(slot);
            const u32 used = memory + HALF_FREE + first.number * 8, before = slot;
            slot = block % LEFTOVERS;
            const u32 leftover = memory + LEFTOVER + slot * TILE_BYTES;
            first.skip();
            second.skip();
            if (HALVES == 2) {  // the next rows have to wait for this half
                products_wait<0>(values);
                if (lane == 0) barrier_arrive(used);
                multiply_first(leftover);
            } else {
                multiply_first(leftover);
                products_wait<1>(values);
                if (lane == 0) barrier_arrive(used);
            }
            multiply_second();
            if (LAG) hand_over(before);
        }
        weigh_first(slot);
        if (LAG) hand_over(slot);
        products_wait<0>(values);
    }
    const Output out = place();
    const float above = finish(upper, reference, head, out), below = finish(lower, reference, head + 8, out);
    if (lane % 4 == 0) {
        shared_store_float(memory + PER_HEAD + head * 4, above);
        shared_store_float(memory + PER_HEAD + head * 4 + 32, below);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(memory + FINISHED);
    out.store(values, VALUES / 2, above, below);
}

template <class Place>
__device__ __forceinline__ void weigh(u32 memory, int blocks, const Place& place) {
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % WARPS * 16 + lane / 4;
    float values[128];
#pragma unroll
    for (int i = 0; i < 128; ++i) values[i] = 0.0f;
    Half second = {1};
    int leftover = 0;
    u32 parity = 0;
    for (int block = 0; block < blocks; ++block) {
        barrier_wait(memory + WEIGHTS_READY + leftover * 8, parity);
        const u32 factors = memory + RESCALE + (leftover * HEADS + head) * 4;
        rescale(values, shared_load_float(factors), shared_load_float(factors + 32));
        const auto weights = along_rows(memory + LEFTOVER + leftover * TILE_BYTES);
        const auto rows = down_rows(memory + HALF + second.number * HALF_BYTES, TILE_BYTES);
        products_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step) multiply_256(values, advance(weights, step * 32), advance(rows, step * 2048));
        products_commit();
        products_wait<0>(values);
        if (lane == 0) barrier_arrive(memory + HALF_FREE + second.number * 8);
        second.skip();
        if (++leftover == LEFTOVERS) leftover = 0, parity ^= 1;
    }
    barrier_wait(memory + FINISHED, 0);
    place().store(values, 0, shared_load_float(memory + PER_HEAD + head * 4),
              shared_load_float(memory + PER_HEAD + head * 4 + 32));
}

// ---- Kernel

#define SELECTION(n)                                                                                                   \
    const unsigned char *pages##n, long long page_stride##n, int page_size##n, int rows##n, const int *slots##n,       \
        long long token_stride##n, long long column_stride##n, int columns##n, const int *lengths##n,                  \
        const int *request_ids##n, const int *table##n, long long table_stride##n, int table_width##n, int requests##n

// Of one query token. A token of an unknown request selects nothing.
__device__ __forceinline__ Selection selection_of(long long token, SELECTION()) {
    Selection made = {pages, page_stride, page_size, rows, slots + token * token_stride, column_stride, columns, nullptr, table_width};
    if (columns > 0 && lengths != nullptr) made.length = min(max(lengths[token], 0), columns);
    if (columns > 0 && table != nullptr) {
        const int request = request_ids[token];
        const bool known = request >= 0 && request < requests;
        made.table = table + (known ? request : 0) * table_stride;
        if (!known) made.length = 0;
    }
    return made;
}

// Part `blockIdx.y` of `parts` of the blocks of 64 selected rows of both selections; out [parts, T, H, 512], lse and
// tops [parts, T, H].
extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_many_heads(
    const unsigned short* queries, long long query_token_stride, long long query_head_stride, int tokens, int heads,
    float scale, const float* scale_factor, const float* sink, void* out, long long out_part_stride,
    long long out_token_stride, long long out_head_stride, int whole, float* lse, float* tops, int parts, SELECTION(0),
    SELECTION(1)) {
    const u32 memory = tiles_start();
    const int groups = (heads + HEADS - 1) / HEADS;
    const long long token = blockIdx.x / groups;
    const int first_head = blockIdx.x % groups * HEADS, part = blockIdx.y;
    if (threadIdx.x == 0) {
        for (int i = 0; i < RING * WARPS * 2; ++i) barrier_init(memory + RAW_READY + i * 8, 1);
        for (int i = 0; i < HALVES; ++i) {
            barrier_init(memory + HALF_READY + i * 8, WARPS);
            barrier_init(memory + HALF_FREE + i * 8, WARPS);
        }
        for (int i = 0; i < LEFTOVERS; ++i) barrier_init(memory + WEIGHTS_READY + i * 8, WARPS);
        barrier_init(memory + FINISHED, WARPS);
        barrier_init_done();
    }
    Work work;
    work.first = selection_of(token, pages0, page_stride0, page_size0, rows0, slots0, token_stride0, column_stride0, columns0,
                              lengths0, request_ids0, table0, table_stride0, table_width0, requests0);
    work.second = selection_of(token, pages1, page_stride1, page_size1, rows1, slots1, token_stride1, column_stride1, columns1,
                               lengths1, request_ids1, table1, table_stride1, table_width1, requests1);
    work.first_blocks = (work.first.length + TOKENS - 1) / TOKENS;
    const int blocks = work.first_blocks + (work.second.length + TOKENS - 1) / TOKENS;
    work.begin = static_cast<int>(static_cast<long long>(blocks) * part / parts);
    work.end = static_cast<int>(static_cast<long long>(blocks) * (part + 1) / parts);
    __syncthreads();

    const auto place = [&] {
        const int groups = (heads + HEADS - 1) / HEADS, part = blockIdx.y, first_head = blockIdx.x % groups * HEADS;
        const long long token = blockIdx.x / groups, row = (part * static_cast<long long>(tokens) + token) * heads + first_head;
        const long long at = part * out_part_stride + token * out_token_stride + first_head * out_head_stride;
        void* const start = whole ? static_cast<void*>(static_cast<unsigned short*>(out) + at) : static_cast<float*>(out) + at;
        return Output{start, out_head_stride, min(heads - first_head, HEADS), whole != 0,
                      sink == nullptr ? nullptr : sink + first_head, lse + row, tops + row};
    };
    const int group = threadIdx.x / (WARPS * 32);
    if (group == 2) {
        give_registers<FETCH_REGISTERS>();
        dequantise(memory, work);
        return;
    }
    load_queries(memory, queries + token * query_token_stride + first_head * query_head_stride, query_head_stride,
                 min(heads - first_head, HEADS));
    if (group == 0) {
        take_registers<SCORE_REGISTERS>();
        if (scale_factor != nullptr) scale *= *scale_factor;
        score(memory, work.end - work.begin, scale, place);
    } else {
        give_registers<WEIGH_REGISTERS>();
        weigh(memory, work.end - work.begin, place);
    }
}
