// Rows of a cache on their way into shared memory: what a launch works on, and the warps that look up slots and copy
// rows into rings of stages, 32 to a stage. Comes after `instructions.cuh`.
//
// Defined by who includes it: ROW, bytes of a row, and PITCH, from one to the next in shared memory; STAGES of a ring;
// STREAMS, rings among which the columns of an item are dealt out; PRODUCERS, warps of a ring, which share the first
// SHARED_STAGES and take turns at the others; ROUND, stages that a ring's consumers take at a time, so that an item has a
// multiple of them.

constexpr int STAGE = 32;  // rows
constexpr int STAGE_BYTES = STAGE * PITCH;
constexpr int FILLING = ROUND == 1 ? PRODUCERS : STAGE;  // arrivals when a stage is full: of warps, or for each row
constexpr int STEP = STAGE * STREAMS;  // columns from one stage of a stream to its next
// Barriers tell two rounds apart: no warp may be further ahead of the ring's consumers.
static_assert(STAGES >= PRODUCERS && STAGES >= ROUND, "a step leads once around the ring at most");

// ---- What a launch works on

struct Work {
    const unsigned char* rows;
    long long page_stride;
    int page_size, pages;
    const int* slots;
    long long slots_token_stride, slots_column_stride;
    int columns;
    const int* lengths;  // null: every column counts
    const int* request_ids;  // with the table: slots are positions
    const int* block_table;
    long long table_stride;
    int table_width, requests;
    int whole, items, parts, part_columns;

    // Items of whole tokens come first.
    __device__ __forceinline__ int token_of(int item) const {
        return item < whole ? item : whole + (item - whole) / parts;
    }

    __device__ __forceinline__ int part_of(int item) const { return item < whole ? 0 : (item - whole) % parts; }

    // Asks for what a block's first rows wait for, one thing after the other; it may still change.
    __device__ __forceinline__ void prefetch_first(int thread) const {
        const int item = opaque(blockIdx.x), token = token_of(item), column = part_of(item) * part_columns + thread;
        if (item >= items) return;
        if (column < columns) prefetch_l2(slots + token * slots_token_stride + column * slots_column_stride);
        if (thread == 0 && lengths != nullptr) prefetch_l2(lengths + token);
        if (thread == 0 && block_table != nullptr) prefetch_l2(request_ids + token);
    }
};

// A stage of a stream's ring, and which pass over the ring this is.
struct Place {
    u32 ring, barriers, notes;
    int stage = 0;
    u32 parity = 0;

    // Of what all rings have, one after the other: rows, barriers (full, then empty, for each stage), and notes: which
    // rows count, and whether the item ends here.
    __device__ __forceinline__ Place(u32 rings, u32 barriers, u32 notes, int stream)
        : ring(rings + stream * STAGES * STAGE_BYTES),
          barriers(barriers + stream * STAGES * 16),
          notes(notes + stream * STAGES * 8) {}

    __device__ __forceinline__ u32 full() const { return barriers + 16 * stage; }
    __device__ __forceinline__ u32 empty() const { return barriers + 16 * stage + 8; }
    __device__ __forceinline__ u32 note() const { return notes + 8 * stage; }
    __device__ __forceinline__ u32 rows() const { return ring + stage * STAGE_BYTES; }

    __device__ __forceinline__ void advance(int stages = 1) {
        stage += stages;
        if (stage >= STAGES) {
            stage -= STAGES;
            parity ^= 1;
        }
    }
};

// ---- Producer

// A stage that exists, and whether it is the last one of its item in this stream; together, as registers are few.
constexpr u32 EXISTS = 1, LAST_STAGE = 2;

// One lane's share of a stage.
struct Wanted {
    u32 kind;
    int found;  // slot or position, -1: nothing
    int request;  // whose positions are in the table's row
};

struct Found {
    u32 kind;
    int page, row;
};

// Walks over the stages of a stream, item after item. An item has at least one round, though it may be empty.
struct Walk {
    const Work& work;
    const int stream;
    int item, column, end, stop;
    int request;
    const int* slots;

    __device__ __forceinline__ Walk(const Work& work, int stream) : work(work), stream(stream), item(blockIdx.x) {
        enter();
    }

    __device__ __forceinline__ void enter() {
        if (item >= work.items) return;
        const int token = work.token_of(item), begin = work.part_of(item) * work.part_columns;
        end = item < work.whole ? work.columns : min(begin + work.part_columns, work.columns);
        if (work.lengths != nullptr) end = min(end, work.lengths[token]);
        request = 0;
        if (work.block_table != nullptr) {
            request = work.request_ids[token];
            if (request < 0 || request >= work.requests) end = begin;
        }
        slots = work.slots + token * work.slots_token_stride;
        column = begin + stream * STAGE;
        stop = ROUND == 1 ? end : begin + max((end - begin + ROUND * STEP - 1) / (ROUND * STEP), 1) * ROUND * STEP;
    }

