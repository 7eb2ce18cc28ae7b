"""One case for each class of wrong arguments for which fuzzing found a wrong result or error; the fuzzing itself is
in tests/reliability/test_contract.py."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tamis import (
    Batch,
    Caches,
    IndexRecipe,
    LayerSpec,
    Limits,
    PagedCache,
    PagePool,
    Planner,
    Recording,
    Selection,
    SparseMLA,
    V4Caches,
    V4Weights,
    choose,
    ops,
)
from tamis.cache.layout import compressor_state, for_engine, rows
from tamis.model.absorb import AbsorbedWeights
from tamis.model.rope import Rope

CACHE = PagedCache(rows(torch.float32, latent=8, rope=8), 2, 4)
SPEC = LayerSpec(1, 8, 8, 8, 1.0, topk=2)
ANGLES = torch.ones(4, 8)
NAN_AT_1 = ANGLES.index_fill(0, torch.tensor([1]), math.nan)
ROWS, IDS, AT_1 = torch.ones(1, 16), torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
HEADS = torch.ones(1, 1, 16)
V32 = {"num_attention_heads": 1, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "index_topk": 2}
SPARSE = torch.ones(1, 8).to_sparse()


def pairs(**changes: Any) -> dict[str, Any]:
    given = {"latent": ROWS[:, :8], "rope": ROWS[:, 8:], "cache": CACHE, "slots": IDS, "norm_weight": torch.ones(8)}
    return given | {"positions": AT_1, "cos_sin": ANGLES} | changes


def compress(**changes: Any) -> None:
    state = PagedCache(compressor_state(dim=16, overlapping=False), 2, 4)
    pages = ops.StatePages(IDS, IDS, torch.zeros(1, 1, dtype=torch.int32))
    given = {"positions": AT_1, "pages": pages, "slots": IDS, "bias": torch.zeros(1, 16), "norm_weight": torch.ones(16)}
    ops.compress_kv(ROWS, ROWS, state, CACHE, **(given | {"cos_sin": ANGLES} | changes))


def table(width: int = 1) -> torch.Tensor:
    return torch.zeros(1, width, dtype=torch.int32)


def gathered(first: torch.Tensor) -> None:
    given = {"ratio": 1, "window": 1, "entries": 0, "rows": 1, "columns": 0}
    ops.select_gathered(IDS, IDS, first, **given, slots=table(), lengths=IDS.clone())


CASES: dict[str, tuple[type[Exception], str, Callable[[], object]]] = {
    "backend, a list": (TypeError, "backend must be a str", lambda: ops.read_kv(CACHE, IDS, backend=[])),
    "cache, a dictionary": (TypeError, "cache must be a PagedCache", lambda: ops.read_kv({}, IDS)),
    "a sparse pair": (
        TypeError,
        "kv must be a pair of dense tensors",
        lambda: ops.write_kv((SPARSE, ROWS[:, 8:]), CACHE, IDS),
    ),
    "sparse slots": (TypeError, "slots must be an int32 or int64 tensor", lambda: ops.read_kv(CACHE, IDS.to_sparse())),
    "infinite numbers to scale by": (
        ValueError,
        "x must be finite",
        lambda: ops.quantise_per_tensor(torch.tensor([math.inf])),
    ),
    "a flag, interleaved": (
        TypeError,
        "interleaved must be True or False",
        lambda: ops.write_normed_kv(**pairs(interleaved="no")),
    ),
    "a flag, compact": (
        TypeError,
        "compact must be True or False",
        lambda: ops.translate_positions(table(), IDS, table(), page_size=4, compact=None),
    ),
    "a flag, inverse": (TypeError, "inverse must be True", lambda: ops.rotate_heads(HEADS, IDS, ANGLES, inverse=2)),
    "a flag of a recipe": (TypeError, "hadamard must be True or False", lambda: IndexRecipe(hadamard=1)),
    "angles, write": (
        ValueError,
        "cos_sin must be finite, got NaN or infinity in row 1",
        lambda: ops.write_normed_kv(**pairs(cos_sin=NAN_AT_1)),
    ),
    "angles, heads": (
        ValueError,
        "cos_sin must be finite, got NaN or infinity in row 1",
        lambda: ops.rotate_heads(HEADS, AT_1, NAN_AT_1),
    ),
    "angles, FP8": (
        ValueError,
        "cos_sin must be finite",
        lambda: ops.rotate_to_fp8(HEADS.repeat(1, 1, 2), AT_1, NAN_AT_1, tile=32),
    ),
    "angles, entries": (
        ValueError,
        "cos_sin must be finite, got NaN or infinity in row 1",
        lambda: compress(cos_sin=NAN_AT_1),
    ),
    "angles, index": (
        ValueError,
        "cos_sin must be finite, got NaN or infinity in row 1",
        lambda: ops.rotate_index(ROWS, IndexRecipe(8), positions=AT_1, cos_sin=NAN_AT_1),
    ),
    "eps, NaN": (ValueError, "eps must be finite and > 0, got nan", lambda: ops.write_normed_kv(**pairs(eps=math.nan))),
    "eps, negative": (ValueError, "eps must be finite and > 0, got -1.0", lambda: compress(eps=-1.0)),
    "an unused eps": (
        ValueError,
        "norm_eps must be finite and > 0",
        lambda: ops.write_index_keys(ROWS, CACHE, IDS, IndexRecipe(0), norm_eps=-1.0),
    ),
    "parts without end": (
        ValueError,
        "splits must be at most 65535",
        lambda: ops.attend_slots(HEADS, _selection(), scale=1.0, value_dim=8, splits=2**30),
    ),
    "sparse storage with a head axis": (
        TypeError,
        "storage must be a dense tensor",
        lambda: PagedCache.wrap(torch.zeros(1, 1, 1, 16).to_sparse(), CACHE.layout),
    ),
    "storage with a gradient": (
        ValueError,
        "storage must be without gradient",
        lambda: PagedCache.wrap(torch.zeros(1, 1, 16, requires_grad=True), CACHE.layout),
    ),
    "a device, None": (TypeError, "device must be a torch.device", lambda: PagedCache(CACHE.layout, 1, 1, None)),
    "a device that is not there": (
        ValueError,
        "device must be one that this machine has",
        lambda: Planner(SPEC, Limits(1, 1, 1), "cuda:99"),
    ),
    "a recipe of another kind": (
        TypeError,
        "recipe must be an IndexRecipe",
        lambda: PagedCache(CACHE.layout, 1, 1, recipe="v4"),
    ),
    "a layout's dtype": (TypeError, "dtype must be bfloat16", lambda: rows(np.zeros(3))),
    "an engine's dtype": (TypeError, "cache_dtype must be one of", lambda: for_engine(np.zeros(3))),
    "a spec's number": (TypeError, "index_heads must be an int", lambda: LayerSpec(1, topk=1, index_heads=None)),
    "a config of another kind": (TypeError, "config must be a Hugging Face config", lambda: LayerSpec.from_hf(3)),
    "a config's text for a number": (
        TypeError,
        "config.index_topk must be an int, got str",
        lambda: LayerSpec.from_hf(V32 | {"index_topk": "2"}),
    ),
    "a config's list for settings": (
        TypeError,
        "config.rope_scaling must be a dictionary",
        lambda: LayerSpec.from_hf(V32 | {"rope_scaling": [1]}),
    ),
    "a rope without frequencies": (ValueError, "theta must be > 1", lambda: Rope(8, theta=1.0, factor=4.0)),
    "a rope of NaN": (ValueError, "mscale must be finite and >= 0", lambda: Rope(8, factor=4.0, mscale=math.nan)),
    "an odd rope": (ValueError, "dim must be even, got 7", lambda: Rope(7)),
    "weights of integers": (
        TypeError,
        "weight must be bfloat16",
        lambda: AbsorbedWeights.split(torch.ones(2, 1).int(), heads=1, nope_dim=1, value_dim=1, latent_dim=1),
    ),
    "weights in a list": (TypeError, "tensors must be a dictionary", lambda: V4Weights.from_state_dict([], groups=1)),
    "a V4 layer that is none": (
        TypeError,
        "spec must be a LayerSpec",
        lambda: V4Caches.allocate(None, pages=1, window_pages=1, state_pages=1),
    ),
    "a choice for nothing": (TypeError, "spec must be a LayerSpec", lambda: choose({}, "cpu")),
    "limits of pools": (TypeError, "other_page_sizes must be a dictionary", lambda: Limits(1, 1, 1, 4, [8])),
    "no limits": (TypeError, "limits must be a Limits", lambda: Planner(SPEC, None)),
    "no batch": (TypeError, "batch must be a Batch", lambda: Planner(SPEC, Limits(1, 1, 1)).plan(3)),
    "no pool": (TypeError, "pool must be a PagePool", lambda: Batch.build([1], [1], None)),
    "a shape of another kind": (TypeError, "shape must be a str", lambda: Batch.parse(3, PagePool(9, 4))),
    "a seed of another kind": (TypeError, "seed must be an int", lambda: PagePool(9, 4, seed=0.5)),
    "a request without a hash": (TypeError, "request must be hashable", lambda: PagePool(9, 4).extend({}, 1)),
    "names that are no list": (
        TypeError,
        "requests must be a list",
        lambda: Batch.build([1], [1], PagePool(9, 4), requests=3),
    ),
    "tokens of no request": (ValueError, "first must be of at least one request", lambda: gathered(IDS[:0])),
    "top-k of another kind": (TypeError, "topk must be an int", lambda: Recording(True)),
}


def _selection() -> Any:
    return Selection(CACHE, table())


@pytest.mark.parametrize("name", CASES)
def test_refused_by_name(name: str) -> None:
    kind, message, call = CASES[name]
    before = CACHE.storage.clone()
    with pytest.raises(kind, match="^" + message):
        call()
    assert torch.equal(CACHE.storage, before)


def test_caches_of_a_layer_are_caches() -> None:
    plan = Planner(SPEC, Limits(1, 1, 4, 4), layout=CACHE.layout).plan(Batch.build([1], [1], PagePool(2, 4)))
    with pytest.raises(TypeError, match=r"^caches\.index must be a PagedCache, got str"):
        SparseMLA(SPEC)(HEADS, ROWS, Caches(CACHE, "keys"), plan, positions=table(2) - 1)
