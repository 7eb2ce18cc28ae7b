"""The operations of the stages: one declaration each, which torch.compile can trace without looking inside.

An operation is declared by a named tuple of its arguments, beside the stage that it belongs to:

    class CombineParts(NamedTuple):
        parts: Tensor
        out: Written[Tensor]
        backend: str

        def fake(self) -> Tensor: ...

    combine_parts = Operation("combine", CombineParts, CombineParts.fake)

`combine_parts(CombineParts(...))` calls the function `combine_parts` of the backend's module of the stage (`reference`,
`triton_kernels`, `hopper`) with the tuple. So every implementation has the same one argument. While torch.compile
traces, the call becomes one of `torch.ops.tamis.combine_parts` instead, whose schema follows from the annotations.

The first argument is a tensor, whose device selects the backend, and the last is `backend`. The tuple's method `fake`
makes empty results for a trace. A static method `run(stage, call)`, if there is one, is called in place of the stage's
function, and `no_gradient` names the arguments that may not require a gradient. An operation of `tamis.train` names the
function that it belongs to (`trains`); `tamis.ops.autograd` gives it a backward pass.

Operations do not check their arguments: the `check_*` functions of the stages have done so. They write only to
arguments marked `Written`, and return new tensors. What `tamis.ops.memory` remembers of a call are operations that were
prepared for others like it: launches that are complete except for addresses.
"""

import re
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Annotated, Any, Generic, NamedTuple, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import without_autocast
from tamis.backends import backend_for_stage
from tamis.cache.fields import from_key
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Rows, Selection
from tamis.model.recipe import IndexRecipe
from tamis.ops.lse import LseForm

T = TypeVar("T")
C = TypeVar("C", bound=tuple[Any, ...])

_WRITTEN = "written"
Written: TypeAlias = Annotated[T, _WRITTEN]
"""Marks an argument that an operation writes to."""

# Registrations last as long as this object.
_LIBRARY = torch.library.Library("tamis", "FRAGMENT")


class Flat(NamedTuple):
    """How an argument of one type is passed through a schema, which has only tensors, numbers, strings and lists."""

    schema: str
    """The arguments in the schema. `@` stands for the argument's name, and `!` follows the type of a written tensor."""
    take_apart: Callable[[Any], Sequence[Any]]
    """From the argument to the values of the schema's arguments."""
    put_together: Callable[..., Any]
    """The inverse of `take_apart`."""


def _cache_parts(held: PagedCache) -> tuple[Tensor, str, float, Tensor | None]:
    scale = held.scale
    if isinstance(scale, Tensor):
        return held.storage, held.layout.key, 1.0, scale
    return held.storage, held.layout.key, scale, None


def _cache(storage: Tensor, layout: str, scale: float, scale_tensor: Tensor | None) -> PagedCache:
    return PagedCache.rebuilt(storage, from_key(layout), scale if scale_tensor is None else scale_tensor)


def _selection_parts(selections: Sequence[Selection]) -> list[list[Any]]:
    caches = [_cache_parts(s.cache) for s in selections]
    parts = [[cache[part] for cache in caches] for part in range(4)]
    parts += [[s.slots for s in selections], [s.lengths for s in selections]]
    return [*parts, [s.request_ids for s in selections], [s.block_table for s in selections]]


def _selections(*lists: Sequence[Any]) -> list[Selection]:
    return [Selection(_cache(*one[:4]), *one[4:]) for one in zip(*lists, strict=True)]


def _rows(rows: Sequence[Tensor], slots: Sequence[Tensor], lengths: Sequence[Tensor | None]) -> list[Rows]:
    return [Rows(*one) for one in zip(rows, slots, lengths, strict=True)]


def _plain(schema: str) -> Flat:
    return Flat(schema, lambda value: (value,), lambda value: value)


_FLAT: dict[Any, Flat] = {
    Tensor: _plain("Tensor! @"),
    Tensor | None: _plain("Tensor!? @"),
    int: _plain("SymInt @"),
    int | None: _plain("SymInt? @"),
    float: _plain("float @"),
    float | None: _plain("float? @"),
    bool: _plain("bool @"),
    str: _plain("str @"),
    torch.dtype: _plain("ScalarType @"),
    tuple[int, int, int]: Flat("SymInt[] @", lambda value: (list(value),), tuple),
    PagedCache: Flat(
        "Tensor! @_storage, str @_layout, float @_scale, Tensor? @_scale_tensor",
        _cache_parts,
        _cache,
    ),
    list[Selection]: Flat(
        "Tensor[] @_storages, str[] @_layouts, float[] @_scales, Tensor?[] @_scale_tensors, "
        "Tensor[] @_slots, Tensor?[] @_lengths, Tensor?[] @_request_ids, Tensor?[] @_block_tables",
        _selection_parts,
        _selections,
    ),
    list[Rows]: Flat(
        "Tensor[] @_rows, Tensor[] @_slots, Tensor?[] @_lengths",
        lambda given: ([g.rows for g in given], [g.slots for g in given], [g.lengths for g in given]),
        _rows,
    ),
    LseForm: Flat("int @_group, bool @_base_2, bool @_plus_inf", tuple, LseForm),
    Layout: Flat("str @", lambda layout: (layout.key,), from_key),
    IndexRecipe: Flat(
        "int @_rope_dim, bool @_interleaved, bool @_rope_first, bool @_hadamard",
        lambda recipe: (recipe.rope_dim, recipe.interleaved, recipe.rope_first, recipe.hadamard),
        IndexRecipe,
    ),
}
_RETURNS = {type(None): "()", Tensor: "Tensor", tuple[Tensor, Tensor]: "(Tensor, Tensor)"}
_RETURNS[tuple[Tensor, Tensor, Tensor]] = "(Tensor, Tensor, Tensor)"
_RETURNS[tuple[Tensor, Tensor, Tensor, Tensor]] = "(Tensor, Tensor, Tensor, Tensor)"
_RETURNS[tuple[Tensor, list[Tensor], Tensor]] = "(Tensor, Tensor[], Tensor)"


