"""Pools, batches, planners and recordings."""

from typing import Any

import torch
from torch import Tensor

from contract.calls import Call, require
from contract.draw import Draw
from tamis import Batch, LayerSpec, Limits, PagePool, Plan, Planner, Recording

Arguments = dict[str, Any]
SPEC = LayerSpec(4, 32, 8, 32, 0.2, topk=4)


def limits(draw: Draw) -> Call:
    arguments: Arguments = {
        "max_tokens": draw.size(1, 64),
        "max_requests": 4,
        "max_length": 64,
        "page_size": draw.pick([4, 64]),
        "other_page_sizes": draw.pick([{}, {"window": 8}]),
        "speculative_tokens": draw.size(0, 2),
        "parallel_drafting": False,
        "base_threshold": 1,
        "context_parallel": False,
        "uniform_decodes": draw.chance(0.5),
        "workspace_rows": draw.pick([None, 64]),
    }

    def check(found: Limits, before: Arguments, _: Arguments) -> None:
        require(all(getattr(found, n) == v for n, v in before.items()) and found.threshold >= 1, "other limits")

    return Call("Limits", Limits, arguments, check, optional=("workspace_rows",), lenient=("other_page_sizes",))


def pool_of(draw: Draw) -> tuple[PagePool, dict[str, int]]:
    """A pool that a few requests hold pages of, and how many tokens each."""
    pool = PagePool(30, draw.pick([2, 4]), seed=draw.size(0, 99))
    lengths = {name: draw.size(0, 9) for name in ("a", "b")}
    for name, length in lengths.items():
        pool.extend(name, length)
    return pool, lengths


def page_pool(draw: Draw) -> Call:
    def check(found: PagePool, before: Arguments, _: Arguments) -> None:
        require(found.free_pages == before["pages"] - 1 and found.page_size == before["page_size"], "another pool")

    arguments = {"pages": draw.size(2, 20), "page_size": draw.pick([1, 16]), "seed": draw.pick([None, 3])}
    return Call("PagePool", PagePool, arguments, check, optional=("seed",), sizes=("pages",))


def extend(draw: Draw) -> Call:
    pool, _ = pool_of(draw)

    def check(_: None, before: Arguments, after: Arguments) -> None:
        if not isinstance(before["request"], str):
            return  # a copy of an object is another name
        table = after["self"].block_table([before["request"]])
        require((table >= 0).sum() * pool.page_size >= before["length"], "too few pages")

    arguments = {"self": pool, "request": draw.pick(["a", "c"]), "length": draw.size(0, 20)}
    return Call("PagePool.extend", PagePool.extend, arguments, check, ("self",), lenient=("request",))


