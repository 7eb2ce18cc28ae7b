"""DeepSeek-V4: SGLang's backend is replaced where tamis is chosen, and attends like float64."""

from typing import Any

import pytest
import torch
import v4_engine as v4
from v4_engine import DECODE, DRAFT_EXTEND, EXTEND, VERIFY, Step
from tamis.integrations.sglang import v4_plugin
from sglang.srt.plugins.hook_registry import HookRegistry

STEPS = {
    "decode": (DECODE, [299, 699, 2, 127], [1, 1, 1, 1]),
    "extend": (EXTEND, [0, 250, 513], [40, 21, 3]),
    "verify": (VERIFY, [300, 126, 640], [3, 3, 3]),
}


@pytest.fixture(scope="module", autouse=True)
def chosen() -> Any:
    v4_plugin.install()
    HookRegistry.apply_hooks()
    with v4.options(**v4.TAMIS):
        yield


@pytest.mark.parametrize("ratio", v4.RATIOS)
@pytest.mark.parametrize("kind", STEPS)
def test_window_and_entries_are_attended_to(kind: str, ratio: int) -> None:
    step = Step(*STEPS[kind], ratio=ratio)
    step.prepare()
    step.agrees(step.forward())


def test_a_draft_extend_attends_to_the_window() -> None:
    step = Step(DRAFT_EXTEND, [300, 126, 640], [3, 3, 3])
    step.prepare()
    step.agrees(step.forward())
