"""Hugging Face transformers: models whose attention runs on tamis, over paged caches.

    attach(model, cache="fp8")
    model.generate(**inputs)
    detach(model)

An attached model selects positions and attends to them. It makes no mask and no other tensor of tokens times tokens,
and it runs long prompts in chunks. Everything else, `generate` included, is the model's own.
"""

from types import MethodType
from typing import Any, get_args

from tamis import checks
from tamis._extras import install_command, is_admitted

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        f"tamis.integrations.transformers needs Hugging Face transformers: {install_command('transformers')}"
    ) from error
if not is_admitted("transformers", _transformers.__version__):
    raise ImportError(
        f"tamis.integrations.transformers needs another version of transformers than {_transformers.__version__}: "
        f"{install_command('transformers')}"
    )

from tamis.integrations.hf.cache import TamisCache
from tamis.integrations.hf.forward import Attachment, model_forward
from tamis.integrations.hf.layers import (
    CacheKind,
    V4Family,
    V32Family,
    WrapLayer,
    glm_forward,
    v4_forward,
    v32_forward,
)

__all__ = ["TamisCache", "attach", "detach", "is_attached", "new_cache"]

_MODELS: dict[str, tuple[Any, Any]] = {
    "DeepseekV32ForCausalLM": (V32Family, v32_forward),
    "GlmMoeDsaForCausalLM": (V32Family, glm_forward),
    "DeepseekV4ForCausalLM": (V4Family, v4_forward),
}
CHUNK_TOKENS = 4096
"""Prompts longer than this run in chunks of this many tokens, which bounds the memory that activations take."""


def attach(
    model: Any,
    *,
    cache: CacheKind = "fp8",
    backend: str = "auto",
    chunk_tokens: int = CHUNK_TOKENS,
    wrap_layer: WrapLayer = lambda number, layer: layer,
) -> None:
    """Run a model's attention through tamis, until `detach`.

    Args:
        model: a `DeepseekV32ForCausalLM`, `GlmMoeDsaForCausalLM` or `DeepseekV4ForCausalLM` on one device.
        cache: the format of the cache pages. "fp8" is the model family's own format (656 or 584 bytes a token at full
            width) with FP8 index keys; "bf16" keeps rows in bf16 and index keys in the model's dtype; "fp32" is exact.
        backend: a name from `tamis backends`, or "auto".
        chunk_tokens: how many tokens run at once, counted over the whole batch.
        wrap_layer: a function that gets each layer's number and its `SparseMLA` or `SparseV4` whenever one is made, and
            returns a layer of the same class that runs in its place. `tamis inspect` uses it to watch layers.

    Attached models are for inference. They take only padding masks [requests, columns], keep their tokens in a
    `TamisCache`, and return no attention weights. V4 models ignore `position_ids` and count each request's own tokens.
    """
    make_family, forward = _parts(model)
    checks.option("cache", cache, get_args(CacheKind))
    checks.integer("chunk_tokens", chunk_tokens, low=1)
    if is_attached(model):
        raise checks.refuse("model", "one that is not attached yet", "an attached one", "call detach(model) first")
    base = model.model
    modules = [layer.self_attn for layer in base.layers]
    if any("forward" in vars(module) for module in (base, *modules)):
        remedy = "load it without device_map or other hooks"
        raise checks.refuse("model", "one with its own forward methods", "replaced forward methods", remedy)
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1:
        raise checks.refuse("model", "on one device", sorted(devices), "move it with .to(device)")
    family = make_family(base, cache, backend, wrap_layer)
    base._tamis = Attachment(family, chunk_tokens, base.embed_tokens.weight.dtype)
    base.forward = MethodType(model_forward, base)
    model._prepare_cache_for_generation = MethodType(_prepare_cache, model)
    for module in modules:
        module.forward = MethodType(forward, module)


def detach(model: Any) -> None:
    """Give a model its own attention back. Does nothing to a model that is not attached."""
    if not is_attached(model):
        return
    base = model.model
    for module in (base, *(layer.self_attn for layer in base.layers)):
        del module.forward
    del model._prepare_cache_for_generation
    del base._tamis


def is_attached(model: Any) -> bool:
    """Whether a model's attention runs through tamis."""
    return getattr(getattr(model, "model", None), "_tamis", None) is not None


def new_cache(model: Any) -> TamisCache:
    """An empty cache for an attached model, to be passed as `past_key_values`."""
    if not is_attached(model):
        raise checks.refuse("model", "an attached one", checks.describe(model), "call attach(model) first")
    return TamisCache(model.model._tamis.family.shape)


def _parts(model: Any) -> tuple[Any, Any]:
    for kind in type(model).__mro__:
        if kind.__name__ in _MODELS:
            return _MODELS[kind.__name__]
    remedy = f"transformers {_transformers.__version__} has no other models with sparse latent attention"
    raise checks.refuse("model", f"one of {', '.join(_MODELS)}", type(model).__name__, remedy)


def _prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """Replaces `GenerationMixin._prepare_cache_for_generation`: makes a `TamisCache` unless the caller passed one."""
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic"):
        raise checks.refuse("cache_implementation", "None for an attached model", repr(kind), "choose attach(cache=)")
    given = model_kwargs.get("past_key_values")
    if given is None and generation_config.use_cache is not False:
        model_kwargs["past_key_values"] = new_cache(self)
    elif given is not None:
        given._is_user_defined = True  # as in the original, so that generate returns the complete cache
