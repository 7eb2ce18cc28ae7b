"""The messages on the page about troubleshooting are those that users see: each is provoked here, or is an engine's."""

import argparse
import ast
import logging
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import build

import tamis.cuda.nvrtc
from tamis import Batch, Caches, IndexRecipe, LayerSpec, Limits, PagedCache, PagePool, Planner, SparseMLA, choose
from tamis import backends as tamis_backends
from tamis.cli import main
from tamis.cuda import cubins
from tamis.integrations import sglang, vllm
from tamis.integrations.sglang import options, v4_options
from tamis.integrations.sglang import versions as sglang_versions
from tamis.integrations.transformers import attach
from tamis.integrations.vllm import versions as vllm_versions
from tamis.ops import IndexInputs, combine_parts, write_kv
from tamis.ops.combine import Partials

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
SPEC = LayerSpec(heads=4, topk=8)
LIMITS = Limits(max_tokens=32, max_requests=4, max_length=128)
ENGINES = {
    "No module named 'triton'": "Python",
    "Backend CUSTOM must be registered before use": "vLLM, of any version",
    "Reason: ['ImportError']": "vLLM 0.25",
    "shape '[N, 64, 576]' is invalid": "torch, in vLLM 0.25",
    "invalid choice: 'tamis'": "argparse, in SGLang",
    "Failed to load plugin tamis": "SGLang",
}
"""Messages that others write. `tests/real_vllm` and `tests/real_sglang` see those that can be seen without a GPU."""


def messages() -> list[str]:
    """The first cell's code of every row whose table is about messages or reasons."""
    found, told = [], False
    for line in PAGE.read_text().splitlines():
        if not line.startswith("|"):
            told = False
        elif re.match(r"\| (message|reason) \|", line):
            told = True
        elif told and (code := re.match(r"\| `([^`]+)`", line)):
            found.append(code[1])
    return found


def pattern(message: str) -> re.Pattern[str]:
    """A message of the page, in which `...` stands for any text."""
    return re.compile(".*".join(map(re.escape, message.split("..."))), re.S)


def plan(shape: str = "q6", page_size: int = 64) -> Any:
    return Planner(SPEC, LIMITS).plan(Batch.parse(shape, PagePool(8, page_size)))


def call_layer(**changes: Any) -> None:
    """A layer call with something wrong."""
    step = changes.pop("step", None) or plan()
    cache = PagedCache("v32-bf16", 8, changes.pop("page_size", 64))
    call: dict[str, Any] = {"q": torch.randn(6, 4, 576), "kv": torch.randn(6, 576), "caches": Caches(cache)}
    call |= {"positions": torch.full((6, 8), -1, dtype=torch.int32)} | changes
    SparseMLA(SPEC)(**call, plan=step)


def stale_plan() -> None:
    planner = Planner(SPEC, LIMITS)
    first = planner.plan(Batch.parse("q6", PagePool(8, 64)))
    planner.plan(Batch.parse("q1s7", PagePool(8, 64)))
    call_layer(step=first)


def plan_inside() -> None:
    planner = Planner(SPEC, LIMITS)
    with planner.plan(Batch.parse("q6", PagePool(8, 64))).using():
        planner.plan(Batch.parse("q1s7", PagePool(8, 64)))


def index(recipe: IndexRecipe | None) -> IndexInputs:
    return IndexInputs(torch.randn(6, 2, 128), torch.randn(6, 2), torch.randn(6, 128), recipe)


def other_recipe() -> None:
    keys = PagedCache("index-fp8", 8, 64, recipe=IndexRecipe())
    caches = Caches(PagedCache("v32-bf16", 8, 64), keys)
    call_layer(caches=caches, positions=None, index=index(IndexRecipe.of_v4()))


def frozen_cache() -> None:
    with torch.inference_mode():
        engine = torch.zeros(2, 64, 576, dtype=torch.bfloat16)
    write_kv(torch.randn(1, 576), PagedCache.wrap(engine, "v32-bf16"), torch.tensor([0]))


def shared_output() -> None:
    parts = Partials(torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4))
    combine_parts(parts, out=parts.out[0])


def without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tamis_backends, "has_nvrtc", lambda: False)
    hopper = tamis_backends.BACKENDS[0]
    raise ValueError(*hopper.device_refusals(torch.device("cuda"), (9, 0)))


