"""Runs SGLang's own attention kit for its FlashMLA implementations and for tamis, side by side, and times decode steps.

    python benchmarks/sglang_kit.py --archive dist/sglang_sm90.tar.xz --out results

The kit is part of the package (`sglang/test/kits/attention_unittest`): SGLang's backends, pools and metadata without an
engine and without weights. `sglang_kit_cases.py` says what its verdicts are worth. Every implementation runs in
processes of its own, all at once; then `sglang_decode.py` times steps alone. A table of verdicts and relative errors is
printed, and written with all details to `sglang_kit.json`; times are written to `h200_sglang_decode.csv`. Conditions
are judged at the end. Without `--archive`, SGLang must be installed.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engine_results import Condition, verdict
from sglang_kit_cases import ENGINES, SETTINGS
from sglang_process import child_environment, prepare

HERE = Path(__file__).resolve().parent
Rows = dict[tuple[str, str, str, str], dict[str, Any]]
# Relative errors against the kit's reference, whose keys are not rounded to FP8.
BOUNDS = {"bf16": 0.01, "fp8": 0.06}


class Group:
    """The processes of one implementation and one kind of cases, one after the other."""

    def __init__(self, number: int, kind: str, engine: str, folder: Path) -> None:
        self.name, self.folder, self.starts = f"{kind}-{engine}", folder, 0
        self.command = [sys.executable, str(HERE / "sglang_kit_cases.py"), "--group", kind, "--engine", engine]
        self.command += ["--folder", str(folder)]
        self.environment = child_environment(number, folder)
        self.start()

    def start(self) -> None:
        self.starts += 1
        with (self.folder / f"{self.name}.log").open("a") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=subprocess.STDOUT, env=self.environment)

    def finished(self) -> bool:
        """Whether there is nothing left to run; starts a process again that died in a case."""
        if self.process.poll() is None:
            return False
        log = self.folder / f"{self.name}.jsonl"
        if not (self.folder / f"{self.name}.done").exists() and self.starts < 8 and log.exists():
            self.start()
            return False
        return True

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if not (self.folder / f"{self.name}.done").exists():
            lines = (self.folder / f"{self.name}.log").read_text(errors="replace").splitlines()
            print(f"--- {self.name} did not get through; the end of its log:", *lines[-15:], sep="\n", flush=True)


def read(folder: Path) -> Rows:
    """The last line about every case."""
    rows: Rows = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["group"], row["case"], row["setting"], row["engine"]] = row
    return rows


def outputs(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The outputs of all processes of a group."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob(f"{name}.*.pt"):
        found |= torch.load(path)
    return found


def cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{row['verdict']} {max(row['errors']):.4f}" if row["errors"] else str(row["verdict"])


def print_table(rows: Rows, kind: str, engines: list[str]) -> None:
    """A line per case: for each engine the kit's verdict and the largest relative error of its comparisons."""
    width = max([12, *map(len, engines)])
    print(f"{kind}, kit's verdict and relative error".ljust(52), *[engine.ljust(width) for engine in engines])
    for case, setting in dict.fromkeys((case, setting) for group, case, setting, _ in rows if group == kind):
        found = [rows.get((kind, case, setting, engine)) for engine in engines]
        if setting == "shipped" and kind == "dsa" and all(row is None or row["verdict"] == "PASS" for row in found):
            continue
        name = case if kind == "v4" else f"{case} {setting}"
        print(name.ljust(52), *[cell(row).ljust(width) for row in found], flush=True)
    for engine in engines:
        mine = [row for (group, _, _, of), row in rows.items() if group == kind and of == engine]
        counts = {
            what: sum(row["verdict"] == what for row in mine) for what in ("PASS", "FAIL", "ERROR", "SKIP", "CRASH")
        }
        print(
            f"{kind} {engine}: {len(mine)} cases,",
            ", ".join(f"{count} {what}" for what, count in counts.items() if count),
        )
    reasons: dict[str, list[str]] = {}
    for (group, case, setting, engine), row in rows.items():
        if group == kind and row["verdict"] != "PASS":
            reasons.setdefault(f"{engine} {row['verdict']}: {row['why']}", []).append(f"{case} {setting}")
    for why, cases in reasons.items():
        print(f"  {why}\n    {len(cases)} cases, first {cases[0]}", flush=True)


