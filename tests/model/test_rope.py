"""Rotary embedding: YaRN numbers of the released models, tables and rotations against complex numbers."""

import cmath
import math

import pytest
import torch
from torch import Tensor

from tamis.model.rope import Rope, rms_norm, rotate

V32 = Rope(64, 1e4, factor=40, original_length=4096, mscale=1.0, mscale_all_dim=1.0)
V4 = Rope(64, 1.6e5, factor=16, original_length=65536)


def yarn(theta: float, factor: float, low: int, high: int) -> list[float]:
    """The specification's formula with its own correction dims."""
    found = []
    for i in range(32):
        ramp = min(max((i - low) / (high - low), 0.0), 1.0)
        found.append(theta ** (-2 * i / 64) * ((1 - ramp) + ramp / factor))
    return found


def turned(x: Tensor, angles: list[float], interleaved: bool) -> list[float]:
    """One vector rotated as complex numbers."""
    half = len(angles)
    out = [0.0] * (2 * half)
    for i, angle in enumerate(angles):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        z = complex(float(x[a]), float(x[b])) * cmath.exp(1j * angle)
        out[a], out[b] = z.real, z.imag
    return out


def test_plain_frequencies() -> None:
    found = Rope(8, 1e4).frequencies()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.tensor([1.0, 0.1, 0.01, 0.001]), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("rope", "theta", "low", "high"), [(V32, 1e4, 10, 23), (V4, 1.6e5, 15, 25)], ids=["V3.2", "V4"]
)
def test_yarn_correction_dims_of_the_released_models(rope: Rope, theta: float, low: int, high: int) -> None:
    found = rope.frequencies()
    torch.testing.assert_close(found, torch.tensor(yarn(theta, rope.factor, low, high)), rtol=1e-6, atol=0)
    plain = Rope(64, theta).frequencies()
    assert torch.equal(found[: low + 1], plain[: low + 1])
    assert (found[low + 1 :] < plain[low + 1 :]).all()
    torch.testing.assert_close(found[high:], plain[high:] / rope.factor, rtol=1e-6, atol=0)
    assert found[high - 1] > plain[high - 1] / rope.factor * 1.01


def test_yarn_ramp_stays_inside_the_dims() -> None:
    found = Rope(4, 100.0, factor=4, original_length=8).frequencies()
    torch.testing.assert_close(found, torch.tensor([1.0, 0.1 / 4]), rtol=1e-6, atol=0)


def test_softmax_scale_of_v32() -> None:
    assert V32.softmax_scale(192) == pytest.approx(0.1352338, abs=5e-8)
    assert (V32.softmax_scale(192) * math.sqrt(192)) ** 0.5 == pytest.approx(1.368888, abs=5e-7)


def test_softmax_scale_without_magnitude() -> None:
    assert V4.softmax_scale(512) == pytest.approx(512**-0.5)
    assert Rope(64, mscale_all_dim=1.0).softmax_scale(192) == pytest.approx(192**-0.5)


@pytest.mark.parametrize("rope", [Rope(64), V32, V4], ids=["plain", "V3.2", "V4"])
def test_table_against_complex_numbers(rope: Rope) -> None:
    table = rope.cos_sin_table(300)
    assert (table.dtype, table.shape) == (torch.float32, (300, 64))
    angles = torch.arange(300).double().unsqueeze(1) * rope.frequencies().double()
    unit = torch.polar(torch.ones_like(angles), angles)
    torch.testing.assert_close(table.double(), torch.cat((unit.real, unit.imag), 1), rtol=0, atol=3e-5)
    assert torch.equal(table[0], torch.cat((torch.ones(32), torch.zeros(32))))


def test_table_carries_the_ratio_of_magnitudes() -> None:
    rope = Rope(64, 1e4, factor=40, mscale=1.0, mscale_all_dim=0.5)
    ratio = (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    unscaled = Rope(64, 1e4, factor=40).cos_sin_table(9)
    torch.testing.assert_close(rope.cos_sin_table(9), unscaled * ratio, rtol=1e-6, atol=0)


def test_empty_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^positions must be >= 1, got 0$"):
        Rope(64).cos_sin_table(0)


@pytest.mark.parametrize("interleaved", [True, False])
def test_rotation_against_complex_numbers(interleaved: bool) -> None:
    positions = [0, 1, 2, 77, 250]
    x = torch.randn(5, 64)
    table = V32.cos_sin_table(251)[positions]
    found = rotate(x, table, interleaved=interleaved)
    frequencies = V32.frequencies().tolist()
    wanted = [turned(row, [p * f for f in frequencies], interleaved) for row, p in zip(x, positions, strict=True)]
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=0, atol=1e-4)
    assert torch.equal(found[0], x[0])


def test_the_two_layouts_are_permutations_of_each_other() -> None:
    x, table = torch.randn(6, 64), V32.cos_sin_table(6)
    halves_first = [*range(0, 64, 2), *range(1, 64, 2)]
    pairs = rotate(x, table, interleaved=True)
    assert torch.equal(rotate(x[:, halves_first], table, interleaved=False), pairs[:, halves_first])
    assert not torch.allclose(rotate(x, table, interleaved=False), pairs)


