"""vLLM's function that translates positions to slots, under its own name and arguments, on top of stage `translate`."""

import torch
from torch import Tensor

from tamis import checks
from tamis.ops import translate_positions


def triton_convert_req_index_to_global_index(
    req_id: Tensor,
    block_table: Tensor,
    token_indices: Tensor,
    BLOCK_SIZE: int = 64,
    BLOCK_STRIDE_ROWS: int | None = None,
    NUM_TOPK_TOKENS: int | None = None,
    BLOCK_N: int = 128,
    HAS_PREFILL_WORKSPACE: bool = False,
    prefill_workspace_request_ids: Tensor | None = None,
    prefill_workspace_starts: Tensor | None = None,
    prefill_workspace_rank_stride: int | None = None,
    dcp_size: int = 1,
    dcp_rank: int = 0,
    cp_kv_cache_interleave_size: int = 1,
    return_valid_counts: bool = False,
    out: Tensor | None = None,
    valid_counts_out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Slots of request-local positions: `block_table[req, i // BLOCK_SIZE] * BLOCK_STRIDE_ROWS + i % BLOCK_SIZE`.

    The results are those of vLLM's function, for any number of columns and on any device. Positions on absent
    (negative) pages give -1 as well.

    Args:
        req_id: int32 [T], the block-table row of each token.
        block_table: int32 [B, W].
        token_indices: int32 [T, K] positions; negative ones give -1, and so does a position past the table.
        BLOCK_SIZE: positions per page.
        BLOCK_STRIDE_ROWS: rows from one page to the next; `BLOCK_SIZE` if not given.
        NUM_TOPK_TOKENS: if given, it must be K. (vLLM's default is 2048.)
        BLOCK_N: no effect.
        HAS_PREFILL_WORKSPACE: map the positions of prefill tokens to rows of a workspace instead.
        prefill_workspace_request_ids: int32 [T], the number of a token's prefill, -1 for decodes.
        prefill_workspace_starts: int32 [P], first row of each prefill.
        prefill_workspace_rank_stride: None; a workspace gathered from several ranks is not supported.
        dcp_size: ranks that share each request's rows.
        dcp_rank: this rank; positions of other ranks give -1.
        cp_kv_cache_interleave_size: consecutive positions per rank.
        return_valid_counts: also return int32 [T], the number of valid slots of each row, which then come first.
        out: int32 [T, K] to write into.
        valid_counts_out: int32 [T] to write into.
    """
    sizes = checks.tensor("token_indices", token_indices, "T K", (torch.int32,))
    if NUM_TOPK_TOKENS is not None and sizes["K"] != NUM_TOPK_TOKENS:
        raise checks.refuse("NUM_TOPK_TOKENS", f"{sizes['K']}, token_indices' columns", NUM_TOPK_TOKENS, "leave it out")
    workspace = None
    if HAS_PREFILL_WORKSPACE:
        if dcp_size != 1 or prefill_workspace_rank_stride:
            raise checks.refuse("dcp_size", "1 with HAS_PREFILL_WORKSPACE", dcp_size, "gather on each rank alone")
        if prefill_workspace_request_ids is None or prefill_workspace_starts is None:
            remedy = "pass both with HAS_PREFILL_WORKSPACE"
            raise checks.refuse("prefill_workspace_request_ids and prefill_workspace_starts", "given", None, remedy)
        workspace = (prefill_workspace_request_ids, prefill_workspace_starts)
    for name, value, shape in (("out", out, "T K"), ("valid_counts_out", valid_counts_out, "T")):
        if value is not None:
            rows, columns = token_indices.shape
            checks.tensor(name, value, shape, (torch.int32,), device=token_indices.device, T=rows, K=columns)
    found = translate_positions(
        token_indices,
        req_id,
        block_table,
        page_size=BLOCK_SIZE,
        rows_per_page=BLOCK_STRIDE_ROWS,
        workspace=workspace,
        ranks=dcp_size,
        rank=dcp_rank,
        interleave=cp_kv_cache_interleave_size,
        compact=return_valid_counts,
    )
    slots = found.slots if out is None else out.copy_(found.slots)
    if not return_valid_counts:
        return slots
    return slots, found.counts if valid_counts_out is None else valid_counts_out.copy_(found.counts)