def conditions(rows: Rows, kind: str, folder: Path) -> list[Condition]:
    """What tamis must meet: the kit's verdict, errors no larger than bounds, outputs like SGLang's own."""
    mine = {key: row for key, row in rows.items() if key[0] == kind and key[3] == "tamis"}
    if not mine:
        return [Condition(f"{kind}: cases of the kit that ran", None, 1)]
    failed = sum(row["verdict"] not in ("PASS", "SKIP") for row in mine.values())
    found = [Condition(f"{kind}: cases of the kit that tamis does not pass", failed, 0, at_least=False)]
    for cache, bound in BOUNDS.items():
        meant = [row for (_, case, setting, _), row in mine.items() if setting != "shipped" and case.endswith(cache)]
        errors = [error for row in meant for error in row["errors"]]
        if kind == "dsa":
            name = f"dsa {cache}: largest relative error of tamis"
            found.append(Condition(name, max(errors, default=None), bound, at_least=False))
    own = outputs(folder, f"{kind}-tamis")
    for engine in ENGINES if kind == "dsa" else ("own",):
        theirs = outputs(folder, f"{kind}-{engine if kind == 'dsa' else 'flashmla_kv'}")
        if engine == "tamis":
            continue
        pairs = [
            (own[name], theirs[name]) for name in own.keys() & theirs.keys() if "shipped" not in name or kind == "v4"
        ]
        errors = [float((left - right).norm() / right.norm()) for left, right in pairs]
        if errors:
            print(f"{kind}: {len(errors)} outputs of tamis differ from {engine}'s by at most {max(errors):.4f}")
    return found


def run_kit(kinds: list[tuple[str, str]], folder: Path, limit: float) -> None:
    """Run all groups at once."""
    deadline = time.monotonic() + limit
    groups = [Group(number, kind, engine, folder) for number, (kind, engine) in enumerate(kinds)]
    left = list(groups)
    while left and time.monotonic() < deadline:
        left = [group for group in left if not group.finished()]
        time.sleep(0.2)
    for group in groups:
        group.stop()


def run_decode(folder: Path, out: Path, own: bool, limit: float) -> None:
    """Time decode steps in a process that has the GPU to itself."""
    log = folder / "decode.log"
    command = [sys.executable, str(HERE / "sglang_decode.py"), "--out", str(out / "h200_sglang_decode.csv")]
    try:
        with log.open("w") as file:
            subprocess.run(
                [*command, *(["--tamis"] if own else [])],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=child_environment(99, folder),
                timeout=limit,
                check=False,
            )
    except subprocess.TimeoutExpired:
        print(f"decode steps were stopped after {limit:.0f} s")
    table = out / "h200_sglang_decode.csv"
    print(table.read_text() if table.exists() else "no decode step was timed", flush=True)
    lines = log.read_text(errors="replace").splitlines()
    if any("Traceback" in line for line in lines):
        print("--- the end of the log of decode steps:", *lines[-25:], sep="\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, help="what sglang_pack.py wrote; by default SGLang must be installed")
    parser.add_argument("--out", type=Path, required=True, help="folder for the table and the details")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--limit", type=float, default=240, help="seconds for the kit")
    parser.add_argument("--decode-limit", type=float, default=150, help="seconds for decode steps; 0 leaves them out")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    own = "tamis" in options.engines
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        began = time.monotonic()
        prepare(folder, options.archive)
        print(f"unpacked in {time.monotonic() - began:.0f} s", flush=True)
        kinds = [("dsa", engine) for engine in options.engines]
        # V4 has one implementation on Hopper, whatever the options for DSA are.
        kinds += [("v4", engine) for engine in ("flashmla_kv", "tamis") if engine in options.engines]
        run_kit(kinds, folder, options.limit)
        print(f"the kit took {time.monotonic() - began:.0f} s", flush=True)
        rows = read(folder)
        (options.out / "sglang_kit.json").write_text(json.dumps(list(rows.values()), indent=1))
        with (options.out / "sglang_kit.log").open("w") as log:
            for path in sorted(folder.glob("*.log")):
                log.write(f"=== {path.name}\n{path.read_text(errors='replace')[-400_000:]}\n")
        for kind in ("dsa", "v4"):
            print_table(rows, kind, [engine for of, engine in kinds if of == kind])
        found = [condition for kind in ("dsa", "v4") for condition in conditions(rows, kind, folder)] if own else []
        if options.decode_limit:
            run_decode(folder, options.out, own, options.decode_limit)
        print(f"all took {time.monotonic() - began:.0f} s; settings of DSA cases: {', '.join(SETTINGS)}", flush=True)
    return verdict(found)


if __name__ == "__main__":
    sys.exit(main())
