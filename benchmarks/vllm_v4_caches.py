"""Serves the model of `vllm_v4_engine.py` with tamis over caches of plain rows: bf16, and e4m3 under one scale.

    python benchmarks/vllm_v4_caches.py --out results --logs logs

vLLM's own layer for such caches needs FlashInfer and a Blackwell GPU, so on Hopper there is none to compare with.
Instead attention is compared with float64 on what it was called with (`bf16exact`, `fp8exact`), and the tokens with
those that vLLM's FlashMLA layer chooses from packed rows (`own`): bf16 rows are more exact than these, e4m3 rows less.
Packed rows with tamis (`tamis`) show how far the kernels alone part. Times are those of engines without comparisons.
One PASS or FAIL line per condition.
"""

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from engine_race import Race, engine_parser
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
    checked_lines,
    every_kind,
    of_set,
    place_of,
    processes,
    repeats,
    replayed_calls,
    write_model,
)

ERROR = 0.004
"""Rounding outputs to bf16 alone is 0.0017 of their size."""


def exact_conditions(results: Results, engines: list[Engine]) -> list[Condition]:
    """How near to float64 the attention of engines with comparisons must be, in all kinds of layers and phases."""
    found = []
    for engine in engines:
        lines = checked_lines(results, engine)
        found.append(every_kind(engine, lines))
        for line in lines:
            place = place_of(engine, line)
            found.append(Condition(f"{place}: error to float64", line["tamis_to_exact"], ERROR, False))
            found += replayed_calls(engine, line)
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
    parser = engine_parser(__doc__, results="vllm", limit=480.0, rounds=3, serves=False)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer, if the engine asks for one")
    parser.add_argument("--heads", type=int, nargs="*", default=[64], help="head counts of the timed engines")
    parser.add_argument("--exact-heads", type=int, nargs="*", default=[8, 64], help="head counts of the compared ones")
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
