"""`Planner.plan(batch)`: per-step metadata in buffers that never move."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div
from tamis.backends import backend_for_stage
from tamis.cache.layout import Layout, named
from tamis.model.spec import LayerSpec
from tamis.step.batch import Batch, PageMap
from tamis.step.lease import Lease, Use
from tamis.step.plan import Chunk, DecodePart, Limits, Mode, Plan, PrefillPart
from tamis.step.split import (
    INT,
    MIN_HEADS_FOR_WORKSPACE,
    BatchSplit,
    chunk_starts,
    pack_chunks,
    split_batch,
)

_HOST = torch.device("cpu")


class Planner:
    """Turns batches into plans. All buffers are allocated here, once; a plan is valid until the next one is made.

    A plan used later is refused, and so is planning while a layer runs on the latest plan: threads, and streams of a
    device, need a planner each. A batch that is refused changes nothing, and the latest plan stays valid.
    """

    # Buffers outlive the call that makes them: one made inside inference_mode could not be written to outside.
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
            spec: the layers' common numbers (heads, top-k).
            limits: the largest step.
            device: where the tensors of a step live.
            layout: of the latent cache; decides whether a workspace is of use.
            mode: "mixed" sends all tokens through one call that reads the cache directly; "separate" gathers the
                prefills of an FP8 cache into a 16-bit workspace. "auto" separates from 32 heads on, unless the device's
                backend has kernels of its own for FP8 rows at every head count.
        """
        checks.option("mode", mode, ("auto", "mixed", "separate"))
        checks.instance("spec", spec, LayerSpec)
        checks.instance("limits", limits, Limits)
        self.spec, self.limits, self.layout = spec, limits, named(layout)
        self.device = checks.device("device", device, usable=True)
        if mode == "auto":
            gathers = self.layout.quantised and spec.heads >= MIN_HEADS_FOR_WORKSPACE
            direct = backend_for_stage("attend", "auto", self.device).direct_prefills
            mode = "separate" if gathers and not direct else "mixed"
        if mode == "separate" and not self.layout.quantised:
            raise checks.refuse("mode", f"'mixed' for {self.layout.name}", repr(mode), "there is nothing to upconvert")
        self.mode: Literal["mixed", "separate"] = mode
        tokens, requests = limits.max_tokens, limits.max_requests
        sizes = {
            "request_ids": (tokens, 0),
            "prefill_ids": (tokens, -1),
            "query_starts": (requests + 1, 0),
            "lengths": (requests, 0),
            "workspace_starts": (requests, 0),
        }
        # Everything that the host computes lies in one arena, so that a step needs one copy to the device.
        self._fills = np.concatenate([np.full(size, fill, np.int32) for size, fill in sizes.values()])
        self._arena = torch.from_numpy(self._fills).to(self.device, copy=True)
        ends = np.cumsum([size for size, _ in sizes.values()]).tolist()
        self._spans = {name: slice(end - size, end) for (name, (size, _)), end in zip(sizes.items(), ends, strict=True)}
        self._views = {name: self._arena[span] for name, span in self._spans.items()}
        self._positions = torch.full((tokens,), -1, dtype=torch.int32, device=self.device)
        self._count = torch.arange(tokens, dtype=torch.int32, device=self.device)
        self._page_sizes = page_sizes = {"": limits.page_size, **limits.other_page_sizes}
        self._pages = {
            name: PageMap(
                torch.full((requests, ceil_div(limits.max_length, size)), -1, dtype=torch.int32, device=self.device),
                torch.full((tokens,), -1, dtype=torch.int64, device=self.device),
            )
            for name, size in page_sizes.items()
        }
        self._numbers = np.arange(requests, dtype=np.int32)
        # How much of these the last step has filled; what lies beyond is -1.
        self._filled_tokens, self._filled_pages = 0, dict.fromkeys(page_sizes, (0, 0, 0))
        self._workspace_rows = limits.workspace_rows or 5 * limits.max_length
        self._workspace = None
        if mode == "separate":
            shape = (self._workspace_rows, self.layout.width)
            self._workspace = torch.zeros(shape, dtype=torch.bfloat16, device=self.device)
        self.lease = Lease()

    def plan(self, batch: Batch) -> Plan:
        """Metadata for one step. Reads the batch only; waits for nothing on the device."""
        prepared = self.prepare(batch)
        with self.lease.renewed() as use:
            return self.fill(prepared, use)

    def prepare(self, batch: Batch) -> "Prepared":
        """The first half of `plan`: everything that can be refused, and what the host computes. Changes nothing."""
        starts, query_lengths, host_lengths = self._check(batch)
        requests, tokens = len(host_lengths), int(starts[-1])
        rows = tokens if batch.padded_tokens is None else batch.padded_tokens
        split = split_batch(
            query_lengths,
            self.limits.threshold,
            uniform=self.limits.uniform_decodes,
            prefilling=batch.prefilling,
        )
        host, spans = self._fills.copy(), self._spans
        request_ids = host[spans["request_ids"]]
        request_ids[:tokens] = self._numbers[:requests].repeat(query_lengths)
        query_starts = host[spans["query_starts"]]
        query_starts[: requests + 1] = starts
        query_starts[requests + 1 :] = tokens
        host[spans["lengths"]][:requests] = host_lengths
        prefill_lengths: list[int] = []
        chunks: list[tuple[int, int]] = []
        if split.prefills:
            prefills = slice(split.decode_tokens, tokens)
            host[spans["prefill_ids"]][prefills] = request_ids[prefills] - split.decodes
            prefill_lengths = host_lengths[split.decodes :].tolist()
            chunks = pack_chunks(prefill_lengths, self._workspace_rows) if self.mode == "separate" else []
            host[spans["workspace_starts"]][: split.prefills] = chunk_starts(prefill_lengths, chunks)
        return Prepared(batch, host, rows, split, starts, query_lengths, host_lengths, prefill_lengths, chunks)

    def fill(self, prepared: "Prepared", use: Use) -> Plan:
        """The second half of `plan`: fill the buffers, in a block of `lease.renewed`."""
        batch, rows, split = prepared.batch, prepared.rows, prepared.split
        starts, query_lengths, host_lengths = prepared.starts, prepared.query_lengths, prepared.host_lengths
        requests, tokens = len(host_lengths), int(starts[-1])
        self._arena.copy_(staged(torch.from_numpy(prepared.host), self.device), non_blocking=True)
        if batch.host_lengths is not None:
            self._views["lengths"][:requests].copy_(self._staged_if_host(batch.lengths), non_blocking=True)
        self._fill_positions(tokens)
        pages = self._fill_pages("", batch.pages, requests, rows)
        others = {n: self._fill_pages(n, p, requests, rows) for n, p in batch.other_pages.items()}
        return Plan(
            requests=requests,
            tokens=tokens,
            rows=rows,
            max_query=int(query_lengths.max(initial=0)),
            max_length=int(host_lengths.max(initial=0)),
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
            decode=self._decode_part(split, query_lengths),
            prefill=self._prefill_part(prepared, pages.block_table),
            workspace=self._workspace,
            other_pages=others,
            use=use,
        )

    def _fill_positions(self, tokens: int) -> None:
        if tokens:
            found = self._positions[:tokens]
            last = self._views["lengths"] - self._views["query_starts"][1:]
            torch.index_select(last, 0, self._views["request_ids"][:tokens], out=found)
            found.add_(self._count[:tokens]).clamp_min_(-1)
        if tokens < self._filled_tokens:
            self._positions[tokens : self._filled_tokens].fill_(-1)
        self._filled_tokens = tokens

    def _fill_pages(self, name: str, pages: PageMap, requests: int, rows: int) -> PageMap:
        held, count, width = self._pages[name], len(pages.slots), pages.block_table.shape[1]
        held.block_table[:requests, :width].copy_(self._staged_if_host(pages.block_table), non_blocking=True)
        held.slots[:count].copy_(self._staged_if_host(pages.slots), non_blocking=True)
        # What the last step left beyond is cleared; a step like the last one clears nothing.
        last_requests, last_width, last_count = self._filled_pages[name]
        if requests < last_requests:
            held.block_table[requests:last_requests, :last_width].fill_(-1)
        if width < last_width:
            held.block_table[:requests, width:last_width].fill_(-1)
        if count < last_count:
            held.slots[count:last_count].fill_(-1)
        self._filled_pages[name] = requests, width, count
        return PageMap(held.block_table[:requests], held.slots[:rows])

    def _staged_if_host(self, value: Tensor) -> Tensor:
        return staged(value, self.device) if value.device.type == "cpu" else value

    def _decode_part(self, split: BatchSplit, query_lengths: INT) -> DecodePart | None:
        if split.decode_tokens == 0:
            return None
        active = query_lengths[: split.decodes]
        active = active[active > 0]
        uniform = bool((active == active[0]).all())
        return DecodePart(len(active), split.decode_tokens, int(active[0]) if uniform else None)

    def _prefill_part(self, prepared: "Prepared", block_table: Tensor) -> PrefillPart | None:
        split, starts, lengths = prepared.split, prepared.starts, prepared.prefill_lengths
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

    def _check(self, batch: Batch) -> tuple[INT, INT, INT]:
        limits = self.limits
        checks.instance("batch", batch, Batch)
        checks.tensor("query_starts", batch.query_starts, "N", (torch.int32,), device=_HOST, remedy="a running sum")
        starts = batch.query_starts.numpy()
        query_lengths = starts[1:] - starts[:-1]
        check_starts(starts, query_lengths, limits)
        requests, tokens = len(query_lengths), int(starts[-1])
        checks.tensor("lengths", batch.lengths, "B", (torch.int32,), B=requests, remedy="one per request")
        lengths = batch.lengths if batch.host_lengths is None else batch.host_lengths
        if not isinstance(lengths, Tensor) or lengths.device != _HOST:
            raise checks.refuse("host_lengths", "given when lengths are on a device", None, "pass a host copy or bound")
        self._check_place("lengths", batch.lengths)
        checks.tensor("host_lengths", lengths, "B", (torch.int32,), B=requests, remedy="one per request")
        checks.values_between("lengths", lengths, 0, limits.max_length, "raise Limits.max_length")
        host_lengths = lengths.numpy()
        short = query_lengths > host_lengths
        if short.any():
            at = int(short.argmax())
            raise checks.refuse(
                f"lengths[{at}]", f"at least its {query_lengths[at]} new tokens", host_lengths[at], "count them in"
            )
        if batch.padded_tokens is not None:
            checks.integer("padded_tokens", batch.padded_tokens, low=tokens, high=limits.max_tokens)
        if batch.prefilling is not None:
            count = len(checks.sequence("prefilling", batch.prefilling))
            if count != requests:
                raise checks.refuse("prefilling", f"{requests} flags", count, "pass one per request")
        if not isinstance(batch.other_pages, Mapping):
            raise checks.refuse_type(
                "other_pages", "a dictionary", checks.describe(batch.other_pages), "name each pool"
            )
        if set(batch.other_pages) - set(limits.other_page_sizes):
            names = ", ".join(limits.other_page_sizes) or "none"
            raise checks.refuse("other_pages", f"among {names}", list(batch.other_pages), "name them in Limits")
        rows = tokens if batch.padded_tokens is None else batch.padded_tokens
        # Where the host knows a bound only, or where ranks share a request's pages, the table may rightly be narrower.
        bounded = batch.host_lengths is not None or limits.context_parallel
        longest = 0 if bounded else int(host_lengths.max(initial=0))
        for name, pages in {"": batch.pages, **batch.other_pages}.items():
            self._check_pages(name, pages, longest, requests, tokens, rows)
        return starts, query_lengths, host_lengths

    def _check_pages(self, name: str, pages: PageMap, longest: int, requests: int, tokens: int, rows: int) -> None:
        most, size = self._pages[name].block_table.shape[1], self._page_sizes[name]
        name = name or "pages"
        checks.instance(name, pages, PageMap)
        if pages.page_size not in (None, size):
            remedy = "make the pool, or the planner's Limits, with the other's"
            raise checks.refuse(f"{name}.page_size", f"{size}, the planner's", pages.page_size, remedy)
        width = checks.tensor(f"{name}.block_table", pages.block_table, "B W", (torch.int32,), B=requests)["W"]
        if width > most:
            raise checks.refuse(
                f"{name}.block_table", f"at most {most} pages wide", width, "slice it, or raise max_length"
            )
        if width * size < longest:
            expected = f"at least {ceil_div(longest, size)} pages wide for {longest} tokens"
            raise checks.refuse(f"{name}.block_table", expected, width, "pass all pages, or set context_parallel")
        count = checks.tensor(f"{name}.slots", pages.slots, "T", checks.INTS)["T"]
        if not tokens <= count <= rows:
            raise checks.refuse(f"{name}.slots", f"of {tokens} to {rows} values", count, "pass one per new token")
        self._check_place(f"{name}.block_table", pages.block_table)
        self._check_place(f"{name}.slots", pages.slots)

    def _check_place(self, name: str, tensor: Tensor) -> None:
        if tensor.device not in (_HOST, self._arena.device):
            raise checks.refuse(name, f"on {self._arena.device} or the host", tensor.device, "move it")


