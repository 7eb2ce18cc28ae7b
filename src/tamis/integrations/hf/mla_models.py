"""Models of DeepSeek-V3.2's family that differ from it in what they compute around attention.

Each class overrides the steps of `V32Family` in which its model differs. Where the model has a module for such a step,
that module computes it.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.integrations.hf.layers import CacheKind, Query, V32Family, WrapLayer
from tamis.model.recipe import IndexRecipe
from tamis.model.spec import LayerSpec


class AxK2Family(V32Family):
    """A.X-K2: one projection of the query's latent, normed and raw, gives the queries and a gate for each value."""

    def query(self, module: Any, hidden: Tensor) -> Query:
        """The queries of the tokens [T, N], and their gates."""
        compressed = module.q_a_proj(hidden)
        residual = module.q_a_layernorm(compressed)
        both = module.q_gate_proj(torch.cat((residual, compressed), dim=-1)).unflatten(1, (module.num_heads, -1))
        heads, gate = both.split([module.qk_head_dim, module.v_head_dim], dim=-1)
        return Query(heads, residual, gate.flatten(1))

    def apply_gate(self, values: Tensor, gate: Tensor | None) -> Tensor:
        """The attention's output [T, H * V] times its gate, in float32."""
        assert gate is not None
        return (values * torch.sigmoid(gate.float())).to(values.dtype)


class Hy4Family(V32Family):
    """Hy4: a sink for each head, a gate for each value, and a rope that rotates halves.

    Somebody has reported that the published weights were trained with adjacent pairs, which transformers does not
    rotate. `rope_interleave` in the config turns them on for attention, `indexer_rope_interleave` for the indexer.
    """

    def __init__(self, base: Any, kind: CacheKind, backend: str, wrap_layer: WrapLayer) -> None:
        """Read a model (the part below the language-model head)."""
        pairs = getattr(base.config, "rope_interleave", None)
        self.interleaved = False if pairs is None else checks.flag("config.rope_interleave", pairs)
        super().__init__(base, kind, backend, wrap_layer)

    def spec(self, config: Any, module: Any) -> LayerSpec:
        """The numbers of one attention module."""
        return replace(super().spec(config, module), sink=True)

    def query(self, module: Any, hidden: Tensor) -> Query:
        """The queries of the tokens [T, N], and their gates."""
        return super().query(module, hidden)._replace(gate=module.gate_proj(hidden))

    def sink(self, module: Any) -> Tensor:
        """The logits [H] of the heads' sinks."""
        sinks: Tensor = module.sinks.float()
        return sinks

    def apply_gate(self, values: Tensor, gate: Tensor | None) -> Tensor:
        """The attention's output [T, H * V] times its gate."""
        assert gate is not None
        return values * torch.sigmoid(gate)


class MistralLarge4Family(V32Family):
    """Mistral Large 4: queries without a latent, which grow with the logarithm of their position; layers without rope;
    layers that attend to the rows of an earlier one."""

    def __init__(self, base: Any, kind: CacheKind, backend: str, wrap_layer: WrapLayer) -> None:
        """Read a model (the part below the language-model head)."""
        self._sources = _row_sources(base.config)
        super().__init__(base, kind, backend, wrap_layer)

    def spec(self, config: Any, module: Any) -> LayerSpec:
        """The numbers of one attention module."""
        return replace(super().spec(config, module), reuse_rows=module.is_kv_shared_layer)

    def layer_recipe(self, spec: LayerSpec) -> IndexRecipe:
        """How the index queries and keys of a layer are rotated: not at all in layers without rope."""
        return replace(self.recipe, rope_dim=spec.rope_dim)

    def row_source(self, layer: int) -> int:
        """The number of the layer whose rows a layer attends to."""
        return self._sources[layer]

    def query(self, module: Any, hidden: Tensor) -> Query:
        """The queries of the tokens [T, N]. The indexer has a norm and a projection of its own."""
        return Query(module.q_proj(hidden).unflatten(1, (module.num_heads, -1)), hidden)

    def index_query(self, indexer: Any, index_input: Tensor, positions: Tensor | None) -> Tensor:
        """The indexer's queries [T, H, D] before their rope, scaled by their positions."""
        q = super().index_query(indexer, indexer.q_input_norm(index_input), positions)
        return _scale_by_position(indexer.softmax_scaling, q, positions)

    def scale_query(self, module: Any, q: Tensor, positions: Tensor | None) -> Tensor:
        """The rotated queries [T, H, P + R], scaled by their positions."""
        return _scale_by_position(module.softmax_scaling, q, positions)


def _scale_by_position(scaling: Any, q: Tensor, positions: Tensor | None) -> Tensor:
    """Queries [T, H, D] times the model's factor for each head and each of the positions [T]."""
    assert positions is not None
    scaled: Tensor = scaling(q.unsqueeze(0), positions.unsqueeze(0), head_dim_first=False).squeeze(0)
    return scaled


def _row_sources(config: Any) -> list[int]:
    """For each layer, the layer whose rows it attends to.

    The model itself hands on the rows of the latest layer that shares them, one with rope and one without. A config
    that names another layer would mean something else to it, so it is refused.
    """
    sources, ropes = list(config.kv_source_layers), list(config.no_rope_layers)
    latest: dict[bool, int] = {}
    for layer, source in enumerate(sources):
        rope = bool(ropes[layer])
        if source != layer and source != latest.get(rope):
            kind = "with" if rope else "without"
            expected = f"{latest.get(rope)}, the latest layer {kind} rope whose rows later layers share"
            raise checks.refuse(f"config.kv_source_layers[{layer}]", expected, source, "transformers reads that one")
        if source == layer and layer in sources[layer + 1 :]:
            latest[rope] = layer
    return sources
