"""V4's attention over SGLang's pages against float64 over the same bytes, without SGLang."""

from typing import Any

import bounds
import pytest
import torch
from torch import Tensor
from v4_pool import NAMES, ROWS, SIZES, WINDOW_PAGE, Pool, core_of, decoded, page_bytes, seen

from tamis.integrations.sglang import v4_attention
from tamis.integrations.sglang.v4_attention import Pages, attend_layer, selected, wrap_pages
from tamis.ops import write_kv

SCALE = 512**-0.5
OPTIONS: dict[str, Any] = {"scale": SCALE, "value_dim": 512}


def query(tokens: int, heads: int, padded: int) -> Tensor:
    """A query whose padding is NaN, as memory that nobody wrote may be."""
    q = torch.full((tokens, padded, 512), torch.nan, dtype=torch.bfloat16)
    q[:, :heads] = torch.randn(tokens, heads, 512).bfloat16()
    return q


def agrees(output: Tensor, q: Tensor, pool: Pool, core: Any, sink: Tensor, heads: int) -> None:
    tokens = len(core.swa_page_indices)
    exact = [
        bounds.attention(q[row, :heads].double(), seen(pool, core, row), scale=SCALE, sink=sink[:heads], parts=2)
        for row in range(tokens)
    ]
    wanted = bounds.stacked(exact)
    bounds.agree(output[:tokens, :heads], wanted.out, wanted.out_error, output.dtype)
    assert output.shape == (*q.shape[:2], 512)
    assert output[:, heads:].eq(0).all(), "padded heads"
    assert output[tokens:].eq(0).all(), "padded tokens"


@pytest.mark.parametrize("ratio", [0, *SIZES])
@pytest.mark.parametrize(("heads", "padded"), [(8, 64), (16, 64), (64, 64), (128, 128)])
def test_window_and_entries_are_one_softmax(heads: int, padded: int, ratio: int) -> None:
    torch.manual_seed(heads + ratio)
    pool, q, sink = Pool(ratio), query(3, heads, padded), torch.randn(padded)
    core = core_of(pool, 3)
    out = attend_layer(q, selected(Pages(pool), core, 7, ratio, 3), heads=heads, sink=sink, **OPTIONS)
    agrees(out, q, pool, core, sink, heads)


def test_a_query_may_have_more_rows_than_the_metadata() -> None:
    pool, q, sink = Pool(4), query(6, 8, 64), torch.randn(64)
    core = core_of(pool, 4)
    out = attend_layer(q, selected(Pages(pool), core, 7, 4, 6), heads=8, sink=sink, **OPTIONS)
    agrees(out, q, pool, core, sink, 8)


def test_the_metadata_may_have_more_rows_than_a_query() -> None:
    pool, q, sink = Pool(128), query(2, 8, 8), torch.randn(8)
    core = core_of(pool, 5)
    out = attend_layer(q, selected(Pages(pool), core, 7, 128, 2), heads=8, sink=sink, **OPTIONS)
    for name in ("swa_page_indices", "swa_topk_lengths", *NAMES[128]):
        setattr(core, name, getattr(core, name)[:2])
    agrees(out, q, pool, core, sink, 8)


def test_a_token_that_selects_nothing_gives_zeros() -> None:
    pool, q = Pool(4), query(2, 8, 8)
    core = core_of(pool, 2)
    core.swa_page_indices[0] = -1
    core.swa_topk_lengths[0] = 1
    out = attend_layer(q, selected(Pages(pool), core, 7, 4, 2), heads=8, sink=None, **OPTIONS)
    assert out[0].eq(0).all()
    assert out[1].ne(0).any()


def test_no_tokens_give_no_rows() -> None:
    pool = Pool(4)
    core = core_of(pool, 2)
    out = attend_layer(query(0, 8, 64), selected(Pages(pool), core, 7, 4, 0), heads=8, sink=torch.randn(64), **OPTIONS)
    assert out.shape == (0, 64, 512)


def test_a_captured_graph_keeps_reading_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention gets the metadata's own memory, which SGLang refreshes before a replay, and nothing copied from it."""
    handed: list[Any] = []
    monkeypatch.setattr(v4_attention, "attend", lambda q, selections, **rest: handed.extend((q, *selections)))
    pool, q = Pool(128), query(3, 8, 64)
    core = core_of(pool, 3)
    for tokens in (3, 2):
        handed.clear()
        attend_layer(q[:tokens], selected(Pages(pool), core, 7, 128, tokens), heads=8, sink=None, **OPTIONS)
        given, window, entries = handed
        assert given.data_ptr() == q.data_ptr()
        assert window.slots.data_ptr() == core.swa_page_indices.data_ptr()
        assert window.lengths.data_ptr() == core.swa_topk_lengths.data_ptr()
        assert entries.slots.data_ptr() == core.c128_page_indices.data_ptr()
        assert entries.lengths.data_ptr() == core.c128_topk_lengths_clamp1.data_ptr()
        assert window.cache.storage.data_ptr() == pool.raw.data_ptr()


def test_caches_are_described_once() -> None:
    pool = Pool(4, torch.float8_e4m3fn)
    pages = Pages(pool)
    assert pages.window(7) is pages.window(7)
    assert pages.entries(7) is pages.entries(7)
    assert (pages.window(7).page_size, pages.entries(7).page_size) == (WINDOW_PAGE, 64)
    first, pool.raw = pages.window(7), pool.raw.clone()
    assert pages.window(7) is not first, "the pool has other memory"


def test_the_page_size_has_another_name_in_older_versions() -> None:
    class Old(Pool):
        get_swa_key_page_size: Any = None
        swa_window_size = WINDOW_PAGE

    assert Pages(Old()).window(7).page_size == WINDOW_PAGE


@pytest.mark.parametrize("size", [2, 64, 128, 256])
def test_bytes_of_a_row_lie_where_sglang_has_them(size: int) -> None:
    """Ones and halves, by hand: 1 is 2**8 times the scale 2**-8, with the code 0x78; 0.5 in bf16 is 0x3F00."""
    raw = torch.zeros(2, page_bytes(size), dtype=torch.uint8)
    row = torch.ones(1, 512)
    row[:, 448:] = 0.5
    write_kv(row, wrap_pages(raw, size), torch.tensor([size + 1]))
    page = raw[1]
    assert page[576 : 576 + 448].eq(0x78).all()
    assert page[576 + 448 : 576 + 576].tolist() == [0x00, 0x3F] * 64
    assert page[size * 576 + 8 : size * 576 + 15].eq(127 - 8).all()
    assert raw.count_nonzero() == 448 + 64 + 7
    assert decoded(raw, size, size + 1).equal(row[0].double())


def test_wrong_arguments_are_refused() -> None:
    pool, q = Pool(4), query(2, 8, 8)
    core = core_of(pool, 2)
    with pytest.raises(ValueError, match="compress_ratio must be 0 or one of"):
        selected(Pages(pool), core, 7, 8, 2)
    with pytest.raises(ValueError, match="metadata must be with c128_page_indices for a layer of ratio 128"):
        selected(Pages(pool), core, 7, 128, 2)
    with pytest.raises(ValueError, match="q must be with at least the layer's 16 heads, got 8"):
        attend_layer(q, selected(Pages(pool), core, 7, 4, 2), heads=16, sink=None, **OPTIONS)
    for bad in (torch.zeros(ROWS, 583), torch.zeros(4, 1, 1024)):
        with pytest.raises(ValueError, match="buffer must be"):
            wrap_pages(bad.to(torch.uint8), 1)
