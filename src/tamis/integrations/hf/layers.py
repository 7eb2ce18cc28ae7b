"""The attention modules of Hugging Face transformers on tamis: DeepSeek-V3.2 and its family.

The forward pass of a model (`forward`) plans a step once. Each attention module then gets that `Step` in place of a
mask. Models that differ from V3.2 in more than numbers are in `mla_models`, and DeepSeek-V4 is in `v4_layers`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from tamis import checks
from tamis.cache.layout import Layout, index_fp8, rows, v32_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Caches
from tamis.choice import choose
from tamis.integrations.hf.adapters import unit_images
from tamis.integrations.hf.cache import MAIN_POOL, CacheShape, Held, Pool
from tamis.layers.mla import SparseMLA
from tamis.model.absorb import AbsorbedWeights
from tamis.model.recipe import IndexRecipe
from tamis.model.rope import rotate
from tamis.model.spec import LayerSpec
from tamis.ops import IndexInputs, quantise_index_query, rotate_index, write_index_keys
from tamis.step.batch import Batch
from tamis.step.plan import Limits
from tamis.step.planner import Planner

CacheKind = Literal["fp8", "bf16", "fp32"]
WrapLayer = Callable[[int, Any], Any]
"""Takes a layer's number and the layer (a `SparseMLA` or a `SparseV4`); returns the layer that runs in its place."""
PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}
PAGE = 64
"""Tokens per page."""


class Family(Protocol):
    """The differences between families of models: the caches that their layers keep, and the planning of a step."""

    shape: CacheShape
    specs: list[Any]
    """The `LayerSpec` of each layer; None for layers of linear attention, which are the model's own."""
    layers: list[Any]
    counts_tokens: bool
    """Whether positions count a request's own tokens, whatever `position_ids` says."""
    quantised: bool
    """Whether index keys are kept in FP8."""

    def plan(self, batch: Batch) -> Any:
        """The step's metadata, valid until the next step."""
        ...


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass, as the attention modules receive it."""

    family: Any
    plan: Any
    paged: list[dict[str, PagedCache]]
    real: Tensor | None
    """int64 [T], the numbers of the real tokens among all tokens; None if there is no padding."""
    record: Any = None
    """A function of layer, plan and selected positions that keeps them; None if nobody does."""

    def pack(self, x: Tensor) -> Tensor:
        """The real tokens' rows [T, ...] of [requests, columns, ...]."""
        flat = x.flatten(0, 1)
        return flat if self.real is None else flat[self.real]

    def unpack(self, packed: Tensor, like: Tensor) -> Tensor:
        """The inverse of `pack`: the rows in the shape of `like`, with zeros for padding."""
        if self.real is None:
            return packed.view(like.shape)
        out = torch.zeros_like(like)
        out.view(-1, like.shape[-1])[self.real] = packed.to(like.dtype)
        return out


class Planners:
    """Makes a new planner when the size of the steps changes, so that a decode step does not have to fill the buffers
    of a long prefill."""

    def __init__(self, make: Any, page_sizes: dict[str, int]) -> None:
        """Remember how to make a planner for given limits."""
        self._make, self._sizes = make, dict(page_sizes)
        self._page_size = self._sizes.pop(MAIN_POOL)
        self._planner: Any = None

    def plan(self, batch: Batch) -> Any:
        """The step's metadata."""
        tokens, requests, length = int(batch.query_starts[-1]), len(batch.lengths), int(batch.lengths.max())
        room = 1 << (max(tokens, 1) - 1).bit_length()
        limits = None if self._planner is None else self._planner.limits
        if limits is None or limits.max_tokens != room or limits.max_requests != requests or limits.max_length < length:
            longest = length + length // 4 + PAGE
            self._planner = self._make(Limits(room, requests, longest, self._page_size, self._sizes))
        return self._planner.plan(batch)


