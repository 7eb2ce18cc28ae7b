"""The notebook docs/tour.ipynb: it runs, and the outputs that it is committed with are those of its code."""

import re
from pathlib import Path
from typing import Any

import pytest


def shape(cell: dict[str, Any]) -> list[str]:
    """What a cell shows: kinds of pictures, and text without its numbers, which may depend on the machine."""
    found = []
    for output in cell.get("outputs", []):
        assert output["output_type"] in ("stream", "display_data"), output
        assert output.get("name") != "stderr", output
        text = "".join(output["text"]) if "text" in output else " ".join(sorted(output["data"]))
        found.append(re.sub(r"[\d.]+", "0", text))
    return found


def test_the_notebook_runs_and_shows_what_it_is_committed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2])
    from tools.docs import tour

    committed = tour.read()
    found = tour.run(committed, tmp_path)
    told = {cell["id"]: shape(cell) for cell in found["cells"]}
    assert told == {cell["id"]: shape(cell) for cell in committed["cells"]}, "run `python -m tools.docs.tour`"
    # What the text says: bytes decoded by hand, everything selected is dense attention, attached logits agree.
    text = str(told)
    assert text.count("True") == 3
    assert "False" not in text
