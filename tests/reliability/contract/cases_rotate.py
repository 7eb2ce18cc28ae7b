"""Norms and rotations, attention's output in FP8, and spans of tokens pooled into entries."""

from typing import Any

import torch
from torch import Tensor

from contract.calls import Call, outside_unchanged, require
from contract.cases_attend import translated
from contract.cases_rows import distinct_slots, near_rows
from contract.draw import FLOATS, Draw
from contract.formats import E4M3, decode
from contract.maths import close, hadamard, rms_norm, rounded, turn_tail
from tamis import IndexRecipe, ops
from tamis.arithmetic import ceil_div
from tamis.cache.layout import compressor_state

Arguments = dict[str, Any]
UNIT = 2.0**-24


def angles(draw: Draw, width: int, total: int) -> Arguments:
    longest, rotary = draw.size(1, 9), draw.pick([2, 4, 8]) if width >= 8 else 2
    positions = draw.ints(-2, longest - 1, total, dtype=draw.pick([torch.int32, torch.int64]))
    return {"positions": positions, "cos_sin": draw.floats(longest, rotary)}


def finite_angles(before: Arguments) -> float:
    """The largest factor of a rotation, of those that are used."""
    table, used = before["cos_sin"].detach().cpu(), before["positions"].cpu().long()
    require(table.dim() == 2 and bool((used < len(table)).all()), "a position without an angle")
    rows = table[used[used >= 0]]
    require(rows.isfinite().all(), "angles that are not finite")
    return max(1.0, float(rows.abs().max())) if rows.numel() else 1.0


def norm_rows(draw: Draw) -> Call:
    width = draw.pick([1, 8, 33])
    x = draw.poison(draw.floats(draw.size(0, 4), width, dtype=draw.pick(FLOATS), spread=draw.pick([0.0, 1.0, 100.0])))
    arguments = {"x": x, "weight": draw.floats(width, dtype=draw.pick(FLOATS)), "eps": 1e-6, "backend": "auto"}

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        wanted = rms_norm(before["x"], before["weight"], before["eps"])
        close(
            "rows",
            found,
            wanted,
            wanted.abs() * (before["x"].shape[1] + 16) * UNIT + rounded(wanted, before["x"].dtype),
        )

    return Call("ops.norm_rows", ops.norm_rows, arguments, check)


def turned_heads(before: Arguments, x: Tensor, eps: float | None, inverse: bool) -> tuple[Tensor, Tensor]:
    """Heads in float64, and how far float32 may be off."""
    factor = finite_angles(before)
    plain = x.detach().cpu().double() if eps is None else rms_norm(x, None, eps)
    size = plain.abs().amax(-1, keepdim=True) * torch.ones_like(plain) * 2 * factor
    return turn_tail(plain, before["positions"], before["cos_sin"], inverse=inverse), size * (x.shape[-1] + 16) * UNIT


def rotate_heads(draw: Draw) -> Call:
    total, width = draw.size(0, 3), draw.pick([8, 32])
    x = draw.poison(draw.floats(total, draw.size(1, 3), width, dtype=draw.pick(FLOATS)))
    arguments = {
        "x": x,
        **angles(draw, width, total),
        "eps": draw.pick([None, 1e-6]),
        "inverse": draw.chance(0.5),
        "backend": "auto",
    }

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        wanted, bound = turned_heads(before, before["x"], before["eps"], before["inverse"])
        usable = wanted.isfinite().flatten(1).all(1)
        close(
            "heads",
            found[usable.to(found.device)],
            wanted[usable],
            (bound + rounded(wanted, before["x"].dtype))[usable],
        )

    return Call("ops.rotate_heads", ops.rotate_heads, arguments, check, optional=("eps",))


