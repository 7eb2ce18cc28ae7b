"""The backend that SGLang constructs for DeepSeek-V4, over stand-ins for both supported versions of SGLang."""

import logging
import sys
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from v4_pool import Pool, core_of

from tamis._version import __version__
from tamis.integrations.sglang import announce, v4_plugin

OURS = "tamis.integrations.sglang.v4_backend"
BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend"
FACTORIES = "sglang.srt.layers.attention.deepseek_v4_trtllm_backend"
NEW, OLD = "0.5.23", "0.5.17"


class HookType(Enum):
    AFTER = "after"
    AROUND = "around"
    REPLACE = "replace"


class Registry:
    def __init__(self) -> None:
        self.hooks: dict[str, tuple[Any, HookType]] = {}

    def register(self, target: str, hook: Any, kind: HookType) -> None:
        self.hooks[target] = hook, kind


class Engine:
    """SGLang as far as the plugin sees it."""

    def __init__(self, version: str, patch: pytest.MonkeyPatch) -> None:
        self.kernel = SimpleNamespace(dsa_prefill_backend=None, dsa_decode_backend=None)
        self.parallel, self.registry = SimpleNamespace(attn_cp_size=1, attn_tp_size=8), Registry()
        self.option = SimpleNamespace(choices=["auto", "flashmla"])
        if version == NEW:
            self.kernel.dsv4_attn_backend = "flashmla"
        arguments = type("ServerArgs", (), {"dsv4_attn_backend": "auto"} if version == NEW else {})
        arguments.__annotations__ = {"dsv4_attn_backend": Annotated[str, self.option]} if version == NEW else {}
        attn, steps = _classes(version)
        modules: dict[str, dict[str, Any]] = {
            "sglang.srt.server_args": {"ServerArgs": arguments},
            "sglang.srt.plugins.hook_registry": {"HookRegistry": self.registry, "HookType": HookType},
            "sglang.srt.runtime_context": {"get_exec": lambda: self, "get_parallel": lambda: self.parallel},
            BACKEND: {"DeepseekV4AttnBackend": attn, "DeepseekV4MultiStepBackend": steps},
        }
        for name, names in modules.items():
            module = ModuleType(name)
            module.__dict__.update(names)
            parts = name.split(".")
            for depth in range(1, len(parts)):
                patch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(".".join(parts[:depth])))
            patch.setitem(sys.modules, name, module)
        self.ours = import_module(OURS)
        # What was imported over the stand-ins must not stay after the test.
        del sys.modules[OURS]
        patch.setitem(sys.modules, OURS, self.ours)

    def choose(self) -> None:
        if hasattr(self.kernel, "dsv4_attn_backend"):
            self.kernel.dsv4_attn_backend = "tamis"
        else:
            self.kernel.dsa_prefill_backend = self.kernel.dsa_decode_backend = "tamis"


def _classes(version: str) -> tuple[type[Any], type[Any]]:
    class AttnBackend:
        softmax_scale, head_dim_v, mtp_enabled = 512**-0.5, 512, False
        hisparse_coordinator: Any = None

        def __init__(self, model_runner: Any, skip_prefill: bool = False, **steps: Any) -> None:
            self.model_runner, self.steps, self.stored = model_runner, steps, []
            self.token_to_kv_pool, self.device = model_runner.pool, "cpu"
            self.forward_metadata = SimpleNamespace(core_attn_metadata=model_runner.core)

        def store_cache(self, layer_id: int, k: Tensor, batch: Any) -> None:
            self.stored.append((layer_id, k, batch))

        def forward(self, *arguments: Any, **keywords: Any) -> Any:
            return ("usual", self._forward_attention(*arguments, **keywords)) if version == NEW else "old"

    class MultiStepBackend(AttnBackend):
        def __init__(self, model_runner: Any, topk: int, speculative_num_steps: int) -> None:
            super().__init__(model_runner)
            self.topk, self.speculative_num_steps = topk, speculative_num_steps
            self.attn_backends = [self._make_step_backend(model_runner, i) for i in range(speculative_num_steps)]

        def _make_step_backend(self, model_runner: Any, step_id: int) -> Any:
            return AttnBackend(model_runner, speculative_step_id=step_id)

    if version == NEW:
        new: Any = AttnBackend
        new._forward_attention = lambda self, *_, **__: "flashmla"
        new._use_sparse_prefill = lambda self, *_, **__: True
    return AttnBackend, MultiStepBackend


@pytest.fixture(params=[NEW, OLD])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(request.param, monkeypatch)


@pytest.fixture
def new_engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(NEW, monkeypatch)


def runner(ratio: int = 4, tokens: int = 3) -> SimpleNamespace:
    torch.manual_seed(5)
    pool = Pool(ratio)
    pool.get_swa_key_layout = lambda: SimpleNamespace(value="v4")  # type: ignore[attr-defined]
    return SimpleNamespace(pool=pool, core=core_of(pool, tokens), model_config=SimpleNamespace(num_attention_heads=64))


