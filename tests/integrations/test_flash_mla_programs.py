"""Programs written for sgl-flash-mla 1.0.0, for SGLang and for vLLM: what they import, pass, and read."""

import copy
import inspect
import math
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

import bounds
import pytest
import torch
from seeds import seeded
from torch import Tensor

from tamis.integrations import flash_mla
from tamis.integrations.flash_mla import decode, flash_mla_interface
from tamis.integrations.flash_mla.attention import attend_checked
from tamis.layers.batch_invariance import FIXED_COLUMNS

ONE_LINE = """
import sys
import tamis.integrations.flash_mla
sys.modules["flash_mla"] = tamis.integrations.flash_mla
"""
IMPORTS = {
    "attributes": "import flash_mla\nflash_mla.flash_mla_with_kvcache, flash_mla.has_legacy(), flash_mla.__version__",
    "submodule": "import flash_mla.flash_mla_interface\nflash_mla.flash_mla_interface.flash_mla_with_kvcache",
    "submodule under a name": "import flash_mla.flash_mla_interface as api\napi.get_mla_decoding_metadata",
    "submodule of the package": "from flash_mla import flash_mla_interface\nflash_mla_interface.flash_mla_sparse_fwd",
    "fused": "import flash_mla.fused_norm_rope_attn_rope_cast as fused\nfused.prefill, fused.decode",
    "fused of the package": "from flash_mla import fused_norm_rope_attn_rope_cast as fused\nfused.permute_wv_proj",
    "the same class": "import flash_mla\nfrom flash_mla.flash_mla_interface import FlashMLASchedMeta\n"
    "assert type(flash_mla.get_mla_metadata()[0]) is FlashMLASchedMeta",
    "the same functions": "import flash_mla.flash_mla_interface as api\n"
    "assert all(getattr(api, n) is getattr(tamis.integrations.flash_mla, n) for n in api.__all__)",
    "everything": "from flash_mla import *\nget_mla_metadata, flash_attn_varlen_func, fused_norm_rope_attn_rope_cast",
}


@pytest.mark.parametrize("program", IMPORTS.values(), ids=IMPORTS)
def test_one_line_serves_every_import(program: str) -> None:
    subprocess.run([sys.executable, "-c", ONE_LINE + program], check=True)


def decode_call(**changes: Any) -> dict[str, Any]:
    """A sparse decode call over 4 packed pages of 8 rows, which have 528 bytes."""
    g = seeded(1)
    latent = torch.randn(4, 8, 512, generator=g).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = (torch.rand(4, 8, 4, generator=g) + 0.5).view(torch.uint8)
    call = {
        "q": torch.randn(2, 3, 5, 512, generator=g),
        "k_cache": torch.cat([latent, scales], -1).unsqueeze(2),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": 512,
        "tile_scheduler_metadata": flash_mla.FlashMLASchedMeta(),
        "indices": torch.randint(0, 32, (2, 3, 6), generator=g, dtype=torch.int32),
        "kv_format": "V32_NO_ROPE",
    }
    return call | changes


def prefill_call(**changes: Any) -> dict[str, Any]:
    g = seeded(2)
    indices = torch.randint(-5, 25, (4, 1, 6), generator=g, dtype=torch.int32)
    indices[3] = -1
    q, kv = torch.randn(4, 5, 576, generator=g), torch.randn(20, 1, 576, generator=g)
    return {"q": q, "kv": kv, "indices": indices, "sm_scale": 0.1} | changes


def run(**changes: Any) -> tuple[Tensor, Tensor]:
    return flash_mla.flash_mla_with_kvcache(**decode_call(**changes))


