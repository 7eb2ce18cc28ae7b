"""Runs the SGLang engine on a tiny DeepSeek-V3.2 model: the plugin of tamis against SGLang's FlashMLA implementations.

    python benchmarks/sglang_engine.py --model tinyv32 --archive dist/sglang_sm90.tar.xz --out results

The model is that of `vllm_engine.py`, whose tokens follow from what attention finds. SGLang's own implementations are
flashmla_sparse over a bf16 cache and flashmla_kv over an FP8 cache, for prompts and decode alike. All engines start at
once and then generate in turns. Tokens, logprobs and times are written to `h200_sglang.csv`, with one PASS or FAIL line
per condition; if an engine fails, the end of its log is printed. Without `--archive`, SGLang must be installed.

Engines compile kernels for minutes when they start, and hardly use the GPU. With `--kit`, what `sglang_kit.py` does is
done in that time, and the turns begin afterwards.
"""

import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from engine_race import Process, Race, engine_parser, median_batch, take_turns, write_result
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
from sglang_kit import DECODE_LIMIT, KIT_LIMIT, run
from sglang_kit_cases import ENGINES as IMPLEMENTATIONS
from sglang_process import child_environment, prepare, versions
from vllm_model import write_checkpoint
from vllm_process import LOGPROBS, keep_logs
from vllm_served import NEW_TOKENS, PROMPTS, prompts

CACHES = {"bf16": ("bfloat16", "flashmla_sparse"), "fp8": ("fp8_e4m3", "flashmla_kv")}
"""For each cache SGLang's name of its type, and SGLang's implementation for it."""
MODES = ("eager", "graph")
VOCABULARY = 1024
WARM_UP = 2
"""Batches before the first turn: requests are batched by arrival, so the first may not meet every compiled kernel."""


@dataclass(frozen=True)
class Engine:
    """One way to serve the model."""

    implementation: str
    cache: str
    mode: str

    @property
    def name(self) -> str:
        return f"{self.implementation}-{self.cache}-{self.mode}"


OWN = {(cache, mode): Engine("tamis", cache, mode) for cache in CACHES for mode in MODES}
PEERS = {(cache, mode): Engine(CACHES[cache][1], cache, mode) for cache in CACHES for mode in MODES}
ENGINES = {engine.name: engine for engine in (*PEERS.values(), *OWN.values())}


def timed(llm: Any, requests: Sequence[list[int]]) -> tuple[float, list[Any]]:
    """Seconds and outputs of one batch."""
    sampling = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    began = time.perf_counter()
    outputs = llm.generate(
        input_ids=list(requests), sampling_params=sampling, return_logprob=True, top_logprobs_num=LOGPROBS
    )
    return time.perf_counter() - began, outputs


def answers(outputs: Sequence[Any]) -> dict[str, Any]:
    """What a result keeps of an engine's outputs."""
    chosen = [output["meta_info"]["output_token_logprobs"] for output in outputs]
    best = [output["meta_info"]["output_top_logprobs"] for output in outputs]
    return {
        "tokens": [[token for _, token, *_ in steps] for steps in chosen],
        "logprobs": [[logprob for logprob, *_ in steps] for steps in chosen],
        "margins": [[step[0][0] - step[1][0] for step in steps] for steps in best],
    }


def serve(engine: Engine, model: Path, folder: Path, turns: int) -> None:
    """Start one engine, report that it is ready, and generate when told to. Runs in a separate process."""
    import sglang

    began = time.perf_counter()
    llm = sglang.Engine(
        model_path=str(model),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        kv_cache_dtype=CACHES[engine.cache][0],
        dsa_prefill_backend=engine.implementation,
        dsa_decode_backend=engine.implementation,
        disable_prefill_cuda_graph=True,
        disable_decode_cuda_graph=engine.mode == "eager",
        cuda_graph_bs_decode=[1, 2, 4, 8],
        context_length=8192,
        max_running_requests=PROMPTS,
        max_total_tokens=1 << 16,
        mem_fraction_static=0.5,
        chunked_prefill_size=8192,
        disable_radix_cache=True,
        sampling_backend="pytorch",
        grammar_backend="none",
        random_seed=0,
        # An idle scheduler would keep a core busy while other engines are timed.
        sleep_on_idle=True,
        log_level="info",
    )
    start_seconds = time.perf_counter() - began
    requests = [request["prompt_token_ids"] for request in prompts(VOCABULARY)]
    for _ in range(WARM_UP):
        timed(llm, requests)
    # The scheduler, a process of its own, writes to the same log.
    log = (folder / f"{engine.name}.log").read_text(errors="replace")
    served = re.search(r"tamis \S+ serves DSA .*", log)
    if engine.implementation == "tamis" and served is None:
        raise SystemExit("error: tamis did not say that it serves the model")
    once = partial(timed, llm, requests)
    runs = take_turns(engine.name, folder, turns, partial(median_batch, once, engine.mode))
    facts = {
        "seconds": [seconds for seconds, _ in runs],
        "start_seconds": start_seconds,
        "served": served.group() if served else "",
    }
    write_result(engine.name, folder, answers(runs[-1][1]) | facts)
    llm.shutdown()


