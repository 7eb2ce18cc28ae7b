"""The stages as torch ops (`torch.ops.tamis.*`), so that torch.compile can trace a call without looking inside it.

Each function here runs one stage and is also the body of an op of the same name. While torch.compile traces, a call
becomes a call of the op; otherwise it runs at once, because the way through the op costs tens of microseconds.

An op's arguments are tensors, numbers and strings, and lists of these. A `PagedCache` travels as its storage, its
layout's key and its scale (a number, or a tensor beside it); selections travel as parallel lists. The body puts the
objects together again. A fake says what comes out without running anything.

The functions trust their arguments, which those of `tamis.ops` have checked. They write only to what the schema marks,
return only new, contiguous tensors, and are for inference: a tensor that needs a gradient is refused.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import without_autocast
from tamis.cache.layout import from_key
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.ops.library import implementation

P = ParamSpec("P")
R = TypeVar("R")

# Registrations last as long as this object.
_LIBRARY = torch.library.Library("tamis", "FRAGMENT")

CACHE = "str layout, float scale, Tensor? scale_tensor"
"""What follows `storage` in a schema and makes it a cache."""
_SELECTIONS = (
    "Tensor[] storages, str[] layouts, float[] scales, Tensor?[] scale_tensors, "
    "Tensor[] slots, Tensor?[] lengths, Tensor?[] request_ids, Tensor?[] block_tables"
)
_REQUESTS = "Tensor block_table, Tensor lengths, Tensor starts, Tensor first"


def op(schema: str, fake: Callable[..., R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Register a function under a schema for every device, with its fake; return it with the way to the op."""

    def register(run: Callable[P, R]) -> Callable[P, R]:
        @wraps(run)
        def as_written(*arguments: P.args, **none: P.kwargs) -> R:
            # A stage's first argument is always a tensor.
            with without_autocast(arguments[0].device):  # type: ignore[attr-defined]
                return run(*arguments, **none)

        # A compiler must not change strides: pages may lie apart.
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
        overload = getattr(torch.ops.tamis, run.__name__).default
        names = [argument.name for argument in overload._schema.arguments]
        _LIBRARY.impl(run.__name__, _with_objects(as_written, names), "CompositeExplicitAutograd")
        torch.library.register_fake(overload, _with_objects(fake, names), lib=_LIBRARY)

        @wraps(run)
        def route(*arguments: P.args, **none: P.kwargs) -> R:
            if torch.compiler.is_compiling():
                result: R = overload(*_flat(arguments))
                return result
            return as_written(*arguments, **none)

        return route

    return register


def _flat(arguments: Sequence[Any]) -> list[Any]:
    """Arguments of a function as those of its op."""
    flat: list[Any] = []
    for argument in arguments:
        if isinstance(argument, PagedCache):
            flat += _flat_cache(argument)
        elif isinstance(argument, list):
            caches = [_flat_cache(s.cache) for s in argument]
            flat += [[cache[part] for cache in caches] for part in range(4)]
            flat += [[s.slots for s in argument], [s.lengths for s in argument]]
            flat += [[s.request_ids for s in argument], [s.block_table for s in argument]]
        else:
            flat.append(argument)
    return flat


def _flat_cache(cache: PagedCache) -> tuple[Tensor, str, float, Tensor | None]:
    scale = cache.scale
    if isinstance(scale, Tensor):
        return cache.storage, cache.layout.key, 1.0, scale
    return cache.storage, cache.layout.key, scale, None


def _with_objects(run: Callable[..., R], names: list[str]) -> Callable[..., R]:
    """A function that takes an op's arguments and calls `run` with a cache or selections in their place."""
    if "storages" in names:
        at = names.index("storages")
        return lambda *flat: run(*flat[:at], _selections(*flat[at : at + 8]), *flat[at + 8 :])
    starts = [at for at, name in enumerate(names) if name.endswith("storage")]
    inside = {at + part for at in starts for part in (1, 2, 3)}

    def call(*flat: Any) -> R:
        kept = [at for at in range(len(flat)) if at not in inside]
        return run(*(_cache(*flat[at : at + 4]) if at in starts else flat[at] for at in kept))

    return call if starts else run


def _cache(storage: Tensor, layout: str, scale: float, scale_tensor: Tensor | None) -> PagedCache:
    return PagedCache.rebuilt(storage, from_key(layout), scale if scale_tensor is None else scale_tensor)


