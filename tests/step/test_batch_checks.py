"""What a planner refuses to plan."""

import pytest
import torch
from step.test_planner import make_batch, make_planner

from tamis import PageMap


def spoiled(**fields):
    return lambda: make_batch([1, 5], [10, 20], **fields)


def bad_pages(**fields):
    good = make_batch([1, 5], [10, 20]).pages
    return PageMap(**({"block_table": good.block_table, "slots": good.slots} | fields))


INT = {"dtype": torch.int32}
BAD = {
    "starts dtype": (spoiled(query_starts=torch.tensor([0, 1, 6])), TypeError, "query_starts must be int32, got int64"),
    "starts begin": (spoiled(query_starts=torch.tensor([1, 2, 6], **INT)), ValueError, "a running sum from 0"),
    "starts fall": (spoiled(query_starts=torch.tensor([0, 6, 1], **INT)), ValueError, "a running sum from 0"),
    "starts rank": (spoiled(query_starts=torch.zeros(2, 2, **INT)), ValueError, "query_starts must be of shape"),
    "too many tokens": (lambda: make_batch([65], [100]), ValueError, "of at most max_tokens=64 tokens, got 65"),
    "too many requests": (lambda: make_batch([1] * 9, [9] * 9), ValueError, "at most max_requests=8 requests, got 9"),
    "too long": (lambda: make_batch([1], [201]), ValueError, "lengths must be between 0 and 200, got a value of 201"),
    "negative": (spoiled(lengths=torch.tensor([-1, 20], **INT)), ValueError, "got a value of -1"),
    "short": (spoiled(lengths=torch.tensor([1, 4], **INT)), ValueError, r"lengths\[1\] must be at least its 5 new"),
    "lengths count": (spoiled(lengths=torch.tensor([10], **INT)), ValueError, "lengths must be of shape .*one per"),
    "device lengths": (
        spoiled(lengths=torch.zeros(2, device="meta", **INT)),
        ValueError,
        "host_lengths must be given when lengths are on a device",
    ),
    "past a bound": (
        spoiled(host_lengths=torch.tensor([9, 20], **INT)),
        ValueError,
        r"lengths\[0\] must be at most host_lengths\[0\]=9, got 10",
    ),
    "padding": (spoiled(padded_tokens=5), ValueError, "padded_tokens must be between 6 and 64, got 5"),
    "prefilling": (spoiled(prefilling=[True]), ValueError, "prefilling must be 2 flags, one per request, got 1"),
    "table rows": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(block_table=torch.zeros(3, 2, **INT))),
        ValueError,
        "pages.block_table must be of shape",
    ),
    "table width": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(block_table=torch.zeros(2, 14, **INT))),
        ValueError,
        "at most 13 pages wide, got 14",
    ),
    "slots count": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(slots=torch.zeros(5, **INT))),
        ValueError,
        "pages.slots must be of 6 to 6 values, got 5",
    ),
    "too many slots": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(slots=torch.zeros(9, **INT)), padded_tokens=8),
        ValueError,
        "pages.slots must be of 6 to 8 values, got 9",
    ),
    "slots dtype": (
        lambda: make_batch([1, 5], [10, 20], pages=bad_pages(slots=torch.zeros(6))),
        TypeError,
        "pages.slots must be int32 or int64, got float32",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_batches_are_refused_with_a_remedy(case: str) -> None:
    make, kind, message = BAD[case]
    with pytest.raises(kind, match=message):
        make_planner().plan(make())
