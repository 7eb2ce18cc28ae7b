// Index scores of bf16 and e2m1 keys with wgmma, on Hopper. CTAs are persistent, one per SM. `fp8_scores.cu` has e4m3 keys.
//
// Computes for each query token t and each key j that it sees: sum over heads h of weights[t, h] * relu(q[t, h] . key[j]). Keys
// are bf16, in pages or in one list, or e2m1 with an exponent per 32 values (MXFP4), in pages.
//
// Keys are the rows (M) of the product, the heads of up to COLUMNS / HEADS tokens of one request, a tile, its columns (N). The
// sum over heads then is a sum within a thread, and a last one within a quad of lanes. The order of all sums is fixed: a score
// has the same bits whichever tokens and keys are computed beside it.
//
// Work: a tile sees blocks of 64 keys. The blocks of all tiles, one tile after the other, are divided evenly by their cost
// among the CTAs, so that a CTA computes consecutive blocks of some tiles. Blocks that no token of a tile sees do not exist.
//
// Roles of the warpgroups:
//   0        produce  Warp 0 copies blocks of keys into a ring of stages with bulk copies. Warps 1 to 3 put the queries and
//                     weights of the next tile into the other one of two buffers.
//   1 and up score    Consumers, which take the CTA's blocks in turn. The keys of a block go to registers, as operand a of the
//                     products with the queries of the tile, one token of 64 heads at a time, or several of fewer. While one
//                     consumer waits for its product or sums over heads, the products of the others run.
//
// The operand in registers determines the order of dims: a lane reads 16-byte units of a key, so that its numbers belong to
// places along K which are not neighbours. The queries in shared memory are permuted alike: see `copy_query`.
//
// Defined by the host: KEYS (the format), HEADS (16, 32 or 64), QUERY_BYTES (of a number: 1 or 2), COLUMNS, STAGES, THREADS,
// SHARED_BYTES, PARAMS_BYTES, and the registers per thread of the roles: SCORE_REGISTERS, PRODUCE_REGISTERS.
#include "instructions.cuh"
#include "warpgroups.cuh"
#include "score_params.cuh"

// ---- Shapes

// Key formats.
constexpr int BF16_KEYS = 1, E2M1_KEYS = 2;
constexpr bool SCALED = KEYS == E2M1_KEYS;
constexpr int WARPS = 4;  // of a warpgroup
constexpr int CONSUMERS = THREADS / 128 - 1;   // warpgroups
constexpr int CHUNK = 64;                      // columns of a product
constexpr int TILE = COLUMNS / HEADS;          // most tokens of a tile
constexpr int BOUNDED = TILE + 4;              // places of their bounds, since lanes without a token read the last four
constexpr int CHUNK_TOKENS = CHUNK / HEADS;
constexpr int MOST_CHUNKS = COLUMNS / CHUNK;   // of a tile
constexpr int K_TILES = 2;                     // tiles of 128 bytes along K
constexpr int STEPS = 8;                       // wgmma along K
constexpr int KEY_BYTES = SCALED ? 64 : 256;
constexpr int SCALE_BYTES = SCALED ? 4 : 0;    // of a key: four exponents
constexpr int LOADERS = 96;                    // threads that copy queries

// ---- Shared memory

