"""The FlashMLA drop-in against fp64, with caches built and decoded byte by byte here.

Error cases, the schedule and the replacement of the module are in `test_flash_mla_contract.py`.
"""

import itertools
import math

import bounds
import pytest
import torch
from seeds import seeded
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.integrations import flash_mla

E4M3 = torch.float8_e4m3fn
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
HEADS = (1, 3, 8, 16, 64, 128)


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def v32_pages(pages: int, size: int, seed: int = 0) -> Tensor:
    """[pages, size, 1, 656]: 512 e4m3, 4 float32 scales that are no powers of two, 64 bf16."""
    g = seeded(seed)
    latent = torch.randn(pages, size, 512, generator=g).to(E4M3)
    scales = torch.rand(pages, size, 4, generator=g) + 0.5
    rope = torch.randn(pages, size, 64, generator=g).bfloat16()
    return torch.cat([as_bytes(latent), as_bytes(scales), as_bytes(rope)], -1).unsqueeze(2)


def v32_rows(storage: Tensor) -> Tensor:
    """fp64 [pages * size, 576] of 656-byte rows, [pages * size, 512] of 528-byte rows, which end before the rope."""
    row = storage.reshape(-1, storage.shape[-1])
    latent = row[:, :512].contiguous().view(E4M3).double()
    scales = row[:, 512:528].contiguous().view(torch.float32).double()
    rope = row[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat([latent * scales.repeat_interleave(128, 1), rope], 1)


def v4_pages(pages: int, size: int, seed: int = 0) -> Tensor:
    """[pages, size, 1, 584] in pages padded to a multiple of 576 bytes; values first, then exponents."""
    g = seeded(seed)
    record = torch.cat(
        [
            as_bytes(torch.randn(pages, size, 448, generator=g).to(E4M3)),
            as_bytes(torch.randn(pages, size, 64, generator=g).bfloat16()),
        ],
        -1,
    )
    exponents = torch.randint(126, 129, (pages, size, 8), generator=g).to(torch.uint8)
    exponents[..., 7] = 0
    padded = math.ceil(size * 584 / 576) * 576
    raw = torch.full((pages, padded), 255, dtype=torch.uint8)
    raw[:, : size * 576] = record.flatten(1)
    raw[:, size * 576 : size * 584] = exponents.flatten(1)
    return raw.as_strided((pages, size, 1, 584), (padded, 584, 584, 1))


def v4_page_parts(storage: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a planar cache: value records [pages, size, 576] and exponents [pages, size, 8]."""
    pages, size, stride = storage.shape[0], storage.shape[1], storage.stride(0)
    record = storage.as_strided((pages, size, 576), (stride, 576, 1))
    return record, storage.as_strided((pages, size, 8), (stride, 8, 1), storage.storage_offset() + size * 576)


def v4_rows(storage: Tensor) -> Tensor:
    """fp64 [pages * size, 512] of planar pages."""
    record, exponents = (part.reshape(-1, part.shape[-1]) for part in v4_page_parts(storage))
    latent = record[:, :448].contiguous().view(E4M3).double()
    scales = torch.exp2(exponents[:, :7].double() - 127).repeat_interleave(64, 1)
    return torch.cat([latent * scales, record[:, 448:].contiguous().view(torch.bfloat16).double()], 1)


def spoil_unused(storage: Tensor, *indices: Tensor) -> None:
    """All bytes 255 (NaN in every field) in each row that no index names."""
    rows = storage.shape[0] * storage.shape[1]
    named = torch.cat([i.flatten() for i in indices])
    unused = torch.ones(rows, dtype=torch.bool)
    unused[named[(named >= 0) & (named < rows)].long()] = False
    unused = unused.view(storage.shape[:2])
    if storage.dtype != torch.uint8:
        storage[unused] = torch.nan
    elif storage.shape[-1] == 584:
        for part in v4_page_parts(storage):
            part[unused] = 255
    else:
        storage[unused] = 255


def picks(indices: Tensor, lengths: Tensor | None, table: Tensor) -> list[Tensor]:
    """The fp64 rows of each query token, from indices [n, topk] and a length each."""
    found = []
    for token, row in enumerate(indices.tolist()):
        count = len(row) if lengths is None else int(lengths[token])
        found.append(table[[i for i in row[:count] if 0 <= i < len(table)]])
    return found


def dense64(
    q: Tensor, keys: list[Tensor], scale: float, d_v: int, sink: Tensor | None = None, parts: int = 1
) -> bounds.Attention:
    """out [n, h, d_v], max [n, h], lse [n, h] in fp64, FlashMLA's conventions for rows without keys."""
    options = {"scale": scale, "value_dim": d_v, "sink": sink, "parts": parts}
    exact = bounds.stacked([bounds.attention(heads, rows, **options) for heads, rows in zip(q, keys, strict=True)])
    return exact._replace(lse=torch.where(exact.lse == -torch.inf, torch.inf, exact.lse))


def agree(found: Tensor, exact: bounds.Attention, dtype: torch.dtype) -> None:
    """Outputs: what the arithmetic allows, and FlashMLA's own budget."""
    assert found.dtype == dtype
    expected = exact.out.view(found.shape)
    bounds.agree(found, expected, exact.out_error.view(found.shape), dtype)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=2.01 / 128)


def agree_log(found: Tensor, expected: Tensor, error: Tensor) -> None:
    """Logarithms: what the arithmetic allows (infinities equal), and FlashMLA's budget for each one."""
    assert found.dtype == torch.float32
    bounds.agree(found, expected, error)
    torch.testing.assert_close(found.double(), expected, atol=1e-6 + float(error.max()), rtol=8.01 / 65536)


def random_indices(shape: tuple[int, ...], rows: int, seed: int) -> Tensor:
    """Slots with duplicates and, in a fifth of the columns, everything an index must not be."""
    g = seeded(seed)
    indices = torch.randint(0, rows, shape, generator=g, dtype=torch.int64)
    hostile = torch.tensor([INT_MIN, -123456, -1, rows, INT_MAX])
    where = torch.rand(shape, generator=g) < 0.2
    return torch.where(where, hostile[torch.randint(0, 5, shape, generator=g)], indices).int()


def mixed_sink(heads: int) -> Tensor:
    return torch.tensor([0.7, -math.inf, math.inf, -2.0, 3.5]).repeat(26)[:heads]


def check_decode(
    q: Tensor,
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor | None]],
    *,
    packed: bool,
    sink: Tensor | None = None,
    scale: float | None = None,
    kv_format: str | None = None,
) -> None:
    """One call against fp64; parts are (cache, its fp64 rows, indices, lengths), the second being the extra one."""
    b, s_q, h, d = q.shape
    extra = {}
    if len(parts) == 2:
        cache, _, indices, lengths = parts[1]
        extra = {"extra_k_cache": cache, "extra_indices_in_kvcache": indices, "extra_topk_length": lengths}
    out, lse = flash_mla.flash_mla_with_kvcache(
        q,
        parts[0][0],
        None,
        None,
        512,
        flash_mla.get_mla_metadata()[0],
        softmax_scale=scale,
        is_fp8_kvcache=packed,
        indices=parts[0][2],
        topk_length=parts[0][3],
        attn_sink=sink,
        kv_format=kv_format,
        **extra,
    )
    keys = [torch.zeros(0, d, dtype=torch.float64)] * (b * s_q)
    for _, table, indices, lengths in parts:
        repeated = None if lengths is None else lengths.repeat_interleave(s_q)
        more = picks(indices.flatten(0, 1), repeated, table)
        keys = [torch.cat(pair) for pair in zip(keys, more, strict=True)]
    exact = dense64(q.flatten(0, 1), keys, scale or d**-0.5, 512, sink)
    agree(out, exact, q.dtype)
    assert lse.is_contiguous()
    agree_log(lse, *(part.view(b, s_q, h).transpose(1, 2) for part in (exact.lse, exact.lse_error)))


