"""The FlashInfer drop-in against fp64 over rows decoded here: formats, scales, lengths, layouts, refusals."""

import math
from typing import Any

import bounds
import pytest
import torch
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.arithmetic import ceil_div
from tamis.cache.layout import plain_fp8, rows
from tamis.integrations._flashinfer import Call, Queries, prepare
from tamis.integrations.flashinfer import trtllm_batch_decode_with_kv_cache_mla as decode_mla

E4M3 = torch.float8_e4m3fn
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LN2 = math.log(2)


def packed_pages(pages: int, size: int) -> tuple[Tensor, Tensor]:
    """656-byte rows [pages, size, 656] with scales that are no powers of two, and their fp64 values."""
    latent = torch.randn(pages, size, 512).to(E4M3)
    scales = torch.rand(pages, size, 4) + 0.5
    rope = torch.randn(pages, size, 64).bfloat16()
    storage = torch.cat([part.view(torch.uint8) for part in (latent, scales, rope)], -1)
    values = latent.double() * scales.double().repeat_interleave(128, -1)
    return storage, torch.cat([values, rope.double()], -1).flatten(0, 1)


def random_slots(shape: tuple[int, ...], rows: int) -> Tensor:
    """Slots of which a tenth are invalid in one way or another."""
    slots = torch.randint(0, rows, shape)
    hostile = torch.tensor([INT_MIN, -123456, -1, rows, INT_MAX])[torch.randint(0, 5, shape)]
    return torch.where(torch.rand(shape) < 0.1, hostile, slots).int()


def spoil_unread(storage: Tensor, slots: Tensor, counts: list[int]) -> None:
    """NaN in every row [pages, size, C] that no counted column names."""
    unread = torch.ones(storage.shape[:2].numel(), dtype=torch.bool)
    for row, count in zip(slots.flatten(0, -2), counts, strict=True):
        named = row[:count]
        unread[named[(named >= 0) & (named < len(unread))].long()] = False
    unread = unread.view(storage.shape[:2])
    if storage.dtype.itemsize == 1:
        storage.view(torch.uint8)[unread] = 255
    else:
        storage[unread] = math.nan


def dense64(
    q: Tensor, slots: Tensor, counts: list[int], table: Tensor, scale: float, value_dim: int, sink: Tensor | None
) -> bounds.Attention:
    """out [T, H, value_dim] and base-2 lse [T, H] in fp64; zeros and -inf where nothing is selected."""
    found = []
    for heads, row, count in zip(q, slots.tolist(), counts, strict=True):
        rows = table[[slot for slot in row[:count] if 0 <= slot < len(table)]]
        found.append(bounds.attention(heads, rows, scale=scale, value_dim=value_dim, sink=sink))
    exact = bounds.stacked(found)
    lse = exact.lse / LN2
    # One product with a rounded constant more.
    error = exact.lse_error / LN2 + bounds.rounded(lse.nan_to_num(neginf=0), torch.float32, 2)
    return exact._replace(lse=lse, lse_error=error)


def agree(found: Tensor, exact: bounds.Attention, dtype: torch.dtype, factor: float = 1.0) -> None:
    """What the arithmetic allows, and FlashInfer's own budget; `factor` is what the result was divided by."""
    assert found.dtype == dtype
    expected, error = (part.view(found.shape) / factor for part in (exact.out, exact.out_error))
    # The caller's division is one rounding, and so is the product with the scale that it takes back.
    error = error + (bounds.rounded(expected, torch.float32, 2) if factor != 1 else 0)
    bounds.agree(found, expected, error, dtype)
    torch.testing.assert_close(found.double(), expected, atol=8e-4, rtol=2e-2)


def agree_log(found: Tensor, exact: bounds.Attention) -> None:
    assert found.dtype == torch.float32
    bounds.agree(found, exact.lse, exact.lse_error)


