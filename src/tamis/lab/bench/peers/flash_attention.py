"""FlashAttention 3 as a peer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tamis.lab.bench.inputs import AttendSet, InputSet
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers.base import Unsupported, build_of, load, need_gpu

MODULE = "vllm.vllm_flash_attn.flash_attn_interface"


@dataclass(frozen=True)
class FlashAttention3:
    """FlashAttention 3 over 16-bit rows: every row is a page, so that a token's slots are its block table."""

    module: Any
    name: str = "fa3"
    capturable: bool = True

    @property
    def build(self) -> str:
        """The distribution that it comes from."""
        return build_of("vllm")

    @classmethod
    def find(cls, device: torch.device) -> "FlashAttention3":
        """The copy inside vLLM, whose values may be wider than its keys."""
        need_gpu(device)
        module = load(MODULE)
        if not getattr(module, "FA3_AVAILABLE", False):
            reason = getattr(module, "FA3_UNAVAILABLE_REASON", None) or "an older release"
            raise Unsupported(f"{MODULE} comes without version 3: {reason}")
        major, minor = torch.cuda.get_device_capability(device)
        if major != 9:
            raise Unsupported(f"it runs on compute capability 9.x, not on {major}.{minor}")
        return cls(module)

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set. Queries are split into rope and latent dimensions here, and valid slots counted."""
        if job.stage != "attend":
            raise Unsupported(f"it has no {job.stage}")
        if job.layout != "v32-bf16":
            raise Unsupported(f"it reads v32-bf16 rows, not {job.layout}")
        if job.window:
            raise Unsupported("it reads one cache")
        return [self._attend(item) for item in sets if isinstance(item, AttendSet)]

    def _attend(self, item: AttendSet) -> Callable[[], Any]:
        (selection,) = item.selections
        latent, device = item.value_dim, item.q.device
        q_latent, q_rope = (part.contiguous() for part in item.q.tensor_split([latent], dim=2))
        # A row is a page with one key (the rope dimensions) and one value (the latent dimensions). Logits are the sum
        # of two products: rope query times key, latent query times value.
        pages = selection.cache.storage.flatten(0, 1)[:, None, None]
        values, keys = pages.tensor_split([latent], dim=3)
        counts = (selection.slots >= 0).sum(dim=1, dtype=torch.int32)
        table = selection.slots.clamp_min(0)
        # Every token is a separate request.
        starts = torch.arange(len(item.q) + 1, dtype=torch.int32, device=device)

        def call() -> Any:
            return self.module.flash_attn_varlen_func(
                q=q_rope,
                k=keys,
                v=values,
                q_v=q_latent,
                max_seqlen_q=1,
                cu_seqlens_q=starts,
                max_seqlen_k=table.shape[1],
                seqused_k=counts,
                block_table=table,
                softmax_scale=item.scale,
                causal=False,
                fa_version=3,
            )

        return call
