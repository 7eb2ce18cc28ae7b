"""The builders of DeepSeek-V4's per-step metadata under vLLM's names: for compressed caches and for the window's."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div, round_up
from tamis.integrations.vllm.classes.v4_records import V4Metadata, V4WindowMetadata
from tamis.integrations.vllm.context_parallel import Ranks
from tamis.integrations.vllm.engine_batch import first
from tamis.integrations.vllm.engine_tokens import EngineTokens, TokenStep
from tamis.integrations.vllm.metadata import model_field
from tamis.integrations.vllm.v4_formats import EVERY
from tamis.ops import memory
from tamis.ops.library import Operation
from tamis.ops.select import check_select_entries, check_select_window
from tamis.ops.select.operations import SelectEntries, SelectWindow, select_entries, select_window
from tamis.step.buffers import Views, outside_modes
from tamis.step.lease import Lease
from tamis.step.plan import Limits
from tamis.step.v4_plan import ALIGN_COLUMNS, ALIGN_DRAFTS

C = TypeVar("C", SelectWindow, SelectEntries)


class _Builder:
    """The common base of all builders: the numbers read from vLLM's configs, and the tokens of a step."""

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
        ranks = Ranks.read(vllm_config.parallel_config)
        for name, count in (("decode", ranks.decode), ("prefill", ranks.prefill)):
            if count != 1:
                remedy = "the builders' tables do not support requests that are divided among ranks"
                raise checks.refuse(f"{name}_context_parallel_size", "1 for DeepSeek-V4", count, remedy)
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
        self.tokens = EngineTokens(self.limits, self.device)
        self.lease = Lease()
        self._written: dict[str, Tensor] = {}
        self._parts = Views({})
        """The buffers that a step writes besides those of the tokens, and parts of them."""
        self._rows_before = 0
        self._known: memory.Memory[Callable[[Any], None]] = memory.Memory()

    def _each(self, dtype: torch.dtype = torch.int32, fill: int = 0) -> Tensor:
        return torch.full((self.limits.max_tokens,), fill, dtype=dtype, device=self.device)

    def _rows(self, columns: int) -> Tensor:
        return torch.full((self.limits.max_tokens, columns), -1, dtype=torch.int32, device=self.device)

    def _clear(self, rows: int, **fills: int) -> None:
        """Give the rows that the previous step wrote and this one does not their value for padding, by buffer."""
        before, self._rows_before = self._rows_before, rows
        if rows < before:
            for name, fill in fills.items():
                if name in self._written:
                    self._written[name][rows:before].fill_(fill)

    def _prepared(
        self, operation: Operation[C, None], check: Callable[[C], None], call: C, *numbers: object
    ) -> Callable[[], None]:
        """What runs a selection, checked. It writes the builder's own buffers, so only the engine's tensors can be
        wrong: they are checked in the first step and whenever they are not like those before. `numbers` are those of
        the call that change from step to step."""
        on_device, positions = memory.remembered_on(call[0]), call[0]
        seen = (on_device, positions.shape, memory.sign(call[2]), memory.sign(call[3]), *numbers)
        run = self._known.find(seen)
        if run is None:
            check(call)
            run = (operation.prepared(call) if on_device else None) or operation
            self._known.keep(seen, run)
        return partial(run, call)


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
        self._keep()

    def _keep(self, **written: Tensor | None) -> None:
        """Name the buffers that a selection writes: `visible`, `lengths` or `every` besides the slots of completed
        entries, and others of which records have views."""
        found = {"completed": self.compressed_slot_mapping_buffer, **written}
        self._written = {name: buffer for name, buffer in found.items() if buffer is not None}
        self._parts = Views(self._written)

    def _selection(self, step: TokenStep) -> Callable[[], None] | None:
        """What finds the slots of completed entries and what else is asked for; None if there is nothing to find. A
        token without a slot completes no entry, and absent pages take none."""
        rows, parts = step.rows, self._parts
        if not step.requests or not rows or not self._written:
            return None
        completed, visible, lengths, every = (
            parts(name, rows) if name in self._written else None
            for name in ("completed", "visible", "lengths", "every")
        )
        call = SelectEntries(
            self.tokens.part("positions", rows),
            self.tokens.part("request_ids", rows),
            step.block_table,
            first(step.slots, rows),
            self.compress_ratio,
            self.block_size // self.compress_ratio,
            None,
            # Decodes get slots, and prefills the numbers of their entries, as in vLLM.
            None if every is None else min(step.decode_rows, rows),
            completed,
            visible,
            lengths,
            every,
            "auto",
        )
        return self._prepared(select_entries, check_select_entries, call, call.local_from)

    def _slot_mapping(self, step: TokenStep) -> Tensor:
        """The slots of completed entries; with a ratio of 1 those of the tokens, which the engine has."""
        own = self.compressed_slot_mapping_buffer is None
        return first(step.slots, step.actual) if own else self._parts("completed", step.actual)


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
        self.c128a_buffer, self.c128a_lens_buffer = None, None
        if self.every_entry:
            longest = ceil_div(self.limits.max_length, self.compress_ratio)
            self.c128a_max_compressed = round_up(longest, ALIGN_COLUMNS)
            self.c128a_buffer, self.c128a_lens_buffer = self._rows(self.c128a_max_compressed), self._each()
            self._keep(every=self.c128a_buffer, lengths=self.c128a_lens_buffer)

    @outside_modes
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> V4Metadata:
        """The metadata of one step, valid until the next call. The engine's tensors are not changed.

        It takes one asynchronous copy to the device, the addition that makes positions, and one kernel.

        `common_prefix_len` and `fast_build` are part of vLLM's signature and have no effect.
        """
        common, step = common_attn_metadata, self.tokens.read(common_attn_metadata)
        selection = self._selection(step)
        with self.lease.renewed() as use:
            self.tokens.fill(step)
            self._clear(step.rows, completed=-1, every=-1, lengths=0)
            if selection is not None:
                selection()
        return V4Metadata(
            step.split,
            use,
            num_reqs=step.requests,
            max_query_len=int(common.max_query_len),
            max_seq_len=int(common.max_seq_len),
            num_actual_tokens=step.actual,
            query_start_loc=step.query_starts,
            slot_mapping=self._slot_mapping(step),
            block_table=step.block_table,
            req_id_per_token=self.tokens.part("request_ids", step.actual),
            block_size=self.block_size,
            topk_tokens=self.topk_tokens,
            **self._every(step),
        )

    def _every(self, step: TokenStep) -> dict[str, Tensor | None]:
        actual, decodes, parts = step.actual, step.decode_rows, self._parts
        if not self.every_entry or actual == 0 or step.requests == 0:
            return {}
        return {
            "c128a_global_decode_topk_indices": parts("every", decodes).unsqueeze(1) if decodes else None,
            "c128a_decode_topk_lens": parts("lengths", decodes) if decodes else None,
            "c128a_prefill_topk_indices": parts("every", actual, decodes) if decodes < actual else None,
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
        self._written = {"slots": self.swa_indices_buffer.unsqueeze(1), "lengths": self.swa_lens_buffer}
        self._written["valid"] = self.is_valid_token_buffer
        if self.draft_indices_buffer is not None:
            self._written["wide slots"] = self.draft_indices_buffer.unsqueeze(1)
        self._parts = Views(self._written)

    @outside_modes
    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> V4WindowMetadata:
        """The metadata of one step, valid until the next call. The engine's tensors are not changed.

        With the engine's `causal=False`, the new tokens of a request are a draft block: each of them attends to the
        window before the block and to the whole block.
        """
        common, step = common_attn_metadata, self.tokens.read(common_attn_metadata)
        actual, decodes, split = step.actual, step.decode_rows, step.split
        slots, context = self._columns(step, bool(getattr(common, "causal", True)))
        selection, parts = self._selection(step, slots, context), self._parts
        with self.lease.renewed() as use:
            self.tokens.fill(step)
            self._clear(step.rows, **{"slots": -1, "wide slots": -1, "lengths": 0, "valid": 0})
            if selection is not None:
                selection()
            valid, prefill_lengths = parts("valid", actual), step.lengths[split.decodes :]
            torch.gt(parts("lengths", actual), 0, out=valid)  # a token that is written sees itself
            gathered = self._gather_lengths(step, prefill_lengths)
        return V4WindowMetadata(
            split,
            use,
            block_table=step.block_table,
            slot_mapping=first(step.slots, actual),
            block_size=self.block_size,
            seq_lens=step.lengths,
            query_start_loc=step.query_starts,
            query_start_loc_cpu=torch.from_numpy(step.starts),
            token_to_req_indices=self.tokens.part("request_ids", actual),
            is_valid_token=valid,
            num_decodes=split.decodes,
            num_prefills=split.prefills,
            num_decode_tokens=decodes,
            num_prefill_tokens=actual - decodes,
            decode_swa_indices=parts(slots, decodes),
            decode_swa_lens=parts("lengths", decodes),
            prefill_swa_indices=parts(slots, actual, decodes),
            prefill_swa_lens=parts("lengths", actual, decodes),
            prefill_seq_lens=prefill_lengths,
            prefill_gather_lens=gathered,
        )

    def _columns(self, step: TokenStep, causal: bool) -> tuple[str, Tensor | None]:
        """The buffer whose rows are wide enough for a step; for a step of draft blocks also their contexts."""
        if causal:
            return "slots", None
        wide = self.draft_indices_buffer
        room = 0 if wide is None else wide.shape[1] - self.window_size
        if wide is None or step.max_query > room:
            expected = f"True for blocks of more than {room} tokens"
            raise checks.refuse("causal", expected, f"blocks of {step.max_query}", "set num_speculative_tokens")
        return "wide slots", step.lengths - (step.query_starts[1:] - step.query_starts[:-1])

    def _selection(self, step: TokenStep, slots: str, context: Tensor | None) -> Callable[[], None] | None:
        rows = step.rows
        if not step.requests or not rows:
            return None
        call = SelectWindow(
            self.tokens.part("positions", rows),
            self.tokens.part("request_ids", rows),
            step.block_table,
            first(step.slots, rows),
            context,
            None if context is None else step.lengths,
            self.block_size,
            self.window_size,
            self._parts(slots, rows)[:, 0],
            self._parts("lengths", rows),
            "auto",
        )
        return self._prepared(select_window, check_select_window, call, call.slots.shape, memory.sign(context))

    def _gather_lengths(self, step: TokenStep, lengths: Tensor) -> Tensor:
        found = self.gather_lens_buffer[: step.split.prefills]
        if step.split.prefills:
            new = (step.query_starts[1:] - step.query_starts[:-1])[step.split.decodes :]
            found.copy_(new + (lengths - new).clamp_max_(self.window_size - 1))
        return found
