"""What a V4 layer in vLLM does once, for its caches and for a step, and when it does it again."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch_calls import Calls
from v4_standin import HEADS, Records, V4Step, attend_pages, layer_of

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.integrations.vllm import v4_limits
from tamis.integrations.vllm.v4_formats import E4M3, wrap
from tamis.integrations.vllm.v4_limits import decode_limits, prefill_limits

FIRST, SECOND = SimpleNamespace(compress_ratio=4), SimpleNamespace(compress_ratio=4)
POSITIONS = torch.tensor([0, 2, 3, 6, 7, 40, 41, 99])


def window() -> SimpleNamespace:
    lengths = torch.tensor([1, 3, 4, 0, 8, 41, 0, 100], dtype=torch.int32)
    return SimpleNamespace(is_valid_token=torch.tensor([True, False, True, True]), prefill_swa_lens=lengths)


def operations(limits: Any, *given: Any) -> tuple[list[int], int]:
    """The limits, and how many operations the device ran for them."""
    with Calls() as calls:
        found = limits(*given)
    assert found.dtype == torch.int32
    return found.tolist(), len(calls.names)


def test_limits_say_which_entries_count() -> None:
    assert decode_limits(FIRST, window(), 3, 16).tolist() == [16, 0, 16]
    assert prefill_limits(FIRST, window(), POSITIONS, 16).tolist() == [0, 0, 1, 0, 2, 10, 0, 16]
    assert prefill_limits(FIRST, window(), POSITIONS - 60, 16).tolist() == [0, 0, 0, 0, 0, 0, 0, 10]


def test_a_record_that_cannot_hold_them_is_served_too() -> None:
    class Record(NamedTuple):
        is_valid_token: Tensor

    assert decode_limits(FIRST, Record(window().is_valid_token), 2, 5).tolist() == [5, 0]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_limits_are_computed_once_in_a_pass(phase: str) -> None:
    record = window()
    limits, given = (decode_limits, (3, 16)) if phase == "decode" else (prefill_limits, (POSITIONS, 16))
    expected, count = operations(limits, FIRST, record, *given)
    assert count > 0
    assert operations(limits, SECOND, record, *given) == (expected, 0)
    # The first layer asks again in the next pass, before which an engine may have filled the record's tensors anew.
    (record.is_valid_token if phase == "decode" else record.prefill_swa_lens).zero_()
    expected = [0] * len(expected)
    assert operations(limits, FIRST, record, *given) == (expected, count)
    assert operations(limits, SECOND, record, *given) == (expected, 0)


def test_limits_of_another_kind_are_computed() -> None:
    record, other = window(), SimpleNamespace(compress_ratio=128)
    decode_limits(FIRST, record, 3, 16)
    prefill_limits(FIRST, record, POSITIONS, 16)
    assert decode_limits(SECOND, record, 3, 8).tolist() == [8, 0, 8]
    assert decode_limits(SECOND, record, 2, 16).tolist() == [16, 0]
    assert prefill_limits(SECOND, record, POSITIONS, 8).tolist() == [0, 0, 1, 0, 2, 8, 0, 8]
    assert prefill_limits(SECOND, record, POSITIONS + 4, 16).tolist() == [1, 1, 2, 0, 3, 11, 0, 16]
    assert prefill_limits(other, record, POSITIONS + 200, 16).tolist() == [1, 1, 1, 0, 1, 1, 0, 2]
    record.is_valid_token = torch.tensor([False, True, True])
    assert decode_limits(SECOND, record, 3, 16).tolist() == [0, 16, 16]


def test_a_graph_computes_its_own_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay runs what was captured, so it must not read what was computed before, nor may later steps read its."""
    record = window()
    decode_limits(FIRST, record, 3, 16)
    monkeypatch.setattr(v4_limits, "captured", lambda tensor: True)
    _, first = operations(decode_limits, SECOND, record, 3, 16)
    _, second = operations(decode_limits, SECOND, record, 3, 16)
    assert first == second > 0
    monkeypatch.undo()
    assert operations(decode_limits, SECOND, record, 3, 16)[1] == 0


