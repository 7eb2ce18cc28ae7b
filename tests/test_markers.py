"""What needs a GPU is skipped without one, unless a run asks for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.mark.parametrize(
    ("expression", "has_gpu", "skipped"),
    [("", False, ["needs_gpu"]), ("", True, []), ("gpu", False, []), ("not wheel", False, [])],
)
def test_a_run_that_names_markers_decides_itself(
    expression: str, has_gpu: bool, skipped: list[str], pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = str(Path(__file__).parent / "conftest.py")
    plugin = next(p for p in pytestconfig.pluginmanager.get_plugins() if getattr(p, "__file__", None) == ours)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    found: list[str] = []

    def item(name: str, *markers: str) -> SimpleNamespace:
        return SimpleNamespace(
            path=Path("test_other.py"),
            get_closest_marker=lambda marker: marker if marker in markers else None,
            add_marker=lambda mark: found.append(name),
        )

    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    plugin.pytest_collection_modifyitems(config, [item("anywhere"), item("needs_gpu", "gpu"), item("built", "wheel")])
    assert found == skipped
