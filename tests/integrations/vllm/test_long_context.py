"""Prefills without tokens and 161,000 tokens of context, where vLLM 0.26's sparse prefill fails on Hopper.

The threads are vllm-project/vllm#54179, #52339, #51486 and #49922.
"""

from dataclasses import replace

import engine_standin as engine
import long_context as long
import pytest
import torch
import v4_standin as v4
from engine_standin import BF16, Served, close
from long_context import LongStep, LongV4Step


@pytest.mark.parametrize(
    ("cache_dtype", "mode"), [("auto", "mixed"), ("fp8_ds_mla", "mixed"), ("fp8_ds_mla", "separate")]
)
def test_a_chunk_without_tokens_and_a_long_context(cache_dtype: str, mode: str) -> None:
    """Gathered prefills have a workspace for one long context, so that the empty chunk is gathered for itself."""
    step = LongStep(4)
    record, out = step.run(cache_dtype, mode=mode, workspace_rows=long.MAX_LENGTH)
    assert record.gathers == (mode == "separate")
    long.check_record(record)
    long.check_output(out, step.expected())


EMPTY = {
    "between prefills": ([70, 200, 300, 90], [1, 7, 0, 6]),
    "last": ([70, 200, 300], [1, 7, 0]),
    "without a context": ([70, 200, 0], [1, 7, 0]),
    "first of the batch": ([300, 200], [0, 7]),
    "no token but theirs": ([200, 300], [5, 0]),
}


@pytest.mark.parametrize("case", EMPTY)
@pytest.mark.parametrize("mode", ["mixed", "separate"])
def test_chunks_without_tokens(case: str, mode: str) -> None:
    """Read directly, or gathered: with a workspace so small that an empty chunk is gathered for itself."""
    of = engine.make_step(*EMPTY[case], 16)
    builder = engine.builder(engine.config(16, "fp8_ds_mla", max_length=300), mode=mode, workspace_rows=300)
    served = Served(of, "fp8_ds_mla", planned=builder)
    assert served.metadata.gathers == (mode == "separate")
    close(served.attend()[0], engine.dense_fp64(of)[0], BF16)


def test_a_step_of_empty_prefills_alone() -> None:
    """Requests that are marked as prefills and have no token: nothing is attended to."""
    builder = engine.builder(engine.config(16))
    builder.treat_short_extends_as_decodes = False
    of = engine.make_step([70, 90], [1, 0], 16)
    table, slots, _ = of.place(64)
    common = engine.common(of.lengths, of.queries, table, of.new_slots(slots))
    common.is_prefilling = torch.tensor([False, True])
    served = Served(of, planned=builder, shared=common)
    assert (served.metadata.num_prefills, served.metadata.num_prefill_tokens) == (1, 0)
    close(served.attend()[0], engine.dense_fp64(of)[0], BF16)


def check_v4(ratio: int, heads: int, device: str) -> None:
    step = LongV4Step()
    q, sink = torch.randn(len(step.tokens), heads, 512).bfloat16(), torch.randn(heads)
    record, out = step.run(ratio, q.to(device), sink.to(device))
    assert (record.num_prefills, record.num_prefill_tokens) == (3, 5)
    long.check_output(out, step.attention(ratio, q, sink=sink).out)


@pytest.mark.parametrize("ratio", v4.RATIOS)
def test_v4_with_a_chunk_without_tokens_and_a_long_context(ratio: int) -> None:
    check_v4(ratio, 2, "cpu")


@pytest.mark.parametrize("ratio", v4.RATIOS)
@pytest.mark.parametrize("case", EMPTY)
def test_v4_chunks_without_tokens(case: str, ratio: int) -> None:
    lengths, queries = EMPTY[case]
    step = v4.V4Step("v4-fp8", queries, lengths)
    out = v4.attend_pages(step, step.q, v4.layer_of(step, ratio), v4.Records(step, ratio))
    step.agrees(out[:, : v4.HEADS], ratio)


def test_v4_prefills_that_have_no_tokens_at_all() -> None:
    """vLLM calls the prefill of a layer if there are prefills, not if there are tokens of theirs."""
    step = v4.V4Step("v4-fp8", [1, 5], [300, 40])
    for ratio in v4.RATIOS:
        records = v4.Records(step, ratio)
        layer = v4.layer_of(step, ratio)
        records.window = replace(records.window, num_prefill_tokens=0, prefill_swa_indices=None, prefill_swa_lens=None)
        out = v4.attend_pages(step, step.q, layer, records)
        assert (out[1:] == 3).all()
        assert (out[0] != 3).any()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [8, 16, 64, 128])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("mode", ["auto", "separate"])
def test_a_chunk_without_tokens_and_a_long_context_on_a_gpu(heads: int, cache_dtype: str, mode: str) -> None:
    if mode == "separate" and cache_dtype == "auto":
        pytest.skip("only packed rows are gathered")
    step = LongStep(heads, "cuda")
    record, out = step.run(cache_dtype, mode=mode, workspace_rows=long.MAX_LENGTH)
    torch.cuda.synchronize()
    long.check_record(record)
    long.check_output(out, step.expected())


@pytest.mark.gpu
@pytest.mark.parametrize("ratio", v4.RATIOS)
@pytest.mark.parametrize("heads", [8, 64, 128])
def test_v4_with_a_chunk_without_tokens_and_a_long_context_on_a_gpu(ratio: int, heads: int) -> None:
    check_v4(ratio, heads, "cuda")
