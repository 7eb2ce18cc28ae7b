"""DeepSeek-V4.1 in the real SGLang: layers that share entries and a selection, and SGLang's own torch code as an oracle
for tamis' two-level selection, latents and byte formats."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import v4_engine as v4

if "dsv4_attn_backend" not in v4.TAMIS:
    pytest.skip("this SGLang has no DeepSeek-V4.1", allow_module_level=True)

from sglang.kernels.ops.attention.dsv4.candidate_blocks import select_candidate_block_ids, topk_among_blocks
from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.attention.dsv4.dsv41_sparse import DeepseekV41Compressor
from sglang.test.kernels.deepseek_v4 import dsv41_kv_quant_reference as bytes_of
from torch import Tensor
from v4_engine import DECODE, EXTEND, VERIFY, Step

from tamis import PagedCache
from tamis._version import __version__
from tamis.cache.layout import compressor_state, rows, v41_fp4, v41_fp8
from tamis.integrations.sglang import announce
from tamis.ops import StatePages, index_scores, index_topk_and_blocks, index_topk_within, pool_kv, write_kv

RATIOS, SOURCES = [2, 2, 0, 1, 1], [0, 3]
STEPS = {"decode": (DECODE, [299, 2], [1, 1]), "extend": (EXTEND, [0, 250], [40, 21]), "verify": (VERIFY, [300], [3])}


@pytest.fixture
def tamis(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """SGLang's runner of unit tests with a model of five layers, two of which own entries."""
    config_of = v4.kit.TinyDSV4ModelConfig

    def config(**given: Any) -> Any:
        made = config_of(**(given | {"compression_ratios": RATIOS}))
        made.hf_config.kv_source_layer_ids = SOURCES
        return made

    runner_of = v4.kit.MockDSV4ModelRunner
    monkeypatch.setattr(v4.kit, "TinyDSV4ModelConfig", config)
    monkeypatch.setattr(
        v4.kit, "MockDSV4ModelRunner", lambda **given: runner_of(**(given | {"compression_ratios": RATIOS}))
    )
    with v4.options(**v4.TAMIS):
        yield


class Shared(Step):
    """A step of one layer, whose entries and selection are those of its source."""

    def __init__(self, kind: str, layer: int) -> None:
        self.layer_id = layer
        super().__init__(*STEPS[kind], ratio=RATIOS[layer])
        self.layer.layer_id = layer

    def buffers(self) -> Iterator[tuple[int, Tensor, int]]:
        yield 1, self.pool.get_swa_key_buffer_radix(self.layer_id), self.pool.swa_page_size
        if self.ratio:
            source = max(number for number in SOURCES if number <= self.layer_id)
            yield self.ratio, self.pool.get_extra_key_buffer(source), self.pool.get_extra_key_page_size(source)


@pytest.mark.usefixtures("tamis")
@pytest.mark.parametrize("layer", range(len(RATIOS)))
@pytest.mark.parametrize("kind", STEPS)
def test_layers_read_their_sources_entries(kind: str, layer: int) -> None:
    """Only the source's pages hold rows: a layer that read others would read NaN."""
    step = Shared(kind, layer)
    core = step.prepare()
    assert core.low_ratios == (1, 2)
    step.agrees(step.forward())


@pytest.mark.usefixtures("tamis")
def test_the_log_names_the_model(caplog: pytest.LogCaptureFixture) -> None:
    announce.cache_clear()
    caplog.set_level(logging.INFO, "tamis")
    ATTENTION_BACKENDS["dsv4"](v4.runner_of(v4.case_of(DECODE, [3], [1])))
    (line,) = (record.getMessage() for record in caplog.records if record.name == "tamis")
    assert line == f"tamis {__version__} serves DeepSeek-V4.1: fp8 rows of 584 bytes, 8 heads, kernels reference"


@pytest.mark.usefixtures("tamis")
@pytest.mark.parametrize("layout", [KVLayout.V41, KVLayout.V41_FP4])
def test_other_rows_of_entries_are_refused(layout: KVLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4.DeepSeekV4TokenToKVPool, "compressed_kv_layout", lambda self, ratio: layout)
    match = f"entries of ratio 1 cache has '{layout.value}' rows and not 'v4' rows; set SGLANG_DSV4_KV_LAYOUT=v4"
    with pytest.raises(ValueError, match=match):
        ATTENTION_BACKENDS["dsv4"](v4.runner_of(v4.case_of(DECODE, [3], [1])))