def call(query: Tensor, cache: Tensor, slots: Tensor, seq_lens: Tensor | None, **options: Any) -> Any:
    """Positional where vLLM passes by position, with the widths of V3.2 unless told otherwise."""
    widths = [options.pop(name, size) for name, size in (("nope", 128), ("latent", 512), ("rope", 64))]
    top_k = options.pop("sparse_mla_top_k", slots.shape[-1])
    workspace = torch.zeros(16, dtype=torch.uint8)
    return decode_mla(query, cache, workspace, *widths, slots, seq_lens, top_k, top_k, **options)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize(("b", "q_len"), [(1, 1), (7, 1), (4, 2)])
@pytest.mark.parametrize(
    ("h", "top_k", "size", "dtype"),
    [
        (64, 128, 64, torch.bfloat16),
        (128, 300, 32, torch.bfloat16),
        (3, 128, 61, torch.float16),
        (1, 77, 1, torch.float32),
    ],
)
def test_unquantised_cache(b: int, q_len: int, h: int, top_k: int, size: int, dtype: torch.dtype, sink: bool) -> None:
    cache = torch.randn(ceil_div(640, size), size, 576).to(dtype)
    slots = random_slots((b, q_len, top_k), cache.shape[0] * size)
    seq_lens = torch.randint(0, top_k + 1, (b,), dtype=torch.int32)
    seq_lens[0] = 0 if b > 1 else top_k
    counts = seq_lens.repeat_interleave(q_len).tolist()
    spoil_unread(cache, slots, counts)
    sinks = torch.tensor([0.5, -math.inf, math.inf, -3.0]).repeat(32)[:h] if sink else None
    table = cache.double().flatten(0, 1)
    for query in (torch.randn(b, q_len, h, 576), torch.randn(b, q_len, h, 576).to(dtype)):
        out, lse = call(query, cache.unsqueeze(1), slots, seq_lens, bmm1_scale=0.07, sinks=sinks, return_lse=True)
        expected = dense64(query.flatten(0, 1), slots.flatten(0, 1), counts, table, 0.07, 512, sinks)
        agree(out, expected, query.dtype)
        agree_log(lse, expected)


@pytest.mark.parametrize(("q_scale", "k_scale"), [(1.0, 1.0), (2.0, 3.0), (0.37, 0.011)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_per_tensor_fp8_cache_and_query(q_scale: float, k_scale: float, as_tensor: bool) -> None:
    """The result is that of the dequantised query and rows, whichever way the folded scales come."""
    cache = torch.randn(10, 64, 576).to(E4M3)
    slots, seq_lens = random_slots((5, 1, 200), 640), torch.tensor([200, 0, 1, 64, 150], dtype=torch.int32)
    spoil_unread(cache, slots, seq_lens.tolist())
    query = torch.randn(5, 1, 16, 576).to(E4M3)
    softmax_scale = 0.08 / (q_scale * k_scale)
    bmm1, bmm2 = softmax_scale * q_scale * k_scale, k_scale
    factors = [torch.tensor([f]) if as_tensor else f for f in (bmm1, bmm2)]
    expected = dense64(
        query.flatten(0, 1).double() * q_scale,
        slots.flatten(0, 1),
        seq_lens.tolist(),
        cache.double().flatten(0, 1) * k_scale,
        softmax_scale,
        512,
        None,
    )
    for storage in (cache, cache.view(torch.uint8)):
        out, lse = call(query, storage, slots, seq_lens, bmm1_scale=factors[0], bmm2_scale=factors[1], return_lse=True)
        assert out.dtype == torch.bfloat16
        bounds.agree(out.flatten(0, 1), expected.out, expected.out_error, torch.bfloat16)
        torch.testing.assert_close(out.double().flatten(0, 1), expected.out, rtol=2e-2, atol=8e-4 * k_scale)
        agree_log(lse, expected)
    exact = torch.empty(5, 1, 16, 512)
    assert call(query, cache, slots, seq_lens, bmm1_scale=bmm1, bmm2_scale=bmm2, out=exact) is exact
    agree(exact / k_scale, expected, torch.float32, factor=k_scale)
    # A query that was not quantised is fine too.
    plain = call(query.float(), cache, slots, seq_lens, bmm1_scale=bmm1, bmm2_scale=bmm2)
    assert torch.equal(plain, exact)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1, 1)])
