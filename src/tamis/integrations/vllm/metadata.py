"""`SparseMetadata`: the per-step metadata of sparse MLA layers under vLLM's names, and its builder."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from tamis import checks
from tamis.integrations.vllm.context_parallel import GatheredPrefills, Gathering, Ranks
from tamis.integrations.vllm.engine_batch import (
    block_table,
    first,
    host_values,
    length_names,
    padded_rows,
)
from tamis.integrations.vllm.engine_step import EngineStep
from tamis.integrations.vllm.fp8_metadata import FP8KernelMetadata, FP8SeparatePrefillDecode, separate_metadata
from tamis.integrations.vllm.held_requests import HeldRequests
from tamis.integrations.vllm.index_group import StepSlots
from tamis.integrations.vllm.row_formats import row_layout, row_rope
from tamis.model.spec import LayerSpec
from tamis.step.batch_checks import check_starts
from tamis.step.buffers import outside_modes
from tamis.step.plan import Limits, Mode, Plan
from tamis.step.planner import Planner
from tamis.step.split import BatchSplit, split_batch


def model_field(model_config: Any, name: str) -> Any:
    """A number from the model's text config, or else from its outer config; None if neither has it."""
    for config in ("hf_text_config", "hf_config"):
        value = getattr(getattr(model_config, config, None), name, None)
        if value is not None:
            return value
    return None


@dataclass(frozen=True)
class MlaDims:
    """The widths of multi-head latent attention, by their Hugging Face names."""

    kv_lora_rank: int
    qk_rope_head_dim: int
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    v_head_dim: int | None = None

    @classmethod
    def read(cls, model_config: Any) -> Self:
        """Read the widths from vLLM's model config."""
        latent = model_field(model_config, "kv_lora_rank")
        if latent is None:
            raise checks.refuse("hf_config", "one with 'kv_lora_rank'", "none", "this is not an MLA model")
        return cls(
            kv_lora_rank=latent,
            qk_rope_head_dim=model_field(model_config, "qk_rope_head_dim") or 0,
            q_lora_rank=model_field(model_config, "q_lora_rank"),
            qk_nope_head_dim=model_field(model_config, "qk_nope_head_dim"),
            v_head_dim=model_field(model_config, "v_head_dim"),
        )


