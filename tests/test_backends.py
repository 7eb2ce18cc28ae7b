"""The table of backends: what each refuses, and which runs a stage."""

from dataclasses import replace

import pytest
import torch

from tamis import LayerSpec, backends
from tamis.backends import BACKENDS, STAGES, Need, backend_for_stage
from tamis.cache.layout import named, v32_fp8

SPEC = LayerSpec(heads=16, topk=2048)
NEED = Need(SPEC, torch.device("cuda"), (8, 0), torch.bfloat16, named("v32-bf16"), 64)
"""A layer that every backend runs, on a GPU before Hopper."""


@pytest.fixture(autouse=True)
def with_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC counts as installed; without it CUDA C++ is refused, as tests/test_troubleshooting.py shows."""
    monkeypatch.setattr(backends, "has_nvrtc", lambda: True)


def test_compute_capability_is_compared_by_major_version() -> None:
    hopper = BACKENDS[0]
    assert hopper.refusals(replace(NEED, capability=(8, 6))) == ["compute capability 8.6 is not one of 9.x"]
    assert hopper.refusals(replace(NEED, capability=(9, 1))) == []


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_has_an_implementation_everywhere(stage: str) -> None:
    for device in ("cpu", "cuda"):
        assert backend_for_stage(stage, "auto", device).name in {b.name for b in BACKENDS}


def test_portable_kernels_are_preferred_on_a_gpu_and_say_what_they_cannot_do() -> None:
    assert [b.name for b in BACKENDS] == ["hopper", "triton", "reference"]
    assert BACKENDS[1].refusals(NEED) == []
    wide = replace(NEED, layout=v32_fp8(latent=1024, rope=257), dtype=torch.float64)
    assert BACKENDS[1].refusals(wide) == [
        "query dtype float64 is not one of bfloat16, float16, float32, float8_e4m3fn",
        "latent width 1024 is more than 512",
        "rope width 257 is more than 256",
    ]
    odd = replace(NEED, layout=v32_fp8(latent=480, tile=96))
    assert BACKENDS[1].refusals(odd) == ["tiles of 96 values are not a power of two"]


def test_rows_of_two_values_to_a_byte_are_refused_where_they_would_be_garbage() -> None:
    """A backend of another package does not read them unless it says so; those of the library do."""
    need = replace(NEED, capability=(9, 0), layout=named("v41-fp4"))
    for backend in BACKENDS:
        assert not [reason for reason in backend.refusals(need) if "two values" in reason]
        refused = [reason for reason in replace(backend, packed_rows=False).refusals(need) if "two values" in reason]
        assert refused == ["attention does not read v41-fp4, which has two values to a byte"]


def test_hopper_kernels_are_for_hopper_and_leave_the_rest_to_their_base(monkeypatch: pytest.MonkeyPatch) -> None:
    hopper = BACKENDS[0]
    need = replace(NEED, capability=(9, 0))
    assert hopper.refusals(need) == []
    assert hopper.refusals(replace(need, capability=(10, 0))) == ["compute capability 10.0 is not one of 9.x"]
    assert hopper.refusals(replace(need, capability=None)) == ["compute capability unknown is not one of 9.x"]
    for capability, wanted in (((9, 0), "hopper"), ((8, 0), "triton"), (None, "triton")):
        monkeypatch.setattr(backends, "compute_capability", lambda device, found=capability: found)
        assert backend_for_stage("index", "auto", "cuda").name == wanted
        assert backend_for_stage("attend", "auto", "cuda").name == wanted
        assert backend_for_stage("write", "auto", "cuda").name == "triton"
    with pytest.raises(
        ValueError, match="backend must be 'auto' or one of hopper, triton, reference that runs on cuda"
    ):
        backend_for_stage("write", "hopper", "cuda")
    monkeypatch.setattr(backends, "compute_capability", lambda device: (9, 0))
    assert backend_for_stage("write", "hopper", "cuda").name == "triton"
    monkeypatch.setattr(backends, "has_nvrtc", lambda: False)
    assert "install the NVRTC of PyTorch's CUDA version" in hopper.refusals(need)[0]
    assert backend_for_stage("index", "auto", "cuda").name == "triton"
