"""The forward pass of a model that is attached for training, and the loss that its indexers add."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.integrations.hf.forward import Attachment, check_inputs, language_model, model_forward
from tamis.integrations.hf.train_step import Collected, Options, Sight, TrainStep

INDEXER = ".indexer."
"""A part of the names of all parameters of indexers, those of adapters included."""


@dataclass(eq=False)
class Training:
    """The state of a model that is attached for training."""

    options: Options
    language_loss: Any
    """The model's own loss function."""
    had_loss: bool
    """Whether that function was set on the model itself."""
    thawed: list[str]
    """The indexers' parameters that required a gradient before the model was attached."""
    collected: Collected = field(default_factory=Collected)
    replay: Any = None
    """What `replaying` has set: a function of a `Pack` that gives selected rows by layer."""


def training_forward(
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
    """Replaces the model's `forward`: without a cache if gradients are wanted, otherwise through pages.

    Packed sequences and replayed selections run without a cache in any case, and so do whole sequences of a sharded
    model, as in an evaluation: its layers may compute in another dtype than its pages have.
    """
    attachment: Attachment = self._tamis
    training: Training = attachment.training
    given = check_inputs(self, input_ids, inputs_embeds, position_ids, kwargs)
    records = torch.is_grad_enabled() and _wants_gradients(self, inputs_embeds)
    sight, whole = None, records or training.replay is not None
    if not (whole or use_cache) and past_key_values is None and attachment.record is None:
        whole = is_sharded(self)
    if past_key_values is None and (whole or position_ids is not None):
        sight = _sight(given, attention_mask, position_ids)
    if not (whole or (sight is not None and sight.packed)):
        return model_forward(
            self,
            input_ids,
            attention_mask,
            position_ids,
            past_key_values,
            inputs_embeds,
            use_cache,
            return_dict,
            **kwargs,
        )
    if sight is None:
        remedy = "train on whole sequences, or call the model under torch.no_grad()"
        if not records:
            remedy = "pass whole sequences to the model, and generate outside of replaying"
        expected = f"None {'in training' if records else 'while selections are replayed'}"
        raise checks.refuse("past_key_values", expected, type(past_key_values).__name__, remedy)
    if attachment.record is not None:
        received = "gradients" if records else "packed sequences" if training.replay is None else "a replay"
        remedy = "call the model under torch.no_grad() with one sequence per row, outside of replaying"
        raise checks.refuse("recording", "of a pass through pages", f"one with {received}", remedy)
    if sight.packed and attachment.family.shape.linear:
        remedy = "pass one per row, padded: linear attention would run from one sequence into the next"
        raise checks.refuse("position_ids", "those of one sequence per row", "packed sequences", remedy)
    step = _step(self, given, sight, records, kwargs.get("num_items_in_batch"))
    if attachment.family.counts_tokens:
        position_ids = _positions(sight, given)
    try:
        return type(self).forward(
            self,
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            attention_mask={"indexed_attention": step, "linear_attention": attention_mask},
            position_ids=position_ids,
            past_key_values=None,
            use_cache=False,
            return_dict=return_dict,
            **kwargs,
        )
    finally:
        step.finish()


def _wants_gradients(base: Any, inputs_embeds: Tensor | None) -> bool:
    given = inputs_embeds is not None and inputs_embeds.requires_grad
    return given or any(parameter.requires_grad for parameter in base.parameters())


def is_sharded(base: Any) -> bool:
    """Whether FSDP2 has sharded the layers, between whose passes their parameters are DTensors, a class that takes
    seconds to import."""
    return any(hasattr(parameter, "to_local") for parameter in base.layers.parameters())


def check_parameters(model: Any) -> None:
    """Refuse parameters that are not there when a layer reads them."""
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        remedy = "use FSDP2 (fully_shard), or ZeRO stage 2"
        raise checks.refuse("model", "not partitioned by DeepSpeed ZeRO-3", "ZeRO-3 parameters", remedy)


def check_learners(model: Any, options: Options) -> None:
    """Refuse a model in which other parameters require gradients than its indexers' stage allows. They may change after
    `attach`: PEFT, for example, freezes everything but its adapters."""
    learning = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    others = sorted(name for name in learning if INDEXER not in name)
    if options.indexer == "warmup" and others:
        received = f"{len(others)} other parameters, such as {others[0]}"
        remedy = "call requires_grad_(False) on everything but indexer_parameters(model)"
        raise checks.refuse("model", "one whose indexers alone require gradients in the warm-up", received, remedy)
    if options.indexer != "frozen" and len(learning) == len(others):
        remedy = "call requires_grad_() on indexer_parameters(model), or choose indexer='frozen'"
        expected = f"one whose indexers require gradients for indexer={options.indexer!r}"
        raise checks.refuse("model", expected, "none of them does", remedy)


def _sight(given: Tensor, attention_mask: Any, position_ids: Tensor | None) -> Sight:
    rows, columns = given.shape[:2]
    if attention_mask is not None and (
        not isinstance(attention_mask, Tensor) or attention_mask.shape != (rows, columns)
    ):
        remedy = "pass a padding mask; a causal mask is not needed"
        expected = f"of shape [{rows}, {columns}]"
        raise checks.refuse("attention_mask", expected, checks.describe(attention_mask), remedy)
    return Sight.of(rows, columns, attention_mask, position_ids, given.device)


def _step(base: Any, given: Tensor, sight: Sight, records: bool, items: Any) -> TrainStep:
    attachment: Attachment = base._tamis
    training: Training = attachment.training
    options = training.options
    check_parameters(base)
    if records and options.teaches:
        check_learners(base, options)
    checkpoints = records and base.training and _checkpoints(base)
    weight = None
    if records and options.teaches:
        if training.collected.unused:
            warnings.warn(
                "the index loss of the last step was not used: pass labels, or add take_index_loss(model) to the loss",
                stacklevel=2,
            )
        # A gradient that is accumulated over several batches is divided by the tokens of all of them.
        tokens = torch.as_tensor(sight.real if items is None else items, dtype=torch.float32, device=given.device)
        weight = options.index_loss / tokens.clamp_min(1.0)
    keep = options.keep_selections
    if keep is None:
        hidden = base.config.hidden_size * base.embed_tokens.weight.element_size()
        keep = max(4 * (spec.topk or 0) for spec in attachment.family.specs if spec is not None) <= hidden
    replayed = None if training.replay is None else training.replay(sight.pack, given.device)
    step = TrainStep(
        attachment.family,
        options,
        sight,
        records=records,
        token_weight=weight,
        keep=keep and checkpoints,
        frees_weights=not checkpoints and is_sharded(base),
        replayed=replayed,
    )
    if weight is not None:
        training.collected.start(step)
    return step


def _checkpoints(base: Any) -> bool:
    """Whether layers are checkpointed. Reentrant checkpointing is refused, whose first pass records no gradients."""
    found = [layer for layer in base.layers if getattr(layer, "gradient_checkpointing", False)]
    for layer in found:
        if getattr(layer._gradient_checkpointing_func, "keywords", {}).get("use_reentrant"):
            remedy = "call gradient_checkpointing_enable() without it"
            raise checks.refuse("use_reentrant", "False for an attached model", "True", remedy)
    return bool(found)


def _positions(sight: Sight, given: Tensor) -> Tensor:
    """int64 [rows, columns]: the position of each token in its own request, for padding 0."""
    own = (sight.ends - sight.starts - 1).clamp_min(0)
    return own.long().view(given.shape[:2]).to(given.device)


def loss_with_indexer(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Replaces the model's `loss_function`: its own loss and that of the indexers."""
    training: Training = language_model(self)._tamis.training
    loss: Tensor = training.language_loss(*args, **kwargs)
    # Without gradients there is none of this pass, and that of an earlier one is not its own.
    added = training.collected.take() if torch.is_grad_enabled() else None
    return loss if added is None else loss + added.to(loss.dtype)
