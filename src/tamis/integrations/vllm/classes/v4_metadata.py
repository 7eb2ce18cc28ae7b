"""Per-step metadata of DeepSeek-V4 layers under vLLM's names: a builder for compressed caches, one for the window's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div, round_up
from tamis.integrations.vllm.classes.v4_indices import build_c128a_topk_metadata
from tamis.integrations.vllm.engine_batch import engine_batch
from tamis.integrations.vllm.metadata import model_field
from tamis.integrations.vllm.v4_formats import EVERY
from tamis.model.spec import LayerSpec
from tamis.ops import select_entries, select_window
from tamis.step.plan import Limits, Plan
from tamis.step.planner import Planner
from tamis.step.v4_plan import ALIGN_COLUMNS, ALIGN_DRAFTS


@dataclass(frozen=True, eq=False)
class V4Metadata:
    """One step of layers with a compressed cache, under vLLM's names. Tensors are views of buffers that never move."""

    plan: Plan
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: Tensor
    """int32 [num_reqs + 1]"""
    slot_mapping: Tensor
    """int64 [num_actual_tokens]: with a ratio above 1, the slot of the entry that a token completes, else -1."""
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
class V4WindowMetadata:
    """One step of the window's cache, under vLLM's names. Tensors are views of buffers that never move."""

    plan: Plan
    block_table: Tensor
    slot_mapping: Tensor
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


class _Builder:
    """The common base of all builders: the numbers read from vLLM's configs, and a planner."""

    _cudagraph_support: ClassVar[Any] = "UNIFORM_BATCH"
    reorder_batch_threshold: int | None = 1
    supports_update_block_table: ClassVar[bool] = False
    uniform_decodes: ClassVar[bool] = False
    """False, since no reader shapes decodes as [requests, query length]. Builders of window and entries must agree on
    it, so that they divide a batch alike."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: Any, device: torch.device | str
    ) -> None:
        """Read the configs once and allocate every buffer.

        Args:
            kv_cache_spec: an object with `block_size` and, for compressed caches, `compress_ratio` or
                `tokens_per_state`.
            layer_names: the layers that this builder serves.
            vllm_config: an object with `model_config`, `scheduler_config`, `parallel_config` and, for speculative
                decoding, `speculative_config`.
            device: where the step runs.
        """
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config
        self.device = torch.device(device)
        model, drafts = vllm_config.model_config, getattr(vllm_config, "speculative_config", None)
        topk = model_field(model, "index_topk")
        if topk is None:
            raise checks.refuse("hf_config", "one with 'index_topk'", "none", "this is not a DeepSeek-V4 model")
        ranks = getattr(vllm_config.parallel_config, "decode_context_parallel_size", None) or 1
        if ranks != 1:
            remedy = "the builders' tables do not support requests that are divided among ranks"
            raise checks.refuse("decode_context_parallel_size", "1 for DeepSeek-V4", ranks, remedy)
        self.topk_tokens: int = topk
        self.window_size: int = model_field(model, "sliding_window") or 128
        self.block_size: int = kv_cache_spec.block_size
        self.limits = Limits(
            max_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            max_requests=vllm_config.scheduler_config.max_num_seqs,
            max_length=model.max_model_len,
            page_size=self.block_size,
            speculative_tokens=getattr(drafts, "num_speculative_tokens", None) or 0,
            parallel_drafting=bool(getattr(drafts, "parallel_drafting", False)),
            uniform_decodes=self.uniform_decodes,
        )
        self.reorder_batch_threshold = self.limits.threshold
        heads = model.get_num_attention_heads(vllm_config.parallel_config)
        spec = LayerSpec(heads, 448, 64, 512, window=self.window_size, kind="window")
        self.planner = Planner(spec, self.limits, self.device, layout="v4-fp8", mode="mixed")

    def _each(self, dtype: torch.dtype = torch.int32, fill: int = 0) -> Tensor:
        return torch.full((self.limits.max_tokens,), fill, dtype=dtype, device=self.device)

    def _rows(self, columns: int) -> Tensor:
        return torch.full((self.limits.max_tokens, columns), -1, dtype=torch.int32, device=self.device)


class CompressedBuilder(_Builder):
    """The common base of builders for caches with one row per entry: the ratio, and the slots of completed entries."""

    @torch.inference_mode(False)  # buffers outlive the call: see `Planner`
    def __init__(
        self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: Any, device: torch.device | str
    ) -> None:
        """Take the arguments of `_Builder`."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        ratio = getattr(kv_cache_spec, "compress_ratio", None)
        if ratio is None:
            ratio = getattr(kv_cache_spec, "tokens_per_state", None)  # the name in vLLM 0.32
        # Checkpoints write 0 for layers without compression.
        self.compress_ratio = max(1, checks.integer("kv_cache_spec.compress_ratio", ratio, low=0))
        if self.block_size % self.compress_ratio:
            expected = f"a multiple of the ratio {self.compress_ratio}"
            raise checks.refuse("kv_cache_spec.block_size", expected, self.block_size, "use 256")
        self.compressed_slot_mapping_buffer = self._each(torch.int64, -1) if self.compress_ratio > 1 else None

    def _slot_mapping(self, plan: Plan) -> Tensor:
        """The slots of completed entries. A token without a slot completes none, and absent pages take none."""
        buffer = self.compressed_slot_mapping_buffer
        if buffer is None:
            return plan.slots
        buffer.fill_(-1)
        found = buffer[: plan.rows]
        if plan.requests:
            select_entries(
                plan.positions,
                plan.request_ids,
                plan.block_table,
                ratio=self.compress_ratio,
                page_size=self.block_size // self.compress_ratio,
                completed=found,
                own=plan.slots,
            )
        return found


