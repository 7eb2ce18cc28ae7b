"""Checks of stage `attend`, against float64."""

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from tamis.arithmetic import output_dtype
from tamis.cache.layout import named
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.lab.testing import cases, compare, oracle
from tamis.lab.testing.attend_cases import AttendCase, attend_cases
from tamis.lab.testing.cases import Draw
from tamis.lab.verify.check import NOT_BATCH_INVARIANT, Check, Target, Trial, named_calls
from tamis.lab.verify.repeat import count_differing_bits, graph_check, repeat_check
from tamis.ops import attend

SIXTEEN_BITS = 2.5e-3
"""Bound for bf16 outputs: rounding the output alone gives 1.7e-3, and FlashMLA has 2.2e-3 on random FP8 data."""
HALF = 1e-3
SINGLE = 2e-5
"""Bound for float32 queries: sums are in float32, and no operand is rounded to 16 bits or to tf32."""
TOKEN_SLACK = 4
"""The error of a single token may be at most this many times the bound."""
FAR_BYTES = 2**31 + 2**28
"""A cache this large has rows that 32-bit byte offsets do not reach."""


def attend_checks(target: Target) -> Iterator[Check]:
    """Values by query dtype, adversarial inputs, tile maxima, repeated runs, batch invariance, graphs."""
    found = [case for case in attend_cases(quick=target.quick) if _takes(target, case)]

    def of(kind: str, *dtypes: torch.dtype) -> list[AttendCase]:
        return [case for case in found if case.kind == kind and (not dtypes or case.q.dtype in dtypes)]

    for label, bound, some in (
        ("values, bf16 queries", SIXTEEN_BITS, of("values", torch.bfloat16, torch.float8_e4m3fn)),
        ("values, fp16 queries", HALF, of("values", torch.float16)),
        ("values, fp32 queries", SINGLE, of("values", torch.float32)),
        ("adversarial slots, lengths, NaN, sinks", SIXTEEN_BITS, of("adversarial")),
        ("tile maxima 1e-5 to 1e4", SIXTEEN_BITS, of("tile maxima")),
    ):
        yield Check("attend", label, bound, named_calls(_attend, target, some))
    yield _far_check(target)
    some = found[::6]
    yield repeat_check("attend", named_calls(_attended, target, some))
    yield _alone_check(target, [case for case in some if case.splits is None and len(case.q) > 1])
    yield graph_check(target, "attend", ["attend", "combine"], named_calls(_attend_again, target, some))


def _takes(target: Target, case: AttendCase) -> bool:
    return all(
        target.takes(
            "attend",
            cache.layout,
            page_size=cache.page_size,
            heads=case.heads,
            dtype=case.q.dtype,
            sink=case.sink is not None,
        )
        for cache in case.caches
    )


def _attended(target: Target, case: AttendCase) -> list[Tensor]:
    moved = target.here(case)
    return _attend_call(target, moved, moved.q, *_selected(moved.selections))


def _selected(selections: tuple[Selection, ...]) -> list[Tensor]:
    """The tensors of the selections that a step changes: slots, and lengths where there are any."""
    return [t for s in selections for t in (s.slots, s.lengths) if t is not None]


def _attend_call(target: Target, case: AttendCase, q: Tensor, *selected: Tensor) -> list[Tensor]:
    """Attention with the case's settings over the given slots and lengths, into an output full of NaN."""
    rest, selections = iter(selected), []
    for s in case.selections:
        slots = next(rest)
        lengths = None if s.lengths is None else next(rest)
        selections.append(Selection(s.cache, slots, lengths, s.request_ids, s.block_table))
    out = torch.full((*q.shape[:2], case.value_dim), torch.nan, dtype=output_dtype(q.dtype), device=q.device)
    found = attend(
        _apart(q) if case.strided else q,
        selections,
        scale=case.scale,
        value_dim=case.value_dim,
        sink=case.sink,
        q_scale=case.q_scale,
        splits=case.splits,
        out=out,
        backend=target.backend,
    )
    return [out, found.lse]


def _apart(q: Tensor) -> Tensor:
    """The same query in a larger buffer: other strides, and NaN around it."""
    tokens, heads, width = q.shape
    room = torch.full((tokens, heads + 3, width + 16), torch.nan, dtype=q.dtype, device=q.device)
    room[:, 1 : heads + 1, 8 : width + 8] = q
    return room[:, 1 : heads + 1, 8 : width + 8]


def _attend(target: Target, case: AttendCase) -> Trial:
    found, lse = _attended(target, case)
    expected, true_lse = oracle.attend(
        case.q.double(), case.selections, scale=case.scale * case.q_scale, value_dim=case.value_dim, sink=case.sink
    )
    return attention_error(found, lse, expected, true_lse, case.block)


