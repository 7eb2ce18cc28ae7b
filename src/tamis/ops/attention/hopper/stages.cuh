// The shapes and the shared memory of `many_heads.cu`: queries, and a ring of two stages of 64 rows each.
//
// The columns of a stage are five chunks with an empty mbarrier each; the first has no columns if rows have 512. A chunk is
// refilled as soon as it has been read for the last time: columns 512 and up, which are only keys, after the product with
// queries; a quarter of the values after the warpgroup that holds these columns of the output has added it.
#pragma once
#include "items.cuh"

constexpr int WARPS = 4;                       // warps of a warpgroup
constexpr int WARP_ROWS = BLOCK_ROWS / WARPS;  // rows of a block that one producer warp widens
constexpr int WIDTH = V4 ? 512 : 512 + ROPE_COLUMNS, TILES = WIDTH / 64;  // columns of a row, and tiles of 64 columns
constexpr int LATENT = V4 ? 448 : 512;                                    // columns in e4m3, one byte each
constexpr int TAIL_COLUMNS = WIDTH - LATENT;                              // columns in bf16
constexpr int TAIL_AT = V4 ? 448 : 528;                                   // their offset in a row, in bytes
constexpr int ROW_BYTES = TAIL_AT + 2 * TAIL_COLUMNS;                     // without V4's exponent bytes
constexpr int SCALE_BYTES = V4 ? 8 : 16;                                  // of a row
constexpr u32 TILE_BYTES = 64 * 128;
constexpr int STAGES = 2;        // of the ring; a stage holds a block of 64 rows
constexpr int CHUNKS = 5;        // of the columns of a stage
constexpr u32 NO_ROW = 0xBF80;   // the factor of a row that does not exist: -1, which no other row has

// The chunks of a stage in the order in which they are released: columns 512 and up; the two quarters of the values that the
// stage's own warpgroup adds, which has the weights first; the two that the other warpgroup adds. They are filled in three
// loads with a full mbarrier each, the first three chunks together.
__device__ constexpr int chunk_of(int stage, int half, int quarter) { return (half == stage ? 1 : 3) + quarter; }
__device__ constexpr int first_tile(int stage, int chunk) {
    return chunk == 0 ? 8 : (chunk < 3 ? stage : 1 - stage) * 4 + (chunk - 1) % 2 * 2;
}
__device__ constexpr int tiles_of(int chunk) { return chunk == 0 ? TILES - 8 : 2; }
constexpr int LOADS = 3;
__device__ constexpr int first_chunk(int load) { return load == 0 ? 0 : load + 2; }
__device__ constexpr int last_chunk(int load) { return load + 2; }

// V4 has room for scales and bf16 columns.
constexpr u32 STAGE_BYTES = TILES * TILE_BYTES, FACTOR_BYTES = BLOCK_ROWS * 2;
constexpr u32 QUERIES = 0;                              // [TILES][64 heads][64 columns] fp16; V3.2's last tile bf16
constexpr u32 RING = QUERIES + STAGE_BYTES;             // [STAGES][TILES][64 rows][64 columns] fp16, as queries
constexpr u32 WEIGHTS = RING + STAGES * STAGE_BYTES;    // [WARPS][4][32] fragments, written by the warpgroups in turn
constexpr u32 TAILS = WEIGHTS + WARPS * 4 * 32 * 16;    // V4: [STAGES][64 rows][64 columns] bf16
constexpr u32 SCALES = TAILS + (V4 ? STAGES * TILE_BYTES : 0);  // V4: [STAGES][BLOCK_ROWS][8] as in the cache
constexpr u32 FACTORS = SCALES + (V4 ? STAGES * BLOCK_ROWS * SCALE_BYTES : 0);  // [STAGES][4][8][2] bf16: 2**E, or NO_ROW
constexpr u32 RESCALE = FACTORS + STAGES * FACTOR_BYTES;  // [WARPS][8][4] rescale factors and running max of two heads
constexpr u32 HEAD_SCALE = RESCALE + WARPS * 8 * 16;    // [HEADS] scales of the queries
constexpr u32 REFERENCE = HEAD_SCALE + HEADS * 4;       // [WARPS] the largest 2**E so far
constexpr u32 TOTALS = REFERENCE + WARPS * 4;           // [2][HEADS] sums of both warpgroups, at the end
constexpr u32 PLACE = TOTALS + 2 * HEADS * 4;           // token, first head and split of the work item
constexpr u32 FULL = PLACE + 16;                        // [STAGES][LOADS] mbarriers, as all that follow
constexpr u32 EMPTY = FULL + STAGES * LOADS * 8;        // [STAGES][CHUNKS]
constexpr u32 WEIGHTS_FULL = EMPTY + STAGES * CHUNKS * 8;  // [2][WARPS] one for each warp that publishes weights
constexpr u32 USED = WEIGHTS_FULL + 2 * WARPS * 8;
static_assert(USED <= SHARED_BYTES && FULL % 8 == 0, "shared memory is too small or not aligned");

__device__ __forceinline__ u32 stage_tiles(u32 memory, int stage) { return memory + RING + stage * STAGE_BYTES; }
__device__ __forceinline__ u32 full(u32 memory, int stage, int load) { return memory + FULL + (stage * LOADS + load) * 8; }
__device__ __forceinline__ u32 empty(u32 memory, int stage, int chunk) { return memory + EMPTY + (stage * CHUNKS + chunk) * 8; }