constexpr u32 CHUNK_BYTES = K_TILES * CHUNK * 128, QUERY_BUFFER = MOST_CHUNKS * CHUNK_BYTES;
constexpr int BUFFERS = COLUMNS == 512 ? 1 : 2;  // two buffers of as many queries do not fit
constexpr u32 STAGE_BYTES = BLOCK * (KEY_BYTES + SCALE_BYTES);
constexpr u32 QUERIES = 0;                                       // [BUFFERS][MOST_CHUNKS][K_TILES][CHUNK][128 bytes]
constexpr u32 RING = QUERIES + BUFFERS * QUERY_BUFFER;           // [STAGES] keys, then scales
constexpr u32 WEIGHTS = RING + STAGES * STAGE_BYTES;             // [BUFFERS][COLUMNS / 16][4 lanes][4] floats
constexpr u32 BOUNDS = WEIGHTS + BUFFERS * COLUMNS * 4;          // [BUFFERS][BOUNDED][2] first and last key of each token
constexpr u32 PARTS = BOUNDS + BUFFERS * BOUNDED * 8;            // [BUFFERS] Part
constexpr u32 PRESENT = PARTS + BUFFERS * sizeof(Part);          // [STAGES] a bit for each 16 keys that exist
constexpr u32 COSTS = PRESENT + (STAGES + 3) / 4 * 16;           // [MOST_GROUPS + 1] costs of the groups before
constexpr u32 WARP_COSTS = COSTS + (MOST_GROUPS + 4) * 4;        // [32] costs of the groups of each warp
constexpr u32 FULL = WARP_COSTS + 128;                           // [STAGES] mbarriers, as all that follow
constexpr u32 EMPTY = FULL + STAGES * 8;
constexpr u32 QUERIES_FULL = EMPTY + STAGES * 8;                 // [BUFFERS]
constexpr u32 QUERIES_EMPTY = QUERIES_FULL + BUFFERS * 8;
constexpr u32 USED = QUERIES_EMPTY + BUFFERS * 8;
static_assert(USED <= SHARED_BYTES && FULL % 8 == 0 && STAGE_BYTES % 16 == 0, "shared memory is too small or not aligned");
static_assert(PARTS % 16 == 0 && BOUNDS % 8 == 0, "parts are stored 16 bytes at a time, bounds 8");
static_assert(STAGES % CONSUMERS == 0, "each consumer has its own stages");
// A CTA has the registers that it is launched with, as many for every thread. More than these would be waited for in vain.
static_assert(PRODUCE_REGISTERS + CONSUMERS * SCORE_REGISTERS <= THREADS / 128 * (65536 / THREADS / 8 * 8), "too many registers");

// What a block costs, relative to one that reads keys for a few tokens only, which takes as long as its product for half a tile.
__device__ __forceinline__ u32 block_cost(int tokens) { return tokens > TILE / 2 ? 2 : 1; }

#include "score_parts.cuh"

// ---- Producers

__device__ __forceinline__ u32 stage_address(u32 memory, int stage) { return memory + RING + stage * STAGE_BYTES; }

// Copies the blocks of keys of all parts, by one warp.
__device__ __forceinline__ void copy_keys(const ScoreParams& params, u32 memory, int groups) {
    for_each_block(params, memory, groups, [&](const BlockCopy& copy, u32 number) {
        const u32 address = stage_address(memory, copy.stage), full = memory + FULL + copy.stage * 8;
        const int rows = copy.rows;
        copy.wait(memory, number);
        copy.announce(memory, copy.present * (KEY_BYTES + SCALE_BYTES));
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int page = copy.pages.page[part], within = copy.within(params, part);
            if (page < 0) continue;
            const auto* keys = params.keys + page * params.key_page_stride + within * KEY_BYTES;
            const u32 to_keys = address + part * rows * KEY_BYTES;
            if (params.joined) {
                bulk_copy(to_keys, keys, BLOCK * (KEY_BYTES + SCALE_BYTES), full);
                continue;
            }
            bulk_copy(to_keys, keys, copy.present * KEY_BYTES, full);
            if (SCALED) {
                const auto* scales = params.scales + page * params.scale_page_stride + within * SCALE_BYTES;
                bulk_copy(address + BLOCK * KEY_BYTES + part * rows * SCALE_BYTES, scales, rows * SCALE_BYTES, full);
            }
        }
    });
}

// Four e4m3 numbers as bf16, which holds them exactly.
__device__ __forceinline__ uint2 e4m3x4_to_bf16(u32 codes) {
    u32 low, high;
    e4m3x4_to_fp16(codes, low, high);
    const float2 first = unpack_fp16(low), second = unpack_fp16(high);
    return make_uint2(pack_bf16(first.x, first.y), pack_bf16(second.x, second.y));
}

// Copies 32 dims of one head's query, as 16-bit numbers. `part` is their number, `column` that of the
// head in the tile. The word at (step s, half h, lane l) along K is word 16 * part + 4 * l + s % 4 of the query where 2 * (s / 4)
// + h is the part; for e2m1 keys it has the numbers 8 * v + n and 8 * v + n + 4 of part l, where 4 * v + n = 2 * s + h.
__device__ __forceinline__ void copy_query(const unsigned char* head, u32 queries, int column, int part) {
    const u32 chunk = queries + column / CHUNK * CHUNK_BYTES;
    const int row = column % CHUNK;
    if constexpr (KEYS == E2M1_KEYS) {
        u32 words[16];  // 32 numbers, the pairs of which are 0 and 1, 2 and 3, and so on
        if constexpr (QUERY_BYTES == 2) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const uint4 loaded = *reinterpret_cast<const uint4*>(head + part * 64 + i * 16);
                words[4 * i] = loaded.x, words[4 * i + 1] = loaded.y, words[4 * i + 2] = loaded.z, words[4 * i + 3] = loaded.w;
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const uint4 loaded = *reinterpret_cast<const uint4*>(head + part * 32 + i * 16);
                const u32 codes[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const uint2 four = e4m3x4_to_bf16(codes[j]);
                    words[8 * i + 2 * j] = four.x, words[8 * i + 2 * j + 1] = four.y;
                }
            }
        }
