"""How tokens and keys are divided over ranks, and what a group of one does: without other processes."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ranks_select
import torch
import torch.distributed as dist
from ranks_select import FP32, Case
from remembered import Pretended, indexing
from selecting import select
from torch import Tensor

from tamis import LayerSpec, SparseMLA
from tamis.cache.shard import Shard
from tamis.ops import index_topk, topk_positions
from tamis.ops.index import break_even, merge, operations, prepared, ranks, reference, sharing, triton_kernels
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.over_ranks import OverRanks
from tamis.ops.index.prepared import run_remembered
from tamis.ops.index.ranks import Ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def one() -> Iterator[Any]:
    """A group of one rank."""
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 9, 31, 32, 64, 100, 128, 133, 4096])
def test_every_token_has_one_row(tokens: int, size: int) -> None:
    deals = [sharing.deal(tokens, size, rank, CPU) for rank in range(size)]
    rows = sharing.rows_of(tokens, size)
    assert rows * 32 <= -(-tokens // size) * 33, "ranks have about as many rows"
    every = torch.full((size, rows), -1)
    for rank, one in enumerate(deals):
        real = torch.ones(rows, dtype=torch.int32) if one.real is None else one.real
        every[rank] = torch.where(real == 1, one.tokens, -1)
        assert (one.tokens[real == 0] == 0).all()
        assert torch.equal(one.place, deals[0].place)
    assert torch.equal(every.flatten()[deals[0].place], torch.arange(tokens))
    assert (every >= 0).sum() == tokens


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    ("tokens", "context"), [(4096, 4096), (4096, 8192), (4096, 131072), (1024, 16384), (2000, 2000), (2000, 65536)]
)
def test_ranks_see_as_many_keys(tokens: int, context: int, size: int) -> None:
    """The tokens of a prefill see one key more each. Whole rounds differ by less than a hundredth, and the rest by the
    rows that a rank has more."""
    lengths = torch.arange(context - tokens + 1, context + 1)
    seen = []
    for rank in range(size):
        own = sharing.deal(tokens, size, rank, CPU)
        counted = lengths[own.tokens] * (1 if own.real is None else own.real)
        seen.append(int(counted.sum()))
    assert max(seen) <= (1.01 if tokens % (8 * size) == 0 or context == tokens else 33 / 32) * sum(seen) / size


def test_neighbours_stay_together() -> None:
    own = sharing.deal(4096, 8, 3, CPU).tokens.view(-1, 8)
    assert torch.equal(own - own[:, :1], torch.arange(8).expand(64, 8))
    assert own[:4, 0].tolist() == [4096 - 32, 4096 - 104, 4096 - 160, 4096 - 232]
    assert sharing.block_of(32, 8) == 4, "all ranks have work"


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("backend", [reference, triton_kernels], ids=lambda b: b.__name__.split(".")[-1])
def test_parts_of_a_backend_make_its_whole(backend: Any, size: int) -> None:
    case = Case(29, layout=FP32)
    given = (case.cache, case.request_ids, case.table, case.lengths, ranks_select.K, 1 << 20, "reference")
    whole = select(backend, case.q, case.weights, *given)
    parts = []
    for rank in range(size):
        own = sharing.deal(29, size, rank, CPU)
        lengths = case.lengths[own.tokens] * (1 if own.real is None else own.real)
        rows = (case.cache, case.request_ids[own.tokens], case.table, lengths.int(), *given[4:])
        parts.append(select(backend, case.q[own.tokens], case.weights[own.tokens], *rows, batch=29))
        if own.real is not None:
            assert (parts[-1][own.real == 0] == -1).all(), "rows without a token see nothing"
    assert torch.equal(torch.cat(parts)[own.place], whole)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_part_is_a_part_of_its_batch(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the whole batch, by which an order of summation is chosen, and its rows without a token see nothing."""
    seen: list[IndexTopk] = []
    monkeypatch.setattr(sharing, "run_remembered", seen.append)
    case = Case(5)
    given = (case.q.to(torch.float8_e4m3fn), case.weights, case.cache, case.request_ids, case.table, case.lengths)
    sharing.select_part(IndexTopk(*given, 3, 1 << 20, 5, torch.empty(5, 3), None, "auto"), 3, rank)
    (part,) = seen
    tokens = [[3, 4], [1, 2], [None, 0]][rank]
    assert part.batch == 5
    assert part.out.shape == (2, 3)
    assert part.lengths.tolist() == [0 if t is None else int(case.lengths[t]) for t in tokens]
    assert torch.equal(part.q[1].float(), given[0][tokens[1]].float())
    assert part.request_ids[1] == case.request_ids[tokens[1]]


