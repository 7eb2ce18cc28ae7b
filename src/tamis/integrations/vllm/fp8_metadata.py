"""The additional fields of vLLM's step records for `fp8_ds_mla` caches, under vLLM's names.

tamis' attention reads none of them. They are for code that reads vLLM's record and calls FlashMLA's functions itself.
"""

from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from tamis.integrations.flash_mla import FlashMLASchedMeta
from tamis.step.plan import Limits, Plan


@dataclass(eq=False)
class FP8KernelMetadata:
    """Arguments of FlashMLA's decode function that it takes, and does not read, when indices are given."""

    scheduler_metadata: FlashMLASchedMeta
    dummy_block_table: Tensor
    """int32 [rows, 1]"""
    cache_lens: Tensor
    """int32 [rows], the greatest length that a request may have."""

    @classmethod
    def of(cls, limits: Limits, device: torch.device) -> Self:
        """For as many requests as a step may have. A call with all tokens of a step uses the first row."""
        requests = limits.max_requests
        return cls(
            FlashMLASchedMeta(),
            torch.zeros(requests, 1, dtype=torch.int32, device=device),
            torch.full((requests,), limits.max_length, dtype=torch.int32, device=device),
        )

    def rows(self, count: int) -> "FP8KernelMetadata":
        """The same for `count` requests."""
        return FP8KernelMetadata(self.scheduler_metadata, self.dummy_block_table[:count], self.cache_lens[:count])


@dataclass(eq=False)
class FP8SeparatePrefillDecode:
    """A step whose decodes read the cache and whose prefills are gathered into a bf16 workspace, chunk by chunk."""

    @dataclass(eq=False)
    class Decode:
        """The decodes, which come first."""

        kernel_metadata: FP8KernelMetadata
        decode_query_len: int | None
        """Tokens of each request, if all requests have the same number."""
        seq_lens: Tensor | None = None

    @dataclass(eq=False)
    class Prefill:
        """The prefills."""

        @dataclass(eq=False)
        class Chunk:
            """Prefills that are gathered into the workspace together."""

            tokens_slice: slice
            block_table: Tensor
            req_start_idx: int
            """The chunk's first request, counted from the first prefill."""
            workspace_starts: Tensor
            chunk_tot_seqlen: int
            seq_lens: Tensor | None = None

        request_ids: Tensor
        """int32 [num_actual_tokens], the number of each token's prefill; -1 for decodes and padding."""
        workspace_starts: Tensor
        """int32 [num_prefills], from 0 in each chunk."""
        chunks: list[Chunk] = field(default_factory=list)
        seq_lens: Tensor | None = None

    num_prefills: int = 0
    num_decodes: int = 0
    """Decode requests that have tokens."""
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    decode: Decode | None = None
    prefill: Prefill | None = None


def separate_metadata(plan: Plan, kernel: FP8KernelMetadata | None, rows: int) -> FP8SeparatePrefillDecode | None:
    """The record of a plan whose prefills are gathered; None without an FP8 cache."""
    if kernel is None:
        return None
    made, first = FP8SeparatePrefillDecode(), plan.split.decodes
    if plan.decode is not None:
        count = plan.decode.requests
        made.num_decodes, made.num_decode_tokens = count, plan.decode.tokens
        lengths = plan.lengths[:count]
        made.decode = FP8SeparatePrefillDecode.Decode(kernel.rows(count), plan.decode.query_length, lengths)
    if plan.prefill is not None:
        part = plan.prefill
        made.num_prefills, made.num_prefill_tokens = part.requests, part.tokens
        chunks = [
            FP8SeparatePrefillDecode.Prefill.Chunk(
                tokens_slice=chunk.tokens,
                block_table=chunk.block_table,
                req_start_idx=chunk.requests.start - first,
                workspace_starts=chunk.starts,
                chunk_tot_seqlen=chunk.rows,
                seq_lens=chunk.lengths,
            )
            for chunk in part.chunks
        ]
        made.prefill = FP8SeparatePrefillDecode.Prefill(part.ids[:rows], part.starts, chunks, part.lengths)
    return made
