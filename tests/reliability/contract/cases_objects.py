"""Objects that describe things: layouts, caches, layers, ropes, recipes, weights, and what configs say of them."""

import math
from typing import Any

import torch
from torch import Tensor

from contract.calls import Call, require
from contract.draw import FLOATS, Draw
from contract.formats import decode
from contract.maths import close, rounded
from tamis import IndexRecipe, LayerSpec, Layout, PagedCache, V4Caches, V4Weights, choose
from tamis.arithmetic import ceil_div
from tamis.cache import layout
from tamis.model.absorb import AbsorbedWeights, dequantise_blocks
from tamis.model.rope import Rope

Arguments = dict[str, Any]
WIDTHS = {"latent": 32, "rope": 8}


def paged_cache(draw: Draw) -> Call:
    made = draw.pick([draw.latent_layout, draw.index_layout])()
    arguments: Arguments = {
        "layout": draw.pick([made, draw.pick(layout.NAMES)]),
        "pages": draw.size(1, 5),
        "page_size": draw.pick([1, 3, 64]),
        "device": "cpu",
        "scale": 1.0,
        "recipe": draw.pick([None, IndexRecipe(8)]),
    }

    def check(cache: PagedCache, before: Arguments, _: Arguments) -> None:
        require((cache.pages, cache.page_size) == (before["pages"], before["page_size"]), "another size")
        require(cache.recipe == before["recipe"], "another recipe")
        require(float(cache.scale) == float(before["scale"]) > 0, "another scale")
        rows = decode(cache, torch.arange(cache.rows))
        require((rows == 0).all() and rows.shape == (cache.rows, cache.layout.width), "rows that are not zeros")

    return Call("PagedCache", PagedCache, arguments, check, optional=("recipe",), sizes=("pages", "page_size"))


def wrap(draw: Draw) -> Call:
    cache = draw.cache(draw.pick([draw.latent_layout, draw.index_layout])())
    storage = cache.storage.unsqueeze(draw.pick([1, 2])) if draw.chance(0.3) else cache.storage
    arguments: Arguments = {
        "storage": storage,
        "layout": cache.layout,
        "page_size": draw.pick([None, cache.page_size]),
        "scale": cache.scale,
        "recipe": None,
    }

    def check(found: PagedCache, before: Arguments, after: Arguments) -> None:
        require(found.storage.data_ptr() == after["storage"].data_ptr(), "another memory")
        require(float(found.scale) == float(before["scale"]) > 0, "another scale")
        every = torch.arange(cache.rows)
        if found.layout == cache.layout and float(found.scale) == float(cache.scale):
            same = (decode(found, every) == decode(cache, every)) | decode(cache, every).isnan()
            require(same.all(), "other rows")

    optional = ("page_size", "recipe")
    return Call("PagedCache.wrap", PagedCache.wrap, arguments, check, optional=optional, lenient=("scale",), free=True)


def with_scale(draw: Draw) -> Call:
    cache = draw.cache(layout.plain_fp8(**WIDTHS))

    def check(found: PagedCache, before: Arguments, _: Arguments) -> None:
        require(
            float(found.scale) == float(torch.tensor(float(before["scale"])))
            or float(found.scale) == float(before["scale"]),
            "scale",
        )
        require(0 < float(found.scale) < math.inf, "a scale that is no positive number")
        every, factor = torch.arange(cache.rows), float(before["scale"]) / float(cache.scale)
        rows = decode(cache, every) * factor
        close("rows", decode(found, every), rows, rows.abs() * 2.0**-21)

    scale = draw.pick([0.5, 2.0, torch.tensor(0.25), torch.tensor([3.0])])
    return Call(
        "PagedCache.with_scale", PagedCache.with_scale, {"self": cache, "scale": scale}, check, lenient=("scale",)
    )


