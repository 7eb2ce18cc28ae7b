"""`tamis bench`: times of the stages, compared with the machine's limits and with peers."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis._extras import install_command
from tamis.cli import bench_door, bench_train
from tamis.cli import options as shared
from tamis.cli.data import print_json, with_unit
from tamis.cli.machine import check_backend, describe_machine, let_waiting_threads_sleep, machine_line, pick_device
from tamis.cli.options import check_file
from tamis.cli.parser import FAILED, OK, Subcommands, add_command
from tamis.cli.progress import Progress, waiting
from tamis.cli.table import print_notes, render_table
from tamis.cli.text import printable
from tamis.cli.values import names, shapes, whole, wholes
from tamis.cli.verify import as_data, results_table

if TYPE_CHECKING:
    import torch

    from tamis.lab.bench.jobs import Job
    from tamis.lab.bench.record import CsvFile, Row
    from tamis.lab.bench.run import Bench
    from tamis.lab.verify import CheckResult

SUITES = {
    "smoke": ("attend", "write", "gather", "translate", "scores", "topk", "index"),
    "decode": ("attend",),
    "prefill": ("attend",),
    "write": ("write", "gather", "translate"),
    "v4": ("attend", "select", "compress"),
    "index": ("scores", "topk", "topk-ties", "index"),
    "select": ("scores", "topk", "topk-ties", "index"),
}
"""The suites of `tamis.lab.bench.jobs` and their stages. That module is too heavy to import for a help text; a test
compares the two, and `PEERS` with `tamis.lab.bench.peers`."""
PEERS = (
    *("flashmla", "flashmla-sgl", "flashmla-vllm", "flashmla-plain", "flashmla-gather"),
    *("fa3", "deepgemm", "vllm", "vllm-gather", "torch", "none"),
)
REPEATS = {"cuda": 25, "cpu": 5}

DETAILS = f"""\
The stages to be timed are verified first, in the formats to be timed; if a check fails, no time is printed. Times are
medians over replays of a CUDA graph (on a CPU: of calls) on rotated inputs that exceed the cache several times over,
with the 10th and 90th percentile. Peers are kernels of other libraries; they run in turn with ours, in the same
process, on the same inputs, and speedup is their time over ours. A suite is a list of shapes:

- smoke: the main stages with tiny shapes, on any machine
- decode: V3.2, FP8 rows, top-k 2048, 1 to 128 requests of 16K, 8 to 128 heads
- prefill: 512 and 4096 tokens over 8K to 128K, bf16 and FP8 rows
- write: write and gather of 64K tokens, translation of 128 x 2048
- v4: a window of 128 and 512 compressed entries
- index: scores over 64K and 128K FP8 keys, top-k 2048 of up to 1M scores, some mostly equal, and both in one call
- select: the same stages for 512 to 4096 tokens of a prompt over 8K to 128K keys, and for two decodes; each token sees
the keys up to its own
- door: the functions that a program calls
- train: what tamis.train runs

Options replace a suite's own numbers, --stage keeps some of its stages; --shape without a suite measures decode-like
attention of that shape.

{bench_door.DETAILS}

{bench_train.DETAILS}

Peers that --against can name:

- flashmla: every build of FlashMLA that is found; the fastest of them has the speedup. Heads are padded before its time
starts
- flashmla-sgl, flashmla-vllm, flashmla-plain: one build: the wheel sgl-flash-mla (its kernels for Hopper), the copy in
vLLM's wheel, a package flash_mla without use_legacy
- flashmla-gather: for prompts over FP8 rows, vLLM's gather of whole requests as bf16 rows, then FlashMLA's prefill over
them, both in its time
- fa3: FlashAttention 3 over bf16 rows as pages of one row
- deepgemm: index scores; the keys of prompts are gathered before its time starts
- vllm: vLLM's top-k; for the whole indexer, DeepGEMM's scores and then that
- vllm-gather: for prompts, the same with vLLM's gather of the keys in its time
- torch: the same work in plain torch

Selections may differ where scores are nearly equal.

