"""Runs SGLang's own attention kit for its FlashMLA implementations and for tamis, side by side, and times decode steps.

    python benchmarks/sglang_kit.py --archive dist/sglang_sm90.tar.xz --out results

The kit is part of the package (`sglang/test/kits/attention_unittest`): SGLang's backends, pools and metadata without an
engine and without weights. `sglang_kit_cases.py` says what its verdicts are worth. `sglang_decode.py` times steps
first; then every implementation runs the kit in processes of its own, all at once. Verdicts and relative errors are
printed, and written to `h200_sglang_kit.csv`, with all details to `sglang_kit.json`; times are written to
`h200_sglang_decode.csv`. Conditions are judged at the end: tamis must pass whatever one of SGLang's implementations
passes, and its errors have bounds. Without `--archive`, SGLang must be installed.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engine_results import Condition, verdict, write_rows
from sglang_kit_cases import ENGINES, SETTINGS, WORKSPACE
from sglang_process import child_environment, prepare, versions

HERE = Path(__file__).resolve().parent
Rows = dict[tuple[str, str, str, str], dict[str, Any]]
"""What became of a case, by group, case, setting and implementation."""
# Relative errors against the kit's reference, whose keys are not rounded to FP8.
BOUNDS = {"bf16": 0.01, "fp8": 0.06}
DECODE = "h200_sglang_decode.csv"
# The relative error of a decode step against float64 over the rows as they are stored.
STEP_BOUND = 0.005
# Seconds that decode steps have the GPU to themselves, at most; then the kit begins as well.
ALONE = 75.0
KIT_LIMIT, DECODE_LIMIT = 150.0, 150.0


class Group:
    """The processes of one implementation and one kind of cases, one after the other."""

    def __init__(self, number: int, kind: str, engine: str, folder: Path) -> None:
        self.name, self.folder, self.starts = f"{kind}-{engine}", folder / "kit", 0
        self.command = [sys.executable, str(HERE / "sglang_kit_cases.py"), "--group", kind, "--engine", engine]
        self.command += ["--folder", str(self.folder)]
        self.environment = child_environment(100 + number, folder)
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
        print(f"  {why[:150]}\n    {len(cases)} cases, first {cases[0]}", flush=True)


def table_rows(rows: Rows, about: dict[str, str]) -> list[dict[str, str]]:
    """A row per case and setting, with the verdict and the largest relative error of every implementation."""
    found = []
    for kind, case, setting in dict.fromkeys(key[:3] for key in rows):
        row = {"group": kind, "case": case, "setting": setting}
        for engine in ENGINES:
            result = rows.get((kind, case, setting, engine), {"verdict": "", "errors": []})
            row[engine] = result["verdict"]
            row[f"{engine}_error"] = f"{max(result['errors']):.3g}" if result["errors"] else ""
        found.append(row | about)
    return found


def missed(rows: Rows, kind: str) -> dict[str, bool]:
    """The cases that tamis does not pass, and whether one of SGLang's implementations does.

    A case that tamis should have run and has not is one of them.
    """
    found = {}
    for case, setting in dict.fromkeys(key[1:3] for key in rows if key[0] == kind and not key[1].endswith(WORKSPACE)):
        own, *peers = [
            rows.get((kind, case, setting, engine), {"verdict": "MISSING"})["verdict"]
            for engine in ("tamis", *(engine for engine in ENGINES if engine != "tamis"))
        ]
        if own not in ("PASS", "SKIP"):
            found[f"{case} {setting}"] = "PASS" in peers
    return found


def conditions(rows: Rows, kind: str) -> list[Condition]:
    """What tamis must meet: it passes whatever SGLang's own pass, with errors no larger than bounds."""
    mine = {key: row for key, row in rows.items() if key[0] == kind and key[3] == "tamis"}
    if not mine:
        return [Condition(f"{kind}: cases of the kit that ran", None, 1)]
    failed = missed(rows, kind)
    for case, alone in failed.items():
        print(f"{kind}: tamis does not pass {case}, {'but' if alone else 'nor does'} one of SGLang's own", flush=True)
    name = f"{kind}: cases of the kit that one of SGLang's own passes and tamis does not"
    found = [Condition(name, sum(failed.values()), 0, at_least=False)]
    for cache, bound in BOUNDS.items() if kind == "dsa" else ():
        meant = [row for (_, case, setting, _), row in mine.items() if setting != "shipped" and case.endswith(cache)]
        errors = [error for row in meant for error in row["errors"]]
        name = f"dsa {cache}: largest relative error of tamis"
        found.append(Condition(name, max(errors, default=None), bound, at_least=False))
    return found


