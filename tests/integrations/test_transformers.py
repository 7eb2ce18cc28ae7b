"""Attached models against the same models untouched, on tiny random checkpoints with contexts several times top-k."""

import copy
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import relative_error

transformers = pytest.importorskip("transformers")

from tamis.integrations.transformers import TamisCache, attach, detach, is_attached, new_cache  # noqa: E402

V4_KINDS = ("sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention")
SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "q_lora_rank": 32,
    "index_topk": 32,
    "index_n_heads": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "vocab_size": 128,
    "pad_token_id": None,  # its embedding would be zero, and then all index scores of the first layer equal
    "eos_token_id": None,
}
V32 = SMALL | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_head_dim": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "intermediate_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
V4 = SMALL | {
    "index_topk": 16,
    "head_dim": 32,
    "partial_rotary_factor": 8 / 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_head_dim": 16,
    "sliding_window": 8,
    "compress_rates": {V4_KINDS[1]: 4, V4_KINDS[2]: 16},
    "layer_types": list(V4_KINDS),
    "mlp_layer_types": ["moe"] * 3,
    "hc_mult": 2,
    "hc_sinkhorn_iters": 3,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 1024,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v32": ("DeepseekV32", V32),
    "v32-yarn": ("DeepseekV32", V32 | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "glm": ("GlmMoeDsa", V32),
    "glm-shared": ("GlmMoeDsa", V32 | {"indexer_types": ["full", "shared", "full"]}),
    "v4": ("DeepseekV4", V4),
}
FAMILIES = ("v32", "glm-shared", "v4")


def build(name: str, **changes: Any) -> Any:
    kind, numbers = MODELS[name]
    torch.manual_seed(4)
    config = getattr(transformers, f"{kind}Config")(**{**numbers, **changes})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(("sinks", "position_bias", "k_norm.bias")):
                parameter.normal_(std=0.1)
    return model


built = cache(build)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Any:
    """A model that every test gets, and leaves, untouched."""
    found = built(request.param)
    yield found
    detach(found)


every_model = pytest.mark.parametrize("model", MODELS, indirect=True)
every_family = pytest.mark.parametrize("model", FAMILIES, indirect=True)
v32_only = pytest.mark.parametrize("model", ["v32"], indirect=True)


def tokens(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(1, 128, (rows, columns), generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def logits(model: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    return model(*args, **kwargs).logits


def greedy(model: Any, ids: torch.Tensor, new: int, **kwargs: Any) -> torch.Tensor:
    kwargs = {"attention_mask": torch.ones_like(ids)} | kwargs
    return model.generate(ids, max_new_tokens=new, do_sample=False, **kwargs)


@every_model
@pytest.mark.parametrize(("kind", "low", "high"), [("fp32", 0, 1e-5), ("bf16", 1e-5, 2e-2), ("fp8", 1e-3, 0.1)])
def test_logits(model: Any, kind: Any, low: float, high: float) -> None:
    """With FP8 keys other positions are selected where scores are nearly equal, hence the last bound."""
    ids = tokens(2, 200)
    expected = logits(model, ids)
    attach(model, cache=kind)
    found = logits(model, ids)
    assert low <= relative_error(found, expected) < high
    assert torch.equal(logits(model, ids), found)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("kind", "high"), [("fp32", 1e-2), ("bf16", 2e-2), ("fp8", 0.1)])
def test_16_bit_models(name: str, kind: Any, high: float) -> None:
    model, ids = build(name).half(), tokens(2, 90)
    expected = logits(model, ids)
    attach(model, cache=kind)
    found = logits(model, ids)
    assert found.dtype == torch.float16
    assert relative_error(found.float(), expected.float()) < high


@every_family
def test_without_a_choice_to_make_fp8_costs_its_rounding_only(model: Any) -> None:
    ids = tokens(2, 32)
    expected = logits(model, ids)
    attach(model, cache="fp8")
    assert 1e-4 < relative_error(logits(model, ids), expected) < 3e-2


@every_model
def test_greedy_tokens_over_64_steps(model: Any) -> None:
    ids = tokens(2, 100)
    expected = greedy(model, ids, 64)
    assert len(expected[:, 100:].unique()) > 8  # a constant output would prove nothing
    attach(model, cache="fp32")
    assert torch.equal(greedy(model, ids, 64), expected)


@every_family
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(model: Any, side: str) -> None:
    """Each row is what its prompt alone gives. (Untouched, V4 compresses the padding with the tokens.)"""
    lengths, ids = (130, 71, 2), tokens(3, 130)
    columns = torch.arange(130)
    counts = torch.tensor(lengths).unsqueeze(1)
    mask = (columns >= 130 - counts if side == "left" else columns < counts).long()
    alone = [logits(model, ids[row, mask[row] != 0].unsqueeze(0))[0] for row in range(3)]
    attach(model, cache="fp32", chunk_tokens=90)
    found = logits(model, ids, attention_mask=mask)
    for row, expected in enumerate(alone):
        assert relative_error(found[row, mask[row] != 0], expected) < 1e-4


@every_family
def test_a_chunk_may_be_nothing_but_padding(model: Any) -> None:
    ids, mask = tokens(2, 90), torch.ones(2, 90)
    mask[0, :50] = mask[1, :60] = 0
    alone = [logits(model, ids[:1, 50:])[0], logits(model, ids[1:, 60:])[0]]
    attach(model, cache="fp32", chunk_tokens=2 * 20)
    found = logits(model, ids, attention_mask=mask)
    assert relative_error(found[0, 50:], alone[0]) < 1e-5
    assert relative_error(found[1, 60:], alone[1]) < 1e-5


@every_family
def test_generate_with_left_padding(model: Any) -> None:
    ids = tokens(2, 90)
    mask = torch.ones_like(ids)
    mask[1, :50] = 0
    alone = [greedy(model, ids[:1], 24)[0, 90:], greedy(model, ids[1:, 50:], 24)[0, 40:]]
    attach(model, cache="fp32")
    found = greedy(model, ids, 24, attention_mask=mask)[:, 90:]
    assert torch.equal(found, torch.stack(alone))


@every_family
@pytest.mark.parametrize("kind", ["fp32", "fp8"])
def test_chunks_and_single_tokens_give_what_the_whole_gives(model: Any, kind: Any) -> None:
    ids = tokens(2, 150)
    attach(model, cache=kind)
    expected = logits(model, ids)
    detach(model)
    attach(model, cache=kind, chunk_tokens=2 * 37)
    assert relative_error(logits(model, ids), expected) < 1e-4
    held = new_cache(model)
    parts = [logits(model, ids[:, a:b], past_key_values=held) for a, b in ((0, 120), (120, 121), (121, 150))]
    assert relative_error(torch.cat(parts, dim=1), expected) < 1e-4
    assert held.get_seq_length() == 150


def test_many_heads_gather_their_prefills_whatever_the_padding() -> None:
    """From 32 heads on, FP8 prefills go through a workspace; rows of one new token among longer ones are decodes."""
    model, ids = build("v32", num_attention_heads=32, num_key_value_heads=32), tokens(3, 70)
    attach(model, cache="fp8")
    alone = [logits(model, ids[row : row + 1])[0] for row in range(3)]
    held = new_cache(model)
    mask = torch.ones(3, 71)
    mask[0, 40:70] = mask[1, 41:] = 0
    columns = torch.cat((ids, ids[:, 40:41]), dim=1)
    first = logits(model, columns[:, :40], attention_mask=mask[:, :40], past_key_values=held)
    own = (mask.cumsum(1) - 1).long()[:, 40:]  # padding between tokens does not count, as in generate
    second = logits(model, columns[:, 40:], attention_mask=mask, position_ids=own, past_key_values=held)
    found = torch.cat((first, second), dim=1)
    assert model.model._tamis.family.plan(held.batch(torch.ones(3, 2, dtype=torch.bool))).mode == "separate"
    assert relative_error(found[0, [*range(40), 70]], alone[0][:41]) < 1e-4
    assert relative_error(found[1, :41], alone[1][:41]) < 1e-4
    assert relative_error(found[2, :70], alone[2]) < 1e-4


@every_family
def test_several_turns_share_a_cache(model: Any) -> None:
    first, second = tokens(2, 70), tokens(2, 60)
    whole = torch.cat((greedy(model, first, 20), second), dim=1)
    expected = greedy(model, whole, 20)
    attach(model, cache="fp32")
    held = new_cache(model)
    answer = greedy(model, first, 20, past_key_values=held)
    assert held.get_seq_length() == 89  # the last token has not run
    assert torch.equal(greedy(model, torch.cat((answer, second), dim=1), 20, past_key_values=held), expected)


@every_family
def test_beams(model: Any) -> None:
    """Compared without a cache: untouched, V4's is not reordered with its beams."""
    ids = tokens(2, 60)
    expected = greedy(model, ids, 12, num_beams=3, use_cache=False)
    attach(model, cache="fp32")
    assert torch.equal(greedy(model, ids, 12, num_beams=3), expected)


@every_family
def test_a_copied_cache_goes_its_own_way(model: Any) -> None:
    ids = tokens(1, 130)
    attach(model, cache="fp32")
    expected = logits(model, ids)[:, 100:]
    held = new_cache(model)
    logits(model, ids[:, :100], past_key_values=held)
    other = copy.deepcopy(held)
    logits(model, tokens(1, 77), past_key_values=other)
    assert relative_error(logits(model, ids[:, 100:], past_key_values=held), expected) < 1e-5
    assert (held.get_seq_length(), other.get_seq_length()) == (130, 177)


@every_family
def test_requests_are_repeated_and_selected(model: Any) -> None:
    ids = tokens(2, 100)
    attach(model, cache="fp32")
    expected = logits(model, ids)[:, 80:]
    held = new_cache(model)
    logits(model, ids[:, :80], past_key_values=held)
    held.batch_repeat_interleave(2)
    assert held.batch_size == 4
    held.batch_select_indices(torch.tensor([3, 0]))
    found = logits(model, ids[:, 80:].flip(0), past_key_values=held)
    assert relative_error(found.flip(0), expected) < 1e-5


@v32_only
def test_crop_and_reset(model: Any) -> None:
    ids = tokens(1, 120)
    attach(model, cache="fp32")
    expected = logits(model, ids)[:, 90:]
    held = new_cache(model)
    logits(model, torch.cat((ids[:, :90], tokens(1, 50)), dim=1), past_key_values=held)
    held.crop(-50)
    assert relative_error(logits(model, ids[:, 90:], past_key_values=held), expected) < 1e-5
    held.reset()
    assert (held.get_seq_length(), held.batch_size) == (0, -1)


@v32_only
def test_assisted_generation_rolls_the_cache_back(model: Any) -> None:
    ids = tokens(1, 80)
    expected = greedy(model, ids, 24)
    attach(model, cache="fp32")
    assert torch.equal(greedy(model, ids, 24, prompt_lookup_num_tokens=3), expected)


@pytest.mark.parametrize("model", ["v4"], indirect=True)
def test_what_v4_has_let_go_cannot_come_back(model: Any) -> None:
    attach(model)
    held = new_cache(model)
    logits(model, tokens(1, 40), past_key_values=held)
    with pytest.raises(ValueError, match="start again"):
        held.crop(-1)
    # Raw tokens and state of a long past take no more room than those of a short one.
    before = {name: held.depths[name] for name in ("window", "state4", "state16")}
    for _ in range(5):
        logits(model, tokens(1, 40), past_key_values=held)
    assert all(held.depths[name] <= before[name] + 4 for name in before)


@every_family
def test_pages_are_of_the_format_asked_for(model: Any) -> None:
    for kind, dtype in (("fp8", torch.uint8), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        attach(model, cache=kind)
        held = model.model._tamis.family.shape.layers[1]
        assert held["window" if "window" in held else "latent"].layout.element == dtype
        detach(model)


@every_family
def test_detach_restores_everything(model: Any) -> None:
    ids = tokens(2, 60)
    expected, tokens_before = logits(model, ids), greedy(model, ids, 8)
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    names = list(model.state_dict())
    attach(model)
    assert is_attached(model)
    logits(model, ids)
    assert list(model.state_dict()) == names
    detach(model)
    assert not is_attached(model)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before
    assert torch.equal(logits(model, ids), expected)
    assert torch.equal(greedy(model, ids, 8), tokens_before)
    detach(model)
    detach(torch.nn.Linear(2, 2))


@every_family
def test_a_copied_model_has_its_own_attention(model: Any) -> None:
    ids = tokens(1, 50)
    attach(model, cache="fp32")
    expected = logits(model, ids)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert torch.equal(logits(other, ids), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1.0)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_is_attached_again_after_a_conversion(name: str) -> None:
    model, ids = build(name), tokens(1, 50)
    attach(model, cache="fp32")
    logits(model, ids)
    model.half()
    with pytest.raises(ValueError, match="float32 on cpu, as when it was attached, got float16"):
        logits(model, ids)
    expected = logits(model.float(), ids)
    detach(model)
    assert relative_error(expected, logits(model, ids)) < 1e-5


@v32_only
def test_a_layer_that_is_no_plain_linear_is_absorbed_too(model: Any) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.halved = torch.nn.Parameter(inner.weight / 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.halved) * 2

    ids = tokens(1, 60)
    expected = logits(model, ids)
    attention = model.model.layers[0].self_attn
    plain = attention.kv_b_proj
    attention.kv_b_proj = Scaled(plain)
    attach(model, cache="fp32")
    try:
        assert relative_error(logits(model, ids), expected) < 1e-5
    finally:
        attention.kv_b_proj = plain


@v32_only
def test_hidden_states_are_recorded_whole(model: Any) -> None:
    ids = tokens(1, 60)
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states
        attach(model, cache="fp32", chunk_tokens=16)
        found = model(ids, output_hidden_states=True, use_cache=False)
    assert found.past_key_values is None
    assert len(found.hidden_states) == len(expected)
    assert relative_error(found.hidden_states[-1], expected[-1]) < 1e-5


@v32_only
def test_other_ways_to_call_the_model(model: Any) -> None:
    ids = tokens(2, 50)
    attach(model, cache="fp32", chunk_tokens=32)
    expected, generated = logits(model, ids), greedy(model, ids, 6)
    with torch.no_grad():
        assert torch.equal(model(ids, return_dict=False)[0], expected)
        hidden, held = model.model(ids, return_dict=False)
        assert torch.equal(model.lm_head(hidden), expected)
        assert torch.equal(logits(model, inputs_embeds=model.get_input_embeddings()(ids)), expected)
    assert isinstance(held, TamisCache)
    assert torch.equal(greedy(model, ids, 6, use_cache=False), generated)
    assert torch.equal(greedy(model, ids, 6, prefill_chunk_size=16), generated)
    sampled = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, num_return_sequences=2, max_new_tokens=3
    )
    assert sampled.shape == (4, 53)
    with pytest.raises(ValueError, match="but not both"):
        logits(model)


@v32_only
def test_wrong_attachments_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="cache must be one of 'fp8', 'bf16', 'fp32'"):
        attach(model, cache="int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nonesuch"):
        attach(model, backend="nonesuch")
    assert not is_attached(model)
    with pytest.raises(
        ValueError, match="DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM, DeepseekV4ForCausalLM, got Lin"
    ):
        attach(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="call attach"):
        new_cache(model)
    attach(model)
    with pytest.raises(ValueError, match="detach"):
        attach(model)
    detach(model)
    model.model.forward = model.model.forward
    try:
        with pytest.raises(ValueError, match="hooks"):
            attach(model)
    finally:
        del model.model.forward


@v32_only
def test_wrong_uses_are_refused(model: Any) -> None:
    ids = tokens(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    attach(model)
    with pytest.raises(ValueError, match="no_grad"):
        model(ids)
    with pytest.raises(ValueError, match="TamisCache, got DynamicCache"):
        logits(model, ids, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="padding mask"):
        logits(model, ids, attention_mask=torch.ones(2, 1, 20, 20))
    with pytest.raises(ValueError, match="cache_implementation"):
        greedy(model, ids, 2, cache_implementation="static")
    held = new_cache(model)
    logits(model, ids, attention_mask=mask, past_key_values=held)
    with pytest.raises(ValueError, match="unchanged"):
        logits(model, ids[:, :1], attention_mask=torch.ones(2, 21), past_key_values=held)
    with pytest.raises(ValueError, match="attention_mask must be given for a cache with padding"):
        logits(model, ids[:, :1], past_key_values=held)
    with pytest.raises(ValueError, match="of 2 rows"):
        logits(model, ids[:1, :1], past_key_values=held)
    assert held.get_seq_length() == 20
    detach(model)
    with pytest.raises(ValueError, match="attach the model"):
        logits(model, ids[:, :1], past_key_values=held)
    attach(model, cache="bf16")
    with pytest.raises(ValueError, match="another one's"):
        logits(model, ids[:, :1], past_key_values=held)


def test_caches_know_their_size() -> None:
    model = built("v32")
    attach(model)
    try:
        held = new_cache(model)
        logits(model, tokens(2, 30), past_key_values=held)
        assert isinstance(held, TamisCache)
        assert len(held) == 3
        assert held.get_mask_sizes(4, 0) == (34, 0)
        assert held.get_max_length() == -1
        assert held.is_initialized
        assert not held.is_compileable
        assert repr(held) == "TamisCache(requests=2, columns=30, layers=3)"
    finally:
        detach(model)


def test_memory_of_a_long_prefill() -> None:
    """At most an eighth of the untouched model's at 32768 tokens.

    Both are measured at sizes that a test can afford and scaled: the untouched model's peak grows with the square of
    the tokens, the attached one's at most in proportion to them.
    """

    def peaks(kind: str, *sizes: int) -> list[int]:
        command = [sys.executable, str(Path(__file__).parent / "hf_memory.py"), kind, *map(str, sizes)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        return [int(line) for line in run.stdout.split()]

    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks are read from Linux's /proc")
    half, untouched = peaks("untouched", 1024, 2048)
    assert untouched > 3 * half  # so it is a square
    (attached,) = peaks("attached", 4096)
    assert attached * 32768 / 4096 < untouched * (32768 / 2048) ** 2 / 8
