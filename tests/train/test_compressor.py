"""Pooling of packed requests' tokens: against inference's `compress_kv`, finite differences and its own definition."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from training import WITH_GRADIENTS, normal, relative

from tamis import PagedCache
from tamis.cache.layout import compressor_state, rows
from tamis.model.rope import rms_norm
from tamis.ops import StatePages, compress_kv
from tamis.ops.compress import gradients
from tamis.train import Pack, compress_rows

KINDS = pytest.mark.parametrize(("ratio", "overlapping"), [(4, True), (3, False), (1, True)])
LENGTHS = (0, 9, 2, 13)
WIDTH = 6


def inputs(ratio: int, overlapping: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    channels, tokens = WIDTH * (2 if overlapping else 1), sum(LENGTHS)
    shapes = ((tokens, channels), (tokens, channels), (ratio, channels))
    return [normal(*shape, dtype=dtype).requires_grad_() for shape in shapes]


def pack() -> Pack:
    return Pack.of(torch.tensor([0, *LENGTHS]).cumsum(0))


def pooled(values: Tensor, scores: Tensor, bias: Tensor, ratio: int, overlapping: bool) -> Tensor:
    """Entries of the pack by loops over requests, spans and tokens."""
    found, first = [], 0
    for length in LENGTHS:
        for span in range(length // ratio):
            members = [(first + span * ratio + i, i, int(overlapping)) for i in range(ratio)]
            if overlapping and span:
                members = [(first + (span - 1) * ratio + i, i, 0) for i in range(ratio)] + members
            own = [slice(part * WIDTH, (part + 1) * WIDTH) for _, _, part in members]
            logits = torch.stack([scores[t, c] + bias[i, c] for (t, i, _), c in zip(members, own, strict=True)])
            rows_of = torch.stack([values[t, c] for (t, _, _), c in zip(members, own, strict=True)])
            found.append((logits.softmax(0) * rows_of).sum(0))
        first += length
    return torch.stack(found)


@WITH_GRADIENTS
@KINDS
@pytest.mark.parametrize("chunk", [1, 32 << 20])
def test_gradients_against_autograd(ratio: int, overlapping: bool, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "WORKING_BYTES", chunk)
    given = inputs(ratio, overlapping)
    found = compress_rows(*given, pack().entries(ratio), overlapping=overlapping)
    expected = pooled(*given, ratio, overlapping)
    assert len(found) == pack().entries(ratio).count
    assert relative(found, expected) < 1e-12
    upstream = torch.randn_like(found).T.contiguous().T  # columns first
    for one, other in zip(*(torch.autograd.grad(x, given, upstream) for x in (found, expected)), strict=True):
        assert relative(one, other) < 1e-12


@WITH_GRADIENTS
@KINDS
def test_finite_differences(ratio: int, overlapping: bool) -> None:
    def compress(*given: Tensor) -> Tensor:
        return compress_rows(*given, pack().entries(ratio), overlapping=overlapping)

    assert gradcheck(compress, tuple(inputs(ratio, overlapping)))


@WITH_GRADIENTS
def test_tokens_of_no_entry_have_no_gradient_and_may_hold_anything() -> None:
    values, scores, bias = inputs(4, True)
    with torch.no_grad():
        values[8], scores[9:11] = torch.nan, torch.nan  # the unfinished spans of the second and third request
        values[4:8, :WIDTH] = torch.nan  # the first channels of the second request's last span
    found = compress_rows(values, scores, bias, pack().entries(4), overlapping=True)
    dvalues, dscores, _ = torch.autograd.grad(found.sum(), (values, scores, bias))
    assert found.isfinite().all()
    for gradient in (dvalues, dscores):
        assert (gradient[8:11] == 0).all()
        assert (gradient[4:8, :WIDTH] == 0).all()
        assert gradient.isfinite().all()


@WITH_GRADIENTS
def test_spans_before_a_request_are_not_read() -> None:
    """Whatever the batch's first token holds, it is in entries of its own request only."""
    values, scores, bias = inputs(4, True)
    with torch.no_grad():
        values[0], scores[0] = torch.nan, torch.nan
    found = compress_rows(values, scores, bias, pack().entries(4), overlapping=True)
    assert found[:2].isnan().any(1).all()
    assert found[2:].isfinite().all()
    for gradient in torch.autograd.grad(found.sum(), (values, scores)):
        assert gradient[9:].isfinite().all()


