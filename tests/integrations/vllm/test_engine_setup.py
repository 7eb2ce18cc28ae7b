"""The engine adapter around attention: a layer's weights and one-call form, declared capabilities."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple

import engine_standin as engine
import pytest
import torch
from engine_standin import BF16, LATENT, NOPE, ROPE, VALUE, Served, Step, close, same_bytes
from seeds import seeded
from torch import Tensor

from tamis.integrations.vllm.backend import TamisSparseBackend
from tamis.integrations.vllm.impl import SparseImpl
from tamis.integrations.vllm.metadata import SparseMetadata, SparseMetadataBuilder

# A layer: refusals, weights, writes, the one-call form


def test_refusals_come_all_at_once() -> None:
    with pytest.raises(ValueError, match="cannot run this layer") as caught:
        engine.impl(
            num_kv_heads=2,
            alibi_slopes=[0.5],
            sliding_window=128,
            logits_soft_cap=30.0,
            attn_type="encoder_only",
            kv_cache_dtype="int4",
        )
    for reason in ("num_kv_heads is 2", "ALiBi", "sliding window", "soft cap", "'encoder_only'", "'int4'"):
        assert reason in str(caught.value)
    with pytest.raises(ValueError, match="head_size 512 is not"):
        engine.impl(head_size=512)
    with pytest.raises(ValueError, match="kv_lora_rank and qk_rope_head_dim must both be given, got None"):
        engine.impl(kv_lora_rank=None)
    kept = engine.impl(logits_soft_cap=0.0, attn_type=SimpleNamespace(value="decoder"), some_new_keyword=1)
    assert kept.softmax_scale == kept.scale == engine.SCALE


class Fp8Method:
    """A quantised linear layer as engines have it: only its `apply` knows what the bytes mean."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return (x.float() @ (layer.weight_packed.float() * layer.factor).T).to(x.dtype)


class UnquantizedLinearMethod:
    pass


@pytest.mark.parametrize("kind", ["plain", "unquantised", "quantised"])
def test_weights_are_split(kind: str) -> None:
    heads = 4
    weight = torch.randn(heads * (NOPE + VALUE), LATENT).to(torch.float8_e4m3fn)
    dense = weight.float() * 0.25
    layer = SimpleNamespace(weight=dense.bfloat16())
    if kind == "unquantised":
        layer.quant_method = UnquantizedLinearMethod()
    if kind == "quantised":
        layer = SimpleNamespace(
            weight_packed=weight, factor=0.25, quant_method=Fp8Method(), input_size_per_partition=LATENT
        )
    impl = engine.impl(heads, kv_b_proj=layer)
    impl.process_weights_after_loading(torch.bfloat16)
    per_head = dense.view(heads, NOPE + VALUE, LATENT)
    assert torch.equal(impl.W_UK.float(), per_head[:, :NOPE].permute(2, 0, 1))
    assert torch.equal(impl.W_UK_T.float(), per_head[:, :NOPE])
    assert torch.equal(impl.W_UV.float(), per_head[:, NOPE:].permute(2, 0, 1))
    assert impl.W_UK.dtype == impl.W_UV.dtype == torch.bfloat16
    q, latent = torch.randn(5, heads, NOPE).bfloat16(), torch.randn(5, heads, LATENT).bfloat16()
    close(impl._k_up_proj(q), torch.einsum("thp,lhp->thl", q.double(), impl.W_UK.double()), BF16)
    expected = torch.einsum("thl,lhv->thv", latent.double(), impl.W_UV.double())
    close(impl._v_up_proj(latent), expected, BF16)
    out = torch.empty(5, heads * VALUE).bfloat16()
    assert impl._v_up_proj(latent, out).data_ptr() == out.data_ptr()
    close(out.view(5, heads, VALUE), expected, BF16)


def test_weights_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"\[1024, 512\] for heads=4, nope_dim=128, value_dim=128, latent_dim=512"):
        engine.impl(4, kv_b_proj=SimpleNamespace(weight=torch.zeros(1000, 512))).process_weights_after_loading(
            torch.bfloat16
        )
    with pytest.raises(ValueError, match=r"one with weight, qweight, weight_packed, got .*kv_b_proj"):
        engine.impl(4, kv_b_proj=SimpleNamespace(name="kv_b_proj")).process_weights_after_loading(torch.bfloat16)
    with pytest.raises(ValueError, match="with kv_b_proj"):
        engine.impl(4).process_weights_after_loading(torch.bfloat16)
    with pytest.raises(ValueError, match="call process_weights_after_loading first"):
        engine.impl(4)._k_up_proj(torch.zeros(1, 4, NOPE))


