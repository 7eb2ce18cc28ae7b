"""vLLM's index functions for DeepSeek-V4, under their own names and arguments, on top of stage `select`.

They differ from vLLM's where that is safer: widths are those of the buffers, rows are written in full, the caller's
tables are not changed, absent pages are not read, and tokens without a slot get -1 as well as a length of 0. A ratio of
0, which checkpoints write for layers without compression, means 1.
"""

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.ops import select_chosen, select_entries, select_gathered, select_window, translate_positions


def get_compressed_slot_mapping(
    num_tokens: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    storage_block_size: int,
    compress_ratio: int,
    out: Tensor,
) -> Tensor:
    """int64 [num_tokens], a view of `out`: the slot of the entry that each token completes, -1 if it completes none.

    All of `out` is filled with -1 first. Negative pages of the block table count as page 0, in a copy of the table.
    """
    checks.integer("num_tokens", num_tokens, low=0, high=len(out))
    out.fill_(-1)
    found = out[:num_tokens]
    if num_tokens and len(seq_lens):
        requests, positions = locate_tokens(query_start_loc, seq_lens, num_tokens)
        table = block_table[: len(seq_lens)].clamp_min(0)
        ratio, size = max(compress_ratio, 1), storage_block_size
        select_entries(positions, requests, table, ratio=ratio, page_size=size, completed=found)
    return found


