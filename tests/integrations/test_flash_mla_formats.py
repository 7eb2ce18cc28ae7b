"""The row formats that the FlashMLA drop-in tells apart, with bytes made and results worked out by hand."""

import math
import struct
from typing import Any

import bounds
import pytest
import torch
from seeds import seeded
from torch import Tensor

from tamis.integrations import flash_mla

E4M3 = torch.float8_e4m3fn
NO_ROPE = "V32_NO_ROPE"


def call(q: Tensor, k_cache: Tensor, indices: Tensor | None, **more: Any) -> tuple[Tensor, Tensor]:
    more = {"block_table": None, "cache_seqlens": None} | more
    return flash_mla.flash_mla_with_kvcache(
        q, k_cache, head_dim_v=512, tile_scheduler_metadata=None, indices=indices, **more
    )


def no_rope_row(values: dict[int, int], scales: tuple[float, float, float, float]) -> bytes:
    """One 528-byte row: e4m3 codes by column, zero elsewhere, then four float32 scales."""
    codes = bytes(values.get(column, 0) for column in range(512))
    return codes + struct.pack("<4f", *scales)


def test_bytes_of_rows_without_rope() -> None:
    """e4m3 codes: 0x38 is 1, 0x40 is 2, 0xB8 is -1, 0x7E is 448. Column c has scale c // 128."""
    first = no_rope_row({0: 0x38, 127: 0x40, 128: 0x38, 300: 0xB8, 511: 0x7E}, (0.75, 3.0, 0.5, 2.0))
    second = no_rope_row({0: 0x40, 511: 0x38}, (1.5, 7.0, 7.0, 0.25))
    page = torch.frombuffer(bytearray(first + second), dtype=torch.uint8).view(1, 2, 1, 528)
    rows = torch.zeros(2, 512)
    rows[0, [0, 127, 128, 300, 511]] = torch.tensor([0.75, 1.5, 3.0, -0.5, 896.0])
    rows[1, [0, 511]] = torch.tensor([3.0, 0.25])
    q = torch.zeros(1, 1, 2, 512)
    q[0, 0, 0, 0] = 2.0
    q[0, 0, 1, 128] = 1.0
    alone = torch.zeros(1, 1, 1, dtype=torch.int32)
    out, lse = call(q, page, alone, softmax_scale=0.5, kv_format=NO_ROPE)
    # With one row the output is that row, and the lse is its scaled logit: 0.75 * 2 / 2 and 3 / 2.
    assert torch.equal(out[0, 0], rows[:1].expand(2, 512))
    assert torch.equal(lse, torch.tensor([[[0.75], [1.5]]]))
    both = torch.tensor([[[1, 0]]], dtype=torch.int32)
    out, lse = call(q, page, both, softmax_scale=0.5, kv_format=NO_ROPE)
    # Head 0: logits 0.75 and 3. Head 1: 1.5 and 0.
    for head, (one, two) in enumerate(((0.75, 3.0), (1.5, 0.0))):
        total = math.exp(one) + math.exp(two)
        expected = (math.exp(one) * rows[0] + math.exp(two) * rows[1]) / total
        torch.testing.assert_close(out[0, 0, head], expected)
        assert lse[0, head, 0].item() == pytest.approx(math.log(total))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, E4M3])
def test_a_format_may_be_named_where_the_width_says_it(dtype: torch.dtype) -> None:
    for kv_format, width, row in (("V32", 576, 656), ("V4", 512, 584)):
        pages = torch.randint(0, 100, (3, 4, 1, row), dtype=torch.uint8, generator=seeded(row)).view(dtype)
        q, indices = torch.randn(2, 1, 3, width), torch.randint(0, 12, (2, 1, 5), dtype=torch.int32)
        expected = call(q, pages, indices, is_fp8_kvcache=True)
        for more in ({"kv_format": kv_format}, {"kv_format": kv_format, "is_fp8_kvcache": True}, {}):
            found = call(q, pages, indices, **more)
            assert all(torch.equal(f.nan_to_num(), e.nan_to_num()) for f, e in zip(found, expected, strict=True))


def test_dense_mode_over_rows_without_rope() -> None:
    g = seeded(3)
    latent = torch.randn(4, 8, 512, generator=g).to(E4M3)
    scales = torch.rand(4, 8, 4, generator=g) + 0.5
    pages = torch.cat([latent.view(torch.uint8), scales.view(torch.uint8)], -1).unsqueeze(2)
    rows = (latent.double() * scales.double().repeat_interleave(128, 2))[[2, 0]].flatten(0, 1)[:13]
    q = torch.randn(1, 1, 3, 512, generator=g)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    lengths = torch.tensor([13], dtype=torch.int32)
    out, lse = call(q, pages, None, block_table=table, cache_seqlens=lengths, kv_format=NO_ROPE)
    exact = bounds.attention(q[0, 0], rows, scale=512**-0.5, value_dim=512)
    bounds.agree(out[0, 0], exact.out, exact.out_error)
    bounds.agree(lse[0, :, 0], exact.lse, exact.lse_error)


