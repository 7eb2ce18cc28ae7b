"""`Planner.plan(batch)`: the metadata of one step, in buffers that never move."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tamis import checks
from tamis.backends import backend_for_stage
from tamis.cache.layout import Layout, named
from tamis.model.spec import LayerSpec
from tamis.step.batch import Batch
from tamis.step.batch_checks import HostLengths, check_batch
from tamis.step.buffers import Arena, PageBuffers, staged
from tamis.step.lease import Lease, Use
from tamis.step.plan import Chunk, DecodePart, Limits, Mode, Plan, PrefillPart
from tamis.step.split import INT, BatchSplit, chunk_starts, pack_chunks, split_batch

MIN_HEADS_FOR_WORKSPACE = 32
"""From this many heads on a rank, FP8 prefills are gathered into a 16-bit workspace by default."""

_LENGTHS_IN_WORKSPACE = 5
"""By default the workspace holds this many of the longest requests."""


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
            limits: the largest step.
            device: where the tensors of a step live.
            layout: the latent cache's format, which decides whether a workspace is useful.
            mode: "mixed" sends all tokens through one call that reads the cache directly; "separate" gathers the
                prefills of an FP8 cache into a 16-bit workspace. "auto" separates from 32 heads on, unless the device's
                backend has kernels of its own for FP8 rows at every head count.
        """
        checks.option("mode", mode, ("auto", "mixed", "separate"))
        checks.instance("spec", spec, LayerSpec)
        checks.instance("limits", limits, Limits)
        self.spec, self.limits, self.layout = spec, limits, named(layout)
        self.device = checks.device("device", device, usable=True)
        self.mode = _resolve_mode(mode, spec, self.layout, self.device)
        tokens, requests = limits.max_tokens, limits.max_requests
        self._arena = Arena(
            {
                "request_ids": (tokens, 0),
                "prefill_ids": (tokens, -1),
                "query_starts": (requests + 1, 0),
                "lengths": (requests, 0),
                "workspace_starts": (requests, 0),
            },
            self.device,
        )
        self._views = self._arena.views
        self._request_numbers = np.arange(requests, dtype=np.int32)
        self._token_numbers = torch.arange(tokens, dtype=torch.int32, device=self.device)
        self._positions = torch.full((tokens,), -1, dtype=torch.int32, device=self.device)
        self._tokens_before = 0
        """How many positions the previous step wrote; those beyond are -1."""
        page_sizes = {"": limits.page_size, **limits.other_page_sizes}
        self._pages = {name: PageBuffers(limits, size, self.device) for name, size in page_sizes.items()}
        self._workspace_rows = limits.workspace_rows or _LENGTHS_IN_WORKSPACE * limits.max_length
        self._workspace = None
        if self.mode == "separate":
            shape = (self._workspace_rows, self.layout.width)
            self._workspace = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        self.lease = Lease()

    def plan(self, batch: Batch) -> Plan:
        """The metadata of one step. The batch is only read, and nothing waits for the device."""
        prepared = self.prepare(batch)
        with self.lease.renewed() as use:
            return self.fill(prepared, use)

    def prepare(self, batch: Batch) -> "Prepared":
        """The first half of `plan`: check the batch and compute what the host computes. No buffer is written."""
        known = check_batch(batch, self.limits, self._pages, self._arena.device)
        requests, tokens = len(known.queries), int(known.starts[-1])
        rows = tokens if batch.padded_tokens is None else batch.padded_tokens
        limits = self.limits
        split = split_batch(
            known.queries, limits.threshold, uniform=limits.uniform_decodes, prefilling=batch.prefilling
        )
        arena, host = self._arena, self._arena.blank()
        request_ids = arena.array(host, "request_ids")
        request_ids[:tokens] = self._request_numbers[:requests].repeat(known.queries)
        query_starts = arena.array(host, "query_starts")
        query_starts[: requests + 1] = known.starts
        query_starts[requests + 1 :] = tokens
        arena.array(host, "lengths")[:requests] = known.lengths
        chunks: list[tuple[int, int]] = []
        prefill_lengths: list[int] = []
        if split.prefills:
            prefills = slice(split.decode_tokens, tokens)
            arena.array(host, "prefill_ids")[prefills] = request_ids[prefills] - split.decodes
            prefill_lengths = known.lengths[split.decodes :].tolist()
            chunks = pack_chunks(prefill_lengths, self._workspace_rows) if self.mode == "separate" else []
            arena.array(host, "workspace_starts")[: split.prefills] = chunk_starts(prefill_lengths, chunks)
        return Prepared(batch, host, rows, split, known, prefill_lengths, chunks)

    def fill(self, prepared: "Prepared", use: Use) -> Plan:
        """The second half of `plan`: write the buffers, inside a block of `lease.renewed`."""
        batch, rows, split, known = prepared.batch, prepared.rows, prepared.split, prepared.known
        requests, tokens = len(known.queries), int(known.starts[-1])
        self._arena.upload(prepared.host)
        if batch.host_lengths is not None:
            self._views["lengths"][:requests].copy_(staged(batch.lengths, self.device), non_blocking=True)
        self._fill_positions(tokens)
        pages = self._pages[""].fill(batch.pages, requests, rows)
        others = {name: self._pages[name].fill(given, requests, rows) for name, given in batch.other_pages.items()}
        return Plan(
            requests=requests,
            tokens=tokens,
            rows=rows,
            max_query=int(known.queries.max(initial=0)),
            max_length=int(known.lengths.max(initial=0)),
            page_size=self.limits.page_size,
            topk=self.spec.topk,
            mode=self.mode,
            query_starts=self._views["query_starts"][: requests + 1],
            lengths=self._views["lengths"][:requests],
            request_ids=self._views["request_ids"][:rows],
            positions=self._positions[:rows],
            slots=pages.slots,
            block_table=pages.block_table,
            split=split,
            decode=_decode_part(split, known.queries),
            prefill=self._prefill_part(prepared, pages.block_table),
            workspace=self._workspace,
            other_pages=others,
            use=use,
        )

    def _fill_positions(self, tokens: int) -> None:
        """Token t of request r is at lengths[r] - query_starts[r + 1] + t. The device knows the exact lengths."""
        if tokens:
            found = self._positions[:tokens]
            offsets = self._views["lengths"] - self._views["query_starts"][1:]
            torch.index_select(offsets, 0, self._views["request_ids"][:tokens], out=found)
            found.add_(self._token_numbers[:tokens]).clamp_min_(-1)
        if tokens < self._tokens_before:
            self._positions[tokens : self._tokens_before].fill_(-1)
        self._tokens_before = tokens

    def _prefill_part(self, prepared: "Prepared", block_table: Tensor) -> PrefillPart | None:
        split, starts, lengths = prepared.split, prepared.known.starts, prepared.prefill_lengths
        if split.prefills == 0:
            return None
        first = split.decodes
        workspace_starts = self._views["workspace_starts"][: split.prefills]
        device_lengths = self._views["lengths"][first : first + split.prefills]
        return PrefillPart(
            requests=split.prefills,
            tokens=split.prefill_tokens,
            ids=self._views["prefill_ids"][: prepared.rows],
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
    host: INT
    """The content of the arena, before it is sent to the device."""
    rows: int
    """Token rows, with padding."""
    split: BatchSplit
    known: HostLengths
    prefill_lengths: list[int]
    """Context plus new tokens of each prefill."""
    chunks: list[tuple[int, int]]
    """First and end prefill of each chunk that shares the workspace; empty in mixed mode."""


def _resolve_mode(mode: Mode, spec: LayerSpec, layout: Layout, device: torch.device) -> Literal["mixed", "separate"]:
    if mode == "auto":
        gathers = layout.quantised and spec.heads >= MIN_HEADS_FOR_WORKSPACE
        direct = backend_for_stage("attend", "auto", device).direct_prefills
        return "separate" if gathers and not direct else "mixed"
    if mode == "separate" and not layout.quantised:
        remedy = "only the prefills of an FP8 cache are gathered"
        raise checks.refuse("mode", f"'auto' or 'mixed' for {layout.name} rows", repr(mode), remedy)
    return mode


def _decode_part(split: BatchSplit, queries: INT) -> DecodePart | None:
    if split.decode_tokens == 0:
        return None
    active = queries[: split.decodes]
    active = active[active > 0]
    uniform = bool((active == active[0]).all())
    return DecodePart(len(active), split.decode_tokens, int(active[0]) if uniform else None)
