"""The race detector of emulated kernels (`--races`), on small kernels with and without what orders their accesses."""

import re
import shutil
from pathlib import Path
from typing import Any

import on_host
import pytest

SOURCE = (Path(on_host.__file__).parent / "small_kernels.cpp").read_text()
SEEDS = range(4)


def names(table: str) -> list[str]:
    rows = SOURCE[SOURCE.index(f"const Case {table}[]") :]
    return re.findall(r'^    {"([^"]+)"', rows[: rows.index("};")], re.MULTILINE)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if shutil.which("g++") is None or shutil.which("addr2line") is None:
        pytest.skip("needs a C++ compiler and addr2line")
    folder = tmp_path_factory.mktemp("small") / on_host.FINDING_RACES
    folder.mkdir()
    return on_host.load(folder, SOURCE, ["-DTHREADS=128"])


@pytest.mark.parametrize("name", names("ORDERED"))
def test_a_kernel_in_order_has_no_race(kernels: Any, name: str) -> None:
    for seed in SEEDS:
        kernels.run(0, names("ORDERED").index(name), seed)


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
