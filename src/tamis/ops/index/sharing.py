"""Ranks that hold the same keys select for a part of the tokens each, and exchange the positions.

Blocks of neighbouring tokens are dealt to the ranks in turn, the last tokens first, and the direction is reversed every
round: 0 1 2 3, 3 2 1 0, and so on. In a prefill each token sees one key more than the one before it, so two rounds give
all ranks as many keys, and what is left over in the end are the tokens with the fewest. Nothing depends on lengths,
which are on the device. All ranks send as many rows; those that have fewer tokens fill up with rows that see nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.ops import memory
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepared import run_remembered
from tamis.ops.index.ranks import is_capturing

BLOCK = 8
"""Neighbouring tokens that stay together, since kernels score several tokens of a request at once."""
SPARE = 32
"""A rank may have one row in 32 more than if single tokens were dealt."""


class Deal(NamedTuple):
    """The part of one rank of T tokens."""

    tokens: Tensor
    """int64 [rows], the token of each row; 0 where there is none."""
    real: Tensor | None
    """int32 [rows], 1 where there is a token and 0 where there is none; None if there are tokens everywhere."""
    place: Tensor
    """int64 [T], the row of each token among those of all ranks, one rank after another."""


def block_of(tokens: int, ranks: int) -> int:
    """How many neighbouring tokens stay together: fewer than `BLOCK` where whole blocks would leave ranks idle."""
    fair = ceil_div(tokens, ranks)
    block = BLOCK
    while block > 1 and ceil_div(ceil_div(tokens, block), ranks) * block * SPARE > fair * (SPARE + 1):
        block //= 2
    return block


def rows_of(tokens: int, ranks: int) -> int:
    """How many rows each rank selects for and sends."""
    block = block_of(tokens, ranks)
    return ceil_div(ceil_div(tokens, block), ranks) * block


def deal(tokens: int, ranks: int, rank: int, device: torch.device) -> Deal:
    """The part of a rank, from arithmetic on the device, so that it can be captured in a CUDA graph."""
    block, rows = block_of(tokens, ranks), rows_of(tokens, ranks)
    row = torch.arange(rows, dtype=torch.int64, device=device)
    turn = row // block
    seat = torch.where(turn % 2 == 0, rank, ranks - 1 - rank)
    own = tokens - (turn * ranks + seat + 1) * block + row % block
    after = torch.arange(tokens - 1, -1, -1, dtype=torch.int64, device=device)  # tokens after each one
    turn, seat = after // (block * ranks), after // block % ranks
    seat = torch.where(turn % 2 == 0, seat, ranks - 1 - seat)
    place = seat * rows + turn * block + block - 1 - after % block
    if tokens == rows * ranks:
        return Deal(own, None, place)
    return Deal(own.clamp_min(0), (own >= 0).int(), place)


_DEALS: memory.Memory[Deal] = memory.Memory()


def _known_deal(tokens: int, ranks: int, rank: int, device: torch.device) -> Deal:
    signature = (tokens, ranks, rank, device)
    found = _DEALS.find(signature)
    if found is None:
        found = deal(*signature)
        # What is computed during a capture exists only when the graph is replayed.
        if not is_capturing(device):
            _DEALS.keep(signature, found)
    return found


def select_part(call: IndexTopk, ranks: int, rank: int) -> Tensor:
    """The positions of a rank's rows, int32 [rows, k]."""
    own = _known_deal(call.q.shape[0], ranks, rank, call.q.device)
    lengths = call.lengths.index_select(0, own.tokens)
    mine = torch.empty(len(lengths), call.k, dtype=torch.int32, device=call.q.device)
    run_remembered(
        call._replace(
            q=_rows(call.q, own.tokens),
            weights=call.weights.index_select(0, own.tokens),
            request_ids=call.request_ids.index_select(0, own.tokens),
            lengths=lengths if own.real is None else lengths.mul_(own.real),
            out=mine,
        )
    )
    return mine


def place_parts(call: IndexTopk, every: Tensor, rank: int) -> None:
    """Write the rows of all ranks, int32 [ranks, rows, k], to `call.out` in the order of the tokens."""
    own = _known_deal(call.q.shape[0], len(every), rank, call.q.device)
    torch.index_select(every.view(-1, call.k), 0, own.place, out=call.out)


def shared_bytes(call: IndexTopk, ranks: int) -> int:
    """Bytes per token of the rows that a rank receives, and of the inputs and the results of its own."""
    inputs = call.q.shape[1] * (call.q.shape[2] * call.q.element_size() + call.weights.element_size()) + 8
    return 4 * call.k + ceil_div(inputs + 4 * call.k, ranks)


def shared_step(tokens: int, ranks: int) -> int:
    """At most so many tokens to share at a time, but one for each rank; if it can be, whole rounds both ways."""
    rounds = 2 * BLOCK * ranks
    return max(tokens, ranks) if tokens < rounds else tokens // rounds * rounds


def _rows(values: Tensor, chosen: Tensor) -> Tensor:
    """values[chosen]. Not every device can index FP8 tensors, but all can index bytes."""
    if values.element_size() > 1:
        return values.index_select(0, chosen)
    return values.view(torch.uint8).index_select(0, chosen).view(values.dtype)