@dataclass(frozen=True, eq=False)
class SparseMetadata:
    """One step under vLLM's names.

    In a record that a builder made, `req_id_per_token` is a view of the builder's buffer and the other tensors are
    views of the engine's. None of them moves, so captured graphs may keep them. Fields that only some steps or readers
    need are computed when they are read. Attention also takes records that were constructed from vLLM's fields without
    a builder; these have no plan.
    """

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    """The engine's number, which under a captured graph includes padding."""
    query_start_loc: Tensor
    """int32 [num_reqs + 1]"""
    slot_mapping: Tensor
    """int64 [num_actual_tokens]; the engine marks padding with -1."""
    block_table: Tensor
    """int32 [num_reqs, pages]"""
    req_id_per_token: Tensor
    """int32 [num_actual_tokens]; 0 for padding."""
    seq_lens: Tensor | None = None
    """int32 [num_reqs], context plus new tokens."""
    block_size: int = 64
    topk_tokens: int = 2048
    fp8_extra_metadata: FP8SeparatePrefillDecode | FP8KernelMetadata | None = None
    """For readers of vLLM's `fp8_ds_mla` records; tamis' attention does not read it."""
    fp8_use_mixed_batch: bool = False
    """Whether all tokens go through one call that reads the cache directly."""
    cp_kv_cache_interleave_size: int | None = None
    """How many consecutive rows of a request each rank holds, if ranks share them; None if only the layer knows."""
    gathered: GatheredPrefills | None = None
    """Prefills that attend to the pages of all ranks."""
    step: EngineStep | None = None
    """The builder's data about the step; None if no builder made the record."""
    slots: StepSlots = field(default_factory=StepSlots)
    """The translated positions of the layers that share them."""

    prefill: ClassVar[None] = None
    """None: vLLM keeps its dense prefill here, and tamis runs every token through sparse attention."""
    FP8KernelMetadata: ClassVar[type[FP8KernelMetadata]] = FP8KernelMetadata
    FP8SeparatePrefillDecode: ClassVar[type[FP8SeparatePrefillDecode]] = FP8SeparatePrefillDecode

    @cached_property
    def split(self) -> BatchSplit:
        """The division of the requests into decodes and prefills."""
        if self.step is not None:
            return self.step.split()
        starts = host_values(self, (), "query_start_loc").numpy()
        return split_batch(starts[1:] - starts[:-1], uniform=True)

    @cached_property
    def plan(self) -> Plan:
        """tamis' plan of the step, valid until the builder's next plan. If prefills are gathered, the builder makes it;
        otherwise it is made when it is first read."""
        if self.step is None:
            raise checks.refuse("attn_metadata", "made by a builder to have a plan", "another record", "build it")
        return self.step.plan()

    @property
    def gathers(self) -> bool:
        """Whether prefills are gathered into a workspace, for which attention needs the plan."""
        return self.step is not None and not self.fp8_use_mixed_batch

    @property
    def new_tokens(self) -> int:
        """The requests' tokens; without padding, if a builder made the record."""
        return self.num_actual_tokens if self.step is None else self.step.tokens

    @property
    def num_decodes(self) -> int:
        """The leading requests, which count as decodes. Padding requests are among them."""
        return self.split.decodes

    @property
    def num_prefills(self) -> int:
        """The requests after the decodes."""
        return self.split.prefills

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of the decodes. As in vLLM, padding counts as decode in a step without prefills, so that decode and
        prefill tokens sum to `num_actual_tokens`."""
        return self.split.decode_tokens if self.num_prefills else self.num_actual_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prefills."""
        return self.num_actual_tokens - self.num_decode_tokens

    @cached_property
    def prefill_max_seq_len(self) -> int:
        """The length of the longest prefill; 0 if there is none."""
        known = host_values(self, (), "seq_lens") if self.step is None else self.step.host_lengths
        lengths = known[self.num_decodes :]
        return int(lengths.max()) if len(lengths) else 0

    def request_ids(self, rows: int) -> Tensor:
        """The block-table row of each of `rows` query rows: all new tokens, and as much padding as the caller kept."""
        step = self.step
        if step is not None:
            step.check_held()
        if rows == self.num_actual_tokens:
            return self.req_id_per_token
        self._check_rows(rows)
        return self.req_id_per_token[:rows] if step is None else step.held.buffer[:rows]

    def plan_for(self, rows: int, columns: int | None = None) -> Plan:
        """The plan for a query of `rows` rows, as in `request_ids`, and for selections of so many columns: as many as
        the engine's buffer has, which is wider than top-k if index keys are pooled."""
        plan = self.plan
        if columns is not None and columns != plan.topk:
            plan = replace(plan, topk=columns)
        if rows == plan.rows:
            return plan
        self._check_rows(rows)
        prefill = plan.prefill
        return replace(
            plan,
            rows=rows,
            request_ids=plan.request_ids[:rows],
            positions=plan.positions[:rows],
            visible=plan.visible[:rows],
            slots=plan.slots[:rows],
            prefill=None if prefill is None else replace(prefill, ids=prefill.ids[:rows]),
        )

    def _check_rows(self, rows: int) -> None:
        step = self.step
        least, most = (0, len(self.req_id_per_token)) if step is None else (step.tokens, step.rows)
        if not least <= rows <= most:
            raise checks.refuse(
                "q", f"of {least} (new tokens) to {most} rows (with padding)", rows, "pass the step's rows"
            )