SPARSE = "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata softmax_scale indices is_fp8_kvcache "
TWO_CACHES = SPARSE + "attn_sink topk_length extra_k_cache extra_indices_in_kvcache extra_topk_length "
DENSE = "q k_cache block_table cache_seqlens head_dim_v tile_scheduler_metadata softmax_scale causal "
ROWS = "q kv indices sm_scale "
CALLS = [
    ("flash_mla_with_kvcache", SPARSE, "vLLM's sparse decode"),
    ("flash_mla_with_kvcache", SPARSE + "attn_sink", "vLLM's Hy4"),
    ("flash_mla_with_kvcache", TWO_CACHES + "out", "vLLM's V4 and V4.1"),
    ("flash_mla_with_kvcache", DENSE + "is_fp8_kvcache", "vLLM's dense decode"),
    ("flash_mla_with_kvcache", DENSE + "num_splits descale_q descale_k", "vLLM's and SGLang's dense FP8"),
    ("flash_mla_with_kvcache", SPARSE + "num_splits", "SGLang 0.5.17's DSA"),
    ("flash_mla_with_kvcache", SPARSE + "use_legacy kv_format", "SGLang 0.5.23's DSA"),
    ("flash_mla_with_kvcache", TWO_CACHES + "use_legacy", "SGLang 0.5.23's V4"),
    ("flash_mla_with_kvcache", DENSE + "is_fp8_kvcache use_legacy descale_q descale_k", "sgl-flash-mla's dense FP8"),
    ("flash_mla_with_kvcache", SPARSE + "enable_batch_invariant", "FlashMLA of 2026-09-30"),
    ("flash_mla_sparse_fwd", ROWS + "attn_sink topk_length out", "vLLM's prefill"),
    ("flash_mla_sparse_fwd", ROWS + "d_v attn_sink topk_length use_legacy return_log2_lse", "SGLang 0.5.23's prefill"),
    ("get_mla_metadata", "", "the newer metadata"),
    ("get_mla_metadata", "cache_seqlens num_q_tokens_per_head_k num_heads_k is_fp8_kvcache", "vLLM's dense metadata"),
    ("get_mla_decoding_metadata", "seqlens_k num_q_tokens_per_head_k h_k h_q is_fp8_kvcache topk use_legacy", "SGLang"),
]


@pytest.mark.parametrize(("function", "keywords", "caller"), CALLS, ids=[caller for *_, caller in CALLS])
def test_engines_calls_bind(function: str, keywords: str, caller: str) -> None:
    inspect.signature(getattr(flash_mla_interface, function)).bind(**dict.fromkeys(keywords.split()))


def test_the_newer_arguments_change_nothing_that_they_should_not() -> None:
    out, lse = run()
    for changes in ({"use_legacy": True}, {"is_fp8_kvcache": True}, {"is_fp8_kvcache": None}):
        found = run(**changes)
        assert torch.equal(found[0], out)
        assert torch.equal(found[1], lse)


def test_a_schedule_may_be_built_filled_and_copied() -> None:
    expected = run()[0]
    holder = flash_mla.FlashMLASchedMeta()
    assert (holder.have_initialized, holder.config) == (False, None)
    lengths = torch.full((2,), 6, dtype=torch.int32)
    parts = flash_mla.get_mla_decoding_metadata(lengths, 15, 1, h_q=5, topk=6, is_fp8_kvcache=True, use_legacy=True)
    holder.tile_scheduler_metadata, holder.num_splits = parts
    twin = copy.deepcopy(holder)
    assert twin.num_splits is not holder.num_splits
    assert torch.equal(run(tile_scheduler_metadata=twin)[0], expected)
    # A call leaves it alone, so that it serves other shapes too.
    assert (holder.have_initialized, holder.config) == (False, None)
    assert run(tile_scheduler_metadata=holder, q=decode_call()["q"][:1], indices=decode_call()["indices"][:1])
    config = flash_mla.FlashMLASchedMeta.Config(2, 3, 5, 8, 1, False, True, 6, None, None)
    assert flash_mla.FlashMLASchedMeta(True, config, *parts).config is config


def test_the_schedule_of_both_functions_is_one() -> None:
    lengths = torch.tensor([100, 0, 4000], dtype=torch.int32)
    for heads, topk in ((64, None), (128, 2048), (None, None)):
        holder, num_splits = flash_mla.get_mla_metadata(lengths, 128, 1, heads, True, topk)
        parts, splits = flash_mla.get_mla_decoding_metadata(lengths, 128, 1, heads, True, topk)
        assert torch.equal(parts, holder.tile_scheduler_metadata)
        assert torch.equal(splits, num_splits)
    empty = flash_mla.get_mla_metadata(cache_seqlens=None, num_q_tokens_per_head_k=64, num_heads_k=1, topk=512)
    assert empty == (flash_mla.FlashMLASchedMeta(), None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seqlens_k": None}, "seqlens_k must be a tensor"),
        ({"seqlens_k": torch.ones(2)}, "seqlens_k must be int32"),
        ({"h_k": 2}, "h_k must be"),
        ({"h_q": 3}, "num_q_tokens_per_head_k must be a multiple of h_q = 3, got 64; pass s_q \\* h_q"),
        ({"topk": 0}, "topk must be"),
        ({"use_legacy": None}, "use_legacy must be True or False"),
        ({"is_fp8_kvcache": "e4m3"}, "is_fp8_kvcache must be True or False"),
    ],
)
def test_refused_decoding_metadata(changes: dict[str, Any], message: str) -> None:
    call = {"seqlens_k": torch.ones(2, dtype=torch.int32), "num_q_tokens_per_head_k": 64, "h_k": 1} | changes
    with pytest.raises((TypeError, ValueError), match=message):
        flash_mla.get_mla_decoding_metadata(**call)


