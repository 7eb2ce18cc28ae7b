"""V4 under vLLM's names: builders field by field, attention in the mixed-index style against fp64, declarations."""

from types import SimpleNamespace

import bounds
import pytest
import torch
from torch import Tensor
from v4_standin import (
    HEADS,
    MAX_TOKENS,
    PAGE,
    RATIOS,
    SCALE,
    SHAPES,
    TOPK,
    WINDOW,
    WINDOW_PAGE,
    Records,
    V4Step,
    attend_mixed,
    engine_config,
    layer_of,
    main_builder,
    window_builder,
)

from tamis.integrations.vllm.classes.v4_backend import TamisV4Backend, TamisV4WindowBackend
from tamis.integrations.vllm.classes.v4_impl import V4Impl, get_padded_num_q_heads, init_layer_buffers
from tamis.integrations.vllm.classes.v4_metadata import V4MetadataBuilder, V4WindowMetadataBuilder
from tamis.integrations.vllm.classes.v4_records import V4Metadata
from tamis.integrations.vllm.v4_forward import forward_decode


def kept(common: SimpleNamespace) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in vars(common).items() if isinstance(value, Tensor)}


def unchanged(common: SimpleNamespace, before: dict[str, Tensor]) -> None:
    for name, value in before.items():
        assert torch.equal(getattr(common, name), value), name


