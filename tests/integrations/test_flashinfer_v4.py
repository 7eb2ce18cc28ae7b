"""FlashInfer's V4 entry point against fp64: both forms of its index lists, formats, scales, one call or two."""

from typing import Any

import pytest
import torch
from torch import Tensor
from v4_standin import HEADS, RATIOS, SCALE, WINDOW, V4Step

from tamis.cache.layout import plain_fp8
from tamis.integrations.flashinfer import trtllm_batch_decode_sparse_mla_dsv4 as attend_v4

E4M3 = torch.float8_e4m3fn


def combined(step: V4Step, ratio: int) -> tuple[Tensor, Tensor]:
    """The combined list of every token: 128 window columns, then entries; lengths count all 128."""
    rows, lengths = [], []
    for row, (request, p) in enumerate(step.tokens):
        seen = step.raw.slots(request, max(0, p - WINDOW + 1), p + 1).tolist()
        slots: list[int] = []
        if ratio > 1:
            slots = step.entry_slots(request, (p + 1) // ratio, ratio).tolist()
            if ratio == 4:
                slots = [slots[n] for n in step.chosen[row].tolist() if n >= 0]
        rows.append(seen + [-1] * (WINDOW - len(seen)) + slots + [-1] * (20 - len(slots)))
        lengths.append(WINDOW + len(slots))
    return torch.tensor(rows, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int32)


def call(step: V4Step, ratio: int, first: int, end: int, **options: Any) -> Tensor:
    """One call for requests first..end, whose query starts are counted from 0."""
    indices, lengths = combined(step, ratio)
    starts = step.batch.query_starts
    rows = slice(int(starts[first]), int(starts[end]))
    pool = step.entries.get(ratio, step.window).storage
    q = options.pop("query", step.q)
    named = {
        "sparse_indices": indices[rows],
        "sparse_topk_lens": lengths[rows],
        "seq_lens": step.batch.lengths[first:end],
        "cum_seq_lens_q": starts[first : end + 1] - starts[first],
        "max_q_len": 64,
        "bmm1_scale": SCALE,
        "sinks": step.sink,
    }
    named["compressed_kv_cache"] = pool
    return attend_v4(q[rows], step.window.storage, None, **(named | options))


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("layout", ["v4-fp8", "v4-bf16", "v4-fp32"])
def test_one_call_for_a_mixed_batch_and_two_rebased_ones(layout: str, ratio: int) -> None:
    step = V4Step(layout)
    requests = len(step.queries)
    one = call(step, ratio, 0, requests)
    step.agrees(one, ratio)
    two = torch.cat((call(step, ratio, 0, 3), call(step, ratio, 3, requests)))
    step.agrees(two, ratio)


def test_window_columns_that_seq_lens_rules_out_are_never_read() -> None:
    """The kernel goes by seq_lens: window columns beyond them are not read."""
    step = V4Step("v4-bf16", [1, 2], [40, 3])
    indices, _ = combined(step, 1)
    for row, (_, p) in enumerate(step.tokens):
        indices[row, min(p + 1, WINDOW) : WINDOW] = 7
    found = call(step, 1, 0, 2, sparse_indices=indices)
    step.agrees(found, 1)


@pytest.mark.parametrize("tensor", [False, True])
@pytest.mark.parametrize("fp8_query", [False, True])
def test_scales_as_floats_and_as_tensors(tensor: bool, fp8_query: bool) -> None:
    step = V4Step(plain_fp8(latent=448), scale=0.02)
    q_scale = 0.05 if fp8_query else 1.0
    q = (step.q / q_scale).to(E4M3) if fp8_query else step.q
    factors: dict[str, Any] = {"bmm1_scale": SCALE * q_scale * 0.02, "bmm2_scale": 0.02}
    if tensor:
        factors = {name: torch.tensor([value]) for name, value in factors.items()}
    for ratio in RATIOS:
        found = call(step, ratio, 0, len(step.queries), query=q, **factors)
        assert found.dtype == (torch.bfloat16 if fp8_query else torch.float32)
        step.agrees(found, ratio, q.double() * q_scale)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("axis", ["flat", "HND", "NHD"])
def test_lists_apart_with_true_lengths(axis: str, ratio: int) -> None:
    step = V4Step("v4-fp8")
    indices, lengths = combined(step, ratio)
    windows = torch.tensor([min(p + 1, WINDOW) for _, p in step.tokens], dtype=torch.int32)
    extra: dict[str, Any] = {}
    pools = [step.window.storage, step.entries.get(ratio, step.window).storage]
    if axis != "flat":
        pools = [pool.unsqueeze(1 if axis == "HND" else 2) for pool in pools]
    if ratio > 1:
        extra = {
            "compressed_kv_cache": pools[1],
            "extra_sparse_indices": indices[:, WINDOW:].contiguous(),
            "extra_sparse_topk_lens": lengths - WINDOW,
        }
    out = torch.empty_like(step.q)
    options = {"bmm1_scale": SCALE, "sinks": step.sink, "kv_layout": axis if axis != "flat" else "HND"}
    found = attend_v4(step.q, pools[0], None, indices[:, :WINDOW], swa_topk_lens=windows, out=out, **options, **extra)
    assert (found.data_ptr(), found.shape) == (out.data_ptr(), out.shape)
    step.agrees(out, ratio)


def test_the_combined_form_may_list_the_window_alone() -> None:
    step = V4Step("v4-bf16", [1, 2], [40, 3])
    indices, lengths = combined(step, 1)
    found = call(step, 1, 0, 2, sparse_indices=indices[:, :WINDOW], sparse_topk_lens=lengths)
    step.agrees(found, 1)


def test_the_combined_form_writes_into_a_given_output() -> None:
    step = V4Step("v4-bf16")
    out = torch.full_like(step.q, torch.nan)
    found = call(step, 4, 0, len(step.queries), out=out)
    assert (found.data_ptr(), found.shape) == (out.data_ptr(), out.shape)
    step.agrees(out, 4)


@pytest.mark.parametrize("given", [False, True])
def test_requests_of_one_query_length_in_four_axes(given: bool) -> None:
    step = V4Step("v4-bf16", [2, 2, 2], [50, 9, 200])
    indices, lengths = combined(step, 4)
    out = torch.full((3, 2, HEADS, 512), torch.nan, dtype=step.q.dtype) if given else None
    found = attend_v4(
        step.q.view(3, 2, HEADS, 512),
        step.window.storage,
        None,
        indices.view(3, 2, -1) if given else indices,
        step.entries[4].storage,
        lengths,
        step.batch.lengths,
        out,
        bmm1_scale=SCALE,
        sinks=step.sink,
    )
    assert out is None or found.data_ptr() == out.data_ptr()
    step.agrees(found.flatten(0, 1), 4)


def test_requests_without_tokens_see_nothing() -> None:
    """Padding of a captured graph: length 0, rows of -1. The result is zero, not a reading of slot 0."""
    step = V4Step("v4-bf16", [1], [5])
    indices, lengths = combined(step, 1)
    found = call(step, 1, 0, 1, seq_lens=torch.zeros(1, dtype=torch.int32), sparse_indices=indices.fill_(0))
    assert found.eq(0).all()
    assert lengths.tolist() == [WINDOW]


def test_refusals() -> None:
    step = V4Step("v4-bf16", [1], [5])
    with pytest.raises(ValueError, match="compressed_kv_cache must be given with sparse_topk_lens"):
        call(step, 1, 0, 1, compressed_kv_cache=None)
    with pytest.raises(
        ValueError, match=r"sparse_topk_lens must be between 128 and 148, got a value of 5; it counts all"
    ):
        call(step, 1, 0, 1, sparse_topk_lens=torch.tensor([5], dtype=torch.int32))
    with pytest.raises(ValueError, match="kv_layout must be one of 'HND', 'NHD', got 'DNH'"):
        call(step, 1, 0, 1, kv_layout="DNH")
    with pytest.raises(ValueError, match=r"sinks must be of shape \[h=\d+\], got \[5\]"):
        call(step, 1, 0, 1, sinks=torch.zeros(5))
    with pytest.raises(TypeError, match="window_columns must be an int, got str"):
        call(step, 1, 0, 1, window_columns="128")
    with pytest.raises(ValueError, match="sparse_indices must be at least 149 columns wide, got 148"):
        call(step, 1, 0, 1, window_columns=149)
    with pytest.raises(TypeError, match=r"sparse_topk_lens must be a tensor \[T\]"):
        call(step, 1, 0, 1, sparse_topk_lens=None)
    with pytest.raises(TypeError, match=r"seq_lens must be a tensor \[B\]"):
        call(step, 1, 0, 1, seq_lens=None)
    with pytest.raises(ValueError, match=r"swa_kv_cache must be of rows 512 numbers or 584 bytes wide"):
        attend_v4(
            step.q,
            torch.zeros(2, 4, 576),
            None,
            torch.zeros(1, 4, dtype=torch.int32),
            swa_topk_lens=torch.ones(1).int(),
        )
    with pytest.raises(ValueError, match="extra_sparse_indices must be None without swa_topk_lens"):
        call(step, 1, 0, 1, extra_sparse_indices=torch.zeros(1, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="extra_sparse_indices must be given with its pool and its lengths"):
        call(step, 1, 0, 1, swa_topk_lens=torch.ones(1).int())
    with pytest.raises(ValueError, match=r"bmm2_scale must be 1\.0 with packed rows"):
        call(V4Step("v4-fp8", [1], [5]), 1, 0, 1, bmm2_scale=0.5)
    apart: dict[str, Any] = {"compressed_kv_cache": step.window.storage}
    apart |= {name: torch.zeros(1, 4, dtype=torch.int32) for name in ("sparse_indices", "extra_sparse_indices")}
    apart["swa_topk_lens"] = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="extra_sparse_topk_lens must be between 0 and 4, got a value of 5"):
        attend_v4(step.q, step.window.storage, None, extra_sparse_topk_lens=torch.tensor([5]).int(), **apart)