def compile_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tamis.cuda.nvrtc, "_candidates", lambda: iter(()))
    tamis.cuda.nvrtc.nvrtc.__wrapped__()


def without_transformers() -> None:
    source = (ROOT / "src/tamis/integrations/transformers.py").read_text()
    blocked = {"__builtins__": __builtins__, "__name__": "tamis.integrations.transformers"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "transformers", None)
        exec(compile(source, "transformers.py", "exec"), blocked)


def train_attached() -> None:
    model = build("v32")
    attach(model)
    model(torch.arange(4).unsqueeze(0))


def foreign_cache() -> None:
    from transformers import DynamicCache

    model = build("v32")
    attach(model)
    with torch.no_grad():
        model(torch.arange(4).unsqueeze(0), past_key_values=DynamicCache())


def run_out_of_memory(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: argparse.Namespace) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("tamis.cli.size.run", fail)
    assert main(["size", "--model", "deepseek-v3.2"]) == 2
    raise ValueError(capsys.readouterr().err.strip().partition("error: ")[2])


def foreign_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    raise ValueError(cubins.refusal(tmp_path))


def shared_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    raise ValueError(cubins.refusal(tmp_path))


def read_only_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setattr(os, "access", lambda *_: False)
    raise ValueError(cubins.refusal(tmp_path))


