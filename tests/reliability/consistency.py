"""Which numbers of a plan, a pool, limits, caches, a layer and its tensors must match, and who refuses if not.

`tests/reliability/test_consistency.py` tries every line that says "refused", and compares docs/consistency.md with
`table()`.
"""

# ruff: noqa: E501

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from small_v4 import HIDDEN, OVERLAPPING, PLAIN, WINDOW, caches_of, weights
from torch import Tensor

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
    SparseMLA,
    SparseV4,
    V4Planner,
)
from tamis.cache.layout import compressor_state, named, rows, v32_fp8
from tamis.layers.v4_gathered import attend_gathered
from tamis.model.rope import Rope
from tamis.ops import IndexInputs

Attempt = tuple[Callable[[], object], list[PagedCache]]
PAGE, NEW, LATENT, ROPE, TOPK, INDEX = 8, 5, 16, 8, 4, 16
WIDTH = LATENT + ROPE
SPEC = LayerSpec(2, LATENT, ROPE, LATENT, 0.1, topk=TOPK, index_heads=2, index_dim=INDEX)
FP8 = v32_fp8(latent=LATENT, rope=ROPE, tile=LATENT)
KEYS = rows(torch.float32, latent=INDEX, rope=0)
POOLS = {"window": 8, "state4": 4, "state16": 8}
V4_LAYOUT = named("v4-fp8", latent=24, rope=8, tile=8)


@dataclass(frozen=True)
class Cell:
    """One line of the table."""

    quantity: str
    one: str
    other: str
    rule: str
    """Who refuses a mismatch; or why it need not match."""
    argument: str = ""
    """How the refusal begins; empty where nothing is refused."""
    attempt: Callable[[], Attempt] | None = None
    """A call with a mismatch, and the caches that it must not change."""


def step(limits: Limits, pool: PagePool, **others: PagePool) -> Batch:
    return Batch.build([NEW], [NEW], pool, other_pools=others or None)


def mla(
    *,
    spec: LayerSpec = SPEC,
    planner_spec: LayerSpec = SPEC,
    layout: Any = FP8,
    planner_layout: Any = FP8,
    index_layout: Any = KEYS,
    page: int = PAGE,
    index_page: int = PAGE,
    pages: int = 9,
    index_pages: int = 9,
    mode: Any = "mixed",
    indexed: bool = True,
    recipe: IndexRecipe | None = None,
    tensors: dict[str, Tensor] | None = None,
) -> Attempt:
    """A `SparseMLA` call whose parts match unless told otherwise."""
    planner = Planner(planner_spec, Limits(16, 4, 64, PAGE), layout=planner_layout, mode=mode)
    plan = planner.plan(step(planner.limits, PagePool(9, PAGE)))
    latent = PagedCache(layout, pages, page)
    index = PagedCache(index_layout, index_pages, index_page, recipe=recipe)
    given: dict[str, Any] = {
        "q": torch.randn(NEW, 2, spec.head_dim),
        "kv": torch.randn(NEW, latent.layout.width),
        "index.q": torch.randn(NEW, 2, index.layout.width),
        "index.weights": torch.randn(NEW, 2),
        "index.keys": torch.randn(NEW, index.layout.width),
        "positions": torch.arange(TOPK).repeat(NEW, 1).tril().int(),
        "sink": None,
        "out": None,
    }
    given |= tensors or {}
    inputs = IndexInputs(given["index.q"], given["index.weights"], given["index.keys"])
    select: dict[str, Any] = {"index": inputs} if indexed else {"positions": given["positions"]}
    layer, both = SparseMLA(spec), Caches(latent, index)

    def call() -> object:
        return layer(given["q"], given["kv"], both, plan, sink=given["sink"], out=given["out"], **select)

    return call, [latent, index]


