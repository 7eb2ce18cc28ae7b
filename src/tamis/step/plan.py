"""`Plan`: the metadata of one step. `Limits`: how large a step may be."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from torch import Tensor
from torch.compiler import is_compiling

from tamis import checks
from tamis.ops import memory
from tamis.step.batch import PageMap
from tamis.step.lease import Use
from tamis.step.split import BatchSplit, decode_threshold

Mode = Literal["auto", "mixed", "separate"]


@dataclass(frozen=True)
class Limits:
    """The largest step that a planner allocates buffers for, and how it splits batches."""

    max_tokens: int
    """New tokens per step, with the padding of captured graphs."""
    max_requests: int
    max_length: int
    """Tokens per request, context and new ones."""
    page_size: int = 64
    other_page_sizes: Mapping[str, int] = field(default_factory=dict)
    """Page sizes of further pools, by their names in `Batch.other_pages`."""
    speculative_tokens: int = 0
    """Draft tokens that a decode verifies besides its own."""
    parallel_drafting: bool = False
    """Whether drafts are made in parallel. A decode then has twice as many draft tokens."""
    base_threshold: int = 1
    """The longest query that counts as decode, unless speculative tokens raise it."""
    context_parallel: bool = False
    """Whether ranks share the rows of each request."""
    uniform_decodes: bool = True
    """Whether all decodes must have the same query length, so that they can be shaped [requests, query length]."""
    workspace_rows: int | None = None
    """Rows of the workspace for gathered prefills; 5 * max_length if not given."""

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
        """The longest query that counts as decode."""
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
    """Requests with at least one token, so without the padding of captured graphs."""
    tokens: int
    query_length: int | None
    """Tokens of each request, if all have the same number."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """Prefill requests that share the workspace in one gather and one attention call."""

    requests: slice
    """Their rows in the plan's block table."""
    tokens: slice
    """Their rows in the query."""
    rows: int
    """Workspace rows that they fill."""
    block_table: Tensor
    """int32 [requests, pages]"""
    lengths: Tensor
    """int32 [requests]: workspace rows of each request, one per token."""
    starts: Tensor
    """int32 [requests]: first workspace row of each request, from 0."""


@dataclass(frozen=True, eq=False)
class PrefillPart:
    """The prefill tokens, which follow the decode tokens."""

    requests: int
    tokens: int
    ids: Tensor
    """int32 [rows of the step]: the number of the token's prefill, -1 for decode tokens and padding."""
    starts: Tensor
    """int32 [requests]: first workspace row of each request, from 0 in each chunk."""
    lengths: Tensor
    """int32 [requests]: context plus new tokens."""
    chunks: tuple[Chunk, ...]
    """Empty in mixed mode, where prefills read the cache directly."""


@dataclass(frozen=True, eq=False)
class GroupPlan:
    """Groups of tokens that have one pooled index key each. Group j of a request has its tokens j * size to
    j * size + size - 1."""

    size: int
    """Tokens per group."""
    slots: Tensor
    """int64 [rows]: the slot of the pooled key that this token completes; -1 for tokens that complete none."""
    visible: Tensor
    """int32 [rows]: the number of groups that are complete at this token; 0 for padding. The indexer scores these."""
    state: PageMap
    """Block table of the pool with the keys and gates of single tokens, and int64 [rows] slots for the step's."""
    state_page_size: int
    """Tokens per page of that pool."""


@dataclass(frozen=True, eq=False)
class Plan:
    """The metadata of one step, which all layers share. Tensors are views of the planner's buffers."""

    requests: int
    tokens: int
    """New tokens, without padding."""
    rows: int
    """Token rows, with padding."""
    max_query: int
    """The most new tokens of a request."""
    max_length: int
    """The most tokens of a request, context and new ones."""
    page_size: int
    topk: int | None
    mode: Literal["mixed", "separate"]
    query_starts: Tensor
    """int32 [requests + 1]: running sum of the new tokens."""
    lengths: Tensor
    """int32 [requests]: context plus new tokens."""
    request_ids: Tensor
    """int32 [rows]: the block-table row of each token; 0 for padding, which is a row that exists."""
    positions: Tensor
    """int32 [rows]: the position of each token in its request; -1 for padding."""
    visible: Tensor
    """int32 [rows]: how many tokens of its request each token sees, which is its position + 1; 0 for padding."""
    slots: Tensor
    """int64 [rows]: the slot of each token in the main pool; -1 for padding."""
    block_table: Tensor
    """int32 [requests, pages]; -1 for absent pages."""
    split: BatchSplit
    decode: DecodePart | None
    prefill: PrefillPart | None
    workspace: Tensor | None
    """bf16 [workspace rows, width] for gathered prefills; None in mixed mode."""
    other_pages: Mapping[str, PageMap]
    """Block tables and slots of the further pools, by name."""
    use: Use
    """Knows whether this is still the planner's latest plan; see `using`."""
    groups: GroupPlan | None = None
    """The groups of layers with pooled index keys; None if the planner's layers have none."""

    @cached_property
    def signature(self) -> memory.Signature:
        """What a layer call depends on of its plan. Computed once for all layers of a step."""
        tensors = (self.slots, self.positions, self.visible, self.request_ids, self.block_table)
        return (self.rows, self.page_size, self.topk, self.mode, *map(memory.sign, tensors))

    def using(self) -> AbstractContextManager[None]:
        """The block in which a layer runs on this plan. Blocks may be nested.

        Entering it is refused if the planner has made another plan since, and inside of it the planner refuses to plan.
        The lease sees only the host: work that is queued on a device must stay on one stream per planner. Compiled
        code checks nothing, since torch.compile would make a new graph for each new number of a plan.
        """
        return nullcontext() if is_compiling() else self.use
