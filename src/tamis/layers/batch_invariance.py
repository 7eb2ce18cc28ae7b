"""The fixed number of splits that layers use in batch-invariant mode."""

from tamis.arithmetic import ceil_div

FIXED_COLUMNS = 512
"""Columns per split: few enough to fill a GPU with a handful of requests at top-k 2048."""


def fixed_splits(columns: int) -> int:
    """The number of splits of a row, which does not depend on the rest of the batch."""
    return ceil_div(columns, FIXED_COLUMNS)
