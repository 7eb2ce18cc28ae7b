"""Calls of FlashMLA's functions that are remembered launch what they would launch if nothing were remembered."""

from typing import Any

import pytest
import torch
from pretended import Pretended
from remembered import Change, Given, added, calls_of, compare, every_other, in_place, ints, outcome, shifted, widened
from torch import Tensor

from tamis import PagedCache
from tamis.integrations.flash_mla import FlashMLASchedMeta, flash_mla_sparse_fwd, flash_mla_with_kvcache

pytestmark = pytest.mark.own_settings("changes settings itself")
BF16 = torch.bfloat16


def pages(layout: str = "v32-fp8", count: int = 6, page_size: int = 64) -> Tensor:
    return PagedCache(layout, count, page_size).storage.unsqueeze(2)


def spaced_pages() -> Tensor:
    return torch.zeros(6, 2 * 64, 656, dtype=torch.uint8)[:, 64:].unsqueeze(2)


def decoding(requests: int = 4, queries: int = 1, heads: int = 16, **more: Any) -> Given:
    given = {"q": torch.zeros(requests, queries, heads, 576, dtype=BF16), "k_cache": pages()}
    given |= {"block_table": None, "cache_seqlens": None, "head_dim_v": 512, "tile_scheduler_metadata": None}
    return given | {"is_fp8_kvcache": True, "indices": ints(requests, queries, 640), "softmax_scale": 0.1} | more


def run_decode(given: Given) -> Any:
    return flash_mla_with_kvcache(**given)


