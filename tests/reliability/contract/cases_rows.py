"""Rows into pages and out of them: write, read, gather."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from contract.calls import Call, memory, outside_unchanged, require
from contract.draw import FLOATS, INT_MAX, INT_MIN, Draw
from contract.formats import E4M3, Format, byte_of, decode, decode_row, encode
from contract.maths import close, rms_norm, rotated, rounded
from tamis import PagedCache, ops

Arguments = dict[str, Any]


def whole(kv: Any) -> Tensor:
    """One tensor from either form; two parts of different dtypes are joined in the wider one."""
    return torch.cat(kv, dim=-1) if isinstance(kv, tuple) else kv


def same_rows(before: PagedCache, after: PagedCache, rows: Tensor, slots: Tensor) -> None:
    """Every byte of the cache's memory: the rows at their slots, and nothing else, changed."""
    image = memory(before.storage)
    found = memory(after.storage)
    assert image is not None
    assert found is not None
    wanted = encode(Format.of(before), rows, before.scale).image(image.cpu().numpy().copy(), before, slots.cpu())
    if np.array_equal(wanted, found.cpu().numpy()):
        return
    # NaN has several codes: then bytes may differ, as long as what they mean does not.
    outside_unchanged("cache", before.storage, after.storage)
    every = torch.arange(before.rows)
    values, expected = decode(after, every), _decoded_image(before, wanted, every)
    same = (values == expected) | (values.isnan() & expected.isnan())
    require(same.all() and values.isnan().any(), f"bytes of {before!r} differ from the oracle's")


def _decoded_image(cache: PagedCache, image: np.ndarray, slots: Tensor) -> Tensor:
    form = Format.of(cache)
    found = []
    for slot in slots.tolist():
        parts = [None if p is None else image[byte_of(cache, form, p, slot) :][: p.size].copy() for p in form.places()]
        found.append(torch.from_numpy(decode_row(form, *parts, float(cache.scale))))
    return torch.stack(found)


def distinct_slots(draw: Draw, cache: PagedCache, count: int) -> Tensor:
    """Slots for so many rows; some are skipped, and no two are the same (kernels may mix those)."""
    order = torch.randperm(cache.rows, generator=draw.generator)[:count]
    slots = torch.cat((order, torch.full((max(0, count - len(order)),), -1)))
    slots[torch.rand(len(slots), generator=draw.generator) < 0.2] = draw.pick([-1, -5, INT_MIN])
    return draw.strided(slots.to(draw.pick([torch.int32, torch.int64])))


def write_kv(draw: Draw) -> Call:
    layout = draw.pick([draw.latent_layout, draw.index_layout])()
    cache = draw.cache(layout)
    count = draw.size(0, 6)
    kv: Any = draw.poison(
        draw.floats(count, layout.width, dtype=draw.pick(FLOATS), spread=draw.pick([1.0, 100.0, 1e-6]))
    )
    if layout.rope and draw.chance(0.4):
        kv = (kv[:, : layout.latent], kv[:, layout.latent :].to(draw.pick([kv.dtype, torch.float32])))
    slots = distinct_slots(draw, cache, draw.size(0, count))

    def check(_: None, before: Arguments, after: Arguments) -> None:
        rows = whole(before["kv"])
        require(rows.dim() == 2 and rows.dtype in FLOATS, "kv of this kind means nothing")
        same_rows(before["cache"], after["cache"], rows[: len(before["slots"])], before["slots"])

    return Call(
        "ops.write_kv", ops.write_kv, {"kv": kv, "cache": cache, "slots": slots, "backend": "auto"}, check, ("cache",)
    )