def test_update_skips_padding_and_empty_caches() -> None:
    impl = engine.impl()
    storage = torch.zeros(2, 64, LATENT + ROPE, dtype=torch.bfloat16)
    latent, rope = torch.ones(5, LATENT).bfloat16(), torch.ones(5, ROPE).bfloat16()
    impl.do_kv_cache_update(latent, rope, storage, torch.tensor([70, -1, 3]))
    written = storage.flatten(0, 1).any(1).nonzero().flatten().tolist()
    assert written == [3, 70]
    impl.do_kv_cache_update(latent, rope, torch.empty(0), torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="slots must be at most 5 long"):
        impl.do_kv_cache_update(latent, rope, storage, torch.arange(6))


class OneCall:
    """A layer in the older one-call form, with its own projections."""

    def __init__(self, cache_dtype: str = "auto", **more: Any) -> None:
        random = seeded(1)
        self.of = of = engine.make_step([60, 90, 20], [1, 1, 6], 16)
        weight = torch.randn(16 * (NOPE + VALUE), LATENT, generator=random) * LATENT**-0.5
        self.q = torch.randn(of.tokens, 16, NOPE + ROPE, generator=random).bfloat16()
        self.weight = weight.bfloat16()
        self.served = Served(of, cache_dtype, kv_b_proj=SimpleNamespace(weight=self.weight), **more)
        self.served.impl.process_weights_after_loading(torch.bfloat16)
        self.storage = self.served.storage.clone()
        flat = self.storage.flatten(0, 1)
        flat[self.served.slots] = 0  # the call itself must write the new rows

    def __call__(self, metadata: Any, output: Tensor, storage: Tensor | None = None, **more: Any) -> Tensor:
        pad = torch.full((4, 1), torch.nan, dtype=torch.bfloat16)
        new = self.of.new_rows()
        latent, rope = (torch.cat([p, pad.expand(4, p.shape[1])]) for p in new.split([LATENT, ROPE], 1))
        q = torch.cat([self.q, pad.unsqueeze(1).expand(4, 16, NOPE + ROPE)])
        storage = self.storage if storage is None else storage
        return self.served.impl.forward(engine.layer(), q, latent, rope.unsqueeze(1), storage, metadata, output, **more)

    def expected(self) -> Tensor:
        per_head = self.weight.double().view(16, NOPE + VALUE, LATENT)
        nope, rope = self.q.double().split([NOPE, ROPE], -1)
        absorbed = torch.cat([torch.einsum("thp,hpl->thl", nope, per_head[:, :NOPE]), rope], -1)
        of = Step(self.of.lengths, self.of.queries, self.of.rows, absorbed, self.of.positions)
        return torch.einsum("thl,hvl->thv", engine.dense_fp64(of)[0], per_head[:, NOPE:])


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("joined", [True, False])
def test_one_call_form(cache_dtype: str, joined: bool) -> None:
    call = OneCall(cache_dtype)
    output = torch.full((12, 16 * VALUE) if joined else (12, 16, VALUE), 7.0).bfloat16()
    assert call(call.served.metadata, output) is output
    close(output[:8].view(8, 16, VALUE), call.expected(), BF16)
    assert (output[8:] == 7).all()
    assert same_bytes(call.storage, call.served.storage)


def test_one_call_form_while_profiling_and_refused() -> None:
    call = OneCall()
    output = torch.full((12, 16, VALUE), 7.0).bfloat16()
    before = call.storage.clone()
    assert call(None, output) is output
    assert (output == 0).all()
    assert same_bytes(call.storage, before)
    output.fill_(7)
    call(call.served.metadata, output, storage=torch.empty(0))
    assert (output[:8] == 0).all()
    assert (output[8:] == 7).all()
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(ValueError, match="quantise the output in a separate step"):
            call(call.served.metadata, output, **{name: torch.ones(1)})
    with pytest.raises(ValueError, match="output must be given"):
        call.served.impl.forward(engine.layer(), call.q, call.q, call.q, call.storage, None)


def test_a_layer_that_shares_a_cache_writes_nothing() -> None:
    call = OneCall(kv_sharing_target_layer_name="model.layers.0")
    before = call.storage.clone()
    call(call.served.metadata, torch.empty(12, 16, VALUE).bfloat16())
    assert same_bytes(call.storage, before)


# What the engine asks before it starts


