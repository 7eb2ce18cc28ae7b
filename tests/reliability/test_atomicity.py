"""A refused call leaves everything as it was: every function that writes, every argument, everything wrong with it."""

from functools import cache, partial

import pytest
import torch
from reliability.bad_values import Arguments, Case, faults, ints, plain
from reliability.drop_ins import flash_mla_decode, flash_mla_prefill, flashinfer, flashinfer_v4

from tamis import IndexRecipe, PagedCache, Selection
from tamis.cache.layout import compressor_state, rows
from tamis.model.rope import Rope
from tamis.ops import (
    Partials,
    StatePages,
    attend,
    combine_parts,
    compress_kv,
    gather_kv,
    index_scores,
    pool_kv,
    ragged_scores,
    rotate_and_write,
    write_index_keys,
    write_kv,
    write_normed_kv,
    write_rotated,
)

T, H, LATENT, ROPE, PAGE, PAGES = 5, 3, 24, 8, 4, 9
D = LATENT + ROPE
TABLE = Rope(ROPE).cos_sin_table(40)


def latent() -> PagedCache:
    held = PagedCache(rows(torch.float32, latent=LATENT, rope=ROPE), PAGES, PAGE)
    held.storage.normal_(generator=torch.Generator().manual_seed(1))
    return held


def keys(recipe: IndexRecipe | None = None) -> PagedCache:
    return PagedCache(rows(torch.float32, latent=16, rope=0), PAGES, PAGE, recipe=recipe)


# A cache's own page size, and how its rows are kept, are its own affair in functions that take one cache.
ANY_CACHE = frozenset({"cache page size", "cache one scale", "cache planar"})
LESS = frozenset({"slots axis 0 shorter", "kv axis 0 longer", "latent axis 0 longer", "keys axis 0 longer"})


def write_rows() -> Case:
    cache = latent()
    given = {"kv": torch.randn(T, D), "cache": cache, "slots": torch.arange(3, 3 + T), "backend": "auto"}
    return Case(plain(write_kv), given, {"cache": cache.storage}, ANY_CACHE | LESS)


def write_pairs() -> Case:
    cache = latent()
    given = {"latent": torch.randn(T, LATENT), "rope": torch.randn(T, ROPE), "cache": cache, "slots": torch.arange(T)}

    def run(a: Arguments) -> object:
        return write_kv((a["latent"], a["rope"]), a["cache"], a["slots"])

    names = {"latent": "kv", "rope": "kv"}
    return Case(run, given, {"cache": cache.storage}, ANY_CACHE | {"slots axis 0 shorter"}, names=names)


def write_normed() -> Case:
    cache = latent()
    given = {
        "latent": torch.randn(T, LATENT),
        "rope": torch.randn(T, ROPE),
        "cache": cache,
        "slots": torch.arange(20, 20 + T),
        "norm_weight": torch.randn(LATENT),
        "positions": torch.arange(T),
        "cos_sin": TABLE,
        "eps": 1e-6,
        "backend": "auto",
    }
    free = {"slots axis 0 shorter", "cos_sin axis 0 longer", "cos_sin axis 0 shorter"}
    return Case(plain(write_normed_kv), given, {"cache": cache.storage}, ANY_CACHE | free)


def write_keys() -> Case:
    cache = keys()
    given = {
        "keys": torch.randn(T, 16),
        "cache": cache,
        "slots": torch.arange(20, 20 + T),
        "recipe": IndexRecipe(ROPE),
        "norm_weight": torch.randn(16),
        "norm_bias": torch.randn(16),
        "norm_eps": 1e-6,
        "positions": torch.arange(T),
        "cos_sin": TABLE,
        "backend": "auto",
    }
    free = {"slots axis 0 shorter", "cos_sin axis 0 longer", "cos_sin axis 0 shorter", "cache page size"}
    free |= {"norm_bias none", "keys axis 0 longer"}
    return Case(plain(write_index_keys), given, {"cache": cache.storage}, frozenset(free))


def rotate() -> Case:
    cache = latent()
    given = {
        "q": torch.randn(T, H, D),
        "kv": torch.randn(T, D),
        "cache": cache,
        "slots": torch.arange(20, 20 + T),
        "positions": torch.arange(T),
        "cos_sin": TABLE,
        "norm_weight": torch.randn(D),
        "eps": 1e-6,
        "index_q": torch.randn(T, 2, 16),
        "backend": "auto",
    }
    free = {"slots axis 0 shorter", "cos_sin axis 0 longer", "cos_sin axis 0 shorter", "index_q none"}
    free |= {f"{name} axis 1 {how}" for name in ("q", "index_q") for how in ("longer", "shorter")}
    # Any even number of columns can be rotated.
    return Case(plain(rotate_and_write), given, {"cache": cache.storage}, ANY_CACHE | free)


