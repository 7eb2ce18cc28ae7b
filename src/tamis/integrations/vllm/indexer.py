"""tamis' lightning indexer under vLLM's names: the options that choose it, the metadata of a step, and the selection.

vLLM's own indexer gathers the keys of prompts, writes a matrix of logits and selects from it, chunk by chunk, with
other kernels for decodes. Here one call selects for all tokens of a step, straight from the pages: a token needs the
number of its request and how many positions it sees, and nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.shard import Shard
from tamis.integrations.vllm.engine_batch import block_table, first, host_values
from tamis.ops import index_topk, index_topk_and_blocks, index_topk_within
from tamis.ops.index import WORKSPACE_BYTES
from tamis.ops.index.columns import seen_columns
from tamis.step.buffers import outside_modes

_NAMES = ("tamis", "vllm")
_OPTIONS = ("indexer", "share_indexer")


@dataclass(frozen=True)
class IndexerOptions:
    """What `--additional-config '{"tamis": {...}}'` says about the indexer."""

    chosen: bool = False
    """Whether tamis selects ("indexer": "tamis") instead of vLLM."""
    shared: bool = False
    """Whether tensor-parallel ranks divide the tokens among them ("share_indexer": true)."""

    @classmethod
    def read(cls, vllm_config: Any) -> Self:
        """Read vLLM's configuration; options that tamis does not know are refused."""
        additional = getattr(vllm_config, "additional_config", None)
        given = additional.get("tamis", {}) if isinstance(additional, dict) else {}
        if not isinstance(given, dict) or not set(given) <= set(_OPTIONS):
            expected = f"an object with {' and '.join(map(repr, _OPTIONS))} at most"
            raise checks.refuse("additional_config['tamis']", expected, given, "see docs/vllm.md")
        chosen = checks.option("additional_config['tamis']['indexer']", given.get("indexer", "vllm"), _NAMES) == "tamis"
        shared = checks.flag("additional_config['tamis']['share_indexer']", given.get("share_indexer", False))
        if shared and not chosen:
            remedy = 'set "indexer": "tamis" as well: vLLM\'s own indexer divides nothing'
            raise checks.refuse("additional_config['tamis']['share_indexer']", "false", True, remedy)
        return cls(chosen, shared)


@dataclass(frozen=True, eq=False)
class IndexerMetadata:
    """One step, for the layers of one builder. It is not of vLLM's class, so vLLM's own indexer fails if it gets it."""

    num_actual_tokens: int
    """The engine's number, which under a captured graph includes padding."""
    slot_mapping: Tensor
    """int64 [num_actual_tokens]: where the new keys go; the engine marks padding with -1."""
    block_table: Tensor
    """int32 [requests, pages], the engine's own."""
    request_ids: Tensor
    """int32 [num_actual_tokens], the block-table row of each token."""
    lengths: Tensor
    """int32 [num_actual_tokens]: how many positions (in V4, compressed entries) each token sees; 0 for padding."""
    seq_lens: Tensor
    """int32 [requests], the engine's own: context plus new tokens."""
    one_each: bool
    """Whether request r has token r and no other; padding requests at the end may have none."""
    longest: int | None
    """No token of a step with prompts sees more positions (in V4, entries). None for decodes, whose lengths may move on
    with those of the engine."""
    engine: Any = None
    """vLLM's record of the step, where vLLM's own builder made the slots."""


class StepRows:
    """The request of each token and the number of positions it sees, in buffers that never move, so that captured
    graphs may keep them. Both are computed on the device: nothing is copied from the host, and nothing waits for it."""

    def __init__(self, vllm_config: Any, device: torch.device, *, ratio: int = 1) -> None:
        """Allocate the buffers.

        Args:
            vllm_config: an object with `scheduler_config` and, for speculative decoding, `speculative_config`.
            device: where the step runs.
            ratio: how many tokens share an index key.
        """
        drafts = getattr(vllm_config, "speculative_config", None)
        self._new = new = 1 + (getattr(drafts, "num_speculative_tokens", None) or 0)
        limits = vllm_config.scheduler_config
        self._most = max(limits.max_num_batched_tokens, limits.max_num_seqs * new)
        # Adaptive verification drops drafts on the device, so the host does not know whose a token is.
        self._host_knows = not getattr(drafts, "enable_adaptive_verification", False)
        self._ratio = ratio
        with torch.inference_mode(False):  # buffers outlive the call: see `Planner`
            self._ids, self._lengths, self._numbers = (
                torch.zeros(self._most, dtype=torch.int32, device=device) for _ in range(3)
            )

    def read(self, common: Any, slots: Tensor, engine: Any = None) -> IndexerMetadata:
        """The metadata of one step, valid until the next call.

        Args:
            common: vLLM's `CommonAttentionMetadata`, or any object with its attributes.
            slots: where the step's keys go.
            engine: vLLM's record of the step, if there is one.
        """
        requests, rows = int(common.num_reqs), int(common.num_actual_tokens)
        if rows > self._most:
            raise checks.refuse("num_actual_tokens", f"at most {self._most}", rows, "raise max_num_batched_tokens")
        checks.tensor("seq_lens", first(common.seq_lens, requests), "B", (torch.int32,), B=requests)
        metadata = IndexerMetadata(
            rows,
            first(slots, rows) if slots.shape[0] > rows else slots,
            block_table(common.block_table_tensor, requests),
            self._ids[:rows],
            self._lengths[:rows],
            first(common.seq_lens, requests),
            rows == requests and self._has_one_each(common, requests),
            int(common.max_seq_len) // self._ratio if int(common.max_query_len) > self._new else None,
            engine,
        )
        if metadata.one_each:
            self.fill_one_each(metadata)
        elif rows:
            self._fill(metadata, first(common.query_start_loc, requests + 1))
        return metadata

    def _has_one_each(self, common: Any, requests: int) -> bool:
        """Whether the first requests have one token each, and the others, which are padding, have none."""
        if not self._host_knows or int(common.max_query_len) > 1:
            return False
        starts = first(host_values(common, ("query_start_loc_cpu",), "query_start_loc"), requests + 1)
        tokens = int(starts[-1])
        return int(starts[tokens]) == tokens

    def fill_one_each(self, metadata: IndexerMetadata) -> None:
        """Write the rows of a step of one token per request. Padding requests have length 0 in the engine's tensor.

        Buffers are written in every step, even if nothing changed: an engine in sleep mode loses their content.
        """
        ids = metadata.request_ids
        torch.arange(metadata.num_actual_tokens, dtype=ids.dtype, device=ids.device, out=ids)
        torch.div(metadata.seq_lens, self._ratio, rounding_mode="floor", out=metadata.lengths)

    def _fill(self, metadata: IndexerMetadata, starts: Tensor) -> None:
        rows, ids, lengths, ends = metadata.num_actual_tokens, metadata.request_ids, metadata.lengths, starts[1:]
        numbers = self._numbers[:rows]
        torch.arange(rows, dtype=numbers.dtype, device=numbers.device, out=numbers)
        # Token t belongs to the first request that ends after it. Padding ends after all requests.
        torch.searchsorted(ends, numbers, right=True, out_int32=True, out=ids)
        ids.clamp_(max=max(0, len(ends) - 1))
        # It is at seq_lens - ends + t in its request, and sees one more position than that.
        torch.index_select(metadata.seq_lens + 1 - ends, 0, ids, out=lengths)
        lengths.add_(numbers).masked_fill_(numbers >= ends[-1:], 0)
        if self._ratio > 1:
            lengths.div_(self._ratio, rounding_mode="floor")


