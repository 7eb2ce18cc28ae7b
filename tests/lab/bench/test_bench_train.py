"""`tamis bench train` on a CPU: what is timed, what a wrong result gives, and the peer."""

import csv
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tamis.cli import bench_train, main
from tamis.lab.bench import training
from tamis.lab.bench.record import Machine
from tamis.lab.bench.training import STAGES, TRAIN_COLUMNS, Inputs, Peer, Shape, TrainBench, default_shapes

HOST = torch.device("cpu")
TINY = Shape(tokens=4, rows=12, topk=8, heads=2)


def bench(*, peer: bool = False) -> TrainBench:
    return TrainBench(HOST, "auto", 1, Machine("cpu", "", "", "", "", ""), peer)


def test_every_stage_is_timed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.csv"
    assert main(["bench", "train", "--device", "cpu", "--repeats", "1", "--heads", "2", "--csv", str(file)]) == 0
    printed = capsys.readouterr().out
    assert all(stage in printed for stage in STAGES)
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    assert list(rows[0]) == TRAIN_COLUMNS
    assert [row["stage"] for row in rows] == list(STAGES)
    assert {row["version"] for row in rows} == {"tamis reference"}
    assert all(float(row["error"]) < training.LARGEST_ERROR for row in rows)


def test_a_wrong_result_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = STAGES["backward"]

    def wrong(inputs: Inputs, backend: str) -> tuple[Tensor, list[Tensor], Tensor]:
        dq, drows, dsink = right.call(inputs, backend)
        return dq, [rows * 1.01 for rows in drows], dsink

    monkeypatch.setitem(STAGES, "backward", right._replace(call=wrong))
    rows, lines = bench().measure(TINY, "backward")
    assert not rows
    assert lines == ["backward of 2 heads by reference: error 0.01 is above 0.003"]


def test_nan_is_an_infinite_error() -> None:
    one = torch.ones(2, dtype=torch.float64, device=HOST)
    assert training.relative_error(one * torch.nan, one) == torch.inf
    assert training.relative_error(one, one) == 0.0


@pytest.mark.parametrize("option", [["--stage", "attend"], ["--shape", "1q1"], ["--layout", "v32-fp8"]])
def test_options_of_other_suites_are_refused(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "train", "--device", "cpu", *option]) != 0
    assert f"{option[0]} must be left out of `tamis bench train`" in capsys.readouterr().err


def test_shapes_follow_the_device() -> None:
    assert [shape.heads for shape in default_shapes([], [], tiny=False)] == [16, 64, 128]
    assert default_shapes([8], [], tiny=False) == [Shape(4096, 8192, 2048, 8)]
    # There are always enough rows for the selection.
    assert default_shapes([8], [16384], tiny=False)[0].rows == 16384


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Modules with the names and the interface of TileLang's example, which skips rows after a token's own."""
    calls = {"forward": 0, "backward": 0}

    def masked(inputs: Inputs, slots: Tensor) -> Inputs:
        own = torch.arange(inputs.shape.tokens, dtype=torch.int32, device=HOST).unsqueeze(1)
        found = Inputs.__new__(Inputs)
        found.__dict__ |= {name: value for name, value in inputs.__dict__.items() if name != "attended"}
        found.slots = torch.where(slots[0, :, 0] <= own, slots[0, :, 0], -1)
        return found

    made: list[Inputs] = []
    monkeypatch.setattr(training.Peer, "__init__", _seen(training.Peer.__init__, made))

    def forward(q: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        calls["forward"] += 1
        out, lse, _, _ = masked(made[-1], slots).attended
        return out.unsqueeze(0), lse.unsqueeze(0) * 1.4426950408889634

    def backward(
        q: Tensor, rows: Tensor, out: Tensor, dout: Tensor, slots: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        calls["backward"] += 1
        call = masked(made[-1], slots).backward("auto", deterministic=False)
        dq, (drows,), _ = training.attend_rows_backward(call)
        return dq.unsqueeze(0), drows

    for name, functions in (
        ("tilelang", {}),
        ("sparse_mla_fwd", {"sparse_mla_fwd_interface": forward}),
        ("sparse_mla_bwd", {"sparse_mla_bwd": backward}),
    ):
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def _seen(original, made: list[Inputs]):
    def init(peer: Peer, inputs: Inputs) -> None:
        made.append(inputs)
        original(peer, inputs)

    return init


def test_the_peer_is_checked_and_timed_in_turn(standin: dict[str, int]) -> None:
    assert training.find_peer() is None
    one = bench(peer=True)
    rows, wrong = one.measure(TINY, "backward")
    assert not wrong
    assert [row.version for row in rows] == ["tamis reference", "tilelang"]
    assert rows[0].ratio == pytest.approx(rows[1].median_ms / rows[0].median_ms)
    assert rows[1].error is not None
    assert rows[1].error < training.LARGEST_ERROR
    assert standin == {"forward": 2, "backward": 3}  # a check; a forward pass for the times; a warm-up and a round
    # Of what has no counterpart there, only ours is timed.
    assert len(one.measure(TINY, "target")[0]) == 1


def test_an_absent_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tilelang", None)
    assert str(training.find_peer()).startswith("tilelang: ModuleNotFoundError")


def test_the_table_has_a_line_for_each_row() -> None:
    rows, _ = bench().measure(TINY, "forward")
    assert "tamis reference" in bench_train.train_table(rows)