def read_kv(draw: Draw) -> Call:
    cache = draw.cache(draw.pick([draw.latent_layout, draw.index_layout])())
    shape = draw.pick([(3,), (2, 3), (0,), (), (1, 2, 2)])
    slots = draw.ints(-2, cache.rows + 1, *shape, dtype=draw.pick([torch.int32, torch.int64]))
    if slots.dim() and slots.numel():
        slots[(0,) * slots.dim()] = draw.pick([INT_MIN, INT_MAX, 0])
    dtype = draw.pick(FLOATS)

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        wanted = decode(before.get("cache", before.get("self")), before["slots"].flatten().cpu())
        given = before.get("dtype", torch.float32)
        require(found.dtype == given, f"dtype {found.dtype}")
        # Value times scale is rounded to float32, and that to the dtype asked for.
        exact = wanted.float().to(given).double().view(*before["slots"].shape, wanted.shape[1])
        close("rows", found, exact, torch.zeros_like(exact))

    if draw.chance(0.3):
        return Call("PagedCache.read", PagedCache.read, {"self": cache, "slots": slots, "dtype": dtype}, check)
    arguments = {"cache": cache, "slots": slots, "dtype": dtype, "backend": "auto"}
    return Call("ops.read_kv", ops.read_kv, arguments, check)


def _requests(draw: Draw, cache: PagedCache) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, int]:
    """Block table, lengths, first positions and starts of a few requests, and the workspace rows they need."""
    requests, width = draw.size(0, 3), draw.size(1, 3)
    longest = width * cache.page_size
    first = [draw.size(0, longest) for _ in range(requests)] if draw.chance(0.5) else [0] * requests
    lengths = [draw.pick([0, draw.size(0, longest - begin)]) for begin in first]
    table = draw.table(requests, width, cache.pages, hostile=False)
    for request in range(requests):
        for page in range(width):
            needed = lengths[request] and page * cache.page_size < first[request] + lengths[request]
            if not (needed and (page + 1) * cache.page_size > first[request]) and draw.chance(0.5):
                table[request, page] = draw.pick([-1, INT_MIN, INT_MAX])
    starts, at = [], 0
    for length in lengths:
        at += draw.size(0, 2)
        starts.append(at)
        at += length
    as_tensor = lambda values: draw.strided(torch.tensor(values, dtype=torch.int32))  # noqa: E731
    running = draw.chance(0.4)
    return (
        table,
        as_tensor(lengths),
        as_tensor(first) if any(first) or draw.chance(0.5) else None,
        None if running else as_tensor(starts),
        sum(lengths) if running else at,
    )


