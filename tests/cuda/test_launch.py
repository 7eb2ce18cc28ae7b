"""Launches pass packed parameters and options to the driver, in the context of the right device."""

import ctypes
import struct
import threading
from typing import NamedTuple

import pytest
import torch

from tamis.cuda import tile_map
from tamis.cuda.compiler import Program
from tamis.cuda.launch import Driver, Kernel, Launch, kernel
from tamis.cuda.params import Float, Int, Long, Pointer, params_format
from tamis.cuda.tile_map import MAP_BYTES, TileMap

CONTEXT, FUNCTION, OTHER = 0x1000, 0x2000, 0x3000


class One(NamedTuple):
    value: Int


class Two(NamedTuple):
    first: Int
    second: Int


class Six(NamedTuple):
    start: Pointer
    count: Int
    stride: Long
    scale: Float
    nothing: Pointer
    last: Int


class Add(NamedTuple):
    x: Pointer
    n: Long


class Nested(NamedTuple):
    count: Int
    two: Two
    one: One


class FakeCuda:
    """The functions of the driver, without a device."""

    def __init__(self, params: type = One, status: int = 0) -> None:
        self.params, self.status = params, status
        self.log: list[tuple] = []
        self.current = [CONTEXT]

    def cuDeviceGet(self, handle, device):
        handle._obj.value = device + 100
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        assert device.value == 103
        context._obj.value = CONTEXT
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert device.value == 103
        value._obj.value = {97: 232448}[attribute]
        return 0

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.current[-1]
        return 0

    def cuCtxPushCurrent_v2(self, context):
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context):
        context._obj.value = self.current.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):
        self.log.append(("mode", mode._obj.value))
        mode._obj.value = 0 if mode._obj.value == 2 else 2
        return 0

    def cuModuleLoadData(self, module, cubin):
        self.log.append(("load", cubin, self.current[-1]))
        return 0

    def cuModuleGetFunction(self, function, module, name):
        function._obj.value = FUNCTION
        self.log.append(("function", name))
        return 0

    def cuFuncGetAttribute(self, value, attribute, function):
        value._obj.value = {1: 1000}[attribute]
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.log.append(("attribute", function.value, attribute, value))
        return 0

    def cuGetErrorString(self, status, text):
        text._obj.value = b"out of luck"
        return 0

    def cuLaunchKernelEx(self, config, function, pointers, extra):
        config = config._obj
        letters = f"@{params_format(self.params).letters}"
        pointer, *maps = pointers
        values = list(struct.unpack(letters, ctypes.string_at(pointer, struct.calcsize(letters))))
        options = {a.name: list(a.value[:3]) for a in config.attributes[: config.attribute_count]}
        assert extra is None
        self.maps = [ctypes.string_at(address, MAP_BYTES) for address in maps]
        where = self.current[-1], function.value, config.stream
        self.log.append(("launch", *where, list(config.grid), list(config.block), config.shared, options, values))
        return self.status


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0x700 + device, raising=False)


def loaded(fake: FakeCuda) -> Kernel:
    return Kernel(Driver(fake), b"cubin", "topk", 3)


def test_loading_allows_all_shared_memory_and_is_allowed_in_a_capture() -> None:
    fake = FakeCuda()
    fake.current = [OTHER]
    assert loaded(fake).shared_limit == 231448
    assert fake.log == [
        ("mode", 2),
        ("load", b"cubin", CONTEXT),
        ("function", b"topk"),
        ("attribute", FUNCTION, 8, 231448),
        ("mode", 0),
    ]
    assert fake.current == [OTHER]


def test_arguments_reach_the_driver_in_their_own_sizes() -> None:
    fake = FakeCuda(Six)
    launch = Launch(loaded(fake), Six, threads=512)
    launch((7, 2, 1), Six(2**48 + 1, -5, -(2**40), 0.5, 0, 2**31 - 1))
    place, options = (CONTEXT, FUNCTION, 0x703), {}
    values = [2**48 + 1, -5, -(2**40), 0.5, 0, 2**31 - 1]
    assert fake.log[-1] == ("launch", *place, [7, 2, 1], [512, 1, 1], 0, options, values)
    launch((1, 1, 1), Six(1, 2, 3, 4.0, 5, 6))
    assert fake.log[-1][4] == [1, 1, 1]
    assert fake.log[-1][-1] == [1, 2, 3, 4.0, 5, 6]
    with pytest.raises(struct.error):
        launch((1, 1, 1), Two(1, 2))
    with pytest.raises(struct.error):
        launch((1, 1, 1), Six(1, 2**31, 3, 4.0, 5, 6))


def test_nested_structs_are_packed_in_order() -> None:
    fake = FakeCuda(Nested)
    Launch(loaded(fake), Nested, threads=32)((1, 1, 1), Nested(1, Two(2, 3), One(4)))
    assert fake.log[-1][-1] == [1, 2, 3, 4]


