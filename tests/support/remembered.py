"""Calls that are remembered, against the same calls where nothing is: what tests of the stages and drop-ins share."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pretended import Launched, Pretended
from torch import Tensor

from tamis import PagedCache
from tamis.cache.layout import Layout
from tamis.ops import index_topk, memory, translate_positions, write_kv

Given = dict[str, Any]
Change = Callable[[Given], Given]
SOURCES = str(Path(memory.__file__).parents[1])


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def shifted(tensor: Tensor, by: int) -> Tensor:
    """The same values at an address that is `by` elements past an aligned one."""
    room = torch.zeros(tensor.numel() + by, dtype=tensor.dtype)[by:].view(tensor.shape)
    return room.copy_(tensor)


def widened(tensor: Tensor) -> Tensor:
    """The same values with gaps between rows."""
    room = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] + 8, dtype=tensor.dtype)[..., : tensor.shape[-1]]
    return room.copy_(tensor)


def every_other(tensor: Tensor) -> Tensor:
    """The same values with gaps between neighbours."""
    return tensor.repeat_interleave(2, -1)[..., ::2]


def paged(layout: str | Layout = "v32-fp8", pages: int = 6, page_size: int = 64, **options: Any) -> PagedCache:
    return PagedCache(layout, pages, page_size, **options)


def with_gaps(layout: str = "v32-fp8") -> PagedCache:
    """A cache whose pages are apart."""
    cache = paged(layout)
    room = torch.zeros(6, 2 * 64, cache.layout.row_elements, dtype=cache.storage.dtype)
    return PagedCache.wrap(room[:, 64:], cache.layout)


def unaligned_cache(layout: str = "v32-fp8") -> PagedCache:
    cache = paged(layout)
    room = torch.zeros(cache.storage.numel() + 4, dtype=torch.uint8)[4:]
    return PagedCache.wrap(room.view(cache.storage.shape), cache.layout)


def in_place(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda given: given | {name: change(given[name])}


def added(**more: Any) -> Change:
    return lambda given: given | {name: value() if callable(value) else value for name, value in more.items()}


def named_tensors(given: Given) -> dict[str, Tensor]:
    found = {name: value for name, value in given.items() if isinstance(value, Tensor) and value.device.type == "cpu"}
    found = {name: value for name, value in found.items() if value.layout is torch.strided}
    return found | ({"rows": given["cache"].storage} if isinstance(given.get("cache"), PagedCache) else {})


def outcome(device: Pretended, run: Callable[[Given], Any], given: Given) -> tuple[list[Launched], object]:
    """What a call launches, and what it returns or raises, without values and addresses."""
    try:
        found = run(given)
    except (TypeError, ValueError) as error:
        return device.launches(), repr(error)
    tensors = [found] if isinstance(found, Tensor) else found or ()
    told = [(t.shape, t.stride(), t.dtype, t.device, t.is_inference(), t.requires_grad) for t in tensors]
    return device.launches(**named_tensors(given)), told


def compare(device: Pretended, run: Callable[[Given], Any], base: Given, changed: Given) -> None:
    """One call after two others, against the same in a process that remembers nothing."""
    device.remembers = False
    expected = outcome(device, run, changed)
    device.remembers = True
    for _ in range(2):
        outcome(device, run, base)
    for _ in range(3):
        assert outcome(device, run, changed) == expected
    before = outcome(device, run, base)
    device.forget()
    device.remembers = False
    assert before == outcome(device, run, base)


def calls_of(run: Callable[[Given], Any], given: Given) -> int:
    """How many functions the library calls in the third call of a function."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        caller = frame.f_back if event == "call" else frame
        count += event in ("call", "c_call") and caller is not None and SOURCES in caller.f_code.co_filename

    for _ in range(2):
        run(given)
    # What the collector calls when it happens to run is not the function's.
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(see)
    try:
        run(given)
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    return count


def writing(rows: int = 4, layout: str = "v32-fp8") -> Given:
    return {"kv": torch.zeros(rows, 576, dtype=torch.bfloat16), "cache": paged(layout), "slots": torch.arange(rows)}


def run_write(given: Given) -> None:
    write_kv(**given)


def indexing(tokens: int = 4, heads: int = 8) -> Given:
    given = {"q": torch.zeros(tokens, heads, 128, dtype=torch.bfloat16), "weights": torch.zeros(tokens, heads)}
    given |= {"cache": paged("index-fp8"), "request_ids": ints(tokens), "block_table": ints(tokens, 9)}
    return given | {"lengths": ints(tokens), "k": 64}


def run_index(given: Given) -> Tensor:
    return index_topk(**given)


def translating(tokens: int = 4) -> Given:
    return {"positions": ints(tokens, 40), "request_ids": ints(tokens), "block_table": ints(3, 9), "page_size": 64}


def run_translate(given: Given) -> Any:
    return translate_positions(**given)
