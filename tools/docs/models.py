"""The table of models: their attention, the bytes of their caches, and where tamis runs them."""

from typing import NamedTuple

from tamis.cache.sizes import cache_sizes
from tamis.integrations.sglang.versions import SUPPORTED as SGLANG
from tamis.integrations.vllm.versions import SUPPORTED as VLLM
from tamis.model.hf_config import is_linear
from tamis.model.known import KNOWN
from tamis.model.spec import LayerSpec
from tools.docs.markdown import table

EVERYWHERE = ("`attach`", f"{VLLM[0]} to {VLLM[-1]}", ", ".join(SGLANG))
NEWEST = SGLANG[-1]


class Model(NamedTuple):
    """A line of the table."""

    title: str
    attention: str
    token: str
    """What a token takes in the caches of all layers, in FP8."""
    where: tuple[str, str, str]
    """Versions of transformers, vLLM and SGLang, or a dash."""


PARTLY = (
    Model("DeepSeek-V4.1", "as V4, with shared entries", "-", ("-", "-", f"{NEWEST}, on Hopper")),
    Model("Hy4", "rows of 512 + 64, sinks", "-", ("-", "-", f"{NEWEST}, bf16 cache")),
)
"""Models of which an engine prepares the selection, so that tamis runs their attention there and nowhere else."""


def models() -> str:
    """A line per model."""
    lines = [
        (model.title, model.attention, model.token, *model.where)
        for model in (*(_known(name) for name in KNOWN), *PARTLY)
    ]
    header = ("model", "attention", "FP8 cache per token, all layers", "transformers", "vLLM", "SGLang")
    return table(header, lines, "llrlll")


def _known(name: str) -> Model:
    model = KNOWN[name]
    spec = LayerSpec.from_hf(model.config, _indexed(name))
    window = f"window {spec.window} + " if spec.window else ""
    width = f"{spec.latent_dim} + {spec.rope_dim}" if spec.rope_dim else f"{spec.latent_dim} without rope"
    pooled = f" in groups of {spec.kpool}" if spec.kpool > 1 else ""
    attention = f"{spec.heads} heads, rows of {width}, {window}top-k {spec.topk}{pooled}"
    token = cache_sizes(model.config).bytes_per_token
    where = EVERYWHERE if spec.kpool == 1 else (EVERYWHERE[0], VLLM[-1], NEWEST)
    return Model(model.title, attention, f"{float(token):,.0f} bytes", where)


def _indexed(name: str) -> int:
    """The number of a layer that selects by an indexer."""
    config = KNOWN[name].config
    layers = (layer for layer in range(config["num_hidden_layers"]) if not is_linear(config, layer))
    return next(layer for layer in layers if LayerSpec.from_hf(config, layer).index_dim)
