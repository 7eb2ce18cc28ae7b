"""Selection in training, the indexer's target and its losses: against inference, float64 autograd and each other."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from training import WITH_GRADIENTS, dense_attention, hostile_slots, normal, relative

from tamis import IndexRecipe, PagedCache
from tamis.cache.layout import index_fp8, index_mxfp4, plain_fp8, rows
from tamis.ops import (
    index_topk,
    pack_index_query,
    quantise_index_query,
    ragged_scores,
    rotate_index,
    topk_positions,
    unpack_index_query,
    write_index_keys,
)
from tamis.ops.index import gradients
from tamis.train import (
    Pack,
    Rows,
    attend_rows,
    index_loss,
    index_target,
    normalise_target,
    select_rows,
    warmup_loss,
)

MODES = pytest.mark.parametrize("deterministic", [False, True])
LENGTHS = (3, 0, 40, 17)
BOUNDS = (0, 3, 3, 43, 60)


def index_inputs(tokens: int, keys: int, *, heads: int = 2, dim: int = 4, dtype=torch.float64) -> list[Tensor]:
    shapes = ((tokens, heads, dim), (keys, dim), (tokens, heads))
    return [normal(*shape, dtype=dtype).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("workspace", [1, 5000, 256 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_set_of_topk_positions(dtype: torch.dtype, workspace: int) -> None:
    pack = Pack.of(BOUNDS)
    q, keys, weights = index_inputs(60, 60, dim=16, dtype=dtype)
    with torch.no_grad():
        scores = ragged_scores(q, weights, keys, None, pack.starts, pack.ends)
        expected = topk_positions(scores, pack.ends, 7)
    found = select_rows(q, keys, weights, pack.starts, pack.ends, 7, workspace_bytes=workspace)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("workspace", [1, 1000, 256 << 20])
def test_tokens_that_see_nothing_have_bounds_of_any_kind(workspace: int) -> None:
    """Padding is often given as an end at the token itself, or before its start."""
    starts = torch.tensor([0, 9, 2, 9, 30, 4, -3], dtype=torch.int32)
    ends = torch.tensor([2, 9, 5, 3, 30, 6, -5], dtype=torch.int32)
    q, keys, weights = (x.detach() for x in index_inputs(7, 9, dtype=torch.float32))
    found = select_rows(q, keys, weights, starts, ends, 3, workspace_bytes=workspace)
    seen = [[0, 1, -1], [-1] * 3, [2, 3, 4], [-1] * 3, [-1] * 3, [4, 5, -1], [-1] * 3]
    assert found.tolist() == seen


SERVED = {"bf16": None, "index-fp8": index_fp8, "index-mxfp4": index_mxfp4}


@pytest.mark.parametrize("layout", SERVED)
@pytest.mark.parametrize("hadamard", [False, True])
def test_the_rows_that_an_engine_selects_from_its_pages(layout: str, hadamard: bool) -> None:
    """Queries and keys go through the functions of inference and, rotated, through `select_rows`."""
    dim, page, recipe = 64, 4, IndexRecipe(rope_dim=0, hadamard=hadamard)
    pack = Pack.of(BOUNDS)
    q, keys, weights = (x.detach().bfloat16() for x in index_inputs(60, 60, heads=3, dim=dim))
    made = SERVED[layout]
    cache = PagedCache(rows(torch.bfloat16, latent=dim, rope=0) if made is None else made(dim=dim), 40, page)
    table, first = torch.randperm(40).int().view(4, 10), 0
    for request, length in enumerate(LENGTHS):
        own = torch.arange(length)
        slots = table[request][own // page].long() * page + own % page
        write_index_keys(keys[first : first + length], cache, slots, recipe)
        first += length
    factor = (3 * dim) ** -0.5
    query, folded = q, weights.float() * factor
    if layout == "index-fp8":
        query, folded = quantise_index_query(q, weights, recipe)
    elif layout == "index-mxfp4":
        packed = pack_index_query(q, weights, recipe)
        query, folded = unpack_index_query(packed.values, packed.scales), packed.weights
    elif hadamard:
        query = rotate_index(q, recipe).bfloat16()
    served = index_topk(query, folded, cache, pack.request_ids, table, pack.positions + 1, 7)
    mine, my_keys = (rotate_index(x, recipe).bfloat16() for x in (q, keys))
    found = select_rows(
        mine, my_keys, weights.float() * factor, pack.starts, pack.ends, 7, layout=None if made is None else layout
    )
    assert torch.equal(found, pack.slots_of(served))


@pytest.mark.parametrize("sink", [False, True])
def test_targets_are_probabilities_of_the_joint_softmax(sink: bool) -> None:
    q, own, window = normal(5, 3, 8), normal(9, 8), normal(4, 8)
    slots, near = hostile_slots(5, 6, 9), hostile_slots(5, 3, 4)
    selections = [Rows(window, near), Rows(own, slots)]
    logit = normal(3) if sink else None
    lse = attend_rows(q, selections, scale=0.5, value_dim=8, sink=logit).lse
    found = index_target(q, selections, lse, scale=0.5, sink=logit)
    plain = index_target(q, selections, lse, scale=0.5, sink=logit, normalise=False)
    first = index_target(q, selections, lse, scale=0.5, sink=logit, of=0, normalise=False)
    for token in range(5):
        logits = [
            torch.stack(
                [0.5 * q[token] @ r[s] if 0 <= s < len(r) else torch.full((3,), -torch.inf).double() for s in row], 1
            )
            for r, row in ((window, near[token]), (own, slots[token]))
        ]
        joint = torch.cat([*logits, (torch.full((3,), -torch.inf).double() if logit is None else logit)[:, None]], 1)
        p = joint.softmax(1).nan_to_num(0.0).sum(0)
        assert relative(plain[token], p[3:9]) < 1e-12
        assert relative(first[token], p[:3]) < 1e-12
    sums = found.sum(1)
    assert torch.equal(sums == 0, plain.sum(1) == 0)
    assert relative(found, normalise_target(plain)) < 1e-12
    assert ((sums - 1).abs() < 1e-12)[sums > 0].all()


@WITH_GRADIENTS
@MODES
def test_finite_differences_of_the_sparse_loss(deterministic: bool) -> None:
    slots, target, factors = hostile_slots(6, 5, 7), torch.rand(6, 5).double(), torch.rand(6).double()
    target[1] = 0.0

    def loss(*inputs: Tensor) -> Tensor:
        return index_loss(*inputs, slots, target, token_weights=factors, deterministic=deterministic)

    assert gradcheck(loss, tuple(index_inputs(6, 7)))


def plain_loss(q: Tensor, keys: Tensor, weights: Tensor, slots: Tensor, target: Tensor) -> Tensor:
    """The loss of each token from its definition, differentiated by autograd."""
    losses = []
    for token in range(len(q)):
        known = [j for j, s in enumerate(slots[token].tolist()) if 0 <= s < len(keys)]
        if not known or float(target[token, known].sum()) == 0:
            continue
        scores = weights[token] @ torch.relu(q[token] @ keys[slots[token, known].long()].T)
        wanted = target[token, known]
        losses.append((torch.xlogy(wanted, wanted) - wanted * scores.log_softmax(0)).sum())
    return torch.stack(losses).sum()


@WITH_GRADIENTS
@MODES
@pytest.mark.parametrize("chunk", [1, 32 << 20])
def test_the_sparse_loss_against_autograd(chunk: int, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradients, "WORKING_BYTES", chunk)
    inputs, slots = index_inputs(9, 12), hostile_slots(9, 6, 12)
    target = normalise_target(torch.rand(9, 6).double())
    found = index_loss(*inputs, slots, target, deterministic=deterministic)
    expected = plain_loss(*inputs, slots, target)
    assert relative(found, expected) < 1e-12
    for one, other in zip(*(torch.autograd.grad(x, inputs) for x in (found, expected)), strict=True):
        assert relative(one, other) < 1e-12


@WITH_GRADIENTS
def test_the_indexer_has_no_gradient_at_its_target() -> None:
    q, keys, weights = index_inputs(5, 8)
    slots = torch.arange(8, dtype=torch.int32).expand(5, 8)
    scores = torch.einsum("th,thn->tn", weights, torch.relu(q @ keys.T))
    loss = index_loss(q, keys, weights, slots, scores.softmax(1).detach())
    assert abs(float(loss.detach())) < 1e-12
    for gradient in torch.autograd.grad(loss, (q, keys, weights)):
        assert gradient.abs().max() < 1e-12


@WITH_GRADIENTS
@MODES
def test_products_of_zero_have_torchs_slope(deterministic: bool) -> None:
    """The ReLU's slope at zero is zero. A key of zeros changes no score, and a query of zeros has no score."""
    inputs, slots = index_inputs(5, 6), torch.arange(6, dtype=torch.int32).expand(5, 6)
    with torch.no_grad():
        inputs[1][2], inputs[0][3] = 0.0, 0.0
    q, keys = normal(5, 2, 8), normal(6, 8)
    starts, ends = torch.zeros(5, dtype=torch.int32), torch.full((5,), 6, dtype=torch.int32)
    lse = (torch.einsum("thd,nd->thn", q, keys) * 0.3).logsumexp(2)
    target = index_target(q, Rows(keys, slots), lse, scale=0.3)
    expected = torch.autograd.grad(plain_loss(*inputs, slots, target), inputs)
    assert (expected[1][2] == 0).all()
    sparse = index_loss(*inputs, slots, target, deterministic=deterministic)
    dense = warmup_loss(q, keys, None, *inputs, starts, ends, scale=0.3)
    for loss in (sparse, dense):
        for one, other in zip(torch.autograd.grad(loss, inputs), expected, strict=True):
            assert relative(one, other) < 1e-12


