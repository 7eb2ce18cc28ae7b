"""A refused call of a layer leaves caches, buffers and plan as they were: every layer, every mode, every argument."""

from dataclasses import fields, is_dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from layers.test_v41 import SPECS, Served, inputs
from reliability.bad_values import Arguments, Case, faults
from small_v4 import HIDDEN, OVERLAPPING, PLAIN, WINDOW, caches_of, weights

from tamis import (
    Batch,
    Caches,
    IndexRecipe,
    LayerSpec,
    Limits,
    PagedCache,
    PagePool,
    Planner,
    SparseMLA,
    SparseV4,
    V4Caches,
    V4Planner,
    checks,
)
from tamis.cache.layout import index_fp8, named
from tamis.layers.mla_checks import MlaChecks
from tamis.layers.v4_checks import V4Checks
from tamis.layers.v4_gathered import attend_gathered
from tamis.layers.v41 import SparseV41, V41Selection
from tamis.model.rope import Rope
from tamis.ops import IndexInputs, memory

HEADS, LATENT, ROPE, PAGE, TOPK = 3, 128, 8, 4, 6
D = LATENT + ROPE
SPEC = LayerSpec(HEADS, LATENT, ROPE, LATENT, 0.1, topk=TOPK, index_heads=2, index_dim=16)
RECIPE = IndexRecipe(8)
CACHES = ("window", "entries", "state", "index", "index_state")


