"""Runs the vLLM 0.25.0 engine on a tiny random DeepSeek-V4: the plugin of tamis against vLLM's own FlashMLA layer.

    python benchmarks/vllm_v4_engine.py --out results --logs logs

The model has a layer with a window only, one of ratio 4 with an indexer and one of ratio 128. `vllm_v4_model.py` makes
weights whose tokens follow from what attention finds; `vllm_v4_parts.py` replaces, for every engine alike, what a
machine without tilelang and CUTLASS' Python package lacks.

Engines with both attentions on the same inputs (`check`) run at 8, 16, 64 and 128 heads, eager and with graphs; then
comes a race of engines with one of them, at 64 and 8 heads, in ten or more turns. Prompts are short (1500 to 3000
tokens, below and above the 2048 that an indexer of 512 entries sees whole) and long (beyond 128 * 128). One PASS or
FAIL line per condition; if an engine fails, the end of its log is printed.
"""

import json
import random
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engine_race import Process, Race, engine_parser, median_batch, take_turns, write_result
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
from vllm_process import answers, attention_in_use, child_environment, keep_logs, timed, versions, write_entry_point
from vllm_v4_model import Weights, fill, prompt, tiny_config

Results = dict[str, dict[str, Any]]

NEW_TOKENS = 32
PROMPTS = {"short": (8, 1500, 3000), "long": (2, 16500, 18000)}
"""How many prompts of which lengths, by name."""
MODES = ("eager", "graph")
CACHES = {"bf16": "bfloat16", "fp8": "fp8_e4m3"}
"""vLLM's cache dtype of engines with tamis that are named after their plain rows; all others have packed rows."""
EXACT = "exact"
"""Ends the names of those whose attention is compared with float64."""
# Both round their outputs to bf16, which alone is 0.0017 of their size; the bound leaves room for FP8 rows.
DIFFERENCE, EXCESS = 0.004, 1.25


@dataclass(frozen=True)
class Engine:
    """One way to serve the model."""

    attention: str
    heads: int
    mode: str

    @property
    def name(self) -> str:
        return f"{self.attention}-{self.heads}-{self.mode}"

    @property
    def custom(self) -> bool:
        """Whether its layers are tamis'."""
        return self.attention == "tamis" or self.cache != "fp8_ds_mla"

    @property
    def cache(self) -> str:
        return CACHES.get(self.attention.removesuffix(EXACT), "fp8_ds_mla")

    @classmethod
    def named(cls, name: str) -> "Engine":
        attention, heads, mode = name.split("-")
        return cls(attention, int(heads), mode)


def requests(weights: Weights) -> dict[str, list[dict[str, list[int]]]]:
    """The prompts, by the name of their set."""
    choice, found = random.Random(7), {}
    for name, (count, shortest, longest) in PROMPTS.items():
        lengths = [choice.randint(shortest, longest) for _ in range(count)]
        found[name] = [{"prompt_token_ids": prompt(weights, length, choice)} for length in lengths]
    return found


def write_model(folder: Path, heads: int, tokenizer: Path | None) -> None:
    """Write the config and the weights, once for all engines of this many heads."""
    folder.mkdir()
    config = tiny_config(heads)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    for path in tokenizer.glob("tokenizer*.json") if tokenizer is not None else ():
        shutil.copy(path, folder)
    torch.save(Weights(config).tensors(), folder / "weights.pt")


