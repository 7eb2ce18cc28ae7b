"""What is remembered of `SparseMLA` calls on a device; see `tamis.ops.memory`."""

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor

from tamis import checks
from tamis.cache.selection import Selection
from tamis.layers.mla_checks import Arguments, Call, Write
from tamis.ops import memory
from tamis.ops.attention import Prepared
from tamis.ops.compress.operations import CompressKv, compress_kv
from tamis.ops.index.prepared import PreparedTopk
from tamis.ops.memory import sign
from tamis.ops.write.operations import write_kv


class KnownCall(NamedTuple):
    """A call that passed all checks, and its operations as far as they could be prepared."""

    writes: list[Callable[[Any], None]]
    index_topk: PreparedTopk | None
    attend: Prepared | None
    apart: memory.Apart | None
    """Whether an output is separate from all that is read, if the call was given one."""

    @classmethod
    def of(cls, given: Arguments, call: Call, positions: Tensor) -> "KnownCall":
        """Prepare the operations of a checked call over such positions."""
        attend = None
        if call.translate is None:
            selections = [Selection(call.cache, positions, None, *call.table)]
            attend = Prepared.of(call.attend._replace(selections=selections), None)
        return cls(
            [_prepared_write(write) for write in call.writes],
            None if call.index_topk is None else PreparedTopk.of(call.index_topk),
            attend,
            None if given.out is None else memory.Apart(given.out, *given.read),
        )

    def fits(self, given: Arguments) -> bool:
        """Whether another call of the same signature is right: only addresses may still be wrong."""
        return self.apart is None or given.out is None or self.apart(given.out, *given.read)

    def attended(self, call: Call, positions: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Output, lse and max_logits of a call; None if its attention must be run as an operation."""
        given = call.attend
        if self.attend is None or not positions.is_contiguous():
            return None
        read = [call.cache.storage, positions, *call.table]
        return self.attend.run(given.q, read, given.scale, given.sink, given.out)


class LayerMemory(memory.Memory[KnownCall]):
    """The calls of all layers: those of a model have their signatures in common."""

    def sign(self, layer: int | None, scale: float, given: Arguments) -> memory.Signature | None:
        """The signature of a call of a layer with that number (see `number_of`) and softmax scale."""
        try:
            return None if layer is None or _must_be_checked(scale, given) else (layer, *_traits(given))
        except memory.NOT_ARGUMENTS:
            return None


def run_write(call: Write) -> None:
    """Run a write of a call that was not prepared."""
    if isinstance(call, CompressKv):
        compress_kv(call)
    else:
        write_kv(call)


def number_of(*options: object) -> int | None:
    """A number for all layers with the same options; None if they cannot be compared, and will be refused."""
    try:
        return _numbered(*options)
    except TypeError:
        return None


_NUMBERS = count()


@cache
def _numbered(*options: object) -> int:
    return next(_NUMBERS)


def _must_be_checked(scale: float, given: Arguments) -> bool:
    """Whether the checks of a call depend on more than its signature."""
    q, kv, caches, plan, _, positions, index, sink, q_scale, out = given
    if not memory.remembered_on(q):
        return True
    if plan is not None and (not plan.requests or (plan.prefill is not None and plan.prefill.chunks)):
        return True
    held = (caches.latent, caches.index, caches.index_state)
    written = (*(None if one is None else one.storage for one in held), out)
    tensors = (q, positions, sink, *written, *(kv if isinstance(kv, tuple) else (kv,)))
    if index is not None:
        tensors += (index.q, index.weights, index.keys, index.gates, index.gate_bias)
    if memory.has_gradient(*tensors) or any(t is not None and checks.frozen(t) for t in written):
        return True
    if isinstance(q_scale, Tensor):
        return memory.has_gradient(q_scale)
    copied = sink is not None and sink.stride() != (1,)
    return copied or not (checks.is_factor(q_scale) and checks.is_factor(scale * q_scale))


def _traits(given: Arguments) -> memory.Signature:
    """What the checks of a call depend on."""
    q, kv, caches, plan, table, positions, index, sink, q_scale, out = given
    keys = inputs = None
    if caches.index is not None:
        keys = (caches.index.recipe, *memory.sign_cache(caches.index))
    if index is not None:
        inputs = (index.recipe, sign(index.q), sign(index.weights), sign(index.keys), *_pooled_traits(given))
    return (
        (*map(sign, kv),) if isinstance(kv, tuple) else sign(kv),
        isinstance(kv, tuple),
        sign(q_scale) if isinstance(q_scale, Tensor) else None,
        tuple(map(sign, table)) if plan is None else plan.signature,
        keys,
        inputs,
        *map(sign, (q, positions, sink, out)),
        *memory.sign_cache(caches.latent),
    )


def _pooled_traits(given: Arguments) -> memory.Signature:
    """What the pooling of index keys depends on, and whether anything was given for it."""
    index, state, groups = (
        given.index_inputs,
        given.caches.index_state,
        None if given.plan is None else given.plan.groups,
    )
    assert index is not None
    if groups is None and state is None and index.gates is None and index.gate_bias is None:
        return ()
    kept = () if state is None else memory.sign_cache(state)
    traits = (sign(index.gates), sign(index.gate_bias), state is None, *kept)
    if groups is None:
        return traits
    tensors = (groups.slots, groups.visible, groups.state.slots, groups.state.block_table)
    return (*traits, groups.size, groups.state_page_size, *map(sign, tensors))


def _prepared_write(write: Write) -> Callable[[Any], None]:
    if isinstance(write, CompressKv):
        return compress_kv
    return write_kv.prepared(write) or write_kv
