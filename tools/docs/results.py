"""Tables of measured times, from `benchmarks/results/`."""

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

from tamis.backends import BACKENDS
from tamis.lab.bench.jobs import SUITES
from tamis.lab.bench.record import FLASH_MLA
from tamis.lab.bench.report.data import MEASUREMENT
from tamis.step.batch import parse_shape
from tools.docs.markdown import sortable, table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
PEERS = {
    **dict.fromkeys(FLASH_MLA, "FlashMLA"),
    "flashmla-gather": "gather + FlashMLA",
    "fa3": "FlashAttention 3",
    "deepgemm": "DeepGEMM",
    "vllm": "vLLM",
    "vllm-gather": "gather + vLLM",
    "torch": "torch",
    "": "-",
}
PREFERENCE = [backend.name for backend in BACKENDS]
SAID_ONCE = ("stage", "heads", "top-k", "format", "backend")
Row = dict[str, str]

HIGHLIGHTS: dict[str, tuple[str, str, str, str, str, str]] = {
    "sparse decode, 128 requests, 128 heads, FP8": ("h200_decode", "attend", "128q1s16k", "128", "2048", "v32-fp8"),
    "sparse decode, 128 requests, 16 heads, FP8": ("h200_decode", "attend", "128q1s16k", "16", "2048", "v32-fp8"),
    "sparse decode, 128 requests, 16 heads, bf16": ("h200_decode", "attend", "128q1s16k", "16", "2048", "v32-bf16"),
    "sparse decode, 1 request, 16 heads, FP8": ("h200_decode", "attend", "1q1s16k", "16", "2048", "v32-fp8"),
    "prompt, 4096 of 8192 tokens, 64 heads, bf16": ("h200_prefill", "attend", "1q4096s8k", "64", "2048", "v32-bf16"),
    "prompt, 4096 of 8192 tokens, 128 heads, bf16": ("h200_prefill", "attend", "1q4096s8k", "128", "2048", "v32-bf16"),
    "prompt, 4096 of 8192 tokens, 64 heads, FP8": ("h200_prefill", "attend", "1q4096s8k", "64", "2048", "v32-fp8"),
    "prompt, 4096 of 8192 tokens, 128 heads, FP8": ("h200_prefill", "attend", "1q4096s8k", "128", "2048", "v32-fp8"),
    "V4 decode, 128 requests, 64 heads, 128 + 512 rows": ("h200_v4", "attend", "128q1s16k", "64", "512", "v4-fp8"),
    "indexer scores, 128 x 64K keys": ("h200_select", "scores", "128q1s64k", "64", "", "index-fp8"),
    "scores of a prompt, 4096 x 64K keys": ("h200_select", "scores", "1q4ks64k", "64", "", "index-fp8"),
    "exact top-k 2048 of 128 x 64K": ("h200_index", "topk", "128q1s64k", "", "2048", "float32"),
    "scores and top-k in one call, 128 x 64K": ("h200_select", "index", "128q1s64k", "64", "2048", "index-fp8"),
    "scores and top-k in one call, 4096 x 64K": ("h200_select", "index", "1q4ks64k", "64", "2048", "index-fp8"),
    "write 64K tokens, FP8": ("h200_write", "write", "8q8k", "", "", "v32-fp8"),
}
"""The rows in README: file, stage, shape, heads, top-k and layout, wins and losses alike. Of several matching rows, the
default backend's is shown; of these the newest; and of its peers the fastest."""


def everything() -> str:
    """The results of each file of `names()` under a heading; other files have other columns."""
    return "\n\n".join(f"## {_heading(name.removeprefix('h200_'))}\n\n{suite(name)}" for name in names())


def names() -> list[str]:
    """The files written by `tamis bench`."""
    return sorted(path.stem for path in RESULTS.glob("h200_*.csv") if path.stem not in ("h200_door", "h200_train"))


def _heading(name: str) -> str:
    """The command that measures a suite, or the words of a file of other shapes."""
    return f"`tamis bench {name}`" if name in SUITES else name.replace("_", " ").capitalize()


