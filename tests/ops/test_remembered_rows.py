"""Writes, selections and translations that are remembered launch what they would launch if nothing were remembered."""

import pytest
import torch
from pretended import Pretended
from remembered import (
    Change,
    Given,
    added,
    calls_of,
    compare,
    every_other,
    in_place,
    indexing,
    ints,
    paged,
    run_index,
    run_translate,
    run_write,
    shifted,
    translating,
    unaligned_cache,
    widened,
    with_gaps,
    writing,
)
from torch import Tensor

from tamis.cache.layout import rows, v32_fp8

pytestmark = pytest.mark.own_settings("changes settings itself")
BF16 = torch.bfloat16


# --- write_kv -------------------------------------------------------------------------------------------------------


def halves(kv: Tensor) -> tuple[Tensor, Tensor]:
    return kv[:, :512], kv[:, 512:]


WRITE: dict[str, Change] = {
    "nothing": lambda given: given,
    "rows": lambda given: given | writing(7),
    "no rows": lambda given: given | writing(0),
    "float32": in_place("kv", Tensor.float),
    "float64": in_place("kv", Tensor.double),
    "kv with gaps": in_place("kv", widened),
    "kv turned": in_place("kv", lambda kv: kv.t().contiguous().t()),
    "kv 2 bytes off": in_place("kv", lambda kv: shifted(kv, 1)),
    "a pair": in_place("kv", halves),
    "a pair of two dtypes": in_place("kv", lambda kv: (kv[:, :512], kv[:, 512:].float())),
    "a pair of three": in_place("kv", lambda kv: (*halves(kv), kv)),
    "kv with a gradient": in_place("kv", lambda kv: kv.clone().requires_grad_()),
    "one in a tuple": in_place("kv", lambda kv: (kv,)),
    "fewer slots": in_place("slots", lambda slots: slots[:2]),
    "more slots": added(slots=lambda: torch.arange(5)),
    "slots int32": in_place("slots", Tensor.int),
    "slots 8 bytes off": in_place("slots", lambda slots: shifted(slots, 1)),
    "slots with gaps": in_place("slots", every_other),
    "slots in two axes": in_place("slots", lambda slots: slots[None]),
    "page size": added(cache=lambda: paged(page_size=16)),
    "pages": added(cache=lambda: paged(pages=9)),
    "pages with gaps": added(cache=with_gaps),
    "cache not aligned": added(cache=unaligned_cache),
    "bf16 rows": added(cache=lambda: paged("v32-bf16")),
    "planar rows": added(cache=lambda: paged("v4-fp8")),
    "exact scales": added(cache=lambda: paged(v32_fp8(scale_mode="exact"))),
    "one scale": added(cache=lambda: paged("plain-fp8", scale=0.5)),
    "another scale": added(cache=lambda: paged("plain-fp8", scale=0.25)),
    "a scale in memory": added(cache=lambda: paged("plain-fp8", scale=torch.tensor(0.5))),
    "no cache": added(cache=lambda: torch.zeros(6, 64, 656)),
    "backend": added(backend="triton"),
}


@pytest.mark.parametrize("name", WRITE)
@pytest.mark.parametrize("layout", ["v32-fp8", "plain-fp8"])
def test_write_kv(pretended: Pretended, name: str, layout: str) -> None:
    base = writing(layout=layout)
    compare(pretended, run_write, base, WRITE[name](dict(base)))


# --- index_topk -----------------------------------------------------------------------------------------------------


INDEX: dict[str, Change] = {
    "nothing": lambda given: given,
    "tokens": lambda given: given | indexing(6),
    "no tokens": lambda given: given | indexing(0),
    "heads": lambda given: given | indexing(heads=16),
    "prefill": lambda given: given | indexing(12) | {"block_table": ints(2, 9)},
    "fp8 query": in_place("q", lambda q: q.to(torch.float8_e4m3fn)),
    "query with gaps": in_place("q", widened),
    "query turned": in_place("q", lambda q: q.transpose(1, 2).contiguous().transpose(1, 2)),
    "query 2 bytes off": in_place("q", lambda q: shifted(q, 1)),
    "query with a gradient": in_place("q", lambda q: q.clone().requires_grad_()),
    "bf16 weights": in_place("weights", Tensor.bfloat16),
    "weights with gaps": in_place("weights", widened),
    "weights with a gradient": in_place("weights", lambda weights: weights.clone().requires_grad_()),
    "mxfp4 keys": added(cache=lambda: paged("index-mxfp4")),
    "page size": added(cache=lambda: paged("index-fp8", page_size=32)),
    "pages with gaps": added(cache=lambda: with_gaps("index-fp8")),
    "latent rows": added(cache=paged),
    "ids with gaps": in_place("request_ids", every_other),
    "ids int64": in_place("request_ids", Tensor.long),
    "table with gaps": in_place("block_table", widened),
    "table turned": in_place("block_table", lambda table: table.t().contiguous().t()),
    "wider table": lambda given: given | {"block_table": ints(4, 11)},
    "no table": lambda given: given | {"block_table": ints(4, 0)},
    "lengths 4 bytes off": added(lengths=lambda: ints(5)[1:]),
    "lengths with gaps": in_place("lengths", every_other),
    "k": added(k=65),
    "k as a float": added(k=64.0),
    "k too large": added(k=5000),
    "small workspace": added(workspace_bytes=5000),
    "an output": added(out=lambda: ints(4, 64)),
    "an output of int64": added(out=lambda: ints(4, 64).long()),
    "an output with gaps": added(out=lambda: ints(4, 65)[:, :64]),
    "an output of floats": added(out=lambda: torch.zeros(4, 64).requires_grad_()),
    "backend": added(backend="hopper"),
}