def slots(draw: Draw) -> Call:
    pool, lengths = pool_of(draw)
    name = draw.pick(["a", "b"])
    end = draw.size(0, lengths[name])

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        table, size = before["self"].block_table([before["request"]])[0].tolist(), before["self"].page_size
        wanted = [table[p // size] * size + p % size for p in range(before["start"], before["end"])]
        require(before["start"] >= 0 and found.tolist() == wanted, f"slots {found.tolist()}, not {wanted}")

    arguments = {"self": pool, "request": name, "start": draw.size(0, end), "end": end}
    return Call("PagePool.slots", PagePool.slots, arguments, check, lenient=("request",))


def steps(draw: Draw) -> tuple[list[int], list[int]]:
    """New tokens and lengths of a few requests, decodes first."""
    decodes = [1] * draw.size(0, 2)
    new = decodes + [draw.size(2, 5) for _ in range(draw.size(0, 2))]
    return new, [n + draw.size(0, 9) for n in new]


def build(draw: Draw) -> Call:
    new, lengths = steps(draw)
    names = draw.pick([None, [f"request {n}" for n in range(len(new))]])
    arguments: Arguments = {
        "query_lengths": new,
        "lengths": lengths,
        "pool": PagePool(40, 4),
        "requests": names,
        "other_pools": draw.pick([None, {"window": PagePool(40, 2)}]),
    }

    def check(found: Batch, before: Arguments, after: Arguments) -> None:
        require(found.lengths.tolist() == before["lengths"], "lengths")
        require(found.query_starts.diff().tolist() == before["query_lengths"], "query starts")
        kept = [slot for slot in found.pages.slots.tolist() if slot >= 0]
        require(len(set(kept)) == len(kept) == sum(before["query_lengths"]), "slots that are not distinct")

    # Other lists of numbers may be a step as well.
    optional, lenient = ("requests", "other_pools"), ("requests", "other_pools", "query_lengths", "lengths")
    written = ("pool", "other_pools")
    return Call("Batch.build", Batch.build, arguments, check, written, optional=optional, lenient=lenient)


def parse(draw: Draw) -> Call:
    arguments = {"shape": draw.pick(["2q1s9_q5", "q3", "3q1s4"]), "pool": PagePool(40, 4)}

    def check(found: Batch, before: Arguments, _: Arguments) -> None:
        wanted = {"2q1s9_q5": [9, 9, 5], "q3": [3], "3q1s4": [4, 4, 4]}[before["shape"]]
        require(found.lengths.tolist() == wanted, "lengths")

    return Call("Batch.parse", Batch.parse, arguments, check, ("pool",))


def planner(draw: Draw) -> Call:
    arguments: Arguments = {
        "spec": SPEC,
        "limits": Limits(16, 4, 32, 4, workspace_rows=32),
        "device": "cpu",
        "layout": draw.pick(["v32-fp8", "v32-bf16"]),
        "mode": draw.pick(["auto", "mixed"]),
    }

    def check(found: Planner, before: Arguments, _: Arguments) -> None:
        require(found.limits == before["limits"], "other limits")

    sizes = ("limits.max_tokens", "limits.max_requests", "limits.max_length", "limits.workspace_rows")
    return Call("Planner", Planner, arguments, check, sizes=sizes, optional=("limits.workspace_rows",), free=True)


def plan(draw: Draw) -> Call:
    new, lengths = steps(draw)
    batch = Batch.build(new, lengths, PagePool(40, 4, seed=draw.size(0, 9)))
    if draw.chance(0.3):
        batch = Batch(batch.query_starts, batch.lengths, batch.pages, padded_tokens=sum(new) + 2)
    made = Planner(SPEC, Limits(24, 4, 32, 4, workspace_rows=32), layout="v32-fp8", mode="mixed")

    def check(found: Plan, before: Arguments, _: Arguments) -> None:
        given = before["batch"]
        new, lengths = given.query_starts.diff().tolist(), given.lengths.tolist()
        tokens = sum(new)
        rows = tokens if given.padded_tokens is None else given.padded_tokens
        require((found.requests, found.tokens, found.rows) == (len(new), tokens, rows), "sizes")
        ids = [r for r, count in enumerate(new) for _ in range(count)] + [0] * (rows - tokens)
        own = [length - n + i for n, length in zip(new, lengths, strict=True) for i in range(n)] + [-1] * (
            rows - tokens
        )
        require(found.request_ids.tolist() == ids, "request ids")
        require(found.positions.tolist() == own, "positions")
        require(found.slots.tolist() == given.pages.slots.tolist() + [-1] * (rows - len(given.pages.slots)), "slots")
        width = given.pages.block_table.shape[1]
        require(torch.equal(found.block_table[:, :width], given.pages.block_table), "block table")

    return Call(
        "Planner.plan",
        Planner.plan,
        {"self": made, "batch": batch},
        check,
        ("self",),
        lenient=("batch.prefilling", "batch.other_pages"),
        optional=("batch.host_lengths", "batch.padded_tokens", "batch.pages.page_size"),
        names=("batch", "padded_tokens", "host_lengths", "prefilling", "other_pages", "pages", "slots", "block_table"),
        free=True,
    )


def recording(draw: Draw) -> Call:
    new, lengths = steps(draw)
    batch = Batch.build(new, lengths, PagePool(40, 4))
    made = Planner(SPEC, Limits(24, 4, 32, 4, workspace_rows=32), layout="v32-fp8", mode="mixed").plan(batch)
    positions = torch.full((made.rows, 4), -1, dtype=torch.int32)
    for token, own in enumerate(made.positions.tolist()):
        chosen = sorted(torch.randperm(own + 1, generator=draw.generator)[:4].tolist())
        positions[token, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
    names = [f"r{n}" for n in range(len(new))]

    def check(_: None, before: Arguments, after: Arguments) -> None:
        again = after["self"].replay(before["layer"], before["requests"], before["plan"])
        require(torch.equal(again, before["positions"]), "another selection is replayed")

    arguments = {"self": Recording(4), "layer": 3, "requests": names, "plan": made, "positions": positions}
    return Call(
        "Recording.record",
        Recording.record,
        arguments,
        check,
        ("self",),
        lenient=("requests",),
        free=True,
        sizes=("layer",),
    )


CASES = (limits, page_pool, extend, slots, build, parse, planner, plan, plan, recording)