def test_a_scale_gives_the_same_bits_as_a_number_and_as_a_tensor(shape: tuple[int, ...]) -> None:
    cache, query = torch.randn(4, 8, 576).to(E4M3), torch.randn(2, 3, 4, 576).to(E4M3)
    slots = random_slots((2, 3, 20), 32)
    number = call(query, cache, slots, None, bmm1_scale=0.1, bmm2_scale=0.3)
    one, two = torch.tensor(0.1).reshape(shape), torch.tensor(0.3).reshape(shape)
    assert torch.equal(call(query, cache, slots, None, bmm1_scale=one, bmm2_scale=two), number)


@pytest.mark.parametrize("heads_axis", [False, True])
def test_packed_rows(heads_axis: bool) -> None:
    storage, table = packed_pages(9, 64)
    slots, seq_lens = random_slots((4, 2, 150), 576), torch.tensor([150, 0, 3, 64], dtype=torch.int32)
    counts = seq_lens.repeat_interleave(2).tolist()
    spoil_unread(storage, slots, counts)
    query = torch.randn(4, 2, 8, 576)
    cache = storage.unsqueeze(1) if heads_axis else storage
    out = call(query, cache, slots, seq_lens, bmm1_scale=0.05, bmm2_scale=torch.ones(1), kv_scale_format="auto")
    expected = dense64(query.flatten(0, 1), slots.flatten(0, 1), counts, table, 0.05, 512, None)
    agree(out, expected, torch.float32)


def test_counts_per_request_per_token_and_none() -> None:
    cache, query, slots = torch.randn(4, 16, 576), torch.randn(3, 2, 4, 576), random_slots((3, 2, 30), 64)
    per_token = torch.tensor([[30, 0], [1, 29], [7, 7]], dtype=torch.int32)
    table = cache.double().flatten(0, 1)

    def expect(counts: list[int]) -> bounds.Attention:
        return dense64(query.flatten(0, 1), slots.flatten(0, 1), counts, table, 1.0, 512, None)

    for given in (per_token, per_token.flatten()):
        agree(call(query, cache, slots, given), expect(per_token.flatten().tolist()), torch.float32)
    agree(call(query, cache, slots, None), expect([30] * 6), torch.float32)
    # Counts per token go first; the lengths beside them may then be those of the contexts.
    long = torch.tensor([5000, 6000, 7000], dtype=torch.int32)
    found = call(query, cache, slots, long, sparse_mla_top_k_lens=per_token.flatten())
    agree(found, expect(per_token.flatten().tolist()), torch.float32)
    assert torch.equal(call(query, cache, slots, None, sparse_mla_top_k_lens=per_token.flatten()), found)


def test_flattened_requests_of_different_lengths() -> None:
    cache, query, slots = torch.randn(4, 16, 576), torch.randn(6, 4, 576), random_slots((6, 30), 64)
    starts = torch.tensor([0, 1, 1, 4, 6], dtype=torch.int32)
    seq_lens = torch.tensor([30, 8, 5, 0], dtype=torch.int32)
    counts = [30, 5, 5, 5, 0, 0]
    expected = dense64(query, slots, counts, cache.double().flatten(0, 1), 0.1, 512, None)
    for lengths in (seq_lens, torch.tensor(counts, dtype=torch.int32)):
        out, lse = call(
            query, cache, slots, lengths, bmm1_scale=0.1, cum_seq_lens_q=starts, max_q_len=3, return_lse=True
        )
        agree(out, expected, torch.float32)
        agree_log(lse, expected)
    assert torch.equal(call(query, cache, slots, seq_lens, bmm1_scale=0.1, cum_seq_lens_q=starts), out)


