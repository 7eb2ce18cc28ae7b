"""Block tables of requests, and arguments that gathering refuses."""

from collections.abc import Sequence

import torch
from seeds import seeded
from torch import Tensor

from tamis import PagedCache
from tamis.arithmetic import ceil_div

INT_MAX = 2**31 - 1


def tables(cache: PagedCache, ends: Sequence[int], *, width: int, unused: int = -1) -> Tensor:
    """Block tables with pages handed out in random order; entries past a request's end hold `unused`."""
    pages = iter(torch.randperm(cache.pages, generator=seeded(0)).tolist())
    table = torch.full((len(ends), width), unused, dtype=torch.int32)
    for row, end in zip(table, ends, strict=True):
        for column in range(ceil_div(end, cache.page_size)):
            row[column] = next(pages)
    return table


def int32(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def slot_of(cache: PagedCache, table: Tensor, request: int, position: int) -> int:
    return int(table[request, position // cache.page_size]) * cache.page_size + position % cache.page_size


TABLE, TWO = torch.zeros(2, 3, dtype=torch.int32), int32([2, 3])
REQUESTS = [
    ({"block_table": TABLE.long()}, TypeError, "block_table must be int32, got int64; convert it"),
    ({"block_table": TABLE[0]}, ValueError, r"block_table must be of shape \[B, W\], got \[3\]; "),
    ({"block_table": [[0]]}, TypeError, r"block_table must be a tensor \[B, W\], got list; "),
    ({"block_table": TABLE.to("meta")}, ValueError, "block_table must be on cpu, got a tensor on meta; "),
    ({"lengths": TWO.long()}, TypeError, "lengths must be int32, got int64; "),
    ({"lengths": int32([1, 2, 3])}, ValueError, r"lengths must be of shape \[B=2\], got \[3\]; pass one length"),
    ({"lengths": int32([1, -2])}, ValueError, "lengths must be between 0 and 12, got a value of -2; "),
    ({"lengths": int32([1, 13])}, ValueError, "lengths must be between 0 and 12, got a value of 13; the block table"),
    ({"first": TWO.float()}, TypeError, "first must be int32, got float32; "),
    ({"first": int32([1])}, ValueError, r"first must be of shape \[B=2\], got \[1\]; "),
    ({"first": int32([0, -1])}, ValueError, "first must be between 0 and 12, got a value of -1; "),
    ({"first": int32([0, 10])}, ValueError, r"first \+ lengths must be between 0 and 12, got a value of 13; "),
    ({"starts": TWO.long()}, TypeError, "starts must be int32, got int64; "),
    ({"starts": int32([0, 2, 4])}, ValueError, r"starts must be of shape \[B=2\], got \[3\]; "),
    ({"starts": int32([0, 1])}, ValueError, r"starts must be ascending, .*, got \[0, 1\]; use a running sum"),
    ({"starts": int32([3, 0])}, ValueError, r"starts must be ascending, .*, got \[3, 0\]; use a running sum"),
    ({"starts": int32([-2, 0])}, ValueError, "starts must be between 0 and .*, got a value of -2; "),
    ({"starts": int32([INT_MAX, 0])}, ValueError, "starts must be ascending, .*; use a running sum"),
    ({"backend": "cuda"}, ValueError, "backend must be 'auto' or one of .*, got 'cuda'; "),
]
"""Changes of two requests over a table of 12 positions, with the errors that they cause."""