def modes_agree(results: dict[str, dict[str, Any]], engine: Engine) -> float | None:
    """The share of tokens that are the same in eager mode and with graphs, the most that a comparison can reach."""
    eager, graph = (results.get(replace(engine, mode=mode).name) for mode in MODES)
    return equal_share(eager, graph)


def conditions(results: dict[str, dict[str, Any]]) -> list[Condition]:
    """The conditions that the plugin must meet."""
    found = []
    for (cache, mode), peer_engine in PEERS.items():
        own, peer = results.get(OWN[cache, mode].name), results.get(peer_engine.name)
        against = f"{mode}, {cache}: "
        found += [
            Condition(f"{against}turns", turns_taken([own, peer]), TURNS),
            Condition(f"{against}tokens equal to {peer_engine.implementation}", equal_share(own, peer), 0.95),
            Condition(f"{against}throughput over {peer_engine.implementation} by medians", speed_ratio(own, peer), 1.0),
        ]
    return found


def rows(results: dict[str, dict[str, Any]], about: dict[str, str]) -> list[dict[str, str]]:
    """The table's rows, one per engine that succeeded."""

    def compared(name: str, result: Result) -> dict[str, float | None]:
        engine = ENGINES[name]
        peer = results.get(PEERS[engine.cache, engine.mode].name)
        return {
            "throughput_over_own": speed_ratio(result, peer),
            "equal_to_own": equal_share(result, peer),
            "logprob_diff_to_own": logprob_difference(result, peer),
            "equal_eager_graph": modes_agree(results, engine),
        }

    engines = {name: asdict(engine) for name, engine in ENGINES.items()}
    return engine_rows(results, engines, PROMPTS * NEW_TOKENS, compared, about)


def main() -> int:
    parser = engine_parser(__doc__, results="sglang", limit=330.0, rounds=TURNS)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tiny model's config and tokenizer")
    parser.add_argument("--archive", type=Path, help="what sglang_pack.py wrote; by default SGLang must be installed")
    parser.add_argument("--kit", action="store_true", help="run SGLang's kit and time decode steps meanwhile")
    parser.add_argument("--only", nargs="*", choices=ENGINES, help="run these engines only")
    options = parser.parse_args()
    if options.serve:
        serve(ENGINES[options.serve], options.model, options.folder, options.rounds)
        return 0
    engines = [engine for name, engine in ENGINES.items() if not options.only or name in options.only]
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        prepare(folder, options.archive)
        write_checkpoint(options.model, folder / "model")
        common = [sys.executable, __file__, "--model", str(folder / "model"), "--folder", str(folder)]
        common += ["--rounds", str(options.rounds)]
        processes = {
            engine.name: Process([*common, "--serve", engine.name], child_environment(number, folder))
            for number, engine in enumerate(engines)
        }
        race = Race(processes, folder, options.rounds, options.limit)
        judged = run(folder, options.out, list(IMPLEMENTATIONS), KIT_LIMIT, DECODE_LIMIT) if options.kit else []
        results = race.run()
        keep_logs(folder, options.logs)
        write_rows(options.out / "h200_sglang.csv", rows(results, versions(child_environment(0, folder))))
    for key, peer in PEERS.items():
        own = results.get(OWN[key].name)
        if own is not None and peer.name in results:
            print(f"{OWN[key].name} and {peer.name} part at:", first_differences(own, results[peer.name]))
    return verdict([*judged, *conditions(results)])


if __name__ == "__main__":
    sys.exit(main())