class Operation(Generic[C, T]):
    """One operation of a stage; calling it with its tuple of arguments runs it."""

    def __init__(
        self, stage: str, arguments: Callable[..., C], fake: Callable[[C], T], *, trains: str | None = None
    ) -> None:
        """Register an operation, named like its tuple: `CombineParts` becomes `combine_parts`.

        Args:
            stage: the stage whose modules implement it.
            arguments: the named tuple of its arguments.
            fake: empty results for a trace; its annotation says what is returned.
            trains: the function of `tamis.train` that it belongs to. The stage's modules for training implement it.
        """
        self.stage, self.arguments, self.fake, self.trains = stage, arguments, fake, trains
        self.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", arguments.__name__).lower()
        self._check, self._prepare = f"check_{self.name}", f"prepare_{self.name}"
        hints = get_type_hints(arguments, include_extras=True)
        fields, letters = [], iter("abcdefgh")
        self._flat: list[Flat] = []
        self._own_run: Callable[[Any, C], T] | None = getattr(arguments, "run", None)
        for name in arguments._fields:  # type: ignore[attr-defined]
            hint, written = hints[name], get_origin(hints[name]) is Annotated
            flat = _FLAT[get_args(hint)[0] if written else hint]
            self._flat.append(flat)
            fields.append(flat.schema.replace("@", name).replace("!", f"({next(letters)}!)" if written else ""))
        returned = _RETURNS[get_type_hints(fake)["return"]]
        # A compiler must not change strides, since there may be gaps between pages.
        tags = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
        _LIBRARY.define(f"{self.name}({', '.join(fields)}) -> {returned}", tags=tags)
        self.overload = getattr(torch.ops.tamis, self.name).default
        _LIBRARY.impl(self.name, lambda *flat: _contiguous(self._run(self.whole(flat))), "CompositeExplicitAutograd")
        torch.library.register_fake(self.overload, lambda *flat: self._traced(self.whole(flat)), lib=_LIBRARY)

    def __call__(self, call: C) -> T:
        """Run the operation. While torch.compile traces, call its torch op instead, which is recorded in the trace.
        Operations that train are always called as torch ops, to which autograd and traces of it belong."""
        if torch.compiler.is_compiling() or self.trains is not None:
            flat = [part for how, value in zip(self._flat, call, strict=True) for part in how.take_apart(value)]
            found: T = self.overload(*flat)
            return found
        return self._run(call)

    def prepared(self, call: C) -> Any:
        """What runs a checked call, and all others that differ from it in addresses and factors only.

        A module prepares calls in a function `prepare_<operation>`, which also says how the result is called; None if
        there is no such function, or if it cannot prepare this call.
        """
        prepare = getattr(self._stage(call), self._prepare, None)
        return None if prepare is None else prepare(call)

    def check(self, call: C, **names: str) -> None:
        """Refuse gradients, a backend that does not run here, and arguments that its kernels do not support.

        A module whose kernels support less than their stage has a function `check_<operation>` that refuses the rest.
        While torch.compile traces, the fake does all this. `names` are the caller's names for arguments, for errors.
        """
        if not torch.compiler.is_compiling():
            self._refuse(call, names)

    def _refuse(self, call: C, names: dict[str, str]) -> None:
        refused = getattr(call, "no_gradient", ())
        if refused and torch.is_grad_enabled():
            checks.no_gradient(**{names.get(name, name): getattr(call, name) for name in refused})
        stage = implementation(self.stage, call[-1], call[0].device, self.trains)
        if not hasattr(stage, self.name):
            raise NotImplementedError(
                f"{stage.__name__} has no function {self.name}; every function of the stage {self.stage} must be there"
            )
        own = getattr(stage, self._check, None)
        if own is not None:
            own(call)

    def _run(self, call: C) -> T:
        device, stage = call[0].device, self._stage(call)
        run: Callable[[C], T] = getattr(stage, self.name) if self._own_run is None else partial(self._own_run, stage)
        if device.type == "meta" or not torch.is_autocast_enabled(device.type):
            return run(call)
        with without_autocast(device):
            return run(call)

    def _stage(self, call: C) -> Any:
        """The module that runs a call."""
        return _module(self.stage, call[-1], call[0].device, self.trains)

    def _traced(self, call: C) -> T:
        self._refuse(call, {})
        return self.fake(call)

    def whole(self, flat: Sequence[Any]) -> C:
        """The tuple from the arguments of the op."""
        values, at = [], 0
        for how in self._flat:
            count = how.schema.count("@")
            values.append(how.put_together(*flat[at : at + count]))
            at += count
        return self.arguments(*values)


def _contiguous(found: Any) -> Any:
    if isinstance(found, Tensor):
        return found.contiguous()
    return type(found)(_contiguous(part) for part in found) if isinstance(found, tuple | list) else found


def implementation(stage: str, backend: str, device: torch.device, trains: str | None = None) -> Any:
    """The module with a backend's kernels of a stage, or of a function of `tamis.train`; all of them offer the same
    functions."""
    try:
        return _module(stage, backend, device, trains)
    except TypeError:
        # The cache of `_module` cannot hash such a value; this error names the argument.
        checks.instance("backend", backend, str, "pass 'auto' or a name from `tamis backends`")
        raise


@cache
def _module(stage: str, backend: str, device: torch.device, trains: str | None = None) -> Any:
    found = backend_for_stage(stage, backend, device, trains)
    return import_module(found.stage_module(stage) if trains is None else found.training_module(stage))
