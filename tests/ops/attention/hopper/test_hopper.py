"""Which calls the kernels for Hopper take, and which they leave to the portable kernels."""

import pytest
import torch
from attention_calls import attend_call
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.cache.layout import v32_fp8
from tamis.ops.attention import hopper, triton_kernels
from tamis.ops.attention.hopper import few_heads, many_heads


def test_what_few_heads_leave_to_other_kernels() -> None:
    cache, q = PagedCache("v32-fp8", 2, 16), torch.zeros(1, 16, 576, dtype=torch.bfloat16)
    selection = Selection(cache, torch.zeros(1, 4, dtype=torch.int32))
    moved = torch.zeros(len(cache.storage.flatten()) + 4, dtype=torch.uint8)[4:].view(cache.storage.shape)
    others = {
        "queries are float32, not bfloat16 or float16": (q.float(), selection, 512),
        "values are 256 wide, not 512": (q, selection, 256),
        "rows are v32-fp16, not v32-fp8 or v32-bf16": (
            q,
            Selection(PagedCache("v32-fp16", 1, 4), selection.slots),
            512,
        ),
        "queries are float16, not bfloat16, over v32-bf16 rows": (
            q.half(),
            Selection(PagedCache("v32-bf16", 1, 4), selection.slots),
            512,
        ),
        "rows do not start at multiples of 16 bytes": (
            q,
            Selection(PagedCache.wrap(moved, v32_fp8()), selection.slots),
            512,
        ),
    }
    for reason, (query, one, width) in others.items():
        assert few_heads.refusal(query, [selection, one], width) == reason
    assert few_heads.refusal(q, [selection], 512) is None
    chosen = {reason: hopper.kernels_for(*given, None) for reason, given in kernel_calls(others).items()}
    assert set(chosen.values()) == {triton_kernels}


def kernel_calls(others: dict[str, tuple[Tensor, Selection, int]]) -> dict[str, tuple[Tensor, list[Selection], int]]:
    return {reason: (query, [one], width) for reason, (query, one, width) in others.items()}


@pytest.mark.parametrize("splits", [None, 4])
def test_which_kernels_take_a_number_of_heads(splits: int | None) -> None:
    """As measured on an H200 (benchmarks/NOTES.md): few rows make the kernels for few heads faster."""
    cache = PagedCache("v32-fp8", 1, 4, "meta")
    expected = {
        (16, 4096, 2048): few_heads,
        (17, 63, 2048): few_heads,
        (32, 64, 2048): few_heads,
        (32, 133, 192): few_heads,
        (64, 4, 2048): few_heads,
        (64, 16, 2048): many_heads,
        (64, 16, 192): few_heads,
        (64, 4096, 2048): many_heads,
        (128, 2, 2048): few_heads,
        (128, 8, 2048): many_heads,
        (96, 5, 192): few_heads,
    }
    for (heads, tokens, columns), kernels in expected.items():
        q = torch.zeros(tokens, heads, 576, dtype=torch.bfloat16, device="meta")
        selection = Selection(cache, torch.zeros(tokens, columns, dtype=torch.int32, device="meta"))
        wanted = many_heads if heads > 32 and splits is not None else kernels  # for any number of tokens
        if splits is not None and heads <= 32:
            wanted = few_heads
        assert hopper.kernels_for(q, [selection], 512, splits) is wanted, (heads, tokens, columns)
        # No other kernels take fp16 queries.
        assert hopper.kernels_for(q.half(), [selection], 512, splits) is few_heads


@pytest.mark.parametrize("splits", [None, 4])
def test_which_kernels_take_bf16_rows(splits: int | None) -> None:
    cache = PagedCache("v32-bf16", 1, 4)
    expected = {
        (16, 4096): few_heads,
        (17, 8): few_heads,
        (32, 9): many_heads,
        (64, 4): few_heads,
        (64, 5): many_heads,
    }
    for (heads, tokens), kernels in expected.items():
        q, slots = torch.zeros(tokens, heads, 576).bfloat16(), torch.zeros(tokens, 1, dtype=torch.int32)
        wanted = many_heads if heads > 16 and splits is not None else kernels  # whatever the number of tokens
        assert hopper.kernels_for(q, [Selection(cache, slots)], 512, splits) is wanted


def test_kernels_look_positions_up_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, seen = PagedCache("v32-bf16", 1, 4), []
    for kernels in (few_heads, many_heads):
        monkeypatch.setattr(kernels, "attend", lambda call: seen.append(call.selections[0]))
    for tokens, heads in ((1, 16), (1, 128), (20, 16), (20, 33)):
        q, ids = torch.zeros(tokens, heads, 576).bfloat16(), torch.zeros(tokens, dtype=torch.int32)
        selection = Selection(cache, torch.ones(tokens, 1, dtype=torch.int32), None, ids, ids[:1].unsqueeze(0))
        out = torch.empty(tokens, heads, 512)
        hopper.attend(attend_call(q, [selection], scale=1.0, out=out, translate_first=True))
        assert seen[-1].block_table is selection.block_table
        assert (seen[-1].slots == 1).all()
