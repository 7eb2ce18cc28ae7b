"""The plugin's entry point under many versions of vLLM: it registers tamis or logs the reason, and never raises."""

import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tamis.integrations.vllm import BACKEND, REFUSED, register
from tamis.integrations.vllm.versions import UnsupportedVersion, plugin_refusal, version_refusal

REGISTRY = """
CALLS = []
class Custom:
    def get_path(self):
        if not CALLS:
            raise ValueError("Backend CUSTOM must be registered before use")
        return CALLS[-1][1]
class AttentionBackendEnum:
    CUSTOM = Custom()
def register_backend(backend, class_path=None, is_mamba=False):
    CALLS.append((backend, class_path))
"""
MODELS = """
from types import SimpleNamespace
def known(module):
    return SimpleNamespace(module_name=f"vllm.models.{module}", class_name="Model")
class ModelRegistry:
    models = {"V4": known("deepseek_v4"), "V41": known("deepseek_v41"), "Other": known("other"), "Odd": object()}
    named = []
    @classmethod
    def register_model(cls, name, path):
        cls.named.append((name, path))
"""
VERSION, REGISTRY_FILE, MODELS_FILE = (
    "version.py",
    "v1/attention/backends/registry.py",
    "model_executor/models/registry.py",
)
USUAL = {VERSION: "__version__ = '0.32.0'", REGISTRY_FILE: REGISTRY, MODELS_FILE: MODELS}


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that installs a package `vllm` of these files; None: there is no such file."""

    def install(files: dict[str, str | None]) -> None:
        for name, text in ({"__init__.py": ""} | USUAL | files).items():
            if text is None:
                continue
            path = tmp_path / "vllm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    yield install
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


def registered() -> list[str]:
    """The classes that CUSTOM was made to stand for, one after the other."""
    calls: list[tuple[Any, str]] = sys.modules["vllm.v1.attention.backends.registry"].CALLS
    return [path for _, path in calls]


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert {record.name for record in caplog.records} <= {"tamis"}
    assert {record.levelno for record in caplog.records} <= {logging.WARNING}
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("version", ["0.25.0", "0.28.0", "0.32.1+cu130"])
def test_a_supported_version(vllm: Any, caplog: pytest.LogCaptureFixture, version: str) -> None:
    vllm({VERSION: f"__version__ = {version!r}"})
    register()
    register()
    assert registered() == [BACKEND] * 2
    named = sys.modules["vllm.model_executor.models.registry"].ModelRegistry.named
    plugin = "tamis.integrations.vllm.v4_plugin"
    assert named == [("V4", f"{plugin}:deepseek_v4__Model"), ("V41", f"{plugin}:deepseek_v41__Model")] * 2
    assert not said(caplog)
    assert plugin_refusal() is None


BROKEN = {
    "another version": ({VERSION: "__version__ = '0.33.0'"}, r"0\.25\.x to 0\.32\.x, and this is 0\.33\.0", True),
    "no version": ({VERSION: ""}, "importing vllm.version failed with AttributeError", True),
    "no version module": ({VERSION: None}, "there is no module 'vllm.version'", True),
    "a version that is no string": ({VERSION: "__version__ = None"}, "and this is None", True),
    "no registry": ({REGISTRY_FILE: None}, "there is no module 'vllm.v1", False),
    "older still": (
        {VERSION: "__version__ = '0.6.0'", REGISTRY_FILE: None, MODELS_FILE: None},
        r"and this is 0\.6\.0",
        False,
    ),
    "a registry that breaks": ({REGISTRY_FILE: "import no_such_module"}, "failed with ModuleNotFoundError", False),
    "a registry without its function": (
        {REGISTRY_FILE: REGISTRY.replace("def register_backend", "def enlist")},
        "vLLM 0.32.0 has no vllm.v1.attention.backends.registry.register_backend",
        False,
    ),
    "a registry without CUSTOM": (
        {REGISTRY_FILE: REGISTRY.replace("CUSTOM =", "OWN =")},
        "registry differs from",
        False,
    ),
    "a registry that takes other arguments": (
        {REGISTRY_FILE: REGISTRY.replace("backend, class_path=None, is_mamba=False", "*, spec")},
        "TypeError: register_backend",
        False,
    ),
    "no models": ({MODELS_FILE: None}, "there is no module 'vllm.model_executor'", True),
    "a renamed registry of models": ({MODELS_FILE: "Models = 1"}, "has no .*models.registry.ModelRegistry", True),
    "models of another kind": (
        {MODELS_FILE: MODELS.replace("models = {", "architectures = {")},
        "vLLM's registry does not accept DeepSeek-V4's models: AttributeError",
        True,
    ),
    "models that cannot be registered": (
        {MODELS_FILE: MODELS.replace("cls.named.append((name, path))", "raise RuntimeError('frozen')")},
        "vLLM's registry does not accept DeepSeek-V4's models: RuntimeError: frozen",
        True,
    ),
    "a package that fails": ({"__init__.py": "raise RuntimeError('no device')"}, "RuntimeError: no device", False),
    "a library that is missing": ({"__init__.py": "raise OSError('libcudart.so.12')"}, "OSError: libcudart", False),
    "a syntax of the future": ({"__init__.py": "match = = 1"}, "SyntaxError", False),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_other_vllms_are_left_alone(vllm: Any, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    """One line says why. Where there is a CUSTOM to choose, it stands for a class that refuses with the reason."""
    files, reason, chooses = BROKEN[kind]
    vllm(files)
    register()
    (line,) = said(caplog)
    assert line.startswith("tamis is not vLLM's CUSTOM attention backend: ")
    assert re.search(reason, line), line
    if chooses:
        assert registered() == [REFUSED]
        (told,) = UnsupportedVersion.validate_configuration("any", argument=1)
        expected = plugin_refusal() or "tamis could not register its models with this vLLM"
        assert told.startswith(expected)


def test_no_vllm_at_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
    register()
    (line,) = said(caplog)
    assert "needs vLLM 0.25.x to 0.32.x, but there is no module 'vllm" in line
    assert line.endswith("install it with pip install 'vllm>=0.25,<0.33'")


def test_whatever_is_asked_of_the_refused_class_first_answers_with_the_reason(vllm: Any) -> None:
    vllm({VERSION: "__version__ = '0.11.2'"})
    for name in ("get_name", "get_impl_cls", "supports_head_size"):
        with pytest.raises(AttributeError, match=r"tamis supports vLLM .*, and this is 0\.11\.2"):
            getattr(UnsupportedVersion, name)
    assert not hasattr(UnsupportedVersion, "accept_output_buffer"), "who only looks gets no exception"


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0"])
def test_the_backend_of_another_plugin_stays(vllm: Any, caplog: pytest.LogCaptureFixture, version: str) -> None:
    vllm({VERSION: f"__version__ = {version!r}", REGISTRY_FILE: REGISTRY + "CALLS.append((None, 'their.Backend'))"})
    register()
    assert registered() == ["their.Backend"]
    (line,) = said(caplog)
    assert "another plugin has registered their.Backend; to use tamis, load it alone with VLLM_PLUGINS=tamis" in line
    models = sys.modules.get("vllm.model_executor.models.registry")
    assert models is None or not models.ModelRegistry.named, "nor are models, which would look after CUSTOM"


def test_versions() -> None:
    minors = [f"0.{minor}.0" for minor in range(25, 33)]
    for version in (*minors, "0.25", "0.25.1", "0.32.0rc1", "0.32.1.dev3+g1"):
        assert version_refusal(version) is None
    for version in ("0.3.0", "0.320.0", "0.24.0", "0.33.0", "1.25.0", "dev"):
        refusal = f"tamis supports vLLM 0.25.x to 0.32.x, and this is {version}; install one of those"
        assert version_refusal(version) == refusal


def test_nothing_is_imported_of_the_engine_before(vllm: Any) -> None:
    """Registering takes the registries alone: no model, no backend, no device."""
    vllm({"platforms.py": "raise AssertionError('imported')", "models/__init__.py": "raise AssertionError('imported')"})
    register()
    assert registered() == [BACKEND]
    assert not {"vllm.platforms", "vllm.models"} & set(sys.modules)


def test_a_changed_operator_is_said(vllm: Any, caplog: pytest.LogCaptureFixture) -> None:
    """CUSTOM is registered all the same; only the indexer cannot be chosen."""
    folders = {f"model_executor/{name}__init__.py": "" for name in ("", "models/", "layers/")}
    vllm({**folders, "model_executor/layers/sparse_attn_indexer.py": ""})
    register()
    assert registered() == [BACKEND]
    (line,) = said(caplog)
    assert line.startswith("tamis' indexer cannot be chosen in this vLLM: ")
