"""The models that `attach` supports, by name. Nothing is imported, so that the command line starts quickly."""

from collections.abc import Mapping
from typing import NamedTuple


class Named(NamedTuple):
    """The names of one model."""

    title: str
    short: str
    """As in `tamis generate --model`."""
    class_name: str
    """Its class in transformers."""


MODELS: Mapping[str, Named] = {
    "deepseek_v32": Named("DeepSeek-V3.2", "v32", "DeepseekV32ForCausalLM"),
    "glm_moe_dsa": Named("GLM-5.x", "glm", "GlmMoeDsaForCausalLM"),
    "deepseek_v4": Named("DeepSeek-V4", "v4", "DeepseekV4ForCausalLM"),
    "axk2": Named("A.X-K2", "axk2", "AXK2ForCausalLM"),
    "hy_v4": Named("Hy4", "hy4", "HYV4ForCausalLM"),
    "mistral_large4": Named("Mistral Large 4", "mistral-large4", "MistralLarge4ForConditionalGeneration"),
    "glm5_next": Named("GLM-5.3-Flash", "glm5-next", "Glm5NextForConditionalGeneration"),
}
"""By the `model_type` of their configs."""
