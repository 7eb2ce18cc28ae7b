"""The whole V4 layer against Hugging Face transformers' own DeepSeek-V4 on a tiny random model.

Its attention concatenates windows and compressed entries and masks a dense product; ours attends to selected rows of
paged caches, fed in chunks. Only the weights and the hidden states are shared.
"""

from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
from oracle import relative_error
from torch import Tensor

from tamis import LayerSpec, PagePool
from tamis.batch import PageMap
from tamis.layout import Layout, index_fp8, named, plain_fp8, rows
from tamis.rope import Rope
from tamis.v4 import SparseV4, V4Caches
from tamis.v4_plan import EntryPlan, V4Plan, WindowPlan
from tamis.v4_weights import V4Weights

transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
TOKENS = 300
KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
WIDTHS = {
    "tiny": {"head_dim": 32, "index_head_dim": 16, "sliding_window": 8, "rates": (4, 16), "index_topk": 8},
    "full": {"head_dim": 512, "index_head_dim": 128, "sliding_window": 128, "rates": (4, 128), "index_topk": 24},
}
PAGE, WINDOW_PAGE, STATE_PAGE = {"tiny": 32, "full": 256}, 5, 4


@cache
def recorded(widths: str):
    """Run the model once and keep what each attention layer got, returned and compressed."""
    torch.manual_seed(4)
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
            seen[layer] |= {"hidden": (args[0] if args else kwargs["hidden_states"])[0], "output": output[0][0]}

        return hook

    def keep_selection(module, args, kwargs, output):
        seen[1]["chosen"] = output[0]

    for number, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_hook(keep(number), with_kwargs=True)
    model.model.layers[1].self_attn.compressor.indexer.register_forward_hook(keep_selection, with_kwargs=True)
    past = transformers.DynamicCache(config=config)
    with torch.no_grad():
        model(torch.randint(0, 256, (1, TOKENS)), past_key_values=past)
    for number in (1, 2):
        seen[number] |= {name: kept[0] for name, kept in past.layers[number].compressed_kv.items()}
    return config, [layer.self_attn for layer in model.model.layers], seen


