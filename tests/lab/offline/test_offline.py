"""Every Triton kernel compiles without a GPU for every target, and fits its shared memory."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tamis.backends import STAGES
from tamis.lab.offline.triton import NATIVE_E4M3, TARGETS

# Triton must not be imported in this process: tests/ops switches it to its interpreter first.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton, which is not installed")
WHOLE = ("sm_90", "gfx942")
"""The targets for which every launch is compiled: one of each compiler, for AMD that with the least shared memory.
Other targets differ in instructions and limits, so that the largest launch of each kernel is enough for them."""
PRODUCT = """
import triton
import triton.language as tl
from tamis.lab.offline.triton import OfflineCase, compile_case

@triton.jit
def product(left, right, out, blocks, SIZE: tl.constexpr):
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for block in range(blocks):
        at = (block * SIZE + row) * SIZE + column
        total = tl.dot(tl.load(left + at), tl.load(right + at), acc=total)
    tl.store(out + row * SIZE + column, total)

signature = {"left": "*fp16", "right": "*fp16", "out": "*fp32", "blocks": "i32", "SIZE": "constexpr"}
for target, size in (("sm_90", 32), ("gfx942", 32), ("sm_90", 256), ("gfx942", 256)):
    options = {"num_warps": 8, "num_stages": 3}
    case = OfflineCase(product, signature, {"SIZE": size}, options, f"product {size}")
    try:
        print(target, size, compile_case(case, target).shared)
    except MemoryError as error:
        print(target, size, error)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python process in which Triton compiles; this process may have chosen Triton's interpreter for good."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target: str) -> None:
    done = run("-m", "tamis.lab.offline.triton", *([] if target in WHOLE else ["--few"]), target)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines()[1:] if line.startswith(target)]
    for stage in STAGES:
        assert any(f"  {stage}" in line for line in lines), f"no case of {stage}"
    assert any("native" in line for line in lines) == (target in NATIVE_E4M3)


def test_too_much_shared_memory_is_an_error(tmp_path: Path) -> None:
    script = tmp_path / "too_much.py"
    script.write_text(PRODUCT)
    done = run(str(script))
    assert done.returncode == 0, done.stderr
    fits_nvidia, fits_amd, *too_much = done.stdout.splitlines()
    assert 0 < int(fits_nvidia.split()[-1]) <= 64 * 1024
    assert 0 < int(fits_amd.split()[-1]) <= 64 * 1024
    for line, limit in zip(too_much, (227, 64), strict=True):
        assert "product 256 needs" in line
        assert f"may have {limit * 1024}; use smaller blocks" in line


def test_unknown_targets_and_interpreted_kernels_are_refused() -> None:
    done = run("-m", "tamis.lab.offline.triton", "sm_12")
    assert done.returncode == 2
    assert "sm_90" in done.stderr
    interpreted = (
        "import os; os.environ['TRITON_INTERPRET'] = '1'\n"
        "from tamis.lab.offline.triton import OfflineCase, compile_case\n"
        "from tamis.ops.translate.triton_kernels import translate_rows\n"
        "compile_case(OfflineCase(translate_rows, {}, {}, {}, 'x'), 'sm_90')\n"
    )
    done = run("-c", interpreted)
    assert done.returncode == 1
    assert "kernel must be compilable, got an interpreted function; unset TRITON_INTERPRET" in done.stderr