def key_layout(kind: CacheKind, dim: int, dtype: torch.dtype) -> Layout:
    """The format of index keys. Rounding a key can change what is selected, so that beside bf16 rows the keys keep the
    model's own dtype."""
    if kind == "fp8":
        return index_fp8(dim=dim)
    return rows(torch.float32 if kind == "fp32" else dtype, latent=dim, rope=0)


def check_first(specs: Sequence[LayerSpec | None]) -> None:
    """Refuse a model whose first layer with rows uses an earlier selection; None is linear attention."""
    number, first = next((number, spec) for number, spec in enumerate(specs) if spec is not None)
    if first.reuse_topk:
        remedy = "no layer before it selects"
        raise checks.refuse(f"config.indexer_types[{number}]", "'full' in the first layer", "'shared'", remedy)


class Query(NamedTuple):
    """A layer's queries before their rope, and what is projected together with them."""

    heads: Tensor
    """[T, H, P + R]: the columns without rope first."""
    index_input: Tensor
    """[T, N], from which the indexer projects its own queries."""
    gate: Tensor | None = None
    """[T, H * V]: the output's gate before its sigmoid; None if there is none."""


class V32Family:
    """DeepSeek-V3.2 and GLM-MoE-DSA: latent rows and index keys of every token, in one pool.

    The methods below `plan` are what other models of the family override (`mla_models`).
    """

    counts_tokens = False
    interleaved = True
    """Whether the rope of attention rotates pairs (2i, 2i+1); otherwise pairs (i, i + R/2)."""

    def __init__(self, base: Any, kind: CacheKind, backend: str, wrap_layer: WrapLayer) -> None:
        """Read a model (the part below the language-model head)."""
        config, device, dtype = base.config, base.embed_tokens.weight.device, base.embed_tokens.weight.dtype
        self.specs = specs = [self.spec(config, layer.self_attn) for layer in base.layers]
        check_first(specs)
        dim = config.index_head_dim
        keys = key_layout(kind, dim, dtype)
        # The Hadamard rotation makes FP8 keys more exact; without FP8 it would only cost time.
        self.recipe = IndexRecipe.from_hf(config, hadamard=kind == "fp8" and dim & (dim - 1) == 0)
        self.backend, self.quantised = backend, kind == "fp8"
        self._planners: dict[int, Planners] = {}
        held = []
        for spec in specs:
            layout = _row_layout(kind, spec)
            if spec.rope_dim not in self._planners:
                choose(spec, device, layout=layout, dtype=dtype, page_size=PAGE, prefer=backend)
                make = partial(Planner, spec, device=device, layout=layout)
                self._planners[spec.rope_dim] = Planners(make, {MAIN_POOL: PAGE})
            own = {} if spec.reuse_rows else {"latent": Held(MAIN_POOL, layout, PAGE)}
            if not spec.reuse_topk:
                own["index"] = Held(MAIN_POOL, keys, PAGE, self.layer_recipe(spec))
            held.append(own)
        self.shape = CacheShape({MAIN_POOL: Pool(PAGE)}, held, device)
        self.layers = [
            wrapped(wrap_layer, number, SparseMLA(spec, backend=backend)) for number, spec in enumerate(specs)
        ]

    def plan(self, batch: Batch) -> Any:
        """The step's metadata, valid until the next step. Layers of another rope width have a plan of their own."""
        plans = {rope: planners.plan(batch) for rope, planners in self._planners.items()}
        return plans if len(plans) > 1 else next(iter(plans.values()))

    def layer_plan(self, plan: Any, spec: LayerSpec) -> Any:
        """The plan of one layer."""
        return plan[spec.rope_dim] if len(self._planners) > 1 else plan

    def spec(self, config: Any, module: Any) -> LayerSpec:
        """The numbers of one attention module."""
        return LayerSpec(
            config.num_attention_heads,
            config.kv_lora_rank,
            module.qk_rope_head_dim,
            config.kv_lora_rank,
            module.scaling,
            topk=config.index_topk,
            index_heads=config.index_n_heads,
            index_dim=config.index_head_dim,
            reuse_topk=module.indexer is None,
        )

    def layer_recipe(self, spec: LayerSpec) -> IndexRecipe:
        """How the index queries and keys of a layer are rotated."""
        return self.recipe

    def row_source(self, layer: int) -> int:
        """The number of the layer whose rows a layer attends to."""
        return layer

    def query(self, module: Any, hidden: Tensor) -> Query:
        """The queries of the tokens [T, N]."""
        residual = module.q_a_layernorm(module.q_a_proj(hidden))
        return Query(module.q_b_proj(residual).unflatten(1, (module.num_heads, -1)), residual)

    def index_query(self, indexer: Any, index_input: Tensor, positions: Tensor | None) -> Tensor:
        """The indexer's queries [T, H, D] before their rope."""
        found: Tensor = indexer.wq_b(index_input).unflatten(1, (indexer.n_heads, indexer.head_dim))
        return found

    def scale_query(self, module: Any, q: Tensor, positions: Tensor | None) -> Tensor:
        """The rotated queries [T, H, P + R] times what depends on the positions [T] of their tokens."""
        return q

    def sink(self, module: Any) -> Tensor | None:
        """The logits [H] of the heads' sinks; None if there are none."""
        return None

    def apply_gate(self, values: Tensor, gate: Tensor | None) -> Tensor:
        """The attention's output [T, H * V] times its gate."""
        return values


