"""The whole attention layer against Hugging Face transformers' own DeepSeek-V3.2 on a tiny random model.

Its attention expands keys and values per head and masks a dense product; ours absorbs the projections and attends to
selected rows of a paged cache. Only the weights and the hidden states are shared.
"""

from functools import cache

import bounds
import pytest
import torch
from bounds import relative_error
from hf_models import V32, transformers
from seeds import reseed, seed_of

from tamis import Batch, Caches, LayerSpec, Limits, PagedCache, PagePool, Planner, SparseMLA
from tamis.cache.layout import named, rows
from tamis.model.absorb import AbsorbedWeights
from tamis.model.rope import Rope, rms_norm, rotate
from tamis.ops import IndexInputs

TOKENS, PAGE = 100, 7
ROPES = {"plain": {"rope_type": "default", "rope_theta": 10000.0}}
ROPES["yarn"] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


@cache
def recorded_layer(rope: str, latent: int, rope_dim: int):
    """Run the model once and keep what its second attention layer got, selected and returned."""
    reseed(4)
    sizes = {"num_hidden_layers": 2, "index_topk": 8, "index_head_dim": 2 * rope_dim}
    changes = {"kv_lora_rank": latent, "qk_rope_head_dim": rope_dim, "rope_parameters": dict(ROPES[rope])}
    options = {"attn_implementation": "eager", "initializer_range": 0.2}
    config = transformers.DeepseekV32Config(**V32 | sizes | changes | options)
    model = transformers.DeepseekV32ForCausalLM(config).eval()
    attention = model.model.layers[1].self_attn
    seen: dict[str, torch.Tensor] = {}

    def keep(module, args, kwargs, output):
        seen["hidden"] = kwargs.get("hidden_states", args[0] if args else None)[0]
        seen["output"] = output[0][0]

    def keep_selection(module, args, kwargs, output):
        seen["topk"] = output[0]

    attention.register_forward_hook(keep, with_kwargs=True)
    attention.indexer.register_forward_hook(keep_selection, with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(0, 128, (1, TOKENS)))
    return config, attention, seen


class TamisLayer:
    """The same layer on tamis, fed with hidden states chunk by chunk."""

    def __init__(self, config, attention, layout) -> None:
        self.config, self.attention = config, attention
        self.spec = LayerSpec.from_hf(config, 1)
        self.layer = SparseMLA(self.spec)
        self.pool = PagePool(40, PAGE, seed=seed_of(0))
        index_keys = PagedCache(rows(torch.float32, latent=config.index_head_dim, rope=0), 40, PAGE)
        self.caches = Caches(PagedCache(layout, 40, PAGE), index_keys)
        limits = Limits(max_tokens=TOKENS, max_requests=1, max_length=TOKENS, page_size=PAGE)
        self.planner = Planner(self.spec, limits, layout=layout)
        self.weights = AbsorbedWeights.from_layer(
            attention.kv_b_proj,
            heads=config.num_attention_heads,
            nope_dim=config.qk_nope_head_dim,
            value_dim=config.v_head_dim,
            latent_dim=config.kv_lora_rank,
            dtype=torch.float32,
        )
        rope_dim = config.qk_rope_head_dim
        self.table = Rope.from_hf(config.to_dict(), rope_dim).cos_sin_table(TOKENS)
        self.queries, self.rows = torch.zeros(0), torch.zeros(0)

    def __call__(self, hidden: torch.Tensor, length: int, topk: torch.Tensor | None):
        config, attention = self.config, self.attention
        plan = self.planner.plan(Batch.build([len(hidden)], [length], self.pool))
        table = self.table[plan.positions.long()]
        residual = attention.q_a_layernorm(attention.q_a_proj(hidden))
        q = attention.q_b_proj(residual).view(len(hidden), config.num_attention_heads, -1)
        q_nope, q_rope = q.split([config.qk_nope_head_dim, config.qk_rope_head_dim], -1)
        q_rope = rotate(q_rope, table.unsqueeze(1), interleaved=True)
        latent, k_rope = attention.kv_a_proj_with_mqa(hidden).split([config.kv_lora_rank, config.qk_rope_head_dim], -1)
        latent = rms_norm(latent, attention.kv_a_layernorm.weight, attention.kv_a_layernorm.variance_epsilon)
        k_rope = rotate(k_rope, table, interleaved=True)
        absorbed = self.weights.absorb_query(q_nope)
        self.queries = torch.cat((self.queries, torch.cat((absorbed, q_rope), -1)))
        self.rows = torch.cat((self.rows, torch.cat((latent, k_rope), -1)))
        index = self.index_inputs(hidden, residual, table)
        result = self.layer(
            (absorbed, q_rope),
            (latent, k_rope),
            self.caches,
            plan,
            positions=topk,
            index=index if topk is None else None,
        )
        positions = self.layer.select(index, self.caches, plan) if topk is None else topk
        return attention.o_proj(self.weights.project_value(result.out).flatten(1)), positions

    def rounding_error(self, topk: torch.Tensor) -> torch.Tensor:
        """How far each value of the layer's output may move as rows are rounded to bf16: the error of attention's
        output, carried through the two projections after it as independent errors are."""
        options = {"scale": self.spec.scale, "value_dim": self.config.kv_lora_rank}
        options["row_unit"] = bounds.unit(torch.bfloat16)
        tokens = ((q, self.rows[chosen[chosen >= 0].long()]) for q, chosen in zip(self.queries, topk, strict=True))
        latent = bounds.stacked([bounds.attention(q, rows, **options) for q, rows in tokens]).out_error
        values = torch.einsum("thl,hlv->thv", latent.square(), self.weights.value.double().square())
        return (values.flatten(1) @ self.attention.o_proj.weight.double().square().T).sqrt()

    def index_inputs(self, hidden, residual, table) -> IndexInputs:
        indexer, rope_dim = self.attention.indexer, self.config.qk_rope_head_dim
        q = indexer.wq_b(residual).view(len(hidden), indexer.n_heads, indexer.head_dim)
        keys = indexer.k_norm(indexer.wk(hidden))

        def turned(x, angles):
            return torch.cat((rotate(x[..., :rope_dim], angles, interleaved=False), x[..., rope_dim:]), -1)

        weights = indexer.weights_proj(hidden) * indexer.n_heads**-0.5 * indexer.head_dim**-0.5
        return IndexInputs(turned(q, table.unsqueeze(1)), weights, turned(keys, table))


