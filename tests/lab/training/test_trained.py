"""The checkpoint that is part of tamis: what `tamis train-demo` promises of it."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from tamis.integrations.hf.layers import CacheKind  # noqa: E402
from tamis.lab.generation import load_model  # noqa: E402
from tamis.lab.training.measure import attention_recall, right_answers  # noqa: E402
from tamis.lab.training.model import DEMOS, V4, V32, Demo, demo_of, new_model, shipped_checkpoint  # noqa: E402
from tamis.lab.training.outcome import ANSWERS_BAR, RANDOM_BAR, RECALL_BAR  # noqa: E402
from tamis.lab.training.task import vocabulary  # noqa: E402


@pytest.fixture(scope="module", params=DEMOS.values(), ids=DEMOS)
def trained(request: pytest.FixtureRequest) -> Any:
    return load_model(shipped_checkpoint(request.param), torch.device("cpu"))[0]


def test_it_is_small_and_has_rows_of_full_width(trained: Any) -> None:
    demo, config = demo_of(trained), trained.config
    size = (shipped_checkpoint(demo) / "model.safetensors").stat().st_size
    numbers = sum(parameter.numel() for parameter in trained.parameters())
    assert max(size, numbers) <= 2_000_000
    page = (Path(__file__).parents[3] / "docs/training_demo.md").read_text()
    assert re.search(f"{numbers:,} parameters[;,] {size / 1e6:.1f} MB", page)
    assert config.index_head_dim == 128
    if demo is V4:
        assert (config.head_dim, config.qk_rope_head_dim) == (512, 64)
    else:
        assert (config.kv_lora_rank, config.qk_rope_head_dim) == (512, 64)
    assert all(getattr(config, name) == value for name, value in demo.sizes.items() if isinstance(value, int))


@pytest.mark.parametrize("demo", [V32, V4], ids=lambda demo: demo.name)
def test_its_tokenizer_knows_the_task(demo: Demo) -> None:
    tokenizer = load_model(shipped_checkpoint(demo), torch.device("cpu"))[1]
    words = vocabulary()
    assert tokenizer(" ".join(words))["input_ids"] == list(range(len(words)))
    assert [tokenizer.decode([number]) for number in range(len(words))] == words


@pytest.mark.parametrize(("cache", "tokens"), [("bf16", 2048), ("fp8", 2048), ("fp8", 4096)])
def test_it_answers_questions_over_thousands_of_tokens(trained: Any, cache: CacheKind, tokens: int) -> None:
    assert right_answers(trained, tokens=tokens, cache=cache, seed=11) >= ANSWERS_BAR


def test_a_random_selection_answers_hardly_better_than_chance(trained: Any) -> None:
    assert right_answers(trained, tokens=4096, selecting="random", seed=11) <= RANDOM_BAR


def test_its_indexers_select_nearly_all_of_dense_attention(trained: Any) -> None:
    demo = demo_of(trained)
    found = attention_recall(trained, tokens=demo.recall_tokens, compared=512, seed=13)
    assert len(found) == (1 if demo is V4 else 2)  # layers with an indexer
    assert min(found) >= RECALL_BAR
    # The measure is not generous: the same prompt through random weights.
    untrained = new_model(torch.Generator("cpu").manual_seed(0), demo).eval()
    assert max(attention_recall(untrained, tokens=demo.recall_tokens, compared=128, seed=13)) < 0.5
