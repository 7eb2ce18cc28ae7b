"""The table of engines that serve with tamis and with their own attention, from `benchmarks/results/{vllm,sglang}`."""

import csv
from collections.abc import Callable, Iterable
from statistics import median
from textwrap import fill
from typing import NamedTuple

from tools.docs.markdown import table
from tools.docs.results import RESULTS, Row, speedup

FILES = ("vllm/h200_vllm.csv", "vllm/h200_vllm_v4.csv", "sglang/h200_sglang.csv")
"""The files with the turns of engines."""
INDEXER_FILE = "vllm/h200_vllm_indexer_fp8_ds_mla.csv"
TURNS = 10
"""The fewest turns of which a median is shown."""
PROMPTS = {"short": "prompts of 1500 to 3000 tokens", "long": "prompts of 16500 to 18000 tokens"}
"""The prompts of `benchmarks/vllm_v4_engine.py`."""


class Race(NamedTuple):
    """Medians of an engine with tamis over those of the engine with its own attention."""

    engine: str
    mode: str
    equal: float
    """The share of tokens that are equal."""
    throughput: float
    itself: float = 1.0
    """The share of tokens on which the engine with its own attention agrees with itself, run again."""


def races() -> list[Race]:
    """Every race, of V4 those with the newest weights of each head count."""
    found = [
        Race(f"vLLM {row['vllm']}, V3.2, bf16 cache, 16 heads", row["mode"], *_ratios(row, "flashmla"))
        for row in _rows("vllm/h200_vllm.csv", lambda row: (row["backend"], row["cache"]) == ("CUSTOM", "auto"))
    ]
    v4 = list(_rows("vllm/h200_vllm_v4.csv", lambda row: True))
    newest = {row["heads"]: row["weights"] for row in v4}
    own = {_cell(row): float(row["equal_again"]) for row in v4 if row["attention"] == "own"}
    found += [
        Race(
            f"vLLM {row['vllm']}, V4, FP8 cache, {row['heads']} heads, {PROMPTS[row['prompts']]}",
            row["mode"],
            *_ratios(row, "own"),
            own[_cell(row)],
        )
        for row in v4
        if row["attention"] == "tamis" and row["weights"] == newest[row["heads"]]
    ]
    found += [
        Race(
            f"SGLang {row['sglang']}, V3.2, {row['cache'].replace('fp8', 'FP8')} cache, 16 heads",
            row["mode"],
            *_ratios(row, "own"),
        )
        for row in _rows("sglang/h200_sglang.csv", lambda row: row["implementation"] == "tamis")
    ]
    return found


def engines() -> str:
    """A line per engine, model and cache: equal tokens and throughput, eager and with graphs."""
    found = races()
    lines = []
    for engine in dict.fromkeys(race.engine for race in found):
        eager, graph = (next(r for r in found if (r.engine, r.mode) == (engine, m)) for m in ("eager", "graph"))
        again = min(eager.itself, graph.itself)
        equal = f"{eager.equal:.2f} / {graph.equal:.2f}" + (f" (own, run again: {again:.2f})" if again < 1 else "")
        lines.append((engine, equal, f"{speedup(str(eager.throughput))} / {speedup(str(graph.throughput))}"))
    return table(("engine, heads per GPU", "equal tokens: eager / graphs", "throughput: eager / graphs"), lines, "lrr")


def spread() -> str:
    """The engines of the table, and by how much an engine's slowest turn exceeds its fastest."""
    versions = sorted({race.engine.partition(",")[0] for race in races()}, reverse=True)
    rows = [row for file in FILES for row in _rows(file, lambda row: True)]
    times = [float(row["seconds_highest"]) / float(row["seconds_lowest"]) for row in rows]
    text = (
        f"Engines are {' and '.join(versions)} with tiny models, which the host bounds. Each ran {TURNS} turns or "
        f"more. A slowest turn typically takes {median(times):.1f} times as long as the fastest ({min(times):.1f} to "
        f"{max(times):.1f} times), so medians within 10% of each other are equal as far as this shows. Nothing was "
        "measured with a whole model or on several GPUs."
    )
    return fill(text, 120)


def indexers() -> str:
    """Throughput of vLLM with its own indexer and with tamis', under the same attention."""
    rows = list(_rows(INDEXER_FILE, lambda row: True))
    lines = []
    for own in (row for row in rows if row["indexer"] == "vllm"):
        attention = (own["backend"], own["cache"], own["mode"])
        (ours,) = (r for r in rows if r["indexer"] == "tamis" and (r["backend"], r["cache"], r["mode"]) == attention)
        speeds = (f"{float(row['tokens_per_s_median']):.0f}" for row in (own, ours))
        ratio, equal = speedup(ours["throughput_over_vllm_indexer"]), float(ours["equal_to_vllm_indexer"])
        name = "tamis" if own["backend"] == "CUSTOM" else own["backend"]
        lines.append((name, *attention[1:], *speeds, ratio, f"{equal:.0%}"))
    header = (
        "attention",
        "cache",
        "mode",
        "vLLM's indexer, tokens/s",
        "tamis' indexer, tokens/s",
        "ratio",
        "equal tokens",
    )
    return table(header, lines, "lllrrrr")


def _rows(file: str, wanted: Callable[[Row], bool]) -> Iterable[Row]:
    with (RESULTS / file).open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return (row for row in rows if wanted(row) and int(row["turns"]) >= TURNS)


def _cell(row: Row) -> tuple[str, ...]:
    return tuple(row[column] for column in ("weights", "heads", "mode", "prompts"))


def _ratios(row: Row, peer: str) -> tuple[float, float]:
    return float(row[f"equal_to_{peer}"]), float(row[f"throughput_over_{peer}"])