def causal(topk: torch.Tensor) -> torch.Tensor:
    """The oracle's selection without the masked positions it pads short rows with."""
    return torch.where(topk > torch.arange(len(topk)).unsqueeze(1), -1, topk).int()


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("chunk", [100, 37, 1])
@pytest.mark.parametrize(
    ("layout", "latent", "rope_dim", "bound"),
    [("v32-fp32", 32, 8, 1e-4), ("v32-bf16", 32, 8, None), ("v32-fp32", 512, 64, 1e-4), ("v32-bf16", 512, 64, None)],
)
@pytest.mark.parametrize("own_selection", [False, True], ids=["their-topk", "our-topk"])
def test_layer_output(rope, chunk, layout, latent, rope_dim, bound, own_selection) -> None:
    config, attention, seen = recorded_layer(rope, latent, rope_dim)
    layer = TamisLayer(config, attention, named(layout, latent=latent, rope=rope_dim))
    topk = causal(seen["topk"])
    outputs, chosen = [], []
    with torch.no_grad():
        for start in range(0, TOKENS, chunk):
            end = min(start + chunk, TOKENS)
            given = None if own_selection else topk[start:end].contiguous()
            output, positions = layer(seen["hidden"][start:end], end, given)
            outputs.append(output)
            chosen.append(positions)
    found = torch.cat(outputs)
    if bound is None:
        with torch.no_grad():
            error = layer.rounding_error(topk) + 1e-4 * seen["output"].abs().max()
        bounds.agree(found, seen["output"], error)
    else:
        assert (found - seen["output"]).abs().max() < bound * seen["output"].abs().max()
        assert relative_error(found, seen["output"]) < bound
    for ours, theirs in zip(torch.cat(chosen), topk, strict=True):
        assert set(ours.tolist()) == set(theirs.tolist())


def test_fp8_rows_stay_within_their_quantisation_error() -> None:
    config, attention, seen = recorded_layer("plain", 512, 64)
    layer = TamisLayer(config, attention, "v32-fp8")
    with torch.no_grad():
        found, _ = layer(seen["hidden"], TOKENS, causal(seen["topk"]))
    assert 1e-4 < relative_error(found, seen["output"]) < 4e-2
