"""Where gathering FP8 prefills first saves time, and that a planner does it there and only there."""

import re
from types import SimpleNamespace

import pytest
from step.test_planner import make_batch

from tamis import LayerSpec, Limits, Planner
from tamis.cache.layout import named
from tamis.step import planner as planning
from tamis.step.gathering import explain_prefills, gathering_saves

K = 1024
MEASURED = {  # (heads, context): microseconds for 4096 queries of top-k 2048, read directly and gathered first
    (64, 8 * K): (2709, 1855),
    (64, 128 * K): (2996, 2310),
    (128, 8 * K): (5452, 3698),
    (128, 128 * K): (5718, 4170),
}


@pytest.mark.parametrize(("heads", "length"), MEASURED)
def test_the_rule_is_close_to_what_was_measured(heads: int, length: int) -> None:
    direct, gathered = MEASURED[heads, length]
    # The measured call began at the context, so its queries saw all of it.
    assert gathering_saves([(4 * K, length)], heads, 2 * K) == pytest.approx(direct - gathered, rel=0.1)


def test_few_heads_and_few_queries_over_a_long_context_stay_direct() -> None:
    assert gathering_saves([(64 * K, 64 * K)], 32, 2 * K) < 0
    assert gathering_saves([(256, 128 * K)], 64, 2 * K) < 0
    assert gathering_saves([(1 * K, 128 * K)], 64, 2 * K) > 0
    assert gathering_saves([(256, 128 * K)], 128, 2 * K) < 0
    assert gathering_saves([(512, 128 * K)], 128, 2 * K) > 0
    assert gathering_saves([(512, 4 * K)], 64, 2 * K) > 0
    assert gathering_saves([(16, 1 * K)], 128, 2 * K) < 0  # the launches cost more
    assert gathering_saves([(4 * K, 8 * K), *[(1, 128 * K)] * 16], 64, 2 * K) < 0  # all rows would be gathered
    assert gathering_saves([], 128, 2 * K) < 0


def test_the_rule_in_words() -> None:
    assert explain_prefills(True, 16, 2 * K, True) == "read the cache directly"
    assert explain_prefills(False, 128, 2 * K, False) == "read the cache directly"
    assert explain_prefills(True, 32, 2 * K, False) == "gathered into a 16-bit workspace"
    told = explain_prefills(True, 64, 2 * K, True)
    short, long = map(int, re.findall(r"from (\d+) ", told))
    for new, length in ((short, 8 * K), (long, 128 * K)):
        assert gathering_saves([(new - 1, length)], 64, 2 * K) <= 0 < gathering_saves([(new, length)], 64, 2 * K)


@pytest.fixture
def both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose backend reads FP8 rows directly at every head count."""
    monkeypatch.setattr(planning, "backend_for_stage", lambda *args: SimpleNamespace(direct_prefills=True))


def planner(heads: int = 64, mode: str = "auto", layout: str = "v32-fp8", rows: int | None = None) -> Planner:
    limits = Limits(max_tokens=2 * K, max_requests=8, max_length=4 * K, page_size=16, workspace_rows=rows)
    return Planner(LayerSpec(heads=heads, topk=2 * K), limits, layout=layout, mode=mode)


@pytest.mark.usefixtures("both_kernels")
def test_auto_decides_for_each_step() -> None:
    made = planner()
    assert made.mode == "auto"
    long = made.plan(make_batch([1, 1 * K], [9, 3 * K]))
    assert long.mode == "separate"
    assert [chunk.rows for chunk in long.prefill.chunks] == [3 * K]
    assert long.workspace.shape == (4 * K, 576)
    short = made.plan(make_batch([1, 20], [9, 3 * K]))
    assert (short.mode, short.prefill.chunks, short.workspace) == ("mixed", (), None)
    decodes = made.plan(make_batch([1, 1], [9, 3 * K]))
    assert (decodes.mode, decodes.workspace) == ("mixed", None)


@pytest.mark.usefixtures("both_kernels")
def test_what_the_user_asked_for_is_kept() -> None:
    batch = make_batch([1 * K], [3 * K])
    assert planner(mode="mixed").plan(batch).mode == "mixed"
    assert planner(mode="separate").plan(make_batch([20], [3 * K])).mode == "separate"
    assert planner(heads=32).mode == planner(layout="v32-bf16").mode == "mixed"
    # A workspace that is too small for a prefill leaves it in the cache, where mode "separate" would refuse it.
    assert planner(rows=2 * K).plan(batch).mode == "mixed"
    assert planner(rows=3 * K).plan(batch).mode == "separate"


@pytest.mark.usefixtures("both_kernels")
def test_the_workspace_has_room_for_the_longest_request_and_no_more_than_a_limit() -> None:
    def rows(length: int) -> int:
        limits = Limits(max_tokens=1, max_requests=1, max_length=length, page_size=64)
        return planning._workspace_rows("auto", limits, named("v32-fp8"))

    assert rows(1000) == 1000
    assert rows(1 << 20) == 233016
    assert 233016 * 576 * 2 <= 256 * K * K < 233017 * 576 * 2  # 256 MiB