class V4MetadataBuilder(CompressedBuilder):
    """Makes a `V4Metadata` per step from vLLM's `CommonAttentionMetadata`, or any object with its attributes.

    The tokens' positions, which vLLM's builder takes as an argument, are computed from lengths and query starts.
    """

    @torch.inference_mode(False)  # buffers outlive the call: see `Planner`
    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: Sequence[str],
        vllm_config: Any,
        device: torch.device | str,
        *,
        every_entry: bool | None = None,
    ) -> None:
        """Take the arguments of `_Builder`. `every_entry` says whether these layers attend to all entries; if not
        given, those of ratio 128 do."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.every_entry = self.compress_ratio == EVERY if every_entry is None else every_entry
        if self.every_entry:
            longest = ceil_div(self.limits.max_length, self.compress_ratio)
            self.c128a_max_compressed = round_up(longest, ALIGN_COLUMNS)
            self.c128a_global_decode_buffer = self._rows(self.c128a_max_compressed)
            self.c128a_prefill_buffer = self._rows(self.c128a_max_compressed)
            self.c128a_decode_lens_buffer = self._each()

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> V4Metadata:
        """The metadata of one step, valid until the next call. The engine's tensors are copied and not changed.

        `common_prefix_len` and `fast_build` are part of vLLM's signature and have no effect.
        """
        common = common_attn_metadata
        actual = int(common.num_actual_tokens)
        plan = self.planner.plan(engine_batch(common, self.limits))
        return V4Metadata(
            plan=plan,
            num_reqs=int(common.num_reqs),
            max_query_len=int(common.max_query_len),
            max_seq_len=int(common.max_seq_len),
            num_actual_tokens=actual,
            query_start_loc=plan.query_starts,
            slot_mapping=self._slot_mapping(plan)[:actual],
            block_table=plan.block_table,
            req_id_per_token=plan.request_ids[:actual],
            block_size=self.block_size,
            topk_tokens=self.topk_tokens,
            **self._every(plan, actual),
        )

    def _every(self, plan: Plan, actual: int) -> dict[str, Tensor | None]:
        if not self.every_entry or actual == 0 or plan.requests == 0:
            return {}
        decodes = decode_rows(plan, actual)
        slots, lengths, numbers = build_c128a_topk_metadata(
            plan.positions[:actual],
            self.compress_ratio,
            decodes,
            plan.request_ids,
            plan.block_table,
            self.block_size // self.compress_ratio,
            plan.slots,
            self.c128a_global_decode_buffer,
            self.c128a_decode_lens_buffer,
            self.c128a_prefill_buffer,
        )
        return {
            "c128a_global_decode_topk_indices": slots.unsqueeze(1) if decodes else None,
            "c128a_decode_topk_lens": lengths if decodes else None,
            "c128a_prefill_topk_indices": numbers if decodes < actual else None,
        }


class V4WindowMetadataBuilder(_Builder):
    """Makes a `V4WindowMetadata` per step."""

    @torch.inference_mode(False)  # buffers outlive the call: see `Planner`
    def __init__(
        self, kv_cache_spec: Any, layer_names: Sequence[str], vllm_config: Any, device: torch.device | str
    ) -> None:
        """Take the arguments of `_Builder`."""
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.swa_indices_buffer = self._rows(self.window_size)
        drafts = self.limits.speculative_tokens
        wide = round_up(self.window_size + drafts, ALIGN_DRAFTS)
        self.draft_indices_buffer = self._rows(wide) if drafts else None
        self.swa_lens_buffer, self.is_valid_token_buffer = self._each(), self._each(torch.bool)
        self.gather_lens_buffer = torch.zeros(self.limits.max_requests, dtype=torch.int32, device=self.device)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> V4WindowMetadata:
        """The metadata of one step, valid until the next call. The engine's tensors are copied and not changed.

        With the engine's `causal=False`, the new tokens of a request are a draft block: each of them attends to the
        window before the block and to the whole block.
        """
        common = common_attn_metadata
        actual = int(common.num_actual_tokens)
        batch = engine_batch(common, self.limits)
        plan = self.planner.plan(batch)
        for buffer in (self.swa_lens_buffer, self.is_valid_token_buffer):
            buffer.zero_()
        slots, lengths = self._window(plan, bool(getattr(common, "causal", True)))
        valid = self.is_valid_token_buffer[: plan.rows]
        torch.ge(plan.slots, 0, out=valid)
        decodes, split = decode_rows(plan, actual), plan.split
        prefill_lengths = plan.lengths[split.decodes :]
        return V4WindowMetadata(
            plan=plan,
            block_table=plan.block_table,
            slot_mapping=plan.slots[:actual],
            block_size=self.block_size,
            seq_lens=plan.lengths,
            query_start_loc=plan.query_starts,
            query_start_loc_cpu=batch.query_starts,
            token_to_req_indices=plan.request_ids[:actual],
            is_valid_token=valid[:actual],
            num_decodes=split.decodes,
            num_prefills=split.prefills,
            num_decode_tokens=decodes,
            num_prefill_tokens=actual - decodes,
            decode_swa_indices=slots[:decodes].unsqueeze(1),
            decode_swa_lens=lengths[:decodes],
            prefill_swa_indices=slots[decodes:actual].unsqueeze(1),
            prefill_swa_lens=lengths[decodes:actual],
            prefill_seq_lens=prefill_lengths,
            prefill_gather_lens=self._gather_lengths(plan, prefill_lengths),
        )

    def _window(self, plan: Plan, causal: bool) -> tuple[Tensor, Tensor]:
        """Slots [rows, columns], and how many of each row count."""
        buffer, blocks = self.swa_indices_buffer, None
        if not causal:
            room = 0 if self.draft_indices_buffer is None else self.draft_indices_buffer.shape[1] - self.window_size
            if self.draft_indices_buffer is None or plan.max_query > room:
                expected = f"True for blocks of more than {room} tokens"
                raise checks.refuse("causal", expected, f"blocks of {plan.max_query}", "set num_speculative_tokens")
            buffer = self.draft_indices_buffer
            blocks = (plan.lengths - (plan.query_starts[1:] - plan.query_starts[:-1]), plan.lengths)
        slots, lengths = buffer[: plan.rows], self.swa_lens_buffer[: plan.rows]
        if plan.requests:
            select_window(
                plan.positions,
                plan.request_ids,
                plan.block_table,
                page_size=self.block_size,
                window=self.window_size,
                slots=slots,
                lengths=lengths,
                own=plan.slots,
                blocks=blocks,
            )
        return slots, lengths

    def _gather_lengths(self, plan: Plan, lengths: Tensor) -> Tensor:
        found = self.gather_lens_buffer[: plan.split.prefills]
        if len(found):
            new = (plan.query_starts[1:] - plan.query_starts[:-1])[plan.split.decodes :]
            found.copy_(new + (lengths - new).clamp_max_(self.window_size - 1))
        return found


def decode_rows(plan: Plan, actual: int) -> int:
    """The number of decode tokens of a step. As in vLLM, padding counts as decode in a step without prefills."""
    return plan.split.decode_tokens if plan.split.prefills else actual
