"""DeepSeek-V4's attention rule (window and compressed entries under one softmax, with a sink per head) against the
function that Hugging Face transformers runs for it."""

from types import SimpleNamespace

import bounds
import pytest
import torch
from bounds import selected_attention
from seeds import seed_of

from tamis import PagedCache, PagePool, Selection
from tamis.cache.layout import named
from tamis.ops import attend, write_kv

modeling = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
TOKENS, HEADS, WINDOW, RATIO = 40, 8, 12, 4
WINDOW_PAGE, ENTRY_PAGE = 64, 2


def fill(layout: str, count: int, page_size: int) -> tuple[PagedCache, torch.Tensor, torch.Tensor]:
    """A cache of random rows in scattered pages, the rows as stored, and the slot of each."""
    pool, cache = PagePool(60, page_size, seed=seed_of(1)), PagedCache(named(layout), 60, page_size)
    pool.extend("request", count)
    slots = pool.slots("request", 0, count)
    write_kv(torch.randn(count, 512), cache, slots)
    return cache, cache.read(slots), slots


@pytest.mark.parametrize("layout", ["v4-fp32", "v4-bf16", "v4-fp8"])
@pytest.mark.parametrize("sink", ["random", "off"])
def test_window_and_compressed_entries_with_sinks(layout: str, sink: str) -> None:
    window, raw_rows, raw_slots = fill(layout, TOKENS, WINDOW_PAGE)
    entries, entry_rows, entry_slots = fill(layout, TOKENS // RATIO, ENTRY_PAGE)
    sinks = torch.randn(HEADS) * 2 if sink == "random" else torch.full((HEADS,), -torch.inf)
    q = torch.randn(TOKENS, HEADS, 512)
    scale = 512**-0.5

    slots = torch.full((TOKENS, WINDOW), -1, dtype=torch.int32)
    for p in range(TOKENS):
        first = max(0, p - WINDOW + 1)
        slots[p, : p + 1 - first] = raw_slots[first : p + 1].int()
    lengths = torch.arange(1, TOKENS + 1).clamp_max(WINDOW).int()
    visible = torch.arange(1, TOKENS + 1).int() // RATIO
    compressed = Selection(entries, entry_slots.int().expand(TOKENS, -1).contiguous(), visible)
    result = attend(q, [Selection(window, slots, lengths), compressed], scale=scale, value_dim=512, sink=sinks)

    mask = torch.full((TOKENS, TOKENS + len(entry_rows)), -torch.inf)
    for p in range(TOKENS):
        mask[p, max(0, p - WINDOW + 1) : p + 1] = 0
        mask[p, TOKENS : TOKENS + (p + 1) // RATIO] = 0
    keys = torch.cat((raw_rows, entry_rows))[None, None]
    module = SimpleNamespace(num_key_value_groups=HEADS, sinks=sinks, training=False)
    wide, mask = keys.double(), mask[None, None].double()
    module.sinks = sinks.double()
    expected, _ = modeling.eager_attention_forward(
        module, q.double().transpose(0, 1)[None], wide, wide, mask, scaling=scale
    )
    both = [Selection(window, slots, lengths), compressed]
    error = selected_attention(q, both, scale=scale, value_dim=512, sink=sinks).out_error
    bounds.agree(result.out, expected[0], error)
