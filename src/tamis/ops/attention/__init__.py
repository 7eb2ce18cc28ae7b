"""Stage `attend`: attention of queries over selected cache rows, in splits (`attend_slots`) or merged (`attend`)."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import output_dtype
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.ops import memory
from tamis.ops.attention import operations
from tamis.ops.attention.operations import Attend, AttendSlots
from tamis.ops.combine import Attended, Partials, check_output, check_sink
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.lse import LseForm
from tamis.ops.pairs import join_pair

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)
MAX_HEADS = 128
MAX_SPLITS = 2**16 - 1
"""The limit of a CUDA grid along its y and z axes."""


def attend_slots(
    q: Tensor | tuple[Tensor, Tensor],
    selections: Selection | Sequence[Selection],
    *,
    scale: float,
    value_dim: int,
    q_scale: float | Tensor = 1.0,
    splits: int | None = None,
    backend: str = "auto",
) -> Partials:
    """Attention of each query token over its selected rows, in `splits` that `combine_parts` merges.

    The columns of all selections, one after the other, are divided into `splits` equal ranges; each has its own
    softmax. The arguments are those of `attend`. Under torch.compile `splits` is 1 if not given, because the shape of
    the result must be known before a backend chooses.
    """
    q, selections = join_pair("q", q), as_list(selections)
    check_query(q, selections, value_dim)
    check_scales(scale, q_scale, q.device)
    check_splits(splits)
    if splits is None and torch.compiler.is_compiling():
        splits = 1
    call = AttendSlots(q, selections, *folded_scale(scale, q_scale), value_dim, splits, backend)
    operations.attend_slots.check(call)
    return Partials(*operations.attend_slots(call))


def attend(
    q: Tensor | tuple[Tensor, Tensor],
    selections: Selection | Sequence[Selection],
    *,
    scale: float,
    value_dim: int,
    sink: Tensor | None = None,
    q_scale: float | Tensor = 1.0,
    splits: int | None = None,
    lse_base: Literal["e", "2"] = "e",
    out: Tensor | None = None,
    backend: str = "auto",
) -> Attended:
    """Attention of each query token over the rows selected for it, all selections under one softmax.

    Invalid slots (negative, past the cache, beyond the row's length) are skipped and never read; duplicates count
    twice. There is no causal mask: a selection must not contain future rows. A row with nothing selected gives zeros
    and an lse of -inf.

    Args:
        q: [T, H, width] in bf16, fp16, fp32 or e4m3, or the pair (latent part, rope part); fp64 for exact checks.
        selections: what each of the T tokens attends to; every cache must have rows of q's width.
        scale: softmax scale.
        value_dim: how many leading columns of a row are its value (512 in V3.2 and V4).
        sink: float32 [H], one extra logit per head with a zero value: scales the output, never the lse.
        q_scale: the factor of an e4m3 query; multiplied into `scale`.
        splits: how many splits the columns are divided into and merged again; the result differs only by rounding. If
            not given, the backend chooses by the size of the batch; a fixed number makes a row's bits independent of
            the rest of the batch.
        lse_base: "e" for natural logarithms, "2" for base 2.
        out: [T, H, value_dim] to write into; otherwise a new tensor of q's dtype (bf16 for e4m3).
        backend: a name from `tamis backends`, or "auto".
    """
    dtype = q[0].dtype if isinstance(q, tuple) and q and isinstance(q[0], Tensor) else None
    q, selections = join_pair("q", q), as_list(selections)
    signature = None
    if not torch.compiler.is_compiling():
        # A default device is a mode, which would put a Python function around every attribute of a tensor.
        with torch._C.DisableTorchFunction():
            signature = sign_attend(
                q, selections, scale, q_scale, sink, out, (value_dim, splits, dtype, lse_base, backend)
            )
            known = _KNOWN.find(signature)
            if known is not None:
                # A call that is known has factors that are numbers.
                found = known.run(q, read_by(selections), scale * q_scale, sink, out)  # type: ignore[arg-type]
                if found is not None:
                    return Attended(*found)
                signature = None
    checks.option("lse_base", lse_base, ("e", "2"))
    check_query(q, selections, value_dim)
    check_scales(scale, q_scale, q.device)
    check_sink(sink, q.shape[1], q.device)
    result = new_output(q, value_dim, dtype) if out is None else out
    if out is not None:
        check_output(out, (*q.shape[:2], value_dim), q.device, q, sink, *read_by(selections))
    factor, form = folded_scale(scale, q_scale), LseForm(base_2=lse_base == "2")
    call = Attend(q, selections, *factor, splits, contiguous_sink(sink), result, False, form, backend)
    check_attend(call)
    prepared = None if signature is None else Prepared.of(call, out)
    if signature is not None and prepared is not None:
        _KNOWN.keep(signature, prepared)
        # The choices that prepared the call are not made again to run it.
        found = prepared.run(q, read_by(selections), call.scale, sink, result)
        if found is not None:
            return Attended(*found)
    return Attended(result, *operations.attend(call))


class Prepared:
    """Attention calls like one that passed its checks."""

    def __init__(self, attend: Any, apart: memory.Apart | None) -> None:
        """Remember what the backend prepared, and how far apart an output and inputs must be if one was given."""
        self._attend, self._apart = attend, apart

    @classmethod
    def of(cls, call: Attend, out: Tensor | None, shape: tuple[int, ...] | None = None) -> "Prepared | None":
        """Prepare calls like this one; None if the backend cannot.

        Args:
            call: the call.
            out: the output, if it was given. The others must then be given one too.
            shape: the shape of new outputs, if it is not that of the call's output.
        """
        attend = operations.attend.prepared(call)
        if attend is None:
            return None
        if shape is not None:
            attend.reshape_output(shape)
        inputs = (call.q, call.sink, *read_by(call.selections))
        return cls(attend, None if out is None else memory.Apart(out, *inputs))

    def run(
        self, q: Tensor, read: list[Tensor], scale: float, sink: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Output, lse and max_logits; None if addresses show that the call must be looked at.

        Args:
            q: the queries.
            read: what `read_by` gives for the selections.
            scale: the softmax scale, with the query scale.
            sink: the sink.
            out: the output; None for a new one.
        """
        if out is not None and self._apart is not None and not self._apart(out, q, sink, *read):
            return None
        found: tuple[Tensor, Tensor, Tensor] | None = self._attend(q, read, scale, sink, out)
        return found


_KNOWN: memory.Memory[Prepared] = memory.Memory()


def sign_attend(
    q: Any, selections: list[Selection], scale: Any, q_scale: Any, sink: Any, out: Any, options: tuple[object, ...]
) -> memory.Signature | None:
    """The signature of a call of `attend`. Its scales are not part of it."""
    try:
        if not (checks.is_factor(scale) and checks.is_factor(q_scale) and checks.is_factor(scale * q_scale)):
            return None
        if not memory.remembered_on(q) or memory.has_gradient(q, sink, out):
            return None
        if (sink is not None and sink.stride() != (1,)) or (out is not None and checks.frozen(out)):
            return None  # the sink will be copied, or the output refused
        seen = (options, *map(type, options[:2]), q.shape, q.stride(), q.dtype, q.device)
        seen += (memory.sign(sink), memory.sign(out))
        for selection in selections:
            seen += memory.sign_selection(selection)
        return seen
    except memory.NOT_ARGUMENTS:
        return None


def check_query(q: Tensor, selections: list[Selection], value_dim: int) -> None:
    """Refuse a query, selections and a width of values that do not fit each other."""
    checks.instance("selections[0].cache", selections[0].cache, PagedCache)
    width = selections[0].cache.layout.width
    sizes = checks.tensor(
        "q",
        q,
        "T H D",
        QUERY_DTYPES,
        D=width,
        remedy=lambda: f"the cache's rows are {width} wide ({selections[0].cache!r})",
    )
    if not 1 <= sizes["H"] <= MAX_HEADS:
        raise checks.refuse("q", f"of 1 to {MAX_HEADS} heads", sizes["H"], "split the heads over several calls")
    for number, selection in enumerate(selections):
        _check_selection(f"selections[{number}]", selection, sizes["T"], width, q.device)
    checks.integer("value_dim", value_dim, low=1, high=width)


def check_attend(call: Attend) -> None:
    """Refuse what `attend` refuses once query, scales, sink and, if given, the output have been checked."""
    check_splits(call.splits)
    operations.attend.check(call)


def check_splits(splits: int | None) -> None:
    """Refuse a number of splits that a launch cannot have."""
    if splits is not None:
        checks.integer("splits", splits, low=1)
        if splits > MAX_SPLITS:
            raise checks.refuse("splits", f"at most {MAX_SPLITS}", splits, "leave it out and the backend chooses")


def check_scales(scale: float, q_scale: float | Tensor, device: torch.device) -> None:
    """Refuse scales that are not positive numbers, and a query scale on another device."""
    checks.positive_number("scale", scale)
    factor = checks.scale_factor("q_scale", q_scale)
    if isinstance(factor, Tensor):
        checks.no_gradient(q_scale=factor)
        if factor.device != device:
            raise checks.refuse("q_scale", f"on {device} like q", f"a tensor on {factor.device}", "keep it with q")


def folded_scale(scale: float, q_scale: float | Tensor) -> tuple[float, Tensor | None]:
    """The softmax scale times the query scale if that is a number, and the query scale if it is a tensor."""
    return (scale, q_scale.reshape(())) if isinstance(q_scale, Tensor) else (scale * q_scale, None)


def read_by(selections: list[Selection]) -> list[Tensor]:
    """All tensors that attention over these selections reads: of each the cache's storage, the slots, and then those
    that it has of lengths, request ids and block table."""
    found: list[Tensor] = []
    for selection in selections:
        found += (selection.cache.storage, selection.slots)
        if selection.lengths is not None:
            found.append(selection.lengths)
        if selection.request_ids is not None:
            found.append(selection.request_ids)
        if selection.block_table is not None:
            found.append(selection.block_table)
    return found


def new_output(q: Tensor, value_dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty output for a query, in the query's dtype or another; bf16 in place of e4m3."""
    dtype = output_dtype(q.dtype if dtype is None else dtype)
    return q.new_empty((q.shape[0], q.shape[1], value_dim), dtype=dtype)


def as_list(selections: Selection | Sequence[Selection]) -> list[Selection]:
    """One selection or several, as a list; anything else is refused."""
    if isinstance(selections, Selection):
        return [selections]
    # A list is recognised before `Sequence`, an abstract class, which takes longer to compare with.
    if not isinstance(selections, (list, Sequence)) or not all(isinstance(s, Selection) for s in selections):
        received = checks.describe(selections)
        raise checks.refuse_type("selections", "Selections", received, "wrap each cache with its slots in a Selection")
    if not selections:
        raise checks.refuse("selections", "at least one Selection", "none", "pass the rows to attend to")
    return list(selections)


def _check_selection(name: str, selection: Selection, tokens: int, width: int, device: torch.device) -> None:
    cache = selection.cache
    checks.instance(f"{name}.cache", cache, PagedCache)
    if cache.layout.width != width:
        raise checks.refuse(f"{name}.cache", f"{width} wide", cache.layout.width, "all caches share q's width")
    if cache.device != device:
        raise checks.refuse(f"{name}.cache", f"on {device} like q", cache.device, "keep both on one device")
    check_columns(name, selection.slots, selection.lengths, tokens, device)
    _check_positions(name, selection, tokens, device)


def check_columns(name: str, slots: Tensor, lengths: Tensor | None, tokens: int, device: torch.device) -> None:
    """Refuse slots and lengths of a selection, called `name`, that are not those of so many query tokens."""
    remedy = "pass one row of slots per query token"
    sizes = checks.tensor(f"{name}.slots", slots, "T K", (torch.int32,), T=tokens, device=device, remedy=remedy)
    if lengths is not None:
        checks.tensor(f"{name}.lengths", lengths, "T", (torch.int32,), T=tokens, device=device)
        checks.values_between(f"{name}.lengths", lengths, 0, sizes["K"], "a length counts columns of slots")


def _check_positions(name: str, selection: Selection, tokens: int, device: torch.device) -> None:
    ids, table = selection.request_ids, selection.block_table
    if ids is None and table is None:
        return
    if ids is None or table is None:
        missing = "request_ids" if ids is None else "block_table"
        raise checks.refuse(f"{name}.{missing}", "given with the other of the two", None, "pass both, or slots alone")
    checks.tensor(f"{name}.request_ids", ids, "T", (torch.int32,), T=tokens, device=device)
    requests = checks.tensor(f"{name}.block_table", table, "B W", (torch.int32,), device=device)
    if requests["B"] == 0 or requests["W"] == 0:
        raise checks.refuse(f"{name}.block_table", "at least one page", list(table.shape), "pass the page table")
    checks.values_between(f"{name}.request_ids", ids, 0, requests["B"] - 1, "each must name a block-table row")
