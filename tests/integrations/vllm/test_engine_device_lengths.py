"""Adaptive verification: the device drops drafts, so the host's query lengths are right only in their sum."""

from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import pytest
import torch
from engine_standin import BF16, Served, Step, close

from tamis.integrations.vllm.backend import TamisSparseBackend
from tamis.integrations.vllm.metadata import SparseMetadataBuilder

ADAPTIVE = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False, enable_adaptive_verification=True)


def adaptive_builder(cache_dtype: str = "auto", heads: int = 16, **options: Any) -> SparseMetadataBuilder:
    return engine.builder(engine.config(heads, cache_dtype, speculative=ADAPTIVE), **options)


def misreported(of: Step, host_queries: list[int], **padding: int) -> SimpleNamespace:
    """The engine's record of a step, with other query lengths on the host. Verifications come first, then prefills."""
    table, slots, _ = of.place(64)
    common = engine.common(of.lengths, of.queries, table, of.new_slots(slots), **padding)
    told = torch.tensor([0, *host_queries], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    common.query_start_loc_cpu = torch.cat((told, told[-1:].expand(len(common.query_start_loc) - len(told))))
    common.seq_lens_cpu_upper_bound = common.seq_lens + 3
    return common


CASES = {
    "verifications": ([300, 40, 700], [4, 1, 1], [2, 2, 2]),
    "uneven on the host": ([300, 40, 700], [1, 4, 2], [3, 2, 2]),
    "with a prefill": ([300, 40, 200], [1, 3, 30], [2, 2, 30]),
    "with none left": ([300, 40, 5], [2, 0, 2], [2, 1, 1]),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("cache_dtype", "heads"), [("auto", 16), ("fp8_ds_mla", 16), ("fp8_ds_mla", 64)])
def test_the_device_decides_which_tokens_are_whose(case: str, cache_dtype: str, heads: int) -> None:
    lengths, queries, host = CASES[case]
    of = engine.make_step(lengths, queries, heads)
    builder = adaptive_builder(cache_dtype, heads)
    common = misreported(of, host)
    served = Served(of, cache_dtype, planned=builder, shared=common)
    metadata = served.metadata
    assert metadata.req_id_per_token.tolist() == [r for r, q in enumerate(queries) for _ in range(q)]
    assert metadata.query_start_loc.tolist() == common.query_start_loc.tolist()
    prefills = sum(q > 4 for q in queries)
    assert (metadata.num_decodes, metadata.num_prefills) == (len(queries) - prefills, prefills)
    assert not metadata.gathers
    close(served.attend()[0], engine.dense_fp64(of)[0], BF16)


def test_padding_and_stale_numbers() -> None:
    """The buffer never moves, and holds zeros past the step's tokens, as captured graphs expect."""
    builder = adaptive_builder()
    wide = engine.make_step([300, 40, 700], [4, 3, 4], 16)
    first = builder.build(0, misreported(wide, [4, 4, 3]))
    assert first.req_id_per_token.tolist() == [0] * 4 + [1] * 3 + [2] * 4
    small = engine.make_step([70, 90], [1, 3], 16)
    second = builder.build(0, misreported(small, [2, 2], padded_tokens=8, padded_requests=4))
    assert second.req_id_per_token.tolist() == [0, 1, 1, 1] + [0] * 4
    assert second.req_id_per_token.data_ptr() == first.req_id_per_token.data_ptr()
    assert second.num_decode_tokens == 8
    assert first.step is not None
    assert first.step.held.buffer.tolist() == [0, 1, 1, 1] + [0] * 596


def test_an_engine_that_slept_has_lost_what_buffers_held() -> None:
    """vLLM 0.28 allocates builders among its caches, whose content sleep mode drops."""
    builder = adaptive_builder()
    held = builder.build(0, misreported(engine.make_step([300, 40], [4, 3], 16), [3, 4])).step.held  # type: ignore[union-attr]
    for buffer in (value for value in vars(held).values() if isinstance(value, torch.Tensor) and value.numel() == 600):
        buffer.fill_(2**31 - 1)
    of = engine.make_step([70, 90, 40], [2, 3, 4], 16)
    served = Served(of, planned=builder, shared=misreported(of, [4, 4, 1]))
    assert served.metadata.req_id_per_token.tolist() == [0] * 2 + [1] * 3 + [2] * 4
    close(served.attend()[0], engine.dense_fp64(of)[0], BF16)


def test_an_overwritten_step_is_refused_even_if_the_host_cannot_tell_them_apart() -> None:
    of = engine.make_step([300, 40], [1, 3], 16)
    builder = adaptive_builder()
    served = Served(of, planned=builder, shared=misreported(of, [2, 2]))
    served.attend()
    builder.build(0, misreported(engine.make_step([300, 40], [3, 1], 16), [2, 2]))
    with pytest.raises(ValueError, match="attn_metadata must be of the builder's latest step"):
        served.attend()


def test_what_needs_lengths_on_the_host_is_refused() -> None:
    with pytest.raises(ValueError, match="mode must be 'mixed' with adaptive verification, got 'separate'"):
        adaptive_builder("fp8_ds_mla", 64, mode="separate")
    metadata = adaptive_builder().build(0, misreported(engine.make_step([300, 40], [1, 3], 16), [2, 2]))
    with pytest.raises(ValueError, match="attn_metadata must be of a step that the host knows"):
        _ = metadata.plan


def test_declared() -> None:
    assert TamisSparseBackend.supports_device_cpu_query_lens_mismatch()
    config = engine.config(max_tokens=600)
    assert SparseMetadataBuilder.get_varlen_cudagraph_max_query_len(config, None) == 600
    assert not engine.builder(config).device_lengths
