"""Stage `select`: which rows each token of a step attends to and writes, where no indexer decides it (DeepSeek-V4).

Everything is a function of positions and block tables, so most of it is made once per step and shared by all layers.
The functions write whole rows into buffers of the caller, who keeps them at one address for captured graphs. They read
no value on the host and change no table. A token that is padding (negative position), belongs to no request, or has a
negative slot of its own selects nothing: -1 in its row and a length of 0.
"""

from torch import Tensor

from tamis.ops.select import registered
from tamis.ops.select.arguments import (
    MOST_COLUMNS,
    check_select_chosen,
    check_select_entries,
    check_select_gathered,
    check_select_mixed,
    check_select_window,
)


def select_window(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    window: int,
    slots: Tensor,
    lengths: Tensor,
    own: Tensor | None = None,
    blocks: tuple[Tensor, Tensor] | None = None,
    backend: str = "auto",
) -> None:
    """Slots of the last `window` raw tokens up to and including each token, oldest first.

    Args:
        positions: int32 [T], of each token in its request; negative for padding.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W] of the pool of raw tokens; an absent (negative) page gives -1.
        page_size: tokens per page.
        window: how many tokens.
        slots: int32 [T, C] to write: C is `window` or more, -1 beyond the length.
        lengths: int32 [T] to write.
        own: int32 or int64 [T], the slot each token is itself written to; negative: it selects nothing.
        blocks: (context [B], length [B]) int32: tokens of a request see the `window` tokens before `context` and all
            up to `length`, each other included (draft blocks without a causal mask). `window` and the block must fit
            into C.
        backend: a name from `tamis backends`, or "auto".
    """
    check_select_window(positions, request_ids, block_table, page_size, window, slots, lengths, own, blocks, backend)
    context, ends = blocks if blocks is not None else (None, None)
    registered.select_window(
        positions, request_ids, block_table, own, context, ends, page_size, window, slots, lengths, backend
    )


def select_entries(
    positions: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    *,
    ratio: int,
    page_size: int,
    completed: Tensor | None = None,
    visible: Tensor | None = None,
    lengths: Tensor | None = None,
    every: Tensor | None = None,
    columns: int | None = None,
    own: Tensor | None = None,
    local_from: int | None = None,
    backend: str = "auto",
) -> None:
    """Compressed entries by position: which one a token completes, how many it sees, and the slots of all it sees.

    Entry j of a request is complete at its token `j * ratio + ratio - 1`, which already sees it.

    Args:
        positions: int32 [T], of each token in its request; negative for padding.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W] of the pool of entries; an absent (negative) page gives -1.
        ratio: tokens per entry.
        page_size: entries per page.
        completed: int64 [T] to write: the slot of the entry that a token completes, -1 for all other tokens.
        visible: int32 [T] to write: how many entries are complete.
        lengths: int32 [T] to write: at most `columns` of them.
        every: int32 [T, C] to write: slots of entries 0, 1, 2..., -1 beyond the visible ones. C is the buffer's own
            width, so nothing is written past a row.
        columns: for `lengths`; the width of `every` if not given.
        own: int32 or int64 [T], the slot of each token itself; negative: it selects and completes nothing.
        local_from: from this token on, `every` holds the entries' numbers (0, 1, 2...) instead of slots.
        backend: a name from `tamis backends`, or "auto".
    """
    written = {"completed": completed, "visible": visible, "lengths": lengths, "every": every}
    check_select_entries(
        positions, request_ids, block_table, ratio, page_size, written, columns, own, local_from, backend
    )
    if columns is None:
        columns = MOST_COLUMNS if every is None else every.shape[1]
    local_from = positions.shape[0] if local_from is None else local_from
    registered.select_entries(
        positions,
        request_ids,
        block_table,
        own,
        ratio,
        page_size,
        columns,
        local_from,
        completed,
        visible,
        lengths,
        every,
        backend,
    )


