"""What the benchmarks of vLLM read from a running engine: its counters, its free blocks, decode steps with drafts."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from vllm_drafts import DRAFTS

COUNTERS = {
    "preemptions": "vllm:num_preemptions",
    "prefix_queries": "vllm:prefix_cache_queries",
    "prefix_hits": "vllm:prefix_cache_hits",
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
}
"""vLLM's own counters, by their name in a table. Hits and queries are tokens, not counting preempted requests."""


class Observed:
    """An engine that runs in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.counts: Counter[str] = Counter()
        self.least = self.free = self.pool.get_num_free_blocks()
        self.peak = 0
        usual = self.scheduler.schedule

        def schedule(*arguments: Any, **options: Any) -> Any:
            step = usual(*arguments, **options)
            self.counts["steps"] += step.total_num_scheduled_tokens > 0
            self.least = min(self.least, self.pool.get_num_free_blocks())
            return step

        self.scheduler.schedule = schedule
        for kind in {type(part) for part in attention_parts(llm.llm_engine.vllm_config)}:
            name = "_forward_decode" if hasattr(kind, "_forward_decode") else "forward_mqa"
            setattr(kind, name, self.counted(getattr(kind, name)))

    def counted(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's attention that counts the first layer's decode steps with drafts."""

        def forward(part: Any, *arguments: Any, **options: Any) -> Any:
            if "swa_metadata" in options:
                place, record = part.prefix, options["swa_metadata"]
                requests, tokens = record.num_decodes, record.num_decode_tokens
            else:
                place, record = arguments[3].layer_name, arguments[2]
                requests = record.num_reqs if record.max_query_len <= 1 + DRAFTS else 0
                tokens = record.num_actual_tokens if requests else 0
            if re.search(r"\blayers\.0\.", place):
                self.counts["steps_with_drafts"] += tokens > requests
                self.counts["steps_of_drafts_only"] += tokens == (1 + DRAFTS) * requests > 0
            return usual(part, *arguments, **options)

        return forward

    def totals(self) -> Counter[str]:
        """Every count since the engine's start."""
        known = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        return self.counts + Counter({name: int(known.get(source, 0)) for name, source in COUNTERS.items()})

    def during(self, work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
        """The result of `work`, and what was counted meanwhile."""
        before, self.least = self.totals(), self.pool.get_num_free_blocks()
        self.free = self.least
        found = work()
        self.peak = self.free - self.least
        after = self.totals()
        names = (*COUNTERS, "steps", "steps_with_drafts", "steps_of_drafts_only")
        return found, {name: after[name] - before[name] for name in names} | {"blocks": self.peak, "free": self.free}

    def leave(self, blocks: int) -> None:
        """Take all but so many of the free blocks from the engine's pool, as if its cache were that small."""
        surplus = self.pool.get_num_free_blocks() - blocks
        if surplus > 0:
            self.pool.get_new_blocks(surplus)


def attention_parts(config: Any) -> list[Any]:
    """The objects that run attention: V3.2's implementations, V4's layers."""
    found = []
    for layer in config.compilation_config.static_forward_context.values():
        part = layer if hasattr(layer, "_forward_decode") else getattr(layer, "impl", None)
        if part is not None and (part is layer or hasattr(part, "forward_mqa")):
            found.append(part)
    return found
