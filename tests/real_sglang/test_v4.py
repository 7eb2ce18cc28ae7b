"""DeepSeek-V4: SGLang's backend is replaced where tamis is chosen, says so where it cannot be, and attends."""

import logging
from argparse import ArgumentParser
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import v4_engine as v4
from sglang.srt.layers.attention import deepseek_v4_backend as engine
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.dsv4 import indexer
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.draft_utils import DraftBackendFactory
from v4_engine import DECODE, DRAFT_EXTEND, EXTEND, VERIFY, Step

from tamis._version import __version__
from tamis.integrations.sglang import announce, v4_backend
from tamis.integrations.sglang.v4_backend import TamisV4AttnBackend, TamisV4MultiStepBackend

OWN_OPTION = "dsv4_attn_backend" in v4.TAMIS
STEPS = {
    "decode": (DECODE, [299, 699, 2, 127], [1, 1, 1, 1]),
    "extend": (EXTEND, [0, 250, 513], [40, 21, 3]),
    "verify": (VERIFY, [300, 126, 640], [3, 3, 3]),
}


@pytest.fixture
def tamis() -> Iterator[None]:
    with v4.options(**v4.TAMIS):
        yield


@pytest.mark.usefixtures("tamis")
@pytest.mark.parametrize("ratio", v4.RATIOS)
@pytest.mark.parametrize("kind", STEPS)
def test_window_and_entries_are_attended_to(kind: str, ratio: int) -> None:
    step = Step(*STEPS[kind], ratio=ratio)
    assert type(step.backend) is TamisV4AttnBackend
    step.prepare()
    step.agrees(step.forward())


@pytest.mark.usefixtures("tamis")
@pytest.mark.parametrize("ratio", v4.RATIOS)
@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_metadata_of_cuda_graphs(kind: str, ratio: int) -> None:
    step = Step(*STEPS[kind], ratio=ratio)
    step.prepare(graph=True)
    step.agrees(step.forward())


@pytest.mark.usefixtures("tamis")
@pytest.mark.parametrize(("heads", "padded"), [(8, 64), (16, 64), (64, 64), (128, 128)])
def test_heads_are_not_padded(heads: int, padded: int) -> None:
    step = Step(*STEPS["decode"], ratio=4, heads=heads, padded=padded)
    step.prepare()
    step.agrees(step.forward())


@pytest.mark.usefixtures("tamis")
def test_a_draft_extend_attends_to_the_window() -> None:
    step = Step(DRAFT_EXTEND, [300, 126, 640], [3, 3, 3])
    step.prepare()
    step.agrees(step.forward())


@pytest.mark.usefixtures("tamis")
@pytest.mark.parametrize("kind", STEPS)
def test_padded_tokens_attend_to_nothing(kind: str) -> None:
    step = Step(*STEPS[kind], ratio=128)
    step.prepare()
    step.agrees(step.forward(rows=5))


