"""Stage `combine`: merges partial outputs (of splits, or of context-parallel ranks) and applies the sink."""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.ops.combine import operations
from tamis.ops.combine.operations import CombineParts, contiguous_sink

OUTPUT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Partials(NamedTuple):
    """Attention over S splits of the selected rows, each normalised separately."""

    out: Tensor
    """float32 [S, T, H, V]"""
    lse: Tensor
    """float32 [S, T, H], natural logarithm; -inf where a split has no row."""
    max_logits: Tensor | None = None
    """float32 [S, T, H], the largest scaled logit; -inf where a split has no row."""


class Attended(NamedTuple):
    """The result of attention."""

    out: Tensor
    """[T, H, V]; zeros where nothing was selected."""
    lse: Tensor
    """float32 [T, H], without the sink; -inf where nothing was selected."""
    max_logits: Tensor | None = None
    """float32 [T, H], the largest scaled logit; -inf where nothing was selected."""


def combine_parts(
    partials: Partials,
    *,
    sink: Tensor | None = None,
    out: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    lse_base: Literal["e", "2"] = "e",
    backend: str = "auto",
) -> Attended:
    """Merge partial outputs by their lse and apply the sink.

    Works for splits of one call as well as for the outputs of several context-parallel ranks stacked along S. A split
    with an lse of -inf is the identity of the merge, even if its output holds NaN.

    Args:
        partials: the result of `attend_slots`, or outputs and natural-log lses that the caller has stacked.
        sink: float32 [H]; scales the output by 1 / (1 + exp(sink - lse)). -inf has no effect, +inf gives zeros.
        out: [T, H, V] to write into; otherwise a new tensor of `dtype`.
        dtype: the dtype of a new output.
        lse_base: "e" or "2", for the returned lse only.
        backend: a name from `tamis backends`, or "auto".
    """
    check_partials(partials)
    checks.option("lse_base", lse_base, ("e", "2"))
    checks.option("dtype", dtype, OUTPUT_DTYPES)
    check_sink(sink, partials.out.shape[2], partials.out.device)
    if out is None:
        out = torch.empty(partials.out.shape[1:], dtype=dtype, device=partials.out.device)
    else:
        check_output(out, partials.out.shape[1:], partials.out.device, *partials, sink)
    call = CombineParts(partials.out, partials.lse, contiguous_sink(sink), out, backend)
    operations.combine_parts.check(call, parts="partials.out", lses="partials.lse")
    lse = operations.combine_parts(call)
    max_logits = None if partials.max_logits is None else partials.max_logits.amax(0)
    return Attended(out, in_base(lse, lse_base), max_logits)


def check_partials(partials: Partials) -> None:
    """Refuse partial outputs whose tensors do not fit each other."""
    checks.instance("partials", partials, Partials)
    floats = (torch.float32, torch.float64)
    sizes = checks.tensor("partials.out", partials.out, "S T H V", (*floats, torch.bfloat16, torch.float16))
    given: dict[str, Any] = {"device": partials.out.device, "S": sizes["S"], "T": sizes["T"], "H": sizes["H"]}
    checks.tensor("partials.lse", partials.lse, "S T H", floats, **given)
    if sizes["S"] == 0:
        raise checks.refuse("partials.out", "at least one split", "none", "stack the splits along the first axis")
    if partials.max_logits is not None:
        checks.tensor("partials.max_logits", partials.max_logits, "S T H", floats, **given)
        if not torch.compiler.is_compiling():
            checks.no_gradient(**{"partials.max_logits": partials.max_logits})


def check_sink(sink: Tensor | None, heads: int, device: torch.device) -> None:
    """Refuse a sink that does not fit the heads, or holds NaN."""
    if sink is None:
        return
    checks.tensor("sink", sink, "H", (torch.float32,), H=heads, device=device, remedy="pass one per query head")
    if checks.visible(sink) and bool(sink.isnan().any()):
        raise checks.refuse("sink", "free of NaN", "NaN", "use -inf for a head without a sink")


def check_output(out: Tensor, shape: Sequence[int], device: torch.device, *inputs: Tensor | None) -> None:
    """Refuse an output that does not fit, or that shares memory with what the same call reads."""
    tokens, heads, value_dim = shape
    checks.tensor("out", out, "T H V", OUTPUT_DTYPES, device=device, T=tokens, H=heads, V=value_dim)
    checks.writable("out", out, *inputs)


def in_base(lse: Tensor, base: Literal["e", "2"]) -> Tensor:
    """A natural-log lse converted to the given base."""
    return lse / math.log(2) if base == "2" else lse
