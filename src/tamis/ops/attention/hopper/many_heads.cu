// Sparse attention of 64 heads per CTA with wgmma, on Hopper, over FP8 rows: one CTA per work item (see `items.cuh`).
//
// Computes, for each query token and head, softmax(scale * q . k) v over the selected rows, its lse and its largest logit.
// Rows are V3.2's (512 e4m3, four float32 scales, 64 bf16 or none; the first 512 columns are values) or V4's (448 e4m3 and 64
// bf16, scale exponents in a plane of their own; all 512 columns are values).
//
// Roles of the four warpgroups, for every block of 64 rows:
//   2, 3  dequantise  Producers. Each warp copies eight rows to shared memory with cp.async, a block ahead, converts them
//                     to fp16 tiles, and fills two ring stages, each with half of the columns: first columns 256 and up,
//                     whose bytes lie beside the scales, then columns 0 to 255.
//   0     score       Consumer. Multiplies queries with both halves, does the online softmax, publishes the weights, and
//                     multiplies them, from registers, with values 256 to 383.
//   1     weigh       Consumer. Multiplies the published weights with the other three quarters of the values.
//
// Shared memory (227 KiB) holds the queries, a ring of three stages, the raw rows of a block and two buffers of weights. The
// third stage takes the first half of the next block while this block is multiplied.
//
// Budget for a block of 64 rows (V3.2, H200): 1,152 cycles of wgmma with keys and 1,024 with values. Measured: about 5,000
// cycles (benchmarks/NOTES.md); shared memory is the bottleneck, with about 4,300 accesses, and producers are never idle.
//
// Numbers. A row is stored as fp16 numbers that are multiplied with 2**E. E follows from the largest of the row's scales
// and, in V4, of its bf16 values, so that its largest values lie just below fp16's largest; an e4m3 value times a power of
// two is exact down to 2**-30 of that. V3.2's bf16 columns, which are only keys, stay bf16 and are multiplied with 2**-E,
// which is at most 2**66. Products of rows with queries (fp16 or bf16, times a power of two
// per head) are exact in float32; times 2**E they are logits.
//
// In the product with values, weights carry the factor 2**(E - reference), where the reference is the largest E so far:
// weight * 2**E decides how much a row contributes, and fp16 holds it down to 2**-34 of the largest.
//
// Splits of a token are merged by `merge_splits.cu`, or in a cluster of CTAs (`cluster_merge.cuh`).
//
// Defined by the host: V4 (0 or 1), ROPE_COLUMNS (64, or 0 for rows of 528 bytes), SELECTIONS (1 or 2), MERGE_IN_CLUSTER (0 or 1),
// THREADS, SHARED_BYTES, PARAMS_BYTES, and the registers per thread of the roles: SCORE_REGISTERS, WEIGH_REGISTERS,
// DEQUANTISE_REGISTERS.
#include "cluster_merge.cuh"
#include "instructions.cuh"
#include "items.cuh"
#include "scaled_numbers.cuh"
#include "softmax.cuh"
#include "warpgroups.cuh"

// ---- Shapes

constexpr int WARPS = 4, PRODUCER_WARPS = 8;            // warps of a warpgroup; of the two that dequantise
constexpr int WARP_ROWS = BLOCK_ROWS / PRODUCER_WARPS;  // rows of a block that one producer warp copies
constexpr int WIDTH = V4 ? 512 : 512 + ROPE_COLUMNS, TILES = WIDTH / 64;  // columns of a row, and tiles of 64 columns
constexpr int LATENT = V4 ? 448 : 512;                     // columns in e4m3
constexpr int ROW_BYTES = V4 ? 576 : 528 + 2 * ROPE_COLUMNS;  // without V4's exponent bytes
constexpr int SECOND_HALF_BYTES = 256;                     // columns 0 to 255, the half that is filled second
constexpr int SCALES_AT = V4 ? 576 : 512, ROPE_AT = V4 ? 448 : 528;  // offsets in a raw row
// V4's raw rows are padded, so that four of them are 64 bytes modulo 128 and lie in different banks.
constexpr int RAW_BYTES = V4 ? 592 : ROW_BYTES;
// Whether the next block's rows are looked up before this block's have arrived: faster for V4's short rows.
constexpr bool LOOKS_AHEAD = V4;
constexpr u32 TILE_BYTES = 64 * 128, STAGE_BYTES = 4 * TILE_BYTES;
constexpr int STAGES = 3, BUFFERS = 2;  // ring stages of half a block's columns; buffers of weights and row scales

// ---- Shared memory

