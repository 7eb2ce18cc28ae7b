"""A step of SGLang's DSA backend on a CPU: its own pool, backend and metadata, and what attention must give."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.kits.attention_unittest.attention_methods import dense_attention, dsa_attention
from torch import Tensor

LATENT, ROPE, PAGE, TOPK, SCALE = 512, 64, 64, 128, 0.07


@dataclass
class Step:
    """What a layer hands to attention in one step."""

    runner: Any
    backend: Any
    batch: Any
    layer: Any
    q: Tensor
    k: Tensor
    k_rope: Tensor
    positions: list[list[int]]
    """The positions that each token selects."""
    requests: list[int]
    """The request of each token."""

    @property
    def topk_positions(self) -> Tensor:
        """[T, TOPK], -1 after the selected ones."""
        return _padded(self.positions)

    @property
    def topk_slots(self) -> Tensor:
        """The same as slots of the pool."""
        table = self.backend.req_to_token
        pairs = zip(self.requests, self.positions, strict=True)
        return _padded([table[request, chosen].tolist() for request, chosen in pairs])

    def run(self, topk: Tensor | None = None, *, packed: bool = False, **others: Any) -> Tensor:
        """Attention as SGLang calls it."""
        q, q_rope = self.q.flatten(1), None
        if not packed:
            q, q_rope = (part.flatten(1) for part in self.q.split([LATENT, self.q.shape[2] - LATENT], dim=2))
        forward = self.backend.forward_decode if self.batch.forward_mode.is_decode() else self.backend.forward_extend
        others = {"k": self.k, "v": self.k, "k_rope": self.k_rope} | others
        others.setdefault("topk_indices", self.topk_slots if topk is None else topk)
        given = (others.pop("k"), others.pop("v"), self.layer, self.batch)
        out: Tensor = forward(q, *given, q_rope=q_rope, **others)
        return out

    def expected(self, slots: Tensor | None = None, sink: Tensor | None = None) -> Tensor:
        """Attention in float64 over the pool's bytes."""
        rows = read_pool(self.backend, self.layer.layer_id)
        slots = self.topk_slots if slots is None else slots
        out = torch.zeros(*self.q.shape[:2], LATENT, dtype=torch.float64)
        for token, chosen in enumerate(slots):
            kept = rows[chosen[chosen >= 0].long()]
            logits = self.q[token].double() @ kept.T * self.layer.scaling
            weights = logits.exp()
            rest = 0.0 if sink is None else sink.double().exp().unsqueeze(1)
            if len(kept):
                out[token] = weights @ kept[:, :LATENT] / (weights.sum(1, keepdim=True) + rest)
        return out