GRID = [
    (*case, HEADS[number % len(HEADS)])
    for number, case in enumerate(itertools.product((2, 61, 64, 69, 576), ((512, 64), (1024, 576)), (4, 7), (1, 3)))
]


@pytest.mark.parametrize(("size", "lengths", "b", "s_q", "h"), GRID)
def test_decode_grid_v32_fp8(size: int, lengths: tuple[int, int], b: int, s_q: int, h: int) -> None:
    s_k, topk = lengths
    pages = ceil_div(s_k, size)
    storage = v32_pages(pages, size)
    indices = random_indices((b, s_q, topk), pages * size, seed=h)
    indices[1] = torch.tensor([INT_MIN, -123456, -1, pages * size, INT_MAX]).repeat(topk)[:topk]
    topk_length = torch.randint(1, topk + 1, (b,), dtype=torch.int32)
    topk_length[0], topk_length[-1] = 0, topk
    for request, length in enumerate(topk_length.tolist()):
        indices[request, :, length:] = INT_MAX
    spoil_unused(storage, indices)
    part = (storage, v32_rows(storage), indices, topk_length)
    sink = mixed_sink(h) if s_q == 3 else None
    q = torch.randn(b, s_q, h, 576)
    for dtype in (torch.float32, torch.bfloat16):
        check_decode(q.to(dtype), [part], packed=True, sink=sink, scale=0.1352338 if b == 7 else None)


