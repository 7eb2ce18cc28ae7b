"""Per-step metadata of V4's indexer under vLLM's names. Its cache has one key per entry of the compressed cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.integrations.vllm.classes.v4_backend import TamisV4Backend
from tamis.integrations.vllm.classes.v4_index_chunks import IndexChunk, chunk_index_prefills
from tamis.integrations.vllm.classes.v4_metadata import CompressedBuilder
from tamis.integrations.vllm.classes.v4_records import BuiltRecord
from tamis.integrations.vllm.engine_tokens import TokenStep
from tamis.step.buffers import outside_modes

KEYS_PER_LENGTH = 40
"""The most keys that are gathered at once, in multiples of the greatest request length."""
SCORE_BYTES = 512 << 20
"""The memory that the scores of a chunk may take."""


@dataclass(frozen=True, eq=False)
class V4IndexDecode:
    """The decode tokens, which are scored over pages."""

    block_table: Tensor
    """int32 [rows, pages]. If decodes are flattened, each token's row is a copy of its request's."""
    seq_lens: Tensor
    """int32 [rows, n], the number of entries that each token sees; 0 for padding."""
    decode_lens: Tensor
    """int32 [rows], the number of tokens of each row."""
    requires_padding: bool
    """Whether some rows have fewer tokens than columns, so that queries must be padded to [rows, n]."""

    schedule_metadata: ClassVar[None] = None
    """None: tamis' scoring kernels need no precomputed schedule."""


@dataclass(frozen=True, eq=False)
class V4IndexChunk:
    """Some of the prefill tokens, which are scored over gathered keys."""

    block_table: Tensor
    """int32 [num_reqs, pages]"""
    cu_seqlen_ks: Tensor
    """int32 [tokens], the first gathered key of each token's request."""
    cu_seqlen_ke: Tensor
    """int32 [tokens], one past the last key that each token sees."""
    cu_seq_lens: Tensor
    """int32 [num_reqs + 1], the first gathered key of each request."""
    total_seq_lens: int
    """The number of gathered keys."""
    token_start: int
    """The tokens are rows token_start to token_end (exclusive) of the step."""
    token_end: int
    num_reqs: int
    skip_kv_gather: bool
    """Whether the chunk before had the same requests, so that their keys are gathered already."""

    @property
    def token_to_seq(self) -> Tensor:
        """int32 [total_seq_lens], the request of each gathered key."""
        number = torch.arange(self.num_reqs, dtype=torch.int32, device=self.cu_seq_lens.device)
        return number.repeat_interleave(self.cu_seq_lens.diff(), output_size=self.total_seq_lens)


@dataclass(frozen=True, eq=False)
class V4IndexPrefill:
    """The prefill tokens. Tokens in no chunk see no entry yet, and their rows of the top-k buffer stay -1."""

    chunks: tuple[V4IndexChunk, ...]


@dataclass(frozen=True, eq=False)
class V4IndexMetadata(BuiltRecord):
    """One step of the indexer, under vLLM's names. Tensors are views of the builder's buffers and of the engine's, none
    of which moves."""

    num_reqs: int
    num_actual_tokens: int
    max_seq_len: int
    seq_lens: Tensor
    """int32 [num_reqs], in tokens."""
    compressed_seq_lens: Tensor
    """int32 [num_reqs], in complete entries."""
    query_start_loc: Tensor
    slot_mapping: Tensor
    """int64 [num_actual_tokens], the slot of the key that a token completes, else -1."""
    block_table: Tensor
    """int32 [num_reqs, pages], the engine's."""
    block_size: int
    topk_tokens: int
    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int
    decode: V4IndexDecode | None = None
    prefill: V4IndexPrefill | None = None


