"""The attention of DeepSeek-V3.2's family in training: the model's own modules around `tamis.train`."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from tamis import checks
from tamis.integrations.hf.adapters import unit_images
from tamis.integrations.hf.layers import Step, V32Family, glm_forward, new_rows, rope_angles, rotated_query, v32_forward
from tamis.integrations.hf.train_selection import check_pass, index_rows, select, teach
from tamis.integrations.hf.train_step import IndexTensors, TrainStep
from tamis.model.spec import LayerSpec
from tamis.train import Rows, attend_rows, index_target, warmup_loss

SLOTS = 2**24
"""How many rows are listed at once where tokens attend to all that are visible."""


def v32_train_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Step | TrainStep,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replaces `DeepseekV32Attention.forward` of a model that is attached for training."""
    if isinstance(attention_mask, Step):
        return v32_forward(self, hidden_states, position_embeddings, attention_mask)
    return _attend(self, hidden_states, position_embeddings, attention_mask, None)[0], None


def glm_train_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Step | TrainStep,
    prev_topk_indices: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, Tensor | None]:
    """Replaces `GlmMoeDsaAttention.forward` of a model that is attached for training. The indices that it returns for
    layers that share them are rows of the flat batch."""
    if isinstance(attention_mask, Step):
        return glm_forward(self, hidden_states, position_embeddings, attention_mask, prev_topk_indices, position_ids)
    shared = prev_topk_indices if self.indexer is None else None
    out, slots = _attend(self, hidden_states, position_embeddings, attention_mask, shared, position_ids)
    return out, None, slots


