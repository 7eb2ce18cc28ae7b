"""Builds of FlashMLA as peers: each is found by its own marks, called with its own arguments, and named in the rows."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tamis.cache.selection import Selection
from tamis.cli.bench import times_table
from tamis.integrations import flash_mla
from tamis.lab.bench import peers
from tamis.lab.bench.inputs import AttendSet, prepare, worst_error
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers.flash_mla import BUILDS, FLASH_MLA_MODULES
from tamis.lab.bench.record import FLASH_MLA, Row, slower_builds

CPU, GPU = torch.device("cpu"), torch.device("cuda")
JOB = Job("test", "attend", "3q1s256", "v32-fp8", 5, 64)


def sgl_build(seen: list[dict[str, object]]) -> ModuleType:
    """A module with the marks and signatures of sgl-flash-mla 1.0.0, which runs the drop-in."""

    def with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        block_table: Tensor | None,
        cache_seqlens: Tensor | None,
        head_dim_v: int,
        tile_scheduler_metadata: object,
        num_splits: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        is_fp8_kvcache: bool | None = None,
        indices: Tensor | None = None,
        use_legacy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        seen.append({"use_legacy": use_legacy, "lengths": cache_seqlens})
        given = (q, k_cache, None, None, head_dim_v, None)
        return flash_mla.flash_mla_with_kvcache(
            *given, softmax_scale=softmax_scale, is_fp8_kvcache=True, indices=indices
        )

    def sparse_fwd(
        q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int = 512, use_legacy: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        seen.append({"use_legacy": use_legacy})
        return flash_mla.flash_mla_sparse_fwd(q, kv, indices, sm_scale, d_v)

    module = ModuleType("flash_mla")
    module.__version__ = "1.0.0"
    module.has_legacy = lambda: True
    module.get_mla_metadata = lambda *args, **kwargs: (object(), None)
    module.flash_mla_with_kvcache, module.flash_mla_sparse_fwd = with_kvcache, sparse_fwd
    return module


@pytest.fixture
def no_modules(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in FLASH_MLA_MODULES:
        monkeypatch.setitem(sys.modules, name, None)
    return monkeypatch


@pytest.mark.parametrize(("layout", "shape"), [("v32-fp8", "3q1s256"), ("v32-bf16", "1q8s256")])
def test_sgl_flash_mla_runs_its_kernels_for_hopper(layout: str, shape: str, no_modules: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, object]] = []
    no_modules.setitem(sys.modules, "flash_mla", sgl_build(seen))
    (peer,), absent = peers.find_peers(["flashmla"], GPU)
    assert (peer.name, peer.build) == ("flashmla-sgl", "sgl-flash-mla 1.0.0")
    assert absent["flashmla-plain"] == "flash_mla is sgl-flash-mla here"
    job = replace(JOB, layout=layout, shape=shape)
    sets = prepare(job, CPU).sets
    for item, call in zip(sets, peer.calls(job, sets), strict=True):
        assert worst_error(item, call()) < 5e-3
    assert [one["use_legacy"] for one in seen] == [True] * len(sets)


def test_a_build_without_the_kernels_for_hopper_is_left_out(no_modules: pytest.MonkeyPatch) -> None:
    module = sgl_build([])
    module.has_legacy = lambda: False
    no_modules.setitem(sys.modules, "flash_mla", module)
    with pytest.raises(ValueError, match="flashmla-sgl: it was built without the older kernels"):
        peers.find_peers(["flashmla-sgl"], GPU)


def test_a_build_without_use_legacy_gets_no_such_argument(no_modules: pytest.MonkeyPatch) -> None:
    module = ModuleType("flash_mla")
    for name in ("flash_mla_with_kvcache", "get_mla_metadata"):
        setattr(module, name, getattr(flash_mla, name))
    calls: list[dict[str, object]] = []

    def with_kvcache(q: Tensor, k_cache: Tensor, *rest: object, **options: object) -> tuple[Tensor, Tensor]:
        calls.append(options)
        return flash_mla.flash_mla_with_kvcache(q, k_cache, *rest, **options)

    module.flash_mla_with_kvcache = with_kvcache
    no_modules.setitem(sys.modules, "flash_mla", module)
    (peer,), _ = peers.find_peers(["flashmla"], GPU)
    assert (peer.name, peer.build) == ("flashmla-plain", "flash_mla")
    sets = prepare(JOB, CPU).sets
    assert worst_error(sets[0], peer.calls(JOB, sets)[0]()) < 5e-3
    assert "use_legacy" not in calls[0]


def test_every_build_that_is_found_is_a_peer(no_modules: pytest.MonkeyPatch) -> None:
    no_modules.setitem(sys.modules, "flash_mla", sgl_build([]))
    inside, parents = (
        "vllm.v1.attention.ops.flashmla",
        ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"),
    )
    for name in parents:
        no_modules.setitem(sys.modules, name, ModuleType(name))
    copy = ModuleType(inside)
    copy.flash_mla_with_kvcache = flash_mla.flash_mla_with_kvcache
    no_modules.setitem(sys.modules, inside, copy)
    assert [peer.name for peer in peers.find_peers(["flashmla"], GPU)[0]] == ["flashmla-sgl", "flashmla-vllm"]


def test_a_release_whose_schedule_needs_the_lengths_gets_them() -> None:
    """FlashMLA's first interface with sparse attention: the schedule is two tensors, made from the lengths."""
    given: list[tuple[object, ...]] = []

    def get_mla_metadata(
        cache_seqlens: Tensor,
        num_q_tokens_per_head_k: int,
        num_heads_k: int,
        num_heads_q: int | None = None,
        is_fp8_kvcache: bool = False,
        topk: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        given.append((num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk))
        holder, splits = flash_mla.get_mla_metadata(
            cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache, topk
        )
        return holder.tile_scheduler_metadata, splits

    module = SimpleNamespace(get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla.flash_mla_with_kvcache)
    sets = prepare(JOB, CPU).sets
    calls = peers.FlashMLA(module).calls(JOB, sets)
    assert given == [(64, 1, 64, True, 64)]
    assert worst_error(sets[0], calls[0]()) < 5e-3
    two = replace(JOB, layout="v4-fp8", window=32)
    with pytest.raises(peers.Unsupported, match="older release reads one cache"):
        peers.FlashMLA(module).calls(two, prepare(two, CPU).sets)


@pytest.mark.parametrize("slot", [-2, 10**6])
def test_flash_mla_is_never_given_a_slot_outside_the_cache_but_minus_one(slot: int) -> None:
    item = prepare(JOB, CPU).sets[0]
    assert isinstance(item, AttendSet)
    (selection,) = item.selections
    for value, fine in ((-1, True), (slot, False)):
        slots = selection.slots.clone()
        slots[0, 0] = value
        changed = replace(item, selections=(Selection(selection.cache, slots),))
        if fine:
            assert len(peers.FlashMLA(flash_mla).calls(JOB, [changed])) == 1
        else:
            with pytest.raises(peers.Unsupported, match="it skips -1 alone"):
                peers.FlashMLA(flash_mla).calls(JOB, [changed])


def test_the_names_of_the_builds_are_those_of_the_rows() -> None:
    assert tuple(BUILDS) == FLASH_MLA


def test_the_fastest_build_alone_has_a_ratio_in_the_table() -> None:
    row = Row(
        *("2026", "gpu", "1", "2", "3", "0.1", "c", "hopper", "decode", "attend", "8q1s16k"),
        *(64, 2048, 0, "v32-fp8", 64, "graph", 25, 9, 20.0, 19.0, 21.0, 1000, 10, 5.0, 1e-3),
    )
    sgl = replace(row, peer="flashmla-sgl", peer_us=18.0, ratio=0.9, peer_build="sgl-flash-mla 1.0.0")
    vllm = replace(row, peer="flashmla-vllm", peer_us=23.0, ratio=1.15, peer_build="vllm 0.25.0")
    other = replace(row, peer="torch", peer_us=90.0, ratio=4.5)
    elsewhere = replace(vllm, shape="1q1s16k")
    rows = [sgl, vllm, other, elsewhere]
    assert slower_builds(rows) == [vllm]
    lines = times_table(rows).splitlines()[3:]
    assert "flashmla-sgl (sgl-flash-mla 1.0.0)" in lines[0]
    assert [line.split()[-1] for line in lines] == ["0.90", "-", "4.50", "1.15"]
    assert "23.0" in lines[1]
