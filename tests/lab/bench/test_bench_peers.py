"""Peers of `tamis bench`: each is called with its own signature on the inputs of tamis, or gives a reason."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tamis import PagedCache
from tamis.cli import main
from tamis.integrations import flash_mla
from tamis.lab.bench import peers
from tamis.lab.bench.inputs import AttendSet, WriteSet, prepare, worst_error
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers import flash_attention
from tamis.lab.bench.peers.deep_gemm import DEEP_GEMM_MODULES
from tamis.lab.bench.peers.flash_mla import BUILDS, FLASH_MLA_MODULES
from tamis.ops import gather_kv, translate_positions, write_kv

CPU = torch.device("cpu")


def test_absent_peers_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*FLASH_MLA_MODULES, *DEEP_GEMM_MODULES, "vllm._custom_ops", flash_attention.MODULE):
        monkeypatch.setitem(sys.modules, name, None)
    found, absent = peers.find_peers(None, torch.device("cuda"))
    assert [peer.name for peer in found] == ["torch"]
    assert set(absent) == {*BUILDS, "flashmla-gather", "fa3", "deepgemm", "vllm", "vllm-gather"}
    assert "cannot import vllm.third_party.deep_gemm" in absent["deepgemm"]
    assert all("cannot import flash_mla" in absent[build] for build in ("flashmla-sgl", "flashmla-plain"))
    assert "cannot import vllm.third_party.flashmla" in absent["flashmla-vllm"]
    assert "cannot import flash_mla" in absent["flashmla-gather"]
    assert "cannot import vllm.vllm_flash_attn" in absent["fa3"]
    with pytest.raises(ValueError, match="--against: flashmla: cannot import"):
        peers.find_peers(["flashmla"], torch.device("cuda"))
    assert peers.find_peers(["none"], torch.device("cuda")) == ([], {})
    # With the drop-in installed as flash_mla, tamis would otherwise be compared with itself.
    monkeypatch.setitem(sys.modules, "flash_mla", flash_mla)
    assert "tamis's own drop-in" in peers.find_peers(None, torch.device("cuda"))[1]["flashmla-sgl"]


@pytest.mark.parametrize(
    ("shape", "layout", "heads", "window"),
    [
        ("3q1s256", "v32-fp8", 5, 0),
        ("2q2s256", "v32-fp8", 64, 0),
        ("1q8s256", "v32-bf16", 66, 0),
        ("3q1s256", "v4-fp8", 8, 64),
    ],
)
def test_flash_mla_is_called_as_it_is_defined(shape: str, layout: str, heads: int, window: int) -> None:
    """The drop-in has FlashMLA's signatures and conventions, so it stands in for it on a CPU."""
    job = Job("test", "attend", shape, layout, heads, 64, window)
    sets = prepare(job, CPU).sets
    seen = []

    def noted(function):
        def call(q: Tensor, *args, **options):
            seen.append(q.shape[-2])
            return function(q, *args, **options)

        return call

    names = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd")
    module = SimpleNamespace(get_mla_metadata=flash_mla.get_mla_metadata)
    for name in names:
        setattr(module, name, noted(getattr(flash_mla, name)))
    calls = peers.FlashMLA(module).calls(job, sets)
    assert len(calls) == len(sets)
    for item, call in zip(sets, calls, strict=True):
        assert worst_error(item, call()) < 5e-3
    assert set(seen) == {64 if heads <= 64 else 128}


@pytest.mark.parametrize(("stage", "layout"), [("write", "v32-fp8"), ("attend", "plain-fp8")])
def test_flash_mla_says_what_it_cannot_do(stage: str, layout: str) -> None:
    with pytest.raises(peers.Unsupported):
        peers.FlashMLA(flash_mla).calls(Job("test", stage, "1q1s64", layout, 4, 8), [])


def stand_in_for_vllm(*, with_lengths: bool) -> peers.VLLM:
    """Functions with vLLM's signatures."""

    def concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale):
        layout = {"fp8_ds_mla": "v32-fp8", "auto": "v32-bf16"}[kv_cache_dtype]
        write_kv((kv_c, k_pe), PagedCache.wrap(kv_cache, layout), slot_mapping)

    def older(src_cache, dst, block_table, seq_lens, workspace_starts, batch_size):
        gather_kv(PagedCache.wrap(src_cache, "v32-fp8"), block_table, seq_lens, starts=workspace_starts, out=dst)

    def newer(src_cache, dst, block_table, workspace_starts, batch_size, seq_starts=None):
        ends = torch.cat((workspace_starts[1:], torch.tensor([len(dst)], dtype=torch.int32)))
        older(src_cache, dst, block_table, ends - workspace_starts, workspace_starts, batch_size)

    def convert(req_id, block_table, token_indices, BLOCK_SIZE=64, NUM_TOPK_TOKENS=2048):
        assert token_indices.shape[1] == NUM_TOPK_TOKENS
        return translate_positions(token_indices, req_id, block_table, page_size=BLOCK_SIZE).slots

    operators = SimpleNamespace(
        concat_and_cache_mla=concat_and_cache_mla,
        cp_gather_and_upconvert_fp8_kv_cache=older if with_lengths else newer,
    )
    return peers.VLLM(operators, SimpleNamespace(triton_convert_req_index_to_global_index=convert), None, None)


