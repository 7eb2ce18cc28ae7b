"""V4's builders and attention on steps that engines rarely make: tokens without a slot, nothing at all, pages that are
absent, other windows, slots that an earlier step left behind."""

from types import SimpleNamespace
from typing import Any

import bounds
import pytest
import torch
from v4_standin import (
    HEADS,
    PAGE,
    RATIOS,
    SHAPES,
    WINDOW_PAGE,
    Records,
    V4Step,
    attend_mixed,
    attend_pages,
    engine_config,
    layer_of,
    main_builder,
    window_builder,
)

from tamis.integrations.vllm.classes.v4_impl import V4Impl
from tamis.integrations.vllm.classes.v4_index_metadata import V4IndexMetadataBuilder, V4UniformIndexMetadataBuilder
from tamis.integrations.vllm.classes.v4_metadata import V4MetadataBuilder, V4WindowMetadataBuilder
from tamis.integrations.vllm.v4_forward import forward_decode, forward_prefill

STYLES = pytest.mark.parametrize("attend", [attend_mixed, attend_pages])
UNWRITTEN = (1, 3, 10, 80)
"""Of the mixed shape: a decode, one of two drafts, and two tokens of prompts."""


def run(attend: Any, step: V4Step, ratio: int, padding: int = 0, **more: Any) -> torch.Tensor:
    layer = layer_of(step, ratio, **more)
    output = attend(step, step.q, layer, Records(step, max(ratio, 1), padding), padding=padding)
    assert output[len(step.tokens) :].eq(0).all()
    assert output[:, HEADS:].eq(0).all()
    found: torch.Tensor = output[: len(step.tokens), :HEADS]
    return found


@STYLES
@pytest.mark.parametrize("ratio", RATIOS)
def test_a_token_without_a_slot_sees_nothing(attend: Any, ratio: int) -> None:
    """A draft past the longest request has no slot. Its row was never written, so it may hold anything."""
    step = V4Step("v4-bf16", unwritten=UNWRITTEN)
    output = run(attend, step, ratio)
    assert output[list(UNWRITTEN)].eq(0).all()
    step.agrees(output, ratio)


