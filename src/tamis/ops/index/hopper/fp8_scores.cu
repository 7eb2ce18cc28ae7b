// Index scores of e4m3 keys with wgmma, on Hopper. CTAs are persistent, one per SM. `scores.cu` has the other key formats.
//
// Computes for each query token t and each key j that it sees: scale[j] * sum over heads h of weights[t, h] *
// relu(q[t, h] . key[j]). Keys are in pages or in one list, each with a scale.
//
// Keys are the rows (M) of the product, the heads of the tokens of a tile its columns (N), and both lie in shared memory. The
// order of all sums is fixed: a score has the same bits whichever tokens and keys are computed beside it.
//
// What bounds prompts is the number of instructions beside the products: above about 40 per scheduler for 64 keys and one
// token, each one costs a cycle (benchmarks/NOTES.md). Rectifying, weighing and adding the products of 64 heads takes 64. So
// nothing else may be done per product, and two layouts serve:
//   QUARTETS  Tiles of COLUMNS / HEADS tokens, for prompts. The heads of four tokens are interleaved: of every eight columns
//             two belong to each. A lane of a quad holds two columns of eight, so all its products are of one token: it sums
//             over heads alone, and has the weights of its token in registers.
//   else      Tiles of up to COLUMNS / HEADS tokens, for decodes, whose keys bound them. The columns of a token are
//             neighbours, and a sum over a quad of lanes follows.
// Either way four chains of sums, one for the heads 8i + 2p and 8i + 2p + 1 of each p < 4, end as (0 + 1) + (2 + 3).
//
// Work: a tile sees blocks of 64 keys. The blocks of all tiles, one tile after the other, are divided evenly among the CTAs,
// so that a CTA computes consecutive blocks of some tiles. Blocks that no token of a tile sees do not exist.
//
// Roles of the warpgroups:
//   0     produce  Warp 0 copies blocks of keys into a ring of stages. Warps 1 to 3 put the queries and weights of the next
//                  tile into the other one of two buffers.
//   1, 2  score    Consumers. Each has half of a tile's tokens and scores all blocks, or, where tokens are few, has all of them and
//                  takes every second block. Each has two sets of accumulators, so that its next product runs while it sums
//                  over the heads of the last one.
//
// Defined by the host: HEADS (16, 32 or 64), COLUMNS, QUARTETS (1 or 0), STAGES, THREADS, SHARED_BYTES, PARAMS_BYTES, and the
// registers per thread of the roles: SCORE_REGISTERS, PRODUCE_REGISTERS.
#include "instructions.cuh"
#include "warpgroups.cuh"
#include "score_params.cuh"

// ---- Shapes

constexpr int WARPS = 4;                       // of a warpgroup
constexpr int CONSUMERS = THREADS / 128 - 1;   // warpgroups
constexpr int TILE = COLUMNS / HEADS;          // most tokens of a tile
constexpr int BOUNDED = TILE + 4;              // places of their bounds, since lanes without a token read the last four
constexpr int CHUNK = QUARTETS ? 128 : 64;     // columns of a product
constexpr int OWN_COLUMNS = COLUMNS / (QUARTETS ? CONSUMERS : 1);  // of one consumer
constexpr int OWN_TOKENS = OWN_COLUMNS / HEADS;
constexpr int STEPS = 4;                       // wgmma along K
constexpr int EIGHTS = HEADS / 8;              // heads of a token in blocks of eight
constexpr int KEY_BYTES = 128, SCALE_BYTES = 4;
constexpr int LOADERS = 96;                    // threads that copy queries
static_assert(CONSUMERS == 2 && THREADS == 384 && OWN_COLUMNS == 2 * CHUNK, "a consumer has two products for a block");

// What a block costs, relative to one that occupies one consumer, or whose keys are waited for.
__device__ __forceinline__ u32 block_cost(int tokens) { return tokens > OWN_TOKENS ? 2 : 1; }

// ---- Shared memory

