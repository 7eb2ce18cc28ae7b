"""Stand-ins for the objects that an engine passes to its attention backend, and dense attention in float64."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from seeds import seeded
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.integrations.vllm.backend import TamisSparseBackend
from tamis.integrations.vllm.impl import SparseImpl
from tamis.integrations.vllm.metadata import SparseMetadata, SparseMetadataBuilder

LATENT, ROPE, NOPE, VALUE = 512, 64, 128, 128
SCALE = (LATENT + ROPE) ** -0.5
TOPK = 128
BF16 = {"rtol": 0.01, "atol": 0.01}
FP8 = {"rtol": 0.065, "atol": 0.05}

BATCHES = {
    "mixed_small": ([32, 40, 48, 56], [1, 1, 5, 5]),
    "mixed_medium": ([512, 1024, 2048, 512, 1024, 2048], [1, 1, 1, 7, 7, 7]),
    "small_prefill": ([32, 40], [8, 8]),
    "medium_prefill": ([256, 512, 1024, 2048], [16] * 4),
    "single_prefill": ([1024], [64]),
    "large_q_prefill": ([1024, 1024], [256, 256]),
    "large_q_pure_prefill": ([256, 256], [256, 256]),
}
"""Total lengths and new tokens per request, from vLLM's tests of its sparse backends."""


def config(
    heads: int = 16,
    cache_dtype: str = "auto",
    *,
    topk: int = TOPK,
    max_tokens: int = 600,
    max_requests: int = 8,
    max_length: int = 2048,
    speculative: Any = None,
    ranks: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    rope: int = ROPE,
) -> SimpleNamespace:
    """The fields of a `VllmConfig` that an adapter reads."""
    widths = {"kv_lora_rank": LATENT, "qk_rope_head_dim": rope, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    model = SimpleNamespace(
        hf_config=SimpleNamespace(index_topk=topk),
        hf_text_config=SimpleNamespace(q_lora_rank=1536, **widths),
        max_model_len=max_length,
        dtype=dtype,
        get_num_attention_heads=lambda parallel: heads // parallel.tensor_parallel_size,
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, decode_context_parallel_size=ranks),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_tokens, max_num_seqs=max_requests),
        speculative_config=speculative,
    )


def builder(configuration: SimpleNamespace, block_size: int = 64, **options: Any) -> SparseMetadataBuilder:
    return SparseMetadataBuilder(SimpleNamespace(block_size=block_size), ["layer"], configuration, "cpu", **options)


def impl(
    heads: int = 16, kv_cache_dtype: str = "auto", *, cls: type[SparseImpl] = SparseImpl, **more: Any
) -> SparseImpl:
    arguments: dict[str, Any] = {
        "num_heads": heads,
        "head_size": LATENT + ROPE,
        "scale": SCALE,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": kv_cache_dtype,
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": 1536,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "qk_head_dim": NOPE + ROPE,
        "v_head_dim": VALUE,
    }
    return cls(**(arguments | more))


def layer(q_scale: float = 1.0, k_scale: float = 1.0) -> SimpleNamespace:
    return SimpleNamespace(_q_scale_float=q_scale, _k_scale_float=k_scale, _v_scale_float=k_scale)


