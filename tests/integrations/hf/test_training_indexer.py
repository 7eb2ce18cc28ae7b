"""What the indexers of attached models learn, compared with autograd over the untouched model's attention weights."""

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from bounds import relative_error
from hf_indexers import index_rows
from hf_models import RELATIVES, tokens
from hf_training import FLIPPED, SEPARATE, Gradients, assert_agree, assert_same, batches, shared, step, trainable
from torch import Tensor

from tamis.integrations.hf import train_v4, train_v32
from tamis.integrations.hf.forward import language_model
from tamis.integrations.transformers import attach, detach, index_losses, indexer_parameters, take_index_loss

pytestmark = pytest.mark.own_settings("the models' own")
IDS = tokens(2, 70)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A model with peaked attention; every test gets, and leaves, it untouched."""
    found = shared(request.param)
    yield found
    detach(found)
    found.requires_grad_(True)


each_family = pytest.mark.parametrize("model", ["v32", "glm-shared", "v4", "glm5-next"], indirect=True)
each_model = pytest.mark.parametrize("model", ["v32", "glm-shared", "v4", *RELATIVES], indirect=True)


@torch.enable_grad()  # the untouched indexer runs without
def scores(indexer: Any, hidden: Tensor, *args: Any) -> Tensor:
    """[B, S, S]: an indexer's scores, from its modules and transformers' rotation."""
    q, k = index_rows(indexer, hidden, *args)
    weights = indexer.weights_proj(hidden) * (indexer.n_heads * indexer.head_dim) ** -0.5
    return torch.einsum("bsh,bsht->bst", weights, torch.einsum("bshd,btd->bsht", q, k).relu())


def divergence(scores: Tensor, target: Tensor) -> Tensor:
    """The mean over tokens of KL(target || softmax of the scores), over the columns that are attended to."""
    target = target.detach()
    total = target.sum(-1, keepdim=True)
    target = target / total.masked_fill(total == 0, 1.0)
    hidden = target == 0
    # A token that attends to no entry has a softmax over nothing.
    log_pi = scores.masked_fill(hidden & (total > 0), -torch.inf).log_softmax(-1).masked_fill(hidden, 0.0)
    return (torch.xlogy(target, target) - target * log_pi).sum() / IDS.numel()


def expected_losses(model: Any, teachers: str = "own") -> tuple[dict[int, Tensor], Gradients]:
    """The mean divergence per token of every indexer, and its gradients: autograd over dense tensors.

    The attention weights are those that transformers returns, so what is selected is what is not zero.
    """
    seen: dict[int, Tensor] = {}
    hooks = []
    for number, layer in enumerate(language_model(model).layers):
        attention = layer.self_attn
        if getattr(attention, "indexer", None) is not None:
            keep = lambda indexer, args, _, number=number: seen.__setitem__(number, scores(indexer, *args))  # noqa: E731
            hooks.append(attention.indexer.register_forward_hook(keep))
        elif hasattr(getattr(attention, "compressor", None), "indexer"):
            scorer = attention.compressor.indexer.scorer
            hooks.append(scorer.register_forward_hook(lambda _, __, out, number=number: seen.__setitem__(number, out)))
    model.set_attn_implementation("eager")
    attentions = model(IDS, output_attentions=True, use_cache=False).attentions
    for hook in hooks:
        hook.remove()
    losses: dict[int, list[Tensor]] = {}
    for number, probabilities in enumerate(attentions):
        source = max((layer for layer in seen if layer <= number), default=-1)
        shares = getattr(language_model(model).layers[number].self_attn, "indexer", "none") is None
        if source >= 0 and (number == source or (teachers == "readers" and shares)):
            # V4's weights have the window first, one column per token.
            first = 0 if probabilities.shape[-1] == IDS.shape[1] else IDS.shape[1]
            losses.setdefault(source, []).append(divergence(seen[source], probabilities.sum(1)[..., first:]))
    means = {source: torch.stack(found).mean() for source, found in losses.items()}
    model.zero_grad(set_to_none=True)
    torch.stack(list(means.values())).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return {source: loss.detach() for source, loss in means.items()}, grads


@each_model
@pytest.mark.parametrize("teachers", ["own", "readers"])
def test_sparse_losses_and_gradients(model: Any, teachers: Any) -> None:
    losses, expected = expected_losses(model, teachers)
    attach(model, train=True, indexer="sparse", index_loss=2.0, teachers=teachers, deterministic=False)
    _, found = step(model, input_ids=IDS, labels=IDS)
    assert index_losses(model).keys() == losses.keys()
    for layer, loss in losses.items():
        assert abs(index_losses(model)[layer] - float(loss)) < 1e-5 * float(loss) + 1e-6
    for name in indexer_parameters(model):
        assert relative_error(found[name], 2 * expected[name]) < 1e-4, name


@torch.enable_grad()
def pooled_scores(indexer: Any, hidden: Tensor, residual: Tensor) -> Tensor:
    """[B, S, G]: the scores of whole groups of tokens by an indexer of GLM-5.3-Flash, group by group."""
    size, keys = indexer.index_kpool, indexer.k_norm(indexer.wk(hidden))
    gates = hidden @ indexer.index_kpool_compress_gate.T
    pooled = []
    for start in range(0, hidden.shape[1] - size + 1, size):
        own = slice(start, start + size)
        shares = (gates[:, own] + indexer.index_kpool_compress_ape).softmax(1)
        pooled.append((shares * keys[:, own]).sum(1))
    q = indexer.wq_b(residual).unflatten(-1, (indexer.n_heads, indexer.head_dim))
    weights = indexer.weights_proj(hidden) * (indexer.n_heads * indexer.head_dim) ** -0.5
    return torch.einsum("bsh,bshg->bsg", weights, torch.einsum("bshd,bgd->bshg", q, torch.stack(pooled, 1)).relu())


@pytest.mark.parametrize("model", ["glm5-next"], indirect=True)
@pytest.mark.parametrize("teachers", ["own", "readers"])
def test_sparse_losses_of_pooled_keys(model: Any, teachers: Any) -> None:
    """A group is attended to as much as its tokens together; the incomplete one, which nothing selects, is left out."""
    seen: dict[int, Tensor] = {}
    hooks = []
    for number, layer in enumerate(language_model(model).layers):
        if getattr(layer.self_attn, "indexer", None) is not None:

            def keep(indexer: Any, _: Any, given: dict[str, Any], __: Any, number: int = number) -> None:
                seen[number] = pooled_scores(indexer, given["hidden_states"].detach(), given["q_resid"].detach())

            hooks.append(layer.self_attn.indexer.register_forward_hook(keep, with_kwargs=True))
    model.set_attn_implementation("eager")
    attentions = model(IDS, output_attentions=True, use_cache=False).attentions
    for hook in hooks:
        hook.remove()
    assert list(seen) == [1]
    (scores,) = seen.values()
    size, groups = 4, scores.shape[-1]
    complete = torch.arange(groups) < (torch.arange(IDS.shape[1]).unsqueeze(1) + 1) // size
    found = []
    for probabilities in attentions[: 2 if teachers == "readers" else 1]:
        target = probabilities.sum(1)[..., : groups * size].unflatten(-1, (groups, size)).sum(-1)
        found.append(divergence(scores, target.masked_fill(~complete, 0.0)))
    loss = torch.stack(found).mean()
    value = float(loss.detach())
    model.zero_grad(set_to_none=True)
    loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    attach(model, train=True, indexer="sparse", index_loss=2.0, teachers=teachers, deterministic=False)
    _, gradients = step(model, input_ids=IDS, labels=IDS)
    assert abs(index_losses(model)[1] - value) < 1e-5 * value + 1e-6
    assert len(indexer_parameters(model)) == 7
    for name in indexer_parameters(model):
        assert relative_error(gradients[name], 2 * expected[name]) < 1e-4, name


@each_family
def test_the_rest_of_the_model_does_not_notice(model: Any) -> None:
    inputs = batches(70)["right"]
    attach(model, train=True, deterministic=False)
    loss, expected = step(model, **inputs)
    detach(model)
    attach(model, train=True, indexer="sparse", deterministic=False)
    found_loss, found = step(model, **inputs)
    learnt = set(indexer_parameters(model))
    assert_same(
        {n: g for n, g in found.items() if n not in learnt}, {n: g for n, g in expected.items() if n not in learnt}
    )
    assert relative_error(found_loss, loss + sum(index_losses(model).values())) < 1e-6
    assert all(found[name] is not None for name in learnt)


@each_model
def test_warmup_teaches_the_indexer_and_nothing_else(model: Any) -> None:
    """With as many positions as there are tokens, dense attention is sparse attention, and so is its loss."""
    own = set(indexer_parameters(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in own)
    dense = trainable(
        next(name for name in ("v32", "glm-shared", "v4", *RELATIVES) if shared(name) is model), index_topk=128
    )
    dense.load_state_dict(model.state_dict())
    attach(dense, train=True, indexer="sparse", deterministic=False)
    loss, expected = step(dense, input_ids=IDS, labels=IDS)
    attach(model, train=True, indexer="warmup", deterministic=False)
    found_loss, found = step(model, input_ids=IDS, labels=IDS)
    assert relative_error(found_loss, loss) < 1e-5
    assert {name for name, gradient in found.items() if gradient is not None} == own
    assert_agree({n: found[n] for n in own}, {n: expected[n] for n in own}, FLIPPED, but="")
    for name, value in index_losses(dense).items():
        assert abs(index_losses(model)[name] - value) < 1e-5 * value + 1e-6


def test_warmup_packs_and_pads() -> None:
    """Index losses of a batch with padding and of packed sequences are those of the sequences alone."""
    model = trainable("v32")
    own = set(indexer_parameters(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in own)
    attach(model, train=True, indexer="warmup", deterministic=False)
    step(model, input_ids=IDS[:1, :40], labels=IDS[:1, :40])
    first = index_losses(model)
    step(model, input_ids=IDS[:1, 40:], labels=IDS[:1, 40:])
    second = index_losses(model)
    position_ids = torch.cat((torch.arange(40), torch.arange(30))).unsqueeze(0)
    step(model, input_ids=IDS[:1], labels=IDS[:1], position_ids=position_ids)
    packed = index_losses(model)
    mask = torch.ones(2, 40, dtype=torch.int64)
    mask[1, :10] = 0
    both = torch.stack((IDS[0, :40], torch.cat((IDS[0, :10], IDS[0, 40:]))))
    step(model, input_ids=both, labels=both, attention_mask=mask)
    padded = index_losses(model)
    for layer, value in first.items():
        expected = (40 * value + 30 * second[layer]) / 70
        assert abs(packed[layer] - expected) < 1e-5 * expected + 1e-6
        assert abs(padded[layer] - expected) < 1e-5 * expected + 1e-6


@pytest.mark.parametrize("stage", ["warmup", "sparse"])
def test_the_indexer_really_learns(stage: Any) -> None:
    model = trainable("v32")
    own = set(indexer_parameters(model))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in own)
    attach(model, train=True, indexer=stage, deterministic=False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    history = []
    for _ in range(12):
        model(IDS, labels=IDS).loss.backward()
        history.append(index_losses(model))
        optimizer.step()
        optimizer.zero_grad()
    assert all(history[-1][layer] < history[0][layer] / 2 for layer in range(3)), (history[0], history[-1])


@pytest.mark.parametrize("model", ["v32"], indirect=True)
def test_losses_of_accumulated_batches_add_up(model: Any) -> None:
    """Trainer passes the number of items of all batches, and then does not divide by the number of batches."""
    attach(model, train=True, indexer="sparse", deterministic=False)
    loss, expected = step(model, input_ids=IDS, labels=IDS, num_items_in_batch=138)
    parts = [
        step(model, input_ids=IDS[row : row + 1], labels=IDS[row : row + 1], num_items_in_batch=138) for row in (0, 1)
    ]
    assert relative_error(parts[0][0] + parts[1][0], loss) < 1e-6
    assert_agree({name: parts[0][1][name] + parts[1][1][name] for name in expected}, expected, but="")


@pytest.mark.parametrize("model", ["v32"], indirect=True)
def test_programs_with_their_own_loss_take_the_index_loss(model: Any) -> None:
    attach(model, train=True, indexer="sparse", deterministic=False)
    loss, expected = step(model, input_ids=IDS, labels=IDS)
    logits = model(IDS).logits
    with pytest.raises(ValueError, match="take_index_loss"):
        index_losses(model)
    own = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    total = own + take_index_loss(model)
    total.backward()
    assert relative_error(total.detach(), loss) < 1e-6
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_agree(found, expected, but="")
    assert take_index_loss(model) is None
    model(IDS)
    with pytest.warns(UserWarning, match="index loss of the last step was not used"):
        model(IDS)
    model.zero_grad(set_to_none=True)


@pytest.mark.parametrize("model", ["v32"], indirect=True)
def test_passes_without_gradients_leave_the_index_loss_alone(model: Any) -> None:
    """A reference's log-probabilities may be computed between a policy's forward pass and its loss."""
    attach(model, train=True, indexer="sparse", deterministic=False)
    model(IDS)
    with torch.no_grad():
        model(IDS, position_ids=torch.arange(70).remainder(35).expand(2, -1))
        model(IDS, labels=IDS)
    added = take_index_loss(model)
    assert added is not None
    assert added.requires_grad
    assert index_losses(model).keys() == {0, 1, 2}


SHARING = pytest.mark.parametrize(
    ("model", "teachers"),
    [("v32", "own"), ("v4", "own"), ("glm-shared", "own"), ("glm-shared", "readers"), ("mistral-large4", "readers")],
    indirect=["model"],
)


@SHARING
@pytest.mark.filterwarnings("ignore:the index loss of the last step was not used")
def test_nothing_of_a_checkpointed_step_outlives_it(model: Any, teachers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of its loss: the graph of a checkpointed layer holds the step, and frees it in a backward pass.
    Mistral Large 4's layers share rows as well."""
    attach(model, train=True, indexer="sparse", teachers=teachers, deterministic=False)
    model.gradient_checkpointing_enable()
    steps = watched_steps(monkeypatch)
    step(model, input_ids=IDS, labels=IDS)
    model(IDS, labels=IDS)  # a loss that is dropped
    model(IDS)  # one that is never taken
    step(model, input_ids=IDS, labels=IDS)
    with monkeypatch.context() as patch:
        patch.setattr(language_model(model).layers[-1].mlp, "forward", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            model(IDS)
    step(model, input_ids=IDS, labels=IDS)
    model(IDS)
    detach(model)
    model.gradient_checkpointing_disable()
    gc.collect()
    assert len({number for number, _ in steps}) == 7
    assert all(one() is None for _, one in steps)


def watched_steps(patch: pytest.MonkeyPatch) -> list[tuple[int, weakref.ref[Any]]]:
    """Collects a number for every forward pass, and weak references to its step."""
    found: list[tuple[int, weakref.ref[Any]]] = []
    numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    count = itertools.count()

    def watching(select: Any) -> Any:
        def watch(one: Any, *rest: Any) -> Tensor:
            numbers[one] = numbers[one] if one in numbers else next(count)
            found.append((numbers[one], weakref.ref(one)))
            return select(one, *rest)

        return watch

    for module in (train_v32, train_v4):
        patch.setattr(module, "select", watching(module.select))
    return found


@SHARING
def test_shared_indexers_learn_the_same_in_checkpointed_layers(model: Any, teachers: Any) -> None:
    attach(model, train=True, indexer="sparse", teachers=teachers, deterministic=False)
    loss, expected = step(model, input_ids=IDS, labels=IDS)
    model.gradient_checkpointing_enable()
    found_loss, found = step(model, input_ids=IDS, labels=IDS)
    model.gradient_checkpointing_disable()
    assert torch.equal(found_loss, loss)
    assert_same(found, expected)


@pytest.mark.parametrize("model", ["v32"], indirect=True)
def test_a_coefficient_of_zero_computes_no_loss(model: Any) -> None:
    attach(model, train=True, indexer="sparse", index_loss=0.0, deterministic=False)
    _, found = step(model, input_ids=IDS, labels=IDS)
    assert index_losses(model) == {}
    assert all(found[name] is None for name in indexer_parameters(model))


@SHARING
def test_both_losses_may_have_backward_passes_of_their_own(model: Any, teachers: Any) -> None:
    """The first of them runs checkpointed layers again, which must not replace the index loss that waits."""
    attach(model, train=True, indexer="sparse", teachers=teachers, deterministic=False)
    model.gradient_checkpointing_enable()
    _, expected = step(model, input_ids=IDS, labels=IDS)
    logits = model(IDS).logits
    waiting = dict(language_model(model)._tamis.training.collected._pending)
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    pending = language_model(model)._tamis.training.collected._pending
    assert pending.keys() == waiting.keys()
    assert all(pending[key] is loss for key, loss in waiting.items())
    added = take_index_loss(model)
    assert added is not None
    added.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_agree(found, expected, SEPARATE, but="")
    model.zero_grad(set_to_none=True)
    model.gradient_checkpointing_disable()


@pytest.mark.parametrize("model", ["v32", "v4"], indirect=True)
def test_a_batch_of_padding_alone_teaches_nothing(model: Any) -> None:
    """A rank may get one at the end of an epoch."""
    attach(model, train=True, indexer="sparse", deterministic=False)
    model(IDS, attention_mask=torch.zeros_like(IDS))
    added = take_index_loss(model)
    assert added is None or float(added.detach()) == 0.0
