// What an item of work reads and where its results go. An item is a query token and HEADS heads, or a part of the rows of
// one: the first tokens of a launch are whole and go straight into the output, the others are cut into parts that another
// kernel merges. Comes after `instructions.cuh`; the kernel says how many HEADS an item has, of how many VALUES, how many
// SELECTIONS there are (1 or 2), how many rows are a block of them (STEP_ROWS), how many blocks are not cut apart
// (TOGETHER), and how long rows are (ROW_BYTES).

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xFF800000u); }

// ---- What to attend to

struct Selection {
    const unsigned char* start;
    long long page_stride;
    int page_size, page_shift, pages;  // a page's size as a power of two; negative: it is none
    const int* slots;  // of the first query token
    long long token_stride, column_stride;
    int length;
    const int* table;  // of the token's request; null: slots are no positions
    int table_width;
};

#define SELECTION(n)                                                                                                   \
    const unsigned char *start##n, long long page_stride##n, int page_size##n, int pages##n, const int *slots##n,      \
        long long token_stride##n, long long column_stride##n, int columns##n, const int *lengths##n,                  \
        const int *request_ids##n, const int *table##n, long long table_stride##n, int table_width##n, int requests##n

#define SELECTION_VALUES(n)                                                                                            \
    start##n, page_stride##n, page_size##n, pages##n, slots##n, token_stride##n, column_stride##n, columns##n,         \
        lengths##n, request_ids##n, table##n, table_stride##n, table_width##n, requests##n

// Of one query token. A token of an unknown request selects nothing.
__device__ __forceinline__ Selection selection_of(long long token, SELECTION()) {
    const int shift = page_size & page_size - 1 ? -1 : __ffs(page_size) - 1;
    Selection made = {start, page_stride, page_size, shift, pages, slots, token_stride, column_stride, columns, nullptr,
                      table_width};
    if (columns > 0 && lengths != nullptr) made.length = min(max(lengths[token], 0), columns);
    if (columns > 0 && table != nullptr) {
        const int request = request_ids[token];
        const bool known = request >= 0 && request < requests;
        made.table = table + (known ? request : 0) * table_stride;
        if (!known) made.length = 0;
    }
    return made;
}

// Blocks of STEP_ROWS columns of one selection, then of the other.
struct Work {
    int token;
    Selection first, second;
    int first_blocks;
    int begin, end;  // blocks of this item

    __device__ __forceinline__ int blocks() const {
        return first_blocks + (SELECTIONS > 1 ? (second.length + STEP_ROWS - 1) / STEP_ROWS : 0);
    }
};

// Follows one column of every block: the slot two blocks ahead, its page one block ahead. Which selection a block is of
// is the same for all lanes; everything is chosen by it first and loaded once, as a load into a register that another
// one is still on the way to would wait for that.
struct Follower {
    const Work& work;
    int column;  // within a block
    int block;   // whose slot is `slot`
    int slot, page = -1, within = 0;
    bool page_in_second = false;

    // Two slots are on their way at once: at the beginning everybody waits for them.
    __device__ __forceinline__ Follower(const Work& work, int column)
        : work(work), column(column), block(work.begin + 1) {
        const int first = load_slot(work.begin);
        slot = load_slot(block);
        find_page(first, work.begin);
    }

    // Whether a block is of the second selection.
    __device__ __forceinline__ bool is_later(int block) const { return SELECTIONS > 1 && block >= work.first_blocks; }

    __device__ __forceinline__ int load_slot(int block) const {
        const bool later = is_later(block);
        const int at = (block - (later ? work.first_blocks : 0)) * STEP_ROWS + column;
        const int length = block < work.end ? (later ? work.second.length : work.first.length) : 0;
        const int* const slots = later ? work.second.slots : work.first.slots;
        const long long stride = later ? work.second.column_stride : work.first.column_stride;
        const long long token_stride = later ? work.second.token_stride : work.first.token_stride;
        return at < length ? slots[work.token * token_stride + at * stride] : -1;
    }

    // Of a block's slot.
    __device__ __forceinline__ void find_page(int slot, int block) {
        const bool later = page_in_second = is_later(block);
        const int size = later ? work.second.page_size : work.first.page_size;
        const int shift = later ? work.second.page_shift : work.first.page_shift;
        const int width = later ? work.second.table_width : work.first.table_width;
        const int* const table = later ? work.second.table : work.first.table;
        const int number = shift >= 0 ? slot >> shift : slot / size;  // negative where the slot is, or zero
        within = slot - number * size;
        page = slot < 0 ? -1 : number;
        if (table != nullptr && slot >= 0) page = number < width ? table[number] : -1;
    }

    // Of the next block; null where there is no row. `after`: eight bytes for each row of a page, beyond all of them.
    __device__ __forceinline__ const unsigned char* next(const unsigned char*& after) {
        const bool later = page_in_second;
        const long long stride = later ? work.second.page_stride : work.first.page_stride;
        const unsigned char* const start = (later ? work.second.start : work.first.start) + page * stride;
        const bool there = static_cast<u32>(page) < static_cast<u32>(later ? work.second.pages : work.first.pages);
        const long long size = later ? work.second.page_size : work.first.page_size;
        const unsigned char* const row = there ? start + within * static_cast<long long>(ROW_BYTES) : nullptr;
        after = start + size * ROW_BYTES + within * 8ll;
        find_page(slot, block);
        slot = load_slot(++block);
        return row;
    }

