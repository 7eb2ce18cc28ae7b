"""The FlashMLA drop-in's conventions one by one: sinks, lengths, empty rows, schedule, replacement, refusals."""

import inspect
import math
import sys
from typing import Any

import bounds
import pytest
import torch
from seeds import seeded
from torch import Tensor

import tamis.integrations.flash_mla
from tamis.integrations import flash_mla
from tamis.integrations.flash_mla import FlashMLASchedMeta, get_mla_metadata, schedule

INT_MIN, INT_MAX = -(2**31), 2**31 - 1


def decode_call(**changes: Any) -> dict[str, Any]:
    """A valid sparse decode call over 4 fp32 pages of 8 rows; changes replace or add arguments."""
    g = seeded(1)
    call = {
        "q": torch.randn(2, 3, 5, 576, generator=g),
        "k_cache": torch.randn(4, 8, 1, 576, generator=g),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
        "indices": torch.randint(0, 32, (2, 3, 6), generator=g, dtype=torch.int32),
    }
    return call | changes


def dense_call(**changes: Any) -> dict[str, Any]:
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    lengths = torch.tensor([16, 9], dtype=torch.int32)
    return decode_call(indices=None, block_table=table, cache_seqlens=lengths) | changes


def packed_call(**changes: Any) -> dict[str, Any]:
    return decode_call(k_cache=torch.zeros(4, 8, 1, 656, dtype=torch.uint8), is_fp8_kvcache=True) | changes


def prefill_call(**changes: Any) -> dict[str, Any]:
    g = seeded(2)
    call = {
        "q": torch.randn(4, 5, 576, generator=g),
        "kv": torch.randn(20, 1, 576, generator=g),
        "indices": torch.randint(0, 20, (4, 1, 6), generator=g, dtype=torch.int32),
        "sm_scale": 0.1,
    }
    return call | changes


def decode(**changes: Any) -> tuple[Tensor, Tensor]:
    return flash_mla.flash_mla_with_kvcache(**decode_call(**changes))


def exactly(indices: Tensor, attn_sink: Tensor | None = None) -> bounds.Attention:
    """What `decode_call` gives for these indices, in fp64, of all tokens in one axis."""
    call = decode_call()
    rows, options = call["k_cache"].flatten(0, 2), {"scale": 576**-0.5, "value_dim": 512, "sink": attn_sink}
    tokens = zip(call["q"].flatten(0, 1), indices.flatten(0, 1).long(), strict=True)
    return bounds.stacked([bounds.attention(heads, rows[chosen], **options) for heads, chosen in tokens])


def test_signatures_are_those_of_flash_mla() -> None:
    """Those of sgl-flash-mla 1.0.0 in its order, which begins with FlashMLA's own; last what vLLM's build has."""
    decode_names = (
        "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata num_splits softmax_scale causal "
        "is_fp8_kvcache indices attn_sink extra_k_cache extra_indices_in_kvcache topk_length extra_topk_length "
        "enable_batch_invariant use_legacy kv_format descale_q descale_k out"
    )
    prefill_names = "q kv indices sm_scale d_v attn_sink topk_length use_legacy return_log2_lse out"
    assert list(inspect.signature(flash_mla.flash_mla_with_kvcache).parameters) == decode_names.split()
    assert list(inspect.signature(flash_mla.flash_mla_sparse_fwd).parameters) == prefill_names.split()


def test_code_that_imports_flash_mla_runs_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_mla", tamis.integrations.flash_mla)
    program = """
import flash_mla
from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

metadata, num_splits = get_mla_metadata()
out, lse = flash_mla.flash_mla_with_kvcache(
    q, k_cache, None, None, 512, metadata, num_splits, softmax_scale=0.1, indices=indices, causal=False)
prefill = flash_mla_sparse_fwd(q.flatten(0, 1), k_cache.flatten(0, 1), indices.view(-1, 1, 6), 0.1)
"""
    call = decode_call()
    names = {name: call[name] for name in ("q", "k_cache", "indices")}
    exec(program, names)
    # A flat list of rows and pages of 8 are the same rows under the same numbers.
    assert torch.equal(names["out"].flatten(0, 1), names["prefill"][0])
    assert torch.equal(names["lse"].transpose(1, 2).flatten(0, 1), names["prefill"][2])
    torch.testing.assert_close(names["out"], decode(softmax_scale=0.1)[0], rtol=0, atol=0)


