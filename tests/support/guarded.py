"""Memory with guard zones: tensors inside larger buffers whose other bytes must stay as they are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tamis import PagedCache
from tamis.arithmetic import ceil_div
from tamis.cache.layout import Layout, named

ZONE = 4096
"""Bytes on either side, a multiple of every alignment that kernels need."""
PATTERN = 0xA5


class Guards:
    """The buffers of one call; `check` compares the bytes that must not change."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        """Start without buffers."""
        self.device = torch.device(device)
        self._zones: list[tuple[str, Tensor]] = []
        self._inputs: list[tuple[str, Tensor, Tensor]] = []

    def empty(self, *shape: int, dtype: torch.dtype, name: str = "scratch") -> Tensor:
        """A dense tensor of bytes 0xFF, NaN in every float type, between two zones."""
        count = int(torch.Size(shape).numel()) * dtype.itemsize
        raw = _filled(count + 2 * ZONE, PATTERN, self.device)
        raw[ZONE : ZONE + count] = 0xFF
        self._zones += [(f"before {name}", raw[:ZONE]), (f"behind {name}", raw[ZONE + count :])]
        return raw[ZONE : ZONE + count].view(dtype).view(shape)

    def output(self, tensor: Tensor, name: str = "output") -> Tensor:
        """A guarded copy that a call may write to."""
        held = self.empty(*tensor.shape, dtype=tensor.dtype, name=name)
        return held.copy_(tensor)

    def given(self, tensor: Tensor, name: str = "input") -> Tensor:
        """A guarded copy that must not change."""
        held = self.output(tensor, name)
        self._inputs.append((name, _bytes(held), _bytes(held).clone()))
        return held

    def cache(
        self, layout: str | Layout, pages: int, page_size: int, *, gap: int = 64, scale: float | Tensor = 1.0
    ) -> PagedCache:
        """A cache of bytes 0xFF with a guarded gap between pages."""
        made = named(layout)
        size = made.row_bytes * page_size
        stride = ceil_div(size + gap, 64) * 64
        raw = _filled(pages * stride + 2 * ZONE, PATTERN, self.device)
        inside = raw[ZONE : ZONE + pages * stride].view(pages, stride)
        inside[:, :size] = 0xFF
        self._zones += [("before the cache", raw[:ZONE]), ("behind the cache", raw[ZONE + pages * stride :])]
        self._zones += [("between pages", inside[:, size:])]
        rows = inside.view(made.element)[:, : size // made.element.itemsize].unflatten(1, (page_size, -1))
        return PagedCache.wrap(rows, made, scale=scale)

    def keep(self, cache: PagedCache) -> PagedCache:
        """A cache that must not change from now on."""
        self._inputs.append(("cache", cache.storage, cache.storage.clone()))
        return cache

    def check(self) -> None:
        """Assert that every zone and every input is unchanged."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for name, zone in self._zones:
            spoilt = (zone != PATTERN).sum().item()
            assert spoilt == 0, f"{spoilt} bytes {name} were written to"
        for name, now, before in self._inputs:
            assert torch.equal(_bytes(now), _bytes(before)), f"{name} was written to"

    @contextmanager
    def allocations(self, monkeypatch: Any) -> Iterator[None]:
        """Within it, `torch.empty` and `torch.empty_like` give guarded memory: outputs and scratch of the library.
        `monkeypatch` is pytest's, or its class."""
        usual: Callable[..., Tensor] = torch.empty

        def empty(*shape: Any, dtype: torch.dtype | None = None, device: Any = None, **rest: Any) -> Tensor:
            sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            if device is None or torch.device(device).type != self.device.type:
                return usual(*shape, dtype=dtype, device=device, **rest)
            return self.empty(*sizes, dtype=dtype or torch.get_default_dtype())

        def empty_like(tensor: Tensor, **rest: Any) -> Tensor:
            return self.empty(*tensor.shape, dtype=rest.get("dtype") or tensor.dtype)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", empty)
            patch.setattr(torch, "empty_like", empty_like)
            yield


def _filled(count: int, value: int, device: torch.device) -> Tensor:
    return torch.full((count,), value, dtype=torch.uint8, device=device)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)
