"""SGLang's DSA backend on tamis: steps of every kind against float64, with SGLang's own pool and metadata."""

import logging
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from steps import LATENT, TOPK, Step, make_step, read_pool

from tamis.integrations.sglang.dsa_plugin import TamisSparseAttnBackend

pytestmark = pytest.mark.usefixtures("hopper")

MODES = (
    ForwardMode.DECODE,
    ForwardMode.EXTEND,
    ForwardMode.MIXED,
    ForwardMode.TARGET_VERIFY,
    ForwardMode.DRAFT_EXTEND_V2,
)
DECODES = {ForwardMode.DECODE, ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2}


def check(step: Step, out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.shape == (*step.q.shape[:2], LATENT)
    assert out.dtype == torch.bfloat16
    error = (out.double() - expected).norm() / expected.norm()
    assert error < 4e-3, float(error)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_a_step_agrees_with_float64(mode: ForwardMode, heads: int, fp8: bool) -> None:
    """The step writes its own rows first, and may select them."""
    step = make_step(mode, heads=heads, fp8=fp8)
    topk = step.topk_slots
    before = topk.clone()
    check(step, step.run(topk), step.expected())
    # Layers share indices, so they are only read.
    assert torch.equal(topk, before)
    written = read_pool(step.backend)[step.batch.out_cache_loc]
    rows = torch.cat([step.k, step.k_rope], dim=2)[:, 0].double()
    # Triton's interpreter rounds to FP8 more coarsely than a GPU.
    assert (written - rows).norm() <= (0.1 if fp8 else 0.0) * rows.norm()


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_positions_give_what_slots_give(mode: ForwardMode) -> None:
    """Without SGLang's fused top-k, indices are positions in each request."""
    step = make_step(mode)
    fused = step.run()
    step.backend.use_fused_topk = False
    step.backend.tamis = type(step.backend.tamis).of(step.backend, prefill_cp=False)
    torch.testing.assert_close(step.run(step.topk_positions), fused, rtol=0, atol=2e-2)
    check(step, step.run(step.topk_positions), step.expected())


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
@pytest.mark.parametrize("fused", [True, False])
def test_tokens_without_indices_are_padding(mode: ForwardMode, fused: bool) -> None:
    """Data-parallel ranks pad their tokens, and indices may have fewer rows."""
    step = make_step(mode)
    step.backend.use_fused_topk = fused
    topk = (step.topk_slots if fused else step.topk_positions)[:-1]
    out = step.run(topk)
    assert not out[-1].any()
    expected = step.expected()
    expected[-1] = 0
    check(step, out, expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("mode", sorted(DECODES), ids=lambda mode: mode.name)
def test_metadata_of_cuda_graphs(mode: ForwardMode, fused: bool) -> None:
    """SGLang writes a graph's metadata in place. A graph reads it where it was at its capture."""
    step = make_step(mode)
    backend = step.backend
    backend.use_fused_topk = fused
    backend.init_cuda_graph_state(4, 12)
    backend.init_forward_metadata_out_graph(step.batch, in_capture=True)
    captured = backend.forward_metadata
    addresses = [captured.real_page_table.data_ptr(), captured.dsa_cache_seqlens_int32.data_ptr()]
    backend.init_forward_metadata_out_graph(step.batch)
    replayed = backend.forward_metadata
    assert [replayed.real_page_table.data_ptr(), replayed.dsa_cache_seqlens_int32.data_ptr()] == addresses
    assert replayed.flashmla_metadata is None
    check(step, step.run(step.topk_slots if fused else step.topk_positions), step.expected())


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_without_rope(fp8: bool) -> None:
    """GLM-5.3-Flash: rows of 528 or 1024 bytes, whose queries come in one part."""
    step = make_step(fp8=fp8, rope=0)
    assert step.backend.tamis.layout.row_bytes == (528 if fp8 else 1024)
    out = step.run(packed=True, k=None, v=None)
    check(step, out, step.expected())


def test_indices_with_gaps_and_a_tail() -> None:
    """Pooled index keys select whole pools and the tokens after the last one, with gaps between them."""
    step = make_step(ForwardMode.EXTEND)
    step.backend.dsa_index_kpool = 4
    step.backend.tamis = type(step.backend.tamis).of(step.backend, prefill_cp=False)
    topk = step.topk_slots
    wide = torch.full((len(topk), TOPK + 8), -1, dtype=torch.int32)
    wide[:, 8:] = topk.flip(1)
    wide[:, 3] = topk[:, 0]
    wide[:, 8:][wide[:, 8:] == wide[:, 3:4]] = -1
    check(step, step.run(wide), step.expected(wide))


def test_a_row_of_absent_indices_gives_zeros() -> None:
    step = make_step()
    topk = step.topk_slots
    topk[1] = -1
    out = step.run(topk)
    assert not out[1].any()
    check(step, out, step.expected(topk))


def test_more_indices_than_tokens_are_refused() -> None:
    step = make_step()
    pool = step.backend.token_to_kv_pool.get_key_buffer(0).view(torch.uint8).clone()
    with pytest.raises(ValueError, match="topk_indices must be of at most 3 rows, one per query token, got 4"):
        step.run(torch.cat([step.topk_slots, step.topk_slots[:1]]))
    assert torch.equal(step.backend.token_to_kv_pool.get_key_buffer(0).view(torch.uint8), pool), "nothing is written"


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND], ids=lambda mode: mode.name.lower())
def test_learnable_sinks(mode: ForwardMode) -> None:
    step = make_step(mode, fp8=False)
    sink = torch.randn(16)
    out = step.run(attn_sink=sink)
    check(step, out, step.expected(sink=sink))
    assert not torch.equal(out, step.run())


