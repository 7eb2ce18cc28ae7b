"""Attention of few heads in CUDA C++: the source runs on the host, with threads in random order, against float64."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from attention_calls import attend_call, attend_slots_call, combine_call
from few_heads_emulated import BF16_SHAPES, FP8_SHAPES, check, emulated_launches
from few_heads_rows import KINDS, SCALE, filled
from seeds import reseed
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.lab.testing import oracle
from tamis.ops.attention.hopper import few_heads
from tamis.ops.attention.hopper.few_heads_shapes import FP8_ROWS, CtaShape
from tamis.ops.attention.hopper.splits import Outputs, choose_splits
from tamis.ops.combine import reference as combine_reference
from tamis.ops.lse import LseForm

MODES = ["pow2", "exact", "bf16"]  # modes of the scales of FP8 rows; bf16 rows
EXACT = [("one stream", "exact"), ("32 columns", "exact")]
BOTH_ROWS = [(name, mode) for name in FP8_SHAPES for mode in ("pow2", "bf16") if name in BF16_SHAPES or mode == "pow2"]


@pytest.fixture
def emulated(host_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, int], None]]:
    """A function that makes the module launch a shape on the host, as if on a device with a number of SMs."""
    yield from emulated_launches(host_folder, monkeypatch)


@pytest.mark.parametrize(("name", "mode"), BOTH_ROWS)
def test_the_source_computes_attention(emulated, name: str, mode: str) -> None:
    reseed(0)
    emulated(name)
    cache = filled(100, mode=mode)
    heads = 32 if name == "32 columns" else 16
    slots = torch.randint(0, cache.rows, (3, 150), dtype=torch.int32)
    check(torch.randn(3, heads, 576).bfloat16(), Selection(cache, slots))


@pytest.mark.parametrize("name", FP8_SHAPES)
@pytest.mark.parametrize(("mode", "dtype"), KINDS)
def test_invalid_slots_lengths_splits_and_sinks(emulated, name: str, mode: str, dtype: torch.dtype) -> None:
    if mode == "bf16" and name not in BF16_SHAPES:
        pytest.skip("heads are columns over FP8 rows only")
    reseed(1)
    emulated(name, 1)
    cache = filled(70, 7, gap=16, mode=mode)
    cache.storage.view(torch.uint8)[:4] = 0xFF  # NaN, in rows that nobody selects
    slots = torch.randint(28, cache.rows, (6, 101), dtype=torch.int32)
    slots[0, 3:60] = torch.tensor([-1, cache.rows, 2**31 - 1])[torch.randint(0, 3, (57,))].int()
    slots[0, 64:] = -(2**31)
    slots[1] = -1
    slots[2, ::2] = cache.rows
    lengths = torch.tensor([101, 101, 77, 0, 1, 33], dtype=torch.int32)
    heads = {"two streams": 8, "one stream": 1, "32 columns": 17, "16 columns": 3}[name]
    q, sink = torch.randn(6, heads, 576).to(dtype), torch.randn(heads)
    sink[0] = torch.inf
    for splits in (1, 3):
        check(q, Selection(cache, slots, lengths), splits=splits, sink=sink)


@pytest.mark.parametrize(
    ("name", "heads"), [("two streams", 39), ("one stream", 17), ("16 columns", 21), ("32 columns", 40)]
)
def test_more_heads_than_a_cta_has(emulated, name: str, heads: int) -> None:
    """Whole tokens and splits, several work items in a CTA, and a last CTA with fewer heads."""
    reseed(14)
    emulated(name, 4)
    cache = filled(100)
    slots = torch.randint(0, cache.rows, (3, 140), dtype=torch.int32)
    q, sink, out = torch.randn(3, heads, 576).bfloat16(), torch.randn(heads), torch.empty(3, heads, 512)
    selection = Selection(cache, slots, torch.tensor([140, 90, 33], dtype=torch.int32))
    check(q, selection, splits=2, sink=sink)
    wanted, wanted_lse = oracle.attend(q, [selection], scale=SCALE, value_dim=512, sink=sink)
    lse, _ = few_heads.attend(attend_call(q, [selection], scale=SCALE, splits=1, sink=sink, out=out))
    assert torch.allclose(lse.double(), wanted_lse, atol=2e-3)
    assert (out - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize(("name", "mode"), BOTH_ROWS)
def test_positions_are_translated_in_the_kernel(emulated, name: str, mode: str) -> None:
    reseed(2)
    emulated(name, 1)
    cache = filled(40 * 5, 5, gap=32, mode=mode)
    table = torch.randint(-1, 41, (3, 9), dtype=torch.int32)
    table[0, 2], table[0, 3] = 2**31 - 1, -(2**31)
    positions = torch.randint(-3, 60, (4, 70), dtype=torch.int32)
    ids = torch.tensor([0, 2, 1, 0], dtype=torch.int32)
    check(torch.randn(4, 5, 576).bfloat16(), Selection(cache, positions, None, ids, table), splits=2)


def test_requests_that_the_table_does_not_have_attend_to_nothing(emulated) -> None:
    emulated("two streams", 1)
    cache, ids = filled(40, 5), torch.tensor([0, 3, -1], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32).expand(3, 8)
    selection = Selection(cache, torch.arange(40, dtype=torch.int32).expand(3, 40), None, ids, table)
    q = torch.randn(3, 4, 576).bfloat16()
    call = attend_slots_call(q, [selection], scale=SCALE, value_dim=512, splits=1)
    out, lse, max_logits = few_heads.attend_slots(call)
    assert (lse[0, 0] > -torch.inf).all()
    assert (out[0, 1:] == 0).all()
    assert (lse[0, 1:] == -torch.inf).all()
    assert (max_logits[0, 1:] == -torch.inf).all()


@pytest.mark.parametrize(("name", "mode"), [("one stream", "pow2"), ("one stream", "bf16"), *EXACT])
@pytest.mark.parametrize("largest", [1e-5, 1e4, None])
def test_tiles_of_different_magnitude(emulated, name: str, mode: str, largest: float | None) -> None:
    """Every tile of the output is right by itself, though others are larger by nine orders of magnitude."""
    reseed(3)
    emulated(name, 1)
    cache = filled(64, mode=mode)
    magnitudes = torch.logspace(-5, 4, 4) if largest is None else torch.full((4,), largest)
    kv = torch.randn(cache.rows, 576)
    kv[:, :512] *= magnitudes.repeat_interleave(128) / 4
    oracle.write(kv, cache, torch.arange(cache.rows))
    slots = torch.randint(0, cache.rows, (2, 96), dtype=torch.int32)
    check(torch.randn(2, 16, 576).bfloat16(), Selection(cache, slots), scale=1 / (24 * float(magnitudes.max())))


@pytest.mark.parametrize("name", FP8_SHAPES)
def test_rows_of_one_selection_whose_tiles_differ(emulated, name: str) -> None:
    """If a row with tiny values has the largest logit, and one with huge values a small logit, both contribute."""
    reseed(4)
    emulated(name, 1)
    cache = filled(96, mode="exact", spread=14.0)
    cache.field(cache.layout.tail)[:] *= 8.0
    slots = torch.stack([torch.randperm(96)[:90] for _ in range(3)]).int()
    q = torch.randn(3, 16, 576) * torch.tensor([2.0**-10, 1.0, 2.0**10])[:, None, None]
    q[:, :, :512] *= torch.exp2(torch.randint(-14, -4, (3, 16, 1)).float())
    check(q.bfloat16(), Selection(cache, slots), scale=0.01)


@pytest.mark.parametrize(("name", "mode"), [("one stream", "bf16"), *EXACT])
def test_rows_in_the_order_of_growing_tiles(emulated, name: str, mode: str) -> None:
    """The softmax references move at almost every stage, and by a large amount."""
    reseed(5)
    emulated(name, 1)
    cache = filled(256, mode=mode)
    kv = torch.randn(cache.rows, 576) * torch.logspace(-5, 4, cache.rows)[:, None]
    oracle.write(kv, cache, torch.arange(cache.rows))
    order = torch.arange(cache.rows, dtype=torch.int32)
    q = torch.randn(2, 3, 576).bfloat16()
    check(q, Selection(cache, torch.stack((order, order.flip(0)))), scale=1e-4)


@pytest.mark.parametrize("name", FP8_SHAPES)
def test_a_weight_out_of_range_is_noticed_in_every_warp(emulated, name: str) -> None:
    """The references of a whole warpgroup move because of one row of one warp, in its second 64 rows."""
    reseed(17)
    emulated(name, 1)
    cache = filled(128)
    q = torch.randn(8, 16, 576).bfloat16()
    kv = torch.randn(cache.rows, 576) * 0.1
    kv[:8] = q[:, 0].float()
    oracle.write(kv, cache, torch.arange(cache.rows))
    slots = torch.randint(8, cache.rows, (8, 256), dtype=torch.int32)
    slots[torch.arange(8), 128 + 16 * torch.arange(8) + 3] = torch.arange(8, dtype=torch.int32)
    check(q, Selection(cache, slots), scale=0.1)


@pytest.mark.parametrize("shape", [FP8_ROWS.more_heads, FP8_ROWS.many_tokens], ids=["32", "16"])
def test_warpgroups_that_share_a_ring(emulated, monkeypatch: pytest.MonkeyPatch, shape: CtaShape) -> None:
    """The ring has as many stages as on a device, and every work item goes over it several times."""
    reseed(13)
    monkeypatch.setitem(FP8_SHAPES, "device", shape)
    emulated("device", 1)
    cache = filled(300)
    slots = torch.randint(0, cache.rows, (3, 900), dtype=torch.int32)
    lengths = torch.tensor([900, 130, 600], dtype=torch.int32)
    q = torch.randn(3, shape.heads, 576).bfloat16()
    for _ in range(3):
        check(q, Selection(cache, slots, lengths))


@pytest.mark.parametrize("name", ["one stream", "32 columns"])
def test_tiles_of_zeros(emulated, name: str) -> None:
    """Their scales are the smallest there are, or zero."""
    reseed(6)
    emulated(name, 1)
    cache = filled(64, mode="exact")
    kv = torch.randn(cache.rows, 576)
    kv[:40, :256] = 0
    oracle.write(kv, cache, torch.arange(cache.rows))
    cache.field(cache.layout.scales).view(-1, 4)[20:30, 0] = 0.0
    slots = torch.arange(64, dtype=torch.int32).expand(2, 64).clone()
    slots[1, 40:] = -1
    check(torch.randn(2, 16, 576).bfloat16() * 300, Selection(cache, slots))


@pytest.mark.parametrize("size", [0.0, 2.0**-120, 1e-6, 1e30])
@pytest.mark.parametrize(("name", "mode"), [("two streams", "pow2"), ("two streams", "bf16"), ("16 columns", "pow2")])
def test_queries_of_any_size(emulated, size: float, name: str, mode: str) -> None:
    reseed(7)
    emulated(name, 1)
    cache = filled(64, mode=mode)
    slots = torch.randint(0, 64, (2, 64), dtype=torch.int32)
    q = (torch.randn(2, 16, 576) * size).bfloat16()
    q[1, :, 512:] = torch.randn(16, 64).bfloat16()
    check(q, Selection(cache, slots), scale=min(0.05 / max(size, 1e-30), 0.05))


@pytest.mark.parametrize(
    ("name", "mode", "code"),
    [
        ("two streams", "pow2", 0x7F),
        ("two streams", "pow2", 0xFF),
        ("two streams", "bf16", 0xFF),
        ("16 columns", "pow2", 0x7F),
    ],
)
@pytest.mark.parametrize("column", [0, 300, 511])
def test_a_nan_in_a_selected_row_shows(emulated, name: str, mode: str, code: int, column: int) -> None:
    reseed(8)
    emulated(name, 1)
    cache = filled(64, mode=mode)
    size = cache.storage.itemsize
    cache.storage.view(torch.uint8)[1, 3, size * column : size * (column + 1)] = code  # row 19
    slots = torch.randint(20, 64, (3, 70), dtype=torch.int32)
    slots[1, 50] = 19
    slots[2, 0] = 19  # beyond the length
    lengths = torch.tensor([70, 70, 0], dtype=torch.int32)
    q = torch.randn(3, 16, 576).bfloat16()
    out, lse, _ = few_heads.attend_slots(
        attend_slots_call(q, [Selection(cache, slots, lengths)], scale=SCALE, value_dim=512, splits=1)
    )
    assert out[0, 1].isnan().all()
    assert lse[0, 1].isnan().all()
    assert not out[0, 0].isnan().any()
    assert (out[0, 2] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("name", "mode"), [("two streams", "pow2"), ("one stream", "bf16"), ("32 columns", "pow2")])
def test_a_single_split_goes_straight_into_the_output(emulated, name: str, mode: str, dtype: torch.dtype) -> None:
    reseed(9)
    emulated(name, 1)
    cache = filled(50, mode=mode)
    selection = Selection(cache, torch.randint(0, cache.rows, (3, 40), dtype=torch.int32))
    q, sink = torch.randn(3, 20, 576).bfloat16(), torch.randn(20)
    room = torch.full((3, 24, 520), 7.0, dtype=dtype)
    out = room[:, :20, 4:516]
    lse, max_logits = few_heads.attend(attend_call(q, [selection], scale=SCALE, splits=1, sink=sink, out=out))
    wanted, wanted_lse = oracle.attend(q, [selection], scale=SCALE, value_dim=512, sink=sink)
    assert torch.allclose(out.double(), wanted, atol=1e-3, rtol=4e-3 if dtype == torch.bfloat16 else 1e-5)
    assert torch.allclose(lse.double(), wanted_lse, atol=1e-3)
    assert max_logits.shape == (3, 20)
    assert (room[:, 20:] == 7).all()
    assert (room[..., :4] == 7).all()
    assert (room[..., 516:] == 7).all()


def test_what_rounding_cuts_off_is_kept(emulated) -> None:
    reseed(6)
    emulated("one stream")
    cache = filled(100, mode="bf16")
    selections = [Selection(cache, torch.randint(-3, cache.rows, (3, 90), dtype=torch.int32))]
    q, exact, out = torch.randn(3, 17, 576).bfloat16(), torch.empty(3, 17, 512), torch.zeros(3, 17, 512).bfloat16()
    rest = torch.full_like(out, 7.0)
    given = {"scale": SCALE, "splits": 1, "sink": torch.randn(17)}
    few_heads.attend(attend_call(q, selections, out=exact, **given))
    few_heads.attend(attend_call(q, selections, out=out, **given), rest)
    assert torch.equal(out, exact.bfloat16())
    assert torch.equal(rest, (exact - out.float()).bfloat16())


def test_tokens_beyond_whole_waves_are_split(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole tokens and splits are in one launch; the merge gets only the splits."""
    reseed(12)
    emulated("one stream", 2)

    def merge(splits: Outputs, sink: Tensor, whole: Outputs, form: LseForm, rest: Tensor | None) -> None:
        last = slice(len(whole.lse) - splits.lse.shape[1], None)
        whole.lse[last] = combine_reference.combine_parts(combine_call(splits.out, splits.lse, sink, whole.out[last]))
        whole.max_logits[last] = splits.max_logits.amax(0)

    monkeypatch.setattr(few_heads, "merge_splits", merge)
    cache = filled(100)
    selection = Selection(cache, torch.randint(0, cache.rows, (5, 320), dtype=torch.int32))
    q, sink = torch.randn(5, 7, 576).bfloat16(), torch.randn(7)
    assert choose_splits(5, 7, 10, 4) == (4, 4)
    out = torch.empty(5, 7, 512)
    lse, max_logits = few_heads.attend(attend_call(q, [selection], scale=SCALE, splits=None, sink=sink, out=out))
    wanted, wanted_lse = oracle.attend(q, [selection], scale=SCALE, value_dim=512, sink=sink)
    assert torch.allclose(out.double(), wanted, atol=1e-3)
    assert torch.allclose(lse.double(), wanted_lse, atol=1e-3)
    call = attend_slots_call(q, [selection], scale=SCALE, value_dim=512, splits=1)
    again, _, max_logits_again = few_heads.attend_slots(call)
    assert again.shape == (1, 5, 7, 512)
    assert torch.equal(max_logits, max_logits_again[0])