def test_launch_options() -> None:
    fake = FakeCuda()
    Launch(loaded(fake), One, threads=256, shared=100_000, cluster=16, overlap=True)((32, 1, 1), One(1))
    assert ("attribute", FUNCTION, 9, 100) in fake.log
    assert ("attribute", FUNCTION, 14, 1) in fake.log
    assert fake.log[-1][-3:] == (100_000, {4: [16, 1, 1], 6: [1, 0, 0]}, [1])
    plain = FakeCuda()
    Launch(loaded(plain), One, threads=256, shared=1000, cluster=8)((8, 1, 1), One(1))
    assert not any(entry[:1] == ("attribute",) and entry[2] in (9, 14) for entry in plain.log)
    assert plain.log[-1][-3:] == (1000, {4: [8, 1, 1]}, [1])
    with pytest.raises(ValueError, match="shared must be at most 231448 on this device, got 231449"):
        Launch(loaded(plain), One, threads=256, shared=231449)


def test_another_context_is_left_as_it_was() -> None:
    fake = FakeCuda()
    launch = Launch(loaded(fake), One, threads=32)
    for current in (OTHER, None):
        fake.current = [current]
        launch((1, 1, 1), One(1))
        entry = next(e for e in reversed(fake.log) if e[0] == "launch")
        assert entry[1] == CONTEXT
        assert fake.current == [current]


def test_threads_do_not_share_launch_buffers() -> None:
    fake = FakeCuda(Two)
    launch = Launch(loaded(fake), Two, threads=32, cluster=2)
    inside, done = threading.Event(), threading.Event()
    plain = fake.cuLaunchKernelEx

    def slow(config, function, pointers, extra):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert done.wait(10)
        return plain(config, function, pointers, extra)

    launch._launch = slow
    other = threading.Thread(target=launch, args=((2, 1, 1), Two(1, 2)))
    other.start()
    assert inside.wait(10)
    launch((4, 1, 1), Two(3, 4))
    done.set()
    other.join()
    launches = [(entry[4], entry[-2], entry[-1]) for entry in fake.log if entry[0] == "launch"]
    options = {4: [2, 1, 1]}
    assert launches == [([4, 1, 1], options, [3, 4]), ([2, 1, 1], options, [1, 2])]


def test_a_failed_launch_says_why() -> None:
    launch = Launch(loaded(FakeCuda(status=701)), One, threads=32)
    with pytest.raises(RuntimeError, match="cuLaunchKernelEx failed with CUDA status 701: out of luck"):
        launch((1, 1, 1), One(1))


def test_a_prepared_launch_writes_what_changes() -> None:
    fake = FakeCuda(Six)
    launch = Launch(loaded(fake), Six, threads=512, shared=64)
    prepared = launch.prepared((7, 2, 1), Six(0, -5, -(2**40), 0.5, 0, 2**31 - 1), ("nothing", "start"), "scale")
    place = (CONTEXT, FUNCTION, 0x123)
    prepared(0x123, (2**48 + 1, 2**63 + 8), 0.25)
    values = [2**63 + 8, -5, -(2**40), 0.25, 2**48 + 1, 2**31 - 1]
    assert fake.log[-1] == ("launch", *place, [7, 2, 1], [512, 1, 1], 64, {}, values)
    launch((1, 1, 1), Six(1, 2, 3, 4.0, 5, 6))  # has memory of its own
    prepared(0x123, [3, 4], 0.75)
    assert fake.log[-1][4:] == ([7, 2, 1], [512, 1, 1], 64, {}, [4, -5, -(2**40), 0.75, 3, 2**31 - 1])
    for addresses in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="zip"):
            prepared(0x123, addresses, 0.5)
    for names, factor in ((("count",), None), (("start",), "count")):
        with pytest.raises(TypeError, match=r"addresses must be pointers and factor a float, got .*count"):
            launch.prepared((1, 1, 1), Six(1, 2, 3, 4.0, 5, 6), names, factor)


def test_a_prepared_launch_without_a_factor_leaves_floats_alone() -> None:
    fake = FakeCuda(Six)
    Launch(loaded(fake), Six, threads=32).prepared((1, 1, 1), Six(1, 2, 3, 4.0, 5, 6), ("start",))(0, [9])
    assert fake.log[-1][-1] == [9, 2, 3, 4.0, 5, 6]


@pytest.mark.parametrize("status", [201, 400])
def test_a_prepared_launch_without_its_context_is_repeated_in_it(status: int) -> None:
    """A thread that has used no device has no context; the driver says so, and nothing was launched."""
    fake = FakeCuda(Add)
    prepared = Launch(loaded(fake), Add, threads=32).prepared((1, 1, 1), Add(0, 5), ("x",))
    for current in (OTHER, None):
        fake.current = [current]
        plain = fake.cuLaunchKernelEx
        prepared._run = lambda *given, plain=plain: plain(*given) if fake.current[-1] == CONTEXT else status
        prepared(0x700, [0x123])
        launches = [entry for entry in fake.log if entry[0] == "launch"]
        assert launches[-1][1] == CONTEXT
        assert launches[-1][-1] == [0x123, 5]
        assert fake.current == [current]


