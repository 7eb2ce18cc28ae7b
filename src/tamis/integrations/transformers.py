"""Hugging Face transformers: models whose attention runs on tamis, over paged caches.

    attach(model, cache="fp8")
    model.generate(**inputs)
    detach(model)

An attached model selects positions and attends to them. It makes no mask and no other tensor of tokens times tokens,
and it runs long prompts in chunks. Everything else, `generate` included, is the model's own.

    attach(model, train=True, indexer="sparse")
    model.train()
    model(**inputs, labels=labels).loss.backward()

A model that is attached for training computes gradients as well, and its indexers can learn.
"""

import inspect
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from types import MethodType
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor
from torch.nn import Module

from tamis import checks
from tamis._extras import install_command, is_admitted
from tamis.backends import refuse_broken, registered

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

from tamis.integrations.hf import replay
from tamis.integrations.hf.cache import TamisCache
from tamis.integrations.hf.forward import Attachment, language_model, model_forward
from tamis.integrations.hf.glm5_next import Glm5NextFamily, glm5_next_forward
from tamis.integrations.hf.layers import CacheKind, V32Family, WrapLayer, glm_forward, v32_forward
from tamis.integrations.hf.linear_states import linear_forward
from tamis.integrations.hf.mla_models import AxK2Family, Hy4Family, MistralLarge4Family
from tamis.integrations.hf.names import MODELS
from tamis.integrations.hf.v4_layers import V4Family, v4_forward
from tamis.layers.recording import Recording

if TYPE_CHECKING:
    from tamis.integrations.hf.train_step import Stage, Teachers

__all__ = [
    "TamisCache",
    "attach",
    "detach",
    "index_losses",
    "indexer_parameters",
    "is_attached",
    "new_cache",
    "recording",
    "replaying",
    "take_index_loss",
]

_MODELS: dict[str, tuple[Any, Any]] = {  # `names.MODELS` has the same
    "DeepseekV32ForCausalLM": (V32Family, v32_forward),
    "GlmMoeDsaForCausalLM": (V32Family, glm_forward),
    "DeepseekV4ForCausalLM": (V4Family, v4_forward),
    "AXK2ForCausalLM": (AxK2Family, v32_forward),
    "HYV4ForCausalLM": (Hy4Family, glm_forward),
    "MistralLarge4ForConditionalGeneration": (MistralLarge4Family, glm_forward),
    "Glm5NextForConditionalGeneration": (Glm5NextFamily, glm5_next_forward),
    "Glm5NextModel": (Glm5NextFamily, glm5_next_forward),
    "Glm5NextTextModel": (Glm5NextFamily, glm5_next_forward),
}
CHUNK_TOKENS = 4096
"""Prompts longer than this run in chunks of this many tokens, which bounds the memory that activations take."""


