"""`TamisCache`: copies, repeats, cropping, formats and sizes."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import relative_error
from hf_models import built, every_kind_of_cache, logits, tokens, v32_only

from tamis.integrations.transformers import TamisCache, attach, detach, new_cache


@every_kind_of_cache
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


@every_kind_of_cache
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


@every_kind_of_cache
@pytest.mark.parametrize("padding", [0, 5])
def test_what_inference_mode_has_kept_goes_on_outside_of_it(model: Any, padding: int) -> None:
    """With padding after the second request's tokens, whose states are then written by themselves."""
    ids, mask = tokens(2, 90), torch.ones(2, 90, dtype=torch.int64)
    mask[1, 40 - padding : 40] = 0
    attach(model, cache="fp32")
    expected = logits(model, ids)[0, 60:]
    held = new_cache(model)
    with torch.inference_mode():
        logits(model, ids[:, :40], attention_mask=mask[:, :40], past_key_values=held)
        held.batch_repeat_interleave(2)
        held.batch_select_indices(torch.tensor([0, 2]))
        logits(model, ids[:, 40:60], attention_mask=mask[:, :60], past_key_values=held)
    found = logits(model, ids[:, 60:], attention_mask=mask, past_key_values=held)
    assert relative_error(found[0], expected) < 1e-5


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


@every_kind_of_cache
def test_pages_are_of_the_format_asked_for(model: Any) -> None:
    for kind, dtype in (("fp8", torch.uint8), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        attach(model, cache=kind)
        held = new_cache(model).shape.layers[1]
        assert held["window" if "window" in held else "latent"].layout.element == dtype
        detach(model)


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
        command = [sys.executable, str(Path(__file__).parents[2] / "support" / "hf_memory.py"), kind, *map(str, sizes)]
        run = subprocess.run(command, check=True, capture_output=True, text=True)
        return [int(line) for line in run.stdout.split()]

    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("peaks are read from Linux's /proc")
    half, untouched = peaks("untouched", 1024, 2048)
    assert untouched > 3 * half  # so it is a square
    (attached,) = peaks("attached", 4096)
    assert attached * 32768 / 4096 < untouched * (32768 / 2048) ** 2 / 8
