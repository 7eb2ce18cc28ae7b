"""What a rank runs: vLLM's own V3.2 layer around our attention, with vLLM's own division of batches, tables and rows.

Only ranks, and the process that they are forked from, import this module; see `ranks`.
"""

import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import engine_standin as engine
import numpy as np
import torch
import vllm.model_executor.layers.quantization.online.fp8
import vllm.platforms
from configured import make_config
from engine_standin import LATENT, NOPE, ROPE, TOPK, VALUE, Step
from index_standin import DIM as INDEX_DIM
from index_standin import HEADS as INDEX_HEADS
from rank_cases import Case
from torch import Tensor
from vllm.config import CUDAGraphMode, DeviceConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel, parallel_state
from vllm.forward_context import set_forward_context
from vllm.models.deepseek_v32.attention import DeepseekV32Attention
from vllm.platforms.interface import DeviceCapability
from vllm.plugins import load_general_plugins
from vllm.utils import torch_utils
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.ops import dcp
from vllm.v1.worker.cp_utils import check_attention_cp_compatibility
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.cp_utils import prepare_dcp_local_seq_lens
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.pcp_manager import maybe_build_pcp_manager

torch.set_num_threads(1)
PAGE, LAYER = 64, "model.layers.0.self_attn.attn"
CPU = torch.device("cpu")


def pretend_hopper(devices: int = 8) -> None:
    """Make vLLM's platform a CUDA one that claims to have H200s and keeps its tensors on the CPU."""
    # Its module wants vLLM's kernels, which need a driver.
    sys.modules.setdefault("vllm._C_stable_libtorch", ModuleType("vllm._C_stable_libtorch"))
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    class Hopper(NonNvmlCudaPlatform):
        device_type = "cpu"
        dist_backend = "gloo"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def device_count(cls) -> int:
            return devices

        @classmethod
        def set_device(cls, device: torch.device) -> None:
            pass

        @classmethod
        def get_device_communicator_cls(cls) -> str:
            return "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"

    before, found = vllm.platforms.current_platform, Hopper()
    vllm.platforms._current_platform = found
    for module in list(sys.modules.values()):
        if vars(module).get("current_platform") is before:
            vars(module)["current_platform"] = found
    buffer_utils.is_uva_available = torch_utils.is_pin_memory_available = lambda: False


def connect(rank: int, count: int, address: str, case: Case) -> None:
    """Load the plugin and make vLLM's groups, then look like a machine with a GPU."""
    load_general_plugins()
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        init_distributed_environment(count, rank, address, rank, "gloo")
        initialize_model_parallel(case.tensor, 1, case.prefill, case.decode)
    pretend_hopper()
    # Triton's interpreter has no list of a kernel's constants; vLLM counts them.
    kernel: Any = dcp._CORRECT_ATTN_CP_OUT_KERNEL.kernel
    kernel.constexprs = [name for name in kernel.arg_names if name.isupper()]


def configure(case: Case) -> VllmConfig:
    """vLLM's configuration of a case."""
    drafts = None
    if case.drafts:
        drafts = SimpleNamespace(
            num_speculative_tokens=case.drafts,
            parallel_drafting=False,
            enable_adaptive_verification=False,
            method="mtp",
            use_dspark=lambda: False,
            use_multi_module_mtp=lambda: False,
        )
    config = make_config(case.heads, case.cache_dtype, dtype=torch.float32, speculative=drafts)
    config.cache_config.block_size = PAGE
    model: Any = config.model_config
    model.use_mla, model.is_encoder_decoder, model.hf_text_config.index_topk = True, False, TOPK
    config.compilation_config.cudagraph_mode = CUDAGraphMode.NONE
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.decode_context_parallel_size = case.tensor, case.decode
    parallel.prefill_context_parallel_size = case.prefill
    parallel.cp_kv_cache_interleave_size = 1 if case.late_interleave else case.interleave
    for name, value in case.options.items():
        setattr(parallel, name, value)
    parallel.set_dcp_defaults()
    return config


