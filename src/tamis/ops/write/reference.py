"""Quantises rows and inserts them into a cache, in plain torch."""

import torch

from tamis.cache.codec import write_rows
from tamis.ops.write.operations import WriteKv


def write_kv(call: WriteKv) -> None:
    """Insert rows; negative slots are skipped, and of rows with the same slot the last is written."""
    kv = call.kv if call.rope is None else torch.cat((call.kv, call.rope), dim=1)
    write_rows(kv, call.cache, call.slots)
