"""The checks that a planner makes before it plans a batch. Each error names the field of the `Batch`."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.step.batch import Batch, PageMap
from tamis.step.buffers import TableBuffer
from tamis.step.plan import Limits
from tamis.step.split import INT

_HOST = torch.device("cpu")


class HostLengths(NamedTuple):
    """The lengths of a checked batch, as far as the host knows them."""

    starts: INT
    """[requests + 1]: running sum of the new tokens."""
    queries: INT
    """[requests]: new tokens."""
    lengths: INT
    """[requests]: context plus new tokens, or for decodes an upper bound of that."""
    exact: INT | None
    """[requests]: context plus new tokens; None if only the device knows that."""
    tokens: int
    """All new tokens."""
    shortest: int
    """The fewest new tokens of a request; 0 without requests."""
    longest: int
    """The most new tokens of a request; 0 without requests."""
    max_length: int
    """The greatest of the lengths; 0 without requests."""
    one_each: bool
    """Whether the first requests have one new token each, and the others, which are padding, have none."""


class _Step(NamedTuple):
    """The sizes that the pages of every pool must fit."""

    requests: int
    tokens: int
    rows: int
    """Token rows, with padding."""
    longest: int
    """Tokens that a block table must have pages for."""
    device: torch.device


def check_batch(batch: Batch, limits: Limits, tables: Mapping[str, TableBuffer], device: torch.device) -> HostLengths:
    """Refuse a batch that is malformed or larger than a planner's buffers (by pool; "" is the main one)."""
    checks.instance("batch", batch, Batch)
    starts = _host_array("query_starts", batch.query_starts, None, "pass a running sum of new tokens")
    queries, shortest, longest = check_starts(starts, limits)
    lengths, max_length = _check_lengths(batch, queries, limits, device)
    tokens, requests = int(starts[-1]), len(queries)
    if batch.padded_tokens is not None:
        checks.integer("padded_tokens", batch.padded_tokens, low=tokens, high=limits.max_tokens)
    if batch.prefilling is not None:
        count = len(checks.sequence("prefilling", batch.prefilling))
        if count != requests:
            raise checks.refuse("prefilling", f"{requests} flags, one per request", count)
    rows = tokens if batch.padded_tokens is None else batch.padded_tokens
    # The block table may be narrower than the longest length if the host knows only upper bounds, or if ranks share the
    # pages of a request.
    bounded = batch.host_lengths is not None or limits.context_parallel
    step = _Step(requests, tokens, rows, 0 if bounded else max_length, device)
    for name, pages in _pools(batch, limits).items():
        if not _fits(pages, tables[name], step):
            _check_pages(name or "pages", pages, tables[name], step)
    exact: INT | None = lengths
    if batch.host_lengths is not None:
        exact = _check_bounds(batch.lengths.numpy(), lengths) if batch.lengths.is_cpu else None
    one_each = longest == 1 and bool(starts[tokens] == tokens)
    return HostLengths(starts, queries, lengths, exact, tokens, shortest, longest, max_length, one_each)


def check_starts(starts: INT, limits: Limits) -> tuple[INT, int, int]:
    """Refuse query starts that are not a running sum from 0, or that exceed the limits.

    Returns the query lengths, and the least and the greatest of them.
    """
    queries = starts[1:] - starts[:-1]
    requests = len(queries)
    shortest = int(np.minimum.reduce(queries)) if requests else 0
    longest = int(np.maximum.reduce(queries)) if requests else 0
    if not len(starts) or starts[0] != 0 or shortest < 0:
        raise checks.refuse("query_starts", "a running sum from 0", starts.tolist(), "begin it with 0")
    tokens = max(int(starts[-1]), longest)  # a sum past int32 would be negative
    if tokens > limits.max_tokens:
        expected = f"of at most max_tokens={limits.max_tokens} tokens"
        raise checks.refuse("query_starts", expected, tokens, "raise the limit")
    if requests > limits.max_requests:
        expected = f"of at most max_requests={limits.max_requests} requests"
        raise checks.refuse("query_starts", expected, requests, "raise the limit")
    return queries, shortest, longest


def _host_array(name: str, value: object, count: int | None, remedy: str) -> INT:
    """The values of an int32 vector on the host. Other values are refused, a few of them only by `checks.tensor`."""
    if isinstance(value, Tensor) and value.is_cpu and value.layout is torch.strided:
        found = value.numpy()
        if found.dtype == np.int32 and found.ndim == 1 and count in (None, len(found)):
            return found
    sizes = {} if count is None else {"B": count}
    checks.tensor(name, value, "N" if count is None else "B", (torch.int32,), device=_HOST, remedy=remedy, **sizes)
    raise AssertionError  # the line above has refused it


