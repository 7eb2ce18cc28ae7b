"""`Planner.plan(batch)`: the metadata of one step, in buffers that never move."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tamis import checks
from tamis.backends import backend_for_stage
from tamis.cache.layout import Layout, named
from tamis.model.spec import LayerSpec
from tamis.step.batch import Batch, PageMap
from tamis.step.batch_checks import HostLengths, check_batch
from tamis.step.buffers import Arena, Staging, TableBuffer, Views, outside_modes
from tamis.step.gathering import automatic_mode, gathering_saves
from tamis.step.lease import Lease, Use
from tamis.step.plan import Chunk, DecodePart, Limits, Mode, Plan, PrefillPart
from tamis.step.split import BatchSplit, chunk_starts, pack_chunks, split_batch

if TYPE_CHECKING:
    from tamis.step.groups import GroupBuffers

_LENGTHS_IN_WORKSPACE = 5
"""By default the workspace holds this many of the longest requests, if all prefills are gathered."""
_WORKSPACE_BYTES = 256 << 20
"""By default the workspace holds the longest request and has at most this size, if prefills are gathered only where
that is faster. Requests of more rows are read directly."""

_PER_TOKEN = {"request_ids": 0, "positions": -1, "visible": 0, "prefill_ids": -1}
_PER_REQUEST = {"query_starts": 0, "lengths": 0, "workspace_starts": 0}
"""The arrays of the arena besides the slots of each pool, with the values of elements that a step does not write."""


class Planner:
    """Turns batches into plans. All buffers are allocated once, here, and a plan is valid until the next one is made.

    Using an older plan is refused, and so is planning while a layer runs on the latest one. So every thread, and every
    stream of a device, needs a planner of its own. A refused batch changes nothing: the latest plan stays valid.
    """

    # The buffers outlive this call. If it ran in inference_mode, they could not be written outside of that mode.
    @torch.inference_mode(False)
    def __init__(
        self,
        spec: LayerSpec,
        limits: Limits,
        device: torch.device | str = "cpu",
        *,
        layout: str | Layout = "v32-fp8",
        mode: Mode = "auto",
    ) -> None:
        """Allocate buffers for the largest step.

        Args:
            spec: the numbers that all layers share (heads, top-k).
            limits: the largest step. If index keys are pooled (`LayerSpec.kpool`), `other_page_sizes` must have the
                pool of single tokens, "state4" for groups of 4.
            device: where the tensors of a step live.
            layout: the latent cache's format, which decides whether a workspace is useful.
            mode: "mixed" sends all tokens through one call that reads the cache directly; "separate" gathers the
                prefills of an FP8 cache into a 16-bit workspace. "auto" separates from 32 heads on. If the device's
                backend has kernels of its own for FP8 rows at every head count, "auto" separates the steps that take
                less time so: above 32 heads, and with enough new tokens for the rows that must be gathered.
        """
        checks.option("mode", mode, ("auto", "mixed", "separate"))
        checks.instance("spec", spec, LayerSpec)
        checks.instance("limits", limits, Limits)
        self.spec, self.limits, self.layout = spec, limits, named(layout)
        self.device = checks.device("device", device, usable=True)
        self.mode: Mode = _resolve_mode(mode, spec, self.layout, self.device)
        """"auto" if each step is divided as is faster for it; otherwise the mode of all steps."""
        page_sizes = {"": limits.page_size, **limits.other_page_sizes}
        slots = dict.fromkeys(map(_slots_of, page_sizes), -1)
        columns = max(limits.max_tokens, limits.max_requests + 1)
        self._arena = Arena(_PER_TOKEN | _PER_REQUEST, slots, columns, self.device)
        self._tables = {name: TableBuffer(limits, size, self.device) for name, size in page_sizes.items()}
        self._numbers = np.arange(columns, dtype=np.int32)
        self._padding = torch.tensor([-1, 0], dtype=torch.int32, device=self.device)
        """The position and the visible tokens of padding, below which there are none."""
        self._rows_before, self._most_requests = 0, 0
        """Token rows of the previous step, and the most requests of any step: what an upload must cover."""
        located = {"located": self._arena.narrow[self._arena.row["positions"] :][:2].T}
        """int32 [columns, 2]: positions and visible."""
        self._views = Views(self._arena.views | located)
        self._workspace_rows = _workspace_rows(self.mode, limits, self.layout)
        self._workspace = None
        if self.mode != "mixed":
            shape = (self._workspace_rows, self.layout.width)
            self._workspace = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        self._threshold = limits.threshold
        self._groups = _group_buffers(spec, limits, self.device) if spec.kpool > 1 else None
        self.lease = Lease()

    @outside_modes
    def plan(self, batch: Batch) -> Plan:
        """The metadata of one step. The batch is only read, and nothing waits for the device."""
        prepared = self.prepare(batch)
        with self.lease.renewed() as use:
            return self.fill(prepared, use)

    def prepare(self, batch: Batch) -> "Prepared":
        """The first half of `plan`: check the batch and compute what the host computes. No buffer is written."""
        known = check_batch(batch, self.limits, self._tables, self._arena.device)
        if self._groups is not None:
            self._groups.check(list(batch.other_pages))
        split = self._split(known, batch.prefilling)
        prefill_lengths = known.lengths[split.decodes :].tolist() if split.prefills else []
        chunks = self.chunks(known.queries[split.decodes :].tolist(), prefill_lengths) if split.prefills else []
        rows = known.tokens if batch.padded_tokens is None else batch.padded_tokens
        # The columns of the step before are overwritten, and those of requests that a captured graph may still read.
        columns = max(rows, self._rows_before, len(known.starts), self._most_requests + 1)
        prepared = Prepared(batch, self._arena.stage(columns), rows, split, known, prefill_lengths, chunks)
        self._stage(prepared)
        return prepared

    def _split(self, known: HostLengths, prefilling: Sequence[bool] | None) -> BatchSplit:
        uniform, threshold = self.limits.uniform_decodes, self._threshold
        if prefilling is None and (known.one_each or (known.longest <= threshold and not uniform)):
            return BatchSplit(len(known.queries), 0, known.tokens, 0)
        return split_batch(known.queries, threshold, uniform=uniform, prefilling=prefilling)

    def chunks(self, new_tokens: list[int], lengths: list[int]) -> list[tuple[int, int]]:
        """First and end prefill of each chunk that is gathered, for prefills of these lengths; none if they are read
        directly."""
        if self.mode == "mixed":
            return []
        if self.mode == "auto":
            saved = gathering_saves(zip(new_tokens, lengths, strict=True), self.spec.heads, self.spec.topk)
            if saved <= 0 or max(lengths) > self._workspace_rows:
                return []
        return pack_chunks(lengths, self._workspace_rows)

    def _stage(self, prepared: "Prepared") -> None:
        """Write what the host knows of a step into its staging."""
        batch, known, split = prepared.batch, prepared.known, prepared.split
        narrow, row = prepared.staging.narrow, self._arena.row
        requests, tokens = len(known.queries), known.tokens
        exact, positions = known.exact, narrow[row["positions"], :tokens]
        if known.one_each:
            ids, positions[:] = self._numbers[:tokens], -1
            lengths = None if exact is None else exact[:tokens]
        else:
            ids = self._numbers[:requests].repeat(known.queries)
            # Token t of request r is at lengths[r] - query_starts[r + 1] + t.
            np.subtract(self._numbers[:tokens], known.starts[1:][ids], out=positions)
            lengths = None if exact is None else exact[ids]
        narrow[row["request_ids"], :tokens] = ids
        if lengths is not None:
            positions += lengths
            if batch.host_lengths is not None:  # the exact lengths may be shorter than the bounds that were checked
                np.maximum(positions, -1, out=positions)
        np.add(positions, 1, out=narrow[row["visible"], :tokens])
        starts = narrow[row["query_starts"]]
        starts[: requests + 1] = known.starts
        starts[requests + 1 :] = tokens
        if exact is not None:
            narrow[row["lengths"], :requests] = exact
        if split.prefills:
            prefills = slice(split.decode_tokens, tokens)
            narrow[row["prefill_ids"], prefills] = ids[prefills] - split.decodes
            found = chunk_starts(prepared.prefill_lengths, prepared.chunks)
            narrow[row["workspace_starts"], : split.prefills] = found
        for name, pages in (("", batch.pages), *batch.other_pages.items()):
            if pages.slots.is_cpu:
                own = pages.slots.numpy()
                prepared.staging.wide[row[_slots_of(name)], : len(own)] = own

    def fill(self, prepared: "Prepared", use: Use) -> Plan:
        """The second half of `plan`: write the buffers, inside a block of `lease.renewed`."""
        batch, rows, split, known = prepared.batch, prepared.rows, prepared.split, prepared.known
        requests, tokens = len(known.queries), known.tokens
        views = self._views
        self._arena.upload(prepared.staging)
        self._rows_before, self._most_requests = rows, max(self._most_requests, requests)
        if known.exact is None:
            self._fill_positions(batch.lengths, known)
        pages = self._fill_pages("", batch.pages, rows)
        others = {name: self._fill_pages(name, given, rows) for name, given in batch.other_pages.items()}
        gathers = bool(prepared.chunks) if self.mode == "auto" else self.mode == "separate"
        plan = Plan(
            requests=requests,
            tokens=tokens,
            rows=rows,
            max_query=known.longest,
            max_length=known.max_length,
            page_size=self.limits.page_size,
            topk=self.spec.topk,
            mode="separate" if gathers else "mixed",
            query_starts=views("query_starts", requests + 1),
            lengths=views("lengths", requests),
            request_ids=views("request_ids", rows),
            positions=views("positions", rows),
            visible=views("visible", rows),
            slots=pages.slots,
            block_table=pages.block_table,
            split=split,
            decode=_decode_part(split, known),
            prefill=self._prefill_part(prepared, pages.block_table),
            workspace=self._workspace if gathers else None,
            other_pages=others,
            use=use,
        )
        return plan if self._groups is None else replace(plan, groups=self._groups.fill(plan))

    def _fill_positions(self, lengths: Tensor, known: HostLengths) -> None:
        """Add the lengths, which only the device knows, to what was uploaded as positions and as visible tokens."""
        found, tokens = self._views("lengths", len(known.queries)), known.tokens
        torch.clamp_min(lengths, 0, out=found)
        located = self._views("located", tokens)
        if known.one_each:
            located.add_(self._views("lengths", tokens).unsqueeze(1))
        elif tokens:
            located.add_(found.index_select(0, self._views("request_ids", tokens)).unsqueeze(1))
            torch.maximum(located, self._padding, out=located)

    def _fill_pages(self, name: str, pages: PageMap, rows: int) -> PageMap:
        given, slots = pages.slots, _slots_of(name)
        if not given.is_cpu:
            self._views(slots, len(given)).copy_(given, non_blocking=True)
        return PageMap(self._tables[name].fill(pages.block_table), self._views(slots, rows))

    def _prefill_part(self, prepared: "Prepared", block_table: Tensor) -> PrefillPart | None:
        split, starts, lengths = prepared.split, prepared.known.starts, prepared.prefill_lengths
        if split.prefills == 0:
            return None
        first = split.decodes
        workspace_starts = self._arena.views["workspace_starts"][: split.prefills]
        device_lengths = self._arena.views["lengths"][first : first + split.prefills]
        return PrefillPart(
            requests=split.prefills,
            tokens=split.prefill_tokens,
            ids=self._arena.views["prefill_ids"][: prepared.rows],
            starts=workspace_starts,
            lengths=device_lengths,
            chunks=tuple(
                Chunk(
                    requests=slice(first + begin, first + end),
                    tokens=slice(int(starts[first + begin]), int(starts[first + end])),
                    rows=sum(lengths[begin:end]),
                    block_table=block_table[first + begin : first + end],
                    lengths=device_lengths[begin:end],
                    starts=workspace_starts[begin:end],
                )
                for begin, end in prepared.chunks
            ),
        )


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step that was checked and computed on the host, before any buffer is written."""

    batch: Batch
    staging: Staging
    """The content of the arena, before it is sent to the device."""
    rows: int
    """Token rows, with padding."""
    split: BatchSplit
    known: HostLengths
    prefill_lengths: list[int]
    """Context plus new tokens of each prefill."""
    chunks: list[tuple[int, int]]
    """First and end prefill of each chunk that shares the workspace; empty if prefills read the cache directly."""


