"""Small DeepSeek-V4 layers: their specs, weights under both namings, caches, planners and batches."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tamis import Batch, LayerSpec, Limits, PagePool, SparseV4, V4Caches, V4Planner, V4Weights
from tamis.cache.layout import Layout, rows
from tamis.model.rope import Rope

HIDDEN, RANK, HEADS, GROUPS, LOW = 12, 10, 4, 2, 3
WINDOW = LayerSpec(HEADS, 24, 8, 32, 32**-0.5, window=6, sink=True, kind="window")
PLAIN = replace(WINDOW, kind="plain", compress=16)
OVERLAPPING = replace(WINDOW, kind="overlapping", compress=4, topk=5, index_heads=2, index_dim=16)


def named_tensors(kind: str) -> dict[str, tuple[str, torch.Tensor]]:
    """For each of the checkpoint's names, that of transformers and a tensor."""
    made = {
        "wq_a.weight": ("q_a_proj.weight", torch.randn(RANK, HIDDEN)),
        "q_norm.weight": ("q_a_norm.weight", torch.randn(RANK)),
        "wq_b.weight": ("q_b_proj.weight", torch.randn(HEADS * 32, RANK)),
        "wkv.weight": ("kv_proj.weight", torch.randn(32, HIDDEN)),
        "kv_norm.weight": ("kv_norm.weight", torch.randn(32)),
        "attn_sink": ("sinks", torch.randn(HEADS).bfloat16()),
        "wo_a.weight": ("o_a_proj.weight", torch.randn(GROUPS * LOW, HEADS * 32 // GROUPS)),
        "wo_b.weight": ("o_b_proj.weight", torch.randn(HIDDEN, GROUPS * LOW)),
    }
    ratio, series = {"plain": (16, 1), "overlapping": (4, 2), "window": (1, 1)}[kind]

    def compressor(theirs: str, ours: str, width: int) -> None:
        made[f"{theirs}wkv.weight"] = (f"{ours}kv_proj.weight", torch.randn(series * width, HIDDEN))
        made[f"{theirs}wgate.weight"] = (f"{ours}gate_proj.weight", torch.randn(series * width, HIDDEN))
        made[f"{theirs}ape"] = (f"{ours}position_bias", torch.randn(ratio, series * width))
        made[f"{theirs}norm.weight"] = (f"{ours}kv_norm.weight", torch.randn(width))

    if kind != "window":
        compressor("compressor.", "compressor.", 32)
    if kind == "overlapping":
        compressor("indexer.compressor.", "compressor.indexer.", 16)
        made["indexer.wq_b.weight"] = ("compressor.indexer.q_b_proj.weight", torch.randn(2 * 16, RANK))
        scorer = "compressor.indexer.scorer.weights_proj.weight"
        made["indexer.weights_proj.weight"] = (scorer, torch.randn(2, HIDDEN))
    return made


def weights(kind: str) -> V4Weights:
    return V4Weights.from_state_dict(dict(named_tensors(kind).values()), groups=GROUPS)


def layer_of(spec: LayerSpec) -> SparseV4:
    return SparseV4(spec, weights(spec.kind), Rope(8).cos_sin_table(80))


def caches_of(spec: LayerSpec, layout: Layout, **changes: Any) -> V4Caches:
    """Caches with index keys that are exact."""
    sizes = {"pages": 20, "window_pages": 40, "state_pages": 40}
    page_sizes = {"page_size": 16, "window_page_size": 8, "state_page_size": 4}
    given = {"layout": layout, "index_layout": rows(torch.float32, latent=16, rope=0)} | sizes | page_sizes
    return V4Caches.allocate(spec, **given | changes)


def planner_of(spec: LayerSpec, layout: str | Layout, mode: Any = "mixed") -> tuple[V4Planner, Callable[..., Batch]]:
    """A planner for the pages of `caches_of`, and what makes the batches of two requests, step after step."""
    sizes = {"window": 8, f"state{spec.compress}": 4}
    pool, others = PagePool(20, 16), {name: PagePool(40, size) for name, size in sizes.items()}
    planner = V4Planner([spec], Limits(80, 2, 80, 16, sizes), layout=layout, mode=mode)
    return planner, partial(Batch.build, pool=pool, other_pools=others)