def test_default_scale_is_the_width_to_the_minus_half() -> None:
    assert torch.equal(decode()[0], decode(softmax_scale=576**-0.5)[0])


def test_a_sink_scales_the_output_and_leaves_the_lse_alone() -> None:
    plain, lse = decode()
    sink = torch.tensor([-math.inf, math.inf, 0.0, 1.5, -40.0])
    out, same = decode(attn_sink=sink)
    assert torch.equal(lse, same)
    assert torch.equal(out[:, :, 0], plain[:, :, 0])
    assert (out[:, :, 1] == 0).all()
    exact = exactly(decode_call()["indices"], attn_sink=sink)
    bounds.agree(out, exact.out.view(out.shape), exact.out_error.view(out.shape))


@pytest.mark.parametrize("sink", [None, -math.inf, math.inf, 0.0])
def test_rows_with_nothing_valid(sink: float | None) -> None:
    sinks = None if sink is None else torch.full((5,), sink)
    hostile = torch.tensor([INT_MIN, -123456, -1, 32, INT_MAX, -2], dtype=torch.int32).expand(2, 3, 6)
    for changes in (
        {"indices": hostile},
        {"topk_length": torch.zeros(2, dtype=torch.int32)},
        {"indices": torch.zeros(2, 3, 0, dtype=torch.int32)},
        {"indices": hostile, "k_cache": torch.full((4, 8, 1, 576), math.nan)},
    ):
        out, lse = decode(attn_sink=sinks, **changes)
        assert (out == 0).all()
        assert (lse == math.inf).all()
    empty = torch.tensor([20, -1], dtype=torch.int32).expand(4, 1, 2)
    out, top, lse = flash_mla.flash_mla_sparse_fwd(**prefill_call(indices=empty, attn_sink=sinks))
    assert (out == 0).all()
    assert (top == -math.inf).all()
    assert (lse == math.inf).all()


def test_a_length_hides_columns_even_if_they_name_nan_rows() -> None:
    call = decode_call()
    k_cache = call["k_cache"].clone()
    k_cache[3] = math.nan
    kept = call["indices"] % 24
    beyond = torch.tensor([24, 31, INT_MAX, INT_MIN], dtype=torch.int32).expand(2, 3, 4)
    out, lse = decode(
        k_cache=k_cache, indices=torch.cat([kept, beyond], 2), topk_length=torch.tensor([6, 6], dtype=torch.int32)
    )
    expected = exactly(kept)
    bounds.agree(out, expected.out.view(out.shape), expected.out_error.view(out.shape))
    bounds.agree(lse.mT.flatten(0, 1), expected.lse, expected.lse_error)


def test_duplicates_count_twice() -> None:
    once = torch.tensor([4, 9], dtype=torch.int32).expand(2, 3, 2)
    twice = torch.tensor([4, 9, 4, 9], dtype=torch.int32).expand(2, 3, 4)
    exact = exactly(once)
    for indices, more in ((once, 0.0), (twice, math.log(2))):
        out, lse = decode(indices=indices)
        bounds.agree(out, exact.out.view(out.shape), exact.out_error.view(out.shape))
        bounds.agree(lse.mT.flatten(0, 1), exact.lse + more, exact.lse_error)
    # Three times row 4 and once row 9 is row 4 with log(3) more: only its weight changes.
    rows = decode_call()["k_cache"].flatten(0, 2)[[4, 9]].double()
    logits = torch.einsum("bshd,kd->bshk", decode_call()["q"].double(), rows) / 24
    share = torch.softmax(logits + torch.tensor([math.log(3), 0], dtype=torch.float64), -1)
    uneven = torch.tensor([4, 4, 9, 4], dtype=torch.int32).expand(2, 3, 4)
    error = exactly(uneven).out_error.view(2, 3, 5, 512)
    bounds.agree(decode(indices=uneven)[0], share @ rows[:, :512], error)


