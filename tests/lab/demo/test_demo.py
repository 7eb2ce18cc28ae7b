"""The demonstration's serving loop, model and measurement."""

from typing import Any

import pytest
import torch

import tamis.lab.demo.mla_server
import tamis.layers.mla_gathered
from tamis.cache.pool import PagePool
from tamis.lab.demo.outcome import Served
from tamis.lab.demo.requests import Request, Scheduler, make_requests
from tamis.lab.demo.serve import serve
from tamis.lab.demo.shape import ModelShape, Workload
from tamis.lab.testing.mla_probe import MLAProbe
from tamis.ops.gather.operations import GatherKv, gather_kv


def run(*, layers: int = 2, heads: int = 4, topk: int = 16, yarn_factor: float = 1.0, **workload: Any) -> Served:
    settings: dict[str, Any] = {"requests": 5, "max_prompt": 90, "new_tokens": 4, "token_budget": 48} | workload
    return serve(ModelShape(layers=layers, heads=heads, topk=topk, yarn_factor=yarn_factor), Workload(**settings))


def test_exact_rows_and_full_selection_equal_dense_attention() -> None:
    served = run(cache="v32-fp32", topk=96)
    assert served.tokens_attended == served.tokens_in_context
    assert served.errors is not None
    for errors in served.errors:
        assert errors.dense_error < 1e-4
        assert errors.quantisation_error < 1e-4
        assert errors.mass_covered == pytest.approx(1.0, abs=1e-5)
        assert errors.mass_covered_selecting is None


@pytest.mark.parametrize(("cache", "low", "high"), [("v32-fp8", 0.01, 0.06), ("v32-bf16", 1e-3, 1e-2)])
def test_quantisation_error_is_that_of_the_format(cache: str, low: float, high: float) -> None:
    served = run(cache=cache)
    assert served.errors is not None
    for errors in served.errors:
        assert low < errors.quantisation_error < high
        assert errors.quantisation_error < errors.dense_error


def test_fp32_rows_leave_only_the_selections_error() -> None:
    served = run(cache="v32-fp32")
    assert served.errors is not None
    for errors in served.errors:
        assert errors.quantisation_error < 1e-5
        assert errors.dense_error > 1e-2


@pytest.mark.parametrize(("heads", "yarn_factor"), [(1, 1.0), (8, 1.0), (8, 40.0)])
def test_indexer_finds_what_attention_looks_at(heads: int, yarn_factor: float) -> None:
    served = run(heads=heads, topk=32, max_prompt=300, requests=2, token_budget=128, yarn_factor=yarn_factor)
    assert served.tokens_attended < 0.3 * served.tokens_in_context
    assert served.errors is not None
    for errors in served.errors:
        assert errors.mass_covered_selecting is not None
        assert errors.mass_covered_selecting > 0.85


def test_probe_counts_a_wrong_output_and_a_wrong_selection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disturbed inputs must raise the measured errors."""

    class Disturbed(MLAProbe):
        def compare(self, layer: int, spans: Any, q: Any, rows: Any, positions: Any, out: torch.Tensor) -> None:
            if layer == 0:
                super().compare(layer, spans, q, rows, positions, out * 1.5)
            else:
                super().compare(layer, spans, q, rows, positions.clamp_max(0), out)

    monkeypatch.setattr(tamis.lab.demo.mla_server, "MLAProbe", Disturbed)
    served = run(cache="v32-fp32")
    assert served.errors is not None
    assert served.errors[0].quantisation_error == pytest.approx(0.5, rel=1e-3)
    assert served.errors[1].quantisation_error > 0.5
    assert served.errors[1].mass_covered < 0.5


def test_token_budget_does_not_change_the_tokens() -> None:
    whole, chunked = (run(cache="v32-fp32", token_budget=budget) for budget in (1000, 7))
    assert sum(chunked.steps.values()) > 2 * sum(whole.steps.values())
    assert chunked.generated == whole.generated


def test_page_size_does_not_change_the_tokens() -> None:
    assert run(page_size=1, check=False).generated == run(page_size=64, check=False).generated


def test_seed_decides_the_tokens() -> None:
    first, again, other = (run(seed=seed, check=False) for seed in (3, 3, 4))
    assert first.generated == again.generated
    assert first.generated != other.generated


def test_generated_tokens_vary() -> None:
    """If greedy output were constant, the equalities above would prove nothing."""
    tokens = [token for tokens in run(check=False).generated for token in tokens]
    assert len(set(tokens)) > len(tokens) // 2


def test_separate_mode_agrees_with_mixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8 values times power-of-two scales fit into bf16, so the workspace's rounding changes nothing."""
    gathers: list[int] = []

    def counted(call: GatherKv) -> None:
        gathers.append(1)
        gather_kv(call)

    monkeypatch.setattr(tamis.layers.mla_gathered, "gather_kv", counted)
    mixed = run(mode="mixed")
    assert not gathers
    separate = run(mode="separate")
    assert len(gathers) >= 2 * (separate.steps["prefill"] + separate.steps["mixed"])
    assert (mixed.mode, separate.mode) == ("mixed", "separate")
    assert mixed.steps == separate.steps
    assert mixed.generated == separate.generated
    for one, other in zip(mixed.errors or [], separate.errors or [], strict=True):
        assert other.quantisation_error == pytest.approx(one.quantisation_error, rel=1e-3)


