"""The plugin's entry point under many versions of SGLang: it registers tamis or logs the reason, and never raises."""

import logging
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import pytest

from tamis.integrations.sglang import register
from tamis.integrations.sglang.options import FIELDS, add_choice, check_attention_backends
from tamis.integrations.sglang.versions import plugin_refusal, version_refusal

DSA, V4 = "tamis.integrations.sglang.dsa_plugin", "tamis.integrations.sglang.v4_plugin"
PLATFORMS = ("is_hip", "is_npu", "is_xpu", "is_musa")


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that installs a package `sglang` of this version, and parts of the plugin that record their calls."""
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)

    def install(version: str | None, **failing: Exception) -> list[str]:
        called: list[str] = []
        registry = SimpleNamespace(HookRegistry=object, HookType=object)
        modules: dict[str, Any] = {
            "sglang": ModuleType("sglang"),
            "sglang.version": SimpleNamespace(__version__=version),
            "sglang.srt.plugins.hook_registry": registry,
            "sglang.srt.server_args": SimpleNamespace(ServerArgs=object),
            "sglang.srt.utils": SimpleNamespace(**dict.fromkeys(PLATFORMS, lambda: False)),
        }
        if version is None:
            modules = {"sglang": None}
        for name in (DSA, V4):

            def run(name: str = name) -> None:
                called.append(name)
                if name.rpartition(".")[2] in failing:
                    raise failing[name.rpartition(".")[2]]

            modules[name] = SimpleNamespace(install=run)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        return called

    return install


def said(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    assert {record.name for record in caplog.records} <= {"tamis"}
    return [record.getMessage() for record in caplog.records if record.levelno == level]


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23", "0.5.23.post1", "0.5.23+cu130", "0.5.17.post2+local"])
def test_a_supported_version(sglang: Any, caplog: pytest.LogCaptureFixture, version: str) -> None:
    called = sglang(version)
    with caplog.at_level(logging.INFO, "tamis"):
        register()
    assert called == [DSA, V4]
    first, second = said(caplog, logging.INFO)
    assert first.endswith("is a value of SGLang's --dsa-decode-backend and --dsa-prefill-backend")
    assert second.endswith("is a value of SGLang's --dsv4-attn-backend")
    assert not said(caplog, logging.WARNING)


@pytest.mark.parametrize(
    "version", ["0.5.16", "0.5.18", "0.5.22", "0.5.170", "0.5.24", "0.6.0", "0.5.23rc1", "0.0.0.dev0"]
)
def test_other_versions_are_left_alone(sglang: Any, caplog: pytest.LogCaptureFixture, version: str) -> None:
    called = sglang(version)
    register()
    assert not called
    (line,) = said(caplog, logging.WARNING)
    told = f"tamis supports SGLang 0.5.17 and 0.5.23, and this is {version}; install one of those"
    assert line == f"tamis is not an attention backend of SGLang here: {told}"
    assert version_refusal(version) == told


def test_without_sglang(sglang: Any, caplog: pytest.LogCaptureFixture) -> None:
    called = sglang(None)
    register()
    assert not called
    (line,) = said(caplog, logging.WARNING)
    assert "importing sglang.version failed with ModuleNotFoundError" in line


def test_a_changed_sglang(sglang: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sglang("0.5.23")
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", SimpleNamespace(HookRegistry=object))
    told = plugin_refusal()
    assert told is not None
    assert told.startswith("SGLang 0.5.23 has no sglang.srt.plugins.hook_registry.HookType")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_other_platforms_are_left_alone(sglang: Any, monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    """Rows of FP8 have other bytes on some of them."""
    called = sglang("0.5.23")
    monkeypatch.setattr(sys.modules["sglang.srt.utils"], platform, lambda: True)
    register()
    assert not called
    told = plugin_refusal()
    assert told is not None
    assert told.startswith("tamis runs in SGLang on NVIDIA GPUs, and this is ")


def test_one_part_fails_alone(sglang: Any, caplog: pytest.LogCaptureFixture) -> None:
    called = sglang("0.5.23", dsa_plugin=LookupError("no such field"))
    with caplog.at_level(logging.INFO, "tamis"):
        register()
    assert called == [DSA, V4]
    (problem,) = said(caplog, logging.WARNING)
    options = "--dsa-decode-backend and --dsa-prefill-backend"
    assert problem == f"tamis is not a value of SGLang's {options} here: LookupError: no such field"
    assert len(said(caplog, logging.INFO)) == 1


def test_choices_are_extended_once() -> None:
    shared = ["fa3"]

    @dataclass
    class Arguments:
        dsa_decode_backend: Annotated[str | None, SimpleNamespace(choices=shared), "more"] = None
        dsa_prefill_backend: Annotated[str | None, SimpleNamespace(choices=shared)] = None
        other: Annotated[str, SimpleNamespace(choices=None)] = ""

    for field in (*FIELDS.values(), "dsa_decode_backend"):
        add_choice(Arguments, field)
    assert shared == ["fa3", "tamis"]
    for field in ("other", "absent"):
        with pytest.raises(LookupError, match=f"no field '{field}' with a list of choices"):
            add_choice(Arguments, field)


@pytest.mark.parametrize(
    ("decode", "prefill", "chosen", "problem"),
    [
        ("dsa", "dsa", {"dsa_decode_backend": "tamis", "dsa_prefill_backend": "tamis"}, None),
        ("nsa", "nsa", {"dsa_decode_backend": "tamis", "dsa_prefill_backend": "tamis"}, None),
        ("dsv4", "dsv4", {"dsa_decode_backend": "tamis", "dsa_prefill_backend": "tamis"}, None),
        ("dsv4", "dsv4", {"dsv4_attn_backend": "tamis"}, None),
        ("fa3", "fa3", {"dsa_decode_backend": "fa3", "dsv4_attn_backend": "auto"}, None),
        ("dsa", "fa3", {"dsa_decode_backend": "tamis"}, None),
        ("fa3", "dsa", {"dsa_decode_backend": "tamis"}, "--dsa-decode-backend tamis was chosen, but decode runs on"),
        ("dsa", "fa3", {"dsa_prefill_backend": "tamis"}, "--dsa-prefill-backend tamis was chosen, but prefill runs on"),
        ("dsa", "dsa", {"dsv4_attn_backend": "tamis"}, "--dsv4-attn-backend tamis was chosen, but decode runs on"),
        ("dsv4", "fa3", {"dsv4_attn_backend": "tamis"}, "--dsv4-attn-backend tamis was chosen, but prefill runs on"),
    ],
)
def test_choices_that_do_not_apply_are_refused(
    decode: str, prefill: str, chosen: dict[str, str], problem: str | None
) -> None:
    built = SimpleNamespace(decode_attention_backend_str=decode, prefill_attention_backend_str=prefill)
    if problem is None:
        check_attention_backends(built, SimpleNamespace(**chosen))
        return
    with pytest.raises(ValueError, match=problem):
        check_attention_backends(built, SimpleNamespace(**chosen))


@pytest.mark.parametrize("overlap", [False, True])
def test_layers_with_an_indexer_may_have_a_backend_of_their_own(overlap: bool) -> None:
    """dots3's sliding windows run on `--attention-backend`, in which two-batch overlap wraps both."""
    both = SimpleNamespace(dsa_backend=object())
    names = {"decode_attention_backend_str": "fa3", "prefill_attention_backend_str": "fa3"}
    built = SimpleNamespace(attn_backend=SimpleNamespace(primary=both) if overlap else both, **names)
    check_attention_backends(built, SimpleNamespace(dsa_decode_backend="tamis", dsa_prefill_backend="tamis"))
    with pytest.raises(ValueError, match="--dsv4-attn-backend tamis was chosen"):
        check_attention_backends(built, SimpleNamespace(dsv4_attn_backend="tamis"))