class Capability(NamedTuple):
    major: int
    minor: int


def combination(**changed: Any) -> str | None:
    usual: dict[str, Any] = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": True,
        "device_capability": Capability(9, 0),
    }
    return TamisSparseBackend.supports_combination(**(usual | changed))


def test_declared_capabilities() -> None:
    backend = TamisSparseBackend
    assert backend.get_name() == "TAMIS_SPARSE_MLA"
    assert (backend.get_impl_cls(), backend.get_builder_cls()) == (SparseImpl, SparseMetadataBuilder)
    assert backend.get_metadata_cls() is SparseMetadata
    assert backend.is_mla()
    assert backend.is_sparse()
    assert backend.accept_output_buffer
    assert backend.supports_sink()
    assert backend.get_supported_head_sizes() == [576, 512]
    assert backend.get_supported_kernel_block_sizes() == backend.get_supported_kernel_block_sizes(object()) == [64]
    assert backend.get_required_kv_cache_layout() is None
    assert {torch.bfloat16, torch.float16} <= set(backend.supported_dtypes)
    for capability in (Capability(8, 0), (9, 0), (12, 1), None):
        assert backend.supports_compute_capability(capability)


def test_cache_shapes() -> None:
    shape = TamisSparseBackend.get_kv_cache_shape
    for name in ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3"):
        assert shape(10, 32, 1, 576, name) == (10, 32, 576)
    assert shape(10, 64, 1, 576) == (10, 64, 576)
    assert shape(10, 64, 1, 576, cache_dtype_str="fp8_ds_mla") == (10, 64, 656)
    assert shape(10, 256, 1, 512, "fp8_ds_mla") == (10, 256, 584)
    # As vLLM's KV connectors ask, to see which axis counts the pages.
    for head_size in (1, 256):
        assert shape(10, 16, 1, head_size) == (10, 16, head_size)
        assert shape(10, 16, 1, head_size, "fp8_ds_mla") == (10, 16, 656)
    with pytest.raises(ValueError, match=r"cache_dtype must be one of 'auto', .*, got 'fp8_e5m2'"):
        shape(10, 64, 1, 576, "fp8_e5m2")
    with pytest.raises(ValueError, match="num_kv_heads must be 1, got 2"):
        shape(10, 64, 2, 576)


def test_supported_combinations() -> None:
    for kv_cache_dtype in (None, *TamisSparseBackend.supported_kv_cache_dtypes):
        for block_size in (None, 32, 64, 61):
            assert combination(kv_cache_dtype=kv_cache_dtype, block_size=block_size) is None
    assert combination(dtype=torch.float16, has_sink=True, device_capability=None, use_mm_prefix=False, new=1) is None
    # By position, as vLLM calls it: without and with `use_mm_prefix` before the capability.
    places = (576, torch.bfloat16, "fp8_ds_mla", 64, True, False, True)
    assert TamisSparseBackend.supports_combination(*places, Capability(9, 0)) is None
    assert TamisSparseBackend.supports_combination(*places, False, Capability(9, 0)) is None
    refused = TamisSparseBackend.supports_combination(*places, True, Capability(9, 0))
    assert refused == "bidirectional multimodal prefixes are not supported"
    # The query's width before absorption does not matter here, but an indexer is required.
    for nope in (64, 128, 192):
        model = SimpleNamespace(hf_text_config=SimpleNamespace(qk_nope_head_dim=nope, index_topk=2048))
        assert combination(model_config=model) is None
    assert combination(model_config=SimpleNamespace(hf_text_config=SimpleNamespace(index_topk=2048))) is None
    model = SimpleNamespace(hf_text_config=SimpleNamespace(qk_nope_head_dim=128))
    assert combination(model_config=model) == "the model config has no index_topk"


def test_refused_combinations_name_every_reason() -> None:
    reason = combination(
        head_size=128,
        dtype=torch.float64,
        kv_cache_dtype="int8",
        use_mla=False,
        use_sparse=False,
        use_mm_prefix=True,
        model_config=SimpleNamespace(hf_config=SimpleNamespace()),
    )
    assert reason is not None
    for part in ("MLA", "not sparse", "multimodal", "head size 128", "'int8'", "index_topk", "dtype float64"):
        assert part in reason


def test_importing_the_adapter_starts_nothing() -> None:
    code = (
        "import sys, tamis.integrations.vllm as plugin; assert 'torch' not in sys.modules;"
        "import tamis.integrations.vllm.backend, torch;"
        "assert 'vllm' not in sys.modules and not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