def turned(tensor: Tensor) -> Tensor:
    """The same values with the first two axes in the other order."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def out_of(given: Given) -> Tensor:
    return torch.zeros(*given["q"].shape[:3], 512, dtype=BF16)


def v4(requests: int = 4, queries: int = 1, **more: Any) -> Given:
    q = torch.zeros(requests, queries, 64, 512, dtype=BF16)
    caches = {"k_cache": pages("v4-fp8"), "extra_k_cache": pages("v4-fp8", 9, 2)}
    lists = {"indices": ints(requests, queries, 128), "extra_indices_in_kvcache": ints(requests, queries, 512)}
    return decoding() | {"q": q} | caches | lists | more


DECODE: dict[str, Change] = {
    "nothing": lambda given: given,
    "requests": lambda given: given | decoding(7),
    "no requests": lambda given: given | decoding(0),
    "queries": lambda given: given | decoding(4, 2),
    "no queries": lambda given: given | decoding(4, 0),
    "requests as queries": lambda given: given | decoding(1, 4),
    "queries and lengths": lambda given: given | decoding(4, 2) | {"topk_length": ints(4)},
    "heads": lambda given: given | decoding(heads=24),
    "no heads": lambda given: given | decoding(heads=129),
    "fp16": in_place("q", Tensor.half),
    "e4m3": in_place("q", lambda q: q.to(torch.float8_e4m3fn)),
    "query with gaps": in_place("q", widened),
    "query turned": lambda given: given | decoding(4, 2) | {"q": turned(decoding(4, 2)["q"])},
    "query 2 bytes off": in_place("q", lambda q: shifted(q, 1)),
    "query with a gradient": in_place("q", lambda q: q.clone().requires_grad_()),
    "no query": added(q=None),
    "bf16 rows": added(k_cache=lambda: pages("v32-bf16"), is_fp8_kvcache=False),
    "bf16 rows, said to be FP8": added(k_cache=lambda: pages("v32-bf16")),
    "rows of int8": in_place("k_cache", lambda pages: pages.view(torch.int8)),
    "pages with gaps": added(k_cache=spaced_pages),
    "page size": added(k_cache=lambda: pages(page_size=16)),
    "cache with a gradient": added(k_cache=lambda: pages("v32-bf16").requires_grad_(), is_fp8_kvcache=False),
    "indices turned": lambda given: given | decoding(4, 2) | {"indices": turned(ints(4, 2, 640))},
    "indices int64": in_place("indices", Tensor.long),
    "indices of another length": in_place("indices", lambda indices: indices[:2]),
    "lengths": added(topk_length=lambda: ints(4)),
    "lengths with gaps": added(topk_length=lambda: every_other(ints(4))),
    "lengths of another length": added(topk_length=lambda: ints(3)),
    "sink": added(attn_sink=lambda: torch.zeros(16)),
    "sink of one number": added(attn_sink=lambda: torch.zeros(1).expand(16)),
    "sink with a gradient": added(attn_sink=lambda: torch.zeros(16, requires_grad=True)),
    "metadata": added(tile_scheduler_metadata=FlashMLASchedMeta),
    "metadata of another kind": added(tile_scheduler_metadata="metadata"),
    "splits of another kind": added(num_splits=3),
    "ignored tables": added(block_table=lambda: ints(4, 2), cache_seqlens=lambda: ints(4)),
    "usual scale": added(softmax_scale=None),
    "another scale": added(softmax_scale=0.3),
    "a scale of 1": added(softmax_scale=1),
    "a negative scale": added(softmax_scale=-1.0),
    "causal": added(causal=True),
    "causal 0": added(causal=0),
    "format": added(kv_format="V32"),
    "another format": added(kv_format="V4"),
    "FP8 by its dtype": added(is_fp8_kvcache=None),
    "FP8 as a number": added(is_fp8_kvcache=1),
    "invariant": added(enable_batch_invariant=True),
    "invariant as a number": added(enable_batch_invariant=1),
    "legacy": added(use_legacy=True),
    "legacy as a number": added(use_legacy=0),
    "descale": added(descale_q=1.0),
    "head_dim_v as a float": added(head_dim_v=512.0),
    "extra indices alone": added(extra_indices_in_kvcache=lambda: ints(4, 1, 64)),
    "two caches": lambda given: given | v4(),
    "given output": lambda given: given | {"out": out_of(given)},
    "given output with gaps": lambda given: given | {"out": widened(out_of(given))},
    "output turned": lambda given: given | decoding(4, 2) | {"out": turned(out_of(decoding(4, 2)))},
    "output in the query": lambda given: given | {"out": given["q"][..., :512]},
    "output with a gradient": lambda given: given | {"out": out_of(given).requires_grad_()},
}


@pytest.mark.parametrize("name", DECODE)
def test_decode(pretended: Pretended, name: str) -> None:
    base = decoding()
    compare(pretended, run_decode, base, DECODE[name](dict(base)))


V4: dict[str, Change] = {
    "nothing": lambda given: given,
    "queries": lambda given: given | v4(4, 3),
    "one cache": lambda given: given | {"extra_k_cache": None, "extra_indices_in_kvcache": None},
    "indices without a cache": added(extra_k_cache=None),
    "cache without indices": added(extra_indices_in_kvcache=None),
    "lengths": added(topk_length=lambda: ints(4)),
    "extra lengths": added(extra_topk_length=lambda: ints(4)),
    "lengths of queries": lambda given: given | v4(4, 3) | {"topk_length": ints(4), "extra_topk_length": ints(4)},
    "extra columns": added(extra_indices_in_kvcache=lambda: ints(4, 1, 1024)),
    "extra pages": added(extra_k_cache=lambda: pages("v4-fp8", 9, 64)),
    "extra cache with a gradient": added(extra_k_cache=lambda: pages("v32-bf16").requires_grad_()),
    "sink": added(attn_sink=lambda: torch.zeros(64)),
    "given output": lambda given: given | {"out": out_of(given)},
}


@pytest.mark.parametrize("name", V4)
def test_decode_over_two_caches(pretended: Pretended, name: str) -> None:
    base = v4()
    compare(pretended, run_decode, base, V4[name](dict(base)))


def prefilling(queries: int = 5, heads: int = 16, rows: int = 90, **more: Any) -> Given:
    given = {"q": torch.zeros(queries, heads, 576, dtype=BF16), "kv": torch.zeros(rows, 1, 576, dtype=BF16)}
    return given | {"indices": ints(queries, 1, 640), "sm_scale": 0.1} | more


def run_prefill(given: Given) -> Any:
    return [tensor for tensor in flash_mla_sparse_fwd(**given) if tensor is not None]


PREFILL: dict[str, Change] = {
    "nothing": lambda given: given,
    "queries": lambda given: given | prefilling(300),
    "no queries": lambda given: given | prefilling(0),
    "heads": lambda given: given | prefilling(300, 128),
    "rows": lambda given: given | prefilling(rows=70),
    "rows with gaps": in_place("kv", widened),
    "rows 2 bytes off": in_place("kv", lambda kv: shifted(kv, 8)),
    "rows with a gradient": in_place("kv", lambda kv: kv.clone().requires_grad_()),
    "rows in two axes": in_place("kv", lambda kv: kv[:, 0]),
    "query with gaps": in_place("q", widened),
    "query with a gradient": in_place("q", lambda q: q.clone().requires_grad_()),
    "indices with gaps": in_place("indices", widened),
    "indices int64": in_place("indices", Tensor.long),
    "lengths": added(topk_length=lambda: ints(5)),
    "lengths with gaps": added(topk_length=lambda: every_other(ints(5))),
    "sink": added(attn_sink=lambda: torch.zeros(16)),
    "another scale": added(sm_scale=0.3),
    "a negative scale": added(sm_scale=-0.3),
    "no scale": added(sm_scale=None),
    "base 2": added(return_log2_lse=True),
    "no lse": added(return_log2_lse=False),
    "base 2 as a number": added(return_log2_lse=1),
    "no lse as a number": added(return_log2_lse=0),
    "legacy": added(use_legacy=True),
    "d_v as a float": added(d_v=512.0),
    "d_v": added(d_v=600),
    "given output": lambda given: given | {"out": torch.zeros(*given["q"].shape[:2], 512, dtype=BF16)},
    "output in the rows": lambda given: given | prefilling(rows=5) | {"out": given["kv"][:5].expand(5, 16, 576)},
}


@pytest.mark.parametrize("name", PREFILL)
def test_prefill(pretended: Pretended, name: str) -> None:
    base = prefilling()
    compare(pretended, run_prefill, base, PREFILL[name](dict(base)))


@pytest.mark.parametrize("name", ["k_cache", "extra_k_cache"])
def test_a_cache_that_needs_a_gradient_is_refused_where_that_matters(pretended: Pretended, name: str) -> None:
    caches = {"k_cache": pages("v32-bf16"), "extra_k_cache": pages("v32-bf16")}
    given = decoding(requests=40, heads=64) | caches | {"is_fp8_kvcache": False}
    given["extra_indices_in_kvcache"] = ints(40, 1, 64)
    run_decode(given)
    given[name].requires_grad_()
    for _ in range(2):
        with torch.no_grad():
            run_decode(given)
        with pytest.raises(ValueError, match=f"{name} must be without gradient"):
            run_decode(given)


def test_a_default_device_changes_nothing(pretended: Pretended) -> None:
    for run, given in ((run_decode, decoding()), (run_decode, v4()), (run_prefill, prefilling())):
        expected = outcome(pretended, run, given)
        with torch.device("meta"):
            for _ in range(2):
                assert outcome(pretended, run, given) == expected


MOST_CALLS = {"decode": 44, "decode over two caches": 56, "prefill": 44}
"""Calls of functions that a remembered call may make, those of torch included. Each costs 0.1 us and more."""


def test_a_remembered_call_does_little(pretended: Pretended) -> None:
    doors = {"decode": (run_decode, decoding()), "prefill": (run_prefill, prefilling(300))}
    doors["decode over two caches"] = (run_decode, v4(attn_sink=torch.zeros(64)))
    with torch.no_grad():
        found = {name: calls_of(*door) for name, door in doors.items()}
    assert {name: count for name, count in found.items() if count > MOST_CALLS[name]} == {}
    with torch.device("meta"), torch.no_grad():
        assert {name: calls_of(*door) for name, door in doors.items()} == found, "a default device costs nothing"
