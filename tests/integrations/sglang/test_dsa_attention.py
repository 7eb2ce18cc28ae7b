"""`DsaAttention` with objects that have the attributes of SGLang's: what it reads, refuses and returns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tamis import PagedCache
from tamis.integrations.sglang.dsa_attention import DsaAttention, describe, page_size_of
from tamis.ops import attend, write_kv

PAGE, PAGES, TOPK, HEADS = 64, 6, 96, 3


def backend(**given: Any) -> Any:
    """What SGLang's backend tells about itself."""
    usual = {
        "num_q_heads": HEADS,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "kv_cache_dim": 656,
        "dsa_kv_cache_store_fp8": True,
        "token_to_kv_pool": SimpleNamespace(dtype=torch.float8_e4m3fn),
        "physical_page_size": PAGE,
        "dsa_index_topk": TOPK,
        "dsa_index_kpool": 1,
        "dsa_topk_backend": SimpleNamespace(is_sgl_kernel=lambda: True),
        "use_fused_topk": True,
        "hisparse_coordinator": None,
        "dcp_size": 1,
        "num_splits": 0,
        "device": "cpu",
        "dsa_decode_impl": "tamis",
        "dsa_prefill_impl": "tamis",
    }
    return SimpleNamespace(**(usual | given))


BF16 = {
    "kv_cache_dim": 576,
    "dsa_kv_cache_store_fp8": False,
    "token_to_kv_pool": SimpleNamespace(dtype=torch.bfloat16),
}


def pool(attention: DsaAttention, seed: int = 0) -> Tensor:
    """A pool of SGLang's shape, filled with rows."""
    cache = PagedCache(attention.layout, pages=PAGES, page_size=PAGE)
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(PAGES * PAGE, attention.layout.width, generator=generator, dtype=torch.bfloat16)
    write_kv(rows, cache, torch.arange(PAGES * PAGE))
    flat = cache.storage.reshape(PAGES * PAGE, 1, attention.layout.row_elements)
    return flat.view(torch.float8_e4m3fn) if attention.layout.quantised else flat


def query(tokens: int, width: int = 576) -> Tensor:
    return torch.randn(tokens, HEADS, width, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)