constexpr int BUFFERS = 2;  // for tiles
constexpr u32 KEYS_OF_A_STAGE = BLOCK * KEY_BYTES, SCALES_OF_A_STAGE = BLOCK * SCALE_BYTES;
constexpr u32 CHUNK_BYTES = CHUNK * 128, QUERY_BUFFER = COLUMNS * 128;
constexpr u32 QUERIES = 0;                                       // [BUFFERS][COLUMNS][128 bytes], swizzled
constexpr u32 KEY_RING = QUERIES + BUFFERS * QUERY_BUFFER;       // [STAGES][BLOCK][128 bytes], swizzled
constexpr u32 SCALE_RING = KEY_RING + STAGES * KEYS_OF_A_STAGE;  // [STAGES][BLOCK] floats
constexpr u32 WEIGHTS = SCALE_RING + STAGES * SCALES_OF_A_STAGE; // [BUFFERS][COLUMNS / 16][4 lanes][4] floats
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
static_assert(USED <= SHARED_BYTES && FULL % 8 == 0 && KEY_RING % 1024 == 0, "shared memory is too small or not aligned");
static_assert(PARTS % 16 == 0 && BOUNDS % 8 == 0, "parts are stored 16 bytes at a time, bounds 8");
static_assert(STAGES % CONSUMERS == 0, "each consumer has its own stages");
// A CTA has the registers that it is launched with, as many for every thread. More than these would be waited for in vain.
static_assert(PRODUCE_REGISTERS + CONSUMERS * SCORE_REGISTERS <= THREADS / 128 * (65536 / THREADS / 8 * 8), "too many registers");

#include "score_parts.cuh"

// ---- Producers

// Copies the blocks of keys of all parts, by one warp.
__device__ __forceinline__ void copy_keys(const ScoreParams& params, const TileMap& map, u32 memory, int groups) {
    for_each_block(params, memory, groups, [&](const BlockCopy& copy, u32 number) {
        const u32 keys = memory + KEY_RING + copy.stage * KEYS_OF_A_STAGE, full = memory + FULL + copy.stage * 8;
        const u32 scales = memory + SCALE_RING + copy.stage * SCALES_OF_A_STAGE;
        const int whole = copy.present / 4 * 4, rows = copy.rows;
        copy.wait(memory, number);
        // The last scales of a list may be no multiple of 16 bytes. The arrival publishes them.
        for (int at = whole; at < copy.present; ++at) {
            shared_store(scales + at * 4, reinterpret_cast<const u32*>(params.scales)[copy.block * BLOCK + at]);
        }
        copy.announce(memory, rows * KEY_BYTES + whole * SCALE_BYTES);
#pragma unroll
        for (int part = 0; part < 4; ++part) {
            const int page = copy.pages.page[part], within = copy.within(params, part);
            if (page < 0) continue;
            const int row = copy.listed ? copy.block * BLOCK : within;
            copy_tile(keys + part * rows * KEY_BYTES, map, row, copy.listed ? 0 : page, full);
            if (whole == 0) continue;
            const auto* from_scales = params.scales + page * params.scale_page_stride + within * SCALE_BYTES;
            bulk_copy(scales + part * rows * SCALE_BYTES, from_scales, whole * SCALE_BYTES, full);
        }
    });
}

// The row of shared memory that has the query of a head.
__device__ __forceinline__ int query_row(int token, int head) {
    if (!QUARTETS) return token * HEADS + head;
    return ((token / 4 * EIGHTS + head / 8) * 4 + head % 8 / 2) * 8 + token % 4 * 2 + head % 2;
}

// The place of its weight: lane l of a quad reads those of its columns, four at a time.
__device__ __forceinline__ u32 weight_place(int token, int head) {
    const int pair = head % 8 / 2, odd = head % 2;
    if (!QUARTETS) return (token * HEADS + head) / 16 * 16 + pair * 4 + head / 8 % 2 * 2 + odd;
    return (token / 4 * EIGHTS + head / 8) * 32 + pair / 2 * 16 + token % 4 * 4 + pair % 2 * 2 + odd;
}

// Copies the queries and weights of the tiles of all parts. By LOADERS threads, numbered by `thread`.
__device__ __forceinline__ void copy_queries(const ScoreParams& params, u32 memory, int groups, int thread) {
    publish_parts(params, memory, groups, thread, [&](int first, int count, int buffer) {
        const u32 queries = memory + QUERIES + buffer * QUERY_BUFFER;
        const int columns = count * HEADS;
        // Eight lanes read a query, which has 128 bytes.
#pragma unroll 4
        for (int unit = thread; unit < columns * 8; unit += LOADERS) {
            const int token = unit / 8 / HEADS, head = unit / 8 % HEADS;
            const auto* query = params.q + (first + token) * params.q_token_stride + head * params.q_head_stride;
            shared_store4(queries + swizzled(query_row(token, head), unit % 8), reinterpret_cast<const uint4*>(query)[unit % 8]);
        }
        const u32 weights = memory + WEIGHTS + buffer * COLUMNS * 4;
#pragma unroll 1
        for (int column = thread; column < columns; column += LOADERS) {
            const int token = column / HEADS, head = column % HEADS;
            const float weight = load_weight(params, (first + token) * params.weight_token_stride + head * params.weight_head_stride);
            // See `rectified`.
            shared_store(weights + weight_place(token, head) * 4, __float_as_uint(head % 2 == 0 ? 0.5f * weight : weight));
        }
    });
}

