"""Layers and the drop-ins for other libraries' functions."""

import math
from typing import Any

import torch
from torch import Tensor

from contract.calls import Call, require
from contract.cases_attend import hostile_slots, selected, translated, unit_of
from contract.cases_index import check_scores, key_rows
from contract.cases_rows import same_rows
from contract.draw import FLOATS, Draw
from contract.formats import decode
from contract.maths import attention, check_attended, scores
from tamis import (
    Batch,
    Caches,
    LayerSpec,
    Limits,
    PagePool,
    Planner,
    Selection,
    SparseMLA,
    SparseV4,
    V4Caches,
    V4Planner,
    V4Weights,
)
from tamis.cache.layout import index_fp8, rows
from tamis.integrations import deep_gemm, flash_mla
from tamis.model.rope import Rope
from tamis.ops import IndexInputs

Arguments = dict[str, Any]


def sparse_mla(draw: Draw) -> Call:
    layout = draw.latent_layout()
    while layout.width > 100:
        layout = draw.latent_layout()
    heads, topk = draw.size(1, 4), draw.pick([1, 4])
    spec = LayerSpec(heads, layout.latent, layout.rope, layout.latent, 0.25, topk=topk, index_heads=2, index_dim=32)
    new = [1] * draw.size(0, 2) + [draw.size(2, 4) for _ in range(draw.size(0, 2))]
    lengths = [n + draw.size(0, 6) for n in new]
    cache = draw.cache(layout, low_pages=6)
    while cache.rows < sum(lengths) * 2 + 8 * cache.page_size:
        cache = type(cache)(layout, 24, 4, scale=cache.scale)
    index = type(cache)(index_fp8(dim=32), cache.pages, cache.page_size)
    batch = Batch.build(new, lengths, PagePool(cache.pages, cache.page_size))
    planner = Planner(spec, Limits(24, 4, 32, cache.page_size), layout=layout, mode="mixed")
    plan = planner.plan(batch)
    positions, inputs = None, None
    if draw.chance(0.5):
        inputs = IndexInputs(draw.floats(plan.rows, 2, 32), draw.floats(plan.rows, 2), draw.floats(plan.rows, 32))
    else:
        positions = torch.full((plan.rows, topk), -1, dtype=torch.int32)
        for token, own in enumerate(plan.positions.tolist()):
            chosen = torch.randperm(own + 1, generator=draw.generator)[:topk].int()
            positions[token, : len(chosen)] = chosen
    arguments: Arguments = {
        "self": SparseMLA(spec),
        "q": draw.floats(plan.rows, heads, layout.width, dtype=draw.pick(FLOATS)),
        "kv": draw.floats(plan.rows, layout.width, dtype=draw.pick(FLOATS)) if draw.chance(0.8) else None,
        "caches": Caches(cache, index),
        "plan": plan,
        "positions": positions,
        "index": inputs,
        "sink": draw.floats(heads) if draw.chance(0.3) else None,
        "q_scale": 1.0,
        "out": draw.floats(plan.rows, heads, layout.latent).contiguous() if draw.chance(0.3) else None,
    }

    def check(found: Any, before: Arguments, after: Arguments) -> None:
        if before["kv"] is not None:
            same_rows(before["caches"].latent, after["caches"].latent, before["kv"], plan.slots)
        chosen = Selection(after["caches"].latent, found.positions, None, plan.request_ids, plan.block_table)
        factor = 0.25 * float(before["q_scale"])
        unit = unit_of(before["q"])
        wanted = attention(
            before["q"],
            selected(chosen, plan.rows),
            scale=factor,
            value_dim=layout.latent,
            sink=before["sink"],
            unit=unit,
        )
        check_attended((found.out, found.lse, found.max_logits), wanted)

    optional = ("kv", "sink", "out", "index.recipe", "index.keys", "caches.index")
    written, lenient = ("caches", "out"), ("q_scale", "plan")
    return Call(
        "SparseMLA", SparseMLA.__call__, arguments, check, written, optional=optional, lenient=lenient, free=True
    )