@pytest.mark.parametrize("with_lengths", [True, False])
@pytest.mark.parametrize("stage", ["write", "gather", "translate"])
def test_vllm_is_called_as_it_is_defined(stage: str, with_lengths: bool) -> None:
    job = Job("test", stage, "2q100s100" if stage != "translate" else "3q1s300", topk=128)
    sets = prepare(job, CPU).sets
    for item, call in zip(sets, stand_in_for_vllm(with_lengths=with_lengths).calls(job, sets), strict=True):
        assert worst_error(item, call()) <= item.bound
        if isinstance(item, WriteSet):
            # The peer wrote into a separate cache.
            assert not item.cache.storage.any()


def test_a_peer_that_fails_or_errs_gets_no_time_but_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Peer:
        name, build, capturable = "torch", "", True

        def calls(self, job: Job, sets: list[AttendSet]) -> list:
            if job.heads == 3:
                return [lambda: 1 / 0 for item in sets]
            return [lambda q=item.q: torch.zeros(*q.shape[:2], 512) for item in sets]

    monkeypatch.setattr("tamis.lab.bench.peers._MAKERS", {"torch": lambda device: Peer()})
    arguments = ["--shape", "2q1s64", "--topk", "16", "--heads", "2,3", "--against", "torch", "--repeats", "1"]
    assert main(["bench", *arguments, "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "torch on attend 2q1s64: its result differs: error 1.00e+00" in text
    assert "torch on attend 2q1s64: ZeroDivisionError" in text


@pytest.mark.parametrize("with_lengths", [True, False])
@pytest.mark.parametrize(("shape", "heads"), [("1q40s200", 5), ("2q8s100_1q30s256", 66)])
def test_gathering_and_flash_mla_in_one_call(shape: str, heads: int, with_lengths: bool) -> None:
    job = Job("test", "attend", shape, "v32-fp8", heads, 64)
    sets = prepare(job, CPU).sets
    seen = []

    def sparse_fwd(q: Tensor, kv: Tensor, indices: Tensor, scale: float):
        seen.append((q.shape[1], kv.shape[0], kv.data_ptr()))
        return flash_mla.flash_mla_sparse_fwd(q, kv, indices, scale)

    operators = stand_in_for_vllm(with_lengths=with_lengths).operators
    peer = peers.GatheredFlashMLA(operators, peers.FlashMLA(SimpleNamespace(flash_mla_sparse_fwd=sparse_fwd)))
    calls = peer.calls(job, sets)
    # All calls share one workspace: a call that used another's rows would be wrong.
    for item, call in [*zip(sets, calls, strict=True), (sets[0], calls[0])]:
        assert worst_error(item, call()) < 5e-3
    assert {one[:2] for one in seen} == {(64 if heads <= 64 else 128, 200 if shape == "1q40s200" else 456)}
    assert len({address for _, _, address in seen}) == 1


@pytest.mark.parametrize(
    ("stage", "shape", "layout", "words"),
    [
        ("write", "1q8", "v32-fp8", "it has no write"),
        ("attend", "1q8s64", "v32-bf16", "it upconverts v32-fp8 rows, not v32-bf16"),
        ("attend", "3q1s64", "v32-fp8", "it is for prompts"),
    ],
)
def test_gathering_says_what_it_is_not_for(stage: str, shape: str, layout: str, words: str) -> None:
    job = Job("test", stage, shape, layout, 4, 8)
    with pytest.raises(peers.Unsupported, match=words):
        peers.GatheredFlashMLA(None, peers.FlashMLA(None)).calls(job, prepare(job, CPU).sets)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    q_v: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    block_table: Tensor | None = None,
    fa_version: int = 2,
) -> Tensor:
    """FlashAttention 3 with latent queries, one request at a time, for the arguments that the peer passes."""
    assert fa_version == 3
    assert cu_seqlens_k is None
    assert k.shape[1:] == (1, 1, 64)
    assert v.shape[1:] == (1, 1, 512)
    assert (q.stride(-1), q_v.stride(-1), k.stride(-1), v.stride(-1)) == (1, 1, 1, 1)
    assert {tensor.dtype for tensor in (cu_seqlens_q, seqused_k, block_table)} == {torch.int32}
    assert block_table.shape == (len(seqused_k), max_seqlen_k)
    out = torch.zeros(*q.shape[:2], 512, dtype=q.dtype)
    for request, (begin, end) in enumerate(zip(cu_seqlens_q[:-1].tolist(), cu_seqlens_q[1:].tolist(), strict=True)):
        assert end - begin == max_seqlen_q == 1
        pages = block_table[request].tolist()[: int(seqused_k[request])]
        keys, values = k[pages, 0, 0].float(), v[pages, 0, 0].float()
        logits = q[begin].float() @ keys.T + q_v[begin].float() @ values.T
        out[begin] = ((logits * softmax_scale).softmax(dim=1) @ values).to(q.dtype)
    return out


@pytest.mark.parametrize(("shape", "heads"), [("3q1s256", 8), ("2q1s40", 16), ("2q3s100_1q5s70", 32)])
def test_flash_attention_is_called_as_it_is_defined(shape: str, heads: int) -> None:
    """Contexts of 40 rows leave columns of the selection empty."""
    job = Job("test", "attend", shape, "v32-bf16", heads, 64)
    sets = prepare(job, CPU).sets
    calls = peers.FlashAttention3(SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)).calls(job, sets)
    assert len(calls) == len(sets)
    for item, call in zip(sets, calls, strict=True):
        assert worst_error(item, call()) < 5e-3