def slots(tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.stack([torch.randperm(PAGES * PAGE, generator=generator)[:TOPK] for _ in range(tokens)]).int()


def metadata(lengths: list[int], **given: Any) -> Any:
    return SimpleNamespace(dsa_cache_seqlens_int32=torch.tensor(lengths, dtype=torch.int32), **given)


@pytest.mark.parametrize(
    ("given", "name", "mode"),
    [
        ({}, "v32-fp8", "exact"),
        (BF16, "v32-bf16", "none"),
        ({"qk_rope_head_dim": 0, "kv_cache_dim": 528}, "v32-fp8[512+0]", "exact"),
        ({**BF16, "qk_rope_head_dim": 0, "kv_cache_dim": 512}, None, "none"),
    ],
)
def test_the_format_of_the_pool(given: dict[str, Any], name: str | None, mode: str) -> None:
    """SGLang's scales are not powers of two."""
    layout = DsaAttention.of(backend(**given), prefill_cp=False).layout
    assert layout.name == name or name is None
    assert layout.scale_mode == mode
    assert layout.row_elements == backend(**given).kv_cache_dim


@pytest.mark.parametrize("given", [{}, BF16])
@pytest.mark.parametrize("pair", [False, True])
def test_attention_over_slots(given: dict[str, Any], pair: bool) -> None:
    attention = DsaAttention.of(backend(**given), prefill_cp=False)
    rows, q, chosen = pool(attention), query(5), slots(5)
    cache = attention.cache_of(0, rows)
    selection = attention.select(cache, chosen, 5, metadata([TOPK, 7, 0, 1, TOPK]), fused=True)
    parts = (q[..., :512], q[..., 512:]) if pair else q
    out = attention(parts, selection, scale=0.1)
    assert torch.equal(out, attend(q, selection, scale=0.1, value_dim=512).out)
    assert not out[2].any()


def test_padding_and_steps_without_tokens() -> None:
    attention = DsaAttention.of(backend(), prefill_cp=False)
    cache = attention.cache_of(0, pool(attention))
    selection = attention.select(cache, slots(2), 4, metadata([TOPK] * 4), fused=True)
    assert selection.lengths is None, "lengths of other rows are not used"
    out = attention(query(4), selection, scale=0.1)
    assert out[:2].any()
    assert not out[2:].any()
    none = attention.select(cache, slots(2)[:0], 0, metadata([]), fused=True)
    assert attention(query(0), none, scale=0.1).shape == (0, HEADS, 512)
    assert not attention(query(3), none, scale=0.1).any()


def test_indices_of_another_step_are_refused() -> None:
    attention = DsaAttention.of(backend(), prefill_cp=False)
    cache = attention.cache_of(0, pool(attention))
    with pytest.raises(ValueError, match="topk_indices must be of at most 2 rows, one per query token, got 3"):
        attention.select(cache, slots(3), 2, metadata([1, 1, 1]), fused=True)


def test_sinks() -> None:
    attention = DsaAttention.of(backend(**BF16), prefill_cp=False)
    selection = attention.select(attention.cache_of(0, pool(attention)), slots(2), 2, metadata([5, TOPK]), fused=True)
    sink = torch.tensor([0.5, -1.0, 3.0])
    expected = attend(query(2), selection, scale=0.1, value_dim=512, sink=sink).out
    assert torch.equal(attention(query(2), selection, scale=0.1, sink=sink), expected)


@pytest.mark.parametrize(
    ("given", "prefill_cp", "used"),
    [
        ({}, False, True),
        ({}, True, False),
        ({"dsa_index_kpool": 4}, False, False),
        ({"use_fused_topk": False}, False, False),
        ({"dsa_topk_backend": SimpleNamespace(is_sgl_kernel=lambda: False)}, False, False),
        ({"dsa_index_topk": TOPK + 1}, False, False),
    ],
)
def test_lengths_are_used_where_valid_indices_come_first(given: dict[str, Any], prefill_cp: bool, used: bool) -> None:
    attention = DsaAttention.of(backend(**given), prefill_cp=prefill_cp)
    lengths = metadata([3, TOPK])
    selection = attention.select(attention.cache_of(0, pool(attention)), slots(2), 2, lengths, fused=True)
    assert (selection.lengths is lengths.dsa_cache_seqlens_int32) == used
    assert used or selection.lengths is None


@pytest.mark.parametrize("expanded", [False, True])
def test_positions_are_translated(expanded: bool) -> None:
    """Requests of two and three tokens; the last token is padding, for which there is no request."""
    attention = DsaAttention.of(backend(use_fused_topk=False), prefill_cp=False)
    cache = attention.cache_of(0, pool(attention))
    tables, requests = torch.tensor([[4, 1], [0, 5]], dtype=torch.int32), [0, 0, 1, 1, 1]
    positions = torch.stack([torch.randperm(128)[:TOPK] for _ in range(6)]).int()
    positions[5] = -1
    positions[1, 3:9] = -1
    given = metadata([TOPK] * 5, cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32), real_page_table=tables)
    if expanded:  # as SGLang has it in steps that verify drafts
        given.real_page_table, given.cu_seqlens_q = tables[requests], torch.arange(6, dtype=torch.int32)
    selection = attention.select(cache, positions, 6, given, fused=False)
    out = attention(query(6), selection, scale=0.1)
    table = torch.cat([tables[requests], tables[:1]]).long()
    found = table.gather(1, (positions.clamp_min(0) // PAGE).long()) * PAGE + positions.clamp_min(0) % PAGE
    direct = attention.select(cache, torch.where(positions < 0, -1, found).int(), 6, given, fused=True)
    torch.testing.assert_close(out, attention(query(6), direct, scale=0.1), rtol=0, atol=0)
    assert not out[5].any()


def test_a_layer_is_wrapped_once() -> None:
    attention = DsaAttention.of(backend(), prefill_cp=False)
    one, other = pool(attention), pool(attention, seed=1)
    first = attention.cache_of(0, one)
    assert attention.cache_of(0, one.view(torch.uint8).view(torch.float8_e4m3fn)) is first
    assert attention.cache_of(1, other) is not first
    assert attention.cache_of(0, other) is not first, "another memory is another cache"
    with pytest.raises(ValueError, match="the pool's rows must be a multiple of the page size 64, got 383"):
        attention.cache_of(2, one[1:])


def test_deterministic_inference_fixes_the_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    from tamis.integrations.sglang import dsa_attention

    seen: list[int | None] = []

    def spy(*arguments: Any, splits: int | None, **keywords: Any) -> Any:
        seen.append(splits)
        return attend(*arguments, splits=splits, **keywords)

    monkeypatch.setattr(dsa_attention, "attend", spy)
    for number in (0, 1):
        attention = DsaAttention.of(backend(num_splits=number, dsa_index_topk=TOPK), prefill_cp=False)
        selection = attention.select(attention.cache_of(0, pool(attention)), slots(1), 1, metadata([TOPK]), fused=True)
        attention(query(1), selection, scale=0.1)
    assert seen == [None, 1]


@pytest.mark.parametrize(
    ("given", "prefill_cp", "reason"),
    [
        ({"dcp_size": 2}, False, "over 2 ranks .decode context parallelism.; drop --dcp-size"),
        ({"_kv_shard_pool": object()}, False, "drop --enable-kv-cache-sharding"),
        ({"hisparse_coordinator": object()}, False, "rows in host memory .HiSparse. are not supported"),
        ({"use_fused_topk": False}, True, "prefill context parallelism needs the fused top-k"),
        ({"dsa_kv_cache_store_fp8": False, "kv_cache_dim": 576}, False, "rows of float8_e4m3fn without scales"),
        ({"kv_cache_dim": 640}, False, "the pool's rows have 640 elements, and v32-fp8 has 656"),
        ({"num_q_heads": 129}, False, "heads must be between 1 and 128, got 129"),
    ],
)
def test_what_cannot_be_served_is_refused(given: dict[str, Any], prefill_cp: bool, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        DsaAttention.of(backend(**given), prefill_cp=prefill_cp)


def test_all_reasons_are_told_at_once() -> None:
    with pytest.raises(ValueError, match="dcp-size") as error:
        DsaAttention.of(backend(dcp_size=2, hisparse_coordinator=object()), prefill_cp=False)
    assert "--enable-hisparse" in str(error.value)


def test_an_older_sglang_has_other_attributes() -> None:
    older = backend(**BF16, real_page_size=32)
    for name in ("physical_page_size", "dcp_size", "dsa_index_kpool"):
        delattr(older, name)
    assert page_size_of(older) == 32
    assert DsaAttention.of(older, prefill_cp=False).kernels == "reference"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "DSA decode and prefill: fp8 rows of 656 bytes, 3 heads, page size 64, kernels reference"),
        ({"dsa_prefill_impl": "fa3"}, "DSA decode: fp8 rows of 656 bytes, 3 heads, page size 64, kernels reference"),
        (
            {**BF16, "dsa_decode_impl": "fa3"},
            "DSA prefill: bf16 rows of 1152 bytes, 3 heads, page size 64, kernels reference",
        ),
    ],
)
def test_the_description_names_what_is_served(given: dict[str, Any], told: str) -> None:
    assert describe(DsaAttention.of(backend(**given), prefill_cp=False), backend(**given)) == told