constexpr u32 QUERIES = 0;                                     // [TILES][64 heads][64 columns] fp16
constexpr u32 RING = QUERIES + TILES * TILE_BYTES;             // [STAGES][4][64 rows][64 columns] fp16
// [BUFFERS][64 heads][64 rows] fp16. In V3.2 a buffer first holds the block's rope columns [64 rows][64 columns] bf16.
constexpr u32 WEIGHTS = RING + STAGES * STAGE_BYTES;
constexpr u32 RAW = WEIGHTS + BUFFERS * TILE_BYTES;            // [BLOCK_ROWS][RAW_BYTES] rows as they are in the cache
constexpr u32 ROW_SCALE = RAW + BLOCK_ROWS * RAW_BYTES;        // [BUFFERS][BLOCK_ROWS][2] 2**E; 0, or -inf for no row
constexpr u32 RESCALE = ROW_SCALE + BUFFERS * BLOCK_ROWS * 8;  // [BUFFERS][HEADS] rescale factors of the accumulators
constexpr u32 HEAD_SCALE = RESCALE + BUFFERS * HEADS * 4;      // [HEADS] scales of the queries; at the end, factors
constexpr u32 PLACE = HEAD_SCALE + HEADS * 4;                  // token, first head and split of the work item
constexpr u32 FULL = PLACE + 16;                               // [STAGES] mbarriers, as all that follow
constexpr u32 EMPTY = FULL + STAGES * 8;                       // [STAGES]
constexpr u32 WEIGHTS_FULL = EMPTY + STAGES * 8;               // [BUFFERS]
constexpr u32 FINISHED = WEIGHTS_FULL + BUFFERS * 8;           // the factors of the accumulators are in HEAD_SCALE
constexpr u32 USED = FINISHED + 8;
// A merge in a cluster stages accumulators in place of queries, and publishes results in place of row scales.
static_assert(STAGED_BYTES <= WEIGHTS && HEADS * 16 <= BUFFERS * BLOCK_ROWS * 8, "the merge does not fit");
static_assert(USED <= SHARED_BYTES && RAW % 128 == 0 && FULL % 8 == 0, "shared memory is too small or not aligned");

// Named barriers: one for the four warps that score, one for all consumers.
constexpr u32 SCORE_BARRIER = 1, CONSUMER_BARRIER = 2;

// A stage of the ring, and the parity of the current pass over it.
struct Stage {
    int index = 0;
    u32 parity = 0;

    __device__ __forceinline__ Stage after(int steps) const {
        const int next = index + steps;
        return next < STAGES ? Stage{next, parity} : Stage{next - STAGES, parity ^ 1};
    }

    __device__ __forceinline__ u32 tiles(u32 memory) const { return memory + RING + index * STAGE_BYTES; }
    __device__ __forceinline__ u32 full(u32 memory) const { return memory + FULL + index * 8; }
    __device__ __forceinline__ u32 empty(u32 memory) const { return memory + EMPTY + index * 8; }
};

// ---- Producers: rows to fp16 tiles

// Copies a warp's eight rows to shared memory, in two cp.async groups: the bytes of the first half, then the others.
struct RowCopier {
    u32 raw;                                  // address of the warp's raw rows
    int lane;
    RowWalker<SELECTIONS, ROW_BYTES> walker;  // of row lane % 8
    const unsigned char* row;                 // row lane % 8 in the block that is copied next
    u32 to_exponents;                         // from that row to its scale exponents
    const unsigned char* from[2];             // rows lane / 8 and lane / 8 + 4; eight lanes copy 128 bytes at a time
    u32 present;                              // a bit for each row that exists

    template <int START, int UNITS>
    __device__ __forceinline__ void copy() const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            // The addresses of all units differ from one another by constants.
            const u32 target = raw + (lane / 8 + 4 * i) * RAW_BYTES + lane % 8 * 16;
            const unsigned char* const source = from[i] + lane % 8 * 16;
            const bool exists = from[i] != nullptr;
#pragma unroll
            for (int unit = 0; unit < UNITS; unit += 8) {
                const int at = START + unit * 16;
                if (unit + 8 <= UNITS || unit + lane % 8 < UNITS) cp_async_zfill<16>(target + at, source + at, exists);
            }
        }
    }

    __device__ __forceinline__ void look_up() { row = walker.next(to_exponents); }

    __device__ __forceinline__ void copy_first_half() {
        if (!LOOKS_AHEAD) look_up();
        present = __ballot_sync(FULL_MASK, row != nullptr);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto address = reinterpret_cast<unsigned long long>(row);
            const u32 low = __shfl_sync(FULL_MASK, static_cast<u32>(address), lane / 8 + 4 * i);
            const u32 high = __shfl_sync(FULL_MASK, static_cast<u32>(address >> 32), lane / 8 + 4 * i);
            from[i] = reinterpret_cast<const unsigned char*>(static_cast<unsigned long long>(high) << 32 | low);
        }
        copy<SECOND_HALF_BYTES, (ROW_BYTES - SECOND_HALF_BYTES) / 16>();
        if (V4 && lane < WARP_ROWS) cp_async_zfill<8>(raw + lane * RAW_BYTES + SCALES_AT, row + to_exponents, row != nullptr);
        cp_async_commit();
    }

    __device__ __forceinline__ void copy_second_half() {
        copy<0, SECOND_HALF_BYTES / 16>();
        cp_async_commit();
    }
};