    __device__ __forceinline__ const unsigned char* next() {
        const unsigned char* after;
        return next(after);
    }
};

// ---- Where results go

struct Output {
    void* start;  // of the part, token and first head
    long long head_stride;
    int heads;   // of this item
    int kind;    // of numbers: 0 float32, 1 bf16, 2 fp16
    const float* sink;
    float *lse, *tops;

    // A fragment of 128 columns of the 64 heads of four warps, each head times a factor.
    __device__ __forceinline__ void store(const float (&values)[64], int column, float upper, float lower) const {
        if (kind == 0) store_wide(values, column, upper, lower);
        else if (kind == 1) store_narrow<true>(values, column, upper, lower);
        else store_narrow<false>(values, column, upper, lower);
    }

    __device__ __forceinline__ void store_wide(const float (&values)[64], int column, float upper, float lower) const {
        const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            if (head + 8 * below >= heads) continue;
            const float factor = below ? lower : upper;
            float* const at = static_cast<float*>(start) + (head + 8 * below) * head_stride + column + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                *reinterpret_cast<float2*>(at + 8 * i) =
                    make_float2(values[4 * i + 2 * below] * factor, values[4 * i + 2 * below + 1] * factor);
            }
        }
    }

    // A lane has two neighbours in each of two groups of eight columns. It swaps with the next lane, for four in one of
    // them: memory is written in whole sectors then.
    template <bool AS_BF16>
    __device__ __forceinline__ void store_narrow(const float (&values)[64], int column, float upper, float lower) const {
        const int lane = threadIdx.x % 32, head = threadIdx.x / 32 % 4 * 16 + lane / 4, odd = lane % 2;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const float factor = below ? lower : upper;
            const long long at = (head + 8 * below) * head_stride + column + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
            for (int i = 0; i < 16; i += 2) {
                u32 words[2];
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float a = values[4 * (i + j) + 2 * below] * factor, b = values[4 * (i + j) + 2 * below + 1] * factor;
                    words[j] = AS_BF16 ? pack_bf16(a, b) : pack_fp16(a, b);
                }
                const u32 other = __shfl_xor_sync(FULL_MASK, odd ? words[0] : words[1], 1);
                if (head + 8 * below < heads) {
                    *reinterpret_cast<uint2*>(static_cast<unsigned short*>(start) + at + 8 * i) =
                        odd ? make_uint2(other, words[1]) : make_uint2(words[0], other);
                }
            }
        }
    }
};

// ---- Items of a launch

// Whole tokens fill out [T, H, 512], lse and tops [T, H]; the others parts_out [parts, T - whole, H, 512] and so on.
struct Results {
    void* out;
    int kind;
    long long token_stride, head_stride;
    float *lse, *tops, *parts_out, *parts_lse, *parts_tops;
    const float* sink;
};

struct Items {
    int tokens, heads, whole, parts;

    __device__ __forceinline__ int groups() const { return (heads + HEADS - 1) / HEADS; }
    __device__ __forceinline__ int count() const { return (whole + (tokens - whole) * parts) * groups(); }
    __device__ __forceinline__ int first_head(int item) const { return item % groups() * HEADS; }

    // Counts parts of tokens that are cut; negative: its token is whole.
    __device__ __forceinline__ int cut(int item) const { return item / groups() - whole; }

    __device__ __forceinline__ long long token(int item) const {
        const int part = cut(item);
        return whole + (part < 0 ? part : part / parts);
    }

    __device__ __forceinline__ Work work(int item, const Selection& first, const Selection& second) const {
        Work work = {static_cast<int>(token(item)), first, second, (first.length + STEP_ROWS - 1) / STEP_ROWS};
        const int part = cut(item), blocks = work.blocks();
        const long long units = (blocks + TOGETHER - 1) / TOGETHER;
        work.begin = part < 0 ? 0 : static_cast<int>(units * (part % parts) / parts * TOGETHER);
        work.end = part < 0 ? blocks : min(static_cast<int>(units * (part % parts + 1) / parts * TOGETHER), blocks);
        return work;
    }

    __device__ __forceinline__ Output place(int item, const Results& to) const {
        const int part = cut(item), first = first_head(item), here = min(heads - first, HEADS);
        if (part < 0) {
            const long long at = token(item) * to.token_stride + first * to.head_stride, row = token(item) * heads + first;
            void* const start = static_cast<char*>(to.out) + at * (to.kind == 0 ? 4 : 2);
            return {start, to.head_stride, here, to.kind, to.sink == nullptr ? nullptr : to.sink + first, to.lse + row, to.tops + row};
        }
        const long long row = (static_cast<long long>(part % parts) * (tokens - whole) + part / parts) * heads + first;
        return {to.parts_out + row * VALUES, VALUES, here, 0, nullptr, to.parts_lse + row, to.parts_tops + row};
    }
};