def select_chosen(
    chosen: Tensor,
    request_ids: Tensor,
    block_table: Tensor,
    *,
    page_size: int,
    slots: Tensor,
    lengths: Tensor,
    own: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """Slots of the entries that an indexer chose, valid ones first, and how many there are.

    `Selection` translates on the way and needs no such pass; this is for consumers that want slots. It differs from
    `translate_positions` in writing to given buffers and in knowing tokens that select nothing.

    Args:
        chosen: int32 [T, K], numbers of entries within the request; -1 for none.
        request_ids: int32 [T], the block-table row of each token.
        block_table: int32 [B, W] of the pool of entries.
        page_size: entries per page.
        slots: int32 [T, K] to write.
        lengths: int32 [T] to write.
        own: int32 or int64 [T], the slot of each token itself; negative: it selects nothing.
        backend: a name from `tamis backends`, or "auto".
    """
    check_select_chosen(chosen, request_ids, block_table, page_size, slots, lengths, own, backend)
    registered.select_chosen(chosen, request_ids, block_table, own, page_size, slots, lengths, backend)


def select_gathered(
    positions: Tensor,
    request_ids: Tensor,
    first: Tensor,
    chosen: Tensor | None = None,
    *,
    ratio: int,
    window: int,
    entries: int,
    rows: int,
    columns: int,
    slots: Tensor,
    lengths: Tensor,
    first_request: int = 0,
    backend: str = "auto",
) -> None:
    """Rows of a workspace into which entries and raw tokens of a few prefills were gathered, in one list per token.

    Request k of the group has its entries in rows `k * rows`, `k * rows + 1`..., and its raw tokens from position
    `first[k]` on in rows `k * rows + entries` and so on. A token's list begins with its entries, chosen or all, and
    goes on with its window; -1 beyond.

    Args:
        positions: int32 [T], of the group's tokens.
        request_ids: int32 [T]: the request of each token, counted from `first_request`.
        first: int32 [G], position of the first gathered raw token of each request.
        chosen: int32 [T, columns], left-packed numbers of entries that an indexer chose; None for all entries.
        ratio: tokens per entry.
        window: raw tokens that a token sees, its own included.
        entries: workspace rows reserved for entries, per request (N).
        rows: workspace rows per request (M).
        columns: at most so many entries per token; 0 without entries.
        slots: int32 [T, columns + window or more] to write.
        lengths: int32 [T] to write.
        first_request: number of the group's first request.
        backend: a name from `tamis backends`, or "auto".
    """
    check_select_gathered(
        positions,
        request_ids,
        first,
        chosen,
        ratio=ratio,
        window=window,
        entries=entries,
        rows=rows,
        columns=columns,
        slots=slots,
        lengths=lengths,
        first_request=first_request,
        backend=backend,
    )
    select_gathered_unchecked(
        positions,
        request_ids,
        first,
        chosen,
        ratio,
        window,
        entries,
        rows,
        columns,
        slots,
        lengths,
        first_request,
        backend,
    )


def select_gathered_unchecked(
    positions: Tensor,
    request_ids: Tensor,
    first: Tensor,
    chosen: Tensor | None,
    ratio: int,
    window: int,
    entries: int,
    rows: int,
    columns: int,
    slots: Tensor,
    lengths: Tensor,
    first_request: int,
    backend: str,
) -> None:
    """As `select_gathered`, for callers who know that its check would pass."""
    numbers = (first_request, ratio, window, entries, rows, columns)
    registered.select_gathered(positions, request_ids, first, chosen, *numbers, slots, lengths, backend)


def select_mixed(
    decode_window: Tensor,
    decode_entries: Tensor | None,
    decode_lengths: Tensor | None,
    prefill_entries: Tensor,
    query_starts: Tensor,
    request_lengths: Tensor,
    request_ids: Tensor,
    window_table: Tensor,
    entry_table: Tensor | None,
    *,
    window_page: int,
    entry_page: int,
    window: int,
    ratio: int,
    topk: int,
    slots: Tensor,
    lengths: Tensor,
    local: bool = False,
    real: Tensor | None = None,
    backend: str = "auto",
) -> None:
    """One table for kernels that tell the two pools apart by column: the window's slots first, then the entries'.

    Here a length counts all window columns, filled or not, because the reader finds out by itself how many are. tamis
    does not need this form: it keeps a `Selection` with true lengths per pool.

    Args:
        decode_window: int32 [Td, Ws] slots of the decode tokens, which come first; Ws is `window` or more.
        decode_entries: int32 [Td, Kd] slots, or with `local` numbers of entries; None without entries.
        decode_lengths: int32 [Td], how many of them count: all columns if not given; counted here with `local`.
        prefill_entries: int32 [Tp, K] numbers of entries, of which the first min(complete, topk) count.
        query_starts: int32 [B + 1], running sum of new tokens.
        request_lengths: int32 [B], context and new tokens.
        request_ids: int32 [Td + Tp].
        window_table: int32 [B, W] of the pool of raw tokens.
        entry_table: int32 [B, W] of the pool of entries; None without entries.
        window_page: tokens per page.
        entry_page: entries per page.
        window: raw tokens that a token sees.
        ratio: tokens per entry.
        topk: entries that a prefill token sees at most.
        slots: int32 [Td + Tp, Ws + max(topk, Kd) or more] to write.
        lengths: int32 [Td + Tp] to write.
        local: the decode entries are numbers, not slots.
        real: bool [Td]: with `local`, tokens for which entries are chosen at all.
        backend: a name from `tamis backends`, or "auto".
    """
    check_select_mixed(
        decode_window,
        decode_entries,
        decode_lengths,
        prefill_entries,
        query_starts,
        request_lengths,
        request_ids,
        window_table,
        entry_table,
        window_page=window_page,
        entry_page=entry_page,
        window=window,
        ratio=ratio,
        topk=topk,
        slots=slots,
        lengths=lengths,
        local=local,
        real=real,
        backend=backend,
    )
    registered.select_mixed(
        decode_window,
        decode_entries,
        decode_lengths,
        real,
        prefill_entries,
        query_starts,
        request_lengths,
        request_ids,
        window_table,
        entry_table,
        window_page,
        entry_page,
        window,
        ratio,
        topk,
        local,
        slots,
        lengths,
        backend,
    )
