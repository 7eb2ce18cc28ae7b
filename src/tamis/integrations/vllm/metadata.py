"""vLLM's per-step metadata of sparse MLA layers, made by a tamis `Planner`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from tamis import checks
from tamis.batch import Batch, PageMap
from tamis.layout import for_engine
from tamis.plan import Limits, Mode, Plan
from tamis.planner import Planner
from tamis.spec import LayerSpec


def model_field(model_config: Any, name: str) -> Any:
    """A number of the model: from its text config, or else from the outer one; None if neither has it."""
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
        """From vLLM's model config."""
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
    """One step under vLLM's names. Tensors are views of the builder's buffers, which never move.

    What vLLM's FP8 records hold (decode and prefill part, chunks, workspace starts) is in `plan.decode` and
    `plan.prefill`.
    """

    plan: Plan
    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    """As the engine gave it: under a captured graph it counts padding too."""
    query_start_loc: Tensor
    """int32 [num_reqs + 1]"""
    slot_mapping: Tensor
    """int64 [num_actual_tokens]; -1 for padding."""
    block_table: Tensor
    """int32 [num_reqs, pages]"""
    req_id_per_token: Tensor
    """int32 [num_actual_tokens]; 0 for padding."""
    seq_lens: Tensor
    """int32 [num_reqs], context plus new tokens."""
    block_size: int = 64
    topk_tokens: int = 2048
    prefill_max_seq_len: int = 0

    prefill: ClassVar[None] = None
    """vLLM keeps its dense prefill here; every token goes through sparse attention instead."""

    @property
    def num_decodes(self) -> int:
        """Requests at the front that count as decode, padding requests included."""
        return self.plan.split.decodes

    @property
    def num_prefills(self) -> int:
        """The requests after them."""
        return self.plan.split.prefills

    @property
    def num_decode_tokens(self) -> int:
        """Their tokens. As in vLLM, padding counts as decode in a step without prefills, so the parts sum to
        `num_actual_tokens`."""
        return self.plan.split.decode_tokens if self.num_prefills else self.num_actual_tokens

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens of the prefills."""
        return self.num_actual_tokens - self.num_decode_tokens

    def plan_for(self, rows: int) -> Plan:
        """The plan for a query of so many rows: all new tokens, and as much padding as the caller kept."""
        plan = self.plan
        if rows == plan.rows:
            return plan
        if not plan.tokens <= rows <= plan.rows:
            raise checks.refuse(
                "q", f"of {plan.tokens} (new tokens) to {plan.rows} rows (with padding)", rows, "pass the step's rows"
            )
        prefill = plan.prefill
        return replace(
            plan,
            rows=rows,
            request_ids=plan.request_ids[:rows],
            positions=plan.positions[:rows],
            slots=plan.slots[:rows],
            prefill=None if prefill is None else replace(prefill, ids=prefill.ids[:rows]),
        )


class SparseMetadataBuilder:
    """Makes a `SparseMetadata` per step from vLLM's `CommonAttentionMetadata`, or anything with its attributes."""

    _cudagraph_support: ClassVar[Any] = "UNIFORM_BATCH"
    reorder_batch_threshold: int | None = 1
    supports_update_block_table: ClassVar[bool] = False
    treat_short_extends_as_decodes: ClassVar[bool] = True
    """False: requests that `is_prefilling` marks are prefills even where their piece of the prompt is short."""
    metadata_cls: ClassVar[type[SparseMetadata]] = SparseMetadata

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
            kv_cache_spec: with `block_size`.
            layer_names: the layers this builder serves.
            vllm_config: with `model_config`, `cache_config`, `parallel_config`, `scheduler_config` and, for
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
        ranks = int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) or 1)
        cache_dtype = vllm_config.cache_config.cache_dtype
        self.use_fp8_kv_cache = cache_dtype == "fp8_ds_mla"
        if ranks > 1 and mode == "separate":
            raise checks.refuse(
                "mode", "'mixed' under decode context parallelism", repr(mode), "a rank has no whole request to gather"
            )
        if mode == "auto" and (ranks > 1 or not self.use_fp8_kv_cache):
            mode = "mixed"
        dims = self.mla_dims
        self.spec = LayerSpec(
            # Under context parallelism each rank sees the heads of all.
            heads=self.model_config.get_num_attention_heads(vllm_config.parallel_config) * ranks,
            latent_dim=dims.kv_lora_rank,
            rope_dim=dims.qk_rope_head_dim,
            value_dim=dims.kv_lora_rank,
            topk=topk,
        )
        self.limits = self._limits(ranks, workspace_rows)
        layout = for_engine(
            cache_dtype, latent=dims.kv_lora_rank, rope=dims.qk_rope_head_dim, dtype=self.model_config.dtype
        )
        self.planner = Planner(self.spec, self.limits, self.device, layout=layout, mode=mode)
        self.reorder_batch_threshold = self.limits.threshold

    def _limits(self, ranks: int, workspace_rows: int | None) -> Limits:
        config = self.vllm_config
        drafts = getattr(config, "speculative_config", None)
        return Limits(
            max_tokens=config.scheduler_config.max_num_batched_tokens,
            max_requests=config.scheduler_config.max_num_seqs,
            max_length=self.model_config.max_model_len,
            page_size=self.kv_cache_spec.block_size,
            speculative_tokens=getattr(drafts, "num_speculative_tokens", None) or 0,
            parallel_drafting=bool(getattr(drafts, "parallel_drafting", False)),
            context_parallel=ranks > 1,
            workspace_rows=workspace_rows,
        )

    @property
    def fp8_use_mixed_batch(self) -> bool:
        """Whether all tokens of an FP8 step go through one call that reads the cache directly."""
        return self.planner.mode == "mixed"

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMetadata:
        """Metadata of one step, valid until the next call.

        Copies from the engine's tensors and leaves them as they are; waits for nothing on the device.

        Args:
            common_prefix_len: part of vLLM's signature, without effect.
            common_attn_metadata: what vLLM knows about the step.
            fast_build: part of vLLM's signature, without effect.
        """
        common = common_attn_metadata
        requests, actual = int(common.num_reqs), int(common.num_actual_tokens)
        batch = engine_batch(common, self.limits, prefilling=self._prefilling(common, requests))
        assert batch.host_lengths is not None
        plan = self.planner.plan(batch)
        prefill_lengths = batch.host_lengths[plan.split.decodes :]
        return self.metadata_cls(
            plan=plan,
            num_reqs=requests,
            max_query_len=int(common.max_query_len),
            max_seq_len=int(common.max_seq_len),
            num_actual_tokens=actual,
            query_start_loc=plan.query_starts,
            slot_mapping=plan.slots[:actual],
            block_table=plan.block_table,
            req_id_per_token=plan.request_ids[:actual],
            seq_lens=plan.lengths,
            block_size=plan.page_size,
            topk_tokens=self.topk_tokens,
            prefill_max_seq_len=int(prefill_lengths.max()) if plan.split.prefills else 0,
        )

    def _prefilling(self, common: Any, requests: int) -> list[bool] | None:
        marks = getattr(common, "is_prefilling", None)
        if self.treat_short_extends_as_decodes or marks is None:
            return None
        if marks.device.type != "cpu":
            raise checks.refuse("is_prefilling", "on the host", f"a tensor on {marks.device}", "pass the host copy")
        return [bool(mark) for mark in marks[:requests].tolist()]