def _attend(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    step: TrainStep,
    shared: Tensor | None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    check_pass(step)
    hidden, layer, family = hidden_states.flatten(0, 1), module.layer_idx, _family(step)
    angles = rope_angles(position_embeddings, hidden_states).flatten(0, 1)
    positions = None if position_ids is None else position_ids.expand(hidden_states.shape[:2]).flatten()
    projected = family.query(module, hidden)
    query = rotated_query(module, projected.heads, angles, positions, family)
    row = _rows(module, hidden, angles, step)
    index = _index_tensors(module.indexer, hidden, projected.index_input, angles, positions, step, layer)
    if step.options.indexer == "warmup":
        attend = _attend_densely if family.sink(module) is None else _attend_to_all
        out, slots = attend(module, query, row, index, step), None
    else:
        sight = step.sight
        slots = shared if shared is not None else select(step, layer, index, sight.starts, sight.ends, sight.longest)
        out = _attend_sparsely(module, query, row, index, slots, step)
    values = family.apply_gate(out.flatten(1), projected.gate)
    return module.o_proj(values).view(hidden_states.shape), slots


def _family(step: TrainStep) -> V32Family:
    assert isinstance(step.family, V32Family)
    return step.family


def _rows(module: Any, hidden: Tensor, angles: Tensor, step: TrainStep) -> tuple[Tensor, Tensor]:
    """The rows [T, L] and [T, R] that a layer attends to: its own, or those of the layer that shares its rows with it.
    A layer that is checkpointed finds the values of the first pass, whose graph takes gradients to their layer."""
    family, layer = _family(step), module.layer_idx
    if family.specs[layer].reuse_rows:
        return step.rows[family.row_source(layer)]
    row = new_rows(module, hidden, angles, family)
    if any(family.row_source(reader) == layer for reader in range(layer + 1, len(family.specs))):
        step.rows.setdefault(layer, row)
    return row


def absorbed(
    module: Any, query: tuple[Tensor, Tensor], row: tuple[Tensor, Tensor], spec: LayerSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [T, H, L + R] and rows [T, L + R] as they are compared, and the weight [H, V, L] of values."""
    weight = _kv_b_weight(module, spec.latent_dim, row[0])
    key, value = weight.unflatten(0, (spec.heads, -1)).split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    absorbed = torch.bmm(query[0].transpose(0, 1), key).transpose(0, 1)
    q = torch.cat((absorbed, query[1].to(absorbed.dtype)), dim=-1)
    return q, torch.cat(row, dim=-1).to(q.dtype), value


def _attend_sparsely(
    module: Any,
    query: tuple[Tensor, Tensor],
    row: tuple[Tensor, Tensor],
    index: IndexTensors | None,
    slots: Tensor,
    step: TrainStep,
) -> Tensor:
    """Values [T, H, V] of the selected rows, and the indexer's loss over them."""
    spec, options, layer = step.family.specs[module.layer_idx], step.options, module.layer_idx
    q, rows, value = absorbed(module, query, row, spec)
    chosen, settings = (
        Rows(rows, slots),
        {"scale": spec.scale, "sink": _sink(module, step, q), "backend": options.backend},
    )
    attended = attend_rows(q, chosen, value_dim=spec.latent_dim, deterministic=options.deterministic, **settings)
    if index is not None and step.teaches(layer):
        teach(step, layer, index, slots, index_target(q, chosen, attended.lse, **settings), attended.out)
    return project_values(attended.out.to(q.dtype), value)


def _sink(module: Any, step: TrainStep, like: Tensor) -> Tensor | None:
    """The sinks in the dtype in which logits of queries `like` are summed."""
    sink = _family(step).sink(module)
    return sink.to(torch.float64) if sink is not None and like.dtype == torch.float64 else sink


def project_values(latent: Tensor, value: Tensor) -> Tensor:
    """Values [T, H, V] of the attention's output [T, H, L]."""
    return torch.bmm(latent.transpose(0, 1), value.transpose(1, 2)).transpose(0, 1)


def _attend_to_all(
    module: Any,
    query: tuple[Tensor, Tensor],
    row: tuple[Tensor, Tensor],
    index: IndexTensors | None,
    step: TrainStep,
) -> Tensor:
    """As `_attend_densely`, for models with sinks: torch's dense attention has none."""
    spec, options, layer = step.family.specs[module.layer_idx], step.options, module.layer_idx
    q, rows, value = absorbed(module, query, row, spec)
    sink = _sink(module, step, q)
    assert sink is not None
    starts, ends = (bound.to(q.device) for bound in (step.sight.starts, step.sight.ends))
    columns = torch.arange(max(1, step.sight.longest), dtype=torch.int32, device=q.device)
    outputs = []
    for some in torch.arange(len(q), dtype=torch.int64, device=q.device).split(max(1, SLOTS // len(columns))):
        seen = starts[some].unsqueeze(1) + columns
        slots = seen.masked_fill(seen >= ends[some].unsqueeze(1), -1)
        settings = {"scale": spec.scale, "sink": sink, "backend": options.backend}
        found = attend_rows(
            q[some], Rows(rows, slots), value_dim=spec.latent_dim, deterministic=options.deterministic, **settings
        )
        outputs.append((found.out.to(q.dtype), found.lse))
    out, lse = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    if index is not None and step.teaches(layer):
        loss = warmup_loss(
            q,
            rows,
            torch.logaddexp(lse, sink.to(lse.dtype)).detach(),
            *index,
            starts,
            ends,
            scale=spec.scale,
            token_weights=step.weights_of_tokens(layer, index.q),
            backend=options.backend,
        )
        step.add_loss(layer, loss, out)
    return project_values(out, value)


def _attend_densely(
    module: Any,
    query: tuple[Tensor, Tensor],
    row: tuple[Tensor, Tensor],
    index: IndexTensors | None,
    step: TrainStep,
) -> Tensor:
    """Values [T, H, V] of all visible rows, and the indexer's loss over them. Keys and values are expanded for every
    head, since products of the absorbed width would take three times as many operations."""
    spec, layer = step.family.specs[module.layer_idx], module.layer_idx
    expanded = module.kv_b_proj(row[0]).unflatten(1, (spec.heads, -1))
    key, value = expanded.split([module.qk_nope_head_dim, module.v_head_dim], dim=-1)
    k_rope = row[1].to(key.dtype).unsqueeze(1).expand(-1, spec.heads, -1)
    q, keys = torch.cat((query[0], query[1].to(query[0].dtype)), dim=-1), torch.cat((key, k_rope), dim=-1)
    if step.sight.requests is None:
        remedy = "leave attention_mask and position_ids out, or run without torch.compile"
        raise checks.refuse("attention_mask", "None in the warm-up of a compiled model", "a padding mask", remedy)
    out = _causal_attention(q, keys, value, step.sight.requests, spec.scale)
    if index is not None and step.teaches(layer):
        starts, ends = (bound.to(q.device) for bound in (step.sight.starts, step.sight.ends))
        weights = step.weights_of_tokens(layer, index.q)
        loss = warmup_loss(
            q, keys, None, *index, starts, ends, scale=spec.scale, token_weights=weights, backend=step.options.backend
        )
        step.add_loss(layer, loss, out)
    return out


def _causal_attention(q: Tensor, keys: Tensor, values: Tensor, requests: list[tuple[int, int]], scale: float) -> Tensor:
    """Dense attention [T, H, V] of each request by itself; zeros for padding."""
    width = values.shape[-1]
    # Torch's kernels without a matrix of tokens by tokens need values as wide as keys.
    values = pad(values, (0, q.shape[-1] - width)) if width < q.shape[-1] else values
    parts, at = [], 0
    for first, length in [*requests, (len(q), 0)]:
        if first > at:
            parts.append(values.new_zeros(first - at, *values.shape[1:], dtype=values.dtype))
        if length:
            own = slice(first, first + length)
            query, key, value = (x[own].transpose(0, 1).unsqueeze(0) for x in (q, keys, values))
            found = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
            parts.append(found.squeeze(0).transpose(0, 1))
        at = first + length
    return torch.cat(parts)[..., :width]


def _index_tensors(
    indexer: Any,
    hidden: Tensor,
    index_input: Tensor,
    angles: Tensor,
    positions: Tensor | None,
    step: TrainStep,
    layer: int,
) -> IndexTensors | None:
    """An indexer's tensors: of the layer's own, or of the one whose selection it shares if it teaches that one.

    Their inputs are detached, so that the main model learns from the language loss alone.
    """
    if indexer is None:
        return step.sources.get(step.source(layer))
    learns = step.teaches(layer)
    if step.replayed is not None and not learns:
        return None
    with nullcontext() if learns else torch.no_grad():
        family = _family(step)
        recipe, hidden = family.layer_recipe(family.specs[layer]), hidden.detach()
        q = family.index_query(indexer, index_input.detach(), positions)
        keys = indexer.wk(hidden).to(indexer.k_norm.weight.dtype)
        keys = indexer.k_norm(keys).to(q.dtype)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        weights = weights.to(wide) * (indexer.n_heads * indexer.head_dim) ** -0.5
        q, keys = (index_rows(x, angles, recipe, step) for x in (q, keys))
    found = IndexTensors(q, keys, weights)
    if step.options.teachers == "readers" and step.readers(layer) > 1 and learns:
        step.sources.setdefault(layer, found)
    return found


def _kv_b_weight(module: Any, latent_dim: int, like: Tensor) -> Tensor:
    """The weight [H * (P + V), L] of `kv_b_proj`: its own, or the images of the unit vectors if it is more than a
    linear layer (an adapter, a quantised or a sharded layer)."""
    layer = module.kv_b_proj
    if type(layer) is nn.Linear and type(layer.weight) is nn.Parameter:
        return layer.weight
    return unit_images("kv_b_proj", layer, latent_dim, like)
