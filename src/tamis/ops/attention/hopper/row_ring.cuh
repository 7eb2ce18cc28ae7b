// Rings of cache rows in shared memory, and the producer warps that fill them.
//
// A stream is one ring of STAGES stages, 32 rows each. Its producer warps look up slots and pages and start one bulk copy
// per row; its consumers wait for a stage's `full` mbarrier, read the rows, and arrive at its `empty` mbarrier. Consecutive
// groups of 32 selected columns of a work item go to the streams in turn.
//
// `Shape` has these constants:
//   ROW_BYTES      bytes of a row in the cache
//   PITCH          bytes from one row to the next in shared memory
//   STAGES         stages of a ring
//   STREAMS        rings of a CTA
//   PRODUCERS      producer warps of a stream
//   SHARED_STAGES  stages, from the first of the launch on, that all producer warps of a stream fill together; of the
//                  later ones each warp fills every PRODUCERS-th
//   ROUND          stages that a stream's consumers take at a time: every work item has a multiple of them
#pragma once
#include "few_heads_items.cuh"
#include "instructions.cuh"

constexpr int STAGE_ROWS = 32;  // one per lane of a producer warp

template <class Shape>
struct RowRing {
    static constexpr int STAGES = Shape::STAGES, STREAMS = Shape::STREAMS, PRODUCERS = Shape::PRODUCERS;
    static constexpr int ROUND = Shape::ROUND, ROW_BYTES = Shape::ROW_BYTES, PITCH = Shape::PITCH;
    static constexpr int SHARED_STAGES = Shape::SHARED_STAGES;
    static constexpr int COLUMN_STEP = STAGE_ROWS * STREAMS;  // columns from one stage of a stream to its next
    // A step along the ring is at most one pass over it, since a cursor flips its parity once per step.
    static_assert(STAGES >= PRODUCERS && STAGES >= ROUND, "the ring is shorter than a step along it");

    // Shared memory of a stage: rows, mbarriers (full, empty) and stage info (valid rows, whether it is the last).
    static constexpr int STAGE_BYTES = STAGE_ROWS * PITCH, BARRIER_BYTES = 16, INFO_BYTES = 8;
    static constexpr int ALL_STAGES = STREAMS * STAGES;

    // Arrivals at a stage's full mbarrier: one per producer warp, all made by the same warp in stages that are not shared, or
    // one per row.
    static constexpr int FULL_ARRIVALS = ROUND == 1 ? PRODUCERS : STAGE_ROWS;

    // A stage of a stream's ring, and the parity of the current pass over it.
    struct Cursor {
        u32 rows_start, barriers, infos;  // shared-memory addresses of this stream's first stage
        int stage = 0;
        u32 parity = 0;

        __device__ __forceinline__ Cursor(u32 rows, u32 barriers, u32 infos, int stream)
            : rows_start(rows + stream * STAGES * STAGE_BYTES),
              barriers(barriers + stream * STAGES * BARRIER_BYTES),
              infos(infos + stream * STAGES * INFO_BYTES) {}

        __device__ __forceinline__ u32 full() const { return barriers + BARRIER_BYTES * stage; }
        __device__ __forceinline__ u32 empty() const { return barriers + BARRIER_BYTES * stage + 8; }
        __device__ __forceinline__ u32 rows() const { return rows_start + stage * STAGE_BYTES; }

        // Stage info, written by a producer: a bit per valid row, and whether the stage is the last of its work item.
        __device__ __forceinline__ u32 valid_rows() const { return shared_load(infos + INFO_BYTES * stage); }
        __device__ __forceinline__ bool is_last() const { return shared_load(infos + INFO_BYTES * stage + 4); }
        __device__ __forceinline__ void describe(u32 valid_rows, u32 last) const {
            shared_store(infos + INFO_BYTES * stage, valid_rows);
            shared_store(infos + INFO_BYTES * stage + 4, last);
        }

        __device__ __forceinline__ void advance(int stages = 1) {
            stage += stages;
            if (stage >= STAGES) {
                stage -= STAGES;
                parity ^= 1;
            }
        }
    };