#pragma unroll
        for (int at = 0; at < 16; ++at) {
            const int eight = at / 4, n = at % 4, step = at / 2, half = at % 2;
            const u32 low = words[4 * eight + n / 2], high = words[4 * eight + n / 2 + 2];
            const u32 pair = __byte_perm(low, high, n % 2 ? 0x7632 : 0x5410);
            const u32 tile = chunk + step / 4 * CHUNK * 128;
            shared_store(tile + swizzled(row, 2 * (step % 4) + half) + part * 4, pair);
        }
    } else {
        const uint4* const from = reinterpret_cast<const uint4*>(head + part * 64);
        const uint4 w0 = from[0], w1 = from[1], w2 = from[2], w3 = from[3];
        const u32 tile = chunk + part / 2 * CHUNK * 128;
        const int half = part % 2;
        shared_store4(tile + swizzled(row, half), make_uint4(w0.x, w1.x, w2.x, w3.x));
        shared_store4(tile + swizzled(row, half + 2), make_uint4(w0.y, w1.y, w2.y, w3.y));
        shared_store4(tile + swizzled(row, half + 4), make_uint4(w0.z, w1.z, w2.z, w3.z));
        shared_store4(tile + swizzled(row, half + 6), make_uint4(w0.w, w1.w, w2.w, w3.w));
    }
}

// Copies the queries and weights of the tiles of all parts. By LOADERS threads, numbered by `thread`.
__device__ __forceinline__ void copy_queries(const ScoreParams& params, u32 memory, int groups, int thread) {
    publish_parts(params, memory, groups, thread, [&](int first, int count, int buffer) {
        const u32 queries = memory + QUERIES + buffer * QUERY_BUFFER;
        const int columns = count * HEADS;
        constexpr int PARTS_OF_A_HEAD = 4;  // of 32 dims
#pragma unroll 1
        for (int piece = thread; piece < columns * PARTS_OF_A_HEAD; piece += LOADERS) {
            const int column = piece % columns;
            const auto* head = params.q + (first + column / HEADS) * params.q_token_stride + column % HEADS * params.q_head_stride;
            copy_query(head, queries, column, piece / columns);
        }
        const u32 weights = memory + WEIGHTS + buffer * COLUMNS * 4;
#pragma unroll 1
        for (int column = thread; column < columns; column += LOADERS) {
            const long long token = first + column / HEADS;
            const float weight = load_weight(
                params, token * params.weight_token_stride + column % HEADS * params.weight_head_stride);
            // Lane l of a quad has columns 8 * i + 2 * l and the next one.
            const u32 at = column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
            shared_store(weights + at * 4, __float_as_uint(weight));
        }
    });
}

// ---- Consumers

// Bits of two e2m1 numbers, 16 apart in `codes`, as bf16 times the factor of their scale. As a subnormal or small bf16 number
// their three bits of exponent and mantissa are 2**-126 too small.
__device__ __forceinline__ u32 e2m1_to_bf16(u32 codes, u32 factor) {
    const u32 tiny = (codes & 0x00070007u) << 6 | (codes & 0x00080008u) << 12;
    return mul_bf16x2(mul_bf16x2(tiny, 0x7E807E80u), factor);
}

// What is needed of a thread's two keys after the products.
struct KeyPlaces {
    int position;   // of the first key; negative if its page is absent
    bool all_seen;  // whether all tokens see the whole block, the same in all threads
};

// A thread's part of a block of keys: the operand a of the block's products, for rows lane / 4 and lane / 4 + 8 of the warp's
// 16, which are the keys 2 * (lane / 4) and the next one. So a thread has the scores of two neighbours.
struct BlockKeys {
    u32 a[STEPS][4];
    KeyPlaces places;