def wrapped(wrap_layer: WrapLayer, number: int, layer: Any) -> Any:
    """The layer that runs in the place of one that was just made."""
    remedy = "return the layer, or another of its class"
    return checks.instance(f"wrap_layer({number}, layer)", wrap_layer(number, layer), type(layer), remedy)


def _row_layout(kind: CacheKind, spec: LayerSpec) -> Layout:
    """The format of a layer's rows."""
    if kind == "fp8":
        return v32_fp8(latent=spec.latent_dim, rope=spec.rope_dim, tile=gcd(spec.latent_dim, 128))
    return rows(PLAIN[kind], latent=spec.latent_dim, rope=spec.rope_dim)


def v32_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Step,
    **_: Any,
) -> tuple[Tensor, None]:
    """Replaces `DeepseekV32Attention.forward`."""
    out, _positions = _v32_attend(self, hidden_states, position_embeddings, attention_mask, None)
    return out, None


def glm_forward(
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Step,
    prev_topk_indices: Tensor | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """Replaces `GlmMoeDsaAttention.forward`. The indices that it returns for layers that share them are packed
    positions, without rows for padding."""
    shared = prev_topk_indices if self.indexer is None else None
    out, positions = _v32_attend(self, hidden_states, position_embeddings, attention_mask, shared, position_ids)
    return out, None, positions


def _v32_attend(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    step: Step,
    shared: Tensor | None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    family, number, indexer = step.family, module.layer_idx, module.indexer
    layer: SparseMLA = family.layers[number]
    spec, plan = layer.spec, family.layer_plan(step.plan, layer.spec)
    caches = Caches(step.paged[family.row_source(number)]["latent"], step.paged[number].get("index"))
    hidden = step.pack(hidden_states)
    angles = step.pack(rope_angles(position_embeddings, hidden_states))
    positions = None if position_ids is None else step.pack(position_ids.expand(hidden_states.shape[:2]))
    query = family.query(module, hidden)
    q_nope, q_rope = rotated_query(module, query.heads, angles, positions, family)
    weights = absorbed(module, spec, hidden)
    rotation: dict[str, Any] = {}
    if indexer is not None and family.layer_recipe(spec).rope_dim:
        # Each token has its own row of angles, so its number is its position in the table.
        own = torch.arange(len(hidden), dtype=torch.int64, device=hidden.device)
        rotation = {"positions": own, "cos_sin": angles}
    index = None
    if indexer is not None:
        index_q = family.index_query(indexer, query.index_input, positions)
        index = _index_inputs(indexer, index_q, hidden, rotation, family, family.layer_recipe(spec))
    call = layer.prepare(
        (weights.absorb_query(q_nope), q_rope),
        None if spec.reuse_rows else new_rows(module, hidden, angles, family),
        caches,
        plan,
        positions=shared,
        index=index,
        sink=family.sink(module),
    )
    if indexer is not None:
        # The whole call has been checked by now, so a refused call does not change the index cache.
        _write_index_keys(indexer, hidden, rotation, caches, plan, family.backend)
    result = layer.run(call)
    if step.record is not None and indexer is not None:
        step.record(number, plan, result.positions)
    values = family.apply_gate(weights.project_value(result.out).flatten(1), query.gate)
    return step.unpack(module.o_proj(values), hidden_states), result.positions


def rotated_query(
    module: Any, heads: Tensor, angles: Tensor, positions: Tensor | None, family: Any
) -> tuple[Tensor, Tensor]:
    """The parts [T, H, P] and [T, H, R] of queries: without rope, and rotated."""
    sizes = [module.qk_nope_head_dim, module.qk_rope_head_dim]
    nope, rope = heads.split(sizes, dim=-1)
    if rope.shape[-1]:
        rope = rotate(rope, angles.unsqueeze(1), interleaved=family.interleaved)
    nope, rope = family.scale_query(module, torch.cat((nope, rope), dim=-1), positions).split(sizes, dim=-1)
    return nope, rope


def new_rows(module: Any, hidden: Tensor, angles: Tensor, family: Any) -> tuple[Tensor, Tensor]:
    """The tokens' own rows: the latent part [T, L], and the rope [T, R]."""
    latent, rope = module.kv_a_proj_with_mqa(hidden).split([module.kv_lora_rank, module.qk_rope_head_dim], dim=-1)
    if rope.shape[-1]:
        rope = rotate(rope, angles, interleaved=family.interleaved)
    return module.kv_a_layernorm(latent), rope


def rope_angles(position_embeddings: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """float32 [requests, columns, rope]: the cosines, then the sines, of the model's own rotary embedding."""
    cos, sin = (half[..., : half.shape[-1] // 2] for half in position_embeddings)
    return torch.cat((cos, sin), dim=-1).float().expand(*like.shape[:2], -1)


def _index_inputs(
    indexer: Any, q: Tensor, hidden: Tensor, rotation: dict[str, Any], family: Any, recipe: IndexRecipe
) -> IndexInputs:
    """The indexer's rotated queries and its weights for the step's tokens. The keys are not among them:
    `_write_index_keys` norms, rotates and writes them in one pass."""
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    if family.quantised:
        q, weights = quantise_index_query(q, weights, recipe, **rotation, backend=family.backend)
    else:
        q = rotate_index(q, recipe, **rotation).to(q.dtype)
        weights = weights.float() * (indexer.n_heads * indexer.head_dim) ** -0.5
    return IndexInputs(q, weights, recipe=recipe)


def _write_index_keys(
    indexer: Any, hidden: Tensor, rotation: dict[str, Any], caches: Caches, plan: Any, backend: str
) -> None:
    norm = indexer.k_norm
    assert caches.index is not None
    write_index_keys(
        indexer.wk(hidden),
        caches.index,
        plan.slots,
        norm_weight=norm.weight,
        norm_bias=norm.bias,
        norm_eps=norm.eps,
        **rotation,
        backend=backend,
    )


def absorbed(module: Any, spec: LayerSpec, like: Tensor) -> AbsorbedWeights:
    """Views of `kv_b_proj`'s weight, which therefore follow the model to other devices. A quantised layer is applied to
    the unit vectors instead, which gives its exact weight whatever its quantisation."""
    layer = module.kv_b_proj
    if type(layer) is nn.Linear:
        weight = layer.weight
    else:
        weight = unit_images("kv_b_proj", layer, spec.latent_dim, like)
    key, value = weight.unflatten(0, (spec.heads, -1)).split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    return AbsorbedWeights(key, value.transpose(1, 2))
