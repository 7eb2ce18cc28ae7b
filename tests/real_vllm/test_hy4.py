"""Hy4's own layers in the real vLLM, on CPU tensors: sinks, a gate, a selection that the next layer uses as well.

Projections, ropes, norms and gates are vLLM's; attention and the indexer are tamis'. Where vLLM has kernels for a GPU
alone (index keys and index queries in FP8), functions with the same arguments run, by the documented formats.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import engine_standin as engine
import index_standin as index
import pytest
import torch
from bounds import relative_error
from configured import make_config
from engine_standin import LATENT, NOPE, ROPE, VALUE
from test_attention import PAGE
from test_layer import alone, bind_cache, dense_prefill  # noqa: F401
from torch import Tensor
from vllm import _custom_ops
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.v1.attention import selector
from vllm.v1.attention.backend import CommonAttentionMetadata

from tamis.integrations.vllm.indexer_plugin import Indexer
from tamis.integrations.vllm.plugin import Backend, Impl

hy4 = pytest.importorskip("vllm.models.hy_v4.nvidia.attention", reason="from vLLM 0.32 on")
pytestmark = pytest.mark.usefixtures("hopper", "alone", "dense_prefill", "index_kernels")

HIDDEN, HEADS, TOPK, LENGTHS, EPS = 64, 4, 32, (150, 70), 1e-5
STEPS = ((100, 40), (49, 1), (1, 29))
"""New tokens of both requests: prompts, then a prompt beside a decode, in both orders."""


def to_fp8(x: Tensor, group_size: int, *, column_major_scales: bool, use_ue8m0: bool) -> tuple[Tensor, Tensor]:
    """vLLM's rounding of groups to e4m3, with scales of powers of two."""
    assert (x.shape[-1], column_major_scales, use_ue8m0) == (group_size, False, True)
    scale = torch.exp2(torch.ceil(torch.log2(x.abs().amax(-1, keepdim=True).clamp_min(1e-10) / 448)))
    return (x / scale).to(torch.float8_e4m3fn), scale


@pytest.fixture
def index_kernels(hopper: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_attn_indexer, "current_platform", hopper())
    monkeypatch.setattr(sparse_attn_indexer, "has_deep_gemm", lambda: True)
    monkeypatch.setattr(
        _custom_ops, "indexer_k_quant_and_cache", lambda k, pages, slots, *_: index.write_keys(k, pages, slots)
    )
    monkeypatch.setattr(hy4, "per_token_group_quant_fp8", to_fp8)


def configure(cache_dtype: str = "auto") -> Any:
    config = make_config(HEADS, cache_dtype, dtype=torch.float32, topk=TOPK)
    config.cache_config.block_size = PAGE
    config.additional_config = {"tamis": {"indexer": "tamis"}}
    config.kernel_config.enable_jit_warmup = False
    config.attention_config.sparse_mla_prefill_workspace_factor = 5
    return config