# --- keys -----------------------------------------------------------------------------------------------------------


LONG_RUNS = [Shard(2, 0, 2**30), Shard(2, 1, 2**30), Shard(2**20, 1, 2**20)]  # longer than int32 counts


@pytest.mark.parametrize("shard", [Shard(1, 0, 5), Shard(2, 1, 1), Shard(3, 0, 4), Shard(4, 3, 16), *LONG_RUNS])
def test_a_shard_counts_and_names_its_positions(shard: Shard) -> None:
    for length in (-2, 0, 1, 5, 16, 63, 64, 65, 200):
        own = [p for p in range(max(length, 0)) if p // shard.interleave % shard.ranks == shard.rank]
        count = shard.local_lengths(torch.tensor([length], dtype=torch.int32))
        assert max(int(count), 0) == len(own)
        local = torch.arange(len(own), dtype=torch.int32)
        assert shard.global_positions(local).tolist() == own
        assert count.dtype == torch.int32


@pytest.mark.parametrize("backend", [reference, triton_kernels], ids=lambda b: b.__name__.split(".")[-1])
@pytest.mark.parametrize("workspace", [1, 1 << 20])
def test_scores_come_with_their_positions(backend: Any, workspace: int) -> None:
    case = Case(9, layout=FP32)
    given = (case.q, case.weights, case.cache, case.request_ids, case.table, case.lengths, 20, workspace, "reference")
    scores = torch.full((9, 20), 7.0)
    found = select(backend, *given, scores=scores)
    wide = torch.empty(9, 96)
    reference.index_scores(IndexTopk(*given[:-1], 9, found, None, "reference").scoring(wide))
    expected = wide.gather(1, found.long().clamp_min(0)).masked_fill(found < 0, -torch.inf)
    torch.testing.assert_close(scores, expected, rtol=1e-6, atol=0)
    empty = (*given[:4], case.table[:, :0], torch.zeros_like(case.lengths), *given[6:])
    assert (select(backend, *empty, scores=scores) == -1).all()
    assert (scores == -torch.inf).all()


ODD = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, torch.inf, 3.4e38, -3.4e38]


def test_candidates_merge_to_the_selection_of_all() -> None:
    """Scores of a few values, so that most of them are equal; some candidates are absent."""
    torch.manual_seed(0)
    size, tokens, width, k = 3, 50, 60, 16
    scores = torch.tensor(ODD)[torch.randint(len(ODD), (tokens, size * width))]
    scores[torch.rand(scores.shape) < 0.1] = torch.nan
    lengths = torch.randint(0, size * width + 1, (tokens,), dtype=torch.int32)
    every = []
    for rank in range(size):
        shard = Shard(size, rank, 4)
        columns = torch.arange(width, dtype=torch.int32)
        own = scores[:, shard.global_positions(columns).long()].contiguous()
        found = topk_positions(own, shard.local_lengths(lengths), k)
        kept = own.gather(1, found.long().clamp_min(0)).masked_fill(found < 0, -torch.inf)
        every.append(merge.encode(kept, shard.global_positions(found), found < 0))
    out = torch.full((tokens, k), -7, dtype=torch.int32)
    merge.merge(torch.stack(every), out)
    assert torch.equal(out, topk_positions(scores, lengths, k))


# --- the rule -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "requests", "keys", "pays"),
    [
        (4096, 1, 8 << 10, True),
        (4096, 1, 64 << 10, True),
        (1024, 1, 16 << 10, True),
        (128, 128, 64 << 10, True),
        (32, 32, 128 << 10, True),
        (256, 128, 64 << 10, True),
        (1, 1, 128 << 10, False),
        (4096, 4, 1 << 10, False),
        (8, 8, 4 << 10, False),
        (0, 1, 64 << 10, False),
    ],
)
def test_where_sharing_pays_on_eight_gpus(tokens: int, requests: int, keys: int, pays: bool) -> None:
    assert break_even.sharing_pays(tokens, requests, keys, 64, 2048, 8, on_host=False) == pays


