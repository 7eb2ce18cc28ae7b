"""The outcome of a run: counts, failed checks, and both as plain data for JSON."""

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
    """Bytes of the same values in bf16."""

    @classmethod
    def of(cls, what: str, layout: Layout, tokens: int = 1) -> Self:
        """The size per token of a row that holds `tokens` tokens."""
        stored, bf16 = layout.row_bytes, layout.width * torch.bfloat16.itemsize
        return cls(what, layout.name, stored / tokens if tokens > 1 else stored, bf16 / tokens if tokens > 1 else bf16)

    @property
    def ratio(self) -> float:
        """Stored bytes divided by those of bf16."""
        return self.stored / self.bf16


@dataclass(frozen=True)
class Served:
    """Counts and results of a run."""

    mode: str
    steps: dict[str, int]
    """The number of steps with only prefills, with both kinds, and with only decodes."""
    prefill_tokens: int
    decode_tokens: int
    seconds: float
    """Time of serving, without the comparison."""
    check_seconds: float
    generated: list[list[int]]
    """Generated tokens per request, in order of arrival."""
    tokens_attended: int
    tokens_in_context: int
    """Visible tokens in one layer, summed over all tokens that ran."""
    pages: int
    """The number of pages that requests could use."""
    peak_pages: int
    free_pages: int
    """The number of free pages at the end."""
    latent: Layout
    sizes: list[RowSize]
    """The sizes of the rows that are stored per token."""
    errors: list[LayerErrors] | None
    """Errors per layer; None if nothing was compared."""

    @property
    def tokens(self) -> int:
        """The number of tokens that ran."""
        return self.prefill_tokens + self.decode_tokens


def failed_checks(served: Served, workload: Workload) -> list[str]:
    """One line for each failed check."""
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
    """The contents of the tables and the generated tokens as plain data for JSON."""
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
