"""Attention over selected rows, merging of parts, and positions to slots."""

from typing import Any

import torch
from torch import Tensor

from contract.calls import Call, outside_unchanged, require
from contract.draw import FLOATS, INT_MAX, INT_MIN, Draw
from contract.formats import decode
from contract.maths import UNIT, Attention, attention, check_attended, close, rounded
from tamis import PagedCache, Selection, ops

Arguments = dict[str, Any]
QUERIES = (*FLOATS, torch.float64, torch.float8_e4m3fn)


def unit_of(q: Tensor) -> float:
    """What products are rounded to: float32 on the host; on a device what its matrix instructions take."""
    if q.dtype == torch.float64:
        return UNIT[torch.float64]
    return UNIT[torch.float32] if q.device.type == "cpu" else max(UNIT[q.dtype], 2.0**-16)


def hostile_slots(draw: Draw, rows: int, *shape: int) -> Tensor:
    """Slots of a cache, duplicates among them, and some that it does not have."""
    slots = torch.randint(0, rows, shape, generator=draw.generator)
    if slots.numel() and draw.chance(0.7):
        bad = torch.rand(shape, generator=draw.generator) < draw.pick([0.1, 0.4, 1.0])
        slots[bad] = draw.pick([-1, -(rows + 3), rows, INT_MAX, INT_MIN])
    return draw.strided(slots.to(torch.int32))


def selection(draw: Draw, cache: PagedCache, tokens: int) -> Selection:
    columns = draw.pick([0, 1, 3, 7, 16]) if draw.device == "cpu" else draw.pick([1, 7, 64, 130])
    lengths = draw.ints(0, columns, tokens) if draw.chance(0.5) else None
    if draw.chance(0.3):
        requests, width = draw.size(1, 3), draw.size(1, 4)
        slots = hostile_slots(draw, width * cache.page_size, tokens, columns)
        return Selection(
            cache, slots, lengths, draw.ints(0, requests - 1, tokens), draw.table(requests, width, cache.pages)
        )
    return Selection(cache, hostile_slots(draw, cache.rows, tokens, columns), lengths)


def selected(chosen: Selection, tokens: int) -> list[Tensor]:
    """float64 rows that each token attends to, in column order."""
    require(chosen.slots.dim() == 2 and len(chosen.slots) == tokens, "one row of slots per token")
    slots = [torch.tensor(slots_of(chosen, token), dtype=torch.int64) for token in range(tokens)]
    # Rows are dequantised to float32, whatever is computed with them afterwards.
    return [decode(chosen.cache, some).float().double() for some in slots]


def slots_of(chosen: Selection, token: int) -> list[int]:
    cache, found = chosen.cache, chosen.slots[token].tolist()
    if chosen.lengths is not None:
        length = int(chosen.lengths[token])
        require(0 <= length <= len(found), "a length beyond the columns")
        found = found[:length]
    if chosen.block_table is not None or chosen.request_ids is not None:
        assert chosen.block_table is not None
        assert chosen.request_ids is not None
        request = int(chosen.request_ids[token])
        require(0 <= request < len(chosen.block_table), "a request without a table")
        found = [translated(p, chosen.block_table[request].tolist(), cache.page_size, cache.page_size) for p in found]
    return [slot for slot in found if 0 <= slot < cache.rows]


def translated(position: int, table: list[int], page_size: int, rows_per_page: int) -> int:
    """The slot of a position, -1 where there is none."""
    page = position // page_size
    if position < 0 or page >= len(table) or table[page] < 0:
        return -1
    slot = table[page] * rows_per_page + position % page_size
    return slot if slot <= INT_MAX else -1


def listed(selections: Any) -> list[Selection]:
    return [selections] if isinstance(selections, Selection) else list(selections)


def expected(before: Arguments) -> Attention:
    q = before["q"]
    q = torch.cat(q, -1) if isinstance(q, tuple) else q
    require(q.dim() == 3 and q.dtype in QUERIES and 1 <= q.shape[1] <= 128, "a query of this kind means nothing")
    parts = [selected(s, len(q)) for s in listed(before["selections"])]
    rows = [torch.cat([part[token] for part in parts]) for token in range(len(q))]
    factor = float(before["scale"]) * float(before["q_scale"])
    require(0 < factor < float("inf"), "a scale that is no positive number")
    sink = before.get("sink")
    require(sink is None or not sink.isnan().any(), "a sink of NaN")
    unit = unit_of(q) * (1 + (before["splits"] or 1) / 8)
    return attention(q, rows, scale=factor, value_dim=before["value_dim"], sink=sink, unit=unit)


def query(draw: Draw, tokens: int, heads: int, width: int) -> Tensor:
    allowed = QUERIES if draw.device == "cpu" else (*FLOATS, torch.float8_e4m3fn)
    dtype = draw.pick(allowed)
    return draw.floats(tokens, heads, width, spread=width**-0.5).to(dtype)


