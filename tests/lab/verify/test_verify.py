"""`tamis verify`: passes if the stages are right, fails if one is not, and says which checks do not apply."""

import json
import math
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module

import pytest
import torch
from torch import Tensor

import tamis.backends
import tamis.cli.verify
from tamis import Planner
from tamis.backends import BACKENDS, Backend
from tamis.cli import main
from tamis.lab import verify
from tamis.lab.verify import repeat, run_checks
from tamis.lab.verify.check import Check, Target, Trial, judge
from tamis.ops.compress.operations import CompressKv
from tamis.ops.index.block_operations import IndexTopkAndBlocks, IndexTopkWithin
from tamis.ops.index.operations import IndexScores, RaggedScores, WriteIndexKeys
from tamis.ops.select.operations import SelectWindow


def by_check(results: list[verify.CheckResult]) -> dict[tuple[str, str], verify.CheckResult]:
    return {(r.stage, r.check): r for r in results}


def test_verify_passes_on_a_cpu_and_reports_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"]
    assert {c["stage"] for c in found["checks"]} == set(verify.STAGES)
    for check in found["checks"]:
        if check["state"] == "ok":
            assert check["cases"] > 0
            assert 0 <= check["error"] <= check["bound"]
        else:
            assert check["state"] == "not applicable"
            assert check["note"]
    attend = [c for c in found["checks"] if c["stage"] == "attend"]
    assert sum(c["cases"] for c in attend) > 60
    # The output is rounded to bf16, so a perfect kernel has an error of this size and no less.
    assert {1e-3 < c["error"] < 2e-3 for c in attend if c["check"].startswith("tile maxima")} == {True}


def test_table_and_conclusion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "--device", "cpu", "--quick", "--stage", "translate", "combine"]) == 0
    text = capsys.readouterr().out
    assert "graphs are captured on CUDA devices only" in text
    assert "not applicable" in text
    assert text.splitlines()[-1].startswith("ok: 5 checks, ")
    assert "attend" not in text


def test_stages_of_the_command_are_those_of_the_library() -> None:
    assert tamis.cli.verify.STAGES == verify.STAGES


def nudge(value: Tensor) -> None:
    value.view(-1)[-1] += 1


def break_write(result: None, kv: Tensor, cache, slots: Tensor) -> None:
    cache.storage.view(torch.uint8)[-1, -1, -1] ^= 1


def break_head(result: Tensor, *args: object) -> None:
    result.view(-1)[::7] += 1


def break_compress(result: None, call: CompressKv) -> None:
    call.cache.storage.view(torch.uint8)[..., ::5] ^= 0x41


def break_lengths(result: None, call: SelectWindow) -> None:
    call.lengths[7 % len(call.lengths)] += 1


def break_gather(result: None, *args: Tensor) -> None:
    args[-1][7 % len(args[-1])] += 1


def break_product(result: Tensor, *args: object) -> None:
    result.view(-1)[::7] *= 2


def break_exponents(result: tuple[Tensor, Tensor], *args: object) -> None:
    result[1][-1] += 1


def break_first(result: tuple[Tensor, ...], *args: object, **options: object) -> None:
    nudge(result[0])


def break_output(lse: Tensor, parts: Tensor, lses: Tensor, sink: Tensor | None, out: Tensor) -> None:
    out[-1, -1, -1] += 1


def break_index(result: Tensor, *args: object) -> None:
    result[3] = result[3].clamp_max(0)


