"""Prepared launches of Triton kernels find the kernel that Triton itself would find."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

from tamis.ops.rows import triton_launch
from tamis.ops.rows.triton_launch import TritonLaunch

pytestmark = pytest.mark.own_settings("launches nothing")


class Kernel:
    """Records its launches: by Triton, which looks for a compiled kernel, or by a compiled kernel's own launcher."""

    arg_names = ("x", "stride", "y", "BLOCK")

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*values: Any, **options: int) -> Any:
            told = [(v.dtype, v.data_ptr()) if hasattr(v, "data_ptr") else v for v in values]
            self.log.append(("triton", grid, told, options))
            number = len(self.log)
            run = lambda *given: self.log.append((number, *given))  # noqa: E731
            return SimpleNamespace(run=run, function=number, packed_metadata=("metadata", number))

        return launch


@pytest.fixture
def launch() -> TritonLaunch:
    x, y = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)
    arguments = {"stride": 7, "x": x, "y": y, "BLOCK": 64}
    return TritonLaunch(Kernel(), (5,), arguments, ("y", "x"), num_warps=2)


def test_triton_compiles_once_for_each_alignment(launch: TritonLaunch) -> None:
    kernel = launch._kernel
    for _ in range(2):
        launch(0x70, [32, 16])
    assert kernel.log == [
        ("triton", (5, 1, 1), [(torch.bfloat16, 16), 7, (torch.int32, 32), 64], {"num_warps": 2}),
        (1, 5, 1, 1, 0x70, 1, ("metadata", 1), None, None, None, 16, 7, 32, 64),
    ]
    for _ in range(2):
        launch(0x71, [4, 16])
        launch(0x71, [4, 8])
    launch(0x72, [48, 160])
    assert [entry[0] for entry in kernel.log[2:]] == ["triton", "triton", 3, 4, 1]
    assert kernel.log[-1] == (1, 5, 1, 1, 0x72, 1, ("metadata", 1), None, None, None, 160, 7, 48, 64)
    with pytest.raises(ValueError, match="zip"):
        launch(0x70, [16])


def test_launches_that_somebody_watches_go_through_triton(
    launch: TritonLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch(0x70, [32, 16])
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, name, lambda metadata: None)
            launch(0x70, [32, 16])
        assert launch._kernel.log[-1][0] == "triton"
    launch(0x70, [32, 16])
    assert launch._kernel.log[-1][0] != "triton"


def test_launches_go_through_triton_where_its_launcher_is_another(
    launch: TritonLaunch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_launch, "_launches_as_expected", lambda: False)
    for _ in range(3):
        launch(0x70, [32, 16])
    assert {entry[0] for entry in launch._kernel.log} == {"triton"}


def test_this_triton_launches_as_expected() -> None:
    assert triton_launch._launches_as_expected()


def test_every_tensor_must_be_named() -> None:
    arguments = {"stride": 7, "x": torch.zeros(1), "y": torch.zeros(1), "BLOCK": 64}
    with pytest.raises(ValueError, match=r"changing must name all tensors, got none of \['y'\]"):
        TritonLaunch(Kernel(), (1,), arguments, ("x",))


SPECIALISED = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from tamis import PagedCache
from tamis.ops.rows.triton_launch import Address, can_prepare
from tamis.ops.write.operations import WriteKv
from tamis.ops.write.triton_kernels import launch_arguments, write_rows

assert can_prepare(write_rows)
bind = create_function_from_signature(write_rows.signature, write_rows.params, make_backend(GPUTarget("cuda", 90, 32)))
room = torch.zeros(6000, dtype=torch.bfloat16)
for offset in (0, 1, 8):
    kv = room[offset : offset + 8 * 576].view(8, 576)
    for slots in (torch.arange(8), torch.arange(9, dtype=torch.int32)[1:], torch.arange(16)[::2]):
        cache = PagedCache("plain-fp8", 4, 64, scale=torch.tensor(0.5))
        given = launch_arguments(WriteKv(kv, None, slots, cache, "auto"))
        plain = {n: Address(v.dtype, v.data_ptr()) if hasattr(v, "data_ptr") else v for n, v in given.items()}
        first, second = (bind(**some, num_warps=1)[1:] for some in (given, plain))
        assert first == second, (first, second)
        # What decides beside the tensors' types is whether each address is a multiple of 16.
        tensors = [n for n, v in given.items() if hasattr(v, "data_ptr")]
        moved = {n: Address(given[n].dtype, given[n].data_ptr() % 16 + 4096 * 7) for n in tensors}
        assert bind(**plain | moved, num_warps=1)[1:] == first
        for n in tensors:
            other = {n: Address(given[n].dtype, given[n].data_ptr() + 4)}
            changed = bind(**plain | other, num_warps=1)[1:]
            assert (changed != first) == (given[n].data_ptr() % 16 in (0, 12)), n
"""


def test_triton_specialises_addresses_as_it_does_tensors() -> None:
    """In a process of its own: here kernels are interpreted, unless there is a GPU."""
    code = f"import os\nos.environ.pop('TRITON_INTERPRET', None)\n{SPECIALISED}"
    subprocess.run([sys.executable, "-c", code], check=True)
