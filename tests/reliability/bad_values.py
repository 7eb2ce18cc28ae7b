"""What can be wrong with an argument, by kind, and the one property of a refusal: it names the argument, and nothing
that was there before has changed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from tamis import IndexRecipe, PagedCache
from tamis.cache.layout import named, plain_fp8, rows

SEEN = ("huge", "nan", "zero tensor", "negative tensor", "few pages", "far", "block_table axis 0 shorter")
"""Parts of labels of what only values show."""
Arguments = dict[str, Any]
Bad = Iterator[tuple[str, Any]]
RELATIVE = ("axis", "rank", "memory", "elsewhere", "width", "few", "huge")
"""Labels of what is wrong only beside other arguments, so that a refusal may name any of them."""


@dataclass(frozen=True, eq=False)
class Case:
    """One way to call a function that writes."""

    run: Callable[[Arguments], object]
    arguments: Arguments
    """Good ones by name; parts of an argument under dotted names."""
    watched: dict[str, torch.Tensor]
    """All tensors that a refused call must leave alone."""
    free: frozenset[str] = frozenset()
    """`argument label` pairs that are no fault here, so that the call may go through."""
    outputs: frozenset[str] = frozenset()
    """Arguments that are written into, and for which sharing memory is a fault."""
    more: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Further bad values, by argument and label."""
    names: dict[str, str] = field(default_factory=dict)
    """What a refusal calls an argument where it is not the argument's own name."""


def bad_tensors(value: torch.Tensor) -> Bad:
    """Other dtypes, ranks, sizes, places and kinds."""
    floating = value.dtype.is_floating_point
    yield "dtype", value.to(torch.int16 if floating else torch.float32)
    yield "complex", value.float().to(torch.complex64)
    yield "rank above", value.unsqueeze(0)
    if value.dim():
        yield "rank below", value[0]
    for axis, size in enumerate(value.shape):
        yield f"axis {axis} longer", torch.cat((value, value.narrow(axis, 0, 1)), axis) if size else value
        if size:
            yield f"axis {axis} shorter", value.narrow(axis, 0, size - 1)
    yield "elsewhere", value.to("meta")
    if not floating and value.dtype != torch.bool:
        yield "huge", torch.full_like(value, 2**31 - 1)
    if floating and value.dtype != torch.float8_e4m3fn:
        yield "gradient", value.detach().clone().requires_grad_()
    yield "none", None
    yield "object", object()
    yield "list", value.float().tolist()


def bad_caches(cache: PagedCache) -> Bad:
    """Other page sizes, widths, formats, places and kinds."""
    layout = cache.layout
    yield "page size", PagedCache(layout, cache.pages, cache.page_size + 1, recipe=cache.recipe)
    yield "width", PagedCache(rows(torch.float32, latent=layout.latent + 2, rope=layout.rope), 40, cache.page_size)
    yield "one scale", PagedCache(plain_fp8(latent=layout.latent, rope=layout.rope), cache.pages, cache.page_size)
    yield "planar", PagedCache(named("v4-fp8", tile=1, latent=layout.latent, rope=layout.rope), 40, cache.page_size)
    yield "elsewhere", PagedCache(layout, cache.pages, cache.page_size, "meta", recipe=cache.recipe)
    yield "few pages", PagedCache(layout, 1, cache.page_size, recipe=cache.recipe)
    pages = cache.storage
    with torch.inference_mode():
        room = torch.zeros(pages.shape[0] * pages.stride(0), dtype=pages.dtype)
        untouchable = room.as_strided(pages.shape, pages.stride())
    yield "inference", PagedCache.wrap(untouchable, layout, recipe=cache.recipe)
    yield "none", None
    yield "object", object()
    yield "tensor", cache.storage