def sparse_v4(draw: Draw) -> Call:
    kind = draw.pick(["window", "overlapping", "plain"])
    indexed = {"topk": 2, "index_heads": 2, "index_dim": 32} if kind == "overlapping" else {}
    spec = LayerSpec(
        2, 24, 8, 32, 0.2, window=4, compress=1 if kind == "window" else 4, kind=kind, sink=True, **indexed
    )
    shapes = {
        "q_a_proj.weight": (8, 16),
        "q_a_norm.weight": (8,),
        "q_b_proj.weight": (64, 8),
        "kv_proj.weight": (32, 16),
    }
    shapes |= {"kv_norm.weight": (32,), "sinks": (2,), "o_a_proj.weight": (8, 32), "o_b_proj.weight": (16, 8)}
    parts = {
        "window": (),
        "plain": (("compressor.", 32),),
        "overlapping": (("compressor.", 64), ("compressor.indexer.", 64)),
    }
    for prefix, wide in parts[kind]:
        shapes |= {prefix + "kv_proj.weight": (wide, 16), prefix + "gate_proj.weight": (wide, 16)}
        shapes |= {prefix + "position_bias": (4, wide), prefix + "kv_norm.weight": (32,)}
    if kind == "overlapping":
        shapes |= {
            "compressor.indexer.q_b_proj.weight": (64, 8),
            "compressor.indexer.scorer.weights_proj.weight": (2, 16),
        }
    weights = V4Weights.from_state_dict({name: draw.floats(*shape) for name, shape in shapes.items()}, groups=2)
    sizes = {"window": 4} | ({} if kind == "window" else {"state4": 4})
    planner = V4Planner([spec], Limits(24, 4, 32, 8, sizes), layout=rows(torch.float32, latent=24, rope=8))
    new = [draw.size(1, 5) for _ in range(draw.size(1, 2))]
    pools = {name: PagePool(40, size) for name, size in sizes.items()}
    plan = planner.plan(Batch.build(new, new, PagePool(20, 8), other_pools=pools))
    made = {
        "pages": 20,
        "window_pages": 40,
        "state_pages": 40,
        "page_size": 8,
        "window_page_size": 4,
        "state_page_size": 4,
    }
    caches = V4Caches.allocate(
        spec, **made, layout=rows(torch.float32, latent=24, rope=8), index_layout=index_fp8(dim=32)
    )
    layer = SparseV4(spec, weights, Rope(8).cos_sin_table(32))
    arguments = {
        "self": layer,
        "hidden": draw.floats(sum(new), 16, dtype=draw.pick(FLOATS)),
        "caches": caches,
        "plan": plan,
        "selected": None,
    }
    if kind == "overlapping" and draw.chance(0.5):
        arguments["selected"] = torch.full((sum(new), 2), 99, dtype=torch.int32)

    def check(found: Tensor, before: Arguments, after: Arguments) -> None:
        require(found.shape == before["hidden"].shape and found.dtype == before["hidden"].dtype, "another shape")
        require(found.isfinite().all(), "an output that is not finite")
        if after["selected"] is not None:
            require((after["selected"] <= 1).all(), "an entry that there is not")

    lenient = ("plan", "caches")
    written, optional = ("caches", "selected"), ("selected",)
    return Call("SparseV4", SparseV4.__call__, arguments, check, written, lenient=lenient, optional=optional, free=True)


