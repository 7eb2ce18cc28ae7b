"""Torch's global settings around a call change no result: layers, caches and drop-ins under every setting.

`pytest --under SETTING` runs the other tests the same way; here the same work is compared bit by bit, and crosses the
border of a setting between two calls.
"""

import ast
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import NEEDS_GPU, SETTINGS, default_dtype, matmul_precision
from torch import Tensor

from tamis import (
    Batch,
    Caches,
    LayerSpec,
    Limits,
    PagedCache,
    PagePool,
    Planner,
    Recording,
    Selection,
    SparseMLA,
    SparseV4,
    V4Caches,
    V4Planner,
    V4Weights,
)
from tamis.arithmetic import float32_products
from tamis.cache.layout import named, rows
from tamis.integrations import deep_gemm, flash_mla, flashinfer
from tamis.layers.v4_products import project
from tamis.layers.v4_weights import CompressorWeights, IndexerWeights
from tamis.model.absorb import AbsorbedWeights
from tamis.model.rope import Rope
from tamis.ops import IndexInputs, attend, lower_groups, write_kv

pytestmark = pytest.mark.own_settings("is about them")
HOST = [name for name in SETTINGS if name not in NEEDS_GPU]
STEPS = (([33, 20], [33, 20]), ([1, 17], [34, 37]))


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu").to(dtype)


class ServedMLA:
    """A layer that selects for itself, with all that it keeps between two steps."""

    def __init__(self) -> None:
        spec = LayerSpec(heads=32, scale=0.08, topk=24)
        limits = Limits(max_tokens=128, max_requests=8, max_length=256, page_size=16, workspace_rows=256)
        self.planner, self.pool = Planner(spec, limits, layout="v32-fp8", mode="separate"), PagePool(60, 16, seed=2)
        self.layer, self.recording = SparseMLA(spec), Recording(24)
        index = PagedCache(rows(torch.float32, latent=16, rope=0), 60, 16)
        self.caches = Caches(PagedCache("v32-fp8", 60, 16), index)

    def step(self, number: int) -> list[Tensor]:
        new, lengths = STEPS[number]
        plan, tokens = self.planner.plan(Batch.build(new, lengths, self.pool)), sum(new)
        index = IndexInputs(normal(tokens, 8, 16), normal(tokens, 8), normal(tokens, 16))
        done = self.layer(normal(tokens, 32, 576), normal(tokens, 576), self.caches, plan, index=index)
        for _ in range(2):  # the second time into rows that are there
            self.recording.record(0, [0, 1], plan, done.positions)
        return [done.out, done.lse, done.positions, self.recording.replay(0, [0, 1], plan)]


class ServedV4:
    """The same for a V4 layer with everything that V4 has."""

    def __init__(self) -> None:
        sizes = {"window": 8, "state4": 4}
        kind = {"kind": "overlapping", "compress": 4, "topk": 5, "index_heads": 2, "index_dim": 16}
        spec = LayerSpec(4, 24, 8, 32, 32**-0.5, window=6, sink=True, **kind)
        entry = CompressorWeights(normal(64, 12), normal(64, 12), normal(4, 64), normal(32))
        keys = CompressorWeights(normal(32, 12), normal(32, 12), normal(4, 32), normal(16))
        dense = (normal(10, 12), normal(10), normal(128, 10), normal(32, 12), normal(32))
        names = dict(zip(("q_a", "q_norm", "q_b", "kv", "kv_norm"), dense, strict=True))
        weights = V4Weights(
            **names,
            sink=normal(4),
            o_a=normal(2, 3, 64),
            o_b=normal(12, 6),
            compressor=entry,
            indexer=IndexerWeights(q=normal(32, 10), weights=normal(2, 12), compressor=keys),
        )
        self.layer = SparseV4(spec, weights, Rope(8).cos_sin_table(80))
        layout = named("v4-fp8", latent=24, rope=8, tile=8)
        self.planner = V4Planner([spec], Limits(80, 2, 80, 16, sizes), layout=layout, mode="separate")
        self.pool, self.others = PagePool(20, 16), {name: PagePool(40, size) for name, size in sizes.items()}
        numbers = {"pages": 20, "window_pages": 40, "state_pages": 40, "page_size": 16, "window_page_size": 8}
        index = rows(torch.float32, latent=16, rope=0)
        self.caches = V4Caches.allocate(spec, **numbers, state_page_size=4, layout=layout, index_layout=index)

    def step(self, number: int) -> list[Tensor]:
        new, lengths = STEPS[number]
        plan = self.planner.plan(Batch.build(new, lengths, self.pool, other_pools=self.others))
        return [self.layer(normal(sum(new), 12), self.caches, plan)]


