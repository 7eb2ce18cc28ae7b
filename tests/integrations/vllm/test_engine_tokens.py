"""Requests and positions of a step's tokens in an engine, and what a step costs on the host."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_calls import Calls
from v4_standin import MAX_LENGTH, PAGE, V4Step, engine_config, main_builder, window_builder

from tamis import Limits
from tamis.integrations.vllm.classes.v4_index_metadata import V4IndexMetadataBuilder
from tamis.integrations.vllm.engine_tokens import EngineTokens
from tamis.integrations.vllm.held_requests import HeldRequests

CPU = torch.device("cpu")
LIMITS = Limits(max_tokens=40, max_requests=8, max_length=MAX_LENGTH, page_size=PAGE)


def common(queries: list[int], lengths: list[int], padding: int = 0) -> SimpleNamespace:
    starts = torch.tensor([0, *queries]).cumsum(0, dtype=torch.int32)
    tokens = sum(queries)
    return SimpleNamespace(
        num_reqs=len(queries),
        num_actual_tokens=tokens + padding,
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        block_table_tensor=torch.zeros(len(queries), 2, dtype=torch.int32),
        slot_mapping=torch.arange(tokens + padding),
    )


steps = st.lists(
    st.tuples(
        st.one_of(st.lists(st.just(1), max_size=8), st.lists(st.integers(0, 5), max_size=8)),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=80, deadline=None)
@given(steps)
def test_whole_buffers_after_any_steps(given: list[tuple[list[int], int, int]]) -> None:
    tokens, held = EngineTokens(LIMITS, CPU), HeldRequests(LIMITS, CPU)
    for queries, empty, padding in given:
        new = (queries + [0] * empty)[:8]
        lengths = [q + 100 * r for r, q in enumerate(new)]
        step = tokens.read(common(new, lengths, padding))
        tokens.fill(step)
        held.fill(step.queries, step.starts, step.max_query)
        ids = [r for r, q in enumerate(new) for _ in range(q)]
        positions = [100 * r + i for r, q in enumerate(new) for i in range(q)]
        rest = 40 - len(ids)
        assert tokens.request_ids.tolist() == held.buffer.tolist() == ids + [0] * rest
        assert tokens.positions.tolist() == positions + [-1] * rest
        assert held.ids.tolist() == ids


def decodes(pool: str) -> SimpleNamespace:
    return V4Step("v4-bf16", [1, 1, 1], [300, 20, 5]).common(pool)


def index_builder(device: str = "cpu") -> V4IndexMetadataBuilder:
    config = engine_config()
    return V4IndexMetadataBuilder(SimpleNamespace(block_size=PAGE, compress_ratio=4), ["layer"], config, device)


BUILDERS: dict[str, tuple[Any, str, list[str]]] = {
    "C4A": (partial(main_builder, 4), "main", ["copy_", "sub"]),
    "C128A": (partial(main_builder, 128), "main", ["copy_", "sub"]),
    "window": (window_builder, "window", ["copy_", "gt", "sub"]),
    "index": (index_builder, "main", ["copy_", "div", "fill_", "index_select", "sub"]),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_a_step_of_decodes_costs_few_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them takes microseconds on the host. The selection, one kernel on a device, is left out."""
    make, pool, expected = BUILDERS[name]
    for stage in ("select_window", "select_entries"):
        monkeypatch.setattr(f"tamis.ops.select.reference.{stage}", lambda call: None)
    builder, step = make(), decodes(pool)
    if name == "index":
        width = builder.expanded_block_table_buffer.shape[1]
        step.block_table_tensor = torch.zeros(3, width, dtype=torch.int32)
    builder.build(0, step)
    with Calls() as calls:
        builder.build(0, step)
    assert sorted(name.removeprefix("aten.") for name in calls.names) == expected


def test_a_step_of_v32_copies_request_numbers_and_nothing_else() -> None:
    builder = engine.builder(engine.config(16, "fp8_ds_mla", max_length=MAX_LENGTH), PAGE)
    step = common([1] * 5, [300] * 5)
    step.max_query_len, step.max_seq_len = 1, 300
    builder.build(0, step)
    with Calls() as calls:
        builder.build(0, step)
    assert calls.names == ["aten.copy_"]


@pytest.mark.parametrize("name", BUILDERS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_table_tensor", torch.zeros(3, 2)),
        ("block_table_tensor", torch.zeros(2, 2, dtype=torch.int32)),
        ("slot_mapping", torch.zeros(3)),
        ("slot_mapping", torch.zeros(2, dtype=torch.int64)),
        ("seq_lens", torch.zeros(3)),
        ("seq_lens", torch.zeros(3, 1, dtype=torch.int32)),
        ("query_start_loc_cpu", torch.tensor([0, 2, 1, 3], dtype=torch.int32)),
        ("num_actual_tokens", 2),
    ],
)
def test_a_refused_step_leaves_the_latest_record_valid(name: str, field: str, value: Any) -> None:
    """Also after a step like it has passed, whose checks are remembered."""
    make, pool, _ = BUILDERS[name]
    builder, step = make(), decodes(pool)
    record = builder.build(0, step)
    kept = builder.tokens.positions.clone()
    broken = SimpleNamespace(**(vars(step) | {field: value, "seq_lens_cpu": torch.tensor([300, 20, 5])}))
    with pytest.raises((TypeError, ValueError), match=field.removesuffix("_cpu") if "query" not in field else "starts"):
        builder.build(0, broken)
    assert torch.equal(builder.tokens.positions, kept)
    with record.using():
        pass
    builder.build(0, step)
    with pytest.raises(ValueError, match="plan must be the planner's latest"):
        record.using().__enter__()


def test_tensors_of_another_device_are_refused_after_a_step_that_passed() -> None:
    builder, step = window_builder(), decodes("window")
    builder.build(0, step)
    step.block_table_tensor = step.block_table_tensor.to("meta")
    with pytest.raises(ValueError, match="block_table must be on cpu"):
        builder.build(0, step)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BUILDERS)
def test_records_on_a_gpu_are_those_of_the_host(name: str) -> None:
    """And building them waits for nothing."""
    make, pool, _ = BUILDERS[name]
    host, device = make(), make(device="cuda")
    for queries, lengths in (([1, 1, 1], [300, 20, 5]), ([1, 2, 40], [300, 20, 256]), ([1, 1], [9, 70]), ([2], [9])):
        step = V4Step("v4-bf16", queries, lengths).common(pool, padding=2)
        there = SimpleNamespace(**vars(step))
        for field in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            setattr(there, field, getattr(step, field).cuda())
        there.seq_lens_cpu = step.seq_lens
        expected = host.build(0, step)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = device.build(0, there)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for field in expected.__dataclass_fields__:
            one, other = getattr(expected, field), getattr(found, field)
            if isinstance(one, torch.Tensor):
                assert torch.equal(one, other.cpu()), field
        for field in ("request_ids", "positions"):
            assert torch.equal(getattr(host.tokens, field), getattr(device.tokens, field).cpu()), field