// ---- Consumers

// The larger of x and 0, or twice that: then the head has half of its weight in shared memory. A maximum and an addition run in
// different units, and neither unit alone keeps up with the products. Doubling and halving are exact (but for a subnormal
// weight), as long as x is finite, which products of e4m3 numbers are: below 2**25.
template <bool TWICE>
__device__ __forceinline__ float rectified(float x) {
    return TWICE ? x + fabsf(x) : relu(x);
}

// A consumer's place in the ring of stages, and what it knows of the block there. STEP is 1 if both consumers score all blocks, and
// CONSUMERS if they take them in turn. A thread has the products of the keys lane / 4 and lane / 4 + 8 of its warp's 16, for
// the consumer's token lane % 4, or with some multiple of tokens added.
template <int STEP>
struct Block {
    u32 memory, stage, parity;
    u32 lane_scale;  // address of the thread's first scale in stage 0
    int position;    // of the block's first key
    float* out;      // of the thread's token and first key
    u32 present;     // a bit for each 16 keys of the block that exist
    float scale[2];  // of the thread's keys

    __device__ __forceinline__ Block(u32 memory, int number, int position, float* row)
        : memory(memory), stage(number % STAGES), parity(number / STAGES % 2), position(position) {
        const int key = threadIdx.x / 32 % WARPS * 16 + threadIdx.x % 32 / 4;
        lane_scale = opaque(memory + SCALE_RING + key * SCALE_BYTES);
        out = row + position + key;
    }

    // Waits until the stage has the block.
    __device__ __forceinline__ void wait() const { mbarrier_wait(memory + FULL + stage * 8, parity); }

    __device__ __forceinline__ void load() {
        present = shared_load(memory + PRESENT + stage * 4);
        const u32 scales = lane_scale + stage * SCALES_OF_A_STAGE;
        scale[0] = __uint_as_float(shared_load(scales));
        scale[1] = __uint_as_float(shared_load(scales + 8 * SCALE_BYTES));
    }

    // Lets the stage be filled again, which no product of this consumer reads any more, and none of the other if it has not.
    __device__ __forceinline__ void release() const {
        __syncwarp();  // all lanes have read their scales
        if (threadIdx.x % 32 == 0) mbarrier_arrive(memory + EMPTY + stage * 8, STEP);
    }

    // Goes on to this consumer's next block.
    __device__ __forceinline__ void advance() {
        stage += STEP;
        if (stage >= STAGES) stage -= STAGES, parity ^= 1;
        position += STEP * BLOCK;
        out += STEP * BLOCK;
    }
};

// One consumer's view of a part.
struct Scorer {
    const ScoreParams& params;
    u32 memory, weights, bounds;       // addresses of shared memory, of the tile's weights, and of what its tokens see
    unsigned long long keys, queries;  // descriptors of the first stage and of the first chunk
    int left;                          // tokens from token lane % 4 on; 0 if this lane stores nothing
    int greatest_start, least_end;     // all tokens see the keys from the one to the other

    template <int N, class Place>
    __device__ __forceinline__ void multiply(float (&acc)[N], const Place& block, int chunk) const {
        const unsigned long long a = advance(keys, block.stage * KEYS_OF_A_STAGE), b = advance(queries, chunk * CHUNK_BYTES);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step) wgmma_ss_e4m3(acc, advance(a, step * 32), advance(b, step * 32), step > 0);
        wgmma_commit();
    }

    // Whether all tokens see the whole block.
    template <class Place>
    __device__ __forceinline__ bool all_seen(const Place& block) const {
        return block.position >= greatest_start && block.position + BLOCK <= least_end && block.present == 15;
    }

    // Stores the scores of the thread's two keys for token lane % 4 + `first`, if there is one.
    template <class Place>
    __device__ __forceinline__ void store(const Place& block, bool all_seen, int first, float one, float two) const {
        const bool exists = left > first;
        float* const own = block.out + first * params.out_stride;
        one *= block.scale[0], two *= block.scale[1];
        if (all_seen) {
            if (exists) own[0] = one, own[8] = two;
            return;
        }
        const uint2 seen = shared_load2(bounds + (first + threadIdx.x % 4) * 8);
        const bool is_present = block.present >> threadIdx.x / 32 % WARPS & 1;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const int at = block.position + threadIdx.x / 32 % WARPS * 16 + threadIdx.x % 32 / 4 + 8 * below;
            const bool sees = is_present && at >= static_cast<int>(seen.x) && at < static_cast<int>(seen.y);
            const float score = below ? two : one;
            if (exists && at < params.width) own[8 * below] = sees ? score : __uint_as_float(MINUS_INFINITY);
        }
    }
};

