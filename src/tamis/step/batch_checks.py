"""The checks that a planner makes before it plans a batch. Each error names the field of the `Batch`."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.step.batch import Batch, PageMap
from tamis.step.buffers import PageBuffers
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


class _Step(NamedTuple):
    """The sizes that the pages of every pool must fit."""

    requests: int
    tokens: int
    rows: int
    """Token rows, with padding."""
    longest: int
    """Tokens that a block table must have pages for."""
    device: torch.device


def check_batch(batch: Batch, limits: Limits, buffers: Mapping[str, PageBuffers], device: torch.device) -> HostLengths:
    """Refuse a batch that is malformed or larger than a planner's buffers (by pool; "" is the main one)."""
    checks.instance("batch", batch, Batch)
    checks.tensor(
        "query_starts", batch.query_starts, "N", (torch.int32,), device=_HOST, remedy="pass a running sum of new tokens"
    )
    starts = batch.query_starts.numpy()
    queries = starts[1:] - starts[:-1]
    check_starts(starts, queries, limits)
    lengths = _check_lengths(batch, queries, limits, device)
    tokens = int(starts[-1])
    if batch.padded_tokens is not None:
        checks.integer("padded_tokens", batch.padded_tokens, low=tokens, high=limits.max_tokens)
    if batch.prefilling is not None:
        count = len(checks.sequence("prefilling", batch.prefilling))
        if count != len(queries):
            raise checks.refuse("prefilling", f"{len(queries)} flags, one per request", count)
    rows = tokens if batch.padded_tokens is None else batch.padded_tokens
    # The block table may be narrower than the longest length if the host knows only upper bounds, or if ranks share the
    # pages of a request.
    bounded = batch.host_lengths is not None or limits.context_parallel
    step = _Step(len(queries), tokens, rows, 0 if bounded else int(lengths.max(initial=0)), device)
    for name, pages in _pools(batch, limits).items():
        _check_pages(name or "pages", pages, buffers[name], step)
    return HostLengths(starts, queries, lengths)


def check_starts(starts: INT, queries: INT, limits: Limits) -> None:
    """Refuse query starts that are not a running sum from 0 of these lengths, or that exceed the limits."""
    if not len(starts) or starts[0] != 0 or queries.min(initial=0) < 0:
        raise checks.refuse("query_starts", "a running sum from 0", starts.tolist(), "begin it with 0")
    tokens, requests = int(starts[-1]), len(queries)
    if tokens > limits.max_tokens:
        expected = f"of at most max_tokens={limits.max_tokens} tokens"
        raise checks.refuse("query_starts", expected, tokens, "raise the limit")
    if requests > limits.max_requests:
        expected = f"of at most max_requests={limits.max_requests} requests"
        raise checks.refuse("query_starts", expected, requests, "raise the limit")


def _check_lengths(batch: Batch, queries: INT, limits: Limits, device: torch.device) -> INT:
    requests = len(queries)
    checks.tensor("lengths", batch.lengths, "B", (torch.int32,), B=requests, remedy="pass one per request")
    lengths = batch.lengths if batch.host_lengths is None else batch.host_lengths
    if not isinstance(lengths, Tensor) or lengths.device != _HOST:
        raise checks.refuse("host_lengths", "given when lengths are on a device", None, "pass a host copy or bound")
    _check_device("lengths", batch.lengths, device)
    checks.tensor("host_lengths", lengths, "B", (torch.int32,), B=requests, remedy="pass one per request")
    checks.values_between("lengths", lengths, 0, limits.max_length, "raise Limits.max_length")
    found = lengths.numpy()
    short = queries > found
    if short.any():
        at = int(short.argmax())
        expected = f"at least its {queries[at]} new tokens"
        raise checks.refuse(f"lengths[{at}]", expected, found[at], "lengths include the new tokens")
    return found


def _pools(batch: Batch, limits: Limits) -> dict[str, PageMap]:
    others = batch.other_pages
    if not isinstance(others, Mapping):
        raise checks.refuse_type("other_pages", "a dictionary", checks.describe(others), "name each pool")
    if set(others) - set(limits.other_page_sizes):
        names = ", ".join(limits.other_page_sizes) or "none"
        raise checks.refuse("other_pages", f"among {names}", list(others), "name them in Limits")
    return {"": batch.pages, **others}


def _check_pages(name: str, pages: PageMap, held: PageBuffers, step: _Step) -> None:
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