Setting = Callable[[], AbstractContextManager[Any]]
SERVED = pytest.mark.parametrize("kind", [ServedMLA, ServedV4])


def served(kind: type[Any], making: Setting, first: Setting, second: Setting) -> list[Tensor]:
    """Two steps, each and the making of all buffers under a setting of its own."""
    torch.manual_seed(3)
    with making():
        made = kind()
    found = []
    for number, setting in enumerate((first, second)):
        with setting():
            found += made.step(number)
    return found


# V4's rows come out of a product, and a last bit can move one across a rounding to e4m3: not to be compared under tf32.
@pytest.mark.parametrize(
    ("kind", "name"), [(ServedMLA, n) for n in HOST] + [(ServedV4, n) for n in HOST if n != "tf32"]
)
def test_a_layer_gives_the_same_under_every_setting(kind: type[Any], name: str) -> None:
    setting = SETTINGS[name]
    expected, found = served(kind, *[nullcontext] * 3), served(kind, *[setting] * 3)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        if name != "tf32":
            assert torch.equal(one, other)
        elif one.is_floating_point():
            # Products are in float64 there, in float32 else: sums of at most 576 terms, each rounded once per term.
            assert (one - other).abs().max() <= 2 * 576 * 2**-24 * other[other.isfinite()].abs().max()


@SERVED
@pytest.mark.parametrize("inside", [0, 1, 2])
@pytest.mark.parametrize("name", ["inference", "bf16", "meta"])
def test_a_setting_may_begin_or_end_between_two_calls(kind: type[Any], inside: int, name: str) -> None:
    """Buffers made inside `inference_mode` are written to outside, and the reverse."""
    expected = served(kind, *[nullcontext] * 3)
    for here, elsewhere in ((SETTINGS[name], nullcontext), (nullcontext, SETTINGS[name])):
        found = served(kind, *(here if place == inside else elsewhere for place in range(3)))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [name for name in HOST if name not in ("tf32", "meta")])
def test_a_compiled_layer_gives_the_same_under_a_setting(name: str) -> None:
    """Tests that compile run without `--under`: torch cannot trace a mode, which a default device is too."""
    expected = served(ServedV4, *[nullcontext] * 3)
    torch._dynamo.reset()

    class Compiled(ServedV4):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.compile(self.layer, fullgraph=True, backend="aot_eager")

    found = served(Compiled, nullcontext, *[SETTINGS[name]] * 2)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_inference_mode_has_made_is_written_to_outside() -> None:
    with torch.inference_mode():
        made, cache = ServedMLA(), PagedCache("v32-fp32", 2, 16)
        plan = made.planner.plan(Batch.build([3], [3], made.pool))
        positions = torch.full((3, 24), -1, dtype=torch.int32, device="cpu")
        for token in range(3):
            positions[token, : token + 1] = torch.arange(token + 1, dtype=torch.int32, device="cpu")
        made.recording.record(0, ["a"], plan, positions)
    made.recording.record(0, ["a"], plan, positions)
    assert torch.equal(made.recording.replay(0, ["a"], plan), positions)
    cache.storage.fill_(1.0)  # an engine that clears or moves pages
    assert cache.storage.sum() == cache.storage.numel()