def test_auto_mode_follows_the_heads() -> None:
    small = {"requests": 2, "max_prompt": 12, "new_tokens": 2, "layers": 1}
    assert run(heads=31, **small).mode == "mixed"
    assert run(heads=32, **small).mode == "separate"


def test_all_kinds_of_steps_run_and_pages_come_back() -> None:
    served = run()
    assert all(count > 0 for count in served.steps.values())
    assert served.free_pages == served.pages
    assert served.prefill_tokens == sum(Workload(requests=5, max_prompt=90).prompt_lengths)
    assert served.decode_tokens == 5 * 3
    assert [len(tokens) for tokens in served.generated] == [4] * 5


def test_progress_reaches_the_total() -> None:
    seen: list[tuple[int, int]] = []
    served = serve(
        ModelShape(layers=1, heads=1, topk=4),
        Workload(requests=2, max_prompt=9, new_tokens=2, arrival_gap=5, token_budget=4),
        lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (served.tokens, served.tokens)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_scheduler_puts_decodes_first_within_the_budget() -> None:
    prompts = ([1] * 5, [2] * 30, [3] * 4)
    requests = [Request(n, prompt, arrival=n, new_tokens=6) for n, prompt in enumerate(prompts)]
    scheduler = Scheduler(requests, PagePool(50, 4), token_budget=8)
    kinds = []
    while not scheduler.finished:
        chunks = scheduler.next_chunks()
        assert 0 < sum(len(p.tokens) for p in chunks) <= 8
        prefilling = [p.request.prefilling for p in chunks]
        assert prefilling == sorted(prefilling)
        kinds.append([(p.request.name, len(p.tokens)) for p in chunks])
        batch = scheduler.batch(chunks)
        assert batch.lengths.tolist() == [p.end for p in chunks]
        scheduler.complete(chunks, [7] * sum(p.predicts for p in chunks))
    assert kinds[:3] == [[(0, 5)], [(0, 1), (1, 7)], [(0, 1), (1, 7)]]
    assert all(r.generated == [7] * 6 for r in requests)
    assert scheduler.pool.free_pages == 49


def test_scheduler_waits_for_pages() -> None:
    requests = [Request(n, [n] * 8, arrival=0, new_tokens=1) for n in range(3)]
    scheduler = Scheduler(requests, PagePool(4, 4), token_budget=100)  # three pages: one request at a time
    order = []
    while not scheduler.finished:
        chunks = scheduler.next_chunks()
        order.append([p.request.name for p in chunks])
        scheduler.complete(chunks, [0] * len(chunks))
    assert order == [[0], [1], [2]]


def test_prompts_have_all_lengths_and_arrive_one_by_one() -> None:
    workload = Workload(requests=6, max_prompt=100, arrival_gap=3)
    requests = make_requests(ModelShape().vocab, workload)
    assert sorted(len(r.prompt) for r in requests) == workload.prompt_lengths
    assert (min(workload.prompt_lengths), max(workload.prompt_lengths)) == (11, 100)
    assert [r.arrival for r in requests] == [0, 3, 6, 9, 12, 15]