def bad_outputs(value: torch.Tensor, others: dict[str, Any]) -> Bad:
    """Buffers whose elements share memory with each other, or with something that the call reads."""
    for axis, size in enumerate(value.shape):
        if size > 1:
            yield f"expanded along {axis}", value.narrow(axis, 0, 1).expand_as(value)
    if value.dim() > 1 and value.shape[0] > 1:
        room = torch.zeros(2 * value.numel(), dtype=value.dtype)
        strides = (max(1, value.stride(0) // 2), *value.stride()[1:])
        yield "overlapping", room.as_strided(value.shape, strides)
    for name, other in others.items():
        memory = other.storage if isinstance(other, PagedCache) else other
        if not isinstance(memory, torch.Tensor) or memory is value or memory.numel() == 0:
            continue
        raw = memory.view(torch.uint8).as_strided((memory.numel() * memory.element_size(),), (1,))
        size = value.numel() * value.element_size()
        start = (-memory.data_ptr()) % value.element_size()
        if memory.is_contiguous() and len(raw) - start >= size:
            yield f"memory of {name}", raw[start : start + size].view(value.dtype).view(value.shape)


def bad_numbers(value: float) -> Bad:
    """Numbers that are none, or no scale."""
    if isinstance(value, float):
        yield from (("nan", float("nan")), ("zero", 0.0), ("infinite", float("inf")))
    yield from (("negative", -1), ("text", "1"), ("none", None), ("object", object()), ("flag", True))


def bad_scales() -> Bad:
    """Factors that may be tensors."""
    yield from bad_numbers(1.0)
    for label, bad in (("nan", float("nan")), ("zero", 0.0), ("negative", -1.0)):
        yield f"{label} tensor", torch.tensor([bad])
    yield "two elements", torch.ones(2)
    yield "double", torch.ones(1, dtype=torch.float64)
    yield "tensor elsewhere", torch.ones(1, device="meta")


def bad_backends() -> Bad:
    """Names of backends that do not exist, or do not run on a host."""
    yield from (("unknown", "magic"), ("other device", "triton"), ("none", None), ("object", object()))


def bad_values(case: Case, name: str) -> Bad:
    """Everything wrong that argument `name` of a case can be."""
    value = case.arguments[name]
    yield from case.more.get(name, {}).items()
    if name == "backend":
        yield from bad_backends()
    elif name == "q_scale":
        yield from bad_scales()
    elif isinstance(value, PagedCache):
        yield from bad_caches(value)
    elif isinstance(value, torch.Tensor):
        for label, bad in bad_tensors(value):
            if label != "huge" or name not in case.outputs:
                yield label, bad
        if name in case.outputs:
            yield from bad_outputs(value, {other: v for other, v in case.arguments.items() if other != name})
        elif name == "sink":
            yield "nan", torch.full_like(value, float("nan"))
    elif isinstance(value, int | float):
        yield from bad_numbers(value)
    elif isinstance(value, IndexRecipe):
        yield from (("width of another", IndexRecipe(4)), ("object", object()))
    else:
        yield from (("none", None), ("object", object()), ("tensor", torch.zeros(2)))


def faults(case: Case, name: str, *, blind: bool = False) -> list[str]:
    """What went otherwise than it should for every bad value of an argument; empty if all is well. A `blind` call sees
    no values, as on a device, and is not blamed for them."""
    before = {key: value.clone() for key, value in case.watched.items()}
    found: list[str] = []
    own = case.names.get(name, name)
    for label, bad in bad_values(case, name):
        if f"{name} {label}" in case.free or (blind and any(word in f"{name} {label}" for word in SEEN)):
            continue
        arguments = {**case.arguments, name: bad}
        try:
            case.run(arguments)
        except (ValueError, TypeError) as error:
            said = str(error)
            # A size that does not fit another argument may be told of either.
            about = known(case) if label.startswith(RELATIVE) else [own]
            if not any(word in said for word in about):
                found.append(f"{label}: names {about}? {said}")
        except Exception as error:
            found.append(f"{label}: {type(error).__name__}: {error}"[:200])
        else:
            found.append(f"{label}: accepted")
        for key, value in case.watched.items():
            if not same(value, before[key]):
                found.append(f"{label}: {key} changed")
                value.copy_(before[key])
    return found


def known(case: Case) -> list[str]:
    """All names that a refusal may use."""
    return [*case.arguments, *case.names.values()]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def ints(*values: object) -> torch.Tensor:
    return torch.tensor(values if len(values) > 1 else values[0], dtype=torch.int32)


def plain(function: Callable[..., object], *positional: str) -> Callable[[Arguments], object]:
    """Call with some arguments by place and the others by name."""

    def run(arguments: Arguments) -> object:
        named = {name: value for name, value in arguments.items() if name not in positional}
        return function(*(arguments[name] for name in positional), **named)

    return run