@pytest.mark.parametrize("name", ["one stream", "32 columns"])
def test_the_lse_leaves_in_the_form_that_was_asked_for(emulated, name: str) -> None:
    reseed(13)
    emulated(name, 1)
    cache = filled(50)
    slots = torch.randint(0, cache.rows, (6, 40), dtype=torch.int32)
    slots[4] = -1
    q, form = torch.randn(6, 20, 576).bfloat16(), LseForm(3, base_2=True, plus_inf=True)
    given = {"scale": SCALE, "splits": 1, "out": torch.empty(6, 20, 512)}
    plain = few_heads.attend(attend_call(q, [Selection(cache, slots)], **given))
    lse, max_logits = few_heads.attend(attend_call(q, [Selection(cache, slots)], **given, lse_form=form))
    wanted = form.arrange(*plain)
    assert lse.shape == (2, 20, 3)
    assert (lse[1, :, 1] == torch.inf).all()
    assert torch.allclose(lse, wanted[0], rtol=1e-6)
    assert torch.equal(max_logits, wanted[1])


@pytest.mark.parametrize("mode", ["pow2", "bf16"])
def test_rows_far_into_a_page(emulated, mode: str) -> None:
    """The page has more than 2 GiB, of which only the last rows are ever accessed."""
    reseed(14)
    emulated("one stream", 1)
    near = filled(32, 32, mode=mode)
    rows = 2**31 // near.layout.row_bytes + 64
    far = PagedCache.wrap(torch.empty(1, rows, near.storage.shape[2], dtype=near.storage.dtype), near.layout)
    far.storage[0, -32:] = near.storage[0]
    slots = torch.randint(rows - 32, rows, (1, 40), dtype=torch.int32)
    check(torch.randn(1, 4, 576).bfloat16(), Selection(far, slots))