// The scales of a row, relative to its power of two, as fp16 (V3.2) or as exponent bytes (V4). V3.2 stores a scale below
// fp16's range as -scale * 2**14; `finish_small` then multiplies its columns with -2**-14.
struct Scales {
    uint2 words;   // V3.2: four scales; V4: seven exponents
    int exponent;  // E + SCALE_EXPONENT, with float32's bias

    // The scale of a tile, in both halves of a word. Without SMALL, V4's exponents are converted in pairs.
    template <bool SMALL>
    __device__ __forceinline__ u32 of_tile(int tile) const {
        const u32 word = tile < 4 ? words.x : words.y;
        if (!V4) return __byte_perm(word, 0, tile % 4 < 2 ? 0x1010 : 0x3232);
        if (SMALL) {
            const int byte = word >> 8 * (tile % 4) & 0xFF;
            const float scale = power_of_two(max(127 + SCALE_EXPONENT + byte - exponent, 0));
            return pack_fp16(scale, scale);
        }
        const u32 two = __byte_perm(word, 0, tile % 4 < 2 ? 0x4140 : 0x4342) - (exponent - SCALE_EXPONENT - 15) * 0x10001;
        return __byte_perm(two << 10, 0, tile % 2 ? 0x3232 : 0x1010);
    }

    __device__ __forceinline__ bool any_negative() const { return ((words.x | words.y) & 0x80008000u) != 0; }
    __device__ __forceinline__ float row_scale() const { return power_of_two(exponent - SCALE_EXPONENT); }
    __device__ __forceinline__ float inverse() const { return power_of_two(254 + SCALE_EXPONENT - exponent); }
};

// The scales of a row as they are in the cache: four float32 or seven exponent bytes.
struct RawScales {
    uint4 bits;
    int largest, smallest;  // exponents of the largest and the smallest scale, with float32's bias

    __device__ __forceinline__ explicit RawScales(u32 row) {
        if (V4) {
            const uint2 bytes = shared_load2(row + SCALES_AT);
            const u32 a = __byte_perm(bytes.x, 0, 0x4140), b = __byte_perm(bytes.x, 0, 0x4342);
            const u32 c = __byte_perm(bytes.y, 0, 0x4140), last = bytes.y >> 16 & 0xFF;
            const u32 above = __vmaxu2(__vmaxu2(a, b), __vmaxu2(c, last));
            const u32 below = __vminu2(__vminu2(a, b), __vminu2(c, last * 0x10001));
            bits = make_uint4(bytes.x, bytes.y, 0, 0);
            largest = max(above & 0xFFFF, above >> 16);
            smallest = min(below & 0xFFFF, below >> 16);
        } else {
            bits = shared_load4(row + SCALES_AT);
            largest = max(max(bits.x, bits.y), max(bits.z, bits.w)) >> 23;
            smallest = min(min(bits.x, bits.y), min(bits.z, bits.w)) >> 23;
        }
        largest = max(largest, LOWEST_EXPONENT);
    }

    // Whether fp16 holds all scales in full, relative to the row's power of two.
    __device__ __forceinline__ bool fits(int exponent) const { return smallest >= exponent - SCALE_EXPONENT - 14; }

    template <bool SMALL>
    __device__ __forceinline__ Scales relative_to(int exponent) const {
        Scales scales = {make_uint2(bits.x, bits.y), exponent};
        if (V4) return scales;
        const float inverse = scales.inverse();
        const auto kept = [&](u32 word) {
            const float scale = __uint_as_float(word) * inverse;
            return SMALL && scale > 0.0f && scale < power_of_two(127 - 14) ? scale * -power_of_two(127 + 14) : scale;
        };
        scales.words = make_uint2(pack_fp16(kept(bits.x), kept(bits.y)), pack_fp16(kept(bits.z), kept(bits.w)));
        return scales;
    }
};

// The e4m3 codes of a lane's two rows, its unit of 8 columns in each of TILES tiles. `first` is the number of the first tile.
template <int TILES>
struct Codes {
    uint2 bytes[TILES][2];