@pytest.mark.parametrize(
    ("stage", "layout", "window", "words"),
    [
        ("write", "v32-bf16", 0, "it has no write"),
        ("attend", "v32-fp8", 0, "it reads v32-bf16 rows, not v32-fp8"),
        ("attend", "v32-bf16", 8, "it reads one cache"),
    ],
)
def test_flash_attention_says_what_it_is_not_for(stage: str, layout: str, window: int, words: str) -> None:
    with pytest.raises(peers.Unsupported, match=words):
        peers.FlashAttention3(None).calls(Job("test", stage, "1q1s64", layout, 4, 8, window), [])


@pytest.mark.parametrize(
    ("capability", "attributes", "words"),
    [
        ((9, 0), {"FA3_AVAILABLE": True}, None),
        ((8, 0), {"FA3_AVAILABLE": True}, "compute capability 9.x, not on 8.0"),
        ((9, 0), {"FA3_AVAILABLE": False, "FA3_UNAVAILABLE_REASON": "no symbol"}, "without version 3: no symbol"),
        ((9, 0), {}, "without version 3: an older release"),
    ],
)
def test_flash_attention_is_found_where_it_runs(
    capability: tuple[int, int], attributes: dict[str, object], words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType(flash_attention.MODULE)
    vars(module).update(attributes)
    parents = flash_attention.MODULE.split(".")[:-1]
    for depth in range(len(parents)):
        name = ".".join(parents[: depth + 1])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, flash_attention.MODULE, module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if words is None:
        assert peers.FlashAttention3.find(torch.device("cuda")).module is module
    else:
        with pytest.raises(peers.Unsupported, match=words):
            peers.FlashAttention3.find(torch.device("cuda"))


def test_named_peers_that_are_not_for_a_job_are_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    makers = {"torch": peers.Torch.find, "fa3": lambda device: peers.FlashAttention3(None)}
    monkeypatch.setattr(peers, "_MAKERS", makers)
    monkeypatch.setattr(peers, "NAMES", tuple(makers))
    arguments = ["bench", "--shape", "2q1s64,3q1s64", "--topk", "16", "--heads", "2", "--device", "cpu"]
    arguments += ["--repeats", "1"]
    line = "fa3 on attend of v32-fp8: it reads v32-bf16 rows, not v32-fp8"
    assert main([*arguments, "--against", "torch,fa3"]) == 0
    assert capsys.readouterr().out.splitlines().count(line) == 1
    assert main(arguments) == 0
    assert line not in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unsuited"] == [line]
    assert {row["peer"] for row in found["rows"]} == {"torch"}
    # If it is the only peer, its reason is the note of the row without a peer.
    assert main([*arguments, "--against", "fa3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["unsuited"] == []
    assert {row["note"] for row in found["rows"]} == {"fa3: it reads v32-bf16 rows, not v32-fp8"}