@pytest.mark.parametrize("ratio", [4, 128])
def test_layers_of_one_step_attend_alike(ratio: int) -> None:
    """The second layer takes the limits of the first, with other entries of its own."""
    step, other = V4Step("v4-fp8"), V4Step("v4-fp8", seed=1)
    records = Records(step, ratio)
    attend_pages(step, step.q, layer_of(step, ratio), records)
    output = attend_pages(other, other.q, layer_of(other, ratio), records)
    other.agrees(output[: len(other.tokens), :HEADS], ratio)


# --- caches ---------------------------------------------------------------------------------------------------------


def cache_of(pages: int = 3, columns: int = 584) -> Tensor:
    return torch.zeros(pages, 64, columns, dtype=torch.uint8)


def test_a_cache_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, storage = SimpleNamespace(kv_cache_torch_dtype=torch.uint8, scale=1.0), cache_of()
    count, usual = 0, checks.dense

    def dense(*given: Any) -> Tensor:
        nonlocal count
        count += 1
        return usual(*given)

    monkeypatch.setattr(checks, "dense", dense)
    first = wrap("kv_cache", storage, layer)
    once = count
    again = wrap("kv_cache", storage, layer)
    assert count == once > 0
    assert vars(again) == vars(first)
    wrap("swa_kv_cache", storage, layer)
    assert count == 2 * once


def test_another_cache_is_checked() -> None:
    layer, storage = SimpleNamespace(kv_cache_torch_dtype=torch.uint8, scale=1.0), cache_of()
    wrap("kv_cache", storage, layer)
    assert wrap("kv_cache", cache_of(7), layer).pages == 7
    with pytest.raises(ValueError, match="kv_cache must be uint8 rows of 584"):
        wrap("kv_cache", cache_of(columns=512), layer)
    wrap("kv_cache", storage, layer)
    layer.kv_cache_torch_dtype = E4M3
    with pytest.raises(ValueError, match="kv_cache must be float8_e4m3fn rows of 512"):
        wrap("kv_cache", storage, layer)


@pytest.mark.parametrize("axis", [1, 2])
def test_a_cache_with_a_head_axis_is_remembered_without_it(axis: int) -> None:
    """vLLM 0.27 has one in rows of bf16 and e4m3 numbers."""
    layer = SimpleNamespace(kv_cache_torch_dtype=torch.bfloat16, scale=1.0)
    storage = torch.zeros(3, 64, 512, dtype=torch.bfloat16).unsqueeze(axis)
    first, again = (wrap("kv_cache", storage, layer) for _ in range(2))
    assert again.storage.shape == first.storage.shape == (3, 64, 512)
    assert again.storage.data_ptr() == storage.data_ptr()
    assert (again.layout, again.page_stride) == (first.layout, first.page_stride)


def test_a_changed_scale_is_seen() -> None:
    layer = SimpleNamespace(kv_cache_torch_dtype=E4M3, scale=1.0, _k_scale_float=0.5)
    storage = cache_of(columns=512)
    assert [wrap("kv_cache", storage, layer).scale for _ in range(2)] == [0.5, 0.5]
    layer._k_scale_float = 0.25
    assert wrap("kv_cache", storage, layer).scale == 0.25
    layer._k_scale_float = -1.0
    with pytest.raises(ValueError, match="scale must be finite and > 0"):
        wrap("kv_cache", storage, layer)


def test_a_layer_does_not_keep_a_cache() -> None:
    """An engine frees its caches, for example while it sleeps."""
    layer, storage = SimpleNamespace(kv_cache_torch_dtype=torch.uint8, scale=1.0), cache_of()
    assert isinstance(wrap("kv_cache", storage, layer), PagedCache)
    held = weakref.ref(storage)
    del storage
    gc.collect()
    assert held() is None
