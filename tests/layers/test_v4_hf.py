"""The whole V4 layer against Hugging Face transformers' own DeepSeek-V4 on a tiny random model.

Its attention concatenates windows and compressed entries and masks a dense product; ours attends to selected rows of
paged caches, fed in chunks. Only the weights and the hidden states are shared.
"""

from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from bounds import relative_error
from seeds import reseed, seed_of
from torch import Tensor

from tamis import Batch, LayerSpec, Limits, PagePool
from tamis.cache.layout import Layout, index_fp8, index_mxfp4, named, plain_fp8, rows
from tamis.cache.v4_caches import V4Caches
from tamis.lab.testing.oracle import hadamard_matrix
from tamis.layers.v4 import SparseV4
from tamis.layers.v4_weights import V4Weights
from tamis.model.rope import Rope
from tamis.step.v4_plan import V4Plan
from tamis.step.v4_planner import V4Planner

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
TOKENS, REQUESTS = 300, 3
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
WIDTHS = {
    "tiny": {"head_dim": 32, "index_head_dim": 16, "sliding_window": 8, "rates": (4, 16), "index_topk": 8},
    "full": {"head_dim": 512, "index_head_dim": 128, "sliding_window": 128, "rates": (4, 128), "index_topk": 24},
}
PAGE, WINDOW_PAGE, STATE_PAGE = {"tiny": 32, "full": 256}, 5, 4


@cache
def recorded(widths: str):
    """Run the model once and keep what each attention layer got, returned and compressed."""
    reseed(4)
    numbers = dict(WIDTHS[widths])
    overlapping, plain = numbers.pop("rates")
    config = transformers.DeepseekV4Config(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        partial_rotary_factor=8 / 32 if widths == "tiny" else 1 / 8,
        q_lora_rank=32,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=32,
        compress_rates={KINDS[1]: overlapping, KINDS[2]: plain},
        layer_types=list(KINDS),
        mlp_layer_types=["moe"] * 3,
        n_routed_experts=4,
        num_experts_per_tok=4,
        moe_intermediate_size=32,
        hc_mult=2,
        hc_sinkhorn_iters=3,
        vocab_size=256,
        num_nextn_predict_layers=0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 16.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        attn_implementation="eager",
        initializer_range=0.2,
        **numbers,
    )
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                parameter.normal_()
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    seen: list[dict[str, Tensor]] = [{} for _ in KINDS]

    def keep(layer: int):
        def hook(module, args, kwargs, output):
            seen[layer] |= {"hidden": args[0] if args else kwargs["hidden_states"], "output": output[0]}

        return hook

    def keep_selection(module, args, kwargs, output):
        seen[1]["chosen"] = output

    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(keep(number), with_kwargs=True)
    model.model.layers[1].self_attn.compressor.indexer.register_forward_hook(keep_selection, with_kwargs=True)
    past = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(torch.randint(0, 256, (REQUESTS, TOKENS)), past_key_values=past)
    for number in (1, 2):
        seen[number] |= past.layers[number].compressed_kv
    return config, [layer.self_attn for layer in model.model.layers], seen