def rotate_and_write(draw: Draw) -> Call:
    layout = draw.latent_layout()
    cache, total, width = draw.cache(layout), draw.size(0, 3), layout.width
    index_dim = draw.pick([16, 32])
    arguments: Arguments = {
        "q": draw.floats(total, draw.size(1, 3), width, dtype=draw.pick(FLOATS)),
        "kv": draw.floats(total, width, dtype=draw.pick(FLOATS)),
        "cache": cache,
        "slots": distinct_slots(draw, cache, draw.size(0, total)),
        **angles(draw, min(width, index_dim), total),
        "norm_weight": draw.floats(width, dtype=draw.pick(FLOATS)),
        "eps": 1e-6,
        "index_q": draw.floats(total, 2, index_dim, dtype=draw.pick(FLOATS)) if draw.chance(0.5) else None,
        "index_hadamard": draw.chance(0.5),
        "backend": "auto",
    }

    def check(found: ops.Rotated, before: Arguments, after: Arguments) -> None:
        factor, count = finite_angles(before), len(before["slots"])
        wanted, bound = turned_heads(before, before["q"], before["eps"], False)
        usable = wanted.isfinite().flatten(1).all(1)
        close(
            "q",
            found.q[usable.to(found.q.device)],
            wanted[usable],
            (bound + rounded(wanted, before["q"].dtype))[usable],
        )
        rows = rms_norm(before["kv"], before["norm_weight"], before["eps"])
        size = rows.abs().amax(-1, keepdim=True) * torch.ones_like(rows) * 2 * factor
        turned = turn_tail(rows, before["positions"], before["cos_sin"])
        near_rows(before["cache"], after["cache"], turned[:count], size[:count], before["slots"])
        require((found.index_q is None) == (before["index_q"] is None), "index_q")
        if before["index_q"] is not None:
            kind, dim = before["index_q"].dtype, before["index_q"].shape[-1]
            wanted, bound = turned_heads(before, before["index_q"], None, False)
            bound = bound + rounded(wanted, kind)
            if before["index_hadamard"]:
                bound = bound.amax(-1, keepdim=True) * dim**0.5 * torch.ones_like(bound)
                wanted = hadamard(wanted)
                bound = bound + wanted.abs().amax(-1, keepdim=True) * dim * UNIT + rounded(wanted, kind)
            usable = wanted.isfinite().flatten(1).all(1)
            close("index_q", found.index_q[usable.to(found.q.device)], wanted[usable], bound[usable])

    return Call("ops.rotate_and_write", ops.rotate_and_write, arguments, check, ("cache",), optional=("index_q",))


def rotate_to_fp8(draw: Draw) -> Call:
    total, width = draw.size(0, 3), draw.pick([64, 128])
    x = draw.floats(total, draw.size(1, 3), width, dtype=draw.pick(FLOATS), spread=draw.pick([1.0, 0.0, 100.0]))
    arguments = {
        "x": x,
        **angles(draw, width, total),
        "tile": draw.pick([32, 64]),
        "inverse": draw.chance(0.7),
        "backend": "auto",
    }

    def check(found: ops.Fp8Heads, before: Arguments, _: Arguments) -> None:
        wanted, bound = turned_heads(before, before["x"], None, before["inverse"])
        tile = before["tile"]
        factor = torch.exp2(found.scales.cpu().double() - 127).repeat_interleave(tile, -1)
        numbers = torch.from_numpy(E4M3[found.values.cpu().view(torch.uint8).numpy()]) * factor
        largest = (wanted.abs() + bound).unflatten(-1, (-1, tile)).amax(-1, keepdim=True).clamp_min(1e-10) / 448
        step = torch.maximum(
            (wanted.abs() + bound) * 2.0**-4, (largest * 2 * 2.0**-10).expand(-1, -1, -1, tile).flatten(-2)
        )
        usable = wanted.isfinite().all(-1)
        close("heads", numbers[usable], wanted[usable], (bound + step)[usable])

    return Call("ops.rotate_to_fp8", ops.rotate_to_fp8, arguments, check)


