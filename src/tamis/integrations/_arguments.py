"""Checks that the drop-in modules share.

The operations would refuse the same inputs, but their errors would speak of selections and slots. These checks name the
arguments of the imitated function instead.
"""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.ops.attention import MAX_HEADS

ONE_BYTE = (torch.uint8, torch.int8, torch.float8_e4m3fn)
"""The dtypes under which engines hold packed or FP8 rows. Only the bytes matter."""


def wrap_pages(name: str, pages: Tensor, layout: Layout, scale: float | Tensor = 1.0) -> PagedCache:
    """`PagedCache.wrap` of pages, with or without a head axis of size 1; errors name the caller's argument."""
    checks.no_gradient(**{name: pages})
    try:
        return PagedCache.wrap(pages, layout, scale=scale)
    except ValueError as error:
        raise ValueError(name + str(error).removeprefix("storage").removeprefix("pages")) from error


def head_count(name: str, heads: int) -> None:
    """Check the number of query heads."""
    if not 1 <= heads <= MAX_HEADS:
        raise checks.refuse(name, f"of 1 to {MAX_HEADS} heads", heads, "split the heads over several calls")


def sink(name: str, value: Tensor | None, heads: int, device: torch.device) -> None:
    """Check an optional sink, one float32 per head."""
    if value is None:
        return
    checks.tensor(name, value, "h", (torch.float32,), device=device, remedy="pass one per query head", h=heads)
    checks.no_gradient(**{name: value})
    if value.device.type == "cpu" and bool(value.isnan().any()):
        raise checks.refuse(name, "free of NaN", "NaN", "use -inf for a head without a sink")


def lengths(name: str, value: Tensor, count: int, columns: int, device: torch.device) -> None:
    """Check the lengths of `count` rows: each says how many of the row's `columns` leading columns count."""
    checks.tensor(name, value, "n", (torch.int32,), device=device, n=count)
    checks.values_between(name, value, 0, columns, f"it counts leading columns, of which there are {columns}")
