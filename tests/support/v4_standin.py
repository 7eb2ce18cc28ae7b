"""One step of a V4 model on random caches, and what attention over it must give, in fp64 and without pages."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import bounds
import torch
from seeds import reseed, seed_of
from torch import Tensor

from tamis import Batch, LayerSpec, Limits, PagedCache, PagePool
from tamis.cache.layout import Layout, named
from tamis.integrations.vllm.classes.v4_impl import V4Impl
from tamis.integrations.vllm.classes.v4_metadata import V4MetadataBuilder, V4WindowMetadataBuilder
from tamis.integrations.vllm.v4_forward import forward_decode, forward_prefill
from tamis.ops import write_kv
from tamis.step.v4_planner import V4Planner

WINDOW, TOPK, PAGE, WINDOW_PAGE, HEADS = 128, 16, 256, 64, 3
SCALE = 512**-0.5
MAX_TOKENS, MAX_LENGTH, MAX_REQUESTS = 160, 1200, 10
QUERIES, LENGTHS = [1, 1, 2, 40, 33, 5], [300, 1000, 70, 40, 170, 600]
RATIOS = (1, 4, 128)
SHAPES = {
    "mixed": (QUERIES, LENGTHS),
    "decodes": ([1, 2, 1], [256, 700, 3]),
    "prefills": ([30, 64], [30, 400]),
}


def specs() -> list[LayerSpec]:
    common: dict[str, Any] = {"heads": HEADS, "latent_dim": 448, "window": WINDOW}
    return [
        LayerSpec(**common, kind="window"),
        LayerSpec(**common, kind="overlapping", compress=4, topk=TOPK, index_heads=2, index_dim=16),
        LayerSpec(**common, kind="plain", compress=128),
    ]


def limits(**changes: Any) -> Limits:
    sizes = {"max_tokens": MAX_TOKENS, "max_requests": MAX_REQUESTS, "max_length": MAX_LENGTH, "page_size": PAGE}
    return Limits(**sizes, other_page_sizes={"window": WINDOW_PAGE}, speculative_tokens=1, **changes)


class V4Step:
    """Requests in shuffled pages, with rows for all their tokens and entries."""

    def __init__(
        self,
        layout: str | Layout,
        queries: list[int] = QUERIES,
        lengths: list[int] = LENGTHS,
        *,
        scale: float = 1.0,
        seed: int = 0,
        window: int = WINDOW,
        unwritten: tuple[int, ...] = (),
        pages: tuple[int, int] = (40, 80),
        topk: int = TOPK,
    ) -> None:
        """`unwritten` are tokens of the step without a slot: nothing is written for them, and they see nothing. `pages`
        are those of the entries and of the window."""
        reseed(seed)
        self.queries, self.lengths, self.window_size, self.unwritten = queries, lengths, window, unwritten
        self.main = PagePool(pages[0], PAGE, seed=seed_of(1))
        self.raw = PagePool(pages[1], WINDOW_PAGE, seed=seed_of(2))
        batch = Batch.build(queries, lengths, self.main)
        self.batch = replace(batch, other_pages={"window": Batch.build(queries, lengths, self.raw).pages})
        layout = named(layout)
        self.window = PagedCache(layout, pages[1], WINDOW_PAGE, scale=scale)
        self.entries = {r: PagedCache(layout, pages[0], PAGE // r, scale=scale) for r in RATIOS if r > 1}
        self.spoil()
        self.tokens = [(r, n - q + i) for r, (q, n) in enumerate(zip(queries, lengths, strict=True)) for i in range(q)]
        for number, length in enumerate(lengths):
            self.write_request(number, length)
        self.q = torch.randn(len(self.tokens), HEADS, 512)
        self.sink = torch.randn(HEADS)
        self.chosen = torch.full((len(self.tokens), topk), -1, dtype=torch.int32)
        for row, (_, p) in enumerate(self.tokens):
            count = min((p + 1) // 4, topk)
            self.chosen[row, :count] = torch.randperm((p + 1) // 4)[:count].int()

    def write_request(self, number: int, length: int) -> None:
        """Write the rows of one request."""
        write_kv(torch.randn(length, 512), self.window, self.raw.slots(number, 0, length))
        for ratio, cache in self.entries.items():
            slots = self.entry_slots(number, length // ratio, ratio)
            write_kv(torch.randn(len(slots), 512), cache, slots)

    def spoil(self) -> None:
        """Fill every row with NaN, so that reading an unwritten row shows."""
        for cache in (self.window, *self.entries.values()):
            storage = cache.storage
            storage.view(torch.uint8).fill_(0xFF) if storage.dtype.itemsize == 1 else storage.fill_(torch.nan)

    def entry_slots(self, request: int, count: int, ratio: int) -> Tensor:
        number, size = torch.arange(count), PAGE // ratio
        pages = self.main.block_table([request])[0].long()
        return pages[number // size] * size + number % size

    def chosen_for(self, ratio: int) -> Tensor | None:
        return self.chosen if ratio == 4 else None

    def rows_seen(self, row: int, ratio: int) -> Tensor:
        """fp64 rows of the window and the entries that one token attends to."""
        if row in self.unwritten:
            return torch.zeros(0, 512, dtype=torch.float64)
        request, p = self.tokens[row]
        seen = self.raw.slots(request, max(0, p - self.window_size + 1), p + 1)
        keys = self.window.read(seen).double()
        if ratio > 1:
            slots = self.entry_slots(request, (p + 1) // ratio, ratio)
            if ratio == 4:
                picked = self.chosen[row]
                slots = slots[picked[picked >= 0].long()]
            keys = torch.cat((keys, self.entries[ratio].read(slots).double()))
        return keys

    def attention(self, ratio: int, q: Tensor | None = None, **options: Any) -> bounds.Attention:
        """Window and entries of each token under one softmax with a sink, in fp64, and what its arithmetic allows."""
        q, options = self.q if q is None else q, {"scale": SCALE, "sink": self.sink, "parts": 2} | options
        rows = range(len(self.tokens))
        return bounds.stacked([bounds.attention(q[row], self.rows_seen(row, ratio), **options) for row in rows])

    def oracle(self, ratio: int, q: Tensor | None = None) -> Tensor:
        """The output of `attention` alone."""
        return self.attention(ratio, q).out

    def agrees(self, found: Tensor, ratio: int, q: Tensor | None = None, **options: Any) -> None:
        """Assert that an output is within what its arithmetic allows, and the rounding to its dtype."""
        exact = self.attention(ratio, q, **options)
        bounds.agree(found, exact.out, exact.out_error, found.dtype)

    def padded(self, rows: int) -> Batch:
        return replace(self.batch, padded_tokens=len(self.tokens) + rows)

    def planner(self, **options: Any) -> V4Planner:
        return V4Planner(specs(), limits(), layout=self.window.layout, **options)

    def selections(self, plan: Any, ratio: int) -> list[Any]:
        """The two selections of the core."""
        found = [plan.window.selection(self.window)]
        if ratio > 1:
            found.append(plan.entries[ratio].selection(self.entries[ratio], self.chosen_for(ratio)))
        return found

    def common(self, pool: str, padding: int = 0, empty: int = 0) -> SimpleNamespace:
        """The metadata that an engine passes to a builder for one pool, padded as for a captured graph."""
        pages = self.batch.pages if pool == "main" else self.batch.other_pages["window"]
        starts = torch.cat([self.batch.query_starts, self.batch.query_starts[-1:].expand(empty)])
        slots = pages.slots.clone()
        slots[list(self.unwritten)] = -1
        blank = torch.zeros(empty, pages.block_table.shape[1], dtype=torch.int32)
        return SimpleNamespace(
            num_reqs=len(self.lengths) + empty,
            num_actual_tokens=len(self.tokens) + padding,
            max_query_len=max(self.queries),
            max_seq_len=max(self.lengths),
            query_start_loc=starts.clone(),
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor([*self.lengths, *[0] * empty], dtype=torch.int32),
            block_table_tensor=torch.cat([pages.block_table, blank]),
            slot_mapping=torch.cat([slots, torch.full((padding,), -1)]),
        )


def engine_config(max_length: int = MAX_LENGTH, **model: Any) -> SimpleNamespace:
    """The fields of a `VllmConfig` that the builders read."""
    fields = {"index_topk": TOPK, "sliding_window": WINDOW} | model
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(**fields),
            max_model_len=max_length,
            get_num_attention_heads=lambda parallel: HEADS,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_REQUESTS),
        parallel_config=SimpleNamespace(),
        speculative_config=SimpleNamespace(num_speculative_tokens=1),
    )


def main_builder(ratio: int, device: str = "cpu", *, max_length: int = MAX_LENGTH, **options: Any) -> V4MetadataBuilder:
    spec = SimpleNamespace(block_size=PAGE, compress_ratio=ratio)
    return V4MetadataBuilder(spec, ["layer"], engine_config(max_length), device, **options)


def window_builder(
    drafts: int = 1,
    *,
    window: int = WINDOW,
    parallel: bool = False,
    device: str = "cpu",
    max_length: int = MAX_LENGTH,
) -> V4WindowMetadataBuilder:
    config = engine_config(max_length, sliding_window=window)
    config.speculative_config = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=parallel)
    return V4WindowMetadataBuilder(SimpleNamespace(block_size=WINDOW_PAGE), ["layer"], config, device)


def layer_of(step: V4Step, ratio: int, **more: Any) -> SimpleNamespace:
    """A layer as engines have it: all of them hold the one buffer that the layers with an indexer fill."""
    shared = torch.randint(0, 9, (MAX_TOKENS, step.chosen.shape[1]), dtype=torch.int32)
    shared[: len(step.tokens)] = step.chosen
    fields = {
        "compress_ratio": ratio,
        "window_size": step.window_size,
        "scale": SCALE,
        "attn_sink": torch.cat((step.sink, torch.full((64 - HEADS,), -torch.inf))),
        "swa_cache_layer": SimpleNamespace(kv_cache=step.window.storage),
        "kv_cache": step.entries[ratio].storage if ratio > 1 else None,
        "kv_cache_torch_dtype": step.window.storage.dtype,
        "topk_indices_buffer": shared,
    }
    return SimpleNamespace(**(fields | more))


class Records:
    """A step's records, as builders make them."""

    def __init__(self, step: V4Step, ratio: int, padding: int = 0, empty: int = 0) -> None:
        longest = max(MAX_LENGTH, *step.lengths)
        window = window_builder(window=step.window_size, max_length=longest)
        self.window = window.build(0, step.common("window", padding, empty))
        self.main = None
        if ratio > 1:
            self.main = main_builder(ratio, max_length=longest).build(0, step.common("main", padding, empty))
        self.decodes = self.window.num_decode_tokens