LAYER = SimpleNamespace(layer_id=7, tp_q_head_num=8, v_head_dim=512)


def batch(idle: bool = False) -> SimpleNamespace:
    return SimpleNamespace(forward_mode=SimpleNamespace(is_idle=lambda: idle))


def test_attention_is_replaced_if_tamis_is_chosen(engine: Engine) -> None:
    engine.choose()
    backend = engine.ours.TamisV4AttnBackend(runner())
    q = torch.randn(3, 64, 512).bfloat16()
    found = backend.forward(q, q, q, LAYER, batch(), compress_ratio=4, save_kv_cache=False, attn_sink=torch.zeros(64))
    # SGLang 0.5.23's `forward` still runs around attention.
    out = found[1] if isinstance(found, tuple) else found
    assert out.shape == (3, 64, 512)
    assert out[:, :8].ne(0).any()
    assert out[:, 8:].eq(0).all()
    assert isinstance(found, tuple) == hasattr(engine.kernel, "dsv4_attn_backend")
    assert not backend.stored
    assert not backend._use_sparse_prefill(None, num_qo_tokens=9999)


def test_rows_are_stored_first_if_the_layer_asks(engine: Engine) -> None:
    engine.choose()
    backend, step = engine.ours.TamisV4AttnBackend(runner(0)), batch()
    q, k = torch.randn(3, 8, 512).bfloat16(), torch.randn(3, 512)
    backend.forward(q, k, k, LAYER, step, 0, attn_sink=torch.zeros(8))
    assert [(layer, batch) for layer, _, batch in backend.stored] == [(7, step)]
    assert backend.stored[0][1] is k


def test_nothing_changes_if_tamis_is_not_chosen(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tamis")
    given = runner()
    given.pool = None  # which no check looks at
    backend = engine.ours.TamisV4AttnBackend(given)
    assert backend.forward(None) in (("usual", "flashmla"), "old")
    if hasattr(engine.kernel, "dsv4_attn_backend"):
        assert backend._use_sparse_prefill() is True
    assert not caplog.messages


def test_an_idle_draft_gives_zeros(engine: Engine) -> None:
    engine.choose()
    backend = engine.ours.TamisV4AttnBackend(runner())
    backend.mtp_enabled = True
    backend.forward_metadata = None  # an idle rank has none
    q = torch.full((2, 64, 512), torch.nan)
    out = backend._forward_attention(q, q, q, LAYER, batch(idle=True), 4)
    assert out.shape == (2, 64, 512)
    assert out.eq(0).all()


def test_one_line_announces_tamis(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    announce.cache_clear()
    caplog.set_level(logging.INFO, "tamis")
    engine.choose()
    for _ in range(2):
        engine.ours.TamisV4AttnBackend(runner())
    line = f"tamis {__version__} serves DeepSeek-V4: fp8 rows of 584 bytes, 8 heads, kernels reference"
    assert caplog.messages == [line]


def test_a_model_that_cannot_be_served_is_an_error(engine: Engine) -> None:
    engine.choose()
    engine.parallel.attn_cp_size = 2
    with pytest.raises(ValueError, match="context parallelism"):
        engine.ours.TamisV4AttnBackend(runner())


def test_functions_of_the_new_version_are_wrapped(new_engine: Engine) -> None:
    v4_plugin.install()
    assert new_engine.option.choices == ["auto", "flashmla", "tamis"]
    ours = new_engine.ours
    assert new_engine.registry.hooks == {
        f"{FACTORIES}.create_deepseek_v4_attn_backend": (ours.create_attn_backend, HookType.AROUND),
        f"{FACTORIES}.create_deepseek_v4_multistep_backend": (ours.create_multistep_backend, HookType.AROUND),
    }
    v4_plugin.install()
    assert new_engine.option.choices.count("tamis") == 1


def test_drafts_of_the_new_version_are_made_of_our_steps(new_engine: Engine) -> None:
    ours, given = new_engine.ours, runner()
    assert ours.create_attn_backend(lambda *_, **__: "usual", given) == "usual"
    assert ours.create_multistep_backend(lambda *_, **__: "usual", given, 1, 3) == "usual"
    new_engine.choose()
    assert type(ours.create_attn_backend(None, given, skip_prefill=False)) is ours.TamisV4AttnBackend
    drafts = ours.create_multistep_backend(None, given, 1, 3)
    assert type(drafts) is ours.TamisV4MultiStepBackend
    assert [type(step) for step in drafts.attn_backends] == [ours.TamisV4AttnBackend] * 3
    assert [step.steps["speculative_step_id"] for step in drafts.attn_backends] == [0, 1, 2]
    assert {step.steps["speculative_num_steps"] for step in drafts.attn_backends} == {3}


def test_the_class_of_the_old_version_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(OLD, monkeypatch)
    v4_plugin.install()
    assert engine.registry.hooks == {
        f"{BACKEND}.DeepseekV4AttnBackend": (engine.ours.TamisV4AttnBackend, HookType.REPLACE)
    }
    assert engine.option.choices == ["auto", "flashmla"]
