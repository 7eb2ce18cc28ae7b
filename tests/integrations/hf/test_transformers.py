"""Attached models compared with the same models before attaching, on contexts several times longer than top-k."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import (
    RowsByThemselves,
    build,
    every_family,
    every_kind_of_cache,
    every_model,
    greedy,
    logits,
    own_positions,
    sum_token_by_token,
    tokens,
    v32_only,
)

from tamis.integrations.transformers import TamisCache, attach, detach, new_cache

# What transformers itself computes follows the default device, and an autocast or shorter products as they should.
pytestmark = pytest.mark.own_settings("the models' own", without=("meta", "cuda", "autocast", "tf32"))


@every_model
def test_logits(model: Any) -> None:
    """Formats that round are in `test_transformers_rounding`."""
    ids = tokens(2, 200)
    expected = logits(model, ids)
    attach(model, cache="fp32")
    found = logits(model, ids)
    assert relative_error(found, expected) < 1e-5
    assert torch.equal(logits(model, ids), found)


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
    found = logits(model, ids, attention_mask=mask, **own_positions(model, mask))
    for row, expected in enumerate(alone):
        assert relative_error(found[row, mask[row] != 0], expected) < 1e-4


@every_family
def test_a_chunk_may_be_nothing_but_padding(model: Any) -> None:
    ids, mask = tokens(2, 90), torch.ones(2, 90)
    mask[0, :50] = mask[1, :60] = 0
    alone = [logits(model, ids[:1, 50:])[0], logits(model, ids[1:, 60:])[0]]
    attach(model, cache="fp32", chunk_tokens=2 * 20)
    found = logits(model, ids, attention_mask=mask, **own_positions(model, mask))
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
def test_chunks_and_single_tokens_give_what_the_whole_gives(
    model: Any, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(model, cache=kind)
    ids, fragile = tokens(2, 150), kind == "fp8" and bool(new_cache(model).states)
    if fragile:
        # Linear attention sums 64 tokens at a time in another order than fewer, and streams are mixed by sums of four
        # numbers: hidden states differ in their last bits, at which codes of FP8 jump, and with them selections. What
        # a jump does to the logits has no useful bound. With sums that do not depend on chunks, nothing does.
        sum_token_by_token(model, monkeypatch)
    with RowsByThemselves() if fragile else nullcontext():
        expected = logits(model, ids)
        detach(model)
        attach(model, cache=kind, chunk_tokens=2 * 37)
        chunked = logits(model, ids)
        held = new_cache(model)
        parts = [logits(model, ids[:, a:b], past_key_values=held) for a, b in ((0, 120), (120, 121), (121, 150))]
    assert torch.equal(chunked, expected) or not fragile
    assert relative_error(chunked, expected) < 1e-4
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


@every_kind_of_cache
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


@v32_only
def test_assisted_generation_rolls_the_cache_back(model: Any) -> None:
    ids = tokens(1, 80)
    expected = greedy(model, ids, 24)
    attach(model, cache="fp32")
    assert torch.equal(greedy(model, ids, 24, prompt_lookup_num_tokens=3), expected)


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
    with pytest.raises(ValueError, match="given one at a time"):
        logits(model)


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


@every_kind_of_cache
def test_a_compiled_model_runs_as_it_is(model: Any) -> None:
    """For steps of all sizes: while a size is traced as a symbol, nothing can be planned."""
    ids = tokens(2, 40)
    attach(model, cache="fp32")
    lengths = (40, 33, 21)
    expected, generated = [logits(model, ids[:, :length]) for length in lengths], greedy(model, ids, 6)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    try:
        for length, wanted in zip(lengths, expected, strict=True):
            assert torch.equal(logits(model, ids[:, :length]), wanted)
        assert torch.equal(greedy(model, ids, 6), generated)
    finally:
        del model.forward
        torch._dynamo.reset()