def padded_query(step: V4Step, q: Tensor, padding: int) -> tuple[Tensor, Tensor]:
    """A query with additional rows, and an output buffer with additional heads."""
    dtype = torch.bfloat16 if q.dtype == torch.float8_e4m3fn else q.dtype
    output = torch.full((len(step.tokens) + padding, 64, 512), 3.0, dtype=dtype)
    return torch.cat((q, torch.ones(padding, *q.shape[1:]).to(q.dtype))), output


def attend_mixed(step: V4Step, q: Tensor, layer: Any, records: Records, *, calls: Any = 2, padding: int = 0) -> Tensor:
    """Output [rows, 64 heads, 512] of a step as an engine runs it in the mixed-index style."""
    query, output = padded_query(step, q, padding)
    options = {"swa_metadata": records.window, "attn_metadata": records.main}
    V4Impl(calls=calls).forward_mqa(layer, query, None, None, output, **options)
    return output


def attend_pages(step: V4Step, q: Tensor, layer: Any, records: Records, *, padding: int = 0) -> Tensor:
    """The same through the two methods of a replaced layer, called as in vLLM's `forward_mqa`."""
    query, output = padded_query(step, q, padding)
    positions = torch.tensor([p for _, p in step.tokens] + [0] * padding)
    window, main, first = records.window, records.main, records.decodes
    swa_only = layer.compress_ratio <= 1
    entries = None if swa_only else layer.kv_cache
    if window.num_prefills:
        raw = layer.swa_cache_layer.kv_cache
        forward_prefill(layer, query[first:], positions[first:], entries, raw, output[first:], main, window)
    if window.num_decodes:
        forward_decode(layer, query[:first], entries, window, main, swa_only, output[:first])
    return output