def break_blocks(result: None, call: IndexTopkAndBlocks) -> None:
    # The token's newest block is lost.
    call.blocks[call.blocks == (call.lengths.unsqueeze(1) - 1) // call.block_size] = -1


def break_within(result: None, call: IndexTopkWithin) -> None:
    call.out[-1, -1] += 1


def break_scores(result: None, call: IndexScores | RaggedScores) -> None:
    call.out[3:4].mul_(1.001)


def break_keys(result: None, call: WriteIndexKeys) -> None:
    call.cache.storage[0].mul_(1.001)


def break_query(result: tuple[Tensor, Tensor], *args: object) -> None:
    result[0].view(torch.uint8)[-1, -1, -1] ^= 0x80


def break_topk(result: Tensor, *args: object) -> None:
    # The last selected position is replaced by its neighbour: one wrong choice in one row.
    if result.shape[0] == 7 and result.shape[1] > 1:
        count = int((result[0] >= 0).sum())
        result[0, count - 1] += 1


@pytest.mark.parametrize(
    ("stage", "function", "spoil", "also"),
    [
        ("rotate", "rotate_heads", break_head, "v4-layer"),
        ("rotate", "write_rotated", break_compress, None),
        ("compress", "compress_kv", break_compress, "v4-layer"),
        ("compress", "pool_kv", break_head, None),
        ("write", "write_kv", break_write, None),
        ("gather", "gather_kv", break_gather, "layer"),
        ("select", "select_window", break_lengths, None),
        ("translate", "translate_positions", break_first, "layer"),
        ("index", "index_topk", break_index, None),
        ("index", "index_topk_and_blocks", break_blocks, None),
        ("index", "index_topk_within", break_within, None),
        ("index", "index_scores", break_scores, None),
        ("index", "ragged_scores", break_scores, None),
        ("index", "topk_positions", break_topk, None),
        ("index", "write_index_keys", break_keys, None),
        ("index", "quantise_index_query", break_query, None),
        ("attend", "attend_slots", break_first, "layer"),
        ("combine", "combine_parts", break_output, "attend"),
        ("output", "lower_groups", break_product, None),
        ("output", "rotate_to_fp8", break_exponents, None),
    ],
)
def test_a_spoiled_stage_fails(
    stage: str, function: str, spoil, also: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    module = import_module(BACKENDS[-1].stage_module(stage))
    right = getattr(module, function)

    def wrong(*args, **options):
        result = right(*args, **options)
        spoil(result, *args, **options)
        return result

    monkeypatch.setattr(module, function, wrong)
    wanted = [stage] if also is None else [stage, also]
    assert main(["verify", "--device", "cpu", "--quick", "--stage", *wanted]) == 1
    text = capsys.readouterr().out
    failed = [line.split()[0] for line in text.splitlines() if " FAILED " in line]
    assert set(wanted) <= set(failed)
    assert text.splitlines()[-1].startswith("FAILED: ")


@pytest.mark.parametrize(
    ("function", "failing"),
    [
        ("index_scores", {"exact scores"}),
        ("topk_positions", {"exact selections"}),
        ("index_topk", {"exact selections"}),
    ],
)
def test_one_bit_and_one_tie_fail_where_scores_are_known(
    function: str, failing: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors far below the bounds of drawn scores: a score off by its last bit, another one of two equal scores."""
    from tamis.ops.index import reference

    right = getattr(reference, function)

    def wrong(call):
        result = right(call)
        if function == "index_scores":
            call.out.copy_(torch.where(call.out.isfinite(), call.out.nextafter(torch.tensor(torch.inf)), call.out))
            return None
        last = (result >= 0).sum(1) - 1
        # The position behind the last one is as good only where scores are equal, and seen only where more are.
        other = result.gather(1, last.clamp_min(0).unsqueeze(1)).squeeze(1) + 1
        able = (last == result.shape[1] - 1) & (other < call.lengths)
        result[able, -1] = other[able]
        return result

    monkeypatch.setattr(reference, function, wrong)
    found = by_check(run_checks("cpu", stages=["index"], quick=True))
    state = {name: found["index", name].state for name in ("exact scores", "exact selections")}
    assert {name for name, one in state.items() if one == "FAILED"} == failing
    assert "token " in found["index", "exact scores"].note or failing != {"exact scores"}


def test_a_wrong_plan_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Planner.plan

    def wrong(self: Planner, batch):
        plan = right(self, batch)
        plan.positions[0] += 1
        return plan

    monkeypatch.setattr(Planner, "plan", wrong)
    (result,) = run_checks("cpu", stages=["planner"], quick=True)
    assert result.state == "FAILED"
    assert "first at [0]" in result.note


def test_results_that_change_from_run_to_run_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    from tamis.ops.combine import reference

    right, runs = reference.combine_parts, iter(range(10**6))

    def unsteady(call):
        lse = right(call)
        call.out.add_(next(runs) % 2 * 1e-6)
        return lse

    monkeypatch.setattr(reference, "combine_parts", unsteady)
    found = by_check(run_checks("cpu", stages=["combine"], quick=True))
    assert found["combine", "same bits on ten runs"].state == "FAILED"
    assert "run 2: output 0: " in found["combine", "same bits on ten runs"].note
    # The values are within their bound, except for rows that must be exactly zero.
    assert "must be zero" in found["combine", "values, to float32"].note


def test_an_exception_is_a_failed_case_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from tamis.ops.translate import reference

    right = reference.translate_positions

    def fragile(call):
        if call.compact:
            raise RuntimeError("no such kernel")
        return right(call)

    monkeypatch.setattr(reference, "translate_positions", fragile)
    found = by_check(run_checks("cpu", stages=["translate"], quick=True))["translate", "slots"]
    assert found.state == "FAILED"
    assert found.cases == 6
    assert found.note.startswith("2 cases; compact")
    assert "RuntimeError: no such kernel" in found.note


def test_nan_is_no_error_within_any_bound() -> None:
    results = [judge(Check("s", "c", 1.0, [("x", lambda e=e: Trial(e))]), "b", lambda: None) for e in (math.nan, 0.5)]
    assert [r.state for r in results] == ["FAILED", "ok"]
    assert results[0].error == math.inf


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--backend", "flash"], "--backend must be one of auto, "),
        (["--stage", "sieve"], "--stage must be one of rotate, "),
        (["--device", "tpu"], "--device"),
    ],
)
def test_wrong_options(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_absent_device_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["verify", "--device", "cuda"]) == 2
    assert "use --device cpu" in capsys.readouterr().err


def test_a_named_backend_is_checked_on_what_it_claims(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    picky = Backend(
        "picky", "reference", "", stages=("attend", "combine"), heads=(8, 64), query_dtypes=(torch.bfloat16,)
    )
    away = Backend("away", "reference", "", devices=("cuda",))
    monkeypatch.setattr(tamis.backends, "BACKENDS", (picky, away, *BACKENDS))
    found = run_checks("cpu", "picky", quick=True)
    # Under another name the reference stands for a kernel that claims more than it can do.
    assert {r.check for r in found if not r.ok} <= {"same bits alone and in a batch"}
    assert {r.cases for r in found if (r.stage, r.check) == ("write", "bytes")} == {0}
    everything = run_checks("cpu", "reference", ["attend"], quick=True)
    applied, all_cases = ({r.check: r.cases for r in run if r.stage == "attend"} for run in (found, everything))
    assert applied["values, fp32 queries"] == 0 < all_cases["values, fp32 queries"]
    assert 0 < applied["values, bf16 queries"] < all_cases["values, bf16 queries"]
    reasons = {r.note for r in found if r.state == "not applicable"}
    assert "picky does not claim any of these cases" in reasons
    assert "picky does not have this stage" in reasons
    assert main(["verify", "--device", "cpu", "--backend", "picky", "--stage", "write"]) == 1
    assert "no check applies" in capsys.readouterr().out
    assert main(["verify", "--device", "cpu", "--backend", "away"]) == 2
    assert "backend 'away' needs a CUDA device" in capsys.readouterr().err


def test_only_backends_that_claim_it_are_captured() -> None:
    gpu = torch.device("cuda")
    assert "reference does not claim" in Target(gpu, "reference").not_capturable(["attend"])
    assert "CUDA devices only" in Target(torch.device("cpu")).not_capturable(["attend"])
    claimed = replace(
        repeat.graph_check(Target(gpu, "triton"), "attend", ["attend"], []), trials=[("x", lambda: Trial(1.0))]
    )
    assert "declares Backend(capturable=False)" in judge(claimed, "triton", lambda: None).note


class FakeGraph:
    """Stands in for a CUDA graph: replays the call made while it was capturing, on the same tensors."""

    capturing: "FakeGraph | None" = None

    def replay(self) -> None:
        for kept, new in zip(self.outputs, self.call(*self.inputs), strict=True):
            kept.copy_(new)


@pytest.mark.parametrize("stale", [False, True])
def test_replays_are_compared_with_eager_calls(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def graph(made: FakeGraph):
        FakeGraph.capturing = made
        yield
        FakeGraph.capturing = None

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def double(values: Tensor) -> list[Tensor]:
        return [values * 2]

    def call(values: Tensor) -> list[Tensor]:
        outputs = double(values)
        if FakeGraph.capturing is not None:
            made = FakeGraph.capturing
            # A stale graph has kept a copy of its inputs instead of their address.
            made.call, made.inputs, made.outputs = double, [values.clone() if stale else values], outputs
        return outputs

    trial = repeat._replay(lambda: ([torch.ones(3)], [torch.arange(3.0)], call))
    assert trial.error == (2 if stale else 0)
    assert ("first at [0]" in trial.note) == stale