class V4IndexMetadataBuilder(CompressedBuilder):
    """Makes a `V4IndexMetadata` per step in which every decode token has a row of its own, so that decodes of any
    lengths can run in any captured graph."""

    _cudagraph_support: ClassVar[Any] = "ALWAYS"

    @torch.inference_mode(False)  # buffers outlive the call: see `Planner`
    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: Sequence[str],
        vllm_config: Any,
        device: torch.device | str,
        *,
        score_bytes: int = SCORE_BYTES,
    ) -> None:
        """Take the arguments of `V4MetadataBuilder`. `score_bytes` bounds the memory of a chunk's scores."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.score_bytes = checks.integer("score_bytes", score_bytes, low=4)
        limits = self.limits
        rows = max(limits.max_tokens, limits.max_requests * limits.threshold)
        pages = ceil_div(limits.max_length, self.block_size)
        self.decode_seq_lens_buffer = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.decode_lens_buffer = self._each()
        self.expanded_block_table_buffer = None if self.uniform_decodes else self._rows(pages)
        self.compressed_seq_lens_buffer = torch.zeros(limits.max_requests, dtype=torch.int32, device=self.device)
        self.cu_seqlen_ks_buffer, self.cu_seqlen_ke_buffer = self._each(), self._each()
        # Each group of requests has one more start than it has requests.
        self.cu_seq_lens_buffer = torch.zeros(2 * limits.max_requests, dtype=torch.int32, device=self.device)
        self._columns = torch.arange(limits.threshold, dtype=torch.int32, device=self.device)
        self._requests_before, self._decodes_before = 0, 0
        # The kernel that finds slots of completed keys also counts the entries that each token sees.
        visible = None if self.uniform_decodes else self.decode_seq_lens_buffer[: limits.max_tokens]
        self._keep(visible=visible, decode_lens=self.decode_lens_buffer)

    @outside_modes
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> V4IndexMetadata:
        """The metadata of one step, valid until the next call. The engine's tensors are not changed.

        `common_prefix_len` and `fast_build` are part of vLLM's signature and have no effect.
        """
        common, step = common_attn_metadata, self.tokens.read(common_attn_metadata)
        decodes, split, requests = step.decode_rows, step.split, step.requests
        selection = self._selection(step)
        entries = self.compressed_seq_lens_buffer[:requests]
        with self.lease.renewed() as use:
            self.tokens.fill(step)
            self._clear(step.rows, completed=-1, visible=0)
            if requests < self._requests_before:
                self.compressed_seq_lens_buffer[requests : self._requests_before].zero_()
            self._requests_before = requests
            torch.div(step.lengths, self.compress_ratio, rounding_mode="floor", out=entries)
            if selection is not None:
                selection()
            decode = self._decode(step, decodes) if decodes and requests else None
            if decode is None:
                self._decode_lens(0)
            prefill = self._prefill(step, entries) if split.prefills else None
        return V4IndexMetadata(
            split,
            use,
            num_reqs=requests,
            num_actual_tokens=step.actual,
            max_seq_len=int(common.max_seq_len),
            seq_lens=step.lengths,
            compressed_seq_lens=entries,
            query_start_loc=step.query_starts,
            slot_mapping=self._slot_mapping(step),
            block_table=step.block_table,
            block_size=self.block_size,
            topk_tokens=self.topk_tokens,
            num_decodes=split.decodes,
            num_decode_tokens=decodes,
            num_prefills=split.prefills,
            num_prefill_tokens=step.actual - decodes,
            decode=decode,
            prefill=prefill,
        )

    def _decode(self, step: TokenStep, rows: int) -> V4IndexDecode:
        """One row per token. Padding gets the row of request 0 and a length of 0."""
        table, given = self.expanded_block_table_buffer, step.block_table
        assert table is not None
        pages = min(table.shape[1], given.shape[1])
        ids, found = self.tokens.part("request_ids", rows), table[:rows]
        if pages < table.shape[1]:
            found[:, pages:].fill_(-1)
            found[:, :pages] = given.index_select(0, ids)
        else:
            torch.index_select(given if given.shape[1] == pages else given[:, :pages], 0, ids, out=found)
        seen = self._parts("visible", rows).unsqueeze(1)
        return V4IndexDecode(found, seen, self._decode_lens(rows).fill_(1), requires_padding=False)

    def _decode_lens(self, rows: int) -> Tensor:
        """Room for a number per row of the decodes. Rows that only the previous step had are cleared."""
        before, self._decodes_before = self._decodes_before, rows
        if rows < before:
            self.decode_lens_buffer[rows:before].zero_()
        return self._parts("decode_lens", rows)

    def _prefill(self, step: TokenStep, entries: Tensor) -> V4IndexPrefill:
        first, starts = step.split.decodes, step.starts
        # For prefills, the lengths on the host are exact.
        keys = (step.host_lengths.numpy()[first:] // self.compress_ratio).tolist()
        chunks = chunk_index_prefills(
            keys,
            step.queries[first:].tolist(),
            key_budget=KEYS_PER_LENGTH * self.limits.max_length,
            score_budget=self.score_bytes // 4,
        )
        for buffer in (self.cu_seqlen_ks_buffer, self.cu_seqlen_ke_buffer, self.cu_seq_lens_buffer):
            buffer.zero_()
        made: list[V4IndexChunk] = []
        groups = 0
        for chunk in chunks:
            begin, end = first + chunk.first, first + chunk.end
            offset = int(starts[begin])
            again = chunk.queries.start > 0
            groups += not again
            # The starts of the groups lie one after the other; each group has one more than it has requests.
            cut = slice(chunk.first + groups - 1, chunk.end + groups)
            sums = self.cu_seq_lens_buffer[cut]
            if not again:
                self._bounds(begin, slice(offset, int(starts[end])), entries[begin:end], sums)
            tokens = slice(offset + chunk.queries.start, offset + chunk.queries.stop)
            made.append(self._chunk(step, chunk, begin, end, tokens, sums, again))
        return V4IndexPrefill(tuple(made))

    def _bounds(self, first: int, tokens: slice, entries: Tensor, sums: Tensor) -> None:
        """Fill in where the keys of a group's requests begin, and which keys each of its tokens sees."""
        torch.cumsum(entries, 0, dtype=torch.int32, out=sums[1:])
        begin, end = self.cu_seqlen_ks_buffer[tokens], self.cu_seqlen_ke_buffer[tokens]
        torch.index_select(sums, 0, self.tokens.request_ids[tokens] - first, out=begin)
        torch.add(begin, (self.tokens.positions[tokens] + 1) // self.compress_ratio, out=end)

    def _chunk(
        self, step: TokenStep, chunk: IndexChunk, begin: int, end: int, tokens: slice, sums: Tensor, again: bool
    ) -> V4IndexChunk:
        return V4IndexChunk(
            block_table=step.block_table[begin:end],
            cu_seqlen_ks=self.cu_seqlen_ks_buffer[tokens],
            cu_seqlen_ke=self.cu_seqlen_ke_buffer[tokens],
            cu_seq_lens=sums,
            total_seq_lens=chunk.keys,
            token_start=tokens.start,
            token_end=tokens.stop,
            num_reqs=end - begin,
            skip_kv_gather=again,
        )


class V4UniformIndexMetadataBuilder(V4IndexMetadataBuilder):
    """For scoring kernels that take decodes as [requests, n]: the prefills begin with the first request whose query
    length differs from that of the decodes before it."""

    _cudagraph_support: ClassVar[Any] = "UNIFORM_BATCH"
    uniform_decodes: ClassVar[bool] = True

    def _decode(self, step: TokenStep, rows: int) -> V4IndexDecode:
        """One row per request, with a column for each of its last n tokens."""
        decodes = step.split.decodes
        lengths = step.queries[:decodes]
        longest = max(1, int(lengths.max()))
        self.decode_seq_lens_buffer.zero_()
        seen = self.decode_seq_lens_buffer[: decodes * longest].view(decodes, longest)
        last = step.lengths[:decodes].unsqueeze(1) - (longest - 1) + self._columns[:longest]
        torch.div(last.clamp_min_(0), self.compress_ratio, rounding_mode="floor", out=seen)
        own, ragged = self._decode_lens(decodes), bool((lengths != longest).any())
        torch.sub(step.query_starts[1 : decodes + 1], step.query_starts[:decodes], out=own)
        return V4IndexDecode(step.block_table[:decodes], seen, own, ragged)


class TamisV4IndexBackend(TamisV4Backend):
    """The cache of V4's index keys."""

    @staticmethod
    def get_name() -> str:
        """The name in logs and reports."""
        return "TAMIS_SPARSE_V4_INDEX"

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """The class that makes per-step metadata."""
        return V4IndexMetadataBuilder

    @staticmethod
    def get_metadata_cls() -> type[Any]:
        """The class of that metadata."""
        return V4IndexMetadata

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """The supported widths of index keys."""
        return [32, 64, 128]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """[pages, keys per page, bytes of a key]. vLLM passes the bytes as `head_size`: 132 for FP8 keys of width
        128, 68 for MXFP4 keys."""
        if num_kv_heads != 1:
            raise checks.refuse("num_kv_heads", "1", num_kv_heads, "the indexer keeps one key for all heads")
        return (num_blocks, block_size, head_size)