    // `lane_keys` and `lane_scales` are offsets of the thread's first key and its scale in a stage.
    __device__ __forceinline__ void load(u32 block, u32 lane_keys, u32 lane_scales) {
        const u32 row = block + lane_keys;
        [[maybe_unused]] const int lane = threadIdx.x % 32, quad = lane / 4;
        if constexpr (KEYS == E2M1_KEYS) {
            // Even quads read their first key first, odd ones the second, so that eight lanes read 128 different bytes.
            const bool odd = quad % 2;
            const uint4 one = shared_load4(row + (odd ? KEY_BYTES : 0));
            const uint4 two = shared_load4(row + (odd ? 0 : KEY_BYTES));
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                const u32 exponent = shared_load(block + lane_scales + below * 4) >> lane % 4 * 8 & 0xFF;
                // 2**(exponent - 127) in bf16: 2**-127 is subnormal, and 255 stands for NaN.
                const u32 scale = exponent == 0 ? 0x40 : exponent == 255 ? 0x7FFF : exponent << 7;
                const u32 factor = scale << 16 | scale;
                const uint4 own = odd == (below == 1) ? one : two;
                const u32 words[4] = {own.x, own.y, own.z, own.w};
#pragma unroll
                for (int at = 0; at < 16; ++at) a[at / 2][at % 2 * 2 + below] = e2m1_to_bf16(words[at / 4] >> at % 4 * 4, factor);
            }
        } else {
            // Odd quads swap neighbouring units for the same reason.
            const bool odd = quad % 2;
#pragma unroll
            for (int below = 0; below < 2; ++below) {
#pragma unroll
                for (int unit = 0; unit < KEY_BYTES / 64; unit += 2) {
                    const u32 from = row + below * KEY_BYTES + unit * 64;
                    const uint4 one = shared_load4(from + (odd ? 64 : 0)), two = shared_load4(from + (odd ? 0 : 64));
                    const u32 ones[4] = {one.x, one.y, one.z, one.w}, twos[4] = {two.x, two.y, two.z, two.w};
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        a[unit * 2 + i][below] = odd ? twos[i] : ones[i];
                        a[unit * 2 + i][2 + below] = odd ? ones[i] : twos[i];
                    }
                }
            }
        }
        // The operand must be complete before the first product: nothing may write its registers between two of them.
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int i = 0; i < 4; ++i) a[step][i] = opaque(a[step][i]);
        }
    }
};

// The weights of a lane's 16 columns of 64.
struct Weights {
    float of[16];

    __device__ __forceinline__ void load(u32 address) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint4 loaded = shared_load4(address + i * 64);
            of[4 * i] = __uint_as_float(loaded.x), of[4 * i + 1] = __uint_as_float(loaded.y);
            of[4 * i + 2] = __uint_as_float(loaded.z), of[4 * i + 3] = __uint_as_float(loaded.w);
        }
    }
};

// Keeps the compiler from computing a number anew at every use.
__device__ __forceinline__ long long opaque64(long long number) {
    return static_cast<long long>(opaque(number >> 32)) << 32 | opaque(static_cast<u32>(number));
}

// One consumer's view of a part.
struct Scorer {
    const ScoreParams& params;
    u32 memory, weights;           // addresses of shared memory, and of the tile's weights for this lane
    unsigned long long queries;    // descriptor of the first chunk
    u32 bounds;                    // address of what the first token of this lane sees
    long long row;                 // offset of this lane's first token in the results
    int left;                      // tokens from this lane's first one on
    int least_start, least_end;    // all tokens see the block of a key within these, whichever key of it that is
    float acc[CHUNK / 2];          // accumulators of the product in flight
    float sums[8];                 // over a lane's heads, of four tokens: [token][key]

    __device__ __forceinline__ void multiply(const BlockKeys& keys, int chunk) {
        const unsigned long long b = advance(queries, chunk * CHUNK_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            const unsigned long long part = advance(b, step / 4 * CHUNK * 128 + step % 4 * 32);
            wgmma_rs<BF16>(acc, keys.a[step], part, step > 0);
        }
        wgmma_commit();
    }

