"""Steps with 161,000 tokens of context, and with prefills that have no token: where other kernels failed.

Nearly all rows are left NaN. Those that a token attends to are written, and they lie in every page of the context.
"""

from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import torch
import v4_standin as v4
from bounds import relative_error
from engine_standin import LATENT, ROPE, SCALE
from seeds import seeded
from torch import Tensor

from tamis.integrations.vllm.impl import SparseImpl
from tamis.integrations.vllm.metadata import SparseMetadataBuilder
from tamis.integrations.vllm.v4_forward import forward_decode, forward_prefill
from tamis.ops import write_kv

LONG, SHORT, TOPK, PAGE = 161_000, 5_000, 2048, 64
MAX_LENGTH = 163_840
LENGTHS = [LONG, LONG - 61, LONG - 7, SHORT]
QUERIES = [1, 3, 0, 2]
"""A decode, a chunk of a prompt, a chunk without tokens, and a chunk of a shorter prompt."""


class LongStep:
    """A step of V3.2. The first three requests have their pages in common, as with prefix caching."""

    def __init__(self, heads: int, device: str = "cpu") -> None:
        random = seeded(heads)
        tokens = [(r, n - q + i) for r, (n, q) in enumerate(zip(LENGTHS, QUERIES, strict=True)) for i in range(q)]
        self.q = engine.grid(len(tokens), heads, LATENT + ROPE, random=random).to(device)
        spread = torch.arange(TOPK - 1)
        # A token's positions are about 79 apart, the tokens' 20, and the last one is its own: every page of 64 is met.
        chosen = [
            torch.cat((spread * (p - 61) // (TOPK - 1) + 20 * (t % 4), torch.tensor([p])))
            for t, (_, p) in enumerate(tokens)
        ]
        self.positions = torch.stack(chosen).int().to(device)
        pages = [-(-LONG // PAGE), -(-SHORT // PAGE)]
        ids = 1 + torch.randperm(sum(pages), generator=random)
        self.table = torch.zeros(len(LENGTHS), -(-MAX_LENGTH // PAGE), dtype=torch.int32)
        self.table[:3, : pages[0]], self.table[3, : pages[1]] = (part.int() for part in ids.split(pages))
        self.pages, self.device, self.tokens = 1 + sum(pages), device, tokens
        slots = torch.stack([self.slots(r, found) for (r, _), found in zip(tokens, chosen, strict=True)])
        self.used = slots.unique()
        self.rows = engine.grid(len(self.used), LATENT + ROPE, random=random)
        self.seen = self.rows[torch.searchsorted(self.used, slots)]
        """[tokens, top-k, 576]"""
        assert set(ids[: pages[0]].tolist()) <= set((self.used // PAGE).tolist())

    def slots(self, request: int, positions: Tensor) -> Tensor:
        return self.table[request, positions // PAGE].long() * PAGE + positions % PAGE

    def common(self) -> SimpleNamespace:
        new = torch.stack([self.slots(r, torch.tensor(p)) for r, p in self.tokens])
        found = engine.common(LENGTHS, QUERIES, self.table, new)
        found.seq_lens_cpu_upper_bound = found.seq_lens
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            setattr(found, name, getattr(found, name).to(self.device))
        return found

    def expected(self) -> Tensor:
        keys = self.seen.double()
        weights = torch.softmax(torch.einsum("thd,tkd->thk", self.q.cpu().double(), keys) * SCALE, -1)
        return torch.einsum("thk,tkl->thl", weights, keys[..., :LATENT])

    def storage(self, impl: SparseImpl) -> Tensor:
        """A cache of NaN, with the rows that are attended to."""
        packed = impl.kv_cache_dtype == "fp8_ds_mla"
        made = torch.full((self.pages, PAGE, 656), 0xFF, dtype=torch.uint8, device=self.device)
        if not packed:
            shape = (self.pages, PAGE, LATENT + ROPE)
            made = torch.full(shape, torch.nan, dtype=torch.bfloat16, device=self.device)
        latent, rope = self.rows.to(self.device).split([LATENT, ROPE], 1)
        impl.do_kv_cache_update(latent, rope.unsqueeze(1), made, self.used.to(self.device))
        return made

    def run(
        self,
        cache_dtype: str = "auto",
        *,
        cls: type[SparseImpl] = SparseImpl,
        builder: Any = None,
        common: Any = None,
        **options: Any,
    ) -> tuple[Any, Tensor]:
        """The step's record, and its output."""
        heads = self.q.shape[1]
        if builder is None:
            config = engine.config(heads, cache_dtype, topk=TOPK, max_length=MAX_LENGTH)
            spec = SimpleNamespace(block_size=PAGE)
            builder = SparseMetadataBuilder(spec, ["layer"], config, self.device, **options)
        record = builder.build(0, common or self.common())
        impl = engine.impl(heads, cache_dtype, cls=cls, topk_indices_buffer=self.positions)
        latent, rope = self.q.split([LATENT, ROPE], -1)
        return record, impl.forward_mqa((latent, rope), self.storage(impl), record, engine.layer())[0]


def check_output(out: Tensor, expected: Tensor) -> None:
    """An average over 2048 rows is small, so that its error is compared with its own size."""
    assert out.shape == expected.shape
    assert relative_error(out.cpu(), expected) < 1e-2


def check_record(record: Any) -> None:
    """The fields that a layer of vLLM looks at."""
    assert (record.num_decodes, record.num_prefills) == (1, 3)
    assert (record.num_decode_tokens, record.num_prefill_tokens, record.num_actual_tokens) == (1, 5, 6)
    assert (record.max_seq_len, record.prefill_max_seq_len) == (LONG, LONG - 7)
    assert record.req_id_per_token.tolist() == [0, 1, 1, 1, 3, 3]


class LongV4Step(v4.V4Step):
    """A step of V4: the window's rows are written, a part of C4A's entries, and all of C128A's."""

    def __init__(self) -> None:
        pages = [sum(-(-length // size) for length in LENGTHS) for size in (v4.PAGE, v4.WINDOW_PAGE)]
        super().__init__("v4-fp8", QUERIES, LENGTHS, pages=(1 + pages[0], 1 + pages[1]), topk=512)
        for row, (request, position) in enumerate(self.tokens):
            count = (position + 1) // 4
            self.chosen[row] = (torch.arange(512) * count // 512).int()
            slots = self.entry_slots(request, count, 4)[self.chosen[row].long()]
            write_kv(torch.randn(512, 512), self.entries[4], slots)

    def write_request(self, number: int, length: int) -> None:
        first = max(0, length - self.queries[number] - self.window_size)
        write_kv(torch.randn(length - first, 512), self.window, self.raw.slots(number, first, length))
        slots = self.entry_slots(number, length // 128, 128)
        write_kv(torch.randn(len(slots), 512), self.entries[128], slots)

    def common_on(self, pool: str, device: str) -> SimpleNamespace:
        found = self.common(pool)
        found.seq_lens_cpu_upper_bound = found.seq_lens
        for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping"):
            setattr(found, name, getattr(found, name).to(device))
        return found

    def run(self, ratio: int, q: Tensor, sink: Tensor) -> tuple[Any, Tensor]:
        """The window's record and the output of a layer, on the query's device."""
        device = str(q.device)
        window = v4.window_builder(device=device, max_length=MAX_LENGTH).build(0, self.common_on("window", device))
        main, cache = None, None
        if ratio > 1:
            builder = v4.main_builder(ratio, device, max_length=MAX_LENGTH)
            main, cache = builder.build(0, self.common_on("main", device)), self.entries[ratio].storage.to(device)
        layer = v4.layer_of(self, ratio, attn_sink=sink, topk_indices_buffer=self.chosen.to(device))
        layer.swa_cache_layer.kv_cache = raw = self.window.storage.to(device)
        output, first = torch.full_like(q, 3.0), window.num_decode_tokens
        positions = torch.tensor([p for _, p in self.tokens], device=device)
        forward_prefill(layer, q[first:], positions[first:], cache, raw, output[first:], main, window)
        forward_decode(layer, q[:first], cache, window, main, ratio <= 1, output[:first])
        return window, output