"host us" is the time until a call returns, on a GPU that had nothing to do. The roofline is the larger of bytes over
bandwidth and operations over peak (twice the peak for FP8 products); bytes count each selected row, key, score, index,
query and output once.

--report draws what was measured, or what files of --csv hold: a roofline, speedups over peers, and latency against
batch and context. It needs matplotlib: {install_command("report")}.

Exits with 1 if a check fails."""

EXAMPLES = """\
tamis bench smoke --against none
tamis bench decode --heads 16,128 --against flashmla --csv results.csv
tamis bench --shape 8q1s1k --heads 16 --layout v32-fp8 --json
tamis bench --report out --from benchmarks/results/*.csv"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "bench",
        run,
        summary="Measure the stages against the machine's limits and against other libraries",
        details=DETAILS,
        example=EXAMPLES,
        usage="[suite] [options]",
    )
    suites = (*SUITES, bench_door.SUITE, bench_train.SUITE)
    parser.add_argument("suite", nargs="?", choices=suites, metavar="suite", help="one of the above (default: smoke)")
    shared.add_device(parser)
    shared.add_backend(parser)
    parser.add_argument(
        "--shape",
        type=shapes,
        default=[],
        metavar="S,...",
        help="such as 128q1s16k: 128 requests, q new tokens, s in all",
    )
    stages = tuple(dict.fromkeys(stage for known in SUITES.values() for stage in known))
    parser.add_argument(
        "--stage", type=names(stages), default=[], metavar="NAME,...", help="only these stages of the suite"
    )
    parser.add_argument("--heads", type=wholes(1, 128), default=[], metavar="N,...", help="query heads, 1 to 128")
    parser.add_argument("--topk", type=wholes(1), default=[], metavar="N,...", help="selected rows per token")
    parser.add_argument(
        "--layout",
        type=names((*shared.LATENT_LAYOUTS, *shared.NO_ROPE_LAYOUTS, *shared.INDEX_LAYOUTS)),
        default=[],
        metavar="NAME,...",
        help="byte formats of the rows or keys; v32-fp8-512 and v32-bf16-512 are rows without a rope",
    )
    parser.add_argument(
        "--against",
        type=names(PEERS),
        metavar="PEER,...",
        help="some of the peers above, or none (default: those that can be imported)",
    )
    parser.add_argument("--repeats", type=whole(1), metavar="N", help="timed rounds (default: 25 on a GPU, 5 on a CPU)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append the rows to this file")
    parser.add_argument(
        "--report", type=Path, metavar="DIR", help="draw the rows: report.html, and PNG files beside it"
    )
    parser.add_argument(
        "--from",
        dest="files",
        type=Path,
        nargs="+",
        default=[],
        metavar="CSV",
        help="with --report: measure nothing, draw the rows of these files",
    )
    bench_door.add_options(parser)


def run(options: argparse.Namespace) -> int:
    """Verify, measure, and print the table or the JSON object; with --from, draw earlier measurements instead."""
    bench_door.check_options(options)
    bench_train.check_options(options)
    _check_options(options)
    let_waiting_threads_sleep()
    if options.suite == bench_door.SUITE:
        return bench_door.run(options)
    if options.suite == bench_train.SUITE:
        return bench_train.run(options)
    if options.report is not None:
        from tamis.lab.bench.report import check_place

        check_place(options.report)
    return _draw_files(options) if options.files else _measure(options)


def _check_options(options: argparse.Namespace) -> None:
    """Refuse options that do not go together, before torch is loaded."""
    if options.files and options.report is None:
        raise ValueError("--from must be given with --report, got alone; name a folder for the report")
    check_file("--csv", options.csv)
    suite = options.suite or ("custom" if options.shape else "smoke")
    known = SUITES.get(suite, ("attend",))
    for stage in options.stage if suite != bench_door.SUITE else ():
        if stage not in known:
            raise ValueError(f"--stage must be one of {', '.join(known)} for the suite {suite!r}; got {stage!r}.")


def _draw_files(options: argparse.Namespace) -> int:
    from tamis.lab.bench.report import read_rows

    drawn = _written(read_rows(options.files), options.report)
    if options.json:
        print_json("bench", True, {"report": drawn})
    else:
        print("\n".join(printable(name) for name in drawn))
    return OK


def _measure(options: argparse.Namespace) -> int:
    device = pick_device(options.device)
    check_backend(options.backend, device)
    from tamis.lab.bench.peers import find_peers
    from tamis.lab.bench.record import CsvFile

    # Options are checked before the first trial runs.
    with waiting("looking for peers"):
        peers, absent = find_peers(options.against, device)
    file = CsvFile(options.csv) if options.csv is not None else None
    jobs = _jobs(options)
    repeats = REPEATS[device.type] if options.repeats is None else options.repeats
    failures = [result for result in _verified(jobs, device, options.backend) if not result.ok]
    if failures:
        return _refuse(failures, json_wanted=options.json)
    with waiting("finding the machine's limits"):
        bench = _bench(device, options.backend, repeats, peers)
    rows, wrong, unsuited = _measured(bench, jobs, file)
    machine = describe_machine(device)
    drawn = _written(rows, options.report) if options.report is not None and rows else []
    if options.json:
        data: dict[str, Any] = {
            "machine": machine,
            "limits": asdict(bench.ceiling),
            "absent": absent,
            "unsuited": unsuited,
        }
        data |= {
            "wrong": wrong,
            "report": drawn,
            "rows": [with_unit(row.as_data(), "us", "p10", "p90") for row in rows],
        }
        print_json("bench", not wrong, data)
    else:
        # Only a user who named peers is told for which stages they do not apply.
        _print_report(machine, bench, rows, absent, [] if options.against is None else unsuited, wrong)
        for name in drawn:
            print(printable(name))
    return FAILED if wrong else OK


def _jobs(options: argparse.Namespace) -> "list[Job]":
    from tamis.lab.bench.jobs import make_jobs

    return make_jobs(
        options.suite,
        stages=options.stage,
        shapes=options.shape,
        layouts=options.layout,
        heads=options.heads,
        topks=options.topk,
    )


def _written(rows: "list[Row]", folder: Path) -> list[str]:
    """Write the report and return the names of its files."""
    from tamis.lab.bench.report import write_report

    with Progress("figures", "drawing") as progress:
        return [str(file) for file in write_report(rows, folder, progress.update)]


def _verified(jobs: "list[Job]", device: "torch.device", backend: str) -> "list[CheckResult]":
    """The results of quick checks of every stage to be timed. A stage without any check counts as failed."""
    from dataclasses import replace

    from tamis.lab.verify import Scope, run_checks

    stages = sorted({stage for job in jobs for stage in job.stages})
    users = {stage: [job for job in jobs if stage in job.stages] for stage in stages}
    scopes = {
        stage: Scope(frozenset(job.layout for job in some), frozenset(job.query_dtype for job in some))
        for stage, some in users.items()
    }
    with Progress("checks", "preparing the checks") as progress:
        results = run_checks(device, backend, stages, True, progress.update, scopes)
        unchecked = _unchecked(stages, results)
        if unchecked:
            # No quick case has the formats to be timed, so the stage is checked in all formats.
            results = [r for r in results if r.stage not in unchecked]
            results += run_checks(device, backend, unchecked, True, progress.update)
    unchecked = _unchecked(stages, results)
    return [replace(r, state="FAILED") if r.stage in unchecked and r.cases == 0 else r for r in results]


def _unchecked(stages: list[str], results: "list[CheckResult]") -> list[str]:
    """The stages without a numeric check; checks of registers and shared memory do not count."""
    return [stage for stage in stages if all(r.cases == 0 or r.kernels for r in results if r.stage == stage)]


def _refuse(failures: "list[CheckResult]", *, json_wanted: bool) -> int:
    if json_wanted:
        print_json("bench", False, {"checks": [as_data(result) for result in failures], "rows": []})
    else:
        print(results_table(failures), end="\n\n")
        print("FAILED: no time is given for stages whose results are wrong")
    return FAILED


def _bench(device: "torch.device", backend: str, repeats: int, peers: Any) -> "Bench":
    from tamis.lab.bench.record import describe
    from tamis.lab.bench.roofline import find_ceiling
    from tamis.lab.bench.run import Bench

    machine = describe(device, describe_machine(device)["name"])
    return Bench(device, backend, repeats, find_ceiling(device), machine, peers)


def _measured(bench: "Bench", jobs: "list[Job]", file: "CsvFile | None") -> "tuple[list[Row], list[str], list[str]]":
    """All rows, a line for each wrong result, and a line for each stage and layout that a peer lacks."""
    from tamis.lab.bench.run import WrongResult

    rows: list[Row] = []
    wrong: list[str] = []
    unsuited: list[str] = []
    with Progress("measurements", "measuring") as progress:
        for number, job in enumerate(jobs):
            try:
                found, reasons = bench.measure(job)
            except WrongResult as error:
                wrong.append(str(error))
                continue
            rows += found
            unsuited += [f"{peer} on {job.stage} of {job.layout}: {reason}" for peer, reason in reasons.items()]
            if file is not None:
                file.add(found)
            progress.update(number + 1, len(jobs))
    return rows, wrong, list(dict.fromkeys(unsuited))


def _print_report(
    machine: dict[str, Any],
    bench: "Bench",
    rows: "list[Row]",
    absent: dict[str, str],
    unsuited: list[str],
    wrong: list[str],
) -> None:
    print(machine_line(machine))
    peak = bench.ceiling.flops_per_second
    limit = f"{bench.ceiling.bytes_per_second / 1e12:.3g} TB/s"
    limit += f", {peak / 1e12:.0f} TFLOP/s" if peak else ""
    print(f"limits: {limit} ({bench.ceiling.source}); medians of {bench.repeats} rounds\n")
    if rows:
        print(times_table(rows), end="\n\n")
    notes = [f"{row.peer or 'no peer'} on {row.stage} {row.shape}: {row.note}" for row in rows if row.note]
    notes += unsuited
    print_notes([*notes, *bench_door.absent_peers(absent)], wrong)


def times_table(rows: "list[Row]") -> str:
    """One line per row. Columns that are the same for all peers of a job are printed once. Of the builds of FlashMLA,
    the fastest alone has a ratio."""
    from tamis.lab.bench.record import slower_builds

    header = ["stage", "backend", "shape", "heads", "top-k", "layout", "time us", "p10..p90", "host us", "MB"]
    header += ["TB/s", "TFLOP/s", "roofline us", "of\nroofline", "peer", "peer us", "peer\nhost us", "speedup"]
    lines: list[tuple[str, ...]] = []
    last: tuple[str, ...] = ()
    slower = slower_builds(rows)
    for row in rows:
        topk = "-" if row.topk is None else f"{row.window}+{row.topk}" if row.window else str(row.topk)
        seconds = row.median_us * 1e-6
        ours: tuple[str, ...] = (
            row.stage,
            row.backend,
            row.shape,
            "-" if row.heads is None else str(row.heads),
            topk,
            row.layout,
            f"{row.median_us:.1f}",
            f"{row.p10:.1f}..{row.p90:.1f}",
            "-" if row.host_us is None else f"{row.host_us:.1f}",
            f"{row.bytes / 1e6:.3g}",
            f"{row.bytes / seconds / 1e12:.3g}",
            f"{row.flops / seconds / 1e12:.3g}" if row.flops else "-",
            f"{row.roofline_us:.3g}",
            f"{row.of_roofline:.0%}",
        )
        theirs = (
            f"{row.peer} ({row.peer_build})" if row.peer_build else row.peer or "-",
            "-" if row.peer_us is None else f"{row.peer_us:.1f}",
            "-" if row.peer_host_us is None else f"{row.peer_host_us:.1f}",
            "-" if row.ratio is None or row in slower else f"{row.ratio:.2f}",
        )
        lines.append((*(ours if ours != last else ("",) * len(ours)), *theirs))
        last = ours
    return render_table(header, lines, "lllrrlrrrrrrrrlrrr")
