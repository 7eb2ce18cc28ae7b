"""Medians with spread, comparisons of tokens and conditions, which all engine benchmarks share."""

import csv
import fcntl
import importlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def numbers() -> ModuleType:
    return importlib.import_module("engine_results")


def result(tokens: list[list[int]], shift: float = 0.0) -> dict[str, Any]:
    logprobs = [[-1.0 - shift * number for number in range(len(row))] for row in tokens]
    return {"tokens": tokens, "logprobs": logprobs, "margins": [[0.25 * token for token in row] for row in tokens]}


def test_spread(numbers: ModuleType) -> None:
    spread = numbers.Spread.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert (spread.lowest, spread.lower_quartile, spread.median, spread.upper_quartile, spread.highest) == (
        1,
        2,
        3,
        4,
        5,
    )
    assert str(spread) == "3 (quartiles 2 to 4, all 1 to 5, 5 turns)"
    assert spread.columns("seconds") == {
        "turns": "5",
        "seconds_median": "3",
        "seconds_lowest": "1",
        "seconds_lower_quartile": "2",
        "seconds_upper_quartile": "4",
        "seconds_highest": "5",
    }
    assert numbers.Spread.of([0.5]) == numbers.Spread(1, 0.5, 0.5, 0.5, 0.5, 0.5)


def test_throughput_goes_by_medians(numbers: ModuleType) -> None:
    # The best turn of the first engine is the fastest of all, but its median is twice the other's.
    own, peer = {"seconds": [0.1, 2.0, 2.0]}, {"seconds": [1.0, 1.0, 1.0]}
    assert numbers.speed_ratio(own, peer) == 0.5
    assert numbers.speed_ratio(own, None) is None
    assert numbers.turns_taken([own, {"seconds": [1.0]}]) == 1
    assert numbers.turns_taken([own, None]) is None


def test_comparisons(numbers: ModuleType) -> None:
    one, other = result([[1, 2, 3], [4, 5, 6]]), result([[1, 2, 3], [4, 7, 6]], shift=0.1)
    assert numbers.equal_share(one, other) == pytest.approx(5 / 6)
    # Up to the first difference: shifts 0, 0.1, 0.2 of the first prompt, 0 of the second.
    assert numbers.logprob_difference(one, other) == pytest.approx(0.3 / 4)
    assert numbers.first_differences(one, other) == "none, 1 (margin 1.250)"
    assert numbers.equal_share(one, None) is None
    assert numbers.equal_share(one | {"again": [[1, 1, 1], [1, 1, 1]]}, one, "again") == pytest.approx(1 / 6)
    assert numbers.logprob_difference(None, one) is None
    entries = {7: SimpleNamespace(logprob=-2.0), 8: SimpleNamespace(logprob=-0.5), 9: SimpleNamespace(logprob=-3.0)}
    assert importlib.import_module("vllm_process").margin(entries) == 1.5


