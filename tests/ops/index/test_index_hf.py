"""Selections against Hugging Face transformers' own indexers, DeepSeek-V3.2's and GLM-MoE-DSA's, past their top-k.

Contexts are several times longer than top-k: in shorter ones every selection is right. The two models rotate pairs in
different layouts; both score with matrix products over the whole context, without pages, FP8 or top-k of our kind.
"""

from functools import cache

import pytest
import torch
from hf_models import V32, transformers
from seeds import reseed, seed_of

from tamis import Batch, Caches, IndexRecipe, LayerSpec, Limits, PagedCache, PagePool, Planner, SparseMLA
from tamis.cache.layout import index_fp8, rows
from tamis.model.rope import Rope
from tamis.ops import IndexInputs, index_scores, quantise_index_query, rotate_index, write_index_keys

TOKENS, TOPK, PAGE, DIM, ROPE = 120, 12, 7, 32, 8
LAYERS = 3
MODELS = {
    "v32": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM, {}),
    "glm": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM, {}),
    "glm-shared": (
        transformers.GlmMoeDsaConfig,
        transformers.GlmMoeDsaForCausalLM,
        {"indexer_types": ["full", "shared", "full"]},
    ),
}


@cache
def recorded_model(name: str):
    """Run a tiny random model once and keep what each indexer got and selected, and what each layer used."""
    reseed(4)
    make_config, make_model, options = MODELS[name]
    sizes = {"index_topk": TOPK, "index_head_dim": DIM, "qk_rope_head_dim": ROPE, "num_hidden_layers": LAYERS}
    config = make_config(**V32 | sizes | {"attn_implementation": "eager", "initializer_range": 0.2} | options)
    model = make_model(config).eval()
    seen: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in range(LAYERS)}

    def keep_inputs(layer):
        def hook(module, args, kwargs, output):
            hidden, residual = (*args, kwargs.get("hidden_states"), kwargs.get("q_resid"))[:2]
            seen[layer] |= {"hidden": hidden[0], "residual": residual[0], "selected": output[0]}

        return hook

    def keep_used(layer):
        def hook(module, args, kwargs, output):
            seen[layer]["used"] = output[2][0] if len(output) > 2 else seen[layer]["selected"]

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(keep_used(number), with_kwargs=True)
        if layer.self_attn.indexer is not None:
            layer.self_attn.indexer.register_forward_hook(keep_inputs(number), with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(0, 128, (1, TOKENS)))
    return config, model, seen


def visible(topk: torch.Tensor) -> list[set[int]]:
    """Their selection, without the masked positions that they pad short rows with."""
    return [{j for j in row if j <= t} for t, row in enumerate(topk.tolist())]


class Indexer:
    """One layer's indexer on tamis, fed chunk by chunk: raw projections in, positions out."""

    def __init__(self, config, module, recipe: IndexRecipe, layout) -> None:
        self.module, self.recipe, self.quantised = module, recipe, layout.quantised
        self.spec = LayerSpec.from_hf(config)
        self.layer = SparseMLA(self.spec)
        self.pool = PagePool(40, PAGE, seed=seed_of(0))
        latent = PagedCache(rows(torch.float32, latent=32, rope=ROPE), 40, PAGE)
        self.caches = Caches(latent, PagedCache(layout, 40, PAGE, recipe=recipe))
        limits = Limits(max_tokens=TOKENS, max_requests=1, max_length=TOKENS, page_size=PAGE)
        self.planner = Planner(self.spec, limits, layout=latent.layout)
        self.table = Rope.from_hf(config.to_dict(), ROPE).cos_sin_table(TOKENS)

    def __call__(self, hidden: torch.Tensor, residual: torch.Tensor, length: int):
        """Positions and scores of the chunk that ends at `length`."""
        module = self.module
        self.plan = self.planner.plan(Batch.build([len(hidden)], [length], self.pool))
        write_index_keys(
            module.wk(hidden),
            self.caches.index,
            self.plan.slots,
            norm_weight=module.k_norm.weight,
            norm_bias=module.k_norm.bias,
            norm_eps=module.k_norm.eps,
            positions=self.plan.positions,
            cos_sin=self.table,
        )
        index = self.query(module.wq_b(residual).unflatten(1, (module.n_heads, DIM)), module.weights_proj(hidden))
        positions = self.layer.select(index, self.caches, self.plan)
        plan = self.plan
        scores = index_scores(
            index.q,
            index.weights,
            self.caches.index,
            plan.request_ids,
            plan.block_table,
            plan.positions + 1,
            width=TOKENS,
        )
        return positions, scores

    def query(self, q: torch.Tensor, weights: torch.Tensor) -> IndexInputs:
        where = {"positions": self.plan.positions, "cos_sin": self.table}
        if self.quantised:
            return IndexInputs(*quantise_index_query(q, weights, self.recipe, **where), recipe=self.recipe)
        constant = (self.module.n_heads * DIM) ** -0.5
        return IndexInputs(rotate_index(q, self.recipe, **where), weights * constant, recipe=self.recipe)