def layouts(draw: Draw) -> Call:
    builders: dict[Any, Arguments] = {
        layout.rows: {"dtype": draw.pick(FLOATS), **WIDTHS, "name": draw.pick([None, "mine"])},
        layout.v32_fp8: {**WIDTHS, "scale_mode": draw.pick(["pow2", "exact"]), "tile": 16},
        layout.v4_fp8: {
            **WIDTHS,
            "rounding": draw.pick(["bf16", "none"]),
            "tile": 8,
            "page_align": draw.pick([None, 64]),
        },
        layout.plain_fp8: dict(WIDTHS),
        layout.index_fp8: {"dim": 64, "rounding": draw.pick(["bf16", "none"])},
        layout.index_mxfp4: {"dim": 64, "rounding": draw.pick(["bf16", "none"]), "page_align": 1},
        layout.compressor_state: {"dim": 16, "overlapping": draw.chance(0.5), "page_align": 1},
        layout.named: {"layout": draw.pick(layout.NAMES)},
        layout.for_engine: {"cache_dtype": draw.pick(["auto", "fp8", "bfloat16"]), **WIDTHS, "dtype": torch.float16},
    }
    function = draw.pick(list(builders))

    def check(found: Layout, before: Arguments, _: Arguments) -> None:
        require(found.width > 0 and found.row_bytes * 8 >= 4 * found.width, "rows that hold nothing")
        for name in ("latent", "rope"):
            require(name not in before or getattr(found, name) == before[name], f"another {name}")
        fields = [f for f in (found.values, found.scales, found.tail) if f is not None]
        ends = [f.plane + f.offset + f.count * f.dtype.itemsize for f in fields]
        require(max(ends) <= found.row_bytes, "a field past its row")

    optional = ("name", "page_align")
    names = tuple(function.__code__.co_varnames)
    return Call(
        f"layout.{function.__name__}",
        function,
        builders[function],
        check,
        optional=optional,
        names=names,
        lenient=("name",),
    )


def layer_spec(draw: Draw) -> Call:
    kind = draw.pick(["tokens", "window", "overlapping", "plain"])
    arguments: Arguments = {
        "heads": draw.size(1, 128),
        "latent_dim": 32,
        "rope_dim": 8,
        "value_dim": draw.size(1, 40),
        "scale": 0.125,
        "topk": 16 if kind in ("tokens", "overlapping") else None,
        "index_heads": 2 if kind == "overlapping" else 0,
        "index_dim": 32 if kind == "overlapping" else 0,
        "reuse_topk": False,
        "window": None if kind == "tokens" else 4,
        "compress": draw.pick([1, 4, 128]),
        "sink": draw.chance(0.5),
        "kind": kind,
    }

    def check(found: LayerSpec, before: Arguments, _: Arguments) -> None:
        for name, value in before.items():
            require(getattr(found, name) == value, f"another {name}")
        require(1 <= found.heads <= 128 and 1 <= found.value_dim <= found.head_dim, "numbers that describe no layer")
        require(0 < found.scale < math.inf, "a scale that is no positive number")

    return Call("LayerSpec", LayerSpec, arguments, check, optional=("topk", "window"))


V32 = {
    "num_attention_heads": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "num_hidden_layers": 4,
    "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32},
    "indexer_rope_interleave": False,
    "index_topk_freq": 2,
}
V4 = {
    "num_attention_heads": 16,
    "head_dim": 40,
    "qk_rope_head_dim": 8,
    "sliding_window": 4,
    "compress_ratios": [0, 4, 128, 4],
    "index_topk": 8,
    "index_n_heads": 4,
    "index_head_dim": 32,
    "num_hidden_layers": 4,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {"type": "yarn", "factor": 16, "original_max_position_embeddings": 4096},
}


def config_of(draw: Draw) -> dict[str, Any]:
    return dict(draw.pick([V32, V4]))


def spec_from_hf(draw: Draw) -> Call:
    arguments = {"config": config_of(draw), "layer": draw.size(0, 5), "tensor_parallel": draw.pick([1, 2, 4])}

    def check(found: LayerSpec, before: Arguments, _: Arguments) -> None:
        require(found.heads * before["tensor_parallel"] == before["config"]["num_attention_heads"], "heads")
        require(found.head_dim == 40 and 0 < found.scale < math.inf, "widths or scale")

    return Call(
        "LayerSpec.from_hf",
        LayerSpec.from_hf,
        arguments,
        check,
        lenient=tuple(f"config.{n}" for n in V32 | V4),
        free=True,
        names=("scale", "dim", "theta", "query_dim"),
    )


