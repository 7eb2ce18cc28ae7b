"""Serves the model of `vllm_v4_engine.py` with tamis over caches of plain rows: bf16, and e4m3 under one scale.

    python benchmarks/vllm_v4_caches.py --out results --logs logs

vLLM's own layer for such caches needs FlashInfer and a Blackwell GPU, so on Hopper there is none to compare with.
Instead attention is compared with float64 on what it was called with (`bf16exact`, `fp8exact`), and the tokens with
those that vLLM's FlashMLA layer chooses from packed rows (`own`): bf16 rows are more exact than these, e4m3 rows less.
Packed rows with tamis (`tamis`) show how far the kernels alone part. Times are those of engines without comparisons.
One PASS or FAIL line per condition.
"""

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from engine_race import Race
from engine_results import Condition, Spread, equal_share, logprob_difference, speed_ratio, text, verdict, write_rows
from vllm_process import keep_logs, versions, write_entry_point
from vllm_v4_engine import (
    CACHES,
    EXACT,
    MODES,
    NEW_TOKENS,
    PROMPTS,
    Engine,
    Results,
    of_set,
    processes,
    repeats,
    write_model,
)

ERROR = 0.004
"""Rounding outputs to bf16 alone is 0.0017 of their size."""


def exact_conditions(results: Results, engines: list[Engine]) -> list[Condition]:
    """How near to float64 the attention of engines with comparisons must be, in all kinds of layers and phases."""
    found = []
    for engine in engines:
        result = results.get(engine.name)
        lines = [] if result is None else result["check"]
        met = {(line["ratio"], line["phase"]) for line in lines}
        found.append(Condition(f"{engine.name}: kinds of layers and phases", float(len(met)) if lines else None, 6))
        for line in lines:
            place = f"{engine.name}, ratio {line['ratio']}, {line['phase']}"
            found.append(Condition(f"{place}: error to float64", line["tamis_to_exact"], ERROR, False))
            if engine.mode == "graph" and line["phase"] == "decode":
                aside = line["calls"] - line["calls_from_python"]
                found.append(Condition(f"{place}: calls within replayed graphs", float(aside), 1))
    return found


def served_conditions(results: Results, engines: list[Engine]) -> list[Condition]:
    """That every engine answered; how tokens and times compare is in the table."""
    return [Condition(f"{engine.name}: served", float(engine.name in results), 1) for engine in engines]


def table(results: Results, about: dict[str, str]) -> list[dict[str, str]]:
    """One row per engine and set of prompts."""
    found = []
    for name in results:
        engine = Engine.named(name)
        worst = max((line["tamis_to_exact"] or 0.0 for line in results[name].get("check", [])), default=None)
        for prompts, (count, _, _) in PROMPTS.items():
            result, own = (
                of_set(results, engine, prompts),
                of_set(results, Engine("own", engine.heads, "eager"), prompts),
            )
            assert result is not None
            spread = Spread.of(result["seconds"])
            facts = {
                "cache": engine.cache,
                "tokens_per_s_median": f"{count * NEW_TOKENS / spread.median:.2f}",
                "throughput_over_own_eager": text(speed_ratio(result, own)),
                "equal_to_own_eager": text(equal_share(result, own)),
                "logprob_diff_to_own_eager": text(logprob_difference(result, own)),
                "equal_again": text(repeats(result)),
                "worst_error_to_float64": text(worst),
            }
            row = {key: str(value) for key, value in asdict(engine).items()} | {"prompts": prompts}
            found.append(row | facts | spread.columns("seconds") | about)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm"), help="folder for the table")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs and tokens")
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer, if the engine asks for one")
    parser.add_argument("--heads", type=int, nargs="*", default=[64], help="head counts of the timed engines")
    parser.add_argument("--exact-heads", type=int, nargs="*", default=[8, 64], help="head counts of the compared ones")
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each engine; the median counts")
    parser.add_argument("--limit", type=float, default=480.0, help="seconds after which engines are stopped")
    options = parser.parse_args()
    exact = [
        Engine(f"{rows}{EXACT}", heads, mode) for heads in options.exact_heads for rows in CACHES for mode in MODES
    ]
    timed = [Engine(who, heads, mode) for heads in options.heads for who in ("own", "tamis", *CACHES) for mode in MODES]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_entry_point(folder / "site")
        for heads in sorted({engine.heads for engine in (*exact, *timed)}):
            write_model(folder / f"model{heads}", heads, options.tokenizer)
        compared = Race(processes(exact, folder, 1, 0), folder, 1, options.limit)
        raced = Race(processes(timed, folder, options.rounds, len(exact)), folder, options.rounds, options.limit)
        results = compared.run() | raced.run()
        write_rows(options.out / "h200_vllm_v4_caches.csv", table(results, versions()))
        keep_logs(folder, options.logs)
    return verdict([*exact_conditions(results, exact), *served_conditions(results, timed)])


if __name__ == "__main__":
    sys.exit(main())
