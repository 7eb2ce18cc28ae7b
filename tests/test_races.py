"""The race detector of emulated kernels (`--races`), on small kernels with and without what orders their accesses."""

import ctypes
import re
import shutil
from pathlib import Path
from typing import Any

import on_host
import pytest

SOURCE = (Path(on_host.__file__).parent / "small_kernels.cpp").read_text()
SEEDS = range(4)
RACY_STRICTLY = "product of copies without fence"
"""A kernel in order that is not in the order that PTX asks for."""


def names(table: str) -> list[str]:
    rows = SOURCE[SOURCE.index(f"const Case {table}[]") :]
    return re.findall(r'^    {"([^"]+)"', rows[: rows.index("};")], re.MULTILINE)


def compiled(tmp_path_factory: pytest.TempPathFactory, name: str) -> tuple[Any, Path]:
    if shutil.which("g++") is None or shutil.which("addr2line") is None:
        pytest.skip("needs a C++ compiler and addr2line")
    folder = tmp_path_factory.mktemp("small") / name
    folder.mkdir()
    return on_host.load(folder, SOURCE, ["-DTHREADS=128"]), folder


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return compiled(tmp_path_factory, on_host.FINDING_RACES)


@pytest.fixture(scope="module")
def kernels(watched: tuple[Any, Path]) -> Any:
    return watched[0]


@pytest.fixture(scope="module")
def folder(watched: tuple[Any, Path]) -> Path:
    return watched[1]


@pytest.fixture(scope="module")
def strict_kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return compiled(tmp_path_factory, on_host.STRICTLY)[0]


@pytest.mark.parametrize("word", [ctypes.c_int8, ctypes.c_int64])
def test_the_detector_has_what_every_cpu_calls(kernels: Any, folder: Path, word: Any) -> None:
    """Compilers for arm64 read a static variable's guard as 64 bits, those for x86-64 as 8."""
    (library,) = folder.glob("*.so")
    load = ctypes.CDLL(str(library))[f"__tsan_atomic{8 * ctypes.sizeof(word)}_load"]
    load.restype = word
    number = word(2 ** (8 * ctypes.sizeof(word) - 2) + 1)
    assert load(ctypes.byref(number), 2) == number.value


@pytest.mark.parametrize("name", names("ORDERED"))
def test_a_kernel_in_order_has_no_race(kernels: Any, name: str) -> None:
    for seed in SEEDS:
        kernels.run(0, names("ORDERED").index(name), seed)


@pytest.mark.parametrize("name", names("ORDERED"))
def test_strictly_copies_need_a_fence_before_a_product(strict_kernels: Any, name: str) -> None:
    for seed in SEEDS:
        if name == RACY_STRICTLY:
            with pytest.raises(AssertionError, match=r"no fence\.proxy\.async between"):
                strict_kernels.run(0, names("ORDERED").index(name), seed)
        else:
            strict_kernels.run(0, names("ORDERED").index(name), seed)


@pytest.mark.parametrize("name", names("RACY"))
def test_a_race_is_found_in_every_order_of_threads(kernels: Any, name: str) -> None:
    for seed in SEEDS:
        with pytest.raises(AssertionError, match="races in shared memory"):
            kernels.run(1, names("RACY").index(name), seed)


def test_both_lines_of_a_race_are_named(kernels: Any) -> None:
    body = SOURCE.index("void neighbours(")
    written = SOURCE.count("\n", 0, SOURCE.index("words()[threadIdx.x] =", body)) + 1
    with pytest.raises(AssertionError) as caught:
        kernels.run(1, names("RACY").index("neighbours"), 0)
    lines = [int(line) for line in re.findall(r"by thread \d+ of CTA 0 \w+\.cpp:(\d+)", str(caught.value))]
    assert sorted(lines) == [written, written + 2]