    __device__ __forceinline__ void load(const u32 (&source)[2], int first) {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) bytes[tile][i] = shared_load2(source[i] + (first + tile) * 64);
        }
    }

    template <bool SMALL>
    __device__ __forceinline__ void store(u32 to, const u32 (&target)[2], const Scales (&scales)[2], int first) const {
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                shared_store4(to + tile * TILE_BYTES + target[i],
                              dequantise(bytes[tile][i], scales[i].template of_tile<SMALL>(first + tile)));
            }
        }
    }
};

// Multiplies a lane's units of a stage with -2**-14 where their scales are negative (see `Scales`).
__device__ __forceinline__ void finish_small(u32 to, const u32 (&target)[2], const Scales (&scales)[2], int first) {
    if (!scales[0].any_negative() && !scales[1].any_negative()) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int tile = 0; tile < 4; tile += 2) {
            if (static_cast<int>(scales[i].template of_tile<true>(first + tile)) >= 0) continue;
            constexpr u32 STEP = 0x84008400;  // -2**-14
            const u32 end = to + (tile + 2) * TILE_BYTES;
#pragma unroll 1
            for (u32 at = to + tile * TILE_BYTES + target[i]; at < end; at += TILE_BYTES) {
                shared_store4(at, mul_fp16x8(shared_load4(at), STEP));
            }
        }
    }
}

// Dequantises a lane's codes and stores them in a stage. `small`: whether fp16 does not hold all scales in full.
template <int TILES>
__device__ __forceinline__ void store_half(
    const Codes<TILES>& codes, u32 to, const u32 (&target)[2], const Scales (&scales)[2], int first, bool small) {
    if (V4 && small) codes.template store<true>(to, target, scales, first);
    else codes.template store<false>(to, target, scales, first);
    if (!V4 && small) finish_small(to, target, scales, first);
}

// Warpgroups 2 and 3.
__device__ __forceinline__ void dequantise_rows(u32 memory, const Work<SELECTIONS>& work) {
    const int warp = threadIdx.x / 32 % PRODUCER_WARPS, lane = threadIdx.x % 32, blocks = work.end - work.begin;
    const u32 raw = memory + RAW + warp * WARP_ROWS * RAW_BYTES;
    RowCopier copier = {raw, lane, RowWalker<SELECTIONS, ROW_BYTES>(work, warp * WARP_ROWS + lane % WARP_ROWS)};
    if (LOOKS_AHEAD) copier.look_up();
    copier.copy_first_half();
    copier.copy_second_half();
    // A lane converts its unit of 8 columns in every tile of two rows. Lanes whose rows are 4 apart load in one wavefront.
    const int unit = lane % 8, row = 4 * (lane / 8 % 2) + lane / 16;
    u32 source[2], target[2];  // of this unit, in the raw rows and in a tile
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        source[i] = raw + (row + 2 * i) * RAW_BYTES + unit * 8;
        target[i] = swizzled(warp * WARP_ROWS + row + 2 * i, unit);
    }
    Stage stage;
    const auto wait_for_empty = [&] { mbarrier_wait(stage.empty(memory), stage.parity ^ 1); };
    const auto arrive_full = [&] {
        fence_async_proxy();
        __syncwarp();
        if (unit == 0) mbarrier_arrive(stage.full(memory));  // the four lanes that write row scales
        stage = stage.after(1);
    };
    for (int block = 0; block < blocks; ++block) {
        const u32 buffer = block % BUFFERS, present = copier.present;
        if (LOOKS_AHEAD) copier.look_up();
        cp_async_wait<1>();
        __syncwarp();
        const RawScales raw_scales[2] = {RawScales(source[0] - unit * 8), RawScales(source[1] - unit * 8)};
        int exponents[2] = {raw_scales[0].largest, raw_scales[1].largest};
        if (V4) {
            u32 largest = max_abs(shared_load4(source[0] + ROPE_AT + 8 * unit));
            largest |= max_abs(shared_load4(source[1] + ROPE_AT + 8 * unit)) << 16;
#pragma unroll
            for (int step = 1; step < 8; step *= 2) largest = __vmaxu2(largest, __shfl_xor_sync(FULL_MASK, largest, step));
            exponents[0] = max(exponents[0], static_cast<int>(largest >> 7 & 0x1FF) - (VALUE_EXPONENT - SCALE_EXPONENT));
            exponents[1] = max(exponents[1], static_cast<int>(largest >> 23) - (VALUE_EXPONENT - SCALE_EXPONENT));
        }
        const bool small = __any_sync(FULL_MASK, !raw_scales[0].fits(exponents[0]) || !raw_scales[1].fits(exponents[1]));
        Scales scales[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) scales[i] = raw_scales[i].relative_to<false>(exponents[i]);
        if (!V4 && small) {
#pragma unroll
            for (int i = 0; i < 2; ++i) scales[i] = raw_scales[i].relative_to<true>(exponents[i]);
        }

        // V3.2's rope columns overwrite the weights of two blocks ago, which consumers release together with this stage.
        Codes<LATENT / 64 - 4> upper;
        if (!V4) upper.load(source, 4);
        wait_for_empty();
        if (unit == 0) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int own = row + 2 * i;
                const u32 at = memory + ROW_SCALE + (buffer * BLOCK_ROWS + warp * WARP_ROWS + own) * 8;
                // An exponent of 255 means infinity or NaN: it makes the row's logits NaN.
                store_float(at, scales[i].exponent == 255 ? __uint_as_float(0x7FC00000u) : scales[i].row_scale());
                store_float(at + 4, present >> own & 1 ? 0.0f : minus_infinity());
            }
        }
        const u32 rope_to = V4 ? stage.tiles(memory) + 3 * TILE_BYTES : memory + WEIGHTS + buffer * TILE_BYTES;
        if (V4) upper.load(source, 4);
        store_half(upper, stage.tiles(memory), target, scales, 4, small);
