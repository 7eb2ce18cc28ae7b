"""vLLM's own Triton kernels of DeepSeek-V4.1, in Triton's interpreter, beside tamis' operations on the same inputs.

Run in a process of its own, with `TRITON_INTERPRET=1` and `CUDA_VISIBLE_DEVICES=` set before Triton is imported; prints
one JSON object of differences. The interpreter truncates where a device rounds to bf16 and to e4m3, so that stored
numbers may differ by one unit of these types.
"""

import json

import torch
from torch import Tensor
from vllm.model_executor.kernels.attention.dsa import candidate_blocks
from vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache import fused_save_compress_norm, rope_quant_insert
from vllm.models.deepseek_v41.common.ops.indexer_k_store import indexer_k_norm_rope_store

from tamis import PagedCache
from tamis.cache.layout import compressor_state, index_fp8, v4_fp8, v41_fp8
from tamis.model.rope import Rope
from tamis.ops import StatePages, norm_rows, pool_kv, write_rotated
from tamis.ops.index.reference import best_blocks

TOKENS, EPS = 9, 1e-6


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def latents(ratio: int) -> tuple[Tensor, Tensor]:
    """Latents of one request's tokens in two steps: vLLM's from its ring, ours from pages."""
    values, scores = torch.randn(TOKENS, 512), 2 * torch.randn(TOKENS, 512)
    norm, positions = (torch.rand(512) + 0.5).bfloat16(), torch.arange(TOKENS)
    ring, found = torch.zeros(3, 8, 1024), torch.zeros(TOKENS, 512, dtype=torch.bfloat16)
    state = PagedCache(compressor_state(dim=512, overlapping=False), 4, 4)
    ours = torch.zeros_like(found)
    for start, end in ((0, 4), (4, TOKENS)) if ratio == 2 else ((0, TOKENS),):
        some = slice(start, end)
        raw = torch.cat((values, scores), 1)[some].contiguous() if ratio == 2 else values[some].contiguous()
        slots = 8 + positions[some] % 8 if ratio == 2 else positions[some]
        loc, ids = torch.tensor([0, end - start], dtype=torch.int32), torch.zeros(end - start, dtype=torch.int32)
        fused_save_compress_norm(raw, positions[some], ring, slots, loc, ids, norm, EPS, ratio, found[some])
        if ratio == 2:
            pages = StatePages(4 + positions[some], ids, torch.tensor([[1, 2, 3]], dtype=torch.int32))
            given = {"positions": positions[some], "pages": pages, "norm_weight": norm, "ratio": 2}
            ours[some] = pool_kv(values[some], scores[some], state, **given)
        else:
            ours[some] = norm_rows(values[some], norm).bfloat16()
    return found, ours


def main() -> None:
    torch.manual_seed(5)
    found: dict[str, float] = {}
    positions, cos_sin = torch.arange(TOKENS), Rope(64, theta=160000.0).cos_sin_table(64)
    for ratio in (1, 2):
        theirs, ours = latents(ratio)
        ends = slice(ratio - 1, None, ratio)
        found[f"latents of {ratio}"] = relative(ours[ends].float(), theirs[ends].float())
        slots = torch.where((positions + 1) % ratio == 0, 3 + positions // ratio, -1)
        kept = slots[slots >= 0]
        for layout in (v4_fp8(), v41_fp8()):
            cache, own = PagedCache(layout, 3, 8), PagedCache(layout, 3, 8)
            rope_quant_insert(theirs, positions, cos_sin, cache.storage, slots, ratio)
            write_rotated(theirs, own, slots, positions=positions, cos_sin=cos_sin, span=ratio)
            found[f"{layout.name} entries of {ratio}"] = relative(own.read(kept), cache.read(kept))
            if layout.rope:
                found[f"rope of {ratio}"] = relative(own.read(kept)[:, 448:], cache.read(kept)[:, 448:])
        keys, weight = torch.randn(TOKENS, 128).bfloat16(), (torch.rand(128) + 0.5).bfloat16()
        cache, own = PagedCache(index_fp8(), 3, 8), PagedCache(index_fp8(), 3, 8)
        indexer_k_norm_rope_store(keys, positions, cos_sin, weight, EPS, cache.storage, slots, ratio, False)
        write_rotated(keys, own, slots, positions=positions, cos_sin=cos_sin, norm_weight=weight, span=ratio)
        found[f"index keys of {ratio}"] = relative(own.read(kept), cache.read(kept))
    torch.Tensor.is_cuda = property(lambda self: True)  # type: ignore[assignment,method-assign]
    logits, lengths = torch.randn(6, 83), torch.tensor([83, 1, 40, 82, 8, 9], dtype=torch.int32)
    blocks = torch.zeros(6, 4, dtype=torch.int32)
    candidate_blocks.select_candidate_blocks(logits, None, lengths, 4, 8, blocks)
    ours = best_blocks(logits, lengths, 4, 8)
    found["blocks"] = float(sum(set(a) != set(b) for a, b in zip(blocks.tolist(), ours.tolist(), strict=True)))
    masked = logits.clone()
    candidate_blocks.apply_candidate_mask(masked, None, lengths, blocks, 8)
    held = torch.zeros(6, 83, dtype=torch.bool)
    for row, own_blocks in enumerate(ours.tolist()):
        for block in own_blocks:
            if block >= 0:
                held[row, 8 * block : min(8 * block + 8, int(lengths[row]))] = True
    found["masked"] = float(((masked > -torch.inf) != held).sum())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
