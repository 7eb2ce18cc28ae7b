"""What a step's metadata is (`Plan`), and how large a step may be (`Limits`)."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor
from torch.compiler import is_compiling

from tamis import checks
from tamis.step.batch import PageMap
from tamis.step.lease import Use
from tamis.step.split import BatchSplit, decode_threshold

Mode = Literal["auto", "mixed", "separate"]


@dataclass(frozen=True)
class Limits:
    """The largest step a planner must hold, and how it cuts batches."""

    max_tokens: int
    """New tokens per step, graph padding included."""
    max_requests: int
    max_length: int
    """Tokens per request."""
    page_size: int = 64
    other_page_sizes: Mapping[str, int] = field(default_factory=dict)
    """Page sizes of further pools, by the names that batches use."""
    speculative_tokens: int = 0
    parallel_drafting: bool = False
    base_threshold: int = 1
    """Longest query that counts as decode, before speculative tokens raise it."""
    context_parallel: bool = False
    uniform_decodes: bool = True
    """Decodes must share one query length, so that they can be shaped [requests, query length]."""
    workspace_rows: int | None = None
    """Rows that gathered prefills may take at once; 5 x max_length if not given."""

    def __post_init__(self) -> None:
        """Refuse impossible limits."""
        for name in ("parallel_drafting", "context_parallel", "uniform_decodes"):
            checks.flag(name, getattr(self, name))
        checks.integer("speculative_tokens", self.speculative_tokens, low=0)
        checks.integer("base_threshold", self.base_threshold, low=1)
        if not isinstance(self.other_page_sizes, Mapping):
            received = checks.describe(self.other_page_sizes)
            raise checks.refuse_type("other_page_sizes", "a dictionary of page sizes", received, "name each pool")
        for name in ("max_tokens", "max_requests", "max_length", "page_size"):
            checks.integer(name, getattr(self, name), low=1)
        for name, size in self.other_page_sizes.items():
            if not isinstance(name, str) or not name:
                raise checks.refuse("other_page_sizes", "by names that are not empty", repr(name), "name the pool")
            checks.integer(f"other_page_sizes[{name!r}]", size, low=1)
        if self.workspace_rows is not None:
            checks.integer("workspace_rows", self.workspace_rows, low=1)

    @property
    def threshold(self) -> int:
        """Longest query that counts as decode."""
        return decode_threshold(
            self.base_threshold,
            speculative_tokens=self.speculative_tokens,
            parallel_drafting=self.parallel_drafting,
            context_parallel=self.context_parallel,
        )


@dataclass(frozen=True, eq=False)
class DecodePart:
    """The decode tokens, which come first."""

    requests: int
    """Requests with at least one token; graph padding is not counted."""
    tokens: int
    query_length: int | None
    """Tokens of every request, where they are uniform."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Prefill requests that share the workspace for one gather and one attention call."""

    requests: slice
    """Rows of the batch's block table."""
    tokens: slice
    """Rows of the query."""
    rows: int
    """Workspace rows in use."""
    block_table: Tensor
    lengths: Tensor
    starts: Tensor
    """First workspace row of each request, from 0."""


@dataclass(frozen=True, eq=False)
class PrefillPart:
    """The prefill tokens, which follow the decode tokens."""

    requests: int
    tokens: int
    ids: Tensor
    """int32 [tokens of the step]: -1 for decode tokens, else the number of the prefill."""
    starts: Tensor
    """int32 [requests]: first workspace row, from 0 in each chunk."""
    lengths: Tensor
    chunks: tuple[Chunk, ...]
    """Empty in mixed mode, where prefills read the cache directly."""


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything about a step that is the same in all layers. Tensors are views of the planner's buffers."""

    requests: int
    tokens: int
    """New tokens, without padding."""
    rows: int
    """Token rows that the step runs, with padding."""
    max_query: int
    max_length: int
    page_size: int
    topk: int | None
    mode: Literal["mixed", "separate"]
    query_starts: Tensor
    """int32 [requests + 1]"""
    lengths: Tensor
    """int32 [requests]"""
    request_ids: Tensor
    """int32 [rows]; 0 for padding, so that it names a legal row."""
    positions: Tensor
    """int32 [rows], absolute position of each token in its request; -1 for padding."""
    slots: Tensor
    """int64 [rows]; -1 for padding."""
    block_table: Tensor
    """int32 [requests, pages]; -1 for absent pages."""
    split: BatchSplit
    decode: DecodePart | None
    prefill: PrefillPart | None
    workspace: Tensor | None
    """[workspace rows, width] bf16 for gathered prefills, in separate mode."""
    other_pages: Mapping[str, PageMap]
    use: Use
    """Knows whether this is still the planner's latest plan; see `using`."""

    def using(self) -> AbstractContextManager[None]:
        """The block in which something runs on this plan: refused if the planner has made another one since, and the
        planner refuses to make one inside of it. Blocks may be nested.

        While torch.compile traces, and so in compiled code, nothing is looked at: a number that changes with every
        step would be a new graph for every step. Threads are told apart by what they do, not by the stream they do it
        on: work queued on a device belongs on one stream per planner.
        """
        return nullcontext() if is_compiling() else self.use
