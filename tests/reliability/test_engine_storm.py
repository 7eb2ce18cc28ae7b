"""Storms of requests through the vLLM builders and the attention under them: whoever else is served, preempted or
drafted for, a request's output is what it is alone. A longer storm: `pytest tests/reliability --tokens 1000000`."""

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import engine_standin as v32
import pytest
import torch
from engine_traffic import Engine, Request, Token, alone
from torch import Tensor

from tamis.integrations.vllm.classes.v4_impl import V4Impl
from tamis.integrations.vllm.classes.v4_metadata import V4MetadataBuilder, V4WindowMetadataBuilder
from tamis.integrations.vllm.impl import SparseImpl
from tamis.integrations.vllm.metadata import SparseMetadataBuilder
from tamis.integrations.vllm.v4_forward import forward_decode, forward_prefill

HEADS, DRAFTS, MAX_TOKENS, MAX_REQUESTS, MAX_LENGTH = 2, 2, 64, 8, 150
EXACT = 1e-9
"""Between two float64 results, of sums of at most 600 terms in any order: 600 roundings of 2**-53 for each of three
products and a softmax, on values of at most 100, stay below it; a row of somebody else is off by 0.01 at least."""
SINGLE = 1e-3
"""The same in float32: 600 roundings of 2**-24, on values of at most 10."""


@lru_cache(maxsize=8192)
def numbers(source: tuple[int, int], kind: int, *shape: int) -> Tensor:
    """What is there, by seed and position, on a grid that FP8 rows hold exactly."""
    random = torch.Generator().manual_seed((source[0] * 1000 + source[1]) * 10 + kind)
    return v32.grid(*shape, random=random)


@lru_cache(maxsize=8192)
def picked(source: tuple[int, int], count: int, columns: int) -> Tensor:
    """Some of the first `count`, the last one always, -1 behind them."""
    random = torch.Generator().manual_seed(source[0] * 1000 + source[1])
    found = torch.full((columns,), -1, dtype=torch.int32)
    chosen = torch.randperm(count, generator=random)[:columns].int()
    found[: len(chosen)] = chosen
    if count:
        found[0] = count - 1
    return found


def content(token: Token) -> tuple[int, int]:
    """Of a rejected draft, something else."""
    seed, position = token.request.source(token.position)
    return (seed, position) if token.accepted else (seed ^ 12345, position)


class V32:
    """DeepSeek-V3.2: one pool, the positions of an indexer, decodes and prefills in one call or apart."""

    pools, pages, topk = {"main": 16}, {"main": 30}, 24
    drafts, max_tokens, max_requests, max_length = DRAFTS, MAX_TOKENS, MAX_REQUESTS, MAX_LENGTH

    def __init__(
        self, cache_dtype: str, mode: Any, *, kind: type[SparseMetadataBuilder] = SparseMetadataBuilder
    ) -> None:
        config = v32.config(
            HEADS,
            cache_dtype,
            topk=self.topk,
            max_tokens=MAX_TOKENS,
            max_requests=MAX_REQUESTS,
            max_length=MAX_LENGTH,
            speculative=SimpleNamespace(num_speculative_tokens=DRAFTS),
        )
        self.builder = kind(SimpleNamespace(block_size=16), ["layer"], config, "cpu", mode=mode)
        self.indexer = SimpleNamespace(topk_indices_buffer=torch.randint(0, 2**30, (MAX_TOKENS, self.topk)).int())
        self.impl: SparseImpl = v32.impl(HEADS, cache_dtype, indexer=self.indexer)
        packed = cache_dtype == "fp8_ds_mla"
        shape = (self.pages["main"], 16, 656 if packed else 576)
        self.storage = torch.full(shape, 0xFF if packed else torch.nan, dtype=torch.uint8 if packed else torch.bfloat16)

    def spoil(self, name: str, gone: list[int]) -> None:
        self.storage[gone] = 0xFF if self.storage.dtype == torch.uint8 else torch.nan

    def step(self, commons: dict[str, Any], tokens: list[Token], rows: int) -> Tensor:
        metadata = self.builder.build(0, commons["main"])
        new = torch.stack([numbers(content(token), 0, 576) for token in tokens])
        slots = metadata.slot_mapping[: len(tokens)]
        self.impl.do_kv_cache_update(*new.split([512, 64], 1), self.storage, slots)
        for row, token in enumerate(tokens):
            source = token.request.source(token.position)
            self.indexer.topk_indices_buffer[row] = picked(source, token.position + 1, self.topk)
        q = torch.full((rows, HEADS, 576), torch.nan, dtype=torch.float64)
        q[: len(tokens)] = torch.stack([numbers(content(token), 1, HEADS, 576) for token in tokens]).double()
        return self.impl.forward_mqa(q, self.storage, metadata, SimpleNamespace())[0][: len(tokens)]


