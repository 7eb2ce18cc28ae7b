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
from tamis.step.buffers import Arena, Staging
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
    """Whether every request has one new token."""
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
    """int32 arrays with one number per token, in buffers that never move: `request_ids` and `positions`, and others
    that a builder adds. Padding has request 0 and position -1."""

    def __init__(self, limits: Limits, device: torch.device, others: dict[str, int] | None = None) -> None:
        """Allocate them. `others` names further arrays, with the value of elements that a step does not write."""
        self._arena = Arena({"request_ids": 0, "positions": -1} | (others or {}), {}, limits.max_tokens, device)
        self._limits, self._threshold = limits, limits.threshold
        self._numbers = np.arange(max(limits.max_tokens, limits.max_requests), dtype=np.int32)
        self._rows_before = 0

    def read(self, common: Any) -> TokenStep:
        """Check the engine's record of a step. Nothing is written."""
        requests, actual, slots = int(common.num_reqs), int(common.num_actual_tokens), common.slot_mapping
        starts = first(host_values(common, ("query_start_loc_cpu",), "query_start_loc"), requests + 1).numpy()
        queries, shortest, longest = check_starts(starts, self._limits)
        tokens = int(starts[-1])
        rows = min(padded_rows(tokens, actual, slots, self._limits), slots.shape[0])
        lengths, uniform = first(common.seq_lens, requests), self._limits.uniform_decodes
        checks.tensor("seq_lens", lengths, "B", (torch.int32,), B=requests)
        split = split_batch(queries, self._threshold, uniform=uniform)
        return TokenStep(
            requests,
            actual,
            tokens,
            rows,
            starts,
            queries,
            longest,
            shortest == longest == 1,
            first(host_values(common, length_names(common), "seq_lens"), requests),
            split,
            first(common.query_start_loc, requests + 1),
            lengths,
            block_table(common.block_table_tensor, requests),
            slots,
        )

    def stage(self, step: TokenStep) -> Staging:
        """The arrays of a step on the host. A builder may write further ones into it before it is sent with `fill`."""
        staging = self._arena.stage(max(step.rows, step.actual, self._rows_before))
        ids = self._numbers[: step.requests]
        if not step.one_each:
            ids = ids.repeat(step.queries)
            # Token t of request r is at lengths[r] - query_starts[r + 1] + t. The device adds the lengths.
            past = self._numbers[: step.tokens] - step.starts[1:][ids]
            self.staged(staging, "positions")[: step.tokens] = past
        self.staged(staging, "request_ids")[: step.tokens] = ids
        return staging

    def staged(self, staging: Staging, name: str) -> INT:
        """One array of a staging."""
        found: INT = staging.narrow[self._arena.row[name]]
        return found

    def fill(self, step: TokenStep, staging: Staging) -> None:
        """Write the buffers of a step."""
        self._arena.upload(staging)
        self._rows_before = max(step.rows, step.actual)
        if step.tokens:
            found, lengths = self["positions"][: step.tokens], step.lengths
            if not step.one_each:
                lengths = lengths.index_select(0, self["request_ids"][: step.tokens])
            found.add_(lengths)  # with one token per request, -1 was uploaded

    def __getitem__(self, name: str) -> Tensor:
        """One array on the device."""
        return self._arena.views[name]
