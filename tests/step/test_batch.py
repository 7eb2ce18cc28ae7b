"""Batches from their shape."""

import pytest

from tamis import Batch, PagePool
from tamis.step.batch import parse_shape


def test_shape_grammar() -> None:
    assert parse_shape("32q1s1k_2q1k") == ([1] * 32 + [1024] * 2, [1024] * 34)
    assert parse_shape("q5s7") == ([5], [7])
    with pytest.raises(ValueError, match="shape must be groups like"):
        parse_shape("32x1")
    with pytest.raises(ValueError, match="totals that include"):
        parse_shape("q5s3")
    batch = Batch.parse("2q1s20_q10", PagePool(20, 16))
    assert batch.lengths.tolist() == [20, 20, 10]
