"""How many columns of a block table a selection scores.

A block table of a planner or an engine has room for the longest request that it admits, and scores take as many columns
as the table has: how many keys tokens see is on the device. If the host knows an upper bound, a prompt of 4096 tokens
and 8K keys is one chunk and not eight of a table for 128K.
"""

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div, round_up

SCORE_BYTES = 4
WIDTHS = 8
"""Widths per octave. Calls are remembered by their shapes, so that tables of any width would be remembered each."""


def seen_columns(table: Tensor, page_size: int, tokens: int, keys: int, workspace_bytes: int) -> Tensor:
    """The leading columns of a block table that hold the first `keys` keys of its requests, or the table itself if the
    workspace holds the scores of all columns. A table is left whole while a CUDA graph is captured, since the graph may
    be replayed with longer requests.

    Args:
        table: int32 [B, W].
        page_size: keys per page.
        tokens: rows of the scores.
        keys: at most so many keys of a request are seen.
        workspace_bytes: as in `index_topk`.
    """
    width = table.shape[1]
    if SCORE_BYTES * tokens * width * page_size <= workspace_bytes:
        return table
    pages = max(1, ceil_div(keys, page_size))
    pages = round_up(pages, max(1, (1 << pages.bit_length() - 1) // WIDTHS))
    if pages >= width or (table.is_cuda and torch.cuda.is_current_stream_capturing()):
        return table
    return table[:, :pages]
