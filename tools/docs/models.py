"""The table of models: their attention, the bytes of their caches, and where tamis runs them."""

from typing import NamedTuple

from tamis.cache.sizes import cache_sizes
from tamis.integrations.sglang.versions import SUPPORTED as SGLANG
from tamis.integrations.vllm.versions import SUPPORTED as VLLM
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
    Model("GLM-5.3-Flash", "64 heads, rows of 512 without rope, pooled keys", "-", ("-", "-", f"{NEWEST}, on Triton")),
    Model("DeepSeek-V4.1", "as V4, with shared entries", "-", ("-", "0.32, on Hopper", f"{NEWEST}, on Hopper")),
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
    width = f"{spec.latent_dim} + {spec.rope_dim}"
    attention = f"{spec.heads} heads, rows of {width}, {window}top-k {spec.topk}"
    token = cache_sizes(model.config).bytes_per_token
    return Model(model.title, attention, f"{float(token):,.0f} bytes", EVERYWHERE)


def _indexed(name: str) -> int:
    """The number of a layer that selects by an indexer."""
    config = KNOWN[name].config
    return next(layer for layer in range(config["num_hidden_layers"]) if LayerSpec.from_hf(config, layer).index_dim)
