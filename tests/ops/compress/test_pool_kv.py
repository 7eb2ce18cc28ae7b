"""Latents of spans against float64, by the reference and by the Triton kernel, whatever the steps."""

from collections.abc import Callable

import pytest
import torch
from bounds import relative_error
from seeds import seed_of, seeded
from torch import Tensor

from tamis import PagedCache, PagePool
from tamis.cache.layout import compressor_state, rows
from tamis.ops import StatePages, pool_kv
from tamis.ops.compress import reference, triton_kernels
from tamis.ops.compress.operations import PoolKv

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on the interpreter's NaN
WIDTH, TOKENS = 20, 23
STAGES = {"reference": reference.pool_kv, "triton": triton_kernels.pool_kv}


class Pooling:
    """Two requests' tokens, their state, and the latents that steps return."""

    def __init__(self, ratio: int, stage: Callable[[PoolKv], Tensor], device: torch.device) -> None:
        generator = seeded(3)
        self.values, self.scores = (torch.randn(2, TOKENS, WIDTH, generator=generator) * n for n in (1, 2))
        self.norm, self.ratio, self.stage, self.device = torch.rand(WIDTH, generator=generator), ratio, stage, device
        self.state = PagedCache(compressor_state(dim=WIDTH, overlapping=False), 20, 3, device)
        self.state.storage.fill_(torch.nan)
        self.pool = PagePool(20, 3, seed=seed_of(1))

    def step(self, *chunks: tuple[int, int, int], padding: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """The latents of tokens start..end of some requests, after which come rows of padding."""
        for request, _, end in chunks:
            self.pool.extend(request, end)
        none = torch.full((padding,), -1)
        positions = torch.cat([*(torch.arange(start, end) for _, start, end in chunks), none])
        slots = torch.cat([*(self.pool.slots(*chunk) for chunk in chunks), none])
        ids = torch.cat([torch.full((end - start,), row) for row, (_, start, end) in enumerate(chunks)] + [none * 0])
        table = self.pool.block_table([request for request, _, _ in chunks])
        values, scores = (
            torch.cat([*(x[request, start:end] for request, start, end in chunks), x[0, :padding]])
            for x in (self.values, self.scores)
        )
        tensors = [t.to(self.device) for t in (positions, slots, ids.int(), table, self.norm)]
        given = (values.to(self.device), scores.to(self.device), self.state, *tensors)
        found = self.stage(PoolKv(*given, self.ratio, 1e-6, dtype, "auto")).cpu()
        assert found.dtype == dtype
        assert not found[len(found) - padding :].any()
        return list(found[: len(found) - padding].split([end - start for _, start, end in chunks]))

    def check(self, request: int, found: Tensor) -> None:
        """The latents of all tokens of a request."""
        for token in range(len(found)):
            if (token + 1) % self.ratio:
                assert not found[token].any()
                continue
            span = slice(token + 1 - self.ratio, token + 1)
            share = self.scores[request, span].double().exp()
            pooled = (self.values[request, span].double() * share).sum(0) / share.sum(0)
            expected = pooled / (pooled.square().mean() + 1e-6).sqrt() * self.norm.double()
            # A few units of float32 for each of the sums over a span and over a row.
            assert relative_error(found[token], expected) < 2.0**-19


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("ratio", [1, 2, 5])
def test_steps_of_any_size(stage: str, ratio: int, device: torch.device) -> None:
    pooling = Pooling(ratio, STAGES[stage], torch.device("cpu") if stage == "reference" else device)
    first = pooling.step((0, 0, 7), (1, 0, 1), padding=2)
    second = pooling.step((1, 1, 2), (0, 7, TOKENS))
    third = pooling.step((1, 2, TOKENS), padding=1)
    pooling.check(0, torch.cat((first[0], second[1])))
    pooling.check(1, torch.cat((first[1], second[0], third[0])))


@pytest.mark.parametrize("stage", STAGES)
def test_latents_are_rounded_once(stage: str, device: torch.device) -> None:
    where = torch.device("cpu") if stage == "reference" else device
    exact, half = (
        Pooling(2, STAGES[stage], where).step((0, 0, 8), dtype=d)[0] for d in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(half, exact.bfloat16())


def test_refusals_leave_the_state_as_it_was() -> None:
    state = PagedCache(compressor_state(dim=8, overlapping=False), 2, 4)
    pages = StatePages(torch.tensor([0]), torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32))
    x = torch.ones(1, 8)
    right = {"positions": torch.tensor([0]), "pages": pages, "norm_weight": torch.ones(8), "ratio": 2}
    for change, message in (
        ({"ratio": 0}, "ratio must be >= 1"),
        ({"eps": 0.0}, "eps"),
        ({"dtype": torch.float64}, "dtype must be one of"),
        ({"norm_weight": torch.ones(7)}, "norm_weight"),
        ({"positions": torch.tensor([0, 1])}, "positions"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            pool_kv(x, x, state, **(right | change))
    with pytest.raises(ValueError, match="state must be of float32 rows 16 wide"):
        pool_kv(x, x, PagedCache(rows(torch.float32, latent=8, rope=0), 2, 4), **right)
    assert not state.storage.any()
