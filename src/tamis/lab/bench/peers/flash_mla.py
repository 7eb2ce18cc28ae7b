"""FlashMLA as a peer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tamis.lab.bench.inputs import AttendSet, InputSet
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers.base import Unsupported, load_first, need_gpu

FLASH_MLA_MODULES = (
    "flash_mla",
    "vllm.third_party.flashmla.flash_mla_interface",
    "vllm.v1.attention.ops.flashmla",
)


@dataclass(frozen=True)
class FlashMLA:
    """FlashMLA's sparse decode over FP8 pages and its sparse prefill over bf16 rows."""

    module: Any
    name: str = "flashmla"
    capturable: bool = True

    @classmethod
    def find(cls, device: torch.device) -> "FlashMLA":
        """The package itself, or the copy inside vLLM."""
        need_gpu(device)
        return cls(load_first(FLASH_MLA_MODULES, "flash_mla_with_kvcache"))

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set. Heads are padded here to 64 or 128, as in engines, and the padding is computed too."""
        if job.stage != "attend":
            raise Unsupported(f"it has no {job.stage}")
        if job.page_size != 64:
            raise Unsupported("its pages have 64 rows")
        if job.layout == "v32-bf16":
            return [self._prefill(s) for s in sets if isinstance(s, AttendSet)]
        if job.layout not in ("v32-fp8", "v4-fp8"):
            raise Unsupported(f"it does not read {job.layout}")
        try:
            schedule, _ = self.module.get_mla_metadata()
        except TypeError as error:
            raise Unsupported("its get_mla_metadata takes arguments: an older release") from error
        return [self._decode(s, schedule) for s in sets if isinstance(s, AttendSet)]

    def _decode(self, item: AttendSet, schedule: Any) -> Callable[[], Any]:
        queries = item.queries
        if queries is None:
            raise Unsupported("its requests all have the same number of new tokens")
        padded = _padded_heads(item.q)
        tokens, heads, width = padded.shape
        requests = tokens // queries
        q = padded.view(requests, queries, heads, width)
        first, *others = item.selections
        more: dict[str, Any] = {}
        for other in others:
            slots = other.slots.view(requests, queries, -1)
            more = {"extra_k_cache": other.cache.storage.unsqueeze(2), "extra_indices_in_kvcache": slots}

        def call() -> Any:
            out, _ = self.module.flash_mla_with_kvcache(
                q,
                first.cache.storage.unsqueeze(2),
                None,
                None,
                item.value_dim,
                schedule,
                softmax_scale=item.scale,
                is_fp8_kvcache=True,
                indices=first.slots.view(requests, queries, -1),
                **more,
            )
            return out.view(tokens, heads, item.value_dim)[:, : item.q.shape[1]]

        return call

    def _prefill(self, item: AttendSet) -> Callable[[], Any]:
        (selection,) = item.selections
        return self.sparse_prefill(item.q, selection.cache.storage.flatten(0, 1), selection.slots, item.scale)

    def sparse_prefill(self, q: Tensor, rows: Tensor, indices: Tensor, scale: float) -> Callable[[], Any]:
        """A call that attends to 16-bit rows [R, D] by their indices [T, K]."""
        padded, rows, indices = _padded_heads(q), rows.unsqueeze(1), indices.unsqueeze(1)

        def call() -> Any:
            return self.module.flash_mla_sparse_fwd(padded, rows, indices, scale)[0][:, : q.shape[1]]

        return call


def _padded_heads(q: Tensor) -> Tensor:
    """The queries padded to 64 or 128 heads, the counts that its kernels take."""
    heads = 64 if q.shape[1] <= 64 else 128
    padded = torch.zeros(q.shape[0], heads, q.shape[2], dtype=q.dtype, device=q.device)
    padded[:, : q.shape[1]] = q
    return padded