class V4:
    """DeepSeek-V4: a window whose pages are given back, chosen entries of 4, every entry of 8; two ways to attend."""

    pools, pages, window, topk = {"main": 16, "window": 8}, {"main": 30, "window": 50}, 12, 6
    drafts, max_tokens, max_requests, max_length = DRAFTS, MAX_TOKENS, MAX_REQUESTS, MAX_LENGTH

    def __init__(self, *, kind: type[V4MetadataBuilder] = V4MetadataBuilder) -> None:
        config = v32.config(HEADS, topk=self.topk, max_tokens=MAX_TOKENS, max_requests=MAX_REQUESTS)
        config.model_config.max_model_len = MAX_LENGTH
        config.model_config.hf_config.sliding_window = self.window
        config.speculative_config = SimpleNamespace(num_speculative_tokens=DRAFTS)
        self.builders: dict[int, Any] = {
            ratio: kind(SimpleNamespace(block_size=16, compress_ratio=ratio), [], config, "cpu", every_entry=ratio == 8)
            for ratio in (4, 8)
        }
        self.raw_builder = V4WindowMetadataBuilder(SimpleNamespace(block_size=8), [], config, "cpu")
        shared = torch.randint(0, 2**30, (MAX_TOKENS, self.topk)).int()
        raw = torch.full((self.pages["window"], 8, 512), torch.nan, dtype=torch.bfloat16)
        self.layers = [
            SimpleNamespace(
                compress_ratio=ratio,
                window_size=self.window,
                scale=512**-0.5,
                attn_sink=torch.zeros(HEADS),
                swa_cache_layer=SimpleNamespace(kv_cache=raw),
                kv_cache=torch.full((30, 16 // max(ratio, 1), 512), torch.nan, dtype=torch.bfloat16),
                kv_cache_torch_dtype=torch.bfloat16,
                topk_indices_buffer=shared,
            )
            for ratio in (0, 4, 8)
        ]

    def spoil(self, name: str, gone: list[int]) -> None:
        for layer in self.layers:
            storage = layer.swa_cache_layer.kv_cache if name == "window" else layer.kv_cache
            storage[gone] = torch.nan

    def step(self, commons: dict[str, Any], tokens: list[Token], rows: int) -> Tensor:
        window, count = self.raw_builder.build(0, commons["window"]), len(tokens)
        raw = self.layers[0].swa_cache_layer.kv_cache.view(-1, 512)
        raw[window.slot_mapping[:count]] = torch.stack([numbers(content(token), 0, 512) for token in tokens])
        q = torch.full((rows, HEADS, 512), torch.nan)
        q[:count] = torch.stack([numbers(content(token), 1, HEADS, 512) for token in tokens]).float()
        positions = torch.tensor([token.position for token in tokens] + [0] * (rows - count))
        outs = []
        for layer in self.layers:
            ratio, record = layer.compress_ratio, None
            if ratio:
                record = self.builders[ratio].build(0, commons["main"])
                self._compress(layer, record.slot_mapping, tokens)
            outs.append(self._attend(layer, q, positions, window, record)[:count])
        return torch.stack(outs, 1)

    def _compress(self, layer: Any, slots: Tensor, tokens: list[Token]) -> None:
        """What tokens complete, and which entries an indexer would choose for them."""
        ratio, entries = layer.compress_ratio, layer.kv_cache.view(-1, 512)
        for row, token in enumerate(tokens):
            source = content(token)
            assert (slots[row] >= 0) == ((token.position + 1) % ratio == 0)
            if slots[row] >= 0:
                entries[slots[row]] = numbers(source, ratio, 512)
            if ratio == 4:
                layer.topk_indices_buffer[row] = picked(source, (token.position + 1) // 4, self.topk)

    def _attend(self, layer: Any, q: Tensor, positions: Tensor, window: Any, record: Any) -> Tensor:
        mixed, pages = torch.full_like(q, 3.0), torch.full_like(q, 3.0, dtype=torch.float64)
        V4Impl().forward_mqa(layer, q, None, None, mixed, swa_metadata=window, attn_metadata=record)
        first, entries = window.num_decode_tokens, layer.kv_cache if record is not None else None
        exact, raw = q.double(), layer.swa_cache_layer.kv_cache
        if window.num_prefills:
            later = (positions[first:], entries, raw, pages[first:], record, window)
            forward_prefill(layer, exact[first:], *later)
        if window.num_decodes:
            forward_decode(layer, exact[:first], entries, window, record, record is None, pages[:first])
        worst = (mixed - pages).abs().max()
        assert worst <= SINGLE, f"the two ways to attend differ by {worst}"
        return pages


def storm(make: Any, seed: int, tokens: int) -> Engine:
    """Run it, with every finished request compared with itself alone."""
    torch.manual_seed(seed)

    def check(request: Request) -> None:
        found = torch.stack([request.outputs[position] for position in sorted(request.outputs)])
        first = min(request.outputs)
        assert sorted(request.outputs) == list(range(first, request.length))
        worst = (found - alone(make(), request)[first:]).abs().max()
        assert worst <= EXACT, f"request {request.name} differs by {worst} from what it is alone"

    engine = Engine(make(), seed, check)
    engine.run(tokens)
    return engine


STORMS = {
    "v32": lambda: V32("auto", "mixed"),
    "v32 packed": lambda: V32("fp8_ds_mla", "mixed"),
    "v32 gathered": lambda: V32("fp8_ds_mla", "separate"),
    "v4": V4,
}


@pytest.mark.parametrize("name", STORMS)
def test_a_request_is_what_it_is_alone(name: str, pytestconfig: pytest.Config) -> None:
    tokens = pytestconfig.getoption("--tokens", None) or 2000
    engine = storm(STORMS[name], 1, tokens)
    happened = {"preempted": engine.preempted, "rejected": engine.rejected, "shared": engine.sharing}
    assert all(happened.values()), happened


class Leaking(SparseMetadataBuilder):
    """Takes one token of a step in twenty for one of its neighbour's."""

    steps = 0

    def build(self, *args: Any, **kwargs: Any) -> Any:
        record = super().build(*args, **kwargs)
        type(self).steps += 1
        if self.steps % 20 == 0 and record.num_reqs > 1:
            record.req_id_per_token[0] = 1
        return record


class V4Leaking(V4MetadataBuilder):
    """Looks up entries in a table whose first row is its neighbour's, in one step of some twenty."""

    steps = 0

    def build(self, *args: Any, **kwargs: Any) -> Any:
        record = super().build(*args, **kwargs)
        type(self).steps += 1
        if self.steps % 21 == 0 and record.num_reqs > 1:
            record.block_table[0] = record.block_table[1]
        return record


@pytest.mark.parametrize("make", [lambda: V32("auto", "mixed", kind=Leaking), lambda: V4(kind=V4Leaking)])
def test_a_planted_leak_is_found(make: Any) -> None:
    with pytest.raises(AssertionError, match=r"differs? by"):
        storm(make, 1, 5000)