def flash_sparse_fwd(draw: Draw) -> Call:
    tokens, heads, width, total, topk = (
        draw.size(0, 3),
        draw.size(1, 4),
        draw.pick([16, 40]),
        draw.size(1, 9),
        draw.pick([1, 5]),
    )
    arguments: Arguments = {
        "q": draw.floats(tokens, heads, width, dtype=draw.pick(FLOATS)),
        "kv": draw.floats(total, 1, width, dtype=draw.pick(FLOATS)).contiguous(),
        "indices": hostile_slots(draw, total, tokens, 1, topk),
        "sm_scale": 0.25,
        "d_v": draw.size(1, width),
        "attn_sink": draw.floats(heads) if draw.chance(0.4) else None,
        "topk_length": draw.ints(0, topk, tokens) if draw.chance(0.4) else None,
        "use_legacy": draw.chance(0.5),
        "return_log2_lse": draw.pick([None, False, True]),
    }

    def check(found: tuple[Tensor, Tensor | None, Tensor | None], before: Arguments, _: Arguments) -> None:
        out, top, lse = found
        keys, given = before["kv"].double()[:, 0], []
        for token in range(len(before["q"])):
            columns = before["indices"][token, 0].tolist()
            if before["topk_length"] is not None:
                columns = columns[: int(before["topk_length"][token])]
            given.append(keys[[c for c in columns if 0 <= c < len(keys)]])
        numbers = {"scale": before["sm_scale"], "value_dim": before["d_v"], "sink": before["attn_sink"]}
        wanted = attention(before["q"], given, **numbers, unit=unit_of(before["q"]))
        if top is None or lse is None:
            require(before["return_log2_lse"] is False, "statistics left out that were asked for")
            top, lse = wanted.top, wanted.lse.masked_fill(wanted.lse == -torch.inf, torch.inf)
        elif before["return_log2_lse"]:
            top, lse = top * math.log(2), lse * math.log(2)
        empty = wanted.lse == -torch.inf
        require(bool((lse[empty] == torch.inf).all()), "an lse of a row with nothing that is not +inf")
        check_attended((out, lse.masked_fill(empty, -torch.inf), top), wanted)

    optional = ("attn_sink", "topk_length", "return_log2_lse")
    return Call("flash_mla_sparse_fwd", flash_mla.flash_mla_sparse_fwd, arguments, check, optional=optional)