#pragma unroll
        for (int i = 0; i < (ROPE_COLUMNS ? 2 : 0); ++i) {
            const uint4 x = shared_load4(source[i] + ROPE_AT + 8 * unit);  // V4's second load of it: saves registers
            shared_store4(rope_to + target[i], V4 ? bf16_to_fp16(x, scales[i].inverse()) : scale_bf16(x, scales[i].inverse()));
        }
        arrive_full();

        if (block + 1 < blocks) copier.copy_first_half();
        else cp_async_commit();
        cp_async_wait<1>();
        __syncwarp();
        Codes<4> lower;
        lower.load(source, 0);
        wait_for_empty();
        store_half(lower, stage.tiles(memory), target, scales, 0, small);
        arrive_full();
        if (block + 1 < blocks) copier.copy_second_half();
        else cp_async_commit();
    }
    cp_async_wait<0>();
}

// ---- Queries

// The eight consumer warps convert the queries to fp16 tiles, times a power of two per head, whose inverse is HEAD_SCALE.
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
            u32 largest = 0;
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) largest = max(largest, max_abs(words[i][round]));
            largest = __reduce_max_sync(FULL_MASK, largest);
            // The bounds keep the scale finite whatever the query holds, so that infinity and NaN show in the products.
            const int exponent = max(min(static_cast<int>(largest >> 7), 254), LOWEST_EXPONENT) - QUERY_EXPONENT;
            const float inverse = power_of_two(254 - exponent);
            if (lane == 0) store_float(memory + HEAD_SCALE + head * 4, power_of_two(exponent));
#pragma unroll
            for (int round = 0; round < ROUNDS; ++round) {
                const int unit = lane + 32 * round;
                const bool as_fp16 = V4 || 32 * round * 8 < VALUE_DIM;
                if (unit < UNITS) {
                    shared_store4(memory + QUERIES + unit / 8 * TILE_BYTES + swizzled(head, unit % 8),
                                  as_fp16 ? bf16_to_fp16(words[i][round], inverse) : scale_bf16(words[i][round], inverse));
                }
            }
        }
    }
    fence_async_proxy();
    named_barrier_sync(CONSUMER_BARRIER, 2 * WARPS * 32);
}

// ---- Online softmax

// The state of one head of a lane, `upper` or `lower` (see `softmax.cuh`).
struct Softmax {
    float scale;                         // turns products of queries and rows into logits in base 2
    float max_logit = minus_infinity();  // the largest logit, in base 2
    float running_max = -1e30f;          // weights are exp2(logit - running_max); follows max_logit with LEEWAY
    float sum = 0.0f;                    // of the weights in this lane's columns

    // Raises the running max if a block's largest logit exceeds it by LEEWAY; returns the rescale factor of the accumulators.
    __device__ __forceinline__ float raise(float product) {
        const float logit = product * scale;
        max_logit = fmaxf(max_logit, logit);
        if (!(logit > running_max + LEEWAY)) return 1.0f;
        const float factor = fast_exp2(running_max - logit);
        running_max = logit;
        sum *= factor;
        return factor;
    }
};

