"""The benchmark's store of compressed V4 entries as plain rows, against float64 and bytes written by rules."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from v4_rows import KINDS, ROW_DTYPES, encoded, page_memory

from benchmarks.vllm_v4_rows import store_plain_rows

WIDTH, ROPE, EPS = 512, 64, 1e-6
BLOCKS = {4: 4, 128: 8}
"""Tokens of a page of states, by ratio, as vLLM has them."""


def drawn(ratio: int, lengths: list[int]) -> dict[str, Any]:
    """States of requests in shuffled pages, and all their tokens as one step."""
    parts = 2 if ratio == 4 else 1
    size, deepest = BLOCKS[ratio], max(lengths)
    table = torch.randperm(len(lengths) * math.ceil(deepest / size)).view(len(lengths), -1).int() + 1
    angles = torch.rand(deepest, ROPE // 2) * 6
    return {
        "state_cache": torch.randn(table.numel() + 1, size, 2 * parts * WIDTH),
        "token_to_req_indices": torch.tensor([r for r, n in enumerate(lengths) for _ in range(n)], dtype=torch.int32),
        "positions": torch.cat([torch.arange(n) for n in lengths]),
        "slot_mapping": torch.arange(sum(lengths)),
        "num_actual": sum(lengths),
        "block_table": table,
        "block_size": size,
        "state_width": parts * WIDTH,
        "cos_sin_cache": torch.cat((angles.cos(), angles.sin()), 1),
        "head_dim": WIDTH,
        "rope_head_dim": ROPE,
        "compress_ratio": ratio,
        "overlap": ratio == 4,
        "rms_norm_weight": torch.rand(WIDTH).bfloat16(),
        "rms_norm_eps": EPS,
        "use_fp4_cache": False,
        "pdl_kwargs": {"launch_pdl": False},
    }


def entry(given: dict[str, Any], request: int, last: int) -> Tensor:
    """The entry that a token completes, in float64, one state after the other."""
    ratio, size, half = given["compress_ratio"], given["block_size"], given["state_width"]
    scores, values = [], []
    for p in range(max(0, last + 1 - (2 if ratio == 4 else 1) * ratio), last + 1):
        state = given["state_cache"][int(given["block_table"][request, p // size]), p % size].double()
        first = WIDTH if ratio == 4 and p > last - ratio else 0
        values.append(state[first : first + WIDTH])
        scores.append(state[half + first : half + first + WIDTH])
    row = (torch.stack(values) * torch.stack(scores).softmax(0)).sum(0)
    row = row / (row.square().mean() + EPS).sqrt() * given["rms_norm_weight"].double()
    cos, sin = given["cos_sin_cache"][last + 1 - ratio].double().chunk(2)
    even, odd = row[WIDTH - ROPE :: 2].clone(), row[WIDTH - ROPE + 1 :: 2].clone()
    row[WIDTH - ROPE :: 2], row[WIDTH - ROPE + 1 :: 2] = even * cos - odd * sin, even * sin + odd * cos
    return row


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_entries_are_those_of_float64(kind: str, ratio: int) -> None:
    lengths, scale = [ratio * 2 + 1, ratio, 3 * ratio - 1], 0.021
    given = drawn(ratio, lengths)
    cache = page_memory(9, 2, ROW_DTYPES[kind])
    before = cache.view(torch.uint8).clone()
    tokens = given["num_actual"]
    targets = torch.full((tokens,), -1)
    ends = [(r, p) for r, n in enumerate(lengths) for p in range(ratio - 1, n, ratio)]
    slots = 2 + torch.randperm(16)[: len(ends)]
    for (request, p), slot in zip(ends, slots, strict=True):
        targets[sum(lengths[:request]) + p] = slot
    dropped = sum(lengths[: ends[-1][0]]) + ends[-1][1]
    given["slot_mapping"][dropped] = -1  # a token of padding
    store_plain_rows(
        kv_cache=cache,
        k_cache_metadata=SimpleNamespace(slot_mapping=targets),
        store_full_fp8=kind == "fp8",
        fp8_scale=torch.tensor([scale]) if kind == "fp8" else None,
        **given,
    )
    stored = {int(slot) for slot in slots[:-1]}
    for (request, p), slot in zip(ends[:-1], slots[:-1], strict=True):
        exact = entry(given, request, p)
        # The last place of bf16, and for e4m3 that of its four bits as well, near halves.
        room = (
            exact.abs() * (2**-8 if kind == "bf16" else 2**-4 + 2**-8) + 1e-5 + (scale * 2**-9 if kind == "fp8" else 0)
        )
        found = cache[slot // 2, slot % 2].double() * (scale if kind == "fp8" else 1.0)
        assert ((found - exact).abs() <= room).all()
        # Nearly all numbers have the bytes of the rules, applied to float64: the others are near halves.
        data = encoded(encoded(exact.unsqueeze(0).float(), "bf16", 1.0)[1], kind, scale)[0]
        same = (cache.view(torch.uint8)[slot // 2, slot % 2] == data[0]).double().mean()
        assert same > 0.99
    untouched = [slot for slot in range(18) if slot not in stored]
    for slot in untouched:
        assert torch.equal(cache.view(torch.uint8)[slot // 2, slot % 2], before[slot // 2, slot % 2])


def test_a_decode_that_completes_nothing_stores_nothing() -> None:
    given = drawn(128, [5])
    cache = page_memory(2, 2, torch.bfloat16)
    before = cache.view(torch.uint8).clone()
    targets = SimpleNamespace(slot_mapping=torch.full((5,), -1))
    store_plain_rows(kv_cache=cache, k_cache_metadata=targets, store_full_fp8=False, fp8_scale=None, **given)
    assert torch.equal(cache.view(torch.uint8), before)