def engine_options(engine: Engine, model: Path) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`."""
    graph = engine.mode == "graph"
    return {
        "model": str(model),
        "attention_backend": "CUSTOM" if engine.custom else None,
        "enforce_eager": not graph,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]} if graph else {},
        "skip_tokenizer_init": True,
        "tokenizer_mode": "hf",
        "generation_config": "vllm",
        "load_format": "dummy",
        "dtype": "bfloat16",
        "kv_cache_dtype": engine.cache,
        "block_size": 256,
        "max_model_len": 20480,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.06,
        "kv_cache_memory_bytes": 2 << 30,
        "disable_log_stats": True,
        "seed": 0,
    }


def serve(engine: Engine, model: Path, folder: Path, turns: int) -> None:
    """Start one engine, report that it is ready, and generate when told to. Runs in a separate process."""
    import vllm_v4_check
    import vllm_v4_parts

    tensors = torch.load(model / "weights.pt")
    check = vllm_v4_check.Check() if engine.attention == "check" else None
    if engine.attention.endswith(EXACT):
        check = vllm_v4_check.Exact()

    def load(constructed: Any) -> None:
        fill(constructed, tensors)
        if check is not None:
            check.allocate(next(constructed.parameters()).device)

    config = json.loads((model / "config.json").read_text())
    vllm_v4_parts.install(config, load)
    if check is not None:
        check.install()
    from vllm import LLM

    began = time.perf_counter()
    llm = LLM(**engine_options(engine, model))
    start_seconds = time.perf_counter() - began
    used = attention_in_use(llm.llm_engine.vllm_config)
    print("LAYERS", json.dumps(used), flush=True)
    classes = [name for name in used if "/" not in name]
    if not classes or any(name.startswith("tamis.") != engine.custom for name in classes):
        raise SystemExit(f"error: the layers are {classes}, which is not what {engine.attention} runs on")
    sets = requests(Weights(config))
    for batch in sets.values():
        timed(llm, batch, NEW_TOKENS)

    def once() -> dict[str, tuple[float, dict[str, Any]]]:
        found = {}
        for name, batch in sets.items():
            seconds, outputs = median_batch(partial(timed, llm, batch, NEW_TOKENS), engine.mode)
            found[name] = seconds, answers(outputs)
            if check is not None:
                check.after_replay(len(batch))
        return found

    if check is not None:
        check.reset()
    runs = take_turns(engine.name, folder, turns, once)
    result: dict[str, Any] = {"start_seconds": start_seconds, "layers": used, "sets": {}}
    for name in sets:
        first, last = runs[0][name][1], runs[-1][name][1]
        facts = {"seconds": [run[name][0] for run in runs], "again": first["tokens"]}
        result["sets"][name] = last | facts
    if check is not None:
        result["check"] = check.report()
        print("CHECK", json.dumps(result["check"]), flush=True)
    write_result(engine.name, folder, result)


def of_set(results: Results, engine: Engine, name: str) -> dict[str, Any] | None:
    result = results.get(engine.name)
    found: dict[str, Any] | None = None if result is None else result["sets"][name]
    return found


def repeats(result: dict[str, Any] | None) -> float | None:
    """The share of tokens that an engine chose again in its last turn."""
    return equal_share(result, result, "again")


def race_conditions(results: Results, heads: list[int]) -> list[Condition]:
    """What the plugin must meet against vLLM's own layer."""
    found = []
    for count in heads:
        for mode in MODES:
            for name in PROMPTS:
                own, tamis = (of_set(results, Engine(who, count, mode), name) for who in ("own", "tamis"))
                place = f"{count} heads, {mode}, {name}"
                found += [
                    Condition(f"{place}: turns", turns_taken([own, tamis]), TURNS),
                    Condition(f"{place}: tokens equal to FlashMLA's", equal_share(tamis, own), 0.95),
                    Condition(f"{place}: throughput over FlashMLA's by medians", speed_ratio(tamis, own), 1.0),
                ]
    return found


def floors(results: Results, heads: list[int]) -> list[str]:
    """How far each attention agrees with itself, the most that a comparison can reach, and where the two part."""
    lines = []
    for count in heads:
        for name in PROMPTS:
            for who in ("own", "tamis"):
                eager, graph = (of_set(results, Engine(who, count, mode), name) for mode in MODES)
                shares = [equal_share(eager, graph), repeats(eager), repeats(graph)]
                lines.append(
                    f"{who} with itself, {count} heads, {name}: eager and graph {text(shares[0])}, "
                    f"eager twice {text(shares[1])}, graph twice {text(shares[2])}"
                )
            for mode in MODES:
                own, tamis = (of_set(results, Engine(who, count, mode), name) for who in ("own", "tamis"))
                if own is not None and tamis is not None:
                    places = first_differences(own, tamis)
                    lines.append(f"own and tamis, {count} heads, {mode}, {name} part at: {places}")
    return lines


def race_rows(results: Results, about: dict[str, str]) -> list[dict[str, str]]:
    """The race's table, one row per engine and set of prompts."""
    found = []
    for engine in map(Engine.named, results):
        for name, (count, _, _) in PROMPTS.items():
            result, own = of_set(results, engine, name), of_set(results, Engine("own", engine.heads, engine.mode), name)
            assert result is not None
            eager, graph = (of_set(results, Engine(engine.attention, engine.heads, mode), name) for mode in MODES)
            spread = Spread.of(result["seconds"])
            speed = {"tokens_per_s_median": f"{count * NEW_TOKENS / spread.median:.2f}"}
            facts = {
                "throughput_over_own": text(speed_ratio(result, own)),
                "equal_to_own": text(equal_share(result, own)),
                "logprob_diff_to_own": text(logprob_difference(result, own)),
                "equal_eager_graph": text(equal_share(eager, graph)),
                "equal_again": text(repeats(result)),
                "start_s": f"{results[engine.name]['start_seconds']:.1f}",
            }
            row = {name: str(value) for name, value in asdict(engine).items()} | {"prompts": name}
            found.append(row | speed | spread.columns("seconds") | facts | about)
    return found


def check_conditions(results: Results, engines: list[Engine]) -> list[Condition]:
    """What both attentions must meet on the same inputs."""
    found = []
    for engine in engines:
        lines = checked_lines(results, engine)
        found.append(every_kind(engine, lines))
        for line in lines:
            place = place_of(engine, line)
            excess = line["tamis_to_exact"] / line["own_to_exact"] if line["exact_calls"] else None
            found += [
                Condition(f"{place}: own to tamis", line["own_to_tamis"], DIFFERENCE, False),
                Condition(f"{place}: error of tamis over that of own", excess, EXCESS, False),
            ]
            found += replayed_calls(engine, line)
    return found


def checked_lines(results: Results, engine: Engine) -> list[dict[str, Any]]:
    """What an engine compared, a line for each kind of layer and phase; empty if it did not end."""
    result = results.get(engine.name)
    return [] if result is None else result["check"]


def place_of(engine: Engine, line: dict[str, Any]) -> str:
    """What a line of an engine's check is about."""
    return f"{engine.name}, ratio {line['ratio']}, {line['phase']}"


def every_kind(engine: Engine, lines: list[dict[str, Any]]) -> Condition:
    """That the check met all kinds of layers in both phases."""
    met = {(line["ratio"], line["phase"]) for line in lines}
    return Condition(f"{engine.name}: kinds of layers and phases", float(len(met)) if lines else None, 6)


def replayed_calls(engine: Engine, line: dict[str, Any]) -> list[Condition]:
    """That decodes were compared within replayed graphs as well, if the engine has graphs."""
    if engine.mode != "graph" or line["phase"] != "decode":
        return []
    aside = line["calls"] - line["calls_from_python"]
    return [Condition(f"{place_of(engine, line)}: calls within replayed graphs", float(aside), 1)]


def check_rows(results: Results, about: dict[str, str]) -> list[dict[str, str]]:
    """The table of `check`."""
    found = []
    for name, result in results.items():
        for line in result["check"]:
            facts = {key: f"{value:.6f}" if isinstance(value, float) else str(value) for key, value in line.items()}
            found.append({key: str(value) for key, value in asdict(Engine.named(name)).items()} | facts | about)
    return found


def processes(engines: list[Engine], folder: Path, turns: int, first: int) -> dict[str, Process]:
    found = {}
    for number, engine in enumerate(engines):
        command = [sys.executable, __file__, "--serve", engine.name, "--folder", str(folder), "--rounds", str(turns)]
        # vLLM's own layers run without the plugin.
        plugins = {"VLLM_PLUGINS": "tamis" if engine.custom else "none"}
        found[engine.name] = Process(command, child_environment(first + number, folder) | plugins)
    return found


def main() -> int:
    parser = engine_parser(__doc__, results="vllm", limit=480.0, rounds=TURNS)
    parser.add_argument("--tokenizer", type=Path, help="folder with a tokenizer, if the engine asks for one")
    parser.add_argument("--heads", type=int, nargs="*", default=[64, 8], help="head counts of the race")
    parser.add_argument("--check-heads", type=int, nargs="*", default=[8, 16, 64, 128], help="head counts of check")
    parser.add_argument("--check-limit", type=float, default=300.0, help="seconds after which check is stopped")
    parser.add_argument("--lock", type=Path, help="take turns only while holding this file, which other races share")
    options = parser.parse_args()
    if options.serve:
        engine = Engine.named(options.serve)
        serve(engine, options.folder / f"model{engine.heads}", options.folder, options.rounds)
        return 0
    checks = [Engine("check", heads, mode) for heads in options.check_heads for mode in MODES]
    race = [Engine(who, heads, mode) for heads in options.heads for mode in MODES for who in ("own", "tamis")]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_entry_point(folder / "site")
        for heads in sorted({*options.heads, *options.check_heads}):
            write_model(folder / f"model{heads}", heads, options.tokenizer)
        # All start at once; the race waits for its first turn while the others are checked.
        checking = Race(processes(checks, folder, 1, 0), folder, 1, options.check_limit)
        racing = Race(processes(race, folder, options.rounds, len(checks)), folder, options.rounds, options.limit)
        about, conditions = versions(), []
        if checks:
            found = checking.run()
            write_rows(options.out / "h200_vllm_v4_check.csv", check_rows(found, about))
            conditions += check_conditions(found, checks)
        if race:
            found = racing.run(options.lock)
            write_rows(options.out / "h200_vllm_v4.csv", race_rows(found, about))
            print(*floors(found, options.heads), sep="\n", flush=True)
            conditions += race_conditions(found, options.heads)
        keep_logs(folder, options.logs)
    return verdict(conditions)


if __name__ == "__main__":
    sys.exit(main())
