"""The table of models: its tests exist, and it has every model that `attach` supports."""

import re
from pathlib import Path

from hf_models import MODELS as TINY

from tamis.integrations import transformers as attaching
from tamis.integrations.hf.names import MODELS as NAMES
from tamis.integrations.hf.train_attach import FORWARDS
from tools.docs import models

ROOT = Path(__file__).parents[2]


def lines() -> list[list[str]]:
    """The cells of the page's table."""
    text = (ROOT / "docs/models.md").read_text()
    found = [line for line in text.splitlines() if "<details>" in line]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in found]


def test_every_test_that_the_table_names_exists() -> None:
    assert [line[0] for line in lines()] == [model.title for model in models.MODELS]
    for *_, tests in lines():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)(?:\[([\w-]+)\])?`", tests)
        assert len(named) == int(re.search(r"(\d+) tests?<", tests)[1]) > 0
        for path, test, parameters in named:
            text = (ROOT / path).read_text()
            assert re.search(rf"^def {test}\(", text, flags=re.M), f"{path}::{test}"
            if parameters:
                assert any(parameters.endswith(name) for name in TINY), f"{path}::{test}[{parameters}]"
                assert re.search(rf"@(every|each)_\w+\n(@[^\n]+\n)*def {test}\(", text), f"{test} has no model"


def test_every_model_that_is_attached_has_a_line() -> None:
    listed = {model.model_type for model in models.MODELS if model.model_type}
    assert listed == set(NAMES)
    for known in NAMES.values():
        assert known.class_name in attaching._MODELS
    where = {line[0]: line[1] for line in lines()}
    for model in models.MODELS:
        supported = NAMES.get(model.model_type or "")
        trained = supported is not None and supported.class_name in FORWARDS
        assert where[model.title] == ("-" if supported is None else "`attach`, training" if trained else "`attach`")


def test_layers_and_bytes_by_hand() -> None:
    found = {line[0]: line[4:6] for line in lines()}
    assert found["DeepSeek-V3.2"] == ["selects tokens", "656 in FP8, 1,152 in bf16; index key 132"]
    assert found["A.X-K2"] == ["selects tokens", "208 in FP8, 320 in bf16; index key 132"]
    shares = "selects tokens; uses the selection of an earlier layer"
    assert found["Hy4"] == [f"{shares}; sinks", "656 in FP8, 1,152 in bf16; index key 132"]
    reads = f"{shares}; some without rope; reads the rows of an earlier layer"
    assert found["Mistral Large 4"] == [reads, "656 or 528 in FP8, 1,152 or 1,024 in bf16; index key 132"]
