"""A V3.2 layer stack in plain torch around `tamis.SparseMLA`: projections, norms, rotary embedding, MLP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from tamis.cache.selection import Caches
from tamis.lab.demo.shape import ModelShape
from tamis.lab.demo.weights import LayerWeights, make_weights
from tamis.layers.mla import LayerOutput, SparseMLA
from tamis.model.rope import rms_norm, rotate
from tamis.ops import IndexInputs, rotate_index
from tamis.step.plan import Plan


@dataclass(frozen=True, eq=False)
class AttentionInputs:
    """The tensors that a layer passes to `SparseMLA` for the tokens of a step."""

    q: Tensor
    """[T, H, 576], absorbed and rotated."""
    rows: Tensor
    """[T, 576], the new tokens' cache rows before any quantisation."""
    index: IndexInputs


Observer = Callable[[int, AttentionInputs, LayerOutput], None]
"""Called after each layer's attention with the layer's number, its inputs and its result."""


class Model:
    """A model with random weights. It is stateless: caches and plan are arguments."""

    def __init__(self, shape: ModelShape, *, max_length: int, device: torch.device, dtype: torch.dtype, seed: int):
        """Make weights and rotary tables.

        Args:
            shape: the sizes of the model.
            max_length: tokens of the longest request.
            device: where to compute.
            dtype: dtype of the inputs of attention and indexer; everything else is float32.
            seed: seed of the weights.
        """
        self.shape, self.dtype = shape, dtype
        self.weights = make_weights(shape, device, seed)
        self.attention = SparseMLA(shape.spec)
        self._cos_sin = shape.rotary.cos_sin_table(max_length, device)

    def forward(
        self,
        tokens: Tensor,
        plan: Plan,
        caches: Sequence[Caches],
        logit_rows: Tensor,
        observe: Observer | None = None,
    ) -> Tensor:
        """Run the new tokens of a step through all layers and return logits [len(logit_rows), vocab].

        Args:
            tokens: int64 [T], in the order of the plan.
            plan: the plan of this step.
            caches: one pair per layer; the new tokens' rows and keys are written into them.
            logit_rows: int64, the rows of the tokens whose logits are returned.
            observe: called after each layer's attention.
        """
        x = self.weights.embedding[tokens]
        for number, (layer, layer_caches) in enumerate(zip(self.weights.layers, caches, strict=True)):
            inputs = self._attention_inputs(layer, rms_norm(x, None), plan.positions)
            attended = self.attention(inputs.q, inputs.rows, layer_caches, plan, index=inputs.index)
            if observe is not None:
                observe(number, inputs, attended)
            values = layer.absorbed.project_value(attended.out.float())
            x = x + linear(values.flatten(1), layer.o)
            gate, up = linear(rms_norm(x, None), layer.gate_up).chunk(2, dim=-1)
            x = x + linear(silu(gate) * up, layer.down)
        return linear(rms_norm(x[logit_rows], None), self.weights.head)

    def _attention_inputs(self, layer: LayerWeights, x: Tensor, positions: Tensor) -> AttentionInputs:
        shape, cos_sin = self.shape, self._cos_sin[positions.long()]
        compressed_q = rms_norm(linear(x, layer.q_a), None)
        q = linear(compressed_q, layer.q_b).unflatten(1, (shape.heads, -1))
        q_nope, q_rope = q.split([shape.nope, shape.rope], dim=-1)
        q_rope = rotate(q_rope, cos_sin.unsqueeze(1), interleaved=True)
        latent, k_rope = linear(x, layer.kv_a).split([shape.latent, shape.rope], dim=-1)
        rows = torch.cat((rms_norm(latent, None), rotate(k_rope, cos_sin, interleaved=True)), dim=-1)
        return AttentionInputs(
            torch.cat((layer.absorbed.absorb_query(q_nope), q_rope), dim=-1).to(self.dtype),
            rows.to(self.dtype),
            self._index_inputs(layer, x, compressed_q, positions),
        )

    def _index_inputs(self, layer: LayerWeights, x: Tensor, compressed_q: Tensor, positions: Tensor) -> IndexInputs:
        shape = self.shape
        q = linear(compressed_q, layer.index_q).unflatten(1, (shape.index_heads, shape.index_dim))
        keys = layer_norm(linear(x, layer.index_k), (shape.index_dim,), bias=layer.index_norm_bias, eps=1e-6)
        weights = linear(x, layer.index_weights) * (shape.index_heads * shape.index_dim) ** -0.5
        where = {"positions": positions, "cos_sin": self._cos_sin}
        return IndexInputs(
            rotate_index(q, shape.recipe, **where).to(self.dtype),
            weights.to(self.dtype),
            rotate_index(keys, shape.recipe, **where).to(self.dtype),
            shape.recipe,
        )