@pytest.mark.usefixtures("tamis")
def test_sglangs_own_top_k_is_read() -> None:
    """Where there are fewer entries than top-k, all are selected, in rows that end with -1."""
    step = Step(*STEPS["decode"], ratio=4)
    core = step.prepare()
    seen = torch.tensor([(p + 1) // 4 for _, p in step.tokens], dtype=torch.int32)
    transform = (
        getattr(indexer, "topk_transform_pytorch_vectorized", None) or indexer.topk_transform_512_pytorch_vectorized
    )
    transform(torch.randn(len(seen), int(seen.max())), seen, core.page_table, core.c4_sparse_page_indices, 64)
    assert (core.c4_sparse_page_indices >= 0).sum(1).equal(seen.long())
    assert int(seen.min()) == 0
    assert int(core.c4_sparse_topk_lengths.min()) == 1, "a length that a row without entries has"
    step.chosen = [torch.arange(int(count)) for count in seen]
    step.agrees(step.forward())


@pytest.mark.usefixtures("tamis")
def test_prefills_need_no_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(*STEPS["extend"], ratio=4)
    step.prepare()
    for name in ("_forward_prefill_sparse", "_build_sparse_prefill_chunk_cache"):
        monkeypatch.setattr(engine.DeepseekV4AttnBackend, name, None, raising=False)
    step.agrees(step.forward())
    assert step.backend.forward_metadata.sparse_prefill_cache is None


@pytest.mark.usefixtures("tamis")
def test_rows_are_stored_by_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[Any] = []
    monkeypatch.setattr(TamisV4AttnBackend, "store_cache", lambda self, *given: stored.append(given))
    step = Step(*STEPS["decode"])
    step.prepare()
    step.agrees(step.forward(save_kv_cache=True))
    assert [(layer, batch) for layer, _, batch in stored] == [(0, step.batch)]


@pytest.mark.usefixtures("tamis")
def test_an_idle_rank_that_drafts_gives_zeros() -> None:
    step = Step(*STEPS["verify"])
    step.batch.forward_mode = ForwardMode.IDLE
    out = step.forward()
    assert out.shape == step.q.shape
    assert out.eq(0).all()


@pytest.mark.usefixtures("tamis")
def test_drafts_take_our_steps() -> None:
    runner = v4.runner_of(v4.case_of(VERIFY, [3], [3]))
    factory = object.__new__(DraftBackendFactory)
    factory.draft_model_runner, factory.topk, factory.speculative_num_steps = runner, 1, 3
    drafts = factory._create_dsv4_decode_backend()
    drafts = drafts[1] if isinstance(drafts, tuple) else drafts
    assert isinstance(drafts, engine.DeepseekV4MultiStepBackend)
    assert [type(step) for step in drafts.attn_backends] == [TamisV4AttnBackend] * 3
    assert [step.speculative_step_id for step in drafts.attn_backends] == [0, 1, 2]
    if OWN_OPTION:
        assert type(drafts) is TamisV4MultiStepBackend
    prefill = factory._create_dsv4_prefill_backend()
    assert type(prefill[1] if isinstance(prefill, tuple) else prefill) is TamisV4AttnBackend


def test_sglangs_own_backend_runs_if_tamis_is_not_chosen(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tamis")
    with v4.options():
        backend = ATTENTION_BACKENDS["dsv4"](v4.runner_of(v4.case_of(DECODE, [3], [1])))
    assert isinstance(backend, engine.DeepseekV4AttnBackend)
    assert (type(backend) is TamisV4AttnBackend) is not OWN_OPTION
    assert getattr(backend, "_pages", None) is None
    assert not [record for record in caplog.records if record.name == "tamis"]


@pytest.mark.usefixtures("tamis")
def test_one_line_announces_tamis(caplog: pytest.LogCaptureFixture) -> None:
    announce.cache_clear()
    caplog.set_level(logging.INFO, "tamis")
    for _ in range(2):
        ATTENTION_BACKENDS["dsv4"](v4.runner_of(v4.case_of(DECODE, [3], [1])))
    (line,) = (record.getMessage() for record in caplog.records if record.name == "tamis")
    assert line == f"tamis {__version__} serves DeepSeek-V4: fp8 rows of 584 bytes, 8 heads, kernels reference"


def refused(reason: str, **options: Any) -> None:
    with v4.options(**(v4.TAMIS | options)), pytest.raises(ValueError, match=reason):
        ATTENTION_BACKENDS["dsv4"](v4.runner_of(v4.case_of(DECODE, [3], [1]), 4))


def test_context_parallelism_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_parallel().attn_cp_size == 1
    monkeypatch.setattr(v4_backend, "get_parallel", lambda: SimpleNamespace(attn_cp_size=2, attn_tp_size=1))
    refused("context parallelism spreads its tokens over 2 ranks")


def test_hisparse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4.kit.MockDSV4ModelRunner, "__setattr__", _with_coordinator)
    refused("HiSparse keeps entries in host memory")


def _with_coordinator(runner: Any, name: str, value: Any) -> None:
    object.__setattr__(runner, name, object() if name == "hisparse_coordinator" else value)


@pytest.mark.skipif(not OWN_OPTION, reason="SGLang 0.5.17 has one layout, and no option for V4")
def test_other_layouts_and_options_without_effect_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout

    refused("tamis has no effect on DeepSeek-V4", dsv4_attn_backend="flashmla", dsa_decode_backend="tamis")
    monkeypatch.setattr(v4.DeepSeekV4TokenToKVPool, "get_swa_key_layout", lambda self: KVLayout.V41)
    refused("its window cache has 'v41' rows")


@pytest.mark.skipif(not OWN_OPTION, reason="SGLang 0.5.17 has no option for V4")
def test_the_parser_takes_the_value() -> None:
    parser = ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(["--model-path", "x", "--dsv4-attn-backend", "tamis"])
    assert given.dsv4_attn_backend == "tamis"


@pytest.mark.skipif(OWN_OPTION, reason="one option chooses for both phases")
def test_one_phase_alone_is_refused() -> None:
    refused("was given without --dsa-prefill-backend tamis", dsa_prefill_backend="fa3")
