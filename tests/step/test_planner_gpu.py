"""The reference and the planner on a GPU: same results as on the host, and no wait for the device while planning."""

from dataclasses import replace

import pytest
import torch
from seeds import reseed, seed_of

from tamis import Batch, Caches, LayerSpec, Limits, PagedCache, PageMap, PagePool, Planner, Selection, SparseMLA
from tamis.cache.layout import NAMES, Layout, named, v32_fp8
from tamis.ops import attend, gather_kv, translate_positions, write_kv

pytestmark = pytest.mark.gpu
PAGE = 16


def to_gpu(batch: Batch, **fields) -> Batch:
    pages = PageMap(batch.pages.block_table.cuda(), batch.pages.slots.cuda())
    return replace(batch, pages=pages, **fields)


@pytest.mark.parametrize("layout", [*NAMES, v32_fp8(scale_mode="exact")], ids=str)
def test_writes_give_the_same_bytes_as_on_the_host(layout: str | Layout) -> None:
    host, device = (PagedCache(layout, 9, PAGE, device=d) for d in ("cpu", "cuda"))
    if host.layout.scale_mode == "tensor":
        host, device = host.with_scale(0.37), device.with_scale(0.37)
    kv = torch.randn(100, host.layout.width) * torch.logspace(-6, 4, 100).unsqueeze(1)
    slots = torch.randperm(144)[:100]
    slots[::7] = -1
    write_kv(kv, host, slots)
    write_kv(kv.cuda(), device, slots.cuda())
    assert torch.equal(host.storage.view(torch.uint8), device.storage.view(torch.uint8).cpu())


def test_slots_past_the_cache_are_skipped_where_the_host_cannot_look() -> None:
    cache = PagedCache("v32-fp8", 2, PAGE, device="cuda")
    write_kv(torch.randn(3, 576, device="cuda"), cache, torch.tensor([1, 32, 2**40], device="cuda"))
    torch.cuda.synchronize()
    assert (cache.storage.view(32, 656) != 0).any(1).nonzero().flatten().tolist() == [1]


@pytest.mark.parametrize("layout", ["v32-bf16", "v32-fp8", "v4-fp8", "plain-fp8"])
def test_attention_agrees_with_the_host(layout: str) -> None:
    made = named(layout)
    host = PagedCache(made, 9, PAGE)
    write_kv(torch.randn(144, made.width), host, torch.arange(144))
    q = torch.randn(7, 16, made.width)
    slots = torch.randint(-2, 160, (7, 50), dtype=torch.int32)
    sink = torch.randn(16)
    expected = attend(q, Selection(host, slots), scale=0.05, value_dim=512, sink=sink, splits=3)
    device = PagedCache.wrap(host.storage.cuda(), made)
    found = attend(q.cuda(), Selection(device, slots.cuda()), scale=0.05, value_dim=512, sink=sink.cuda(), splits=3)
    torch.testing.assert_close(found.out.cpu(), expected.out, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.lse.cpu(), expected.lse, rtol=1e-5, atol=1e-5)


def test_translation_skips_unknown_requests_where_the_host_cannot_look() -> None:
    table = torch.arange(6, dtype=torch.int32, device="cuda").view(2, 3)
    ids = torch.tensor([0, 1, 2, -5], dtype=torch.int32, device="cuda")
    positions = torch.tensor([[0, 17, 48]] * 4, dtype=torch.int32, device="cuda")
    found = translate_positions(positions, ids, table, page_size=PAGE)
    assert found.slots.tolist() == [[0, 17, -1], [48, 65, -1], [-1, -1, -1], [-1, -1, -1]]


