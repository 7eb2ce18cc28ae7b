"""The operations of stage `index` that select in two levels: first blocks of positions, then positions in these blocks.

The layer that selects the blocks scores all positions anyway (`IndexTopkAndBlocks`). Later layers score only positions
in them (`IndexTopkWithin`).
"""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.index.operations import IndexTopk
from tamis.ops.library import Operation, Written


class IndexTopkAndBlocks(NamedTuple):
    """The k best positions of each token, and its best blocks of positions."""

    q: Tensor
    """[T, H, D] in bf16, fp16, fp32, or e4m3 with its scale folded into the weights."""
    weights: Tensor
    """bf16, fp16 or fp32 [T, H]."""
    cache: PagedCache
    """Index keys in `index-fp8`, `index-mxfp4` or unquantised rows, D wide."""
    request_ids: Tensor
    """int32 [T], the block-table row of each token."""
    block_table: Tensor
    """int32 [B, W], negative where a page is absent."""
    lengths: Tensor
    """int32 [T], how many leading positions a token sees."""
    k: int
    """How many positions to select, 1 to 4096."""
    block_size: int
    """Positions per block."""
    workspace_bytes: int
    """The memory that scores and other intermediate results may take, unless one token needs more."""
    batch: int
    """As in `IndexTopk`."""
    out: Written[Tensor]
    """int32 [T, k], contiguous. Every element is written: positions in ascending order, then -1."""
    blocks: Written[Tensor]
    """int32 [T, N], contiguous. Every element is written: blocks in ascending order, then -1."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("q", "weights")

    def fake(self) -> None:
        """The positions go to `out`, the blocks to `blocks`."""

    @property
    def topk(self) -> IndexTopk:
        """The call that selects the positions alone."""
        numbers = (self.k, self.workspace_bytes, self.batch)
        return IndexTopk(*self[:6], *numbers, self.out, None, self.backend)


class IndexTopkWithin(NamedTuple):
    """The k best positions of each token in its candidate blocks."""

    q: Tensor
    """[T, H, D] in bf16, fp16, fp32, or e4m3 with its scale folded into the weights."""
    weights: Tensor
    """bf16, fp16 or fp32 [T, H]."""
    cache: PagedCache
    """Index keys in `index-fp8`, `index-mxfp4` or unquantised rows, D wide."""
    request_ids: Tensor
    """int32 [T], the block-table row of each token."""
    block_table: Tensor
    """int32 [B, W], negative where a page is absent."""
    lengths: Tensor
    """int32 [T], how many leading positions a token sees."""
    candidates: Tensor
    """int32 [T, N], the blocks of each token in ascending order, without repetitions; negative ones are skipped."""
    k: int
    """How many positions to select, 1 to 4096."""
    block_size: int
    """Positions per block."""
    workspace_bytes: int
    """The memory that scores and other intermediate results may take, unless one token needs more."""
    out: Written[Tensor]
    """int32 [T, k], contiguous. Every element is written: positions in ascending order, then -1."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("q", "weights")

    def fake(self) -> None:
        """The positions go to `out`."""

    @property
    def topk(self) -> IndexTopk:
        """The call that selects from all positions."""
        return IndexTopk(*self[:6], self.k, self.workspace_bytes, self.q.shape[0], self.out, None, self.backend)

    def chunks(self, tokens: int) -> Iterator["IndexTopkWithin"]:
        """This call divided into calls of at most `tokens` tokens each (at least one)."""
        for some, part in self.topk.chunks(tokens):
            yield self._replace(
                q=part.q,
                weights=part.weights,
                request_ids=part.request_ids,
                lengths=part.lengths,
                candidates=self.candidates[some],
                out=part.out,
            )


index_topk_and_blocks = Operation("index", IndexTopkAndBlocks, IndexTopkAndBlocks.fake)
index_topk_within = Operation("index", IndexTopkWithin, IndexTopkWithin.fake)
