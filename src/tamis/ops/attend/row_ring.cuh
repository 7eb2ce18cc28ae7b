// Rows of a cache on their way into shared memory: what a launch works on, and the warps that look up slots and copy
// rows into rings of stages, 32 to a stage. Comes after `instructions.cuh`.
//
// Defined by who includes it: ROW, bytes of a row, and PITCH, from one to the next in shared memory; STAGES of a ring;
// STREAMS, rings among which the columns of an item are dealt out; PRODUCERS, warps that take turns at a ring; ROUND,
// stages that a ring's consumers take at a time, so that an item has a multiple of them.

constexpr int STAGE = 32;  // rows
constexpr int STAGE_BYTES = STAGE * PITCH;
constexpr int FILLING = ROUND == 1 ? 1 : 32;  // threads that say so when a stage is full: those that may clear it
constexpr int STEP = STAGE * STREAMS;  // columns from one stage of a stream to its next

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

// One lane's share of a stage.
struct Wanted {
    bool exists;  // false: there is no such stage
    bool last;  // of its item, in this stream
    int found;  // slot or position, -1: nothing
    const int* table;
};

struct Found {
    bool exists, last;
    int page, row;
};

// Walks over the stages of a stream, item after item. An item has at least one round, though it may be empty.
struct Walk {
    const Work& work;
    const int stream;
    int item, column, end, stop;
    const int *slots, *table;

    __device__ __forceinline__ Walk(const Work& work, int stream, int turn) : work(work), stream(stream), item(blockIdx.x) {
        if (work.lengths != nullptr && item < work.items) {
            // Slots wait for lengths, but need not be far away then.
            const int mine = work.part_of(item) * work.part_columns + (stream + turn * STREAMS) * STAGE + threadIdx.x % 32;
            const int* const own = work.slots + work.token_of(item) * work.slots_token_stride;
            if (mine < work.columns) prefetch(own + mine * work.slots_column_stride);
        }
        enter();
        skip(turn);
    }

    __device__ __forceinline__ void enter() {
        if (item >= work.items) return;
        const int token = work.token_of(item), begin = work.part_of(item) * work.part_columns;
        end = item < work.whole ? work.columns : min(begin + work.part_columns, work.columns);
        if (work.lengths != nullptr) end = min(end, work.lengths[token]);
        table = nullptr;
        if (work.block_table != nullptr) {
            const int request = work.request_ids[token];
            const bool listed = request >= 0 && request < work.requests;
            table = work.block_table + (listed ? request : 0) * work.table_stride;
            if (!listed) end = begin;
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
    __device__ __forceinline__ Wanted next() {
        Wanted wanted = {item < work.items, column + ROUND * STEP >= stop, -1, table};
        const int mine = column + threadIdx.x % 32;
        if (wanted.exists && mine < end) wanted.found = slots[mine * work.slots_column_stride];
        skip(PRODUCERS);
        return wanted;
    }
};

__device__ __forceinline__ Found look_up(const Work& work, const Wanted& wanted) {
    Found found = {wanted.exists, wanted.last, -1, 0};
    if (wanted.found < 0) return found;
    const u32 page = static_cast<u32>(wanted.found) / static_cast<u32>(work.page_size);
    found.row = wanted.found - page * work.page_size;
    if (wanted.table == nullptr) {
        found.page = page;
    } else if (page < static_cast<u32>(work.table_width)) {
        found.page = wanted.table[page];
    }
    return found;
}

__device__ __forceinline__ void copy_stage(const Work& work, Found found, const Place& place) {
    const int lane = threadIdx.x % 32;
    const u32 counted = __ballot_sync(EVERY_LANE, found.page >= 0 && found.page < work.pages);
    // Rows that do not count are copies of one that does: their weights are zero, so they must be numbers.
    const int stand_in = counted ? __ffs(counted) - 1 : 0;
    const int page = __shfl_sync(EVERY_LANE, found.page, stand_in), row = __shfl_sync(EVERY_LANE, found.row, stand_in);
    if (!(counted >> lane & 1)) {
        found.page = page;
        found.row = row;
    }
    barrier_wait(place.empty(), place.parity ^ 1);
    __syncwarp();  // an empty stage comes back at once: a lane that still waited would miss it
    if (lane == 0) {
        shared_store(place.note(), counted);
        shared_store(place.note() + 4, found.last);
    }
    if (ROUND == 1) {
        if (lane == 0 && counted) barrier_arrive_expecting(place.full(), STAGE * ROW);
        if (lane == 0 && !counted) barrier_arrive(place.full());
        __syncwarp();
    } else if (counted) {
        barrier_arrive_expecting(place.full(), ROW);
    } else {
        // Its neighbours may count, and what is multiplied with weights of zero must be numbers.
        for (int at = 16 * lane; at < STAGE_BYTES; at += 16 * 32) shared_store4(place.rows() + at, make_uint4(0, 0, 0, 0));
        fence_for_copies();
        barrier_arrive(place.full());
    }
    if (counted) {
        const unsigned char* source = work.rows + found.page * work.page_stride + static_cast<long long>(found.row) * ROW;
        copy_to_shared(place.rows() + lane * PITCH, source, ROW, place.full());
    }
}

// Slots are fetched two stages ahead and pages one, since each waits for the one before.
__device__ __forceinline__ void produce(const Work& work, int stream, int turn, Place place) {
    Walk walk(work, stream, turn);
    place.advance(turn);
    // At the beginning everybody waits: what can be on its way together is.
    const Wanted first = walk.next(), second = walk.next();
    Wanted upcoming = walk.next();
    Found now = look_up(work, first), next = look_up(work, second);
    while (now.exists) {
        copy_stage(work, now, place);
        place.advance(PRODUCERS);
        now = next;
        next = look_up(work, upcoming);
        upcoming = walk.next();
    }
}