class IndexerMetadataBuilder:
    """Makes an `IndexerMetadata` per step from vLLM's `CommonAttentionMetadata`, or any object with its attributes."""

    _cudagraph_support: ClassVar[Any] = "UNIFORM_BATCH"
    reorder_batch_threshold: int | None = None
    """None: decodes and prompts are the same call, so requests may come in any order."""
    supports_update_block_table: ClassVar[bool] = False
    supports_draft_decode_metadata_update: ClassVar[bool] = True

    def __init__(
        self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: Any, device: torch.device | str
    ) -> None:
        """Allocate every buffer; the arguments are vLLM's."""
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config
        self.device = torch.device(device)
        self._rows = StepRows(vllm_config, self.device)

    @outside_modes
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> IndexerMetadata:
        """The metadata of one step, valid until the next call; the first and the last argument have no effect."""
        return self._rows.read(common_attn_metadata, common_attn_metadata.slot_mapping)

    def update_draft_decode_metadata(self, metadata: IndexerMetadata) -> None:
        """Follow the engine's lengths, which it has changed in place for the next draft."""
        self._rows.fill_one_each(metadata)

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """How many new tokens a decode in a captured graph may have: any number."""
        return int(vllm_config.scheduler_config.max_num_batched_tokens)


@dataclass(frozen=True, eq=False)
class CandidateBlocks:
    """How a layer of DeepSeek-V4.1 selects in two levels; see `tamis.ops.index_topk_within`."""

    buffer: Tensor
    """int32 [max tokens, blocks], which all layers share; blocks of tamis are in ascending order."""
    block_size: int
    """Index keys per block."""
    writes: bool
    """Whether this layer selects the blocks. The others select within them."""


def select_positions(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    metadata: IndexerMetadata,
    k: int,
    buffer: Tensor,
    group: ProcessGroup | None = None,
    shard: Shard | None = None,
    candidates: CandidateBlocks | None = None,
) -> None:
    """Write each token's positions into its row of vLLM's buffer, and -1 into the rows of padding.

    Args:
        q: e4m3 [T, H, D], with as much padding past the step's tokens as the engine kept.
        weights: float32 [T, H], with the query's scale folded in.
        cache: the index keys, which hold those of the step already.
        metadata: the step.
        k: how many to select.
        buffer: int32 [T or more, k].
        group: the ranks that share the work, or the keys; None if this one does all of it.
        shard: the part of the keys that this rank holds; None if it holds all.
        candidates: the blocks that it selects too, or selects within; None for one level. Not with a group.
    """
    rows, padded = metadata.num_actual_tokens, q.shape[0]
    if rows:
        where = (metadata.request_ids, _seen_pages(metadata, cache.page_size, shard), metadata.lengths)
        given, out = (first(q, rows), first(weights, rows), cache, *where), first(buffer, rows)
        if candidates is None:
            index_topk(*given, k, out=out, group=group, shard=shard)
        elif candidates.writes:
            held, size = first(candidates.buffer, rows), candidates.block_size
            index_topk_and_blocks(*given, k, blocks=held.shape[1], block_size=size, out=out, blocks_out=held)
        else:
            held = first(candidates.buffer, rows)
            index_topk_within(*given, held, k, block_size=candidates.block_size, out=out)
    if padded > rows:
        buffer[rows:padded].fill_(-1)


def _seen_pages(metadata: IndexerMetadata, page_size: int, shard: Shard | None) -> Tensor:
    """The engine's page table, which has columns for `max_model_len`, or what a step with prompts needs of it. Decodes
    keep all columns: they are captured in CUDA graphs, after calls that load their kernels."""
    table, longest = metadata.block_table, metadata.longest
    if longest is None:
        return table
    keys = longest if shard is None else shard.most(longest)
    return seen_columns(table, page_size, metadata.num_actual_tokens, keys, WORKSPACE_BYTES)