@pytest.mark.parametrize(("size", "extra_size", "h"), [(64, 2, 64), (2, 64, 128), (61, 576, 3), (1, 69, 8)])
@pytest.mark.parametrize("s_q", [1, 3])
def test_decode_v4_with_an_extra_cache(size: int, extra_size: int, h: int, s_q: int) -> None:
    b, topk, extra_topk = 4, 128, 77
    parts = []
    for columns, page, seed in ((topk, size, 1), (extra_topk, extra_size, 2)):
        storage = v4_pages(ceil_div(512, page), page, seed)
        indices = random_indices((b, s_q, columns), storage.shape[0] * page, seed)
        spoil_unused(storage, indices)
        lengths = torch.randint(0, columns + 1, (b,), dtype=torch.int32)
        parts.append((storage, v4_rows(storage), indices, lengths))
    # Request 0: both lists empty; request 1: only the extra one has rows.
    parts[0][3][:2] = 0
    parts[1][3][:2] = torch.tensor([0, extra_topk])
    q = torch.randn(b, s_q, h, 512)
    check_decode(q, parts, packed=True, sink=mixed_sink(h))
    check_decode(q.bfloat16(), [parts[0], (*parts[1][:3], None)], packed=True)


def test_decode_v32_with_an_extra_cache() -> None:
    parts = []
    for size, columns, seed in ((64, 64, 3), (61, 33, 4)):
        storage = v32_pages(9, size, seed)
        indices = random_indices((2, 3, columns), 9 * size, seed)
        spoil_unused(storage, indices)
        parts.append((storage, v32_rows(storage), indices, None))
    check_decode(torch.randn(2, 3, 16, 576), parts, packed=True, sink=mixed_sink(16))


