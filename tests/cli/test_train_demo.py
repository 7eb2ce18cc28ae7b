"""`tamis train-demo`: a few steps end to end, and what it refuses."""

import json
from pathlib import Path

import pytest

from tamis.cli import main

transformers = pytest.importorskip("transformers")


def test_a_quick_run_writes_a_checkpoint_that_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "recall"
    assert main(["train-demo", "--quick", "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["command"], found["ok"], found["quick"], found["out"]) == ("train-demo", True, True, str(out))
    assert [point["stage"] for point in found["curves"]] == ["dense"] * 12 + ["warmup"] * 6 + ["sparse"] * 4
    assert found["curves"][11]["loss"] < found["curves"][0]["loss"]
    assert sum(point["recall"] is not None for point in found["curves"]) == 3
    assert len(found["recall"]) == 2
    assert {(one["tokens"], one["selecting"]) for one in found["answers"]} == {(1024, "indexer"), (1024, "random")}
    assert found["failures"] == []
    assert len((out / "curves.csv").read_text().splitlines()) == 23
    assert (out / "model.safetensors").stat().st_size < 2_000_000
    options = ["--device", "cpu", "--prompt", "<s> w1 k7 v3 k7", "--max-new-tokens", "2", "--json"]
    assert main(["generate", "--checkpoint", str(out), *options]) == 0
    assert json.loads(capsys.readouterr().out)["prompt"] == [0, 163, 9, 101, 9]
    # Training takes minutes, so a folder that may not be overwritten is refused before it.
    assert main(["train-demo", "--quick", "--out", str(out)]) == 2
    assert "--force overwrites them" in capsys.readouterr().err


def test_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from tamis.lab.training import outcome, stages

    points = [
        stages.Point("dense", 1, 24, 5.5, 0.0),
        stages.Point("warmup", 2, 72, 0.5, 0.25, kl=2.0, recall=0.5),
        stages.Point("sparse", 3, 72, 0.125, 1.0, kl=0.25),
    ]
    answers = [outcome.Answers(1024, "fp8", "indexer", 0.5), outcome.Answers(1024, "fp8", "random", 0.0)]
    monkeypatch.setattr(stages, "train", lambda *_: (None, points))
    monkeypatch.setattr(outcome, "served_outcome", lambda *_, **__: outcome.Outcome(7000, 512, [1.0, 0.9], answers))
    assert main(["train-demo"]) == 1
    found = capsys.readouterr().out
    assert "FAILED: layer 1: recall 90.0% is below 95%" in found
    assert "FAILED: 1024 tokens, fp8 cache: 50.0% of answers right, less than 99%" in found
    assert "right answers at 1024 tokens, fp8 cache, random selection" in found
    assert "7,000 parameters" in found
    assert "nothing was written (--out)" in found
    # What a quick run did not learn is no failure.
    assert main(["train-demo", "--quick"]) == 0
    assert "FAILED" not in capsys.readouterr().out


def test_places_that_cannot_be_written_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "nowhere" / "recall"):
        assert main(["train-demo", "--out", str(place)]) == 2
        assert "--out must be a folder, or a new one in an existing folder" in capsys.readouterr().err


def test_a_folder_is_tried_before_the_minutes_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tamis.lab.training.stages.train", pytest.fail)
    monkeypatch.setattr("os.access", lambda *given: False)  # root may write anywhere
    assert main(["train-demo", "--out", str(tmp_path)]) == 2
    assert "--out must be a folder that can be written to, got " in capsys.readouterr().err
    if Path("/proc/self").is_dir():  # where not even root can make a folder
        assert main(["train-demo", "--out", "/proc/recall"]) == 2
        assert "/proc/recall" in capsys.readouterr().err
