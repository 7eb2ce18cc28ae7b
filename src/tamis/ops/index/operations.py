"""The operations of stage `index`; see `tamis.ops.library`."""

from typing import NamedTuple

import torch
from torch import Tensor

from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.model.recipe import IndexRecipe
from tamis.ops.library import Operation, Written


class IndexScores(NamedTuple):
    """Scores of the cached keys of each token's request."""

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
    out: Written[Tensor]
    """float32 [T, width], rows contiguous. Every element is written, -inf where there is nothing to see."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("q", "weights")

    def fake(self) -> None:
        """The scores go to `out`."""


class RaggedScores(NamedTuple):
    """Scores of gathered keys."""

    q: Tensor
    """[T, H, D] in bf16, fp16, fp32, or e4m3 with its scale folded into the weights."""
    weights: Tensor
    """bf16, fp16 or fp32 [T, H]."""
    keys: Tensor
    """[N, D] in e4m3, bf16, fp16 or fp32, or e2m1 pairs, uint8 [N, D / 2]."""
    key_scales: Tensor | None
    """float32 [N], or for e2m1 pairs exponents uint8 [N, D / 32]; None if all are 1."""
    starts: Tensor
    """int32 [T], the first key that a token sees."""
    ends: Tensor
    """int32 [T], one past the last."""
    out: Written[Tensor]
    """float32 [T, N], rows contiguous. Every element is written, -inf where there is nothing to see."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("q", "weights", "keys", "key_scales")

    def fake(self) -> None:
        """The scores go to `out`."""


class TopkPositions(NamedTuple):
    """The k best positions of each row of scores, or their slots."""

    scores: Tensor
    """float32 [T, S]"""
    lengths: Tensor
    """int32 [T], how many leading columns of a row count."""
    k: int
    """How many positions to select, 1 to 4096."""
    request_ids: Tensor | None
    """int32 [T]; given with the block table and the page size, or not at all."""
    block_table: Tensor | None
    """int32 [B, W], page ids; negative for absent pages."""
    page_size: int | None
    """Positions per page."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("scores",)

    def fake(self) -> Tensor:
        """Positions or slots, int32 [T, k]."""
        return self.scores.new_empty((self.scores.shape[0], self.k), dtype=torch.int32)


class IndexTopk(NamedTuple):
    """The k best positions of each token, without scores of the whole batch in memory at once."""

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
    workspace_bytes: int
    """The memory that scores and other intermediate results may take, unless one token needs more."""
    batch: int
    """Tokens of the batch that these are a part of. What decides on an order of summation looks at this, so that a part
    has the bits of the whole."""
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
    def read(self) -> tuple[Tensor, ...]:
        """All tensors with which `out` must not share memory."""
        return (self.q, self.weights, self.cache.storage, self.request_ids, self.block_table, self.lengths)

    def scoring(self, out: Tensor) -> IndexScores:
        """The call that writes these tokens' scores to `out`."""
        paged = (self.cache, self.request_ids, self.block_table, self.lengths)
        return IndexScores(self.q, self.weights, *paged, out, self.backend)

    def chunks(self, tokens: int) -> list[tuple[slice, "IndexTopk"]]:
        """This call divided into calls of at most `tokens` tokens each (at least one), with the tokens of each."""
        total, step = self.q.shape[0], max(1, tokens)
        if 0 < total <= step:
            # No slices are made here, because four of them take about as much host time as a launch.
            return [(slice(0, total), self)]
        slices = [slice(at, min(at + step, total)) for at in range(0, total, step)]
        return [(some, self._chunk(some)) for some in slices]

    def _chunk(self, some: slice) -> "IndexTopk":
        q, weights, ids = self.q[some], self.weights[some], self.request_ids[some]
        return self._replace(q=q, weights=weights, request_ids=ids, lengths=self.lengths[some], out=self.out[some])


class QuantiseIndexQuery(NamedTuple):
    """Index queries rotated and quantised to e4m3, their scales folded into the weights."""

    q: Tensor
    """[T, H, D] in bf16, fp16 or fp32."""
    weights: Tensor
    """bf16, fp16 or fp32 [T, H]."""
    positions: Tensor | None
    """int32 or int64 [T]; None if the rope has been applied to q already."""
    cos_sin: Tensor | None
    """float32 [max_positions, rope_dim], given with the positions."""
    recipe: IndexRecipe
    """The rotations to apply to q."""
    layout: Layout
    """The row format in which queries are encoded, with one scale per row."""
    scale: float
    """The constant factor of all weights."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("q", "weights", "cos_sin")

    def fake(self) -> tuple[Tensor, Tensor]:
        """Queries e4m3 [T, H, D] and weights float32 [T, H]."""
        values = self.q.new_empty(self.q.shape, dtype=torch.float8_e4m3fn)
        return values, self.q.new_empty(self.weights.shape, dtype=torch.float32)


class WriteIndexKeys(NamedTuple):
    """Index keys normed, rotated, encoded and inserted at their slots."""

    keys: Tensor
    """[T, D] in bf16, fp16 or fp32."""
    cache: Written[PagedCache]
    """Index keys in `index-fp8`, `index-mxfp4` or unquantised rows, D wide."""
    slots: Tensor
    """int32 or int64 [T'] with T' <= T; keys past T' and those with a negative slot are skipped."""
    norm_weight: Tensor | None
    """bf16, fp16 or fp32 [D], the weight of the LayerNorm; None if keys have been normalised already."""
    norm_bias: Tensor | None
    """bf16, fp16 or fp32 [D], only with a weight."""
    norm_eps: float
    """Epsilon of the LayerNorm."""
    positions: Tensor | None
    """int32 or int64 [T]; None if the rope has been applied to the keys already."""
    cos_sin: Tensor | None
    """float32 [max_positions, rope_dim], given with the positions."""
    recipe: IndexRecipe
    """The rotations to apply to the keys."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return ("keys", "norm_weight", "norm_bias", "cos_sin")

    def fake(self) -> None:
        """The keys go to the cache."""


index_scores = Operation("index", IndexScores, IndexScores.fake)
ragged_scores = Operation("index", RaggedScores, RaggedScores.fake)
topk_positions = Operation("index", TopkPositions, TopkPositions.fake)
index_topk = Operation("index", IndexTopk, IndexTopk.fake)
quantise_index_query = Operation("index", QuantiseIndexQuery, QuantiseIndexQuery.fake)
write_index_keys = Operation("index", WriteIndexKeys, WriteIndexKeys.fake)
