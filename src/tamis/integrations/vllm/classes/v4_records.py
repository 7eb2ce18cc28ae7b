"""Per-step metadata of DeepSeek-V4 layers under vLLM's names, as the builders of `v4_metadata` make it."""

from dataclasses import dataclass

from torch import Tensor

from tamis.step.lease import Use
from tamis.step.split import BatchSplit


@dataclass(frozen=True, eq=False)
class BuiltRecord:
    """What all records of a builder know of their step."""

    split: BatchSplit
    """The division of the requests into decodes and prefills."""
    use: Use
    """Knows whether the builder has made another record since, which has overwritten its buffers."""

    def using(self) -> Use:
        """The block in which attention reads this record. Entering it is refused for a record that is not the latest,
        and inside of it the builder refuses to build."""
        return self.use


@dataclass(frozen=True, eq=False)
class V4Metadata(BuiltRecord):
    """One step of layers with a compressed cache, under vLLM's names. Tensors are views of the builder's buffers and of
    the engine's, none of which moves."""

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor
    """int32 [num_reqs + 1]"""
    slot_mapping: Tensor
    """int64 [num_actual_tokens]: with a ratio above 1, the slot of the entry that a token completes, else -1. With a
    ratio of 1, the engine's own, which marks padding with -1."""
    block_table: Tensor
    """int32 [num_reqs, pages], the engine's."""
    req_id_per_token: Tensor
    """int32 [num_actual_tokens]; 0 for padding."""
    block_size: int
    topk_tokens: int
    c128a_global_decode_topk_indices: Tensor | None = None
    """int32 [decode tokens, 1, width], slots of all complete entries."""
    c128a_decode_topk_lens: Tensor | None = None
    """int32 [decode tokens]"""
    c128a_prefill_topk_indices: Tensor | None = None
    """int32 [prefill tokens, width], numbers of all complete entries: 0, 1, 2..."""


@dataclass(frozen=True, eq=False)
class V4WindowMetadata(BuiltRecord):
    """One step of the window's cache, under vLLM's names. Tensors are views of the builder's buffers and of the
    engine's, none of which moves."""

    block_table: Tensor
    slot_mapping: Tensor
    """int64 [tokens], the engine's, which marks padding with -1."""
    block_size: int
    seq_lens: Tensor
    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    token_to_req_indices: Tensor
    """int32 [tokens]; 0 for padding."""
    is_valid_token: Tensor
    """bool [tokens]"""
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    decode_swa_indices: Tensor
    """int32 [decode tokens, 1, width] slots, oldest first; -1 beyond the length."""
    decode_swa_lens: Tensor
    """int32 [decode tokens]; 0 for tokens that are not valid."""
    prefill_swa_indices: Tensor
    prefill_swa_lens: Tensor
    prefill_seq_lens: Tensor
    """int32 [prefills]"""
    prefill_gather_lens: Tensor
    """int32 [prefills]: how many raw tokens the windows of the new tokens cover, the new tokens included."""

    @property
    def decode_swa_width(self) -> int:
        """The number of columns of the window's rows, which exceeds the window for draft blocks without causal mask."""
        return self.decode_swa_indices.shape[-1]
