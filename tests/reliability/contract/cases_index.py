"""Index queries and keys made ready, their scores, and the best positions."""

from typing import Any

import torch
from torch import Tensor

from contract.calls import Call, Wrong, outside_unchanged, require
from contract.cases_attend import translated
from contract.cases_rows import distinct_slots, near_rows
from contract.draw import FLOATS, INT_MAX, INT_MIN, Draw
from contract.formats import E4M3, Format, decode, decode_row
from contract.maths import UNIT, best, close, hadamard, rotated, rounded, scores
from tamis import IndexRecipe, ops

Arguments = dict[str, Any]


def recipe_of(draw: Draw, width: int) -> IndexRecipe:
    return IndexRecipe(draw.pick([0, 8, 16, width]), draw.chance(0.5), draw.chance(0.5), draw.chance(0.4))


def sums_unit(q: Tensor) -> float:
    """Relative error of a score's sums: float64 on the host, float32 on a device. Hopper adds 32 products of e4m3 at a
    time, each cut off 13 bits below the largest of them."""
    if q.device.type == "cpu":
        return (q.shape[1] + q.shape[2] + 4) * 2.0**-50
    cut = 32 * 2.0**-13 if q.dtype == torch.float8_e4m3fn else 0.0
    return (q.shape[1] + q.shape[2] + 4) * UNIT[torch.float32] + cut


def paged(draw: Draw) -> Arguments:
    cache = draw.cache(draw.index_layout())
    requests, width = draw.size(1, 3), draw.size(1, 3)
    tokens, heads, longest = draw.size(0, 4), draw.pick([1, 2, 8, 64]), width * cache.page_size
    dtype = draw.pick([*FLOATS, torch.float8_e4m3fn])
    return {
        "q": draw.floats(tokens, heads, cache.layout.width).to(dtype),
        "weights": draw.floats(tokens, heads, dtype=draw.pick(FLOATS)),
        "cache": cache,
        "request_ids": draw.ints(0, requests - 1, tokens),
        "block_table": draw.table(requests, width, cache.pages),
        "lengths": draw.ints(-3, longest, tokens),
    }


def paged_scores(before: Arguments, width: int) -> tuple[Tensor, Tensor]:
    """Scores [T, width] of each token's request, -inf where there is nothing to see, and magnitudes."""
    q, cache, table = before["q"], before["cache"], before["block_table"].tolist()
    require(q.dim() == 3, "a query of this shape means nothing")
    found = torch.full((len(q), width), -torch.inf, dtype=torch.float64)
    sizes = torch.zeros(len(q), width, dtype=torch.float64)
    for token in range(len(q)):
        request, length = int(before["request_ids"][token]), int(before["lengths"][token])
        require(0 <= request < len(table) and length <= width, "a request without a table, or a length without room")
        slots = [translated(p, table[request], cache.page_size, cache.page_size) for p in range(max(0, length))]
        slots = [slot if slot < cache.rows else -1 for slot in slots]
        known = [p for p, slot in enumerate(slots) if slot >= 0]
        if known:
            keys = decode(cache, torch.tensor([slots[p] for p in known]))
            found[token, known], sizes[token, known] = scores(q[token], before["weights"][token], keys)
    return found, sizes


def check_scores(found: Tensor, wanted: Tensor, sizes: Tensor, q: Tensor) -> None:
    bound = rounded(wanted, torch.float32) + sizes * sums_unit(q)
    close("scores", found, wanted, bound)


def index_scores(draw: Draw) -> Call:
    arguments = paged(draw)
    cache, longest = arguments["cache"], int(arguments["lengths"].max()) if len(arguments["lengths"]) else 0
    arguments["width"] = draw.pick([None, max(0, longest) + draw.size(0, 3)])
    arguments["out"] = None
    if draw.chance(0.4):
        width = arguments["width"]
        width = arguments["block_table"].shape[1] * cache.page_size if width is None else width
        arguments["out"] = draw.rows_apart(draw.floats(len(arguments["q"]), width))

    def check(found: Tensor, before: Arguments, after: Arguments) -> None:
        width = before["block_table"].shape[1] * before["cache"].page_size
        width = found.shape[1] if before["out"] is not None and before["width"] is None else width
        width = width if before["width"] is None else before["width"]
        check_scores(found, *paged_scores(before, width), before["q"])
        if before["out"] is not None:
            outside_unchanged("out", before["out"], after["out"])

    arguments["backend"] = "auto"
    return Call(
        "ops.index_scores", ops.index_scores, arguments, check, ("out",), optional=("width", "out"), sizes=("width",)
    )


