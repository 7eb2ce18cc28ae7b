"""kv_b_proj split, absorbed and applied; weights out of plain and quantised layers."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from seeds import seeded
from torch import Tensor

from tamis.model.absorb import WEIGHT_NAMES, AbsorbedWeights, dense_weight, dequantise_blocks, layer_weight

H, P, V, L = 3, 5, 7, 11
SIZES = {"heads": H, "nope_dim": P, "value_dim": V, "latent_dim": L}


def kv_b_weight(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(H * (P + V), L, generator=seeded(1)).to(dtype)


def halves(weight: Tensor) -> tuple[Tensor, Tensor]:
    """W_UK [H, P, L] and W_UV [H, V, L], row by row."""
    keys = torch.stack([torch.stack([weight[h * (P + V) + p] for p in range(P)]) for h in range(H)])
    values = torch.stack([torch.stack([weight[h * (P + V) + P + v] for v in range(V)]) for h in range(H)])
    return keys, values


class ScaledInt8:
    """A quantisation scheme as engines write them: int8 rows with one factor each."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        assert bias is None
        self.calls.append((x.dtype, tuple(x.shape)))
        return (x.float() @ (layer.qweight.float() * layer.scales.unsqueeze(1)).T).to(x.dtype)


class UnquantizedLinearMethod:
    """Only its name counts."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise AssertionError("an unquantised layer gives its weight as it is")


def int8_layer() -> SimpleNamespace:
    generator = seeded(2)
    quantised = torch.randint(-127, 128, (H * (P + V), L), dtype=torch.int8, generator=generator)
    scales = 2.0 ** torch.randint(-9, 1, (H * (P + V),), generator=generator)
    return SimpleNamespace(
        qweight=quantised, scales=scales, input_size_per_partition=L, quant_method=ScaledInt8(), name="kv_b_proj"
    )


def test_split_takes_the_rows_of_each_head() -> None:
    weight = kv_b_weight()
    absorbed = AbsorbedWeights.split(weight, **SIZES)
    keys, values = halves(weight)
    assert torch.equal(absorbed.key, keys)
    assert torch.equal(absorbed.value, values.transpose(1, 2))
    assert absorbed.key.is_contiguous()
    assert absorbed.value.is_contiguous()


def test_split_takes_a_transposed_view() -> None:
    weight = kv_b_weight()
    absorbed = AbsorbedWeights.split(weight.T.contiguous().T, **SIZES)
    assert torch.equal(absorbed.key, halves(weight)[0])


def test_split_converts_when_asked() -> None:
    weight = kv_b_weight()
    absorbed = AbsorbedWeights.split(weight, **SIZES, dtype=torch.bfloat16)
    assert absorbed.key.dtype == absorbed.value.dtype == torch.bfloat16
    assert torch.equal(absorbed.key, halves(weight.to(torch.bfloat16))[0])
    assert AbsorbedWeights.split(weight.half(), **SIZES).key.dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_projections_are_the_einsums_of_the_specification(dtype: torch.dtype) -> None:
    weight = kv_b_weight(dtype)
    keys, values = halves(weight.double())
    absorbed = AbsorbedWeights.split(weight, **SIZES)
    q = torch.randn(4, H, P).to(dtype)
    latent = torch.randn(4, H, L).to(dtype)
    query, value = absorbed.absorb_query(q), absorbed.project_value(latent)
    assert (query.dtype, query.shape) == (dtype, (4, H, L))
    assert (value.dtype, value.shape) == (dtype, (4, H, V))
    tolerance = {"rtol": torch.finfo(dtype).eps, "atol": 1e-5}
    torch.testing.assert_close(query.double(), torch.einsum("thp,hpl->thl", q.double(), keys), **tolerance)
    torch.testing.assert_close(value.double(), torch.einsum("thl,hvl->thv", latent.double(), values), **tolerance)


def test_absorbed_scores_equal_those_of_expanded_keys() -> None:
    weight = kv_b_weight()
    absorbed = AbsorbedWeights.split(weight, **SIZES)
    q, latent = torch.randn(4, H, P), torch.randn(6, L)
    expanded = (latent @ weight.T).view(6, H, P + V)
    plain = torch.einsum("thp,shp->ths", q, expanded[..., :P])
    torch.testing.assert_close(torch.einsum("thl,sl->ths", absorbed.absorb_query(q), latent), plain)
    mixed = torch.softmax(plain, -1)
    outputs = torch.einsum("ths,shv->thv", mixed, expanded[..., P:])
    torch.testing.assert_close(absorbed.project_value(torch.einsum("ths,sl->thl", mixed, latent)), outputs)


def test_no_tokens_give_no_rows() -> None:
    absorbed = AbsorbedWeights.split(kv_b_weight(), **SIZES)
    assert absorbed.absorb_query(torch.ones(0, H, P)).shape == (0, H, L)
    assert absorbed.project_value(torch.ones(0, H, L)).shape == (0, H, V)


def test_projections_take_transposed_views() -> None:
    absorbed = AbsorbedWeights.split(kv_b_weight(), **SIZES)
    q = torch.randn(H, 4, P)
    assert torch.equal(absorbed.absorb_query(q.transpose(0, 1)), absorbed.absorb_query(q.transpose(0, 1).contiguous()))


@pytest.mark.parametrize("weight", [torch.ones(36, 12), torch.ones(11, 36), torch.ones(36)], ids=lambda w: str(w.shape))
def test_wrong_weight_shape_names_all_five_numbers(weight: Tensor) -> None:
    with pytest.raises(ValueError, match=r"^weight must be of shape \[36, 11\] for .*, got \[.*\]; pass kv_b") as error:
        AbsorbedWeights.split(weight, **SIZES)
    for part in ("36", "heads=3", "nope_dim=5", "value_dim=7", "latent_dim=11", str(list(weight.shape))):
        assert part in str(error.value)


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^weight must be .*, got list; "):
        AbsorbedWeights.split([1.0], **SIZES)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^heads must be >= 1, got 0$"):
        AbsorbedWeights.split(kv_b_weight(), **(SIZES | {"heads": 0}))
    with pytest.raises(TypeError, match=r"^nope_dim must be an int, got float$"):
        AbsorbedWeights.split(kv_b_weight(), **(SIZES | {"nope_dim": 5.0}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("q", "kind", "message"),
    [
        (torch.ones(4, H, P + 1), ValueError, r"q_nope must be of shape \[T, H=3, P=5\], got \[4, 3, 6\]; "),
        (torch.ones(4, H + 1, P), ValueError, r"q_nope must be of shape \[T, H=3, P=5\], got \[4, 4, 5\]; "),
        (torch.ones(4, P), ValueError, r"q_nope must be of shape .*, got \[4, 5\]; "),
        (torch.ones(4, H, P).int(), TypeError, "q_nope must be bfloat16 .*, got int32; "),
        (torch.ones(4, H, P, device="meta"), ValueError, "q_nope must be on cpu, got a tensor on meta; "),
    ],
)
def test_wrong_queries_are_refused(q: Tensor, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match="^" + message):
        AbsorbedWeights.split(kv_b_weight(), **SIZES).absorb_query(q)


@pytest.mark.parametrize(
    ("latent", "kind", "message"),
    [
        (torch.ones(4, H, V), ValueError, r"latent must be of shape \[T, H=3, L=11\], got \[4, 3, 7\]; "),
        (torch.ones(4, H, L).double(), TypeError, "latent must be bfloat16 .*, got float64; "),
    ],
)
def test_wrong_latent_outputs_are_refused(latent: Tensor, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match="^" + message):
        AbsorbedWeights.split(kv_b_weight(), **SIZES).project_value(latent)


@pytest.mark.parametrize("name", ["weight", "qweight", "weight_packed"])
def test_weight_is_found_under_every_name(name: str) -> None:
    assert name in WEIGHT_NAMES
    weight = kv_b_weight()
    layer = SimpleNamespace(**{"weight": None, name: weight})
    assert layer_weight(layer) is weight
    assert dense_weight(layer) is weight


def test_a_layer_without_weights_is_named() -> None:
    class KvBProj:
        def __repr__(self) -> str:
            return "KvBProj(layer 17)"

    with pytest.raises(
        ValueError, match=r"^layer must be one with weight, qweight, weight_packed, got KvBProj\(layer 17"
    ):
        AbsorbedWeights.from_layer(KvBProj(), **SIZES)


def test_unquantised_method_gives_the_weight_as_it_is() -> None:
    weight = kv_b_weight()
    layer = SimpleNamespace(weight=weight, quant_method=UnquantizedLinearMethod())
    assert dense_weight(layer) is weight


def test_from_a_torch_linear() -> None:
    layer = torch.nn.Linear(L, H * (P + V), bias=False, dtype=torch.float32, device="cpu")
    absorbed = AbsorbedWeights.from_layer(layer, **SIZES)
    assert absorbed.key.dtype == torch.bfloat16
    assert torch.equal(absorbed.key, halves(layer.weight.detach().to(torch.bfloat16))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_quantised_layer_is_dequantised_through_the_identity(dtype: torch.dtype) -> None:
    layer = int8_layer()
    dense = dense_weight(layer, dtype)
    assert layer.quant_method.calls == [(dtype, (L, L))]
    assert (dense.dtype, dense.shape, dense.is_contiguous()) == (dtype, (H * (P + V), L), True)
    # int8 times a power of two is exact in bf16, so nothing may be lost.
    assert torch.equal(dense.float(), layer.qweight.float() * layer.scales.unsqueeze(1))


def test_absorbed_weights_from_a_quantised_layer() -> None:
    layer = int8_layer()
    absorbed = AbsorbedWeights.from_layer(layer, **SIZES, dtype=torch.float32)
    keys, values = halves(layer.qweight.float() * layer.scales.unsqueeze(1))
    assert torch.equal(absorbed.key, keys)
    assert torch.equal(absorbed.value, values.transpose(1, 2))


def test_quantised_layer_must_tell_its_input_size() -> None:
    layer = int8_layer()
    del layer.input_size_per_partition
    with pytest.raises(TypeError, match=r"^layer.input_size_per_partition must be an int, got NoneType$"):
        dense_weight(layer)


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(256, 128, 128), (130, 200, 128), (5, 7, 3), (1, 1, 128), (6, 4, 1)]
)
def test_block_scaled_weights_with_ragged_edges(rows: int, columns: int, block: int) -> None:
    weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(math.ceil(rows / block), math.ceil(columns / block)) + 0.1
    dense = dequantise_blocks(weight, scales, block=block, dtype=torch.float32)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    assert torch.equal(dense, weight.float() * scales[row // block, column // block])
    assert dequantise_blocks(weight, scales, block=block).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("weight", "scales", "block", "kind", "message"),
    [
        (torch.ones(4, 4), torch.ones(1, 1), 4, TypeError, "weight must be float8_e4m3fn, got float32; "),
        (torch.ones(4).to(torch.float8_e4m3fn), torch.ones(1, 1), 4, ValueError, r"weight must be .*, got \[4\]; "),
        (
            torch.ones(5, 4).to(torch.float8_e4m3fn),
            torch.ones(1, 1),
            4,
            ValueError,
            r"scale_inv must be of shape \[R=2, C=1\], got \[1, 1\]; ",
        ),
        (
            torch.ones(4, 4).to(torch.float8_e4m3fn),
            torch.ones(1, 1).half(),
            4,
            TypeError,
            "scale_inv must be float32, got float16; ",
        ),
        (torch.ones(4, 4).to(torch.float8_e4m3fn), torch.ones(1, 1), 0, ValueError, "block must be >= 1, got 0$"),
    ],
)
def test_wrong_block_scales_are_refused(
    weight: Tensor, scales: Tensor, block: int, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match="^" + message):
        dequantise_blocks(weight, scales, block=block)


def test_a_block_larger_than_the_weight_costs_no_memory() -> None:
    weight = torch.ones(3, 2).to(torch.float8_e4m3fn)
    assert dequantise_blocks(weight, torch.full((1, 1), 2.0), block=2**31 - 1).tolist() == [[2.0, 2.0]] * 3
