"""What a V4 layer remembers of a call that passed on a device: properties change one at a time, and checks see it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from reliability.test_layer_atomicity import OVERLAPPING, v4
from torch_calls import Calls

from tamis import PagedCache, checks
from tamis.cache.layout import rows
from tamis.layers import v4_memory
from tamis.layers.v4_checks import V4Checks
from tamis.ops.library import Operation

Arguments = dict[str, Any]
WIDTH = {"latent": 24, "rope": 8}


class Watched:
    """A layer on a pretended device, whose values no check sees, and how often its operations were checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        case = v4(OVERLAPPING, "mixed")
        self.given, self.run, self.checked = case.arguments, case.run, 0
        original = V4Checks.arguments

        def arguments(*given: Any) -> None:
            self.checked += 1
            original(*given)

        monkeypatch.setattr(V4Checks, "arguments", arguments)
        monkeypatch.setattr(checks, "visible", lambda tensor: False)
        self.expected = self.run(self.given)

    def again(self, **changes: Any) -> tuple[bool, Any]:
        """Whether a call is checked that differs in these arguments from one that passed, and what it returns."""
        self.run(self.given)
        before = self.checked
        found = self.run(self.given | changes)
        return self.checked > before, found


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def of_layout(given: Arguments, dtype: torch.dtype) -> PagedCache:
    cache = given["caches.window"]
    return PagedCache(rows(dtype, **WIDTH), cache.pages, cache.page_size)


ACCEPTED: dict[str, Callable[[Arguments], Arguments]] = {
    "dtype": lambda g: {"hidden": g["hidden"].bfloat16()},
    "stride": lambda g: {"hidden": torch.cat((g["hidden"], g["hidden"]), 1)[:, : g["hidden"].shape[1]]},
    "layout": lambda g: {"caches.window": of_layout(g, torch.bfloat16)},
    "another cache": lambda g: {"caches.window": of_layout(g, torch.float32)},
    "other slots": lambda g: {
        "plan": replace(g["plan"], window=replace(g["plan"].window, slots=g["plan"].window.slots.repeat(1, 2)))
    },
}
REFUSED: dict[str, tuple[Callable[[Arguments], Arguments], str]] = {
    "shape": (lambda g: {"hidden": g["hidden"][:18]}, "hidden must be of shape"),
    "device": (lambda g: {"hidden": g["hidden"].to("meta")}, "hidden must be on cpu"),
    "page size": (
        lambda g: {"caches.window": PagedCache(rows(torch.float32, **WIDTH), 40, 9)},
        "caches.window must be of the plan's page size",
    ),
    "width": (
        lambda g: {"caches.window": PagedCache(rows(torch.float32, latent=8, rope=8), 40, 8)},
        "caches.window must be of rows",
    ),
    "requires grad": (lambda g: {"hidden": g["hidden"].clone().requires_grad_()}, "hidden must be without gradient"),
    "page size of the plan": (
        lambda g: {"plan": replace(g["plan"], window=replace(g["plan"].window, page_size=4))},
        "caches.window must be of the plan's page size",
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_change_that_is_allowed_is_looked_at(name: str, layer: Watched) -> None:
    assert layer.again(**ACCEPTED[name](layer.given))[0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_is_not_allowed_is_refused(name: str, layer: Watched) -> None:
    change, message = REFUSED[name]
    layer.run(layer.given)
    with pytest.raises(ValueError, match=message):
        layer.run(layer.given | change(layer.given))


def test_the_same_call_is_not_checked_again(layer: Watched) -> None:
    checked, found = layer.again()
    assert not checked
    assert torch.equal(found, layer.expected)


def test_calls_that_alternate_are_all_remembered(layer: Watched) -> None:
    changed = layer.given | ACCEPTED["dtype"](layer.given)
    for given in (layer.given, changed):
        layer.run(given)
    before = layer.checked
    for _ in range(3):
        for given in (layer.given, changed):
            layer.run(given)
    assert layer.checked == before


def test_a_memory_that_is_full_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4_memory, "MOST", 1)
    layer = Watched(monkeypatch)
    changed = layer.given | ACCEPTED["dtype"](layer.given)
    before = layer.checked
    for given in (changed, layer.given, layer.given):
        layer.run(given)
    assert layer.checked == before + 2


def test_alignment_and_default_dtype_change_no_result(layer: Watched) -> None:
    hidden = layer.given["hidden"]
    shifted = torch.cat((torch.zeros(1), hidden.flatten()))[1:].view(hidden.shape)
    torch.testing.assert_close(layer.again(hidden=shifted)[1], layer.expected)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(layer.again()[1], layer.expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_modes_of_torch_are_part_of_what_is_remembered(layer: Watched) -> None:
    layer.run(layer.given)
    for mode in (torch.no_grad, torch.inference_mode):
        before = layer.checked
        with mode():
            layer.run(layer.given)
        assert layer.checked == before + 1, mode


def test_a_cache_that_starts_to_require_a_gradient_is_refused(layer: Watched) -> None:
    layer.run(layer.given)
    layer.given["caches.index"].storage.requires_grad_()
    with pytest.raises(ValueError, match=r"caches\.index must be without gradient"):
        layer.run(layer.given)


def test_on_the_host_every_call_is_checked(layer: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "visible", lambda tensor: True)
    assert layer.again()[0]


def test_a_plan_is_signed_once_for_all_layers(layer: Watched) -> None:
    plan = layer.given["plan"]
    assert plan.signature(4) == replace(plan).signature(4)
    assert plan.signature(4) != plan.signature(1)
    wider = replace(plan, window=replace(plan.window, slots=plan.window.slots.repeat(1, 2)))
    assert wider.signature(4) != plan.signature(4)


def test_a_call_copies_nothing(layer: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation of torch takes microseconds on the host. Products, operations of the stages and memory for the
    selected entries are left."""
    results: dict[str, Any] = {}

    def remembered(self: Any, call: Any, run: Any) -> Any:
        if self.name not in results:
            results[self.name] = run(self, call)
        return results[self.name]

    original = Operation._run
    monkeypatch.setattr(Operation, "_run", lambda self, call: remembered(self, call, original))
    with torch.no_grad():
        for _ in range(2):
            layer.run(layer.given)
        with Calls() as calls:
            layer.run(layer.given)
    products = {"aten.mm", "aten.bmm", "aten.addmm"}
    assert [name for name in calls.names if name not in products] == ["aten.empty", "aten.new_empty", "aten.clone"]
