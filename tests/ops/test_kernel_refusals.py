"""What a backend's kernels do not take is refused by the stage's check, before any other stage writes."""

from importlib import import_module

import pytest
import torch

from tamis import IndexRecipe, PagedCache, Selection
from tamis.backends import BACKENDS
from tamis.cache.layout import named, rows
from tamis.model.rope import Rope
from tamis.ops import (
    StatePages,
    attend,
    compress_kv,
    index_scores,
    library,
    rotate_and_write,
    write_index_keys,
)


@pytest.fixture(autouse=True)
def triton_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of the triton backend, whose checks need no device."""

    def module(stage: str, backend: str, device: torch.device, trains: str | None = None) -> object:
        return import_module(next(b for b in BACKENDS if b.name == "triton").stage_module(stage))

    monkeypatch.setattr(library, "implementation", module)


def test_attention_and_scores() -> None:
    ids, table, lengths = (torch.zeros(*shape, dtype=torch.int32) for shape in ((1,), (1, 2), (1,)))
    odd = PagedCache(named("v4-fp8", latent=12, rope=4, tile=6), 2, 4)
    out = torch.full((1, 2, 16), 7.0)
    with pytest.raises(ValueError, match="cache must be a latent part of at most 512 in tiles of a power of two"):
        attend(torch.zeros(1, 2, 16), Selection(odd, table), scale=1.0, value_dim=16, out=out)
    plain = PagedCache(rows(torch.float32, latent=16, rope=0), 2, 4)
    with pytest.raises(TypeError, match="q must be at most float32"):
        attend(torch.zeros(1, 2, 16).double(), Selection(plain, table), scale=1.0, value_dim=16)
    scores = torch.full((1, 8), 7.0)
    with pytest.raises(ValueError, match="q must be at most 128 heads"):
        index_scores(torch.zeros(1, 129, 16), torch.zeros(1, 129), plain, ids, table, lengths, out=scores)
    assert (out == 7).all()
    assert (scores == 7).all()


def test_rows_and_keys() -> None:
    table, slots, positions = Rope(4).cos_sin_table(8), torch.arange(2), torch.arange(2)
    odd = PagedCache(named("v4-fp8", latent=12, rope=4, tile=6), 2, 4)
    with pytest.raises(ValueError, match="cache must be in tiles of a power of two"):
        rotate_and_write(
            torch.zeros(2, 1, 16),
            torch.zeros(2, 16),
            odd,
            slots,
            positions=positions,
            cos_sin=table,
            norm_weight=torch.ones(16),
        )
    state = PagedCache(rows(torch.float32, latent=32, rope=0), 2, 4)
    pages = StatePages(slots, torch.zeros(2, dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="cache must be in tiles of a power of two"):
        compress_kv(
            torch.ones(2, 16),
            torch.ones(2, 16),
            state,
            odd,
            positions=positions,
            pages=pages,
            slots=slots,
            bias=torch.zeros(2, 16),
            norm_weight=torch.ones(16),
            cos_sin=table,
        )
    keys = PagedCache(rows(torch.float32, latent=9, rope=0), 2, 4)
    recipe = IndexRecipe(4, interleaved=True, rope_first=False)
    with pytest.raises(ValueError, match="recipe must be with pairs from an even column on"):
        write_index_keys(torch.ones(2, 9), keys, slots, recipe, positions=positions, cos_sin=table)
    assert not any(cache.storage.any() for cache in (odd, state, keys))