def test_buffers_of_the_caller_are_written_and_returned() -> None:
    cache, query, slots = torch.randn(4, 16, 576).bfloat16(), torch.randn(3, 2, 4, 576), random_slots((3, 2, 9), 64)
    expected, expected_lse = call(query, cache, slots, None, return_lse=True)
    strided = torch.zeros(2, 3, 4, 600)[..., :512].transpose(0, 1)
    for shape in ((6, 4), (3, 2, 4)):
        lse = torch.zeros(shape)
        out, same = call(query, cache, slots, None, out=strided, lse=lse, return_lse=True)
        assert out is strided
        assert same is lse
        assert torch.equal(out, expected)
        assert torch.equal(lse.view(6, 4), expected_lse)


def prepared(cache_dtype: torch.dtype, after: float | Tensor, out: Tensor) -> Call:
    cache = torch.randn(4, 16, 576).to(cache_dtype)
    layout = plain_fp8() if cache_dtype == E4M3 else rows(cache_dtype)
    selection = Selection(PagedCache.wrap(cache, layout), random_slots((6, 9), 64))
    return prepare(torch.randn(3, 2, 4, 576), [selection], (0.1, after), None, out)


@pytest.mark.parametrize(
    ("cache_dtype", "after", "direct"),
    [
        (torch.bfloat16, 1.0, True),
        (E4M3, 1.0, True),
        (E4M3, 0.3, True),
        (E4M3, torch.tensor(0.3), True),
        (E4M3, 2.0**126, False),  # 0.1 divided by it is no normal number
        (torch.bfloat16, 0.3, False),
        (torch.bfloat16, torch.tensor(1.0), False),
    ],
)
def test_attention_writes_into_the_callers_output(cache_dtype: torch.dtype, after: Any, direct: bool) -> None:
    for out in (torch.empty(3, 2, 4, 512, dtype=torch.bfloat16), torch.empty(3, 2, 4, 600)[..., :512]):
        found = prepared(cache_dtype, after, out)
        assert (found.attend.out.data_ptr() == out.data_ptr()) == (found.target is None) == direct
        assert found.attend.out.dtype == (out.dtype if direct else torch.float32)
    # Rows that cannot be joined into one axis are copied.
    apart = prepared(cache_dtype, after, torch.empty(2, 3, 4, 512).transpose(0, 1))
    assert apart.target is not None


def test_the_requests_of_tokens_are_looked_up_only_where_counts_are_per_request(monkeypatch) -> None:
    monkeypatch.setattr(Queries, "request", property(lambda self: pytest.fail("it was looked up")))
    cache, query, slots = torch.randn(4, 16, 576), torch.randn(3, 1, 4, 576), random_slots((3, 1, 30), 64)
    for counts in (None, torch.tensor([1, 2, 30], dtype=torch.int32)):
        call(query, cache, slots, counts)
        starts = torch.tensor([0, 2, 3], dtype=torch.int32)
        call(query[:, 0], cache, slots[:, 0], counts, cum_seq_lens_q=starts)


def test_a_factor_that_no_cache_has_is_applied_before_the_only_rounding() -> None:
    cache, query, slots = torch.randn(4, 16, 576), torch.randn(3, 2, 4, 576), random_slots((3, 2, 9), 64)
    exact = call(query, cache, slots, None, out=torch.empty(3, 2, 4, 512))
    found = call(query, cache, slots, None, bmm2_scale=0.3, out=torch.empty(3, 2, 4, 512, dtype=torch.bfloat16))
    assert torch.equal(found, (exact * 0.3).bfloat16())


def test_strided_pages_and_non_contiguous_inputs() -> None:
    apart = torch.full((5, 3, 16, 576), math.nan)
    cache = apart[:, 1]
    cache.copy_(torch.randn(5, 16, 576))
    query = torch.randn(4, 3, 2, 576).transpose(0, 1)
    slots = random_slots((11, 3, 4), 80).permute(1, 2, 0)
    counts = torch.tensor([[11, 3, 5, 0], [1, 2, 3, 4], [11, 11, 11, 11]], dtype=torch.int32)
    found = call(query, cache, slots, counts)
    assert torch.equal(found, call(query.contiguous(), cache.contiguous(), slots.contiguous(), counts))
    assert found.isfinite().all()
    quantised = query.to(E4M3)
    found = call(quantised, cache, slots, counts)
    assert torch.equal(found, call(quantised.contiguous(), cache.contiguous(), slots.contiguous(), counts))


