"""`tamis bench index`: rooflines, the error of a selection, and the calls of DeepGEMM and vLLM."""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from tamis.cache.layout import named
from tamis.cache.paged import PagedCache
from tamis.integrations import deep_gemm
from tamis.lab.bench import peers
from tamis.lab.bench.index_sets import IndexSet, ScoreSet, TopkSet, selection_error
from tamis.lab.bench.inputs import prepare, worst_error
from tamis.lab.bench.jobs import Job, make_jobs
from tamis.lab.bench.peers.vllm import TopK
from tamis.lab.bench.roofline import Ceiling, index_cost, scores_cost, topk_cost
from tamis.ops import gather_index

CPU = torch.device("cpu")
KEYS = named("index-fp8")
H200 = Ceiling(4.3e12, 790e12, "measured on an H200")


def scores_job(shape: str, heads: int = 3) -> Job:
    return Job("test", "scores", shape, "index-fp8", heads)


def topk_job(shape: str, k: int, stage: str = "topk") -> Job:
    return Job("test", stage, shape, "float32", None, k)


def index_job(shape: str, k: int) -> Job:
    return Job("test", "index", shape, "index-fp8", 3, k)


def test_the_suite_has_the_shapes_that_peers_are_known_for() -> None:
    shapes: dict[str, list[str]] = {}
    for job in make_jobs("index"):
        shapes.setdefault(job.stage, []).append(job.shape)
        assert job.stages == ("index",)
        assert job.query_dtype == torch.float8_e4m3fn
        assert job.heads == (64 if job.stage in ("scores", "index") else None)
        assert job.topk == (None if job.stage == "scores" else 2048)
    assert set(shapes["scores"]) == {"1q1s64k", "32q1s128k", "128q1s64k", "1q4ks64k"}
    assert set(shapes["index"]) == {"32q1s128k", "128q1s64k"}
    assert len(shapes["topk"]) == 7
    assert {"1q1s1024k", "1q1ks64k"} < set(shapes["topk"])
    changed = make_jobs("index", heads=[32], topks=[512])
    assert {(job.heads, job.topk) for job in changed} == {(32, None), (None, 512), (32, 512)}


def test_the_suite_of_selections_has_chunks_of_prompts_and_decodes() -> None:
    jobs = make_jobs("select")
    by_stage: dict[str, list[str]] = {}
    for job in jobs:
        by_stage.setdefault(job.stage, []).append(job.shape)
        assert (job.heads, job.layout) == ((64, "index-fp8") if job.stage in ("scores", "index") else (None, "float32"))
        assert job.topk == (None if job.stage == "scores" else 2048)
    assert set(by_stage) == {"scores", "topk", "topk-ties", "index"}
    chunks = {"1q4ks8k", "1q4ks32k", "1q4ks64k", "1q4ks128k", "1q1ks16k", "1q512s64k"}
    assert all(set(shapes) == chunks | {"128q1s64k", "32q1s128k"} for shapes in by_stage.values())
    some = make_jobs("select", stages=["index", "scores"], shapes=["1q4ks8k"])
    assert [(job.stage, job.shape) for job in some] == [("scores", "1q4ks8k"), ("index", "1q4ks8k")]
    packed = make_jobs("select", stages=["index", "topk"], layouts=["index-mxfp4"])
    assert {(job.stage, job.layout) for job in packed} == {("index", "index-mxfp4"), ("topk", "float32")}
    with pytest.raises(ValueError, match="stage must be one of 'scores', 'topk', 'topk-ties', 'index', got 'attend'"):
        make_jobs("select", stages=["attend"])


@pytest.mark.parametrize("job", [scores_job("2q3s70_1q1s9"), topk_job("2q3s70_1q1s9", 5), index_job("2q3s70_1q1s9", 5)])
def test_each_token_sees_the_keys_up_to_its_own(job: Job) -> None:
    for item in prepare(job, CPU).sets:
        assert not isinstance(item, IndexSet) or item.scored.width == 70
        lengths = item.scored.lengths if isinstance(item, IndexSet) else item.lengths  # type: ignore[union-attr]
        assert lengths.tolist() == [68, 69, 70, 68, 69, 70, 9]


def test_scores_of_all_sets_go_to_one_place() -> None:
    sets = [item for item in prepare(scores_job("1q3s70"), CPU).sets if isinstance(item, ScoreSet)]
    found = [item.run("auto") for item in sets]
    assert len(sets) > 1
    assert {one.data_ptr() for one in found} == {sets[0].out.data_ptr()}  # type: ignore[union-attr]
    # Keys differ, so that no call finds those of another in the cache.
    assert len({item.cache.storage.data_ptr() for item in sets}) == len(sets)


