"""Reads settings from Hugging Face configs. A config may come from anywhere, so each setting is checked."""

from collections.abc import Mapping, Sequence
from typing import Any

from tamis import checks

GLM5_NEXT, HY4, MISTRAL_LARGE4 = "glm5_next_text", "hy_v4", "mistral_large4_text"
"""Types of models whose settings have defaults of their own."""
MOST_LAYERS = 10_000
"""Layers are looked at one by one, here and in transformers, so a config that claims billions would never end."""


def fields_of(config: Any) -> Mapping[str, Any]:
    """The settings of a config object or dictionary; those of its language model if the config has others besides."""
    if isinstance(config, Mapping):
        text = config.get("text_config")
        if not isinstance(text, Mapping) or "index_topk" in config:
            return config
        # The type of the part decides its defaults, and follows from the whole's where it is left out.
        whole_type = config.get("model_type")
        return text if "model_type" in text or whole_type is None else {"model_type": f"{whole_type}_text", **text}
    to_dict = getattr(config, "to_dict", None)
    found = to_dict() if callable(to_dict) and not isinstance(config, type) else None
    if not isinstance(found, Mapping):
        expected = "a Hugging Face config or its dictionary"
        raise checks.refuse_type("config", expected, checks.describe(config), "pass model.config")
    return fields_of(found)


def whole(fields: Mapping[str, Any], name: str, *, low: int = 1, default: int | None = None) -> int:
    """An integer setting, which may be written as 64.0. Without a default, an absent setting is refused."""
    value = fields.get(name)
    if value is None:
        if default is None:
            raise checks.refuse("config", f"one with {name!r}", "none", "this is not a sparse-MLA model config")
        return default
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return checks.integer(f"config.{name}", value, low=low)


def real(fields: Mapping[str, Any], name: str, default: float, *, low: float | None = None) -> float:
    """A numeric setting, which must be positive, or at least `low` if that is given."""
    value = fields.get(name)
    if value is None:
        return default
    return (
        checks.positive_number(f"config.{name}", value)
        if low is None
        else checks.number(f"config.{name}", value, low=low)
    )


def group(fields: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A nested dictionary of settings; empty if it is absent."""
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise checks.refuse_type(f"config.{name}", "a dictionary", checks.describe(value), "fix the config")
    return value


def listed(fields: Mapping[str, Any], name: str) -> Sequence[Any] | None:
    """A list with one setting per layer, or a text with one letter per layer; None if it is absent."""
    value = fields.get(name)
    if value is not None and not isinstance(value, list | tuple | str):
        raise checks.refuse_type(f"config.{name}", "a list", checks.describe(value), "fix the config")
    return value


def is_linear(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer has linear attention, which keeps a state and no rows (KDA): in GLM-5.3-Flash three of four
    layers if the config does not list them."""
    names = listed(fields, "layer_types")
    if names is None and fields.get("model_type") == GLM5_NEXT:
        return layer < whole(fields, "num_hidden_layers", low=0, default=layer + 1) and layer % 4 != 3
    return names is not None and layer < len(names) and names[layer] == "linear_attention"


def is_v32(fields: Mapping[str, Any]) -> bool:
    """Whether a config is of the V3.2 family, which has a latent rank; V4's heads have no part that only they have."""
    if fields.get("qk_nope_head_dim") is not None:
        return whole(fields, "kv_lora_rank") > 0
    return whole(fields, "kv_lora_rank", low=0, default=0) > 0


def v32_rope_width(fields: Mapping[str, Any]) -> int:
    """The number of rotated columns of a head of the V3.2 family. Only GLM-5.3-Flash has none unless it says so."""
    return whole(fields, "qk_rope_head_dim", low=0, default=0 if fields.get("model_type") == GLM5_NEXT else None)


def rope_width(fields: Mapping[str, Any]) -> int:
    """The number of rotated columns of a V4 head."""
    given = whole(fields, "qk_rope_head_dim", low=0, default=0)
    return given or int(whole(fields, "head_dim") * real(fields, "partial_rotary_factor", 0.125))


def has_rope(fields: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of the V3.2 family has a rope: all of them but some of Mistral Large 4."""
    flags = listed(fields, "no_rope_layers")
    if flags is not None:
        return (
            layer >= len(flags) or checks.integer(f"config.no_rope_layers[{layer}]", flags[layer], low=0, high=1) == 1
        )
    usual = 4 if fields.get("model_type") == MISTRAL_LARGE4 else 0
    interval = whole(fields, "no_rope_layer_interval", low=0, default=usual)
    return interval == 0 or (layer + 1) % interval != 0
