"""Scores, and scores with top-k in one call, against a plain scorer and sort."""

import pytest
import torch
from seeds import reseed, seed_of
from selecting import select

from tamis import PagedCache, PagePool
from tamis.cache.layout import index_fp8, index_mxfp4, named, rows
from tamis.ops import gather_index, index_scores, index_topk, ragged_scores, topk_positions, write_kv
from tamis.ops.index import reference
from tamis.ops.index.operations import IndexScores, TopkPositions

FP32 = rows(torch.float32, latent=16, rope=0)


def make(layout, lengths: list[int], dim: int, page_size: int = 16):
    pool = PagePool(100, page_size, seed=seed_of(3))
    cache = PagedCache(layout, 100, page_size)
    keys = []
    for request, length in enumerate(lengths):
        pool.extend(request, length)
        keys.append(torch.randn(length, dim))
        write_kv(keys[-1], cache, pool.slots(request, 0, length))
    return cache, pool.block_table(list(range(len(lengths)))), keys


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def plain_scores(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """One token's scores of keys [n, D], head by head."""
    total = torch.zeros(len(keys), dtype=torch.float64)
    for head in range(len(q)):
        total += weights[head].double() * torch.relu(keys.double() @ q[head].double())
    return total


def stable_top(scores: torch.Tensor, k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda j: (-float(scores[j]), j))[:k]


def stored(cache: PagedCache, table: torch.Tensor, length: int) -> torch.Tensor:
    slots = [int(table[p // cache.page_size]) * cache.page_size + p % cache.page_size for p in range(length)]
    return cache.read(torch.tensor(slots, dtype=torch.int64))


@pytest.mark.parametrize("layout", ["index-fp8", "exact", "index-mxfp4", "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("page_size", [1, 16, 61])
def test_paged_scores(layout: str, dtype: torch.dtype, page_size: int) -> None:
    plain = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    made = rows(plain[layout], latent=32, rope=0) if layout in plain else index_fp8(dim=32)
    made = index_mxfp4(dim=32) if layout == "index-mxfp4" else made
    cache, table, _ = make(made, [50, 40, 3] if page_size > 1 else [30, 9, 3], 32, page_size)
    if layout == "exact":  # a scale that is no power of two is used as it is stored
        cache.field(made.scales)[:] = torch.rand_like(cache.field(made.scales)) + 0.1
    visible = ints([30, 29, 9, 3, 1, 0, -4])
    ids = ints([0, 0, 1, 2, 1, 2, 0])
    q, weights = torch.randn(7, 5, 32).to(dtype), torch.randn(7, 5)
    found = index_scores(q, weights, cache, ids, table, visible)
    assert found.dtype == torch.float32
    assert found.shape == (7, table.shape[1] * page_size)
    for t in range(7):
        seen = max(0, int(visible[t]))
        expected = plain_scores(q[t].float(), weights[t], stored(cache, table[ids[t]], seen))
        torch.testing.assert_close(found[t, :seen].double(), expected, rtol=1e-5, atol=1e-5)
        assert (found[t, seen:] == -torch.inf).all()


def test_scores_below_zero_stay_below_zero() -> None:
    cache, table, _ = make(FP32, [20], 16)
    q, weights = torch.randn(1, 3, 16), -torch.rand(1, 3) - 0.1
    found = index_scores(q, weights, cache, ints([0]), table, ints([20]))[0, :20]
    assert (found <= 0).all()
    assert (found < -0.1).any()


def test_absent_pages_score_minus_infinity() -> None:
    cache, table, _ = make(FP32, [60], 16)
    table[0, 1], table[0, 2] = -1, 2**30
    q, weights = torch.randn(1, 3, 16), torch.rand(1, 3)
    found = index_scores(q, weights, cache, ints([0]), table, ints([60]))[0]
    assert (found[16:48] == -torch.inf).all()
    assert found[:16].isfinite().all()
    assert found[48:60].isfinite().all()
    assert index_topk(q, weights, cache, ints([0]), table, ints([60]), 64)[0, :28].tolist() == [
        *range(16),
        *range(48, 60),
    ]


def test_nan_keys_reach_no_other_score_and_no_selection() -> None:
    cache, table, _ = make(FP32, [60], 16)
    q, weights = torch.randn(2, 3, 16), torch.rand(2, 3)
    usual = index_scores(q, weights, cache, ints([0, 0]), table, ints([60, 5]))
    for position in (7, 40):
        slot = int(table[0, position // 16]) * 16 + position % 16
        write_kv(torch.full((1, 16), torch.nan), cache, torch.tensor([slot]))
    found = index_scores(q, weights, cache, ints([0, 0]), table, ints([60, 5]))
    assert found[0, [7, 40]].isnan().all()
    found[0, [7, 40]] = usual[0, [7, 40]]
    assert torch.equal(found, usual)
    chosen = index_topk(q, weights, cache, ints([0, 0]), table, ints([60, 5]), 60)
    assert chosen[0, :58].tolist() == [p for p in range(60) if p not in (7, 40)]
    assert (chosen[0, 58:] == -1).all()


def test_width_and_output_buffer() -> None:
    cache, table, _ = make(FP32, [50], 16)
    q, weights, ids, visible = torch.randn(2, 3, 16), torch.randn(2, 3), ints([0, 0]), ints([33, 20])
    usual = index_scores(q, weights, cache, ids, table, visible)
    assert torch.equal(index_scores(q, weights, cache, ids, table, visible, width=33), usual[:, :33])
    wide = index_scores(q, weights, cache, ids, table, visible, width=300)
    assert torch.equal(wide[:, : usual.shape[1]], usual)
    assert (wide[:, 33:] == -torch.inf).all()
    block = torch.full((2, 90), 7.0)
    out = block[:, :40]
    assert index_scores(q, weights, cache, ids, table, visible, out=out) is out
    assert torch.equal(out, usual[:, :40])
    assert (block[:, 40:] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scaled", [True, False])
def test_ragged_scores(dtype: torch.dtype, scaled: bool) -> None:
    total = 700
    keys, scales = torch.randn(total, 32).to(dtype), torch.rand(total) + 0.1 if scaled else None
    q, weights = torch.randn(6, 5, 32).to(dtype), torch.randn(6, 5)
    starts, ends = ints([0, 10, 690, 50, -5, 300]), ints([700, 640, 900, 50, 3, 200])
    found = ragged_scores(q, weights, keys, scales, starts, ends)
    assert found.shape == (6, total)
    whole = keys.float() * (1.0 if scales is None else scales.unsqueeze(1))
    for t in range(6):
        low, high = max(0, int(starts[t])), min(total, int(ends[t]))
        high = max(low, high)
        expected = plain_scores(q[t].float(), weights[t], whole[low:high])
        torch.testing.assert_close(found[t, low:high].double(), expected, rtol=1e-5, atol=1e-5)
        assert (found[t, :low] == -torch.inf).all()
        assert (found[t, high:] == -torch.inf).all()


def test_gathered_keys_score_like_paged_ones() -> None:
    lengths = [50, 0, 37]
    cache, table, _ = make("index-fp8", [max(1, n) for n in lengths], 128)
    keys, scales = gather_index(cache, table, ints(lengths), rows=100)
    q, weights = torch.randn(4, 8, 128).to(torch.float8_e4m3fn), torch.rand(4, 8)
    ids, visible = ints([0, 0, 2, 2]), ints([50, 31, 37, 4])
    paged = index_scores(q, weights, cache, ids, table, visible)
    starts = ints([0, 0, 50, 50])
    ragged = ragged_scores(q, weights, keys, scales, starts, starts + visible)
    for t in range(4):
        seen = int(visible[t])
        torch.testing.assert_close(ragged[t, starts[t] : starts[t] + seen], paged[t, :seen], rtol=1e-6, atol=1e-6)


def test_what_a_device_may_hold_does_no_harm() -> None:
    """Values are checked on the host only; on a device they are skipped."""
    cache, table, _ = make(FP32, [60], 16)
    q, weights, many = torch.randn(6, 3, 16), torch.randn(6, 3), 2**31 - 1
    ids, lengths = ints([0, -1, 1, many, 0, 0]), ints([60, 60, 60, 60, many, -many])
    width = table.shape[1] * 16
    out = torch.empty(6, width)
    reference.index_scores(IndexScores(q, weights, cache, ids, table, lengths, out, "reference"))
    assert (out[[1, 2, 3, 5]] == -torch.inf).all()
    assert out[4, :60].isfinite().all()
    usual = index_scores(q[:1], weights[:1], cache, ints([0]), table, ints([60]))
    assert torch.equal(out[:1], usual)
    found = select(reference, q, weights, cache, ids, table, lengths, 20, 1 << 20, "reference")
    assert torch.equal(found, reference.topk_positions(TopkPositions(out, lengths, 20, None, None, None, "reference")))
    slots = reference.topk_positions(TopkPositions(out, lengths, 20, ids, table, 16, "reference"))
    assert (slots[[1, 2, 3, 5]] == -1).all()
    assert (slots[0] >= 0).all()


def test_nothing_to_score() -> None:
    cache, table, _ = make(FP32, [20], 16)
    none = torch.randn(0, 3, 16), torch.randn(0, 3), cache, ints([]), table, ints([])
    assert index_scores(*none).shape == (0, table.shape[1] * 16)
    assert index_topk(*none, 5).shape == (0, 5)
    q, weights = torch.randn(2, 3, 16), torch.randn(2, 3)
    assert ragged_scores(q, weights, torch.randn(0, 16), None, ints([0, 0]), ints([0, 9])).shape == (2, 0)
    assert (index_topk(q, weights, cache, ints([0, 0]), table, ints([0, -1]), 5) == -1).all()
    empty = table[:, :0]
    assert index_scores(q, weights, cache, ints([0, 0]), empty, ints([0, 0])).shape == (2, 0)
    assert (index_topk(q, weights, cache, ints([0, 0]), empty, ints([0, 0]), 5) == -1).all()


@pytest.mark.parametrize("heads", [1, 8])
@pytest.mark.parametrize("k", [1, 7, 40, 100])
def test_selects_the_highest_scores_in_ascending_order(heads: int, k: int) -> None:
    lengths = [50, 40, 3]
    cache, table, keys = make(FP32, lengths, 16)
    ids = ints([0, 0, 1, 2, 1, 2])
    visible = ints([50, 41, 40, 3, 1, 0])
    q, weights = torch.randn(6, heads, 16), torch.randn(6, heads)
    found = index_topk(q, weights, cache, ids, table, visible, k)
    assert found.shape == (6, k)
    for t in range(6):
        known = keys[int(ids[t])][: int(visible[t])]
        expected = sorted(stable_top(plain_scores(q[t], weights[t], known).float(), k))
        assert found[t, : len(expected)].tolist() == expected
        assert (found[t, len(expected) :] == -1).all()


def test_plateaus_of_zeros_resolve_to_the_lowest_positions() -> None:
    cache, table, _ = make(rows(torch.float32, latent=8, rope=0), [64], 8)
    q = torch.randn(1, 4, 8)
    weights = torch.zeros(1, 4)
    assert index_topk(q, weights, cache, ints([0]), table, ints([64]), 10)[0].tolist() == list(range(10))


def test_fp8_keys_are_scored_as_stored() -> None:
    cache, table, _ = make("index-fp8", [70], 128)
    q, weights = torch.randn(1, 8, 128), torch.randn(1, 8)
    scores = plain_scores(q[0], weights[0], stored(cache, table[0], 70)).float()
    found = index_topk(q, weights, cache, ints([0]), table, ints([70]), 20)[0].tolist()
    assert found == sorted(stable_top(scores, 20))


def test_packed_keys_are_scored_as_stored_in_pages_and_in_a_list() -> None:
    """Scores are those of what reading the cache gives, in float64, however the keys come."""
    cache, table, _ = make("index-mxfp4", [70, 33], 128)
    keys, scales = gather_index(cache, table, ints([70, 33]), rows=110)
    assert (keys.dtype, keys.shape) == (torch.uint8, (110, 64))
    assert (scales.dtype, scales.shape) == (torch.uint8, (110, 4))
    assert not keys[103:].any()
    q, weights = torch.randn(3, 5, 128), torch.randn(3, 5)
    ids, seen = ints([0, 1, 1]), ints([70, 33, 9])
    paged = index_scores(q, weights, cache, ids, table, seen)
    listed = ragged_scores(q, weights, keys, scales, ints([0, 70, 70]), ints([70, 103, 79]))
    for token, (request, length, start) in enumerate(((0, 70, 0), (1, 33, 70), (1, 9, 70))):
        expected = plain_scores(q[token], weights[token], stored(cache, table[request], length))
        assert torch.allclose(paged[token, :length].double(), expected, rtol=1e-6, atol=1e-5)
        assert torch.equal(listed[token, start : start + length], paged[token, :length])
    with pytest.raises(ValueError, match=r"^key_scales must be .*one byte per 32 values"):
        ragged_scores(q, weights, keys, scales[:, :3], seen, seen)
    with pytest.raises(TypeError, match=r"^key_scales must be "):
        ragged_scores(q, weights, keys, None, seen, seen)


def long_case(layout="index-fp8"):
    """Several requests longer than a block of keys, tokens of all of them mixed."""
    lengths = [1300, 700, 513, 5]
    cache, table, _ = make(named(layout), lengths, 128, 64)
    reseed(5)
    q, weights = torch.randn(9, 3, 128), torch.randn(9, 3)
    ids = ints([0, 3, 1, 0, 2, 1, 0, 2, 0])
    visible = ints([1300, 5, 700, 640, 513, 1, 1024, 512, 1])
    return q, weights, cache, ids, table, visible


@pytest.mark.parametrize(
    "layout", ["index-fp8", "index-mxfp4", rows(torch.float32, latent=128, rope=0)], ids=["fp8", "mxfp4", "fp32"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_a_score_depends_on_its_token_and_key_alone(layout, dtype: torch.dtype) -> None:
    q, weights, cache, ids, table, visible = long_case(layout)
    q = q.to(dtype)
    together = index_scores(q, weights, cache, ids, table, visible)
    # Odd widths of everything around a token, and its own place in memory, must not show in any bit.
    for t in range(9):
        one = index_scores(q[t : t + 1], weights[t : t + 1], cache, ids[t : t + 1], table, visible[t : t + 1])
        assert torch.equal(one[0], together[t])
    for length in (1, 77, 511, 513, 1299):
        shorter = index_scores(q[:1], weights[:1], cache, ids[:1], table, ints([length]))
        assert torch.equal(shorter[0, :length], together[0, :length])
    order = torch.randperm(9)
    mixed = index_scores(q[order], weights[order], cache, ids[order], table, visible[order])
    assert torch.equal(mixed, together[order])


@pytest.mark.parametrize("workspace", [1, 100_000, 300_000, 1 << 28])
@pytest.mark.parametrize("k", [1, 300, 2048])
def test_the_fused_selection_is_that_of_the_two_steps(workspace: int, k: int) -> None:
    q, weights, cache, ids, table, visible = long_case()
    expected = topk_positions(index_scores(q, weights, cache, ids, table, visible), visible, k)
    found = index_topk(q, weights, cache, ids, table, visible, k, workspace_bytes=workspace)
    assert torch.equal(found, expected)
    for t in range(9):
        one = slice(t, t + 1)
        alone = index_topk(q[one], weights[one], cache, ids[one], table, visible[one], k, workspace_bytes=workspace)
        assert torch.equal(alone[0], expected[t])


def test_positions_go_to_a_given_tensor() -> None:
    q, weights, cache, ids, table, visible = long_case()
    expected = index_topk(q, weights, cache, ids, table, visible, 20)
    buffer = torch.full((12, 20), -7, dtype=torch.int32)
    out = buffer[2:11]
    for workspace in (1, 1 << 28):
        buffer.fill_(-7)
        given = (q, weights, cache, ids, table, visible, 20)
        assert index_topk(*given, workspace_bytes=workspace, out=out) is out
        assert torch.equal(out, expected)
        assert (buffer[[0, 1, 11]] == -7).all()


def test_a_wrong_output_is_refused_before_anything_is_written() -> None:
    q, weights, cache, ids, table, visible = long_case()
    room = torch.full((9, 40), -7, dtype=torch.int32)
    with torch.inference_mode():
        frozen = torch.zeros(9, 20, dtype=torch.int32)
    wrong = {
        "out must be of shape \\[T=9, K=20\\], got \\[9, 40\\]": room,
        "out must be int32, got int64": room[:, :20].long(),
        "out must be contiguous, got strides \\(40, 1\\)": room[:, :20],
        r"out must be a tensor \[T, K\], got list": room[:, :20].tolist(),
        "out must be on cpu, got a tensor on meta": room[:, :20].to("meta"),
        "out must be a tensor that may be written here": frozen,
        "out must be separate from all inputs and caches": q.view(torch.int32).view(-1)[:180].view(9, 20),
    }
    if torch.is_inference_mode_enabled():
        del wrong["out must be a tensor that may be written here"]  # here it may
    for message, out in wrong.items():
        with pytest.raises((TypeError, ValueError), match=message):
            index_topk(q, weights, cache, ids, table, visible, 20, out=out)
    assert (room == -7).all()


def test_the_workspace_bounds_how_many_tokens_have_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    q, weights, cache, ids, table, visible = long_case()
    sizes, usual = [], reference.index_scores

    def spied(call: IndexScores) -> None:
        sizes.append(call.out.numel() * reference.BYTES_PER_SCORE)
        usual(call)

    monkeypatch.setattr(reference, "index_scores", spied)
    index_topk(q, weights, cache, ids, table, visible, 8, workspace_bytes=200_000)
    assert len(sizes) > 1
    assert max(sizes) <= 200_000


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"q": torch.randn(2, 4, 9)}, ValueError, "q must be of shape .*D=8"),
        ({"q": torch.randn(2, 4, 8).double()}, TypeError, "q must be bfloat16 or float16 or float32 or float8_e4m3fn"),
        ({"weights": torch.randn(2, 3)}, ValueError, "weights must be of shape"),
        ({"weights": None}, TypeError, "weights must be a tensor"),
        ({"request_ids": ints([0, 0, 0])}, ValueError, "request_ids .* one per query token"),
        ({"request_ids": ints([0, 4])}, ValueError, "request_ids must be between 0 and 0"),
        ({"lengths": ints([1, 999])}, ValueError, "lengths must be between 0 and 64"),
        (
            {"cache": PagedCache("v32-fp8", 4, 16)},
            ValueError,
            "cache must be index-fp8, index-mxfp4 or unq",
        ),
        (
            {"cache": PagedCache("plain-fp8", 4, 16)},
            ValueError,
            "cache must be index-fp8, index-mxfp4 or unq",
        ),
        ({"k": 0}, ValueError, "k must be between 1 and 4096"),
        ({"k": 4097}, ValueError, "k must be between 1 and 4096"),
        ({"workspace_bytes": 0}, ValueError, "workspace_bytes must be >= 1"),
        ({"width": 63, "lengths": ints([1, 64])}, ValueError, "lengths must be between 0 and 63"),
        ({"out": torch.zeros(2, 65), "width": 64}, ValueError, "out must be of shape .*S=64"),
        ({"out": torch.zeros(64, 2).t()}, ValueError, "out must be contiguous along its rows"),
    ],
)
def test_bad_input_is_refused_with_a_remedy(fields, kind, message) -> None:
    cache, table, _ = make(rows(torch.float32, latent=8, rope=0), [64], 8)
    arguments = {
        "q": torch.randn(2, 4, 8),
        "weights": torch.randn(2, 4),
        "cache": cache,
        "request_ids": ints([0, 0]),
        "block_table": table,
        "lengths": ints([1, 1]),
    } | fields
    fused = {"k", "workspace_bytes"} & set(fields)
    scored = {"width", "out"} & set(fields)
    if not scored:
        with pytest.raises(kind, match=message):
            index_topk(**({"k": 3} | arguments))
    if not fused:
        with pytest.raises(kind, match=message):
            index_scores(**arguments)


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"q": torch.randn(2, 4, 9)}, ValueError, "q must be of shape .*as wide as the keys"),
        ({"keys": torch.randn(3, 8, 1)}, ValueError, "keys must be of shape"),
        ({"keys": torch.zeros(3, 4, dtype=torch.uint8)}, ValueError, "keys must be of shape .* multiple of 32, got"),
        ({"key_scales": torch.ones(2)}, ValueError, "key_scales .* one per key"),
        ({"starts": ints([0])}, ValueError, "starts .* one per query token"),
        ({"ends": torch.tensor([0, 1])}, TypeError, "ends must be int32"),
    ],
)
def test_bad_ragged_input_is_refused_with_a_remedy(fields, kind, message) -> None:
    arguments = {
        "q": torch.randn(2, 4, 8),
        "weights": torch.randn(2, 4),
        "keys": torch.randn(3, 8),
        "key_scales": None,
        "starts": ints([0, 0]),
        "ends": ints([3, 3]),
    }
    with pytest.raises(kind, match=message):
        ragged_scores(**(arguments | fields))