@pytest.mark.parametrize("name", INDEX)
def test_index_topk(pretended: Pretended, name: str) -> None:
    base = indexing()
    compare(pretended, run_index, base, INDEX[name](dict(base)))


ROW_BYTES = 9 * 64 * 4
"""Scores of one token."""
CHUNKED: dict[str, Change] = {
    "nothing": lambda given: given,
    "addresses": lambda given: given | by_hopper(given["workspace_bytes"]),
    "more tokens": lambda given: given | by_hopper(given["workspace_bytes"], 8),
    "another workspace": added(workspace_bytes=3 * ROW_BYTES),
    "a prompt": added(block_table=lambda: ints(1, 9)),
    "query with gaps": in_place("q", widened),
    "query 8 bytes off": in_place("q", lambda q: shifted(q, 8)),
    "query 16 bytes off": in_place("q", lambda q: shifted(q, 16)),
    "pages 4 bytes off": added(cache=lambda: unaligned_cache("index-fp8")),
    "pages with gaps": added(cache=lambda: with_gaps("index-fp8")),
    "weights with gaps": in_place("weights", widened),
    "one weight for all": in_place("weights", lambda weights: weights[:1].expand(5, -1)),
    "ids with gaps": in_place("request_ids", every_other),
    "lengths with gaps": in_place("lengths", every_other),
    "one length for all": in_place("lengths", lambda lengths: lengths[:1].expand(5)),
    "table with gaps": in_place("block_table", widened),
    "an output": added(out=lambda: ints(5, 64)),
    "bf16 keys": lambda given: given | {"cache": paged(rows(latent=128, rope=0)), "q": given["q"].bfloat16()},
    "mxfp4 keys": added(cache=lambda: paged("index-mxfp4")),
}


def by_hopper(workspace_bytes: int, tokens: int = 5) -> Given:
    """A call that CUDA C++ scores."""
    given = indexing(tokens, heads=16) | {"workspace_bytes": workspace_bytes}
    return given | {"q": given["q"].to(torch.float8_e4m3fn)}


@pytest.mark.parametrize("chunk", [1, 2, 9])
@pytest.mark.parametrize("name", CHUNKED)
def test_index_topk_in_chunks(pretended: Pretended, name: str, chunk: int) -> None:
    """A chunk of one token is contiguous, whatever the call's strides are."""
    base = by_hopper(chunk * ROW_BYTES)
    compare(pretended, run_index, base, CHUNKED[name](dict(base)))


def test_a_chunk_more_does_little(pretended: Pretended) -> None:
    """Two launches, the address of a map, two calls of the driver, and no look at a tensor."""
    with torch.no_grad():
        few, many = (calls_of(run_index, by_hopper(room * ROW_BYTES)) for room in (5, 1))
    assert (many - few) / 4 <= 5


def test_positions_are_separate_from_inputs_in_every_call(pretended: Pretended) -> None:
    """Signatures have no addresses, so that these outputs have the same one."""
    given = indexing(4, heads=64) | {"k": 64}
    inside = given["weights"].view(torch.int32)
    with torch.inference_mode():
        frozen = ints(4, 64)
    for _ in range(2):
        run_index(given | {"out": ints(4, 64)})
        with pytest.raises(ValueError, match="out must be separate from all inputs and caches"):
            run_index(given | {"out": inside})
        with pytest.raises(ValueError, match="out must be a tensor that may be written here"):
            run_index(given | {"out": frozen})


# --- translate_positions --------------------------------------------------------------------------------------------


TRANSLATE: dict[str, Change] = {
    "nothing": lambda given: given,
    "tokens": lambda given: given | translating(5),
    "no tokens": lambda given: given | translating(0),
    "positions with gaps": in_place("positions", widened),
    "positions turned": in_place("positions", lambda positions: positions.t().contiguous().t()),
    "positions int64": in_place("positions", Tensor.long),
    "ids 4 bytes off": in_place("request_ids", lambda ids: shifted(ids, 1)),
    "ids with gaps": in_place("request_ids", every_other),
    "ids of another length": in_place("request_ids", lambda ids: ids[:2]),
    "wider table": added(block_table=lambda: ints(3, 11)),
    "table turned": in_place("block_table", lambda table: table.t().contiguous().t()),
    "page size": added(page_size=32),
    "page size as a float": added(page_size=64.0),
    "rows per page": added(rows_per_page=70),
    "ranks": added(ranks=2, rank=1),
    "a rank too high": added(ranks=2, rank=2),
    "compact": added(compact=True),
    "workspace": added(workspace=lambda: (ints(4), ints(2))),
    "half a workspace": added(workspace=lambda: (ints(4), None)),
    "backend": added(backend="triton"),
}


@pytest.mark.parametrize("name", TRANSLATE)
def test_translate_positions(pretended: Pretended, name: str) -> None:
    base = translating()
    compare(pretended, run_translate, base, TRANSLATE[name](dict(base)))
