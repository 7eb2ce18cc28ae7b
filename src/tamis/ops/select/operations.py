"""The operations of stage `select`; see `tamis.ops.library`.

T tokens of a step, B requests, W pages of each request, G requests whose rows were gathered. Position p of a request is
in page `block_table[request, p // page_size]`; a negative page id means that the page is absent. Operations return
nothing: they write every column of their buffers.
"""

from typing import NamedTuple

from torch import Tensor

from tamis.ops.library import Operation, Written

MOST_COLUMNS = 2**31 - 1
"""The limit of `lengths` where neither `columns` nor `every` gives one."""


class SelectWindow(NamedTuple):
    """Slots of the raw tokens in each token's window, oldest first."""

    positions: Tensor
    """int32 [T], the position of each token in its request; negative for padding, which selects nothing."""
    request_ids: Tensor
    """int32 [T], the block-table row of each token; one outside 0..B-1 selects nothing."""
    block_table: Tensor
    """int32 [B, W], pages of raw tokens."""
    own: Tensor | None
    """int32 or int64 [T], the slot that each token's own row is written to; negative: the token selects nothing."""
    contexts: Tensor | None
    """int32 [B], given with `ends` for draft blocks: every token of request b sees `window` tokens before
    `contexts[b]` and all tokens from there up to `ends[b]`."""
    ends: Tensor | None
    """int32 [B], one past the last token that request b sees; see `contexts`."""
    page_size: int
    """Raw tokens per page."""
    window: int
    """Raw tokens that a token sees, itself included."""
    slots: Written[Tensor]
    """int32 [T, C], C >= window: slots of the window, -1 beyond."""
    lengths: Written[Tensor]
    """int32 [T], how many slots each row has."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> None:
        """Nothing is returned."""


class SelectEntries(NamedTuple):
    """The compressed entry that each token completes, the number of entries that it sees, and their slots."""

    positions: Tensor
    """int32 [T], as in `SelectWindow`."""
    request_ids: Tensor
    """int32 [T], as in `SelectWindow`."""
    block_table: Tensor
    """int32 [B, W], pages of entries."""
    own: Tensor | None
    """int32 or int64 [T], the slot that each token's own row is written to; negative: the token selects nothing."""
    ratio: int
    """Tokens per entry. Entry j is complete from position `j * ratio + ratio - 1` on."""
    page_size: int
    """Entries per page."""
    columns: int | None
    """Upper limit of `lengths`; None for the width of `every`, or no limit without `every`."""
    local_from: int | None
    """Tokens from this one on get entry numbers instead of slots in `every`; None if no token does."""
    completed: Written[Tensor | None]
    """int64 [T], the slot of the entry that the token completes, -1 if it completes none."""
    visible: Written[Tensor | None]
    """int32 [T], how many entries are complete at the token's position."""
    lengths: Written[Tensor | None]
    """int32 [T], `visible` limited to `columns`."""
    every: Written[Tensor | None]
    """int32 [T, C], slots of entries 0, 1, 2..., -1 beyond the visible ones."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def limit(self) -> int:
        """The upper limit of `lengths`."""
        if self.columns is not None:
            return self.columns
        return MOST_COLUMNS if self.every is None else self.every.shape[1]

    @property
    def first_local(self) -> int:
        """The first token whose row of `every` holds entry numbers."""
        return self.positions.shape[0] if self.local_from is None else self.local_from

    def fake(self) -> None:
        """Nothing is returned."""


class SelectChosen(NamedTuple):
    """Slots of the entries that an indexer chose."""

    chosen: Tensor
    """int32 [T, K], entry numbers within the request; negative ones are skipped."""
    request_ids: Tensor
    """int32 [T], as in `SelectWindow`."""
    block_table: Tensor
    """int32 [B, W], pages of entries."""
    own: Tensor | None
    """int32 or int64 [T], the slot that each token's own row is written to; negative: the token selects nothing."""
    page_size: int
    """Entries per page."""
    slots: Written[Tensor]
    """int32 [T, K], valid slots first, -1 beyond."""
    lengths: Written[Tensor]
    """int32 [T], how many slots are valid."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> None:
        """Nothing is returned."""


class SelectGathered(NamedTuple):
    """Workspace rows of the entries and of the window of tokens whose requests were gathered.

    Request g of the group has its entries in workspace rows `g * rows`, `g * rows + 1`... and its raw tokens from
    position `first[g]` on in rows `g * rows + entries`, and so on.
    """

    positions: Tensor
    """int32 [T], as in `SelectWindow`."""
    request_ids: Tensor
    """int32 [T], counted from `first_request`; one outside the group selects nothing."""
    first: Tensor
    """int32 [G], position of the first raw token that was gathered."""
    chosen: Tensor | None
    """int32 [T, columns], left-packed entry numbers; None selects all entries."""
    first_request: int
    """Number of the group's first request."""
    ratio: int
    """Tokens per entry."""
    window: int
    """Raw tokens that a token sees, itself included."""
    entries: int
    """Workspace rows reserved for entries, per request."""
    rows: int
    """Workspace rows per request."""
    columns: int
    """The most entries that a token sees."""
    slots: Written[Tensor]
    """int32 [T, C], C >= columns + window: rows of the entries, then rows of the window, -1 beyond."""
    lengths: Written[Tensor]
    """int32 [T], how many rows each token has."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> None:
        """Nothing is returned."""


class SelectGroups(NamedTuple):
    """Positions of the tokens of the groups that an indexer chose, and of the last tokens, which have no group yet.

    Group j of a request has the tokens j * size to j * size + size - 1. A token that sees n tokens sees n // size whole
    groups and a tail of n % size tokens.
    """

    chosen: Tensor
    """int32 [T, K], numbers of groups within the request; those that a token does not see whole are skipped."""
    visible: Tensor
    """int32 [T], how many tokens of its request a token sees, itself included; 0 for padding, which selects nothing."""
    size: int
    """Tokens per group."""
    positions: Written[Tensor]
    """int32 [T, C], C >= K * size + size - 1: tokens of the groups, then the tail, -1 beyond."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    def fake(self) -> None:
        """Nothing is returned."""


select_window = Operation("select", SelectWindow, SelectWindow.fake)
select_entries = Operation("select", SelectEntries, SelectEntries.fake)
select_chosen = Operation("select", SelectChosen, SelectChosen.fake)
select_gathered = Operation("select", SelectGathered, SelectGathered.fake)
select_groups = Operation("select", SelectGroups, SelectGroups.fake)
