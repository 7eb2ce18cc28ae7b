"""The attention of GLM-5.3-Flash in training: the model's own modules around `tamis.train`.

Groups of tokens are what V4 calls the spans of entries: `compress_rows` pools their keys, and a token sees the groups
that are complete at it. The rows that it attends to are those of the selected groups and of its own incomplete one.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from tamis.integrations.hf.glm5_next import Glm5NextFamily, glm5_next_forward
from tamis.integrations.hf.layers import Step
from tamis.integrations.hf.train_selection import check_pass, index_rows, select, teach
from tamis.integrations.hf.train_step import IndexTensors, TrainStep
from tamis.integrations.hf.train_v32 import absorbed, project_values
from tamis.model.spec import LayerSpec
from tamis.ops.attention.operations import accumulator
from tamis.train import Entries, Rows, attend_rows, compress_rows, index_target


def glm5_next_train_forward(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Step | TrainStep,
    prev_topk_indices: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """Replaces `Glm5NextTextAttention.forward` of a model that is attached for training. The indices that it returns
    for layers that share them are rows of the flat batch."""
    if isinstance(attention_mask, Step):
        return glm5_next_forward(self, hidden_states, attention_mask, prev_topk_indices)
    step = attention_mask
    check_pass(step)
    hidden, layer = hidden_states.flatten(0, 1), self.layer_idx
    spec: LayerSpec = step.family.specs[layer]
    residual = self.q_a_layernorm(self.q_a_proj(hidden))
    query = self.q_b_proj(residual).unflatten(1, (spec.heads, -1))
    latent = self.kv_a_layernorm(self.kv_a_proj_with_mqa(hidden))
    q, rows, value = absorbed(self, (query, query[..., :0]), (latent, latent[:, :0]), spec)
    groups, index = prev_topk_indices, step.sources.get(step.source(layer))
    if self.indexer is not None:
        entries = step.entries(spec.kpool, hidden.device)
        index = _index_tensors(self.indexer, hidden, residual, entries, step, layer)
        groups = select(step, layer, index, entries.starts, entries.ends, entries.longest)
    assert groups is not None
    settings: dict[str, Any] = {"scale": spec.scale, "backend": step.options.backend}
    chosen = [Rows(rows, slots) for slots in _slots(step, spec, groups)]
    attended = attend_rows(q, chosen, value_dim=spec.latent_dim, deterministic=step.options.deterministic, **settings)
    if index is not None and step.teaches(layer):
        # A group is attended to as much as its tokens together.
        target = index_target(q, chosen, attended.lse, **settings).unflatten(1, (-1, spec.kpool)).sum(2)
        teach(step, layer, index, groups, target, attended.out)
    out = self.o_proj(project_values(attended.out.to(q.dtype), value).flatten(1))
    return out.view(hidden_states.shape), None, groups


def _slots(step: TrainStep, spec: LayerSpec, groups: Tensor) -> list[Tensor]:
    """The rows that tokens attend to: int32 [T, kpool - 1] of their incomplete group, [T, N] of the selected groups."""
    if step.replayed is not None:
        return [groups]
    size, device = spec.kpool, groups.device
    spans = step.entries(size, device).spans
    tail = step.remembered(("tail", size), lambda: _tail(step, size, device))
    if not len(spans):
        return [tail, groups.repeat_interleave(size, 1)]  # there is no group, so that all are -1
    first = spans[groups.clamp_min(0).long()].unsqueeze(2)
    rows = first + torch.arange(size, dtype=torch.int32, device=device)
    return [tail, torch.where(groups.unsqueeze(2) >= 0, rows, -1).flatten(1)]


def _tail(step: TrainStep, size: int, device: torch.device) -> Tensor:
    """int32 [T, size - 1]: the rows of each token's incomplete group, then -1."""
    starts, ends = step.sight.starts.to(device), step.sight.ends.to(device)
    first = ends - (ends - starts) % size
    rows = first.unsqueeze(1) + torch.arange(size - 1, dtype=torch.int32, device=device)
    return torch.where(rows < ends.unsqueeze(1), rows, -1)


def _index_tensors(
    indexer: Any, hidden: Tensor, residual: Tensor, entries: Entries, step: TrainStep, layer: int
) -> IndexTensors | None:
    """An indexer's queries, and one key per group. Their inputs are detached, so that the main model learns from the
    language loss alone."""
    learns = step.teaches(layer)
    if step.replayed is not None:
        return None
    family = step.family
    assert isinstance(family, Glm5NextFamily)
    with nullcontext() if learns else torch.no_grad():
        hidden = hidden.detach()
        q = indexer.wq_b(residual.detach()).unflatten(1, (indexer.n_heads, indexer.head_dim))
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
        weights = weights.to(accumulator(q)) * (indexer.n_heads * indexer.head_dim) ** -0.5
        keys, gates = indexer.k_norm(indexer.wk(hidden)), linear(hidden, indexer.index_kpool_compress_gate)
        keys = compress_rows(
            keys, gates.to(keys.dtype), indexer.index_kpool_compress_ape, entries, backend=step.options.backend
        ).to(q.dtype)
        q, keys = (index_rows(x, hidden[:, :0], family.recipe, step) for x in (q, keys))
    found = IndexTensors(q, keys, weights)
    if step.options.teachers == "readers" and step.readers(layer) > 1 and learns:
        step.sources.setdefault(layer, found)
    return found
