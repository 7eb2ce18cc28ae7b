// The parameters of the scorers, `scores.cu` and `fp8_scores.cu`, and their common constants.
#pragma once
#include "instructions.cuh"

// The parameters of a launch. T is the number of tokens, B of requests.
struct ScoreParams {
    const unsigned char* q;         // [T, HEADS, 128] numbers
    long long q_token_stride;       // in bytes, as all strides of q
    long long q_head_stride;
    const void* weights;            // [T, HEADS]
    long long weight_token_stride;  // in elements
    long long weight_head_stride;
    const unsigned char* keys;      // pages of keys, each with its numbers side by side, or one list of keys
    long long key_page_stride;      // in bytes
    const unsigned char* scales;    // the pages' scales; null if keys have none
    long long scale_page_stride;    // in bytes
    const int* request_ids;         // [T]; null if keys are one list, as are the block table and its sizes
    const int* block_table;         // [B, table_width]
    long long table_stride;         // in elements
    const int* starts;              // [T], the first key that each token sees; null if it is 0
    const int* ends;                // [T], one past the last
    float* out;                     // [T, width]
    long long out_stride;           // in elements
    int weight_type;                // 0 float32, 1 bf16, 2 fp16
    int pages;                      // that exist
    int page_size;                  // 16, 32, or a multiple of 64; keys of one list are pages of 64
    int requests;                   // B
    int table_width;                // pages of a request
    int listed_keys;                // keys of a request that have a column and an entry in the table; or of the list
    int tokens;                     // T
    int group;                      // tokens that may be one tile, at most COLUMNS / HEADS
    int width;                      // columns of the result
    int fill;                       // whether -inf is written past the keys that tiles see
    int pairs;                      // whether two neighbouring scores may be stored at once
    int joined;                     // whether a page has 64 keys, and their scales follow them
};

static_assert(sizeof(ScoreParams) == PARAMS_BYTES, "ScoreParams differs from its twin in scores.py");

constexpr int BLOCK = 64;          // keys of a block
constexpr int MOST_GROUPS = 2048;  // groups of tokens in a launch
constexpr u32 MINUS_INFINITY = 0xFF800000u;

// What consumers know about a tile's part that their CTA computes. `blocks` is 0 after the last one.
struct Part {
    int first, count;   // tokens
    int position;       // of the first key
    int blocks;
    int number;         // of the first block, in the CTA's sequence of blocks
    int padding[3];
};
