"""tamis as an attention backend of vLLM, for models with DeepSeek sparse attention.

`register` is the plugin's entry point. vLLM then loads what it needs:

- V3.2 and GLM-5: `plugin`, whose classes derive from `backend`, `metadata` and `impl`;
- DeepSeek-V4 and V4.1: `v4_plugin` and `v4_caches`, then `v4_layer` or `v41_layer`, which call `v4_forward`;
- the lightning indexer of both, if it is asked for: `indexer_plugin`, which calls `indexer`.

Only `plugin`, `indexer_plugin`, `v4_plugin`, `v4_layer` and `v41_layer` import vLLM. The other modules have vLLM's
names, shapes and call order but take any objects with the same attributes, so that they can be tested without vLLM.
`classes` holds V4's backend, builders and impl for engines that construct attention by class, which vLLM does not do
for V4.
"""

from importlib import import_module
from importlib.util import find_spec
from logging import getLogger
from typing import Any

BACKEND = "tamis.integrations.vllm.plugin.Backend"
REFUSED = "tamis.integrations.vllm.versions.UnsupportedVersion"
_INDEXER = "vllm.model_executor.layers.sparse_attn_indexer"
"""vLLM's module of the operator that `indexer_plugin` replaces."""
_V4_MODELS = "tamis.integrations.vllm.v4_plugin"
V4_SOURCES = ("vllm.models.deepseek_v4", "vllm.models.deepseek_v41")
"""The packages whose models are registered again, as classes of `v4_plugin`."""


def register() -> None:
    """Make tamis vLLM's CUSTOM attention backend (`--attention-backend CUSTOM`), and offer its indexer.

    vLLM calls this in every process it starts, possibly more than once. It only stores paths of classes, which vLLM
    imports when they are chosen, and the class of an operator, since vLLM takes no path for those. It touches no
    device, and changes nothing for users who do not choose CUSTOM or the indexer.

    It never raises, since an exception would stop vLLM even where tamis is not used. Under a version of vLLM that tamis
    does not support, it logs one line, and choosing the backend then fails with the reason. It does not replace another
    plugin's CUSTOM backend, and logs a line if there is one.
    """
    try:
        problem = _register()
    except Exception as error:  # versions of vLLM may fail in any way
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        getLogger("tamis").warning("tamis is not vLLM's CUSTOM attention backend: %s", problem)
    try:
        problem = _register_indexer()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        getLogger("tamis").warning("tamis' indexer cannot be chosen in this vLLM: %s", problem)


def _register() -> str | None:
    """Register tamis; return the reason if that is not possible, else None."""
    from tamis.integrations.vllm.versions import REGISTRY, plugin_refusal

    refusal = plugin_refusal()
    try:
        registry = import_module(REGISTRY)
        custom, store = registry.AttentionBackendEnum.CUSTOM, registry.register_backend
    except Exception:
        # Then this vLLM has no CUSTOM backend at all.
        return refusal or f"{REGISTRY} differs from the versions that tamis supports"
    other = _other_plugin(custom)
    if other is not None:
        return f"another plugin has registered {other}; to use tamis, load it alone with VLLM_PLUGINS=tamis"
    if refusal is None:
        try:
            _register_v4_models()
        except Exception as error:
            refusal = f"vLLM's registry does not accept DeepSeek-V4's models: {type(error).__name__}: {error}"
    store(custom, BACKEND if refusal is None else REFUSED)
    return refusal


def _register_indexer() -> str | None:
    """Register the indexer; return the reason if that is not possible, else None."""
    try:
        present = find_spec(_INDEXER) is not None
    except Exception:  # a package above it is missing, or fails, which is said elsewhere
        present = False
    if not present:  # then no model of this vLLM has an indexer to replace
        return None
    problem: str | None = import_module("tamis.integrations.vllm.indexer_plugin").register_indexer()
    return problem


def _other_plugin(custom: Any) -> str | None:
    """The path of the class that CUSTOM stands for, if another plugin has registered it."""
    try:
        path = str(custom.get_path())
    except Exception:  # vLLM raises if no class is registered
        return None
    return None if path in (BACKEND, REFUSED) else path


def _register_v4_models() -> None:
    """Register V4's model classes as those of `v4_plugin`, which take CUSTOM into account."""
    models = import_module("vllm.model_executor.models.registry").ModelRegistry
    for architecture, known in list(models.models.items()):
        source = getattr(known, "module_name", None)
        if source in V4_SOURCES:
            models.register_model(architecture, f"{_V4_MODELS}:{source.rpartition('.')[2]}__{known.class_name}")