def test_block_table_and_lengths_are_ignored_in_sparse_mode() -> None:
    expected = decode()[0]
    dummy = torch.full((1, 1), INT_MAX, dtype=torch.int32)
    assert torch.equal(decode(block_table=dummy, cache_seqlens=torch.tensor([-5]))[0], expected)


def test_a_step_without_requests_or_without_rows() -> None:
    for b, s_q in ((0, 3), (2, 0), (0, 0)):
        out, lse = decode(q=torch.zeros(b, s_q, 5, 576), indices=torch.zeros(b, s_q, 6, dtype=torch.int32))
        assert (out.shape, lse.shape) == ((b, s_q, 5, 512), (b, 5, s_q))
    out, lse = flash_mla.flash_mla_with_kvcache(**dense_call(cache_seqlens=torch.zeros(2, dtype=torch.int32)))
    assert (out == 0).all()
    assert (lse == math.inf).all()


def test_arguments_are_left_alone() -> None:
    for call in (dense_call(causal=True), decode_call(topk_length=torch.tensor([2, 6], dtype=torch.int32))):
        before = {name: value.clone() for name, value in call.items() if isinstance(value, Tensor)}
        flash_mla.flash_mla_with_kvcache(**call)
        assert all(torch.equal(call[name], value) for name, value in before.items())


def test_schedule_of_todays_interface_is_an_empty_holder() -> None:
    holder, num_splits = get_mla_metadata()
    assert holder == FlashMLASchedMeta()
    assert num_splits is None
    assert get_mla_metadata()[0] is not holder


def test_classic_schedule_on_one_sm_splits_nothing() -> None:
    lengths = torch.tensor([0, 64, 65, 4096], dtype=torch.int32)
    holder, num_splits = get_mla_metadata(lengths, 2 * 64, 1, num_heads_q=64, is_fp8_kvcache=True)
    # First row 0, last row 3, blocks 0 to 64, nothing cut before or after.
    assert holder.tile_scheduler_metadata is not None
    assert holder.tile_scheduler_metadata.dtype == torch.int32
    assert holder.tile_scheduler_metadata.tolist() == [[0, 3, 0, 64, 0, 0, 0, 0]]
    assert num_splits is holder.num_splits
    assert num_splits is not None
    assert num_splits.tolist() == [0, 1, 2, 3, 4]
    with_topk, _ = get_mla_metadata(lengths, 64, 1, 64, True, 2048)
    assert with_topk.tile_scheduler_metadata is not None
    assert with_topk.tile_scheduler_metadata[0, 3] == 32