def test_statistics_of_prefill_in_either_base_or_left_out() -> None:
    out, top, lse = flash_mla.flash_mla_sparse_fwd(**prefill_call())
    assert top is not None
    assert lse is not None
    assert lse[3].tolist() == [math.inf] * 5
    same, top2, lse2 = flash_mla.flash_mla_sparse_fwd(**prefill_call(use_legacy=True, return_log2_lse=True))
    assert torch.equal(same, out)
    q, rows = prefill_call()["q"].double(), prefill_call()["kv"].double()[:, 0]
    for token, named in enumerate(prefill_call()["indices"][:3, 0].tolist()):
        kept = rows[[i for i in named if 0 <= i < 20]]
        exact = bounds.attention(q[token], kept, scale=0.1, value_dim=512)
        for found, expected, error in ((lse2, exact.lse, exact.lse_error), (top2, exact.top, exact.top_error)):
            bounds.agree(found[token], expected / math.log(2), 2 * error + 1e-6)
    assert lse2[3].tolist() == [math.inf] * 5
    assert top2[3].tolist() == [-math.inf] * 5
    found = flash_mla.flash_mla_sparse_fwd(**prefill_call(return_log2_lse=False))
    assert torch.equal(found[0], out)
    assert found[1:] == (None, None)
    with pytest.raises(TypeError, match="return_log2_lse must be True or False, got int"):
        flash_mla.flash_mla_sparse_fwd(**prefill_call(return_log2_lse=2))


def wide_call(requests: int, columns: int, extra: int) -> dict[str, Any]:
    g = seeded(requests)
    call = decode_call(
        q=decode_call()["q"][:1].expand(requests, 3, 5, 512),
        indices=torch.randint(0, 32, (1, 3, columns), generator=seeded(8), dtype=torch.int32).repeat(requests, 1, 1),
    )
    if requests > 1:
        call["q"] = torch.cat([call["q"][:1], torch.randn(requests - 1, 3, 5, 512, generator=g)])
    if extra:
        indices = torch.randint(0, 32, (1, 3, extra), generator=seeded(9), dtype=torch.int32)
        call |= {
            "extra_k_cache": call["k_cache"],
            "extra_indices_in_kvcache": indices.repeat(requests, 1, 1),
        }
    return call


