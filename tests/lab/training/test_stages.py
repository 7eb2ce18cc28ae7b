"""The stages of the training, a few steps each."""

import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tamis.integrations.transformers import indexer_parameters, is_attached  # noqa: E402
from tamis.lab.training import outcome, stages, task  # noqa: E402
from tamis.lab.training.model import V4, V32, Demo, indexers, new_model  # noqa: E402

TINY_V4 = (
    stages.Stage("dense", 3e-3, (stages.Part(64, 8, 10),), 11),
    stages.Stage("warmup", 1e-2, (stages.Part(256, 4, 6),), 7),
    stages.Stage("sparse", 5e-4, (stages.Part(96, 1, 2),), 3),
)
TINY = (
    stages.Stage("dense", 3e-3, (stages.Part(24, 8, 10),), 11),
    stages.Stage("warmup", 3e-3, (stages.Part(72, 1, 6),), 7),
    stages.Stage("sparse", 5e-4, (stages.Part(72, 1, 2),), 3),
)
"""72 tokens are more than top-k. Recall is measured after steps that these stages do not reach."""


@pytest.mark.parametrize(("demo", "tiny"), [(V32, TINY), (V4, TINY_V4)], ids=["v32", "v4"])
def test_losses_fall_and_the_seed_decides_everything(demo: Demo, tiny: tuple[stages.Stage, ...]) -> None:
    reports: list[tuple[int, int]] = []
    model, points = stages.train(5, tiny, lambda done, total: reports.append((done, total)), demo)
    assert reports == [(step, 18) for step in range(1, 19)]
    assert [point.step for point in points] == list(range(1, 19))
    dense, warmup, sparse = ([p for p in points if p.stage == name] for name in ("dense", "warmup", "sparse"))
    assert dense[-1].loss < dense[0].loss - 1
    assert all(point.kl is None for point in dense)
    assert warmup[-1].kl is not None
    assert warmup[0].kl is not None
    assert warmup[-1].kl < warmup[0].kl
    assert all(point.kl is not None and math.isfinite(point.kl) for point in sparse)
    assert not is_attached(model)
    assert all("forward" not in vars(indexer) for indexer in indexers(model))
    again, same = stages.train(5, tiny, demo=demo)
    assert same == points
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)
    assert stages.train(6, tiny[:1], demo=demo)[1] != points[:10]


@pytest.mark.parametrize(("demo", "tiny"), [(V32, TINY), (V4, TINY_V4)], ids=["v32", "v4"])
def test_each_stage_trains_its_own_parameters(demo: Demo, tiny: tuple[stages.Stage, ...]) -> None:
    made = new_model(torch.Generator("cpu").manual_seed(5), demo)
    before = {name: value.clone() for name, value in made.named_parameters()}
    states = [before]
    for count in (1, 2, 3):
        model, _ = stages.train(5, tiny[:count], demo=demo)
        states.append({name: value.detach() for name, value in model.named_parameters()})
    own = set(indexer_parameters(model))
    for stage, (earlier, later) in zip(tiny, pairwise(states), strict=True):
        moved = {name for name, value in later.items() if not torch.equal(value, earlier[name])}
        expected = {"dense": set(later) - own, "warmup": own, "sparse": set(later)}[stage.name]
        # Tokens that no prompt holds keep their rows, but some of every tensor moves.
        assert moved == expected


def test_spread_positions_keep_keys_and_values_together() -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    batch = task.make_batch(generator, 64, 40)
    positions = stages._spread_positions(batch, generator)
    assert (positions[:, 0] == 0).all()
    assert (positions.diff(dim=1) >= 1).all()
    assert int(positions.max()) < stages.LONGEST
    assert int(positions.max()) > stages.LONGEST // 2
    for places in (batch.stated, batch.asked + 1):
        assert (positions.gather(1, places) - positions.gather(1, places - 1) == 1).all()


def test_curves_as_csv(tmp_path: Path) -> None:
    points = [stages.Point("dense", 1, 24, 5.5, 0.0), stages.Point("warmup", 2, 72, 1 / 3, 0.25, kl=2.0, recall=0.5)]
    outcome.save_curves(points, tmp_path / "curves.csv")
    assert (tmp_path / "curves.csv").read_text().splitlines() == [
        "stage,step,tokens,loss,accuracy,kl,recall",
        "dense,1,24,5.5,0,,",
        "warmup,2,72,0.333333,0.25,2,0.5",
    ]


def test_measures_as_csv(tmp_path: Path) -> None:
    answers = [outcome.Answers(1024, "fp8", "random", 1 / 64)]
    outcome.save_outcome(outcome.Outcome(7, 512, [0.5], answers), 12.4, 20.6, "a, machine", tmp_path / "measures.csv")
    assert (tmp_path / "measures.csv").read_text().splitlines() == [
        "measure,value",
        'machine,"a, machine"',
        "training_seconds,12",
        "training_cpu_seconds,21",
        "parameters,7",
        "recall_tokens,512",
        "recall_layer_0,0.5",
        "answers_1024_fp8_random,0.015625",
    ]


def test_missed_bars_are_named() -> None:
    good = outcome.Answers(1024, "fp8", "indexer", 0.99)
    bad = [outcome.Answers(4096, "bf16", "indexer", 0.98), outcome.Answers(1024, "fp8", "random", 0.5)]
    assert outcome.Outcome(1, 512, [0.95, 1.0], [good]).failures() == []
    found = outcome.Outcome(1, 512, [0.94, math.nan], bad).failures()
    assert len(found) == 4
    assert found[0] == "layer 0: recall 94.0% is below 95%"
    assert found[2] == "4096 tokens, bf16 cache: 98.0% of answers right, less than 99%"