def logged_by_vllm(part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("_register", "_register_indexer"):
        monkeypatch.setattr(vllm, name, lambda own=name: "a reason" if own == part else None)
    vllm.register()
    raise ValueError(caplog.messages[-1])


def logged_by_sglang(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sglang_versions, "plugin_refusal", lambda: "a reason")
    sglang.register()
    raise ValueError(caplog.messages[-1])


def raise_text(text: str | None) -> None:
    raise ValueError(text)


CALLS: dict[str, Callable[..., None]] = {
    "it belongs to user ...": foreign_folder,
    "other users can write to it (its mode is ...)": shared_folder,
    "it cannot be written to": read_only_folder,
    "this user has no home folder": lambda: raise_text(cubins.refusal(None)),
    "... must be bfloat16 or float16 or float32, got ...; convert it with .to(torch.bfloat16)": lambda: call_layer(
        kv=torch.zeros(6, 576, dtype=torch.float64)
    ),
    "... must be of shape [...], got [...]; ...": lambda: call_layer(q=torch.randn(5, 4, 576)),
    "... must be on ..., got a tensor on ...; move it with ...": lambda: call_layer(
        positions=torch.full((6, 8), -1, dtype=torch.int32, device="meta")
    ),
    "device must be one that this machine has, got ...": lambda: PagedCache("v32-bf16", 2, 64, "cuda:99"),
    "backend 'triton' cannot run this layer on cpu: needs a cuda device, not cpu; reference can": lambda: choose(
        SPEC, "cpu", prefer="triton"
    ),
    "no backend can run this layer on ...": lambda: choose(SPEC, "cpu", dtype=torch.float64),
    "NVRTC was not found; ...": without_nvrtc,
    "CUDA C++ kernels need NVRTC, NVIDIA's runtime compiler, which was not found; ...": compile_without_nvrtc,
    "tamis.integrations.transformers needs Hugging Face transformers: ...": without_transformers,
    "... must be without gradient, got a tensor that requires grad; ...": lambda: call_layer(
        q=torch.randn(6, 4, 576, requires_grad=True)
    ),
    "... must be a tensor that may be written here, got one made under torch.inference_mode(); ...": frozen_cache,
    "plan must be the planner's latest, got generation ... of ...; ...": stale_plan,
    "planner must be used by one thread at a time, got ...; ...": plan_inside,
    "pages.page_size must be ..., the planner's, got ...; ...": lambda: plan(page_size=32),
    "caches must be of the plan's page size ..., got ...; use one page size for both": lambda: call_layer(page_size=32),
    "positions and index must be given one at a time, got neither; pass exactly one": lambda: call_layer(
        positions=None
    ),
    "caches.index must be a cache of index keys, got None; pass Caches(latent, index)": lambda: call_layer(
        positions=None, index=index(None)
    ),
    "index.recipe must be that of the cache, ...": other_recipe,
    "positions[...] must be at most ..., the position of token ..., got ...; ...": lambda: call_layer(
        positions=torch.full((6, 8), 5, dtype=torch.int32)
    ),
    "slots must be ...": lambda: write_kv(torch.randn(1, 576), PagedCache("v32-bf16", 2, 64), torch.tensor([128])),
    "lengths must be between 0 and ..., got ...; raise Limits.max_length": lambda: plan("q1s129"),
    "query_starts must be of at most max_tokens=... tokens, got ...; raise the limit": lambda: plan("q33"),
    "pool must be of at least ... free pages, got ...; release requests": lambda: plan("q1s513"),
    "out must be separate from all inputs and caches, got ...; allocate a separate tensor": shared_output,
    "model must be one of DeepseekV32ForCausalLM, ...": lambda: attach(torch.nn.Linear(2, 2)),
    "model must be used for inference while it is attached, got gradients enabled; ...": train_attached,
    "past_key_values must be a TamisCache, got ...; ...": foreign_cache,
    "out of memory: ...; use a smaller model, prompt or batch": run_out_of_memory,
    "tamis supports vLLM 0.25.x to 0.32.x, and this is ...; install one of those": lambda: raise_text(
        vllm_versions.version_refusal("0.99.0")
    ),
    "tamis is not vLLM's CUSTOM attention backend: ...": partial(logged_by_vllm, "_register"),
    "tamis' indexer cannot be chosen in this vLLM: ...": partial(logged_by_vllm, "_register_indexer"),
    "tamis is not an attention backend of SGLang here: ...": logged_by_sglang,
    "tamis supports SGLang 0.5.17 and 0.5.23, and this is ...; install one of those": lambda: raise_text(
        sglang_versions.version_refusal("0.9.0")
    ),
    "--dsa-decode-backend tamis was chosen, but decode runs on the attention backend ..., to which it does not apply; "
    "...": lambda: options.check_attention_backends(
        SimpleNamespace(decode_attention_backend_str="fa3", prefill_attention_backend_str="fa3"),
        SimpleNamespace(dsa_decode_backend="tamis"),
    ),
    "--dsa-decode-backend tamis has no effect on DeepSeek-V4, whose attention is ...; give --dsv4-attn-backend tamis "
    "instead": lambda: v4_options.is_chosen(
        SimpleNamespace(dsa_decode_backend="tamis", dsa_prefill_backend="tamis", dsv4_attn_backend="flashmla")
    ),
}
"""What provokes each message: a function that raises it, with pytest's fixtures by name."""


def test_every_message_is_provoked_or_known_to_be_another_programs() -> None:
    found = messages()
    assert len(found) == len(set(found))
    assert {*CALLS, *ENGINES} <= set(found)
    written = templates()
    for message in set(found) - {*CALLS, *ENGINES}:
        # Raised by code that needs an engine or a GPU: an expression of the source has exactly this text.
        sample = message.replace("...", "x")
        assert any(template.fullmatch(sample) for template in written), message


@pytest.mark.parametrize("message", CALLS)
def test_the_message_is_what_a_user_sees(
    message: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    call = CALLS[message]
    code = getattr(call, "func", call).__code__
    wanted = code.co_varnames[: code.co_argcount]
    fixtures = {name: request.getfixturevalue(name) for name in wanted if name != "part"}
    with caplog.at_level(logging.INFO, logger="tamis"), pytest.raises((ValueError, TypeError, ImportError)) as error:
        call(**fixtures)
    assert pattern(message).fullmatch(str(error.value)), str(error.value)


def templates() -> list[re.Pattern[str]]:
    """Every message in the source as a pattern, in which what is computed may be anything."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = _text(node)
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("refuse", "refuse_type"):
                name, expected, received, *remedy = map(_text, node.args)
                text = "; ".join([f"{name} must be {expected}, got {received}", *remedy])
            # Others, such as that of `checks.refuse` itself, would match nearly everything.
            if len(text.replace(ANYTHING, "")) > 20:
                found.append(re.compile(text, re.S))
    return found


ANYTHING = ".+"


def _text(node: ast.AST) -> str:
    match node:
        case ast.JoinedStr(values=values):
            return "".join(map(_text, values))
        case ast.Constant(value=value):
            return re.escape(str(value))
        case _:
            return ANYTHING
