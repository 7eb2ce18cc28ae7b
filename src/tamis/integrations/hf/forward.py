"""The forward pass of an attached model: the model's own, in chunks, with a planned `Step` in place of a mask."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor

from tamis import checks
from tamis.integrations.hf.cache import TamisCache
from tamis.integrations.hf.layers import Family, Step
from tamis.integrations.hf.linear_states import mask_or_tokens

_RECORDED = ("output_attentions", "output_hidden_states", "output_router_logits")


@dataclass(eq=False)
class Attachment:
    """The data that `attach` stores with a model."""

    family: Family
    chunk: int
    """How many tokens run at once, counted over the whole batch."""
    dtype: torch.dtype
    """The model's dtype when it was attached."""
    training: Any = None
    """A `Training`, if the model was attached for training."""
    record: Any = None
    """What `recording` has set: a function of layer, plan and selected positions."""


def language_model(model: Any) -> Any:
    """The part of a model that has the decoder layers: below the head, and the language model of a multimodal one."""
    below = getattr(model, "model", model)
    return getattr(below, "language_model", below)


@dataclass(frozen=True, eq=False)
class _Prepared:
    """The checked inputs of one forward pass."""

    input_ids: Tensor | None
    inputs_embeds: Tensor | None
    position_ids: Tensor
    new: Tensor
    """bool [requests, columns] on the host: which tokens are real, as opposed to padding."""
    cache: TamisCache
    device: torch.device
    columns_at_once: int


