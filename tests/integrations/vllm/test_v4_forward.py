"""Attention of a replaced V4 layer against fp64, from the same records in two ways: decode and prefill over pages, and
FlashMLA's functions with a workspace."""

from typing import Any

import pytest
import torch
from torch import Tensor
from v4_standin import HEADS, RATIOS, SCALE, SHAPES, WINDOW, Records, V4Step, attend_pages, layer_of

from tamis.cache.layout import plain_fp8
from tamis.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from tamis.integrations.vllm.classes.v4_indices import combine_topk_swa_indices, compute_global_topk_indices_and_lens
from tamis.ops import gather_kv
from tamis.step.split import group_prefills


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["v4-fp8", "v4-bf16", "plain-fp8"])
def test_pages_are_read_directly(layout: str, shape: str, ratio: int) -> None:
    scaled = layout == "plain-fp8"
    step = V4Step(plain_fp8(latent=448) if scaled else layout, *SHAPES[shape], scale=0.02 if scaled else 1.0)
    total, padding = len(step.tokens), 2
    layer = layer_of(step, ratio, _k_scale_float=0.02 if scaled else 1.0)
    output = attend_pages(step, step.q, layer, Records(step, ratio, padding), padding=padding)
    step.agrees(output[:total, :HEADS], ratio)
    assert output[total:].eq(0).all()
    assert output[:, HEADS:].eq(0).all()


def classic_decode(step: V4Step, ratio: int, records: Records) -> Tensor:
    """FlashMLA's decode: 64 heads, two caches, lengths per row."""
    count = records.decodes
    q = torch.zeros(count, 1, 64, 512, dtype=torch.bfloat16)
    q[:, 0, :HEADS] = step.q[:count].bfloat16()
    sink = torch.cat((step.sink, torch.full((64 - HEADS,), -torch.inf)))
    window, extra = records.window, {}
    if ratio > 1 and records.main is not None:
        slots, lengths = records.main.c128a_global_decode_topk_indices, records.main.c128a_decode_topk_lens
        if ratio == 4:
            given = (step.chosen[:count], window.token_to_req_indices, records.main.block_table)
            slots, lengths = compute_global_topk_indices_and_lens(*given, 256 // ratio, window.is_valid_token)
            slots = slots.unsqueeze(1)
        extra = {
            "extra_k_cache": step.entries[ratio].storage.unsqueeze(2),
            "extra_indices_in_kvcache": slots,
            "extra_topk_length": lengths,
        }
    options: dict[str, Any] = {"softmax_scale": SCALE, "is_fp8_kvcache": True, "attn_sink": sink}
    out, _ = flash_mla_with_kvcache(
        q,
        step.window.storage.unsqueeze(2),
        None,
        None,
        512,
        None,
        indices=window.decode_swa_indices,
        topk_length=window.decode_swa_lens,
        **options,
        **extra,
    )
    return out[:, 0, :HEADS]


def classic_prefill(step: V4Step, ratio: int, records: Records, budget: int) -> Tensor:
    """Dequantise, group by group, into a bf16 workspace, combine the index lists, and run the 16-bit kernel."""
    window, first = records.window, records.window.num_decodes
    raw, totals = window.prefill_gather_lens, window.prefill_seq_lens
    counts = totals // ratio if ratio > 1 else torch.zeros_like(totals)
    outs = []
    for group in group_prefills(counts.tolist(), raw.tolist(), budget):
        mine = slice(group.first, group.end)
        table = slice(first + group.first, first + group.end)
        workspace = torch.full((group.end - group.first, group.rows, 512), torch.nan, dtype=torch.bfloat16)
        starts = torch.arange(len(workspace), dtype=torch.int32) * group.rows
        flat = workspace.view(-1, 512)
        gather_kv(
            step.window,
            window.block_table[table],
            raw[mine],
            starts=starts + group.entries,
            first=totals[mine] - raw[mine],
            out=flat,
        )
        begin, end = int(window.query_start_loc_cpu[table.start]), int(window.query_start_loc_cpu[table.stop])
        numbers = torch.empty(end - begin, 0, dtype=torch.int32)
        if ratio > 1 and records.main is not None:
            gather_kv(step.entries[ratio], records.main.block_table[table], counts[mine], starts=starts, out=flat)
            every = records.main.c128a_prefill_topk_indices
            numbers = (
                step.chosen[begin:end] if every is None else every[begin - records.decodes : end - records.decodes]
            )
        query_starts = window.query_start_loc[table.start : table.stop + 1]
        slots, lengths = combine_topk_swa_indices(
            numbers, query_starts, totals[mine], raw[mine], WINDOW, ratio, numbers.shape[1], group.rows, group.entries
        )
        out, _, _ = flash_mla_sparse_fwd(
            step.q[begin:end].bfloat16(),
            flat.unsqueeze(1),
            slots.unsqueeze(1),
            SCALE,
            attn_sink=step.sink,
            topk_length=lengths,
        )
        outs.append(out)
    return torch.cat(outs)


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("budget", [10_000, 330])
def test_the_classic_way_through_flash_mla(budget: int, ratio: int) -> None:
    step = V4Step("v4-fp8")
    records = Records(step, ratio)
    out = torch.cat((classic_decode(step, ratio, records), classic_prefill(step, ratio, records, budget)))
    assert out.dtype == torch.bfloat16
    step.agrees(out, ratio, step.q.bfloat16())
