"""Training: gradients for sparse latent attention, for its indexer and for V4's compressor.

Functions of tensors, for any training loop. Rows are tensors here and not pages of a cache; everything else means what
it means in inference: slots, -1, lse, ties. `import tamis` does not load this package.
"""

from tamis.cache.selection import Rows
from tamis.train.attention import attend_rows, index_target, normalise_target
from tamis.train.compressor import compress_rows
from tamis.train.indexer import index_loss, select_rows, warmup_loss
from tamis.train.pack import Entries, Pack
from tamis.train.quantise import fake_quantise

__all__ = [
    "Entries",
    "Pack",
    "Rows",
    "attend_rows",
    "compress_rows",
    "fake_quantise",
    "index_loss",
    "index_target",
    "normalise_target",
    "select_rows",
    "warmup_loss",
]
