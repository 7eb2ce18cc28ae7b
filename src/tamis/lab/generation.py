"""Loads or makes a Hugging Face model and generates from a prompt token by token, for `tamis generate`."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tamis import checks
from tamis.integrations.hf.layers import CacheKind
from tamis.integrations.hf.names import MODELS, Named
from tamis.integrations.transformers import attach, detach
from tamis.model import hf_config

_DEFAULT_PROMPT = 256

_TINY: dict[str, Any] = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_hidden_layers": 3,
    "q_lora_rank": 64,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "vocab_size": 4096,
    "pad_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.1,
}
_TINY_V32 = _TINY | {
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "kv_lora_rank": 512,
    "intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
_TINY_V4 = _TINY | {
    "head_dim": 512,
    "partial_rotary_factor": 1 / 8,
    "o_groups": 2,
    "o_lora_rank": 64,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["moe"] * 3,
    "hc_mult": 2,
    "num_nextn_predict_layers": 0,
    "rope_parameters": {"rope_type": "default"},
}
_TINY_MISTRAL = {
    # Every second layer has no rope, and the last two attend to the rows of the first two.
    "text_config": _TINY_V32
    | {
        "model_type": "mistral_large4_text",
        "num_hidden_layers": 4,
        "no_rope_layer_interval": 2,
        "kv_source_layers": [0, 1, 0, 1],
        "indexer_types": ["full", "full", "shared", "full"],
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 64,
        "patch_size": 16,
    },
}
_TINY_GLM5_NEXT = _TINY_V32 | {
    "num_hidden_layers": 4,
    "qk_rope_head_dim": 0,
    "index_kpool": 4,
    "layer_types": ["linear_attention", "indexed_attention"] * 2,
    "linear_num_heads": 4,
    "linear_head_dim": 32,
    "mlp_layer_types": ["dense"] * 4,
    "hc_mult": 2,
}
_TINY_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 32,
    "out_hidden_size": 256,
    "projection_intermediate_size": 32,
}
_SIZES: dict[str, dict[str, Any]] = {
    "v32": _TINY_V32,
    "glm": _TINY_V32 | {"indexer_types": ["full", "shared", "full"]},
    "v4": _TINY_V4,
    "axk2": _TINY_V32 | {"kv_lora_rank": 128, "qk_rope_head_dim": 32, "n_group": None, "topk_group": None},
    "hy4": _TINY_V32 | {"hc_mult": 2, "indexer_types": ["full", "shared", "full"]},
    "mistral-large4": _TINY_MISTRAL,
    "glm5-next": {"text_config": _TINY_GLM5_NEXT, "vision_config": _TINY_VISION},
}


def make_model(name: str, device: torch.device, seed: int) -> Any:
    """A tiny model with random weights whose cached rows have their full widths, by its short name."""
    torch.manual_seed(seed)
    kind = _model_class("--model", next(known for known in MODELS.values() if known.short == name))
    return kind(kind.config_class(**_SIZES[name])).eval().to(device)


def _model_class(option: str, named: Named) -> Any:
    """A model's class. Older versions of transformers do not have every model."""
    found = getattr(transformers, named.class_name, None)
    if found is None:
        expected = f"a model of transformers {transformers.__version__}"
        raise checks.refuse(option, expected, named.title, "install a newer transformers")
    return found