@pytest.mark.parametrize(
    ("heads", "s_q", "overhead", "cuts"), [(64, 1, 5, 4), (64, 2, 5, 2), (128, 1, 3, 3), (None, 1, 5, 4)]
)
def test_classic_schedule_spreads_the_work(
    heads: int | None, s_q: int, overhead: int, cuts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device with 16 SMs: shared by query tokens and groups of 64 heads, each block in exactly one part.

    `cuts` are worked out by hand: 18 blocks a request, 16 parts of 5 blocks, 8 parts of 9, 8 parts of 8 (overhead 3).
    """
    shares = []
    real = schedule.part_count

    def on_16_sms(sms: int, heads: int, tokens: int, *, capability_major: int) -> int:
        shares.append((sms, heads, tokens))
        return real(16, heads, tokens, capability_major=capability_major)

    monkeypatch.setattr(schedule, "part_count", on_16_sms)
    b, topk = 3, 1100
    holder, num_splits = get_mla_metadata(
        torch.full((b,), topk, dtype=torch.int32), s_q * (heads or 64), 1, num_heads_q=heads, topk=topk
    )
    assert shares == [(1, heads or 64, s_q)]
    assert holder.tile_scheduler_metadata is not None
    parts = holder.tile_scheduler_metadata.tolist()
    assert len(parts) == 16 // s_q // ((heads or 64) // 64)
    blocks = math.ceil(topk / 64)
    payload = math.ceil(b * (blocks + overhead) / len(parts)) + overhead
    covered, pieces = [], [0] * b
    for first, last, begin, end, *_ in parts:
        cost = 0
        for request in range(first, last + 1):
            span = range(begin if request == first else 0, end if request == last else blocks)
            covered += [(request, block) for block in span]
            pieces[request] += 1
            cost += len(span) + overhead
        assert cost <= payload
    assert sorted(covered) == [(request, block) for request in range(b) for block in range(blocks)]
    assert num_splits is not None
    assert num_splits.tolist() == [sum(pieces[:i]) for i in range(b + 1)] == [cuts * i for i in range(b + 1)]


def test_the_schedule_changes_no_result() -> None:
    expected = decode()[0]
    lengths = torch.full((2,), 6, dtype=torch.int32)
    holder, num_splits = get_mla_metadata(lengths, 15, 1, num_heads_q=5, topk=6)
    for metadata in (holder, holder.tile_scheduler_metadata, None, get_mla_metadata()[0]):
        assert torch.equal(decode(tile_scheduler_metadata=metadata, num_splits=num_splits)[0], expected)


LENGTHS = torch.ones(2, dtype=torch.int32)
SCHEDULES = [
    ({"cache_seqlens": LENGTHS}, "get_mla_metadata takes no arguments or .*missing"),
    ({"cache_seqlens": LENGTHS, "heads": 3}, "get_mla_metadata takes"),
    ({"cache_seqlens": LENGTHS.long(), "num_q_tokens_per_head_k": 64, "num_heads_k": 1}, "cache_seqlens must be int32"),
    ({"cache_seqlens": -LENGTHS, "num_q_tokens_per_head_k": 64, "num_heads_k": 1}, "cache_seqlens must be between 0"),
    ({"cache_seqlens": LENGTHS, "num_q_tokens_per_head_k": 64, "num_heads_k": 2}, "num_heads_k must be"),
    ({"cache_seqlens": LENGTHS, "num_q_tokens_per_head_k": 0, "num_heads_k": 1}, "num_q_tokens_per_head_k must be"),
    (
        {"cache_seqlens": LENGTHS, "num_q_tokens_per_head_k": 65, "num_heads_k": 1, "num_heads_q": 64},
        "num_q_tokens_per_head_k must be a multiple of num_heads_q = 64, got 65",
    ),
    ({"cache_seqlens": LENGTHS, "num_q_tokens_per_head_k": 64, "num_heads_k": 1, "topk": 0}, "topk must be"),
    (
        {"cache_seqlens": LENGTHS, "num_q_tokens_per_head_k": 64, "num_heads_k": 1, "is_fp8_kvcache": 1},
        "is_fp8_kvcache must be True or False",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), SCHEDULES, ids=[m for _, m in SCHEDULES])
def test_refused_schedules(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        get_mla_metadata(**arguments)


CACHE = torch.zeros(4, 8, 1, 576)
INDICES = torch.zeros(2, 3, 6, dtype=torch.int32)
REFUSED = [
    (decode_call(q=[1.0]), "q must be a tensor"),
    (decode_call(q=torch.zeros(2, 5, 576)), r"q must be of shape \[b, s_q, h, d\], got \[2, 5, 576\]"),
    (decode_call(q=torch.zeros(2, 3, 5, 576).long()), "q must be bfloat16 or float16 or float32, got int64"),
    (decode_call(q=torch.zeros(2, 3, 129, 576)), "q must be of 1 to 128 heads, got 129"),
    (decode_call(q=torch.zeros(2, 3, 0, 576)), "q must be of 1 to 128 heads, got 0"),
    (
        packed_call(q=torch.zeros(2, 3, 5, 192), head_dim_v=128),
        "q must be 576 or 512 wide with is_fp8_kvcache, got 192",
    ),
    (decode_call(k_cache=None), "k_cache must be a tensor"),
    (decode_call(k_cache=CACHE.squeeze(2)), "k_cache must be of shape"),
    (decode_call(k_cache=torch.zeros(4, 8, 2, 576)), "k_cache must be of shape"),
    (
        decode_call(k_cache=torch.zeros(4, 8, 1, 512)),
        "k_cache must be of shape .*C=576.*queries of width 576 need rows of 576",
    ),
    (decode_call(k_cache=CACHE.double()), "k_cache must be .*got float64"),
    (decode_call(k_cache=CACHE.to("meta")), "k_cache must be on cpu"),
    (decode_call(k_cache=torch.zeros(0, 8, 1, 576)), "k_cache must be at least one page of one row"),
    (decode_call(k_cache=torch.zeros(8, 4, 1, 576).transpose(0, 1)), "k_cache must be contiguous inside a page"),
    (decode_call(k_cache=torch.zeros(8, 1, 576).expand(4, 8, 1, 576)), "k_cache must be in pages at least 4608"),
    (decode_call(is_fp8_kvcache=True), "k_cache must be uint8 or .* with is_fp8_kvcache=True, got float32"),
    (packed_call(is_fp8_kvcache=False), "k_cache must be bfloat16 or .* with is_fp8_kvcache=False, got uint8"),
    (packed_call(k_cache=torch.zeros(4, 8, 1, 584, dtype=torch.uint8)), "k_cache must be of shape .*C=656"),
    (packed_call(k_cache=torch.zeros(4, 8 * 656 + 2, dtype=torch.uint8)[:, :-2].unflatten(1, (8, 1, 656))), "aligned"),
    (decode_call(head_dim_v=577), "head_dim_v must be between 1 and 576"),
    (
        decode_call(tile_scheduler_metadata=3),
        "tile_scheduler_metadata must be a FlashMLASchedMeta or a tensor, got int",
    ),
    (decode_call(num_splits=3), "num_splits must be a tensor or None"),
    (decode_call(softmax_scale=math.nan), "softmax_scale must be finite and > 0"),
    (decode_call(softmax_scale=torch.ones(1)), "softmax_scale must be a number"),
    (decode_call(causal=True), "causal must be False with indices"),
    (decode_call(causal=None), "causal must be True or False"),
    (decode_call(is_fp8_kvcache="yes"), "is_fp8_kvcache must be True or False"),
    (decode_call(indices=INDICES.long()), "indices must be int32, got int64"),
    (decode_call(indices=INDICES[0]), "indices must be of shape"),
    (decode_call(indices=INDICES[:1]), "indices must be of shape .*b=2"),
    (decode_call(indices=INDICES.to("meta")), "indices must be on cpu"),
    (decode_call(attn_sink=torch.zeros(4)), "attn_sink must be of shape .*h=5.*one per query head"),
    (decode_call(attn_sink=torch.zeros(5).bfloat16()), "attn_sink must be float32"),
    (decode_call(attn_sink=torch.full((5,), math.nan)), "attn_sink must be free of NaN"),
    (decode_call(topk_length=torch.ones(3).int()), "topk_length must be of shape .*n=2"),
    (decode_call(topk_length=LENGTHS * 7), "topk_length must be between 0 and 6, got a value of 7"),
    (decode_call(topk_length=-LENGTHS), "topk_length must be between 0 and 6, got a value of -1"),
    (decode_call(topk_length=LENGTHS.long()), "topk_length must be int32"),
    (decode_call(extra_k_cache=CACHE), "extra_indices_in_kvcache must be given with extra_k_cache"),
    (decode_call(extra_indices_in_kvcache=INDICES), "extra_indices_in_kvcache must be None without extra_k_cache"),
    (decode_call(extra_topk_length=LENGTHS), "extra_topk_length must be None without extra_k_cache"),
    (decode_call(extra_k_cache=CACHE.int(), extra_indices_in_kvcache=INDICES), "extra_k_cache must be"),
    (decode_call(extra_k_cache=CACHE, extra_indices_in_kvcache=INDICES[0]), "extra_indices_in_kvcache must be"),
    (
        decode_call(extra_k_cache=CACHE, extra_indices_in_kvcache=INDICES, extra_topk_length=LENGTHS * 9),
        "extra_topk_length must be between 0 and 6",
    ),
    (dense_call(block_table=None), r"block_table must be given without indices \(dense mode\)"),
    (dense_call(cache_seqlens=None), "cache_seqlens must be given without indices"),
    (dense_call(block_table=torch.zeros(3, 2).int()), "block_table must be of shape .*b=2"),
    (dense_call(block_table=torch.zeros(2, 2)), "block_table must be int32"),
    (dense_call(block_table=torch.full((2, 2), 4).int()), "block_table must be between 0 and 3, got a value of 4"),
    (dense_call(cache_seqlens=LENGTHS * 17), "cache_seqlens must be between 0 and 16, got a value of 17"),
    (dense_call(cache_seqlens=-LENGTHS), "cache_seqlens must be between 0 and 16"),
    (dense_call(topk_length=LENGTHS), r"topk_length must be None without indices \(dense mode\)"),
    (dense_call(extra_k_cache=CACHE), "extra_k_cache must be None without indices"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused_decode_calls(call: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        flash_mla.flash_mla_with_kvcache(**call)


REFUSED_PREFILL = [
    ({"q": torch.zeros(4, 576)}, "q must be of shape"),
    ({"q": torch.zeros(4, 200, 576)}, "q must be of 1 to 128 heads, got 200"),
    ({"kv": torch.zeros(20, 576)}, "kv must be of shape"),
    ({"kv": torch.zeros(20, 1, 512)}, "kv must be of shape .*d=576.*its rows are as wide as q"),
    ({"kv": torch.zeros(20, 1, 576).int()}, "kv must be bfloat16"),
    ({"kv": torch.zeros(0, 1, 576)}, "kv must be at least one"),
    ({"kv": torch.zeros(1, 1, 576).expand(20, 1, 576)}, "kv must be in pages at least 576 elements apart"),
    ({"kv": torch.zeros(576, 1, 20).transpose(0, 2)}, "kv must be contiguous"),
    ({"indices": torch.zeros(4, 6).int()}, "indices must be of shape"),
    ({"indices": torch.zeros(5, 1, 6).int()}, "indices must be of shape .*s_q=4"),
    ({"indices": torch.zeros(4, 1, 6)}, "indices must be int32"),
    ({"sm_scale": 0}, "sm_scale must be finite and > 0"),
    ({"sm_scale": None}, "sm_scale must be a number"),
    ({"d_v": 600}, "d_v must be between 1 and 576"),
    ({"attn_sink": torch.zeros(5, dtype=torch.float64)}, "attn_sink must be float32"),
    ({"topk_length": torch.full((4,), 7).int()}, "topk_length must be between 0 and 6"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED_PREFILL, ids=[m for _, m in REFUSED_PREFILL])
def test_refused_prefill_calls(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        flash_mla.flash_mla_sparse_fwd(**prefill_call(**changes))


def test_the_other_prefill_names_its_own_arguments() -> None:
    q, indices = torch.zeros(4, 5, 576), torch.zeros(4, 6, dtype=torch.int32)
    with pytest.raises(ValueError, match="kv_rows must be of shape"):
        flash_mla.flash_mla_sparse_prefill(q, torch.zeros(20, 2, 576), indices, 0.1)
    with pytest.raises(ValueError, match="softmax_scale must be finite"):
        flash_mla.flash_mla_sparse_prefill(q, torch.zeros(20, 576), indices, -1.0)