def lower_groups(draw: Draw) -> Call:
    total, groups, ranks, tile = draw.size(0, 3), draw.size(1, 2), draw.pick([1, 40]), draw.pick([32, 64])
    width = tile * draw.size(1, 2)
    e4m3 = torch.float8_e4m3fn
    arguments: Arguments = {
        "x": draw.floats(total, groups, width).to(e4m3),
        "scales": draw.ints(120, 130, total, groups, width // tile, dtype=torch.uint8),
        "weight": draw.floats(groups, ranks, width).to(e4m3),
        "weight_scales": draw.floats(groups, ceil_div(ranks, tile), width // tile).abs(),
        "dtype": draw.pick(FLOATS),
        "backend": "auto",
    }

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        tile = before["x"].shape[2] // before["scales"].shape[2]
        x = torch.from_numpy(E4M3[before["x"].cpu().view(torch.uint8).numpy()])
        x = x * torch.exp2(before["scales"].cpu().double() - 127).repeat_interleave(tile, 2)
        weight = torch.from_numpy(E4M3[before["weight"].cpu().view(torch.uint8).numpy()])
        factors = before["weight_scales"].cpu().double().repeat_interleave(tile, 1)[:, : weight.shape[1]]
        weight = weight * factors.repeat_interleave(tile, 2)
        wanted, size = torch.einsum("tgk,gok->tgo", x, weight), torch.einsum("tgk,gok->tgo", x.abs(), weight.abs())
        # Hopper adds 32 products of e4m3 at a time, each cut off 13 bits below the largest of them.
        unit = (x.shape[2] + 16) * UNIT if found.device.type == "cpu" else 32 * 2.0**-13
        close("groups", found, wanted, size * unit + rounded(wanted, before["dtype"]))

    return Call("ops.lower_groups", ops.lower_groups, arguments, check)


def quantise_blocks(draw: Draw) -> Call:
    tile = draw.pick([32, 64])
    weight = draw.floats(
        draw.size(1, 2),
        draw.pick([1, 33, 64]),
        tile * draw.size(1, 2),
        dtype=draw.pick(FLOATS),
        spread=draw.pick([0.0, 1.0, 50.0]),
    )

    def check(found: tuple[Tensor, Tensor], before: Arguments, _: Arguments) -> None:
        values, scales = found
        wanted, tile = before["weight"].detach().cpu().double(), before["tile"]
        factors = scales.cpu().double().repeat_interleave(tile, 1)[:, : wanted.shape[1]].repeat_interleave(tile, 2)
        numbers = torch.from_numpy(E4M3[values.cpu().view(torch.uint8).numpy()]) * factors
        require(((torch.frexp(scales.cpu())[0] == 0.5) | (scales.cpu() == 0)).all(), "a scale that is no power of two")
        step = torch.maximum(wanted.abs() * 2.0**-4, factors * 2.0**-10)
        usable = torch.where(wanted.isfinite(), step, torch.inf)
        close(
            "weights",
            numbers,
            wanted.nan_to_num(0.0, 0.0, 0.0),
            torch.where(wanted.isfinite().all(), usable, torch.inf),
        )

    return Call("ops.quantise_blocks", ops.quantise_blocks, {"weight": weight, "tile": tile}, check)


def compress_kv(draw: Draw) -> Call:
    overlapping, ratio = draw.chance(0.5), draw.pick([1, 2, 4])
    layout = draw.latent_layout()
    width = layout.width
    recipe = None
    if draw.chance(0.3) and width & (width - 1) == 0:
        recipe = IndexRecipe.of_v4(4, hadamard=draw.chance(0.5))
    cache = draw.cache(layout, recipe=recipe)
    state = draw.cache(compressor_state(dim=width, overlapping=overlapping), low_pages=2)
    channels, requests = width * (2 if overlapping else 1), draw.size(1, 2)
    pages = torch.randperm(state.pages, generator=draw.generator)[: 2 * requests].tolist() + [-1] * 4
    table = torch.tensor([pages[r * 2 : r * 2 + 2] for r in range(requests)], dtype=torch.int32)
    longest = 2 * state.page_size
    begin = [draw.size(0, max(0, longest - 2)) for _ in range(requests)]
    new = [draw.size(0, min(4, longest - b)) for b in begin]
    positions = [b + n for b, count in zip(begin, new, strict=True) for n in range(count)] + [-1] * draw.size(0, 1)
    ids = [r for r, count in enumerate(new) for _ in range(count)] + [0] * (len(positions) - sum(new))
    own = [
        translated(p, table[r].tolist(), state.page_size, state.page_size) for p, r in zip(positions, ids, strict=True)
    ]
    total = len(positions)
    arguments: Arguments = {
        "values": draw.floats(total, channels, dtype=draw.pick(FLOATS)),
        "scores": draw.floats(total, channels, dtype=draw.pick(FLOATS)),
        "state": state,
        "cache": cache,
        "positions": draw.strided(torch.tensor(positions, dtype=draw.pick([torch.int32, torch.int64]))),
        "pages": ops.StatePages(
            draw.strided(torch.tensor(own, dtype=draw.pick([torch.int32, torch.int64]))),
            draw.strided(torch.tensor(ids, dtype=torch.int32)),
            draw.strided(table),
        ),
        "slots": distinct_slots(draw, cache, total),
        "bias": draw.floats(ratio, channels, dtype=draw.pick(FLOATS)),
        "norm_weight": draw.floats(width, dtype=draw.pick(FLOATS)),
        "cos_sin": draw.floats(longest, 4),
        "eps": 1e-6,
        "backend": "auto",
    }
    return Call("ops.compress_kv", ops.compress_kv, arguments, check_compressed, ("state", "cache"))


def check_compressed(_: None, before: Arguments, after: Arguments) -> None:
    positions, own = before["positions"].tolist(), before["pages"].slots.tolist()
    ids, table = before["pages"].request_ids.tolist(), before["pages"].block_table.tolist()
    state, width, ratio = before["state"], before["cache"].layout.width, len(before["bias"])
    written = {slot: t for t, slot in enumerate(own) if slot >= 0 and positions[t] >= 0}
    biased = before["scores"].cpu().double() + before["bias"].cpu().double()[before["positions"].cpu().long() % ratio]
    new = torch.cat((before["values"].cpu().double(), biased), 1)
    kept = decode(after["state"], torch.arange(state.rows))
    was = decode(state, torch.arange(state.rows))
    for slot in range(state.rows):
        wanted = new[written[slot]] if slot in written else was[slot]
        close(f"state[{slot}]", kept[slot], wanted, rounded(wanted, torch.float32) * (slot in written))
    outside_unchanged("state", before["state"].storage, after["state"].storage)
    span = ratio * (before["values"].shape[1] // width)
    entries, sizes = (
        torch.zeros(len(positions), width, dtype=torch.float64),
        torch.zeros(len(positions), width, dtype=torch.float64),
    )
    slots = [
        slot if p >= 0 and (p + 1) % ratio == 0 else -1
        for slot, p in zip(before["slots"].tolist(), positions, strict=True)
    ]
    for token, position in enumerate(positions):
        if slots[token] < 0:
            continue
        require(0 <= ids[token] < len(table), "a request without a table")
        pages = table[ids[token]]
        where = [
            translated(p, pages, state.page_size, state.page_size) for p in range(position + 1 - span, position + 1)
        ]
        rows = [(n, kept[slot]) for n, slot in enumerate(where) if 0 <= slot < state.rows]
        half = span // 2 if span > ratio else -1
        values, weights = [], []
        for n, row in rows:
            at = width if n >= half and half > 0 else 0
            channels = before["values"].shape[1]
            values.append(row[at : at + width])
            weights.append(row[channels + at : channels + at + width])
        if not rows:
            sizes[token] = torch.inf
            continue
        pooled = (torch.softmax(torch.stack(weights), 0) * torch.stack(values)).sum(0)
        require(before["cos_sin"][position + 1 - ratio].isfinite().all(), "angles that are not finite")
        factor = max(1.0, float(before["cos_sin"].detach().abs().nan_to_num(0, 0, 0).max()))
        entries[token] = rms_norm(pooled, before["norm_weight"], before["eps"])
        scale = float(torch.stack(values).abs().max() / (pooled.square().mean() + before["eps"]).sqrt())
        score = float(torch.stack(weights).abs().max())
        largest = scale * float(before["norm_weight"].detach().abs().max()) * factor
        sizes[token] = largest * (4 + 4 * score)
        entries[token] = turn_tail(
            entries[token : token + 1], before["positions"][token : token + 1] + 1 - ratio, before["cos_sin"]
        )[0]
    if before["cache"].recipe is not None and before["cache"].recipe.hadamard:
        sizes = sizes * width**0.5 * 2
        entries = hadamard(entries)
        # Rounded once before the rotation, too.
        extra = 2.0**-8
    else:
        extra = 0.0
    usable = sizes.isfinite().all(1) & entries.isfinite().all(1)
    shown = torch.tensor(
        [slot if ok else -1 for slot, ok in zip(slots, usable.tolist(), strict=True)], dtype=torch.int64
    )
    if bool(usable.all()):
        near_rows(before["cache"], after["cache"], entries, sizes, shown, extra=extra)


CASES = (
    norm_rows,
    rotate_heads,
    rotate_and_write,
    rotate_and_write,
    rotate_to_fp8,
    lower_groups,
    quantise_blocks,
    compress_kv,
    compress_kv,
    compress_kv,
)