def attach(
    model: Any,
    *,
    cache: CacheKind | None = None,
    backend: str = "auto",
    chunk_tokens: int = CHUNK_TOKENS,
    wrap_layer: WrapLayer = lambda number, layer: layer,
    train: bool = False,
    indexer: "Stage" = "frozen",
    index_loss: float = 1.0,
    deterministic: bool | None = None,
    keep_selections: bool | None = None,
    teachers: "Teachers" = "own",
) -> None:
    """Run a model's attention through tamis, until `detach`.

    Args:
        model: a model on one device, with its language-model head, of a kind that the guide's table of models lists;
            or a `PeftModel` of one. Of GLM-5.3-Flash also the part below the head.
        cache: the format of the cache pages. "fp8" is the model family's own format (656, 584 or 528 bytes a token at
            full width) with FP8 index keys; "bf16" keeps rows in bf16 and index keys in the model's dtype; "fp32" is
            exact.
            In training, only the format of index keys matters: rows are selected as from such a cache. The default is
            "fp8", and "bf16" with `train=True`.
        backend: a name from `tamis backends`, or "auto".
        chunk_tokens: how many tokens run at once, counted over the whole batch. Training does not use chunks.
        wrap_layer: a function that gets each layer's number and its `SparseMLA` or `SparseV4` whenever one is made, and
            returns a layer of the same class that runs in its place. `tamis inspect` uses it to watch layers.
        train: whether to train the model. Calls that record gradients then run without a cache.
        indexer: what the indexers do in training. "frozen": they select, and their parameters need no gradient.
            "sparse": they also learn from the attention over what they selected. "warmup": attention is dense, and they
            learn from it; nothing else may require a gradient.
        index_loss: the coefficient of the indexers' loss, which is the sum over layers of the divergence between
            attention and indexer, per token. It is added to the loss that the model returns for `labels`.
        deterministic: as in `tamis.train.attend_rows`.
        keep_selections: whether layers that are checkpointed keep what they selected instead of selecting again: 4
            bytes per token, layer and selected position. None: if that is less than a layer's hidden states.
        teachers: whose attention teaches an indexer that several layers share (GLM): "own", that of its own layer;
            "readers", the mean over all of them.

    Without `train=True` an attached model is for inference, of one sequence per row. Attached models take only padding
    masks [requests, columns], keep their tokens in a `TamisCache`, and return no attention weights. V4 models ignore
    `position_ids` and count each request's own tokens. Where it does not train, a model inside torch.compile runs as it
    is.
    """
    if _inside(model) is not None:
        remedy = "attach the model inside it, before it is wrapped"
        raise checks.refuse("model", "the model itself", type(model).__name__, remedy)
    model = _bare(model)
    make_family, forward = _parts(model)
    cache = ("bf16" if train else "fp8") if cache is None else cache
    checks.option("cache", cache, get_args(CacheKind))
    checks.integer("chunk_tokens", chunk_tokens, low=1)
    _check_backend(backend)
    if not callable(wrap_layer):
        expected = "a function of a layer's number and the layer"
        raise checks.refuse_type("wrap_layer", expected, checks.describe(wrap_layer), "leave it out")
    if not checks.flag("train", train):
        _check_untrained(indexer, index_loss, deterministic, keep_selections, teachers)
    if is_attached(model):
        raise checks.refuse("model", "one that is not attached yet", "an attached one", "call detach(model) first")
    base = language_model(model)
    modules, linear = _attention_modules(base), _linear_modules(base)
    if any("forward" in vars(module) for module in (base, *modules, *linear)):
        remedy = "load it without device_map or other hooks"
        raise checks.refuse("model", "one with its own forward methods", "replaced forward methods", remedy)
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1:
        raise checks.refuse("model", "on one device", sorted(devices), "move it with .to(device)")
    base_forward: Any = model_forward
    training, dtype = None, base.embed_tokens.weight.dtype
    if dtype not in checks.FLOATS:
        expected, remedy = "of bfloat16, float16 or float32", "convert it with .to(torch.float32)"
        raise checks.refuse_type("model", expected, checks.dtype_name(dtype), remedy)
    if train:
        from tamis.integrations.hf import train_attach

        options = train_attach.checked_options(indexer, index_loss, deterministic, keep_selections, teachers, backend)
        base_forward, forward = train_attach.training_forward, train_attach.training_method(_name(model))
        train_attach.check_model(model, options)
    family = make_family(base, cache, backend, wrap_layer)
    if train:
        training = train_attach.start(model, options)
    base._tamis = Attachment(family, chunk_tokens, dtype, training)
    base.forward = MethodType(base_forward, base)
    if hasattr(model, "generate"):
        model._prepare_cache_for_generation = MethodType(_prepare_cache, model)
    for module in modules:
        module.forward = MethodType(forward, module)
    for module in linear:
        module.forward = MethodType(linear_forward, module)


def detach(model: Any) -> None:
    """Give a model its own attention back. Does nothing to a model that is not attached."""
    model = _bare(model)
    if not is_attached(model):
        return
    base = language_model(model)
    if base._tamis.training is not None:
        from tamis.integrations.hf import train_attach

        train_attach.stop(model, base._tamis.training)
    for module in (base, *_attention_modules(base), *_linear_modules(base)):
        del module.forward
    vars(model).pop("_prepare_cache_for_generation", None)
    del base._tamis


def is_attached(model: Any) -> bool:
    """Whether a model's attention runs through tamis."""
    return getattr(language_model(_bare(model)), "_tamis", None) is not None


def new_cache(model: Any) -> TamisCache:
    """An empty cache for an attached model, to be passed as `past_key_values`."""
    if not is_attached(model):
        raise checks.refuse("model", "an attached one", checks.describe(model), "call attach(model) first")
    return TamisCache(language_model(_bare(model))._tamis.family.shape)


def indexer_parameters(model: Any) -> list[str]:
    """The names of the parameters of a model's indexers: what the warm-up trains."""
    from tamis.integrations.hf import train_attach

    _parts(_bare(model))
    return train_attach.indexer_parameters(model)


def index_losses(model: Any) -> dict[int, float]:
    """The indexers' losses in the last training step, per token, by layer, without the coefficient."""
    found: dict[int, float] = _training(model).collected.means()
    return found


def take_index_loss(model: Any) -> Tensor | None:
    """The sum of the indexers' losses of the last forward pass, with its graph, for programs that compute their own
    language loss; None if there is none, or if `labels` were passed and the returned loss contains it already."""
    found: Tensor | None = _training(model).collected.take()
    return found


