"""What the two FlashInfer drop-ins share: checks of queries, factors, sinks and outputs, and the call of attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import output_dtype
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.integrations import _arguments
from tamis.ops import attend
from tamis.ops.attention import check_attend, check_query, check_scales, folded_scale
from tamis.ops.attention.operations import Attend
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.lse import LseForm

QUERY_DTYPES = (*checks.FLOATS, torch.float8_e4m3fn)
_SMALLEST, _LARGEST = 2.0**-126, torch.finfo(torch.float32).max
"""The normal numbers of float32."""


@dataclass(frozen=True, eq=False)
class Queries:
    """The arrangement of the query tokens."""

    lead: tuple[int, ...]
    """The leading sizes of the query: (B, q), or (T,) if it is flattened."""
    heads: int
    requests: int
    device: torch.device
    starts: Tensor | None
    """int32 [requests + 1], where each request begins in a flattened query."""

    @cached_property
    def request(self) -> Tensor:
        """int64 [tokens], the request of each token. It takes kernels, and few calls need it."""
        if self.starts is None:
            number = torch.arange(self.lead[0], dtype=torch.int64, device=self.device)
            return number.repeat_interleave(self.lead[1])
        number = torch.arange(self.tokens, dtype=torch.int32, device=self.device)
        found = torch.searchsorted(self.starts, number, right=True) - 1
        return found.clamp_(0, self.requests - 1)

    @property
    def tokens(self) -> int:
        """The number of query tokens."""
        return math.prod(self.lead)

    @property
    def axes(self) -> str:
        """The names of the leading axes, as `checks.tensor` takes them."""
        return "B q" if len(self.lead) == 2 else "T"

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each leading axis by name."""
        return dict(zip(self.axes.split(), self.lead, strict=True))


def arrange(query: Tensor, width: int, starts: Tensor | None, longest: int | None) -> Queries:
    """Check a query [B, q, H, D], or with `starts` [T, H, D], and how its tokens are divided among requests."""
    axes = "B q H D" if starts is None else "T H D"
    remedy = "D is kv_lora_rank + qk_rope_head_dim; [T, H, D] needs cum_seq_lens_q"
    heads = checks.tensor("query", query, axes, QUERY_DTYPES, remedy=remedy, D=width)["H"]
    _arguments.head_count("query", heads)
    checks.no_gradient(query=query)
    lead = tuple(query.shape[:-2])
    if starts is not None:
        return Queries(lead, heads, _count_requests(starts, longest, lead[0], query.device), query.device, starts)
    if longest is not None:
        raise checks.refuse("max_q_len", "None without cum_seq_lens_q", longest, "pass both or neither")
    return Queries(lead, heads, lead[0], query.device, None)


def _count_requests(starts: Tensor, longest: int | None, tokens: int, device: torch.device) -> int:
    """The number of requests of a flattened query."""
    length = checks.tensor("cum_seq_lens_q", starts, "B+1", (torch.int32,), device=device)["B+1"]
    remedy = f"it must begin with 0, never decrease, and end with the {tokens} query tokens"
    if length < 2:
        raise checks.refuse("cum_seq_lens_q", "at least two long", length, remedy)
    if longest is not None:
        checks.integer("max_q_len", longest, low=0)
    if device.type == "cpu":
        counts = starts.diff()
        if int(starts[0]) != 0 or int(starts[-1]) != tokens or int(counts.min()) < 0:
            raise checks.refuse("cum_seq_lens_q", f"a running sum from 0 to {tokens}", starts.tolist(), remedy)
        if longest is not None and int(counts.max()) > longest:
            raise checks.refuse("max_q_len", f">= {int(counts.max())}, the longest query", longest, "raise it")
    return length - 1


def factors(bmm1: float | Tensor, bmm2: float | Tensor, cache: PagedCache) -> tuple[float | Tensor, float | Tensor]:
    """Check the factors before and after the softmax. The cache's own scale is 1: it is part of both factors."""
    for name, value in (("bmm1_scale", bmm1), ("bmm2_scale", bmm2)):
        checks.scale_factor(name, value)
        if isinstance(value, Tensor) and value.device != cache.device:
            raise checks.refuse(name, f"on {cache.device}", f"a tensor on {value.device}", "keep it with the query")
    on_host = not isinstance(bmm2, Tensor) or bmm2.device.type == "cpu"
    if cache.layout.scales is not None and on_host and float(bmm2) != 1.0:
        raise checks.refuse("bmm2_scale", "1.0 with packed rows", float(bmm2), "their scales are in the cache")
    return _no_axes(bmm1), _no_axes(bmm2)


def _no_axes(factor: float | Tensor) -> float | Tensor:
    """A tensor of one element without its axes, so that it multiplies like a number."""
    return factor.reshape(()) if isinstance(factor, Tensor) else factor