def test_rooflines() -> None:
    decode = [(1, 65536)] * 128
    scores = scores_cost(decode, heads=64, layout=KEYS, page_size=64)
    keys = 128 * 65536 * 132
    queries = 128 * (64 * 132 + 8) + 4 * 128 * 1024
    assert scores.bytes == keys + queries + 4 * 128 * 65536
    assert scores.flops == 2 * 128 * 65536 * 64 * 128
    assert H200.seconds(scores) == pytest.approx(266e-6, rel=1e-2)
    fused = index_cost(decode, heads=64, topk=2048, layout=KEYS, page_size=64)
    assert fused.bytes == keys + queries + 4 * 128 * 2048
    # A prompt is bound by its products, at twice the rate of bf16: 4.3 TFLOP of what its tokens see in 2.7 ms.
    prompt = scores_cost([(4096, 65536)], heads=64, layout=KEYS, page_size=64)
    seen = sum(range(65536 - 4096 + 1, 65536 + 1))
    assert prompt.flops == seen * 64 * 128 * 2
    assert H200.seconds(prompt) == pytest.approx(seen * 16384 / 1580e12)
    assert H200.seconds(prompt) == pytest.approx(2.70e-3, rel=1e-2)
    assert topk_cost(decode, topk=2048).bytes == 4 * 128 * (65536 + 1 + 2048)
    assert topk_cost([(4096, 65536)], topk=2048).bytes == 4 * seen + 4 * 4096 * (1 + 2048)


def test_selections_are_judged_as_sets_by_their_scores() -> None:
    scores = torch.tensor([3.0, -4.0, 1.0, 2.0, 1.0], dtype=torch.float64)

    def error(*row: int) -> float:
        return selection_error(torch.tensor(row, dtype=torch.int32), scores, len(row))

    assert error(0, 3, 2) == error(4, 3, 0) == 0.0
    assert error(0, 2, 4) == pytest.approx((2 - 1) / 4)
    assert error(1, 0, 3) == pytest.approx((1 + 4) / 4)
    for malformed in [(0, 0, 3), (0, 3, -1), (0, 3, 5)]:
        assert error(*malformed) == math.inf
    assert error(4, 3, 2, 1, 0, -1, -1) == 0.0
    assert error(4, 3, 2, 1, -1, -1, -1) == math.inf


@pytest.mark.parametrize(
    ("job", "kind"),
    [
        (scores_job("3q1s200_1q5s130"), ScoreSet),
        (topk_job("3q1s200_1q5s130", 33), TopkSet),
        (topk_job("3q1s200", 33, "topk-ties"), TopkSet),
        (topk_job("3q1s20", 33), TopkSet),
        (Job("test", "scores", "1q9s130", "index-mxfp4", 3), ScoreSet),
        (Job("test", "index", "1q9s130", "index-mxfp4", 3, 33), IndexSet),
        (index_job("3q1s200_1q5s130", 33), IndexSet),
    ],
)
def test_results_are_checked_on_the_inputs_to_be_timed(job: Job, kind: type) -> None:
    prepared = prepare(job, CPU)
    item = prepared.sets[0]
    assert isinstance(item, kind)
    result = item.run("auto")
    assert worst_error(item, result) <= item.bound / 10
    changed = result.clone()
    if isinstance(item, ScoreSet):
        changed[-1, : int(item.lengths[-1])] *= 1.1
        # Columns past a token's length do not count.
        result[-1, int(item.lengths[-1]) :] = 7.0
        assert worst_error(item, result) <= item.bound / 10
    else:
        changed[-1, 0] = changed[-1, 1]
    assert worst_error(item, changed) > item.bound


def test_mostly_equal_scores_are_cut_among_the_equal_ones() -> None:
    item = prepare(topk_job("4q1s4k", 512, "topk-ties"), CPU).sets[0]
    assert isinstance(item, TopkSet)
    positive = (item.scores > 0).sum(1)
    assert bool(((positive > 128) & (positive < 512)).all())
    assert bool((item.scores >= 0).all())


@pytest.mark.parametrize(
    "job",
    [
        scores_job("3q1s200_2q1s130"),
        scores_job("2q70s100"),
        topk_job("5q1s300", 64),
        index_job("2q2s200", 64),
        index_job("1q90s100", 64),
    ],
)
def test_torch_by_hand_does_the_same(job: Job) -> None:
    sets = prepare(job, CPU).sets
    for item, call in zip(sets, peers.Torch().calls(job, sets), strict=True):
        assert worst_error(item, call()) <= item.bound / 10