def test_the_rule_is_its_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 20 tokens with 100 keys, 10 are saved. 20 * 3 * 4 bytes take 240 * (0.5 / 1 + 2 / 2) = 360 seconds."""
    costs = break_even.Costs(product=8, read=2, latency=0, link=1, memory=2)
    for requests, heads, saved in (
        (20, 1, 10 * 100 * 2),  # reading
        (20, 64, 10 * 100 * 8),  # products
        (99, 16, 10 * 100 * 2),  # no more requests than tokens
        (4, 1, 2 * 100 * 2),
        (4, 32, 10 * 100 * 4),
    ):
        for latency, pays in ((saved - 361, True), (saved - 360, False)):
            monkeypatch.setattr(break_even, "DEVICE", costs._replace(latency=latency))
            assert break_even.sharing_pays(20, requests, 100, heads, 3, 2, on_host=False) == pays


# --- a group --------------------------------------------------------------------------------------------------------


def test_a_group_of_one_is_the_plain_call(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ranks, "gather", None)
    case = Case(20)
    expected = case.select()
    assert torch.equal(case.select(group=one, share="always"), expected)
    assert torch.equal(case.select(group=one, shard=Shard(1, 0, 4)), expected)
    assert torch.equal(case.select(shard=Shard(1, 0, 4)), expected)


def test_wrong_groups_and_options_are_refused(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(20)
    with pytest.raises(ValueError, match="group must be the ranks that hold the other shards, got None"):
        case.select(shard=Shard(2, 0))
    with pytest.raises(TypeError, match="group must be a ProcessGroup, got int"):
        case.select(group=3)
    with pytest.raises(TypeError, match="shard must be a Shard, got int"):
        case.select(group=one, shard=3)
    with pytest.raises(ValueError, match="shard must be that of rank 0 of 1, as in the group"):
        case.select(group=one, shard=Shard(2, 0))
    for options in ({}, {"group": one}):
        with pytest.raises(ValueError, match="share must be one of 'auto', 'always', got 'no'"):
            case.select(**options, share="no")
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    with pytest.raises(ValueError, match="group must be None while torch"):
        OverRanks(one, None, "auto").check(CPU)


def test_a_layer_names_its_own_arguments(one: Any) -> None:
    """Also without a group, so that a wrong option is not found only on the machine with several GPUs."""
    spec = LayerSpec(4, topk=8, index_heads=2, index_dim=32)
    with pytest.raises(TypeError, match=r"^index_group must be a ProcessGroup, got str"):
        SparseMLA(spec, index_group="world")  # type: ignore[arg-type]
    for group in (None, one):
        with pytest.raises(ValueError, match=r"^index_share must be one of 'auto', 'always', got 'never'"):
            SparseMLA(spec, index_group=group, index_share="never")
    for shard in (0, ()):
        with pytest.raises(TypeError, match=r"^shard must be a Shard, got"):
            SparseMLA(spec, shard=shard)  # type: ignore[arg-type]


def test_equal_calls_agree_whatever_they_are_named(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of layouts are free: they may be longer than a message, or have its separator in them."""
    sizes = (("cache", "a; b"), ("layout", "x" * 2000), ("k", 3))
    Ranks(one).agree(sizes)
    other = (*sizes[:2], ("k", 4))
    found, told = Ranks(one), []
    gather = found.gather
    monkeypatch.setattr(found, "gather", lambda mine: told.append(mine) or gather(mine))
    found.agree(other)
    monkeypatch.setattr(found, "gather", lambda mine: torch.stack([told[0]]))
    with pytest.raises(ValueError, match="a call over ranks must be the same on all"):
        found.agree(sizes)


def test_a_group_must_carry_the_tensors(one: Any) -> None:
    found = Ranks(one)
    found.check_device(CUDA)  # gloo carries both
    found._carried = "cuda:nccl"
    with pytest.raises(ValueError, match="group must be one that carries tensors on cpu, got cuda:nccl"):
        found.check_device(CPU)