@pytest.mark.parametrize("name", ["tf32", "autocast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float32_products_are_not_shortened(dtype: torch.dtype, name: str) -> None:
    """Where torch may round factors of float32 products to TF32 or bf16, they are multiplied in float64: all that is
    left is the rounding of the result. Under autocast they stay in float32: sums of at most 576 rounded terms."""
    torch.manual_seed(5)
    cache = PagedCache("v32-fp32", 4, 64)
    write_kv(normal(256, 576), cache, torch.arange(256, dtype=torch.int64, device="cpu"))
    slots = torch.stack([torch.randperm(256)[:64] for _ in range(8)]).int()
    q, keys = normal(8, 16, 576, dtype=dtype), normal(576, 576)
    selection, wide = Selection(cache, slots), {"scale": 0.05, "value_dim": 512}
    exact = attend(q.double(), selection, **wide)
    x, scales = normal(9, 2, 256).to(torch.float8_e4m3fn), torch.full((9, 2, 2), 127, dtype=torch.uint8, device="cpu")
    weight = normal(2, 128, 256).to(torch.float8_e4m3fn)
    factors = normal(2, 1, 2).abs()
    lowered = torch.einsum("tgk,gok->tgo", x.double(), weight.float().mul(factors.repeat_interleave(128, 2)).double())
    with SETTINGS[name]():
        found = attend(q, selection, **wide, out=torch.empty(8, 16, 512, dtype=torch.float32, device="cpu"))
        low = lower_groups(x, scales, weight, factors, dtype=torch.float32)
        dense = project(q[:, 0], keys, torch.float32)
        absorbed = AbsorbedWeights(keys[None], keys[None]).absorb_query(q[:, :1].float())
    several = ((found.out, exact.out), (found.lse, exact.lse), (low, lowered))
    product = q[:, 0].double() @ keys.double().T
    for one, other in (*several, (dense, product), (absorbed[:, 0], q[:, 0].double() @ keys.double())):
        terms = 1 if name == "tf32" else 576
        assert one.dtype == torch.float32
        assert (one.double() - other).abs().max() <= terms * 2**-23 * other.abs().max()


@pytest.mark.parametrize("name", ["v32-fp16", "v32-bf16"])
def test_autocast_to_one_16_bit_dtype_leaves_the_other_alone(name: str) -> None:
    """Torch refuses to join tensors of a 16-bit dtype under an autocast to the other."""
    cache, dtype = PagedCache(name, 2, 16), torch.float16 if name == "v32-fp16" else torch.bfloat16
    slots = torch.arange(32, dtype=torch.int64, device="cpu")
    rows, q = normal(32, 576, dtype=dtype), normal(2, 4, 576, dtype=dtype)
    chosen = slots.int().expand(2, -1).contiguous()
    for other in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=other):
            write_kv((rows[:, :512], rows[:, 512:]), cache, slots)
            found = attend((q[..., :512], q[..., 512:]), [Selection(cache, chosen)] * 2, scale=0.05, value_dim=512)
        assert torch.equal(cache.read(slots, dtype=dtype), rows)
        assert torch.equal(found.out, attend(q, [Selection(cache, chosen)] * 2, scale=0.05, value_dim=512).out)


@pytest.mark.parametrize("backend", ["cuda", "mkldnn"])
def test_every_way_to_allow_shorter_products_is_seen(backend: str) -> None:
    device = torch.device("cuda" if backend == "cuda" else "cpu")
    assert float32_products(device) == torch.float32
    with matmul_precision("high"):
        assert float32_products(torch.device("cuda")) == torch.float64
    own, before = getattr(torch.backends, backend).matmul, torch.backends.fp32_precision
    try:
        for value, expected in (("tf32", torch.float64), ("ieee", torch.float32), ("none", torch.float32)):
            own.fp32_precision = value
            assert float32_products(device) == expected
        torch.backends.fp32_precision = "tf32"
        assert float32_products(device) == torch.float64
    finally:
        torch.backends.fp32_precision = before
        torch.set_float32_matmul_precision("highest")


def decode() -> tuple[Tensor, ...]:
    pages = torch.randint(0, 120, (4, 64, 1, 656), dtype=torch.uint8, device="cpu")
    pages[..., 512:528].view(torch.float32).fill_(0.5)
    indices = torch.randint(0, 256, (2, 1, 64), dtype=torch.int32, device="cpu")
    q, sink = normal(2, 1, 16, 576, dtype=torch.bfloat16), normal(16)
    plan = flash_mla.get_mla_metadata()[0]
    options = {"is_fp8_kvcache": True, "indices": indices, "attn_sink": sink}
    return flash_mla.flash_mla_with_kvcache(q, pages, None, None, 512, plan, **options)


def dense_decode() -> tuple[Tensor, ...]:
    table = torch.arange(4, dtype=torch.int32, device="cpu").view(2, 2)
    lengths = torch.tensor([100, 70], dtype=torch.int32, device="cpu")
    pages, q = normal(4, 64, 1, 576, dtype=torch.bfloat16), normal(2, 2, 16, 576, dtype=torch.bfloat16)
    plan = flash_mla.get_mla_metadata()[0]
    return flash_mla.flash_mla_with_kvcache(q, pages, table, lengths, 512, plan, causal=True)


def prefill() -> tuple[Tensor, ...]:
    indices = torch.randint(-1, 90, (6, 1, 64), dtype=torch.int32, device="cpu")
    q, kv = normal(6, 16, 576, dtype=torch.bfloat16), normal(90, 1, 576, dtype=torch.bfloat16)
    return flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05)


