"""The attention of DeepSeek-V3.2 and GLM-MoE-DSA in training: the model's own modules around `tamis.train`."""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention

from tamis import checks
from tamis.integrations.hf.layers import Step, glm_forward, rope_angles, v32_forward
from tamis.integrations.hf.train_selection import check_pass, index_rows, select, teach
from tamis.integrations.hf.train_step import IndexTensors, TrainStep
from tamis.model.rope import rotate
from tamis.train import Rows, attend_rows, index_target, warmup_loss


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
    **_: Any,
) -> tuple[Tensor, None, Tensor | None]:
    """Replaces `GlmMoeDsaAttention.forward` of a model that is attached for training. The indices that it returns for
    layers that share them are rows of the flat batch."""
    if isinstance(attention_mask, Step):
        return glm_forward(self, hidden_states, position_embeddings, attention_mask, prev_topk_indices)
    shared = prev_topk_indices if self.indexer is None else None
    out, slots = _attend(self, hidden_states, position_embeddings, attention_mask, shared)
    return out, None, slots


def _attend(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    step: TrainStep,
    shared: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    check_pass(step)
    hidden, layer = hidden_states.flatten(0, 1), module.layer_idx
    spec = step.family.specs[layer]
    angles = rope_angles(position_embeddings, hidden_states).flatten(0, 1)
    residual = module.q_a_layernorm(module.q_a_proj(hidden))
    q_nope, q_rope = (
        module.q_b_proj(residual).unflatten(1, (spec.heads, -1)).split([module.qk_nope_head_dim, spec.rope_dim], dim=-1)
    )
    latent, k_rope = module.kv_a_proj_with_mqa(hidden).split([spec.latent_dim, spec.rope_dim], dim=-1)
    latent, k_rope = module.kv_a_layernorm(latent), rotate(k_rope, angles, interleaved=True)
    q_rope = rotate(q_rope, angles.unsqueeze(1), interleaved=True)
    index = _index_tensors(module.indexer, hidden, residual, angles, step, layer)
    if step.options.indexer == "warmup":
        out, slots = _attend_densely(module, (q_nope, q_rope), (latent, k_rope), index, step), None
    else:
        sight = step.sight
        slots = shared if shared is not None else select(step, layer, index, sight.starts, sight.ends, sight.longest)
        out = _attend_sparsely(module, (q_nope, q_rope), (latent, k_rope), index, slots, step)
    return module.o_proj(out.flatten(1)).view(hidden_states.shape), slots


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
    weight = _kv_b_weight(module, spec.latent_dim, row[0])
    key, value = weight.unflatten(0, (spec.heads, -1)).split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    absorbed = torch.bmm(query[0].transpose(0, 1), key).transpose(0, 1)
    q, rows = torch.cat((absorbed, query[1].to(absorbed.dtype)), dim=-1), torch.cat(row, dim=-1)
    rows = rows.to(q.dtype)
    chosen, settings = Rows(rows, slots), {"scale": spec.scale, "backend": options.backend}
    attended = attend_rows(q, chosen, value_dim=spec.latent_dim, deterministic=options.deterministic, **settings)
    if index is not None and step.teaches(layer):
        teach(step, layer, index, slots, index_target(q, chosen, attended.lse, **settings), attended.out)
    latent = attended.out.to(q.dtype)
    return torch.bmm(latent.transpose(0, 1), value.transpose(1, 2)).transpose(0, 1)


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
    indexer: Any, hidden: Tensor, residual: Tensor, angles: Tensor, step: TrainStep, layer: int
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
        recipe = step.family.recipe  # type: ignore[attr-defined]
        hidden, residual = hidden.detach(), residual.detach()
        q = indexer.wq_b(residual).unflatten(1, (indexer.n_heads, indexer.head_dim))
        keys = indexer.k_norm(indexer.wk(hidden)).to(q.dtype)
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
    if module.training:
        for name, part in layer.named_modules():
            if isinstance(part, nn.Dropout) and part.p > 0:
                remedy = "set lora_dropout=0, or leave kv_b_proj out of target_modules"
                raise checks.refuse(f"kv_b_proj.{name}", "without dropout: it acts on unit vectors", part.p, remedy)
    unit: Tensor = layer(torch.eye(latent_dim, dtype=like.dtype, device=like.device))
    return unit.T
