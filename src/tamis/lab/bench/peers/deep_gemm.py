"""DeepGEMM's index scores as a peer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.lab.bench.index_sets import ScoreSet
from tamis.lab.bench.inputs import InputSet
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers.base import Unsupported, build_of, load_first, need_gpu
from tamis.ops import gather_index

DEEP_GEMM_MODULES = ("deep_gemm", "vllm.third_party.deep_gemm")
"""Where DeepGEMM may be found, in the order in which vLLM looks for it."""
MOST_PAGED_QUERIES = 2
"""The most new tokens per request that its paged kernel takes on Hopper."""


@dataclass(frozen=True)
class DeepGEMM:
    """DeepGEMM's index scores, over paged FP8 keys for decodes and over gathered keys for prompts."""

    module: Any
    name: str = "deepgemm"
    capturable: bool = True

    @property
    def build(self) -> str:
        """The distribution that it comes from."""
        return build_of("deep_gemm")

    @classmethod
    def find(cls, device: torch.device) -> "DeepGEMM":
        """The package itself, or the copy inside vLLM, with PDL on as in vLLM."""
        need_gpu(device)
        module = load_first(DEEP_GEMM_MODULES, "get_paged_mqa_logits_metadata")
        if hasattr(module, "set_pdl") and torch.cuda.get_device_capability(device)[0] >= 9:
            module.set_pdl(True)
        return cls(module)

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set. Schedules are made here, as engines make one per step, and the keys of prompts gathered."""
        if job.stage != "scores":
            raise Unsupported("it has index scores only")
        return [self.scores(item) for item in sets if isinstance(item, ScoreSet)]

    def scores(self, item: ScoreSet) -> Callable[[], Tensor]:
        """A call that computes the same scores, but leaves columns past a token's length as they were."""
        if item.cache.layout.name != "index-fp8" or item.cache.page_size != 64:
            raise Unsupported("its keys are index-fp8 in pages of 64")
        if item.queries is not None and item.queries <= MOST_PAGED_QUERIES:
            return self._paged(item, item.queries)
        if len(item.block_table) == 1:
            return self.gathered(item, gather_index(item.cache, item.block_table, item.lengths[-1:], rows=item.width))
        raise Unsupported("its scores of several prompts are not the same tensor as ours")

    def _paged(self, item: ScoreSet, queries: int) -> Callable[[], Tensor]:
        requests = len(item.block_table)
        q = item.q.view(requests, queries, *item.q.shape[1:])
        keys, lengths = item.cache.storage.unsqueeze(2), item.lengths.view(requests, queries)
        schedule = self.module.get_paged_mqa_logits_metadata(lengths, 64, self.module.get_num_sms())
        score = self._function("paged_mqa_logits")

        def call() -> Tensor:
            return score(q, keys, item.weights, lengths, item.block_table, schedule, item.width, clean_logits=False)

        return call

    def gathered(self, item: ScoreSet, keys: tuple[Tensor, Tensor | None]) -> Callable[[], Tensor]:
        """A call that scores the keys of one prompt, which lie one after another, and their scales."""
        starts = torch.zeros_like(item.lengths)
        score = self._function("mqa_logits")

        def call() -> Tensor:
            return score(item.q, keys, item.weights, starts, item.lengths, clean_logits=False)

        return call

    def _function(self, name: str) -> Callable[..., Tensor]:
        """The function by its newer name, whose queries come with optional scales, or by its older name."""
        newer = getattr(self.module, f"fp8_fp4_{name}", None)
        if newer is not None:
            return lambda q, *rest, **options: newer((q, None), *rest, **options)
        older: Callable[..., Tensor] = getattr(self.module, f"fp8_{name}")
        return older
