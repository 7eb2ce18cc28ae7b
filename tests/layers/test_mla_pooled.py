"""A layer with pooled index keys (GLM-5.3-Flash) against float64, over steps of a served batch."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import bounds
import pytest
import torch
from bounds import relative_error
from seeds import seed_of
from torch import Tensor

from tamis import Batch, Caches, IndexRecipe, LayerSpec, Limits, PagedCache, PagePool, Planner, Shard, SparseMLA
from tamis.cache.layout import Layout, compressor_state, index_fp8, rows
from tamis.lab.testing.oracle import hadamard_matrix
from tamis.layers.mla import LayerOutput
from tamis.ops import IndexInputs

PAGE, STATE_PAGE, LENGTH, DIM = 16, 4, 96, 16
FP32, FP8 = rows(torch.float32, latent=DIM, rope=0), index_fp8(dim=DIM)


@dataclass
class Token:
    """What a layer made of one token."""

    out: Tensor
    positions: list[int]


class Server:
    """A layer, its caches and pools, and requests whose tokens are known in advance."""

    def __init__(self, keys: Layout = FP32, kpool: int = 4, device: torch.device | str = "cpu") -> None:
        self.spec = LayerSpec(2, 32, 0, 32, 0.2, topk=16, index_heads=4, index_dim=DIM, kpool=kpool)
        limits = Limits(64, 4, LENGTH, PAGE, {f"state{kpool}": STATE_PAGE})
        self.planner = Planner(self.spec, limits, device, layout=rows(torch.float32, latent=32, rope=0))
        self.layer, self.device = SparseMLA(self.spec), device
        self.recipe = IndexRecipe(0, hadamard=keys is FP8)
        self.pool, self.state_pool = PagePool(24, PAGE, seed=seed_of(2)), PagePool(96, STATE_PAGE, seed=seed_of(3))
        self.caches = Caches(
            PagedCache(rows(torch.float32, latent=32, rope=0), 24, PAGE, device),
            PagedCache(keys, 24, PAGE // kpool, device, recipe=self.recipe),
            PagedCache(compressor_state(dim=DIM, overlapping=False), 96, STATE_PAGE, device),
        )
        assert self.caches.index_state is not None
        self.caches.index_state.storage.fill_(torch.nan)
        self.bias = torch.randn(kpool, DIM)
        self.inputs: dict[str, dict[str, Tensor]] = {}
        self.lengths: dict[str, int] = {}
        self.found: dict[str, list[Token]] = {}

    def tokens(self, name: str) -> dict[str, Tensor]:
        """All inputs of a request, the same in every call."""
        if name not in self.inputs:
            shapes = {"q": (2, 32), "kv": (32,), "index_q": (4, DIM), "weights": (4,), "keys": (DIM,), "gates": (DIM,)}
            self.inputs[name] = {part: torch.randn(LENGTH, *shape) for part, shape in shapes.items()}
        return self.inputs[name]

    def batch(self, *news: tuple[str, int]) -> Batch:
        names, queries = zip(*news, strict=True)
        ends = [self.lengths.get(name, 0) + new for name, new in news]
        others = {f"state{self.spec.kpool}": self.state_pool}
        return Batch.build(queries, ends, self.pool, requests=names, other_pools=others)

    def given(self, *news: tuple[str, int], pad: int = 0) -> tuple[Tensor, Tensor, IndexInputs]:
        """The step's queries, rows and index inputs, with zeros for padding."""
        parts: dict[str, Tensor] = {}
        for part in self.tokens(news[0][0]):
            found = [self.tokens(n)[part][self.lengths.get(n, 0) : self.lengths.get(n, 0) + new] for n, new in news]
            found.append(torch.zeros(pad, *found[0].shape[1:]))
            parts[part] = torch.cat(found)
        if self.recipe.hadamard:
            parts["index_q"] = parts["index_q"] @ hadamard_matrix(DIM).float()
        parts = {part: value.to(self.device) for part, value in parts.items()}
        index = (
            parts["index_q"],
            parts["weights"],
            parts["keys"],
            self.recipe,
            parts["gates"],
            self.bias.to(self.device),
        )
        return parts["q"], parts["kv"], IndexInputs(*index)

    def step(self, *news: tuple[str, int], pad: int = 0) -> LayerOutput:
        """Run some new tokens of some requests, and keep what the layer made of them."""
        q, kv, index = self.given(*news, pad=pad)
        batch = self.batch(*news)
        plan = self.planner.plan(replace(batch, padded_tokens=sum(new for _, new in news) + pad) if pad else batch)
        result = self.layer(q, kv, self.caches, plan, index=index)
        at = 0
        for name, new in news:
            held = self.found.setdefault(name, [])
            del held[self.lengths.get(name, 0) :]
            for token in range(at, at + new):
                held.append(Token(result.out[token].cpu(), result.positions[token].tolist()))
            self.lengths[name], at = self.lengths.get(name, 0) + new, at + new
        return result

    def leave(self, name: str) -> None:
        """A request ends; its pages go to others."""
        self.pool.release(name)
        self.state_pool.release(name)
        del self.lengths[name]

    def pooled(self, name: str) -> tuple[Tensor, Tensor]:
        """The keys of whole groups in float64, and how far float32 may be from each value."""
        size, given = self.spec.kpool, self.tokens(name)
        keys, errors = [], []
        for group in range(self.lengths[name] // size):
            own = slice(group * size, group * size + size)
            mean, error = bounds.softmax_mean((given["gates"][own] + self.bias).double(), given["keys"][own].double())
            keys.append(mean)
            errors.append(error)
        return torch.stack(keys), torch.stack(errors)

    def stored(self, name: str) -> Tensor:
        """The keys of whole groups as they are in the cache."""
        held, groups = self.caches.index, self.lengths[name] // self.spec.kpool
        assert held is not None
        table = self.pool.block_table([name])[0].long()
        slots = [int(table[g // held.page_size]) * held.page_size + g % held.page_size for g in range(groups)]
        found = held.read(torch.tensor(slots, device=held.device)).cpu().double()
        return found @ hadamard_matrix(DIM) if self.recipe.hadamard else found

    def check(self, name: str) -> None:
        """Stored keys are the pooled ones, selections the best groups by them and the tail, outputs attention to it."""
        size, count, given = self.spec.kpool, self.lengths[name], self.tokens(name)
        (expected, error), keys = self.pooled(name), self.stored(name)
        if self.recipe.hadamard:
            assert relative_error(keys, expected) < 2**-4  # e4m3 with a power of two as scale, and two bf16 roundings
        else:
            bounds.agree(keys, expected, error)
        scores = torch.einsum("thd,gd->thg", given["index_q"][:count].double(), keys).relu()
        scores = (given["weights"][:count].double().unsqueeze(2) * scores).sum(1)
        assert len(self.found[name]) == count
        for position, token in enumerate(self.found[name]):
            whole, taken = (position + 1) // size, [p for p in token.positions if p >= 0]
            assert token.positions == taken + [-1] * (16 + size - 1 - len(taken))
            tail = list(range(whole * size, position + 1))
            groups = sorted({p // size for p in taken[: len(taken) - len(tail)]})
            assert taken == [g * size + inside for g in groups for inside in range(size)] + tail
            assert len(groups) == min(whole, 16 // size)
            seen, own = scores[position, :whole], torch.zeros(whole, dtype=torch.bool)
            own[groups] = True
            if not own.all():
                # Float32 may rank two almost equal scores either way.
                assert seen[~own].max() - seen[own].min() < 1e-5 * seen.abs().max()
            exact = bounds.attention(given["q"][position], given["kv"][taken], scale=0.2, value_dim=32)
            bounds.agree(token.out, exact.out, exact.out_error)


def serve(server: Server) -> None:
    """Continuous batching: prompts in chunks of any size, decodes between them, padding, a request that leaves."""
    server.step(("a", 13))
    server.step(("a", 17), ("b", 2))
    server.step(("a", 1), ("b", 1), ("c", 23), pad=3)
    for _ in range(9):
        server.step(("a", 1), ("b", 1), ("c", 1))
    server.check("a")
    server.leave("a")
    server.step(("b", 1), ("d", 41))
    server.step(("b", 3), ("d", 2), ("c", 2))
    for name in "bcd":
        server.check(name)


@pytest.mark.parametrize("keys", [FP32, FP8], ids=["fp32", "fp8"])
@pytest.mark.parametrize("kpool", [4, 16, 2])
def test_continuous_batching(keys: Layout, kpool: int) -> None:
    serve(Server(keys, kpool))


@pytest.mark.gpu
@pytest.mark.parametrize("keys", [FP32, FP8], ids=["fp32", "fp8"])
def test_continuous_batching_on_a_gpu(keys: Layout) -> None:
    serve(Server(keys, device="cuda"))


def test_rejected_drafts_are_overwritten() -> None:
    server = Server()
    server.step(("a", 29))
    right = {part: value.clone() for part, value in server.tokens("a").items()}
    for value in server.tokens("a").values():
        value[30:36] = torch.randn_like(value[30:36])
    server.step(("a", 5))
    server.inputs["a"], server.lengths["a"] = right, 30  # one draft of five was right
    server.step(("a", 40))
    server.check("a")


def test_halves_of_a_call_and_layers_that_share_its_selection() -> None:
    whole, halves = Server(), Server()
    halves.bias, halves.inputs = whole.bias, whole.inputs
    expected = whole.step(("a", 50))
    q, kv, index = halves.given(("a", 50))
    plan = halves.planner.plan(halves.batch(("a", 50)))
    halves.layer.write(kv, halves.caches, plan, index)
    positions = halves.layer.select(index, halves.caches, plan)
    assert torch.equal(positions, expected.positions)
    shared = SparseMLA(replace(halves.spec, reuse_topk=True))
    found = shared(q, None, halves.caches, plan, positions=positions)
    assert torch.equal(found.out, expected.out)
    with pytest.raises(ValueError, match=r"\[rows=50, 19\], got \[50, 16\]"):
        shared(q, None, halves.caches, plan, positions=positions[:, :16].contiguous())
    written = replace(index, keys=None, gates=None, gate_bias=None)
    assert torch.equal(halves.layer(q, None, halves.caches, plan, index=written).out, expected.out)


def test_a_step_without_requests_writes_nothing() -> None:
    server = Server()
    server.step(("a", 20))
    none = torch.zeros(0, dtype=torch.int32)
    table = torch.zeros(0, 1, dtype=torch.int32)
    pages = type(server.batch(("a", 0)).pages)(table, none.long())
    batch = Batch(torch.zeros(1, dtype=torch.int32), none, pages, padded_tokens=2, other_pages={"state4": pages})
    q, kv, index = server.given(("a", 2))
    assert server.caches.index is not None
    before = server.caches.index.storage.clone()
    plan = server.planner.plan(batch)
    result = server.layer(q, kv, server.caches, plan, index=index)
    server.layer.write(kv, server.caches, plan, index)
    assert not result.out.any()
    assert result.positions.eq(-1).all()
    assert result.positions.shape == (2, 19)
    assert torch.equal(server.caches.index.storage, before)


REFUSED: dict[str, tuple[str, Callable[[Server, dict[str, Any]], Any]]] = {
    "gates missing": ("index.gates must be given like", lambda s, a: a | {"index": replace(a["index"], gates=None)}),
    "bias missing": ("gate_bias must be given", lambda s, a: a | {"index": replace(a["index"], gate_bias=None)}),
    "keys missing": ("index.gates must be None like", lambda s, a: a | {"index": replace(a["index"], keys=None)}),
    "a narrow bias": (
        r"index.gate_bias must be",
        lambda s, a: a | {"index": replace(a["index"], gate_bias=s.bias[:3])},
    ),
    "gates of another width": (
        "index.gates must be",
        lambda s, a: a | {"index": replace(a["index"], gates=a["index"].gates[:, :8])},
    ),
    "no state": ("index_state must be a cache", lambda s, a: a | {"caches": replace(s.caches, index_state=None)}),
    "state pages of another size": (
        "index_state must be of the plan's page size 4",
        lambda s, a: (
            a
            | {"caches": replace(s.caches, index_state=PagedCache(compressor_state(dim=DIM, overlapping=False), 4, 8))}
        ),
    ),
    "state rows of another width": (
        "index_state must be of float32 rows 32 wide",
        lambda s, a: (
            a | {"caches": replace(s.caches, index_state=PagedCache(compressor_state(dim=8, overlapping=False), 4, 4))}
        ),
    ),
    "keys in pages of tokens": (
        "caches.index must be of the plan's page size 16 / kpool=4",
        lambda s, a: a | {"caches": replace(s.caches, index=PagedCache(FP32, 24, PAGE))},
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_arguments_are_refused_before_anything_is_written(name: str) -> None:
    message, change = REFUSED[name]
    server = Server()
    q, kv, index = server.given(("a", 20))
    plan = server.planner.plan(server.batch(("a", 20)))
    given = change(server, {"caches": server.caches, "index": index})
    with pytest.raises((ValueError, TypeError), match=message):
        server.layer(q, kv, given["caches"], plan, index=given["index"])
    assert not server.caches.latent.storage.any()
    assert server.caches.index_state is not None
    assert server.caches.index_state.storage.isnan().all()


def test_wrong_layers_and_plans_are_refused() -> None:
    server = Server()
    with pytest.raises(ValueError, match="shard must be of one rank"):
        SparseMLA(server.spec, shard=Shard(2, 0))
    with pytest.raises(ValueError, match="topk must be a multiple of kpool=4"):
        LayerSpec(2, 32, 0, 32, topk=18, kpool=4)
    with pytest.raises(ValueError, match="one with 'state4'"):
        Planner(server.spec, Limits(4, 1, 64))
    with pytest.raises(ValueError, match="page_size must be a multiple of kpool=4"):
        Planner(server.spec, Limits(4, 1, 64, 6, {"state4": 4}))
    with pytest.raises(ValueError, match="other_pages must be one with 'state4'"):
        server.planner.plan(Batch.build([2], [2], server.pool))
    plain = replace(server.spec, kpool=1)
    plan = Planner(plain, Limits(64, 4, LENGTH, PAGE), layout=rows(torch.float32, latent=32, rope=0)).plan(
        Batch.build([20], [20], PagePool(24, PAGE))
    )
    q, kv, index = server.given(("a", 20))
    with pytest.raises(ValueError, match=r"plan.groups must be of 4 tokens"):
        server.layer(q, kv, server.caches, plan, index=index)
    own = PagedCache(FP32, 24, PAGE, recipe=server.recipe)
    with pytest.raises(ValueError, match=r"index.gates must be None for a layer with kpool=1"):
        SparseMLA(plain)(q, kv, Caches(server.caches.latent, own), plan, index=index)