@WITH_GRADIENTS
@KINDS
def test_entries_without_a_span_are_zeros_and_teach_nothing(ratio: int, overlapping: bool) -> None:
    """They may stand anywhere, and their upstream gradient may be anything finite."""
    given, spans = inputs(ratio, overlapping), pack().entries(ratio)
    place = torch.tensor([0, spans.count, *range(1, spans.count), spans.count + 1])
    more = {
        name: torch.cat((getattr(spans, name), torch.tensor([-1, -1]).int()))[place] for name in ("spans", "before")
    }
    whole = compress_rows(*given, spans, overlapping=overlapping)
    found = compress_rows(*given, replace(spans, count=spans.count + 2, **more), overlapping=overlapping)
    real = more["spans"] >= 0
    assert real.sum() == spans.count
    assert torch.equal(found[real], whole)
    assert (found[~real] == 0).all()
    upstream = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad(found, given, upstream), torch.autograd.grad(whole, given, upstream[real]), strict=True
    ):
        assert relative(one, other) < 1e-14


@WITH_GRADIENTS
@KINDS
def test_packed_requests_have_the_bits_that_they_have_alone(ratio: int, overlapping: bool) -> None:
    """Entries and gradients of tokens; the bias's gradient is a sum over requests."""
    channels, bounds = 64 * (2 if overlapping else 1), torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    values, scores, bias = (normal(n, channels, dtype=torch.float32) for n in (bounds[-1], bounds[-1], ratio))

    def step(some: slice, requests: list[int]) -> list[Tensor]:
        leaves = [x[some].clone().requires_grad_() for x in (values, scores)]
        entries = compress_rows(*leaves, bias, Pack.of(requests).entries(ratio), overlapping=overlapping)
        return [entries.detach(), *torch.autograd.grad(entries.square().sum(), leaves)]

    alone = [step(slice(a, b), [0, b - a]) for a, b in pairwise(bounds)]
    for one, parts in zip(step(slice(None), bounds), zip(*alone, strict=True), strict=True):
        assert torch.equal(one, torch.cat(parts))


@pytest.mark.parametrize("overlapping", [False, True])
def test_entries_are_those_of_inference(overlapping: bool) -> None:
    """Norm and rounding follow outside: the same bits as `compress_kv`, which pools in float32 too."""
    values, scores, bias = (x.detach() for x in inputs(4, overlapping, torch.bfloat16))
    weight, made = torch.ones(WIDTH), rows(torch.bfloat16, latent=WIDTH, rope=0)
    cache = PagedCache(made, 8, 4)
    state = PagedCache(compressor_state(dim=WIDTH, overlapping=overlapping), 8, 4)
    whole = pack()
    table = torch.arange(8, dtype=torch.int32).view(4, 2)
    # States of requests of up to 13 tokens need four pages.
    state = PagedCache(state.layout, 16, 4)
    states = torch.arange(16, dtype=torch.int32).view(4, 4)
    state_slots = states[whole.request_ids.long(), whole.positions.long() // 4] * 4 + whole.positions % 4
    ends = (whole.positions + 1) % 4 == 0
    entry = (whole.positions + 1) // 4 - 1
    slots = torch.where(ends, table[whole.request_ids.long(), 0] * 4 + entry, -1)
    compress_kv(
        *(values, scores, state, cache),
        positions=whole.positions,
        pages=StatePages(state_slots, whole.request_ids, states),
        slots=slots,
        bias=bias,
        norm_weight=weight,
        cos_sin=torch.cat((torch.ones(16, 1), torch.zeros(16, 1)), 1),
    )
    found = compress_rows(values, scores, bias, whole.entries(4), overlapping=overlapping)
    found = rms_norm(found, weight).bfloat16()
    assert torch.equal(found.float(), cache.read(slots[ends]).float())


def test_wrong_arguments_are_refused_by_name() -> None:
    values, scores, bias = inputs(4, True)
    with pytest.raises(ValueError, match="values must be of shape"):
        compress_rows(values[1:], scores, bias, pack().entries(4), overlapping=True)
    with pytest.raises(ValueError, match="bias must be of shape"):
        compress_rows(values, scores, bias, pack().entries(3), overlapping=True)
    with pytest.raises(TypeError, match="scores must be float64 like values"):
        compress_rows(values, scores.float(), bias, pack().entries(4), overlapping=True)
    with pytest.raises(TypeError, match="entries must be an Entries"):
        compress_rows(values, scores, bias, pack())
    with pytest.raises(ValueError, match="values must be 2D wide"):
        compress_rows(values[:, :5], scores[:, :5], bias[:, :5], pack().entries(4), overlapping=True)
