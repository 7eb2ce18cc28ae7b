"""SGLang finds the plugin, takes its options, and constructs its backend."""

import argparse
import logging
from importlib.metadata import entry_points
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.version
import torch
from sglang.srt import plugins
from sglang.srt.arg_groups import hisparse_hook, overrides
from sglang.srt.environ import envs
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.mem_cache.kv_cache_configurator import calculate_mla_kv_cache_dim
from sglang.srt.model_executor import model_runner
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner_components import attention_backend_setup as setup
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
from steps import make_step

import tamis.integrations.sglang
from tamis.integrations.sglang import dsa_plugin
from tamis.integrations.sglang.dsa_attention import DsaAttention
from tamis.integrations.sglang.versions import plugin_refusal

FIELDS = ("dsa_decode_backend", "dsa_prefill_backend")
OLDER = sglang.version.__version__ == "0.5.17"


def test_the_entry_point_is_found() -> None:
    (found,) = (one for one in entry_points(group=plugins.GENERAL_PLUGINS_GROUP) if one.name == "tamis")
    assert found.load() is tamis.integrations.sglang.register


def test_a_list_of_other_plugins_leaves_it_out() -> None:
    """What `tamis doctor` warns of."""
    with envs.SGLANG_PLUGINS.override("other"):
        assert plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP) == {}
    with envs.SGLANG_PLUGINS.override("other, tamis"):
        assert set(plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP)) == {"tamis"}


def test_this_version_is_supported() -> None:
    assert plugin_refusal() is None


def test_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sglang.version, "__version__", "0.5.99")
    monkeypatch.setattr(dsa_plugin, "install", lambda: pytest.fail("it was installed"))
    tamis.integrations.sglang.register()
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tamis"]
    assert line.startswith("tamis is not an attention backend of SGLang here: tamis supports SGLang 0.5.17 and 0.5.23")


def test_registering_says_so(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HookRegistry, "register", lambda *_, **__: None)
    with caplog.at_level(logging.INFO, "tamis"):
        tamis.integrations.sglang.register()
    lines = [record.getMessage() for record in caplog.records if record.name == "tamis"]
    assert any("is a value of SGLang's --dsa-decode-backend and --dsa-prefill-backend" in line for line in lines)


def parsed(*given: str) -> Any:
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(["--model-path", "some-model", *given])


@pytest.mark.parametrize("field", FIELDS)
def test_the_options_take_tamis(field: str) -> None:
    option = f"--{field.replace('_', '-')}"
    assert getattr(parsed(option, "tamis"), field) == "tamis"
    assert getattr(parsed(option, "fa3"), field) == "fa3"
    if OLDER:
        assert getattr(parsed(option.replace("dsa", "nsa"), "tamis"), field) == "tamis"


def test_every_place_that_constructs_a_backend_sees_the_subclass() -> None:
    ours = dsa_plugin.TamisSparseAttnBackend
    assert dsa_backend.DeepseekSparseAttnBackend is ours
    assert dsa_backend.DeepseekSparseAttnMultiStepBackend.__init__.__globals__["DeepseekSparseAttnBackend"] is ours
    assert {dsa_plugin.BACKEND, dsa_plugin.BUILD, dsa_plugin.RESOLVE} <= HookRegistry._patched
    assert model_runner.build_attention_backends.__wrapped__ is not None


@pytest.mark.usefixtures("hopper")
def test_drafts_of_several_steps_run_on_tamis() -> None:
    step = make_step(ForwardMode.TARGET_VERIFY)
    drafts = dsa_backend.DeepseekSparseAttnMultiStepBackend(step.runner, topk=1, speculative_num_steps=3)
    assert [type(one) for one in drafts.attn_backends] == [dsa_plugin.TamisSparseAttnBackend] * 2
    assert all(isinstance(one.tamis, DsaAttention) for one in drafts.attn_backends)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("dtype", "expected"), [(torch.float8_e4m3fn, 656), (torch.bfloat16, 576)])
