"""The outcome of a run: what was served, which checks failed, and everything as plain data for JSON."""

from dataclasses import asdict, dataclass
from typing import Any, Self

import torch

from tamis.cache.layout import Layout
from tamis.lab.demo.shape import ERROR_BOUNDS, ModelShape, V4Shape, Workload
from tamis.lab.testing.probe import LayerErrors


@dataclass(frozen=True)
class RowSize:
    """Bytes that one token takes in one layer."""

    what: str
    layout: str
    stored: float
    bf16: float
    """The same numbers in bf16."""

    @classmethod
    def of(cls, what: str, layout: Layout, tokens: int = 1) -> Self:
        """A row that stands for some tokens."""
        stored, bf16 = layout.row_bytes, layout.width * torch.bfloat16.itemsize
        return cls(what, layout.name, stored / tokens if tokens > 1 else stored, bf16 / tokens if tokens > 1 else bf16)

    @property
    def ratio(self) -> float:
        """Stored bytes against bf16."""
        return self.stored / self.bf16


@dataclass(frozen=True)
class Served:
    """What happened in a run."""

    mode: str
    steps: dict[str, int]
    """How many steps had only prefills, both kinds, and only decodes."""
    prefill_tokens: int
    decode_tokens: int
    seconds: float
    """Of serving, without the comparison."""
    check_seconds: float
    generated: list[list[int]]
    """Per request, in order of arrival."""
    tokens_attended: int
    tokens_in_context: int
    """Summed over all tokens that ran, per layer."""
    pages: int
    """Pages that requests could use."""
    peak_pages: int
    free_pages: int
    """At the end."""
    latent: Layout
    sizes: list[RowSize]
    """Of what is kept of a token."""
    errors: list[LayerErrors] | None
    """Per layer; None if nothing was compared."""

    @property
    def tokens(self) -> int:
        """Tokens that ran."""
        return self.prefill_tokens + self.decode_tokens


def failed_checks(served: Served, workload: Workload) -> list[str]:
    """One line for each thing that is not as it must be."""
    failures = []
    bound = ERROR_BOUNDS[workload.cache]
    for layer, errors in enumerate(served.errors or []):
        # Written so that NaN fails too.
        if not errors.quantisation_error <= bound:
            failures.append(
                f"layer {layer}: quantisation error {errors.quantisation_error:.2e} exceeds {bound:.0e}, "
                f"the bound for {workload.cache}"
            )
    if served.free_pages != served.pages:
        failures.append(f"{served.pages - served.free_pages} of {served.pages} pages were not given back")
    short = sum(len(tokens) != workload.new_tokens for tokens in served.generated)
    if short:
        failures.append(f"{short} requests did not get their {workload.new_tokens} tokens")
    return failures


def as_data(shape: ModelShape | V4Shape, workload: Workload, served: Served) -> dict[str, Any]:
    """Everything that the tables show and the generated tokens, ready for JSON."""
    failures = failed_checks(served, workload)
    return {
        "model": asdict(shape),
        "workload": asdict(workload) | {"prompt_lengths": workload.prompt_lengths},
        "mode": served.mode,
        "steps": served.steps | {"total": sum(served.steps.values())},
        "tokens": {
            "prefill": served.prefill_tokens,
            "decode": served.decode_tokens,
            "total": served.tokens,
            "attended": served.tokens_attended,
            "in_context": served.tokens_in_context,
            "attended_share": served.tokens_attended / served.tokens_in_context,
        },
        "layers": None if served.errors is None else [asdict(errors) for errors in served.errors],
        "quantisation_error_bound": ERROR_BOUNDS[workload.cache],
        "cache_bytes_per_token_and_layer": [asdict(size) | {"ratio": size.ratio} for size in served.sizes],
        "pages": {"total": served.pages, "peak": served.peak_pages, "free_at_end": served.free_pages},
        "seconds": {"serving": served.seconds, "checking": served.check_seconds},
        "tokens_per_second": served.tokens / served.seconds,
        "generated": served.generated,
        "failures": failures,
        "ok": not failures,
    }
