"""Other implementations of the same stages, where they can be imported."""

import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any, Protocol

import torch

from tamis import checks
from tamis.bench import by_hand
from tamis.bench.inputs import AttendSet, GatherSet, InputSet, TranslateSet, WriteSet
from tamis.bench.suites import Job

NAMES = ("flashmla", "vllm", "torch")
FLASH_MLA_MODULES = (
    "flash_mla",
    "vllm.third_party.flashmla.flash_mla_interface",
    "vllm.v1.attention.ops.flashmla",
)


class Unsupported(Exception):
    """A peer does not do this job; the message says why."""


class Peer(Protocol):
    """Makes the peer's calls for input sets. A call returns a result of the same kind as ours."""

    @property
    def name(self) -> str:
        """As on the command line."""

    @property
    def capturable(self) -> bool:
        """Whether its calls can be captured in a CUDA graph."""

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set; padding and other preparation is done here and not timed. Raises `Unsupported`."""


def find_peers(wanted: Sequence[str] | None, device: torch.device) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can run here, and for each one that is absent the reason.

    Args:
        wanted: names; each must be there or a ValueError says why not. None: those that are there.
        device: where they would run.
    """
    for name in wanted or ():
        checks.option("against", name, (*NAMES, "none"))
    found: list[Peer] = []
    absent: dict[str, str] = {}
    for name in NAMES if wanted is None else [n for n in wanted if n != "none"]:
        try:
            found.append(_MAKERS[name](device))
        except Unsupported as reason:
            absent[name] = str(reason)
    if wanted is not None and absent:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise checks.refuse("against", "peers that can be imported here", reasons, "install them or leave them out")
    return found, absent


def _load(name: str) -> ModuleType:
    """A module, or `Unsupported` with what went wrong: a broken extension raises more than ImportError."""
    try:
        # Some libraries log to the standard output while they load, and go on doing so; it belongs to our result.
        with redirect_stdout(sys.stderr):
            return import_module(name)
    except Exception as error:
        text = " ".join(str(error).split())
        raise Unsupported(f"cannot import {name} ({type(error).__name__}: {text[:120]})") from error


def _need_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unsupported(f"its kernels do not run on {device.type}")


@dataclass(frozen=True)
class FlashMLA:
    """FlashMLA's sparse decode over FP8 pages and its sparse prefill over bf16 rows."""

    module: Any
    name: str = "flashmla"
    capturable: bool = True

    @classmethod
    def find(cls, device: torch.device) -> "FlashMLA":
        """The package itself, or the copy inside vLLM."""
        _need_gpu(device)
        reasons = []
        for name in FLASH_MLA_MODULES:
            try:
                module = _load(name)
            except Unsupported as reason:
                reasons.append(str(reason))
                continue
            if module.__name__.startswith("tamis."):
                reasons.append(f"{name} is tamis's own drop-in")
            elif hasattr(module, "flash_mla_with_kvcache"):
                return cls(module)
        raise Unsupported("; ".join(reasons))

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


@dataclass(frozen=True)
class VLLM:
    """vLLM's cache write, gather-and-upconvert and index translation."""

    operators: Any
    translation: Any
    name: str = "vllm"
    capturable: bool = True

    @classmethod
    def find(cls, device: torch.device) -> "VLLM":
        """From an installed vLLM."""
        _need_gpu(device)
        operators = _load("vllm._custom_ops")
        translation = _load("vllm.v1.attention.backends.mla.sparse_utils")
        return cls(operators, translation)

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """Writes go into caches of their own."""
        return [self._call(job, item) for item in sets]

    def _call(self, job: Job, item: InputSet) -> Callable[[], Any]:
        if isinstance(item, WriteSet):
            return self._write(job, item)
        if isinstance(item, GatherSet):
            return self._gather(job, item)
        if isinstance(item, TranslateSet):
            return self._translate(item)
        raise Unsupported("its attention is FlashMLA" if job.stage == "attend" else f"it has no {job.stage}")

    def _write(self, job: Job, item: WriteSet) -> Callable[[], Any]:
        kinds = {"v32-fp8": "fp8_ds_mla", "v32-bf16": "auto"}
        if job.layout not in kinds:
            raise Unsupported(f"it does not write {job.layout}")
        layout = item.cache.layout
        cache = by_hand.own_cache(item.cache)
        latent, rope = (part.contiguous() for part in item.kv.split([layout.latent, layout.rope], dim=1))
        scale = torch.ones((), dtype=torch.float32, device=item.kv.device)

        def call() -> Any:
            self.operators.concat_and_cache_mla(latent, rope, cache.storage, item.slots, kinds[job.layout], scale)
            return cache

        return call

    def _gather(self, job: Job, item: GatherSet) -> Callable[[], Any]:
        if job.layout != "v32-fp8":
            raise Unsupported(f"it does not upconvert {job.layout}")
        out = torch.zeros_like(item.out)
        gather = self.operators.cp_gather_and_upconvert_fp8_kv_cache
        # Releases differ in whether the lengths are an argument.
        lengths = [item.lengths] if "seq_lens" in signature(gather).parameters else []

        def call() -> Any:
            gather(item.cache.storage, out, item.block_table, *lengths, item.starts, len(item.lengths))
            return out

        return call

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


@dataclass(frozen=True)
class Torch:
    """The same work written by hand in torch."""

    name: str = "torch"
    capturable: bool = True

    @classmethod
    def find(cls, device: torch.device) -> "Torch":
        """Always there."""
        return cls()

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set."""
        try:
            return [by_hand.call_for(item) for item in sets]
        except NotImplementedError as reason:
            raise Unsupported(str(reason)) from reason


_MAKERS: dict[str, Callable[[torch.device], Peer]] = {
    "flashmla": FlashMLA.find,
    "vllm": VLLM.find,
    "torch": Torch.find,
}
