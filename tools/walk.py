"""Counts the Python functions that one warm call of a layer runs: `python -m tools.walk [--list]`.

Three numbers are counted: the functions of the library that are called, the files that they are in, and how often
execution returns to a file that it had left. The calls are those on an H200 (the Hopper kernels for `index` and
`attend`, Triton elsewhere), but with tensors on the host: launches are stubs, and checks do not read values, as on a
device. The first call fills caches; the second is counted.
"""

import argparse
import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

import tamis
from tamis import (
    Batch,
    Caches,
    LayerSpec,
    Limits,
    PagedCache,
    PagePool,
    Planner,
    SparseMLA,
    SparseV4,
    V4Caches,
    V4Planner,
    V4Weights,
    checks,
)
from tamis.backends import BACKENDS
from tamis.cuda import launch
from tamis.model.rope import Rope
from tamis.ops import IndexInputs, library, memory

ROOT = Path(tamis.__file__).parent
SHARED_BYTES = 232448
SMS = 132
BOUNDS = {"V3.2 decode": (110, 60), "V4 prefill": (220, 115), "V4 decode in vLLM": (60, 30)}
"""The most calls, and the most returns to a file, that a walk may have."""


@dataclass(frozen=True)
class Walk:
    """The functions that one call ran, in order: file and name."""

    steps: list[tuple[str, str]]
    depth: int

    @property
    def files(self) -> int:
        """The number of files that the functions are in."""
        return len({file for file, _ in self.steps})

    @property
    def switches(self) -> int:
        """The number of functions that are in another file than the one before."""
        return sum(one[0] != other[0] for one, other in zip(self.steps, self.steps[1:], strict=False))

    @property
    def returns(self) -> int:
        """The number of switches to a file that had been entered before."""
        return self.switches - (self.files - 1)


def walk(run: Callable[[], object]) -> Walk:
    """Run a call and return its walk."""
    steps: list[tuple[str, str]] = []
    depth = deepest = 0

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth, deepest
        if not frame.f_code.co_filename.startswith(str(ROOT)):
            return
        if event == "call":
            depth += 1
            deepest = max(deepest, depth)
            steps.append((str(Path(frame.f_code.co_filename).relative_to(ROOT)), frame.f_code.co_qualname))
        elif event == "return":
            depth -= 1

    sys.setprofile(trace)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Walk(steps, deepest)


class _Driver:
    """A CUDA driver whose functions do nothing and return success."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return self.set_limit if name == "cuDeviceGetAttribute" else lambda *arguments: 0

    @staticmethod
    def set_limit(value: Any, *_: object) -> int:
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = SHARED_BYTES
        return 0


@contextmanager
def like_an_h200() -> Iterator[None]:
    """Within it, stages choose the kernels of an H200, and launches do nothing."""
    hopper, triton = (next(b for b in BACKENDS if b.name == name) for name in ("hopper", "triton"))

    @cache
    def module(stage: str, backend: str, device: torch.device, trains: str | None = None) -> object:
        return import_module((hopper if stage in hopper.stages else triton).stage_module(stage))

    from triton.runtime.jit import JITFunction

    # Stubs are compiled with the paths of the files that they stand for, so that they are counted as their functions.
    stubs: dict[str, Any] = {}
    exec(compile("def visible(value): return False", checks.__file__, "exec"), stubs)
    exec(compile("def remembered_on(tensor): return True", str(memory.__file__), "exec"), stubs)
    properties = SimpleNamespace(multi_processor_count=SMS, shared_memory_per_block_optin=SHARED_BYTES, major=9)
    patches = [
        patch.object(library, "_module", module),
        patch.object(checks, "visible", stubs["visible"]),
        patch.object(memory, "remembered_on", stubs["remembered_on"]),
        patch.object(launch, "driver", lambda: launch.Driver(_Driver())),
        patch.object(launch, "compiled", lambda *_, **__: b""),
        patch.object(JITFunction, "run", lambda *_, **__: None),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(torch.cuda, "get_device_properties", lambda *_: properties),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0, create=True),
    ]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()


def v32_decode() -> Callable[[], object]:
    """One token of each of 8 requests: write, select by the layer's own indexer, attend; 16 heads, FP8 rows."""
    requests, heads, topk = 8, 16, 256
    spec = LayerSpec(heads=heads, scale=0.05, topk=topk)
    caches = Caches(PagedCache("v32-fp8", 80, 64), PagedCache("index-fp8", 80, 64))
    limits = Limits(max_tokens=16, max_requests=requests, max_length=512)
    plan = Planner(spec, limits).plan(Batch.build([1] * requests, [400] * requests, PagePool(80, 64)))
    index = IndexInputs(_random(requests, 64, 128), _random(requests, 64).float(), _random(requests, 128))
    layer, q, kv = SparseMLA(spec), _random(requests, heads, 576), _random(requests, 576)
    return lambda: layer(q, kv, caches, plan, index=index)


