"""The indexer of a layer in training: its rotations, its selection, and its loss over what it selected."""

from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.integrations.hf.train_step import IndexTensors, TrainStep
from tamis.model.recipe import IndexRecipe
from tamis.model.rope import rotate
from tamis.train import fake_quantise, index_loss, select_rows


def rotated(x: Tensor, angles: Tensor, recipe: IndexRecipe, *, inverse: bool = False) -> Tensor:
    """Rows [T, D] or [T, H, D] whose rope is rotated by the angles [T, R], if they have a rope."""
    if not recipe.rope_dim:
        return x
    sizes, turn = [recipe.rope_dim, x.shape[-1] - recipe.rope_dim], {"interleaved": recipe.interleaved}
    angles = angles if x.dim() == 2 else angles.unsqueeze(1)
    if recipe.rope_first:
        rope, rest = x.split(sizes, dim=-1)
        return torch.cat((rotate(rope, angles, inverse=inverse, **turn), rest), dim=-1)
    rest, rope = x.split(sizes[::-1], dim=-1)
    return torch.cat((rest, rotate(rope, angles, inverse=inverse, **turn)), dim=-1)


def index_rows(x: Tensor, angles: Tensor, recipe: IndexRecipe, step: TrainStep) -> Tensor:
    """Index queries or keys, rotated, as they would be read from the step's kind of index cache."""
    if not step.family.quantised:
        return rotated(x, angles, recipe)
    where: dict[str, Any] = {}
    if recipe.rope_dim:
        where = {"positions": torch.arange(len(x), dtype=torch.int64, device=x.device), "cos_sin": angles.float()}
    return fake_quantise(x, "index-fp8", recipe, **where, backend=step.options.backend)


def select(step: TrainStep, layer: int, index: IndexTensors | None, starts: Tensor, ends: Tensor, most: int) -> Tensor:
    """The keys int32 [T, K] that a layer's indexer selects, at most `most` for a token: rows to attend to, or groups of
    them where keys are pooled."""
    if step.replayed is not None:
        return step.replayed[layer]
    if layer in step.kept:
        return step.kept[layer]
    assert index is not None
    topk = step.family.specs[layer].index_topk
    assert topk is not None
    found = select_rows(*index, starts, ends, max(1, min(topk, most)), backend=step.options.backend)
    if step.keep:
        step.kept[layer] = found
    return found


def teach(step: TrainStep, layer: int, index: IndexTensors, slots: Tensor, target: Tensor, out: Tensor) -> None:
    """Add the loss of a layer's indexer over the rows that it selected. `out` is its attention's output."""
    weights, options = step.weights_of_tokens(layer, index.q), step.options
    loss = index_loss(
        *index,
        slots,
        target.to(weights.dtype),
        token_weights=weights,
        deterministic=options.deterministic,
        backend=options.backend,
    )
    step.add_loss(layer, loss, out)


def check_pass(step: TrainStep) -> None:
    """Refuse a layer's first pass without gradients within a step that has them."""
    if step.records and not torch.is_grad_enabled():
        remedy = "call gradient_checkpointing_enable() without use_reentrant"
        raise checks.refuse("use_reentrant", "False: a reentrant pass computes no index loss", "True", remedy)
