"""V4 attention over plain rows on a GPU: float64 over bytes written by rules, without waiting, and from a graph."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bounds import relative_error
from v4_rows import KINDS, PlainStep, page_memory
from v4_standin import MAX_TOKENS, RATIOS, SHAPES, TOPK, main_builder, window_builder

from tamis.integrations.vllm.v4_forward import forward_step

pytestmark = pytest.mark.gpu
STEPS = SHAPES | {"drafts": ([2, 2, 2], [300, 700, 4])}
BOUND = 5e-3
"""Weights and outputs are rounded to bf16, 0.0017 of their size each; queries and rows are what the rules wrote."""
TABLE = 40


class OnDevice:
    """A layer and an engine's buffers on a device, whose addresses stay as steps come and go."""

    def __init__(self, step: PlainStep, ratio: int, padding: int, device: str = "cuda") -> None:
        tokens = len(step.tokens) + padding
        self.ratio, self.padding, self.device = ratio, padding, device
        self.q = torch.zeros(tokens, *step.q.shape[1:], dtype=torch.bfloat16, device=device).to(step.query()[0].dtype)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.output = torch.empty(self.q.shape, dtype=torch.bfloat16, device=device)
        caches = {number: self.memory(step, number) for number in {1, ratio}}
        self.layer = step.layer(
            ratio,
            attn_sink=step.sink.to(device),
            swa_cache_layer=SimpleNamespace(kv_cache=caches[1], prefix="window"),
            kv_cache=caches[ratio] if ratio > 1 else None,
            topk_indices_buffer=torch.zeros(MAX_TOKENS, TOPK, dtype=torch.int32, device=device),
        )
        self.caches = caches
        self.builders: dict[str, Any] = {"window": window_builder(device=device)}
        if ratio > 1:
            self.builders["attn"] = main_builder(ratio, device=device)
        self.common = {name: self.engine_record(step, name) for name in self.builders}

    def memory(self, step: PlainStep, ratio: int) -> torch.Tensor:
        storage = step.cache(ratio).storage
        return page_memory(*storage.shape[:2], storage.dtype, self.device)

    def engine_record(self, step: PlainStep, name: str) -> SimpleNamespace:
        found = step.common("window" if name == "window" else "main", self.padding)
        blank = torch.zeros(len(found.block_table_tensor), TABLE - found.block_table_tensor.shape[1], dtype=torch.int32)
        found.block_table_tensor = torch.cat((found.block_table_tensor, blank), 1)
        found.seq_lens_cpu = found.seq_lens
        for field in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            setattr(found, field, getattr(found, field).to(self.device))
        return found

    def load(self, step: PlainStep) -> dict[str, Any]:
        """Copy a step into the buffers, and build its records."""
        total = len(step.tokens)
        self.q.view(torch.uint8)[:total].copy_(step.query()[0].view(torch.uint8))
        self.positions[:total].copy_(step.positions())
        self.layer.topk_indices_buffer[:total].copy_(step.chosen)
        self.layer.attn_sink.copy_(step.sink)
        for ratio, memory in self.caches.items():
            memory.view(torch.uint8).copy_(step.cache(ratio).storage.view(torch.uint8))
        records = {}
        for name, builder in self.builders.items():
            held, new = self.common[name], self.engine_record(step, name)
            for field, value in vars(new).items():
                if isinstance(value, torch.Tensor) and value.device.type == torch.device(self.device).type != "cpu":
                    getattr(held, field).copy_(value)
                else:
                    setattr(held, field, value)
            records[name] = builder.build(0, held)
        return records

    def run(self, records: dict[str, Any]) -> None:
        forward_step(self.layer, self.q, self.positions, self.output, records)

    def error(self, step: PlainStep) -> float:
        found = self.output[: len(step.tokens)].cpu()
        return relative_error(found, step.attention(self.ratio, step.query()[1]).out)


@pytest.mark.parametrize("heads", [8, 13, 128])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("shape", STEPS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_agree_with_float64_and_wait_for_nothing(kind: str, shape: str, ratio: int, heads: int) -> None:
    step = PlainStep(kind, *STEPS[shape], heads=heads)
    there = OnDevice(step, ratio, padding=2)
    records = there.load(step)
    there.run(records)  # kernels are compiled, which waits
    there.output.fill_(torch.nan)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        there.run(records)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.error(step) < BOUND


@pytest.mark.parametrize("heads", [8, 64])
@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_serves_the_steps_after_it(kind: str, ratio: int, heads: int) -> None:
    """Decodes with a draft token each; the graph is captured for the first step alone."""
    queries = [2, 2, 2]
    steps = [
        PlainStep(kind, queries, lengths, heads=heads, seed=seed)
        for seed, lengths in enumerate(([256, 700, 3], [2, 1100, 129], [5, 40, 600]))
    ]
    there = OnDevice(steps[0], ratio, padding=2)
    records = there.load(steps[0])
    there.run(records)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.run(records)
    for step in (*steps, steps[0]):
        there.load(step)
        there.output.fill_(torch.nan)
        graph.replay()
        assert there.error(step) < BOUND
        assert there.output[len(step.tokens) :].eq(0).all(), "padding attends to nothing"