@pytest.mark.parametrize(("latent", "rope"), [(512, 0), (128, 32)])
def test_other_widths_and_any_nope_width(latent: int, rope: int) -> None:
    cache, query = torch.randn(4, 16, latent + rope), torch.randn(3, 1, 5, latent + rope)
    slots = random_slots((3, 1, 40), 64)
    widths = {"latent": latent, "rope": rope}
    expected = dense64(
        query.flatten(0, 1), slots.flatten(0, 1), [40] * 3, cache.double().flatten(0, 1), 1.0, latent, None
    )
    for nope in (0, 1, 64, 128, 192):
        agree(call(query, cache, slots, None, nope=nope, **widths), expected, torch.float32)


def test_options_that_only_steer_kernels_have_no_effect() -> None:
    cache, query, slots = torch.randn(4, 16, 576), torch.randn(3, 1, 4, 576), random_slots((3, 1, 9), 64)
    options = {
        "enable_pdl": True,
        "backend": "trtllm-gen",
        "is_var_seq": False,
        "uses_shared_paged_kv_idx": True,
        "skip_softmax_threshold_scale_factor": None,
        "multi_ctas_kv_counter_buffer": torch.zeros(4),
        "kv_scale_format": "arbitrary_fp32",
    }
    assert torch.equal(call(query, cache, slots, None, **options), call(query, cache, slots, None))


def test_a_sink_may_come_in_a_list() -> None:
    cache, query, slots = torch.randn(4, 16, 576), torch.randn(3, 1, 4, 576), random_slots((3, 1, 9), 64)
    sink = torch.tensor([0.0, math.inf, -math.inf, 2.0])
    assert torch.equal(call(query, cache, slots, None, sinks=[sink]), call(query, cache, slots, None, sinks=sink))