def _forward(
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
    """The forward pass of an attached model."""
    prepared = _prepare(self, input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, kwargs)
    use_cache = self.config.use_cache if use_cache is None else use_cache
    if position_ids is not None and attention_mask is None and past_key_values is None and not use_cache:
        _refuse_packed(position_ids)
    kept = use_cache or past_key_values is not None
    # Layers of linear attention find their states in the cache, also from one chunk to the next.
    given = prepared.cache if kept or prepared.cache.states else None
    options = {"past_key_values": given, "use_cache": use_cache, **kwargs}
    outputs = []
    for new, inputs in _chunks(self._tamis, prepared):
        outputs.append(type(self).forward(self, **inputs, **options))
        prepared.cache.commit(new)
    if not kept:
        outputs[-1].past_key_values = None
    return _join(outputs, self.config.return_dict if return_dict is None else return_dict)


@wraps(_forward)
def model_forward(*args: Any, **kwargs: Any) -> Any:
    """Replaces the model's `forward`. Inside torch.compile it runs as it is: planning reads values on the host, and
    pages grow with the requests."""
    run = torch.compiler.disable(_forward) if torch.compiler.is_compiling() else _forward
    return run(*args, **kwargs)


def _prepare(
    base: Any,
    input_ids: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Any,
    inputs_embeds: Tensor | None,
    options: dict[str, Any],
) -> _Prepared:
    """Check the inputs, and complete what was left out."""
    attachment: Attachment = base._tamis
    given = check_inputs(base, input_ids, inputs_embeds, position_ids, options)
    _check_use(base, attachment)
    cache = _cache(past_key_values, attachment)
    requests, columns = given.shape[:2]
    new = cache.new_tokens(requests, columns, attention_mask)
    if position_ids is None:
        seen = cache.get_seq_length()
        position_ids = torch.arange(seen, seen + columns, dtype=torch.int64, device=given.device).unsqueeze(0)
    # The per-layer outputs that transformers records cannot be joined over chunks.
    recorded = any(options.get(name) or getattr(base.config, name, False) for name in _RECORDED)
    size = columns if recorded else max(1, attachment.chunk // requests)
    return _Prepared(input_ids, inputs_embeds, position_ids, new, cache, given.device, size)


def _refuse_packed(position_ids: Tensor) -> None:
    """Refuse positions that transformers reads as several sequences in a row, in a call without mask and cache: in the
    pages a row is one request."""
    if bool((position_ids.diff(dim=1) != 1).any()):
        remedy = "pass one per row, padded, or attach with train=True"
        raise checks.refuse("position_ids", "those of one sequence per row", "packed sequences", remedy)


def _chunks(attachment: Attachment, prepared: _Prepared) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Each chunk's real tokens and model inputs. A chunk is planned when it is asked for, after the one before it was
    committed to the cache."""
    family, ids, embeds = attachment.family, prepared.input_ids, prepared.inputs_embeds
    size = prepared.columns_at_once
    for start in range(0, prepared.new.shape[1], size):
        columns = slice(start, start + size)
        new = prepared.new[:, columns]
        plan = family.plan(prepared.cache.batch(new))
        step = Step(family, plan, prepared.cache.paged, _real_tokens(new, prepared.device), attachment.record)
        inputs = {
            "input_ids": None if ids is None else ids[:, columns],
            "inputs_embeds": None if embeds is None else embeds[:, columns],
            "attention_mask": {"indexed_attention": step, "linear_attention": _linear_mask(prepared, new)},
            "position_ids": prepared.position_ids[:, columns],
            "return_dict": True,
        }
        yield new, inputs


def _linear_mask(prepared: _Prepared, new: Tensor) -> Any:
    """What layers of linear attention get as a mask; None if the model has none."""
    cache = prepared.cache
    if not cache.states:
        return None
    seen = torch.zeros(len(new), dtype=torch.bool, device="cpu") if cache.kept is None else cache.kept.any(1)
    return mask_or_tokens(new, seen, prepared.device)


def _join(outputs: list[Any], return_dict: bool) -> Any:
    """One output of all chunks: the last one's, with the hidden states of all."""
    last = outputs[-1]
    if len(outputs) > 1:
        last.last_hidden_state = torch.cat([out.last_hidden_state for out in outputs], dim=1)
    return last if return_dict else last.to_tuple()


def _cache(given: Any, attachment: Attachment) -> TamisCache:
    if given is None:
        return TamisCache(attachment.family.shape)
    if not isinstance(given, TamisCache):
        remedy = "pass none, or new_cache(model)"
        raise checks.refuse("past_key_values", "a TamisCache", type(given).__name__, remedy)
    if given.shape != attachment.family.shape:
        raise checks.refuse("past_key_values", "a cache of this model", "another model's", "pass new_cache(model)")
    return given


def _real_tokens(new: Tensor, device: torch.device) -> Tensor | None:
    """int64, the numbers of the real tokens; None if there is no padding."""
    return None if bool(new.all()) else new.flatten().nonzero().squeeze(1).to(device)


def check_inputs(
    base: Any,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    position_ids: Tensor | None,
    options: dict[str, Any],
) -> Tensor:
    """Refuse inputs of another shape or dtype, and results that there are none of. Values are the model's own business.
    Returns the tokens or their embeddings."""
    if (input_ids is None) == (inputs_embeds is None):
        which = "neither" if input_ids is None else "both"
        raise checks.refuse("input_ids and inputs_embeds", "given one at a time", which, "pass exactly one")
    if options.get("output_attentions") or getattr(base.config, "output_attentions", False):
        remedy = "attention weights are never all computed; `tamis inspect` reports those of selected tokens"
        raise checks.refuse("output_attentions", "False for an attached model", True, remedy)
    if inputs_embeds is None:
        checks.tensor("input_ids", input_ids, "requests columns", checks.INTS)
        given = cast("Tensor", input_ids)
    else:
        checks.tensor("inputs_embeds", inputs_embeds, "requests columns hidden", (*checks.FLOATS, torch.float64))
        given = inputs_embeds
    requests, columns = given.shape[:2]
    if not requests or not columns:
        name = "input_ids" if inputs_embeds is None else "inputs_embeds"
        raise checks.refuse(name, "of at least one request and one token", list(given.shape), "skip an empty batch")
    if position_ids is not None:
        checks.tensor("position_ids", position_ids, "rows columns", checks.INTS, columns=columns)
        if position_ids.shape[0] not in (1, requests):
            expected, received = f"of 1 or {requests} rows, like the tokens", position_ids.shape[0]
            raise checks.refuse("position_ids", expected, received, "pass those of the new tokens")
    return given


def _check_use(base: Any, attachment: Attachment) -> None:
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in base.parameters()):
        remedy = "call it under torch.no_grad(), or attach it with train=True"
        raise checks.refuse("model", "used for inference while it is attached", "gradients enabled", remedy)
    weight = base.embed_tokens.weight
    device, dtype = attachment.family.shape.device, attachment.dtype
    if (weight.device, weight.dtype) != (device, dtype):
        expected = f"{checks.dtype_name(dtype)} on {device}, as when it was attached"
        remedy = "detach it, and attach it again after moving or converting it"
        raise checks.refuse("model", expected, f"{checks.dtype_name(weight.dtype)} on {weight.device}", remedy)