def test_sglang_gives_fp8_rows_scales(dtype: torch.dtype, expected: int) -> None:
    runner = make_step().runner
    given: dict[str, Any] = {"model_config": runner.model_config, "kv_cache_dtype": dtype}
    if "server_args" in signature(calculate_mla_kv_cache_dim).parameters:
        given["server_args"] = runner.server_args
    assert calculate_mla_kv_cache_dim(**given) == expected


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's choice of the implementations that a user left open, for a model of DSA on a Hopper GPU."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def run(kv_cache_dtype: str = "fp8_e4m3", *, sink: bool = False, **given: Any) -> dict[str, Any]:
        config = SimpleNamespace(
            hf_config=SimpleNamespace(
                architectures=["DeepseekV32ForCausalLM"],
                index_topk=2048,
                learnable_sink=sink,
                model_type="deepseek_v32",
            )
        )
        monkeypatch.setattr(overrides, "model_config_of", lambda _view: config, raising=False)
        usual = dict.fromkeys(FIELDS) | {"enable_hisparse": False, "dcp_size": 1, "kv_cache_dtype": kv_cache_dtype}
        view = SimpleNamespace(**(usual | given), get_model_config=lambda: config)
        found: dict[str, Any] = overrides._dsa_split_backend_resolution(view)
        return found

    return run


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "bfloat16"])
def test_sglang_leaves_the_choice_as_it_is(resolve: Any, kv_cache_dtype: str) -> None:
    assert resolve(kv_cache_dtype, dsa_decode_backend="tamis", dsa_prefill_backend="tamis") == {}


def test_sglang_chooses_the_other_phase(resolve: Any) -> None:
    assert resolve(dsa_decode_backend="tamis") == {"dsa_prefill_backend": "flashmla_kv"}
    assert resolve("bfloat16", dsa_prefill_backend="tamis") == {"dsa_decode_backend": "fa3"}


def test_models_with_learnable_sinks_may_choose_tamis(resolve: Any) -> None:
    both = dict.fromkeys(FIELDS, "tamis")
    assert resolve("bfloat16", sink=True, **both) == {}
    if OLDER:  # it has no such models, and no rule for them
        return
    assert resolve("bfloat16", sink=True, dsa_decode_backend="tamis") == {"dsa_prefill_backend": "flashmla_sparse"}
    assert resolve("bfloat16", sink=True) == dict.fromkeys(reversed(FIELDS), "flashmla_sparse")
    with pytest.raises(ValueError, match="uses learnable attention sinks and requires"):
        resolve("bfloat16", sink=True, dsa_decode_backend="fa3")


def test_hisparse_is_refused_by_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    given = SimpleNamespace(**dict.fromkeys(FIELDS, "tamis"), kv_cache_dtype="fp8_e4m3")
    monkeypatch.setattr(hisparse_hook, "resolved_view", lambda arguments: arguments, raising=False)
    with pytest.raises(ValueError, match="HiSparse supports DSA"):
        hisparse_hook.validate_hisparse_dsa_backend(given, FIELDS[0], "decode")


@pytest.mark.usefixtures("hopper")
def test_what_tamis_cannot_serve_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**attributes: Any) -> str:
        backend = make_step().backend
        for name, value in attributes.items():
            setattr(backend, name, value)
        with pytest.raises(ValueError, match="tamis cannot serve this model in SGLang: ") as error:
            DsaAttention.of(backend, prefill_cp=True)
        return str(error.value)

    told = refused(hisparse_coordinator=object(), dcp_size=2, _kv_shard_pool=object(), use_fused_topk=False)
    for remedy in ("--enable-hisparse", "--dcp-size", "--enable-kv-cache-sharding", "SGLANG_DSA_FUSE_TOPK"):
        assert remedy in told


@pytest.mark.usefixtures("hopper")
def test_rows_without_scales_are_refused() -> None:
    """`--dsa-prefill-backend trtllm` makes SGLang store FP8 rows without scales."""
    backend = make_step().backend
    backend.dsa_kv_cache_store_fp8, backend.kv_cache_dim = False, 576
    with pytest.raises(ValueError, match="rows of float8_e4m3fn without scales are not supported"):
        DsaAttention.of(backend, prefill_cp=False)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("draft", [False, True])
def test_a_choice_that_does_not_apply_is_an_error(draft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With another attention backend SGLang would ignore the options of DSA. Drafts may be other models."""
    runner = make_step().runner
    runner.model_config.attention_arch, runner.is_draft_worker = None, False
    assert isinstance(setup.build_attention_backends(model_runner=runner).attn_backend.tamis, DsaAttention)
    monkeypatch.setattr(setup, "_build_resolved_backend", lambda **_: SimpleNamespace())
    monkeypatch.setattr(type(runner.server_args), "get_attention_backends", lambda _: ("fa3", "triton"), raising=False)
    runner.prefill_attention_backend_str, runner.decode_attention_backend_str = "fa3", "triton"
    runner.is_draft_worker = draft
    if draft:
        assert model_runner.build_attention_backends(model_runner=runner).decode_attention_backend_str == "triton"
        return
    with pytest.raises(ValueError, match="--dsa-decode-backend tamis was chosen, but decode runs on the attention"):
        model_runner.build_attention_backends(model_runner=runner)