@pytest.mark.parametrize("where", ["host", "device"])
@pytest.mark.parametrize(("heads", "max_tokens"), [(16, 128), (64, 128), (16, 8192)])
def test_planning_waits_for_nothing(heads: int, max_tokens: int, where: str) -> None:
    """With a small arena, which is copied whole, and with a large one; with lengths and pages on the host or not."""
    spec, limits = LayerSpec(heads=heads, scale=0.1, topk=32), Limits(max_tokens, 8, 256, page_size=PAGE)
    planner = Planner(spec, limits, "cuda")
    addresses = set()
    for shape in ("3q1s100_1q50s70", "4q1s60", "2q30s40", "8q1s60", "2q1s60"):
        made = Batch.parse(shape, PagePool(100, PAGE, seed=seed_of(1)))
        batch = to_gpu(made, lengths=made.lengths.cuda(), host_lengths=made.lengths) if where == "device" else made
        expected = Planner(spec, limits).plan(made)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            plan = planner.plan(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for name in ("request_ids", "positions", "visible", "slots", "lengths", "query_starts", "block_table"):
            assert torch.equal(getattr(plan, name).cpu(), getattr(expected, name)), name
        whole = {name: view.cpu() for name, view in planner._arena.views.items()}
        tokens = plan.tokens
        assert whole["request_ids"][tokens:].eq(0).all()
        assert whole["positions"][tokens:].eq(-1).all()
        assert whole["visible"][tokens:].eq(0).all()
        assert whole["slots "][tokens:].eq(-1).all()
        addresses.add((plan.request_ids.data_ptr(), plan.slots.data_ptr(), plan.block_table.data_ptr()))
    assert len(addresses) == 1


def test_gathering_where_it_saves_time_gives_the_same_result() -> None:
    """Mode "auto" on a device with kernels for both ways, on both sides of its rule."""
    spec = LayerSpec(heads=64, scale=0.1, topk=2048)
    limits = Limits(1200, 2, 4096, page_size=PAGE)
    cache = PagedCache("v32-fp8", 300, PAGE, device="cuda")
    write_kv(torch.randn(cache.rows, 576, device="cuda"), cache, torch.arange(cache.rows, device="cuda"))
    automatic, mixed = Planner(spec, limits, "cuda"), Planner(spec, limits, "cuda", mode="mixed")
    if automatic.mode != "auto":
        pytest.skip("this device has no kernels that read FP8 rows at 64 heads")
    for shape, mode in (("1q1s90_1q1100s4k", "separate"), ("1q1s90_1q40s4k", "mixed"), ("2q1s90", "mixed")):
        batch = Batch.parse(shape, PagePool(300, PAGE, seed=seed_of(1)))
        plan = automatic.plan(batch)
        assert plan.mode == mode
        q = torch.randn(plan.rows, 64, 576, device="cuda", dtype=torch.bfloat16)
        reach = plan.visible.unsqueeze(1).float()
        positions = (torch.rand(plan.rows, 2048, device="cuda") * reach).int().clamp_max_(reach.int() - 1)
        found = SparseMLA(spec)(q, None, cache, plan, positions=positions).out
        expected = SparseMLA(spec)(q, None, cache, mixed.plan(batch), positions=positions).out
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("heads", [16, 64])
def test_layer_call_agrees_with_the_host(heads: int) -> None:
    spec = LayerSpec(heads=heads, scale=0.1, topk=32)
    results = []
    for device in ("cpu", "cuda"):
        reseed(3)
        pool = PagePool(100, PAGE, seed=seed_of(1))
        cache = PagedCache("v32-fp8", 100, PAGE, device=device)
        planner = Planner(spec, Limits(128, 8, 256, page_size=PAGE), device)
        batch = Batch.parse("3q1s1_2q40", pool)
        plan = planner.plan(batch if device == "cpu" else to_gpu(batch))
        q, kv = torch.randn(plan.rows, heads, 576), torch.randn(plan.rows, 576)
        positions = torch.randint(0, 40, (plan.rows, 32), dtype=torch.int32)
        positions[positions > plan.positions.cpu().unsqueeze(1)] = -1
        tensors = [t.to(device) for t in (q, kv, positions)]
        results.append(SparseMLA(spec)(tensors[0], tensors[1], Caches(cache), plan, positions=tensors[2]))
    torch.testing.assert_close(results[1].out.cpu(), results[0].out, rtol=1e-3, atol=1e-4)


def test_gather_agrees_with_the_host() -> None:
    host = PagedCache("v32-fp8", 20, PAGE)
    write_kv(torch.randn(320, 576), host, torch.arange(320))
    table = torch.randperm(20).int().view(2, 10)
    lengths = torch.tensor([100, 37], dtype=torch.int32)
    out = torch.zeros(150, 576, dtype=torch.bfloat16)
    expected = gather_kv(host, table, lengths, out=out)
    device = PagedCache.wrap(host.storage.cuda(), "v32-fp8")
    found = gather_kv(device, table.cuda(), lengths.cuda(), out=torch.zeros_like(out, device="cuda"))
    assert torch.equal(found.cpu(), expected)