def flash_with_kvcache(draw: Draw) -> Call:
    requests, queries, heads, width, topk = draw.size(1, 2), draw.size(1, 2), draw.size(1, 3), 40, draw.pick([1, 5])
    cache = draw.cache(rows(draw.pick(FLOATS), latent=width, rope=0))
    arguments: Arguments = {
        "q": draw.floats(requests, queries, heads, width, dtype=draw.pick(FLOATS)),
        "k_cache": cache.storage.unsqueeze(2),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": draw.size(1, width),
        "tile_scheduler_metadata": None,
        "num_splits": None,
        "softmax_scale": 0.25,
        "causal": False,
        "is_fp8_kvcache": False,
        "indices": hostile_slots(draw, cache.rows, requests, queries, topk),
        "attn_sink": None,
        "topk_length": draw.ints(0, topk, requests) if draw.chance(0.4) else None,
        "enable_batch_invariant": draw.chance(0.3),
        "use_legacy": draw.chance(0.5),
        "kv_format": None,
        "descale_q": None,
        "descale_k": None,
    }

    def check(found: tuple[Tensor, Tensor], before: Arguments, _: Arguments) -> None:
        q, keys, given = before["q"].flatten(0, 1), decode(cache, torch.arange(cache.rows)), []
        for token in range(len(q)):
            columns = before["indices"].flatten(0, 1)[token].tolist()
            if before["topk_length"] is not None:
                columns = columns[: int(before["topk_length"][token // before["q"].shape[1]])]
            given.append(keys[[c for c in columns if 0 <= c < len(keys)]])
        scale = before["softmax_scale"] if before["softmax_scale"] is not None else q.shape[-1] ** -0.5
        numbers = {"scale": scale, "value_dim": before["head_dim_v"], "sink": before["attn_sink"]}
        wanted = attention(q, given, **numbers, unit=unit_of(q))
        lse = found[1].transpose(1, 2).flatten(0, 1)
        check_attended((found[0].flatten(0, 1), lse.masked_fill(lse == torch.inf, -torch.inf), None), wanted)

    lenient = ("block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits")
    optional = (
        *lenient,
        "softmax_scale",
        "is_fp8_kvcache",
        "attn_sink",
        "topk_length",
        "kv_format",
        "descale_q",
        "descale_k",
    )
    function = flash_mla.flash_mla_with_kvcache
    return Call("flash_mla_with_kvcache", function, arguments, check, optional=optional, lenient=lenient, free=True)


def mqa_logits(draw: Draw) -> Call:
    tokens, heads, total = draw.size(0, 3), draw.size(1, 3), draw.pick([0, 6])
    arguments: Arguments = {
        "q": draw.floats(tokens, heads, 32).to(torch.float8_e4m3fn),
        "kv": (draw.floats(total, 32).to(torch.float8_e4m3fn), draw.floats(total).abs()),
        "weights": draw.floats(tokens, heads),
        "cu_seq_len_k_start": draw.ints(0, total, tokens),
        "cu_seq_len_k_end": draw.ints(0, total, tokens),
        "clean_logits": True,
        "max_seqlen_k": 0,
    }

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        keys, factors = key_rows(*before["kv"])
        wanted = torch.full((len(before["q"]), len(keys)), -torch.inf, dtype=torch.float64)
        sizes = torch.zeros_like(wanted)
        for token in range(len(wanted)):
            low, high = (int(before[n][token]) for n in ("cu_seq_len_k_start", "cu_seq_len_k_end"))
            low, high = max(0, low), min(high, len(keys))
            if low < high:
                some, size = scores(before["q"][token], before["weights"][token], keys[low:high])
                wanted[token, low:high], sizes[token, low:high] = (
                    some * factors[low:high],
                    size * factors[low:high].abs(),
                )
        if before["max_seqlen_k"] == 0:
            check_scores(found, wanted, sizes, before["q"])

    names = ("keys", "key_scales", "starts", "ends")
    lenient, sizes = ("clean_logits",), ("max_seqlen_k",)
    return Call(
        "fp8_mqa_logits",
        deep_gemm.fp8_mqa_logits,
        arguments,
        check,
        lenient=lenient,
        sizes=sizes,
        optional=("kv.1",),
        names=names,
    )


def paged_mqa_logits(draw: Draw) -> Call:
    requests, queries, heads = draw.size(1, 2), draw.size(1, 2), draw.size(1, 3)
    cache = draw.cache(index_fp8(dim=32))
    width = draw.size(1, 3)
    longest = width * cache.page_size
    arguments: Arguments = {
        "q": draw.floats(requests, queries, heads, 32).to(torch.float8_e4m3fn),
        "kv_cache": cache.storage.unsqueeze(2),
        "weights": draw.floats(requests * queries, heads),
        "context_lens": draw.ints(0, longest, requests, queries),
        "block_table": draw.table(requests, width, cache.pages),
        "schedule_meta": None,
        "max_context_len": longest + draw.size(0, 2),
        "clean_logits": False,
    }

    def check(found: Tensor, before: Arguments, _: Arguments) -> None:
        q, lens = before["q"].flatten(0, 1), before["context_lens"].flatten().tolist()
        wanted = torch.full((len(q), before["max_context_len"]), -torch.inf, dtype=torch.float64)
        sizes = torch.zeros_like(wanted)
        for token, length in enumerate(lens):
            table = before["block_table"][token // before["q"].shape[1]].tolist()
            slots = [translated(p, table, cache.page_size, cache.page_size) for p in range(length)]
            seen = [p for p, slot in enumerate(slots) if 0 <= slot < cache.rows]
            if seen:
                keys = decode(cache, torch.tensor([slots[p] for p in seen]))
                wanted[token, seen], sizes[token, seen] = scores(q[token], before["weights"][token], keys)
        check_scores(found, wanted, sizes, q)

    lenient, names = ("schedule_meta", "clean_logits"), ("lengths", "out", "width", "cache", "request_ids")
    function = deep_gemm.fp8_paged_mqa_logits
    return Call(
        "fp8_paged_mqa_logits",
        function,
        arguments,
        check,
        lenient=lenient,
        sizes=("max_context_len",),
        names=names,
        free=True,
    )


DROP_INS = (flash_sparse_fwd, flash_with_kvcache, mqa_logits, paged_mqa_logits)
CASES = (sparse_mla, sparse_mla, sparse_v4, *DROP_INS)
