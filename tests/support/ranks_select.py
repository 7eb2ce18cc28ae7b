"""What the ranks of `tests/ops/index/test_ranks.py` do: selections together, and the same alone."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tamis.cache.layout import Layout, index_fp8, rows
from tamis.cache.paged import PagedCache
from tamis.cache.pool import PagePool
from tamis.cache.shard import Shard
from tamis.ops import index_topk, write_kv
from tamis.ops.index import sharing
from tamis.ops.index.ranks import Ranks

DIM, HEADS, PAGE, PAGES, K = 32, 4, 8, 64, 12
FP32 = rows(torch.float32, latent=DIM, rope=0)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Case:
    """Requests with cached keys, and tokens of them. All ranks make the same."""

    def __init__(self, tokens: int, contexts: tuple[int, ...] = (90, 70), *, layout: Layout | None = None) -> None:
        torch.manual_seed(5)
        self.layout, self.contexts = layout or index_fp8(dim=DIM), contexts
        # Rounded keys and queries have many equal scores.
        self.keys = [torch.randn(context, DIM).mul(2).round() for context in contexts]
        self.q, self.weights = torch.randn(tokens, HEADS, DIM).round(), torch.randn(tokens, HEADS).round()
        self.request_ids = (torch.arange(tokens) * len(contexts) // max(tokens, 1)).int()
        ends = torch.tensor(contexts)[self.request_ids.long()]
        self.lengths = (ends - torch.arange(tokens).flip(0) % 40).int()
        self.lengths[5::9] = 0
        self.lengths[7::11] = -3
        self.cache, self.table = self.cached(Shard())

    def cached(self, shard: Shard) -> tuple[PagedCache, Tensor]:
        """The keys of a rank."""
        cache, pool = PagedCache(self.layout, PAGES, PAGE), PagePool(PAGES, PAGE, seed=shard.rank)
        for request, keys in enumerate(self.keys):
            place = torch.arange(len(keys))
            own = keys[place // shard.interleave % shard.ranks == shard.rank]
            pool.extend(request, len(own))
            write_kv(own, cache, pool.slots(request, 0, len(own)))
        return cache, pool.block_table(list(range(len(self.keys))))

    def select(self, k: int = K, **options: Any) -> Tensor:
        """The selection, alone unless options say otherwise."""
        given = {"cache": self.cache, "block_table": self.table, "q": self.q} | options
        names = {"weights": self.weights, "request_ids": self.request_ids, "lengths": self.lengths}
        return index_topk(**{**names, **given}, k=k)


def shared() -> dict[str, bool]:
    """Whether selections of shared tokens equal those of one rank, by case."""
    found, world = {}, dist.group.WORLD
    for tokens in (0, 1, 3, 8, 37, 64, 133):
        case = Case(tokens)
        expected = case.select()
        found[f"{tokens} tokens"] = torch.equal(case.select(group=world, share="always"), expected)
        found[f"{tokens} tokens by the rule"] = torch.equal(case.select(group=world), expected)
    case = Case(133, layout=FP32)
    for workspace in (1, 3000, 20_000):
        expected = case.select(workspace_bytes=workspace)
        options = {"workspace_bytes": workspace, "group": world, "share": "always"}
        found[f"workspace of {workspace}"] = torch.equal(case.select(**options), expected)
    buffer = torch.full((140, K), -7, dtype=torch.int32)
    case.select(group=world, share="always", out=buffer[:133])
    found["given output"] = torch.equal(buffer[:133], case.select()) and bool((buffer[133:] == -7).all())
    return found


def sharded() -> dict[str, bool]:
    """Whether selections from divided keys equal those from all keys, by case."""
    found, world = {}, dist.group.WORLD
    size, rank = world.size(), world.rank()
    for interleave in (1, 4, 16, 1000):
        for name, layout in (("fp32", FP32), ("fp8", index_fp8(dim=DIM))):
            case, shard = Case(37, (90, 70, 3), layout=layout), Shard(size, rank, interleave)
            cache, table = case.cached(shard)
            for k in (1, K, 200):
                options = {"cache": cache, "block_table": table, "group": world, "shard": shard}
                alike = torch.equal(case.select(k, **options), case.select(k))
                alike &= torch.equal(case.select(k, **options, workspace_bytes=20_000), case.select(k))
                found[f"{name} in runs of {interleave}, k={k}"] = alike
    return found


def odd_keys() -> dict[str, bool]:
    """As `sharded`, with keys that score NaN, infinity, -0.0 and the same."""
    found, world = {}, dist.group.WORLD
    shard = Shard(world.size(), world.rank(), 3)
    for name, value in {"nan": torch.nan, "inf": torch.inf, "zero": 0.0, "one": 1.0}.items():
        case = Case(20, (90,), layout=FP32)
        case.keys[0][::3] = value
        case.keys[0][1::7] = -value
        case.weights[::2] = -0.0 if name == "zero" else -1.0
        case.cache, case.table = case.cached(Shard())
        cache, table = case.cached(shard)
        found[name] = torch.equal(case.select(cache=cache, block_table=table, group=world, shard=shard), case.select())
    return found


def failures() -> dict[str, tuple[str, bool]]:
    """What is raised on this rank if another one fails, and whether its output is as it was."""
    world, found = dist.group.WORLD, {}
    last = world.rank() == world.size() - 1
    case = Case(37)
    shard = Shard(world.size(), world.rank(), 4)
    cache, table = case.cached(shard)

    def attempt(name: str, usual: dict[str, Any] | None = None, **wrong: Any) -> None:
        out = torch.full((37, K), -7, dtype=torch.int32)
        options = {"group": world, "share": "always", "out": out} | (usual or {}) | (wrong if last else {})
        try:
            case.select(**options)
            told = "nothing"
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
        found[name] = (told, bool((out == -7).all()))

    attempt("wrong shape", weights=case.weights[:-1])
    attempt("no tensor", q=None)
    attempt("no option", share="sometimes")
    attempt("other shard", shard=Shard(8, 7))
    attempt("other sizes", k=K - 1, out=None)
    attempt("lengths past the table", lengths=case.lengths + 1000)
    attempt("other lengths", lengths=case.lengths - 1)
    few = {"workspace_bytes": 20_000}  # two exchanges and more
    for name, function, call, options in (
        ("while selecting", "select_part", 1, {}),
        ("while selecting another part", "select_part", 2, few),
        ("while placing a part", "place_parts", 1, few),
    ):
        usual = getattr(sharing, function)
        if last:
            setattr(sharing, function, _breaking(usual, call))
        attempt(name, options)
        setattr(sharing, function, usual)
    attempt("afterwards")
    told, unwritten = found["afterwards"]
    found["afterwards"] = (told, not unwritten)
    by_shard = {"cache": cache, "block_table": table, "shard": shard, "group": world}
    try:
        case.select(**by_shard | ({"lengths": case.lengths.long()} if last else {}))
    except Exception as error:
        found["divided keys"] = (f"{type(error).__name__}: {error}", True)
    return found


def _breaking(function: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The same function, but for one of its calls, counted from 1."""
    calls = 0

    def broken(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise MemoryError("no room for scores")
        return function(*given)

    return broken


def messages() -> dict[str, int]:
    """How often ranks exchange something, by case."""
    world, found, usual = dist.group.WORLD, {}, Ranks.gather
    count = 0

    def counted(self: Ranks, mine: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return usual(self, mine)

    Ranks.gather = counted
    for name, tokens, options in (("shared", 64, {"share": "always"}), ("by the rule", 1, {})):
        count = 0
        Case(tokens).select(group=world, **options)
        found[name] = count
    Ranks.gather = usual
    return found


def everything() -> dict[str, Any]:
    """All of these, in the order in which every rank runs them."""
    steps: tuple[Callable[[], Any], ...] = (shared, sharded, odd_keys, failures, messages)
    return {step.__name__: step() for step in steps}