def index_topk(draw: Draw) -> Call:
    arguments = {
        **paged(draw),
        "k": draw.pick([1, 3, 8, 100]),
        "workspace_bytes": draw.pick([1, 1000, 2**28]),
        "out": None,
        "backend": "auto",
    }
    if draw.chance(0.4):
        arguments["out"] = torch.full((len(arguments["q"]), arguments["k"]), -7, dtype=torch.int32)

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        width = before["block_table"].shape[1] * before["cache"].page_size
        wanted, sizes = paged_scores(before, width)
        q = before["q"]
        bound = rounded(wanted, torch.float32) + sizes * sums_unit(q)
        check_selection(found, wanted, bound, before["k"])

    return Call("ops.index_topk", ops.index_topk, arguments, check, ("out",), optional=("out",))


def check_selection(found: Tensor, wanted: Tensor, bound: Tensor, count: int) -> None:
    """The best positions of each row up to scores that are nearer than their bounds, ascending, then -1."""
    require(list(found.shape) == [len(wanted), count], "another shape")
    for token in range(len(wanted)):
        row = found[token].tolist()
        chosen = [p for p in row if p >= 0]
        known = [p for p, s in enumerate(wanted[token].tolist()) if s == s and s != -torch.inf]
        require(row == chosen + [-1] * (count - len(chosen)), f"row {token} is not packed: {row}")
        require(chosen == sorted(set(chosen)) and set(chosen) <= set(known), f"row {token} is no selection: {row}")
        require(len(chosen) == min(count, len(known)), f"row {token} has {len(chosen)} of {min(count, len(known))}")
        left = [p for p in known if p not in chosen]
        if chosen and left:
            lowest = min(float(wanted[token, p] + bound[token, p]) for p in chosen)
            highest = max(float(wanted[token, p] - bound[token, p]) for p in left)
            if lowest < highest:
                raise Wrong(f"row {token} leaves out a better score")


def topk_positions(draw: Draw) -> Call:
    tokens, width = draw.size(0, 4), draw.pick([0, 1, 9, 40])
    values = draw.floats(tokens, width)
    if values.numel() and draw.chance(0.6):
        values[torch.rand(values.shape, generator=draw.generator).to(values.device) < 0.3] = draw.pick(
            [0.0, -0.0, float("nan"), -torch.inf, torch.inf, 1.0]
        )
    table = draw.chance(0.4)
    requests = draw.size(1, 3)
    arguments: Arguments = {
        "scores": values,
        "lengths": draw.ints(-2, width, tokens),
        "k": draw.pick([1, 4, 16, 50]),
        "request_ids": draw.ints(0, requests - 1, tokens) if table else None,
        "block_table": draw.table(requests, draw.size(1, 4), 2**31 - 1 if draw.chance(0.2) else 9) if table else None,
        "page_size": draw.pick([1, 4, 64]) if table else None,
        "backend": "auto",
    }

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        count = before["k"]
        require(list(found.shape) == [len(before["scores"]), count], "another shape")
        for token, row in enumerate(before["scores"].tolist()):
            require(int(before["lengths"][token]) <= len(row), "a length without scores")
            chosen = best(row[: max(0, int(before["lengths"][token]))], count)
            chosen = chosen + [-1] * (count - len(chosen))
            if before["block_table"] is not None:
                request = int(before["request_ids"][token])
                require(0 <= request < len(before["block_table"]), "a request without a table")
                pages, size = before["block_table"][request].tolist(), before["page_size"]
                chosen = [translated(p, pages, size, size) for p in chosen]
            require(found[token].tolist() == chosen, f"row {token} is {found[token].tolist()}, not {chosen}")

    return Call("ops.topk_positions", ops.topk_positions, arguments, check)


