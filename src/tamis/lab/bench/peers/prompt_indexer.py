"""vLLM's indexer for prompts with its gather of the keys, as one peer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.lab.bench.index_sets import IndexSet, ScoreSet
from tamis.lab.bench.inputs import InputSet
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers.base import Unsupported, build_of, load, need_gpu
from tamis.lab.bench.peers.deep_gemm import DeepGEMM
from tamis.lab.bench.peers.vllm import TopK


@dataclass(frozen=True)
class PromptIndexer:
    """All that vLLM launches to select for a prompt: a gather of the request's keys from their pages, DeepGEMM's scores
    over them, and for `index` its top-k. The peers `deepgemm` and `vllm` find the keys gathered."""

    operators: Any
    deep_gemm: DeepGEMM
    topk: TopK
    name: str = "vllm-gather"
    capturable: bool = True

    @property
    def build(self) -> str:
        """The distribution that it comes from."""
        return build_of("vllm")

    @classmethod
    def find(cls, device: torch.device) -> "PromptIndexer":
        """The gather and the top-k of an installed vLLM, and DeepGEMM."""
        need_gpu(device)
        operators = load("vllm._custom_ops")
        return cls(operators, DeepGEMM.find(device), TopK.find(operators, device))

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set. All calls share one workspace for the gathered keys, as vLLM's layers do."""
        scored = [item.scored if isinstance(item, IndexSet) else item for item in sets]
        items = [item for item in scored if isinstance(item, ScoreSet)]
        if len(items) < len(sets):
            raise Unsupported(f"it has no {job.stage}")
        if items[0].queries == 1 or len(items[0].block_table) > 1:
            raise Unsupported("it is for a prompt: the keys of decodes are read from their pages")
        if items[0].cache.layout.name != "index-fp8":
            raise Unsupported("its keys are index-fp8")
        width, device = items[0].cache.layout.width, items[0].q.device
        keys = torch.empty(items[0].width, width, dtype=torch.float8_e4m3fn, device=device)
        scales = torch.empty(items[0].width, 4, dtype=torch.uint8, device=device)
        scoring = [self._score(item, keys, scales) for item in items]
        return [self._select(item, call) for item, call in zip(sets, scoring, strict=True)]

    def _score(self, item: ScoreSet, keys: Tensor, scales: Tensor) -> Callable[[], Tensor]:
        ends = torch.tensor([0, item.width], dtype=torch.int32, device=keys.device)
        score = self.deep_gemm.gathered(item, (keys, scales.view(torch.float32).squeeze(1)))

        def call() -> Tensor:
            self.operators.cp_gather_indexer_k_quant_cache(item.cache.storage, keys, scales, item.block_table, ends)
            return score()

        return call

    def _select(self, item: InputSet, score: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if not isinstance(item, IndexSet):
            return score
        select = self.topk.choose(score(), item.scored.lengths, item.k, decode=False)
        return lambda: select(score())
