"""Runs the vLLM engine on a tiny random DeepSeek-V3.2 model: the plugin of tamis against vLLM's FlashMLA backend.

    python benchmarks/vllm_engine.py --model tinyv32 --out results

`tinyv32` holds a config.json (dense layers only) and a tokenizer; `vllm_model.py` makes random weights for which
rounding seldom decides a token. With Gaussian weights it often does: vLLM's backend, eager and with graphs, agreed with
itself on only half of the tokens. The output therefore also shows how far each backend agrees with itself.

Every engine runs in a separate process. All start at once and then generate one after the other, in ten or more turns;
throughput is judged by the medians. Tokens, logprobs and times are written to `h200_vllm.csv`, with one PASS or FAIL
line per condition; if an engine fails, the end of its log is printed. tamis need not be installed: its entry point is
put on the engines' path.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine_race import Process, Race, median_batch, take_turns, write_result
from engine_results import (
    TURNS,
    Condition,
    Spread,
    equal_share,
    first_differences,
    logprob_difference,
    speed_ratio,
    text,
    turns_taken,
    verdict,
    write_rows,
)
from vllm_model import write_checkpoint
from vllm_process import answers, attention_in_use, child_environment, keep_logs, timed, versions, write_entry_point

PROMPTS, SHORTEST, LONGEST, NEW_TOKENS = 8, 3000, 6000, 32


@dataclass(frozen=True)
class Engine:
    """One way to serve the model."""

    backend: str
    cache: str
    mode: str

    @property
    def name(self) -> str:
        backend = "tamis" if self.backend == "CUSTOM" else self.backend.lower()
        return f"{backend}-{'bf16' if self.cache == 'auto' else self.cache}-{self.mode}"


MODES = ("eager", "graph")
OWN = {(cache, mode): Engine("CUSTOM", cache, mode) for cache in ("auto", "fp8_ds_mla") for mode in MODES}
PEERS = {mode: Engine("FLASHMLA_SPARSE", "auto", mode) for mode in MODES}
ENGINES = {engine.name: engine for engine in (*PEERS.values(), *OWN.values())}


def prompts(vocabulary: int) -> list[dict[str, list[int]]]:
    choice = random.Random(7)
    lengths = [choice.randint(SHORTEST, LONGEST) for _ in range(PROMPTS)]
    return [{"prompt_token_ids": [choice.randrange(2, vocabulary) for _ in range(n)]} for n in lengths]


def serve(engine: Engine, model: Path, folder: Path, turns: int) -> None:
    """Start one engine, report that it is ready, and generate when told to. Runs in a separate process."""
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(
        model=str(model),
        attention_backend=engine.backend,
        kv_cache_dtype=engine.cache,
        enforce_eager=engine.mode == "eager",
        compilation_config={} if engine.mode == "eager" else {"cudagraph_capture_sizes": [1, 2, 4, 8]},
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=8192,
        max_num_seqs=PROMPTS,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2 << 30,
        disable_log_stats=True,
        seed=0,
    )
    start_seconds = time.perf_counter() - began
    config = llm.llm_engine.vllm_config
    used = attention_in_use(config)
    print("LAYERS", json.dumps(used), flush=True)
    if engine.backend == "CUSTOM" and not any("tamis" in name for name in used):
        raise SystemExit("error: no layer runs on tamis")
    requests = prompts(config.model_config.get_vocab_size())
    timed(llm, requests, NEW_TOKENS)
    once = partial(timed, llm, requests, NEW_TOKENS)
    runs = take_turns(engine.name, folder, turns, partial(median_batch, once, engine.mode))
    facts = {"seconds": [seconds for seconds, _ in runs], "start_seconds": start_seconds, "layers": used}
    write_result(engine.name, folder, answers(runs[-1][1]) | facts)


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
    found = []
    for name, result in results.items():
        engine = ENGINES[name]
        own, peer = results.get(OWN["auto", engine.mode].name), results.get(PEERS[engine.mode].name)
        spread = Spread.of(result["seconds"])
        found.append(
            {"engine": name, **asdict(engine), "tokens_per_s_median": f"{PROMPTS * NEW_TOKENS / spread.median:.2f}"}
            | spread.columns("seconds")
            | {
                "start_s": f"{result['start_seconds']:.1f}",
                "throughput_over_flashmla": text(speed_ratio(result, peer)),
                "equal_to_flashmla": text(equal_share(result, peer)),
                "equal_to_own_bf16": text(equal_share(result, own)),
                "logprob_diff_to_own_bf16": text(logprob_difference(result, own)),
                "equal_eager_graph": text(own_modes_agree(results, engine)),
            }
            | about
        )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tiny model's config and tokenizer")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/vllm"), help="folder for the table")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs and tokens")
    parser.add_argument("--rounds", type=int, default=TURNS, help="timed turns of each engine; the median counts")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which running engines are stopped")
    parser.add_argument("--only", nargs="*", choices=ENGINES, help="run these engines only")
    parser.add_argument("--serial", action="store_true", help="start one engine after the other, if memory is short")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(ENGINES[options.serve], options.model, options.folder, options.rounds)
        return 0
    engines = [engine for name, engine in ENGINES.items() if not options.only or name in options.only]
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
            results |= Race(group, folder, options.rounds, options.limit).run()
        keep_logs(folder, options.logs)
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
