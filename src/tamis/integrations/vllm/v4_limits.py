"""How many of its entries each token of a V4 step may attend to, computed once for all layers of a kind.

These are a few small operations on the device. In a step whose kernels are short, each of them takes the host as long
as launching attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_HELD = "_tamis_v4_limits"
"""Where a record holds what was computed for its step."""


class _Computed(NamedTuple):
    """Limits, and the layer that they were computed for."""

    limits: Tensor
    layer: int


def decode_limits(layer: Any, window: Any, count: int, columns: int) -> Tensor:
    """Of the first `count` tokens: all `columns` of the indexer's buffer, or none for a token that is not valid,
    whatever the buffer holds for it.

    Args:
        layer: the layer that asks.
        window: the window's record.
        count: the number of decode tokens.
        columns: the width of the indexer's buffer.
    """

    def compute() -> Tensor:
        valid = window.is_valid_token[:count]
        return torch.mul(valid, columns, out=_room(valid))

    return _once(layer, window, window.is_valid_token, (count, columns), compute)


def prefill_limits(layer: Any, window: Any, positions: Tensor, columns: int) -> Tensor:
    """Of each prefill token: the entries that are complete at its position, at most `columns`. Padding, which has no
    window, has no entries either.

    Args:
        layer: the layer that asks, with its `compress_ratio`.
        window: the window's record.
        positions: [prefill tokens].
        columns: the number of entries that are listed for each token.
    """
    lengths, ratio = window.prefill_swa_lens, layer.compress_ratio

    def compute() -> Tensor:
        complete = torch.div(positions + 1, ratio, rounding_mode="floor").clamp_(0, columns)
        return torch.mul(complete, lengths > 0, out=_room(complete))

    key = (positions.shape[0], columns, ratio, positions.data_ptr())
    return _once(layer, window, lengths, key, compute)


def _room(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=torch.int32, device=like.device)


def captured(tensor: Tensor) -> bool:
    """Whether what happens to a tensor becomes part of a graph."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _once(layer: Any, record: Any, source: Tensor, key: tuple[int, ...], compute: Callable[[], Tensor]) -> Tensor:
    """Limits that follow from a tensor of a record: computed for the first layer of a pass through the model, and found
    by the others.

    The layer that they were computed for asks again in the next pass, in which the engine may have changed what the
    same record's tensors hold. Nothing is found while a graph is captured, since its replay must compute them.
    """
    held = getattr(record, "__dict__", None)
    if held is None or captured(source):
        return compute()
    known: dict[tuple[int, ...], _Computed] = held.setdefault(_HELD, {})
    key = (*key, source.data_ptr())
    found = known.get(key)
    if found is None or found.layer == id(layer):
        found = known[key] = _Computed(compute(), id(layer))
    return found.limits
