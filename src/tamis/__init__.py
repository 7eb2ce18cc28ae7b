"""tamis: sparse latent attention for DeepSeek-V3.2, GLM-5 and DeepSeek-V4 style models.

The names below are loaded when first used, so that importing the package stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tamis._version import __version__

if TYPE_CHECKING:
    from tamis import ops
    from tamis.cache.layout import Layout
    from tamis.cache.paged import PagedCache
    from tamis.cache.pool import PagePool
    from tamis.cache.selection import Caches, Selection
    from tamis.cache.shard import Shard
    from tamis.cache.v4_caches import V4Caches
    from tamis.choice import choose
    from tamis.layers.mla import SparseMLA
    from tamis.layers.recording import Recording
    from tamis.layers.v4 import SparseV4
    from tamis.layers.v4_weights import V4Weights
    from tamis.model.recipe import IndexRecipe
    from tamis.model.spec import LayerSpec
    from tamis.step.batch import Batch, PageMap
    from tamis.step.plan import Limits, Plan
    from tamis.step.planner import Planner
    from tamis.step.v4_plan import V4Plan
    from tamis.step.v4_planner import V4Planner

_HOME = {
    "Batch": "tamis.step.batch",
    "Caches": "tamis.cache.selection",
    "IndexRecipe": "tamis.model.recipe",
    "LayerSpec": "tamis.model.spec",
    "Layout": "tamis.cache.layout",
    "Limits": "tamis.step.plan",
    "PageMap": "tamis.step.batch",
    "PagePool": "tamis.cache.pool",
    "PagedCache": "tamis.cache.paged",
    "Plan": "tamis.step.plan",
    "Planner": "tamis.step.planner",
    "Recording": "tamis.layers.recording",
    "Selection": "tamis.cache.selection",
    "Shard": "tamis.cache.shard",
    "SparseMLA": "tamis.layers.mla",
    "SparseV4": "tamis.layers.v4",
    "V4Caches": "tamis.cache.v4_caches",
    "V4Plan": "tamis.step.v4_plan",
    "V4Planner": "tamis.step.v4_planner",
    "V4Weights": "tamis.layers.v4_weights",
    "choose": "tamis.choice",
}

__all__ = [
    "Batch",
    "Caches",
    "IndexRecipe",
    "LayerSpec",
    "Layout",
    "Limits",
    "PageMap",
    "PagePool",
    "PagedCache",
    "Plan",
    "Planner",
    "Recording",
    "Selection",
    "Shard",
    "SparseMLA",
    "SparseV4",
    "V4Caches",
    "V4Plan",
    "V4Planner",
    "V4Weights",
    "__version__",
    "choose",
    "ops",
]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return import_module("tamis.ops")
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'tamis' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