def plain_call(**changes: Any) -> dict[str, Any]:
    """A dense call with e4m3 queries over e4m3 rows that share one factor."""
    g = seeded(4)
    call = {
        "q": (torch.randn(2, 2, 3, 576, generator=g) * 4).to(E4M3),
        "k_cache": (torch.randn(4, 8, 1, 576, generator=g) * 4).to(E4M3),
        "block_table": torch.tensor([[3, 1], [0, 2]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([16, 9], dtype=torch.int32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.FlashMLASchedMeta(),
        "softmax_scale": 0.0625,
        "causal": True,
        "is_fp8_kvcache": True,
        "use_legacy": True,
        "descale_q": torch.tensor([0.25]),
        "descale_k": torch.tensor([0.125]),
    }
    return call | changes


@pytest.mark.parametrize("sparse", [False, True])
def test_plain_fp8_with_one_factor_each(sparse: bool) -> None:
    call = plain_call()
    rows = call["k_cache"].double() * 0.125
    keys = []
    for request, length in enumerate((16, 9)):
        whole = rows[call["block_table"][request].long()].flatten(0, 2)
        keys += [whole[: length - 1], whole[:length]]
    if sparse:
        indices = torch.full((2, 2, 16), -1, dtype=torch.int32)
        for token, length in enumerate((15, 16, 8, 9)):
            order = torch.arange(length, dtype=torch.int32)
            pages = call["block_table"][token // 2][order.long() // 8]
            indices[token // 2, token % 2, :length] = pages * 8 + order % 8
        call |= {"indices": indices, "causal": False}
    out, lse = flash_mla.flash_mla_with_kvcache(**call)
    assert out.dtype == torch.bfloat16
    q = call["q"].flatten(0, 1).double() * 0.25
    options = {"scale": 0.0625, "value_dim": 512}
    exact = bounds.stacked([bounds.attention(heads, rows, **options) for heads, rows in zip(q, keys, strict=True)])
    bounds.agree(out.flatten(0, 1), exact.out, exact.out_error, torch.bfloat16)
    bounds.agree(lse.mT.flatten(0, 1), exact.lse, exact.lse_error)
    numbers = flash_mla.flash_mla_with_kvcache(**call | {"descale_q": 0.25, "descale_k": 0.125})
    assert torch.equal(numbers[0], out)


def packed_call(width: int, row: int, **changes: Any) -> dict[str, Any]:
    call = {
        "q": torch.zeros(2, 1, 3, width),
        "k_cache": torch.zeros(4, 8, 1, row, dtype=torch.uint8),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
        "indices": torch.zeros(2, 1, 6, dtype=torch.int32),
        "use_legacy": True,
    }
    return call | changes


BF16_CACHE = torch.zeros(4, 8, 1, 576, dtype=torch.bfloat16)
REFUSED = [
    (packed_call(512, 528), "k_cache must be of rows of 584 bytes .*got rows of 528 bytes; .*V4.1.*SM100.*V32_NO_ROPE"),
    (packed_call(512, 288), "k_cache must be of rows of 584 bytes .*got rows of 288 bytes; .*V4.1"),
    (
        packed_call(512, 584, extra_k_cache=torch.zeros(1, 2, 1, 528).byte(), extra_indices_in_kvcache=torch.ones(0)),
        "extra_k_cache must be of rows of 584 bytes .*got rows of 528 bytes",
    ),
    (packed_call(512, 528, kv_format="V41"), "kv_format must be one of V32, V32_NO_ROPE, V4, got 'V41'; .*SM100"),
    (packed_call(512, 288, kv_format="V41_FP4"), "kv_format must be one of .*got 'V41_FP4'; .*DeepSeek-V4.1"),
    (packed_call(512, 528, kv_format="V5"), "kv_format must be one of 'V32', .*got 'V5'"),
    (packed_call(512, 528, kv_format=32), "kv_format must be one of 'V32', .*got int"),
    (packed_call(576, 528, kv_format=NO_ROPE), "kv_format must be V32 for queries of width 576, got 'V32_NO_ROPE'"),
    (packed_call(512, 656, kv_format="V32"), "kv_format must be V32_NO_ROPE or V4 for queries of width 512, got 'V32'"),
    (packed_call(512, 584, kv_format=NO_ROPE), "k_cache must be of shape .*C=528"),
    (packed_call(576, 576, k_cache=BF16_CACHE, kv_format="V32"), "kv_format must be None unless .*packed FP8"),
    (packed_call(576, 656, descale_k=torch.ones(1)), "descale_k must be None unless q is float8_e4m3fn"),
    (packed_call(576, 656, descale_q=torch.ones(1)), "descale_q must be None unless q is float8_e4m3fn"),
    (packed_call(576, 656, use_legacy=1), "use_legacy must be True or False, got int"),
    (packed_call(576, 656, enable_batch_invariant=None), "enable_batch_invariant must be True or False"),
    (plain_call(descale_q=None), "descale_q must be given with an FP8 q, got None"),
    (plain_call(descale_k=None), "descale_k must be given with an FP8 q, got None"),
    (plain_call(descale_q=torch.ones(2)), "descale_q must be one float32 element"),
    (plain_call(descale_k=torch.ones(1).double()), "descale_k must be one float32 element"),
    (plain_call(descale_k=torch.zeros(1)), "descale_k must be finite and > 0"),
    (plain_call(descale_q=torch.ones(1, device="meta")), "descale_q must be on cpu like q"),
    (plain_call(kv_format="V32"), "kv_format must be None unless .*packed FP8"),
    (plain_call(k_cache=BF16_CACHE, is_fp8_kvcache=False), "q must be bfloat16 .*over an unquantised cache"),
    (plain_call(k_cache=torch.zeros(4, 8, 1, 656).byte()), "k_cache must be of shape .*C=576"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[m for _, m in REFUSED])
def test_refused_formats(call: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        flash_mla.flash_mla_with_kvcache(**call)
