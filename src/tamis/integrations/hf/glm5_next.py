"""GLM-5.3-Flash (`glm5_next`) on tamis: latent rows without a rope, and index keys pooled over groups of tokens.

Its layers of linear attention (KDA) are the model's own. Their states are kept in the `TamisCache`, so that they follow
its requests.
"""

from math import gcd, lcm
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from tamis.cache.layout import Layout, compressor_state, rows, v32_fp8
from tamis.cache.selection import Caches
from tamis.choice import choose
from tamis.integrations.hf.cache import MAIN_POOL, CacheShape, Held, Pool
from tamis.integrations.hf.layers import (
    PAGE,
    PLAIN,
    CacheKind,
    Planners,
    Step,
    WrapLayer,
    absorbed,
    check_first,
    key_layout,
    wrapped,
)
from tamis.layers.mla import SparseMLA
from tamis.model import hf_config
from tamis.model.recipe import IndexRecipe
from tamis.model.rope import hadamard
from tamis.model.spec import LayerSpec
from tamis.ops import IndexInputs, quantise_index_query
from tamis.step.batch import Batch
from tamis.step.planner import Planner
from tamis.step.v4_plan import state_pool

PAGE_KEYS = 16
"""The fewest index keys of a page that every kernel reads."""
STATE_PAGE = 8
"""Tokens per page of the pool with the keys and gates of single tokens."""


class Glm5NextFamily:
    """Latent rows of every token and one index key per group of tokens, in one pool, and the keys and gates of single
    tokens in another, in which those of complete groups are overwritten."""

    counts_tokens = False

    def __init__(self, base: Any, kind: CacheKind, backend: str, wrap_layer: WrapLayer) -> None:
        """Read a model (its language model, below the head)."""
        config, device, dtype = base.config, base.embed_tokens.weight.device, base.embed_tokens.weight.dtype
        fields, count = hf_config.fields_of(config), len(base.layers)
        linear_layers = tuple(number for number in range(count) if hf_config.is_linear(fields, number))
        self.specs = [None if number in linear_layers else LayerSpec.from_hf(fields, number) for number in range(count)]
        check_first(self.specs)
        spec = next(spec for spec in self.specs if spec is not None)
        layout: Layout
        if kind == "fp8":
            layout = v32_fp8(latent=spec.latent_dim, rope=0, tile=gcd(spec.latent_dim, 128))
        else:
            layout = rows(PLAIN[kind], latent=spec.latent_dim, rope=0)
        keys, page = key_layout(kind, spec.index_dim, dtype), lcm(PAGE, PAGE_KEYS * spec.kpool)
        # The Hadamard rotation makes FP8 keys more exact; without FP8 it would only cost time.
        power_of_two = spec.index_dim & (spec.index_dim - 1) == 0
        self.recipe = IndexRecipe.from_hf(config, hadamard=kind == "fp8" and power_of_two)
        choose(spec, device, layout=layout, dtype=dtype, page_size=page, prefer=backend)
        self.backend, self.quantised = backend, kind == "fp8"
        self.layers = [
            None if spec is None else wrapped(wrap_layer, number, SparseMLA(spec, backend=backend))
            for number, spec in enumerate(self.specs)
        ]
        pools, indexed = {MAIN_POOL: Pool(page)}, {"index": Held(MAIN_POOL, keys, page // spec.kpool, self.recipe)}
        if spec.kpool > 1:
            single, state = state_pool(spec.kpool), compressor_state(dim=spec.index_dim, overlapping=False)
            pools[single] = Pool(STATE_PAGE, spec.kpool)
            indexed["index_state"] = Held(single, state, STATE_PAGE)
        held: list[dict[str, Held]] = [
            {} if own is None else {"latent": Held(MAIN_POOL, layout, page)} | ({} if own.reuse_topk else indexed)
            for own in self.specs
        ]
        self.shape = CacheShape(pools, held, device, linear=linear_layers)
        self._planners = Planners(
            lambda limits: Planner(spec, limits, device, layout=layout),
            {name: pool.page_size for name, pool in pools.items()},
        )

    def plan(self, batch: Batch) -> Any:
        """The step's metadata, valid until the next step."""
        return self._planners.plan(batch)


def glm5_next_forward(
    self: Any, hidden_states: Tensor, attention_mask: Step, prev_topk_indices: Tensor | None = None, **_: Any
) -> tuple[Tensor, None, Tensor]:
    """Replaces `Glm5NextTextAttention.forward`. The indices that it returns for a layer that shares them are packed
    positions, without rows for padding."""
    step, indexer = attention_mask, self.indexer
    layer: SparseMLA = step.family.layers[self.layer_idx]
    spec, hidden = layer.spec, step.pack(hidden_states)
    weights = absorbed(self, spec, hidden)
    residual = self.q_a_layernorm(self.q_a_proj(hidden))
    q = self.q_b_proj(residual).unflatten(1, (spec.heads, -1))
    call = layer.prepare(
        weights.absorb_query(q),
        self.kv_a_layernorm(self.kv_a_proj_with_mqa(hidden)),
        Caches(**step.paged[self.layer_idx]),
        step.plan,
        positions=prev_topk_indices if indexer is None else None,
        index=None if indexer is None else _index_inputs(indexer, hidden, residual, spec, step.family),
    )
    result = layer.run(call)
    if step.record is not None and indexer is not None:
        step.record(self.layer_idx, step.plan, result.positions)
    out = self.o_proj(weights.project_value(result.out).flatten(1))
    return step.unpack(out, hidden_states), None, result.positions


def _index_inputs(
    indexer: Any, hidden: Tensor, residual: Tensor, spec: LayerSpec, family: Glm5NextFamily
) -> IndexInputs:
    """The indexer's queries and weights, and the normed keys and gates of single tokens, which the layer pools."""
    q = indexer.wq_b(residual).unflatten(1, (indexer.n_heads, indexer.head_dim))
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    if family.quantised:
        q, weights = quantise_index_query(q, weights, family.recipe, backend=family.backend)
    else:
        weights = weights.float() * (indexer.n_heads * indexer.head_dim) ** -0.5
    keys = indexer.k_norm(indexer.wk(hidden))
    if spec.kpool == 1:
        # A group of one token has its key, whatever the gates say.
        keys = keys if not family.recipe.hadamard else hadamard(keys).to(keys.dtype)
        return IndexInputs(q, weights, keys, family.recipe)
    gates = linear(hidden, indexer.index_kpool_compress_gate)
    return IndexInputs(q, weights, keys, family.recipe, gates, indexer.index_kpool_compress_ape)
