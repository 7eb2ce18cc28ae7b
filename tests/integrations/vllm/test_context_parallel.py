"""Ranks that share rows or divide prompts, without an engine: what is gathered, how heads are counted, what is refused.

Tests inside the real vLLM run the same over gloo (tests/real_vllm/test_context_parallel.py).
"""

from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import numpy as np
import pytest
import torch
from engine_standin import BF16, LATENT, ROPE, close
from torch import Tensor

from tamis.integrations.vllm.context_parallel import Ranks
from tamis.integrations.vllm.impl import SparseImpl
from tamis.integrations.vllm.metadata import SparseMetadataBuilder

PAGE = 64


def config(decode: int, prefill: int, interleave: int = 1, **options: Any) -> SimpleNamespace:
    made = engine.config(4, options.pop("cache_dtype", "auto"), ranks=decode, **options)
    made.parallel_config.prefill_context_parallel_size = prefill
    made.parallel_config.cp_kv_cache_interleave_size = interleave
    return made


@pytest.mark.parametrize(("decode", "prefill", "groups"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), (2, 2, 1), (8, 4, 2)])
def test_queries_have_the_heads_that_vllm_gathers(decode: int, prefill: int, groups: int) -> None:
    assert Ranks(decode, prefill).query_groups == groups
    assert engine.builder(config(decode, prefill)).spec.heads == 4 * groups
    kind = type("Local", (SparseImpl,), {"dcp_world_size": decode, "pcp_world_size": prefill})
    assert engine.impl(4, cls=kind)._attention.spec.heads == 4 * groups


def test_a_divided_prompt_is_two_parts_on_each_rank() -> None:
    """Parts are prefills however short they are, and drafts stay decodes, whatever their lengths."""
    drafts = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)
    builder = engine.builder(config(1, 2, max_requests=3, speculative=drafts))
    lengths, queries = [50, 60, 80, 20, 40, 30], [3, 2, 1, 1, 20, 20]
    step = engine.make_step(lengths, queries, 4)
    table, slots, _ = step.place(PAGE)
    common = engine.common(lengths, queries, table, step.new_slots(slots))
    common.is_prefilling = torch.tensor([False] * 3 + [True] * 3)
    record = builder.build(0, common)
    assert (record.num_decodes, record.num_decode_tokens, record.num_prefills) == (3, 6, 3)
    assert record.gathered is None


def test_a_rank_without_tokens() -> None:
    builder = engine.builder(config(1, 2))
    common = engine.common([0], [0], torch.zeros(1, 4, dtype=torch.int32), torch.full((4,), -1))
    common.num_actual_tokens, common.is_prefilling = 0, torch.tensor([False])
    record = builder.build(0, common)
    assert (record.num_actual_tokens, record.num_decode_tokens, record.num_prefills) == (0, 0, 0)