def _selections(*lists: Sequence[Any]) -> list[Selection]:
    return [Selection(_cache(*one[:4]), *one[4:]) for one in zip(*lists, strict=True)]


def stage_module(name: str, backend: str, device: torch.device, **inputs: Tensor | None) -> Any:
    """The module that runs a stage. Fakes ask for it too, so that a wrong backend or a gradient fails the trace."""
    checks.no_gradient(**inputs)
    return implementation(name, backend, device)


def check_stage(name: str, backend: str, device: torch.device, **inputs: Tensor | None) -> None:
    """Refuse a backend that does not run here, and a gradient. In a trace the op's fake does it."""
    if not torch.compiler.is_compiling():
        stage_module(name, backend, device, **inputs)


def check_kernels(name: str, backend: str, device: torch.device, check: str, *arguments: Any) -> None:
    """Refuse what the backend's own kernels do not take. In a trace the op's fake does it."""
    if not torch.compiler.is_compiling():
        ask_kernels(implementation(name, backend, device), check, *arguments)


def ask_kernels(stage: Any, check: str, *arguments: Any) -> None:
    """A module whose kernels take less than their stage has a function that refuses the rest, by the name `check`."""
    if hasattr(stage, check):
        getattr(stage, check)(*arguments)


def _write_kv(kv: Tensor, rope: Tensor | None, *rest: Any) -> None:
    stage_module("write", rest[-1], kv.device, kv=kv, rope=rope)


@op(
    f"write_kv(Tensor kv, Tensor? rope, Tensor slots, Tensor(a!) storage, {CACHE}, str backend) -> ()",
    _write_kv,
)
def write_kv(kv: Tensor, rope: Tensor | None, slots: Tensor, cache: PagedCache, backend: str) -> None:
    """Rows into the cache; their last columns may lie apart."""
    stage_module("write", backend, cache.device, kv=kv, rope=rope).write_kv(kv, cache, slots, rope)


def _read_kv(slots: Tensor, cache: PagedCache, dtype: torch.dtype, backend: str) -> Tensor:
    stage_module("gather", backend, cache.device)
    return slots.new_empty((*slots.shape, cache.layout.width), dtype=dtype)


@op(f"read_kv(Tensor slots, Tensor storage, {CACHE}, ScalarType dtype, str backend) -> Tensor", _read_kv)
def read_kv(slots: Tensor, cache: PagedCache, dtype: torch.dtype, backend: str) -> Tensor:
    """Rows [..., width] of slots [...]."""
    rows: Tensor = stage_module("gather", backend, cache.device).read_kv(cache, slots, dtype)
    return rows.contiguous()


def _gather_kv(block_table: Tensor, *rest: Any) -> None:
    stage_module("gather", rest[-1], block_table.device)


@op(f"gather_kv({_REQUESTS}, Tensor storage, {CACHE}, Tensor(a!) out, str backend) -> ()", _gather_kv)
def gather_kv(
    block_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    first: Tensor,
    cache: PagedCache,
    out: Tensor,
    backend: str,
) -> None:
    """Whole requests into `out`."""
    stage_module("gather", backend, cache.device).gather_kv(cache, block_table, lengths, starts, first, out)


def _stored_keys(cache: PagedCache, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Room beside `like` for keys and scales as they are stored, one scale per key without an axis of its own."""
    layout = cache.layout
    assert layout.scales is not None
    values = like.new_zeros((rows, layout.values.count), dtype=torch.uint8)
    scales = like.new_zeros((rows, layout.scales.count), dtype=layout.scales.dtype)
    return (values, scales) if layout.packed else (values.view(torch.float8_e4m3fn), scales.squeeze(1))


def _gather_index(block_table: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, cache, rows, backend = rest
    stage_module("gather", backend, block_table.device)
    return _stored_keys(cache, rows, block_table)


@op(
    f"gather_index({_REQUESTS}, Tensor storage, {CACHE}, SymInt rows, str backend) -> (Tensor, Tensor)",
    _gather_index,
)
def gather_index(
    block_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    first: Tensor,
    cache: PagedCache,
    rows: int,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Keys and scales of whole requests as they are stored, zeros elsewhere."""
    values, scales = _stored_keys(cache, rows, block_table)
    stage = stage_module("gather", backend, cache.device)
    stage.gather_index(cache, block_table, lengths, starts, first, values, scales)
    return values, scales