def run(name: str, layer: int, chunk: int, recipe: IndexRecipe, layout):
    config, model, seen = recorded_model(name)
    indexer = Indexer(config, model.model.layers[layer].self_attn.indexer, recipe, layout)
    positions, scores = [], []
    with torch.no_grad():
        for start in range(0, TOKENS, chunk):
            some = slice(start, min(start + chunk, TOKENS))
            found = indexer(seen[layer]["hidden"][some], seen[layer]["residual"][some], some.stop)
            positions.append(found[0])
            scores.append(found[1])
    return torch.cat(positions), torch.cat(scores), visible(seen[layer]["selected"])


FP32 = rows(torch.float32, latent=DIM, rope=0)


@pytest.mark.parametrize("name", ["v32", "glm"])
@pytest.mark.parametrize("layer", [0, 2])
@pytest.mark.parametrize("chunk", [TOKENS, 37, 1], ids=["prefill", "chunked", "decode"])
def test_the_same_sets_are_selected(name: str, layer: int, chunk: int) -> None:
    recipe = IndexRecipe.from_hf(recorded_model(name)[0])
    assert recipe.interleaved == (name == "glm")
    positions, scores, theirs = run(name, layer, chunk, recipe, FP32)
    for t in range(TOKENS):
        ours = {p for p in positions[t].tolist() if p >= 0}
        assert len(ours) == min(t + 1, TOPK)
        differing = torch.tensor(sorted(ours ^ theirs[t]), dtype=torch.int64)
        # Rounding may swap two positions whose scores are equal to a few units in the last place, and only those.
        if len(differing):
            assert scores[t, differing].max() - scores[t, differing].min() < 1e-5 * scores[t, : t + 1].abs().max()


@pytest.mark.parametrize("name", ["v32", "glm"])
def test_the_other_rope_layout_selects_other_sets(name: str) -> None:
    """What a port with the wrong pairs would do: nothing wrong up to top-k tokens, a lot after."""
    right = IndexRecipe.from_hf(recorded_model(name)[0])
    wrong = IndexRecipe(ROPE, interleaved=not right.interleaved)
    positions, _, theirs = run(name, 0, TOKENS, wrong, FP32)
    agree = [{p for p in positions[t].tolist() if p >= 0} == theirs[t] for t in range(TOKENS)]
    assert all(agree[:TOPK])
    assert sum(agree[2 * TOPK :]) < 0.7 * (TOKENS - 2 * TOPK)


@pytest.mark.parametrize("name", ["v32", "glm"])
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "hadamard"])
@pytest.mark.parametrize("chunk", [TOKENS, 37, 1], ids=["prefill", "chunked", "decode"])
def test_fp8_keys_and_queries_differ_at_near_equal_scores_only(name: str, turned: bool, chunk: int) -> None:
    config = recorded_model(name)[0]
    _, exact, theirs = run(name, 2, TOKENS, IndexRecipe.from_hf(config), FP32)
    recipe = IndexRecipe.from_hf(config, hadamard=turned)
    positions, scores, _ = run(name, 2, chunk, recipe, index_fp8(dim=DIM))
    known = exact > -torch.inf
    assert (scores[known] - exact[known]).norm() < 0.05 * exact[known].norm()
    common = total = 0
    for t in range(TOKENS):
        ours = {p for p in positions[t].tolist() if p >= 0}
        seen = exact[t, : t + 1]
        error = (scores[t, : t + 1] - seen).abs().max()
        common, total = common + len(ours & theirs[t]), total + len(ours)
        differing = torch.tensor(sorted(ours ^ theirs[t]), dtype=torch.int64)
        if len(differing):
            # Two exact scores change places only if the errors of both together bridge their distance.
            assert seen[differing].max() - seen[differing].min() <= 2 * error
    assert common / total > 0.95


def test_chunks_select_the_same_bits() -> None:
    recipe = IndexRecipe.from_hf(recorded_model("v32")[0])
    whole, _, _ = run("v32", 0, TOKENS, recipe, index_fp8(dim=DIM))
    for chunk in (37, 1):
        assert torch.equal(run("v32", 0, chunk, recipe, index_fp8(dim=DIM))[0], whole)


def test_shared_layers_use_the_selection_of_the_layer_before() -> None:
    config, model, seen = recorded_model("glm-shared")
    specs = [LayerSpec.from_hf(config, layer) for layer in range(LAYERS)]
    assert [spec.reuse_topk for spec in specs] == [False, True, False]
    assert model.model.layers[1].self_attn.indexer is None
    assert torch.equal(seen[1]["used"], seen[0]["selected"])
    positions, _, theirs = run("glm-shared", 0, TOKENS, IndexRecipe.from_hf(config), FP32)
    plan = Indexer(config, None, IndexRecipe(ROPE), FP32)
    step = plan.planner.plan(Batch.build([TOKENS], [TOKENS], plan.pool))
    q, kv = torch.randn(TOKENS, 4, 40), torch.randn(TOKENS, 40)
    shared = SparseMLA(specs[1])(q, kv, plan.caches.latent, step, positions=positions)
    assert shared.positions is positions
    same = [{p for p in row if p >= 0} == theirs[t] for t, row in enumerate(shared.positions.tolist())]
    assert sum(same) >= TOKENS - 2
    with pytest.raises(ValueError, match="shares an earlier layer's selection"):
        SparseMLA(specs[1])(q, kv, plan.caches, step, index=IndexInputs(q, q, kv))