def read(name: str) -> list[Row]:
    """The newest row of each measurement in a file."""
    newest: dict[tuple[str, ...], Row] = {}
    with (RESULTS / f"{name}.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            key = tuple(row[column] for column in (*MEASUREMENT, "peer"))
            if key not in newest or row["time"] >= newest[key]["time"]:
                newest[key] = row
    return list(newest.values())


def highlights() -> str:
    """A few rows for README."""
    lines = []
    for words, (name, stage, shape, heads, topk, layout) in HIGHLIGHTS.items():
        wanted = {"stage": stage, "shape": shape, "heads": heads, "topk": topk, "layout": layout}
        found = [row for row in read(name) if all(row[column] == value for column, value in wanted.items())]
        newest = max(found, key=lambda row: (-PREFERENCE.index(row["backend"]), row["time"]))
        same = [row for row in found if all(row[c] == newest[c] for c in ("backend", "commit", "median_us"))]
        row = min(same, key=lambda row: float(row["peer_us"] or "inf"))
        peer = "-" if not row["peer_us"] else f"{peer_words(row)}: {_us(row['peer_us'])}"
        ratio = speedup(row["ratio"])
        lines.append((words, row["backend"], _us(row["median_us"]), peer, ratio))
    return table(("on one H200", "backend", "tamis", "baseline, same run", "speedup vs. baseline"), lines, "llrrr")


def cpu_step() -> str:
    """The results of `benchmarks/cpu_step.py`."""
    with (RESULTS / "cpu_step.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [
        (r["torch"], r["threads"], r["heads"], r["topk"], f"{r['by_hand_ms']} ms", f"{r['tamis_ms']} ms", r["ratio"])
        for r in rows
    ]
    header = ("torch", "threads", "heads", "top-k", "plain torch", "tamis", "tamis / torch")
    return table(header, lines, "lrrrrrr")


def suite(name: str) -> str:
    """All rows of a file, and the machine and versions of the measurement."""
    rows = read(name)
    slower = _slower_builds(rows)
    columns: list[tuple[str, str, Callable[[Row], str]]] = [
        ("stage", "l", lambda r: f"`{r['stage']}`"),
        ("shape", "l", lambda r: shape_words(r["shape"])),
        ("heads", "r", lambda r: r["heads"] or "-"),
        (
            "top-k",
            "r",
            lambda r: (
                f"{r['window']} + {r['topk']}" if r["window"] not in ("", "0") and r["topk"] else r["topk"] or "-"
            ),
        ),
        ("format", "l", lambda r: f"`{r['layout']}`"),
        ("backend", "l", lambda r: r["backend"]),
        ("time", "r", lambda r: _us(r["median_us"])),
        ("p10 to p90", "r", lambda r: f"{digits(r['p10'])} to {digits(r['p90'])}"),
        ("of roofline", "r", lambda r: f"{100 * float(r['roofline_us']) / float(r['median_us']):.0f}%"),
        ("error", "r", lambda r: "0" if float(r["error"]) == 0 else f"{float(r['error']):.1e}"),
        ("baseline", "l", lambda r: f"{peer_words(r)}, {_us(r['peer_us'])}" if r["peer_us"] else "-"),
        ("speedup vs. baseline", "r", lambda r: "-" if r in slower else speedup(r["ratio"])),
    ]
    # Values that are the same in every row are stated once, above the table.
    values = {name: {cell(row) for row in rows} for name, _, cell in columns}
    same = [name for name, found in values.items() if len(found) == 1 and name in SAID_ONCE]
    said = [f"{name} {found}" for name in same for found in values[name] if found != "-"]
    kept = [column for column in columns if column[0] not in same and values[column[0]] != {"-"}]
    lines = [tuple(cell(row) for _, _, cell in kept) for row in rows]
    title = f"{origin(rows)} All rows: {', '.join(said)}." if said else origin(rows)
    return f"{title}\n\n" + sortable(table([c[0] for c in kept], lines, "".join(c[1] for c in kept)))


def peer_words(row: Row) -> str:
    """A peer's name, with its build where the row tells it."""
    name, build = PEERS[row["peer"]], row["peer_build"].replace("vllm", "vLLM")
    return f"{name} ({build})" if build else name


def _slower_builds(rows: Sequence[Row]) -> list[Row]:
    """The rows of builds of FlashMLA than which another was faster on the same measurement."""
    fastest: dict[tuple[str, ...], float] = {}
    timed = [(tuple(r[c] for c in MEASUREMENT), r) for r in rows if r["peer"] in FLASH_MLA and r["peer_us"]]
    for key, row in timed:
        fastest[key] = min(float(row["peer_us"]), fastest.get(key, float("inf")))
    return [row for key, row in timed if float(row["peer_us"]) > fastest[key]]


def origin(rows: Sequence[Row]) -> str:
    """The machines, versions, commits and days of some rows."""
    machines = sorted({f"{r['gpu']}, driver {r['driver']}, torch {r['torch']}, Triton {r['triton']}" for r in rows})
    commits = sorted({r["commit"][:10] for r in rows})
    days = sorted({r["time"][:10] for r in rows})
    return f"{'; '.join(machines)}; commit {', '.join(commits)}; {', '.join(days)}."


def shape_words(shape: str) -> str:
    """`32q1s16k` -> `32 x 1 of 16384`: requests, new tokens, tokens in all."""
    queries, lengths = parse_shape(shape)
    if queries == lengths:
        return f"{len(queries)} x {queries[0]} new"
    return f"{len(queries)} x {queries[0]} of {lengths[0]}"


def speedup(text: str) -> str:
    """A ratio; losses in bold."""
    if not text:
        return "-"
    value = float(text)
    return f"{value:.2f}" if value >= 1 else f"**{value:.2f}**"


def digits(text: str) -> str:
    """A time with as many digits as matter."""
    value = float(text)
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}"


def _us(text: str) -> str:
    return f"{digits(text)} us"
