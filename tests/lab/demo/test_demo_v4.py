"""The V4 demonstration: windows and state use few pages, and errors are those of the format."""

from typing import Any

import pytest
import torch

import tamis.lab.demo.v4_server
from tamis.cache.pool import PagePool
from tamis.cli import main
from tamis.lab.demo.outcome import Served
from tamis.lab.demo.requests import Request, Scheduler
from tamis.lab.demo.serve import serve
from tamis.lab.demo.server import run_server
from tamis.lab.demo.shape import V4Shape, Workload
from tamis.lab.demo.v4_server import V4Server
from tamis.lab.testing.v4_probe import V4Probe

SMALL = {"hidden": 64, "heads": 4, "q_lora": 32, "o_lora": 16, "window": 16, "plain": 32, "mlp": 64, "topk": 8}


def workload(**changes: Any) -> Workload:
    settings = {"requests": 4, "max_prompt": 110, "new_tokens": 4, "token_budget": 48, "page_size": 64}
    return Workload(**settings | {"cache": "v4-fp32"} | changes)


def run(*, shape: dict[str, Any] | None = None, **changes: Any) -> Served:
    return serve(V4Shape(**SMALL | (shape or {})), workload(**changes))


def test_exact_rows_leave_only_the_selections_error() -> None:
    served = run()
    assert served.errors is not None
    window, indexed, plain = served.errors
    for errors in served.errors:
        assert errors.quantisation_error < 1e-5
    for errors in (window, plain):
        assert errors.dense_error < 1e-5
        assert errors.mass_covered == pytest.approx(1.0, abs=1e-5)
        assert errors.mass_covered_selecting is None
    assert indexed.dense_error > 1e-3
    assert indexed.mass_covered_selecting is not None
    assert 0.5 < indexed.mass_covered_selecting < 1.0


def test_full_selection_equals_dense_attention() -> None:
    served = run(shape={"topk": 40, "yarn_factor": 16.0})
    assert served.errors is not None
    assert all(errors.dense_error < 1e-5 for errors in served.errors)


@pytest.mark.parametrize(("cache", "low", "high"), [("v4-fp8", 0.01, 0.06), ("v4-bf16", 1e-3, 1e-2)])
def test_quantisation_error_is_that_of_the_format(cache: str, low: float, high: float) -> None:
    served = run(cache=cache)
    assert served.errors is not None
    for errors in served.errors:
        assert low < errors.quantisation_error < high


def test_the_measurement_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Disturbed(V4Probe):
        def compare(self, layer: int, spans: Any, given: Any, select: Any, out: torch.Tensor) -> None:
            if layer == 1:
                super().compare(layer, spans, given, lambda: select().clamp_max(0), out)
            else:
                super().compare(layer, spans, given, select, out * 1.5)

    monkeypatch.setattr(tamis.lab.demo.v4_server, "V4Probe", Disturbed)
    served = run()
    assert served.errors is not None
    assert served.errors[0].quantisation_error == pytest.approx(0.5, rel=1e-3)
    assert served.errors[1].quantisation_error > 1e-3
    assert served.errors[2].quantisation_error == pytest.approx(0.5, rel=1e-3)


def test_neither_budget_nor_pages_nor_mode_change_the_tokens() -> None:
    whole = run(token_budget=1000, check=False)
    assert run(token_budget=7, check=False).generated == whole.generated
    assert run(page_size=32, check=False).generated == whole.generated
    quantised = run(cache="v4-fp8")
    # FP8 values times power-of-two scales fit into bf16, so the workspace's rounding changes nothing.
    separate = run(cache="v4-fp8", mode="separate")
    assert (quantised.mode, separate.mode) == ("mixed", "separate")
    assert separate.generated == quantised.generated
    assert len({token for tokens in whole.generated for token in tokens}) > 8


def test_windows_and_state_stay_small_and_all_pages_come_back() -> None:
    server = V4Server(V4Shape(**SMALL), workload(token_budget=8, max_prompt=250, check=False))
    pools = {name: pool for name, (pool, _) in server.scheduler.windows.items()}
    assert sorted(pools) == ["state32", "state4", "window"]
    # Far fewer pages than for all tokens of all requests.
    lengths = sum(r.cache_length for r in server.requests)
    assert all(pool.pages * pool.page_size < lengths or name == "window" for name, pool in pools.items())
    served = run_server(server, None)
    assert all(pool.free_pages == pool.pages - 1 for pool in pools.values())
    assert served.free_pages == served.pages
    assert served.tokens_attended < 0.5 * served.tokens_in_context


def test_scheduler_gives_pages_back_while_a_request_runs() -> None:
    pool = PagePool(20, 4)
    scheduler = Scheduler([Request(0, [1] * 30, arrival=0, new_tokens=2)], PagePool(20, 4), 8, {"window": (pool, 6)})
    while not scheduler.finished:
        chunks = scheduler.next_chunks()
        batch = scheduler.batch(chunks)
        assert batch.other_pages["window"].slots.min() >= 0
        scheduler.complete(chunks, [0] * sum(p.predicts for p in chunks))
        if scheduler.running:
            kept = scheduler.running[0].cached - 5
            held = pool.block_table([0])[0]
            assert ((held >= 0) == (torch.arange(len(held)) >= max(kept, 0) // 4)).all()
    assert pool.free_pages == 19


def test_pool_forgets_pages() -> None:
    pool = PagePool(10, 4)
    pool.extend("a", 14)
    pool.forget("a", -3)
    pool.forget("a", 11)
    assert (pool.block_table(["a"])[0] >= 0).tolist() == [False, False, True, True]
    pool.forget("a", 11)
    assert pool.free_pages == 7
    assert pool.slots("a", 8, 14).min() > 0
    with pytest.raises(ValueError, match="start must be in a page that was not freed by forget, got 7"):
        pool.slots("a", 7, 9)
    pool.extend("a", 18)
    assert (pool.block_table(["a"])[0] >= 0).tolist() == [False, False, True, True, True]
    pool.release("a")
    assert pool.free_pages == 9


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["demo", "--model", "v4", "--requests", "2", "--max-prompt", "40", "--new-tokens", "2"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "entry of 128 tokens" in text
    assert "Served 2/2 requests; all cache pages were freed." in text
    assert main([*arguments, "--cache", "v32-fp8"]) != 0
    assert "--cache must be one of v4-fp8, v4-bf16, v4-fp32 for --model v4; got 'v32-fp8'." in capsys.readouterr().err
    assert main([*arguments, "--page-size", "64"]) != 0
    assert "--page-size must be a multiple of 128 for these layers of v4, got 64" in capsys.readouterr().err


def test_impossible_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="heads must be a multiple of the 2 output groups, got 3"):
        V4Shape(heads=3)
    with pytest.raises(ValueError, match="layers must be between 1 and 64"):
        V4Shape(layers=0)