def locate_tokens(query_start_loc: Tensor, seq_lens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """int32 [tokens]: the request of each token, and its position in the request, -1 past the last request."""
    number = torch.arange(tokens, dtype=torch.int32, device=seq_lens.device)
    request = torch.searchsorted(query_start_loc, number, right=True, out_int32=True) - 1
    known = request.clamp_(0, len(seq_lens) - 1).long()
    position = seq_lens[known] - query_start_loc[1:][known] + number
    return request, torch.where(number < query_start_loc[-1], position, -1).clamp_min_(-1)


def build_c128a_topk_metadata(
    positions: Tensor,
    compress_ratio: int,
    num_decode_tokens: int,
    token_to_req_indices: Tensor,
    block_table: Tensor,
    block_size: int,
    slot_mapping: Tensor,
    global_decode_buffer: Tensor,
    decode_lens_buffer: Tensor,
    prefill_buffer: Tensor,
    max_compressed_tokens: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of a layer that attends to every entry: (decode slots, decode lengths, prefill entry numbers).

    Args:
        positions: [T], the positions of the step's tokens, decodes first.
        compress_ratio: tokens per entry.
        num_decode_tokens: how many of the tokens are decodes.
        token_to_req_indices: int32 [T or more].
        block_table: int32 [B, W]; the entries of an absent (negative) page are -1.
        block_size: entries per page.
        slot_mapping: [T or more], the slots of the tokens themselves; a token with a negative slot selects nothing.
        global_decode_buffer: int32 [max tokens, width], of which the first result is a view.
        decode_lens_buffer: int32 [max tokens], of which the second is a view; zeroed past the decodes.
        prefill_buffer: int32 [max tokens, width], of which the third is a view.
        max_compressed_tokens: how many columns are written, at most the buffers' width; if not given, the width.
    """
    total = checks.tensor("positions", positions, "T", checks.INTS)["T"]
    decodes = checks.integer("num_decode_tokens", num_decode_tokens, low=0, high=total)
    width = min(global_decode_buffer.shape[1], prefill_buffer.shape[1])
    if max_compressed_tokens is not None:
        width = checks.integer("max_compressed_tokens", max_compressed_tokens, low=0, high=width)
    decode, lengths = global_decode_buffer[:decodes, :width], decode_lens_buffer[:decodes]
    prefill = prefill_buffer[: total - decodes, :width]
    decode_lens_buffer[decodes:].zero_()
    for rows, out, counts in ((slice(decodes), decode, lengths), (slice(decodes, total), prefill, None)):
        if len(out):
            select_entries(
                positions[rows].int(),
                token_to_req_indices[:total][rows].int(),
                block_table,
                ratio=compress_ratio,
                page_size=block_size,
                every=out,
                lengths=counts,
                own=slot_mapping[:total][rows],
                local_from=len(out) if counts is not None else 0,
            )
    return decode, lengths, prefill


def compute_global_topk_indices_and_lens(
    topk_indices: Tensor,
    token_to_req_indices: Tensor,
    block_table: Tensor,
    block_size: int,
    is_valid_token: Tensor,
) -> tuple[Tensor, Tensor]:
    """Slots of the entries [T, K] that an indexer chose, valid ones first, and how many; 0 for invalid tokens."""
    slots = torch.empty_like(topk_indices, memory_format=torch.contiguous_format)
    lengths = torch.empty(len(slots), dtype=torch.int32, device=slots.device)
    own = is_valid_token[: len(slots)].int() - 1
    select_chosen(
        topk_indices,
        token_to_req_indices[: len(slots)],
        block_table,
        page_size=block_size,
        slots=slots,
        lengths=lengths,
        own=own,
    )
    return slots, lengths


def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    M: int,
    N: int,
) -> tuple[Tensor, Tensor]:
    """Workspace rows of a group of gathered prefills (entries, then window, -1 beyond), and how many there are.

    Request k of the group owns rows k * M to (k + 1) * M: first its entries, and from row N on its raw tokens.
    `query_start_loc` need not begin with 0: the tokens are those of this group.
    """
    tokens, columns = topk_indices.shape[0], checks.integer("topk", topk, low=0, high=topk_indices.shape[1])
    width = ceil_div(columns + window_size, 128) * 128
    slots = torch.empty(tokens, width, dtype=torch.int32, device=topk_indices.device)
    lengths = torch.empty(tokens, dtype=torch.int32, device=topk_indices.device)
    requests, positions = locate_tokens(query_start_loc - query_start_loc[0], seq_lens, tokens)
    select_gathered(
        positions,
        requests,
        seq_lens - gather_lens,
        topk_indices[:, :columns] if columns else None,
        ratio=max(compress_ratio, 1),
        window=window_size,
        entries=N,
        rows=M,
        columns=columns,
        slots=slots,
        lengths=lengths,
    )
    return slots, lengths


def build_flashinfer_mixed_sparse_indices(
    decode_swa_indices: Tensor,
    decode_compressed_indices: Tensor | None,
    decode_compressed_topk_lens: Tensor | None,
    prefill_topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    token_to_req_indices: Tensor,
    swa_block_table: Tensor,
    swa_block_size: int,
    compressed_block_table: Tensor | None,
    compressed_block_size: int,
    window_size: int,
    compress_ratio: int,
    topk: int,
    decode_compressed_indices_are_local: bool = False,
    decode_is_valid_token: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(sparse_indices int32 [T, Ws + K], sparse_topk_lens int32 [T]) for FlashInfer's combined form.

    The first Ws columns, the width of `decode_swa_indices`, hold window slots, the others slots of the compressed pool.
    K is padded with -1 to a multiple of 4. A length counts all Ws columns, filled or not.

    Args:
        decode_swa_indices: int32 [Td, Ws] slots of the decode tokens, which come first; Ws is `window_size` or more.
        decode_compressed_indices: int32 [Td, Kd] slots of entries, or their numbers; None without entries.
        decode_compressed_topk_lens: int32 [Td], how many of them count: all columns if not given. Numbers are counted
            here instead.
        prefill_topk_indices: int32 [Tp, topk or more] numbers of entries, of which the first min(complete, topk) count.
        query_start_loc: int32 [B + 1], running sum of new tokens.
        seq_lens: int32 [B], context and new tokens.
        token_to_req_indices: int32 [Td + Tp].
        swa_block_table: int32 [B, W] of the pool of raw tokens.
        swa_block_size: tokens per page.
        compressed_block_table: int32 [B, W] of the pool of entries; None without entries.
        compressed_block_size: entries per page.
        window_size: raw tokens that a token sees.
        compress_ratio: tokens per entry.
        topk: entries that a prefill token sees at most.
        decode_compressed_indices_are_local: they are numbers, not slots.
        decode_is_valid_token: bool [Td], tokens whose numbers count.
        out: int32 [T or more, Ws + K or more] and [T or more]: the results are the first rows of these buffers, for
            callers whose addresses must not change. Rows are written in full.
    """
    decodes, window = decode_swa_indices.shape
    tokens = decodes + prefill_topk_indices.shape[0]
    checks.integer("topk", topk, low=0, high=prefill_topk_indices.shape[1])
    entries = max(topk, 0 if decode_compressed_indices is None else decode_compressed_indices.shape[1])
    slots, lengths = _buffers(out, tokens, window, entries, seq_lens.device)
    requests = token_to_req_indices[:tokens]
    slots.fill_(-1)
    slots[:decodes, :window] = decode_swa_indices
    lengths[:decodes] = window
    if decode_compressed_indices is not None:
        found, taken = decode_compressed_indices, decode_compressed_topk_lens
        if decode_compressed_indices_are_local:
            table = _entry_table(compressed_block_table)
            found = _slots_in_place(found, requests[:decodes], table, compressed_block_size, decode_is_valid_token)
            taken = (found >= 0).sum(1, dtype=torch.int32)
        slots[:decodes, window : window + found.shape[1]] = found
        lengths[:decodes] += found.shape[1] if taken is None else taken
    if tokens == decodes:
        return slots, lengths
    requests, rows, counts = requests[decodes:], slots[decodes:], lengths[decodes:]
    positions, size = _positions(requests, query_start_loc, seq_lens, decodes), swa_block_size
    select_window(
        positions, requests, swa_block_table, page_size=size, window=window_size, slots=rows[:, :window], lengths=counts
    )
    counts.zero_()
    if topk:
        where = (positions, requests, _entry_table(compressed_block_table), compressed_block_size)
        numbers = prefill_topk_indices[:, :topk]
        rows[:, window : window + topk] = _prefill_entries(numbers, *where, max(compress_ratio, 1), counts)
    counts += window
    return slots, lengths


def _buffers(
    out: tuple[Tensor, Tensor] | None, tokens: int, window: int, entries: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Rows of the caller's buffers, or new ones, for `window` and `entries` columns per token."""
    if out is None:
        width = window + ceil_div(entries, 4) * 4
        slots = torch.empty(tokens, width, dtype=torch.int32, device=device)
        return slots, torch.empty(tokens, dtype=torch.int32, device=device)
    slots, lengths = (buffer[:tokens] for buffer in out)
    if slots.shape[1] < window + entries:
        expected = f"at least {window + entries} columns wide"
        raise checks.refuse("out[0]", expected, slots.shape[1], "allocate a wider one")
    return slots, lengths


def _prefill_entries(
    numbers: Tensor,
    positions: Tensor,
    requests: Tensor,
    block_table: Tensor,
    page_size: int,
    ratio: int,
    counts: Tensor,
) -> Tensor:
    """Slots [T, K] of the first entry numbers, as many as are complete; writes how many to `counts`."""
    columns = numbers.shape[1]
    select_entries(
        positions, requests, block_table, ratio=ratio, page_size=page_size, lengths=counts, columns=columns
    )  # fmt: skip
    column = torch.arange(columns, dtype=torch.int32, device=numbers.device)
    slots = _slots_in_place(numbers, requests, block_table, page_size)
    return slots.masked_fill_(column >= counts.unsqueeze(1), -1)


def _entry_table(block_table: Tensor | None) -> Tensor:
    if block_table is None:
        raise checks.refuse("compressed_block_table", "given where entries are numbers", None, "pass the page table")
    return block_table


def _positions(requests: Tensor, query_start_loc: Tensor, seq_lens: Tensor, first: int) -> Tensor:
    """int32 [T], positions of the batch's tokens from number `first` on; -1 for tokens of an unknown request."""
    number = torch.arange(first, first + len(requests), dtype=torch.int64, device=seq_lens.device)
    known = (requests >= 0) & (requests < len(seq_lens))
    request = requests.long().clamp(0, len(seq_lens) - 1)
    positions = seq_lens[request].long() - query_start_loc[request + 1] + number
    return torch.where(known, positions, -1).clamp(-1, 2**31 - 1).int()


def _slots_in_place(
    entries: Tensor, requests: Tensor, block_table: Tensor, page_size: int, valid: Tensor | None = None
) -> Tensor:
    """Slots int32 [T, K] of entry numbers, each in its own column; -1 for tokens of an unknown request or not valid."""
    known = (requests >= 0) & (requests < len(block_table))
    if valid is not None:
        known &= valid
    request = requests.clamp(0, max(len(block_table) - 1, 0))
    found = translate_positions(entries, request, block_table, page_size=page_size).slots
    return found.masked_fill_(~known.unsqueeze(1), -1)