// Turns the products of a block into weights, as fragments; returns the rescale factors of both heads.
__device__ __forceinline__ float2 online_softmax(
    float (&s)[32], u32 row_scales, Softmax& upper, Softmax& lower, float& reference, u32 (&weights)[4][4]) {
    const u32 own = row_scales + threadIdx.x % 4 * 16;  // row scales of this lane's columns, read twice to save registers
    float highest = 0.0f, largest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint4 pair = shared_load4(own + i * 64);
        const float factor[2] = {__uint_as_float(pair.x), __uint_as_float(pair.z)};
        const float added[2] = {__uint_as_float(pair.y), __uint_as_float(pair.w)};
        highest = fmaxf(highest, fmaxf(factor[0], factor[1]));
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            s[4 * i + j] = fmaf(s[4 * i + j], factor[j % 2], added[j % 2]);
            largest[j / 2] = fmaxf(largest[j / 2], s[4 * i + j]);
        }
    }
    highest = max_over_lanes<1, 4>(highest);
    float2 rescales = make_float2(upper.raise(max_over_lanes<1, 4>(largest[0])), lower.raise(max_over_lanes<1, 4>(largest[1])));
    if (highest > reference) {  // the same in all lanes of all warps
        const float raised = highest * SPARE;
        const float factor = reference * power_of_two(254 - biased_exponent(raised));
        rescales.x *= factor;
        rescales.y *= factor;
        reference = raised;
    }
    const float inverse = HEADROOM * power_of_two(254 - biased_exponent(reference));
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float2 factor = {load_float(own + i * 64), load_float(own + i * 64 + 8)};
        const float a = fast_exp2(s[4 * i] * upper.scale - upper.running_max);
        const float b = fast_exp2(s[4 * i + 1] * upper.scale - upper.running_max);
        const float c = fast_exp2(s[4 * i + 2] * lower.scale - lower.running_max);
        const float d = fast_exp2(s[4 * i + 3] * lower.scale - lower.running_max);
        upper.sum += a + b;
        lower.sum += c + d;
        const float even = factor.x * inverse, odd = factor.y * inverse;
        weights[i / 2][i % 2 * 2] = pack_fp16(a * even, b * odd);
        weights[i / 2][i % 2 * 2 + 1] = pack_fp16(c * even, d * odd);
    }
    return rescales;
}

// The results of a head, after its last block.
__device__ __forceinline__ HeadResult result_of(Softmax& head, float reference) {
    head.sum = sum_over_lanes<1, 4>(head.sum);
    const bool empty = head.sum == 0.0f;
    const float max_logit = head.sum == head.sum ? head.max_logit * LN_2 : head.sum;  // fmaxf drops NaN
    return {empty ? minus_infinity() : head.running_max + fast_log2(head.sum), max_logit,
            empty ? 0.0f : reference / HEADROOM / head.sum};
}

// ---- Consumers

__device__ __forceinline__ ClusterMerge cluster_merge(u32 memory) {
    return {memory + QUERIES, memory + HEAD_SCALE, memory + ROW_SCALE, memory + RESCALE, memory + RESCALE + HEADS * 4};
}