// Loads the weights of a lane's columns of `COUNT / 16` groups of 64 columns.
template <int COUNT>
__device__ __forceinline__ void load_weights(float (&weights)[COUNT], u32 address) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
        const uint4 loaded = shared_load4(address + i * 64 + threadIdx.x % 4 * 16);
        weights[4 * i] = __uint_as_float(loaded.x), weights[4 * i + 1] = __uint_as_float(loaded.y);
        weights[4 * i + 2] = __uint_as_float(loaded.z), weights[4 * i + 3] = __uint_as_float(loaded.w);
    }
}

// Adds the products of a key with two neighbouring heads to a chain.
__device__ __forceinline__ void add_pair(float& sum, bool begins, float even, float odd, float even_weight, float odd_weight) {
    const float one = rectified<true>(even), two = rectified<false>(odd);
    sum = begins ? one * even_weight : fmaf(one, even_weight, sum);
    sum = fmaf(two, odd_weight, sum);
}

// Tiles whose tokens are interleaved. Lane l of a quad has the tokens 4 * q + l.
struct Quartets {
    const Scorer& scorer;
    float weights[OWN_COLUMNS / 4];
    float sums[4][2];  // chains, keys

    __device__ __forceinline__ explicit Quartets(const Scorer& scorer) : scorer(scorer) { load_weights(weights, scorer.weights); }

    // Adds the products of a chunk, and stores the scores of the quartets that end in it.
    template <int NUMBER, class Place>
    __device__ __forceinline__ void add(const float (&acc)[CHUNK / 2], const Place& block, bool all_seen) {
#pragma unroll
        for (int eight = 0; eight < CHUNK / 8; ++eight) {
            const int all = NUMBER * (CHUNK / 8) + eight, chain = all % 4, i = all / 4 % EIGHTS, quartet = all / 4 / EIGHTS;
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                const float* pair = acc + eight * 4 + below * 2;
                add_pair(sums[chain][below], i == 0, pair[0], pair[1], weights[all * 2], weights[all * 2 + 1]);
            }
            if (chain == 3 && i == EIGHTS - 1) {
                const float first = (sums[0][0] + sums[1][0]) + (sums[2][0] + sums[3][0]);
                const float second = (sums[0][1] + sums[1][1]) + (sums[2][1] + sums[3][1]);
                scorer.store(block, all_seen, quartet * 4, first, second);
            }
        }
    }
};

// Tiles of few tokens, one after the other. A token's sums end in a quad of lanes.
struct FewTokens {
    const Scorer& scorer;
    float weights[OWN_COLUMNS / 4];

    __device__ __forceinline__ explicit FewTokens(const Scorer& scorer) : scorer(scorer) { load_weights(weights, scorer.weights); }

    template <int NUMBER, class Place>
    __device__ __forceinline__ void add(const float (&acc)[CHUNK / 2], const Place& block, bool all_seen) {
        constexpr int TOKENS = CHUNK / HEADS;
        const int lane = threadIdx.x % 4;
        float scores[2];
#pragma unroll
        for (int token = 0; token < TOKENS; ++token) {
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                float sum = 0.0f;
#pragma unroll
                for (int i = 0; i < EIGHTS; ++i) {
                    const float* pair = acc + (token * EIGHTS + i) * 4 + below * 2;
                    const int own = ((NUMBER * TOKENS + token) * EIGHTS + i) * 2;
                    add_pair(sum, i == 0, pair[0], pair[1], weights[own], weights[own + 1]);
                }
                sum += __shfl_xor_sync(FULL_MASK, sum, 1);
                sum += __shfl_xor_sync(FULL_MASK, sum, 2);
                if (lane == token) scores[below] = sum;
            }
        }
        scorer.store(block, all_seen, NUMBER * TOKENS, scores[0], scores[1]);
    }
};

