"""Stage `combine`: partial outputs (splits of one rank, or whole ranks) and a sink to the final output."""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.ops import old_library as library

OUTPUT_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Partials(NamedTuple):
    """Attention over S parts of the selected rows, each normalised by itself."""

    out: Tensor
    """float32 [S, T, H, V]"""
    lse: Tensor
    """float32 [S, T, H], natural logarithm; -inf where a part has no row."""
    max_logits: Tensor | None = None
    """float32 [S, T, H], the largest scaled logit; -inf where a part has no row."""


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

    Works for splits of one call as well as for the outputs of several context-parallel ranks stacked along S. A part
    with an lse of -inf is the identity of the merge, even if its output holds NaN.

    Args:
        partials: what `attend_slots` returned, or outputs and natural-log lses stacked by hand.
        sink: float32 [H]; scales the output by 1 / (1 + exp(sink - lse)). -inf has no effect, +inf gives zeros.
        out: [T, H, V] to write into; otherwise a new tensor of `dtype`.
        dtype: of a new output.
        lse_base: "e" or "2", for the returned lse only.
        backend: a name from `tamis backends`, or "auto".
    """
    check_combine_parts(partials, sink, out, dtype, lse_base, backend)
    if out is None:
        out = torch.empty(partials.out.shape[1:], dtype=dtype, device=partials.out.device)
    lse = library.combine_parts(partials.out, partials.lse, sink, out, backend)
    maxima = None if partials.max_logits is None else partials.max_logits.amax(0)
    return Attended(out, in_base(lse, lse_base), maxima)


def check_combine_parts(
    partials: Partials, sink: Tensor | None, out: Tensor | None, dtype: torch.dtype, lse_base: str, backend: str
) -> None:
    """Refuse what `combine_parts` refuses."""
    checks.instance("partials", partials, Partials)
    floats = (torch.float32, torch.float64)
    sizes = checks.tensor("partials.out", partials.out, "S T H V", (*floats, torch.bfloat16, torch.float16))
    device = partials.out.device
    splits, tokens, heads = sizes["S"], sizes["T"], sizes["H"]
    checks.tensor("partials.lse", partials.lse, "S T H", floats, device=device, S=splits, T=tokens, H=heads)
    if splits == 0:
        raise checks.refuse("partials.out", "at least one part", "none", "stack the parts along the first axis")
    if partials.max_logits is not None:
        top = partials.max_logits
        checks.tensor("partials.max_logits", top, "S T H", floats, device=device, S=splits, T=tokens, H=heads)
    check_sink(sink, heads, device)
    checks.option("lse_base", lse_base, ("e", "2"))
    checks.option("dtype", dtype, OUTPUT_DTYPES)
    if out is not None:
        check_output(out, (tokens, heads, sizes["V"]), device, *partials, sink)
    given = {"partials.out": partials.out, "partials.lse": partials.lse, "partials.max_logits": partials.max_logits}
    library.check_stage("combine", backend, device, **given, sink=sink)


def check_sink(sink: Tensor | None, heads: int, device: torch.device) -> None:
    """Refuse a sink that does not fit the heads, or holds NaN."""
    if sink is None:
        return
    checks.tensor("sink", sink, "H", (torch.float32,), H=heads, device=device, remedy="one per query head")
    if checks.visible(sink) and bool(sink.isnan().any()):
        raise checks.refuse("sink", "free of NaN", "NaN", "use -inf for a head without a sink")


def check_output(out: Tensor, shape: tuple[int, int, int], device: torch.device, *inputs: Tensor | None) -> None:
    """Refuse an output that does not fit, or that shares memory with what the same call reads."""
    tokens, heads, value_dim = shape
    checks.tensor("out", out, "T H V", OUTPUT_DTYPES, device=device, T=tokens, H=heads, V=value_dim)
    checks.writable("out", out, *inputs)


def in_base(lse: Tensor, base: Literal["e", "2"]) -> Tensor:
    """A natural-log lse in the asked base."""
    return lse / math.log(2) if base == "2" else lse