def rotate_rows() -> Case:
    cache = latent()
    given = {
        "rows": torch.randn(T, D),
        "cache": cache,
        "slots": torch.arange(20, 20 + T),
        "positions": torch.arange(T),
        "cos_sin": TABLE,
        "norm_weight": torch.randn(D),
        "eps": 1e-6,
        "span": 2,
        "backend": "auto",
    }
    free = {"slots axis 0 shorter", "cos_sin axis 0 longer", "cos_sin axis 0 shorter", "norm_weight none"}
    return Case(plain(write_rotated), given, {"cache": cache.storage}, ANY_CACHE | free)


def pool() -> Case:
    state, table = PagedCache(compressor_state(dim=D, overlapping=False), PAGES, PAGE), ints([[0, 1, 2]])
    given = {
        "values": torch.randn(8, D),
        "scores": torch.randn(8, D),
        "state": state,
        "positions": torch.arange(8),
        "pages.slots": torch.arange(8),
        "pages.request_ids": ints([0] * 8),
        "pages.block_table": table,
        "norm_weight": torch.randn(D),
        "ratio": 2,
        "eps": 1e-6,
        "backend": "auto",
    }

    def run(a: Arguments) -> object:
        pages = StatePages(*(a[f"pages.{name}"] for name in ("slots", "request_ids", "block_table")))
        return pool_kv(**{n: v for n, v in a.items() if not n.startswith("pages")}, pages=pages)

    free = {"pages.block_table axis 0 longer", "pages.block_table axis 1 longer", "pages.block_table axis 1 shorter"}
    # No table of angles ends before a position, and positions past 32 bits count as padding.
    free |= {"state page size", "pages.block_table huge", "positions huge"}
    return Case(run, given, {"state": state.storage}, frozenset(free))