def basics(draw: Draw) -> Arguments:
    layout = draw.latent_layout()
    heads = draw.pick([1, 2, 5] if draw.device == "cpu" else [1, 8, 16, 24, 64, 128])
    tokens = draw.size(0, 4)
    caches = [draw.cache(layout) for _ in range(draw.size(1, 2))]
    if draw.chance(0.2):
        for cache in caches:
            spoil_rows(draw, cache)
    q: Any = query(draw, tokens, heads, layout.width)
    if layout.rope and draw.chance(0.25) and q.element_size() > 1:
        q = (q[..., : layout.latent], q[..., layout.latent :])
    selections: Any = [selection(draw, cache, tokens) for cache in caches]
    return {
        "q": q,
        "selections": selections[0] if len(selections) == 1 and draw.chance(0.5) else selections,
        "scale": draw.pick([1.0, 0.25, 4.0]),
        "value_dim": draw.pick([layout.latent, layout.width, 1]) if draw.device == "cpu" else layout.latent,
        "q_scale": draw.pick([1.0, 0.5, torch.tensor(2.0, device=draw.device)]),
        "splits": draw.pick([None, 1, 2, 5]),
        "backend": "auto",
    }


def spoil_rows(draw: Draw, cache: PagedCache) -> None:
    """Make NaN of some row, selected or not."""
    if cache.layout.scale_mode == "none":
        cache.storage[draw.size(0, cache.pages - 1), draw.size(0, cache.page_size - 1), 0] = float("nan")


def attend(draw: Draw) -> Call:
    arguments = basics(draw)
    first = arguments["q"][0] if isinstance(arguments["q"], tuple) else arguments["q"]
    heads = first.shape[1]
    arguments["sink"] = draw.floats(heads) if draw.chance(0.4) else None
    if arguments["sink"] is not None and draw.chance(0.3):
        arguments["sink"][0] = draw.pick([float("inf"), -float("inf")])
    arguments["lse_base"] = draw.pick(["e", "2"])
    arguments["out"] = None
    if draw.chance(0.4):
        shape = (len(first), heads, arguments["value_dim"])
        arguments["out"] = draw.rows_apart(draw.floats(*shape, dtype=draw.pick([*FLOATS, torch.float64])))

    def check(found: ops.Attended, before: Arguments, after: Arguments) -> None:
        check_attended((found.out, found.lse, found.max_logits), expected(before), base=before["lse_base"])
        if before["out"] is not None:
            require(found.out is after["out"], "out is not what was returned")
            outside_unchanged("out", before["out"], after["out"])

    return Call(
        "ops.attend",
        ops.attend,
        arguments,
        check,
        ("out",),
        optional=("sink", "out", "splits"),
        sizes=("splits",),
        lenient=("q_scale",),
    )


def attend_slots(draw: Draw) -> Call:
    def check(found: ops.Partials, before: Arguments, _: Arguments) -> None:
        require(before["splits"] in (None, len(found.out)), "not as many parts as asked for")
        unit = UNIT[found.lse.dtype]
        merged = merge(found.out, found.lse, None, unit)
        whole = expected(before)
        whole.out_bound += merged.out_bound
        whole.lse_bound += merged.lse_bound
        top = None if found.max_logits is None else found.max_logits.amax(0)
        check_attended((merged.out, merged.lse, top), whole)

    return Call(
        "ops.attend_slots",
        ops.attend_slots,
        basics(draw),
        check,
        optional=("splits",),
        sizes=("splits",),
        lenient=("q_scale",),
    )


def merge(parts: Tensor, lses: Tensor, sink: Tensor | None, unit: float) -> Attention:
    """Parts merged by their lse; an lse of -inf counts nothing, whatever its output holds."""
    parts, lses = parts.detach().cpu().double(), lses.detach().cpu().double()
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses == -torch.inf, 0.0, torch.exp(lses - lse)).unsqueeze(-1)
    kept = torch.where(weights == 0, 0.0, parts)
    out = (kept * weights).sum(0)
    size = (kept.abs() * weights).sum(0)
    off = 8 * unit * (1 + lses.abs().nan_to_num(0.0, 0.0, 0.0).amax(0)) + (len(parts) + 8) * unit
    bound = torch.expm1(2 * off).unsqueeze(-1) * size + 2.0**-126
    if sink is not None:
        logit = sink.detach().cpu().double()
        share = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - logit))
        share = torch.where((lse != -torch.inf) & (logit == -torch.inf), 1.0, share).unsqueeze(-1)
        moved = (off + 4 * unit * (1 + logit.abs().nan_to_num(0.0, 0.0, 0.0))).unsqueeze(-1)
        out, bound = out * share, (bound + torch.expm1(moved) * out.abs()) * share + 2.0**-126
    return Attention(out, lse, lse, bound, off)


