"""Reading index keys back as they are stored. The expected keys are cut from the bytes of pages filled here."""

import numpy as np
import pytest
import torch
from gathering import INT_MAX, REQUESTS, TABLE, TWO, int32, slot_of, tables
from seeds import numpy_seeded

from tamis import PagedCache, ops
from tamis.cache.layout import Layout, named


def index_cache(pages: int, page_size: int) -> tuple[np.ndarray, PagedCache]:
    raw = numpy_seeded(7).integers(0, 256, (pages, 132 * page_size + 12), dtype=np.uint8)
    scales = raw[:, 128 * page_size : 132 * page_size]
    scales[:] = numpy_seeded(8).uniform(1e-3, 9, (pages, page_size)).astype(np.float32).view(np.uint8)
    storage = torch.from_numpy(raw)[:, : 132 * page_size].unflatten(1, (page_size, 132))
    return raw, PagedCache.wrap(storage, "index-fp8")


@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
def test_index_keys_come_back_as_stored(page_size: int) -> None:
    raw, cache = index_cache(12, page_size)
    lengths, first = [4, 0, 3], [1, 0, 2]
    table = tables(cache, [5, 0, 5], width=5, unused=INT_MAX)
    keys, scales = ops.gather_index(cache, table, int32(lengths), rows=10, first=int32(first))
    assert (keys.dtype, keys.shape) == (torch.float8_e4m3fn, (10, 128))
    assert (scales.dtype, scales.shape) == (torch.float32, (10,))
    found = keys.view(torch.uint8).numpy()
    for row, (request, position) in enumerate([(0, 1), (0, 2), (0, 3), (0, 4), (2, 2), (2, 3), (2, 4)]):
        page, i = divmod(slot_of(cache, table, request, position), page_size)
        assert np.array_equal(found[row], raw[page, 128 * i : 128 * i + 128])
        at = 128 * page_size + 4 * i
        assert scales[row].item() == raw[page, at : at + 4].copy().view(np.float32)[0]
    assert not found[7:].any()
    assert not scales[7:].any()


def test_index_keys_at_given_starts() -> None:
    _, cache = index_cache(8, 4)
    table = tables(cache, [3, 5], width=2)
    plain = ops.gather_index(cache, table, int32([3, 5]), rows=8)
    apart = ops.gather_index(cache, table, int32([3, 5]), rows=20, starts=int32([4, 9]))
    rows = [4, 5, 6, 9, 10, 11, 12, 13]
    assert torch.equal(apart[0].view(torch.uint8)[rows], plain[0].view(torch.uint8))
    assert torch.equal(apart[1][rows], plain[1])
    assert not apart[1][[0, 1, 2, 3, 7, 8, 14, 19]].any()


def test_no_index_keys() -> None:
    _, cache = index_cache(2, 4)
    keys, scales = ops.gather_index(cache, torch.zeros(0, 1, dtype=torch.int32), int32([]), rows=3)
    assert (keys.shape, scales.tolist()) == ((3, 128), [0.0, 0.0, 0.0])
    keys, scales = ops.gather_index(cache, torch.zeros(1, 1, dtype=torch.int32), int32([0]), rows=0)
    assert (keys.shape, scales.shape) == ((0, 128), (0,))


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        *REQUESTS,
        ({"rows": 4}, ValueError, "rows must be at least 5 rows, got 4; "),
        ({"rows": -1}, ValueError, "rows must be >= 0, got -1$"),
        ({"rows": 5.0}, TypeError, "rows must be an int, got float$"),
    ],
)
def test_gather_index_refuses_wrong_input(change: dict[str, object], kind: type[Exception], message: str) -> None:
    arguments = {"block_table": TABLE, "lengths": TWO, "rows": 9} | change
    with pytest.raises(kind, match="^" + message):
        ops.gather_index(PagedCache("index-fp8", 2, 4), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "layout",
    [named("v32-bf16"), named("v32-fp8"), named("v4-fp8"), named("plain-fp8"), named("v32-fp8", latent=128, rope=32)],
    ids=lambda layout: layout.name,
)
def test_gather_index_refuses_latent_caches(layout: Layout) -> None:
    with pytest.raises(ValueError, match=r"^cache must be of layout index-fp8 or index-mxfp4, got '.*'; use gather_kv"):
        ops.gather_index(PagedCache(layout, 2, 4), TABLE, TWO, rows=9)