def rope_from_hf(draw: Draw) -> Call:
    if draw.chance(0.5):
        arguments: Arguments = {"config": config_of(draw), "dim": 8}
        function = Rope.from_hf
    else:
        arguments, function = {"config": dict(V4), "dim": 8, "compressed": draw.chance(0.5)}, Rope.from_hf_v4

    def check(found: Rope, before: Arguments, _: Arguments) -> None:
        require(found.cos_sin_table(8).isfinite().all() and found.dim == before["dim"], "a table that is not finite")

    lenient = tuple(f"config.{n}" for n in V32 | V4)
    return Call(f"Rope.{function.__name__}", function, arguments, check, lenient=("config", *lenient), names=("theta",))


def recipe_from_hf(draw: Draw) -> Call:
    arguments = {"config": config_of(draw), "hadamard": draw.chance(0.5)}

    def check(found: IndexRecipe, before: Arguments, _: Arguments) -> None:
        require(found.rope_dim % 2 == 0 and found.hadamard == before["hadamard"], "another recipe")

    lenient = tuple(f"config.{n}" for n in V32 | V4)
    return Call(
        "IndexRecipe.from_hf", IndexRecipe.from_hf, arguments, check, lenient=lenient, free=True, names=("rope_dim",)
    )


def index_recipe(draw: Draw) -> Call:
    arguments = {
        "rope_dim": draw.pick([0, 8, 64]),
        "interleaved": True,
        "rope_first": False,
        "hadamard": draw.chance(0.5),
    }

    def check(found: IndexRecipe, before: Arguments, _: Arguments) -> None:
        require(all(getattr(found, n) == v for n, v in before.items()) and found.rope_dim % 2 == 0, "another recipe")

    return Call("IndexRecipe", IndexRecipe, arguments, check)


def rope(draw: Draw) -> Call:
    arguments: Arguments = {
        "dim": draw.pick([2, 8, 64]),
        "theta": draw.pick([10000.0, 1.6e5, 50.0]),
        "factor": draw.pick([1.0, 40.0]),
        "original_length": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": draw.pick([0.0, 1.0]),
        "mscale_all_dim": draw.pick([0.0, 1.0]),
    }

    def check(found: Rope, before: Arguments, _: Arguments) -> None:
        if found.dim:
            table = found.cos_sin_table(5)
            require(table.shape == (5, found.dim) and table.isfinite().all(), "a table that is not finite")
        if found.factor == 1.0 and found.dim and found.dim <= 4096:
            half = found.dim // 2
            angles = torch.arange(5).double().unsqueeze(1) * found.theta ** (-torch.arange(half).double() / half)
            wanted = torch.cat((angles.cos(), angles.sin()), 1)
            close("table", found.cos_sin_table(5), wanted, torch.full_like(wanted, 2.0**-19))

    lenient = ("mscale", "mscale_all_dim")
    return Call("Rope", Rope, arguments, check, sizes=("dim",), lenient=lenient)


def cos_sin_table(draw: Draw) -> Call:
    arguments = {"self": Rope(8, factor=draw.pick([1.0, 4.0])), "positions": draw.size(1, 50), "device": "cpu"}

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        require(found.shape == (before["positions"], 8) and found.isfinite().all(), "another table")

    return Call("Rope.cos_sin_table", Rope.cos_sin_table, arguments, check, sizes=("positions",))


def absorbed(draw: Draw) -> Call:
    heads, nope, value, latent = draw.size(1, 3), 4, 3, 8
    arguments: Arguments = {
        "weight": draw.floats(heads * (nope + value), latent, dtype=draw.pick(FLOATS)),
        "heads": heads,
        "nope_dim": nope,
        "value_dim": value,
        "latent_dim": latent,
        "dtype": draw.pick([None, torch.float32]),
    }

    def check(found: AbsorbedWeights, before: Arguments, _: Arguments) -> None:
        rows = (
            before["weight"]
            .view(before["heads"], -1, before["latent_dim"])
            .to(before["dtype"] or before["weight"].dtype)
        )
        keys, values = rows[:, : before["nope_dim"]].double(), rows[:, before["nope_dim"] :].transpose(1, 2).double()
        close("keys", found.key, keys, torch.zeros_like(keys))
        close("values", found.value, values, torch.zeros_like(values))

    return Call("AbsorbedWeights.split", AbsorbedWeights.split, arguments, check, optional=("dtype",))


