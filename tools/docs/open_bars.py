"""The bars that the newest rows under `benchmarks/results/` miss, for the top of `benchmarks/NOTES.md`."""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from tamis.step.batch import parse_shape
from tools.docs import doors, results, train_times
from tools.docs.markdown import table
from tools.docs.results import Row

FLASH_MLA = "sgl-flash-mla"


@dataclass(frozen=True)
class Cell:
    """One measurement that a bar is about."""

    shape: str
    """`128 x 1 of 65536, 64 heads`: which call, engine or layer it is."""
    value: float
    time: str = ""
    """When it was measured: of two measurements of one shape, the later one counts."""
    us: float | None = None
    """The time that a speedup is about: what it would have to be follows from the bar."""


@dataclass(frozen=True)
class Bar:
    """What was asked for: at least, or at most, this value in every cell."""

    words: str
    value: float
    cells: Sequence[Cell]
    at_most: bool = False

    def missed(self) -> list[Cell]:
        """The cells on the wrong side of the bar, the farthest first."""
        sign = -1 if self.at_most else 1
        return sorted((c for c in self.cells if sign * c.value < sign * self.value), key=lambda c: sign * c.value)


def open_bars() -> str:
    """A line for each bar that a cell misses: what was measured, where it is the farthest, and what the bar leaves."""
    lines = []
    for bar in bars():
        if not bar.cells:
            raise ValueError(f"no row under benchmarks/results is about {bar.words!r}; correct its condition")
        if missed := bar.missed():
            values = [cell.value for cell in bar.cells]
            span = " to ".join(dict.fromkeys((_digits(min(values)), _digits(max(values)))))
            far, words = missed[0], missed[0].shape
            if far.us is not None:
                now, asked = (results.digits(str(time)) for time in (far.us, far.us * far.value / bar.value))
                words += f": {now} us, {asked} asked"
            side = "<=" if bar.at_most else ">="
            lines.append((bar.words, f"{side} {bar.value:g}", span, f"{len(missed)} of {len(values)}", words))
    return table(("what", "bar", "measured", "cells that miss it", "the farthest"), lines, "lrrrl")


def bars() -> list[Bar]:
    """Every bar of selecting, of training and of many heads."""
    select, decodes = results.read("h200_select"), _decodes()
    prompts, steps = [_kind(select, "index", "vllm", one) for one in (False, True)]
    return [
        Bar("scores of 4096 tokens, over DeepGEMM", 1.05, _cells(_long(_kind(select, "scores", "deepgemm", False)))),
        Bar("scores and top-k of prompts in one call, over DeepGEMM + vLLM", 1.15, _cells(prompts)),
        Bar("scores and top-k of decodes in one call, over DeepGEMM + vLLM", 1.1, _cells(steps)),
        Bar("top-k among equal scores, over vLLM", 1.0, _cells(_stage(results.read("h200_index"), "topk-ties"))),
        Bar("host time of `index_topk`, us", 60, [_host(row) for row in (*prompts, *steps)], at_most=True),
        Bar("throughput of vLLM with tamis' indexer, over its own", 1.0, _indexers()),
        *(_many_heads(decodes, heads, bar) for heads, bar in (("64", 1.35), ("128", 1.2))),
        *(_v4(heads, bar) for heads, bar in (("64", 1.3), ("128", 1.15))),
        Bar(f"bf16 decode, 64 and 128 heads, over {FLASH_MLA}", 1.1, _cells(_layout(decodes, "v32-bf16"))),
        Bar(f"bf16 prompts, 64 and 128 heads, over {FLASH_MLA} (an aim)", 1.05, _cells(_prefills())),
        Bar("loss of the indexer, of attention's backward pass", 0.2, _shares("index loss", "backward"), at_most=True),
        Bar(
            "deterministic backward pass, of the other",
            1.6,
            _shares("backward, deterministic", "backward"),
            at_most=True,
        ),
    ]


def _many_heads(decodes: Sequence[Row], heads: str, bar: float) -> Bar:
    rows = [row for row in _layout(decodes, "v32-fp8") if row["heads"] == heads]
    return Bar(f"V3.2 FP8 decode, {heads} heads, over {FLASH_MLA}", bar, _cells(rows))


def _v4(heads: str, bar: float) -> Bar:
    rows = [r for r in doors.compared(doors.read()) if (r["layout"], r["heads"]) == ("v4-fp8", heads)]
    cells = []
    for row in (row for row in rows if doors.requests(row) >= 32):
        words = f"{results.shape_words(row['shape'])}, top-k {row['window']} + {row['topk']}"
        cells.append(replace(_cell(row, "graph_us"), shape=words))
    return Bar(f"V4 decode, {heads} heads, over {FLASH_MLA}", bar, cells)


def _decodes() -> list[Row]:
    """Decodes of 32 requests and more, one and two tokens, against sgl-flash-mla."""
    rows = [row for name in ("h200_decode_sgl", "h200_batch_sizes") for row in results.read(name) if row["ratio"]]
    return [row for row in rows if doors.requests(row) in (32, 64, 128, 512) and row["heads"] in ("64", "128")]


def _prefills() -> list[Row]:
    wanted = ("flashmla-sgl", "v32-bf16")
    return [row for row in results.read("h200_prefill") if (row["peer"], row["layout"]) == wanted]


def _indexers() -> list[Cell]:
    with (results.RESULTS / "vllm" / "h200_vllm_indexer_fp8_ds_mla.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["indexer"] == "tamis"]
    return [Cell(f"{row['cache']}, {row['mode']}", float(row["throughput_over_vllm_indexer"])) for row in rows]


def _shares(part: str, whole: str) -> list[Cell]:
    """The time of one stage of training over that of another, by heads."""
    times = {
        (row["stage"], row["heads"]): float(row["median_ms"])
        for row in train_times.read()
        if row["version"] == "tamis hopper"
    }
    return [
        Cell(f"{heads} heads", time / times[whole, heads]) for (stage, heads), time in times.items() if stage == part
    ]


def _kind(rows: Iterable[Row], stage: str, peer: str, decode: bool) -> list[Row]:
    """The rows of a stage against a peer, of decodes or of prompts."""
    found = [row for row in _stage(rows, stage) if row["peer"] == peer]
    return [row for row in found if (max(parse_shape(row["shape"])[0]) == 1) == decode]


def _long(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if sum(parse_shape(row["shape"])[0]) == 4096]


def _stage(rows: Iterable[Row], stage: str) -> list[Row]:
    return [row for row in rows if row["stage"] == stage and row["ratio"]]


def _layout(rows: Iterable[Row], layout: str) -> list[Row]:
    return [row for row in rows if row["layout"] == layout]


def _cells(rows: Iterable[Row]) -> list[Cell]:
    """A cell per shape, the newest of those that were measured twice."""
    newest: dict[str, Cell] = {}
    for cell in (_cell(row, "median_us") for row in rows):
        if cell.shape not in newest or cell.time >= newest[cell.shape].time:
            newest[cell.shape] = cell
    return list(newest.values())


def _cell(row: Row, time: str) -> Cell:
    heads = f", {row['heads']} heads" if row["heads"] else ""
    return Cell(results.shape_words(row["shape"]) + heads, float(row["ratio"]), row["time"], float(row[time]))


def _host(row: Row) -> Cell:
    return Cell(results.shape_words(row["shape"]), float(row["host_us"]))


def _digits(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