// Scores this consumer's blocks of a part, with as many products of each as the tile's tokens need. Both are issued at once; while
// the second is added up, the other consumer's run. A product in flight from one block to the next gained nothing.
template <int PRODUCTS, class Tokens, class Place>
__device__ __forceinline__ void score_blocks(const Scorer& scorer, Tokens& tokens, Place& block, int blocks) {
    float one[CHUNK / 2], two[CHUNK / 2];
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
        block.wait();
        scorer.multiply(one, block, 0);
        if constexpr (PRODUCTS == 2) scorer.multiply(two, block, 1);
        block.load();
        const bool all_seen = scorer.all_seen(block);
        wgmma_wait<PRODUCTS - 1>(one);
        if constexpr (PRODUCTS == 2) {
            tokens.template add<0>(one, block, all_seen);
            wgmma_wait<0>(two);
            block.release();
            tokens.template add<1>(two, block, all_seen);
        } else {
            block.release();
            tokens.template add<0>(one, block, all_seen);
        }
        block.advance();
    }
}

__device__ __forceinline__ void score(const ScoreParams& params, u32 memory, int consumer) {
    const int lane = threadIdx.x % 32;
    Scorer scorer = {params, memory};
    scorer.keys = k_major(memory + KEY_RING);
    for (int part = 0;; ++part) {
        const int buffer = part % BUFFERS;
        mbarrier_wait(memory + QUERIES_FULL + buffer * 8, part / BUFFERS % 2);
        const u32 own = memory + PARTS + buffer * sizeof(Part);
        const uint4 words = shared_load4(own);
        const int blocks = warp_uniform(words.w), number = warp_uniform(shared_load(own + 16));
        if (blocks == 0) return;
        const int count = warp_uniform(words.y), position = static_cast<int>(warp_uniform(words.z)), token = lane % 4;
        // Tiles of many tokens are divided between the consumers, which then score all blocks, and others are not.
        const bool divided = QUARTETS && count > OWN_TOKENS;
        const int first = divided ? consumer * OWN_TOKENS : 0;
        scorer.left = QUARTETS || token < CHUNK / HEADS ? count - first - token : 0;
        scorer.queries = k_major(memory + QUERIES + buffer * QUERY_BUFFER + first * HEADS * 128);
        scorer.weights = memory + WEIGHTS + (buffer * COLUMNS + first * HEADS) * 4;
        scorer.bounds = memory + BOUNDS + (buffer * BOUNDED + first) * 8;
        const uint2 seen = shared_load2(memory + BOUNDS + (buffer * BOUNDED + lane % TILE) * 8);
        scorer.greatest_start = __reduce_max_sync(FULL_MASK, lane < count ? seen.x : 0);
        scorer.least_end = 0x7FFFFFFF - __reduce_max_sync(FULL_MASK, lane < count ? 0x7FFFFFFF - seen.y : 0);
        float* const row = params.out + (static_cast<long long>(words.x) + first + token) * params.out_stride;
        const int skip = (consumer + CONSUMERS - number % CONSUMERS) % CONSUMERS, mine = (blocks - skip + CONSUMERS - 1) / CONSUMERS;
        if constexpr (QUARTETS) {
            Quartets quartets(scorer);
            if (divided) {
                Block<1> block(memory, number, position, row);
                score_blocks<2>(scorer, quartets, block, blocks);
            } else {
                Block<CONSUMERS> block(memory, number + skip, position + skip * BLOCK, row);
                score_blocks<2>(scorer, quartets, block, mine);
            }
        } else {
            FewTokens tokens(scorer);
            Block<CONSUMERS> block(memory, number + skip, position + skip * BLOCK, row);
            if (count <= CHUNK / HEADS) score_blocks<1>(scorer, tokens, block, mine);
            else score_blocks<2>(scorer, tokens, block, mine);
        }
        mbarrier_arrive(memory + QUERIES_EMPTY + buffer * 8);
    }
}

// ---- Kernel

extern "C" __global__ void __launch_bounds__(THREADS, 1) index_scores(
    const __grid_constant__ ScoreParams params, const __grid_constant__ TileMap map) {
    const u32 memory = tile_memory();
    const int warpgroup = threadIdx.x / 128, groups = (params.tokens + params.group - 1) / params.group;
    if (threadIdx.x == 0) {
        prefetch_tile_map(map);
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(memory + FULL + stage * 8, 1);
            mbarrier_init(memory + EMPTY + stage * 8, CONSUMERS * WARPS);
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
        if (threadIdx.x < 32) copy_keys(params, map, memory, groups);
        else copy_queries(params, memory, groups, threadIdx.x - 32);
    } else {
        warpgroup_reg_alloc<SCORE_REGISTERS>();
        if (params.fill) fill_rows(params, threadIdx.x - 128, CONSUMERS * 128);
        score(params, memory, warp_uniform(warpgroup) - 1);
    }
}