class Shards:
    """A step whose rows two ranks share, each with its own pages under the same numbers."""

    def __init__(
        self, lengths: list[int], queries: list[int], interleave: int, cache_dtype: str = "auto", device: str = "cpu"
    ) -> None:
        self.step, self.dtype, self.device = engine.make_step(lengths, queries, 4), cache_dtype, device
        table, _, pages = self.step.place(PAGE)
        self.table = table.to(device)
        storage = torch.uint8 if cache_dtype == "fp8_ds_mla" else torch.bfloat16
        width = 656 if cache_dtype == "fp8_ds_mla" else LATENT + ROPE
        self.storages = [torch.zeros(pages, PAGE, width, dtype=storage, device=device) for _ in range(2)]
        for rank, mine in enumerate(self.storages):
            for request, rows in enumerate(self.step.rows):
                position = torch.arange(len(rows), device=device)
                inside = position // (2 * interleave) * interleave + position % interleave
                slots = self.table[request, inside // PAGE].long() * PAGE + inside % PAGE
                slots[position // interleave % 2 != rank] = -1
                self.impl(rank).do_kv_cache_update(*rows.to(device).split([LATENT, ROPE], 1), mine, slots)

    def impl(self, rank: int, positions: Tensor | None = None, **more: Any) -> Any:
        own = {"dcp_world_size": 2, "dcp_rank": rank, "pcp_world_size": 2, "need_to_return_lse_for_decode": True}
        kind = type("Local", (SparseImpl,), own | more)
        return engine.impl(4, self.dtype, cls=kind, topk_indices_buffer=positions)

    def attend(self, tokens: list[int], common: Any, builder: Any, rank: int = 0) -> tuple[Tensor, Tensor, Any]:
        """What a rank returns for some tokens, where gathering finds the other rank's pages of the same numbers."""
        record = builder.build(0, common)
        impl = self.impl(rank, self.step.positions[tokens].to(self.device))

        def gather(every: Tensor, mine: Tensor) -> None:
            chunk = next(c for c in record.gathered.chunks if c.pages.data_ptr() not in seen)
            seen.add(chunk.pages.data_ptr())
            pages = [storage.view(torch.uint8)[chunk.pages] for storage in self.storages]
            assert torch.equal(pages[rank], mine)
            every.copy_(torch.cat(pages))

        seen: set[int] = set()
        impl._gather_ranks = gather
        q = self.step.q[tokens].to(self.device)
        out, lse = impl.forward_mqa(q, self.storages[rank], record, engine.layer())
        assert len(seen) == len(record.gathered.chunks)
        return out.cpu(), lse, record


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("interleave", [1, 16, 128])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_prefills_attend_to_the_pages_of_all_ranks(interleave: int, cache_dtype: str, device: str) -> None:
    """A decode, and one rank's two parts of each of two prompts. Runs may be longer than a page."""
    shards = Shards([100, 570, 500], [1, 40, 8], interleave, cache_dtype, device)
    step = shards.step
    tokens = [0, *range(1, 11), *range(31, 41), 41, 42, 47, 48]
    lengths, queries, rows = [100, 540, 570, 494, 500], [1, 10, 10, 2, 2], [0, 1, 1, 2, 2]
    common = engine.common(lengths, queries, shards.table[rows].cpu(), torch.full((len(tokens),), -1))
    common.block_table_tensor = common.block_table_tensor.to(device)
    common.req_idx = np.array([7, 3, 3, 5, 5])
    common.is_prefilling = torch.tensor([False] + [True] * 4)
    whole = [[100, 570, 500][row] for row in rows]
    largest = [n // (2 * interleave) * interleave + min(n % (2 * interleave), interleave) for n in whole]
    common.dcp_local_seq_lens_cpu_upper_bound = torch.tensor(largest, dtype=torch.int32)
    for max_length, chunks in ((2048, 1), (600, 2)):
        configuration = config(2, 2, interleave, cache_dtype=cache_dtype, max_length=max_length)
        builder = SparseMetadataBuilder(SimpleNamespace(block_size=PAGE), ["layer"], configuration, device)
        out, lse, record = shards.attend(tokens, common, builder, rank=1)
        assert lse.shape == (1, 4)
        assert len(record.gathered.chunks) == chunks
        close(out[1:], engine.dense_fp64(step)[0][tokens][1:], BF16)


def test_a_batch_that_vllm_makes_up_has_one_row_per_request() -> None:
    """Before it serves, vLLM runs batches without its division of prompts."""
    shards = Shards([200, 300], [20, 30], 1)
    tokens = list(range(50))
    common = engine.common([200, 300], [20, 30], shards.table, torch.full((50,), -1))
    out, lse, _ = shards.attend(tokens, common, engine.builder(config(2, 2)))
    assert lse.shape == (0, 4)
    close(out, engine.dense_fp64(shards.step)[0], BF16)


@pytest.mark.parametrize("gap", [0, 4, 8])
def test_pages_of_an_engine_may_have_gaps(gap: int) -> None:
    """Pages that lie between those of other layers are copied in large pieces only if they are aligned."""
    shards = Shards([200], [20], 1, "fp8_ds_mla")
    size = PAGE * 656
    for rank, storage in enumerate(shards.storages):
        room = torch.zeros(len(storage), size + gap, dtype=torch.uint8)
        room[:, :size] = storage.flatten(1)
        shards.storages[rank] = room[:, :size].unflatten(1, (PAGE, 656))
    common = engine.common([200], [20], shards.table, torch.full((20,), -1))
    builder = engine.builder(config(2, 2, cache_dtype="fp8_ds_mla"))
    out, _, _ = shards.attend(list(range(20)), common, builder)
    close(out, engine.dense_fp64(shards.step)[0], BF16)


def test_layers_with_other_rows_are_refused() -> None:
    shards = Shards([200], [20], 1, "fp8_ds_mla")
    common = engine.common([200], [20], shards.table, torch.full((20,), -1))
    with pytest.raises(ValueError, match="kv_cache must be of rows with 1152 bytes"):
        shards.attend(list(range(20)), common, engine.builder(config(2, 2)))


def test_adaptive_verification_of_divided_prompts_is_refused() -> None:
    """Where prefills are gathered, the host must know which tokens they have."""
    drafts = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False, enable_adaptive_verification=True)
    for decode, prefill in ((2, 1), (1, 2)):
        engine.builder(config(decode, prefill, speculative=drafts))
    with pytest.raises(ValueError, match="enable_adaptive_verification must be off where ranks divide prompts"):
        engine.builder(config(2, 2, speculative=drafts))


def test_sinks_of_shared_rows_are_refused() -> None:
    kind = type("Local", (SparseImpl,), {"dcp_world_size": 2})
    with pytest.raises(ValueError, match="attention sinks under decode context parallelism"):
        engine.impl(4, cls=kind, sinks=torch.zeros(4))
    engine.impl(4, sinks=torch.zeros(4))