@pytest.mark.parametrize(("length", "blocks", "k"), [(203, 6, 20), (40, 3, 40), (7, 9, 3)])
def test_two_level_selection_is_sglangs(length: int, blocks: int, k: int) -> None:
    """SGLang's torch functions select the same blocks, and the same positions in them, from the same scores."""
    torch.manual_seed(length)
    tokens, size = 5, 8
    keys, q = torch.randn(length, 32), torch.randn(tokens, 32, 32)  # so many heads leave no two scores equal
    weights, lengths = torch.randn(tokens, 32), torch.randint(1, length + 1, (tokens,), dtype=torch.int32)
    lengths[0] = length
    cache = PagedCache(rows(torch.float32, latent=32, rope=0), 1, length)
    write_kv(keys, cache, torch.arange(length))
    given = (q, weights, cache, torch.zeros(tokens, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32), lengths)
    positions, found = index_topk_and_blocks(*given, k, blocks=blocks, block_size=size)
    scores = index_scores(*given)
    theirs = select_candidate_block_ids(scores, lengths.long().unsqueeze(1), blocks, size)
    for ours, other in zip(found.tolist(), theirs.tolist(), strict=True):
        assert [n for n in ours if n >= 0] == sorted(n for n in other if n >= 0)
    among = topk_among_blocks(scores, lengths.long(), theirs, min(k, length), size)
    inner = index_topk_within(*given, found, k, block_size=size)
    for ours, other in zip(inner.tolist(), among.tolist(), strict=True):
        assert [n for n in ours if n >= 0] == sorted(n for n in other if n >= 0)
    best = scores.topk(min(k, length), dim=-1)
    for ours, values, other in zip(positions.tolist(), best.values, best.indices, strict=True):
        assert [n for n in ours if n >= 0] == sorted(other[values > -torch.inf].tolist())


def test_latents_are_sglangs() -> None:
    """SGLang's compressor pools two tokens and normalises. It rounds to bf16 between the two, which tamis does not."""
    torch.manual_seed(1)
    compressor = DeepseekV41Compressor(16, 512, 2, 1e-6, fused_compress=False)
    torch.nn.init.uniform_(compressor.norm.weight, 0.5, 1.5)
    values, scores = torch.randn(6, 512), 2 * torch.randn(6, 512)
    theirs = compressor.finish(compressor.pool_pairs(values.view(3, 2, 512), scores.view(3, 2, 512))).detach()
    state = PagedCache(compressor_state(dim=512, overlapping=False), 1, 8)
    pages = StatePages(torch.arange(6), torch.zeros(6, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))
    norm = compressor.norm.weight.detach()
    found = pool_kv(values, scores, state, positions=torch.arange(6), pages=pages, norm_weight=norm, ratio=2)
    assert not found[::2].any()
    gap = (found[1::2].float() - theirs.float()).abs()
    assert (gap <= 2.0**-7 * theirs.float().abs()).all()


@pytest.mark.parametrize("page_size", [3, 64])
def test_rows_of_528_bytes_are_sglangs(page_size: int) -> None:
    """Byte for byte, where the scale is above SGLang's floor of 1e-4 for it (vLLM's is 1e-4 / 448)."""
    torch.manual_seed(2)
    given = torch.randn(2, page_size, 512).bfloat16() * torch.logspace(0, 6, page_size).view(1, -1, 1).bfloat16()
    expected = bytes_of.quantize_k_cache_v41(given)
    cache = PagedCache(v41_fp8(), 2, page_size)
    write_kv(given.view(-1, 512), cache, torch.arange(2 * page_size))
    assert cache.page_stride == expected.shape[1]
    used = page_size * 528
    assert torch.equal(cache.storage.flatten(1), expected[:, :used])
    found = cache.read(torch.arange(2 * page_size)).view(given.shape)
    assert torch.equal(found.bfloat16(), bytes_of.dequantize_k_cache_v41(expected, page_size))


@pytest.mark.parametrize("page_size", [3, 64])
def test_rows_of_288_bytes_are_sglangs(page_size: int) -> None:
    torch.manual_seed(3)
    given = torch.randn(2, page_size, 512).bfloat16() * torch.logspace(-4, 4, page_size).view(1, -1, 1).bfloat16()
    given[0, 0] = 0.0
    expected = bytes_of.quantize_k_cache_v41_fp4(given)
    cache = PagedCache(v41_fp4(), 2, page_size)
    write_kv(given.view(-1, 512), cache, torch.arange(2 * page_size))
    assert cache.page_stride == expected.shape[1]
    assert torch.equal(cache.storage.flatten(1), expected[:, : page_size * 288])
    found = cache.read(torch.arange(2 * page_size)).view(given.shape)
    assert torch.equal(found, bytes_of.dequantize_k_cache_v41_fp4(expected, page_size).float())