class SparseMetadataBuilder:
    """Makes a `SparseMetadata` per step from vLLM's `CommonAttentionMetadata`, or any object with its attributes."""

    _cudagraph_support: ClassVar[Any] = "UNIFORM_BATCH"
    reorder_batch_threshold: int | None = 1
    supports_update_block_table: ClassVar[bool] = False
    treat_short_extends_as_decodes: bool = True
    """If False, requests marked by `is_prefilling` are prefills even if their chunk of the prompt is short."""
    metadata_cls: ClassVar[type[SparseMetadata]] = SparseMetadata

    @torch.inference_mode(False)  # buffers outlive the call: see `Planner`
    def __init__(
        self,
        kv_cache_spec: Any,
        layer_names: Sequence[str],
        vllm_config: Any,
        device: torch.device | str,
        *,
        mode: Mode = "auto",
        workspace_rows: int | None = None,
    ) -> None:
        """Read the configs once and allocate every buffer.

        Args:
            kv_cache_spec: an object with `block_size` and, if these layers have a cache dtype of their own,
                `cache_dtype_str`.
            layer_names: the layers that this builder serves.
            vllm_config: an object with `model_config`, `cache_config`, `parallel_config`, `scheduler_config` and, for
                speculative decoding, `speculative_config`.
            device: where the step runs.
            mode: how tokens of an `fp8_ds_mla` cache are attended; see `Planner`. Every other cache is read directly.
            workspace_rows: as in `Limits`.
        """
        self.kv_cache_spec, self.layer_names, self.vllm_config = kv_cache_spec, layer_names, vllm_config
        self.model_config, self.device = vllm_config.model_config, torch.device(device)
        self.mla_dims = MlaDims.read(self.model_config)
        topk = model_field(self.model_config, "index_topk")
        if topk is None:
            raise checks.refuse("hf_config", "one with 'index_topk'", "none", "use a dense MLA backend for this model")
        self.topk_tokens: int = topk
        drafts = getattr(vllm_config, "speculative_config", None)
        # Adaptive verification drops drafts on the device, so that the host does not know which tokens are whose.
        self.device_lengths = bool(getattr(drafts, "enable_adaptive_verification", False))
        self.ranks = Ranks.read(vllm_config.parallel_config)
        # Parts of prompts are prefills on every rank, however short, because ranks must agree about it.
        self.treat_short_extends_as_decodes = self.treat_short_extends_as_decodes and self.ranks.prefill == 1
        # Single layers may have another dtype than the configuration's, and drafting layers that of their own.
        cache_dtype = getattr(kv_cache_spec, "cache_dtype_str", None) or vllm_config.cache_config.cache_dtype
        self.use_fp8_kv_cache = cache_dtype == "fp8_ds_mla"
        mode = self._possible(mode)
        dims = self.mla_dims
        self.spec = LayerSpec(
            # Under context parallelism each rank attends for the heads of several ranks.
            heads=self.model_config.get_num_attention_heads(vllm_config.parallel_config) * self.ranks.query_groups,
            latent_dim=dims.kv_lora_rank,
            rope_dim=row_rope(cache_dtype, dims.qk_rope_head_dim),
            value_dim=dims.kv_lora_rank,
            topk=topk,
        )
        self.limits = self._limits(workspace_rows)
        layout = row_layout(cache_dtype, dims.kv_lora_rank, dims.qk_rope_head_dim, self.model_config.dtype)
        self.planner = Planner(self.spec, self.limits, self.device, layout=layout, mode=mode)
        self._gathering = (
            Gathering(self.ranks, self.limits, layout, self.device) if self.ranks.gather_prefills else None
        )
        self._held = HeldRequests(self.limits, self.device)
        self._fp8 = FP8KernelMetadata.of(self.limits, self.device) if self.use_fp8_kv_cache else None
        self._fp8_mixed = None if self._fp8 is None else self._fp8.rows(1)
        self.reorder_batch_threshold = self.limits.threshold

    def _possible(self, mode: Mode) -> Mode:
        """The mode for these ranks and this cache: "mixed" in place of "auto" where no other is possible."""
        ranks, remedy = self.ranks.decode, "the host does not know which tokens to gather for"
        if ranks > 1 and mode == "separate":
            expected = "'mixed' under decode context parallelism"
            raise checks.refuse("mode", expected, repr(mode), "a rank has no whole request to gather")
        if self.device_lengths and mode == "separate":
            raise checks.refuse("mode", "'mixed' with adaptive verification", repr(mode), remedy)
        if self.device_lengths and self.ranks.gather_prefills:
            expected = "off where ranks divide prompts and share rows (PCP with DCP)"
            raise checks.refuse("enable_adaptive_verification", expected, True, remedy)
        if mode == "auto" and (ranks > 1 or self.device_lengths or not self.use_fp8_kv_cache):
            return "mixed"
        return mode

    def _limits(self, workspace_rows: int | None) -> Limits:
        config, alone = self.vllm_config, self.ranks.prefill == 1
        drafts = getattr(config, "speculative_config", None)
        return Limits(
            max_tokens=config.scheduler_config.max_num_batched_tokens,
            # A rank gets two parts of a divided prompt, one near its start and one near its end.
            max_requests=config.scheduler_config.max_num_seqs * (1 if alone else 2),
            max_length=self.model_config.max_model_len,
            page_size=self.kv_cache_spec.block_size,
            speculative_tokens=getattr(drafts, "num_speculative_tokens", None) or 0,
            parallel_drafting=bool(getattr(drafts, "parallel_drafting", False)),
            context_parallel=self.ranks.decode > 1 and alone,
            uniform_decodes=alone and not self.device_lengths,
            workspace_rows=workspace_rows,
        )

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """How many new tokens a decode in a captured graph may have: any number, since attention reads the cache token
        by token. vLLM asks for adaptive verification, under which decodes differ in length."""
        return int(vllm_config.scheduler_config.max_num_batched_tokens)

    @property
    def fp8_use_mixed_batch(self) -> bool:
        """Whether all tokens of every FP8 step go through one call that reads the cache directly."""
        return self.planner.mode == "mixed"

    @outside_modes
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMetadata:
        """The metadata of one step, valid until the next call.

        It takes one asynchronous copy to the device, or one kernel if only the device knows the query lengths.
        Everything else is in the engine's own tensors already.

        Args:
            common_prefix_len: no effect; part of vLLM's signature.
            common_attn_metadata: vLLM's record of the step. Where vLLM captures graphs, its tensors never move.
            fast_build: no effect; part of vLLM's signature.
        """
        common, limits, held = common_attn_metadata, self.limits, self._held
        requests, actual = int(common.num_reqs), int(common.num_actual_tokens)
        starts = first(host_values(common, ("query_start_loc_cpu",), "query_start_loc"), requests + 1).numpy()
        host_lengths = first(host_values(common, length_names(common), "seq_lens"), requests)
        queries, _, longest = check_starts(starts, limits)
        tokens, slots = int(starts[-1]), common.slot_mapping
        rows = padded_rows(tokens, actual, slots, limits)
        prefilling = self._prefilling(common, requests)
        table = block_table(common.block_table_tensor, requests)
        device_starts = first(common.query_start_loc, requests + 1)
        if self.device_lengths:
            held.fill_from_device(device_starts, tokens)
        else:
            held.fill(queries, starts, longest)
        step = EngineStep(common, self.planner, queries, host_lengths, prefilling, tokens, rows, held.ids, held)
        # The plan is made here and not inside a layer, because captured graphs read the planner's buffers.
        plan = step.plan() if self._gathers(step, longest) else None
        gathered = None
        if self._gathering is not None:
            gathered = self._gathering.plan(common, starts, host_lengths, step.split().decodes, table)
        metadata = self.metadata_cls(
            num_reqs=requests,
            max_query_len=int(common.max_query_len),
            max_seq_len=int(common.max_seq_len),
            num_actual_tokens=actual,
            query_start_loc=device_starts,
            slot_mapping=first(slots, actual),
            block_table=table,
            req_id_per_token=held.leading(actual),
            seq_lens=first(common.seq_lens, requests),
            block_size=limits.page_size,
            topk_tokens=self.topk_tokens,
            fp8_extra_metadata=self._fp8_mixed if plan is None else separate_metadata(plan, self._fp8, actual),
            fp8_use_mixed_batch=plan is None,
            cp_kv_cache_interleave_size=self.ranks.interleave,
            gathered=gathered,
            step=step,
        )
        if plan is not None:
            vars(metadata)["plan"] = plan  # the value of the cached property
        return metadata

    def _gathers(self, step: EngineStep, longest: int) -> bool:
        """Whether prefills of a step are gathered. In a planner's mode "auto" that depends on their sizes."""
        if self.planner.mode != "auto":
            return self.planner.mode == "separate"
        if longest <= 1 and step.prefilling is None:  # the usual case, which needs no look at the requests
            return False
        decodes = step.split().decodes
        new, lengths = step.query_lengths[decodes:].tolist(), step.host_lengths[decodes:].tolist()
        return bool(new) and bool(self.planner.chunks(new, lengths))

    def _prefilling(self, common: Any, requests: int) -> list[bool] | None:
        marks = getattr(common, "is_prefilling", None)
        if self.treat_short_extends_as_decodes or marks is None:
            return None
        if marks.device.type != "cpu":
            raise checks.refuse("is_prefilling", "on the host", f"a tensor on {marks.device}", "pass the host copy")
        return [bool(mark) for mark in marks[:requests].tolist()]
