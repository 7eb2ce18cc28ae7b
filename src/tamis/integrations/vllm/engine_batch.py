"""Reads vLLM's own record of a step, `CommonAttentionMetadata`, without synchronising with a device."""

from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.step.batch import Batch, PageMap
from tamis.step.plan import Limits


def engine_batch(common: Any, limits: Limits, *, prefilling: list[bool] | None = None) -> Batch:
    """The step that vLLM describes, as a `Batch` over the engine's tensors; nothing is copied to or from a device."""
    requests, actual = int(common.num_reqs), int(common.num_actual_tokens)
    starts = host_values(common, ("query_start_loc_cpu",), "query_start_loc")[: requests + 1].to(torch.int32)
    # While drafting, vLLM's upper bounds may exceed the longest possible request.
    lengths = host_values(common, length_names(common), "seq_lens")[:requests].to(torch.int32)
    lengths = lengths.clamp_max(limits.max_length)
    tokens, slots = int(starts[-1]) if len(starts) else 0, common.slot_mapping
    rows = padded_rows(tokens, actual, slots, limits)
    width = ceil_div(limits.max_length, limits.page_size)
    # Slots past the new tokens are padding or left over from an earlier step; the planner writes -1 there.
    return Batch(
        starts,
        common.seq_lens[:requests].to(torch.int32),
        PageMap(common.block_table_tensor[:requests, :width].to(torch.int32), slots[:tokens]),
        host_lengths=lengths,
        padded_tokens=rows,
        prefilling=prefilling,
    )


def first(values: Tensor, count: int) -> Tensor:
    """The first `count` values; if these are all, the tensor itself, which saves the time of making a view."""
    return values if values.shape[0] == count else values[:count]


def block_table(table: Tensor, requests: int) -> Tensor:
    """The requests' rows of the engine's page table."""
    # A converted copy would not be at the address that a captured graph reads.
    if table.dtype != torch.int32:
        received = checks.dtype_name(table.dtype)
        raise checks.refuse_type("block_table_tensor", "int32", received, "pass the engine's own tensor")
    return first(table, requests)


def padded_rows(tokens: int, actual: int, slots: Tensor, limits: Limits) -> int:
    """How many token rows a layer may be called with: all that the engine counts or has a slot for."""
    if tokens > actual:
        raise checks.refuse("num_actual_tokens", f"at least the {tokens} new tokens", actual, "count every token")
    given = slots.shape[0]
    if given < tokens:
        raise checks.refuse("slot_mapping", f"at least {tokens} long", given, "pass one slot per new token")
    most = limits.max_tokens
    if actual > most:
        raise checks.refuse("num_actual_tokens", f"at most max_num_batched_tokens={most}", actual, "raise the limit")
    return max(actual, min(given, most))


def length_names(common: Any) -> tuple[str, ...]:
    """The attributes that may hold lengths on the host, best first.

    In vLLM's own record `seq_lens_cpu` is a property that copies from the device unless `_seq_lens_cpu` is filled, so
    only the latter is read where both exist.
    """
    second = "_seq_lens_cpu" if hasattr(common, "_seq_lens_cpu") else "seq_lens_cpu"
    return ("seq_lens_cpu_upper_bound", second)


def host_values(common: Any, names: tuple[str, ...], device_name: str) -> Tensor:
    """The first of these tensors that is on the host, which may be the device tensor of an engine that runs there."""
    value = None
    for name in (*names, device_name):
        value = getattr(common, name, None)
        if isinstance(value, Tensor) and value.is_cpu:
            return value
    raise checks.refuse(
        device_name,
        f"accompanied by {' or '.join(n.lstrip('_') for n in names)} on the host",
        checks.describe(value),
        "pass a host copy (for lengths an upper bound will do); making one here would synchronise with the device",
    )
