"""How the benchmarks of the V3.2 engine start one engine in a process of its own and let it generate."""

import json
import random
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engine_race import median_batch, take_turns, write_result
from vllm_process import answers, attention_in_use, timed

PROMPTS, SHORTEST, LONGEST, NEW_TOKENS = 8, 3000, 6000, 32


@dataclass(frozen=True)
class Engine:
    """One way to serve the model."""

    backend: str
    cache: str
    mode: str
    indexer: str = "vllm"

    @property
    def name(self) -> str:
        backend = "tamis" if self.backend == "CUSTOM" else self.backend.lower()
        indexer = "" if self.indexer == "vllm" else f"-{self.indexer}_indexer"
        return f"{backend}-{'bf16' if self.cache == 'auto' else self.cache}-{self.mode}{indexer}"


MODES = ("eager", "graph")


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
        additional_config={} if engine.indexer == "vllm" else {"tamis": {"indexer": engine.indexer}},
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
    selecting = {type(layer).__name__ for layer in indexers_in_use(config)}
    if selecting != ({"Indexer"} if engine.indexer == "tamis" else set()):
        raise SystemExit(f"error: {engine.indexer} was to select, and these operators of tamis do: {selecting}")
    requests = prompts(config.model_config.get_vocab_size())
    timed(llm, requests, NEW_TOKENS)
    once = partial(timed, llm, requests, NEW_TOKENS)
    runs = take_turns(engine.name, folder, turns, partial(median_batch, once, engine.mode))
    facts = {"seconds": [seconds for seconds, _ in runs], "start_seconds": start_seconds, "layers": used}
    write_result(engine.name, folder, answers(runs[-1][1]) | facts)


def indexers_in_use(config: Any) -> list[Any]:
    """The operators of tamis that select for the engine's layers."""
    layers = config.compilation_config.static_forward_context.values()
    return [layer for layer in layers if type(layer).__module__ == "tamis.integrations.vllm.indexer_plugin"]
