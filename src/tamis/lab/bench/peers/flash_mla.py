"""FlashMLA as a peer: one peer per build, since the builds differ in speed and in their functions' arguments."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from tamis.cache.selection import Selection
from tamis.lab.bench.inputs import AttendSet, InputSet
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers.base import Unsupported, build_of, load_first, need_gpu

PACKAGE = ("flash_mla",)
INSIDE_VLLM = ("vllm.third_party.flashmla.flash_mla_interface", "vllm.v1.attention.ops.flashmla")
FLASH_MLA_MODULES = (*PACKAGE, *INSIDE_VLLM)
DECODE = "flash_mla_with_kvcache"


@dataclass(frozen=True, eq=False)
class Bound:
    """A call with all of its arguments, and what reads the output [T, H, V] for our heads from its result."""

    call: Callable[[], Any]
    output: Callable[[Any], Tensor]

    def __call__(self) -> Tensor:
        """Run the call and read its output."""
        return self.output(self.call())


@dataclass(frozen=True)
class FlashMLA:
    """FlashMLA's sparse decode over FP8 pages and its sparse prefill over bf16 rows."""

    module: Any
    name: str = "flashmla"
    build: str = ""
    """The distribution and its version."""
    capturable: bool = True

    @classmethod
    def find_sgl(cls, device: torch.device) -> "FlashMLA":
        """The build sgl-flash-mla, whose older kernels are those for Hopper."""
        need_gpu(device)
        module = load_first(PACKAGE, DECODE)
        if not hasattr(module, "has_legacy"):
            raise Unsupported("flash_mla is another build here, without use_legacy")
        if not module.has_legacy():
            raise Unsupported("it was built without the older kernels, which are those for Hopper")
        return cls(module, "flashmla-sgl", _build("sgl-flash-mla", module))

    @classmethod
    def find_vllm(cls, device: torch.device) -> "FlashMLA":
        """The copy inside vLLM's wheel."""
        need_gpu(device)
        return cls(load_first(INSIDE_VLLM, DECODE), "flashmla-vllm", build_of("vllm"))

    @classmethod
    def find_plain(cls, device: torch.device) -> "FlashMLA":
        """The package `flash_mla` in a build without `use_legacy`."""
        need_gpu(device)
        module = load_first(PACKAGE, DECODE)
        if hasattr(module, "has_legacy"):
            raise Unsupported("flash_mla is sgl-flash-mla here")
        return cls(module, "flashmla-plain", _build("flash_mla", module))

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set. Heads are padded here to 64 or 128, as in engines, and the padding is computed too."""
        return list(self.bound(job, sets))

    def bound(self, job: Job, sets: Sequence[InputSet]) -> list[Bound]:
        """The calls of `calls`, apart from what reads their output."""
        if job.stage != "attend":
            raise Unsupported(f"it has no {job.stage}")
        if job.page_size != 64:
            raise Unsupported("its pages have 64 rows")
        items = [item for item in sets if isinstance(item, AttendSet)]
        if job.layout == "v32-bf16":
            return [self._prefill(item) for item in items]
        if job.layout not in ("v32-fp8", "v4-fp8"):
            raise Unsupported(f"it does not read {job.layout}")
        if not items:
            return []
        schedule = self._schedule(items[0])
        return [self._decode(item, schedule) for item in items]

    def _schedule(self, item: AttendSet) -> tuple[Any, ...]:
        """What `get_mla_metadata` makes for a step. All sets of a job have the same shape, so they share it."""
        make = self.module.get_mla_metadata
        if not self._needs_lengths:
            return (make()[0],)
        if len(item.selections) > 1:
            raise Unsupported("this older release reads one cache")
        heads, queries = _padded_count(item.q.shape[1]), item.queries or 1
        return tuple(make(item.lengths, queries * heads, 1, heads, True, item.selections[0].slots.shape[1]))

    def _decode(self, item: AttendSet, schedule: tuple[Any, ...]) -> Bound:
        queries = item.queries
        if queries is None:
            raise Unsupported("its requests all have the same number of new tokens")
        for selection in item.selections:
            _check_slots(selection)
        padded = padded_heads(item.q)
        tokens, heads, width = padded.shape
        requests = tokens // queries
        first, *others = item.selections
        more: dict[str, Any] = {}
        for other in others:
            slots = other.slots.view(requests, queries, -1)
            more = {"extra_k_cache": other.cache.storage.unsqueeze(2), "extra_indices_in_kvcache": slots}
        call = partial(
            self.module.flash_mla_with_kvcache,
            padded.view(requests, queries, heads, width),
            first.cache.storage.unsqueeze(2),
            None,
            item.lengths if self._needs_lengths else None,
            item.value_dim,
            *schedule,
            softmax_scale=item.scale,
            is_fp8_kvcache=True,
            indices=first.slots.view(requests, queries, -1),
            **more,
            **self._older_kernels,
        )
        kept = item.q.shape[1]
        return Bound(call, lambda result: result[0].view(tokens, heads, item.value_dim)[:, :kept])

    def _prefill(self, item: AttendSet) -> Bound:
        (selection,) = item.selections
        return self.sparse_prefill(item.q, selection.cache.storage.flatten(0, 1), selection.slots, item.scale)

    def sparse_prefill(self, q: Tensor, rows: Tensor, indices: Tensor, scale: float) -> Bound:
        """A call that attends to 16-bit rows [R, D] by their indices [T, K]."""
        prefill = self.module.flash_mla_sparse_fwd
        options = {"use_legacy": True} if "use_legacy" in signature(prefill).parameters else {}
        call = partial(prefill, padded_heads(q), rows.unsqueeze(1), indices.unsqueeze(1), scale, **options)
        return Bound(call, lambda result: result[0][:, : q.shape[1]])

    @cached_property
    def _older_kernels(self) -> dict[str, Any]:
        """The argument with which sgl-flash-mla runs the kernels for Hopper; nothing for builds without it."""
        known = signature(self.module.flash_mla_with_kvcache).parameters
        return {"use_legacy": True} if "use_legacy" in known else {}

    @cached_property
    def _needs_lengths(self) -> bool:
        """Whether `get_mla_metadata` has arguments that must be given, as in releases before the schedule object."""
        kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        parameters = signature(self.module.get_mla_metadata).parameters.values()
        return any(p.kind in kinds and p.default is Parameter.empty for p in parameters)


BUILDS: dict[str, Callable[[torch.device], FlashMLA]] = {
    "flashmla-sgl": FlashMLA.find_sgl,
    "flashmla-vllm": FlashMLA.find_vllm,
    "flashmla-plain": FlashMLA.find_plain,
}
"""The builds by the name of their peer. `flashmla` stands for all of them that are found."""


def find_first(device: torch.device) -> FlashMLA:
    """The first build that is found."""
    reasons = []
    for find in BUILDS.values():
        try:
            return find(device)
        except Unsupported as reason:
            reasons.append(str(reason))
    raise Unsupported("; ".join(dict.fromkeys(reasons)))


def _build(distribution: str, module: Any) -> str:
    """The distribution and the module's own version, which an unpacked wheel has too."""
    own = getattr(module, "__version__", None)
    return build_of(distribution) or distribution if own is None else f"{distribution} {own}"


def _check_slots(selection: Selection) -> None:
    """Refuse slots that its decode would follow out of the cache: it skips -1 alone."""
    slots = selection.slots
    if selection.lengths is not None or bool(((slots < -1) | (slots >= selection.cache.rows)).any()):
        raise Unsupported("it skips -1 alone, and would read outside of the cache")


def _padded_count(heads: int) -> int:
    return 64 if heads <= 64 else 128


def padded_heads(q: Tensor) -> Tensor:
    """The queries padded to 64 or 128 heads, the counts that its kernels take."""
    padded = torch.zeros(q.shape[0], _padded_count(q.shape[1]), q.shape[2], dtype=q.dtype, device=q.device)
    padded[:, : q.shape[1]] = q
    return padded
