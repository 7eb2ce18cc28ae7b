"""Layer calls that are remembered launch what they would launch if nothing were remembered."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pretended import Pretended
from remembered import Change, Given, added, calls_of, compare, every_other, in_place, ints, outcome, shifted, widened
from torch import Tensor

from tamis import Batch, Caches, IndexRecipe, LayerSpec, Limits, PagedCache, PagePool, Planner, Shard, SparseMLA
from tamis.cache.layout import compressor_state
from tamis.ops import IndexInputs
from tamis.ops.index.over_ranks import OverRanks
from tamis.step.plan import Plan

pytestmark = pytest.mark.own_settings("changes settings itself")
BF16 = torch.bfloat16
TOKENS, TOPK = 3, 640


def zeros(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def spec(**options: Any) -> LayerSpec:
    return LayerSpec(**{"heads": 16, "scale": 0.1, "topk": TOPK, "index_heads": 8} | options)


class Step:
    """The plans of a step, each of a planner of its own, so that all stay valid."""

    def __init__(self, tokens: int = TOKENS, page_size: int = 64) -> None:
        limits = Limits(max_tokens=16, max_requests=16, max_length=1024, page_size=page_size)
        planner = Planner(spec(), limits, mode="mixed")
        self.plan = planner.plan(Batch.build([1] * tokens, [700] * tokens, PagePool(600, page_size)))


def rows_of(tokens: int = TOKENS, heads: int = 16) -> Given:
    return {"q": zeros(tokens, heads, 576), "kv": zeros(tokens, 576), "plan": Step(tokens).plan}


def given_positions() -> Given:
    given = rows_of() | {"layer": SparseMLA(spec()), "cache": PagedCache("v32-fp8", 600, 64)}
    return given | {"positions": ints(TOKENS, TOPK)}


def own_index() -> Given:
    given = given_positions() | {"index_cache": PagedCache("index-fp8", 600, 64), "index.q": zeros(TOKENS, 8, 128)}
    del given["positions"]
    return given | {"index.weights": zeros(TOKENS, 8, dtype=torch.float32), "index.keys": zeros(TOKENS, 128)}


def pooled_plan(tokens: int = TOKENS, state_page: int = 4) -> Plan:
    limits = Limits(16, 16, 1024, 64, {"state4": state_page})
    pools = {"state4": PagePool(600, state_page)}
    planner = Planner(spec(kpool=4), limits, mode="mixed")
    return planner.plan(Batch.build([1] * tokens, [700] * tokens, PagePool(600, 64), other_pools=pools))


def pooled_index() -> Given:
    state = PagedCache(compressor_state(dim=128, overlapping=False), 600, 4)
    given = own_index() | {"layer": SparseMLA(spec(kpool=4)), "plan": pooled_plan()}
    given |= {"index_cache": PagedCache("index-fp8", 600, 16), "index_state": state}
    return given | {"index.gates": zeros(TOKENS, 128), "index.gate_bias": zeros(4, 128)}


def run_layer(given: Given) -> Any:
    given = dict(given)
    inputs = {name.removeprefix("index."): given.pop(name) for name in list(given) if name.startswith("index.")}
    caches = Caches(given.pop("cache"), given.pop("index_cache", None), given.pop("index_state", None))
    if inputs:
        given["index"] = IndexInputs(**inputs)
    return given.pop("layer")(given.pop("q"), given.pop("kv"), caches, given.pop("plan"), **given)


def out_of(given: Given) -> Tensor:
    return zeros(*given["q"].shape[:2], 512)


def with_layer(**options: Any) -> Change:
    return lambda given: given | {"layer": SparseMLA(spec(), **options)}


BOTH: dict[str, Change] = {
    "nothing": lambda given: given,
    "another layer": lambda given: given | {"layer": SparseMLA(spec())},
    "another scale": lambda given: given | {"layer": SparseMLA(spec(scale=0.3))},
    "another spec": lambda given: given | {"layer": SparseMLA(spec(topk=64))},
    "invariant": with_layer(batch_invariant=True),
    "shard": with_layer(shard=Shard(2, 1)),
    "backend": with_layer(backend="hopper"),
    "no backend": with_layer(backend="magic"),
    "backend that cannot be hashed": with_layer(backend=[]),
    "fp16": in_place("q", Tensor.half),
    "query with gaps": in_place("q", widened),
    "query 2 bytes off": in_place("q", lambda q: shifted(q, 1)),
    "query with a gradient": in_place("q", lambda q: q.clone().requires_grad_()),
    "query as a pair": in_place("q", lambda q: (q[..., :512], q[..., 512:])),
    "no query": added(q=None),
    "no rows": added(kv=None),
    "rows float32": in_place("kv", Tensor.float),
    "rows with gaps": in_place("kv", widened),
    "rows turned": in_place("kv", lambda kv: kv.t().contiguous().t()),
    "rows 2 bytes off": in_place("kv", lambda kv: shifted(kv, 1)),
    "rows with a gradient": in_place("kv", lambda kv: kv.clone().requires_grad_()),
    "rows as a pair": in_place("kv", lambda kv: (kv[:, :512], kv[:, 512:])),
    "rows as a wrong pair": in_place("kv", lambda kv: (kv[:, :500], kv[:, 500:])),
    "bf16 cache": added(cache=lambda: PagedCache("v32-bf16", 600, 64)),
    "pages": added(cache=lambda: PagedCache("v32-fp8", 700, 64)),
    "page size": added(cache=lambda: PagedCache("v32-fp8", 600, 32)),
    "page size of the plan": lambda given: given | {"plan": Step(page_size=32).plan},
    "no cache": added(cache=None),
    "plan of more tokens": lambda given: given | {"plan": Step(4).plan},
    "plan of no tokens": lambda given: given | {"plan": Step(0).plan},
    "sink": added(sink=lambda: torch.zeros(16)),
    "sink of one number": added(sink=lambda: torch.zeros(1).expand(16)),
    "sink of a wrong length": added(sink=lambda: torch.zeros(15)),
    "query scale": added(q_scale=0.5),
    "query scale in memory": added(q_scale=lambda: torch.tensor(0.5)),
    "a negative query scale": added(q_scale=-0.5),
    "given output": lambda given: given | {"out": out_of(given)},
    "given output with gaps": lambda given: given | {"out": widened(out_of(given))},
    "output in the query": lambda given: given | {"out": given["q"][..., :512]},
    "output with a gradient": lambda given: given | {"out": out_of(given).requires_grad_()},
}
POSITIONS: dict[str, Change] = BOTH | {
    "positions with gaps": in_place("positions", widened),
    "positions turned": in_place("positions", lambda positions: positions.t().contiguous().t()),
    "positions int64": in_place("positions", Tensor.long),
    "positions of another width": in_place("positions", lambda positions: positions[:, :64]),
    "positions and index": lambda given: given | own_index(),
    "index": lambda given: {name: value for name, value in (given | own_index()).items() if name != "positions"},
    "unused index cache": added(index_cache=lambda: PagedCache("index-fp8", 600, 64)),
    "many heads": lambda given: given | rows_of(heads=64) | {"layer": SparseMLA(spec(heads=64))},
}
INDEX: dict[str, Change] = BOTH | {
    "no keys": added(**{"index.keys": None}),
    "keys with gaps": in_place("index.keys", widened),
    "keys float32": in_place("index.keys", Tensor.float),
    "keys with a gradient": in_place("index.keys", lambda keys: keys.clone().requires_grad_()),
    "index query in e4m3": in_place("index.q", lambda q: q.to(torch.float8_e4m3fn)),
    "index query with gaps": in_place("index.q", widened),
    "index query with a gradient": in_place("index.q", lambda q: q.clone().requires_grad_()),
    "other index heads": in_place("index.q", lambda q: q[:, :4]),
    "weights in bf16": in_place("index.weights", Tensor.bfloat16),
    "weights with gaps": in_place("index.weights", every_other),
    "recipe": added(**{"index.recipe": IndexRecipe(64)}),
    "recipe of the cache": added(index_cache=lambda: PagedCache("index-fp8", 600, 64, recipe=IndexRecipe(64))),
    "mxfp4 keys": added(index_cache=lambda: PagedCache("index-mxfp4", 600, 64)),
    "no index cache": added(index_cache=None),
    "index cache of other pages": added(index_cache=lambda: PagedCache("index-fp8", 600, 32)),
    "small workspace": with_layer(index_workspace_bytes=5000),
    "layer that shares a selection": lambda given: given | {"layer": SparseMLA(spec(reuse_topk=True))},
}


@pytest.mark.parametrize("name", POSITIONS)
def test_given_positions(pretended: Pretended, name: str) -> None:
    base = given_positions()
    compare(pretended, run_layer, base, POSITIONS[name](dict(base)))


@pytest.mark.parametrize("name", INDEX)
def test_own_index(pretended: Pretended, name: str) -> None:
    base = own_index()
    compare(pretended, run_layer, base, INDEX[name](dict(base)))


POOLED: dict[str, Change] = {
    "nothing": lambda given: given,
    "no keys": added(**{"index.keys": None, "index.gates": None, "index.gate_bias": None}),
    "no gates": added(**{"index.gates": None}),
    "gates with gaps": in_place("index.gates", widened),
    "gates float32": in_place("index.gates", Tensor.float),
    "gates with a gradient": in_place("index.gates", lambda gates: gates.clone().requires_grad_()),
    "a narrow bias": in_place("index.gate_bias", lambda bias: bias[:3]),
    "no state": added(index_state=None),
    "state of other pages": added(index_state=lambda: PagedCache(compressor_state(dim=128, overlapping=False), 600, 8)),
    "more state": added(index_state=lambda: PagedCache(compressor_state(dim=128, overlapping=False), 700, 4)),
    "pages of tokens": added(index_cache=lambda: PagedCache("index-fp8", 600, 64)),
    "recipe": added(
        **{"index.recipe": IndexRecipe(0, hadamard=True)},
        index_cache=lambda: PagedCache("index-fp8", 600, 16, recipe=IndexRecipe(0, hadamard=True)),
    ),
    "plan of other state": lambda given: given | {"plan": pooled_plan(state_page=8)},
    "plan without groups": lambda given: given | {"plan": Step().plan},
    "keys of tokens": lambda given: given | {"layer": SparseMLA(spec())},
    "plain": lambda given: own_index() | {"plan": given["plan"]},
    "plain with gates": lambda given: own_index() | {"index.gates": given["index.gates"]},
    "given output": lambda given: given | {"out": out_of(given)},
}


@pytest.mark.parametrize("name", POOLED)
def test_pooled_index(pretended: Pretended, name: str) -> None:
    base = pooled_index()
    changed = POOLED[name](dict(base))
    pretended.launches()  # those of the planners
    compare(pretended, run_layer, base, changed)


def test_gates_are_refused_after_calls_without_them(pretended: Pretended) -> None:
    """A layer without pooled keys has remembered calls that differ in nothing else."""
    for _ in range(2):
        run_layer(own_index())
    with pytest.raises(ValueError, match=r"index\.gates must be None for a layer with kpool=1"):
        run_layer(own_index() | {"index.gates": zeros(TOKENS, 128)})


def without_plan(heads: int = 16, tokens: int = TOKENS) -> Given:
    given = {"layer": SparseMLA(spec(heads=heads)), "q": zeros(tokens, heads, 576), "positions": ints(tokens, TOPK)}
    table = {"request_ids": ints(tokens), "block_table": ints(2, 11)}
    return given | table | {"cache": PagedCache("v32-fp8", 600, 64)}


def run_attend_positions(given: Given) -> Any:
    given = dict(given)
    return given.pop("layer").attend_positions(**given)


ATTEND_POSITIONS: dict[str, Change] = {
    "nothing": lambda given: given,
    "many heads": lambda given: given | without_plan(64),
    "tokens": lambda given: given | without_plan(given["q"].shape[1], 40),
    "ids 4 bytes off": in_place("request_ids", lambda ids: shifted(ids, 1)),
    "ids with gaps": in_place("request_ids", every_other),
    "ids of another length": in_place("request_ids", lambda ids: ids[:2]),
    "wider table": added(block_table=lambda: ints(2, 12)),
    "table with gaps": in_place("block_table", widened),
    "table turned": in_place("block_table", lambda table: table.t().contiguous().t()),
    "sink": lambda given: given | {"sink": torch.zeros(given["q"].shape[1])},
    "given output": lambda given: given | {"out": out_of(given)},
    "page size": added(cache=lambda: PagedCache("v32-fp8", 600, 16)),
    "no cache": added(cache=lambda: zeros(600, 64, 656)),
}


@pytest.mark.parametrize("name", ATTEND_POSITIONS)
@pytest.mark.parametrize(("heads", "tokens"), [(16, TOKENS), (128, 30)])
def test_attend_positions(pretended: Pretended, name: str, heads: int, tokens: int) -> None:
    base = without_plan(heads, tokens)
    compare(pretended, run_attend_positions, base, ATTEND_POSITIONS[name](dict(base)))


def test_an_output_is_separate_from_all_that_a_step_reads(pretended: Pretended) -> None:
    """Signatures have no addresses, so that these outputs have the same one."""
    given = own_index()
    for _ in range(2):
        run_layer(given | {"out": out_of(given)})
        for name in ("kv", "index.keys", "index.weights"):
            room = out_of(given)
            inside = room.view(-1).view(given[name].dtype)[: given[name].numel()].view(given[name].shape)
            with pytest.raises(ValueError, match="out must be separate from all inputs and caches"):
                run_layer(given | {"out": room, name: inside})


@pytest.mark.parametrize("made", [own_index, given_positions])
def test_a_default_device_changes_nothing(pretended: Pretended, made: Callable[[], Given]) -> None:
    given = made()
    expected = outcome(pretended, run_layer, given)
    with torch.device("meta"):
        for _ in range(2):
            assert outcome(pretended, run_layer, given) == expected


MOST_CALLS = {"positions": 120, "index": 180, "attend_positions": 85}
"""Calls of functions that a remembered call may make, those of torch included. Each costs 0.1 us and more."""


def test_a_remembered_call_does_little(pretended: Pretended) -> None:
    doors = {"positions": (run_layer, given_positions()), "index": (run_layer, own_index())}
    doors["attend_positions"] = (run_attend_positions, without_plan())
    with torch.no_grad():
        found = {name: calls_of(*door) for name, door in doors.items()}
    assert {name: count for name, count in found.items() if count > MOST_CALLS[name]} == {}
    with torch.device("meta"), torch.no_grad():
        assert {name: calls_of(*door) for name, door in doors.items()} == found, "a default device costs nothing"


@pytest.fixture
def one() -> Iterator[Any]:
    """A group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_layers_over_ranks(pretended: Pretended, one: Any) -> None:
    """A group of one selects by itself, so the layer is told to do what several ranks do."""
    base = own_index()
    layer = SparseMLA(spec(), index_group=one)
    assert layer._over is None
    layer._over = OverRanks(one, None, "always")
    layer._kind = SparseMLA(spec(), index_workspace_bytes=1 << 27)._kind
    compare(pretended, run_layer, base, base | {"layer": layer})
    compare(pretended, run_layer, base | {"layer": layer}, base)