def print_differences(kind: str, folder: Path) -> None:
    """How far outputs of tamis are from those of SGLang's own, at most."""
    own = outputs(folder, f"{kind}-tamis")
    for engine in ENGINES:
        theirs = {} if engine == "tamis" else outputs(folder, f"{kind}-{engine}")
        errors = [
            float((own[name] - theirs[name]).norm() / theirs[name].norm().clamp_min(1e-30))
            for name in own.keys() & theirs.keys()
            if "shipped" not in name or kind == "v4"
        ]
        if errors:
            print(f"{kind}: {len(errors)} outputs of tamis differ from {engine}'s by at most {max(errors):.4f}")


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


class DecodeSteps:
    """The process that times decode steps."""

    def __init__(self, folder: Path, out: Path, own: bool, limit: float) -> None:
        self.log, self.table = folder / "decode.log", out / DECODE
        self.deadline = time.monotonic() + limit
        command = [sys.executable, str(HERE / "sglang_decode.py"), "--out", str(self.table)]
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                [*command, *(["--tamis"] if own else [])],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=child_environment(99, folder),
            )

    def wait(self, seconds: float) -> bool:
        """Whether it ends within this time, and before its limit."""
        try:
            self.process.wait(max(0.0, min(seconds, self.deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            return False
        return True

    def finish(self) -> list[Condition]:
        """Wait for its end, and judge the table."""
        if not self.wait(float("inf")):
            self.process.kill()
            self.process.wait()
            print("decode steps were stopped", flush=True)
        text = self.table.read_text() if self.table.exists() else ""
        print(text or "no decode step was timed", flush=True)
        lines = self.log.read_text(errors="replace").splitlines()
        if self.process.returncode or any("Traceback" in line for line in lines):
            print("--- the end of the log of decode steps:", *lines[-25:], sep="\n", flush=True)
        errors = [float(row["tamis_error"]) for row in csv.DictReader(text.splitlines()) if row["tamis_error"]]
        name = f"decode: largest relative error of tamis in {len(errors)} kinds of steps"
        return [Condition(name, max(errors, default=None), STEP_BOUND, at_least=False)]


def run(folder: Path, out: Path, engines: list[str], limit: float, decode_limit: float) -> list[Condition]:
    """Time decode steps and run the kit, in a folder that is prepared; the conditions that tamis must meet."""
    began = time.monotonic()
    own = "tamis" in engines
    decode = DecodeSteps(folder, out, own, decode_limit) if decode_limit else None
    if decode is not None:
        decode.wait(ALONE)
        print(f"the kit begins after {time.monotonic() - began:.0f} s", flush=True)
    kinds = [("dsa", engine) for engine in engines]
    # V4 has one implementation on Hopper, whatever the options for DSA are.
    kinds += [("v4", engine) for engine in ("flashmla_kv", "tamis") if engine in engines]
    (folder / "kit").mkdir()
    run_kit(kinds, folder, limit)
    print(f"the kit ended after {time.monotonic() - began:.0f} s", flush=True)
    rows = read(folder / "kit")
    (out / "sglang_kit.json").write_text(json.dumps(list(rows.values()), indent=1))
    with (out / "sglang_kit.log").open("w") as log:
        for path in sorted((folder / "kit").glob("*.log")):
            log.write(f"=== {path.name}\n{path.read_text(errors='replace')[-400_000:]}\n")
    write_rows(out / "h200_sglang_kit.csv", table_rows(rows, versions(child_environment(99, folder))), echo=False)
    found = []
    for kind in ("dsa", "v4"):
        print_table(rows, kind, [engine for of, engine in kinds if of == kind])
        if own:
            print_differences(kind, folder / "kit")
            found += conditions(rows, kind)
    if decode is not None:
        judged = decode.finish()
        found += judged if own else []
    print(f"all took {time.monotonic() - began:.0f} s; settings of DSA cases: {', '.join(SETTINGS)}", flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archive", type=Path, help="what sglang_pack.py wrote; by default SGLang must be installed")
    parser.add_argument("--out", type=Path, required=True, help="folder for the tables and the details")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--limit", type=float, default=KIT_LIMIT, help="seconds for the kit")
    parser.add_argument("--decode-limit", type=float, default=DECODE_LIMIT, help="seconds for decode steps; 0: none")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        prepare(folder, options.archive)
        return verdict(run(folder, options.out, options.engines, options.limit, options.decode_limit))


if __name__ == "__main__":
    sys.exit(main())