@pytest.mark.parametrize("ratio", [1, 4, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_records_of_compressed_caches(shape: str, ratio: int) -> None:
    builder = main_builder(ratio)
    builder.build(0, V4Step("v4-bf16", [90, 60], [900, 1100]).common("main"))  # something to leave behind
    step = V4Step("v4-bf16", *SHAPES[shape])
    common = step.common("main", padding=3, empty=1)
    common.block_table_tensor[0, -1] = -5 if step.lengths[0] <= PAGE else common.block_table_tensor[0, -1]
    before = kept(common)
    record = builder.build(0, common)
    unchanged(common, before)
    tokens = len(step.tokens)
    assert (record.num_reqs, record.num_actual_tokens) == (len(step.queries) + 1, tokens + 3)
    assert (record.max_query_len, record.max_seq_len) == (max(step.queries), max(step.lengths))
    assert (record.block_size, record.topk_tokens) == (PAGE, TOPK)
    assert record.req_id_per_token.tolist() == [r for r, _ in step.tokens] + [0] * 3
    assert torch.equal(record.block_table[:, : common.block_table_tensor.shape[1]], common.block_table_tensor)
    assert torch.equal(record.query_start_loc, common.query_start_loc)
    if ratio == 1:
        expected = common.slot_mapping.tolist()
    else:
        expected = [
            int(step.entry_slots(r, p // ratio + 1, ratio)[-1]) if (p + 1) % ratio == 0 else -1 for r, p in step.tokens
        ] + [-1] * 3
        assert builder.compressed_slot_mapping_buffer is not None
        assert builder.compressed_slot_mapping_buffer[tokens:].eq(-1).all()
    assert record.slot_mapping.tolist() == expected
    check_every_entry(record, step, ratio, 3)


def check_every_entry(record: V4Metadata, step: V4Step, ratio: int, padding: int) -> None:
    slots, lengths = record.c128a_global_decode_topk_indices, record.c128a_decode_topk_lens
    numbers = record.c128a_prefill_topk_indices
    if ratio != 128:
        assert slots is None
        assert lengths is None
        assert numbers is None
        return
    decodes = [row for row, (r, _) in enumerate(step.tokens) if all(q <= 2 for q in step.queries[: r + 1])]
    decode_rows, prefill_rows = len(decodes), len(step.tokens) - len(decodes)
    decode_rows, prefill_rows = (decode_rows, prefill_rows + padding) if prefill_rows else (decode_rows + padding, 0)
    assert (slots is None) == (decode_rows == 0)
    assert (numbers is None) == (prefill_rows == 0)
    for row, (r, p) in enumerate(step.tokens):
        count = (p + 1) // 128
        blank = [-1] * (128 - count)
        if slots is not None and row < decode_rows:
            assert slots.shape == (decode_rows, 1, 128)
            assert slots[row, 0].tolist() == step.entry_slots(r, count, 128).tolist() + blank
            assert lengths is not None
            assert lengths[row] == count
        elif numbers is not None:
            assert numbers.shape == (prefill_rows, 128)
            assert numbers[row - decode_rows].tolist() == list(range(count)) + blank
    if numbers is None and slots is not None and lengths is not None:
        assert slots[-padding:].eq(-1).all()
        assert lengths[-padding:].eq(0).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_records_of_the_window(shape: str) -> None:
    builder = window_builder()
    builder.build(0, V4Step("v4-bf16", [90, 60], [900, 1100]).common("window"))
    step = V4Step("v4-bf16", *SHAPES[shape])
    common = step.common("window", padding=2)
    before = kept(common)
    record = builder.build(0, common)
    unchanged(common, before)
    tokens = len(step.tokens)
    assert record.token_to_req_indices.tolist() == [r for r, _ in step.tokens] + [0, 0]
    assert record.is_valid_token.tolist() == [True] * tokens + [False] * 2
    rows = torch.cat((record.decode_swa_indices, record.prefill_swa_indices))[:, 0]
    lengths = torch.cat((record.decode_swa_lens, record.prefill_swa_lens))
    for row, (r, p) in enumerate(step.tokens):
        seen = step.raw.slots(r, max(0, p - WINDOW + 1), p + 1).tolist()
        assert rows[row].tolist() == seen + [-1] * (WINDOW - len(seen))
        assert lengths[row] == len(seen)
    assert rows[tokens:].eq(-1).all()
    assert lengths[tokens:].eq(0).all()
    assert builder.swa_lens_buffer[tokens:].eq(0).all()
    first = record.num_decodes
    new, total = step.queries[first:], step.lengths[first:]
    gathered = [q + min(n - q, WINDOW - 1) for q, n in zip(new, total, strict=True)]
    assert record.prefill_gather_lens.tolist() == gathered
    assert record.prefill_seq_lens.tolist() == total
    assert (record.num_decode_tokens, record.num_prefill_tokens) == (
        len(record.decode_swa_lens),
        len(record.prefill_swa_lens),
    )
    assert (record.block_size, record.decode_swa_width) == (WINDOW_PAGE, WINDOW)


def test_draft_blocks_without_a_causal_mask() -> None:
    """Rows [max(context - W, 0), length) for all tokens of a block, in columns rounded up to 64."""
    builder = window_builder(drafts=5)
    builder.build(0, V4Step("v4-bf16", [90, 60], [900, 1100]).common("window"))
    step = V4Step("v4-bf16", [5, 5, 4], [300, 5, 100])
    common = step.common("window", padding=2)
    common.causal = False
    record = builder.build(0, common)
    assert (record.decode_swa_width, record.num_decodes) == (192, 3)
    for row, (r, _) in enumerate(step.tokens):
        context = step.lengths[r] - step.queries[r]
        seen = step.raw.slots(r, max(0, context - WINDOW), step.lengths[r]).tolist()
        assert record.decode_swa_indices[row, 0].tolist() == seen + [-1] * (192 - len(seen))
        assert record.decode_swa_lens[row] == len(seen)
    assert record.decode_swa_indices[-2:].eq(-1).all()
    assert record.decode_swa_lens[-2:].eq(0).all()
    layer, output = layer_of(step, 1), torch.ones(len(step.tokens) + 2, 64, 512)
    forward_decode(layer, torch.cat((step.q, step.q[:2])), None, record, None, True, output)
    for row, (r, _) in enumerate(step.tokens):
        seen = step.raw.slots(r, max(0, step.lengths[r] - step.queries[r] - WINDOW), step.lengths[r])
        keys = step.window.read(seen).double()
        exact = bounds.attention(step.q[row], keys, scale=SCALE, sink=step.sink)
        bounds.agree(output[row, :HEADS], exact.out, exact.out_error)
    assert output[-2:].eq(0).all()
    with pytest.raises(
        ValueError, match="swa_metadata must be with rows of the layer's window of 128, got 192 columns"
    ):
        V4Impl().build_sparse_indices(layer, record, None)
    assert builder.build(0, step.common("window")).decode_swa_width == WINDOW
    with pytest.raises(ValueError, match="causal must be True for blocks of more than 0 tokens"):
        window_builder(drafts=0).build(0, common)


def test_both_builders_cut_batches_alike_and_keep_their_addresses() -> None:
    main, window = main_builder(128), window_builder()
    assert main.reorder_batch_threshold == window.reorder_batch_threshold == 2
    assert main._cudagraph_support == "UNIFORM_BATCH"
    assert main.c128a_max_compressed == 128
    assert main.c128a_buffer.shape == (MAX_TOKENS, 128)
    places = []
    for queries, lengths in SHAPES.values():
        step = V4Step("v4-bf16", queries, lengths)
        common = step.common("main")
        one, other = main.build(0, common), window.build(0, step.common("window"))
        assert one.split == other.split
        names = ("slot_mapping", "req_id_per_token")
        places.append([getattr(one, n).data_ptr() for n in names] + [other.is_valid_token.data_ptr()])
        # The engine keeps its own tensors in place.
        assert one.block_table.data_ptr() == common.block_table_tensor.data_ptr()
        assert one.query_start_loc.data_ptr() == common.query_start_loc.data_ptr()
        first = other.num_decode_tokens
        for field, buffer in (
            (one.c128a_global_decode_topk_indices, main.c128a_buffer),
            (one.c128a_decode_topk_lens, main.c128a_lens_buffer),
            (one.c128a_prefill_topk_indices, main.c128a_buffer[first:]),
            (other.decode_swa_indices, window.swa_indices_buffer),
        ):
            assert field is None or len(field) == 0 or field.data_ptr() == buffer.data_ptr()
    assert places[0] == places[1] == places[2]


def test_a_refused_prefill_leaves_the_output_of_the_decodes_as_it_was() -> None:
    """Output and query share memory, but the rows of the decodes, which run first, do not."""
    step, records = V4Step("v4-bf16"), Records(V4Step("v4-bf16"), 4)
    tokens, decodes = len(step.tokens), records.decodes
    shared = torch.zeros(tokens + decodes, HEADS, 512)
    q, output = shared[decodes:], shared[:tokens]
    q.copy_(step.q)
    before = shared.clone()
    with pytest.raises(ValueError, match="out must be separate from all inputs"):
        V4Impl().forward_mqa(
            layer_of(step, 4), q, None, None, output, swa_metadata=records.window, attn_metadata=records.main
        )
    assert torch.equal(shared, before)


def test_wide_rows_for_long_contexts_are_aligned() -> None:
    """2136 tokens are 17 entries of 128: a row that narrow breaks kernels with tiles of 64."""
    config = engine_config()
    config.model_config.max_model_len = 2136
    builder = V4MetadataBuilder(SimpleNamespace(block_size=PAGE, compress_ratio=128), [], config, "cpu")
    assert builder.c128a_max_compressed == 128
    config.model_config.max_model_len = 128 * 128 + 1
    builder = V4MetadataBuilder(SimpleNamespace(block_size=PAGE, compress_ratio=128), [], config, "cpu")
    assert builder.c128a_max_compressed == 256


def test_an_empty_step_has_no_rows() -> None:
    step = V4Step("v4-bf16", [1], [5])
    common = step.common("main")
    common.num_reqs, common.num_actual_tokens = 0, 0
    common.query_start_loc_cpu = common.query_start_loc = torch.zeros(1, dtype=torch.int32)
    common.seq_lens, common.slot_mapping = common.seq_lens[:0], common.slot_mapping[:0]
    record = main_builder(128).build(0, common)
    assert record.c128a_global_decode_topk_indices is None
    assert record.c128a_prefill_topk_indices is None
    assert len(record.slot_mapping) == 0


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("calls", [1, 2])
@pytest.mark.parametrize("layout", ["v4-bf16", "v4-fp8"])
def test_attention_in_the_mixed_index_style(layout: str, calls: int, shape: str, ratio: int) -> None:
    step = V4Step(layout, *SHAPES[shape])
    output = attend_mixed(step, step.q, layer_of(step, ratio), Records(step, ratio, 2), calls=calls, padding=2)
    tokens = len(step.tokens)
    step.agrees(output[:tokens, :HEADS], ratio)
    assert output[tokens:].eq(0).all(), "padding"
    assert output[:, HEADS:].eq(0).all(), "heads that nobody asked for"


def test_layer_buffers() -> None:
    module = torch.nn.Module()
    module.kv_cache_torch_dtype, module.scale = torch.float8_e4m3fn, 0.5
    module._q_scale_float, module._k_scale_float, module.device = 0.25, 2.0, "cpu"
    init_layer_buffers(module)
    values = {"q_scale": 0.25, "q_scale_inv": 4.0, "kv_scale": 2.0}
    assert {name: module.get_buffer(f"_flashinfer_fp8_{name}").tolist() for name in values} == {
        name: [value] for name, value in values.items()
    }
    assert not module.state_dict(), "not persistent"
    assert (module._flashinfer_fp8_bmm1_scale, module._flashinfer_fp8_bmm2_scale) == (0.25, 2.0)
    plain = SimpleNamespace(kv_cache_torch_dtype=torch.bfloat16)
    init_layer_buffers(plain)
    assert vars(plain) == {"kv_cache_torch_dtype": torch.bfloat16}


def test_warm_up_and_refusals() -> None:
    step = V4Step("v4-bf16", [1], [5])
    layer, impl = layer_of(step, 4), V4Impl()
    output = torch.ones(1, 64, 512)
    impl.forward_mqa(layer, step.q, None, None, output, swa_metadata=None)
    assert output.eq(0).all()
    window = window_builder().build(0, step.common("window"))
    with pytest.raises(ValueError, match="attn_metadata must be given for ratio 4"):
        impl.forward_mqa(layer, step.q, None, None, output, swa_metadata=window)
    with pytest.raises(
        ValueError, match=r"output must be \[1, 3 or more, 512\] like q \[1, 3, 512\], got \[1, 2, 512\]"
    ):
        impl.forward_mqa(layer, step.q, None, None, output[:, :2], swa_metadata=window)
    with pytest.raises(TypeError, match="output must be float32, got bfloat16"):
        impl.forward_mqa(layer, step.q, None, None, output.bfloat16(), swa_metadata=window)
    with pytest.raises(TypeError, match=r"kv_cache_spec.compress_ratio must be an int"):
        V4MetadataBuilder(SimpleNamespace(block_size=PAGE), [], engine_config(), "cpu")
    with pytest.raises(ValueError, match="hf_config must be one with 'index_topk'"):
        V4WindowMetadataBuilder(SimpleNamespace(block_size=64), [], engine_config(index_topk=None), "cpu")


def test_padded_heads_are_for_other_kernels() -> None:
    assert [get_padded_num_q_heads(n) for n in (1, 64, 65, 128)] == [64, 64, 128, 128]
    newer = (8, 16, 32, 64, 128)
    assert [get_padded_num_q_heads(n, newer) for n in (1, 8, 9, 17, 64, 65)] == [8, 8, 16, 32, 64, 128]
    with pytest.raises(ValueError, match="num_heads must be at most 128, got 129"):
        get_padded_num_q_heads(129)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_declarations(capability: tuple[int, int]) -> None:
    backend = TamisV4Backend
    assert (backend.is_mla(), backend.is_sparse(), backend.supports_sink()) == (True, True, True)
    assert backend.get_builder_cls() is V4MetadataBuilder
    assert backend.get_metadata_cls() is V4Metadata
    assert backend.supports_compute_capability(capability)
    assert backend.get_supported_kernel_block_sizes() == [256]
    assert backend.get_supported_head_sizes() == [512]
    with pytest.raises(NotImplementedError, match="runs attention itself"):
        backend.get_impl_cls()
    for cache_dtype in ("auto", "bfloat16", "fp8", "fp8_ds_mla"):
        assert cache_dtype in backend.supported_kv_cache_dtypes
        options = (512, torch.bfloat16, cache_dtype, 256, True, True, True)
        assert backend.supports_combination(*options, device_capability=capability) is None
    assert "head size 576" in str(
        backend.supports_combination(576, torch.bfloat16, "auto", 256, True, True, True, device_capability=capability)
    )
    assert backend.get_kv_cache_shape(7, 64, 1, 512, "fp8_ds_mla") == (7, 64, 584)
    assert backend.get_kv_cache_shape(7, 64, 1, 512, "auto") == (7, 64, 512)
    assert backend.get_name() != TamisV4WindowBackend.get_name()
    assert TamisV4WindowBackend.get_builder_cls() is V4WindowMetadataBuilder
    assert TamisV4WindowBackend.get_supported_kernel_block_sizes() == [64, 256]