def v4_prefill() -> Callable[[], object]:
    """A chunk of a prefill in a layer with overlapping compression (C4A): 64 heads, FP8 rows."""
    tokens, hidden, heads = 32, 64, 64
    spec = LayerSpec(
        heads, 448, 64, 512, 512**-0.5, window=128, sink=True, kind="overlapping", compress=4, topk=128,
        index_heads=64, index_dim=128,
    )  # fmt: skip
    weights = V4Weights.from_state_dict(_v4_weights(spec, hidden), groups=8)
    layer = SparseV4(spec, weights, Rope(64).cos_sin_table(512))
    sizes = {"window": 64, "state4": 4}
    planner = V4Planner([spec], Limits(64, 2, 512, 256, sizes))
    pools = {name: PagePool(200, size) for name, size in sizes.items()}
    caches = V4Caches.allocate(spec, pages=10, window_pages=200, state_pages=200)
    plan = planner.plan(Batch.build([tokens], [300], PagePool(10, 256), other_pools=pools))
    x = _random(tokens, hidden)
    return lambda: layer(x, caches, plan)


def vllm_v4_decode() -> Callable[[], object]:
    """Attention of a layer whose indexer selects (C4A), as vLLM calls it: one token of each of 8 requests, 64 heads."""
    from tamis.integrations.vllm.v4_forward import forward_decode

    requests, heads = 8, 64
    window, entries = PagedCache("v4-fp8", 40, 64), PagedCache("v4-fp8", 40, 64)
    layer = SimpleNamespace(
        compress_ratio=4,
        scale=512**-0.5,
        attn_sink=torch.zeros(heads, dtype=torch.float32, device="cpu"),
        swa_cache_layer=SimpleNamespace(kv_cache=window.storage),
        kv_cache_torch_dtype=torch.uint8,
        topk_indices_buffer=_integers(64, 512),
    )
    raw = SimpleNamespace(
        num_decode_tokens=requests,
        decode_swa_indices=_integers(requests, 1, 128),
        decode_swa_lens=_integers(requests),
        is_valid_token=_integers(64).bool(),
    )
    record = SimpleNamespace(req_id_per_token=_integers(requests), block_table=_integers(requests, 10))
    q = _random(requests, heads, 512)
    out = torch.empty_like(q)
    return lambda: forward_decode(layer, q, entries.storage, raw, record, False, out)


def _integers(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32, device="cpu")


def _v4_weights(spec: LayerSpec, hidden: int) -> dict[str, torch.Tensor]:
    rank, groups, low, width, index = 48, 8, 16, spec.head_dim, spec.index_dim or 0
    made = {
        "wq_a.weight": _random(rank, hidden),
        "q_norm.weight": _random(rank),
        "wq_b.weight": _random(spec.heads * width, rank),
        "wkv.weight": _random(width, hidden),
        "kv_norm.weight": _random(width),
        "attn_sink": _random(spec.heads).float(),
        "wo_a.weight": _random(groups * low, spec.heads * width // groups),
        "wo_b.weight": _random(hidden, groups * low),
        "indexer.wq_b.weight": _random((spec.index_heads or 0) * index, rank),
        "indexer.weights_proj.weight": _random(spec.index_heads or 0, hidden),
    }
    for name, size in (("compressor.", width), ("indexer.compressor.", index)):
        made |= {f"{name}{part}.weight": _random(2 * size, hidden) for part in ("wkv", "wgate")}
        made |= {f"{name}ape": _random(spec.compress, 2 * size).float(), f"{name}norm.weight": _random(size)}
    return made


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float32, device="cpu").bfloat16()


def walks() -> dict[str, Walk]:
    """The walks of both layers' warm calls."""
    found = {}
    made = {"V3.2 decode": v32_decode(), "V4 prefill": v4_prefill(), "V4 decode in vLLM": vllm_v4_decode()}
    with like_an_h200(), torch.no_grad():
        for name, run in made.items():
            run()
            found[name] = walk(run)
    return found


def main() -> int:
    """Print the numbers; 1 if a walk is longer than its bounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print every step of the walks")
    options = parser.parse_args()
    longer = False
    for name, found in walks().items():
        calls, returns = BOUNDS[name]
        longer |= len(found.steps) > calls or found.returns > returns
        if options.list:
            print("\n".join(f"  {file}: {function}" for file, function in found.steps))
        print(
            f"{name}: {len(found.steps)} calls (at most {calls}), {found.files} files, {found.switches} switches, "
            f"{found.returns} returns (at most {returns}), depth {found.depth}"
        )
    return int(longer)


if __name__ == "__main__":
    sys.exit(main())
