"""`tamis bench door`: the functions that a program calls, timed as it calls them."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tamis.cli.data import print_json, with_unit
from tamis.cli.machine import describe_machine, machine_line, pick_device
from tamis.cli.parser import FAILED, OK, Parser
from tamis.cli.progress import Progress, waiting
from tamis.cli.table import print_notes, render_table
from tamis.cli.text import one_line
from tamis.cli.values import names, wholes

if TYPE_CHECKING:
    from tamis.lab.bench.door.cells import Cell
    from tamis.lab.bench.door.record import DoorRow
    from tamis.lab.bench.door.run import DoorBench
    from tamis.lab.bench.record import CsvFile

SUITE = "door"
REPEATS = {"cuda": 15, "cpu": 3}
SEED = 0
PEERS = ("flashmla-sgl", "flashmla-vllm", "flashmla-plain", "vllm")
"""The peers that do the work of one of the functions."""
DOORS = (
    *("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "SparseMLA", "attend_positions", "index_topk"),
    *("SparseV4", "forward_mqa", "attend", "write_kv", "plan"),
)
"""The functions of `tamis.lab.bench.door.cells`, which is too heavy to import for a help text; a test compares them."""

DETAILS = """\
door times the functions that a program calls: FlashMLA's drop-ins flash_mla_with_kvcache and flash_mla_sparse_fwd,
SparseMLA (a whole layer call), attend_positions, forward_mqa (the method that vLLM calls), attend, index_topk,
SparseV4, write_kv and plan (Planner.plan). Each has three times: replayed from a CUDA graph, called back to back, and
on the host alone; and the number of kernels that a call launches. A result that is wrong gets no time. Peers are the
builds of FlashMLA, and DeepGEMM with vLLM's top-k; the speedup is over the fastest of them. --doors, --heads, --batch,
--quick and --long choose what is measured. On a CPU the shapes are tiny."""


def add_options(parser: Parser) -> None:
    """Add the options that only this suite takes."""
    parser.add_argument(
        "--doors", type=names(DOORS), default=[], metavar="NAME,...", help="door: the functions to time"
    )
    parser.add_argument("--batch", type=wholes(1), default=[], metavar="N,...", help="door: numbers of decodes")
    parser.add_argument("--quick", action="store_true", help="door: fewer cells")
    parser.add_argument("--long", action="store_true", help="door: prefills over 128K too")


def check_options(options: argparse.Namespace) -> None:
    """Refuse options of this suite without it, and options of other suites with it."""
    given = {f"--{name}": getattr(options, name) for name in ("doors", "batch", "quick", "long")}
    others = {f"--{name}": getattr(options, name) for name in ("stage", "shape", "topk", "layout", "report")}
    others["--backend"] = options.backend != "auto"
    chosen = options.suite == SUITE
    for name, value in (others if chosen else given).items():
        if value:
            expected = "left out of `tamis bench door`" if chosen else "given with `tamis bench door` only"
            raise ValueError(f"{name} must be {expected}; leave it out")


def run(options: argparse.Namespace) -> int:
    """Measure all cells and print them."""
    from tamis import checks

    device = pick_device(options.device)
    from tamis.lab.bench.door.cells import make_cells, pages_needed
    from tamis.lab.bench.door.record import DOOR_COLUMNS
    from tamis.lab.bench.door.run import DoorBench
    from tamis.lab.bench.peers import find_peers
    from tamis.lab.bench.random_inputs import SharedInputs
    from tamis.lab.bench.record import CsvFile, describe

    repeats = REPEATS[device.type] if options.repeats is None else options.repeats
    with waiting("looking for peers"):
        peers, absent = find_peers(options.against, device)
    absent = {name: reason for name, reason in absent.items() if name in PEERS}
    cells = make_cells(
        doors=options.doors,
        heads=options.heads,
        batches=options.batch,
        quick=options.quick,
        long=options.long,
        tiny=device.type != "cuda",
    )
    if not cells:
        raise checks.refuse("--doors, --heads and --batch", "such that a cell is left", "none", "leave one of them out")
    file = CsvFile(options.csv, DOOR_COLUMNS) if options.csv is not None else None
    machine = describe_machine(device)
    drawn = SharedInputs(device, SEED, pages_needed(cells))
    names = options.doors or DOORS
    bench = DoorBench(device, repeats, describe(device, machine["name"]), peers, drawn, names)
    rows, wrong, missing = _measured(bench, cells, file)
    if options.json:
        data = {"machine": machine, "absent": absent, "missing": missing, "wrong": wrong}
        print_json("bench", not wrong, data | {"rows": [with_unit(asdict(row), "us", "p10", "p90") for row in rows]})
        return FAILED if wrong else OK
    print(machine_line(machine))
    print(f"processor: {one_line(bench.cpu) or 'unknown'}; medians of {repeats} rounds, microseconds per call\n")
    print(doors_table(rows), end="\n\n")
    notes = [f"{row.version} on {row.shape}, {row.heads} heads: {row.note}" for row in rows if row.note]
    notes += missing
    print_notes([*notes, *absent_peers(absent)], wrong)
    return FAILED if wrong else OK


def _measured(
    bench: "DoorBench", cells: "Sequence[Cell]", file: "CsvFile | None"
) -> "tuple[list[DoorRow], list[str], list[str]]":
    rows: list[DoorRow] = []
    wrong: list[str] = []
    missing: list[str] = []
    with Progress("cells", "measuring") as progress:
        for number, cell in enumerate(cells):
            found = bench.measure(cell)
            rows += found.rows
            wrong += found.wrong
            missing += [f"{peer} on {cell.job.layout}: {reason}" for peer, reason in found.missing.items()]
            if file is not None and found.rows:
                file.add(found.rows)
            progress.update(number + 1, len(cells))
    return rows, wrong, list(dict.fromkeys(missing))


def absent_peers(absent: dict[str, str]) -> list[str]:
    """A line for each reason, with all peers that are absent for it."""
    reasons: dict[str, list[str]] = {}
    for name, reason in absent.items():
        reasons.setdefault(reason, []).append(name)
    lines = []
    for reason, found in reasons.items():
        noun, verb = ("peers", "are") if len(found) > 1 else ("peer", "is")
        lines.append(f"{noun} {', '.join(found)} {verb} absent: {reason}")
    return lines


def doors_table(rows: "Sequence[DoorRow]") -> str:
    """One line per row; a cell's shape is printed once."""
    header = ["shape", "layout", "heads", "top-k", "function", "version", "error", "graph", "eager", "host"]
    header += ["kernels", "copies", "speedup over\nfastest peer", "back to\nback"]
    lines: list[tuple[str, ...]] = []
    last: tuple[str, ...] = ()
    for row in rows:
        topk = "-" if row.topk is None else f"{row.window}+{row.topk}" if row.window else str(row.topk)
        cell: tuple[str, ...] = (row.shape, row.layout, "-" if row.heads is None else str(row.heads), topk)
        times = [_number(value, ".1f") for value in (row.graph_us, row.eager_us, row.host_us)]
        rest = (row.door, row.build or row.version, _number(row.error, ".1e"), *times)
        counts = ("-" if row.kernels is None else str(row.kernels), "-" if row.copies is None else str(row.copies))
        ratios = (_number(row.ratio, ".2f"), _number(row.eager_ratio, ".2f"))
        lines.append((*(cell if cell != last else ("",) * len(cell)), *rest, *counts, *ratios))
        last = cell
    return render_table(header, lines, "llrrllrrrrrrrr")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
