"""`tamis bench train`: passes of training, timed."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from tamis.cli.data import print_json
from tamis.cli.machine import check_backend, describe_machine, machine_line, pick_device
from tamis.cli.parser import FAILED, OK
from tamis.cli.progress import Progress, waiting
from tamis.cli.table import print_notes, render_table

if TYPE_CHECKING:
    from tamis.lab.bench.record import CsvFile
    from tamis.lab.bench.training import Shape, TrainBench, TrainRow

SUITE = "train"
REPEATS = {"cuda": 10, "cpu": 3}

DETAILS = """\
train times what tamis.train runs: the forward and the backward pass of attention over rows in bf16, the latter in the
deterministic mode as well, the indexer's target, and its loss with all gradients, for 4096 queries, 8K rows and top-k
2048 (--heads and --topk change that). Each result is compared with float64 first, for 64 tokens; a wrong one gets no
time. The peer is TileLang's example for DeepSeek-V3.2, where tilelang, sparse_mla_fwd and sparse_mla_bwd can be
imported. On a CPU the shapes are tiny."""


def check_options(options: argparse.Namespace) -> None:
    """Refuse options that this suite does not take."""
    if options.suite != SUITE:
        return
    for name in ("stage", "shape", "layout", "report"):
        if getattr(options, name):
            raise ValueError(f"--{name} must be left out of `tamis bench train`; leave it out")


def run(options: argparse.Namespace) -> int:
    """Measure all stages of all shapes and print them."""
    device = pick_device(options.device)
    check_backend(options.backend, device)
    from tamis.lab.bench.record import CsvFile, describe
    from tamis.lab.bench.training import STAGES, TRAIN_COLUMNS, TrainBench, default_shapes, find_peer

    repeats = REPEATS[device.type] if options.repeats is None else options.repeats
    absent = "left out"
    if options.against is None and device.type == "cuda":
        with waiting("looking for TileLang"):
            absent = find_peer() or ""
    file = CsvFile(options.csv, TRAIN_COLUMNS) if options.csv is not None else None
    machine = describe_machine(device)
    bench = TrainBench(device, options.backend, repeats, describe(device, machine["name"]), peer=not absent)
    shapes = default_shapes(options.heads, options.topk, tiny=device.type != "cuda")
    rows, wrong = _measured(bench, [(shape, stage) for shape in shapes for stage in STAGES], file)
    if options.json:
        data = {"machine": machine, "absent": absent, "wrong": wrong, "rows": [asdict(row) for row in rows]}
        print_json("bench", not wrong, data)
        return FAILED if wrong else OK
    print(machine_line(machine))
    print(f"medians of {repeats} rounds, milliseconds per call\n")
    print(train_table(rows), end="\n\n")
    print_notes([f"TileLang is absent: {absent}"] if absent else [], wrong)
    return FAILED if wrong else OK


def _measured(
    bench: "TrainBench", cells: "Sequence[tuple[Shape, str]]", file: "CsvFile | None"
) -> "tuple[list[TrainRow], list[str]]":
    rows: list[TrainRow] = []
    wrong: list[str] = []
    with Progress("cells", "measuring") as progress:
        for number, (shape, stage) in enumerate(cells):
            found, lines = bench.measure(shape, stage)
            rows += found
            wrong += lines
            if file is not None and found:
                file.add(found)
            progress.update(number + 1, len(cells))
    return rows, wrong


def train_table(rows: "Sequence[TrainRow]") -> str:
    """One line per row."""
    header = ["heads", "tokens", "rows", "top-k", "stage", "version", "error", "ms", "p10..p90", "TFLOP/s", "peak MB"]
    header.append("speedup over\nTileLang")
    lines = [
        (
            *(str(row.heads), str(row.tokens), str(row.rows), str(row.topk), row.stage, row.build or row.version),
            "-" if row.error is None else f"{row.error:.2e}",
            *(f"{row.median_ms:.3f}", f"{row.p10:.3f}..{row.p90:.3f}", f"{row.tflops:.0f}"),
            "-" if row.peak_mb is None else f"{row.peak_mb:.0f}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
        )
        for row in rows
    ]
    return render_table(header, lines, "rrrrllrrrrrr")
