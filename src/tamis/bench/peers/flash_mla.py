"""FlashMLA as a peer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tamis.bench.inputs import AttendSet, InputSet
from tamis.bench.peers.base import Unsupported, load_first, need_gpu
from tamis.bench.suites import Job

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
        """Heads are padded to 64 or 128 beforehand, as engines do; the padded heads are computed, as they are there."""
        if job.stage != "attend" or job.heads is None:
            raise Unsupported(f"it has no {job.stage}")
        if job.page_size != 64:
            raise Unsupported("its pages have 64 rows")
        heads = 64 if job.heads <= 64 else 128
        if job.layout == "v32-bf16":
            return [self._prefill(job, s, heads) for s in sets if isinstance(s, AttendSet)]
        if job.layout not in ("v32-fp8", "v4-fp8"):
            raise Unsupported(f"it does not read {job.layout}")
        try:
            schedule, _ = self.module.get_mla_metadata()
        except TypeError as error:
            raise Unsupported("its get_mla_metadata takes arguments: an older release") from error
        return [self._decode(job, s, heads, schedule) for s in sets if isinstance(s, AttendSet)]

    def _decode(self, job: Job, item: AttendSet, heads: int, schedule: Any) -> Callable[[], Any]:
        queries = item.queries
        if queries is None:
            raise Unsupported("its requests all have the same number of new tokens")
        tokens, _, width = item.q.shape
        requests = tokens // queries
        q = _padded_heads(item.q, heads).view(requests, queries, heads, width)
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
            return out.view(tokens, heads, item.value_dim)[:, : job.heads]

        return call

    def _prefill(self, job: Job, item: AttendSet, heads: int) -> Callable[[], Any]:
        q = _padded_heads(item.q, heads)
        (selection,) = item.selections
        rows = selection.cache.storage.reshape(-1, 1, item.q.shape[2])
        slots = selection.slots.unsqueeze(1)

        def call() -> Any:
            return self.module.flash_mla_sparse_fwd(q, rows, slots, item.scale)[0][:, : job.heads]

        return call


def _padded_heads(q: torch.Tensor, heads: int) -> torch.Tensor:
    padded = torch.zeros(q.shape[0], heads, q.shape[2], dtype=q.dtype, device=q.device)
    padded[:, : q.shape[1]] = q
    return padded
