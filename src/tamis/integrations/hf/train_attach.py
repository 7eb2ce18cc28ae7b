"""What `attach(model, train=True)` changes in a model beside its forward methods, and what `detach` changes back."""

from types import MethodType
from typing import Any, get_args

from tamis import checks
from tamis.integrations.hf.train_forward import (
    INDEXER,
    Training,
    check_learners,
    check_parameters,
    loss_with_indexer,
    training_forward,
)
from tamis.integrations.hf.train_glm5_next import glm5_next_train_forward
from tamis.integrations.hf.train_step import Options, Stage, Teachers
from tamis.integrations.hf.train_v4 import v4_train_forward
from tamis.integrations.hf.train_v32 import glm_train_forward, v32_train_forward

FORWARDS = {
    "DeepseekV32ForCausalLM": v32_train_forward,
    "GlmMoeDsaForCausalLM": glm_train_forward,
    "DeepseekV4ForCausalLM": v4_train_forward,
    "AXK2ForCausalLM": v32_train_forward,
    "HYV4ForCausalLM": glm_train_forward,
    "MistralLarge4ForConditionalGeneration": glm_train_forward,
    "Glm5NextForConditionalGeneration": glm5_next_train_forward,
}
"""By class. What is not listed here is refused by `training_method`."""


def training_method(name: str) -> Any:
    """The forward method of an attention module in training, by the class of its model."""
    if name not in FORWARDS:
        raise checks.refuse("model", f"one of {', '.join(FORWARDS)} to train", name, "attach it without train=True")
    return FORWARDS[name]


def checked_options(
    indexer: Stage,
    index_loss: float,
    deterministic: bool | None,
    keep_selections: bool | None,
    teachers: Teachers,
    backend: str,
) -> Options:
    """The options of `attach` that concern training, or an error that names the wrong one."""
    checks.option("indexer", indexer, get_args(Stage))
    checks.number("index_loss", index_loss, low=0.0)
    for name, value in (("deterministic", deterministic), ("keep_selections", keep_selections)):
        if value is not None:
            checks.flag(name, value)
    checks.option("teachers", teachers, get_args(Teachers))
    return Options(indexer, float(index_loss), deterministic, keep_selections, teachers, backend)


def check_model(model: Any, options: Options) -> None:
    """Refuse a model that cannot be trained as asked."""
    rate = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    if rate:
        remedy = "set config.attention_dropout = 0 before training"
        raise checks.refuse("attention_dropout", "0: tamis has no dropout of attention weights", rate, remedy)
    check_parameters(model)
    _check_pooled(model, options)
    check_learners(model, options)


def _check_pooled(model: Any, options: Options) -> None:
    """Refuse the warm-up of pooled index keys, whose targets would be sums over groups of all visible tokens."""
    if options.indexer == "warmup" and getattr(model.config.get_text_config(), "index_kpool", 1) > 1:
        raise checks.refuse("indexer", "'frozen' or 'sparse' for pooled index keys", "'warmup'", "choose one of these")


def indexer_parameters(model: Any) -> list[str]:
    """The names of the parameters of a model's indexers, adapters included."""
    return [name for name, _ in model.named_parameters() if INDEXER in name]


def start(model: Any, options: Options) -> Training:
    """Freeze the indexers if they are not to learn, and let the loss function add their loss if they are."""
    own, had_loss = model.loss_function, "_loss_function" in vars(model)
    thawed = []
    if options.indexer == "frozen":
        for name, parameter in model.named_parameters():
            if INDEXER in name and parameter.requires_grad:
                parameter.requires_grad_(False)
                thawed.append(name)
    else:
        model.loss_function = MethodType(loss_with_indexer, model)
    return Training(options, own, had_loss, thawed)


def stop(model: Any, training: Training) -> None:
    """Undo `start`."""
    training.collected.forget()
    for name, parameter in model.named_parameters():
        if name in training.thawed:
            parameter.requires_grad_(True)
    if training.had_loss:
        model.loss_function = training.language_loss
    elif "_loss_function" in vars(model):
        del model._loss_function


__all__ = [
    "FORWARDS",
    "check_model",
    "checked_options",
    "indexer_parameters",
    "start",
    "stop",
    "training_forward",
    "training_method",
]
