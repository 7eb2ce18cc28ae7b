"""What a rank runs for tests of the indexer: vLLM's own V3.2 layer with its indexer, and vLLM's own builder of V4.

Only ranks, and the process that they are forked from, import this module; see `ranks`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import engine_standin as engine
import index_standin as index
import torch
from engine_standin import TOPK
from rank_cases import Case
from rank_programs import CPU, LAYER, PAGE, Rank, configure, connect
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.models.deepseek_v4.attention import DeepseekV4IndexerCache
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.mla import indexer as their_builders

from tamis.ops.index import over_ranks, sharing

INDEXER = LAYER.removesuffix(".attn") + ".indexer.k_cache"


def configure_indexer(case: Case, **options: Any) -> VllmConfig:
    """vLLM's configuration, with these options of tamis."""
    sparse_attn_indexer.has_deep_gemm = lambda: True  # else vLLM does not build its operator
    config = configure(case)
    config.additional_config = {"tamis": options}
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    config.kernel_config.enable_jit_warmup = False
    return config


class IndexRank(Rank):
    """A rank whose layer selects its positions itself."""

    def __init__(self, case: Case, config: VllmConfig) -> None:
        super().__init__(case, config)
        self.index = index.make_index_step(case.lengths, case.queries)
        # What float64 attention is to attend to.
        self.step = replace(self.step, positions=self.index.selected(TOPK))
        pages = 1 + int(self.tables.block_tables[0].gpu.max())
        storage = torch.full((pages, PAGE, index.ROW), 0xFF, dtype=torch.uint8)
        for request, keys in enumerate(self.index.keys):  # of which this rank keeps its own
            index.write_keys(keys, storage, self.slots_of(request, len(keys)))
        self.layer.indexer.k_cache.kv_cache = storage
        with set_current_vllm_config(config):
            cache = self.layer.indexer.k_cache
            builder = cache.get_attn_backend().get_builder_cls()
            self.index_builder = builder(cache.get_kv_cache_spec(config), [INDEXER], config, CPU)

    def index_inputs(self, tokens: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        self.layer.topk_indices_buffer.fill_(7)
        return self.index.q[tokens], None, self.index.weights[tokens]

    def steps(self) -> dict[str, Any]:
        return {LAYER: self.metadata, INDEXER: self.index_builder.build(0, self.common)}


def select_and_attend(
    rank: int, count: int, address: str, cases: Sequence[Case], options: dict[str, Any]
) -> list[dict[str, Any]]:
    """For each case, the positions that the layer selected and its output, and what both should be."""
    connect(rank, count, address, cases[0])
    found: list[dict[str, Any]] = []
    parts: list[Any] = []
    # Where it pays to share is tested elsewhere; here it does for every step of several tokens.
    over_ranks.sharing_pays = lambda tokens, *_, **__: tokens > 1
    select_part = sharing.select_part
    sharing.select_part = lambda *arguments: parts.append(arguments) or select_part(*arguments)
    for case in cases:
        parts.clear()
        here = IndexRank(case, configure_indexer(case, **options))
        output = here.run()
        found.append(
            {
                "operator": type(here.layer.indexer.indexer_op).__name__,
                "shared": bool(parts),
                "output": output,
                "expected": here.expected(),
                "positions": here.layer.topk_indices_buffer[: here.index.tokens].clone(),
                "selected": here.step.positions,
            }
        )
    return found


def select_compressed(
    rank: int, count: int, address: str, lengths: Sequence[int], queries: Sequence[int]
) -> dict[str, Any]:
    """The positions of DeepSeek-V4's operator, one key for every four tokens, with vLLM's own slots."""
    case, ratio = Case(tuple(lengths), tuple(queries)), 4
    connect(rank, count, address, case)
    config = configure_indexer(case, indexer="tamis")
    config.cache_config.block_size = ratio * PAGE
    their_builders.num_compute_units = lambda *_: 132
    their_builders.has_deep_gemm = lambda: False
    step = index.make_index_step([max(1, n // ratio) for n in lengths], queries)
    step = replace(step, lengths=tuple(lengths))
    buffer = torch.full((step.tokens, TOPK), 7, dtype=torch.int32)
    with set_current_vllm_config(config):
        cache = DeepseekV4IndexerCache(index.ROW, torch.uint8, INDEXER, config.cache_config, ratio)
        sizes = (index.DIM, "ue8m0", TOPK, index.DIM, 512, 1024)
        operator = sparse_attn_indexer.SparseAttnIndexer(cache, *sizes, buffer, skip_k_cache_insert=True)
        backend = cache.get_attn_backend()
        kind, width = backend.get_builder_cls(), step.table.shape[1]
        builder = kind(cache.get_kv_cache_spec(config), [INDEXER], config, CPU, block_table_width=width)
        common = engine.common(lengths, queries, step.table, torch.arange(step.tokens))
        record = CommonAttentionMetadata(**vars(common), seq_lens_cpu_upper_bound=common.seq_lens)
        metadata = builder.build(0, record)
        cache.kv_cache = replace(step, lengths=tuple(len(keys) for keys in step.keys)).storage(new=True)
        with set_forward_context({INDEXER: metadata}, config):
            operator(torch.zeros(step.tokens, 8), step.q, None, step.weights)
    return {
        "operator": type(operator).__name__,
        "positions": buffer,
        "selected": step.selected(TOPK, ratio),
        "slots": metadata.slot_mapping.clone(),
        "table": step.table,
    }
