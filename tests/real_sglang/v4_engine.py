"""DeepSeek-V4 steps of the real SGLang on a CPU: its runner of unit tests, its pools, its backend and its metadata.

Rows are written by tamis' writer, and read by `decoded`, which shares no code with the library.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import bounds
import pytest
import torch
from sglang.srt.layers.attention import deepseek_v4_backend as engine
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput, EagleVerifyInput
from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit
from torch import Tensor

from tamis import PagedCache
from tamis.ops import write_kv

PAGE, PAGES, WINDOW, WIDTH = 256, 8, 128, 512
SCALE = WIDTH**-0.5
ENTRIES = {"c4_size": PAGE * PAGES // 4}
TAMIS = (
    {"dsv4_attn_backend": "tamis"}
    if hasattr(ServerArgs, "dsv4_attn_backend")
    else {"dsa_prefill_backend": "tamis", "dsa_decode_backend": "tamis"}
)
"""The options that choose tamis. SGLang 0.5.17 has none for V4 alone."""
RATIOS = (0, 1, 2, 4, 128) if "dsv4_attn_backend" in TAMIS else (0, 4, 128)
DECODE, EXTEND = ForwardMode.DECODE, ForwardMode.EXTEND
VERIFY, DRAFT_EXTEND = ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2


@contextmanager
def options(**given: Any) -> Iterator[None]:
    """SGLang's options as the command line would give them, for runners that are constructed in the block."""
    context = type(get_context())
    usual = context.override_server_args
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "override_server_args", lambda self, **rest: usual(self, **(rest | given)))
        # The kit's pool of entries is smaller than its window.
        patch.setattr(kit, "DeepSeekV4TokenToKVPool", lambda **sizes: DeepSeekV4TokenToKVPool(**(sizes | ENTRIES)))
        # Attention does not read the plans of FlashMLA, of the compressor and of the indexer, which need a GPU.
        patch.setattr(engine, "_create_flashmla_metadata", lambda: None)
        patch.setattr(engine, "create_paged_compressor_data", lambda *_, **__: None)
        patch.setattr(engine.DeepseekV4AttnBackend, "init_forward_metadata_indexer", lambda *_, **__: None)
        yield


def runner_of(case: kit.DSV4AttentionCase, ratio: int = 0) -> kit.MockDSV4ModelRunner:
    config = kit.TinyDSV4ModelConfig(num_heads=case.num_heads, context_len=PAGE * 4, compression_ratios=[ratio])
    return kit.MockDSV4ModelRunner(
        case=case,
        model_config=config,
        dtype=torch.bfloat16,
        device="cpu",
        max_context_len=PAGE * 4,
        swa_size=PAGE * PAGES,
        compression_ratios=[ratio],
    )


def case_of(mode: ForwardMode, prefixes: list[int], news: list[int], heads: int = 8) -> kit.DSV4AttentionCase:
    return kit.DSV4AttentionCase(
        name="tamis",
        backend="dsv4",
        forward_mode=mode,
        num_heads=heads,
        page_size=PAGE,
        prefix_lens=tuple(prefixes),
        extend_lens=tuple(news),
    )