def engine_batch(common: Any, limits: Limits, *, prefilling: list[bool] | None = None) -> Batch:
    """The step that vLLM describes, as a `Batch` over the engine's tensors; nothing is copied to or from a device."""
    requests, actual = int(common.num_reqs), int(common.num_actual_tokens)
    starts = _host_values(common, ("query_start_loc_cpu",), "query_start_loc")[: requests + 1].to(torch.int32)
    # While drafting, vLLM lets its upper bounds run past the longest request.
    lengths = _host_values(common, _length_names(common), "seq_lens")[:requests].to(torch.int32)
    lengths = lengths.clamp_max(limits.max_length)
    tokens = int(starts[-1]) if len(starts) else 0
    if tokens > actual:
        raise checks.refuse("num_actual_tokens", f"at least the {tokens} new tokens", actual, "count every token")
    width = -(-limits.max_length // limits.page_size)
    # Slots past the new tokens are padding or what an earlier step left behind: the planner writes -1 there.
    slots = common.slot_mapping
    return Batch(
        starts,
        common.seq_lens[:requests].to(torch.int32),
        PageMap(common.block_table_tensor[:requests, :width].to(torch.int32), slots[:tokens]),
        host_lengths=lengths,
        padded_tokens=max(actual, min(len(slots), limits.max_tokens)),
        prefilling=prefilling,
    )


def _length_names(common: Any) -> tuple[str, ...]:
    """Where the record may hold lengths on the host, best first.

    vLLM's own record has `seq_lens_cpu` as a property that copies from the device unless `_seq_lens_cpu` is filled, so
    only the latter is looked at where both exist.
    """
    second = "_seq_lens_cpu" if hasattr(common, "_seq_lens_cpu") else "seq_lens_cpu"
    return ("seq_lens_cpu_upper_bound", second)


def _host_values(common: Any, names: tuple[str, ...], device_name: str) -> Tensor:
    """The first of these tensors that is on the host; the device tensor itself may be, when the engine runs there."""
    value = None
    for name in (*names, device_name):
        value = getattr(common, name, None)
        if isinstance(value, Tensor) and value.device.type == "cpu":
            return value
    raise checks.refuse(
        device_name,
        f"accompanied by {' or '.join(n.lstrip('_') for n in names)} on the host",
        checks.describe(value),
        "pass a host copy (for lengths an upper bound will do); none is made here, as it would wait for the device",
    )
