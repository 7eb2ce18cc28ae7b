"""Runs the vLLM engine on a tiny random DeepSeek-V3.2 model: the plugin of tamis against vLLM's FlashMLA backend.

    python benchmarks/vllm_engine.py --model tinyv32 --out results

`tinyv32` holds a config.json (dense layers only) and a tokenizer; `vllm_model.py` makes random weights for which
rounding seldom decides a token. With Gaussian weights it often does: vLLM's backend, eager and with graphs, agreed with
itself on only half of the tokens. The output therefore also shows how far each backend agrees with itself.

With `--race indexer` tamis' indexer runs against vLLM's own instead, with the same attention in both; `--caches` cuts
that race into parts. Its table is `h200_vllm_indexer_<cache>.csv`.

Every engine runs in a separate process. All start at once and then generate one after the other, in ten or more turns;
throughput is judged by the medians. Tokens, logprobs and times are written to `h200_vllm.csv`, with one PASS or FAIL
line per condition; if an engine fails, the end of its log is printed. tamis need not be installed: its entry point is
put on the engines' path.
"""

import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import vllm_indexer_race as indexer_race
from engine_race import Process, Race, engine_parser
from engine_results import (
    TURNS,
    Condition,
    Result,
    engine_rows,
    equal_share,
    first_differences,
    logprob_difference,
    speed_ratio,
    turns_taken,
    verdict,
    write_rows,
)
from vllm_model import write_checkpoint
from vllm_process import child_environment, keep_logs, versions, write_entry_point
from vllm_served import MODES, NEW_TOKENS, PROMPTS, Engine, serve

OWN = {(cache, mode): Engine("CUSTOM", cache, mode) for cache in ("auto", "fp8_ds_mla") for mode in MODES}
PEERS = {mode: Engine("FLASHMLA_SPARSE", "auto", mode) for mode in MODES}
ENGINES = {engine.name: engine for engine in (*PEERS.values(), *OWN.values())}


def conditions(results: dict[str, dict[str, Any]]) -> list[Condition]:
    """The conditions that the plugin must meet."""
    found = []
    for mode in MODES:
        peer = results.get(PEERS[mode].name)
        own, packed = (results.get(OWN[cache, mode].name) for cache in ("auto", "fp8_ds_mla"))
        found += [
            Condition(f"{mode}: turns", turns_taken([own, peer]), TURNS),
            Condition(f"{mode}, bf16: tokens equal to FLASHMLA_SPARSE", equal_share(own, peer), 0.95),
            Condition(f"{mode}, bf16: throughput over FLASHMLA_SPARSE by medians", speed_ratio(own, peer), 1.0),
            Condition(f"{mode}, fp8_ds_mla: tokens equal to bf16", equal_share(packed, own), 0.80),
            Condition(f"{mode}, fp8_ds_mla: logprob difference to bf16", logprob_difference(packed, own), 0.05, False),
        ]
    return found


def own_modes_agree(results: dict[str, dict[str, Any]], engine: Engine) -> float | None:
    """The share of tokens that are the same in eager mode and with graphs, the most that a comparison can reach."""
    eager, graph = (results.get(replace(engine, mode=mode).name) for mode in MODES)
    return equal_share(eager, graph)


def rows(results: dict[str, dict[str, Any]], about: dict[str, str]) -> list[dict[str, str]]:
    """The table's rows, one per engine that succeeded."""

    def compared(name: str, result: Result) -> dict[str, float | None]:
        engine = ENGINES[name]
        own, peer = results.get(OWN["auto", engine.mode].name), results.get(PEERS[engine.mode].name)
        return {
            "throughput_over_flashmla": speed_ratio(result, peer),
            "equal_to_flashmla": equal_share(result, peer),
            "equal_to_own_bf16": equal_share(result, own),
            "logprob_diff_to_own_bf16": logprob_difference(result, own),
            "equal_eager_graph": own_modes_agree(results, engine),
        }

    engines = {
        name: {field: value for field, value in asdict(engine).items() if field != "indexer"}
        for name, engine in ENGINES.items()
    }
    return engine_rows(results, engines, PROMPTS * NEW_TOKENS, compared, about)


def main() -> int:
    every = ENGINES | indexer_race.ENGINES
    parser = engine_parser(__doc__, results="vllm", limit=240.0, rounds=TURNS)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tiny model's config and tokenizer")
    parser.add_argument("--lock", type=Path, help="take turns only while holding this file, which other races share")
    parser.add_argument("--race", choices=("attention", "indexer"), default="attention", help="what is compared")
    parser.add_argument("--caches", nargs="*", choices=indexer_race.CACHES, help="race indexers with these caches only")
    parser.add_argument("--only", nargs="*", choices=every, help="run these engines only")
    parser.add_argument("--serial", action="store_true", help="start one engine after the other, if memory is short")
    options = parser.parse_args()
    if options.serve:
        serve(every[options.serve], options.model, options.folder, options.rounds)
        return 0
    racing = ENGINES if options.race == "attention" else indexer_race.engines(options.caches)
    engines = [engine for name, engine in racing.items() if not options.only or name in options.only]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_checkpoint(options.model, folder / "model")
        write_entry_point(folder / "site")
        common = [sys.executable, __file__, "--model", str(folder / "model"), "--folder", str(folder)]
        common += ["--rounds", str(options.rounds)]
        processes = {
            engine.name: Process([*common, "--serve", engine.name], child_environment(number, folder))
            for number, engine in enumerate(engines)
        }
        results: dict[str, dict[str, Any]] = {}
        for group in [{name: process} for name, process in processes.items()] if options.serial else [processes]:
            results |= Race(group, folder, options.rounds, options.limit).run(options.lock)
        keep_logs(folder, options.logs)
    if options.race == "indexer":
        return indexer_race.report(results, engines, options.out, versions())
    write_rows(options.out / "h200_vllm.csv", rows(results, versions()))
    for mode in MODES:
        own = results.get(OWN["auto", mode].name)
        for other in (PEERS[mode], OWN["fp8_ds_mla", mode]):
            if own is not None and other.name in results:
                print(f"{mode}, bf16 and {other.name} part at:", first_differences(own, results[other.name]))
    for engine in (PEERS["eager"], OWN["auto", "eager"], OWN["fp8_ds_mla", "eager"]):
        share = own_modes_agree(results, engine)
        if share is not None:
            print(f"{engine.name.removesuffix('-eager')}, eager and graph: {share:.4g} of the tokens equal")
    return verdict(conditions(results))


if __name__ == "__main__":
    sys.exit(main())