def test_packed_queries() -> None:
    step = make_step()
    assert torch.equal(step.run(packed=True), step.run())


@pytest.mark.parametrize("given", [{"save_kv_cache": False}, {"k": None, "v": None, "k_rope": None}])
def test_rows_that_are_in_the_pool_already(given: dict[str, Any]) -> None:
    step = make_step()
    step.run()
    pool = step.backend.token_to_kv_pool.get_key_buffer(0).view(torch.uint8).clone()
    step.k = step.k + 1
    out = step.run(**given)
    assert torch.equal(step.backend.token_to_kv_pool.get_key_buffer(0).view(torch.uint8), pool)
    check(step, out, step.expected())


@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND], ids=lambda mode: mode.name.lower())
def test_a_step_without_tokens(mode: ForwardMode) -> None:
    step = make_step(mode)
    step.q = step.q[:0]
    out = step.run(step.topk_slots[:0], k=None, v=None)
    assert out.shape == (0, 16, LATENT)


def test_a_step_without_indices_is_refused() -> None:
    step = make_step()
    with pytest.raises(ValueError, match="topk_indices must be given"):
        step.run(topk_indices=None)


@pytest.mark.parametrize("name", ["cos_sin_cache", "llama_4_scaling"])
def test_queries_that_are_not_rotated_are_refused(name: str) -> None:
    step = make_step()
    with pytest.raises(ValueError, match=f"{name} must be None"):
        step.run(**{name: torch.ones(1)})


@pytest.mark.parametrize("name", ["is_cross_attention", "logit_cap"])
def test_layers_of_another_kind_are_refused(name: str) -> None:
    step = make_step()
    setattr(step.layer, name, 1)
    with pytest.raises(ValueError, match="layer must be causal and without a logit cap"):
        step.run()


@pytest.mark.parametrize(
    ("decode", "prefill", "served"),
    [
        ("tamis", "flashmla_sparse", DECODES),
        ("fa3", "tamis", {ForwardMode.EXTEND, ForwardMode.MIXED}),
    ],
)
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name.lower())
def test_other_phases_are_left_to_sglang(
    mode: ForwardMode, decode: str, prefill: str, served: set[ForwardMode], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that verify or extend drafts belong to decode."""
    step, taken = make_step(mode, fp8=False, decode=decode, prefill=prefill), []
    for name in ("forward_decode", "forward_extend"):
        monkeypatch.setattr(TamisSparseAttnBackend.__base__, name, lambda *_, **keywords: taken.append(keywords))
    out = step.run()
    assert (out is None) == (mode not in served)
    if mode not in served:
        assert taken[0]["topk_indices"] is not None
    else:
        check(step, out, step.expected())


def test_dense_attention_over_short_prompts_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step(ForwardMode.EXTEND, fp8=False)
    step.backend.use_mha = True
    monkeypatch.setattr(TamisSparseAttnBackend.__base__, "forward_extend", lambda *_, **__: "dense")
    assert step.run() == "dense"


def test_prefills_read_pages_directly() -> None:
    """SGLang does not gather rows for an implementation that it does not know."""
    step = make_step(ForwardMode.EXTEND)
    assert step.backend.get_topk_transform_method(ForwardMode.EXTEND).name == "PAGED"
    assert step.backend.forward_metadata.flashmla_metadata is None


def test_the_backend_announces_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tamis"):
        make_step(heads=24)
        make_step(heads=24)
    lines = [record.getMessage() for record in caplog.records if record.name == "tamis"]
    assert len(lines) == 1
    assert "serves DSA decode and prefill: fp8 rows of 656 bytes, 24 heads, page size 64" in lines[0]


def test_another_implementation_does_not_announce_tamis(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tamis"):
        step = make_step(heads=40, fp8=False, decode="fa3", prefill="flashmla_sparse")
    assert step.backend.tamis is None
    assert not caplog.records


def test_widths_and_topk_are_those_of_the_model() -> None:
    step = make_step()
    assert step.topk_slots.shape[1] == step.backend.dsa_index_topk == TOPK
