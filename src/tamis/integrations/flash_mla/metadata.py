"""FlashMLA's scheduler metadata. tamis' kernels choose their splits themselves and never read it."""

from dataclasses import dataclass
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cuda.device import sm_count
from tamis.integrations.flash_mla import schedule


@dataclass
class FlashMLASchedMeta:
    """A schedule for `flash_mla_with_kvcache`. Callers may fill it; unlike in FlashMLA, no call changes it.

    It may therefore be used again with other shapes and lengths, which FlashMLA refuses or silently gets wrong.
    """

    @dataclass
    class Config:
        """The shapes that FlashMLA notes at the first call with a schedule. tamis notes nothing."""

        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None
        enable_batch_invariant: bool = False

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: Tensor | None = None
    """int32 [parts, 8]; see `schedule.SplitSchedule.parts`."""
    num_splits: Tensor | None = None
    """int32 [b + 1], the running sum of the number of splits of each request."""


def has_legacy() -> bool:
    """Whether the kernels behind `use_legacy=True` are there: those for Hopper and for V3.2's and V4's rows."""
    return True


def get_mla_metadata(*args: Any, **kwargs: Any) -> tuple[FlashMLASchedMeta, Tensor | None]:
    """The schedule of a decode step, as (holder, num_splits). `flash_mla_with_kvcache` accepts it without needing it.

    Without arguments, or with None for `cache_seqlens` (today's FlashMLA): an empty holder and None. With the classic
    arguments `cache_seqlens` int32 [b], `num_q_tokens_per_head_k` = s_q * h_q, `num_heads_k` = 1, and optionally
    `num_heads_q`, `is_fp8_kvcache` and `topk`: a filled holder and its `num_splits`. Without `topk` the lengths are
    read on the host, which synchronises with the device.
    """
    if not args and not kwargs:
        return FlashMLASchedMeta(), None
    try:
        given = signature(_classic_metadata).bind(*args, **kwargs)
    except TypeError as error:
        known = ", ".join(signature(_classic_metadata).parameters)
        raise TypeError(
            f"get_mla_metadata takes no arguments or ({known}): {error}; call it without arguments"
        ) from error
    return _classic_metadata(*given.args, **given.kwargs)


def get_mla_decoding_metadata(
    seqlens_k: Tensor,
    num_q_tokens_per_head_k: int,
    h_k: int,
    h_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
    use_legacy: bool = False,
) -> tuple[Tensor, Tensor]:
    """The schedule of a decode step as (tile_scheduler_metadata, num_splits), to be put into a `FlashMLASchedMeta`.

    `seqlens_k` is int32 [b], `num_q_tokens_per_head_k` is s_q * h_q, and `h_k` is 1. Without `topk` the lengths are
    read on the host, which synchronises with the device. `use_legacy` changes nothing: there is one schedule.
    """
    check_flags(is_fp8_kvcache=is_fp8_kvcache, use_legacy=use_legacy)
    names = _StepNames("seqlens_k", "h_k", "h_q")
    return _spread_step(names, seqlens_k, num_q_tokens_per_head_k, h_k, h_q, topk)


def check_flags(**flags: object) -> None:
    """Refuse flags that are not bools."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise checks.refuse_type(name, "True or False", checks.describe(value), "pass a bool")


def check_schedule(metadata: object, num_splits: object) -> None:
    """Refuse what is no schedule. Its values are not read, so they are not checked."""
    remedy = "pass what get_mla_metadata of this module returned, or None"
    if metadata is not None and not isinstance(metadata, FlashMLASchedMeta | Tensor):
        expected = "a FlashMLASchedMeta or a tensor"
        raise checks.refuse_type("tile_scheduler_metadata", expected, checks.describe(metadata), remedy)
    if num_splits is not None and not isinstance(num_splits, Tensor):
        raise checks.refuse_type("num_splits", "a tensor or None", checks.describe(num_splits), remedy)


class _StepNames(NamedTuple):
    """The names of the same arguments in the two functions, for errors."""

    lengths: str
    heads_k: str
    heads_q: str


def _classic_metadata(
    cache_seqlens: Tensor | None,
    num_q_tokens_per_head_k: int,
    num_heads_k: int,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[FlashMLASchedMeta, Tensor | None]:
    check_flags(is_fp8_kvcache=is_fp8_kvcache)
    if cache_seqlens is None:
        return FlashMLASchedMeta(), None
    names = _StepNames("cache_seqlens", "num_heads_k", "num_heads_q")
    parts, splits = _spread_step(names, cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q, topk)
    return FlashMLASchedMeta(tile_scheduler_metadata=parts, num_splits=splits), splits


def _spread_step(
    names: _StepNames, lengths: Tensor, query_rows: int, heads_k: int, heads_q: int | None, topk: int | None
) -> tuple[Tensor, Tensor]:
    requests = checks.tensor(names.lengths, lengths, "b", (torch.int32,))["b"]
    checks.values_between(names.lengths, lengths, 0, 2**31 - 1, "a request cannot have fewer than 0 rows")
    checks.integer("num_q_tokens_per_head_k", query_rows, low=1)
    checks.integer(names.heads_k, heads_k, low=1, high=1)
    # Without a head count, all query rows count as heads of one token, which is the same amount of work.
    heads = query_rows if heads_q is None else checks.integer(names.heads_q, heads_q, low=1)
    if query_rows % heads:
        expected, remedy = f"a multiple of {names.heads_q} = {heads}", f"pass s_q * {names.heads_q}"
        raise checks.refuse("num_q_tokens_per_head_k", expected, query_rows, remedy)
    if topk is None:
        columns = lengths.tolist()
    else:
        columns = [checks.integer("topk", topk, low=1)] * requests
    device = lengths.device
    capability = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9
    parts = schedule.part_count(sm_count(device), heads, query_rows // heads, capability_major=capability)
    spread = schedule.schedule_splits(columns, parts, overhead=3 if heads_q == 128 else 5)
    return torch.from_numpy(spread.parts).to(device), torch.from_numpy(spread.splits).to(device)