def load_model(checkpoint: Path, device: torch.device) -> tuple[Any, Any]:
    """A local checkpoint's model, and its tokenizer if it has one.

    Nothing is downloaded and no code of the checkpoint is run: weights are safetensors and not pickles, Python files
    are ignored, and attention and experts are those of transformers whatever the config names, since it could name
    kernels that transformers would download.
    """
    if not (checkpoint / "config.json").is_file():
        raise checks.refuse("--checkpoint", "a directory with a config.json", str(checkpoint), "save a model there")
    _check_config(checkpoint / "config.json")
    local = {"local_files_only": True, "trust_remote_code": False}
    with quiet():
        kind = transformers.PreTrainedConfig.get_config_dict(checkpoint, local_files_only=True)[0].get("model_type")
        if not isinstance(kind, str) or kind not in MODELS:
            expected = f"of a model of type {', '.join(MODELS)}"
            raise checks.refuse("--checkpoint", expected, repr(kind), "these are the models that `attach` supports")
        model, loaded = _model_class("--checkpoint", MODELS[kind]).from_pretrained(
            checkpoint,
            # Not every CPU supports 16-bit matrix products.
            dtype=torch.float32 if device.type == "cpu" else "auto",
            use_safetensors=True,
            attn_implementation="eager",
            experts_implementation=None,
            use_kernels=False,
            output_loading_info=True,
            **local,
        )
        if missing := sorted(loaded["missing_keys"]):
            # transformers would replace missing weights with random numbers.
            found = f"one without {len(missing)} of them, such as {missing[0]}"
            raise checks.refuse("--checkpoint", "a checkpoint with all weights", found, "copy the whole checkpoint")
        tokenizer = None
        if any((checkpoint / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint, **local)
            except ValueError as error:
                if "trust_remote_code" not in str(error):
                    raise
                expected, found = "a checkpoint without code of its own", "a tokenizer that is a Python file"
                remedy = "tamis never runs it: use --prompt-ids with a copy that has no tokenizer"
                raise checks.refuse("--checkpoint", expected, found, remedy) from error
    return model.eval().to(device), tokenizer


def _check_config(file: Path) -> None:
    """Refuse what transformers would not refuse in words, or not before it has made a list of billions of layers."""
    config = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise checks.refuse("--checkpoint", "a directory whose config.json has fields", type(config).__name__)
    for fields in (config, config.get("text_config")):
        layers = fields.get("num_hidden_layers") if isinstance(fields, dict) else None
        if isinstance(layers, int) and layers > hf_config.MOST_LAYERS:
            raise checks.refuse("--checkpoint", f"a model of up to {hf_config.MOST_LAYERS} layers", layers)


@contextmanager
def quiet() -> Iterator[None]:
    """Within it, transformers logs only errors, since its warnings quote untrusted texts of the checkpoint."""
    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def prompt_ids(
    model: Any, tokenizer: Any, *, text: str | None, ids: list[int] | None, count: int | None, seed: int
) -> list[int]:
    """Token ids from a text, from given ids, or at random."""
    vocab: int = model.config.get_text_config().vocab_size
    if text is not None:
        if tokenizer is None:
            which = "checkpoint" if model.name_or_path else "random model"
            remedy = "Use --prompt-ids, or --checkpoint with a tokenizer."
            raise ValueError(f"--prompt needs a tokenizer, but the {which} has none. {remedy}")
        ids = tokenizer(text)["input_ids"]
    if ids is None:
        count = checks.integer("--prompt-tokens", _DEFAULT_PROMPT if count is None else count, low=1)
        generator = torch.Generator("cpu").manual_seed(seed)
        return torch.randint(vocab, (count,), generator=generator, dtype=torch.int64, device="cpu").tolist()
    option = "--prompt-ids" if text is None else "--prompt"
    if not ids:
        raise ValueError(f"{option}: the prompt has no tokens; give at least one.")
    outside = [token for token in ids if not 0 <= token < vocab]
    if outside:
        raise ValueError(f"{option}: token id {outside[0]} is outside the vocabulary (0-{vocab - 1}).")
    return ids


@dataclass
class Generated:
    """The generated tokens and their times."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    text: str | None = None
    """The generated text; None without a tokenizer."""
    prefill_seconds: float = 0.0
    """Time to the first token."""
    decode_seconds: float = 0.0
    """Time from the first to the last token."""

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of decoding; None if there is only one token."""
        later = len(self.tokens) - 1
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else None


class _Streamer:
    """Receives tokens from `generate` one step at a time, the prompt first."""

    def __init__(self, result: Generated, tokenizer: Any, report: Callable[[str, int], None]) -> None:
        self.result, self.tokenizer, self.report = result, tokenizer, report
        self.began = self.first = time.monotonic()
        self.started = False

    def put(self, value: Tensor) -> None:
        if not self.started:
            self.started = True
            return
        result, now = self.result, time.monotonic()
        result.tokens += value.flatten().tolist()
        if len(result.tokens) == 1:
            self.first, result.prefill_seconds = now, now - self.began
        result.decode_seconds = now - self.first
        self.report(self._new_text(), len(result.tokens))

    def end(self) -> None:
        """Nothing is left to report: only an incomplete character may be pending."""

    def _new_text(self) -> str:
        """The text that the newest token adds; empty for the first bytes of a character."""
        result = self.result
        if self.tokenizer is None:
            return f"{result.tokens[-1]} "
        before, text = result.text or "", self.tokenizer.decode(result.tokens)
        if text.endswith("\ufffd"):  # the next tokens complete the character
            return ""
        result.text = text
        return str(text[len(before) :])


def generate(
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    *,
    cache: CacheKind,
    backend: str,
    max_new_tokens: int,
    report: Callable[[str, int], None],
) -> Generated:
    """Continue a prompt greedily with the model attached.

    `report` is called after each token with the new text and the number of tokens so far.
    """
    result = Generated(prompt)
    ids = torch.tensor([prompt], dtype=torch.int64, device=model.device)
    attach(model, cache=cache, backend=backend)
    try:
        with quiet():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_new_tokens,
                do_sample=False,
                streamer=_Streamer(result, tokenizer, report),
            )
    finally:
        detach(model)
    return result