def test_torch_by_hand_says_what_it_cannot_do() -> None:
    for job, reason in (
        (topk_job("3q1s200_1q5s130", 33), "rows of different lengths"),
        (Job("test", "index", "3q1s200", "index-mxfp4", 3, 33), "no torch baseline for index-mxfp4"),
    ):
        with pytest.raises(peers.Unsupported, match=reason):
            peers.Torch().calls(job, prepare(job, CPU).sets)


def stand_in_for_deep_gemm(names: list[str], *, newer: bool) -> peers.DeepGEMM:
    """The drop-in with DeepGEMM's signatures; the newer ones take queries as pairs. `names` records the calls."""

    def noted(name: str):
        function = getattr(deep_gemm, f"fp8_{name}")

        def call(q, *args, clean_logits):
            assert not clean_logits
            names.append(name)
            return function(*q[:1] if newer else (q,), *args, clean_logits=clean_logits)

        return call

    module = SimpleNamespace(
        get_num_sms=lambda: 132, get_paged_mqa_logits_metadata=deep_gemm.get_paged_mqa_logits_metadata
    )
    for name in ("paged_mqa_logits", "mqa_logits"):
        setattr(module, f"fp8_fp4_{name}" if newer else f"fp8_{name}", noted(name))
    return peers.DeepGEMM(module)


def test_deep_gemm_is_found_and_launched_as_in_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    switched: list[bool] = []
    copy = ModuleType("vllm.third_party.deep_gemm")
    copy.get_paged_mqa_logits_metadata = None  # type: ignore[attr-defined]
    copy.set_pdl = switched.append  # type: ignore[attr-defined]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setitem(sys.modules, "deep_gemm", deep_gemm)
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", None)
    gpu = torch.device("cuda")
    with pytest.raises(peers.Unsupported, match="deep_gemm is tamis's own drop-in; cannot import vllm"):
        peers.DeepGEMM.find(gpu)
    monkeypatch.setitem(sys.modules, "deep_gemm", ModuleType("deep_gemm"))
    with pytest.raises(peers.Unsupported, match="deep_gemm has no get_paged_mqa_logits_metadata"):
        peers.DeepGEMM.find(gpu)
    for name in ("vllm", "vllm.third_party"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.third_party.deep_gemm", copy)
    assert peers.DeepGEMM.find(gpu).module is copy
    assert switched == [True]


@pytest.mark.parametrize("newer", [True, False])
@pytest.mark.parametrize(
    ("shape", "function"),
    [("3q1s200", "paged_mqa_logits"), ("3q2s130", "paged_mqa_logits"), ("1q9s150", "mqa_logits")],
)
def test_deep_gemm_is_called_as_it_is_defined(shape: str, function: str, newer: bool) -> None:
    names: list[str] = []
    job = scores_job(shape)
    sets = prepare(job, CPU).sets
    calls = stand_in_for_deep_gemm(names, newer=newer).calls(job, sets)
    assert names == []
    for item, call in zip(sets, calls, strict=True):
        assert worst_error(item, call()) <= item.bound / 10
    assert set(names) == {function}


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (index_job("2q1s100", 8), "index scores only"),
        (topk_job("2q1s100", 8), "index scores only"),
        (Job("test", "attend", "2q1s100", heads=2, topk=8), "index scores only"),
        (scores_job("2q5s100"), "several prompts"),
        (Job("test", "scores", "2q1s100", "index-fp8", 2, page_size=16), "pages of 64"),
    ],
)
def test_deep_gemm_says_what_it_cannot_do(job: Job, reason: str) -> None:
    with pytest.raises(peers.Unsupported, match=reason):
        stand_in_for_deep_gemm([], newer=True).calls(job, prepare(job, CPU).sets)


