"""What the emulator of CUDA kernels computes in place of instructions, against NumPy."""

import ctypes
from pathlib import Path
from typing import Any

import numpy as np
import on_host
import pytest
from seeds import numpy_seeded

SOURCE = """
#include "matrix_emulator.hpp"

extern "C" __attribute__((visibility("default"))) void values(const uint16_t* bits, float* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = emulator::fp16_value(bits[i]);
}
extern "C" __attribute__((visibility("default"))) void bits(const float* values, uint16_t* to, int count) {
  for (int i = 0; i < count; ++i) to[i] = emulator::fp16_bits(values[i]);
}
"""


@pytest.fixture(scope="module")
def conversions(tmp_path_factory: pytest.TempPathFactory, host_folder: Path) -> Any:
    # A folder of its own: with --races, the library would need a detector.
    # g++ 12 for arm64 has no _Float16, so the emulator does without.
    return on_host.load(tmp_path_factory.mktemp("conversions"), SOURCE, ["-DTHREADS=32", "-D_Float16=absent"])


def address(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def test_every_fp16_number_is_converted_as_numpy_does(conversions: Any) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    found = np.empty(len(bits), np.float32)
    conversions.values(address(bits), address(found), len(bits))
    expected = bits.view(np.float16).astype(np.float32)
    assert np.array_equal(np.isnan(found), np.isnan(expected))
    assert np.array_equal(found.view(np.uint32)[~np.isnan(expected)], expected.view(np.uint32)[~np.isnan(expected)])
    assert np.array_equal(np.signbit(found), np.signbit(expected))


def test_rounding_to_fp16_is_numpys(conversions: Any) -> None:
    numbers = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    halfway = (numbers[:-1] + numbers[1:]) / 2
    overflowing = np.float32([65519.996, 65520, 65536, 1e30, np.finfo(np.float32).max, np.inf, np.nan])
    tiny = np.float32([1e-45, 1e-38, 2**-25, 2**-126])
    around = [np.nextafter(halfway, np.float32(0)), halfway, np.nextafter(halfway, np.float32(1e9))]
    of_any_bits = numpy_seeded(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    values = np.concatenate([numbers, *around, overflowing, tiny, of_any_bits])
    values = np.concatenate([values, -values])
    found = np.empty(len(values), np.uint16)
    conversions.bits(address(values), address(found), len(values))
    with np.errstate(over="ignore", invalid="ignore"):
        expected = values.astype(np.float16)
    nan = np.isnan(expected)
    assert np.array_equal(found[~nan], expected.view(np.uint16)[~nan])
    assert np.isnan(found.view(np.float16)[nan]).all()
    assert np.array_equal(np.signbit(found.view(np.float16)), np.signbit(expected))