def compress() -> Case:
    state, cache, table = PagedCache(compressor_state(dim=D), PAGES, PAGE), latent(), ints([[0, 1, 2]])
    given = {
        "values": torch.randn(8, 2 * D),
        "scores": torch.randn(8, 2 * D),
        "state": state,
        "cache": cache,
        "positions": torch.arange(8),
        "pages.slots": torch.arange(8),
        "pages.request_ids": ints([0] * 8),
        "pages.block_table": table,
        "slots": torch.where(torch.arange(8) % 4 == 3, torch.arange(8) // 4, -1),
        "bias": torch.randn(4, 2 * D),
        "norm_weight": torch.randn(D),
        "cos_sin": TABLE,
        "eps": 1e-6,
        "backend": "auto",
    }

    def run(a: Arguments) -> object:
        pages = StatePages(*(a[f"pages.{name}"] for name in ("slots", "request_ids", "block_table")))
        return compress_kv(**{n: v for n, v in a.items() if not n.startswith("pages")}, pages=pages)

    free = {"cos_sin axis 0 longer", "cos_sin axis 0 shorter", "bias axis 0 longer", "bias axis 0 shorter"}
    free |= {"pages.block_table axis 0 longer", "pages.block_table axis 1 longer", "pages.block_table axis 1 shorter"}
    free |= {"state page size", "cache few pages", "pages.block_table huge", "norm_weight none", "cos_sin none"}
    watched = {"state": state.storage, "cache": cache.storage}
    return Case(run, given, watched, ANY_CACHE | free)


def gather() -> Case:
    cache, out = latent(), torch.zeros(12, D)
    given = {
        "cache": cache,
        "block_table": ints([[1, 2], [3, 4]]),
        "lengths": ints([5, 3]),
        "starts": ints([0, 6]),
        "first": ints([0, 2]),
        "out": out,
        "backend": "auto",
    }
    free = {"out none", "starts none", "first none", "block_table axis 1 longer", "out axis 0 longer"}
    free |= {"cache page size", "out axis 0 shorter", "cache planar", "cache inference"}
    return Case(plain(gather_kv), given, {"out": out, "cache": cache.storage}, free | ANY_CACHE, frozenset({"out"}))


def attention() -> Case:
    cache, out = latent(), torch.zeros(T, H, LATENT)
    given = {
        "q": torch.randn(T, H, D),
        "cache": cache,
        "slots": torch.randint(0, 36, (T, 6)).int(),
        "lengths": ints([6, 2, 3, 0, 1]),
        "request_ids": ints([0, 0, 1, 1, 1]),
        "block_table": ints([[1, 2], [3, 4]]),
        "scale": 0.1,
        "value_dim": LATENT,
        "sink": torch.randn(H),
        "q_scale": 0.5,
        "splits": 2,
        "lse_base": "e",
        "out": out,
        "backend": "auto",
    }

    def run(a: Arguments) -> object:
        parts = ("cache", "slots", "lengths", "request_ids", "block_table")
        selection = Selection(*(a[name] for name in parts))
        return attend(selections=selection, **{n: v for n, v in a.items() if n not in parts})

    free = {"out none", "sink none", "splits none", "lengths none", "slots axis 1 longer", "slots axis 1 shorter"}
    free |= {f"block_table axis {axis} {how}" for axis, how in ((0, "longer"), (1, "longer"), (1, "shorter"))}
    free |= {"cache inference", "cache few pages", "slots huge", "block_table huge"}
    return Case(run, given, {"out": out, "cache": cache.storage}, free | ANY_CACHE, frozenset({"out"}))


def combine() -> Case:
    out = torch.zeros(T, H, LATENT)
    given = {
        "partials.out": torch.randn(2, T, H, LATENT),
        "partials.lse": torch.randn(2, T, H),
        "partials.max_logits": torch.randn(2, T, H),
        "sink": torch.randn(H),
        "out": out,
        "lse_base": "e",
        "backend": "auto",
    }

    def run(a: Arguments) -> object:
        partials = Partials(*(a[f"partials.{name}"] for name in ("out", "lse", "max_logits")))
        return combine_parts(partials, **{n: v for n, v in a.items() if not n.startswith("partials")})

    free = frozenset({"out none", "sink none", "partials.max_logits none", "partials.max_logits gradient"})
    return Case(run, given, {"out": out}, free, frozenset({"out"}))


def paged_scores() -> Case:
    cache, out = keys(), torch.zeros(T, 8)
    given = {
        "q": torch.randn(T, H, 16),
        "weights": torch.randn(T, H),
        "cache": cache,
        "request_ids": ints([0, 0, 1, 1, 1]),
        "block_table": ints([[1, 2], [3, 4]]),
        "lengths": ints([1, 2, 8, 7, 0]),
        "width": 8,
        "out": out,
        "backend": "auto",
    }
    free = {"out none", "width none", "block_table axis 0 longer", "block_table axis 1 longer"}
    free |= {"cache page size", "cache inference", "cache few pages", "block_table huge"}
    watched = {"out": out, "cache": cache.storage}
    return Case(plain(index_scores), given, watched, frozenset(free), frozenset({"out"}))


def gathered_scores() -> Case:
    out = torch.zeros(T, 7)
    given = {
        "q": torch.randn(T, H, 16),
        "weights": torch.randn(T, H),
        "keys": torch.randn(7, 16),
        "key_scales": torch.rand(7),
        "starts": ints([0] * T),
        "ends": ints([7] * T),
        "out": out,
        "backend": "auto",
    }
    # Bounds outside of the keys are cut.
    free = frozenset({"out none", "key_scales none", "starts huge", "ends huge"})
    return Case(plain(ragged_scores), given, {"out": out}, free, frozenset({"out"}))


CASES = {
    f.__name__: cache(f)
    for f in (
        *(write_rows, write_pairs, write_normed, write_keys, rotate, rotate_rows, compress, pool, gather),
        *(attention, combine),
        *(paged_scores, gathered_scores, flashinfer, flashinfer_v4, flash_mla_prefill),
    )
} | {f"flash_mla_decode {mode}": cache(partial(flash_mla_decode, mode)) for mode in ("dense", "sparse")}


@pytest.mark.parametrize("name", CASES)
def test_good_arguments_are_accepted(name: str) -> None:
    case = CASES[name].__wrapped__()
    before = {key: value.clone() for key, value in case.watched.items()}
    case.run(case.arguments)
    assert any(not torch.equal(value, before[key]) for key, value in case.watched.items()), "it writes nothing"


ROWS = [(name, argument) for name, made in CASES.items() for argument in made().arguments]


@pytest.mark.parametrize(("name", "argument"), ROWS)
def test_a_refused_call_changes_nothing(name: str, argument: str) -> None:
    assert faults(CASES[name](), argument) == []