def decoded(buffer: Tensor, page_size: int, slot: int) -> Tensor:
    """A V4 row of a page by its byte offsets: 448 e4m3 values and 64 bf16 values, then a page's exponents apart."""
    page, row = buffer.view(torch.uint8)[slot // page_size], slot % page_size
    values = page[row * 576 : row * 576 + 448].view(torch.float8_e4m3fn).double()
    rope = page[row * 576 + 448 : row * 576 + 576].view(torch.bfloat16).double()
    exponents = page[page_size * 576 + row * 8 : page_size * 576 + row * 8 + 7].double()
    return torch.cat((values * (2.0 ** (exponents - 127)).repeat_interleave(64), rope))


class Step:
    """One step of several requests in shuffled pages. Rows that no token may see are NaN."""

    def __init__(
        self,
        mode: ForwardMode,
        prefixes: list[int],
        news: list[int],
        *,
        ratio: int = 0,
        heads: int = 8,
        padded: int = 0,
    ) -> None:
        torch.manual_seed(3)
        self.case, self.ratio, self.heads = case_of(mode, prefixes, news, heads), ratio, heads
        self.runner = runner_of(self.case, ratio)
        self.backend: Any = ATTENTION_BACKENDS["dsv4"](self.runner)
        self.pool = self.runner.token_to_kv_pool
        self.layer = RadixAttention(heads, WIDTH, SCALE, 1, 0, v_head_dim=WIDTH)
        self.sink = torch.randn(max(heads, padded))
        self.lengths = [p + n for p, n in zip(prefixes, news, strict=True)]
        self._place()
        self._write()
        self.tokens = [(r, p + i) for r, (p, n) in enumerate(zip(prefixes, news, strict=True)) for i in range(n)]
        self.q = torch.full((len(self.tokens), max(heads, padded), WIDTH), torch.nan, dtype=torch.bfloat16)
        self.q[:, :heads] = torch.randn(len(self.tokens), heads, WIDTH).bfloat16()
        self.batch = self._batch()

    def _place(self) -> None:
        """Page 0 is the engine's dummy, which padding writes to."""
        free = (torch.randperm(PAGES - 1) + 1).tolist()
        self.pages = [[free.pop() for _ in range(-(-length // PAGE))] for length in self.lengths]
        for request, length in enumerate(self.lengths):
            self.runner.req_to_token_pool.req_to_token[request, :length] = self.places(request, length)

    def places(self, request: int, count: int, ratio: int = 1) -> Tensor:
        """The slots of a request's first rows, in pages of 256 / ratio rows."""
        number, size = torch.arange(count), PAGE // ratio
        return torch.tensor(self.pages[request])[number // size] * size + number % size

    def buffers(self) -> Iterator[tuple[int, Tensor, int]]:
        yield 1, self.pool.get_swa_key_buffer_radix(0), self.pool.swa_page_size
        if self.ratio:
            yield self.ratio, self.pool.get_extra_key_buffer(0), self.pool.get_extra_key_page_size(0)

    def _write(self) -> None:
        for part, (ratio, buffer, size) in enumerate(self.buffers()):
            buffer.view(torch.uint8).fill_(0xFF)
            rows = buffer.view(torch.uint8)[:, : size * 584].unflatten(1, (size, 584))
            for request, length in enumerate(self.lengths):
                per_row = self.ratio if part else ratio
                slots = self.places(request, length // per_row, per_row)
                write_kv(torch.randn(len(slots), WIDTH), PagedCache.wrap(rows, "v4-fp8"), slots)

    def _batch(self) -> ForwardBatch:
        case, lengths = self.case, torch.tensor(self.lengths, dtype=torch.int32)
        positions = torch.tensor([p for _, p in self.tokens])
        places = [self.places(request, p + 1)[-1] for request, p in self.tokens]
        batch = ForwardBatch(
            forward_mode=case.forward_mode,
            batch_size=case.batch_size,
            input_ids=torch.arange(len(self.tokens)),
            req_pool_indices=torch.arange(case.batch_size, dtype=torch.int32),
            seq_lens=lengths,
            seq_lens_cpu=lengths.clone(),
            out_cache_loc=torch.stack(places),
            seq_lens_sum=sum(self.lengths),
            positions=positions,
        )
        if hasattr(self.runner, "kv_index_translator"):
            self.runner.kv_index_translator.bind_own_plan(batch)
        if case.forward_mode.is_extend(include_draft_extend_v2=True):
            news = torch.tensor(case.input_lens, dtype=torch.int32)
            batch.extend_prefix_lens = torch.tensor(case.prefix_lens, dtype=torch.int32)
            batch.extend_prefix_lens_cpu = list(case.prefix_lens)
            batch.extend_seq_lens, batch.extend_seq_lens_cpu = news, list(case.input_lens)
            batch.extend_start_loc = torch.cumsum(news, 0, dtype=torch.int32) - news
            batch.extend_num_tokens = len(self.tokens)
        if case.forward_mode.is_target_verify():
            # Lengths without the drafts, which SGLang appends.
            prefixes = torch.tensor(case.prefix_lens, dtype=torch.int32)
            batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = prefixes, prefixes.clone(), int(prefixes.sum())
            batch.spec_info = _verify_input(batch, case.input_lens[0])
        if case.forward_mode.is_draft_extend_v2():
            batch.spec_info = EagleDraftExtendInput(
                num_accept_tokens=torch.tensor(case.input_lens, dtype=torch.int32),
                seq_lens=batch.seq_lens,
                positions=batch.positions,
            )
        return batch

    def prepare(self, graph: bool = False) -> Any:
        """SGLang's metadata of this step, with entries chosen in place of its indexer.

        With `graph` it is the metadata of a replayed CUDA graph, which was captured with a batch of its own.
        """
        if graph:
            backend, batch = self.backend, self.batch
            backend.init_cuda_graph_state(self.case.batch_size, len(self.tokens))
            lengths, batch.seq_lens = batch.seq_lens, torch.ones_like(batch.seq_lens)
            backend.init_forward_metadata_out_graph(batch, in_capture=True)
            backend.init_forward_metadata_in_graph(batch)
            backend.on_after_cuda_graph_warmup()
            batch.seq_lens = lengths
            backend.init_forward_metadata_out_graph(batch)
            backend.init_forward_metadata_in_graph(batch)
        else:
            self.backend.init_forward_metadata(self.batch)
        core = self.backend.forward_metadata.core_attn_metadata
        self.chosen: list[Tensor] = []
        if self.ratio in (1, 2, 4):
            rows = getattr(core, f"c{self.ratio}_sparse_page_indices")
            for row, (request, p) in enumerate(self.tokens):
                seen = (p + 1) // self.ratio
                count = min(seen, 60)
                picked = torch.randperm(seen)[:count]
                if count > 4:
                    picked[count // 2] = -1  # a hole, which is skipped
                slots = self.places(request, seen, self.ratio)[picked.clamp(min=0)] if seen else picked
                rows[row, :count] = torch.where(picked < 0, -1, slots).int()
                self.chosen.append(picked[picked >= 0])
        return core

    def forward(self, rows: int | None = None, **changes: Any) -> Tensor:
        q = self.q if rows is None else torch.cat((self.q, self.q.new_zeros(rows, *self.q.shape[1:])))
        arguments = {"compress_ratio": self.ratio, "save_kv_cache": False, "attn_sink": self.sink} | changes
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend)):
            return self.backend.forward(q, q, q, self.layer, self.batch, **arguments)

    def seen(self, row: int) -> Tensor:
        """Rows of the window and the entries that one token attends to, from their bytes."""
        request, p = self.tokens[row]
        found = list(self.buffers())
        slots = self.places(request, p + 1)[max(0, p - WINDOW + 1) :]
        keys = [decoded(found[0][1], found[0][2], int(slot)) for slot in slots]
        if self.ratio:
            entries = self.places(request, (p + 1) // self.ratio, self.ratio)
            entries = entries if self.ratio == 128 else entries[self.chosen[row]]
            keys += [decoded(found[1][1], found[1][2], int(slot)) for slot in entries]
        return torch.stack(keys)

    def agrees(self, output: Tensor) -> None:
        """Assert that an output is attention in float64 up to the rounding of its arithmetic, and zero elsewhere."""
        count, options = len(self.tokens), {"scale": SCALE, "sink": self.sink[: self.heads], "parts": 2}
        q = self.q[:, : self.heads].double()
        exact = bounds.stacked([bounds.attention(q[row], self.seen(row), **options) for row in range(count)])
        bounds.agree(output[:count, : self.heads], exact.out, exact.out_error, output.dtype)
        assert output[:, self.heads :].eq(0).all(), "padded heads"
        assert output[count:].eq(0).all(), "padded tokens"


def _verify_input(batch: ForwardBatch, drafts: int) -> EagleVerifyInput:
    absent: Any = None
    return EagleVerifyInput(
        draft_token=batch.input_ids,
        custom_mask=absent,
        positions=batch.positions,
        retrieve_index=absent,
        retrieve_next_token=absent,
        retrieve_next_sibling=absent,
        retrieve_cum_len=absent,
        spec_steps=drafts - 1,
        topk=1,
        draft_token_num=drafts,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        seq_lens_sum=batch.seq_lens_sum,
        seq_lens_cpu=batch.seq_lens_cpu,
    )
