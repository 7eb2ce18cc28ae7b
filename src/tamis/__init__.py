"""tamis: sparse latent attention for DeepSeek-V3.2, GLM-5 and DeepSeek-V4 style models.

The names below are loaded when first used, so that importing the package stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tamis._version import __version__

if TYPE_CHECKING:
    from tamis import ops
    from tamis.backends import choose
    from tamis.batch import Batch, PageMap
    from tamis.cache import Caches, PagedCache, Selection
    from tamis.layout import Layout
    from tamis.pages import PagePool
    from tamis.pipeline import Shard, SparseMLA
    from tamis.plan import Limits, Plan
    from tamis.planner import Planner
    from tamis.recipe import IndexRecipe
    from tamis.recording import Recording
    from tamis.spec import LayerSpec
    from tamis.v4 import SparseV4, V4Caches
    from tamis.v4_plan import V4Plan
    from tamis.v4_planner import V4Planner
    from tamis.v4_weights import V4Weights

_HOME = {
    "Batch": "tamis.batch",
    "Caches": "tamis.cache",
    "IndexRecipe": "tamis.recipe",
    "LayerSpec": "tamis.spec",
    "Layout": "tamis.layout",
    "Limits": "tamis.plan",
    "PageMap": "tamis.batch",
    "PagePool": "tamis.pages",
    "PagedCache": "tamis.cache",
    "Plan": "tamis.plan",
    "Planner": "tamis.planner",
    "Recording": "tamis.recording",
    "Selection": "tamis.cache",
    "Shard": "tamis.pipeline",
    "SparseMLA": "tamis.pipeline",
    "SparseV4": "tamis.v4",
    "V4Caches": "tamis.v4",
    "V4Plan": "tamis.v4_plan",
    "V4Planner": "tamis.v4_planner",
    "V4Weights": "tamis.v4_weights",
    "choose": "tamis.backends",
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
