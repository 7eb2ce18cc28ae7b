"""Attention of many heads over bf16 rows in CUDA C++: the source runs on the host, warps in random order."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attention_calls import attend_call
from many_heads_emulated import Emulated, choose, close, expected, filled, merged, on_gpu, queries
from seeds import reseed

from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.ops.attention.hopper import many_heads as many
from tamis.ops.attention.hopper.splits import Outputs

ERRORS = {"error": 4e-3, "lse_error": 1e-4}
"""Bounds of the error of a float32 output, whose weights are rounded to bf16, and of its lse, whose are not."""


@pytest.fixture(scope="session")
def emulated(host_folder: Path) -> Callable[..., Emulated]:
    """The kernel of a number of selections and a width of rows."""
    kernels = {"v32-bf16": many.V32_BF16, "v4-bf16": many.V4_BF16}
    return functools.cache(lambda selections=1, layout="v32-bf16": Emulated(host_folder, kernels[layout], selections))


@pytest.mark.parametrize("columns", [1, 64, 65, 330])
def test_the_source_attends_as_the_reference(emulated, columns: int) -> None:
    reseed(0)
    cache = filled("v32-bf16", 500)
    q, selections = queries(2, 64, 576), [Selection(cache, choose(2, columns, cache))]
    for seed in range(3):
        _, splits = emulated()(q, selections, scale=0.05, seed=seed)
        close(merged(*splits), expected(q, selections, 0.05), **ERRORS)


@pytest.mark.parametrize("columns", [64, 330])
def test_rows_of_v4_are_values_in_all_columns(emulated, columns: int) -> None:
    """Tokens have different lengths and share CTAs, so that stages without rows and with them follow one another."""
    reseed(columns)
    cache = filled("v4-bf16", 500)
    lengths = torch.tensor([columns, 0, columns // 2], dtype=torch.int32)
    q, selections = queries(3, 64, 512), [Selection(cache, choose(3, columns, cache), lengths)]
    for seed in range(2):
        _, splits = emulated(layout="v4-bf16")(q, selections, scale=0.05, seed=seed, ctas=2)
        close(merged(*splits), expected(q, selections, 0.05), **ERRORS)


@pytest.mark.parametrize("heads", [17, 33, 128])
def test_heads_that_do_not_fill_a_cta(emulated, heads: int) -> None:
    reseed(heads)
    cache = filled("v32-bf16", 200)
    q, selections = queries(1, heads, 576), [Selection(cache, choose(1, 150, cache))]
    _, splits = emulated()(q, selections, scale=0.05)
    close(merged(*splits), expected(q, selections, 0.05), **ERRORS)


@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_a_cta_takes_one_work_item_after_the_other(emulated, ctas: int) -> None:
    """Some tokens have no rows, so that only the barriers of the queries separate work items."""
    reseed(ctas)
    cache = filled("v32-bf16", 300)
    lengths = torch.tensor([140, 0, 0, 64, 300, 1], dtype=torch.int32)
    selections = [Selection(cache, choose(6, 300, cache, invalid=0.3), lengths)]
    q, sink = queries(6, 70, 576), torch.randn(70)
    wanted = expected(q, selections, 0.05, sink)
    direct, rest = emulated()(
        q, selections, scale=torch.tensor([0.05]), whole=3, splits=2, sink=sink, ctas=ctas, seed=ctas
    )
    close(Outputs(*(t[:3] for t in direct)), tuple(t[:3] for t in wanted), error=6e-3, lse_error=1e-4)
    assert (direct.out[3:] == -7).all()
    close(merged(*rest, sink=sink), tuple(t[3:] for t in wanted), **ERRORS)


@pytest.mark.parametrize("splits", [2, 3, 7])
def test_two_selections_in_splits(emulated, splits: int) -> None:
    reseed(splits)
    caches = filled("v32-bf16", 200), filled("v32-bf16", 300, page_size=7, seed=5)
    lengths = torch.tensor([70, 0, 1], dtype=torch.int32), torch.tensor([140, 65, 0], dtype=torch.int32)
    slots = choose(3, 80, caches[0]), choose(3, 150, caches[1], invalid=0.3)
    selections = [Selection(*given) for given in zip(caches, slots, lengths, strict=True)]
    q = queries(3, 64, 576)
    _, found = emulated(2)(q, selections, scale=0.05, splits=splits, ctas=4, seed=splits)
    close(merged(*found), expected(q, selections, 0.05), **ERRORS)


def test_what_rounding_cuts_off_is_kept(host_folder: Path) -> None:
    reseed(6)
    cache = filled("v32-bf16", 300)
    q, selections = queries(3, 70, 576), [Selection(cache, choose(3, 150, cache))]
    kernel = Emulated(host_folder, many.V32_BF16, 1, keep_rest=True)
    _, exact = kernel(q, selections, scale=0.05)
    assert (kernel.rest == -7).all()  # only whole tokens have one; a split is float32
    direct, _ = kernel(q, selections, scale=0.05, whole=3)
    assert torch.equal(direct.out, exact.out[0].bfloat16())
    assert torch.equal(kernel.rest, (exact.out[0] - direct.out.float()).bfloat16())


def test_positions_are_translated_in_the_kernel(emulated) -> None:
    reseed(4)
    cache = filled("v32-bf16", 640, page_size=8)
    table = torch.randint(-1, cache.pages, (3, 40), dtype=torch.int32)
    table[0, 3] = 2**31 - 1
    positions = torch.randint(-3, 8 * 45, (4, 150), dtype=torch.int32)
    for ids in ([0, 2, 1, 0], [0, -1, 3, 1]):
        selections = [Selection(cache, positions[:, ::2], None, torch.tensor(ids, dtype=torch.int32), table)]
        q = queries(4, 64, 576)
        _, splits = emulated()(q, selections, scale=0.05)
        close(merged(*splits), expected(q, selections, 0.05), **ERRORS)


def test_rows_without_anything_selected_give_zeros(emulated) -> None:
    cache = filled("v32-bf16", 64)
    cache.storage.view(torch.int16).fill_(0x7FFF)  # NaN everywhere: no byte of it may be used
    slots = torch.full((2, 130), -1, dtype=torch.int32)
    selections = [Selection(cache, slots, torch.tensor([130, 0], dtype=torch.int32))]
    q = queries(2, 64, 576)
    for splits in (1, 2):
        direct, found = emulated()(q, selections, scale=0.1, whole=1, splits=splits, sink=torch.zeros(64))
        for out, lse, max_logits in (Outputs(*(t[0] for t in direct)), found):
            assert (out == 0).all()
            assert (lse == -torch.inf).all()
            assert (max_logits == -torch.inf).all()


def test_nan_shows_and_stays_in_its_token(emulated) -> None:
    cache = filled("v32-bf16", 128)
    cache.storage.view(torch.bfloat16).view(-1, 576)[53, 300] = torch.nan
    slots = choose(3, 120, cache, invalid=0.0)
    slots[slots == 53] = 0
    slots[1, 77] = 53
    q, selections = queries(3, 64, 576), [Selection(cache, slots)]
    _, (out, lse, max_logits) = emulated()(q, selections, scale=0.05, ctas=1)
    for found in (out, lse, max_logits):
        assert found[0, 1].isnan().all()
    kept = [0, 2]
    wanted = expected(q[kept], [Selection(cache, slots[kept])], 0.05)
    close((out[0, kept], lse[0, kept], max_logits[0, kept]), wanted, **ERRORS)


@pytest.mark.parametrize("size", [1e-5, 1e-2, 1e4])
def test_rows_of_any_size(emulated, size: float) -> None:
    reseed(6)
    cache = filled("v32-bf16", 200, size=size)
    q, selections = queries(1, 64, 576, 1.0 / size), [Selection(cache, choose(1, 130, cache))]
    _, splits = emulated()(q, selections, scale=0.05)
    close(merged(*splits), expected(q, selections, 0.05), **ERRORS)


def test_logits_that_grow_from_block_to_block(emulated) -> None:
    """Each warpgroup raises the running max, and the other one follows."""
    reseed(8)
    cache = filled("v32-bf16", 320)
    cache.storage.view(torch.bfloat16).view(-1, 576).mul_(torch.arange(320).div(64, rounding_mode="floor")[:, None] + 1)
    q = queries(1, 64, 576)
    upwards = torch.arange(320, dtype=torch.int32).unsqueeze(0)
    for seed, slots in enumerate((upwards, upwards.flip(1))):
        selections = [Selection(cache, slots)]
        _, splits = emulated()(q, selections, scale=0.2, seed=seed)
        close(merged(*splits), expected(q, selections, 0.2), **ERRORS)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["v32-bf16", "v4-bf16"])
@pytest.mark.parametrize("heads", [17, 64, 128])
def test_the_device_attends_as_the_reference(heads: int, layout: str) -> None:
    reseed(heads)
    caches = filled(layout, 4096, page_size=64), filled(layout, 3000, page_size=64, seed=2)
    lengths = torch.randint(0, 1025, (300,), dtype=torch.int32), torch.randint(0, 301, (300,), dtype=torch.int32)
    lengths[0][0] = lengths[1][0] = 0
    pairs = zip(caches, (1024, 300), lengths, strict=True)
    selections = [Selection(cache, choose(300, columns, cache), length) for cache, columns, length in pairs]
    q, sink = queries(300, heads, caches[0].layout.width), torch.randn(heads)
    wanted = expected(q, selections, 0.05, sink)
    placed = [on_gpu(s) for s in selections]
    for splits in (None, 1, 5):
        out = torch.empty(300, heads, 512, dtype=torch.bfloat16, device="cuda")
        call = attend_call(q.cuda(), placed, scale=0.05, splits=splits, sink=sink.cuda(), out=out)
        lse, max_logits = many.attend(call)
        close((out.cpu(), lse.cpu(), max_logits.cpu()), wanted, error=6e-3, lse_error=1e-4)


def test_calls_that_the_kernel_takes() -> None:
    cache, slots = PagedCache("v32-bf16", 2, 16), torch.zeros(1, 4, dtype=torch.int32)
    q, good = torch.zeros(1, 64, 576, dtype=torch.bfloat16), Selection(cache, slots)
    assert many.refusal(q, [good, good], 512) is None
    for other in ("v32-fp8", "v32-fp16", "v4-bf16"):
        mixed = [good, Selection(PagedCache(other, 2, 16), slots)]
        assert "not all v32-fp8" in (many.refusal(q, mixed, 512) or "")
    narrow = [Selection(PagedCache("v4-bf16", 2, 16), slots)]
    assert many.refusal(q[:, :17, :512], narrow, 512) is None
    assert "queries have 16 heads" in (many.refusal(q[:, :16, :512], narrow, 512) or "")


def test_warpgroups_share_the_registers_of_a_launch() -> None:
    """A warpgroup that asks for more registers than are free waits for ever; the compiler does not check it."""
    registers = dict(many.V32_BF16.constants)
    assert 2 * registers["ATTEND_REGISTERS"] + registers["GATHER_REGISTERS"] <= 3 * 168
    for kind in (many.V32_FP8, many.V4_FP8):
        registers = dict(kind.constants)
        dequantising = 2 * registers["DEQUANTISE_REGISTERS"]
        assert registers["SCORE_REGISTERS"] + registers["WEIGH_REGISTERS"] + dequantising <= 4 * 128
