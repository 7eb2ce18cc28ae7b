"""Context parallelism: how vLLM divides requests among ranks, and prefills that attend to the rows of all ranks.

Decode context parallelism divides the cached rows of every request. Each rank attends to its own rows, and vLLM merges
the ranks' results by their lse. Prefill context parallelism divides the new tokens of prompts. With both, ranks differ
in their tokens and in their rows, so there is nothing to merge: before prefills attend, the pages of all ranks are
gathered.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div, round_up
from tamis.cache.layout import Layout
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.layers.mla_checks import Call
from tamis.ops.attention.operations import attend
from tamis.ops.translate.operations import TranslatePositions
from tamis.step.buffers import staged
from tamis.step.plan import Limits
from tamis.step.split import INT, chunk_starts, pack_chunks


@dataclass(frozen=True)
class Ranks:
    """The division of requests among ranks."""

    decode: int = 1
    """Ranks that share the cached rows of each request."""
    prefill: int = 1
    """Ranks that share the new tokens of each prompt."""
    interleave: int | None = None
    """How many consecutive rows a rank holds; None if the configuration does not say."""

    @classmethod
    def read(cls, parallel_config: Any) -> Self:
        """Read vLLM's parallel config, in which older versions have fewer fields."""
        sizes = ("decode_context_parallel_size", "prefill_context_parallel_size")
        decode, prefill = (int(getattr(parallel_config, name, None) or 1) for name in sizes)
        return cls(decode, prefill, getattr(parallel_config, "cp_kv_cache_interleave_size", None))

    @property
    def query_groups(self) -> int:
        """How many ranks' heads a query has, as vLLM gathers it. Ranks that share the new tokens of a prompt have the
        same heads."""
        return max(1, self.decode // self.prefill)

    @property
    def gather_prefills(self) -> bool:
        """Whether prefills attend to gathered pages."""
        return self.decode > 1 and self.prefill > 1


@dataclass(frozen=True, eq=False)
class GatheredChunk:
    """Consecutive prefills whose pages are gathered together."""

    tokens: slice
    """Their rows in the query."""
    pages: Tensor
    """int64 [pages]: this rank's pages of all their requests."""
    request_ids: Tensor
    """int32 [tokens]: the row in the table of each token."""
    table: Tensor
    """int32 [requests, runs]: the place of each run of `interleave` rows in the gathered pages; -1 past the end."""


@dataclass(frozen=True, eq=False)
class GatheredPrefills:
    """The prefills of a step that attend to gathered pages."""

    decode_tokens: int
    """Query rows before the prefills; they attend to this rank's rows."""
    chunks: tuple[GatheredChunk, ...]
    gathering: "Gathering"

    def caches(
        self, cache: PagedCache, gather: Callable[[Tensor, Tensor], object]
    ) -> Iterator[tuple[GatheredChunk, PagedCache]]:
        """Each chunk and its gathered pages, which hold until the next chunk.

        Args:
            cache: this rank's rows.
            gather: fills its first argument with the second one of all ranks, in the order of the ranks.
        """
        rooms = self.gathering
        if cache.layout.row_bytes != rooms.mine.shape[2]:
            expected = f"of rows with {rooms.mine.shape[2]} bytes, as --kv-cache-dtype says"
            raise checks.refuse("kv_cache", expected, cache.layout.row_bytes, "use one cache dtype for all layers")
        stored = _words(cache.storage)
        for chunk in self.chunks:
            count = len(chunk.pages)
            mine, every = rooms.mine[:count], rooms.every[: count * rooms.ranks]
            torch.index_select(stored, 0, chunk.pages, out=mine.flatten(1).view(stored.dtype))
            gather(every, mine)
            yield chunk, PagedCache.wrap(every.view(cache.storage.dtype), cache.layout, scale=cache.scale)


def _words(pages: Tensor) -> Tensor:
    """Pages as rows of eight-byte numbers, which a GPU copies faster than bytes; as bytes if they are not aligned."""
    flat = pages.view(torch.uint8).flatten(1)
    aligned = not (flat.shape[1] % 8 or flat.stride(0) % 8 or flat.storage_offset() % 8)
    return flat.view(torch.int64) if aligned else flat


def attend_gathered(
    call: Call,
    q: Tensor,
    out: Tensor,
    prefills: GatheredPrefills,
    gather: Callable[[Tensor, Tensor], object],
    translate: Callable[[TranslatePositions], Tensor],
) -> Tensor:
    """Attend decodes to this rank's rows and prefills to gathered pages; return the decodes' lse [tokens, H].

    Args:
        call: the checked attention of all tokens to this rank's rows.
        q: [T, H, width].
        out: [T, H, value_dim], to write into.
        prefills: what to gather.
        gather: as in `GatheredPrefills.caches`.
        translate: translates positions to slots, or finds what another layer has translated.
    """
    positions, usual = call.positions, call.translate
    assert positions is not None
    assert usual is not None

    def attend_rows(rows: slice, cache: PagedCache, place: TranslatePositions) -> Tensor:
        selection = Selection(cache, translate(place._replace(positions=positions[rows])))
        return attend(call.attend._replace(q=q[rows], selections=[selection], out=out[rows]))[0]

    lse = q.new_empty((0, q.shape[1]), dtype=torch.float32)
    if prefills.decode_tokens:
        own = slice(0, prefills.decode_tokens)
        lse = attend_rows(own, call.cache, usual._replace(request_ids=usual.request_ids[own]))
    run = prefills.gathering.interleave
    for chunk, cache in prefills.caches(call.cache, gather):
        # The table finds runs, whichever rank they came from.
        place = usual._replace(
            request_ids=chunk.request_ids, block_table=chunk.table, page_size=run, rows_per_page=run, shard=(1, 0, 1)
        )
        attend_rows(chunk.tokens, cache, place)
    return lse


class Gathering:
    """The buffers for gathered pages, which all layers share, and the plan of what is gathered in a step.

    All ranks must gather equally many pages at the same time. vLLM therefore gives every rank a part of every prompt,
    and tells all of them the same number of rows to gather: those of the rank that holds most of the request.
    """

    def __init__(self, ranks: Ranks, limits: Limits, layout: Layout, device: torch.device) -> None:
        """Allocate room for the pages of the longest request; several shorter ones share it."""
        self.ranks, self.interleave, self.page_size = ranks.decode, ranks.interleave or 1, limits.page_size
        self._device = device
        # Every request starts with a whole run, so its pages are filled up to whole runs.
        self._unit = lcm(self.page_size, self.interleave) // self.page_size
        self._most = self._pages(self._largest_shard(limits.max_length))
        shape = (self._most, self.page_size, layout.row_bytes)
        self.mine = torch.empty(shape, dtype=torch.uint8, device=device)
        self.every = torch.empty((self.ranks * shape[0], *shape[1:]), dtype=torch.uint8, device=device)

    def _largest_shard(self, length: int) -> int:
        """Rows of a request on the first rank, which holds most of them."""
        rounds, rest = divmod(length, self.interleave * self.ranks)
        return rounds * self.interleave + min(rest, self.interleave)

    def _pages(self, rows: int) -> int:
        return round_up(ceil_div(max(rows, 1), self.page_size), self._unit)

    def plan(
        self, common: Any, starts: INT, host_lengths: Tensor, decodes: int, block_table: Tensor
    ) -> GatheredPrefills | None:
        """What the prefills of a step gather; None without prefills.

        Args:
            common: vLLM's record of the step. `req_idx` tells which rows of the batch are parts of one request, and
                `dcp_local_seq_lens_cpu_upper_bound` how many cached rows each request has on the rank with most of
                them. A batch without the two has one row per request.
            starts: the first token of each row of the batch, and the end.
            host_lengths: context plus new tokens of each row.
            decodes: rows of the batch that are decodes; they come first.
            block_table: int32 [rows, pages].
        """
        count = len(starts) - 1
        if decodes == count:
            return None
        numbers, shards = getattr(common, "req_idx", None), getattr(common, "dcp_local_seq_lens_cpu_upper_bound", None)
        if numbers is None:
            numbers = np.arange(count)
        first = (decodes + np.flatnonzero(np.diff(numbers[decodes:count], prepend=-1))).tolist()
        if shards is None:
            shards = [self._largest_shard(int(length)) for length in host_lengths]
        pages = [self._pages(int(shards[row])) for row in first]
        requests = list(pairwise([*first, count]))
        parts = pack_chunks(pages, self._most)
        firsts = chunk_starts(pages, parts)
        chunks = [
            self._chunk(requests[begin:end], pages[begin:end], firsts[begin:end], starts, block_table)
            for begin, end in parts
        ]
        return GatheredPrefills(int(starts[decodes]), tuple(chunks), self)

    def _chunk(
        self, requests: Sequence[tuple[int, int]], pages: Sequence[int], firsts: INT, starts: INT, block_table: Tensor
    ) -> GatheredChunk:
        begins, ends = np.array(requests, np.int32).T
        numbers = np.arange(len(pages), dtype=np.int32)
        columns = np.concatenate([np.arange(count, dtype=np.int32) for count in pages])
        arrays = (
            np.repeat(numbers, starts[ends] - starts[begins]),
            np.repeat(begins, pages),
            # Pages past the table only fill up runs; nobody selects their rows.
            np.minimum(columns, block_table.shape[1] - 1),
            np.array(pages, np.int32),
            firsts,
        )
        host = torch.from_numpy(np.concatenate(arrays))
        sent = staged(host, self._device).to(self._device, non_blocking=True)
        ids, rows, columns_sent, counts, begin = sent.split([len(array) for array in arrays])
        listed = block_table[rows.long(), columns_sent.long()].clamp_min(0).long()
        per_rank = sum(pages) * self.page_size // self.interleave
        longest = self.ranks * max(pages) * self.page_size // self.interleave
        run = torch.arange(longest, dtype=torch.int32, device=self._device)
        owner, inside = run % self.ranks, run // self.ranks
        within = inside < (counts * self.page_size // self.interleave).unsqueeze(1)
        table = owner * per_rank + (begin * self.page_size // self.interleave).unsqueeze(1) + inside
        tokens = slice(int(starts[requests[0][0]]), int(starts[requests[-1][1]]))
        return GatheredChunk(tokens, listed, ids, torch.where(within, table, -1).int())