def make_step(
    mode: ForwardMode = ForwardMode.DECODE,
    *,
    heads: int = 16,
    fp8: bool = True,
    prefix: tuple[int, ...] = (150, 3, 63),
    new: int = 3,
    decode: str = "tamis",
    prefill: str = "tamis",
    rope: int = ROPE,
    longest: int = 256,
) -> Step:
    """A step whose requests have `prefix` tokens in the pool and, unless it decodes, `new` more, `longest` at most.

    Needs the fixture `hopper`.
    """
    width = LATENT + rope
    case = dsa_attention.DSAAttentionCase(
        name="tamis",
        backend="dsa",
        forward_mode=mode,
        num_heads=heads,
        num_kv_heads=1,
        page_size=PAGE,
        prefix_lens=prefix,
        extend_lens=(new,) * len(prefix),
    )
    config = dsa_attention.TinyDSAModelConfig(
        num_heads=heads,
        num_kv_heads=1,
        head_dim=width,
        hidden_size=64,
        context_len=longest,
        qk_nope_head_dim=LATENT,
        qk_rope_head_dim=rope,
        kv_lora_rank=LATENT,
        index_topk=TOPK,
    )
    runner = dsa_attention.DSAMockModelRunner(
        case=case,
        model_config=config,
        dtype=torch.bfloat16,
        device="cpu",
        max_context_len=longest,
        head_dim=width,
        dsa_prefill_backend=prefill,
        dsa_decode_backend=decode,
        fp8_kv_cache=fp8,
    )
    backend = ATTENTION_BACKENDS["dsa"](runner)
    place = dense_attention.make_loc_fn(
        "shuffled_pages",
        batch_size=len(prefix),
        seq_lens=case.seq_lens,
        prefix_lens=prefix,
        page_size=PAGE,
        max_context_len=longest,
        seed=1,
    )
    batch = dsa_attention._make_forward_batch(case, runner, max_context_len=longest, device="cpu", loc_fn=place)
    if mode.is_target_verify():
        # SGLang counts the drafts that a step verifies apart.
        batch.seq_lens, batch.seq_lens_cpu = batch.seq_lens - new, batch.seq_lens_cpu - new
    backend.init_forward_metadata(batch)
    backend.use_mha = False  # SGLang attends densely to prompts as short as these
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=heads,
        v_head_dim=LATENT,
        head_dim=width,
        scaling=SCALE,
        is_cross_attention=False,
        logit_cap=0.0,
    )
    generator = torch.Generator().manual_seed(heads)
    fill_pool(backend.token_to_kv_pool.get_key_buffer(0)[:, 0], generator)
    requests = [request for request, count in enumerate(case.input_lens) for _ in range(count)]
    seen = [prefix[r] + offset + 1 for r, count in enumerate(case.input_lens) for offset in range(count)]
    positions = [torch.randperm(length, generator=generator)[:TOPK].tolist() for length in seen]
    q = torch.randn(len(seen), heads, width, generator=generator, dtype=torch.bfloat16)
    return Step(runner, backend, batch, layer, q, *_new_rows(len(seen), generator), positions, requests)


def read_pool(backend: Any, layer: int = 0) -> Tensor:
    """All rows of a layer's pool in float64, from its bytes: values, then float32 scales, then the rope part."""
    pool: Tensor = backend.token_to_kv_pool.get_key_buffer(layer)[:, 0]
    if pool.dtype == torch.bfloat16:
        return pool.double()
    raw = pool.view(torch.uint8)
    values = raw[:, :LATENT].view(torch.float8_e4m3fn).double().unflatten(1, (-1, 128))
    scales = raw[:, LATENT : LATENT + 16].contiguous().view(torch.float32).double()
    rope = raw[:, LATENT + 16 :].contiguous().view(torch.bfloat16).double()
    return torch.cat([(values * scales.unsqueeze(2)).flatten(1), rope], dim=1)


def fill_pool(pool: Tensor, generator: torch.Generator | None = None) -> None:
    """Write random rows into the whole pool. (SGLang's own kernel is slow in Triton's interpreter.)"""
    latent, rope = (part[:, 0] for part in _new_rows(len(pool), generator))
    if pool.dtype == torch.bfloat16:
        pool.copy_(torch.cat([latent, rope], dim=1)[:, : pool.shape[1]])
        return
    tiles = latent.float().unflatten(1, (-1, 128))
    scales = tiles.abs().amax(dim=2) / 448
    values = (tiles / scales.unsqueeze(2)).to(torch.float8_e4m3fn).flatten(1)
    parts = [part.contiguous().view(torch.uint8) for part in (values, scales, rope)]
    pool.view(torch.uint8).copy_(torch.cat(parts, dim=1)[:, : pool.shape[1]])


def _new_rows(count: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    rows = torch.randn(count, 1, LATENT + ROPE, generator=generator, dtype=torch.bfloat16)
    latent, rope = rows.split([LATENT, ROPE], dim=2)
    return latent.contiguous(), rope.contiguous()


def _padded(rows: list[list[int]]) -> Tensor:
    return torch.tensor([row + [-1] * (TOPK - len(row)) for row in rows], dtype=torch.int32).reshape(-1, TOPK)
