"""DeepSeek-V4's attention modules of Hugging Face transformers on tamis."""

from collections.abc import Hashable
from dataclasses import replace
from math import gcd, lcm
from typing import Any

import torch
from torch import Tensor, nn

from tamis import checks
from tamis.cache.layout import Layout, compressor_state, rows, v4_fp8
from tamis.cache.v4_caches import STATE_PAGE_SIZES, V4Caches
from tamis.choice import choose
from tamis.integrations.hf.adapters import chosen_adapters, unit_images
from tamis.integrations.hf.cache import MAIN_POOL, CacheShape, Held, Pool
from tamis.integrations.hf.layers import PLAIN, CacheKind, Planners, Step, WrapLayer, key_layout, wrapped
from tamis.layers.v4 import SparseV4
from tamis.layers.v4_weights import V4Weights
from tamis.model.spec import LayerSpec
from tamis.step.batch import Batch
from tamis.step.v4_plan import WINDOW_POOL, state_pool
from tamis.step.v4_planner import V4Planner

V4_PAGE, WINDOW_PAGE = 256, 64
"""Tokens per page."""


class V4Family:
    """DeepSeek-V4: the raw tokens of the window, compressed entries, index keys and compressor state.

    Window and state have pools of their own, in which rows that have left the window, or that have been compressed, are
    overwritten.
    """

    counts_tokens = True

    def __init__(self, base: Any, kind: CacheKind, backend: str, wrap_layer: WrapLayer) -> None:
        """Read a model (the part below the language-model head)."""
        self._base, self.backend, self._wrap_layer, self.quantised = base, backend, wrap_layer, kind == "fp8"
        weight = base.embed_tokens.weight
        self.specs = specs = [LayerSpec.from_hf(base.config, number) for number in range(len(base.layers))]
        latent, rope = specs[0].latent_dim, specs[0].rope_dim
        if kind == "fp8":
            layout: Layout = v4_fp8(latent=latent, rope=rope, tile=gcd(latent, 64))
        else:
            layout = rows(PLAIN[kind], latent=latent, rope=rope)
        choose(specs[0], weight.device, layout=layout, dtype=weight.dtype, prefer=backend)
        page = lcm(V4_PAGE, *(spec.compress for spec in specs))
        pools = {MAIN_POOL: Pool(page), WINDOW_POOL: Pool(WINDOW_PAGE, specs[0].window)}
        for spec in specs:
            if spec.kind != "window":
                spans = 2 if spec.kind == "overlapping" else 1
                pools[state_pool(spec.compress)] = Pool(STATE_PAGE_SIZES[spec.kind], spans * spec.compress)
        held = [_v4_held(spec, layout, key_layout(kind, spec.index_dim or 4, weight.dtype), page) for spec in specs]
        self.shape = CacheShape(pools, held, weight.device)
        self.layers: list[SparseV4] = []
        self._source: list[Hashable] = []
        self._planners = Planners(
            lambda limits: V4Planner(specs, limits, weight.device, layout=layout, backend=backend),
            {name: pool.page_size for name, pool in pools.items()},
        )

    def plan(self, batch: Batch) -> Any:
        """The step's metadata, valid until the next step."""
        longest = int(batch.lengths.max())
        # The layers share the model's weights, or hold copies of adapted ones. So they are made again when the model
        # was copied or converted, after an optimizer's step, and when other adapters were chosen.
        source: list[Hashable] = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self._parameters()]
        source += [chosen for layer in self._base.layers for chosen in chosen_adapters(layer.self_attn)]
        if source != self._source or len(self.layers[0].cos_sin) < longest:
            self._make_layers(longest + longest // 4 + V4_PAGE)
            self._source = source
        self._renew_sinks()
        return self._planners.plan(batch)

    def _renew_sinks(self) -> None:
        """Copy sinks that are not in float32 again: a copy does not follow what is written through `.data`."""
        for number, layer in enumerate(self.layers):
            sinks = self._base.layers[number].self_attn.sinks
            if sinks.dtype != torch.float32:
                layer.weights = replace(layer.weights, sink=sinks.detach().float())

    def _parameters(self) -> list[Tensor]:
        """The parameters of all attention modules."""
        found = [p for layer in self._base.layers for p in layer.self_attn.parameters()]
        if any(hasattr(p, "to_local") for p in found):  # a DTensor, whose module takes seconds to import
            remedy = "generate with an unsharded copy of the model"
            raise checks.refuse("model", "whole when it serves V4", "parameters sharded by fully_shard", remedy)
        return found

    def _make_layers(self, positions: int) -> None:
        """Make the layers, with the angles of the model's own rotary embedding for this many positions."""
        base = self._base
        at = torch.arange(positions, dtype=torch.int64, device=self.shape.device).unsqueeze(0)
        like = torch.zeros(1, dtype=torch.float32, device=self.shape.device)
        tables = {
            name: torch.cat(base.rotary_emb(like, position_ids=at, layer_type=name), dim=-1)[0]
            for name in ("main", "compress")
        }
        self.layers = []
        for number, spec in enumerate(self.specs):
            module = base.layers[number].self_attn
            weights = V4Weights.from_state_dict(_v4_tensors(module), groups=base.config.o_groups)
            table = tables[module.rope_layer_type]
            eps = base.config.rms_norm_eps
            layer = SparseV4(spec, weights, table, eps=eps, backend=self.backend)
            self.layers.append(wrapped(self._wrap_layer, number, layer))


@torch.no_grad()
def _v4_tensors(module: Any) -> dict[str, Tensor]:
    """An attention module's tensors by name. The weight of a linear layer with an adapter is the image of the unit
    vectors."""
    found: dict[str, Tensor] = module.state_dict()
    for name, layer in module.named_modules():
        base = getattr(layer, "base_layer", None)
        if isinstance(base, nn.Linear):
            found = {key: tensor for key, tensor in found.items() if not key.startswith(f"{name}.")}
            found[f"{name}.weight"] = unit_images(name, layer, base.in_features, base.weight).contiguous()
    return found


def _v4_held(spec: LayerSpec, layout: Layout, keys: Layout, page: int) -> dict[str, Held]:
    held = {"window": Held(WINDOW_POOL, layout, WINDOW_PAGE)}
    if spec.kind == "window":
        return held
    overlapping, pool = spec.kind == "overlapping", state_pool(spec.compress)
    state = compressor_state(dim=spec.head_dim, overlapping=overlapping)
    held["entries"] = Held(MAIN_POOL, layout, page // spec.compress)
    held["state"] = Held(pool, state, STATE_PAGE_SIZES[spec.kind])
    if overlapping:
        held["index"] = Held(MAIN_POOL, keys, page // spec.compress)
        state = compressor_state(dim=spec.index_dim, overlapping=True)
        held["index_state"] = Held(pool, state, STATE_PAGE_SIZES[spec.kind])
    return held


def v4_forward(self: Any, hidden_states: Tensor, *, attention_mask: Step, **_: Any) -> tuple[Tensor, None]:
    """Replaces `DeepseekV4Attention.forward`. Positions count a request's own tokens: padding is neither compressed nor
    counted."""
    step = attention_mask
    layer: SparseV4 = step.family.layers[self.layer_idx]
    hidden, caches = step.pack(hidden_states), V4Caches(**step.paged[self.layer_idx])
    if step.record is None or layer.spec.kind != "overlapping":
        return step.unpack(layer(hidden, caches, step.plan), hidden_states), None
    selected = torch.empty(len(hidden), layer.spec.topk or 0, dtype=torch.int32, device=hidden.device)
    out = layer(hidden, caches, step.plan, selected=selected)
    step.record(self.layer_idx, step.plan.step, selected)
    return step.unpack(out, hidden_states), None
