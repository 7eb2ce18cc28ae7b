"""The attention modules of Hugging Face transformers on tamis: one class per family of models.

The forward pass of a model (`forward`) plans a step once. Each attention module then gets that `Step` in place of a
mask.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from tamis import checks
from tamis.cache.layout import Layout, compressor_state, index_fp8, rows, v4_fp8, v32_fp8
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Caches
from tamis.cache.v4_caches import STATE_PAGE_SIZES, V4Caches
from tamis.choice import choose
from tamis.integrations.hf.cache import MAIN_POOL, CacheShape, Held, Pool
from tamis.layers.mla import SparseMLA
from tamis.layers.v4 import SparseV4
from tamis.layers.v4_weights import V4Weights
from tamis.model.absorb import AbsorbedWeights
from tamis.model.recipe import IndexRecipe
from tamis.model.rope import rotate
from tamis.model.spec import LayerSpec
from tamis.ops import IndexInputs, quantise_index_query, rotate_index, write_index_keys
from tamis.step.batch import Batch
from tamis.step.plan import Limits
from tamis.step.planner import Planner
from tamis.step.v4_plan import WINDOW_POOL, state_pool
from tamis.step.v4_planner import V4Planner

CacheKind = Literal["fp8", "bf16", "fp32"]
WrapLayer = Callable[[int, Any], Any]
"""Takes a layer's number and the layer (a `SparseMLA` or a `SparseV4`); returns the layer that runs in its place."""
PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32}
PAGE, V4_PAGE, WINDOW_PAGE = 64, 256, 64
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


class V32Family:
    """DeepSeek-V3.2 and GLM-MoE-DSA: latent rows and index keys of every token, in one pool."""

    counts_tokens = False

    def __init__(self, base: Any, kind: CacheKind, backend: str, wrap_layer: WrapLayer) -> None:
        """Read a model (the part below the language-model head)."""
        config, device, dtype = base.config, base.embed_tokens.weight.device, base.embed_tokens.weight.dtype
        modules = [layer.self_attn for layer in base.layers]
        self.specs = specs = [_v32_spec(config, module) for module in modules]
        latent = specs[0].latent_dim
        dim, rope = config.index_head_dim, specs[0].rope_dim
        if kind == "fp8":
            layout = v32_fp8(latent=latent, rope=rope, tile=gcd(latent, 128))
        else:
            layout = rows(PLAIN[kind], latent=latent, rope=rope)
        keys = key_layout(kind, dim, dtype)
        # The Hadamard rotation makes FP8 keys more exact; without FP8 it would only cost time.
        self.recipe = IndexRecipe.from_hf(config, hadamard=kind == "fp8" and dim & (dim - 1) == 0)
        choose(specs[0], device, layout=layout, dtype=dtype, page_size=PAGE, prefer=backend)
        self.backend, self.quantised = backend, kind == "fp8"
        self.layers = [wrap_layer(number, SparseMLA(spec, backend=backend)) for number, spec in enumerate(specs)]
        held = [
            {"latent": Held(MAIN_POOL, layout, PAGE)}
            | ({} if spec.reuse_topk else {"index": Held(MAIN_POOL, keys, PAGE, self.recipe)})
            for spec in specs
        ]
        self.shape = CacheShape({MAIN_POOL: Pool(PAGE)}, held, device)
        self._planners = Planners(lambda limits: Planner(specs[0], limits, device, layout=layout), {MAIN_POOL: PAGE})

    def plan(self, batch: Batch) -> Any:
        """The step's metadata, valid until the next step."""
        return self._planners.plan(batch)


def _v32_spec(config: Any, module: Any) -> LayerSpec:
    return LayerSpec(
        config.num_attention_heads,
        config.kv_lora_rank,
        config.qk_rope_head_dim,
        config.kv_lora_rank,
        module.scaling,
        topk=config.index_topk,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        reuse_topk=module.indexer is None,
    )


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
    **_: Any,
) -> tuple[Tensor, None, Tensor]:
    """Replaces `GlmMoeDsaAttention.forward`. The indices that it returns for layers that share them are packed
    positions, without rows for padding."""
    shared = prev_topk_indices if self.indexer is None else None
    out, positions = _v32_attend(self, hidden_states, position_embeddings, attention_mask, shared)
    return out, None, positions


