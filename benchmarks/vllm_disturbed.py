"""Runs tiny DeepSeek models in vLLM 0.25.0 under disturbance and with drafts, and compares tokens with a plain run's.

    python benchmarks/vllm_disturbed.py --model tinyv32 --out results --logs logs

For V3.2 (`tinyv32` holds its config) and V4, with vLLM's own attention and with tamis, four engines each:

- plain: no prefix cache, large steps, blocks for everything. Two runs, to see how often it agrees with itself.
- disturbed: prefix cache on, prompts in chunks of at most 60 tokens. One run fills the prefix cache and one finds
  everything in it; then blocks are taken away until requests are preempted, and two more runs follow.
- mtp: two tokens per step from a drafting layer.
- ngram: two tokens per step, looked up in the text by vLLM's own drafter.

With `--indexer tamis`, tamis also selects in the engines with its attention; their table is then
`h200_vllm_disturbed_indexer.csv`.

Attention computes the same in all of them, but steps have other shapes, whose rounding may change a token; so vLLM's
own attention shows how much agreement there can be. That requests were preempted, that prefixes were found and drafts
accepted is read from vLLM's own counters. All engines run at the same time, since none is timed; one PASS or FAIL line
per condition; if an engine fails, the others go on and the end of its log is printed.
"""

import json
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import vllm_v4_engine
import vllm_v4_model
from engine_race import Process, Race, engine_parser, take_turns, write_result
from engine_results import Condition, equal_share, first_differences, text, verdict, write_rows
from vllm_drafts import DRAFTS, install_interpreted_numba, install_v4_parts, write_v4, write_v32
from vllm_observed import Observed, cached_tokens
from vllm_process import answers, attention_in_use, child_environment, keep_logs, sampling, versions, write_entry_point
from vllm_served import indexers_in_use

Results = dict[str, dict[str, Any]]

MODELS, ATTENTIONS, KINDS = ("v32", "v4"), ("own", "tamis"), ("plain", "disturbed", "mtp", "ngram")
HEADS = 16
"""Heads of the V4 model."""
PROMPTS, NEW_TOKENS = 8, 64
LENGTHS, SHARED = {"v32": (3000, 6000), "v4": (1500, 3000)}, {"v32": 2048, "v4": 1024}
"""Shortest and longest prompt, and how many of their first tokens half of the prompts have in common."""
STEP_TOKENS, CHUNK = 512, 60
"""Tokens of a step and of a prompt's chunk: all prompts start together, and no chunk ends with a block or group."""
LEFT = (0.55, 0.42, 0.32)
"""The share of the blocks that a run used which the small cache has; the next one if nothing was preempted."""
SMALL = ("small", "small again")
EQUAL = 0.95


@dataclass(frozen=True)
class Engine:
    """One way to serve a model."""

    model: str
    attention: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.model}-{self.attention}-{self.kind}"

    @classmethod
    def named(cls, name: str) -> "Engine":
        return cls(*name.split("-"))


ENGINES = [Engine(model, attention, kind) for model in MODELS for attention in ATTENTIONS for kind in KINDS]