def v4(
    spec: LayerSpec = OVERLAPPING,
    *,
    layer_spec: LayerSpec | None = None,
    mode: Any = "mixed",
    tensors: dict[str, Tensor] | None = None,
    limits: dict[str, Any] | None = None,
    call: Callable[[SimpleNamespace], object] | None = None,
    **caches: PagedCache | None,
) -> Attempt:
    """A `SparseV4` call whose parts match unless told otherwise."""
    layer_spec = layer_spec or spec
    numbers: dict[str, Any] = {"page_size": 16, "other_page_sizes": POOLS} | (limits or {})
    planner = V4Planner([spec], Limits(16, 4, 64, **numbers), layout=V4_LAYOUT, mode=mode)
    others = {name: PagePool(20, size) for name, size in planner.limits.other_page_sizes.items()}
    plan = planner.plan(step(planner.limits, PagePool(9, planner.limits.page_size), **others))
    state_page = POOLS.get(f"state{layer_spec.compress}")
    sizes = {"pages": 9, "window_pages": 20, "state_pages": 20, "state_page_size": state_page}
    made = caches_of(layer_spec, V4_LAYOUT, **sizes, index_layout=KEYS)
    made = replace(made, **caches)
    layer = SparseV4(layer_spec, weights(layer_spec.kind), Rope(8).cos_sin_table(64))
    hidden = (tensors or {}).get("hidden", torch.randn(NEW, HIDDEN))
    world = SimpleNamespace(layer=layer, caches=made, plan=plan, hidden=hidden)
    run = call or (lambda w: w.layer(w.hidden, w.caches, w.plan))
    held = [cache for cache in vars(made).values() if cache is not None]
    return lambda: run(world), held


def planned(**changes: Any) -> Attempt:
    """A batch that is planned, with some fields exchanged."""
    planner = Planner(SPEC, Limits(16, 4, 64, PAGE, {"window": 4}), layout=FP8)
    page, window = changes.pop("page", PAGE), changes.pop("window", 4)
    good = step(planner.limits, PagePool(9, page), window=PagePool(20, window))
    pages = changes.pop("pages", None)
    if pages is not None:
        changes["pages"] = replace(good.pages, **pages(good.pages))
    return lambda: planner.plan(replace(good, **changes)), []


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.int32)


def recorded(topk: int, positions: Tensor, names: list[str]) -> Attempt:
    planner = Planner(SPEC, Limits(16, 4, 64, PAGE), layout=FP8)
    plan = planner.plan(step(planner.limits, PagePool(9, PAGE)))
    return lambda: Recording(topk).record(0, names, plan, positions), []


def stale() -> Attempt:
    planner = Planner(SPEC, Limits(16, 4, 64, PAGE), layout=FP8)
    pool, cache = PagePool(9, PAGE), PagedCache(FP8, 9, PAGE)
    plan = planner.plan(step(planner.limits, pool))
    planner.plan(step(planner.limits, pool))
    q, kv, positions = torch.randn(NEW, 2, WIDTH), torch.randn(NEW, WIDTH), -1 - ints(NEW, TOPK)
    return lambda: SparseMLA(SPEC)(q, kv, cache, plan, positions=positions), [cache]


def gathered(**wrong: Any) -> Attempt:
    """`attend_gathered` by itself."""

    def call(w: SimpleNamespace) -> object:
        q, window = wrong.get("q", torch.randn(NEW, 4, 32)), wrong.get("window", w.caches.window)
        entries, chosen = wrong.get("entries", w.caches.entries), wrong.get("chosen", -1 - ints(NEW, 5))
        return attend_gathered(q, w.plan, window, entries, chosen, ratio=4, scale=0.1, value_dim=32)

    return v4(mode="separate", call=call)


def wide_v4(pages: int = 20, size: int = 8) -> PagedCache:
    return PagedCache(named("v4-fp8", latent=32, rope=8, tile=8), pages, size)