def ragged_scores(draw: Draw) -> Call:
    tokens, heads, total, dim = draw.size(0, 4), draw.pick([1, 4]), draw.pick([0, 1, 12]), draw.pick([32, 64])
    keys: Tensor = draw.floats(total, dim)
    factors: Tensor | None = draw.floats(total).abs() if draw.chance(0.7) else None
    kind = draw.pick(["e4m3", "plain", "packed"])
    if kind == "e4m3":
        keys = keys.to(torch.float8_e4m3fn)
    elif kind == "packed":
        keys, factors = (
            draw.ints(0, 255, total, dim // 2, dtype=torch.uint8),
            draw.ints(110, 140, total, dim // 32, dtype=torch.uint8),
        )
    arguments: Arguments = {
        "q": draw.floats(tokens, heads, dim).to(draw.pick([*FLOATS, torch.float8_e4m3fn])),
        "weights": draw.floats(tokens, heads, dtype=draw.pick(FLOATS)),
        "keys": keys,
        "key_scales": factors,
        "starts": draw.ints(-2, total + 1, tokens),
        "ends": draw.ints(-2, total + 3, tokens),
        "out": draw.rows_apart(draw.floats(tokens, total)) if draw.chance(0.4) else None,
        "backend": "auto",
    }
    if tokens and draw.chance(0.3):
        arguments["ends"][0] = draw.pick([INT_MAX, INT_MIN])

    def check(found: Tensor, before: Arguments, after: Arguments) -> None:
        rows, factors = key_rows(before["keys"], before["key_scales"])
        wanted = torch.full((len(before["q"]), len(rows)), -torch.inf, dtype=torch.float64)
        sizes = torch.zeros_like(wanted)
        for token in range(len(wanted)):
            low, high = max(0, int(before["starts"][token])), min(len(rows), int(before["ends"][token]))
            if low < high:
                some, size = scores(before["q"][token], before["weights"][token], rows[low:high])
                wanted[token, low:high], sizes[token, low:high] = (
                    some * factors[low:high],
                    size * factors[low:high].abs(),
                )
        check_scores(found, wanted, sizes, before["q"])
        if before["out"] is not None:
            outside_unchanged("out", before["out"], after["out"])

    return Call("ops.ragged_scores", ops.ragged_scores, arguments, check, ("out",), optional=("key_scales", "out"))


def key_rows(keys: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor]:
    """float64 keys without the scale of each, and those."""
    one = torch.ones(len(keys), dtype=torch.float64)
    if keys.dtype == torch.uint8:
        assert factors is not None
        return unpacked(keys.cpu(), factors.cpu()), one
    if keys.dtype == torch.float8_e4m3fn:
        keys = torch.from_numpy(E4M3[keys.cpu().view(torch.uint8).numpy()])
    return keys.cpu().double(), one if factors is None else factors.cpu().double()


def unpacked(values: Tensor, exponents: Tensor) -> Tensor:
    """float64 numbers [..., D] of e2m1 pairs [..., D / 2] under exponents [..., D / 32]."""
    form = Format("index-mxfp4", 2 * values.shape[-1], 0, 32, "exponent", "none", torch.uint8, 1)
    lead = values.shape[:-1]
    pairs = zip(values.reshape(-1, values.shape[-1]), exponents.reshape(-1, exponents.shape[-1]), strict=True)
    found = [torch.from_numpy(decode_row(form, v.numpy(), s.numpy(), None)) for v, s in pairs]
    return (
        torch.stack(found).view(*lead, form.latent) if found else torch.zeros(*lead, form.latent, dtype=torch.float64)
    )


def turned(before: Arguments, x: Tensor, recipe: IndexRecipe) -> tuple[Tensor, Tensor]:
    """Rows after rope and Hadamard rotation in float64, and the magnitude that errors of each row are relative to."""
    found = x.detach().cpu().double().clone()
    size = found.abs().amax(-1, keepdim=True) * torch.ones_like(found)
    if before.get("positions") is not None and recipe.rope_dim:
        table = before["cos_sin"].cpu().double()
        require(table.shape[1] == recipe.rope_dim, "a table of another width")
        at = slice(0, recipe.rope_dim) if recipe.rope_first else slice(found.shape[-1] - recipe.rope_dim, None)
        for token, position in enumerate(before["positions"].tolist()):
            require(-1 <= position < len(table), "a position without an angle")
            if position >= 0:
                require(table[position].isfinite().all(), "angles that are not finite")
                part = found[token, ..., at]
                found[token, ..., at] = rotated(part, table[position].expand_as(part), interleaved=recipe.interleaved)
                size[token] *= 2 * max(1.0, float(table[position].detach().abs().max()))
    if recipe.hadamard:
        found, size = hadamard(found), size * found.shape[-1] ** 0.5
    return found, size


def rope_inputs(draw: Draw, recipe: IndexRecipe, tokens: int) -> Arguments:
    if draw.chance(0.3):
        return {"positions": None, "cos_sin": None}
    longest = draw.size(1, 9)
    positions = draw.ints(-1, longest - 1, tokens, dtype=draw.pick([torch.int32, torch.int64]))
    return {"positions": positions, "cos_sin": draw.floats(longest, recipe.rope_dim)}


def rotate_index(draw: Draw) -> Call:
    tokens, dim = draw.size(0, 3), draw.pick([16, 32])
    recipe = recipe_of(draw, dim)
    shape = (tokens, dim) if draw.chance(0.5) else (tokens, 2, dim)
    arguments = {
        "x": draw.floats(*shape, dtype=draw.pick(FLOATS)),
        "recipe": recipe,
        **rope_inputs(draw, recipe, tokens),
    }

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        wanted, size = turned(before, before["x"], before["recipe"])
        close("rows", found, wanted, size * 32 * 2.0**-24 + 2.0**-120)

    return Call("ops.rotate_index", ops.rotate_index, arguments, check)


def quantise_index_query(draw: Draw) -> Call:
    tokens, heads, dim = draw.size(0, 3), draw.size(1, 3), draw.pick([32, 64])
    recipe = recipe_of(draw, dim)
    arguments = {
        "q": draw.floats(tokens, heads, dim, dtype=draw.pick(FLOATS)),
        "weights": draw.floats(tokens, heads, dtype=draw.pick(FLOATS)),
        "recipe": recipe,
        **rope_inputs(draw, recipe, tokens),
        "scale": draw.pick([None, 0.25]),
        "rounding": draw.pick(["bf16", "none"]),
        "scale_mode": draw.pick(["pow2", "exact"]),
        "backend": "auto",
    }

    def check(found: tuple[Tensor, Tensor], before: Arguments, _: Arguments) -> None:
        values, weights = found
        wanted, size = turned(before, before["q"], before["recipe"])
        constant = (heads * dim) ** -0.5 if before["scale"] is None else before["scale"]
        plain = before["weights"].cpu().double() * constant
        require(values.shape == before["q"].shape and weights.shape == plain.shape, "another shape")
        # The scale of each query is in its weight.
        factor = torch.where(plain == 0, 0.0, weights.cpu().double() / plain).unsqueeze(-1)
        numbers = torch.from_numpy(E4M3[values.cpu().view(torch.uint8).numpy()]) * factor
        error = size * (
            32 * 2.0**-24 + (2.0**-8 + 2.0**-8 * before["recipe"].hadamard) * (before["rounding"] == "bf16")
        )
        largest = (wanted.abs() + error).amax(-1, keepdim=True).clamp_min(1e-4) / 448
        bound = (
            error + torch.maximum((wanted.abs() + error) * 2.0**-4, largest * 2 * 2.0**-10) + wanted.abs() * 2.0**-20
        )
        usable = (plain.isfinite() & (plain != 0) & wanted.isfinite().all(-1)).unsqueeze(-1).expand_as(wanted)
        close("queries", numbers[usable], wanted[usable], bound[usable])
        require((factor <= largest * 2 * (1 + 2.0**-20))[usable[..., :1]].all(), "a scale twice as large as it must be")

    return Call("ops.quantise_index_query", ops.quantise_index_query, arguments, check, optional=("scale",))


def write_index_keys(draw: Draw) -> Call:
    layout = draw.index_layout()
    recipe = recipe_of(draw, layout.width)
    recorded = draw.chance(0.4)
    cache, count = draw.cache(layout, recipe=recipe if recorded else None), draw.size(0, 4)
    normed = draw.chance(0.5)
    arguments: Arguments = {
        "keys": draw.floats(count, layout.width, dtype=draw.pick(FLOATS)),
        "cache": cache,
        "slots": distinct_slots(draw, cache, draw.size(0, count)),
        "recipe": None if recorded and draw.chance(0.5) else recipe,
        "norm_weight": draw.floats(layout.width, dtype=draw.pick(FLOATS)) if normed else None,
        "norm_bias": draw.floats(layout.width) if normed and draw.chance(0.5) else None,
        "norm_eps": 1e-6,
        **rope_inputs(draw, recipe, count),
        "backend": "auto",
    }

    def check(_: None, before: Arguments, after: Arguments) -> None:
        keys = before["keys"].cpu().double()
        if before["norm_weight"] is not None:
            middle = keys - keys.mean(1, keepdim=True)
            keys = middle / torch.sqrt(middle.square().mean(1, keepdim=True) + before["norm_eps"])
            keys = keys * before["norm_weight"].cpu().double()
            keys = keys if before["norm_bias"] is None else keys + before["norm_bias"].cpu().double()
        recipe = before["recipe"] or before["cache"].recipe
        rows, size = turned(before, keys, recipe)
        bf16 = before["cache"].layout.rounding == "bf16"
        extra = 2.0**-7 * (1 + recipe.hadamard) if bf16 else 64 * 2.0**-24
        near_rows(before["cache"], after["cache"], rows, size + 1, before["slots"], extra=extra)

    optional = ("recipe", "norm_weight", "norm_bias")
    return Call("ops.write_index_keys", ops.write_index_keys, arguments, check, ("cache",), optional=optional)


def pack_index_query(draw: Draw) -> Call:
    tokens, heads, dim = draw.size(0, 3), draw.size(1, 3), draw.pick([32, 64])
    recipe = recipe_of(draw, dim)
    arguments: Arguments = {
        "q": draw.floats(tokens, heads, dim, dtype=draw.pick(FLOATS)),
        "weights": draw.floats(tokens, heads, dtype=draw.pick(FLOATS)),
        "recipe": recipe,
        **rope_inputs(draw, recipe, tokens),
        "scale": draw.pick([None, 0.25]),
        "rounding": draw.pick(["bf16", "none"]),
    }

    def check(found: ops.PackedQuery, before: Arguments, _: Arguments) -> None:
        wanted, size = turned(before, before["q"], before["recipe"])
        numbers = unpacked(found.values.cpu(), found.scales.cpu())
        error = size * (32 * 2.0**-24 + 2.0**-7 * (1 + before["recipe"].hadamard) * (before["rounding"] == "bf16"))
        tiles = (wanted.abs() + error).unflatten(-1, (-1, 32))
        step = torch.maximum(tiles * 0.25, tiles.amax(-1, keepdim=True) / 6 * 2 * 0.25).flatten(-2)
        usable = wanted.isfinite().all(-1)
        close("queries", numbers[usable], wanted[usable], (error + step)[usable] + 2.0**-120)
        constant = (heads * dim) ** -0.5 if before["scale"] is None else before["scale"]
        plain = before["weights"].cpu().double() * constant
        close("weights", found.weights, plain, plain.abs() * 2.0**-22)

    return Call("ops.pack_index_query", ops.pack_index_query, arguments, check, optional=("scale",))


def unpack_index_query(draw: Draw) -> Call:
    tokens, heads, dim = draw.size(0, 3), draw.size(1, 3), draw.pick([32, 64])
    values = draw.ints(0, 255, tokens, heads, dim // 2, dtype=torch.uint8)
    exponents = draw.ints(10, 200, tokens, heads, dim // 32, dtype=torch.uint8)

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        wanted = unpacked(before["values"].cpu(), before["scales"].cpu())
        close("queries", found, wanted, torch.zeros_like(wanted))

    return Call("ops.unpack_index_query", ops.unpack_index_query, {"values": values, "scales": exponents}, check)


CASES = (
    index_scores,
    index_scores,
    ragged_scores,
    topk_positions,
    topk_positions,
    index_topk,
    index_topk,
    rotate_index,
)
CASES += (quantise_index_query, write_index_keys, pack_index_query, unpack_index_query)