    __device__ __forceinline__ void skip(int stages) {
#pragma unroll 1
        for (int i = 0; i < stages && item < work.items; ++i) {
            column += STEP;
            if (column < stop) continue;
            item += gridDim.x;
            enter();
        }
    }

    // What this lane fetches for the stage at hand; moves on to the producer's next one.
    __device__ __forceinline__ Wanted next(int stages) {
        const bool exists = item < work.items;
        Wanted wanted = {exists ? EXISTS | (column + ROUND * STEP >= stop ? LAST_STAGE : 0) : 0, -1, request};
        const int mine = column + threadIdx.x % 32;
        if (exists && mine < end) wanted.found = slots[mine * work.slots_column_stride];
        skip(stages);
        return wanted;
    }
};

__device__ __forceinline__ Found look_up(const Work& work, const Wanted& wanted) {
    Found found = {wanted.kind, -1, 0};
    if (wanted.found < 0) return found;
    const u32 page = static_cast<u32>(wanted.found) / static_cast<u32>(work.page_size);
    found.row = wanted.found - page * work.page_size;
    if (work.block_table == nullptr) {
        found.page = page;
    } else if (page < static_cast<u32>(work.table_width)) {
        found.page = work.block_table[wanted.request * work.table_stride + page];
    }
    return found;
}

// A stage, or this warp's share of it.
__device__ __forceinline__ void copy_stage(const Work& work, Found found, int warp, bool shared, const Place& place) {
    const int lane = threadIdx.x % 32;
    const u32 counted = __ballot_sync(FULL_MASK, found.page >= 0 && found.page < work.pages);
    // Rows that do not count are copies of one that does: their weights are zero, so they must be numbers.
    const int stand_in = counted ? __ffs(counted) - 1 : 0;
    const int page = __shfl_sync(FULL_MASK, found.page, stand_in), row = __shfl_sync(FULL_MASK, found.row, stand_in);
    if (!(counted >> lane & 1)) {
        found.page = page;
        found.row = row;
    }
    mbarrier_wait(place.empty(), place.parity ^ 1);
    __syncwarp();  // an empty stage comes back at once: a lane that still waited would miss it
    if (lane == 0 && !(shared && warp > 0)) {
        shared_store(place.note(), counted);
        shared_store(place.note() + 4, found.kind & LAST_STAGE);
    }
    if (ROUND == 1 && lane < (shared ? 1 : PRODUCERS)) {
        if (counted && lane == 0) {
            mbarrier_arrive_expect_tx(place.full(), shared ? STAGE / PRODUCERS * ROW : STAGE * ROW);
        } else {
            mbarrier_arrive(place.full());
        }
    }
    __syncwarp();
    if (shared && lane / (STAGE / PRODUCERS) != warp) return;
    if (ROUND > 1 && counted) mbarrier_arrive_expect_tx(place.full(), ROW);
    if (ROUND > 1 && !counted) {
        // Its neighbours may count, and what is multiplied with weights of zero must be numbers.
        for (int at = 0; at < PITCH; at += 16) shared_store4(place.rows() + lane * PITCH + at, make_uint4(0, 0, 0, 0));
        fence_async_proxy();
        mbarrier_arrive(place.full());
    }
    if (counted) {
        const unsigned char* source = work.rows + found.page * work.page_stride + static_cast<long long>(found.row) * ROW;
        bulk_copy(place.rows() + lane * PITCH, source, ROW, place.full());
    }
}

// Slots are fetched two stages ahead and pages one, since each waits for the one before. A warp copies row after row: at
// the beginning, when everybody waits for them, all warps of a ring share a stage; then each has stages of its own.
__device__ __forceinline__ void produce(const Work& work, int stream, int warp, Place place) {
    const auto stages_after = [&](int number) {
        return number + 1 < SHARED_STAGES ? 1 : number + 1 == SHARED_STAGES ? 1 + warp : PRODUCERS;
    };
    Walk walk(work, stream);
    // What can be on its way together is.
    const Wanted first = walk.next(stages_after(0)), second = walk.next(stages_after(1));
    Wanted upcoming = walk.next(stages_after(2));
    Found now = look_up(work, first), next = look_up(work, second);
    for (int number = 0; now.kind & EXISTS; ++number) {
        copy_stage(work, now, warp, number < SHARED_STAGES, place);
        place.advance(stages_after(number));
        now = next;
        next = look_up(work, upcoming);
        upcoming = walk.next(stages_after(number + 3));
    }
}