def combine_parts(draw: Draw) -> Call:
    splits, tokens, heads, width = draw.size(1, 4), draw.size(0, 3), draw.size(1, 4), draw.pick([1, 8, 16])
    kind = draw.pick([torch.float32, torch.float32, torch.float64]) if draw.device == "cpu" else torch.float32
    lse = draw.floats(splits, tokens, heads, dtype=kind, spread=4.0)
    parts = draw.floats(splits, tokens, heads, width, dtype=kind)
    if lse.numel() and draw.chance(0.5):
        lse[0] = -torch.inf
        parts[0] = float("nan")
    out = draw.rows_apart(draw.floats(tokens, heads, width, dtype=draw.pick(FLOATS))) if draw.chance(0.4) else None
    arguments: Arguments = {
        "partials": ops.Partials(parts, lse, draw.floats(splits, tokens, heads) if draw.chance(0.5) else None),
        "sink": draw.floats(heads) if draw.chance(0.5) else None,
        "out": out,
        "dtype": draw.pick(FLOATS),
        "lse_base": draw.pick(["e", "2"]),
        "backend": "auto",
    }

    def check(found: ops.Attended, before: Arguments, after: Arguments) -> None:
        given, sink = before["partials"], before["sink"]
        require(sink is None or not sink.isnan().any(), "a sink of NaN")
        require(given.out.dim() == 4 and len(given.out) > 0, "parts of this shape mean nothing")
        wide = torch.float64 in (given.lse.dtype, given.out.dtype) and given.lse.dtype == torch.float64
        wanted = merge(given.out, given.lse, sink, UNIT[torch.float64 if wide else torch.float32])
        top = None if given.max_logits is None else given.max_logits.cpu().double().amax(0)
        if top is not None:
            close("max_logits", found.max_logits, top, torch.zeros_like(top))
        bound = wanted.out_bound + rounded(wanted.out, found.out.dtype)
        close("out", found.out, wanted.out, bound)
        divisor = 1.0 if before["lse_base"] == "e" else torch.log(torch.tensor(2.0, dtype=torch.float64))
        close(
            "lse",
            found.lse,
            wanted.lse / divisor,
            2 * (wanted.lse_bound + UNIT[found.lse.dtype] * wanted.lse.abs().nan_to_num(0.0, 0.0, 0.0)),
        )
        require(found.out.dtype == (before["dtype"] if before["out"] is None else before["out"].dtype), "another dtype")
        if before["out"] is not None:
            outside_unchanged("out", before["out"], after["out"])

    optional = ("sink", "out", "partials.max_logits")
    return Call("ops.combine_parts", ops.combine_parts, arguments, check, ("out",), optional=optional)


def translate_positions(draw: Draw) -> Call:
    tokens, columns, requests, width = draw.size(0, 4), draw.pick([0, 1, 6]), draw.size(1, 3), draw.size(1, 4)
    page_size, ranks = draw.pick([1, 3, 4, 64]), draw.pick([1, 1, 2, 3])
    workspace = None
    if draw.chance(0.3):
        prefills = draw.size(1, 3)
        workspace = (draw.ints(-2, prefills - 1, tokens), draw.ints(0, 99, prefills))
    arguments: Arguments = {
        "positions": hostile_slots(draw, width * page_size * ranks + 3, tokens, columns),
        "request_ids": draw.ints(0, requests - 1, tokens),
        "block_table": draw.table(requests, width, draw.pick([5, 2**31 - 1])),
        "page_size": page_size,
        "rows_per_page": draw.pick([None, page_size, page_size + 5]),
        "workspace": workspace,
        "ranks": ranks,
        "rank": draw.size(0, ranks - 1),
        "interleave": draw.pick([1, 2, 4]),
        "compact": draw.chance(0.4),
        "backend": "auto",
    }

    def check(found: ops.Translated, before: Arguments, _: Arguments) -> None:
        positions, table = before["positions"].tolist(), before["block_table"].tolist()
        apart = before["rows_per_page"] or before["page_size"]
        turn = before["ranks"] * before["interleave"]
        require(0 <= before["rank"] < before["ranks"], "a rank that does not exist")
        require(found.slots.shape == before["positions"].shape, "another shape")
        for token, row in enumerate(positions):
            request = int(before["request_ids"][token])
            require(0 <= request < len(table), "a request without a table")
            mine = []
            for position in row:
                own, slot = position, -1
                if before["ranks"] > 1:
                    own = position // turn * before["interleave"] + position % before["interleave"]
                here = position >= 0 and position // before["interleave"] % before["ranks"] == before["rank"]
                group = -1 if before["workspace"] is None else int(before["workspace"][0][token])
                if here and group >= 0:
                    inside = own // before["page_size"] < len(table[request])
                    slot = int(before["workspace"][1][group]) + own if inside else -1
                    slot = slot if slot <= INT_MAX else -1
                elif here:
                    slot = translated(own, table[request], before["page_size"], apart)
                mine.append(slot)
            valid = [slot for slot in mine if slot >= 0]
            if before["compact"]:
                mine = valid + [-1] * (len(mine) - len(valid))
            require(
                found.slots[token].tolist() == mine, f"slots[{token}] are {found.slots[token].tolist()}, not {mine}"
            )
            require(int(found.counts[token]) == len(valid), f"counts[{token}]")

    optional = ("rows_per_page", "workspace")
    return Call("ops.translate_positions", ops.translate_positions, arguments, check, optional=optional)


CASES = (attend, attend, attend, attend_slots, combine_parts, combine_parts, translate_positions, translate_positions)
