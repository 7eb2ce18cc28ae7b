"""vLLM's own kernels as a peer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from tamis.lab.bench import torch_baseline
from tamis.lab.bench.index_sets import IndexSet, ScoreSet, TopkSet
from tamis.lab.bench.inputs import GatherSet, InputSet, TranslateSet, WriteSet
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers.base import Unsupported, build_of, load, need_gpu
from tamis.lab.bench.peers.deep_gemm import MOST_PAGED_QUERIES, DeepGEMM

FAST_TOPKS = (512, 1024, 2048)
"""The k that vLLM's preferred top-k kernels support."""
COOPERATIVE_ROWS = 32
TOPK_WORKSPACE = 2**20


@dataclass(frozen=True)
class VLLM:
    """vLLM's cache write, gather-and-upconvert and index translation, and its top-k, alone and after DeepGEMM."""

    operators: Any
    translation: Any
    topk: "TopK"
    deep_gemm: DeepGEMM | None
    """Computes the scores for vLLM's whole indexer; None where it is absent."""
    name: str = "vllm"
    capturable: bool = True

    @property
    def build(self) -> str:
        """The distribution that it comes from."""
        return build_of("vllm")

    @classmethod
    def find(cls, device: torch.device) -> "VLLM":
        """The kernels of an installed vLLM."""
        need_gpu(device)
        operators = load("vllm._custom_ops")
        translation = load("vllm.v1.attention.backends.mla.sparse_utils")
        try:
            deep_gemm = DeepGEMM.find(device)
        except Unsupported:
            deep_gemm = None
        return cls(operators, translation, TopK.find(operators, device), deep_gemm)

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set. Writes go into separate caches, so that those of tamis keep their contents."""
        return [self._call(job, item) for item in sets]

    def _call(self, job: Job, item: InputSet) -> Callable[[], Any]:
        if isinstance(item, WriteSet):
            return self._write(job, item)
        if isinstance(item, GatherSet):
            return self._gather(job, item)
        if isinstance(item, TranslateSet):
            return self._translate(item)
        if isinstance(item, TopkSet):
            select = self.topk.choose(item.scores, item.lengths, item.k, decode=item.decode)
            return lambda: select(item.scores)
        if isinstance(item, IndexSet):
            return self._index(item)
        if isinstance(item, ScoreSet):
            raise Unsupported("its scores are DeepGEMM's")
        raise Unsupported("its attention is FlashMLA" if job.stage == "attend" else f"it has no {job.stage}")

    def _write(self, job: Job, item: WriteSet) -> Callable[[], Any]:
        kinds = {"v32-fp8": "fp8_ds_mla", "v32-bf16": "auto"}
        if job.layout not in kinds:
            raise Unsupported(f"it does not write {job.layout}")
        layout = item.cache.layout
        cache = torch_baseline.own_cache(item.cache)
        latent, rope = (part.contiguous() for part in item.kv.split([layout.latent, layout.rope], dim=1))
        scale = torch.ones((), dtype=torch.float32, device=item.kv.device)

        def call() -> Any:
            self.operators.concat_and_cache_mla(latent, rope, cache.storage, item.slots, kinds[job.layout], scale)
            return cache

        return call

    def _gather(self, job: Job, item: GatherSet) -> Callable[[], Any]:
        if job.layout != "v32-fp8":
            raise Unsupported(f"it does not upconvert {job.layout}")
        return upconverting(self.operators, replace(item, out=torch.zeros_like(item.out)))

    def _translate(self, item: TranslateSet) -> Callable[[], Any]:
        convert = self.translation.triton_convert_req_index_to_global_index
        columns = item.positions.shape[1]

        def call() -> Any:
            return convert(
                item.request_ids,
                item.block_table,
                item.positions,
                BLOCK_SIZE=item.page_size,
                NUM_TOPK_TOKENS=columns,
            )

        return call

    def _index(self, item: IndexSet) -> Callable[[], Any]:
        """A call of DeepGEMM's scores and then vLLM's top-k."""
        if self.deep_gemm is None:
            raise Unsupported("its scores are DeepGEMM's, which is absent")
        score = self.deep_gemm.scores(item.scored)
        select = self.topk.choose(score(), item.scored.lengths, item.k, decode=_decodes(item.scored))
        return lambda: select(score())


def _decodes(item: ScoreSet) -> bool:
    """Whether its keys are scored in their pages, so that the top-k for decodes follows."""
    return item.queries is not None and item.queries <= MOST_PAGED_QUERIES


def upconverting(operators: Any, item: GatherSet) -> Callable[[], Tensor]:
    """A call of vLLM's gather, which converts FP8 rows to bf16."""
    gather = operators.cp_gather_and_upconvert_fp8_kv_cache
    # Only some releases take the lengths as an argument.
    lengths = [item.lengths] if "seq_lens" in signature(gather).parameters else []

    def call() -> Tensor:
        gather(item.cache.storage, item.out, item.block_table, *lengths, item.starts, len(item.lengths))
        return item.out

    return call


@dataclass(frozen=True)
class TopK:
    """vLLM's top-k kernels."""

    operators: Any
    kernels: Any
    """The namespace of the operators without a Python wrapper."""
    workspace: Tensor
    """One workspace for all calls, as vLLM has one for all layers."""
    clusters: bool
    """Whether the GPU supports thread-block clusters, which the kernel for few rows needs."""

    @classmethod
    def find(cls, operators: Any, device: torch.device) -> "TopK":
        """The kernels for a device."""
        major = torch.cuda.get_device_capability(device)[0]
        workspace = torch.zeros(TOPK_WORKSPACE, dtype=torch.uint8, device=device)
        return cls(operators, torch.ops._C, workspace, clusters=major >= 9 and major != 12)

    def choose(self, like: Tensor, lengths: Tensor, k: int, *, decode: bool) -> Callable[[Tensor], Tensor]:
        """The kernel that vLLM chooses for such scores. Positions that it does not write stay -1."""
        rows = len(like)
        out = torch.full((rows, k), -1, dtype=torch.int32, device=like.device)
        starts = torch.zeros_like(lengths)

        def prompts(scores: Tensor) -> Tensor:
            self.operators.top_k_per_row_prefill(scores, starts, lengths, out, rows, *scores.stride(), k)
            return out

        def any_number(scores: Tensor) -> Tensor:
            self.operators.top_k_per_row_decode(scores, 1, lengths, out, rows, *scores.stride(), k)
            return out

        def few_rows(scores: Tensor) -> Tensor:
            self.kernels.cooperative_topk(scores, lengths, out, self.workspace, k, scores.shape[1])
            return out

        def many_rows(scores: Tensor) -> Tensor:
            self.kernels.persistent_topk(scores, lengths, out, self.workspace, k, scores.shape[1])
            return out

        if not decode:
            return prompts
        if k not in FAST_TOPKS:
            return any_number
        return few_rows if self.clusters and rows <= COOPERATIVE_ROWS and like.stride(0) % 4 == 0 else many_rows
