"""DeepSeek-V4's layer over prefills without tokens and 161,000 tokens of context."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import v4_standin as v4
from long_context import LongV4Step
from test_v4 import record
from vllm.models.deepseek_v4.nvidia import flashmla
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadata
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadata

from tamis.integrations.vllm.v4_layer import TamisV4Attention


class Replaced:
    """vLLM's layer in tamis' class, with caches and records of one step."""

    def __init__(self, step: v4.V4Step, ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.layer: Any = TamisV4Attention.__new__(TamisV4Attention)
        torch.nn.Module.__init__(self.layer)
        for name, value in vars(v4.layer_of(step, ratio)).items():
            setattr(self.layer, name, value)
        self.layer.prefix, self.layer.swa_cache_layer.prefix = "attn", "window"
        made = v4.Records(step, ratio)
        self.metadata = {"window": record(DeepseekSparseSWAMetadata, made.window)}
        if ratio > 1:
            self.metadata["attn"] = record(DeepseekV4FlashMLAMetadata, made.main)
        context = SimpleNamespace(attn_metadata=self.metadata)
        monkeypatch.setattr(flashmla, "get_forward_context", lambda: context)

    def attend(self, step: v4.V4Step, padding: int = 3) -> torch.Tensor:
        """The output of vLLM's own `forward_mqa`, with rows of padding behind the step, which start as 3."""
        q = torch.cat((step.q, torch.ones(padding, *step.q.shape[1:])))
        output = torch.full_like(q, 3.0)
        positions = torch.tensor([p for _, p in step.tokens] + [0] * padding)
        self.layer.forward_mqa(q, None, positions, output)
        return output


@pytest.mark.parametrize("ratio", v4.RATIOS)
def test_a_chunk_without_tokens_and_a_long_context(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM 0.26's own prefill fails on Hopper: vllm-project/vllm#54179, #52339, #51486, #49922."""
    step = LongV4Step()
    replaced = Replaced(step, ratio, monkeypatch)
    assert (replaced.metadata["window"].num_prefills, replaced.metadata["window"].num_prefill_tokens) == (3, 5)
    step.agrees(replaced.attend(step)[: len(step.tokens)], ratio)


@pytest.mark.parametrize("ratio", v4.RATIOS)
def test_prefills_that_have_no_token_at_all(ratio: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls a layer's prefill if there are prefills, even if none of them has a token."""
    step = v4.V4Step("v4-fp8", [1, 1], [300, 700])
    replaced = Replaced(step, ratio, monkeypatch)
    empty = {"num_prefills": 1, "num_prefill_tokens": 0, "prefill_swa_indices": None, "prefill_swa_lens": None}
    replaced.metadata["window"] = replace(replaced.metadata["window"], **empty)
    step.agrees(replaced.attend(step)[:2], ratio)