def test_selections_of_different_rows(emulated) -> None:
    reseed(13)
    emulated("one stream", 1)
    selections = [Selection(filled(50, mode=m), torch.randint(0, 50, (2, 40), dtype=torch.int32)) for m in MODES]
    q, out = torch.randn(2, 5, 576).bfloat16(), torch.empty(2, 5, 512)
    wanted, _ = oracle.attend(q, selections, scale=SCALE, value_dim=512)
    split_out, lse, _ = few_heads.attend_slots(attend_slots_call(q, selections, scale=SCALE, value_dim=512, splits=1))
    combine_reference.combine_parts(combine_call(split_out, lse, None, out))
    assert torch.allclose(out.double(), wanted, atol=2e-3)


def test_strided_queries_and_slots_and_a_scale_in_memory(emulated) -> None:
    reseed(10)
    emulated("one stream", 1)
    cache = filled(50)
    slots = torch.randint(0, cache.rows, (40, 6), dtype=torch.int32).T[::2]
    q = torch.randn(6, 3, 580).bfloat16()[::2, :, 2:578]
    selection = Selection(cache, slots)
    wanted, _ = oracle.attend(q, [selection], scale=SCALE, value_dim=512)
    out, _, _ = few_heads.attend_slots(
        attend_slots_call(q, [selection], scale=torch.tensor(SCALE), value_dim=512, splits=1)
    )
    assert torch.allclose(out[0].double(), wanted, atol=2e-3)