def blocks(draw: Draw) -> Call:
    rows, columns, block = draw.size(1, 9), draw.size(1, 9), draw.pick([1, 4, 128])
    arguments: Arguments = {
        "weight": draw.floats(rows, columns).to(torch.float8_e4m3fn),
        "scale_inv": draw.floats(ceil_div(rows, block), ceil_div(columns, block)),
        "block": block,
        "dtype": draw.pick(FLOATS),
    }

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        wanted = before["weight"].float().double()
        for row in range(wanted.shape[0]):
            for column in range(wanted.shape[1]):
                wanted[row, column] *= float(before["scale_inv"][row // before["block"], column // before["block"]])
        close("weight", found, wanted, rounded(wanted, torch.float32) + rounded(wanted, before["dtype"]))

    return Call("dequantise_blocks", dequantise_blocks, arguments, check)


def v4_caches(draw: Draw) -> Call:
    kind = draw.pick(["window", "overlapping", "plain"])
    indexed = {"topk": 4, "index_heads": 2, "index_dim": 32} if kind == "overlapping" else {}
    spec = LayerSpec(2, 32, 8, 40, 0.2, window=4, compress=1 if kind == "window" else 4, kind=kind, **indexed)
    arguments: Arguments = {
        "spec": spec,
        "pages": draw.size(1, 3),
        "window_pages": draw.size(1, 3),
        "state_pages": draw.size(1, 3),
        "page_size": draw.pick([4, 16]),
        "window_page_size": draw.pick([1, 8]),
        "state_page_size": draw.pick([None, 2]),
        "layout": layout.rows(latent=32, rope=8),
        "index_layout": layout.index_fp8(dim=32),
        "hadamard": draw.chance(0.5),
        "device": "cpu",
    }

    def check(found: V4Caches, before: Arguments, _: Arguments) -> None:
        require(found.window.pages == before["window_pages"], "window pages")
        require((found.entries is None) == (before["spec"].kind == "window"), "entries")
        if found.entries is not None:
            require(found.entries.page_size * before["spec"].compress == before["page_size"], "entries of a page")

    sizes = ("pages", "window_pages", "state_pages", "page_size", "window_page_size", "state_page_size")
    return Call("V4Caches.allocate", V4Caches.allocate, arguments, check, sizes=sizes, optional=("state_page_size",))


def v4_weights(draw: Draw) -> Call:
    names = {
        "q_a_proj.weight": (8, 16),
        "q_a_norm.weight": (8,),
        "q_b_proj.weight": (80, 8),
        "kv_proj.weight": (40, 16),
    }
    names |= {"kv_norm.weight": (40,), "sinks": (2,), "o_a_proj.weight": (8, 40), "o_b_proj.weight": (16, 8)}
    prefix = draw.pick(["", "model."])
    tensors = {prefix + name: draw.floats(*shape) for name, shape in names.items()}

    def check(found: V4Weights, before: Arguments, _: Arguments) -> None:
        given = {name.removeprefix(before["prefix"]): value for name, value in before["tensors"].items()}
        require(torch.equal(found.kv, given["kv_proj.weight"]), "kv")
        require(torch.equal(found.o_a.flatten(0, 1), given["o_a_proj.weight"]), "o_a")
        require(len(found.o_a) == before["groups"], "groups")

    arguments = {"tensors": tensors, "groups": draw.pick([1, 2]), "prefix": prefix}
    return Call(
        "V4Weights.from_state_dict",
        V4Weights.from_state_dict,
        arguments,
        check,
        lenient=("tensors", "prefix"),
        free=True,
    )


def chosen(draw: Draw) -> Call:
    spec = LayerSpec(4, 32, 8, 32, 0.2, topk=4)
    arguments: Arguments = {
        "spec": spec,
        "device": "cpu",
        "layout": draw.pick([None, layout.v32_fp8(**WIDTHS, tile=16)]),
        "dtype": draw.pick(FLOATS),
        "page_size": 64,
        "prefer": draw.pick(["auto", "reference"]),
    }

    def check(found: Any, before: Arguments, _: Arguments) -> None:
        require(found.name == "reference", "another backend")

    return Call("choose", choose, arguments, check, optional=("layout",), lenient=("device",), free=True)


CASES = (paged_cache, wrap, with_scale, layouts, layouts, layer_spec, spec_from_hf, rope_from_hf, recipe_from_hf)
CASES += (index_recipe, rope, cos_sin_table, absorbed, blocks, v4_caches, v4_weights, chosen)