    // Waits for the product, sums over the heads of its chunk, then over the quad, and stores the scores of four tokens, or of
    // all if they are fewer.
    template <int CHUNKS>
    __device__ __forceinline__ void finish(const KeyPlaces& keys, int chunk) {
        constexpr int EIGHTS = HEADS / 8, TOKENS = CHUNKS * CHUNK_TOKENS;  // n8 blocks of a token, tokens of the tile
        const int at = chunk * CHUNK_TOKENS % 4 * 2;
        Weights w;
        w.load(weights + chunk * CHUNK * 4);  // while the product runs
        wgmma_wait<0>(acc);
#pragma unroll
        for (int eight = 0; eight < CHUNK / 8; ++eight) {
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                float& sum = sums[at + eight / EIGHTS * 2 + below];
                const float one = relu(acc[eight * 4 + below * 2]);
                const float two = relu(acc[eight * 4 + below * 2 + 1]);
                sum = eight % EIGHTS == 0 ? one * w.of[eight * 2] : fmaf(one, w.of[eight * 2], sum);
                sum = fmaf(two, w.of[eight * 2 + 1], sum);
            }
        }
        if constexpr (TOKENS < 4) {
            if (chunk == CHUNKS - 1) store_few<TOKENS>(keys);
        } else {
            if ((chunk + 1) * CHUNK_TOKENS % 4 == 0) store_four(keys, chunk * CHUNK_TOKENS / 4);
        }
    }

    // Lane l of a quad gets the sums of token l. Any lane adds in the order (0 + 1) + (2 + 3).
    __device__ __forceinline__ void store_four(const KeyPlaces& keys, int number) {
        const bool odd = threadIdx.x % 2, upper = threadIdx.x / 2 % 2;
        float score[2];
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const float t0 = sums[below], t1 = sums[2 + below], t2 = sums[4 + below], t3 = sums[6 + below];
            const float low = (odd ? t1 : t0) + __shfl_xor_sync(FULL_MASK, odd ? t0 : t1, 1);
            const float high = (odd ? t3 : t2) + __shfl_xor_sync(FULL_MASK, odd ? t2 : t3, 1);
            score[below] = (upper ? high : low) + __shfl_xor_sync(FULL_MASK, upper ? low : high, 2);
        }
        store(keys, score, number);
    }

    // The same for one or two tokens: lane l and others have the sums of token l, and lane l stores.
    template <int TOKENS>
    __device__ __forceinline__ void store_few(const KeyPlaces& keys) {
        const bool odd = TOKENS == 2 && threadIdx.x % 2;
        float score[2];
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const float t0 = sums[below], t1 = sums[TOKENS == 2 ? 2 + below : below];
            const float both = (odd ? t1 : t0) + __shfl_xor_sync(FULL_MASK, odd ? t0 : t1, 1);
            score[below] = both + __shfl_xor_sync(FULL_MASK, both, 2);
        }
        store(keys, score, 0);
    }

    __device__ __forceinline__ void store(const KeyPlaces& keys, float (&score)[2], int number) {
        const int place = keys.position & 0x7FFFFFFF;
        if (!keys.all_seen) {
            const uint2 seen = shared_load2(bounds + number * 32);
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                const int position = keys.position + below;
                const bool sees = position >= static_cast<int>(seen.x) && position < static_cast<int>(seen.y);
                if (!sees) score[below] = __uint_as_float(MINUS_INFINITY);
            }
        }
        const bool exists = left > number * 4;
        float* const out = params.out + row + number * 4 * params.out_stride + place;
        if (params.pairs) {
            if (exists) *reinterpret_cast<float2*>(out) = make_float2(score[0], score[1]);
        } else {
            if (exists && place < params.width) out[0] = score[0];
            if (exists && place + 1 < params.width) out[1] = score[1];
        }
    }

    // Computes the blocks of a part that belong to this consumer: `blocks` of them, from `number` and `position` on. Only the
    // other consumers' products run while this one sums over heads; two sets of accumulators, for fewer consumers, were slower.
    template <int CHUNKS>
    __device__ __forceinline__ void score_part(int number, int blocks, int position) {
        u32 stage = number % STAGES, parity = number / STAGES % 2;
        const int lane = threadIdx.x % 32, key = threadIdx.x / 32 % WARPS * 16 + lane / 4 * 2;
        const u32 lane_keys = opaque(key * KEY_BYTES + lane % 4 * 16), lane_scales = opaque(BLOCK * KEY_BYTES + key * 4);
        position += key;
        BlockKeys keys;
#pragma unroll 1
        for (int i = 0; i < blocks; ++i) {
            mbarrier_wait(memory + FULL + stage * 8, parity);
            const u32 present = shared_load(memory + PRESENT + stage * 4);
            keys.load(stage_address(memory, stage), lane_keys, lane_scales);
            __syncwarp();  // all lanes have read the stage
            if (lane == 0) mbarrier_arrive(memory + EMPTY + stage * 8);
            keys.places.position = position;
            keys.places.all_seen = position >= least_start && position < least_end && present == 15;
            if (!(present >> threadIdx.x / 32 % WARPS & 1)) keys.places.position |= 0x80000000;
            stage += CONSUMERS;
            if (stage >= STAGES) stage -= STAGES, parity ^= 1;
            position += CONSUMERS * BLOCK;
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS; ++chunk) {
                multiply(keys, chunk);
                finish<CHUNKS>(keys.places, chunk);
            }
        }
    }
};