def stand_in_for_vllm(names: list[str], *, clusters: bool = True, scoring: bool = True) -> peers.VLLM:
    """Top-k operators with vLLM's signatures, which write positions in no particular order."""

    def select(name: str, scores: Tensor, lengths: Tensor, out: Tensor, k: int) -> None:
        names.append(name)
        assert out.shape == (len(scores), k)
        for row, length in enumerate(lengths.flatten().tolist()):
            best = scores[row, :length].topk(min(k, length)).indices
            out[row, : len(best)] = best.int()

    def prefill(logits, row_starts, row_ends, indices, rows, stride0, stride1, k):
        assert (rows, stride0, stride1) == (len(logits), *logits.stride())
        assert not row_starts.any()
        select("prefill", logits, row_ends, indices, k)

    def decode(logits, next_n, seq_lens, indices, rows, stride0, stride1, k):
        assert (next_n, rows, stride0, stride1) == (1, len(logits), *logits.stride())
        select("decode", logits, seq_lens, indices, k)

    def gather(kv_cache, dst_k, dst_scale, block_table, cu_seq_lens):
        names.append("gather")
        assert (dst_k.dtype, dst_scale.dtype) == (torch.float8_e4m3fn, torch.uint8)
        total = cu_seq_lens.tolist()[-1]
        cache = PagedCache.wrap(kv_cache, KEYS)
        keys, scales = gather_index(cache, block_table, cu_seq_lens.diff(), rows=total)
        dst_k.copy_(keys)
        dst_scale.copy_(scales.view(torch.uint8).view(total, 4))

    def fast(name: str):
        def call(logits, lengths, output, workspace, k, max_seq_len):
            assert (workspace.dtype, len(workspace)) == (torch.uint8, 2**20)
            assert max_seq_len == logits.shape[1]
            select(name, logits, lengths, output, k)

        return call

    kernels = SimpleNamespace(cooperative_topk=fast("cooperative"), persistent_topk=fast("persistent"))
    operators = SimpleNamespace(
        top_k_per_row_prefill=prefill, top_k_per_row_decode=decode, cp_gather_indexer_k_quant_cache=gather
    )
    scores = stand_in_for_deep_gemm(names, newer=True) if scoring else None
    topk = TopK(operators, kernels, torch.zeros(2**20, dtype=torch.uint8), clusters)
    return peers.VLLM(operators, None, topk, scores)


@pytest.mark.parametrize(
    ("job", "clusters", "used"),
    [
        (topk_job("3q1s600", 512), True, ["cooperative"]),
        (topk_job("3q1s600", 512), False, ["persistent"]),
        (topk_job("3q1s601", 512), True, ["persistent"]),
        (topk_job("33q1s600", 512), True, ["persistent"]),
        (topk_job("3q1s100", 512), True, ["cooperative"]),
        (topk_job("3q1s600", 500), True, ["decode"]),
        (topk_job("1q9s600", 512), True, ["prefill"]),
        (index_job("3q1s640", 512), True, ["paged_mqa_logits", "cooperative"]),
        (index_job("1q9s640", 512), True, ["mqa_logits", "prefill"]),
        (index_job("1q90s100", 64), True, ["mqa_logits", "prefill"]),
        (index_job("3q2s640", 512), True, ["paged_mqa_logits", "cooperative"]),
    ],
)
def test_vllm_selects_as_its_indexer_does(job: Job, clusters: bool, used: list[str]) -> None:
    names: list[str] = []
    sets = prepare(job, CPU).sets
    calls = stand_in_for_vllm(names, clusters=clusters).calls(job, sets)
    names.clear()
    for item, call in zip(sets, calls, strict=True):
        assert worst_error(item, call()) <= item.bound / 10
    assert names == used * len(sets)


@pytest.mark.parametrize(
    ("job", "scoring", "reason"),
    [
        (scores_job("2q1s100"), True, "its scores are DeepGEMM's"),
        (index_job("2q1s100", 8), False, "absent"),
        (index_job("2q9s100", 8), True, "several prompts"),
    ],
)
def test_vllm_says_what_it_cannot_do(job: Job, scoring: bool, reason: str) -> None:
    with pytest.raises(peers.Unsupported, match=reason):
        stand_in_for_vllm([], scoring=scoring).calls(job, prepare(job, CPU).sets)


def stand_in_for_gathering(names: list[str]) -> peers.PromptIndexer:
    vllm = stand_in_for_vllm(names)
    assert vllm.deep_gemm is not None
    return peers.PromptIndexer(vllm.operators, vllm.deep_gemm, vllm.topk)


@pytest.mark.parametrize(
    ("job", "used"),
    [
        (scores_job("1q9s150"), ["gather", "mqa_logits"]),
        (index_job("1q9s640", 512), ["gather", "mqa_logits", "prefill"]),
    ],
)
def test_the_gather_before_a_prompt_counts_where_it_is_asked_for(job: Job, used: list[str]) -> None:
    names: list[str] = []
    sets = prepare(job, CPU).sets
    calls = stand_in_for_gathering(names).calls(job, sets)
    names.clear()
    for item, call in zip(sets, calls, strict=True):
        assert worst_error(item, call()) <= item.bound / 10
    assert names == used * len(sets)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (topk_job("1q9s100", 8), "it has no topk"),
        (index_job("2q1s100", 8), "it is for a prompt"),
        (scores_job("2q9s100"), "it is for a prompt"),
    ],
)
def test_the_gather_says_what_it_cannot_do(job: Job, reason: str) -> None:
    with pytest.raises(peers.Unsupported, match=reason):
        stand_in_for_gathering([]).calls(job, prepare(job, CPU).sets)