@pytest.mark.parametrize(("size", "h", "s_q"), [(64, 64, 1), (61, 3, 3), (1, 16, 2)])
def test_decode_rows_without_rope(size: int, h: int, s_q: int) -> None:
    parts = []
    for columns, page, seed in ((64, size, 3), (33, 7, 4)):
        storage = v32_pages(ceil_div(200, page), page, seed)[..., :528].contiguous()
        indices = random_indices((3, s_q, columns), storage.shape[0] * page, seed)
        spoil_unused(storage, indices)
        lengths = torch.tensor([columns, 0, columns // 2], dtype=torch.int32)
        parts.append((storage, v32_rows(storage), indices, lengths))
    q = torch.randn(3, s_q, h, 512)
    check_decode(q, parts[:1], packed=True, kv_format="V32_NO_ROPE")
    check_decode(q.bfloat16(), parts, packed=True, sink=mixed_sink(h), kv_format="V32_NO_ROPE")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("width", "size", "h"), [(576, 64, 5), (512, 69, 128), (520, 1, 2)])
def test_decode_unquantised_rows(dtype: torch.dtype, width: int, size: int, h: int) -> None:
    storage = torch.randn(ceil_div(300, size), size, 1, width).to(dtype)
    indices = random_indices((3, 2, 50), storage.shape[0] * size, seed=5)
    spoil_unused(storage, indices)
    part = (storage, storage.double().flatten(0, 2), indices, torch.tensor([50, 0, 17], dtype=torch.int32))
    check_decode(torch.randn(3, 2, h, width), [part], packed=False)
    check_decode(torch.randn(3, 2, h, width, dtype=torch.bfloat16), [part], packed=False, sink=mixed_sink(h))


@pytest.mark.parametrize("packed", [True, False])
def test_decode_mixed_batch_is_one_request_of_many_tokens(packed: bool) -> None:
    storage = v32_pages(8, 64) if packed else torch.randn(8, 64, 1, 576, dtype=torch.bfloat16)
    table = v32_rows(storage) if packed else storage.double().flatten(0, 2)
    indices = random_indices((1, 37, 100), 512, seed=6)
    check_decode(torch.randn(1, 37, 7, 576), [(storage, table, indices, None)], packed=packed)


def test_decode_many_rows_in_pages_that_lie_apart() -> None:
    apart = torch.full((6, 3, 656 * 64), 255, dtype=torch.uint8)
    apart[:, 1] = v32_pages(6, 64).flatten(1)
    storage = apart[:, 1].unflatten(1, (64, 1, 656))
    assert storage.stride(0) == 3 * 64 * 656
    indices = random_indices((2, 1, 80), 6 * 64, seed=7)
    check_decode(torch.randn(2, 1, 4, 576), [(storage, v32_rows(storage), indices, None)], packed=True)


def test_decode_takes_any_one_byte_dtype_and_any_strides() -> None:
    storage, indices = v32_pages(4, 64), random_indices((3, 2, 40), 256, seed=8)
    q = torch.randn(3, 2, 6, 576)

    def call(q: Tensor, cache: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        return flash_mla.flash_mla_with_kvcache(q, cache, None, None, 512, None, is_fp8_kvcache=True, indices=indices)

    expected = call(q, storage, indices)
    strided_q = torch.randn(2, 6, 3, 600)[..., :576].permute(2, 0, 1, 3).copy_(q)
    strided_indices = torch.empty(40, 3, 2, dtype=torch.int32).permute(1, 2, 0).copy_(indices)
    assert not strided_q.is_contiguous()
    assert not strided_indices.is_contiguous()
    for dtype in (torch.uint8, torch.int8, E4M3):
        found = call(strided_q, storage.view(dtype), strided_indices)
        assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("size", "packed"), [(64, False), (61, True), (1, False), (2, True)])
@pytest.mark.parametrize("s_q", [1, 4])
def test_dense_mode(causal: bool, size: int, packed: bool, s_q: int) -> None:
    lengths = torch.tensor([130, 0, 2, 61], dtype=torch.int32)
    width = ceil_div(140, size)
    storage = v32_pages(4 * width, size) if packed else torch.randn(4 * width, size, 1, 576)
    block_table = torch.randperm(4 * width).int().view(4, width)
    table = (v32_rows(storage) if packed else storage.double().flatten(0, 2)).view(-1, size, 576)
    keys, used = [], []
    for request, length in enumerate(lengths.tolist()):
        rows = table[block_table[request].long()].flatten(0, 1)
        keys += [rows[: max(0, length - (s_q - 1 - i)) if causal else length] for i in range(s_q)]
        used.append(block_table[request].long().repeat_interleave(size)[:length] * size + torch.arange(length) % size)
        block_table[request, ceil_div(length, size) :] = INT_MAX if request % 2 else INT_MIN
    spoil_unused(storage, *used)
    q, sink = torch.randn(4, s_q, 5, 576), mixed_sink(5)
    metadata, num_splits = flash_mla.get_mla_metadata(lengths, s_q * 5, 1)
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, storage, block_table, lengths, 512, metadata, num_splits, None, causal, packed, attn_sink=sink
    )
    exact = dense64(q.flatten(0, 1), keys, 576**-0.5, 512, sink)
    agree(out, exact, torch.float32)
    agree_log(lse, *(part.view(4, s_q, 5).transpose(1, 2) for part in (exact.lse, exact.lse_error)))