def attention_error(found: Tensor, lse: Tensor, expected: Tensor, true_lse: Tensor, block: int | None = None) -> Trial:
    """The largest of the relative errors of the output (per block of columns, if given), of a token, and of the lse.

    A row with nothing selected must be exactly zero, with an lse of -inf.
    """
    found, lse = found.cpu(), lse.cpu()
    empty = true_lse == -math.inf
    if not torch.equal(lse == -math.inf, empty) or bool((found[empty] != 0).any()):
        return Trial(math.inf, "a row with nothing selected must be zero with an lse of -inf, and only such a row")
    whole = compare.relative_error(found, expected)
    if block is not None:
        whole = max(whole, compare.worst_block_error(found, expected, block))
    token = compare.worst_row_error(found, expected) / TOKEN_SLACK
    size = true_lse.masked_fill(empty, 0.0).abs().clamp_min(1.0)
    shift = ((lse.double() - true_lse).masked_fill(empty, 0.0) / size).abs().max()
    error = max(whole, token, math.inf if bool(shift.isnan()) else float(shift))
    note = f"output {whole:.2e}, worst token {token * TOKEN_SLACK:.2e}, lse {float(shift):.2e}"
    return Trial(error, note)


def _far_check(target: Target) -> Check:
    name = "rows beyond 2 GiB"
    layout = named("v32-fp8")
    if target.device.type != "cuda" or target.quick:
        return Check("attend", name, SIXTEEN_BITS, reason="needs a GPU and a full run")
    free, _ = torch.cuda.mem_get_info(target.device)
    if free < 2 * FAR_BYTES:
        return Check("attend", name, SIXTEEN_BITS, reason=f"needs {2 * FAR_BYTES / 2**30:.1f} GiB of free memory")
    trials = [("v32-fp8", partial(_far, target))] if target.takes("attend", layout) else []
    return Check("attend", name, SIXTEEN_BITS, trials)


def _far(target: Target) -> Trial:
    """Rows at the end of a large cache must give the same result as in a small cache."""
    draw, layout = Draw("far"), named("v32-fp8")
    near = cases.filled_cache(draw, layout, 256, 64)
    far = PagedCache(layout, FAR_BYTES // layout.page_bytes(64), 64, target.device)
    first = far.pages - near.pages
    far.storage[first:] = target.here(near).storage
    q, slots = draw.normal(4, 16, layout.width, dtype=torch.bfloat16), draw.integers(0, near.rows, 4, 100)
    scale = layout.width**-0.5
    moved = Selection(far, target.here(slots + first * 64))
    found = attend(target.here(q), moved, scale=scale, value_dim=layout.latent, backend=target.backend)
    expected, lse = oracle.attend(q, [Selection(near, slots)], scale=scale, value_dim=layout.latent)
    return attention_error(found.out, found.lse, expected, lse)


def _alone_check(target: Target, some: list[AttendCase]) -> Check:
    name = "same bits alone and in a batch"
    reason = target.not_batch_invariant("attend")
    if reason:
        return Check("attend", name, 0.0, reason=reason)
    return Check("attend", name, 0.0, named_calls(_alone, target, some), remedy=NOT_BATCH_INVARIANT)


def _alone(target: Target, case: AttendCase) -> Trial:
    """Each token alone, and half of the batch, must give the bits of the whole batch with a fixed number of splits."""
    moved = target.here(case)
    tokens = len(case.q)
    worst = Trial(0.0)

    def run(begin: int, end: int) -> list[Tensor]:
        rows = [s.rows(begin, end) for s in moved.selections]
        found = attend(
            moved.q[begin:end],
            rows,
            scale=case.scale,
            value_dim=case.value_dim,
            sink=moved.sink,
            q_scale=case.q_scale,
            splits=3,
            backend=target.backend,
        )
        return [found.out, found.lse]

    whole = run(0, tokens)
    spans = [(0, max(1, tokens // 2)), *((t, t + 1) for t in range(min(tokens, 6)))]
    for begin, end in spans:
        found = count_differing_bits(run(begin, end), [output[begin:end] for output in whole])
        if found.error > worst.error:
            worst = Trial(found.error, f"tokens {begin} to {end}: {found.note}")
    return worst


def _attend_again(target: Target, case: AttendCase) -> tuple[list[Tensor], list[Tensor], "partial[list[Tensor]]"]:
    moved = target.here(case)
    first = [moved.q, *_selected(moved.selections)]
    # Some devices cannot flip FP8 tensors, so bytes are flipped.
    second = [moved.q.view(torch.uint8).flip(0).view(moved.q.dtype)]
    for s in moved.selections:
        changed = s.slots.flip(0)
        changed[0] = -1  # a padded row
        second.append(changed)
        if s.lengths is not None:
            second.append((s.lengths.flip(0) - 3).clamp_min(0))
    return first, second, partial(_attend_call, target, moved)