def requests(model: str, folder: Path) -> list[dict[str, list[int]]]:
    """Prompts of which the first and the second half begin alike."""
    choice, config = random.Random(11), json.loads((folder / "config.json").read_text())
    weights = vllm_v4_model.Weights(config) if model == "v4" else None

    def tokens(count: int) -> list[int]:
        if weights is not None:
            return vllm_v4_model.prompt(weights, count, choice)
        return [choice.randrange(2, config["vocab_size"]) for _ in range(count)]

    begins = [tokens(SHARED[model]) for _ in range(2)]
    rests = [tokens(choice.randint(*LENGTHS[model]) - SHARED[model]) for _ in range(PROMPTS)]
    return [{"prompt_token_ids": begins[2 * i // PROMPTS] + rest} for i, rest in enumerate(rests)]


def engine_options(engine: Engine, folder: Path) -> dict[str, Any]:
    """The arguments of vLLM's `LLM`."""
    if engine.model == "v4":
        options = vllm_v4_engine.engine_options(vllm_v4_engine.Engine(engine.attention, HEADS, "eager"), folder)
    else:
        backend = "CUSTOM" if engine.attention == "tamis" else "FLASHMLA_SPARSE"
        options = {
            "model": str(folder),
            "attention_backend": backend,
            "kv_cache_dtype": "auto",
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "max_num_seqs": PROMPTS,
            "max_num_batched_tokens": 8192,
            "enable_prefix_caching": False,
            "kv_cache_memory_bytes": 1 << 30,
            "seed": 0,
        }
    options |= {"max_model_len": 8192, "gpu_memory_utilization": 0.05, "disable_log_stats": False}
    if engine.kind == "disturbed":
        options |= {
            "enable_prefix_caching": True,
            "max_num_batched_tokens": STEP_TOKENS,
            "long_prefill_token_threshold": CHUNK,
            # Otherwise requests wait for room for their whole prompt, with much to spare, and are seldom preempted; a
            # small cache would then never take a V4 prompt at all.
            "scheduler_reserve_full_isl": False,
        }
    elif engine.kind == "mtp":
        # vLLM does not give a drafting layer the model's backend by itself.
        drafting = {"method": "mtp", "attention_backend": options["attention_backend"]}
        options["speculative_config"] = drafting | {"num_speculative_tokens": DRAFTS}
    elif engine.kind == "ngram":
        lookup = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}
        options["speculative_config"] = lookup | {"num_speculative_tokens": DRAFTS}
    return options


def start(engine: Engine, folder: Path, indexer: str) -> Any:
    """vLLM's `LLM`, whose attention is certain to be the engine's, and so is the indexer of tamis' engines."""
    if engine.kind == "ngram":
        install_interpreted_numba()
    if engine.model == "v4":
        import vllm_v4_parts

        tensors = torch.load(folder / "weights.pt")
        config = json.loads((folder / "config.json").read_text())
        vllm_v4_parts.install(config, lambda model: vllm_v4_model.fill(model, tensors))
        install_v4_parts()
    from vllm import LLM

    selects = indexer == "tamis" and engine.attention == "tamis"
    more = {"additional_config": {"tamis": {"indexer": indexer}}} if selects else {}
    llm = LLM(**engine_options(engine, folder), **more)
    used = attention_in_use(llm.llm_engine.vllm_config)
    print("LAYERS", json.dumps(used), flush=True)
    if bool(indexers_in_use(llm.llm_engine.vllm_config)) != selects:
        raise SystemExit(f"error: {indexer} was to select in this engine")
    attention = [name for name in used if ("/" in name) == (engine.model == "v32") and "Indexer" not in name]
    if not attention or any(name.startswith("tamis.") != (engine.attention == "tamis") for name in attention):
        raise SystemExit(f"error: attention is {attention}, which is not what {engine.attention} runs on")
    return llm


def serve(engine: Engine, model: Path, folder: Path, indexer: str = "vllm") -> None:
    """Start one engine, generate, and write what came of it. Runs in a separate process."""
    take_turns(engine.name, folder, 0, lambda: None)  # ready: no engine waits for another
    began = time.perf_counter()
    llm = start(engine, model, indexer)
    start_seconds = time.perf_counter() - began
    observed, batch = Observed(llm), requests(engine.model, model)
    runs: dict[str, dict[str, Any]] = {}

    def run(label: str) -> dict[str, int]:
        settings = sampling(NEW_TOKENS)
        if engine.kind != "plain":
            settings.logprobs = None
        outputs, counts = observed.during(lambda: llm.generate(batch, settings, use_tqdm=False))
        counts["prefix_hits"] = cached_tokens(outputs)
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        runs[label] = {"tokens": tokens, "counts": counts}
        if engine.kind == "plain":
            runs[label] |= answers(outputs)
        print("RUN", label, json.dumps(counts), flush=True)
        return counts

    if engine.kind == "disturbed":
        disturb(llm, observed, run)
    else:
        run("first")
        run("again")
    write_result(engine.name, folder, {"start_seconds": start_seconds, "runs": runs})


def disturb(llm: Any, observed: Observed, run: Any) -> None:
    """Fill the prefix cache in chunks, use it, and then make the cache too small for the batch."""
    used = run("chunked")["blocks"]
    run("cached")
    llm.reset_prefix_cache()
    for share in LEFT:
        observed.leave(int(share * used))
        if run(SMALL[0])["preemptions"]:
            break
    run(SMALL[1])


def run_of(results: Results, engine: Engine, label: str = "first") -> dict[str, Any] | None:
    result = results.get(engine.name)
    found: dict[str, Any] | None = None if result is None else result["runs"].get(label)
    return found


def labels(kind: str) -> tuple[str, ...]:
    """The runs of an engine."""
    return ("chunked", "cached", *SMALL) if kind == "disturbed" else ("first", "again")


def counted(run: dict[str, Any] | None, name: str) -> float | None:
    return None if run is None else float(run["counts"][name])


def agreement(results: Results, engine: Engine, label: str) -> float | None:
    """The share of a run's tokens that the plain run of the same attention chose as well."""
    plain = run_of(results, Engine(engine.model, engine.attention, "plain"))
    return equal_share(run_of(results, engine, label), plain)


def conditions(results: Results, engines: list[Engine]) -> list[Condition]:
    """What must hold: disturbances happened, to both attentions, and tamis' tokens are those of its plain run.

    Tokens may differ where vLLM's own attention differs from itself as often.
    """
    found = []
    for engine in engines:
        for label in labels(engine.kind):
            if engine.attention == "tamis" and (engine.kind, label) != ("plain", "first"):
                own = agreement(results, Engine(engine.model, "own", engine.kind), label)
                bound = EQUAL if own is None else min(EQUAL, own)
                name = f"{engine.name}, {label}: tokens equal to the plain run's"
                found.append(Condition(name, agreement(results, engine, label), bound))
        required = {
            "plain": [],
            "disturbed": [("cached", "prefix_hits"), (SMALL[0], "preemptions")],
            "mtp": [("first", "steps_of_drafts_only"), ("first", "accepted_tokens")],
            "ngram": [("first", "steps_with_drafts"), ("first", "accepted_tokens")],
        }[engine.kind]
        for label, name in required:
            run = run_of(results, engine, label)
            found.append(Condition(f"{engine.name}, {label}: {name}", counted(run, name), 1))
    return found


def rows(results: Results, about: dict[str, str]) -> list[dict[str, str]]:
    """The table, one row per run."""
    found = []
    for name, result in results.items():
        engine = Engine.named(name)
        for label, run in result["runs"].items():
            counts = run["counts"]
            accepted = counts["accepted_tokens"] / counts["draft_tokens"] if counts["draft_tokens"] else None
            other = run_of(results, Engine(engine.model, "own", engine.kind), label)
            facts = {
                "equal_to_plain": text(agreement(results, engine, label)),
                "equal_to_own": text(equal_share(run, other)),
                "acceptance": text(accepted),
                "start_s": f"{result['start_seconds']:.1f}",
            }
            counted_as = {key: str(value) for key, value in counts.items()}
            found.append(asdict(engine) | {"run": label} | facts | counted_as | about)
    return found


def places(results: Results) -> list[str]:
    """Where runs part from the plain run of the same attention, with its margins there."""
    lines = []
    for name, result in results.items():
        engine = Engine.named(name)
        plain = run_of(results, Engine(engine.model, engine.attention, "plain"))
        for label, run in result["runs"].items():
            if plain is not None and run["tokens"] != plain["tokens"]:
                lines.append(f"{name}, {label} parts from the plain run at: {first_differences(plain, run)}")
    return lines


def main() -> int:
    parser = engine_parser(__doc__, results="vllm", limit=240.0)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tiny V3.2's config and tokenizer")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=MODELS, help="run these models only")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=KINDS, help="run these engines; plain always runs")
    parser.add_argument("--attentions", nargs="*", default=["own", "tamis"], help="run these attentions only")
    parser.add_argument(
        "--indexer", choices=("vllm", "tamis"), default="vllm", help="what selects for tamis' attention"
    )
    options = parser.parse_args()
    if options.serve:
        engine = Engine.named(options.serve)
        serve(engine, options.model, options.folder, options.indexer)
        return 0
    kinds = {"plain", *options.kinds}
    chosen = [engine for engine in ENGINES if engine.model in options.models and engine.kind in kinds]
    engines = [engine for engine in chosen if engine.attention in options.attentions]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        write_entry_point(folder / "site")
        if "v32" in options.models:
            write_v32(options.model, folder / "v32")
        if "v4" in options.models:
            write_v4(folder / "v4", HEADS)
        processes = {}
        for number, engine in enumerate(engines):
            command = [sys.executable, __file__, "--serve", engine.name, "--folder", str(folder)]
            command += ["--indexer", options.indexer]
            # vLLM's own attention runs without the plugin.
            plugins = {"VLLM_PLUGINS": "tamis" if engine.attention == "tamis" else "none"}
            environment = child_environment(number, folder) | plugins
            processes[engine.name] = Process([*command, "--model", str(folder / engine.model)], environment)
        results = Race(processes, folder, 0, options.limit).run()
        keep_logs(folder, options.logs)
    suffix = "" if options.indexer == "vllm" else "_indexer"
    write_rows(options.out / f"h200_vllm_disturbed{suffix}.csv", rows(results, versions()))
    print(*places(results), sep="\n", flush=True)
    return verdict(conditions(results, engines))


if __name__ == "__main__":
    sys.exit(main())