def one_sink(sinks: Tensor | Sequence[Tensor] | None) -> Tensor | None:
    """The sinks as one tensor. FlashInfer annotates a list and passes a tensor to its kernels; both are accepted."""
    if sinks is None or isinstance(sinks, Tensor):
        return sinks
    if isinstance(sinks, list | tuple) and len(sinks) == 1:
        return one_sink(sinks[0])
    raise checks.refuse_type("sinks", "a float32 tensor [H]", checks.describe(sinks), "pass one tensor for all heads")


def output(out: Tensor | None, query: Tensor, queries: Queries, value_dim: int, *inputs: Tensor | None) -> Tensor:
    """The checked output, or a new one in the query's dtype (bf16 for e4m3). It must share no memory with the query and
    the inputs."""
    if out is None:
        dtype = output_dtype(query.dtype)
        return torch.empty(*queries.lead, queries.heads, value_dim, dtype=dtype, device=query.device)
    shape = (*queries.lead, queries.heads, value_dim)
    if not isinstance(out, Tensor) or out.dtype not in checks.FLOATS:
        raise checks.refuse_type(
            "out", "bfloat16, float16 or float32", checks.describe(out), "leave it out for a new tensor"
        )
    if tuple(out.shape) != shape or out.device != query.device:
        expected = f"of shape {list(shape)} on {query.device}"
        raise checks.refuse("out", expected, checks.describe(out), "leave it out for a new tensor")
    checks.writable("out", out, query, *inputs)
    return out


class Call(NamedTuple):
    """One call of attention, checked and not yet run."""

    attend: Attend
    """Its output is the caller's if nothing remains to be done with it."""
    target: Tensor | None
    """The caller's output [..., H, V], if attention writes to a float32 tensor in its place."""
    after: float | Tensor
    """What the float32 output is multiplied with on its way to the target."""

    def run(self) -> Tensor:
        """Write the output, and return the lse [tokens, H] in base 2."""
        q, selections, scale, q_scale, _, sink, out, _, _, _ = self.attend
        # The stage's function remembers calls on a device, so it runs faster than the operation that was checked.
        factor = 1.0 if q_scale is None else q_scale
        found = attend(
            q, selections, scale=scale, q_scale=factor, value_dim=out.shape[2], sink=sink, lse_base="2", out=out
        )
        if self.target is not None:
            self.target.copy_(self.attend.out.mul_(self.after).view(self.target.shape))
        return found.lse


def prepare(
    query: Tensor,
    selections: list[Selection],
    scales: tuple[float | Tensor, float | Tensor],
    sink: Tensor | None,
    out: Tensor,
) -> Call:
    """The attention of queries [..., H, D] into `out` [..., H, V], under factors before and after the softmax.

    Everything is checked and nothing is written. Attention writes into `out` itself, except where the factor after the
    softmax is none that a cache can have, or where the leading axes of `out` cannot be joined.
    """
    tokens, heads, value_dim = math.prod(query.shape[:-2]), query.shape[-2], out.shape[-1]
    selections, before, after = _in_cache(selections, *scales)
    rows = _joined(out)
    into = rows
    if into is None or isinstance(after, Tensor) or after != 1.0:
        # The product is rounded once, at the end.
        into = torch.empty((tokens, heads, value_dim), dtype=torch.float32, device=query.device)
    q = query.reshape(tokens, heads, query.shape[-1])
    check_query(q, selections, value_dim)
    check_scales(1.0, before, q.device)
    factor = folded_scale(1.0, before)
    call = Attend(q, selections, *factor, None, contiguous_sink(sink), into, False, LseForm(base_2=True), "auto")
    check_attend(call)
    return Call(call, None if into is rows else out, after)


def _in_cache(
    selections: list[Selection], before: float | Tensor, after: float | Tensor
) -> tuple[list[Selection], float | Tensor, float | Tensor]:
    """The factor after the softmax as the scale of e4m3 caches, which then scales their keys too, and the factors that
    remain. For other caches everything stays as it is."""
    one = not isinstance(after, Tensor) and after == 1.0
    if one or any(selection.cache.layout.scale_mode != "tensor" for selection in selections):
        return selections, before, after
    if isinstance(before, Tensor) or isinstance(after, Tensor):
        device = selections[0].cache.device
        one_more, two = (
            value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float32, device=device)
            for value in (before, after)
        )
        rest: float | Tensor = one_more / two
    else:
        # As the tensors would be divided, so that both forms give the same bits.
        with np.errstate(over="ignore", under="ignore"):
            rest = float(np.float32(before) / np.float32(after))
        if not _SMALLEST <= rest <= _LARGEST:
            return selections, before, after
    found = []
    for selection in selections:
        cache = PagedCache.rebuilt(selection.cache.storage, selection.cache.layout, after)
        found.append(Selection(cache, selection.slots, selection.lengths))
    return found, rest, 1.0


def _joined(out: Tensor) -> Tensor | None:
    """A view [tokens, H, V] of an output; None if its leading axes cannot be joined without a copy."""
    if out.dim() == 3:
        return out
    try:
        return out.view(-1, *out.shape[-2:]) if out.numel() else out.flatten(0, 1)
    except RuntimeError:
        return None
