"""The race of indexers inside the vLLM engine: tamis' against vLLM's own, with the same attention and cache."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from engine_results import (
    TURNS,
    Condition,
    Result,
    engine_rows,
    equal_share,
    first_differences,
    speed_ratio,
    turns_taken,
    verdict,
    write_rows,
)
from vllm_served import MODES, NEW_TOKENS, PROMPTS, Engine

CACHES = ("auto", "fp8_ds_mla")
BACKENDS = {"auto": ("CUSTOM", "FLASHMLA_SPARSE"), "fp8_ds_mla": ("CUSTOM",)}
"""The attention of each race. With `fp8_ds_mla`, vLLM 0.25 does not start on its own backend."""


def engines(caches: Collection[str] | None = None) -> dict[str, Engine]:
    """The engines with these caches, by name, those that race each other side by side."""
    found = [
        Engine(backend, cache, mode, indexer)
        for cache in caches or CACHES
        for backend in BACKENDS[cache]
        for mode in MODES
        for indexer in ("vllm", "tamis")
    ]
    return {engine.name: engine for engine in found}


ENGINES = engines()


def conditions(results: Mapping[str, Result], raced: Sequence[Engine]) -> list[Condition]:
    """The conditions that tamis' indexer must meet."""
    found = []
    for engine in raced:
        if engine.indexer != "tamis":
            continue
        own, peer = results.get(engine.name), results.get(replace(engine, indexer="vllm").name)
        name = replace(engine, indexer="vllm").name
        found += [
            Condition(f"{name}: turns", turns_taken([own, peer]), TURNS),
            Condition(f"{name}: tokens equal to those of vLLM's indexer", equal_share(own, peer), 0.95),
            Condition(f"{name}: throughput over vLLM's indexer by medians", speed_ratio(own, peer), 1.0),
        ]
    return found


def rows(results: Mapping[str, Result], about: Mapping[str, str]) -> list[dict[str, str]]:
    """The table's rows, one per engine that succeeded."""

    def compared(name: str, result: Result) -> dict[str, float | None]:
        peer = results.get(replace(ENGINES[name], indexer="vllm").name)
        return {
            "throughput_over_vllm_indexer": speed_ratio(result, peer),
            "equal_to_vllm_indexer": equal_share(result, peer),
        }

    engines = {name: asdict(engine) for name, engine in ENGINES.items()}
    return engine_rows(results, engines, PROMPTS * NEW_TOKENS, compared, about)


def report(results: Mapping[str, Result], raced: Sequence[Engine], out: Path, about: Mapping[str, str]) -> int:
    """Write a table per cache, print where tokens part, and judge."""
    table = rows(results, about)
    for cache in CACHES:
        name = "bf16" if cache == "auto" else cache
        write_rows(out / f"h200_vllm_indexer_{name}.csv", [row for row in table if row["cache"] == cache])
    for engine in raced:
        peer = replace(engine, indexer="vllm")
        if engine != peer and {engine.name, peer.name} <= set(results):
            print(f"{peer.name}: indexers part at:", first_differences(results[engine.name], results[peer.name]))
    return verdict(conditions(results, raced))