def _check_lengths(batch: Batch, queries: INT, limits: Limits, device: torch.device) -> tuple[INT, int]:
    """The lengths that the host knows, and the greatest of them."""
    requests, given, remedy = len(queries), batch.lengths, "pass one per request"
    known = given if batch.host_lengths is None else batch.host_lengths
    if known is not given or not isinstance(given, Tensor) or not given.is_cpu:
        checks.tensor("lengths", given, "B", (torch.int32,), B=requests, remedy=remedy)
        if not isinstance(known, Tensor) or not known.is_cpu:
            raise checks.refuse("host_lengths", "given when lengths are on a device", None, "pass a host copy or bound")
        _check_device("lengths", given, device)
    lengths = _host_array("lengths" if known is given else "host_lengths", known, requests, remedy)
    if not requests:
        return lengths, 0
    longest, short = int(np.maximum.reduce(lengths)), queries > lengths
    if longest > limits.max_length or short.any():
        checks.values_between("lengths", known, 0, limits.max_length, "raise Limits.max_length")
        at = int(short.argmax())
        expected = f"at least its {queries[at]} new tokens"
        raise checks.refuse(f"lengths[{at}]", expected, lengths[at], "lengths include the new tokens")
    return lengths, longest


def _check_bounds(exact: INT, bounds: INT) -> INT:
    """The lengths, where those on the host are bounds: at least 0, as on a device. Rows past a bound would be gathered
    over those of the next request."""
    if (exact > bounds).any():
        at = int((exact > bounds).argmax())
        expected = f"at most host_lengths[{at}]={bounds[at]}"
        raise checks.refuse(f"lengths[{at}]", expected, exact[at], "host_lengths are upper bounds")
    return np.maximum(exact, 0)


def _pools(batch: Batch, limits: Limits) -> dict[str, PageMap]:
    others = batch.other_pages
    if not isinstance(others, Mapping):
        raise checks.refuse_type("other_pages", "a dictionary", checks.describe(others), "name each pool")
    if others and set(others) - set(limits.other_page_sizes):
        names = ", ".join(limits.other_page_sizes) or "none"
        raise checks.refuse("other_pages", f"among {names}", list(others), "name them in Limits")
    return {"": batch.pages, **others} if others else {"": batch.pages}


def _fits(pages: PageMap, held: TableBuffer, step: _Step) -> bool:
    """Whether pages pass all checks of `_check_pages`, found out in less time. If not, those checks tell why."""
    if type(pages) is not PageMap or type(pages.block_table) is not Tensor or type(pages.slots) is not Tensor:
        return False
    table, slots = pages.block_table, pages.slots
    shape, count = table.shape, slots.shape
    return (
        pages.page_size in (None, held.page_size)
        and len(shape) == 2
        and shape[0] == step.requests
        and step.longest <= shape[1] * held.page_size
        and shape[1] <= held.width
        and len(count) == 1
        and step.tokens <= count[0] <= step.rows
        and table.dtype is torch.int32
        and slots.dtype in checks.INTS
        and table.layout is torch.strided
        and slots.layout is torch.strided
        and table.device in (_HOST, step.device)
        and slots.device in (_HOST, step.device)
    )


def _check_pages(name: str, pages: PageMap, held: TableBuffer, step: _Step) -> None:
    checks.instance(name, pages, PageMap)
    if pages.page_size not in (None, held.page_size):
        remedy = "make the pool and the planner's Limits with the same page size"
        raise checks.refuse(f"{name}.page_size", f"{held.page_size}, the planner's", pages.page_size, remedy)
    width = checks.tensor(f"{name}.block_table", pages.block_table, "B W", (torch.int32,), B=step.requests)["W"]
    if width > held.width:
        expected = f"at most {held.width} pages wide"
        raise checks.refuse(f"{name}.block_table", expected, width, "slice it, or raise max_length")
    if width * held.page_size < step.longest:
        expected = f"at least {ceil_div(step.longest, held.page_size)} pages wide for {step.longest} tokens"
        raise checks.refuse(f"{name}.block_table", expected, width, "pass all pages, or set context_parallel")
    count = checks.tensor(f"{name}.slots", pages.slots, "T", checks.INTS)["T"]
    if not step.tokens <= count <= step.rows:
        expected = f"of {step.tokens} to {step.rows} values"
        raise checks.refuse(f"{name}.slots", expected, count, "pass one per new token")
    _check_device(f"{name}.block_table", pages.block_table, step.device)
    _check_device(f"{name}.slots", pages.slots, step.device)


def _check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device not in (_HOST, device):
        raise checks.refuse(name, f"on {device} or the host", tensor.device, "move it there")