// Warpgroup 0. `output_of` computes the destination of the results, at the end, when registers are free.
template <class OutputOf>
__device__ __forceinline__ void score(u32 memory, int blocks, float scale, const OutputOf& output_of) {
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 * 16 + lane / 4;
    Softmax upper = {load_float(memory + HEAD_SCALE + head * 4) * scale * LOG2_E};
    Softmax lower = {load_float(memory + HEAD_SCALE + head * 4 + 32) * scale * LOG2_E};
    float reference = power_of_two(LOWEST_EXPONENT - SCALE_EXPONENT);  // the least 2**E of a row
    float s[32], values[1][64];  // accumulators: products with a block's keys, and the output of columns 256 to 383
#pragma unroll
    for (int i = 0; i < 64; ++i) values[0][i] = s[i % 32] = 0.0f;
    // The matrix row that this lane addresses in stmatrix.
    const u32 target = swizzled(threadIdx.x / 32 * 16 + lane % 16, lane / 16);
    Stage stage;
    const auto at = [](int step) { return step / 4 * TILE_BYTES + step % 4 * 32; };
    // The first tile is issued alone: issuing wgmma takes as long as running it, and the stage before must be released.
    const auto multiply_first_tile = [&] {
        mbarrier_wait(stage.full(memory), stage.parity);
        const auto queries = k_major(memory + QUERIES + STAGE_BYTES), keys = k_major(stage.tiles(memory));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_ss<FP16>(s, advance(queries, at(step)), advance(keys, at(step)), step > 0);
        wgmma_commit();
    };
    const auto multiply_first_half = [&](u32 buffer) {
        const auto queries = k_major(memory + QUERIES + STAGE_BYTES), keys = k_major(stage.tiles(memory));
        const auto rope = k_major(memory + WEIGHTS + buffer * TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 4; step < 16; ++step) wgmma_ss<FP16>(s, advance(queries, at(step)), advance(keys, at(step)), 1);
#pragma unroll
        for (int step = 16; step < TILES * 4 - 16; ++step) {
            wgmma_ss<BF16>(s, advance(queries, at(step)), advance(rope, at(step - 16)), 1);
        }
        wgmma_commit();
    };
    const auto multiply_second_half = [&] {
        const Stage second = stage.after(1);
        mbarrier_wait(second.full(memory), second.parity);
        const auto queries = k_major(memory + QUERIES), keys = k_major(second.tiles(memory));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 16; ++step) wgmma_ss<FP16>(s, advance(queries, at(step)), advance(keys, at(step)), 1);
        wgmma_commit();
        wgmma_wait<0>(s);
    };
    // Does the softmax of a block, publishes its weights, and issues the product with the first quarter of its values.
    const auto weigh_first_quarter = [&](u32 buffer) {
        const u32 tile = memory + WEIGHTS + buffer * TILE_BYTES, row_scales = memory + ROW_SCALE + buffer * BLOCK_ROWS * 8;
        u32 weights[4][4];
        const float2 rescales = online_softmax(s, row_scales, upper, lower, reference, weights);
        if (!V4 && ROPE_COLUMNS) named_barrier_sync(SCORE_BARRIER, WARPS * 32);  // all four warps have read the rope columns there
#pragma unroll
        for (int step = 0; step < 4; ++step) stmatrix_x4(tile + (target ^ step * 32), weights[step]);
        if (lane % 4 == 0) {
            // The head is computed again, since registers are scarce here.
            const u32 thread = opaque(threadIdx.x), own = thread / 32 * 16 + thread % 32 / 4;
            store_float(memory + RESCALE + (buffer * HEADS + own) * 4, rescales.x);
            store_float(memory + RESCALE + (buffer * HEADS + own) * 4 + 32, rescales.y);
        }
        fence_async_proxy();
        __syncwarp();
        if (lane % 4 == 0) mbarrier_arrive(memory + WEIGHTS_FULL + buffer * 8);
        rescale(values, rescales.x, rescales.y);
        const auto rows = mn_major(stage.tiles(memory), TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_rs<FP16>(values[0], weights[step], advance(rows, step * 2048));
        wgmma_commit();
    };
    if (blocks > 0) {
        multiply_first_tile();
        multiply_first_half(0);
        multiply_second_half();
        u32 buffer = 0;
        // The last block is not in the loop: the compiler serialises wgmma if a branch leaves the loop while one is in flight.
        for (int block = 1; block < blocks; ++block) {
            weigh_first_quarter(buffer);
            const u32 multiplied = stage.empty(memory);
            buffer = block % BUFFERS;
            stage = stage.after(2);
            multiply_first_tile();
            wgmma_wait<1>(values[0]);
            if (lane == 0) mbarrier_arrive(multiplied);
            multiply_first_half(buffer);
            multiply_second_half();
        }
        weigh_first_quarter(buffer);
        wgmma_wait<0>(values[0]);
    }
    let_next_kernel_start();
    const HeadResult results[2] = {result_of(upper, reference), result_of(lower, reference)};
    if (MERGE_IN_CLUSTER) {
        const ClusterMerge end = cluster_merge(memory);
        named_barrier_sync(SCORE_BARRIER, WARPS * 32);  // all four warps have read the row scales, which are overwritten
#pragma unroll
        for (int i = 0; i < 2; ++i) end.publish(head + 8 * i, results[i], end.largest_of(values, i));
        end.wait_for_factors();
        end.stage(values[0], VALUE_DIM / 2);
        end.merge<8>(output_of());
        return;
    }
    const ItemOutput out = output_of();
    __syncwarp();  // all lanes have read the scales of their queries, which are overwritten
    float factors[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int own = head + 8 * i;
        const bool exists = own < out.heads;
        factors[i] = results[i].factor;
        if (out.sink != nullptr && exists && factors[i] != 0.0f) {
            factors[i] *= 1.0f / (1.0f + fast_exp2(out.sink[own] * LOG2_E - results[i].lse));
        }
        if (lane % 4 != 0) continue;
        store_float(memory + HEAD_SCALE + own * 4, factors[i]);
        if (exists) out.logits.store(own, results[i].lse * LN_2, results[i].max_logit);
    }
    if (lane % 4 == 0) mbarrier_arrive(memory + FINISHED);
    out.store(values[0], VALUE_DIM / 2, factors[0], factors[1]);
}