    // Initialises the mbarriers of one stage.
    __device__ __forceinline__ static void init_barriers(u32 barriers, int stage, int consumer_warps) {
        mbarrier_init(barriers + BARRIER_BYTES * stage, FULL_ARRIVALS);
        mbarrier_init(barriers + BARRIER_BYTES * stage + 8, consumer_warps);
    }

    // Prefetches the first slots, the length and the request id of this CTA into L2. It runs before griddepcontrol.wait,
    // while the previous kernel may still write them; they are read only after the wait.
    __device__ __forceinline__ static void prefetch_first(const WorkItems& work, const SelectionParams& s, int thread) {
        const int item = opaque(blockIdx.x), token = work.token(item);
        const int column = work.split(item) * work.split_columns + thread;
        if (item >= work.count) return;
        if (column < s.columns) prefetch_l2(s.slots + token * s.token_stride + column * s.column_stride);
        if (thread == 0 && s.lengths != nullptr) prefetch_l2(s.lengths + token);
        if (thread == 0 && s.block_table != nullptr) prefetch_l2(s.request_ids + token);
    }

    // ---- Producer warps

    // Flags of a stage, in one register: EXISTS unless all work items are done, LAST_STAGE in the last stage (or the last
    // round of stages) that this stream has of a work item.
    static constexpr u32 EXISTS = 1, LAST_STAGE = 2;

    // A lane's selected column in a stage.
    struct Slot {
        u32 flags;
        int slot;     // a slot, or with a block table a position of the request; -1: none
        int request;  // the row of the block table
    };

    // A lane's row of the cache in a stage.
    struct Row {
        u32 flags;
        int page;  // -1: none
        int row;   // in the page
    };

    // Walks over the stages of a stream, work item after work item. An item has at least one round of stages, even if
    // nothing is selected.
    struct StageIterator {
        const WorkItems& work;
        const SelectionParams& s;
        const int stream;
        int item;          // current work item
        int column;        // first column of the current stage
        int end;           // first column after the selected ones
        int stop;          // first column after the item's last stage
        int request;       // the token's row of the block table
        const int* slots;  // the token's slots

        __device__ __forceinline__ StageIterator(const WorkItems& work, const SelectionParams& s, int stream)
            : work(work), s(s), stream(stream), item(blockIdx.x) {
            enter();
        }

        // Starts at the first stage of `item`.
        __device__ __forceinline__ void enter() {
            if (item >= work.count) return;
            const int token = work.token(item), begin = work.split(item) * work.split_columns;
            end = item < work.whole ? s.columns : min(begin + work.split_columns, s.columns);
            if (s.lengths != nullptr) end = min(end, s.lengths[token]);
            request = 0;
            if (s.block_table != nullptr) {
                request = s.request_ids[token];
                if (request < 0 || request >= s.requests) end = begin;
            }
            slots = s.slots + token * s.token_stride;
            column = begin + stream * STAGE_ROWS;
            constexpr int ROUND_COLUMNS = ROUND * COLUMN_STEP;
            stop = ROUND == 1 ? end : begin + max((end - begin + ROUND_COLUMNS - 1) / ROUND_COLUMNS, 1) * ROUND_COLUMNS;
        }

        __device__ __forceinline__ void skip(int stages) {
#pragma unroll 1
            for (int i = 0; i < stages && item < work.count; ++i) {
                column += COLUMN_STEP;
                if (column < stop) continue;
                item += gridDim.x;
                enter();
            }
        }

        // Loads this lane's slot of the current stage, and moves on by `stages`.
        __device__ __forceinline__ Slot next(int stages) {
            const bool exists = item < work.count;
            const u32 last = column + ROUND * COLUMN_STEP >= stop ? LAST_STAGE : 0;
            Slot found = {exists ? EXISTS | last : 0, -1, request};
            const int mine = column + threadIdx.x % 32;
            if (exists && mine < end) found.slot = slots[mine * s.column_stride];
            skip(stages);
            return found;
        }
    };

