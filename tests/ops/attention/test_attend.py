"""Attention over selections against fp64, including adversarial edge cases."""

import math

import bounds
import pytest
import torch
from bounds import selected_attention
from torch import Tensor

from tamis import PagedCache, Selection
from tamis.arithmetic import ceil_div
from tamis.cache.layout import named
from tamis.lab.testing.cases import INT_MAX, INT_MIN
from tamis.ops import attend, attend_slots, combine_parts, translate_positions, write_kv

LAYOUTS = ["v32-bf16", "v32-fp16", "v32-fp32", "v32-fp8", "plain-fp8"]
V4_LAYOUTS = ["v4-bf16", "v4-fp32", "v4-fp8"]


def filled(layout: str, rows: int, page_size: int = 64, **options: int) -> PagedCache:
    made = named(layout, **options)
    cache = PagedCache(made, ceil_div(rows, page_size), page_size)
    write_kv(torch.randn(cache.rows, made.width), cache, torch.arange(cache.rows))
    return cache


def random_slots(tokens: int, k: int, rows: int) -> Tensor:
    return torch.randint(0, rows, (tokens, k), dtype=torch.int32)


def check(q: Tensor, selections: list[Selection], *, value_dim: int = 512, sink: Tensor | None = None, splits: int = 1):
    result = attend(q, selections, scale=0.05, value_dim=value_dim, sink=sink, splits=splits)
    u = bounds.FLOAT64 * 2 if q.dtype == torch.float64 else bounds.FLOAT32  # float64 rounds on both sides
    exact = selected_attention(q, selections, scale=0.05, value_dim=value_dim, sink=sink, parts=splits, u=u)
    empty = exact.lse == -torch.inf
    assert torch.equal(result.lse == -torch.inf, empty)
    assert not result.out.isnan().any()
    assert (result.out[empty] == 0).all()
    bounds.agree(result.out, exact.out, exact.out_error, q.dtype)
    bounds.agree(result.lse, exact.lse, exact.lse_error)
    bounds.agree(result.max_logits, exact.top, exact.top_error)
    assert (result.max_logits[empty] == -torch.inf).all()
    return result


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 64, 128])
def test_v32_layouts_and_head_counts(layout: str, heads: int) -> None:
    cache = filled(layout, 300)
    q = torch.randn(5, heads, 576)
    check(q, [Selection(cache, random_slots(5, 77, cache.rows))])


@pytest.mark.parametrize("layout", V4_LAYOUTS)
def test_v4_rows_are_keys_and_values(layout: str) -> None:
    cache = filled(layout, 200)
    check(torch.randn(4, 8, 512), [Selection(cache, random_slots(4, 50, cache.rows))])


@pytest.mark.parametrize(("latent", "rope"), [(512, 0), (128, 32), (256, 64)])
@pytest.mark.parametrize("layout", ["v32-bf16", "v32-fp8", "v4-fp8", "plain-fp8"])
def test_other_latent_widths(layout: str, latent: int, rope: int) -> None:
    cache = filled(layout, 100, 7, latent=latent, rope=rope)
    q = torch.randn(3, 4, latent + rope)
    check(q, [Selection(cache, random_slots(3, 33, cache.rows))], value_dim=latent)