class Served:
    """One of the model's layers on tamis, fed step by step."""

    def __init__(
        self,
        widths: str,
        number: int,
        layout: Layout,
        index_layout: Layout,
        dtype: torch.dtype = torch.float32,
        fp8_output: bool = False,
        hadamard: bool = False,
    ) -> None:
        config, attention, _ = recorded(widths)
        self.spec = spec = LayerSpec.from_hf(config, number)
        rope = Rope.from_hf_v4(config.to_dict(), spec.rope_dim, compressed=spec.kind != "window")
        weights = {name: value.detach().to(dtype) for name, value in attention[number].state_dict().items()}
        held = V4Weights.from_state_dict(weights, groups=config.o_groups)
        self.layer = SparseV4(
            spec,
            held.with_fp8_output() if fp8_output else held,
            rope.cos_sin_table(TOKENS),
            eps=config.rms_norm_eps,
        )
        page_sizes = {"window": WINDOW_PAGE, f"state{spec.compress}": STATE_PAGE}
        limits = Limits(3 * TOKENS, 3, TOKENS, PAGE[widths], page_sizes)
        self.planner = V4Planner([spec], limits, layout=layout)
        self.pool = PagePool(40, PAGE[widths], seed=seed_of(1))
        self.others = {name: PagePool(240, size, seed=seed_of(2)) for name, size in page_sizes.items()}
        self.caches = V4Caches.allocate(
            spec,
            pages=40,
            window_pages=240,
            state_pages=240,
            page_size=PAGE[widths],
            window_page_size=WINDOW_PAGE,
            state_page_size=STATE_PAGE,
            layout=layout,
            index_layout=index_layout,
            hadamard=hadamard,
        )
        for held in (self.caches.window, self.caches.entries, self.caches.index):
            if held is not None:
                held.storage.view(torch.uint8).fill_(0xFF)  # NaN in every format

    def plan(self, *pieces: tuple[int, int, int], padding: int = 0) -> V4Plan:
        """The plan of a step with tokens start..end of some requests."""
        new, ends = [end - start for _, start, end in pieces], [end for _, _, end in pieces]
        names = [request for request, _, _ in pieces]
        batch = Batch.build(new, ends, self.pool, requests=names, other_pools=self.others)
        return self.planner.plan(replace(batch, padded_tokens=sum(new) + padding))

    @torch.no_grad()
    def step(self, hidden: Tensor, *pieces: tuple[int, int, int], padding: int = 0) -> list[Tensor]:
        """The output of each piece, given all requests' hidden states."""
        plan = self.plan(*pieces, padding=padding)
        given = [hidden[request, start:end] for request, start, end in pieces]
        found = self.layer(torch.cat((*given, hidden[0, :padding])), self.caches, plan)
        *parts, rest = found.split([len(part) for part in given] + [padding])
        assert not rest.any()
        return parts

    def run(self, hidden: Tensor, chunk: int) -> Tensor:
        """All outputs of the first request, chunk by chunk."""
        spans = [(start, min(start + chunk, TOKENS)) for start in range(0, TOKENS, chunk)]
        return torch.cat([self.step(hidden, (0, start, end))[0] for start, end in spans])

    def entries(self, cache, count: int, request: int = 0) -> Tensor:
        numbers, page = torch.arange(count), cache.page_size
        return cache.read(self.pool.block_table([request])[0].long()[numbers // page] * page + numbers % page)


def layouts(widths: str, name: str) -> tuple[Layout, Layout]:
    """The formats of rows and of exact index keys."""
    width, rope = WIDTHS[widths]["head_dim"], 8 if widths == "tiny" else 64
    build = {"plain-fp8": plain_fp8}.get(name, partial(named, name))
    keys = rows(torch.float32, latent=WIDTHS[widths]["index_head_dim"], rope=0)
    return build(latent=width - rope, rope=rope), keys


@pytest.mark.parametrize("number", range(3), ids=KINDS)
@pytest.mark.parametrize(
    ("widths", "layout", "chunk"),
    # How a request is cut does not depend on the widths, nor on the format of its rows.
    [
        *(("tiny", "v4-fp32", chunk) for chunk in (300, 37, 1)),
        ("tiny", "v4-bf16", 37),
        ("full", "v4-fp32", 37),
        ("full", "v4-bf16", 300),
    ],
)
def test_layer_output(widths: str, number: int, layout: str, chunk: int) -> None:
    _, _, seen = recorded(widths)
    served, bound = Served(widths, number, *layouts(widths, layout)), {"v4-fp32": 1e-4, "v4-bf16": 5e-3}[layout]
    found, expected = served.run(seen[number]["hidden"], chunk), seen[number]["output"][0]
    assert (found - expected).abs().max() < bound * expected.abs().max()
    assert relative_error(found, expected) < bound


@pytest.mark.parametrize("number", [1, 2], ids=KINDS[1:])
@pytest.mark.parametrize(
    ("layout", "bound", "chunk"),
    [*(("v4-fp32", 5e-6, chunk) for chunk in (300, 37, 1)), ("v4-bf16", 2**-8, 37), ("v4-fp8", 2**-5, 37)],
)
def test_compressed_entries(number: int, layout: str, bound: float, chunk: int) -> None:
    """What is in the caches is what the oracle concatenated, entry by entry, to within the cache's rounding."""
    _, _, seen = recorded("full")
    served = Served("full", number, *layouts("full", layout))
    served.run(seen[number]["hidden"], chunk)
    count = TOKENS // served.spec.compress
    assert seen[number]["compressor"].shape[1] == count
    assert relative_error(served.entries(served.caches.entries, count), seen[number]["compressor"][0]) < bound
    if served.caches.index is not None:
        assert relative_error(served.entries(served.caches.index, count), seen[number]["indexer"][0]) < 5e-6


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("hadamard", [False, True])
def test_selected_entries(widths: str, hadamard: bool) -> None:
    """The oracle knows no Hadamard rotation: orthogonal, and on queries and keys alike, it changes no selection."""
    _, _, seen = recorded(widths)
    served = Served(widths, 1, *layouts(widths, "v4-fp32"), hadamard=hadamard)
    hidden, plan = seen[1]["hidden"][0], served.plan((0, 0, TOKENS))
    with torch.no_grad():
        _, index_q = served.layer.write(hidden, served.caches, plan)
        chosen = served.layer.select(hidden, index_q, served.caches, plan)
    assert chosen.shape == seen[1]["chosen"][0].shape
    for ours, theirs in zip(chosen.tolist(), seen[1]["chosen"][0].tolist(), strict=True):
        assert set(ours) == set(theirs)
    # The layer has a choice to make, and makes it otherwise than by taking the last ones.
    assert (chosen[-1] >= 0).all()
    assert set(chosen[-1].tolist()) != set(range(75 - len(chosen[-1]), 75))


@pytest.mark.parametrize("number", range(3), ids=KINDS)
@pytest.mark.parametrize("layout", ["v4-fp8", "plain-fp8"])
def test_fp8_rows_stay_within_their_quantisation_error(number: int, layout: str) -> None:
    """e4m3 keeps three mantissa bits, an error of 2.4 % per value; sums of many values average it."""
    _, _, seen = recorded("full")
    served = Served("full", number, *layouts("full", layout))
    found = served.run(seen[number]["hidden"], 37)
    assert 1e-3 < relative_error(found, seen[number]["output"][0]) < 4e-2


@pytest.mark.parametrize("number", range(3), ids=KINDS)
def test_an_fp8_output_projection_stays_within_its_quantisation_error(number: int) -> None:
    """Two factors of e4m3, each 2.6 % off, in sums of a thousand terms."""
    _, _, seen = recorded("full")
    served = Served("full", number, *layouts("full", "v4-fp32"), fp8_output=True)
    found = served.run(seen[number]["hidden"], 37)
    assert 1e-2 < relative_error(found, seen[number]["output"][0]) < 6e-2


def test_fp8_index_keys_cost_little_more() -> None:
    """Rounded keys may exchange entries of nearly equal score."""
    _, _, seen = recorded("full")
    served = Served("full", 1, named("v4-fp8"), index_fp8())
    assert relative_error(served.run(seen[1]["hidden"], 37), seen[1]["output"][0]) < 6e-2


@pytest.mark.parametrize("hadamard", [False, True])
def test_mxfp4_index_keys_stay_within_their_quantisation_error(hadamard: bool) -> None:
    """e2m1 keeps one mantissa bit, an error of a tenth of a key's length: entries near the last place change it."""
    _, _, seen = recorded("full")
    served = Served("full", 1, layouts("full", "v4-fp32")[0], index_mxfp4(), hadamard=hadamard)
    found = served.run(seen[1]["hidden"], 37)
    keys = seen[1]["indexer"][0].double() @ (hadamard_matrix(128) if hadamard else torch.eye(128).double())
    assert 0.05 < relative_error(served.entries(served.caches.index, 75), keys) < 0.15
    plan, hidden = served.plan((0, 0, TOKENS)), seen[1]["hidden"][0]
    with torch.no_grad():
        _, index_q = served.layer.write(hidden, served.caches, plan)
        chosen = served.layer.select(hidden, index_q, served.caches, plan)
    pairs = zip(chosen.tolist(), seen[1]["chosen"][0].tolist(), strict=True)
    kept = [len(set(ours) & set(theirs)) / len(set(theirs)) for ours, theirs in pairs]
    assert min(kept) > 0.7
    assert sum(kept) / TOKENS > 0.95
    assert relative_error(found, seen[1]["output"][0]) < 6e-2


@pytest.mark.parametrize(("number", "bound"), [(0, 1.5e-2), (1, 6e-2), (2, 1.5e-2)], ids=KINDS)
def test_16_bit_weights_and_hidden_states(number: int, bound: float) -> None:
    _, _, seen = recorded("full")
    served = Served("full", number, *layouts("full", "v4-bf16"), dtype=torch.bfloat16)
    found = served.run(seen[number]["hidden"].bfloat16(), 37)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, seen[number]["output"][0]) < bound


@pytest.mark.parametrize("number", range(3), ids=KINDS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_requests_share_steps_and_rejected_drafts_leave_no_trace(widths: str, number: int) -> None:
    """Prompts, decodes, both, padding, and drafts of wrong tokens that are run again."""
    _, _, seen = recorded(widths)
    served = Served(widths, number, *layouts(widths, "v4-fp32"))
    hidden, expected = seen[number]["hidden"], seen[number]["output"]
    found = torch.zeros_like(expected)

    def run(*pieces: tuple[int, int, int], padding: int = 0) -> None:
        for (request, start, end), part in zip(pieces, served.step(hidden, *pieces, padding=padding), strict=True):
            found[request, start:end] = part

    run((1, 0, 127), (0, 0, 251))
    for token in range(3):
        run((0, 251 + token, 252 + token), (1, 127 + token, 128 + token), padding=2)
    run((0, 254, 255), (2, 0, 130))
    drafts = hidden.clone()
    drafts[:, 256:] = torch.randn_like(drafts[:, 256:])
    drafts[2, 131:] = torch.randn_like(drafts[2, 131:])
    served.step(drafts, (0, 255, 259), (2, 130, 134), padding=1)
    run((0, 255, 258), (2, 130, 132), (1, 130, 300))
    run((2, 132, 300), (0, 258, 300))
    for request in range(REQUESTS):
        assert relative_error(found[request], expected[request]) < 1e-4
        if number:
            count = TOKENS // served.spec.compress
            entries = served.entries(served.caches.entries, count, request)
            assert relative_error(entries, seen[number]["compressor"][request]) < 5e-6


def test_the_layer_is_the_same_alone_and_with_others() -> None:
    """The bound is float32's: sums may be ordered by the batch's size."""
    _, _, seen = recorded("tiny")
    hidden = seen[1]["hidden"]
    alone, shared = (Served("tiny", 1, *layouts("tiny", "v4-bf16")) for _ in range(2))
    first = alone.run(hidden, 100)
    others = [shared.step(hidden, (0, a, a + 100), (2, a, a + 50), (1, a, a + 100))[0] for a in (0, 100, 200)]
    assert relative_error(torch.cat(others), first) < 1e-6
