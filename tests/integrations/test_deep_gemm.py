"""DeepGEMM's indexer functions, on tamis, against the formula they are documented with."""

import inspect
from itertools import pairwise

import pytest
import torch
from seeds import reseed

from tamis import PagedCache
from tamis.arithmetic import ceil_div
from tamis.cache.layout import index_fp8
from tamis.integrations import deep_gemm
from tamis.ops import gather_index, topk_positions, write_kv

E4M3 = torch.float8_e4m3fn


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def formula(q: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Dense logits [M, N] of float operands."""
    logits = torch.relu(torch.einsum("mhd,nd->mhn", q.double(), keys.double()))
    return torch.einsum("mh,mhn->mn", weights.double(), logits)


def paged(batch: int, tokens: int, heads: int, *, page_size: int = 64, dim: int = 128, longest: int = 200):
    """Arguments of a paged call, and each request's keys as stored."""
    reseed(batch * 100 + tokens)
    width = ceil_div(longest, page_size)
    cache = PagedCache(index_fp8(dim=dim), batch * width + 1, page_size)
    write_kv(torch.randn(cache.rows, dim), cache, torch.arange(cache.rows))
    table = (torch.randperm(batch * width) + 1).view(batch, width).int()
    lengths = torch.randint(tokens, longest + 1, (batch,), dtype=torch.int32)
    q = torch.randn(batch, tokens, heads, dim).to(E4M3)
    arguments = {
        "q": q,
        "kv_cache": cache.storage.unsqueeze(2),
        "weights": torch.randn(batch * tokens, heads),
        "context_lens": (lengths.unsqueeze(1) + torch.arange(1 - tokens, 1)).int(),
        "block_table": table,
        "schedule_meta": deep_gemm.get_paged_mqa_logits_metadata(lengths, page_size, 132),
        "max_context_len": longest,
    }
    every = torch.arange(width * page_size)
    keys = [cache.read(row.long()[every // page_size] * page_size + every % page_size)[:longest] for row in table]
    return arguments, keys


def test_names_and_arguments_are_those_of_deep_gemm() -> None:
    dense = "q kv weights cu_seq_len_k_start cu_seq_len_k_end clean_logits max_seqlen_k"
    pages = "q kv_cache weights context_lens block_table schedule_meta max_context_len clean_logits indices"
    assert list(inspect.signature(deep_gemm.fp8_mqa_logits).parameters) == dense.split()
    assert list(inspect.signature(deep_gemm.fp8_paged_mqa_logits).parameters) == pages.split()
    schedule = inspect.signature(deep_gemm.get_paged_mqa_logits_metadata).parameters
    assert list(schedule) == ["context_lens", "block_kv", "num_sms", "indices"]


@pytest.mark.parametrize("clean", [True, False])
def test_gathered_keys(clean: bool) -> None:
    rows, total, heads = 60, 300, 32
    q, weights = torch.randn(rows, heads, 128).to(E4M3), torch.randn(rows, heads)
    keys, scales = torch.randn(total, 128).to(E4M3), torch.rand(total) + 0.5
    starts = torch.randint(0, 100, (rows,), dtype=torch.int32)
    ends = starts + torch.randint(0, 200, (rows,), dtype=torch.int32)
    found = deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, starts, ends, clean_logits=clean)
    expected = formula(q.float(), keys.float() * scales.unsqueeze(1), weights)
    column = torch.arange(total)
    seen = (column >= starts.unsqueeze(1)) & (column < ends.unsqueeze(1))
    assert found.dtype == torch.float32
    assert torch.equal(found > -torch.inf, seen)
    assert calc_diff(found[seen], expected[seen]) < 1e-10
    short = deep_gemm.fp8_mqa_logits(q, (keys, scales), weights, starts, ends, clean, 200)
    assert short.shape == (rows, 200)
    for row in range(rows):
        count = int(ends[row] - starts[row])
        assert torch.equal(short[row, :count], found[row, starts[row] : ends[row]])
        assert (short[row, count:] == -torch.inf).all()


def test_no_keys_at_all() -> None:
    q, weights, bounds = torch.randn(2, 4, 16).to(E4M3), torch.randn(2, 4), ints([0, 0])
    none = torch.zeros(0, 16).to(E4M3), torch.zeros(0)
    assert deep_gemm.fp8_mqa_logits(q, none, weights, bounds, bounds).shape == (2, 0)
    short = deep_gemm.fp8_mqa_logits(q, none, weights, bounds, bounds, False, 5)
    assert (short == -torch.inf).all()
    assert short.shape == (2, 5)


@pytest.mark.parametrize(("batch", "tokens"), [(4, 1), (2, 2), (2, 4), (3, 3)])
@pytest.mark.parametrize(("heads", "page_size"), [(32, 64), (64, 32), (5, 7)])
def test_paged_keys(batch: int, tokens: int, heads: int, page_size: int) -> None:
    arguments, keys = paged(batch, tokens, heads, page_size=page_size)
    found = deep_gemm.fp8_paged_mqa_logits(**arguments)
    assert found.shape == (batch * tokens, 200)
    for request in range(batch):
        for token in range(tokens):
            row, seen = request * tokens + token, int(arguments["context_lens"][request, token])
            q, weights = arguments["q"][request, token].float(), arguments["weights"][row]
            expected = formula(q.unsqueeze(0), keys[request], weights.unsqueeze(0))[0]
            assert calc_diff(found[row, :seen], expected[:seen]) < 1e-10
            assert (found[row, seen:] == -torch.inf).all()
    per_request = arguments | {"context_lens": arguments["context_lens"][:, -1].contiguous()}
    assert torch.equal(deep_gemm.fp8_paged_mqa_logits(**per_request), found), "the last token's length is enough"


@pytest.mark.parametrize("padding", [-3, -(2**31)])
def test_padded_requests_see_nothing(padding: int) -> None:
    arguments, _ = paged(3, 2, 8)
    lengths = ints([0, 1, padding])
    found = deep_gemm.fp8_paged_mqa_logits(**(arguments | {"context_lens": lengths}))
    assert (found > -torch.inf).sum(1).tolist() == [0, 0, 0, 1, 0, 0]


def test_the_way_of_an_engine_from_logits_to_positions() -> None:
    """Prefill gathers its keys and counts from the row's start; decode reads pages. Both select the same."""
    arguments, _ = paged(2, 4, 32)
    lengths = arguments["context_lens"].flatten()
    decode = topk_positions(deep_gemm.fp8_paged_mqa_logits(**arguments), lengths, 64)
    cache = PagedCache.wrap(arguments["kv_cache"], "index-fp8")
    whole = arguments["context_lens"].amax(1)
    gathered = gather_index(cache, arguments["block_table"], whole, rows=400)
    starts = torch.cat((whole.new_zeros(1), whole.cumsum(0)[:-1].int())).repeat_interleave(4)
    dense = deep_gemm.fp8_mqa_logits(
        arguments["q"].flatten(0, 1), gathered, arguments["weights"], starts, starts + lengths, False, 200
    )
    assert torch.equal(topk_positions(dense, lengths, 64), decode)


@pytest.mark.parametrize("sms", [1, 7, 132])
def test_the_schedule_cuts_the_work_evenly(sms: int) -> None:
    lengths = ints([1000, 0, 256, 257, 5])
    pieces = [(request, piece) for request, count in enumerate((4, 0, 1, 2, 1)) for piece in range(count)]
    found = deep_gemm.get_paged_mqa_logits_metadata(lengths, 64, sms)
    assert found.dtype == torch.int32
    assert found.shape == (sms + 1, 2)
    starts = [pieces.index(tuple(row)) if tuple(row) in pieces else len(pieces) for row in found.tolist()]
    assert starts[0] == 0
    assert starts[-1] == len(pieces)
    sizes = [b - a for a, b in pairwise(starts)]
    assert max(sizes) - min(sizes) <= 1
    per_token = torch.stack((lengths - 1, lengths), 1)
    assert torch.equal(deep_gemm.get_paged_mqa_logits_metadata(per_token, 64, sms, indices=lengths), found)
    assert deep_gemm.get_paged_mqa_logits_metadata(lengths[:0], 64, sms).tolist() == [[0, 0]] * (sms + 1)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"q": torch.randn(2, 8, 128)}, ValueError, "q must be of shape"),
        ({"kv_cache": torch.zeros(4, 64, 132, dtype=torch.uint8)}, ValueError, r"kv_cache must be of shape \[pages"),
        ({"kv_cache": torch.zeros(4, 64, 1, 100, dtype=torch.uint8)}, ValueError, "kv_cache must be of shape"),
        ({"weights": torch.randn(2, 8)}, ValueError, "weights must be of shape"),
        ({"context_lens": torch.tensor([1, 2])}, TypeError, r"context_lens must be an int32 tensor \[B\] or \[B, n\]"),
        ({"context_lens": ints([1, 2, 3])}, ValueError, "context_lens must be of shape"),
        ({"context_lens": ints([1, 999])}, ValueError, "context_lens must be between 0 and 200"),
        ({"block_table": ints([[1]])}, ValueError, "block_table must be of shape"),
        ({"max_context_len": -1}, ValueError, "max_context_len must be >= 0"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(fields, kind, message) -> None:
    arguments, _ = paged(2, 2, 8)
    with pytest.raises(kind, match=message):
        deep_gemm.fp8_paged_mqa_logits(**(arguments | fields))


def test_bad_pairs_are_refused() -> None:
    q, bounds = torch.randn(1, 4, 16).to(E4M3), ints([0])
    with pytest.raises(TypeError, match=r"kv must be a pair \(keys, scales\)"):
        deep_gemm.fp8_mqa_logits(q, torch.zeros(3, 16), torch.zeros(1, 4), bounds, bounds)
