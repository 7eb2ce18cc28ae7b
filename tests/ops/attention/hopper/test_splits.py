"""How the Hopper kernels split a batch, and the merge of splits: its source runs on the host against the definition."""

from collections.abc import Callable
from pathlib import Path

import on_host
import pytest
import torch
from attention_calls import combine_call
from seeds import reseed
from torch import Tensor

from tamis.arithmetic import ceil_div
from tamis.ops.attention.hopper import few_heads, splits
from tamis.ops.attention.hopper.splits import Outputs
from tamis.ops.combine import reference as combine
from tamis.ops.lse import LseForm

ENTRY = """
extern "C" __attribute__((visibility("default"))) void run(int ctas, const MergeParams* params) {
  for (int cta = 0; cta < ctas; ++cta) {
    emulator::start_cta(ctas);
    emulator::run_cluster(cta, 1, 0, [&] { merge_splits(*params); });
  }
}
"""


@pytest.fixture
def merge(host_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the module launch the merge on the host."""

    def launch(device: torch.device, batch: int) -> Callable[..., None]:
        program = splits.merge_program(batch)
        source = program.source.replace('#include "instructions.cuh"', '#include "matrix_emulator.hpp"')
        options = [*program.options, "-DTHREADS=128", "-I", str(Path(splits.__file__).parent)]
        run = on_host.load(host_folder, source + ENTRY, options).run
        return lambda grid, params: run(grid[0], on_host.packed(params))

    monkeypatch.setattr(splits, "_merge_launch", launch)


def some_splits(count: int, tokens: int, heads: int) -> Outputs:
    reseed(count)
    found = Outputs(torch.randn(count, tokens, heads, 512), torch.randn(count, tokens, heads) * 9, Tensor())
    found.lse[torch.rand(count, tokens, heads) < 0.3] = -torch.inf
    found.lse[:, 0, 0] = -torch.inf  # nothing selected anywhere
    found.out[found.lse == -torch.inf] = 0.0
    return found._replace(max_logits=found.lse - 1.0)


@pytest.mark.parametrize("dtype", splits.OUT_KINDS)
@pytest.mark.parametrize("count", [1, 4, 5, 16, 37])
def test_splits_are_merged_by_their_weights(merge, count: int, dtype: torch.dtype) -> None:
    tokens, heads = 2, 3
    given_splits, sink = some_splits(count, tokens, heads), torch.tensor([0.5, -torch.inf, torch.inf])
    room = torch.full((tokens, heads, 516), 7.0, dtype=dtype)
    for given_sink in (None, sink):
        whole = Outputs(room[..., 4:], torch.empty(tokens, heads), torch.empty(tokens, heads))
        splits.merge_splits(given_splits, given_sink, whole, LseForm())
        wanted = torch.empty(tokens, heads, 512)
        lse = combine.combine_parts(combine_call(given_splits.out, given_splits.lse, given_sink, wanted))
        assert torch.equal(whole.lse == -torch.inf, lse == -torch.inf)
        found = lse.isfinite()
        assert torch.allclose(whole.lse[found], lse[found], atol=1e-5)
        assert torch.allclose(whole.out.float(), wanted, atol=1e-6 if dtype == torch.float32 else 2e-2)
        assert (whole.out[0, 0] == 0).all()
        assert torch.equal(whole.max_logits, given_splits.max_logits.amax(0))
        assert (room[..., :4] == 7).all()


def test_what_rounding_cuts_off_is_kept(merge) -> None:
    given, shape = some_splits(5, 3, 2), (3, 2, 512)
    exact, rounded = (torch.empty(shape, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    rest = torch.full_like(rounded, 7.0)
    for out in (exact, rounded):
        kept = rest if out is rounded else None
        splits.merge_splits(given, None, Outputs(out, torch.empty(3, 2), torch.empty(3, 2)), LseForm(), kept)
    assert torch.equal(rounded, exact.bfloat16())
    assert torch.equal(rest, (exact - rounded.float()).bfloat16())


def test_the_merged_lse_has_the_form_that_was_asked_for(merge) -> None:
    given, form = some_splits(3, 4, 2), LseForm(3, base_2=True, plus_inf=True)
    plain = Outputs(torch.empty(6, 2, 512), torch.zeros(6, 2), torch.zeros(6, 2))
    splits.merge_splits(given, None, plain, LseForm())
    assert (plain.lse[:2] == 0).all()
    found = Outputs(torch.empty(6, 2, 512), torch.zeros(2, 2, 3), torch.zeros(2, 2, 3))
    splits.merge_splits(given, None, found, form)
    lse, max_logits = form.arrange(plain.lse, plain.max_logits)
    assert found.lse[0, 0, 2] == torch.inf
    assert torch.allclose(found.lse, lse, rtol=1e-6)
    assert torch.equal(found.max_logits, max_logits)
    assert torch.equal(found.out[2:], plain.out[2:])


def test_nan_in_a_split_shows(merge) -> None:
    given_splits = some_splits(6, 2, 2)
    given_splits.lse[3, 1, 0] = given_splits.max_logits[3, 1, 0] = torch.nan
    whole = Outputs(torch.empty(2, 2, 512), torch.empty(2, 2), torch.empty(2, 2))
    splits.merge_splits(given_splits, None, whole, LseForm())
    assert whole.out[1, 0].isnan().all()
    assert whole.lse[1, 0].isnan()
    assert whole.max_logits[1, 0].isnan()
    assert not whole.out[1, 1].isnan().any()


@pytest.mark.parametrize("heads", [1, 8, 16, 17, 32, 64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 64, 128, 132, 133, 264, 265, 512, 4096])
@pytest.mark.parametrize("bf16_rows", [False, True])
def test_one_more_token_never_costs_one_more_wave(tokens: int, heads: int, bf16_rows: bool) -> None:
    shape = few_heads.choose_shape(tokens, heads, 132, bf16_rows, 2048)
    if few_heads.suits(tokens, heads, bf16_rows):
        if shape.source == "heads_as_columns":
            assert not bf16_rows
            assert shape.heads >= heads
        else:
            assert ("BF16_ROWS", bf16_rows) in shape.defines
        assert (shape.shared + 1024) * shape.per_sm <= 228 * 1024
        row, room = 2048 // shape.columns, 132 * shape.per_sm // ceil_div(heads, shape.heads)
        costs = {"rows_per_step": shape.rows_per_step, "steps_per_split": shape.steps_per_split}
    else:
        row, room, costs = 32, 132 // ceil_div(heads, 64), {}

    def steps(count: int) -> float:
        plan = splits.choose_splits(count, heads, row, room, **costs)
        waves = ceil_div(plan.whole, room) * (row + splits.OVERHEAD_STEPS)
        split_waves = ceil_div((count - plan.whole) * plan.splits, room)
        return waves + split_waves * (row / plan.splits + splits.OVERHEAD_STEPS)

    assert steps(tokens + 1) <= steps(tokens) + 4
    chosen = splits.choose_splits(tokens, heads, row, room, **costs).splits
    assert chosen == 1 or row // chosen >= costs.get("steps_per_split", 1)


def test_outputs_that_the_kernels_can_write() -> None:
    good = torch.empty(3, 4, 512, dtype=torch.bfloat16)
    assert splits.can_store(good)
    assert splits.can_store(good.float())
    assert not splits.can_store(good.double())
    assert not splits.can_store(good.transpose(1, 2))
    assert not splits.can_store(torch.empty(3, 4, 514, dtype=torch.bfloat16)[..., 2:])
