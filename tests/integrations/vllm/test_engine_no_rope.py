"""Models without a rope (GLM-5.3-Flash) under vLLM's names: 512 numbers a row, or 656 bytes with zeros for a rope."""

from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import pytest
import torch
from engine_standin import BF16, LATENT, close
from torch import Tensor

from tamis.integrations.vllm.backend import TamisSparseBackend
from tamis.integrations.vllm.row_formats import row_layout
from tamis.ops import select_groups

KPOOL, TOPK, PAGE = 4, 64, 64
WIDTH = 128
"""As vLLM: top-k and the tail, rounded up to a multiple of 128."""


def group_positions(lengths: list[int], queries: list[int]) -> Tensor:
    """Selections as vLLM's indexer leaves them: whole groups in any order, a gap, the tail from column TOPK on, -1."""
    own = [n - q + i for n, q in zip(lengths, queries, strict=True) for i in range(q)]
    table = torch.full((len(own), WIDTH), -1, dtype=torch.int32)
    for token, position in enumerate(own):
        whole = (position + 1) // KPOOL
        groups = torch.randperm(whole)[: TOPK // KPOOL]
        table[token, : len(groups) * KPOOL] = (groups.unsqueeze(1) * KPOOL + torch.arange(KPOOL)).flatten().int()
        tail = torch.arange(whole * KPOOL, position + 1, dtype=torch.int32)
        table[token, TOPK : TOPK + len(tail)] = tail
    return table


def run(cache_dtype: str, lengths: list[int], queries: list[int], heads: int, **options: Any) -> tuple[Tensor, Tensor]:
    """A layer's output, and dense float64 over the selected rows."""
    of = engine.make_step(lengths, queries, heads)
    rows = tuple(rows[:, :LATENT] for rows in of.rows)
    of = engine.Step(of.lengths, of.queries, rows, of.q[..., :LATENT], group_positions(lengths, queries))
    table, slots, pages = of.place(PAGE)
    config = engine.config(heads, cache_dtype, topk=TOPK, rope=0)
    builder = engine.builder(config, PAGE, **options)
    metadata = builder.build(0, engine.common(of.lengths, of.queries, table, of.new_slots(slots)))
    layer = engine.impl(
        heads,
        cache_dtype,
        head_size=LATENT,
        qk_rope_head_dim=0,
        qk_head_dim=128,
        indexer=SimpleNamespace(topk_indices_buffer=of.positions.clone()),
    )
    row = 656 if cache_dtype == "fp8_ds_mla" else 512
    packed = cache_dtype.startswith("fp8")
    empty = (0xFF, torch.uint8) if packed else (torch.nan, torch.bfloat16)
    storage = torch.full((pages, PAGE, row), empty[0], dtype=empty[1])
    for some, at in zip(of.rows, slots, strict=True):
        no_rope = some.new_zeros(len(some), 1, 0)
        layer.do_kv_cache_update(some, no_rope, storage, at, cache_dtype, torch.tensor(1.0))
    if row == 656:
        filled = storage.view(-1, 656)[torch.cat(slots)]
        assert not filled[:, 528:].any()
    pair = (of.q, of.q.new_zeros(*of.q.shape[:2], 0))
    found, _ = layer.forward_mqa(pair, storage, metadata, engine.layer())
    alone, _ = layer.forward_mqa(of.q, storage, metadata, engine.layer())  # as under context parallelism
    assert torch.equal(found, alone)
    assert found.shape == (of.tokens, heads, LATENT)
    if options.get("mode") == "separate":
        assert metadata.gathers
    return found, engine.dense_fp64(of)[0]


@pytest.mark.parametrize("cache_dtype", ["auto", "bfloat16", "fp8_ds_mla", "fp8"])
def test_attention_over_groups_and_a_tail(cache_dtype: str) -> None:
    found, expected = run(cache_dtype, [300, 90, 7, 200], [1, 1, 1, 30], 4)
    close(found, expected, BF16)


def test_gathered_prefills() -> None:
    found, expected = run("fp8_ds_mla", [90, 200, 130], [1, 30, 130], 32, mode="separate")
    close(found, expected, BF16)


def test_the_selection_is_that_of_the_library() -> None:
    """What vLLM's indexer writes and what `select_groups` writes name the same tokens."""
    seen = torch.tensor([3, 70, 129], dtype=torch.int32)
    chosen = torch.tensor([[-1] * 16, [*range(15), -1], [*range(5, 21)]], dtype=torch.int32)
    ours = select_groups(chosen, seen, size=KPOOL)
    for row, groups, count in zip(ours.tolist(), chosen.tolist(), seen.tolist(), strict=True):
        wanted = {g * KPOOL + i for g in groups if 0 <= g < count // KPOOL for i in range(KPOOL)}
        assert {p for p in row if p >= 0} == wanted | set(range(count // KPOOL * KPOOL, count))


def test_which_layers_are_taken() -> None:
    def combination(head_size: int, cache: str, rope: int | None = None) -> str | None:
        widths = {} if rope is None else {"qk_rope_head_dim": rope}
        model = SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=2048, **widths))
        given = (head_size, torch.bfloat16, cache, 64, True, False, True)
        return TamisSparseBackend.supports_combination(*given, device_capability=(9, 0), model_config=model)

    for cache in TamisSparseBackend.supported_kv_cache_dtypes:
        assert combination(512, cache, 0) is None
        assert combination(576, cache, 64) is None
    refused = "head size 512 is for models without a rope, and this one has 64 columns of it"
    assert combination(512, "auto", 64) == refused
    assert row_layout("fp8_ds_mla", 512, 0).row_bytes == row_layout("fp8_ds_mla", 512, 64).row_bytes == 656
    assert row_layout("auto", 512, 0).row_bytes == 1024