@pytest.mark.parametrize("interleaved", [True, False])
def test_inverse_undoes_the_rotation(interleaved: bool) -> None:
    x, table = torch.randn(6, 4, 64), V4.cos_sin_table(500)[[0, 5, 99, 200, 350, 499]].unsqueeze(1)
    there = rotate(x, table, interleaved=interleaved)
    back = rotate(there, table, interleaved=interleaved, inverse=True)
    torch.testing.assert_close(back, x, rtol=0, atol=1e-5)
    assert (there[1:] - x[1:]).abs().amax() > 0.5


@pytest.mark.parametrize("interleaved", [True, False])
def test_dot_products_depend_on_the_distance_only(interleaved: bool) -> None:
    q, k = torch.randn(64, dtype=torch.float64).float(), torch.randn(64)
    table = V32.cos_sin_table(200)

    def score(query_at: int, key_at: int) -> float:
        turned_q = rotate(q, table[query_at], interleaved=interleaved).double()
        turned_k = rotate(k, table[key_at], interleaved=interleaved).double()
        return float((turned_q * turned_k).sum())

    assert score(30, 10) == pytest.approx(score(150, 130), abs=1e-3)
    assert score(30, 30) == pytest.approx(float((q.double() * k.double()).sum()), abs=1e-4)
    assert abs(score(30, 10) - score(30, 11)) > 1e-2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rotation_computes_in_fp32_and_rounds_once(dtype: torch.dtype) -> None:
    x, table = torch.randn(9, 3, 64).to(dtype), V32.cos_sin_table(9).unsqueeze(1)
    found = rotate(x, table, interleaved=True)
    assert found.dtype == dtype
    assert torch.equal(found, rotate(x.float(), table, interleaved=True).to(dtype))


def test_rotation_of_nothing() -> None:
    assert rotate(torch.ones(3, 0), torch.ones(3, 0), interleaved=True).shape == (3, 0)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, Rope(64)),
        ({"rope_theta": 5e5}, Rope(64, 5e5)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 160000}}, Rope(64, 1.6e5)),
        (
            {
                "rope_theta": 10000,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 40,
                    "original_max_position_embeddings": 4096,
                    "beta_fast": 32,
                    "beta_slow": 1,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                },
            },
            V32,
        ),
        (
            {
                "rope_theta": 10000,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 160000,
                    "factor": 16,
                    "original_max_position_embeddings": 65536,
                },
            },
            V4,
        ),
    ],
    ids=["empty", "theta", "default", "V3.2", "V4"],
)
def test_from_a_hugging_face_config(config: dict[str, object], wanted: Rope) -> None:
    assert Rope.from_hf(config, 64) == wanted


def test_unknown_rope_type_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^config.rope_type must be 'default' or 'yarn', got 'longrope'; "):
        Rope.from_hf({"rope_scaling": {"rope_type": "longrope"}}, 64)


def test_rms_norm_with_and_without_weight() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([2.0, -1.0])
    size = math.sqrt(12.5 + 0.5)
    torch.testing.assert_close(rms_norm(x, None, 0.5), torch.tensor([[3 / size, 4 / size]]))
    torch.testing.assert_close(rms_norm(x, weight, 0.5), torch.tensor([[6 / size, -4 / size]]))


def test_v4_settings_by_kind_of_layer() -> None:
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1}
    checkpoint = {"rope_theta": 1e4, "compress_rope_theta": 1.6e5, "rope_scaling": yarn}
    main = {"rope_type": "default", "rope_theta": 2e4}
    compress = {**yarn, "rope_type": "yarn", "rope_theta": 3e5, "attention_factor": 1.0}
    nested = {"rope_theta": 1e4, "rope_parameters": {"main": main, "compress": compress}}
    for config, plain_theta, theta in ((checkpoint, 1e4, 1.6e5), (nested, 2e4, 3e5)):
        window = Rope.from_hf_v4(config, 64, compressed=False)
        assert (window.theta, window.factor) == (plain_theta, 1.0)
        rope = Rope.from_hf_v4(config, 64, compressed=True)
        assert (rope.theta, rope.factor, rope.original_length) == (theta, 16.0, 65536)
        # Nothing multiplies cosines and sines.
        assert torch.equal(rope.cos_sin_table(1)[0], torch.tensor([1.0] * 32 + [0.0] * 32))
    frequencies = Rope.from_hf_v4(checkpoint, 64, compressed=True).frequencies()
    ratio = frequencies / Rope(64, 1.6e5).frequencies()
    # The ramp of the published numbers runs from pair 15 to pair 25.
    assert torch.allclose(ratio[:16], torch.ones(16))
    assert torch.allclose(ratio[25:], torch.full((7,), 1 / 16))
    assert ((ratio[16:25] < 1) & (ratio[16:25] > 1 / 16)).all()