    // Loads the page of a slot or position.
    __device__ __forceinline__ static Row find_row(const SelectionParams& s, const Slot& wanted) {
        Row found = {wanted.flags, -1, 0};
        if (wanted.slot < 0) return found;
        const u32 page = static_cast<u32>(wanted.slot) / static_cast<u32>(s.page_size);
        found.row = wanted.slot - page * s.page_size;
        if (s.block_table == nullptr) {
            found.page = page;
        } else if (page < static_cast<u32>(s.table_width)) {
            found.page = s.block_table[wanted.request * s.table_stride + page];
        }
        return found;
    }

    // Copies a stage, or with `shared` only this warp's rows of it: STAGE_ROWS / PRODUCERS each.
    __device__ __forceinline__ static void copy_stage(
        const SelectionParams& s, Row mine, int warp, bool shared, const Cursor& cursor) {
        const int lane = threadIdx.x % 32;
        const u32 valid = __ballot_sync(FULL_MASK, mine.page >= 0 && mine.page < s.pages);
        // Invalid rows are replaced by a valid one: their weights are zero, and zero times NaN would show in the result.
        const int substitute = valid ? __ffs(valid) - 1 : 0;
        const int page = __shfl_sync(FULL_MASK, mine.page, substitute);
        const int row = __shfl_sync(FULL_MASK, mine.row, substitute);
        if (!(valid >> lane & 1)) {
            mine.page = page;
            mine.row = row;
        }
        mbarrier_wait(cursor.empty(), cursor.parity ^ 1);
        __syncwarp();  // consumers free a stage without valid rows at once; a lane that still waited would miss the phase
        if (lane == 0 && !(shared && warp > 0)) cursor.describe(valid, mine.flags & LAST_STAGE);
        if (ROUND == 1 && lane < (shared ? 1 : PRODUCERS)) {
            if (valid && lane == 0) {
                constexpr int ALL_BYTES = STAGE_ROWS * ROW_BYTES;
                mbarrier_arrive_expect_tx(cursor.full(), shared ? ALL_BYTES / PRODUCERS : ALL_BYTES);
            } else {
                mbarrier_arrive(cursor.full());
            }
        }
        __syncwarp();
        if (shared && lane / (STAGE_ROWS / PRODUCERS) != warp) return;
        if (ROUND > 1 && valid) mbarrier_arrive_expect_tx(cursor.full(), ROW_BYTES);
        if (ROUND > 1 && !valid) {
            // Consumers process whole rounds: they multiply these rows with weights of zero, so the rows must be finite.
            for (int at = 0; at < PITCH; at += 16) {
                shared_store4(cursor.rows() + lane * PITCH + at, make_uint4(0, 0, 0, 0));
            }
            fence_async_proxy();
            mbarrier_arrive(cursor.full());
        }
        if (valid) {
            const long long offset = static_cast<long long>(mine.row) * ROW_BYTES;
            bulk_copy(cursor.rows() + lane * PITCH, s.rows + mine.page * s.page_stride + offset, ROW_BYTES, cursor.full());
        }
    }

    // The loop of a producer warp. Slots are loaded two stages ahead and pages one stage ahead, since the address of a row
    // depends on its page and the page on the slot. A warp starts the copies of a stage row by row. At the beginning, when
    // all consumers wait, the warps of a stream share stages; after that each has stages of its own.
    __device__ __forceinline__ static void produce(
        const WorkItems& work, const SelectionParams& s, int stream, int warp, Cursor cursor) {
        const auto stages_after = [&](int number) {
            return number + 1 < SHARED_STAGES ? 1 : number + 1 == SHARED_STAGES ? 1 + warp : PRODUCERS;
        };
        StageIterator stages(work, s, stream);
        // At the beginning three loads of slots, then two of pages, are in flight together.
        const Slot first = stages.next(stages_after(0)), second = stages.next(stages_after(1));
        Slot upcoming = stages.next(stages_after(2));
        Row now = find_row(s, first), next = find_row(s, second);
        for (int number = 0; now.flags & EXISTS; ++number) {
            copy_stage(s, now, warp, number < SHARED_STAGES, cursor);
            cursor.advance(stages_after(number));
            now = next;
            next = find_row(s, upcoming);
            upcoming = stages.next(stages_after(number + 3));
        }
    }
};