PREFILL = [
    (s_q, s_kv, topk, h, d)
    for (s_q, s_kv, topk), (h, d) in itertools.product(
        ((1, 95, 128), (62, 592, 256), (40, 1840, 512), (33, 303, 77)), ((1, 576), (3, 512), (64, 576), (128, 512))
    )
]


@pytest.mark.parametrize(("s_q", "s_kv", "topk", "h", "d"), PREFILL)
def test_prefill_grid(s_q: int, s_kv: int, topk: int, h: int, d: int) -> None:
    kv = torch.randn(s_kv, 1, d, dtype=torch.bfloat16)
    indices = random_indices((s_q, 1, topk), s_kv, seed=s_q)
    topk_length = torch.randint(0, topk + 1, (s_q,), dtype=torch.int32)
    if s_q > 1:
        indices[0] = torch.tensor([INT_MIN, -123456, -1, s_kv, INT_MAX]).repeat(topk)[:topk]
        topk_length[:3] = torch.tensor([topk, 0, 1])
    unused = torch.ones(s_kv, dtype=torch.bool)
    for token, length in enumerate(topk_length.tolist()):
        named = indices[token, 0, :length]
        unused[named[(named >= 0) & (named < s_kv)].long()] = False
    # Columns past the length do name spoiled rows here: they must not be read either.
    kv[unused] = torch.nan
    keys = picks(indices.squeeze(1), topk_length, kv.double().squeeze(1))
    sink = mixed_sink(h)
    for dtype in (torch.float32, torch.bfloat16):
        q = torch.randn(s_q, h, d).to(dtype)
        out, top, lse = flash_mla.flash_mla_sparse_fwd(
            q, kv, indices, 0.07, d_v=512, attn_sink=sink, topk_length=topk_length
        )
        exact = dense64(q, keys, 0.07, 512, sink)
        agree(out, exact, dtype)
        agree_log(top, exact.top, exact.top_error)
        agree_log(lse, exact.lse, exact.lse_error)


@pytest.mark.parametrize("row_stride", [576, 577, 1152])
def test_prefill_rows_may_lie_apart(row_stride: int) -> None:
    kv = torch.randn(200, row_stride)[:, None, :576]
    indices = torch.randint(0, 200, (9, 60, 1), dtype=torch.int32).transpose(1, 2)
    q = torch.randn(8, 9, 576).transpose(0, 1)
    found = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1)
    same = flash_mla.flash_mla_sparse_fwd(q.contiguous(), kv.contiguous(), indices.contiguous(), 0.1)
    assert all(torch.equal(f, s) for f, s in zip(found, same, strict=True))
    expected = dense64(q, picks(indices.squeeze(1), None, kv.double().squeeze(1)), 0.1, 512)
    agree(found[0], expected, torch.float32)


def test_prefill_by_its_other_name_returns_the_output_alone() -> None:
    kv, indices = torch.randn(100, 1, 576), random_indices((5, 1, 64), 100, seed=9)
    q = torch.randn(5, 7, 576)
    out = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1)[0]
    assert torch.equal(flash_mla.flash_mla_sparse_prefill(q, kv, indices, 0.1), out)
    assert torch.equal(flash_mla.flash_mla_sparse_prefill(q, kv[:, 0], indices[:, 0], 0.1), out)


def test_prefill_of_more_tokens_than_a_grid_axis_holds() -> None:
    kv = torch.randn(50, 1, 64)
    indices = torch.arange(70_000, dtype=torch.int32).remainder(50).view(-1, 1, 1)
    out, top, lse = flash_mla.flash_mla_sparse_fwd(torch.ones(70_000, 1, 64), kv, indices, 0.5, d_v=32)
    assert torch.equal(out[:, 0], kv[indices.flatten().long(), 0, :32])
    assert torch.equal(top, lse)