@pytest.fixture
def splits_seen(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The number of splits of every call from now on."""
    seen = []

    def noted(*args: Any, **options: Any) -> Any:
        seen.append(options["splits"])
        return attend_checked(*args, **options)

    monkeypatch.setattr(decode, "attend_checked", noted)
    return seen


@pytest.mark.parametrize(
    ("columns", "extra", "splits"), [(6, 0, 1), (2 * FIXED_COLUMNS, 0, 2), (FIXED_COLUMNS, 1, 2), (0, 0, 1)]
)
def test_a_batch_invariant_step_has_fixed_splits(
    columns: int, extra: int, splits: int, splits_seen: list[int | None]
) -> None:
    found = {}
    for requests in (1, 9):
        found[requests] = run(**wide_call(requests, columns, extra), enable_batch_invariant=True)
    assert splits_seen == [splits, splits]
    assert all(torch.equal(alone, many[:1]) for alone, many in zip(found[1], found[9], strict=True))
    run(**wide_call(1, columns, extra))
    assert splits_seen[-1] is None


def test_a_batch_invariant_dense_step_does_not_follow_the_longest_request(splits_seen: list[int | None]) -> None:
    """The lengths of other requests must change neither the number of splits nor the width of the sums."""
    g = seeded(5)
    q, k_cache = torch.randn(2, 1, 5, 576, generator=g), torch.randn(64, 64, 1, 576, generator=g)
    table = torch.arange(64, dtype=torch.int32).view(2, 32)

    def step(count: int, longest: int) -> tuple[Tensor, Tensor]:
        lengths = torch.tensor([77, longest], dtype=torch.int32)[:count]
        call = {"block_table": table[:count], "cache_seqlens": lengths, "indices": None, "kv_format": None}
        return run(**call, q=q[:count], k_cache=k_cache, enable_batch_invariant=True)

    expected = step(1, 0)
    for longest in (0, 5, 1000, 2048):
        found = step(2, longest)
        assert all(torch.equal(alone, many[:1]) for alone, many in zip(expected, found, strict=True))
    assert set(splits_seen) == {1}


def test_a_step_writes_into_the_output_that_it_is_given() -> None:
    expected, lse = run()
    buffer = torch.full((7, 3, 5, 512), math.nan)
    out = buffer[2:4]
    found = run(out=out)
    assert found[0] is out
    assert torch.equal(out, expected)
    assert torch.equal(found[1], lse)
    assert buffer[[0, 1, 4, 5, 6]].isnan().all()
    # As vLLM passes it: one token per request, a slice of padded heads.
    q, indices = decode_call()["q"][:, :1], decode_call()["indices"][:, :1]
    wide = torch.zeros(2, 8, 512)
    run(q=q, indices=indices, out=wide[:, :5].unsqueeze(1))
    assert torch.equal(wide[:, :5], expected[:, 0])
    assert (wide[:, 5:] == 0).all()
    rows = torch.zeros(4, 5, 512)
    assert flash_mla.flash_mla_sparse_fwd(**prefill_call(out=rows))[0] is rows
    assert torch.equal(rows, flash_mla.flash_mla_sparse_fwd(**prefill_call())[0])


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(2, 3, 5, 511), "out must be of shape .*d_v=512"),
        (torch.zeros(6, 5, 512), "out must be of shape"),
        (torch.zeros(2, 3, 5, 512).int(), "out must be bfloat16"),
        (torch.zeros(2, 4, 5, 512)[:, :3], "out must be of tokens at equal distances"),
        (torch.zeros(2, 3, 5, 512, device="meta"), "out must be on cpu"),
        (torch.zeros(1, 3, 5, 512).expand(2, 3, 5, 512), "out must be of tokens at equal distances"),
        ([0.0], "out must be a tensor"),
    ],
)
def test_refused_outputs(out: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        run(out=out)


def test_what_only_sm100_has_can_be_imported_and_says_so_when_called() -> None:
    fused = flash_mla.fused_norm_rope_attn_rope_cast
    names = ["flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"]
    functions = [(name, getattr(flash_mla_interface, name)) for name in names]
    functions += [(f"fused_norm_rope_attn_rope_cast.{name}", getattr(fused, name)) for name in fused.__all__]
    for name, function in functions:
        with pytest.raises(NotImplementedError, match=rf"{name} is not served by tamis: .*SM100 alone"):
            function(torch.zeros(1), causal=True)


PUBLIC = {
    "sgl-flash-mla 1.0.0": "FlashMLASchedMeta flash_attn_varlen_func flash_mla_sparse_fwd flash_mla_with_kvcache "
    "fused_norm_rope_attn_rope_cast get_mla_decoding_metadata get_mla_metadata has_legacy",
    "FlashMLA 1.0.0": "FlashMLASchedMeta flash_attn_varlen_func flash_attn_varlen_kvpacked_func "
    "flash_attn_varlen_qkvpacked_func flash_mla_sparse_fwd flash_mla_with_kvcache fused_norm_rope_attn_rope_cast "
    "get_mla_metadata",
}
"""The public names of the packages, and those of their submodule that programs import."""
ROW = re.compile(r"^\| `([\w.]+)` \| [^|]+ \| (served|refused) \| [^|]+ \|$", re.M)


def test_the_page_says_of_every_function_whether_it_is_served() -> None:
    page = (Path(__file__).parents[2] / "docs/flash_mla.md").read_text()
    told = dict(ROW.findall(page))
    fused = "fused_norm_rope_attn_rope_cast"
    functions = [name for name in flash_mla.__all__ if name != fused]
    functions += [f"{fused}.{name}" for name in flash_mla.fused_norm_rope_attn_rope_cast.__all__]
    assert set(told) == set(functions)
    assert set(" ".join(PUBLIC.values()).split()) <= set(flash_mla.__all__)
    for name, state in told.items():
        try:
            attrgetter(name)(flash_mla)()
            refusal = ""
        except TypeError:
            refusal = ""  # it is served, and wants arguments
        except NotImplementedError as error:
            refusal = str(error)
        assert bool(refusal) == (state == "refused"), name
        if refusal:
            assert refusal.startswith(f"{name} is not served by tamis: ")
            assert "; use " in refusal


def test_the_version_is_that_of_both_packages() -> None:
    assert flash_mla.__version__ == "1.0.0"