def make_layer(config: VllmConfig, case: Case, buffer: Tensor) -> tuple[Any, Tensor]:
    """vLLM's V3.2 layer, and the weights [H, nope + value, latent] of all heads."""
    widths = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    model = SimpleNamespace(
        hidden_size=64,
        q_lora_rank=64,
        num_attention_heads=case.heads,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        num_hidden_layers=1,
        index_topk=TOPK,
        index_topk_pattern=None if case.index else "S",
        index_n_heads=INDEX_HEADS,
        index_head_dim=INDEX_DIM,
        **widths,
    )
    with set_current_vllm_config(config), torch.random.fork_rng():
        torch.manual_seed(0)
        layer = DeepseekV32Attention(config, model, LAYER.removesuffix(".attn"), topk_indices_buffer=buffer)
        up = torch.randn(case.heads, NOPE + VALUE, LATENT) * LATENT**-0.5
        mine = up.chunk(case.tensor)[parallel_state.get_tp_group().rank_in_group]
        layer.kv_b_proj.weight.data.copy_(mine.flatten(0, 1))
        layer.process_weights_after_loading(torch.float32)
    return layer, up.double()


def make_tables(case: Case) -> BlockTables:
    """vLLM's own tables, in which every request has shuffled pages: each rank's pages have the same numbers."""
    rows = PAGE * case.decode
    needed = [-(-length // rows) for length in case.lengths]
    rank = parallel_state.get_dcp_group().rank_in_group if case.decode > 1 else 0
    tables = BlockTables([PAGE], 8, 2048, [2048 // PAGE], CPU, case.decode, rank, case.interleave)
    ids = 1 + torch.randperm(sum(needed), generator=torch.Generator().manual_seed(1))
    for number, mine in enumerate(ids.split(needed)):
        tables.block_tables[0].gpu[number, : len(mine)] = mine
        tables.num_blocks.np[0, number] = len(mine)
    tables.num_blocks.copy_to_uva()
    return tables


def make_batch(lengths: Any, queries: Any, prompts: int) -> InputBatch:
    """vLLM's description of a step, before ranks divide it."""
    count, total = len(lengths), int(sum(queries))
    starts = np.concatenate(([0], np.cumsum(queries))).astype(np.int32)
    lengths, queries = np.array(lengths, np.int32), np.array(queries, np.int32)
    computed = lengths - queries
    prefilling = np.arange(count) >= count - prompts
    numbers = torch.arange(count, dtype=torch.int32)
    return InputBatch(
        req_ids=[str(n) for n in range(count)],
        num_reqs=count,
        num_reqs_after_padding=count,
        idx_mapping=numbers,
        idx_mapping_np=numbers.numpy(),
        expanded_idx_mapping=numbers,
        expanded_local_pos=torch.zeros(count, dtype=torch.int32),
        num_scheduled_tokens=queries,
        num_tokens=total,
        num_tokens_after_padding=total,
        num_draft_tokens=0,
        num_draft_tokens_per_req=None,
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_np=starts,
        seq_lens=torch.from_numpy(lengths),
        seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
        dcp_local_seq_lens=None,
        num_computed_tokens_np=computed,
        prefill_len_np=np.where(prefilling, lengths + 1, computed),
        num_computed_prefill_tokens_np=computed,
        is_prefilling_np=prefilling,
        has_prefill=bool(prefilling.any()),
        decode_graph_eligible=not prefilling.any(),
        input_ids=torch.zeros(total, dtype=torch.int32),
        positions=torch.cat([torch.arange(n - q, n) for n, q in zip(lengths.tolist(), queries.tolist(), strict=True)]),
        is_padding=torch.zeros(total, dtype=torch.bool),
        logits_indices=numbers,
        cu_num_logits=numbers,
        cu_num_logits_np=numbers.numpy(),
        has_structured_output_reqs=False,
        prompt_lens=None,
        dcp_local_seq_lens_cpu_upper_bound=None,
    )


def common_of(batch: InputBatch, table: Tensor, slots: Tensor) -> CommonAttentionMetadata:
    """vLLM's record of a batch without padding, as its model runner makes it."""
    count = batch.num_reqs
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc[: count + 1],
        query_start_loc_cpu=torch.from_numpy(batch.query_start_loc_np[: count + 1]),
        seq_lens=batch.seq_lens[:count],
        seq_lens_cpu_upper_bound=batch.seq_lens_cpu_upper_bound[:count],
        max_seq_len=int(batch.seq_lens_cpu_upper_bound[:count].max()),
        num_reqs=count,
        num_actual_tokens=batch.num_tokens,
        max_query_len=int(batch.num_scheduled_tokens.max()),
        block_table_tensor=table,
        slot_mapping=slots,
        dcp_local_seq_lens=batch.dcp_local_seq_lens,
        dcp_local_seq_lens_cpu_upper_bound=batch.dcp_local_seq_lens_cpu_upper_bound,
        positions=batch.positions,
        is_prefilling=torch.from_numpy(batch.is_prefilling_np),
        req_idx=batch.idx_mapping_np,
    )


class Rank:
    """A rank with one layer, whose cache holds the context of a step."""

    def __init__(self, case: Case, config: VllmConfig) -> None:
        self.case, self.step, self.config = case, case.step(), config
        self.layer, self.up = make_layer(self.config, case, torch.full((600, TOPK), -1, dtype=torch.int32))
        check_attention_cp_compatibility(self.config)
        self.config.parallel_config.cp_kv_cache_interleave_size = case.interleave
        self.tables = make_tables(case)
        forward_mqa = self.layer.impl.forward_mqa
        self.returned: Any = None
        """What our attention returned to vLLM: output and lse of this rank."""

        def recorded(*arguments: Any) -> tuple[Tensor, Tensor | None]:
            out, lse = forward_mqa(*arguments)
            self.returned = (out.clone(), None if lse is None else lse.clone())  # vLLM merges in place
            return out, lse

        self.layer.impl.forward_mqa = recorded
        with set_current_vllm_config(self.config):
            spec = self.layer.get_kv_cache_spec(self.config)
            backend = self.layer.get_attn_backend()
            self.builder = backend.get_builder_cls()(spec, [LAYER], self.config, CPU)
            self.manager = maybe_build_pcp_manager(self.config, CPU, False, self.tables)
        width = 656 if case.cache_dtype == "fp8_ds_mla" else LATENT + ROPE
        pages = 1 + int(self.tables.block_tables[0].gpu.max())
        storage = torch.full((pages, 1, PAGE, width * spec.dtype.itemsize), 0xFF, dtype=torch.uint8).view(spec.dtype)
        self.layer.bind_kv_cache(storage)  # unwritten rows are NaN
        for request, rows in enumerate(self.step.rows):
            self._write(request, rows[: len(rows) - case.queries[request]])

    def _write(self, request: int, rows: Tensor) -> None:
        """Write the first rows of a request, of which this rank keeps its own."""
        slots = self.slots_of(request, len(rows))
        latent, rope = rows.float().split([LATENT, ROPE], 1)
        scale = self.layer._k_scale
        self.layer.impl.do_kv_cache_update(
            latent, rope.unsqueeze(1), self.layer.kv_cache, slots, self.case.cache_dtype, scale
        )

    def slots_of(self, request: int, count: int) -> Tensor:
        """Where this rank keeps the first positions of a request; negative for those of other ranks."""
        starts = torch.tensor([0, count], dtype=torch.int32)
        numbers, positions = torch.tensor([request], dtype=torch.int32), torch.arange(count)
        slots: Tensor = self.tables.compute_slot_mappings(numbers, starts, positions, count)[0]
        return slots

    def run(self) -> Tensor:
        """The layer's output for all tokens [T, H of this rank * value]."""
        batch = make_batch(self.case.lengths, self.case.queries, self.case.prompts)
        tokens = torch.arange(batch.num_tokens)
        if self.manager is not None:
            description = BatchExecutionDescriptor(CUDAGraphMode.NONE, batch.num_tokens, batch.num_reqs)
            batch = self.manager.partition_batch(batch, description)
            (table,), (slots,) = self.manager.prepare_attn(batch)
            tokens = self.manager._local_gather_idx
        else:
            (table,) = self.tables.gather_block_tables(batch.idx_mapping, batch.num_reqs)
            (slots,) = self.tables.compute_slot_mappings(
                batch.idx_mapping, batch.query_start_loc, batch.positions, batch.num_tokens
            )
            for request, rows in enumerate(self.step.rows):
                self._write(request, rows)  # the layer's fused kernel does that for new tokens
        if self.case.decode > 1:
            batch.dcp_local_seq_lens = prepare_dcp_local_seq_lens(
                torch.zeros(16, dtype=torch.int32),
                batch.seq_lens,
                batch.num_reqs,
                self.case.decode,
                parallel_state.get_dcp_group().rank_in_group,
                self.case.interleave,
            )
        self.common = common_of(batch, table, slots)
        self.metadata = self.builder.build(0, self.common)
        output = self._attend(tokens, slots)
        return output if self.manager is None else self.manager.restore_hidden_states(output)

    def _attend(self, tokens: Tensor, slots: Tensor) -> Tensor:
        """vLLM's own code from the projections on, for this rank's tokens (with padding) and heads."""
        step, layer, heads = self.step, self.layer, self.layer.num_local_heads
        index = self.index_inputs(tokens)
        first = parallel_state.get_tp_group().rank_in_group * heads
        q = step.q[tokens, first : first + heads].float()
        nope, up = q[..., :NOPE], self.up[first : first + heads, :NOPE].float()
        latent, rope = step.new_rows()[tokens].float().split([LATENT, ROPE], 1)
        output = torch.full((len(tokens), heads * VALUE), torch.nan)
        with (
            set_current_vllm_config(self.config),
            set_forward_context(self.steps(), self.config, slot_mapping={LAYER: slots}),
        ):
            if self.case.generic:
                if self.manager is not None:
                    cache, scale = layer.kv_cache, layer._k_scale
                    layer.update_kv_cache(
                        latent, rope.unsqueeze(1), cache, slots, self.metadata, self.case.cache_dtype, scale
                    )
                whole = torch.cat((nope, q[..., LATENT:]), -1)
                layer.forward_impl(whole, latent, rope.unsqueeze(1), layer.kv_cache, self.metadata, output)
            else:
                absorbed = torch.einsum("thp,hpl->thl", nope, up)
                rest = (*index, latent, rope, absorbed, q[..., LATENT:], output)
                layer._sparse_indexer_and_attn(torch.zeros(len(tokens)), latent, nope, q[..., LATENT:], *rest)
        return output

    def index_inputs(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Queries, keys and weights for the layer's indexer. There is none: the step's positions are in its buffer."""
        self.layer.topk_indices_buffer.fill_(-1)[: len(tokens)] = self.step.positions[tokens]
        return None, None, None

    def steps(self) -> dict[str, Any]:
        """The step's metadata by layer."""
        return {LAYER: self.metadata}

    def expected(self) -> Tensor:
        """The output of all tokens and heads in float64, from what every rank knows."""
        step, up = self.step, self.up
        absorbed = torch.einsum("thp,hpl->thl", step.q[..., :NOPE].double(), up[:, :NOPE])
        q = torch.cat((absorbed, step.q[..., LATENT:].double()), -1)
        whole = Step(step.lengths, step.queries, step.rows, q, step.positions)
        latent = engine.dense_fp64(whole, (NOPE + ROPE) ** -0.5)[0].nan_to_num(0)  # where nothing is selected
        return torch.einsum("thl,hvl->thv", latent, up[:, NOPE:]).flatten(1)


def attend(rank: int, count: int, address: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """For each case, the layer's output for all tokens, and what the rank saw of them. All have the same groups."""
    connect(rank, count, address, cases[0])
    found = []
    for case in cases:
        here = Rank(case, configure(case))
        output, record = here.run(), here.metadata
        out, lse = here.returned or (None, None)
        found.append(
            {
                "output": output,
                "expected": here.expected(),
                "out": out,
                "lse": lse,
                "decode_tokens": record.num_decode_tokens,
                "chunks": None if record.gathered is None else len(record.gathered.chunks),
                "tokens": record.num_actual_tokens,
            }
        )
    return found


def order(rank: int, count: int, address: str, case: Case) -> tuple[int, int]:
    """This rank's number among those that share rows: vLLM's, by which rows are kept, and torch's, by which they are
    gathered."""
    connect(rank, count, address, case)
    group = parallel_state.get_dcp_group()
    return group.rank_in_group, torch.distributed.get_rank(group.device_group)