def test_when_ranks_exchange_messages(one: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host always, on a device once for each size, and never while a graph is captured."""
    assert Ranks.of(one) is Ranks.of(one)
    found, sizes = Ranks(one), (("k", 3),)
    with monkeypatch.context() as capture:
        capture.setattr(ranks, "is_capturing", lambda device: True)
        capture.setattr(found, "gather", None)
        assert not found.must_agree(CUDA, sizes)
        with pytest.raises(ValueError, match="too bad"):
            found.agree(None, ValueError("too bad"))
    monkeypatch.setattr(ranks, "is_capturing", lambda device: False)
    assert found.must_agree(CUDA, sizes)
    found.agree(sizes)
    assert not found.must_agree(CUDA, sizes)
    assert found.must_agree(CPU, sizes)
    assert found.must_agree(CUDA, (("k", 4),))
    monkeypatch.setattr(ranks, "MOST_AGREED", 1)
    found.agree((("k", 4),))
    assert found.must_agree(CUDA, sizes)


def test_a_group_may_end_before_its_calls_are_forgotten(one: Any) -> None:
    held = len(ranks._KNOWN)
    mine = dist.new_group([0])
    Ranks.of(mine)
    assert len(ranks._KNOWN) == held + 1
    dist.destroy_process_group(mine)
    del mine
    assert len(ranks._KNOWN) == held


def test_what_a_whole_call_takes_of_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """4096 x 2048 positions travel at once, and with the own rows' scores all stays within the workspace."""
    workspace = 256 << 20
    meta: dict[str, Any] = {"device": "meta"}
    q, weights = torch.empty(4096, 64, 128, dtype=torch.float8_e4m3fn, **meta), torch.empty(4096, 64, **meta)
    call = SimpleNamespace(q=q, weights=weights, k=2048, workspace_bytes=workspace)
    for shard in (None, Shard(8, 0)):
        over = SimpleNamespace(ranks=SimpleNamespace(size=8), shard=shard)
        step, spent = OverRanks._step(over, call)
        assert min(step, 4096) * spent <= workspace // 2
        assert shard is not None or step >= 4096
        assert step % 128 == 0 or shard is not None
    assert sharing.shared_step(0, 8) == 8, "every rank has a token, whatever the workspace"


@pytest.mark.parametrize("workspace", [1, 100_000, 1 << 20])
@pytest.mark.parametrize("shard", [None, Shard(8, 0)])
def test_scores_get_what_an_exchange_leaves_of_the_workspace(
    shard: Shard | None, workspace: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, parts = Case(300), []
    where = (case.cache, case.request_ids, case.table, case.lengths)
    out = torch.empty(300, 64, dtype=torch.int32)
    call = IndexTopk(case.q, case.weights, *where, 64, workspace, 300, out, None, "reference")
    over: Any = object.__new__(OverRanks)
    over.shard, over.share = shard, "always"
    over.ranks = SimpleNamespace(size=8, rank=0, must_agree=lambda *given: False)
    monkeypatch.setattr(OverRanks, "_own", lambda self, part: parts.append(part))
    monkeypatch.setattr(OverRanks, "_place", lambda self, every, part: None)
    over.ranks.gather = lambda mine: out
    over.run(call)
    _, spent = over._step(call)
    assert sum(len(part.q) for part in parts) == 300
    for part in parts:
        assert part.workspace_bytes >= 1
        assert part.workspace_bytes == 1 or len(part.q) * spent + part.workspace_bytes <= workspace
    assert workspace == 1 or parts[0].workspace_bytes > 1


def test_parts_are_remembered(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    given = indexing(4)
    fields = [given[n] for n in ("q", "weights", "cache", "request_ids", "block_table", "lengths", "k")]
    call = IndexTopk(*fields, 1 << 28, 32, torch.empty(4, 64, dtype=torch.int32), None, "auto")
    run_remembered(call)
    first = pretended.launches()
    monkeypatch.setattr(prepared, "index_topk", None)
    run_remembered(call)
    assert pretended.launches() == first
    for other in (call._replace(batch=4), call._replace(scores=torch.empty(4, 64))):
        with pytest.raises(TypeError, match="not callable"):
            run_remembered(other)  # it may be summed in another order, or must give scores too


def test_a_call_for_scores_is_not_prepared(pretended: Pretended) -> None:
    """What is prepared launches the scores and the selection alone."""
    given = indexing(4)
    fields = [given[n] for n in ("q", "weights", "cache", "request_ids", "block_table", "lengths", "k")]
    call = IndexTopk(*fields, 1 << 28, 32, torch.empty(4, 64, dtype=torch.int32), None, "auto")
    assert operations.index_topk.prepared(call) is not None
    assert operations.index_topk.prepared(call._replace(scores=torch.empty(4, 64))) is None


def test_deals_are_remembered_unless_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "is_capturing", lambda device: True)
    captured = sharing._known_deal(77, 3, 1, CPU)
    assert sharing._known_deal(77, 3, 1, CPU) is not captured
    monkeypatch.undo()
    usual: Tensor = sharing._known_deal(77, 3, 1, CPU).tokens
    assert sharing._known_deal(77, 3, 1, CPU).tokens is usual
    monkeypatch.setattr(sharing, "is_capturing", lambda device: True)
    assert sharing._known_deal(77, 3, 1, CPU).tokens is usual


def test_the_public_function_takes_part_in_a_group_by_name(one: Any) -> None:
    case = Case(6)
    with pytest.raises(TypeError, match="positional"):
        index_topk(case.q, case.weights, case.cache, case.request_ids, case.table, case.lengths, 3, one)
