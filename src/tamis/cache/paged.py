"""`PagedCache`: rows of one byte format, in pages."""

from typing import Self

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.codec import check_read, read_rows
from tamis.cache.fields import Field
from tamis.cache.layout import Layout, named
from tamis.model.recipe import IndexRecipe

_ONE_BYTE = (torch.uint8, torch.int8, torch.float8_e4m3fn)


class PagedCache:
    """Rows of one layout in pages; row `r` of page `p` is slot `p * page_size + r`.

    `PagedCache("v32-fp8", pages=1024, page_size=64)` allocates zeroed pages; `PagedCache.wrap` describes an engine's
    tensor. The object only describes its storage, so caches from `with_scale` share it.

    Attributes:
        layout: the byte format.
        storage: [pages, page_size, row_elements], as engines hold it. In planar layouts only the size of the
            last two axes has a meaning, since the bytes of a row are not contiguous.
        page_size: rows per page.
        scale: the one factor of a `plain-fp8` cache (stored value = x / scale); 1.0 in every other layout.
        recipe: how the index keys of this cache were rotated, if known. Keys and queries of another recipe are refused.
    """

    recipe: IndexRecipe | None

    def __init__(
        self,
        layout: str | Layout,
        pages: int,
        page_size: int,
        device: torch.device | str = "cpu",
        *,
        scale: float | Tensor = 1.0,
        recipe: IndexRecipe | None = None,
    ) -> None:
        """Allocate `pages` zeroed pages."""
        layout = named(layout)
        checks.integer("pages", pages, low=1)
        checks.integer("page_size", page_size, low=1)
        _few_enough(pages, page_size)
        _check_recipe(recipe)
        device = checks.device("device", device, usable=True)
        # The pages outlive this call. If they were made in inference_mode, they could not be written outside of it.
        with torch.inference_mode(False):
            raw = torch.zeros(pages, layout.page_bytes(page_size), dtype=torch.uint8, device=device)
            used = raw[:, : layout.row_bytes * page_size].unflatten(1, (page_size, layout.row_bytes))
            storage = used.view(layout.element)
        self._hold(layout, storage, page_size, scale)
        self.recipe = recipe

    @classmethod
    def wrap(
        cls,
        storage: Tensor,
        layout: str | Layout,
        page_size: int | None = None,
        *,
        scale: float | Tensor = 1.0,
        recipe: IndexRecipe | None = None,
    ) -> Self:
        """Describe an engine's tensor: [pages, page_size, C], or the same with a head axis of size 1.

        C is the number of elements of a row: 656 for `v32-fp8`, 576 for `v32-bf16`, 584 for `v4-fp8`. The bytes of a
        page must be contiguous, but there may be gaps between pages, for example with pages of other layers.
        """
        layout = named(layout)
        if not isinstance(storage, Tensor):
            raise checks.refuse_type("storage", "a tensor", checks.describe(storage), "pass the cache tensor")
        if storage.requires_grad:
            received = "a tensor that requires grad"
            raise checks.refuse("storage", "without gradient", received, "rows are written in place: pass .detach()")
        _check_recipe(recipe)
        allowed = _ONE_BYTE if layout.element.itemsize == 1 else (layout.element,)
        checks.dense("storage", storage, allowed)
        if storage.dim() == 4 and 1 in storage.shape[1:3]:
            storage = storage.squeeze(1 if storage.shape[1] == 1 and storage.shape[2] != 1 else 2)
        remedy = f"a {layout.name} cache has rows of {layout.row_elements}"
        found = checks.tensor("storage", storage, "pages page_size C", allowed, C=layout.row_elements, remedy=remedy)
        if page_size is not None and checks.integer("page_size", page_size, low=1) != found["page_size"]:
            raise checks.refuse(
                "page_size", f"{found['page_size']}, the storage's second axis", page_size, "leave it out"
            )
        cache = cls.__new__(cls)
        cache._hold(layout, storage, found["page_size"], scale)
        cache.recipe = recipe
        return cache

    @classmethod
    def rebuilt(cls, storage: Tensor, layout: Layout, scale: float | Tensor) -> Self:
        """A cache from the parts of one that was checked already. Op bodies use it to avoid a second check."""
        cache = cls.__new__(cls)
        cache._keep(layout, storage, scale)
        cache.recipe = None
        return cache

    def _keep(self, layout: Layout, storage: Tensor, scale: float | Tensor) -> None:
        pages, page_size, row = storage.shape
        self.layout, self.storage, self.page_size, self.scale = layout, storage, page_size, scale
        self.page_stride = (storage.stride(0) if pages > 1 else row * page_size) * storage.element_size()
        """Bytes from one page to the next."""

    def _hold(self, layout: Layout, storage: Tensor, page_size: int, scale: float | Tensor) -> None:
        pages, item, row = storage.shape[0], storage.element_size(), layout.row_elements
        if pages == 0 or page_size == 0:
            raise checks.refuse("storage", "at least one page of one row", list(storage.shape), "allocate pages first")
        _few_enough(pages, page_size)
        if storage.stride(2) != 1 or (page_size > 1 and storage.stride(1) != row):
            raise checks.refuse(
                "storage", f"contiguous inside a page (strides *, {row}, 1)", storage.stride(), "call .contiguous()"
            )
        page_stride = storage.stride(0) if pages > 1 else row * page_size
        if page_stride < row * page_size:
            raise checks.refuse(
                "storage", f"in pages at least {row * page_size} elements apart", page_stride, "do not overlap pages"
            )
        # torch.compile does not know where a tensor starts while it traces. A misaligned start then fails in `field`.
        start = 0 if torch.compiler.is_compiling() else storage.storage_offset()
        for what, found in (("start", start * item), ("page stride", page_stride * item)):
            if found % layout.alignment:
                expected = f"aligned, its {what} a multiple of {layout.alignment} bytes"
                raise checks.refuse("storage", expected, f"{found} bytes", "pad the pages")
        scale = checks.scale_factor("scale", scale)
        if layout.scale_mode != "tensor" and not (isinstance(scale, float) and scale == 1.0):
            raise checks.refuse("scale", f"1.0 for {layout.name}", scale, "only plain-fp8 has a scale for all rows")
        if isinstance(scale, Tensor):
            checks.same_device(storage=storage, scale=scale)
        self._keep(layout, storage, scale)

    @property
    def pages(self) -> int:
        """The number of pages."""
        return self.storage.shape[0]

    @property
    def rows(self) -> int:
        """The number of slots."""
        return self.storage.shape[0] * self.page_size

    @property
    def device(self) -> torch.device:
        """The device of the storage."""
        return self.storage.device

    @property
    def rows_per_page(self) -> int:
        """The distance between two pages in rows, for consumers that index one flat list of rows.

        It is `page_size` unless there are gaps between pages. A distance that is not a whole number of rows is refused.
        """
        span, rest = divmod(self.page_stride, self.layout.row_bytes)
        if rest:
            raise checks.refuse(
                "storage",
                f"in pages a whole number of {self.layout.row_bytes}-byte rows apart",
                f"{self.page_stride} bytes",
                "address it by page and row, as PagedCache.read does, instead of by flat row",
            )
        return span

    def field(self, field: Field) -> Tensor:
        """A view [pages, page_size, count] of one field of every row, whatever the page stride."""
        raw = self.storage.view(torch.uint8)
        start, strides = field.start(self.page_size), (self.page_stride, field.stride, 1)
        shape = (self.pages, self.page_size, field.count * field.dtype.itemsize)
        if torch.compiler.is_compiling():
            # The storage offset is unknown while torch.compile traces, so a slice moves the view to the field's start.
            used = self.layout.row_bytes * self.page_size
            page = torch.as_strided(raw, (self.pages, used), (self.page_stride, 1))
            return torch.as_strided(page[:, start:], shape, strides).view(field.dtype)
        return torch.as_strided(raw, shape, strides, raw.storage_offset() + start).view(field.dtype)

    def with_scale(self, scale: float | Tensor) -> Self:
        """The same storage, read and written with another scale."""
        return type(self).wrap(self.storage, self.layout, self.page_size, scale=scale, recipe=self.recipe)

    def read(self, slots: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Dequantised rows [..., width] of the given slots; a negative slot, or one past the end, reads zeros."""
        check_read(self, slots, dtype)
        return read_rows(self, slots, dtype)

    def __repr__(self) -> str:
        """The layout, the size and the device."""
        return f"PagedCache({self.layout.name!r}, pages={self.pages}, page_size={self.page_size}, {self.device})"


def _check_recipe(recipe: IndexRecipe | None) -> None:
    if recipe is not None:
        checks.instance("recipe", recipe, IndexRecipe)


def _few_enough(pages: int, page_size: int) -> None:
    if pages * page_size >= 2**31:
        raise checks.refuse("pages", "fewer than 2**31 rows in all", pages * page_size, "slots are 32-bit numbers")