def test_a_prepared_launch_that_fails_says_why() -> None:
    for status in (201, 701):
        launch = Launch(loaded(FakeCuda(status=status)), One, threads=32)
        with pytest.raises(RuntimeError, match=f"cuLaunchKernelEx failed with CUDA status {status}: out of luck"):
            launch.prepared((1, 1, 1), One(1), ())(0x700, [])


def test_threads_do_not_share_the_memory_of_a_prepared_launch() -> None:
    fake = FakeCuda(Add)
    prepared = Launch(loaded(fake), Add, threads=32).prepared((1, 1, 1), Add(0, 5), ("x",))
    inside, done = threading.Event(), threading.Event()
    plain = fake.cuLaunchKernelEx

    def slow(*given):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert done.wait(10)
        return plain(*given)

    prepared._run = slow
    other = threading.Thread(target=prepared, args=(0x701, [1]))
    other.start()
    assert inside.wait(10)
    prepared(0x702, [2])
    done.set()
    other.join()
    assert [(entry[3], entry[-1]) for entry in fake.log if entry[0] == "launch"] == [(0x702, [2, 5]), (0x701, [1, 5])]


@pytest.mark.gpu
def test_a_prepared_launch_runs_in_a_new_thread_and_in_a_graph(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.undo()
    x = torch.zeros(64, dtype=torch.int32, device="cuda")
    made = kernel(Program("add.cu", ADD), "add", x.device.index, tmp_path)
    prepared = Launch(made, Add, threads=64).prepared((1, 1, 1), Add(0, 5), ("x",))
    stream = torch.cuda.current_stream().cuda_stream
    prepared(stream, [x.data_ptr()])
    other = threading.Thread(target=prepared, args=(stream, [x.data_ptr()]))
    other.start()
    other.join()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prepared(torch.cuda.current_stream().cuda_stream, [x.data_ptr()])
    assert x.tolist() == [10] * 64
    graph.replay()
    assert x.tolist() == [15] * 64


ADD = """
    struct Params { int* x; long long n; };
    extern "C" __global__ void add(const __grid_constant__ Params p) { p.x[threadIdx.x] += (int)p.n; }"""


@pytest.mark.gpu
def test_a_kernel_runs_on_the_current_stream_and_in_a_graph(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.undo()
    program = Program("add.cu", ADD)
    x = torch.zeros(64, dtype=torch.int32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    # The kernel is loaded inside the capture.
    with torch.cuda.graph(graph):
        made = kernel(program, "add", x.device.index, tmp_path)
        Launch(made, Add, threads=64, shared=100_000)((1, 1, 1), Add(x.data_ptr(), 5))
    assert x.tolist() == [0] * 64
    graph.replay()
    graph.replay()
    assert x.tolist() == [10] * 64
    assert kernel(program, "add", x.device.index, tmp_path) is made


def test_a_tile_map_is_the_second_parameter() -> None:
    fake = FakeCuda()
    launch = Launch(loaded(fake), One, threads=32, mapped=True)
    maps = [TileMap(bytes([number]) * MAP_BYTES) for number in (3, 7)]
    launch((1, 1, 1), One(5), maps[0])
    assert fake.log[-1][-1] == [5]
    assert fake.maps == [bytes([3]) * MAP_BYTES]
    prepared = launch.prepared((1, 1, 1), One(6), ())
    prepared(0x123, (), tile_map=maps[1])
    assert fake.maps == [bytes([7]) * MAP_BYTES]
    assert all(one.address % 64 == 0 for one in maps)
    launches = len(fake.log)
    for without in (lambda: launch((1, 1, 1), One(5)), lambda: prepared(0x123, ())):
        with pytest.raises(TypeError, match="this kernel needs a tile map"):
            without()
    assert len(fake.log) == launches
    Launch(loaded(fake), One, threads=32)((1, 1, 1), One(5))
    assert fake.maps == []


def test_a_tile_map_describes_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver is told: three dimensions, the innermost 128 bytes, and strides of the outer two."""
    told: list[list[int]] = []

    def encode(out, kind, rank, address, sizes, strides, box, steps, *options):
        ctypes.memset(out, 9, MAP_BYTES)
        told.append([kind, rank, address.value, *sizes, *strides, *box, *steps, *options])
        return 0

    fake = FakeCuda()
    fake.cuTensorMapEncodeTiled = encode
    monkeypatch.setattr(tile_map, "driver", lambda: Driver(fake))
    tile_map.tile_map.cache_clear()
    made = tile_map.tile_map(0x4000, 64, 100, 8448, 32)
    assert told == [[0, 3, 0x4000, 128, 64, 100, 128, 8448, 128, 32, 1, 1, 1, 1, 0, 3, 3, 0]]
    assert ctypes.string_at(made.address, MAP_BYTES) == bytes([9]) * MAP_BYTES
    assert tile_map.tile_map(0x4000, 64, 100, 8448, 32) is made
    assert len(told) == 1
    tile_map.tile_map.cache_clear()
