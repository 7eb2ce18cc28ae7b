"""What layers of V4 and V4.1 remember of calls on a device; see `tamis.ops.memory`.

A layer has a memory of its own, since what its checks depend on includes the identities of its caches.
"""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.v4_caches import V4Caches
from tamis.ops import memory
from tamis.step.v4_plan import V4Plan

MOST = 64
"""Calls that a layer remembers: each holds its caches."""


def sign_call(hidden: Tensor, caches: V4Caches, plan: V4Plan, ratio: int) -> memory.Signature | None:
    """All that the checks of a call on a device depend on; None if they must run in every call.

    Caches count by their identity, since neither a cache nor its storage changes its shape. What is kept for a
    signature must hold them (`held_by`).
    """
    if torch.compiler.is_compiling() or not isinstance(hidden, Tensor) or checks.visible(hidden):
        return None
    if not isinstance(caches, V4Caches):
        return None
    planned = plan.signature(ratio)
    if planned is None:
        return None
    grad = torch.is_grad_enabled()
    seen: list[object] = [grad, torch.is_inference_mode_enabled(), memory.remembered_on(hidden), planned]
    for cache in (caches.window, caches.entries, caches.state, caches.index, caches.index_state):
        if isinstance(cache, PagedCache):
            seen += (id(cache), id(cache.storage), grad and cache.storage.requires_grad)
        else:
            seen.append(type(cache))
    return (*seen, hidden.shape, hidden.stride(), hidden.dtype, hidden.device)


def held_by(caches: V4Caches) -> list[tuple[PagedCache, Tensor]]:
    """The caches of a call that is remembered: while they are held, no others get their identities."""
    held = (caches.window, caches.entries, caches.state, caches.index, caches.index_state)
    return [(cache, cache.storage) for cache in held if cache is not None]