@dataclass(frozen=True, eq=False)
class Prepared:
    """A step that was checked and computed on the host, before any buffer is touched."""

    batch: Batch
    host: INT
    """What the arena will hold."""
    rows: int
    split: BatchSplit
    starts: INT
    query_lengths: INT
    host_lengths: INT
    prefill_lengths: list[int]
    chunks: list[tuple[int, int]]


def check_starts(starts: INT, query_lengths: INT, limits: Limits) -> None:
    """Refuse query starts that are no running sum of these lengths from 0, or that say more than the limits allow."""
    if not len(starts) or starts[0] != 0 or query_lengths.min(initial=0) < 0:
        raise checks.refuse("query_starts", "a running sum from 0", starts.tolist(), "begin it with 0")
    tokens, requests = int(starts[-1]), len(query_lengths)
    if tokens > limits.max_tokens or requests > limits.max_requests:
        name = "tokens" if tokens > limits.max_tokens else "requests"
        count, limit = (tokens, limits.max_tokens) if name == "tokens" else (requests, limits.max_requests)
        raise checks.refuse("query_starts", f"of at most max_{name}={limit} {name}", count, "raise the limit")


def staged(host: Tensor, device: torch.device) -> Tensor:
    """Host values from where a copy to a device need not be waited for.

    That is a fresh pinned block per step: the caching host allocator keeps it until the copy is done, while writing
    into one fixed block could overtake a copy still under way.
    """
    return host.pin_memory() if device.type == "cuda" else host