@WITH_GRADIENTS
def test_keys_that_no_token_of_a_block_sees_may_hold_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of keys begin at fixed places, so they contain keys of padding. Bounds reach beyond the keys."""
    monkeypatch.setattr(gradients, "KEY_BLOCK", 4)
    inputs, q, keys = index_inputs(3, 9), normal(3, 2, 5), normal(9, 5)
    starts, ends = (torch.tensor(x, dtype=torch.int32) for x in ([-4, 6, 9], [3, 20, 9]))

    def step() -> list[Tensor]:
        loss = warmup_loss(q, keys, None, *inputs, starts, ends, scale=0.5)
        return [loss.detach(), *torch.autograd.grad(loss, inputs)]

    expected = step()
    with torch.no_grad():
        inputs[1][3:6] = torch.nan
        keys[3:6] = torch.nan
    for one, other in zip(step(), expected, strict=True):
        assert torch.equal(one, other)
    assert all((x[3:6] == 0).all() for x in step()[2:3])
    whole = torch.tensor([0, 6, 9], dtype=torch.int32), torch.tensor([3, 9, 9], dtype=torch.int32)
    loss = warmup_loss(q, keys, None, *inputs, *whole, scale=0.5)
    assert torch.equal(loss.detach(), expected[0])


@WITH_GRADIENTS
def test_second_derivatives_are_refused() -> None:
    """A loss keeps its gradients as constants: a penalty on them would be left out without an error."""
    inputs, slots = index_inputs(5, 7), hostile_slots(5, 4, 7)
    pack = Pack.of((0, 5))
    losses = (
        index_loss(*inputs, slots, torch.rand(5, 4).double()),
        warmup_loss(normal(5, 2, 4), normal(7, 4), None, *inputs, pack.starts, pack.ends, scale=0.5),
    )
    for loss in losses:
        with pytest.raises(ValueError, match="gradients of an index loss must be computed once, got create_graph=True"):
            torch.autograd.grad(loss, inputs, create_graph=True)


@WITH_GRADIENTS
@pytest.mark.parametrize("blocks", [(2, 3), (128, 512)])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_the_dense_loss_is_the_sparse_one_over_everything(
    per_head: bool, given: bool, blocks: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradients, "QUERY_BLOCK", blocks[0])
    monkeypatch.setattr(gradients, "KEY_BLOCK", blocks[1])
    pack = Pack.of((0, 1, 8, 13))
    starts, ends = pack.starts.clone(), pack.ends.clone()
    ends[5] = starts[5]  # padding
    inputs, factors = index_inputs(13, 13), torch.rand(13).double()
    q = normal(13, 3, 6)
    keys = normal(13, 3, 6) if per_head else normal(13, 6)
    logits = torch.einsum("thd,nhd->thn" if per_head else "thd,nd->thn", q, keys) * 0.3
    place = torch.arange(13)
    hidden = (place < starts[:, None]) | (place >= ends[:, None])
    p = logits.masked_fill(hidden[:, None], -torch.inf).softmax(2).nan_to_num(0.0)
    # A window and a sink outside of these keys take some of each head's probability.
    outside = normal(13, 3) if given else torch.full((13, 3), -torch.inf, dtype=torch.float64)
    if given:
        outside[9] = torch.inf  # a sink that takes everything: the token has no target
    own = logits.masked_fill(hidden[:, None], -torch.inf).logsumexp(2)
    lse = torch.logaddexp(own, outside)
    target = normalise_target((p * (own - lse).exp().nan_to_num(0.0)[..., None]).sum(1))
    slots = torch.where(hidden, -1, place).int()
    expected = index_loss(*inputs, slots, target, token_weights=factors)
    found = warmup_loss(q, keys, lse if given else None, *inputs, starts, ends, scale=0.3, token_weights=factors)
    assert relative(found, expected) < 1e-12
    for one, other in zip(*(torch.autograd.grad(x, inputs) for x in (found, expected)), strict=True):
        assert relative(one, other) < 1e-12


@WITH_GRADIENTS
def test_finite_differences_of_the_dense_loss() -> None:
    pack, q, keys = Pack.of((0, 2, 6)), normal(6, 2, 5), normal(6, 5)

    def loss(*inputs: Tensor) -> Tensor:
        return warmup_loss(q, keys, None, *inputs, pack.starts, pack.ends, scale=0.5)

    assert gradcheck(loss, tuple(index_inputs(6, 6)))


def test_targets_of_dense_attention() -> None:
    """`index_target` over everything is the mean over heads of what dense attention computes."""
    q, own = normal(4, 3, 8), normal(6, 8)
    slots = torch.arange(6, dtype=torch.int32).expand(4, 6)
    selection = Rows(own, slots)
    lse = dense_attention(q, [selection], scale=0.2, value_dim=8).lse
    expected = (torch.einsum("thd,nd->thn", q, own) * 0.2).softmax(2).mean(1)
    assert relative(index_target(q, selection, lse, scale=0.2), expected) < 1e-12


@pytest.mark.parametrize("sink", [False, True])
def test_targets_of_heads_on_two_ranks_are_summed_before_they_are_normalised(sink: bool) -> None:
    q, own, window, slots = normal(5, 3, 8), normal(9, 8), normal(4, 8), hostile_slots(5, 6, 9)
    selections = [Rows(window, hostile_slots(5, 3, 4)), Rows(own, slots)]
    logit = normal(3) if sink else None
    lse = attend_rows(q, selections, scale=0.5, value_dim=8, sink=logit).lse
    expected = index_target(q, selections, lse, scale=0.5, sink=logit)
    parts = []
    for heads in (slice(0, 1), slice(1, 3)):
        given = {"scale": 0.5, "sink": None if logit is None else logit[heads]}
        parts.append(index_target(q[:, heads], selections, lse[:, heads], normalise=False, **given))
    assert relative(normalise_target(parts[0] + parts[1]), expected) < 1e-12


def test_wrong_arguments_are_refused_by_name() -> None:
    q, keys, weights = index_inputs(5, 7)
    slots, target = hostile_slots(5, 4, 7), torch.rand(5, 4).double()
    bound = torch.zeros(5, dtype=torch.int32)
    wrong = [
        (ValueError, "target must be free of negative", lambda: index_loss(q, keys, weights, slots, target - 1)),
        (ValueError, "target must be free of .* infinity", lambda: index_loss(q, keys, weights, slots, target / 0)),
        (TypeError, "target must be float64", lambda: index_loss(q, keys, weights, slots, target.float())),
        (TypeError, "index_keys must be float64 like", lambda: index_loss(q, keys.float(), weights, slots, target)),
        (ValueError, "weights must be of shape", lambda: index_loss(q, keys, weights[:, :1], slots, target)),
        (ValueError, "k must be between 1 and 4096", lambda: select_rows(q, keys, weights, bound, bound, 5000)),
        (ValueError, "starts must be of shape", lambda: select_rows(q, keys, weights, bound[:2], bound, 3)),
        (
            ValueError,
            "layout must be index-fp8, index-mxfp4 or unquantised rows, got plain-fp8",
            lambda: select_rows(q, keys, weights, bound, bound, 3, layout=plain_fp8(latent=4, rope=0)),
        ),
        (
            ValueError,
            r"keys must be of shape \[N=7, D=4\]",
            lambda: warmup_loss(q, keys[:, :3], None, q, keys, weights, bound, bound, scale=1.0),
        ),
        (
            ValueError,
            "lse must be of shape",
            lambda: index_target(q, Rows(keys, slots), torch.zeros(5, 3).double(), scale=1.0),
        ),
        (ValueError, "of must be", lambda: index_target(q, Rows(keys, slots), weights, scale=1.0, of=1)),
    ]
    for error, message, run in wrong:
        with pytest.raises(error, match=message):
            run()


@WITH_GRADIENTS
def test_autocast_converts_index_queries_and_keys_at_the_door() -> None:
    leaves = index_inputs(5, 7, dtype=torch.float32)
    slots, target = hostile_slots(5, 4, 7), normalise_target(torch.rand(5, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = index_loss(*leaves, slots, target)
    half = [x.detach().bfloat16().requires_grad_() for x in leaves[:2]]
    expected = index_loss(*half, leaves[2], slots, target)
    assert torch.equal(found, expected)
    for one, other in zip(torch.autograd.grad(found, leaves[:2]), torch.autograd.grad(expected, half), strict=True):
        assert torch.equal(one, other.float())
