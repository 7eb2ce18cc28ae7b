"""Random numbers, tensors and caches of one call, all from one seed."""

import random
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tamis import PagedCache
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, plain_fp8, rows, v4_fp8, v32_fp8

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class Draw:
    """The source of a call's random choices: call i under seed s is the same in any run."""

    def __init__(self, seed: int, number: int, device: str = "cpu") -> None:
        self.random = random.Random(f"{seed}/{number}")
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(62))
        self.device = device

    def chance(self, share: float) -> bool:
        return self.random.random() < share

    def pick(self, values: Sequence[Any]) -> Any:
        return values[self.random.randrange(len(values))]

    def size(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def floats(self, *shape: int, dtype: torch.dtype = torch.float32, spread: float = 1.0) -> Tensor:
        """Normal numbers under random strides."""
        return self.strided(torch.randn(shape, generator=self.generator, dtype=torch.float32).mul_(spread).to(dtype))

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        """Numbers from low to high, both included."""
        return self.strided(torch.randint(low, high + 1, shape, generator=self.generator, dtype=torch.int64).to(dtype))

    def strided(self, value: Tensor) -> Tensor:
        """The same values, now and then in rows that lie apart or across."""
        value = value.to(self.device)
        if value.dim() == 0 or value.numel() == 0 or self.chance(0.7):
            return value
        if value.dim() > 1 and self.chance(0.3):
            return value.transpose(-1, -2).contiguous().transpose(-1, -2)
        room = torch.zeros((*value.shape[:-1], value.shape[-1] + self.size(1, 3)), dtype=torch.float64)
        room = room.to(value.dtype).to(self.device)
        room[..., : value.shape[-1]].copy_(value)
        return room[..., : value.shape[-1]]

    def rows_apart(self, value: Tensor) -> Tensor:
        """The same values; rows may lie apart, columns never: what a buffer to be written may look like."""
        value = value.to(self.device)
        if value.dim() < 2 or self.chance(0.6):
            return value.contiguous()
        room = value.new_zeros((*value.shape[:-1], value.shape[-1] + self.size(1, 4)))
        room[..., : value.shape[-1]].copy_(value)
        return room[..., : value.shape[-1]]

    def poison(self, value: Tensor, *, bad: Sequence[float] = (float("nan"),), share: float = 0.3) -> Tensor:
        """The same values, now and then with a few that are not finite."""
        if value.numel() and value.is_floating_point() and self.chance(share):
            flat = value.clone()
            for _ in range(self.size(1, 2)):
                at = tuple(self.size(0, extent - 1) for extent in flat.shape)
                if flat.element_size() > 1:
                    flat[at] = self.pick(bad)
            return flat
        return value

    def latent_layout(self, quantised: bool | None = None) -> Layout:
        """A layout of latent rows, mostly narrow."""
        on_gpu = self.device != "cpu"
        if self.chance(0.5 if on_gpu else 0.03):
            latent, rope, tile = self.pick([(512, 64, 128), (448, 64, 64)])
        else:
            latent, rope, tile = self.pick(
                [(128, 64, 64), (64, 32, 32)] if on_gpu else [(32, 8, 16), (64, 0, 32), (16, 4, 8)]
            )
        packed = [
            lambda: v32_fp8(latent=latent, rope=rope, tile=tile, scale_mode=self.pick(["pow2", "exact"])),
            lambda: v4_fp8(latent=latent, rope=rope, tile=tile, rounding=self.pick(["bf16", "none"])),
            lambda: plain_fp8(latent=latent, rope=rope),
        ]
        plain = [lambda: rows(self.pick(FLOATS), latent=latent, rope=rope)]
        choices = packed if quantised else plain if quantised is False else packed + plain * 2
        return self.pick(choices)()

    def index_layout(self) -> Layout:
        dim = self.pick([128] if self.device != "cpu" and self.chance(0.7) else [32, 64, 32, 128])
        kinds = [lambda: index_fp8(dim=dim, rounding=self.pick(["bf16", "none"])), lambda: index_mxfp4(dim=dim)]
        return self.pick([*kinds, lambda: rows(self.pick(FLOATS), latent=dim, rope=0)])()

    def cache(self, layout: Layout, *, low_pages: int = 1, filled: bool = True, recipe: Any = None) -> PagedCache:
        """Pages that may lie apart, full of random bytes that are finite numbers."""
        pages, page_size = (
            self.size(low_pages, 6),
            self.pick([1, 2, 3, 4, 8, 16, 64] if self.chance(0.3) else [2, 4, 8]),
        )
        apart = layout.alignment * self.size(1, 5) if self.chance(0.4) else 0
        size = layout.row_bytes * page_size
        size += -size % layout.alignment if apart else 0
        room = torch.randint(0, 256, (pages, size + apart), generator=self.generator, dtype=torch.uint8)
        room = room[:, : layout.row_bytes * page_size].unflatten(1, (page_size, layout.row_bytes))
        storage = room.to(self.device) if not apart else _moved(room, self.device)
        scale: float | Tensor = 1.0
        if layout.scale_mode == "tensor":
            scale = self.random.uniform(0.01, 4.0)
            scale = torch.tensor([scale], dtype=torch.float32, device=self.device) if self.chance(0.4) else scale
        if apart and (size + apart) % layout.alignment:
            storage = storage.contiguous()
        cache = PagedCache.wrap(storage.view(layout.element), layout, scale=scale, recipe=recipe)
        if filled:
            fill(self, cache)
        return cache

    def table(self, requests: int, width: int, pages: int, *, hostile: bool = True) -> Tensor:
        """Page numbers; hostile ones hold absent pages and pages that the cache does not have."""
        found = torch.randint(0, pages, (requests, width), generator=self.generator, dtype=torch.int64)
        if hostile and found.numel():
            bad = torch.rand(found.shape, generator=self.generator) < 0.15
            found[bad] = self.pick([-1, -7, INT_MIN])
        return self.strided(found.to(torch.int32))


def _moved(room: Tensor, device: str) -> Tensor:
    """The same view of memory of the same size elsewhere."""
    base = torch.empty(0, dtype=room.dtype).set_(room.untyped_storage())  # type: ignore[call-overload]
    return base.to(device).as_strided(room.shape, room.stride(), room.storage_offset())


def fill(draw: Draw, cache: PagedCache) -> None:
    """Numbers of moderate size in every row: random bytes alone would be mostly NaN and infinities."""
    from contract.formats import Format, encode

    count = cache.rows
    values = torch.randn((count, cache.layout.width), generator=draw.generator)
    values *= torch.exp2(torch.randint(-3, 3, (count, 1), generator=draw.generator).float())
    encode(Format.of(cache), values).store(cache, torch.arange(count))