def make_layers(
    config: Any, *, sink: bool = True, kinds: Sequence[str] = ("full", "shared"), **changes: Any
) -> list[Any]:
    """vLLM's layers with random weights, which select into one buffer."""
    selector._cached_get_attn_backend.cache_clear()
    widths = {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": VALUE}
    settings: dict[str, Any] = dict(
        num_hidden_layers=len(kinds),
        layer_types=["deepseek_sparse_attention"] * len(kinds),
        indexer_types=list(kinds),
        index_topk=TOPK,
        index_n_heads=index.HEADS,
        index_head_dim=index.DIM,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        gated_mla=True,
        gating_type="elementwise",
        learnable_sink=sink,
        **widths,
    )
    model = SimpleNamespace(**(settings | changes))
    buffer = torch.full((sum(LENGTHS), TOPK), 7, dtype=torch.int32)
    layers = []
    for number in range(len(kinds)):
        layer = hy4.HYV4MLAAttention(
            vllm_config=config,
            config=model,
            hidden_size=HIDDEN,
            num_heads=HEADS,
            q_lora_rank=HIDDEN,
            max_position_embeddings=2048,
            cache_config=config.cache_config,
            prefix=f"model.layers.{number}.self_attn",
            topk_indices_buffer=buffer,
            layer_idx=number,
            **widths,
        )
        random = torch.Generator().manual_seed(number)
        for weight in layer.parameters():
            spread = weight.shape[-1] ** -0.5 if weight.dim() == 2 else 1.0
            weight.data = torch.randn(weight.shape, generator=random) * spread + (weight.dim() == 1)
        layer.mla_attn.process_weights_after_loading(torch.float32)
        layers.append(layer)
    return layers


class Served:
    """Layers with their caches, which run steps as the engine does."""

    def __init__(self, config: Any, layers: Sequence[Any], lengths: Sequence[int]) -> None:
        self.config, self.layers, self.seen = config, layers, [0] * len(lengths)
        random = torch.Generator().manual_seed(9)
        pages = [-(-length // PAGE) for length in lengths]
        self.table = torch.zeros(len(lengths), max(pages), dtype=torch.int32)
        for request, mine in enumerate((1 + torch.randperm(sum(pages), generator=random)).split(pages)):
            self.table[request, : len(mine)] = mine
        self.specs = {}
        for layer in layers:
            attention, spec = layer.mla_attn, layer.mla_attn.get_kv_cache_spec(config)
            width = spec.page_size_bytes // PAGE // spec.dtype.itemsize
            storage = torch.full((1 + sum(pages), 1, PAGE, width * spec.dtype.itemsize), 0xFF, dtype=torch.uint8)
            bind_cache(attention, storage.view(spec.dtype))
            self.specs[attention.layer_name] = (attention.get_attn_backend(), spec)
            if layer.indexer is not None:
                cache = layer.indexer.k_cache
                cache.kv_cache = torch.full((1 + sum(pages), PAGE, index.ROW), 0xFF, dtype=torch.uint8)
                self.specs[cache.prefix] = (cache.get_attn_backend(), cache.get_kv_cache_spec(config))

    def rows(self, number: int, request: int) -> tuple[Tensor, Tensor | None]:
        """The cached rows of a request in float64, and the scales of their latent values in FP8."""
        storage = self.layers[number].mla_attn.kv_cache
        at = torch.arange(self.seen[request])
        held = storage[self.table[request].long()[at // PAGE], at % PAGE]
        if held.dtype != torch.uint8:
            return held.double(), None
        values, scales, rope = (part.contiguous() for part in held.split([LATENT, 16, 2 * ROPE], 1))
        each = scales.view(torch.float32).double().repeat_interleave(LATENT // 4, 1)
        latent = values.view(torch.float8_e4m3fn).double() * each
        return torch.cat((latent, rope.view(torch.bfloat16).double()), 1), each

    def run(self, queries: Sequence[int], hidden: Sequence[Tensor]) -> list[Tensor]:
        """The inputs of the first layer's indexer, the positions that it selected, and the outputs of all layers."""
        starts, self.seen = self.seen, [seen + new for seen, new in zip(self.seen, queries, strict=True)]
        places = [torch.arange(start, end) for start, end in zip(starts, self.seen, strict=True)]
        slots = torch.cat(
            [row.long()[at // PAGE] * PAGE + at % PAGE for row, at in zip(self.table, places, strict=True)]
        )
        record = engine.common(self.seen, queries, self.table, slots)
        common = CommonAttentionMetadata(**vars(record), seq_lens_cpu_upper_bound=record.seq_lens)
        metadata = {
            name: backend.get_builder_cls()(spec, [name], self.config, torch.device("cpu")).build(0, common)
            for name, (backend, spec) in self.specs.items()
        }
        given = torch.cat([rows[at] for rows, at in zip(hidden, places, strict=True)])
        with (
            torch.inference_mode(),
            set_current_vllm_config(self.config),
            set_forward_context(metadata, self.config, slot_mapping=dict.fromkeys(metadata, slots)),
        ):
            found = [layer(torch.cat(places), given) for layer in self.layers]
            first = self.layers[0]
            q_c = first.q_a_layernorm(first.fused_qkv_a_proj(given)[0][:, :HIDDEN])
            inputs = first.indexer.prepare_inputs(given, q_c, torch.cat(places), first.indexer_rope_emb)
        return [*inputs[1:], first.topk_indices_buffer[: len(given)].clone(), *found]


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Adjacent pairs [T, ..., ROPE] by the angles of their positions."""
    angles = positions.double()[:, None] * 10000.0 ** (-torch.arange(0, ROPE, 2).double() / ROPE)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    ).view(len(x), *[1] * (x.dim() - 2), -1)
    return torch.view_as_real(turned).flatten(-2)


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def projected(layer: Any, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Queries [T, H, NOPE + ROPE] and rows [T, LATENT + ROPE] of one request in float64, rotated."""
    x, positions = hidden.double(), torch.arange(len(hidden))
    q_c, kv, rope = (x @ layer.fused_qkv_a_proj.weight.double().T).split([HIDDEN, LATENT, ROPE], 1)
    q = norm(q_c, layer.q_a_layernorm.weight) @ layer.q_b_proj.weight.double().T
    nope, turned = q.view(len(x), HEADS, NOPE + ROPE).split([NOPE, ROPE], 2)
    rows = torch.cat((norm(kv, layer.kv_a_layernorm.weight), rotate(rope, positions)), 1)
    return torch.cat((nope, rotate(turned, positions)), 2), rows


def attended(layer: Any, hidden: Tensor, rows: Tensor, selected: Tensor) -> Tensor:
    """The layer's output for one request by Hy4's definition, in float64, with keys and values of each head."""
    x, (q, _) = hidden.double(), projected(layer, hidden)
    both = rows[:, :LATENT] @ layer.kv_b_proj.weight.double().T
    k, v = both.view(len(x), HEADS, NOPE + VALUE).split([NOPE, VALUE], 2)
    logits = torch.einsum("thd,shd->hts", q[..., :NOPE], k)
    logits += torch.einsum("thd,sd->hts", q[..., NOPE:], rows[:, LATENT:])
    allowed = torch.zeros(len(x), len(x) + 1, dtype=torch.bool)
    allowed.scatter_(1, torch.where(selected < 0, len(x), selected).long(), True)
    logits = (logits * (NOPE + ROPE) ** -0.5).masked_fill(~allowed[:, :-1], -torch.inf)
    if layer.learnable_sink:
        sinks = layer.learnable_sink_param.double().view(HEADS, 1, 1).expand(-1, len(x), 1)
        logits = torch.cat((logits, sinks), 2)
    weights = torch.softmax(logits, 2)[..., : len(x)]
    values = torch.einsum("hts,shd->thd", weights, v).flatten(1)
    gated = values * torch.sigmoid(x @ layer.linear_gate.weight.double().T)
    return gated @ layer.o_proj.weight.double().T


def best(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """The positions of one request by score and then by position, ascending, then -1; keys rounded as they are held."""
    keys, scale = to_fp8(k.float(), index.DIM, column_major_scales=False, use_ue8m0=True)
    held = keys.double() * scale.double()
    scores = torch.einsum("thd,sd->ths", q.double(), held).relu() * weights.double().unsqueeze(2)
    scores = scores.sum(1).masked_fill(~torch.ones(len(q), len(q)).tril().bool(), -torch.inf)
    found = torch.full((len(q), TOPK), -1, dtype=torch.int32)
    for token, row in enumerate(scores):
        chosen = row[: token + 1].sort(descending=True, stable=True).indices[:TOPK]
        found[token, : len(chosen)] = chosen.sort().values
    return found


@pytest.mark.parametrize("sink", [True, False])
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
def test_layers_of_vllm_run_on_tamis(cache_dtype: str, sink: bool) -> None:
    config = configure(cache_dtype)
    with set_current_vllm_config(config):
        layers = make_layers(config, sink=sink)
        assert [layer.mla_attn.attn_backend for layer in layers] == [Backend, Backend]
        assert [type(layer.mla_attn.impl) for layer in layers] == [Impl, Impl]
        assert [layer.mla_attn.impl.sinks is not None for layer in layers] == [sink, sink]
        assert type(layers[0].indexer.indexer_op) is Indexer
        assert layers[1].indexer is None
        served = Served(config, layers, LENGTHS)
    random = torch.Generator().manual_seed(4)
    hidden = [torch.randn(length, HIDDEN, generator=random) for length in LENGTHS]
    steps = [served.run(queries, hidden) for queries in STEPS]
    for request, tokens in enumerate(hidden):
        parts = [[part.split(new)[request] for part in step] for new, step in zip(STEPS, steps, strict=True)]
        q, k, weights, positions, *found = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
        assert torch.equal(positions, best(q, k, weights))
        for number, output in enumerate(found):
            rows, exact = served.rows(number, request), projected(layers[number], tokens)[1]
            assert_rounded(*rows, exact)
            assert relative_error(output, attended(layers[number], tokens, rows[0], positions)) < 1e-5


def assert_rounded(held: Tensor, scales: Tensor | None, exact: Tensor) -> None:
    """That rows are what their format can hold of the exact ones. e4m3 has three bits after the first, and below its
    smallest normal number steps of 2^-9; a bf16 rope has seven bits. 1e-5 is for float32."""
    error = (held - exact).abs()
    if scales is None:
        assert bool((error <= 1e-5 * (1 + exact.abs())).all())
        return
    latent, rope = error.split([LATENT, ROPE], 1)
    most = torch.maximum(exact[:, :LATENT].abs() * 2**-4, scales * 2**-10)
    assert bool((latent <= most + 1e-5).all())
    assert bool((rope <= exact[:, LATENT:].abs() * 2**-8 + 1e-5).all())


def test_layers_that_select_nothing_are_refused() -> None:
    """Without `layer_types` vLLM takes every layer for a dense one."""
    config = configure()
    with (
        set_current_vllm_config(config),
        pytest.raises(ValueError, match=r"CUSTOM is not valid .*the layer is not sparse"),
    ):
        make_layers(config, kinds=("full",), layer_types=None)


def test_sinks_under_decode_context_parallelism_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure()
    group = SimpleNamespace(world_size=2, rank_in_group=0)
    monkeypatch.setattr(parallel_state, "get_dcp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "get_dcp_world_size_and_rank", lambda *_: (2, 0), raising=False)
    with (
        set_current_vllm_config(config),
        pytest.raises(
            ValueError, match="tamis cannot run this layer: attention sinks under decode context parallelism"
        ),
    ):
        make_layers(config, kinds=("shared",))