__device__ __forceinline__ void score(const ScoreParams& params, u32 memory, int consumer) {
    const int lane = threadIdx.x % 32;
    Scorer scorer = {params, memory};
    for (int part = 0;; ++part) {
        const int buffer = part % BUFFERS;
        mbarrier_wait(memory + QUERIES_FULL + buffer * 8, part / BUFFERS % 2);
        const u32 own = memory + PARTS + buffer * sizeof(Part);
        const uint4 words = shared_load4(own);
        const int blocks = warp_uniform(words.w), number = warp_uniform(shared_load(own + 16));
        if (blocks == 0) return;
        const int count = warp_uniform(words.y);
        const long long token = static_cast<int>(words.x) + lane % 4;
        scorer.row = opaque64(token * params.out_stride);
        scorer.left = count - lane % 4;
        scorer.queries = k_major(memory + QUERIES + buffer * QUERY_BUFFER);
        scorer.weights = memory + WEIGHTS + buffer * COLUMNS * 4 + lane % 4 * 16;
        scorer.bounds = memory + BOUNDS + (buffer * BOUNDED + lane % 4) * 8;
        const uint2 seen = shared_load2(memory + BOUNDS + (buffer * BOUNDED + lane % TILE) * 8);
        scorer.least_start = __reduce_max_sync(FULL_MASK, lane < count ? seen.x : 0) + BLOCK - 1;
        scorer.least_end = 0x7FFFFFFF - __reduce_max_sync(FULL_MASK, lane < count ? 0x7FFFFFFF - seen.y : 0) - BLOCK + 1;
        const int skip = (consumer + CONSUMERS - number % CONSUMERS) % CONSUMERS, mine = (blocks - skip + CONSUMERS - 1) / CONSUMERS;
        if (mine > 0) {
            const int begin = number + skip, position = static_cast<int>(warp_uniform(words.z)) + skip * BLOCK;
            if (count <= CHUNK_TOKENS) scorer.score_part<1>(begin, mine, position);
            else if (MOST_CHUNKS == 2 || count <= 2 * CHUNK_TOKENS) scorer.score_part<2>(begin, mine, position);
            else if (count <= 4 * CHUNK_TOKENS) scorer.score_part<4>(begin, mine, position);
            else scorer.score_part<MOST_CHUNKS>(begin, mine, position);
        }
        mbarrier_arrive(memory + QUERIES_EMPTY + buffer * 8);
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) index_scores(const __grid_constant__ ScoreParams params) {
    const u32 memory = tile_memory();
    const int warpgroup = threadIdx.x / 128, groups = (params.tokens + params.group - 1) / params.group;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(memory + FULL + stage * 8, 1);
            mbarrier_init(memory + EMPTY + stage * 8, WARPS);
        }
        for (int buffer = 0; buffer < BUFFERS; ++buffer) {
            mbarrier_init(memory + QUERIES_FULL + buffer * 8, LOADERS);
            mbarrier_init(memory + QUERIES_EMPTY + buffer * 8, CONSUMERS * 128);
        }
        fence_mbarrier_init();
    }
    wait_for_previous_kernel();
    sum_costs(params, memory, groups);
    let_next_kernel_start();
    if (warpgroup == 0) {
        warpgroup_reg_dealloc<PRODUCE_REGISTERS>();
        if (threadIdx.x < 32) copy_keys(params, memory, groups);
        else copy_queries(params, memory, groups, threadIdx.x - 32);
    } else {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        if (params.fill) fill_rows(params, threadIdx.x - 128, CONSUMERS * 128);
        score(params, memory, warpgroup - 1);
    }
}
