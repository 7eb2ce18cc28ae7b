"""The operations of stage `compress`; see `tamis.ops.library`.

T tokens, D channels of an entry, r tokens per span. C is D, or 2D where spans overlap. B requests, W pages of each.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.library import Operation, Written


class CompressKv(NamedTuple):
    """The state of a step's tokens, and the entries of the spans that some of them end."""

    values: Tensor
    """bf16, fp16 or fp32 [T, C]."""
    scores: Tensor
    """bf16, fp16 or fp32 [T, C], without the bias."""
    state: Written[PagedCache]
    """float32 rows of 2C: a token's values, then its scores with the bias."""
    cache: Written[PagedCache]
    """The entries: rows of D numbers, in any layout."""
    positions: Tensor
    """int32 or int64 [T]; negative for padding, which is not written."""
    state_slots: Tensor
    """int32 or int64 [T], the slot of each token's state; negative slots are not written."""
    request_ids: Tensor
    """int32 [T], the block-table row of each token."""
    block_table: Tensor
    """int32 [B, W], pages of the state; negative for absent pages."""
    slots: Tensor
    """int32 or int64 [T], the slot of the entry if the token ends a span; negative slots are not written."""
    bias: Tensor
    """bf16, fp16 or fp32 [r, C]; row i is added to the scores of the i-th token of a span."""
    norm_weight: Tensor | None
    """bf16, fp16 or fp32 [D]; None if entries are not normalised."""
    cos_sin: Tensor | None
    """float32 [P, R]; the last R channels are rotated, R/2 cosines before R/2 sines. None: they are not."""
    eps: float
    """Epsilon of the norm."""
    hadamard: bool
    """Whether rounded entries are multiplied by the Hadamard matrix and rounded again."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("values", "scores", "bias", "norm_weight", "cos_sin")

    def fake(self) -> None:
        """Nothing is returned."""


class PoolKv(NamedTuple):
    """The state of a step's tokens, and the latents of the spans that some of them end. Spans do not overlap."""

    values: Tensor
    """bf16, fp16 or fp32 [T, D]."""
    scores: Tensor
    """bf16, fp16 or fp32 [T, D]."""
    state: Written[PagedCache]
    """float32 rows of 2D: a token's values, then its scores."""
    positions: Tensor
    """int32 or int64 [T]; negative for padding, which is not written."""
    state_slots: Tensor
    """int32 or int64 [T], the slot of each token's state; negative slots are not written."""
    request_ids: Tensor
    """int32 [T], the block-table row of each token."""
    block_table: Tensor
    """int32 [B, W], pages of the state; negative for absent pages."""
    norm_weight: Tensor
    """bf16, fp16 or fp32 [D]."""
    ratio: int
    """Tokens per span."""
    eps: float
    """Epsilon of the norm."""
    dtype: torch.dtype
    """The dtype of the latents."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("values", "scores", "norm_weight")

    def fake(self) -> Tensor:
        """Latents [T, D]; zeros for tokens that end no span."""
        return self.values.new_empty(self.values.shape, dtype=self.dtype)


compress_kv = Operation("compress", CompressKv, CompressKv.fake)
pool_kv = Operation("compress", PoolKv, PoolKv.fake)
