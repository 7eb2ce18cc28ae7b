"""The sizes of the demonstration's models and its workload, as plain numbers."""

from dataclasses import dataclass
from typing import Literal

from tamis import checks
from tamis.model.recipe import IndexRecipe
from tamis.model.rope import Rope
from tamis.model.spec import LayerKind, LayerSpec
from tamis.step.plan import Mode

CACHES = ("v32-fp8", "v32-bf16", "v32-fp32", "v4-fp8", "v4-bf16", "v4-fp32")
CacheName = Literal["v32-fp8", "v32-bf16", "v32-fp32", "v4-fp8", "v4-bf16", "v4-fp32"]

ERROR_BOUNDS = {name: {"fp8": 6e-2, "bf16": 1e-2, "fp32": 1e-4}[name.split("-")[1]] for name in CACHES}
"""Largest relative error of attention outputs that storing rows in a format may cause. e4m3 keeps three mantissa bits:
2.4 % error per value. It reaches the output through the values, and through the attention weights times 2.4, the
standard deviation of the latent share of the logits: 0.024 * sqrt(1 + 2.4**2) = 0.062 at most. Normalising the weights
removes some of it."""


@dataclass(frozen=True)
class ModelShape:
    """A V3.2 model made small where size does not matter, and kept at full size where bytes do (512 + 64 rows)."""

    layers: int = 3
    hidden: int = 256
    heads: int = 8
    latent: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128
    q_lora: int = 192
    index_heads: int = 8
    index_dim: int = 128
    mlp: int = 512
    vocab: int = 1000
    topk: int = 128
    yarn_factor: float = 1.0
    """Above 1, YaRN stretches the rotary frequencies from an original length of 4096 and raises the softmax scale."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no model."""
        checks.integer("layers", self.layers, low=1, high=64)
        checks.integer("heads", self.heads, low=1, high=128)
        checks.integer("topk", self.topk, low=1)
        checks.positive_number("yarn_factor", self.yarn_factor)

    @property
    def rotary(self) -> Rope:
        """Rotary settings, the same for attention and indexer."""
        return Rope(self.rope, factor=self.yarn_factor, mscale=1.0, mscale_all_dim=1.0)

    @property
    def recipe(self) -> IndexRecipe:
        """The indexer's recipe: unlike in attention, rotary columns come first and are in half-split pairs."""
        return IndexRecipe(self.rope)

    @property
    def spec(self) -> LayerSpec:
        """What every layer's attention computes."""
        return LayerSpec(
            self.heads,
            self.latent,
            self.rope,
            self.latent,
            self.rotary.softmax_scale(self.nope + self.rope),
            topk=self.topk,
            index_heads=self.index_heads,
            index_dim=self.index_dim,
        )


@dataclass(frozen=True)
class V4Shape:
    """A V4 model made small where size does not matter, and kept at full size where bytes do (448 + 64 rows)."""

    layers: int = 3
    """The first layer has a window only; the others alternate between overlapping spans with an indexer and plain
    spans."""
    hidden: int = 256
    heads: int = 8
    latent: int = 448
    rope: int = 64
    q_lora: int = 192
    o_groups: int = 2
    o_lora: int = 128
    index_heads: int = 8
    index_dim: int = 128
    window: int = 128
    overlapping: int = 4
    plain: int = 128
    mlp: int = 512
    vocab: int = 1000
    topk: int = 128
    """Entries that the indexer selects per token."""
    yarn_factor: float = 1.0
    """Above 1, YaRN stretches the rotary frequencies of compressed layers from an original length of 4096."""

    def __post_init__(self) -> None:
        """Refuse numbers that make no model."""
        checks.integer("layers", self.layers, low=1, high=64)
        groups = checks.integer("o_groups", self.o_groups, low=1)
        checks.integer("heads", self.heads, low=1, high=128)
        if self.heads % groups:
            raise checks.refuse("heads", f"a multiple of the {groups} output groups", self.heads, "choose such")
        checks.integer("topk", self.topk, low=1)
        checks.positive_number("yarn_factor", self.yarn_factor)

    @property
    def width(self) -> int:
        """Width of a row and of a query head."""
        return self.latent + self.rope

    def spec(self, layer: int) -> LayerSpec:
        """What one layer's attention computes."""
        kind: LayerKind = "window" if layer == 0 else "overlapping" if layer % 2 else "plain"
        indexed = kind == "overlapping"
        return LayerSpec(
            self.heads,
            self.latent,
            self.rope,
            self.width,
            self.width**-0.5,
            topk=self.topk if indexed else None,
            index_heads=self.index_heads if indexed else 0,
            index_dim=self.index_dim if indexed else 0,
            window=self.window,
            compress={"window": 1, "overlapping": self.overlapping, "plain": self.plain}[kind],
            sink=True,
            kind=kind,
        )

    def rotary(self, layer: int) -> Rope:
        """Rotary settings of one layer. Layers without compression have their own theta and no YaRN."""
        if self.spec(layer).kind == "window":
            return Rope(self.rope)
        return Rope(self.rope, theta=160000.0, factor=self.yarn_factor)


@dataclass(frozen=True)
class Workload:
    """The requests to serve, and how to serve them."""

    requests: int = 8
    max_prompt: int = 1600
    """Prompts are spread evenly from a ninth of this length up to it."""
    new_tokens: int = 24
    """Tokens that each request generates."""
    token_budget: int = 256
    """Most tokens per step: longer prompts are prefilled in chunks."""
    arrival_gap: int = 2
    """Steps between the arrivals of two requests."""
    page_size: int = 64
    cache: CacheName = "v32-fp8"
    mode: Mode = "auto"
    device: str = "cpu"
    seed: int = 0
    check: bool = True
    """Whether to compute dense and exact attention for comparison."""

    def __post_init__(self) -> None:
        """Refuse work that cannot be done."""
        checks.integer("requests", self.requests, low=1, high=4096)
        checks.integer("max_prompt", self.max_prompt, low=1)
        checks.integer("new_tokens", self.new_tokens, low=1)
        checks.integer("arrival_gap", self.arrival_gap, low=0)
        checks.integer("page_size", self.page_size, low=1)
        checks.option("cache", self.cache, CACHES)
        checks.integer("seed", self.seed, low=0, high=2**63 - 1)
        if checks.integer("token_budget", self.token_budget, low=1) < self.requests:
            expected = f"at least the number of requests ({self.requests})"
            remedy = "every running request decodes one token per step"
            raise checks.refuse("token_budget", expected, self.token_budget, remedy)

    @property
    def prompt_lengths(self) -> list[int]:
        """The lengths of the prompts in ascending order."""
        shortest = max(1, self.max_prompt // 9)
        span, steps = self.max_prompt - shortest, max(1, self.requests - 1)
        return [shortest + span * number // steps for number in range(self.requests)]