@pytest.mark.parametrize("name", ["two streams", "32 columns"])
def test_no_columns_and_no_tokens(emulated, name: str) -> None:
    emulated(name, 1)
    cache = filled(50)
    for tokens, columns in ((2, 0), (0, 5)):
        selection = Selection(cache, torch.zeros(tokens, columns, dtype=torch.int32))
        q = torch.randn(tokens, 4, 576).bfloat16()
        out, lse, _ = few_heads.attend_slots(attend_slots_call(q, [selection], scale=SCALE, value_dim=512, splits=None))
        assert (out == 0).all()
        assert (lse == -torch.inf).all()


@pytest.mark.parametrize("name", ["two streams", "16 columns"])
def test_a_row_does_not_depend_on_the_others(emulated, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its result nor the shape depends on the other rows, if the number of splits is given."""
    reseed(11)
    usual = few_heads.choose_shape
    emulated(name, 3)
    seen = set()
    monkeypatch.setattr(few_heads, "choose_shape", lambda *given: seen.add(usual(*given)) or FP8_SHAPES[name])
    cache = filled(100)
    slots = torch.randint(0, cache.rows, (4, 130), dtype=torch.int32)
    q = torch.randn(4, 9, 576).bfloat16()

    def run(tokens: slice) -> Tensor:
        return few_heads.attend_slots(
            attend_slots_call(q[tokens], [Selection(cache, slots[tokens])], scale=SCALE, value_dim=512, splits=2)
        )[0]

    assert torch.equal(run(slice(0, 4))[:, 2:3], run(slice(2, 3)))
    few_heads.attend_slots(
        attend_slots_call(
            q.repeat(9, 1, 1), [Selection(cache, slots[:1, :1].repeat(36, 1))], scale=SCALE, value_dim=512, splits=1
        )
    )
    assert len(seen) == 1