def tensors(value: Any, name: str) -> dict[str, torch.Tensor]:
    """All tensors inside a plan."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    found: dict[str, torch.Tensor] = {}
    if is_dataclass(value):
        for part in fields(value):
            found |= tensors(getattr(value, part.name), f"{name}.{part.name}")
    elif isinstance(value, dict | tuple):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            found |= tensors(part, f"{name}[{key}]")
    return found


def mla(mode: str, what: str) -> Case:
    layout = named("v32-fp8", latent=LATENT, rope=ROPE)
    planner = Planner(SPEC, Limits(16, 4, 32, PAGE), layout=layout, mode=mode)
    plan = planner.plan(Batch.build([1, 6], [5, 6], PagePool(20, PAGE, seed=1)))
    latent = PagedCache(layout, 20, PAGE)
    index = PagedCache(index_fp8(dim=16), 20, PAGE, recipe=RECIPE)
    out = torch.zeros(7, HEADS, LATENT)
    given: Arguments = {
        "q": torch.randn(7, HEADS, D),
        "kv": torch.randn(7, D),
        "caches": latent,
        "caches.index": index,
        "plan": plan,
        "sink": torch.randn(HEADS),
        "q_scale": 0.5,
        "out": out,
        "topk": TOPK,
        "backend": "auto",
    }
    if what == "index":
        q, factors, keys = torch.randn(7, 2, 16), torch.randn(7, 2), torch.randn(7, 16)
        given |= {"index.q": q, "index.weights": factors, "index.keys": keys, "index.recipe": RECIPE}
    else:
        given["positions"] = torch.zeros(7, TOPK).int()

    made = SparseMLA(SPEC)

    def run(a: Arguments) -> object:
        layer = made
        if a["topk"] is not TOPK or a["backend"] != "auto":
            layer = SparseMLA(replace(SPEC, topk=a["topk"]), backend=a["backend"])
        inputs = {"positions": a.get("positions")}
        if what == "index":
            inputs = {"index": IndexInputs(a["index.q"], a["index.weights"], a["index.keys"], a["index.recipe"])}
        both = Caches(a["caches"], a["caches.index"])
        options = {name: a[name] for name in ("sink", "q_scale", "out")}
        return layer(a["q"], a["kv"], both, a["plan"], **inputs, **options)

    free = {"kv none", "sink none", "out none", "index.keys none", "kv axis 0 longer", "index.keys axis 0 longer"}
    free |= {"caches one scale", "caches planar", "caches.index none" if what == "positions" else ""}
    if what == "positions":
        free |= {f"caches.index {how}" for how in ("page size", "width", "one scale", "planar", "elsewhere")}
        free |= {"caches.index few pages", "caches.index inference", "caches.index tensor", "caches.index object"}
    watched = {"latent": latent.storage, "index": index.storage, "out": out, **tensors(plan, "plan")}
    changed = {"rows": 8, "page_size": 8, "topk": TOPK + 1}
    plans = {f"width: other {name}": replace(plan, **{name: value}) for name, value in changed.items()}
    plans |= {"width: far slots": replace(plan, slots=plan.slots + 80)}
    plans |= {"width: far requests": replace(plan, request_ids=plan.request_ids + 2)}
    if mode == "separate":
        plans["width: no workspace"] = replace(plan, workspace=None)
        plans["width: other workspace"] = replace(plan, workspace=torch.zeros(160, D + 1))
        plans["width: integers"] = replace(plan, workspace=torch.zeros(160, D).int())
    more = {"plan": plans, "topk": {"too many": 5000, "other": TOPK + 1}}
    return Case(run, given, watched, frozenset(free), frozenset({"out"}), more)


def given_positions() -> Case:
    case = mla("mixed", "positions")
    plan, latent = case.arguments["plan"], case.arguments["caches"]
    names = ("q", "positions", "sink", "q_scale", "out", "backend")
    given = {name: case.arguments[name] for name in names}
    given |= {"cache": latent, "request_ids": plan.request_ids, "block_table": plan.block_table}

    made = SparseMLA(SPEC)

    def run(a: Arguments) -> object:
        layer = made if a["backend"] == "auto" else SparseMLA(SPEC, backend=a["backend"])
        return layer.attend_positions(**{name: value for name, value in a.items() if name != "backend"})

    free = {
        "positions huge",
        "block_table huge",
        "sink none",
        "out none",
        "cache page size",
        "cache one scale",
        "cache planar",
        "cache few pages",
    }
    free |= {f"block_table axis {axis} {how}" for axis, how in ((0, "longer"), (1, "longer"), (1, "shorter"))}
    free |= {"cache inference"}
    return Case(run, given, case.watched, frozenset(free), frozenset({"out"}))


def mla_write() -> Case:
    case = mla("mixed", "index")
    names = ("kv", "caches", "caches.index", "plan", "index.keys", "backend")

    def run(a: Arguments) -> object:
        index = IndexInputs(case.arguments["index.q"], case.arguments["index.weights"], a["index.keys"])
        layer = SparseMLA(SPEC, backend=a["backend"])
        return layer.write(a["kv"], Caches(a["caches"], a["caches.index"]), a["plan"], index)

    given = {name: case.arguments[name] for name in names}
    return Case(run, given, case.watched, case.free)


V4_LAYOUT = named("v4-fp8", latent=24, rope=8, tile=8)
V4_SIZES = {"window": 8, "state4": 4, "state16": 8}


def v4(spec: LayerSpec, mode: str, what: str = "call") -> Case:
    planner = V4Planner([spec], Limits(80, 2, 80, 16, V4_SIZES), layout=V4_LAYOUT, mode=mode)
    pools = {name: PagePool(40, size) for name, size in V4_SIZES.items()}
    plan = planner.plan(Batch.build([1, 18], [7, 20], PagePool(20, 16), other_pools=pools))
    held = caches_of(spec, V4_LAYOUT, state_page_size=V4_SIZES.get(f"state{spec.compress}", 4))
    own = weights(spec.kind)
    given: Arguments = {f"caches.{name}": getattr(held, name) for name in CACHES if getattr(held, name) is not None}
    given |= {"hidden": torch.randn(19, HIDDEN), "plan": plan, "backend": "auto", "sink": own.sink}
    if spec.topk is not None:
        given["topk"] = spec.topk
    made = SparseV4(spec, own, Rope(8).cos_sin_table(80))
    if what == "select":
        given["index_q"] = torch.randn(19, spec.index_heads, spec.index_dim)
    if what == "output":
        given = {name: given[name] for name in ("plan", "backend")} | {"attended": torch.randn(19, 4, 32)}

    def run(a: Arguments) -> object:
        layer = made
        topk, sink = a.get("topk", spec.topk), a.get("sink", own.sink)
        if a["backend"] != "auto" or topk is not spec.topk or sink is not own.sink:
            layer = SparseV4(replace(spec, topk=topk), replace(own, sink=sink), made.cos_sin, backend=a["backend"])
        if what == "output":
            return layer.output(a["attended"], a["plan"])
        caches = V4Caches(*(a.get(f"caches.{name}") for name in CACHES))
        if what == "select":
            return layer.select(a["hidden"], a["index_q"], caches, a["plan"])
        return getattr(layer, "__call__" if what == "call" else what)(a["hidden"], caches, a["plan"])

    free = {f"caches.{name} {how}" for name in ("window", "entries") for how in ("one scale", "planar")}
    free |= {"sink none"}
    if what == "select":
        free |= {f"caches.{name} {how}" for name in CACHES for how in ("elsewhere", "inference", "few pages")}
        free |= {"sink gradient", "caches.state one scale", "caches.index_state one scale"}
        free |= {f"caches.{name} planar" for name in ("state", "index_state")}
    watched = {name: getattr(held, name).storage for name in CACHES if getattr(held, name) is not None}
    far = replace(plan.window.pages, slots=plan.window.pages.slots + 320)
    windows = {"size": {"size": 7}, "pages": {"page_size": 4}, "far slots": {"pages": far}}
    plans = {f"width: {label}": replace(plan, window=replace(plan.window, **x)) for label, x in windows.items()}
    plans["width: rows"] = replace(plan, step=replace(plan.step, rows=20))
    for label, change in (
        ("columns", {"columns": 3}),
        ("state pages", {"state_page_size": 5}),
        ("state", {"state": None}),
    ):
        parts = {ratio: replace(part, **change) for ratio, part in plan.entries.items()}
        if spec.kind == "overlapping" or (spec.kind == "plain" and label != "columns"):
            plans[f"width: {label}"] = replace(plan, entries=parts)
    if mode == "separate":
        plans["width: workspace"] = replace(plan, workspace=torch.zeros(800, 33))
        plans["width: no gathers"] = replace(plan, gathers={})
    more = {} if what in ("select", "output") else {"plan": plans}
    if spec.topk is not None:
        more["topk"] = {"width: too many": 5000, "width: other": spec.topk + 1}
    if what == "write":
        more = {"plan": {label: bad for label, bad in plans.items() if "workspace" not in label}}
    return Case(run, given, {**watched, **tensors(plan, "plan")}, frozenset(free), more=more)


def v41(number: int) -> Case:
    """A layer of the tiny model of V4.1 that makes entries, or that takes them and a selection of earlier ones."""
    served, hidden = Served(), inputs()
    served.step(hidden, (0, 0, 7))
    plan, selection = served.plan((0, 7, 12), (1, 0, 4)), None
    states = torch.cat((hidden[:, 0, 7:12], hidden[:, 0, :4]), dim=1)
    for before in range(number):
        _, selection = served.layers[before](states[before], served.caches[before], plan, selection)
    spec, made, held = SPECS[number], served.layers[number], served.caches[number]
    needed = ["window", "entries", *([] if spec.reuse_topk else ["index"])]
    needed += ["state"] * (spec.compress > 1 and not spec.reuse_entries)
    given: Arguments = {f"caches.{name}": getattr(held, name) for name in needed}
    given |= {"hidden": states[number], "plan": plan, "backend": "auto"}
    if selection is not None and spec.reuse_topk:
        given["selection.entries"] = selection.entries
    if selection is not None and spec.candidates is not None and not spec.candidates.source:
        given["selection.candidates"] = selection.candidates

    def run(a: Arguments) -> object:
        layer = made
        if a["backend"] != "auto":
            layer = SparseV41(spec, made.weights, made.cos_sin, backend=a["backend"])
        passed = selection
        if selection is not None:
            parts = (a.get(f"selection.{name}", getattr(selection, name)) for name in selection._fields)
            passed = V41Selection(*parts)
        caches = V4Caches(*(a.get(f"caches.{name}", getattr(held, name)) for name in CACHES))
        return layer(a["hidden"], caches, a["plan"], passed)

    free = {f"caches.{name} {how}" for name in ("window", "entries") for how in ("one scale", "planar")}
    if spec.reuse_entries:  # these are read only, and slots past them are skipped
        free |= {f"caches.{name} {how}" for name in ("entries", "index") for how in ("few pages", "inference")}
    plans = {"width: rows": replace(plan, step=replace(plan.step, rows=20))}
    plans["width: window"] = replace(plan, window=replace(plan.window, size=7))
    wider = {ratio: replace(part, columns=3) for ratio, part in plan.entries.items()}
    plans["width: columns"] = replace(plan, entries=wider)
    watched = {name: getattr(held, name).storage for name in CACHES if getattr(held, name) is not None}
    return Case(run, given, {**watched, **tensors(plan, "plan")}, frozenset(free), more={"plan": plans})


def gathered() -> Case:
    case = v4(OVERLAPPING, "separate")
    plan = case.arguments["plan"]
    given: Arguments = {
        "q": torch.randn(19, 4, 32),
        "plan": plan,
        "window": case.arguments["caches.window"],
        "entries": case.arguments["caches.entries"],
        "chosen": torch.zeros(19, OVERLAPPING.topk).int(),
        "ratio": 4,
        "scale": 0.1,
        "value_dim": 32,
        "sink": torch.randn(4),
        "backend": "auto",
    }

    def run(a: Arguments) -> object:
        return attend_gathered(**a)

    free = {"sink none", *(f"{name} {how}" for name in ("window", "entries") for how in ("one scale", "planar"))}
    free |= {"window inference", "entries inference", "chosen huge"}
    return Case(run, given, case.watched, frozenset(free))


MODES = ("mixed", "separate")
LAYERS = {
    **{f"mla {mode} {what}": partial(mla, mode, what) for mode in MODES for what in ("index", "positions")},
    "attend_positions": given_positions,
    "mla write": mla_write,
    **{f"v4 {spec.kind} {mode}": partial(v4, spec, mode) for spec in (WINDOW, OVERLAPPING, PLAIN) for mode in MODES},
    **{f"v4 {what}": partial(v4, OVERLAPPING, "mixed", what) for what in ("write", "select", "output")},
    **{f"v41 {number}": partial(v41, number) for number in (1, 4, 5, 6)},
    "attend_gathered": gathered,
}
CASES = {name: cache(made) for name, made in LAYERS.items()}


@pytest.mark.parametrize("name", CASES)
def test_good_arguments_are_accepted(name: str) -> None:
    case = LAYERS[name]()
    case.run(case.arguments)


ROWS = [(name, argument) for name, made in CASES.items() for argument in made().arguments]


@pytest.mark.parametrize(("name", "argument"), ROWS)
def test_a_refused_call_changes_nothing(name: str, argument: str) -> None:
    assert faults(CASES[name](), argument) == []


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", [name for name in CASES if "separate" not in name and name != "attend_gathered"])
def test_what_passed_before_lets_nothing_else_pass_on_a_device(
    name: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a device a layer remembers what its checks saw last; here the host's values are hidden from it."""
    case = LAYERS[name]()
    monkeypatch.setattr(checks, "visible", lambda tensor: False)
    monkeypatch.setattr(memory, "remembered_on", lambda tensor: tensor.device.type == "cpu")
    with torch.set_grad_enabled(grad):
        for argument in case.arguments:
            case.run(case.arguments)
            found = [fault for fault in faults(case, argument, blind=True) if grad or "gradient" not in fault]
            assert found == [], argument


def test_a_call_that_passed_is_not_checked_again_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = dict.fromkeys(("mla mixed index", "mla mixed positions", "v4 overlapping mixed"), "operations")
    monkeypatch.setattr(checks, "visible", lambda tensor: False)
    monkeypatch.setattr(memory, "remembered_on", lambda tensor: True)
    memory.forget_all()
    for name, method in layers.items():
        kind, ran = V4Checks if "v4" in name else MlaChecks, []
        original = getattr(kind, method)
        monkeypatch.setattr(kind, method, lambda *a, run=original, ran=ran: (ran.append(1), run(*a))[1])
        case = LAYERS[name]()
        for _ in range(3):
            case.run(case.arguments)
        assert len(ran) == 1, name