def flashinfer_decode() -> tuple[Tensor, ...]:
    cache, query = normal(4, 64, 576, dtype=torch.bfloat16), normal(2, 1, 16, 576, dtype=torch.bfloat16)
    slots = torch.randint(0, 256, (2, 1, 64), dtype=torch.int32, device="cpu")
    lengths = torch.tensor([64, 9], dtype=torch.int32, device="cpu")
    out = flashinfer.trtllm_batch_decode_with_kv_cache_mla(
        query,
        cache,
        torch.zeros(8, dtype=torch.uint8, device="cpu"),
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        block_tables=slots,
        seq_lens=lengths,
        max_seq_len=64,
        sparse_mla_top_k=64,
        bmm1_scale=0.05,
    )
    return (out,)


def logits() -> tuple[Tensor, ...]:
    q, keys = normal(5, 8, 128).to(torch.float8_e4m3fn), normal(40, 128).to(torch.float8_e4m3fn)
    starts = torch.zeros(5, dtype=torch.int32, device="cpu")
    ends = torch.tensor([1, 9, 20, 40, 40], dtype=torch.int32, device="cpu")
    return (deep_gemm.fp8_mqa_logits(q, (keys, normal(40).abs()), normal(5, 8), starts, ends),)


@pytest.mark.parametrize("call", [decode, dense_decode, prefill, flashinfer_decode, logits], ids=lambda c: c.__name__)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_drop_ins_under_the_defaults_of_other_programs(
    call: Callable[[], tuple[Tensor, ...]], device: str, dtype: torch.dtype
) -> None:
    """FlashMLA's own tests set default dtype bf16 and default device cuda. "meta" stands for any device that is not
    where the tensors are."""
    torch.manual_seed(9)
    expected = call()
    torch.manual_seed(9)
    with default_dtype(dtype), torch.device(device):
        found = call()
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device)
        assert torch.equal(one, other)


def test_every_triton_launch_is_on_the_device_of_its_tensors() -> None:
    """Triton launches on the current device, which need not be that of the tensors: `launching_on` makes it so."""
    found = 0
    for path in (Path(__file__).parents[1] / "src/tamis/ops").rglob("triton_*.py"):
        tree = ast.parse(path.read_text())
        guarded = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.With) and "launching_on(" in ast.unparse(node.items[0].context_expr)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                found += 1
                assert id(node) in guarded, f"{path.name}:{node.lineno} launches on the current device"
    assert found >= 15
