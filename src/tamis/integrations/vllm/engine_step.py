"""`EngineStep`: what the host knows about a step of vLLM."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from tamis import checks
from tamis.integrations.vllm.engine_batch import engine_batch
from tamis.integrations.vllm.held_requests import HeldRequests
from tamis.step.plan import Plan
from tamis.step.planner import Planner
from tamis.step.split import INT, BatchSplit, split_batch


@dataclass(frozen=True, eq=False)
class EngineStep:
    """The host's data about a step, and the device buffer with its request numbers."""

    common: Any
    """The engine's record."""
    planner: Planner
    query_lengths: INT
    """New tokens of each request."""
    host_lengths: Tensor
    """Context plus new tokens of each request, on the host; upper bounds for decodes."""
    prefilling: list[bool] | None
    tokens: int
    """New tokens."""
    rows: int
    """Token rows that the step may run, with padding."""
    ids: INT
    """The request of each new token; negative if only the device knows it."""
    held: HeldRequests
    """The device buffer with `ids`, until a later step of the builder overwrites it."""

    def check_held(self) -> None:
        """Refuse a step whose request numbers in the device buffer have been overwritten by a later step's.

        Engines use the record that was built last, for which this compares two references. A record of an earlier step
        is accepted as long as the buffer still holds the same numbers for its tokens.
        """
        if self.held.ids is self.ids:
            return
        now = self.held.ids[: self.tokens]
        if not np.array_equal(now, self.ids[: len(now)]) or self.ids[len(now) : self.tokens].any():
            remedy = "a builder's records share one buffer: run all layers of a step before building the next"
            raise checks.refuse("attn_metadata", "of the builder's latest step", "one that it overwrote", remedy)

    def split(self) -> BatchSplit:
        """Divide the requests into decodes and prefills."""
        limits = self.planner.limits
        return split_batch(
            self.query_lengths, limits.threshold, uniform=limits.uniform_decodes, prefilling=self.prefilling
        )

    def plan(self) -> Plan:
        """Plan the step, which fills the planner's buffers."""
        if self.ids.size and self.ids[0] < 0:
            remedy = "read the step's own fields, which are right"
            raise checks.refuse("attn_metadata", "of a step that the host knows, to have a plan", "another", remedy)
        return self.planner.plan(engine_batch(self.common, self.planner.limits, prefilling=self.prefilling))
