"""Runs engines in processes of their own, which start together and then generate one after the other, in turns.

The script that starts a `Race` is also what each process runs: with `serve_name` set, it starts its engine and gives
`take_turns` a function that generates once. The two sides know each other by empty files: an engine writes `ready`,
and `done` after every turn; the race writes `go` when it is that engine's turn. Nothing else uses the GPU while one
engine is timed. Odd turns run in the opposite order, so that no engine always follows the same one.

The cores of a shared host differ in speed by up to 1.7, and small models are bound by the host. So all engines have the
same few cores in a turn, each alone, and other ones in the next turn.
"""

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TAIL = 40
"""How many lines of a failed engine's log are printed."""
BATCHES = {"eager": 1, "graph": 3}
"""How many batches an engine generates in a turn, of which the median counts: those with graphs are short."""
CORES = 4
"""How many cores an engine has to itself in its turn."""


def engine_parser(
    description: str | None, *, results: str, limit: float, rounds: int | None = None, serves: bool = True
) -> argparse.ArgumentParser:
    """The options that benchmarks of engines have in common.

    Args:
        description: what the benchmark says about itself.
        results: the folder of `benchmarks/results` that its tables are in.
        limit: seconds after which engines are stopped.
        rounds: timed turns of each engine; None where there are no turns.
        serves: whether the processes of the race run the same script, and learn from it what to serve.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    out = Path("benchmarks/results") / results
    parser.add_argument("--out", type=Path, default=out, help="folder for the tables")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs and tokens")
    if rounds is not None:
        described = "timed turns of each engine; the median counts"
        parser.add_argument("--rounds", type=int, default=rounds, help=described)
    parser.add_argument("--limit", type=float, default=limit, help="seconds after which running engines are stopped")
    if serves:
        parser.add_argument("--serve", help=argparse.SUPPRESS)
        parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


@dataclass(frozen=True)
class Process:
    """How to start an engine."""

    command: Sequence[str]
    environment: Mapping[str, str]


class Race:
    """The processes of several engines."""

    def __init__(self, processes: Mapping[str, Process], folder: Path, turns: int, limit: float) -> None:
        self.folder, self.turns = folder, turns
        self.deadline = time.monotonic() + limit
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        for name, process in processes.items():
            with (folder / f"{name}.log").open("w") as log:
                self.processes[name] = subprocess.Popen(
                    process.command, stdout=log, stderr=subprocess.STDOUT, env=process.environment
                )

    def wait(self, name: str, mark: str) -> bool:
        """Wait until the engine has written this mark; False if it died or timed out."""
        path = self.folder / f"{name}.{mark}"
        while not path.exists():
            if self.processes[name].poll() is not None or time.monotonic() > self.deadline:
                return path.exists()
            time.sleep(0.01)
        return True

    def place(self, active: str, turn: int) -> None:
        """Give the engine whose turn it is some cores, and all other engines the rest."""
        busy, rest = split_cores(sorted(os.sched_getaffinity(0)), turn)
        for name, process in self.processes.items():
            for thread in threads_of(process.pid):
                try:
                    os.sched_setaffinity(thread, busy if name == active else rest)
                except ProcessLookupError:  # a thread may end at any time
                    continue

    def run(self, lock: Path | None = None) -> dict[str, dict[str, Any]]:
        """The results of the engines that succeeded, by name. Races with the same lock start their engines side by side
        and take their turns one after the other."""
        began = time.monotonic()
        alive = [name for name in self.processes if self.wait(name, "ready")]
        spent = time.monotonic() - began
        print(f"{len(alive)} of {len(self.processes)} engines ready after {spent:.0f} s", flush=True)
        with alone(lock):
            for turn in range(self.turns):
                for name in list(alive if turn % 2 == 0 else reversed(alive)):
                    self.place(name, turn)
                    (self.folder / f"{name}.go{turn}").touch()
                    if not self.wait(name, f"done{turn}"):
                        alive.remove(name)
        results = {
            name: json.loads((self.folder / f"{name}.json").read_text()) for name in alive if self.wait(name, "json")
        }
        spent = time.monotonic() - began
        print(f"{len(results)} of {len(self.processes)} engines done after {spent:.0f} s", flush=True)
        for name, process in self.processes.items():
            if process.poll() is None:
                process.kill()
            process.wait()
            if name not in results:
                lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
                print(f"--- {name} did not get through; the end of its log:", *lines[-TAIL:], sep="\n", flush=True)
        return results


@contextmanager
def alone(lock: Path | None) -> Iterator[None]:
    """The block in which no other holder of the lock takes turns."""
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def split_cores(cores: Sequence[int], turn: int) -> tuple[set[int], set[int]]:
    """The cores of the active engine in a turn, and those of all others. Few cores are not divided."""
    groups = len(cores) // CORES
    if groups < 2:
        return set(cores), set(cores)
    first = turn % groups * CORES
    busy = set(cores[first : first + CORES])
    return busy, set(cores) - busy


def threads_of(process: int) -> list[int]:
    """The threads of a process and of all processes that it has started."""
    found = []
    for folder in Path("/proc").glob(f"{process}/task/[0-9]*"):
        found.append(int(folder.name))
        try:
            children = (folder / "children").read_text().split()
        except OSError:  # the thread has just ended
            continue
        for child in children:
            found += threads_of(int(child))
    return found


def median_batch(once: Callable[[], tuple[float, Any]], mode: str) -> tuple[float, Any]:
    """The median of the seconds of a turn's batches, and the outputs of the last."""
    runs = [once() for _ in range(BATCHES[mode])]
    return statistics.median(seconds for seconds, _ in runs), runs[-1][1]


def take_turns(name: str, folder: Path, turns: int, once: Callable[[], Any]) -> list[Any]:
    """Call `once` whenever it is this engine's turn. Runs in the engine's process, warmed up."""
    (folder / f"{name}.ready").touch()
    found = []
    for turn in range(turns):
        go = folder / f"{name}.go{turn}"
        while not go.exists():
            time.sleep(0.01)
        found.append(once())
        (folder / f"{name}.done{turn}").touch()
    return found


def write_result(name: str, folder: Path, result: Mapping[str, Any]) -> None:
    """Hand an engine's result to the race, whole or not at all."""
    written = folder / f"{name}.part"
    written.write_text(json.dumps(result))
    written.rename(folder / f"{name}.json")
