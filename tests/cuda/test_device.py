"""Memory for the tensors of a call, allocated as torch.empty would and in less time."""

import pytest
import torch

from tamis.cuda import device
from tamis.cuda.device import Rooms, contiguous_strides

CPU = torch.device("cpu")
SHAPES = [(), (0,), (3,), (2, 3), (0, 4), (4, 0, 5), (2, 3, 4, 5), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES)
def test_strides_are_those_of_torch(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@pytest.fixture(params=["torch.empty", "fast"])
def rooms(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rooms:
    made = Rooms(CPU, ((2, 3), torch.bfloat16), ((5,), torch.int32))
    if request.param == "fast":
        made._fast = torch._C._dynamo.guards._empty_strided_cpu
    return made


def test_every_call_makes_new_tensors(rooms: Rooms) -> None:
    torch.use_deterministic_algorithms(False)
    first, second = rooms(), rooms()
    for made in (first, second):
        assert [(t.shape, t.stride(), t.dtype, t.device) for t in made] == [
            ((2, 3), (3, 1), torch.bfloat16, CPU),
            ((5,), (1,), torch.int32, CPU),
        ]
        assert not any(t.requires_grad or t.is_inference() for t in made)
    assert len({t.untyped_storage().data_ptr() for t in (*first, *second)}) == 4
    with torch.inference_mode():
        assert all(t.is_inference() for t in rooms())
    with torch.device("meta"):
        assert all(t.device == CPU for t in rooms())


def test_deterministic_algorithms_fill_memory(rooms: Rooms) -> None:
    assert rooms()[0].isnan().all(), "tests run under deterministic algorithms, so that unwritten values show"


def test_this_torch_has_the_fast_allocation() -> None:
    assert device._fast_empty is not None


@pytest.mark.gpu
def test_memory_of_a_device() -> None:
    torch.use_deterministic_algorithms(False)
    where = torch.device("cuda", 0)
    (made,) = Rooms(where, ((2, 3), torch.float16))()
    assert (made.shape, made.stride(), made.dtype, made.device) == ((2, 3), (3, 1), torch.float16, where)
