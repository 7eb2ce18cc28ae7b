"""Tables of `tamis bench train`, from `benchmarks/results/h200_train.csv`."""

import csv

from tamis.lab.bench.training import LARGEST_ERROR
from tools.docs.markdown import table
from tools.docs.results import RESULTS

FILE = RESULTS / "h200_train.csv"
KEY = ("gpu", "stage", "version", "tokens", "rows", "topk", "heads")
STAGES = ("forward", "backward", "backward, deterministic", "target", "index loss", "index loss, deterministic")

Row = dict[str, str]


def read() -> list[Row]:
    """The newest row of each measurement."""
    newest: dict[tuple[str, ...], Row] = {}
    with FILE.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = tuple(row[column] for column in KEY)
            if key not in newest or row["time"] >= newest[key]["time"]:
                newest[key] = row
    return list(newest.values())


def headline() -> str:
    """A line for each stage, with the times of the CUDA C++ and of the portable kernels by number of heads."""
    rows = read()
    heads = sorted({int(row["heads"]) for row in rows})
    header = ("milliseconds", "kernels", *(f"{number} heads" for number in heads))
    lines = []
    for stage in STAGES:
        for version, words in (("tamis hopper", "CUDA C++"), ("tamis triton", "Triton"), ("tilelang", "TileLang")):
            found = [r for r in rows if r["stage"] == stage and r["version"] == version]
            times = {int(row["heads"]): f"{float(row['median_ms']):.1f}" for row in found}
            if times:
                lines.append((stage, words, *(times.get(number, "-") for number in heads)))
    one = rows[0]
    said = f"{one['gpu']}, {one['tokens']} queries, top-k {one['topk']} of {one['rows']} rows, bf16, width 576:"
    return f"{said}\n\n{table(header, lines, 'll' + 'r' * len(heads))}\n\n{deterministic(rows)}\n\n{errors(rows)}"


def deterministic(rows: list[Row]) -> str:
    """What the deterministic mode of the CUDA C++ kernels costs: times as long, and the most memory."""
    ours = {(row["stage"], row["heads"]): row for row in rows if row["version"] == "tamis hopper"}
    pairs = [(stage, heads) for stage, heads in ours if (f"{stage}, deterministic", heads) in ours]
    costs = []
    for stage in dict.fromkeys(stage for stage, _ in pairs):
        same = [(ours[pair], ours[f"{stage}, deterministic", pair[1]]) for pair in pairs if pair[0] == stage]
        ratios = [float(after["median_ms"]) / float(before["median_ms"]) for before, after in same]
        span = " to ".join(dict.fromkeys((f"{min(ratios):.1f}", f"{max(ratios):.1f}")))
        most = max(float(after["peak_mb"]) for _, after in same)
        costs.append(f"{stage} takes {span} times as long and up to {most / 1000:.1f} GB")
    return f"In the deterministic mode of the CUDA C++ kernels, {', and '.join(costs)}."


def errors(rows: list[Row]) -> str:
    """The largest error of each pass of our kernels, and the one above which a measurement is refused."""

    def largest(*stages: str) -> str:
        ours = [row for row in rows if row["stage"] in stages and row["version"].startswith("tamis ")]
        return f"{max(float(row['error']) for row in ours):.1e}"

    passes = f"{largest('forward')} in the forward pass, {largest(*STAGES[1:3])} in gradients of queries and rows"
    index = f"{largest(*STAGES[4:])} in those of the indexer"
    checked = f"`tamis bench train` refuses results with errors above {LARGEST_ERROR:.0e}"
    return f"Relative errors against float64 were at most {passes}, and {index}. {checked}."


def everything() -> str:
    """All rows."""
    header = ("stage", "heads", "kernels", "time", "p10 to p90", "TFLOP/s", "peak of memory", "error")
    lines = [
        (
            *(row["stage"], row["heads"], row["build"] or row["version"].removeprefix("tamis ")),
            *(f"{float(row['median_ms']):.2f} ms", f"{float(row['p10']):.2f} to {float(row['p90']):.2f}"),
            f"{float(row['tflops']):.0f}",
            f"{float(row['peak_mb']):.0f} MB" if row["peak_mb"] else "-",
            f"{float(row['error']):.1e}" if row["error"] else "-",
        )
        for row in sorted(read(), key=lambda row: (int(row["heads"]), STAGES.index(row["stage"]), row["version"]))
    ]
    one = read()[0]
    about = f"{one['gpu']}, {one['tokens']} queries, top-k {one['topk']} of {one['rows']} rows of 576 bf16 numbers."
    return f"## `tamis bench train`\n\n{about}\n\n{table(header, lines, 'lrlrrrrr')}"