Q, CACHE = torch.zeros(3, 2, 4, 576), torch.zeros(4, 16, 576)
SLOTS, COUNTS = torch.zeros(3, 2, 9, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
FLAT = {"query": Q.flatten(0, 1), "slots": SLOTS.flatten(0, 1), "seq_lens": None}
REFUSED = [
    ({"sparse_mla_top_k": 0}, "sparse_mla_top_k must be > 0 .only the sparse mode .*flash_mla_with_kvcache"),
    ({"sparse_mla_top_k": 8}, "block_tables must be of shape .*K=8"),
    ({"query": Q[0]}, "query must be of shape .*needs cum_seq_lens_q"),
    ({"query": Q[..., :512]}, "query must be of shape .*D=576"),
    ({"query": Q.double()}, "query must be bfloat16"),
    ({"query": Q.int()}, "query must be bfloat16"),
    ({"query": torch.zeros(3, 2, 129, 576)}, "query must be of 1 to 128 heads"),
    ({"cache": None}, "kv_cache must be a tensor"),
    ({"cache": CACHE[0]}, "kv_cache must be of shape"),
    ({"cache": CACHE.unsqueeze(2)}, "kv_cache must be of shape .*1"),
    ({"cache": CACHE.double()}, "kv_cache must be bfloat16"),
    ({"cache": CACHE[..., :512]}, "kv_cache must be 576 wide.*got float32 rows of 512"),
    ({"cache": torch.zeros(4, 16, 584, dtype=torch.uint8)}, "kv_cache must be 576 wide.*packed 656-byte rows"),
    ({"cache": CACHE.to("meta")}, "kv_cache must be on cpu"),
    ({"cache": CACHE.transpose(0, 1)}, "kv_cache must be contiguous inside a page"),
    ({"slots": SLOTS.long()}, "block_tables must be int32"),
    ({"slots": SLOTS[:, 0]}, "block_tables must be of shape"),
    ({"slots": SLOTS[:2]}, "block_tables must be of shape .*B=3"),
    ({"seq_lens": COUNTS.long()}, "seq_lens must be int32"),
    ({"seq_lens": COUNTS[:2]}, "seq_lens must be of shape .*one count per request or per query token"),
    ({"seq_lens": COUNTS * 10}, "seq_lens must be between 0 and 9"),
    ({"seq_lens": -COUNTS}, "seq_lens must be between 0 and 9"),
    ({"sparse_mla_top_k_lens": COUNTS}, "sparse_mla_top_k_lens must be of shape .*n=6"),
    ({"sparse_mla_top_k_lens": torch.full((6,), 10).int()}, "sparse_mla_top_k_lens must be between 0 and 9"),
    ({"out": torch.zeros(3, 2, 4, 576)}, "out must be of shape"),
    ({"out": torch.zeros(3, 2, 4, 512).int()}, "out must be bfloat16"),
    ({"lse": torch.zeros(3, 4)}, "lse must be of shape"),
    ({"lse": torch.zeros(6, 4).double()}, "lse must be float32"),
    ({"bmm1_scale": 0.0}, "bmm1_scale must be finite and > 0"),
    ({"bmm1_scale": torch.ones(2)}, "bmm1_scale must be one float32 element"),
    ({"bmm1_scale": torch.tensor([math.nan])}, "bmm1_scale must be finite"),
    ({"bmm2_scale": "1"}, "bmm2_scale must be a number"),
    ({"bmm2_scale": torch.ones(1).double()}, "bmm2_scale must be one float32 element"),
    (
        {"cache": torch.zeros(4, 16, 656, dtype=torch.uint8), "bmm2_scale": 0.5},
        "bmm2_scale must be 1.0 with packed rows, got 0.5",
    ),
    ({"sinks": torch.zeros(5)}, "sinks must be of shape .*h=4"),
    ({"sinks": torch.full((4,), math.nan)}, "sinks must be free of NaN"),
    ({"sinks": [torch.zeros(4), torch.zeros(4)]}, "sinks must be a float32 tensor"),
    ({"max_q_len": 2}, "max_q_len must be None without cum_seq_lens_q"),
    (FLAT | {"cum_seq_lens_q": torch.tensor([0, 2, 5]).int()}, "cum_seq_lens_q must be a running sum from 0 to 6"),
    (FLAT | {"cum_seq_lens_q": torch.tensor([0, 4, 2, 6]).int()}, "cum_seq_lens_q must be a running sum"),
    (FLAT | {"cum_seq_lens_q": torch.tensor([6]).int()}, "cum_seq_lens_q must be at least two long"),
    (FLAT | {"cum_seq_lens_q": torch.tensor([0, 6])}, "cum_seq_lens_q must be int32"),
    (FLAT | {"cum_seq_lens_q": torch.tensor([0, 5, 6]).int(), "max_q_len": 4}, "max_q_len must be >= 5"),
    ({"cum_seq_lens_q": torch.tensor([0, 6]).int()}, "query must be of shape"),
    ({"skip_softmax_threshold_scale_factor": 1.0}, "skip_softmax_threshold_scale_factor must be None"),
    ({"uses_shared_paged_kv_idx": False}, "uses_shared_paged_kv_idx must be True"),
    ({"causal_seqlens_kv_global": COUNTS}, "causal_seqlens_kv_global must be None"),
    ({"cp_world": 2}, "cp_world must be 1"),
    ({"window": 3}, "does not know the argument 'window'"),
    ({"latent": 0}, "kv_lora_rank must be >= 1"),
    ({"rope": -1}, "qk_rope_head_dim must be >= 0"),
    ({"nope": "128"}, "qk_nope_head_dim must be an int"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused_calls(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"query": Q, "cache": CACHE, "slots": SLOTS, "seq_lens": COUNTS} | changes
    with pytest.raises((TypeError, ValueError), match=message):
        call(**arguments)