def _v32_attend(
    module: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], step: Step, shared: Tensor | None
) -> tuple[Tensor, Tensor]:
    layer: SparseMLA = step.family.layers[module.layer_idx]
    spec, caches = layer.spec, Caches(**step.paged[module.layer_idx])
    hidden = step.pack(hidden_states)
    angles = step.pack(rope_angles(position_embeddings, hidden_states))
    residual = module.q_a_layernorm(module.q_a_proj(hidden))
    q_nope, q_rope = (
        module.q_b_proj(residual).unflatten(1, (spec.heads, -1)).split([module.qk_nope_head_dim, spec.rope_dim], dim=-1)
    )
    latent, k_rope = module.kv_a_proj_with_mqa(hidden).split([spec.latent_dim, spec.rope_dim], dim=-1)
    rotation: dict[str, Any] = {
        # Each token has its own row of angles, so its number is its position in the table.
        "positions": torch.arange(len(hidden), dtype=torch.int64, device=hidden.device),
        "cos_sin": angles,
    }
    indexer = module.indexer
    weights = absorbed(module, spec)
    call = layer.prepare(
        (weights.absorb_query(q_nope), rotate(q_rope, angles.unsqueeze(1), interleaved=True)),
        (module.kv_a_layernorm(latent), rotate(k_rope, angles, interleaved=True)),
        caches,
        step.plan,
        positions=shared,
        index=None if indexer is None else _index_inputs(indexer, hidden, residual, rotation, step.family),
    )
    if indexer is not None:
        # The whole call has been checked by now, so a refused call does not change the index cache.
        _write_index_keys(indexer, hidden, rotation, caches, step)
    result = layer.run(call)
    if step.record is not None and indexer is not None:
        step.record(module.layer_idx, step.plan, result.positions)
    out = module.o_proj(weights.project_value(result.out).flatten(1))
    return step.unpack(out, hidden_states), result.positions


def rope_angles(position_embeddings: tuple[Tensor, Tensor], like: Tensor) -> Tensor:
    """float32 [requests, columns, rope]: the cosines, then the sines, of the model's own rotary embedding."""
    cos, sin = (half[..., : half.shape[-1] // 2] for half in position_embeddings)
    return torch.cat((cos, sin), dim=-1).float().expand(*like.shape[:2], -1)


def _index_inputs(indexer: Any, hidden: Tensor, residual: Tensor, rotation: dict[str, Any], family: Any) -> IndexInputs:
    """The indexer's queries and weights for the step's tokens. The keys are not among them: `_write_index_keys` norms,
    rotates and writes them in one pass."""
    q = indexer.wq_b(residual).unflatten(1, (indexer.n_heads, indexer.head_dim))
    weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
    if family.quantised:
        q, weights = quantise_index_query(q, weights, family.recipe, **rotation, backend=family.backend)
    else:
        q = rotate_index(q, family.recipe, **rotation).to(q.dtype)
        weights = weights.float() * (indexer.n_heads * indexer.head_dim) ** -0.5
    return IndexInputs(q, weights, recipe=family.recipe)


def _write_index_keys(indexer: Any, hidden: Tensor, rotation: dict[str, Any], caches: Caches, step: Step) -> None:
    norm = indexer.k_norm
    assert caches.index is not None
    write_index_keys(
        indexer.wk(hidden),
        caches.index,
        step.plan.slots,
        norm_weight=norm.weight,
        norm_bias=norm.bias,
        norm_eps=norm.eps,
        **rotation,
        backend=step.family.backend,
    )


def absorbed(module: Any, spec: LayerSpec) -> AbsorbedWeights:
    """Views of `kv_b_proj`'s weight, which therefore follow the model to other devices. A quantised layer is applied to
    the unit vectors instead, which gives its exact weight whatever its quantisation."""
    layer = module.kv_b_proj
    if type(layer) is nn.Linear:
        weight = layer.weight
    else:
        norm = module.kv_a_layernorm.weight
        weight = layer(torch.eye(spec.latent_dim, dtype=norm.dtype, device=norm.device)).T
    key, value = weight.unflatten(0, (spec.heads, -1)).split([module.qk_nope_head_dim, module.v_head_dim], dim=1)
    return AbsorbedWeights(key, value.transpose(1, 2))


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
        self._source: list[tuple[int, int]] = []
        self._planners = Planners(
            lambda limits: V4Planner(specs, limits, weight.device, layout=layout, backend=backend),
            {name: pool.page_size for name, pool in pools.items()},
        )

    def plan(self, batch: Batch) -> Any:
        """The step's metadata, valid until the next step."""
        longest = int(batch.lengths.max())
        # The layers share the model's weights, or hold copies of adapted ones. So they are made again when the model
        # was copied or converted, and after an optimizer's step.
        source = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in self._parameters()]
        if source != self._source or len(self.layers[0].cos_sin) < longest:
            self._make_layers(longest + longest // 4 + V4_PAGE)
            self._source = source
        return self._planners.plan(batch)

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
            self.layers.append(self._wrap_layer(number, layer))


@torch.no_grad()
def _v4_tensors(module: Any) -> dict[str, Tensor]:
    """An attention module's tensors by name. The weight of a linear layer with an adapter is the image of the unit
    vectors."""
    found: dict[str, Tensor] = module.state_dict()
    for name, layer in module.named_modules():
        base = getattr(layer, "base_layer", None)
        if isinstance(base, nn.Linear):
            found = {key: tensor for key, tensor in found.items() if not key.startswith(f"{name}.")}
            unit = torch.eye(base.in_features, dtype=base.weight.dtype, device=base.weight.device)
            found[f"{name}.weight"] = layer(unit).T.contiguous()
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
    out = layer(step.pack(hidden_states), V4Caches(**step.paged[self.layer_idx]), step.plan)
    return step.unpack(out, hidden_states), None
