"""What a V4.1 layer remembers of a call that passed on a device: properties change one at a time, and checks see it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_v41 import SPECS, Served, inputs
from torch import Tensor

from tamis import checks
from tamis.layers import v4_memory
from tamis.layers.v41 import V41Output, V41Selection
from tamis.layers.v41_checks import V41Checks
from tamis.step.v4_plan import V4Plan

TOKENS = 9
LAYERS = {"window": 0, "entries of one token": 1, "taken": 2, "selects blocks": 4, "selects within blocks": 5}
Change = Callable[["Watched"], dict[str, Any]]


class Watched:
    """A layer on a pretended device, whose values no check sees, and how often its arguments were checked."""

    def __init__(self, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
        served = Served()
        self.layer, self.checked, original = served.layers[number], 0, V41Checks.arguments
        self.hidden, self.plan = inputs()[:, 0, :TOKENS], served.plan((0, 0, TOKENS))
        selection: V41Selection | None = None
        with torch.no_grad():
            for layer, caches, hidden in zip(served.layers[:number], served.caches, self.hidden, strict=False):
                selection = layer(hidden, caches, self.plan, selection).selection
        self.given = {
            "hidden": self.hidden[number],
            "caches": served.caches[number],
            "plan": self.plan,
            "selection": selection,
        }

        def arguments(*given: Any) -> None:
            self.checked += 1
            original(*given)

        monkeypatch.setattr(V41Checks, "arguments", arguments)
        monkeypatch.setattr(checks, "visible", lambda tensor: False)
        self.expected = self.run()

    def run(self, **changes: Any) -> V41Output:
        return self.layer(**self.given | changes)

    def again(self, **changes: Any) -> tuple[bool, V41Output]:
        """Whether a call is checked that differs in these arguments from one that passed, and what it returns."""
        self.run()
        before = self.checked
        found = self.run(**changes)
        return self.checked > before, found


def wider(plan: V4Plan) -> V4Plan:
    return replace(plan, window=replace(plan.window, slots=plan.window.slots.repeat(1, 2)))


def other_entries(plan: V4Plan, ratio: int, **changes: Any) -> V4Plan:
    return replace(plan, entries=plan.entries | {ratio: replace(plan.entries[ratio], **changes)})


def twice(x: Tensor | None) -> Tensor | None:
    """The same numbers, with other strides."""
    return None if x is None else torch.cat((x, x), 1)[:, : x.shape[1]]


def of_strides(selection: V41Selection) -> V41Selection:
    entries = twice(selection.entries)
    assert entries is not None
    return V41Selection(entries, twice(selection.candidates))


@pytest.mark.parametrize("name", LAYERS)
def test_the_same_call_is_not_checked_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Watched(LAYERS[name], monkeypatch)
    checked, found = layer.again()
    assert not checked
    assert torch.equal(found.hidden, layer.expected.hidden)
    if layer.expected.selection is not None:
        assert found.selection is not None
        assert torch.equal(found.selection.entries, layer.expected.selection.entries)


ACCEPTED: dict[str, Change] = {
    "dtype": lambda w: {"hidden": w.given["hidden"].bfloat16()},
    "stride": lambda w: {"hidden": twice(w.given["hidden"])},
    "another cache": lambda w: {"caches": replace(w.given["caches"], window=Served().caches[5].window)},
    "other slots": lambda w: {"plan": wider(w.plan)},
    "strides of the selection": lambda w: {"selection": of_strides(w.given["selection"])},
}
REFUSED: dict[str, tuple[Change, str]] = {
    "rows": (lambda w: {"hidden": w.given["hidden"][:5]}, "hidden must be of shape"),
    "no selection": (lambda w: {"selection": None}, "selection must be given"),
    "rows of the selection": (
        lambda w: {"selection": V41Selection(*(part[:5] for part in w.given["selection"]))},
        r"selection\.candidates must be of shape",
    ),
    "a selection without blocks": (
        lambda w: {"selection": V41Selection(w.given["selection"].entries, None)},
        r"selection\.candidates",
    ),
    "no selection at all": (lambda w: {"selection": (1, 2)}, "selection must be"),
    "gradient": (lambda w: {"hidden": w.given["hidden"].clone().requires_grad_()}, "hidden must be without gradient"),
    "page size of the window": (
        lambda w: {"plan": replace(w.plan, window=replace(w.plan.window, page_size=4))},
        r"caches\.window must be of the plan's page size",
    ),
    "page size of the entries": (
        lambda w: {"plan": other_entries(w.plan, 2, page_size=4)},
        r"caches\.entries must be of the plan's page size",
    ),
}


@pytest.fixture
def within(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(LAYERS["selects within blocks"], monkeypatch)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_change_that_is_allowed_is_looked_at(name: str, within: Watched) -> None:
    assert within.again(**ACCEPTED[name](within))[0]


@pytest.mark.parametrize("name", REFUSED)
def test_a_change_that_is_not_allowed_is_refused(name: str, within: Watched) -> None:
    change, message = REFUSED[name]
    within.run()
    with pytest.raises((TypeError, ValueError), match=message):
        within.run(**change(within))


def test_entries_without_state_are_part_of_what_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries of one token have no state, and are looked at all the same."""
    layer = Watched(LAYERS["entries of one token"], monkeypatch)
    assert SPECS[1].compress == 1
    assert layer.plan.entries[1].state is None
    with pytest.raises(ValueError, match=r"caches\.entries must be of the plan's page size"):
        layer.run(plan=other_entries(layer.plan, 1, page_size=4))


def test_a_memory_that_is_full_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v4_memory, "MOST", 1)
    layer = Watched(LAYERS["selects blocks"], monkeypatch)
    before = layer.checked
    layer.run(hidden=layer.given["hidden"].bfloat16())
    for _ in range(2):
        layer.run()
    assert layer.checked == before + 2


def test_modes_of_torch_are_part_of_what_is_remembered(within: Watched) -> None:
    for mode in (torch.no_grad, torch.inference_mode):
        before = within.checked
        with mode():
            within.run()
        assert within.checked == before + 1, mode


def test_a_step_without_requests_is_not_taken_for_another(within: Watched) -> None:
    empty = replace(within.plan, step=replace(within.plan.step, requests=0))
    assert not within.run(plan=empty).hidden.any()
    assert torch.equal(within.again()[1].hidden, within.expected.hidden)


def test_on_the_host_every_call_is_checked(within: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "visible", lambda tensor: True)
    assert within.again()[0]