class Served:
    """One of the model's layers on tamis, with one request, fed chunk by chunk."""

    def __init__(
        self, widths: str, number: int, layout: Layout, index_layout: Layout, dtype: torch.dtype = torch.float32
    ) -> None:
        config, attention, _ = recorded(widths)
        self.spec = LayerSpec.from_hf(config, number)
        rope = Rope.from_hf_v4(config.to_dict(), self.spec.rope_dim, compressed=self.spec.kind != "window")
        weights = {name: value.detach().to(dtype) for name, value in attention[number].state_dict().items()}
        self.layer = SparseV4(
            self.spec,
            V4Weights.from_state_dict(weights, groups=config.o_groups),
            rope.cos_sin_table(TOKENS),
            eps=config.rms_norm_eps,
        )
        self.entry_page = PAGE[widths] // self.spec.compress
        self.pools = {
            "entries": PagePool(20, PAGE[widths], seed=1),
            "window": PagePool(80, WINDOW_PAGE, seed=2),
            "state": PagePool(90, STATE_PAGE, seed=3),
        }
        self.caches = V4Caches.allocate(
            self.spec,
            pages=20,
            window_pages=80,
            state_pages=90,
            page_size=PAGE[widths],
            window_page_size=WINDOW_PAGE,
            state_page_size=STATE_PAGE,
            layout=layout,
            index_layout=index_layout,
        )

    def plan(self, start: int, end: int) -> V4Plan:
        """The step's lists, position by position."""
        for pool in self.pools.values():
            pool.extend("a", end)
        count, window, ratio = end - start, self.spec.window, self.spec.compress
        positions = torch.arange(start, end)
        ids = torch.zeros(count, dtype=torch.int32)
        raw = self.pools["window"].slots("a", 0, end)
        slots = torch.full((count, window), -1, dtype=torch.int32)
        for row, last in enumerate(range(start, end)):
            first = max(0, last - window + 1)
            slots[row, : last + 1 - first] = raw[first : last + 1].int()
        lengths = (positions + 1).clamp_max(window).int()
        pages = {name: PageMap(p.block_table(["a"]), p.slots("a", start, end)) for name, p in self.pools.items()}
        table, entry_page = pages["entries"].block_table, self.entry_page

        def entry_slot(entry: int) -> int:
            return int(table[0, entry // entry_page]) * entry_page + entry % entry_page

        completed = [entry_slot(p // ratio) if (p + 1) % ratio == 0 else -1 for p in range(start, end)]
        visible = ((positions + 1) // ratio).int()
        columns = self.spec.topk or max(1, end // ratio)
        every = None
        if self.spec.kind == "plain":
            every = torch.full((count, columns), -1, dtype=torch.int32)
            for row, known in enumerate(visible.tolist()):
                every[row, :known] = torch.tensor([entry_slot(e) for e in range(known)], dtype=torch.int32)
        entries = EntryPlan(
            ratio=ratio,
            page_size=entry_page,
            block_table=table,
            slots=torch.tensor(completed),
            visible=visible,
            lengths=visible.clamp_max(columns),
            columns=columns,
            request_ids=ids,
            every=every,
            state=pages["state"],
        )
        return V4Plan(
            step=SimpleNamespace(rows=count, positions=positions.int(), request_ids=ids),
            window=WindowPlan(window, WINDOW_PAGE, pages["window"], slots, lengths),
            entries={ratio: entries} if self.spec.kind != "window" else {},
            gathers={},
            workspace=None,
        )

    @torch.no_grad()
    def run(self, hidden: Tensor, chunk: int) -> Tensor:
        spans = [(start, min(start + chunk, TOKENS)) for start in range(0, TOKENS, chunk)]
        return torch.cat([self.layer(hidden[a:b], self.caches, self.plan(a, b)) for a, b in spans])

    def entries(self, cache, count: int) -> Tensor:
        table = self.pools["entries"].block_table(["a"])[0].long()
        numbers = torch.arange(count)
        return cache.read(table[numbers // self.entry_page] * self.entry_page + numbers % self.entry_page)


def layouts(widths: str, name: str) -> tuple[Layout, Layout]:
    """Of rows, and of exact index keys."""
    width, rope = WIDTHS[widths]["head_dim"], 8 if widths == "tiny" else 64
    build = {"plain-fp8": plain_fp8}.get(name, partial(named, name))
    keys = rows(torch.float32, latent=WIDTHS[widths]["index_head_dim"], rope=0)
    return build(latent=width - rope, rope=rope), keys


@pytest.mark.parametrize("number", range(3), ids=KINDS)
@pytest.mark.parametrize("chunk", [300, 37, 1])
@pytest.mark.parametrize(("layout", "bound"), [("v4-fp32", 1e-4), ("v4-bf16", 5e-3)])
@pytest.mark.parametrize("widths", WIDTHS)
def test_layer_output(widths: str, number: int, chunk: int, layout: str, bound: float) -> None:
    _, _, seen = recorded(widths)
    served = Served(widths, number, *layouts(widths, layout))
    found, expected = served.run(seen[number]["hidden"], chunk), seen[number]["output"]
    assert (found - expected).abs().max() < bound * expected.abs().max()
    assert relative_error(found, expected) < bound


@pytest.mark.parametrize("number", [1, 2], ids=KINDS[1:])
@pytest.mark.parametrize("chunk", [300, 37, 1])
@pytest.mark.parametrize(("layout", "bound"), [("v4-fp32", 5e-6), ("v4-bf16", 2**-8), ("v4-fp8", 2**-5)])
def test_compressed_entries(number: int, chunk: int, layout: str, bound: float) -> None:
    """What is in the caches is what the oracle concatenated, entry by entry, to within the cache's rounding."""
    _, _, seen = recorded("full")
    served = Served("full", number, *layouts("full", layout))
    served.run(seen[number]["hidden"], chunk)
    count = TOKENS // served.spec.compress
    assert len(seen[number]["compressor"]) == count
    assert relative_error(served.entries(served.caches.entries, count), seen[number]["compressor"]) < bound
    if served.caches.index is not None:
        assert relative_error(served.entries(served.caches.index, count), seen[number]["indexer"]) < 5e-6


@pytest.mark.parametrize("widths", WIDTHS)
def test_selected_entries(widths: str) -> None:
    _, _, seen = recorded(widths)
    served = Served(widths, 1, *layouts(widths, "v4-fp32"))
    hidden, plan = seen[1]["hidden"], served.plan(0, TOKENS)
    with torch.no_grad():
        compressed_q = served.layer.compressed_query(hidden)
        served.layer.write(hidden, compressed_q, served.caches, plan)
        chosen = served.layer.select(hidden, compressed_q, served.caches, plan)
    assert chosen.shape == seen[1]["chosen"].shape
    for ours, theirs in zip(chosen.tolist(), seen[1]["chosen"].tolist(), strict=True):
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
    assert 1e-3 < relative_error(found, seen[number]["output"]) < 4e-2


def test_fp8_index_keys_cost_little_more() -> None:
    """Rounded keys may exchange entries of nearly equal score."""
    _, _, seen = recorded("full")
    served = Served("full", 1, named("v4-fp8"), index_fp8())
    assert relative_error(served.run(seen[1]["hidden"], 37), seen[1]["output"]) < 6e-2


@pytest.mark.parametrize(("number", "bound"), [(0, 1.5e-2), (1, 6e-2), (2, 1.5e-2)], ids=KINDS)
def test_16_bit_weights_and_hidden_states(number: int, bound: float) -> None:
    _, _, seen = recorded("full")
    served = Served("full", number, *layouts("full", "v4-bf16"), dtype=torch.bfloat16)
    found = served.run(seen[number]["hidden"].bfloat16(), 37)
    assert found.dtype == torch.bfloat16
    assert relative_error(found, seen[number]["output"]) < bound
