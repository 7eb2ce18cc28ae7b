"""The drop-ins that write into an output: how to call them, for the tests of what refused calls leave alone."""

import torch
from reliability.bad_values import Arguments, Case, ints, plain

from tamis.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache
from tamis.integrations.flashinfer import trtllm_batch_decode_sparse_mla_dsv4, trtllm_batch_decode_with_kv_cache_mla

H, PAGE, LATENT, ROPE = 3, 4, 24, 8
D = LATENT + ROPE


def flashinfer() -> Case:
    pool, out, lse = torch.randn(6, PAGE, D), torch.zeros(2, 1, H, LATENT), torch.zeros(2, H)
    given = {
        "query": torch.randn(2, 1, H, D),
        "kv_cache": pool,
        "qk_nope_head_dim": 8,
        "kv_lora_rank": LATENT,
        "qk_rope_head_dim": ROPE,
        "block_tables": torch.randint(0, 24, (2, 1, 6)).int(),
        "seq_lens": ints([6, 3]),
        "max_seq_len": 9,
        "sparse_mla_top_k": 6,
        "out": out,
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
        "sinks": torch.randn(H),
        "lse": lse,
    }

    def run(a: Arguments) -> object:
        return trtllm_batch_decode_with_kv_cache_mla(workspace_buffer=None, **a)

    free = {"out none", "lse none", "sinks none", "seq_lens none", "kv_cache rank above", "block_tables huge"}
    free |= {f"kv_cache axis {axis} {how}" for axis in (0, 1) for how in ("longer", "shorter")}
    watched = {"out": out, "lse": lse, "kv_cache": pool}
    return Case(run, given, watched, frozenset(free), frozenset({"out", "lse"}))


def flashinfer_v4() -> Case:
    window_pool, pool = torch.randn(6, PAGE, 512), torch.randn(6, PAGE, 512)
    out = torch.zeros(2, H, 512)
    given = {
        "query": torch.randn(2, H, 512),
        "swa_kv_cache": window_pool,
        "sparse_indices": torch.randint(0, 24, (2, 6)).int(),
        "compressed_kv_cache": pool,
        "out": out,
        "bmm1_scale": 0.1,
        "bmm2_scale": 1.0,
        "sinks": torch.randn(H),
        "swa_topk_lens": ints([6, 3]),
        "extra_sparse_indices": torch.randint(0, 24, (2, 5)).int(),
        "extra_sparse_topk_lens": ints([5, 0]),
    }

    def run(a: Arguments) -> object:
        return trtllm_batch_decode_sparse_mla_dsv4(workspace_buffer=None, **a)

    pools = ("swa_kv_cache", "compressed_kv_cache")
    free = {f"{name} axis {axis} {how}" for name in pools for axis in (0, 1) for how in ("longer", "shorter")}
    # Without lengths of the window it is the combined form, which wants other arguments.
    free |= {"out none", "sinks none", "swa_topk_lens none", *(f"{name} rank above" for name in pools)}
    free |= {
        f"{name} {how}" for name in ("sparse_indices", "extra_sparse_indices") for how in ("axis 1 longer", "huge")
    }
    return Case(run, given, {"out": out, "pool": pool}, frozenset(free), frozenset({"out"}))


def flash_mla_decode(mode: str) -> Case:
    pool, out = torch.randn(6, PAGE, 1, 576), torch.zeros(2, 2, H, 512)
    given: Arguments = {
        "q": torch.randn(2, 2, H, 576),
        "k_cache": pool,
        "head_dim_v": 512,
        "softmax_scale": 0.1,
        "attn_sink": torch.randn(H),
        "out": out,
    }
    if mode == "dense":
        given |= {"block_table": torch.randint(0, 6, (2, 3)).int(), "cache_seqlens": ints([5, 12])}
    else:
        given |= {"indices": torch.randint(0, 24, (2, 2, 6)).int(), "topk_length": ints([6, 0])}
        given |= {"extra_k_cache": torch.randn(6, PAGE, 1, 576), "extra_topk_length": ints([5, 1])}
        given["extra_indices_in_kvcache"] = torch.randint(0, 24, (2, 2, 5)).int()

    def run(a: Arguments) -> object:
        paged = {"block_table": None, "cache_seqlens": None}
        return flash_mla_with_kvcache(tile_scheduler_metadata=None, **paged | a)

    free = {f"{name} none" for name in ("out", "attn_sink", "softmax_scale", "topk_length", "extra_topk_length")}
    pools, lists = ("k_cache", "extra_k_cache"), ("indices", "extra_indices_in_kvcache")
    free |= {f"{name} axis {axis} {how}" for name in pools for axis in (0, 1) for how in ("longer", "shorter")}
    free |= {f"{name} {how}" for name in lists for how in ("axis 2 longer", "axis 2 shorter", "huge")}
    free |= {"block_table axis 1 longer"}
    return Case(run, given, {"out": out, "k_cache": pool}, frozenset(free), frozenset({"out"}))


def flash_mla_prefill() -> Case:
    out = torch.zeros(4, H, 512)
    given = {
        "q": torch.randn(4, H, 576),
        "kv": torch.randn(24, 1, 576),
        "indices": torch.randint(0, 20, (4, 1, 6)).int(),
        "sm_scale": 0.1,
        "d_v": 512,
        "attn_sink": torch.randn(H),
        "topk_length": ints([6, 0, 1, 2]),
        "out": out,
    }
    free = {f"{name} none" for name in ("out", "attn_sink", "topk_length")}
    free |= {"kv axis 0 longer", "kv axis 0 shorter", "indices axis 2 longer", "indices axis 2 shorter", "indices huge"}
    return Case(plain(flash_mla_sparse_fwd), given, {"out": out}, frozenset(free), frozenset({"out"}))
