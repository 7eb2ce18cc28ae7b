"""Hugging Face transformers: models whose attention runs on tamis, over paged caches.

    attach(model, cache="fp8")
    model.generate(**inputs)
    detach(model)

An attached model selects positions and attends to them; no mask and no other tensor of tokens times tokens is made, and
long prompts run in chunks. Everything else, `generate` included, is the model's own.
"""

from dataclasses import dataclass
from types import MethodType
from typing import Any, get_args

import torch
from torch import Tensor

from tamis import checks

try:
    import transformers as _transformers
except ImportError as error:
    raise ImportError(
        "tamis.integrations.transformers needs Hugging Face transformers: pip install 'tamis[transformers]'"
    ) from error

from tamis.integrations.hf.cache import TamisCache
from tamis.integrations.hf.layers import (
    CacheKind,
    Family,
    Step,
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
"""Longer prompts run in pieces of so many tokens, which bounds what all layers need at once."""
_RECORDED = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(frozen=True, eq=False)
class _Attachment:
    family: Family
    chunk: int
    dtype: torch.dtype


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
        cache: of what the pages are made. "fp8" is the model family's own format (656 or 584 bytes a token at full
            width) with FP8 index keys; "bf16" keeps rows in bf16 and index keys in the model's dtype; "fp32" is exact.
        backend: a name from `tamis backends`, or "auto".
        chunk_tokens: how many tokens of a prompt run at once, over all of the batch.
        wrap_layer: gets each layer's number and its `SparseMLA` or `SparseV4` whenever one is made, and returns what
            runs in its place. For tools that look on, as `tamis inspect` does.

    Attached models are for inference. They take padding masks [requests, columns] only, keep their tokens in a
    `TamisCache`, and give no attention weights. V4 models count a request's own tokens, whatever `position_ids` say.
    """
    make_family, forward = _parts(model)
    checks.option("cache", cache, get_args(CacheKind))
    checks.integer("chunk_tokens", chunk_tokens, low=1)
    if is_attached(model):
        raise checks.refuse("model", "without tamis", "one that is attached", "call detach(model) first")
    base = model.model
    modules = [layer.self_attn for layer in base.layers]
    if any("forward" in vars(module) for module in (base, *modules)):
        remedy = "load it without device_map or other hooks"
        raise checks.refuse("model", "with its own forward methods", "one with replaced ones", remedy)
    places = {str(parameter.device) for parameter in model.parameters()}
    if len(places) != 1:
        raise checks.refuse("model", "on one device", sorted(places), "move it with .to(device)")
    family = make_family(base, cache, backend, wrap_layer)
    base._tamis = _Attachment(family, chunk_tokens, base.embed_tokens.weight.dtype)
    base.forward = MethodType(_model_forward, base)
    model._prepare_cache_for_generation = MethodType(_prepare_cache, model)
    for module in modules:
        module.forward = MethodType(forward, module)


def detach(model: Any) -> None:
    """Give a model its own attention back; without effect on one that is not attached."""
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
    remedy = f"these are what transformers {_transformers.__version__} has of sparse latent attention"
    raise checks.refuse("model", f"one of {', '.join(_MODELS)}", type(model).__name__, remedy)


def _prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
    """In place of `GenerationMixin._prepare_cache_for_generation`: the cache is ours unless one is given."""
    kind = generation_config.cache_implementation
    if kind not in (None, "dynamic"):
        raise checks.refuse("cache_implementation", "None for an attached model", repr(kind), "choose attach(cache=)")
    given = model_kwargs.get("past_key_values")
    if given is None and generation_config.use_cache is not False:
        model_kwargs["past_key_values"] = new_cache(self)
    elif given is not None:
        given._is_user_defined = True  # as the original does: generate then returns it complete


def _model_forward(
    self: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: Tensor | None = None,
    use_cache: bool | None = None,
    return_dict: bool | None = None,
    **kwargs: Any,
) -> Any:
    """In place of the model's forward pass: the same, in chunks, with a planned step for a mask."""
    attachment: _Attachment = self._tamis
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None or (input_ids is not None and inputs_embeds is not None):
        raise checks.refuse("input_ids", "given, or inputs_embeds, but not both", "neither or both", "pass one")
    _check_use(self, attachment)
    cache = past_key_values
    if cache is None:
        cache = TamisCache(attachment.family.shape)
    elif not isinstance(cache, TamisCache):
        remedy = "pass none, or new_cache(model)"
        raise checks.refuse("past_key_values", "a TamisCache", type(cache).__name__, remedy)
    elif cache.shape != attachment.family.shape:
        raise checks.refuse("past_key_values", "of this model", "another one's", "pass new_cache(model)")
    use_cache = self.config.use_cache if use_cache is None else use_cache
    returned = cache if use_cache or past_key_values is not None else None
    requests, columns = given.shape[:2]
    new = cache.new_tokens(requests, columns, attention_mask)
    if position_ids is None:
        seen = cache.get_seq_length()
        position_ids = torch.arange(seen, seen + columns, dtype=torch.int64, device=given.device).unsqueeze(0)
    recorded = any(kwargs.get(name) or getattr(self.config, name, False) for name in _RECORDED)
    size = columns if recorded else max(1, attachment.chunk // requests)
    outputs = []
    for start in range(0, columns, size):
        some = slice(start, start + size)
        plan = attachment.family.plan(cache.batch(new[:, some]))
        step = Step(attachment.family, plan, cache.paged, _real(new[:, some], given.device))
        outputs.append(
            type(self).forward(
                self,
                input_ids=None if input_ids is None else input_ids[:, some],
                inputs_embeds=None if inputs_embeds is None else inputs_embeds[:, some],
                attention_mask={"indexed_attention": step},
                position_ids=position_ids[:, some],
                past_key_values=returned,
                use_cache=use_cache,
                return_dict=True,
                **kwargs,
            )
        )
        cache.commit(new[:, some])
    last = outputs[-1]
    if len(outputs) > 1:
        last.last_hidden_state = torch.cat([out.last_hidden_state for out in outputs], dim=1)
    return_dict = self.config.return_dict if return_dict is None else return_dict
    return last if return_dict else last.to_tuple()


def _real(new: Tensor, device: torch.device) -> Tensor | None:
    """The numbers of the real tokens; None if all are."""
    return None if bool(new.all()) else new.flatten().nonzero().squeeze(1).to(device)


def _check_use(base: Any, attachment: _Attachment) -> None:
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in base.parameters()):
        remedy = "call it under torch.no_grad(), or detach(model) to train it"
        raise checks.refuse("model", "used for inference while it is attached", "gradients enabled", remedy)
    weight = base.embed_tokens.weight
    device, dtype = attachment.family.shape.device, attachment.dtype
    if (weight.device, weight.dtype) != (device, dtype):
        expected = f"{checks.dtype_name(dtype)} on {device}, as when it was attached"
        remedy = "detach it, and attach it again after moving or converting it"
        raise checks.refuse("model", expected, f"{checks.dtype_name(weight.dtype)} on {weight.device}", remedy)
