"""`EngineTokens`: the requests and positions of a step's tokens, which vLLM does not keep on the device.

Everything else that a builder needs is in the engine's own tensors: lengths, query starts, block table and slots.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tamis import checks
from tamis.integrations.vllm.engine_batch import block_table, first, host_values, length_names, padded_rows
from tamis.step.batch_checks import check_starts
from tamis.step.buffers import Arena, Views, staged
from tamis.step.plan import Limits
from tamis.step.split import INT, BatchSplit, split_batch


class TokenStep(NamedTuple):
    """A step as the engine describes it, checked. Tensors are the engine's own; numpy arrays are on the host."""

    requests: int
    actual: int
    """The engine's number of tokens, which under a captured graph includes padding."""
    tokens: int
    """New tokens."""
    rows: int
    """Token rows for which there are slots: the new tokens, and as much padding as the engine's tensor has."""
    starts: INT
    """[requests + 1]: running sum of new tokens."""
    queries: INT
    """[requests]: new tokens."""
    max_query: int
    one_each: bool
    """Whether the first requests have one new token each, and the others, which are padding, have none."""
    host_lengths: Tensor
    """Context plus new tokens of each request, on the host; upper bounds for decodes."""
    split: BatchSplit
    query_starts: Tensor
    """int32 [requests + 1]"""
    lengths: Tensor
    """int32 [requests]"""
    block_table: Tensor
    """int32 [requests, pages]"""
    slots: Tensor
    """int64 [actual or more]"""

    @property
    def decode_rows(self) -> int:
        """The number of decode tokens. As in vLLM, padding counts as decode in a step without prefills."""
        return self.split.decode_tokens if self.split.prefills else self.actual


class EngineTokens:
    """The request and the position of each token, in buffers that never move. Padding has request 0 and position -1.

    Attributes:
        request_ids: int32 [tokens that a step may have].
        positions: int32 [tokens that a step may have].
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        """Allocate the buffers."""
        arena = Arena({"request_ids": 0, "positions": -1}, {}, limits.max_tokens, device)
        self._arena, self._limits, self._threshold = arena, limits, limits.threshold
        self.request_ids, self.positions = arena.views["request_ids"], arena.views["positions"]
        self._numbers = np.arange(max(limits.max_tokens, limits.max_requests), dtype=np.int32)
        # What most steps copy: request r has token r. It is never written again, so copies under way see no change.
        numbers = staged(torch.from_numpy(self._numbers[: limits.max_requests]), device)
        self.part = Views(arena.views | {"numbers": numbers})
        """A part of "request_ids" or "positions"."""
        self._tokens_before = 0

    def read(self, common: Any) -> TokenStep:
        """Check the engine's record of a step. Nothing is written."""
        requests, actual, slots = int(common.num_reqs), int(common.num_actual_tokens), common.slot_mapping
        starts = first(host_values(common, ("query_start_loc_cpu",), "query_start_loc"), requests + 1).numpy()
        queries, _, longest = check_starts(starts, self._limits)
        tokens = int(starts[-1])
        rows = min(padded_rows(tokens, actual, slots, self._limits), slots.shape[0])
        lengths, one_each = first(common.seq_lens, requests), longest == 1 and bool(starts[tokens] == tokens)
        table = block_table(common.block_table_tensor, requests)
        if lengths.dtype is not torch.int32 or lengths.shape != (requests,):
            checks.tensor("seq_lens", lengths, "B", (torch.int32,), B=requests)
        if table.dim() != 2 or table.shape[0] != requests:
            checks.tensor("block_table_tensor", table, "B W", (torch.int32,), B=requests)
        if slots.dtype not in checks.INTS:
            checks.tensor("slot_mapping", slots, "T", checks.INTS)
        split = BatchSplit(requests, 0, tokens, 0)
        if not one_each:
            split = split_batch(queries, self._threshold, uniform=self._limits.uniform_decodes)
        return TokenStep(
            requests,
            actual,
            tokens,
            rows,
            starts,
            queries,
            longest,
            one_each,
            first(host_values(common, length_names(common), "seq_lens"), requests),
            split,
            first(common.query_start_loc, requests + 1),
            lengths,
            table,
            slots,
        )

    def fill(self, step: TokenStep) -> None:
        """Write the requests and positions of a step. They are written in every step, even if nothing changed: an
        engine in sleep mode loses their content."""
        tokens, before, part = step.tokens, self._tokens_before, self.part
        self._tokens_before = tokens
        if step.one_each:
            part("request_ids", tokens).copy_(part("numbers", tokens), non_blocking=True)
            torch.sub(first(step.lengths, tokens), 1, out=part("positions", tokens))
            if tokens < before:
                self.request_ids[tokens:before].zero_()
                self.positions[tokens:before].fill_(-1)
            return
        staging, row = self._arena.stage(max(tokens, before)), self._arena.row
        ids = self._numbers[: step.requests].repeat(step.queries)
        staging.narrow[row["request_ids"], :tokens] = ids
        # Token t of request r is at lengths[r] - query_starts[r + 1] + t. The device adds the lengths.
        staging.narrow[row["positions"], :tokens] = self._numbers[:tokens] - step.starts[1:][ids]
        self._arena.upload(staging)
        if tokens:
            part("positions", tokens).add_(step.lengths.index_select(0, part("request_ids", tokens)))