def common(
    lengths: Sequence[int],
    queries: Sequence[int],
    block_table: Tensor,
    slots: Tensor,
    *,
    padded_tokens: int | None = None,
    padded_requests: int | None = None,
) -> SimpleNamespace:
    """The fields of a `CommonAttentionMetadata` that an adapter reads, padded as for a captured graph."""
    empty = (padded_requests or len(lengths)) - len(lengths)
    starts = torch.tensor([0, *queries] + [0] * empty, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    tokens = sum(queries)
    actual = tokens if padded_tokens is None else padded_tokens
    return SimpleNamespace(
        num_reqs=len(lengths) + empty,
        num_actual_tokens=actual,
        max_query_len=max(queries, default=0),
        max_seq_len=max(lengths, default=0),
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor([*lengths] + [0] * empty, dtype=torch.int32),
        block_table_tensor=torch.cat([block_table, torch.zeros(empty, block_table.shape[1], dtype=torch.int32)]),
        slot_mapping=torch.cat([slots, torch.full((actual - tokens,), -1)]),
    )


@dataclass(frozen=True, eq=False)
class Step:
    """One engine step on random data: bf16 rows per request, absorbed queries, positions per token."""

    lengths: tuple[int, ...]
    queries: tuple[int, ...]
    rows: tuple[Tensor, ...]
    """[length, 576] per request."""
    q: Tensor
    positions: Tensor

    @property
    def tokens(self) -> int:
        return sum(self.queries)

    def new_rows(self) -> Tensor:
        return torch.cat([r[n - q :] for r, n, q in zip(self.rows, self.lengths, self.queries, strict=True)])

    def place(self, block_size: int) -> tuple[Tensor, tuple[Tensor, ...], int]:
        """Shuffled pages: the block table, the slots of all rows per request, and the number of pages."""
        needed = [ceil_div(n, block_size) for n in self.lengths]
        ids = 1 + torch.randperm(sum(needed), generator=seeded(3))
        table = torch.zeros(len(needed), max(needed), dtype=torch.int32)
        slots = []
        for number, mine in enumerate(ids.split(needed)):
            table[number, : len(mine)] = mine
            position = torch.arange(self.lengths[number])
            slots.append(mine[position // block_size] * block_size + position % block_size)
        return table, tuple(slots), 1 + sum(needed)

    def new_slots(self, slots: Sequence[Tensor]) -> Tensor:
        return torch.cat([s[n - q :] for s, n, q in zip(slots, self.lengths, self.queries, strict=True)])


def token_positions(lengths: Sequence[int], queries: Sequence[int], topk: int = TOPK) -> Tensor:
    """Half of the columns filled, each token with others than its neighbours, none past the token itself."""
    own = [n - q + i for n, q in zip(lengths, queries, strict=True) for i in range(q)]
    table = torch.full((len(own), topk), -1, dtype=torch.int32)
    for token, position in enumerate(own):
        count = min(topk // 2, position + 1)
        table[token, :count] = (torch.arange(count, dtype=torch.int32) + 7 * token) % (position + 1)
    return table


def grid(*shape: int, random: torch.Generator) -> Tensor:
    """Normal numbers on the e4m3 grid: FP8 rows hold them exactly, so FP8 paths can be held to bf16 tolerances."""
    return torch.randn(*shape, generator=random).to(torch.float8_e4m3fn).bfloat16()


def make_step(lengths: Sequence[int], queries: Sequence[int], heads: int, factor: float = 1.0) -> Step:
    """Random data on the e4m3 grid, rows times `factor`."""
    random = seeded(sum(lengths) + heads)
    rows = tuple(grid(n, LATENT + ROPE, random=random) * factor for n in lengths)
    q = grid(sum(queries), heads, LATENT + ROPE, random=random)
    return Step(tuple(lengths), tuple(queries), rows, q, token_positions(lengths, queries))


@cache
def step(name: str, heads: int, factor: float = 1.0) -> Step:
    return make_step(*BATCHES[name], heads, factor)


@cache
def dense(name: str, heads: int, factor: float = 1.0) -> Tensor:
    return dense_fp64(step(name, heads, factor))[0]


def dense_fp64(of: Step, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    """Latent output and lse: all scores of a request, then a mask; no pages, no gathering."""
    outs, lses, token = [], [], 0
    for rows, count in zip(of.rows, of.queries, strict=True):
        keys = rows.double()
        hidden = torch.ones(count, len(rows), dtype=torch.bool)
        for i in range(count):
            chosen = of.positions[token + i]
            hidden[i, chosen[chosen >= 0].long()] = False
        logits = torch.einsum("thd,sd->ths", of.q[token : token + count].double(), keys) * scale
        logits.masked_fill_(hidden.unsqueeze(1), -torch.inf)
        outs.append(torch.softmax(logits, -1) @ keys[:, :LATENT])
        lses.append(torch.logsumexp(logits, -1))
        token += count
    return torch.cat(outs), torch.cat(lses)


class Served:
    """One step as an engine runs it: pages filled, metadata built, one layer ready."""

    def __init__(
        self,
        of: Step,
        cache_dtype: str = "auto",
        *,
        block_size: int = 64,
        k_scale: float = 1.0,
        planned: SparseMetadataBuilder | None = None,
        shared: Any = None,
        **more: Any,
    ) -> None:
        heads = of.q.shape[1]
        self.of = of
        self.table, slots, self.pages = of.place(block_size)
        self.slots = of.new_slots(slots)
        self.common = shared or common(of.lengths, of.queries, self.table, self.slots)
        self.builder = planned or builder(config(heads, cache_dtype), block_size)
        self.metadata: SparseMetadata = self.builder.build(0, self.common)
        self.indexer = SimpleNamespace(topk_indices_buffer=of.positions.clone())
        self.impl = impl(heads, cache_dtype, **({"indexer": self.indexer} | more))
        shape = TamisSparseBackend.get_kv_cache_shape(self.pages, block_size, 1, LATENT + ROPE, cache_dtype)
        # Unwritten rows are NaN in every format.
        if cache_dtype.startswith("fp8"):
            self.storage = torch.full(shape, 0xFF, dtype=torch.uint8)
        else:
            self.storage = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        for rows, at, query in zip(of.rows, slots, of.queries, strict=True):
            self.write(rows[: len(rows) - query], at[: len(rows) - query], k_scale)
        self.write(of.new_rows(), self.metadata.slot_mapping[: of.tokens], k_scale)

    def write(self, rows: Tensor, slots: Tensor, k_scale: float) -> None:
        latent, rope = rows.split([LATENT, ROPE], 1)
        dtype = self.impl.kv_cache_dtype
        self.impl.do_kv_cache_update(latent, rope.unsqueeze(1), self.storage, slots, dtype, torch.tensor(k_scale))

    def attend(self, q: Any = None, by: Any = None, **more: Any) -> tuple[Tensor, Tensor | None]:
        q = self.of.q if q is None else q
        return self.impl.forward_mqa(q, self.storage, self.metadata, by or layer(), **more)


def close(out: Tensor, expected: Tensor, tolerance: dict[str, float]) -> None:
    """A fast `torch.testing.assert_close`, which takes longer than the attention it checks."""
    assert out.shape == expected.shape
    excess = (out - expected).abs_() - expected.abs() * tolerance["rtol"]
    worst = float(excess.max())
    assert worst <= tolerance["atol"], f"off by {worst} more than the relative tolerance allows"  # NaN fails too


def same_bytes(first: Tensor, second: Tensor) -> bool:
    """Equality in which NaN equals itself."""
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))