def _resolve_mode(mode: Mode, spec: LayerSpec, layout: Layout, device: torch.device) -> Mode:
    if mode == "auto":
        direct = backend_for_stage("attend", "auto", device).direct_prefills
        return automatic_mode(layout.quantised, spec.heads, direct)
    if mode == "separate" and not layout.quantised:
        remedy = "only the prefills of an FP8 cache are gathered"
        raise checks.refuse("mode", f"'auto' or 'mixed' for {layout.name} rows", repr(mode), remedy)
    return mode


def _workspace_rows(mode: Mode, limits: Limits, layout: Layout) -> int:
    if limits.workspace_rows is not None:
        return limits.workspace_rows
    if mode == "auto":
        return min(limits.max_length, _WORKSPACE_BYTES // (torch.bfloat16.itemsize * layout.width))
    return _LENGTHS_IN_WORKSPACE * limits.max_length


def _group_buffers(spec: LayerSpec, limits: Limits, device: torch.device) -> "GroupBuffers":
    from tamis.step.groups import GroupBuffers  # which programs without pooled index keys need not load

    return GroupBuffers(spec, limits, device)


def _slots_of(pool: str) -> str:
    """The name of a pool's slots in the arena."""
    return f"slots {pool}"


def _decode_part(split: BatchSplit, known: HostLengths) -> DecodePart | None:
    if split.decode_tokens == 0:
        return None
    if split.prefills == 0 and known.shortest == known.longest:
        return DecodePart(split.decodes, split.decode_tokens, known.longest)
    active = known.queries[: split.decodes]
    active = active[active > 0]
    uniform = bool((active == active[0]).all())
    return DecodePart(len(active), split.decode_tokens, int(active[0]) if uniform else None)