def test_records_of_a_token_without_a_slot() -> None:
    # Tokens 1 and 3 are the last of requests 1 and 2, and complete entries of 4 and of 128.
    step = V4Step("v4-bf16", [1, 1, 2, 40], [300, 1024, 72, 40], unwritten=(1, 3, 7))
    records = Records(step, 128)
    main, window = records.main, records.window
    assert main is not None
    assert main.c128a_decode_topk_lens is not None
    assert main.c128a_decode_topk_lens.tolist() == [2, 0, 0, 0]
    assert main.c128a_global_decode_topk_indices is not None
    assert main.c128a_global_decode_topk_indices[1].eq(-1).all()
    assert window.is_valid_token.tolist() == [n not in (1, 3, 7) for n in range(44)]
    assert window.decode_swa_lens.tolist() == [128, 0, 71, 0]
    assert window.decode_swa_indices[[1, 3]].eq(-1).all()
    assert window.prefill_swa_lens.tolist() == [0 if n == 3 else n + 1 for n in range(40)]
    for ratio in (4, 128):
        slots = main_builder(ratio).build(0, step.common("main")).slot_mapping
        expected = [
            int(step.entry_slots(r, p // ratio + 1, ratio)[-1]) if (p + 1) % ratio == 0 and n not in (1, 3, 7) else -1
            for n, (r, p) in enumerate(step.tokens)
        ]
        assert slots.tolist() == expected, "an entry is written by the token that completes it, and by no other"


@STYLES
@pytest.mark.parametrize("ratio", [0, *RATIOS])
@pytest.mark.parametrize("window", [1, 7, 64, 200])
def test_other_windows(attend: Any, window: int, ratio: int) -> None:
    """Ratio 0 is what checkpoints say of layers with a window only."""
    step = V4Step("v4-bf16", [1, 2, 30], [300, 5, 260], window=window)
    step.agrees(run(attend, step, ratio, padding=2), max(ratio, 1))


@pytest.mark.parametrize("window", [7, 200])
def test_records_of_other_windows(window: int) -> None:
    step = V4Step("v4-bf16", [1, 2, 30, 9], [300, 5, 260, 9], window=window)
    record = Records(step, 1).window
    rows = torch.cat((record.decode_swa_indices, record.prefill_swa_indices))[:, 0]
    lengths = torch.cat((record.decode_swa_lens, record.prefill_swa_lens))
    for row, (r, p) in enumerate(step.tokens):
        seen = step.raw.slots(r, max(0, p - window + 1), p + 1).tolist()
        assert rows[row].tolist() == seen + [-1] * (window - len(seen))
        assert lengths[row] == len(seen)
    assert record.prefill_gather_lens.tolist() == [30 + min(230, window - 1), 9]


@STYLES
def test_pages_that_are_absent_are_skipped(attend: Any) -> None:
    """An engine marks pages that a request does not hold with a negative number; page 0 belongs to another request.

    (In the mixed-index style an indexer's choices come first in their rows. It makes none in a page that is absent,
    since the keys that it scores lie in the same pages.)
    """
    for ratio in (4, 128) if attend is attend_pages else (128,):
        step = V4Step("v4-bf16", [1, 40], [1000, 700])
        entries, rows = step.entries[ratio], PAGE // ratio
        entries.storage[0] = 7.0
        gone = [(0, 1), (1, 0)]
        for request, page in gone:
            step.batch.pages.block_table[request, page] = -3
            held = int(step.main.block_table([request])[0, page])
            entries.storage[held] = torch.nan
        output = run(attend, step, ratio)
        for row, (request, p) in enumerate(step.tokens):
            numbers = torch.arange((p + 1) // ratio) if ratio == 128 else step.chosen[row][step.chosen[row] >= 0]
            kept = [int(n) for n in numbers if (request, int(n) // rows) not in gone]
            keys = step.window.read(step.raw.slots(request, max(0, p - 127), p + 1)).double()
            slots = step.entry_slots(request, (p + 1) // ratio, ratio)[kept]
            keys = torch.cat((keys, entries.read(slots).double()))
            exact = bounds.attention(step.q[row], keys, scale=512**-0.5, sink=step.sink, parts=2)
            bounds.agree(output[row], exact.out, exact.out_error, output.dtype)


def test_records_of_absent_pages() -> None:
    step = V4Step("v4-bf16", [2, 4], [1000, 256])
    common = step.common("main")
    common.block_table_tensor[0, 1] = -1
    common.block_table_tensor[1, 0] = -7
    record = main_builder(128).build(0, common)
    assert record.c128a_global_decode_topk_indices is not None
    assert record.c128a_global_decode_topk_indices[0, 0, 2:4].tolist() == [-1, -1]
    assert record.c128a_global_decode_topk_indices[0, 0, [0, 1, 4, 5, 6]].ge(0).all()
    assert record.slot_mapping.eq(-1).all(), "nor is an entry written there"
    index = index_builder().build(0, common).slot_mapping
    last = int(step.entry_slots(0, 250, 4)[-1])
    assert index.tolist() == [-1, last, -1, -1, -1, -1], "token 999 completes an entry in a page that is there"


def index_builder(kind: type[V4IndexMetadataBuilder] = V4IndexMetadataBuilder, **spec: Any) -> V4IndexMetadataBuilder:
    return kind(SimpleNamespace(block_size=PAGE, **(spec or {"compress_ratio": 4})), ["layer"], engine_config(), "cpu")


def test_slots_that_an_earlier_step_left_behind() -> None:
    """Engines pass their whole buffer; its rows past the step's tokens must not be used."""
    for shape in SHAPES.values():
        step = V4Step("v4-bf16", *shape)
        total = len(step.tokens)
        for pool, builder in (("main", main_builder(1)), ("main", main_builder(4)), ("window", window_builder())):
            common = step.common(pool, padding=3)
            clean = builder.build(0, common).slot_mapping.tolist()
            common.slot_mapping = torch.cat((common.slot_mapping[:total], torch.full((20,), 5)))
            record: Any = builder.build(0, common)
            assert record.slot_mapping[:total].tolist() == clean[:total]
            if getattr(builder, "compress_ratio", 1) > 1:
                assert record.slot_mapping.tolist() == clean
        assert record.is_valid_token.tolist() == [True] * total + [False] * 3
        lengths = torch.cat((record.decode_swa_lens, record.prefill_swa_lens))
        assert lengths[total:].eq(0).all()


@STYLES
@pytest.mark.parametrize("ratio", RATIOS)
def test_padding_after_prefills(attend: Any, ratio: int) -> None:
    """Under a graph of prefills the padding counts as prefill, at positions that were never set."""
    step = V4Step("v4-bf16", *SHAPES["prefills"])
    step.agrees(run(attend, step, ratio, padding=5), ratio)


def test_parallel_drafting_counts_both_halves_as_decodes() -> None:
    """A request may have twice as many drafts, which are decodes all the same."""
    builder = window_builder(3, parallel=True)
    assert builder.reorder_batch_threshold == 7
    step = V4Step("v4-bf16", [7, 7, 8], [300, 90, 60])
    record = builder.build(0, step.common("window"))
    assert (record.num_decodes, record.num_decode_tokens, record.num_prefills) == (2, 14, 1)
    assert window_builder(3).build(0, step.common("window")).num_decodes == 0


def empty_common(requests: int = 0, rows: int = 0) -> SimpleNamespace:
    """A step without a token: without requests, or with some that have nothing to do, and rows of padding."""
    zeros = torch.zeros(requests + 1, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=requests,
        num_actual_tokens=rows,
        max_query_len=0,
        max_seq_len=0,
        query_start_loc=zeros.clone(),
        query_start_loc_cpu=zeros,
        seq_lens=torch.zeros(requests, dtype=torch.int32),
        block_table_tensor=torch.zeros(requests, 4, dtype=torch.int32),
        slot_mapping=torch.full((rows,), -1),
    )


@pytest.mark.parametrize("ratio", [0, 1, 4, 128])
@pytest.mark.parametrize(("requests", "rows"), [(0, 0), (2, 0), (0, 3), (2, 3)])
def test_steps_without_a_token(requests: int, rows: int, ratio: int) -> None:
    common, step = empty_common(requests, rows), V4Step("v4-bf16", [1], [5])
    layer = layer_of(step, ratio)
    window, main = window_builder().build(0, common), main_builder(ratio).build(0, common)
    assert len(window.slot_mapping) == len(main.slot_mapping) == rows
    for kind in (V4IndexMetadataBuilder, V4UniformIndexMetadataBuilder):
        index = index_builder(kind, compress_ratio=4).build(0, common)
        assert index.prefill is None
        assert len(index.slot_mapping) == rows
    q, output = torch.ones(rows, HEADS, 512), torch.full((rows, 64, 512), 3.0)
    for calls in (1, 2):
        output.fill_(3.0)
        V4Impl(calls=calls).forward_mqa(layer, q, None, None, output, swa_metadata=window, attn_metadata=main)
        assert output.eq(0).all()
    output.fill_(3.0)
    entries = layer.kv_cache if ratio > 1 else None
    forward_decode(layer, q, entries, window, main, ratio <= 1, output)
    assert output.eq(0).all()
    nothing = q[:0], torch.zeros(0, dtype=torch.int64)
    forward_prefill(layer, *nothing, entries, layer.swa_cache_layer.kv_cache, output[:0], main, window)


@pytest.mark.parametrize("kind", [V4MetadataBuilder, V4IndexMetadataBuilder])
def test_the_ratio_under_either_name(kind: type[Any]) -> None:
    def made(**fields: Any) -> int:
        found: int = kind(SimpleNamespace(block_size=PAGE, **fields), [], engine_config(), "cpu").compress_ratio
        return found

    assert made(compress_ratio=4) == made(tokens_per_state=4) == made(tokens_per_state=4, compress_ratio=None) == 4
    assert made(compress_ratio=0) == made(tokens_per_state=0) == made(compress_ratio=1) == 1
    for fields in ({"compress_ratio": -1}, {"tokens_per_state": -1}):
        with pytest.raises(ValueError, match=r"compress_ratio must be >= 0, got -1"):
            made(**fields)
    for fields in ({}, {"tokens_per_state": 0.5}):
        with pytest.raises(TypeError, match=r"kv_cache_spec.compress_ratio must be an int"):
            made(**fields)


def test_the_record_of_another_ratio_is_refused() -> None:
    """A layer that attends to every entry cannot do with a record that lists none."""
    for shape in (([1], [300]), ([30], [300])):
        step = V4Step("v4-bf16", *shape)
        records = Records(step, 4)
        layer = layer_of(step, 128)
        for attend in (attend_mixed, attend_pages):
            with pytest.raises(ValueError, match=r"attn_metadata must be a record with c128a.*this layer's ratio"):
                attend(step, step.q, layer, records)


def test_every_entry_at_a_ratio_that_vllm_does_not_have() -> None:
    step = V4Step("v4-bf16", [1, 20], [300, 70])
    spec = SimpleNamespace(block_size=PAGE, compress_ratio=2)
    record = V4MetadataBuilder(spec, [], engine_config(), "cpu", every_entry=True).build(0, step.common("main"))
    assert record.c128a_decode_topk_lens is not None
    assert record.c128a_decode_topk_lens.tolist() == [150]
    layer = layer_of(step, 4, compress_ratio=2)
    inputs = V4Impl().build_sparse_indices(layer, Records(step, 1).window, record)
    assert inputs.sparse_topk_lens.tolist() == [128 + 150, *(128 + (p + 1) // 2 for p in range(50, 70))]


@pytest.mark.parametrize("kind", [V4MetadataBuilder, V4WindowMetadataBuilder, V4IndexMetadataBuilder])
@pytest.mark.parametrize("size", ["decode_context_parallel_size", "prefill_context_parallel_size"])
def test_context_parallelism_is_refused(kind: type[Any], size: str) -> None:
    """The rows or the tokens of a request would be spread over ranks, which the tables here do not support."""
    config, spec = engine_config(), SimpleNamespace(block_size=WINDOW_PAGE, compress_ratio=4)
    for alone in ({}, {size: 1}):
        config.parallel_config = SimpleNamespace(**alone)
        kind(spec, [], config, "cpu")
    config.parallel_config = SimpleNamespace(**{size: 2})
    with pytest.raises(ValueError, match=f"{size} must be 1 for DeepSeek-V4, got 2"):
        kind(spec, [], config, "cpu")


@STYLES
def test_a_record_that_a_later_build_has_overwritten_is_refused(attend: Any) -> None:
    step, window, main = V4Step("v4-bf16", [1, 5], [300, 70]), window_builder(), main_builder(4)
    first = SimpleNamespace(window=window.build(0, step.common("window")), main=main.build(0, step.common("main")))
    first.decodes = first.window.num_decode_tokens
    layer = layer_of(step, 4)
    attend(step, step.q, layer, first)
    for builder, pool in ((main, "main"), (window, "window")):
        builder.build(0, V4Step("v4-bf16", [1, 5], [200, 50]).common(pool))
        with pytest.raises(ValueError, match="plan must be the planner's latest"):
            attend(step, step.q, layer, first)