def recording(model: Any, into: Recording, requests: Sequence[Hashable]) -> AbstractContextManager[None]:
    """A context in which an attached model records what its layers select, for `replaying`.

    Args:
        model: an attached model.
        into: a `Recording(topk=config.index_topk)`; with `kpool=config.index_kpool` if index keys are pooled, and for
            DeepSeek-V4, whose layers select entries, with `ratio=config.compress_rates["compressed_sparse_attention"]`.
        requests: a name for every row of the batch.
    """
    if not is_attached(model):
        raise checks.refuse("model", "an attached one", checks.describe(model), "call attach(model) first")
    return replay.recording(language_model(_bare(model)), into, requests)


def replaying(model: Any, recorded: Recording, requests: Sequence[Hashable]) -> AbstractContextManager[None]:
    """A context in which a model that is attached for training attends to the positions of an earlier run.

    Calls run without a cache, with and without gradients. A token that was never recorded is refused: the last token
    that was generated has not run, so leave it out of `input_ids`.

    Args:
        model: one attached with `train=True`.
        recorded: the selections: from `recording`, or loaded from what an engine captured (`Recording.load`).
        requests: the names of the batch's sequences, in order; every packed sequence has its own.
    """
    _training(model)
    return replay.replaying(language_model(_bare(model)), recorded, requests)


def _check_backend(name: str) -> None:
    """Refuse a name that no backend has. Whether the backend runs the model's layers, its family finds out."""
    refuse_broken(name)
    checks.option("backend", name, ("auto", *(known.name for known in registered().backends)))


def _check_untrained(indexer: Any, index_loss: Any, deterministic: Any, keep_selections: Any, teachers: Any) -> None:
    """Refuse options of training that would be ignored."""
    given = {"indexer": indexer, "index_loss": index_loss, "teachers": teachers}
    given |= {"deterministic": deterministic, "keep_selections": keep_selections}
    usual = inspect.signature(attach).parameters
    for name, value in given.items():
        if value != usual[name].default:
            raise checks.refuse(name, "left out without train=True", repr(value), "pass train=True")


def _training(model: Any) -> Any:
    training = language_model(_bare(model))._tamis.training if is_attached(model) else None
    if training is None:
        raise checks.refuse("model", "one attached for training", checks.describe(model), "attach(model, train=True)")
    return training


def _bare(model: Any) -> Any:
    """The model inside a `PeftModel` and inside what wraps it, or the model itself."""
    inside = _inside(model)
    if inside is not None:
        return _bare(inside)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _inside(model: Any) -> Any:
    """The model inside DistributedDataParallel, DataParallel, FullyShardedDataParallel or torch.compile; None if there
    is none."""
    parts = getattr(model, "_modules", {})
    return next((parts[name] for name in ("module", "_fsdp_wrapped_module", "_orig_mod") if name in parts), None)


def _names(model: Any) -> list[str]:
    """The names of a model's class and of its bases."""
    return [kind.__name__ for kind in type(model).__mro__]


def _attention_modules(base: Any) -> list[Any]:
    """The attention modules that tamis runs. Layers of linear attention are the model's own."""
    return [layer.self_attn for layer in base.layers if not _is_linear(layer)]


def _linear_modules(base: Any) -> list[Any]:
    """The modules of linear attention, which are only told which tokens are real."""
    return [layer.self_attn for layer in base.layers if _is_linear(layer)]


def _is_linear(layer: Any) -> bool:
    return getattr(layer, "block_type", "") == "linear_attention"


def _name(model: Any) -> str:
    """The name by which a model is supported; empty if it is not."""
    return next((name for name in _names(model) if name in _MODELS), "")


def _parts(model: Any) -> tuple[Any, Any]:
    """The family and the forward method of a model that is supported; others are refused."""
    if _name(model):
        return _MODELS[_name(model)]
    if not isinstance(model, Module):
        raise checks.refuse_type("model", "a model of transformers", checks.describe(model), "pass the loaded model")
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    whole = any(name.endswith(("ForCausalLM", "ForConditionalGeneration")) for name in _names(model))
    # A config may have the settings of an indexer that the class of transformers does not have.
    has_indexer = any(name.rpartition(".")[2] == "indexer" for name, _ in model.named_modules())
    if not whole and _is_known_part(model):
        remedy = "this is a part of a model: attach the whole, with its language-model head"
    elif getattr(text, "index_topk", None) is None or not has_indexer:
        remedy = "this one has no sparse latent attention, so leave it as it is"
    else:
        remedy = "this one has an indexer too, but tamis does not support it yet"
    raise checks.refuse("model", f"one of {', '.join(_MODELS)}", type(model).__name__, remedy)


def _is_known_part(model: Any) -> bool:
    """Whether a module is of a file of transformers that defines a supported model."""
    files = [kind.__module__.rpartition(".")[2] for kind in type(model).__mro__]
    return any(name.removeprefix("modeling_") in MODELS for name in files)


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
