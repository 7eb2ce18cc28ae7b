"""`Case`: a step that ranks divide among them."""

from dataclasses import dataclass, field
from typing import Any

import engine_standin as engine
from engine_standin import Step


@dataclass(frozen=True)
class Case:
    """One step, and how ranks divide it."""

    lengths: tuple[int, ...]
    """Context and new tokens of each request, decodes first."""
    queries: tuple[int, ...]
    """New tokens of each request."""
    prompts: int = 0
    """How many of the last requests are parts of prompts."""
    tensor: int = 1
    decode: int = 1
    prefill: int = 1
    interleave: int = 1
    cache_dtype: str = "bfloat16"
    heads: int = 4
    drafts: int = 0
    first_only: int | None = None
    """A token that selects nothing but the request's first row, which one rank holds."""
    nothing: int | None = None
    """A token that selects nothing."""
    late_interleave: bool = False
    """Whether vLLM decides about the interleave size only after its layers are built, as its workers may."""
    generic: bool = False
    """Whether vLLM's layer of all MLA models runs instead of the one of V3.2."""
    index: bool = False
    """Whether the layer has an indexer of its own."""
    options: dict[str, Any] = field(default_factory=dict, hash=False)
    """More fields of vLLM's parallel config."""

    @property
    def ranks(self) -> int:
        """How many processes there are."""
        return self.tensor * self.prefill

    def step(self) -> Step:
        """The step's data, the same on every rank."""
        step = engine.make_step(self.lengths, self.queries, self.heads)
        for token, only in ((self.first_only, 0), (self.nothing, -1)):
            if token is not None:
                step.positions[token] = -1
                step.positions[token, 3] = only
        return step