def test_verdict(numbers: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = numbers.Condition("a", 1.0, 1.0), numbers.Condition("b", 2.0, 1.0, at_least=False)
    assert numbers.verdict([good]) == 0
    assert numbers.verdict([good, bad]) == 1
    assert capsys.readouterr().out == "PASS a: 1 (>= 1)\nPASS a: 1 (>= 1)\nFAIL b: 2 (<= 1)\n"


def test_rows(numbers: ModuleType, tmp_path: Path) -> None:
    numbers.write_rows(tmp_path / "made" / "table.csv", [{"a": "1", "b": ""}, {"a": "2", "b": "3"}])
    with (tmp_path / "made" / "table.csv").open() as file:
        assert list(csv.DictReader(file)) == [{"a": "1", "b": ""}, {"a": "2", "b": "3"}]


CHILD = """
import sys, pathlib
sys.path.insert(0, sys.argv[1])
from engine_race import take_turns, write_result
name, folder = sys.argv[2], pathlib.Path(sys.argv[3])
if name == "broken":
    print("the reason")
    raise SystemExit(1)
def once():
    with (folder / "order").open("a") as file:
        file.write(name + " ")
    return len(name)
write_result(name, folder, {"seconds": take_turns(name, folder, 3, once)})
"""


def test_a_race_takes_turns_and_survives_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    race = importlib.import_module("engine_race")
    command = [sys.executable, "-c", CHILD, str(ROOT / "benchmarks")]
    processes = {name: race.Process([*command, name, str(tmp_path)], {}) for name in ("one", "broken", "three")}
    results = race.Race(processes, tmp_path, 3, 60.0).run()
    assert results == {"one": {"seconds": [3] * 3}, "three": {"seconds": [5] * 3}}
    # Odd turns run the other way round.
    assert (tmp_path / "order").read_text() == "one three three one one three "
    printed = capsys.readouterr().out
    assert "2 of 3 engines ready" in printed
    assert "--- broken did not get through; the end of its log:\nthe reason" in printed
    assert json.loads((tmp_path / "one.json").read_text()) == results["one"]


def test_options_that_benchmarks_share() -> None:
    race = importlib.import_module("engine_race")
    turns = race.engine_parser("text", results="vllm", limit=9.0, rounds=7).parse_args(["--serve", "one"])
    assert (turns.out, turns.rounds, turns.limit, turns.serve) == (Path("benchmarks/results/vllm"), 7, 9.0, "one")
    alone = vars(race.engine_parser("text", results="sglang", limit=9.0, serves=False).parse_args(["--limit", "2"]))
    assert alone == {"out": Path("benchmarks/results/sglang"), "logs": None, "limit": 2.0}


def test_a_race_stops_at_its_limit(tmp_path: Path) -> None:
    race = importlib.import_module("engine_race")
    slow = race.Process([sys.executable, "-c", "import time; time.sleep(60)"], {})
    assert race.Race({"slow": slow}, tmp_path, 1, 0.2).run() == {}


def test_cores_of_a_turn() -> None:
    race = importlib.import_module("engine_race")
    assert race.split_cores(range(16), 0) == ({0, 1, 2, 3}, set(range(4, 16)))
    assert race.split_cores(range(16), 5) == ({4, 5, 6, 7}, {*range(4), *range(8, 16)})
    assert race.split_cores([2, 3, 5], 1) == ({2, 3, 5}, {2, 3, 5})


def test_the_active_engine_has_its_cores_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    race = importlib.import_module("engine_race")
    # An engine that starts a process of its own, which must move with it.
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    processes = {name: race.Process([sys.executable, "-c", code], {}) for name in ("one", "two")}
    run = race.Race(processes, tmp_path, 1, 60.0)
    try:
        deadline = time.monotonic() + 30
        while min(len(race.threads_of(process.pid)) for process in run.processes.values()) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        placed: dict[int, set[int]] = {}
        monkeypatch.setattr(race.os, "sched_getaffinity", lambda _: set(range(8)))
        monkeypatch.setattr(race.os, "sched_setaffinity", placed.__setitem__)
        run.place("two", 1)
        for name, cores in (("one", {0, 1, 2, 3}), ("two", {4, 5, 6, 7})):
            threads = race.threads_of(run.processes[name].pid)
            assert len(threads) >= 2
            assert all(placed[thread] == cores for thread in threads)
    finally:
        for process in run.processes.values():
            for thread in reversed(race.threads_of(process.pid)):
                os.kill(thread, signal.SIGKILL)
            process.wait()


def test_the_median_batch_of_a_turn_counts() -> None:
    race = importlib.import_module("engine_race")
    runs = iter([(5.0, "a"), (1.0, "b"), (2.0, "c")])
    assert race.median_batch(lambda: next(runs), "graph") == (2.0, "c")
    assert race.median_batch(lambda: (3.0, "d"), "eager") == (3.0, "d")


def test_races_with_one_lock_take_turns_one_after_the_other(tmp_path: Path) -> None:
    race = importlib.import_module("engine_race")
    lock = tmp_path / "lock"
    with race.alone(lock), lock.open() as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with race.alone(lock), race.alone(None):
        pass
