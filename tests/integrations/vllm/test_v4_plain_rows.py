"""V4 attention over caches of plain rows, in bf16 and in e4m3 under one scale, as vLLM's FlashInfer layer has them.

Rows are bytes that rules in numpy wrote, and float64 attention reads the values of those rules.
"""

import logging
import sys
from types import ModuleType

import pytest
import torch
from v4_rows import KINDS, Q_SCALE, PlainStep
from v4_standin import RATIOS, SHAPES, Records

from tamis.integrations.vllm.v4_caches import _COMPRESSOR, _WRITERS, PACKED, announce, check_cache_dtype
from tamis.integrations.vllm.v4_forward import forward_step

STEPS = SHAPES | {"drafts": ([2, 2, 2], [300, 700, 4])}


def attend(step: PlainStep, ratio: int, padding: int = 0, **more: object) -> torch.Tensor:
    """The output of a step, for the query that vLLM's kernel would make."""
    q = torch.cat((step.query()[0], torch.ones(padding, *step.q.shape[1:]).to(step.query()[0].dtype)))
    records, output = Records(step, ratio, padding), step.output(padding)
    metadata = {"window": records.window, "attn": records.main}
    forward_step(step.layer(ratio, **more), q, step.positions(padding), output, metadata)
    return output[: len(step.tokens)]


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("shape", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_written_by_rules(kind: str, shape: str, ratio: int) -> None:
    step = PlainStep(kind, *STEPS[shape])
    step.agrees(attend(step, ratio, padding=2), ratio, step.query()[1])


@pytest.mark.parametrize("heads", [1, 13, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_heads(kind: str, heads: int) -> None:
    step = PlainStep(kind, [1, 5], [300, 40], heads=heads)
    step.agrees(attend(step, 4), 4, step.query()[1])


def test_the_scales_are_those_of_vllms_factors() -> None:
    """vLLM passes one factor before the softmax and one after it; a layer's other attributes do not count then."""
    step = PlainStep("fp8", [1, 2], [300, 40], scale=0.4)
    step.agrees(attend(step, 4, _k_scale_float=7.0, _q_scale_float=7.0), 4, step.query()[1])
    without = {"_flashinfer_fp8_bmm1_scale": None, "_flashinfer_fp8_bmm2_scale": None}
    step.agrees(attend(step, 4, _k_scale_float=0.4, _q_scale_float=Q_SCALE, **without), 4, step.query()[1])


def test_a_step_that_only_warms_up_gives_zeros() -> None:
    step = PlainStep("bf16", [1], [300])
    output = step.output()
    forward_step(step.layer(4), step.query()[0], step.positions(), output, None)
    assert output.eq(0).all()


def test_records_of_several_microbatches_are_refused() -> None:
    step = PlainStep("bf16", [1], [300])
    output = step.output()
    with pytest.raises(TypeError, match=r"attn_metadata must be one record per layer, got .*; microbatches"):
        forward_step(step.layer(4), step.query()[0], step.positions(), output, [{}, {}])  # type: ignore[arg-type]
    assert output.eq(3).all()


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A vLLM that can write every format."""
    for name in _WRITERS.values():
        monkeypatch.setattr(torch.ops._C, name, object(), raising=False)
    for end in range(_COMPRESSOR.count(".") + 1):
        name = ".".join(_COMPRESSOR.split(".")[: end + 1])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return monkeypatch


@pytest.mark.usefixtures("writers")
@pytest.mark.parametrize("dtype", ["auto", "bfloat16", "fp8_e4m3", *PACKED])
def test_caches_that_vllm_can_write_are_accepted(dtype: str) -> None:
    check_cache_dtype(dtype)


@pytest.mark.usefixtures("writers")
@pytest.mark.parametrize("dtype", ["fp8_e5m2", "float16", "fp8_per_token_head", "nvfp4_ds_mla"])
def test_caches_that_vllm_would_write_as_something_else_are_refused(dtype: str) -> None:
    with pytest.raises(ValueError, match=rf"kv_cache_dtype must be one of fp8_ds_mla, fp8, auto, .*, got {dtype}"):
        check_cache_dtype(dtype)


@pytest.mark.parametrize(("dtype", "kernel"), [("bfloat16", "cache_bf16_insert"), ("fp8_e4m3", "cache_fp8_insert")])
def test_a_vllm_without_the_kernel_is_refused(writers: pytest.MonkeyPatch, dtype: str, kernel: str) -> None:
    (name,) = (name for name in _WRITERS.values() if name.endswith(kernel))
    writers.delattr(torch.ops._C, name)
    with pytest.raises(ValueError, match=rf"{dtype} needs rows in .*{kernel}; pass --kv-cache-dtype fp8_ds_mla"):
        check_cache_dtype(dtype)
    for packed in PACKED:
        check_cache_dtype(packed)


def test_a_vllm_whose_compressor_does_not_import_is_refused(writers: pytest.MonkeyPatch) -> None:
    writers.setitem(sys.modules, _COMPRESSOR, None)
    with pytest.raises(ValueError, match=r"cutedsl failed with ModuleNotFoundError.*install nvidia-cutlass-dsl"):
        check_cache_dtype("bfloat16")


def test_names_that_mean_something_else_to_vllms_default_layer_are_announced(
    caplog: pytest.LogCaptureFixture,
) -> None:
    announce.cache_clear()
    with caplog.at_level(logging.WARNING, logger="tamis"):
        for dtype in ("fp8_e4m3", "auto", "fp8_e4m3", "bfloat16", *PACKED):
            announce(dtype)
    lines = [record.getMessage() for record in caplog.records if record.name == "tamis"]
    assert len(lines) == 2
    assert "rows in e4m3 under one scale (kv_cache_dtype fp8_e4m3)" in lines[0]
    assert "rows in bf16 (kv_cache_dtype auto)" in lines[1]