@pytest.mark.parametrize("page_size", [1, 2, 61, 64, 69, 256])
@pytest.mark.parametrize("layout", ["v32-fp8", "v4-fp8", "v32-bf16"])
def test_page_sizes(layout: str, page_size: int) -> None:
    cache = filled(layout, 300, page_size)
    q = torch.randn(3, 4, cache.layout.width)
    check(q, [Selection(cache, random_slots(3, 64, cache.rows))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_query_dtypes(dtype: torch.dtype) -> None:
    cache = filled("v32-fp8", 100)
    result = check(torch.randn(3, 4, 576).to(dtype), [Selection(cache, random_slots(3, 20, cache.rows))])
    assert result.out.dtype == dtype


def test_e4m3_query_with_its_scale() -> None:
    cache = filled("plain-fp8", 64).with_scale(0.5)
    wide = torch.randn(2, 4, 576) * 3
    q = (wide / 0.25).to(torch.float8_e4m3fn)
    slots = random_slots(2, 30, 64)
    result = attend(q, Selection(cache, slots), scale=0.05, value_dim=512, q_scale=0.25)
    exact = selected_attention(q.float() * 0.25, [Selection(cache, slots)], scale=0.05, value_dim=512)
    assert result.out.dtype == torch.bfloat16
    bounds.agree(result.out, exact.out, exact.out_error, torch.bfloat16)
    as_tensor = attend(q, Selection(cache, slots), scale=0.05, value_dim=512, q_scale=torch.tensor([0.25]))
    assert torch.equal(result.out, as_tensor.out)
    deep = attend(q, Selection(cache, slots), scale=0.05, value_dim=512, q_scale=torch.full((1, 1, 1, 1), 0.25))
    assert torch.equal(result.out, deep.out)


def test_hostile_indices_are_skipped() -> None:
    cache = filled("v32-fp8", 128)
    slots = random_slots(6, 40, 128)
    bad = torch.tensor([INT_MIN, -123456, -1, 128, 129, INT_MAX], dtype=torch.int32)
    slots[:, ::3] = bad[torch.randint(0, 6, slots[:, ::3].shape)]
    slots[4] = -1
    slots[5] = INT_MAX
    result = check(torch.randn(6, 4, 576), [Selection(cache, slots)])
    assert (result.lse[4:] == -torch.inf).all()


def test_duplicates_count_twice() -> None:
    cache = filled("v32-fp32", 8)
    q = torch.randn(1, 2, 576)
    slots = torch.tensor([[3, 5, 5, 5]], dtype=torch.int32)
    result = check(q, [Selection(cache, slots)])
    once = attend(q, Selection(cache, slots[:, :2].contiguous()), scale=0.05, value_dim=512)
    assert (result.lse > once.lse).all()


def test_lengths_hide_garbage_and_zero_is_empty() -> None:
    cache = filled("v32-fp8", 64)
    slots = random_slots(4, 32, 64)
    lengths = torch.tensor([0, 1, 17, 32], dtype=torch.int32)
    columns = torch.arange(32)
    slots[columns >= lengths.unsqueeze(1)] = INT_MAX
    check(torch.randn(4, 4, 576), [Selection(cache, slots, lengths)])


@pytest.mark.parametrize("layout", ["v32-fp8", "v32-bf16", "v4-fp8"])
def test_nan_in_rows_that_are_not_selected_never_leaks(layout: str) -> None:
    cache = filled(layout, 256)
    wanted = torch.randperm(256)[:40]
    unused = torch.ones(256, dtype=torch.bool)
    unused[wanted] = False
    poison = unused.nonzero().squeeze(1)
    for field in (cache.layout.values, cache.layout.tail):
        if field is not None:
            nan = 0x7F if field.dtype == torch.uint8 else float("nan")
            cache.field(field)[poison // 64, poison % 64] = nan
    slots = wanted[torch.randint(0, 40, (5, 30))].int()
    slots[:, 20:] = -1
    slots[0, 5:] = int(poison[0])
    lengths = torch.tensor([5, 30, 30, 30, 0], dtype=torch.int32)
    if 0 in wanted:
        assert not cache.read(torch.tensor([0])).isnan().any()
    check(torch.randn(5, 4, cache.layout.width), [Selection(cache, slots, lengths)])


def test_row_zero_may_be_nan_while_padding_points_nowhere() -> None:
    cache = filled("v32-bf16", 64)
    cache.storage[0, 0] = float("nan")
    slots = torch.full((2, 8), -1, dtype=torch.int32)
    slots[0, :3] = torch.tensor([4, 5, 6])
    check(torch.randn(2, 3, 576), [Selection(cache, slots)])


def test_several_selections_share_one_softmax() -> None:
    window = filled("v4-fp8", 128, 64)
    compressed = filled("v4-fp8", 64, 2)
    other = filled("v4-bf16", 30, 5)
    selections = [
        Selection(window, random_slots(5, 16, 128), torch.tensor([16, 3, 0, 16, 0], dtype=torch.int32)),
        Selection(compressed, random_slots(5, 9, 64), torch.tensor([9, 9, 2, 0, 0], dtype=torch.int32)),
        Selection(other, random_slots(5, 4, 30), torch.tensor([0, 1, 2, 3, 0], dtype=torch.int32)),
    ]
    check(torch.randn(5, 8, 512), selections)
    check(torch.randn(5, 8, 512), selections, splits=4)


@pytest.mark.parametrize("value", [-torch.inf, -5.0, 0.0, 3.0, torch.inf])
def test_sinks(value: float) -> None:
    cache = filled("v32-fp8", 64)
    slots = random_slots(3, 10, 64)
    slots[2] = -1
    q = torch.randn(3, 4, 576)
    sink = torch.tensor([value, 0.0, -1.0, value])
    result = check(q, [Selection(cache, slots)], sink=sink)
    plain = attend(q, Selection(cache, slots), scale=0.05, value_dim=512)
    assert torch.equal(result.lse, plain.lse)
    assert torch.equal(result.max_logits, plain.max_logits)
    if value == torch.inf:
        assert (result.out[:, 0] == 0).all()
    if value == -torch.inf:
        assert torch.equal(result.out[:, 0], plain.out[:, 0])


@pytest.mark.parametrize("splits", [1, 2, 5, 31, 100])
def test_splits_merge_to_the_same_result(splits: int) -> None:
    cache = filled("v32-fp8", 128)
    slots = random_slots(3, 50, 128)
    slots[1, 10:] = -1
    slots[2] = -1
    check(torch.randn(3, 4, 576), [Selection(cache, slots)], splits=splits, sink=torch.randn(4))


def test_partials_keep_their_own_maximum_and_lse() -> None:
    cache = filled("v32-fp32", 64)
    slots = random_slots(2, 20, 64)
    q = torch.randn(2, 3, 576)
    partials = attend_slots(q, Selection(cache, slots), scale=0.05, value_dim=512, splits=2)
    left = selected_attention(q, [Selection(cache, slots[:, :10])], scale=0.05, value_dim=512)
    bounds.agree(partials.lse[0], left.lse, left.lse_error)
    bounds.agree(partials.out[0], left.out, left.out_error)
    assert combine_parts(partials, dtype=torch.float32).out.shape == (2, 3, 512)


def test_lse_in_base_two() -> None:
    cache = filled("v32-fp8", 64)
    slots = random_slots(2, 20, 64)
    slots[1] = -1
    q = torch.randn(2, 3, 576)
    natural = selected_attention(q, [Selection(cache, slots)], scale=0.05, value_dim=512)
    binary = attend(q, Selection(cache, slots), scale=0.05, value_dim=512, lse_base="2")
    expected = natural.lse / math.log(2)
    # One product with a rounded constant more.
    error = natural.lse_error / math.log(2) + bounds.rounded(expected.nan_to_num(neginf=0), torch.float32, 2)
    bounds.agree(binary.lse, expected, error)


def test_non_contiguous_inputs_and_given_output() -> None:
    cache = filled("v32-fp8", 100)
    q = torch.randn(4, 576, 6).transpose(1, 2)
    slots = random_slots(60, 4, 100).T[:, ::2]
    out = torch.zeros(4, 6, 1024)[..., ::2]
    result = attend(q, Selection(cache, slots), scale=0.05, value_dim=512, out=out)
    assert result.out is out
    exact = selected_attention(q, [Selection(cache, slots)], scale=0.05, value_dim=512)
    bounds.agree(out, exact.out, exact.out_error)


def test_query_as_a_pair_with_a_transposed_member() -> None:
    cache = filled("v32-fp8", 100)
    latent = torch.randn(6, 4, 512).transpose(0, 1)
    rope = torch.randn(4, 6, 64)
    slots = random_slots(4, 9, 100)
    packed = attend(torch.cat((latent, rope), -1), Selection(cache, slots), scale=0.05, value_dim=512)
    pair = attend((latent, rope), Selection(cache, slots), scale=0.05, value_dim=512)
    assert torch.equal(packed.out, pair.out)


def test_more_rows_than_fit_at_once_and_no_rows_at_all() -> None:
    cache = filled("v32-fp8", 300)
    q = torch.randn(40, 2, 576)
    slots = random_slots(40, 1024, 300)
    check(q, [Selection(cache, slots)])
    none = attend(q[:0], Selection(cache, slots[:0]), scale=0.05, value_dim=512)
    assert none.out.shape == (0, 2, 512)
    narrow = attend(q, Selection(cache, slots[:, :0]), scale=0.05, value_dim=512)
    assert (narrow.out == 0).all()
    assert (narrow.lse == -torch.inf).all()


def test_70000_query_tokens() -> None:
    cache = filled("v32-bf16", 16, latent=16, rope=0)
    q = torch.randn(70000, 1, 16)
    slots = random_slots(70000, 2, 16)
    result = attend(q, Selection(cache, slots), scale=0.05, value_dim=16)
    last = selected_attention(q[-3:], [Selection(cache, slots[-3:])], scale=0.05, value_dim=16)
    bounds.agree(result.out[-3:], last.out, last.out_error)


def test_one_row_does_not_depend_on_the_others() -> None:
    cache = filled("v32-fp8", 200)
    q, slots = torch.randn(30, 4, 576), random_slots(30, 600, 200)
    together = attend(q, Selection(cache, slots), scale=0.05, value_dim=512)
    alone = attend(q[7:8], Selection(cache, slots[7:8]), scale=0.05, value_dim=512)
    exact = selected_attention(q[7:8], [Selection(cache, slots[7:8])], scale=0.05, value_dim=512)
    for found in (together.out[7:8], alone.out):
        bounds.agree(found, exact.out, exact.out_error)


BAD = {
    "q rank": (lambda a: a | {"q": a["q"][0]}, ValueError, r"q must be of shape \[T, H, D=576\], got \[4, 576\]"),
    "q width": (lambda a: a | {"q": a["q"][..., :512]}, ValueError, "q must be of shape .*576.* rows are 576 wide"),
    "q dtype": (lambda a: a | {"q": a["q"].int()}, TypeError, "q must be bfloat16 or .* got int32; convert"),
    "q type": (lambda a: a | {"q": 3}, TypeError, "q must be a tensor"),
    "q pair": (lambda a: a | {"q": (a["q"],)}, ValueError, "q must be one tensor or a pair"),
    "heads": (lambda a: a | {"q": torch.randn(2, 129, 576)}, ValueError, "q must be of 1 to 128 heads, got 129"),
    "no selections": (lambda a: a | {"selections": []}, ValueError, "selections must be at least one"),
    "not a selection": (lambda a: a | {"selections": [5]}, TypeError, "selections must be Selections, got list"),
    "slots dtype": (lambda a: change(a, slots=a["s"].slots.long()), TypeError, r"slots must be int32, got int64"),
    "slots rows": (lambda a: change(a, slots=a["s"].slots[:1]), ValueError, r"selections\[0\].slots .* one row of"),
    "lengths rows": (lambda a: change(a, lengths=torch.zeros(3, dtype=torch.int32)), ValueError, "lengths must be of"),
    "lengths negative": (
        lambda a: change(a, lengths=torch.tensor([-1, 2], dtype=torch.int32)),
        ValueError,
        "lengths must be between 0 and 5, got a value of -1",
    ),
    "lengths too large": (
        lambda a: change(a, lengths=torch.tensor([1, 6], dtype=torch.int32)),
        ValueError,
        "lengths must be between 0 and 5, got a value of 6",
    ),
    "scale nan": (lambda a: a | {"scale": float("nan")}, ValueError, "scale must be finite"),
    "scale zero": (lambda a: a | {"scale": 0.0}, ValueError, "scale must be finite and > 0, got 0.0"),
    "scale type": (lambda a: a | {"scale": "x"}, TypeError, "scale must be a number"),
    "q_scale nan": (lambda a: a | {"q_scale": torch.tensor([float("nan")])}, ValueError, "q_scale must be finite"),
    "value_dim": (lambda a: a | {"value_dim": 577}, ValueError, "value_dim must be between 1 and 576, got 577"),
    "splits": (lambda a: a | {"splits": 0}, ValueError, "splits must be >= 1, got 0"),
    "sink shape": (lambda a: a | {"sink": torch.zeros(3)}, ValueError, "sink must be of shape .*H=4.* one per query"),
    "sink dtype": (lambda a: a | {"sink": torch.zeros(4).double()}, TypeError, "sink must be float32"),
    "sink nan": (lambda a: a | {"sink": torch.full((4,), torch.nan)}, ValueError, "sink must be free of NaN"),
    "out shape": (lambda a: a | {"out": torch.zeros(2, 4, 511)}, ValueError, "out must be of shape"),
    "lse_base": (lambda a: a | {"lse_base": "10"}, ValueError, "lse_base must be one of 'e', '2'"),
    "backend": (
        lambda a: a | {"backend": "cuda-magic"},
        ValueError,
        "backend must be 'auto' or one of hopper, triton, ref",
    ),
    "device": (lambda a: a | {"q": a["q"].to("meta")}, ValueError, "cache must be on meta like q, got cpu"),
}


def change(arguments: dict, **fields) -> dict:
    selection = arguments["s"]
    fields = {"slots": selection.slots, "lengths": selection.lengths} | fields
    return arguments | {"selections": [Selection(selection.cache, **fields)]}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_with_a_remedy(case: str) -> None:
    cache = filled("v32-fp8", 64)
    selection = Selection(cache, random_slots(2, 5, 64))
    arguments = {
        "q": torch.randn(2, 4, 576),
        "selections": [selection],
        "scale": 0.05,
        "value_dim": 512,
        "s": selection,
    }
    spoil, kind, message = BAD[case]
    arguments = spoil(arguments)
    del arguments["s"]
    with pytest.raises(kind, match=message):
        attend(**arguments)


def test_widths_of_all_caches_must_agree() -> None:
    v32, v4 = filled("v32-fp8", 64), filled("v4-fp8", 64)
    slots = random_slots(2, 5, 64)
    with pytest.raises(ValueError, match=r"selections\[1\].cache must be 576 wide, got 512"):
        attend(torch.randn(2, 4, 576), [Selection(v32, slots), Selection(v4, slots)], scale=0.1, value_dim=512)


def test_positions_are_translated_on_the_way() -> None:
    cache = filled("v32-fp8", 128, 16)
    table = torch.tensor([[3, 1, -1], [0, 7, 5]], dtype=torch.int32)
    ids = torch.tensor([1, 0, 1, 0], dtype=torch.int32)
    positions = torch.randint(-2, 60, (4, 20), dtype=torch.int32)
    lengths = torch.tensor([20, 20, 5, 0], dtype=torch.int32)
    q = torch.randn(4, 3, 576)
    slots = translate_positions(positions, ids, table, page_size=16).slots
    expected = attend(q, Selection(cache, slots, lengths), scale=0.05, value_dim=512)
    fused = attend(q, Selection(cache, positions, lengths, ids, table), scale=0.05, value_dim=512)
    assert torch.equal(fused.out, expected.out)
    with pytest.raises(ValueError, match=r"selections\[0\].block_table must be given with the other"):
        attend(q, Selection(cache, positions, None, ids), scale=0.05, value_dim=512)
    with pytest.raises(ValueError, match=r"selections\[0\].request_ids must be between 0 and 1"):
        attend(q, Selection(cache, positions, None, ids + 1, table), scale=0.05, value_dim=512)