def _sources(before: Arguments, rows: int) -> list[int]:
    """The slot behind each workspace row, -1 for none."""
    cache, lengths = before["cache"], before["lengths"].tolist()
    starts = before["starts"].tolist() if before["starts"] is not None else np.cumsum([0, *lengths])[:-1].tolist()
    first = before["first"].tolist() if before["first"] is not None else [0] * len(lengths)
    table = before["block_table"].tolist()
    found = [-1] * rows
    for request, length in enumerate(lengths):
        for number in range(length):
            position = first[request] + number
            page = table[request][position // cache.page_size]
            found[starts[request] + number] = page * cache.page_size + position % cache.page_size
    return found


def gather_kv(draw: Draw) -> Call:
    cache = draw.cache(draw.pick([draw.latent_layout, draw.index_layout])())
    table, lengths, first, starts, rows = _requests(draw, cache)
    out = None
    if starts is not None or draw.chance(0.3):  # without it, rows are allocated up to the last start
        out = draw.rows_apart(draw.floats(rows + draw.size(0, 2), cache.layout.width, dtype=draw.pick(FLOATS)))

    def check(found: Tensor, before: Arguments, after: Arguments) -> None:
        sources = _sources(before, len(found))
        values = decode(before["cache"], torch.tensor(sources, dtype=torch.int64)).float().to(found.dtype)
        known = torch.tensor([s >= 0 for s in sources], dtype=torch.bool)
        given = before["out"]
        rest = torch.zeros_like(values) if given is None else given.cpu()
        wanted = torch.where(known.unsqueeze(1), values, rest).double()
        close("workspace", found, wanted, torch.zeros_like(wanted))
        if given is not None:
            require(found is after["out"], "out is not what was returned")
            outside_unchanged("out", given, after["out"])

    arguments = {"cache": cache, "block_table": table, "lengths": lengths, "starts": starts, "first": first, "out": out}
    return Call(
        "ops.gather_kv",
        ops.gather_kv,
        {**arguments, "backend": "auto"},
        check,
        ("out",),
        optional=("starts", "first", "out"),
    )


def gather_index(draw: Draw) -> Call:
    layout = draw.index_layout()
    while not layout.quantised:
        layout = draw.index_layout()
    cache = draw.cache(layout)
    table, lengths, first, starts, rows = _requests(draw, cache)

    def check(found: tuple[Tensor, Tensor], before: Arguments, _: Arguments) -> None:
        values, scales = found
        form, image = Format.of(before["cache"]), memory(before["cache"].storage)
        assert image is not None
        raw, places = image.cpu().numpy(), form.places()
        require(len(values) == before["rows"] == len(scales), "not as many rows as asked for")
        keys = values.view(torch.uint8).cpu().numpy()
        factors = (
            scales.cpu().reshape(len(keys), scales.numel() // max(1, len(keys))).contiguous().view(torch.uint8).numpy()
        )
        for row, slot in enumerate(_sources(before, len(keys))):
            for name, place, part in (("keys", places[0], keys), ("scales", places[1], factors)):
                assert place is not None
                start = 0 if slot < 0 else byte_of(before["cache"], form, place, slot)
                wanted = np.zeros(place.size, np.uint8) if slot < 0 else raw[start : start + place.size]
                require(np.array_equal(part[row], wanted), f"{name}[{row}] are other bytes")

    arguments = {"cache": cache, "block_table": table, "lengths": lengths, "rows": rows + draw.size(0, 2)}
    arguments |= {"starts": starts, "first": first, "backend": "auto"}
    return Call("ops.gather_index", ops.gather_index, arguments, check, optional=("starts", "first"), sizes=("rows",))


def quantise_per_tensor(draw: Draw) -> Call:
    x = draw.floats(*draw.pick([(3, 4), (5,), (2, 2, 3)]), dtype=draw.pick(FLOATS), spread=draw.pick([1.0, 0.0, 1e4]))

    def check(found: tuple[Tensor, Tensor], before: Arguments, _: Arguments) -> None:
        values, inverse = found
        exact = before["x"].detach().cpu().double()
        amax = max(float(exact.abs().max()), 1e-10)
        close(
            "inverse scale",
            inverse.reshape(()),
            torch.tensor(amax / 448, dtype=torch.float64),
            torch.tensor(amax * 2.0**-30),
        )
        require(np.isfinite(float(inverse.detach())), "an inverse scale that is not finite")
        numbers = np.asarray(E4M3[values.view(torch.uint8).cpu().numpy()] * float(inverse.detach()))
        wanted = exact.clamp(-amax, amax)
        # Half a step of three bits of mantissa, or of the smallest step, and the two roundings of the scale.
        step = torch.maximum(wanted.abs() * 2.0**-4, torch.tensor(float(inverse.detach()) * 2.0**-10))
        close("values", torch.from_numpy(numbers), wanted, step * (1 + 2.0**-20) + wanted.abs() * 2.0**-21)

    return Call("ops.quantise_per_tensor", ops.quantise_per_tensor, {"x": x}, check)


def write_normed_kv(draw: Draw) -> Call:
    layout = draw.latent_layout()
    while not layout.rope:
        layout = draw.latent_layout()
    cache, count, longest = draw.cache(layout), draw.size(0, 4), draw.size(1, 9)
    arguments = {
        "latent": draw.floats(count, layout.latent, dtype=draw.pick(FLOATS)),
        "rope": draw.floats(count, layout.rope, dtype=draw.pick(FLOATS)),
        "cache": cache,
        "slots": distinct_slots(draw, cache, count),
        "norm_weight": draw.floats(layout.latent, dtype=draw.pick(FLOATS)),
        "positions": draw.ints(0, longest - 1, count, dtype=draw.pick([torch.int32, torch.int64])),
        "cos_sin": draw.floats(longest, layout.rope),
        "eps": 1e-6,
        "interleaved": draw.chance(0.5),
        "backend": "auto",
    }

    def check(_: None, before: Arguments, after: Arguments) -> None:
        normed = rms_norm(before["latent"], before["norm_weight"], before["eps"])
        angles = before["cos_sin"].cpu().double()[before["positions"].cpu().long()]
        require(angles.isfinite().all(), "angles that are not finite")
        turned = rotated(before["rope"].cpu().double(), angles, interleaved=before["interleaved"])
        sizes = torch.cat(
            (
                normed.abs(),
                before["rope"].cpu().double().abs().amax(1, keepdim=True) * 2 * angles.abs().amax(1, keepdim=True)
                + turned.abs(),
            ),
            1,
        )
        near_rows(before["cache"], after["cache"], torch.cat((normed, turned), 1), sizes, before["slots"])

    return Call("ops.write_normed_kv", ops.write_normed_kv, arguments, check, ("cache",))


def near_rows(
    before: PagedCache, after: PagedCache, rows: Tensor, sizes: Tensor, slots: Tensor, *, extra: float = 0.0
) -> None:
    """Rows that were computed in float32 before they were written: what is read back is as near as the format keeps
    numbers. `sizes` are the magnitudes that their errors are relative to; each has a few roundings of its row."""
    outside_unchanged("cache", before.storage, after.storage)
    form, known = Format.of(before), slots.tolist()
    kept = [(row, slot) for row, slot in enumerate(known) if 0 <= slot < before.rows and slot not in known[row + 1 :]]
    untouched = torch.tensor([s for s in range(before.rows) if s not in known], dtype=torch.int64)
    left, was = decode(after, untouched), decode(before, untouched)
    require(((left == was) | (left.isnan() & was.isnan())).all(), "a row that has no token changed")
    if not kept:
        return
    where, which = torch.tensor([s for _, s in kept]), torch.tensor([r for r, _ in kept])
    wanted, size = rows[which], sizes[which]
    bound = size * ((form.width + 32) * 2.0**-24 + extra) + rounded(
        wanted, torch.bfloat16 if form.kind != "rows" else form.element
    )
    if form.kind != "rows":
        step = torch.zeros_like(wanted)
        if form.kind == "plain-fp8":
            scale = float(before.scale)
            limit = 448.0 * scale
            wanted = wanted.clamp(-limit, limit)
            step[:] = scale * 2.0**-10
            step = torch.maximum(step, wanted.abs() * 2.0**-4)
        else:
            step[:, : form.latent] = _tile_step(form, wanted[:, : form.latent], bound[:, : form.latent])
        bound = bound + step * 1.01
    # What is infinite saturates or not, as the format can.
    close(
        "rows in the cache",
        decode(after, where),
        *(torch.where(wanted.isinf(), other, part) for part, other in ((wanted, 0.0), (bound, torch.inf))),
    )


def _tile_step(form: Format, wanted: Tensor, bound: Tensor) -> Tensor:
    """Half a step of each value under the scale of its tile, which may be a power of two more than it need be."""
    tile = form.tile or form.latent
    sizes = (wanted.abs() + bound).unflatten(1, (-1, tile))
    packed = form.kind == "index-mxfp4"
    scale = torch.clamp_min(sizes.amax(2, keepdim=True) / (6.0 if packed else 448.0), form.floor) * 2
    if packed:
        return torch.maximum(sizes * 0.25, scale * 0.25).flatten(1)
    return torch.maximum(sizes * 2.0**-4, scale * 2.0**-10).flatten(1)


CASES = (write_kv, write_kv, read_kv, read_kv, gather_kv, gather_kv, gather_index, quantise_per_tensor, write_normed_kv)