// Warpgroup 1.
template <class OutputOf>
__device__ __forceinline__ void weigh(u32 memory, int blocks, const OutputOf& output_of) {
    const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % WARPS * 16 + lane / 4;
    float values[3][64];  // accumulators: the output of columns 384 to 511, 0 to 127 and 128 to 255
#pragma unroll
    for (int i = 0; i < 192; ++i) values[i / 64][i % 64] = 0.0f;
    Stage stage;
    u32 buffer = 0, parity = 0;
    for (int block = 0; block < blocks; ++block) {
        mbarrier_wait(memory + WEIGHTS_FULL + buffer * 8, parity);
        const u32 rescales = memory + RESCALE + (buffer * HEADS + head) * 4;
        rescale(values, load_float(rescales), load_float(rescales + 32));
        const auto weights = k_major(memory + WEIGHTS + buffer * TILE_BYTES);
        const auto upper = mn_major(stage.tiles(memory) + 2 * TILE_BYTES, TILE_BYTES);
        const auto lower = mn_major(stage.after(1).tiles(memory), TILE_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) wgmma_ss<FP16>(values[0], advance(weights, step * 32), advance(upper, step * 2048));
        wgmma_commit();
        // The stage that producers wait for is released before more is issued: issuing wgmma takes as long as running it.
        wgmma_wait<0>(values[0]);
        if (lane == 0) mbarrier_arrive(stage.empty(memory));
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            wgmma_ss<FP16>(values[1], advance(weights, step * 32), advance(lower, step * 2048));
            wgmma_ss<FP16>(values[2], advance(weights, step * 32), advance(lower, step * 2048 + 2 * TILE_BYTES));
        }
        wgmma_commit();
        wgmma_wait<0>(values[1]);
        wgmma_wait<0>(values[2]);
        if (lane < 2) mbarrier_arrive(stage.after(1).empty(memory));  // also for `score`, which has read it
        stage = stage.after(2);
        if (++buffer == BUFFERS) buffer = 0, parity ^= 1;
    }
    const auto column = [](int i) { return (VALUE_DIM * 3 / 4 + i * VALUE_DIM / 4) % VALUE_DIM; };
    if (MERGE_IN_CLUSTER) {
        const ClusterMerge end = cluster_merge(memory);
#pragma unroll
        for (int i = 0; i < 2; ++i) end.publish(head + 8 * i, end.largest_of(values, i));
        end.wait_for_factors();
#pragma unroll
        for (int i = 0; i < 3; ++i) end.stage(values[i], column(i));
        end.merge<8>(output_of());
        return;
    }
    mbarrier_wait(memory + FINISHED, 0);
    const ItemOutput out = output_of();
    const float above = load_float(memory + HEAD_SCALE + head * 4), below = load_float(memory + HEAD_SCALE + head * 4 + 32);
#pragma unroll
    for (int i = 0; i < 3; ++i) out.store(values[i], column(i), above, below);
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) attend_many_heads(const __grid_constant__ ManyHeadsParams given) {
    const ManyHeadsParams params = given;  // the compiler would load fields of the parameter again after every barrier
    const u32 memory = tile_memory();
    const Items items = {params};
    const QueryParams& query = params.query;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; ++i) {
            mbarrier_init(memory + FULL + i * 8, PRODUCER_WARPS * 4);
            mbarrier_init(memory + EMPTY + i * 8, 2 * WARPS);
        }
        for (int i = 0; i < BUFFERS; ++i) mbarrier_init(memory + WEIGHTS_FULL + i * 8, WARPS * 8);
        mbarrier_init(memory + FINISHED, WARPS * 8);
        fence_mbarrier_init();
    }
    const Place place = items.place(blockIdx.x);
    if (threadIdx.x == 0) shared_store4(memory + PLACE, make_uint4(place.token, place.first_head, place.split, 0));
    wait_for_previous_kernel();
    const Work<SELECTIONS> work = items.work<SELECTIONS, 1>(place);
    const unsigned short* const start = query.q + place.token * query.token_stride + place.first_head * query.head_stride;
    __syncthreads();

    // The end reads the place from shared memory and the parameter itself, so that they hold no registers until then.
    const auto output_of = [&] {
        const uint4 stored = shared_load4(memory + PLACE);
        return Items{given}.output({static_cast<int>(stored.x), static_cast<int>(stored.y), static_cast<int>(stored.z)});
    };
    const int warpgroup = threadIdx.x / (WARPS * 32);
    if (warpgroup >= 2) {
        warpgroup_reg_dealloc<DEQUANTISE_REGISTERS>();
        dequantise_rows(memory, work);
        if (!MERGE_IN_CLUSTER) return;
        const ClusterMerge end = cluster_merge(memory);
        end.weigh_split(threadIdx.x % (2 * WARPS * 32), output_of());
        end.merge<4>(output_of());  // producers have few registers
        return;
    }
    load_queries(memory, start, query.head_stride, min(query.heads - place.first_head, HEADS));
    if (warpgroup == 0) {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        float scale = query.scale;
        if (query.scale_factor != nullptr) scale *= *query.scale_factor;
        score(memory, work.end - work.begin, scale, output_of);
    } else {
        warpgroup_reg_alloc<WEIGH_REGISTERS>();
        weigh(memory, work.end - work.begin, output_of);
    }
}