MLA, SV4, PLAN, V4PLAN, RECORD = "`SparseMLA`", "`SparseV4`", "`Planner.plan`", "`V4Planner`", "`Recording`"
GATHERED = "`attend_gathered`"
# One line each, as on the page.
# fmt: off
CELLS = [
    # Page size
    Cell("page size", "limits", "pool", PLAN, "pages.page_size", lambda: planned(page=16)),
    Cell("page size", "limits", "other pools", PLAN, "window.page_size", lambda: planned(window=8)),
    Cell("page size", "plan", "latent cache", MLA, "caches", lambda: mla(page=16)),
    Cell("page size", "plan", "index cache", MLA, "caches.index", lambda: mla(index_page=16)),
    Cell("page size", "plan", "window", SV4, "caches.window", lambda: v4(window=PagedCache(V4_LAYOUT, 20, 16))),
    Cell("page size", "plan", "entries", SV4, "caches.entries", lambda: v4(entries=PagedCache(V4_LAYOUT, 9, 8))),
    Cell("page size", "plan", "index keys of V4", SV4, "caches.index", lambda: v4(index=PagedCache(KEYS, 9, 8))),
    Cell("page size", "plan", "state", SV4, "caches.state", lambda: v4(state=PagedCache(compressor_state(dim=32), 20, 8))),
    Cell("page size", "plan", "index state", SV4, "caches.index_state", lambda: v4(index_state=PagedCache(compressor_state(dim=16), 20, 8))),
    Cell("page size", "plan", "gathered window", GATHERED, "window", lambda: gathered(window=PagedCache(V4_LAYOUT, 20, 16))),
    Cell("page size", "plan", "gathered entries", GATHERED, "entries", lambda: gathered(entries=PagedCache(V4_LAYOUT, 9, 8))),
    Cell("page size", "limits", "layer's ratio", V4PLAN, "page_size", lambda: v4(PLAIN, limits={"page_size": 24})),
    Cell("page size", "latent cache", "index cache", "follows: both must have the plan's"),
    Cell("page size", "window", "entries", "need not match: pools of their own, with tables of their own"),
    Cell("page size", "limits", "tensors given as a `PageMap`", "cannot be seen there, unless its `page_size` is given"),
    # Width
    Cell("width", "layer", "queries", MLA, "q", lambda: mla(tensors={"q": torch.randn(NEW, 2, WIDTH + 8)})),
    Cell("width", "layer", "latent cache", MLA, "caches", lambda: mla(layout=v32_fp8(latent=32, rope=8, tile=16))),
    Cell("width", "latent cache", "new rows", MLA, "kv", lambda: mla(tensors={"kv": torch.randn(NEW, WIDTH + 8)})),
    Cell("width", "layer", "index cache", "need not match: index queries and keys must have the cache's"),
    Cell("width", "index cache", "index queries", MLA, "index.q", lambda: mla(tensors={"index.q": torch.randn(NEW, 2, 8)})),
    Cell("width", "index cache", "index keys", MLA, "index.keys", lambda: mla(tensors={"index.keys": torch.randn(NEW, 8)})),
    Cell("width", "workspace of the plan", "latent cache", MLA, "plan.workspace", lambda: mla(mode="separate", planner_layout=v32_fp8(latent=32, rope=8, tile=16))),
    Cell("width", "layer", "hidden states", SV4, "hidden", lambda: v4(tensors={"hidden": torch.randn(NEW, HIDDEN + 1)})),
    Cell("width", "layer", "window", SV4, "caches.window", lambda: v4(window=wide_v4())),
    Cell("width", "layer", "entries", SV4, "caches.entries", lambda: v4(entries=wide_v4(9, 4))),
    Cell("width", "layer", "state", SV4, "caches.state", lambda: v4(state=PagedCache(compressor_state(dim=40), 20, 4))),
    Cell("width", "layer", "index keys of V4", SV4, "caches.index", lambda: v4(index=PagedCache(rows(torch.float32, latent=24, rope=0), 9, 4))),
    Cell("width", "layer", "index state", SV4, "caches.index_state", lambda: v4(index_state=PagedCache(compressor_state(dim=24), 20, 4))),
    # Page count
    Cell("page count", "pool", "latent cache", f"{MLA}, on the host; on a device such rows are skipped", "slots", lambda: mla(pages=8)),
    Cell("page count", "pool", "index cache", f"{MLA}, on the host; on a device such rows are skipped", "slots", lambda: mla(index_pages=8)),
    Cell("page count", "block table", "caches", "need not match: a page past the cache is skipped by every reader"),
    Cell("page count", "latent cache", "index cache", "need not match: the smaller one refuses slots, as above"),
    Cell("page count", "limits", "block table too wide", PLAN, "pages.block_table", lambda: planned(pages=lambda p: {"block_table": ints(1, 9)})),
    Cell("page count", "lengths", "block table too narrow", PLAN, "pages.block_table", lambda: planned(lengths=ints(1) + 9)),
    Cell("page count", "limits", "workspace for the longest prefill", PLAN, "workspace_rows", lambda: v4(mode="separate", limits={"workspace_rows": 3})),
    # Row count
    Cell("row count", "plan", "queries", MLA, "q", lambda: mla(tensors={"q": torch.randn(NEW + 1, 2, WIDTH)})),
    Cell("row count", "plan", "new rows", MLA, "slots", lambda: mla(tensors={"kv": torch.randn(NEW - 1, WIDTH)})),
    Cell("row count", "plan", "positions", MLA, "positions", lambda: mla(indexed=False, tensors={"positions": -1 - ints(NEW + 1, TOPK)})),
    Cell("row count", "plan", "index queries", MLA, "index.q", lambda: mla(tensors={"index.q": torch.randn(NEW + 1, 2, INDEX)})),
    Cell("row count", "plan", "index weights", MLA, "index.weights", lambda: mla(tensors={"index.weights": torch.randn(NEW + 1, 2)})),
    Cell("row count", "plan", "index keys", MLA, "slots", lambda: mla(tensors={"index.keys": torch.randn(NEW - 1, INDEX)})),
    Cell("row count", "plan", "out", MLA, "out", lambda: mla(tensors={"out": torch.zeros(NEW + 1, 2, LATENT)})),
    Cell("row count", "plan", "hidden states", SV4, "hidden", lambda: v4(tensors={"hidden": torch.randn(NEW + 1, HIDDEN)})),
    Cell("row count", "plan", "gathered queries", GATHERED, "q", lambda: gathered(q=torch.randn(NEW + 1, 4, 32))),
    Cell("row count", "plan", "chosen entries", GATHERED, "chosen", lambda: gathered(chosen=-1 - ints(NEW + 1, 5))),
    Cell("row count", "plan", "recorded positions", RECORD, "positions", lambda: recorded(TOPK, ints(NEW + 1, TOPK), ["a"])),
    Cell("row count", "plan", "recorded requests", RECORD, "requests", lambda: recorded(TOPK, ints(NEW, TOPK), ["a", "b"])),
    Cell("row count", "query starts", "lengths", PLAN, "lengths", lambda: planned(lengths=ints(2) + NEW)),
    Cell("row count", "query starts", "block table", PLAN, "pages.block_table", lambda: planned(pages=lambda p: {"block_table": ints(2, 1)})),
    Cell("row count", "query starts", "slots", PLAN, "pages.slots", lambda: planned(pages=lambda p: {"slots": ints(NEW - 1)})),
    Cell("row count", "query starts", "prefilling", PLAN, "prefilling", lambda: planned(prefilling=[True, False])),
    Cell("row count", "limits", "padding", PLAN, "padded_tokens", lambda: planned(padded_tokens=17)),
    Cell("row count", "limits", "lengths", PLAN, "lengths", lambda: planned(lengths=ints(1) + 65)),
    # Layout
    Cell("layout", "separate plan", "latent cache", MLA, "caches", lambda: mla(mode="separate", layout=rows(torch.bfloat16, latent=LATENT, rope=ROPE))),
    Cell("layout", "mixed plan", "latent cache", "need not match: pages are read by the cache's own layout"),
    Cell("layout", "index cache", "recipe of queries and keys", MLA, "index.recipe", lambda: mla(recipe=IndexRecipe(8))),
    Cell("layout", "layer", "recipe of V4's index keys", SV4, "caches.index.recipe", lambda: v4(index=PagedCache(KEYS, 9, 4, recipe=IndexRecipe(8)))),
    Cell("layout", "layer's kind", "state", SV4, "caches.state", lambda: v4(state=PagedCache(compressor_state(dim=32, overlapping=False), 20, 4))),
    Cell("layout", "window", "entries", "need not match: two selections, each read by its own layout"),
    # Heads and top-k
    Cell("heads", "layer", "queries", MLA, "q", lambda: mla(tensors={"q": torch.randn(NEW, 3, WIDTH)})),
    Cell("heads", "layer", "sink", MLA, "sink", lambda: mla(tensors={"sink": torch.zeros(3)})),
    Cell("heads", "layer", "out", MLA, "out", lambda: mla(tensors={"out": torch.zeros(NEW, 3, LATENT)})),
    Cell("heads", "layer", "index queries", MLA, "index.q", lambda: mla(tensors={"index.q": torch.randn(NEW, 3, INDEX)})),
    Cell("heads", "index queries", "index weights", MLA, "index.weights", lambda: mla(tensors={"index.weights": torch.randn(NEW, 3)})),
    Cell("heads", "planner", "layer", "need not match: a plan depends on them only through the default mode"),
    Cell("top-k", "layer", "positions", MLA, "positions", lambda: mla(indexed=False, tensors={"positions": -1 - ints(NEW, 3)})),
    Cell("top-k", "recording", "positions", RECORD, "positions", lambda: recorded(3, ints(NEW, TOPK), ["a"])),
    Cell("top-k", "planner", "layer (V3.2)", "need not match: the layer selects by its own"),
    Cell("top-k", "plan", "layer (V4)", SV4, "plan", lambda: v4(layer_spec=replace(OVERLAPPING, topk=6))),
    Cell("ratio", "plan", "layer", SV4, "plan", lambda: v4(layer_spec=PLAIN)),
    Cell("window", "plan", "layer", SV4, "plan.window.size", lambda: v4(layer_spec=replace(WINDOW, window=5))),
    # Device
    Cell("device", "planner", "lengths", PLAN, "lengths", lambda: planned(lengths=ints(1).to("meta"), host_lengths=ints(1) + NEW)),
    Cell("device", "planner", "block table", PLAN, "pages.block_table", lambda: planned(pages=lambda p: {"block_table": p.block_table.to("meta")})),
    Cell("device", "planner", "slots", PLAN, "pages.slots", lambda: planned(pages=lambda p: {"slots": p.slots.to("meta")})),
    Cell("device", "caches", "queries", MLA, "q", lambda: mla(tensors={"q": torch.zeros(NEW, 2, WIDTH, device="meta")})),
    Cell("device", "caches", "new rows", MLA, "kv", lambda: mla(tensors={"kv": torch.zeros(NEW, WIDTH, device="meta")})),
    Cell("device", "caches", "index queries", MLA, "index.weights", lambda: mla(tensors={"index.q": torch.zeros(NEW, 2, INDEX, device="meta")})),
    Cell("device", "queries", "positions", MLA, "positions", lambda: mla(indexed=False, tensors={"positions": ints(NEW, TOPK).to("meta")})),
    Cell("device", "layer's weights", "hidden states", SV4, "hidden", lambda: v4(tensors={"hidden": torch.zeros(NEW, HIDDEN, device="meta")})),
    Cell("device", "recording", "plan", "need not match: selections are kept on the host and replayed to the plan's device"),
    # Which step
    Cell("step", "planner", "plan", "every layer, `Recording`, `attend_gathered`", "plan", stale),
]
# fmt: on


def table() -> str:
    """The lines of docs/consistency.md."""
    lines = ["| what | of | and of | refused by | argument |", "|---|---|---|---|---|"]
    for cell in CELLS:
        argument = f"`{cell.argument}`" if cell.argument else "—"
        lines.append(f"| {cell.quantity} | {cell.one} | {cell.other} | {cell.rule} | {argument} |")
    return "\n".join(lines)
