"""The cases of SGLang's attention kit, run with one implementation. One process of `sglang_kit.py`.

The kit compares a backend's output with a reference in torch, with an absolute tolerance of 0.08 to 0.2. Outputs of its
DSA cases are of the order of 0.03, so that even zeros would pass, and the kit passes positions where the backend, as
configured by default, expects slots. Every comparison of the kit is therefore repeated as a relative error, and every
DSA case runs in three settings:

- `shipped`: as the kit is, with positions taken for slots, so that only the kit's own verdict means anything;
- `slots`: the kit's positions are translated to slots first;
- `positions`: with the fused top-k off, so that the backend translates positions itself.
"""

import argparse
import contextlib
import json
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

SETTINGS = ("shipped", "slots", "positions")
OWN = {
    "flashmla_sparse": ("flashmla_sparse", "flashmla_sparse"),
    "flashmla_kv": ("flashmla_kv", "flashmla_kv"),
    "flashmla_auto": ("flashmla_auto", "flashmla_kv"),
}
ENGINES = OWN | {"tamis": ("tamis", "tamis")}
"""The implementations for prefill and decode, by a name for both."""
WORKSPACE = "_workspace"
"""How cases of V4 end in which the kit asserts that SGLang's workspace is used, which tamis has no need of."""


@dataclass(frozen=True)
class Case:
    """A case of the kit, bound to an implementation."""

    name: str
    setting: str
    call: Callable[[], object]


class Kit(unittest.TestCase):
    """What the kit takes for the running test."""

    def runTest(self) -> None:
        raise NotImplementedError


class Recorder:
    """Keeps what the kit compares, and leaves its verdict alone."""

    def __init__(self) -> None:
        self.errors: list[float] = []
        self.first: torch.Tensor | None = None
        self.compare = torch.testing.assert_close

    def __call__(self, actual: Any, expected: Any, **tolerance: Any) -> None:
        # Draft steps without probabilities have None among their outputs, on both sides.
        if isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor) and actual.shape == expected.shape:
            if self.first is None:
                self.first = actual.detach().float().cpu()
            wanted = expected.detach().double()
            difference = (actual.detach().double() - wanted).norm() / wanted.norm().clamp_min(1e-30)
            self.errors.append(float(difference))
        self.compare(actual, expected, **tolerance)


@contextlib.contextmanager
def selection_as(setting: str) -> Iterator[None]:
    """Run the kit's DSA fixtures in one of the settings."""
    from sglang.srt.environ import envs
    from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit

    build = kit.build_dsa_sparse_attention_fixture

    def translated(*arguments: Any, **keywords: Any) -> Any:
        fixture = build(*arguments, **keywords)
        table = fixture.runner.req_to_token_pool.req_to_token
        lengths = torch.tensor(fixture.case.input_lens, device=table.device)
        requests = torch.arange(len(lengths), device=table.device).repeat_interleave(lengths)
        positions = fixture.topk_indices
        slots = table[requests[:, None], positions.clamp_min(0).long()]
        fixture.topk_indices = torch.where(positions < 0, -1, slots).to(torch.int32)
        return fixture

    with envs.SGLANG_DSA_FUSE_TOPK.override(setting != "positions"):
        if setting == "slots":
            kit.build_dsa_sparse_attention_fixture = translated
        try:
            yield
        finally:
            kit.build_dsa_sparse_attention_fixture = build


def dsa_cases(engine: str) -> Iterator[Case]:
    """Decode, extend, verify and draft steps of DSA, with both kinds of cache."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.test.kits.attention_unittest.attention_methods import dsa_attention as kit
    from sglang.test.kits.attention_unittest.runner_modes.cuda_graph_decode_runner import (
        run_dsa_sparse_cuda_graph_decode_case,
    )

    prefill, decode = ENGINES[engine]
    chosen = {"dsa_prefill_backend": prefill, "dsa_decode_backend": decode}
    make = partial(kit.DSAAttentionCase, backend="dsa", num_heads=4, num_kv_heads=1, page_size=kit.DSA_PAGE_SIZE)
    test = Kit()
    cases: list[tuple[Any, dict[str, str]]] = [(case, {}) for case in kit.make_dsa_sparse_cases("dsa")]
    long = make(name="decode_long_prefix", forward_mode=ForwardMode.DECODE, prefix_lens=(2048,))
    cases += [
        (replace(long, name=f"decode_{pattern}"), {"index_pattern": pattern}) for pattern in ("strided", "head_tail")
    ]
    cases += [(replace(long, name="decode_interleaved_pages"), {"loc_layout": "interleaved_pages"})]
    for heads in (16, 64, 128):
        cases += [(replace(long, name=f"decode_{heads}_heads", num_heads=heads), {})]
    extend = make(
        name="extend_ragged", forward_mode=ForwardMode.EXTEND, prefix_lens=(2048, 100, 0), extend_lens=(5, 64, 33)
    )
    cases += [(extend, {}), (replace(extend, name="extend_16_heads", num_heads=16), {})]
    for mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
        short = make(name=f"{mode.name.lower()}_one", forward_mode=mode, prefix_lens=(128,), extend_lens=(3,))
        cases += [(short, {})]
        cases += [(replace(short, name=f"{mode.name.lower()}_two", prefix_lens=(128, 300), extend_lens=(3, 3)), {})]
    for case, keywords in cases:
        drafts = case.forward_mode.is_target_verify() or case.forward_mode.is_draft_extend_v2()
        bf16_only = decode == "flashmla_sparse" and (case.forward_mode.is_decode() or drafts)
        for fp8 in (False,) if bf16_only else (False, True):
            # The kit's own condition: this implementation gets offsets instead of slots.
            ragged = fp8 and prefill == "flashmla_sparse" and case.forward_mode == ForwardMode.EXTEND
            for setting in SETTINGS:
                if setting == "slots" and ragged:
                    continue
                call = partial(kit.run_dsa_sparse_attention_case, test, case, fp8_kv_cache=fp8, **chosen, **keywords)
                yield Case(f"{case.name.removeprefix('dsa_sparse_')}/{'fp8' if fp8 else 'bf16'}", setting, call)
    graph = make(name="graph_decode", forward_mode=ForwardMode.DECODE, prefix_lens=(127, 128))
    for fp8 in (False,) if decode == "flashmla_sparse" else (False, True):
        for setting in ("shipped", "positions"):
            call = partial(
                run_dsa_sparse_cuda_graph_decode_case, test, graph, dsa_decode_backend=decode, fp8_kv_cache=fp8
            )
            yield Case(f"graph_decode/{'fp8' if fp8 else 'bf16'}", setting, call)
    draft = make(name="eagle_draft", forward_mode=ForwardMode.DECODE, prefix_lens=(128, 192))
    for setting in ("shipped", "positions"):
        yield Case("eagle_draft_graph/bf16", setting, partial(draft_case, test, draft, decode))


def draft_case(test: Kit, case: Any, decode: str) -> None:
    """Draft steps in the engine's graph runner; the kit has no argument for the implementation."""
    from sglang.test.kits.attention_unittest.runner_modes import speculative_draft_runner as runner

    build = runner.build_dsa_sparse_attention_fixture
    runner.build_dsa_sparse_attention_fixture = partial(build, dsa_decode_backend=decode)
    try:
        runner.run_dsa_eagle_draft_cuda_graph_runner_case(test, case)
    finally:
        runner.build_dsa_sparse_attention_fixture = build


def v4_cases(engine: str) -> Iterator[Case]:
    """The cases of DeepSeek-V4: window only, and with entries of both ratios."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import RuntimeContext
    from sglang.test.kits.attention_unittest.attention_methods import dsv4_attention as kit
    from sglang.test.kits.attention_unittest.runner_modes import (
        cuda_graph_decode_runner,
        speculative_draft_runner,
        speculative_target_verify_runner,
    )

    if engine == "tamis":
        # SGLang 0.5.17 has no option for the attention of V4; these two choose tamis.
        override = RuntimeContext.override_server_args

        def chosen(self: Any, **fields: Any) -> Any:
            return override(self, **{"dsa_prefill_backend": "tamis", "dsa_decode_backend": "tamis"} | fields)

        RuntimeContext.override_server_args = chosen
    make = partial(kit.DSV4AttentionCase, backend="dsv4", num_heads=64, page_size=kit.DSV4_PAGE_SIZE)
    test = Kit()
    for case in kit.make_dsv4_cases("dsv4"):
        yield Case(case.name.removeprefix("dsv4_"), "shipped", partial(kit.run_dsv4_attention_case, test, case))
    for ratio, prefix in ((4, 64), (128, 128)):
        for mode, extend in ((ForwardMode.EXTEND, (16,)), (ForwardMode.DECODE, ())):
            case = make(
                name=f"c{ratio}_{mode.name.lower()}",
                forward_mode=mode,
                prefix_lens=(prefix,),
                extend_lens=extend,
                compress_ratio=ratio,
            )
            paths = (False, True) if mode == ForwardMode.EXTEND and engine != "tamis" else (False,)
            for sparse in paths:
                call = partial(kit.run_dsv4_compress_attention_case, test, case, sparse_prefill=sparse)
                yield Case(f"{case.name}{WORKSPACE if sparse else ''}", "shipped", call)
    for ratio, prefixes in ((0, (64, 96)), (4, (64, 96)), (128, (128, 160))):
        decode = make(
            name=f"graph_decode_c{ratio}",
            forward_mode=ForwardMode.DECODE,
            prefix_lens=prefixes[:1],
            compress_ratio=ratio,
        )
        call = partial(cuda_graph_decode_runner.run_dsv4_cuda_graph_decode_case, test, decode)
        yield Case(decode.name, "shipped", call)
        verify = make(
            name=f"verify_c{ratio}",
            forward_mode=ForwardMode.TARGET_VERIFY,
            prefix_lens=prefixes,
            extend_lens=(3, 3),
            compress_ratio=ratio,
        )
        yield Case(verify.name, "shipped", partial(kit.run_dsv4_target_verify_attention_case, test, verify, topk=1))
        graph = speculative_target_verify_runner.run_dsv4_eagle_verify_cuda_graph_case
        call = partial(graph, test, verify, topk=1, force_gpu_only_seq_lens=True)
        yield Case(f"graph_verify_c{ratio}", "shipped", call)
    extend = make(
        name="draft_extend", forward_mode=ForwardMode.DRAFT_EXTEND_V2, prefix_lens=(64, 96), extend_lens=(4, 4)
    )
    call = partial(kit.run_dsv4_draft_extend_attention_case, test, extend, force_gpu_only_seq_lens=True)
    yield Case("draft_extend", "shipped", call)
    draft = make(name="eagle_draft", forward_mode=ForwardMode.DECODE, prefix_lens=(32, 64))
    graph = speculative_draft_runner.run_dsv4_eagle_draft_cuda_graph_runner_case
    yield Case("eagle_draft_graph", "shipped", partial(graph, test, draft, force_gpu_only_seq_lens=True))


def require_tamis() -> None:
    """Fail cases in which SGLang constructs a backend of its own where tamis was chosen."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    def checked(create: Callable[[Any], Any], runner: Any) -> Any:
        backend = create(runner)
        if not type(backend).__module__.startswith("tamis."):
            raise RuntimeError(f"expected a backend of tamis, got {type(backend).__module__}")
        return backend

    for name in ("dsa", "dsv4"):
        ATTENTION_BACKENDS[name] = partial(checked, ATTENTION_BACKENDS[name])


def verdict(case: Case) -> tuple[str, str]:
    """Run a case: what became of it, and why."""
    try:
        with torch.no_grad(), selection_as(case.setting):
            case.call()
            torch.cuda.synchronize()
    except unittest.SkipTest as reason:
        return "SKIP", str(reason)
    except AssertionError as error:
        traceback.print_exc()
        return "FAIL", " ".join(str(error).split())[:300] or "an assertion without a message"
    except Exception as error:
        traceback.print_exc()
        return "ERROR", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return "PASS", ""


def run(group: str, engine: str, folder: Path) -> None:
    """Run what is left of a group, a line of JSON for every case that begins or ends.

    A case that breaks the device breaks the process: it ends then, and is started again for the cases that are left.
    """
    from sglang.srt.plugins import load_plugins

    load_plugins()
    if engine == "tamis":
        require_tamis()
    log = folder / f"{group}-{engine}.jsonl"
    known = (
        {(row["case"], row["setting"]) for row in map(json.loads, log.read_text().splitlines())}
        if log.exists()
        else set()
    )
    outputs = {}
    for case in (dsa_cases if group == "dsa" else v4_cases)(engine):
        if (case.name, case.setting) in known:
            continue
        row: dict[str, Any] = {"group": group, "engine": engine, "case": case.name, "setting": case.setting}
        with log.open("a") as file:
            file.write(
                json.dumps(row | {"verdict": "CRASH", "why": "the process ended in this case", "errors": []}) + "\n"
            )
        print("begin", case.name, case.setting, flush=True)
        recorder = Recorder()
        torch.testing.assert_close = recorder
        began = time.perf_counter()
        row["verdict"], row["why"] = verdict(case)
        row["seconds"] = time.perf_counter() - began
        torch.testing.assert_close = recorder.compare
        row["errors"] = recorder.errors
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        if recorder.first is not None:
            outputs[f"{case.name} {case.setting}"] = recorder.first
            torch.save(outputs, folder / f"{group}-{engine}.{len(known)}.pt")
        torch.cuda.synchronize()
    (folder / f"{group}-{engine}.done").touch()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--group", choices=("dsa", "v4"), required=True)
    parser.add_argument("--engine", choices=tuple(ENGINES), required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    run(options.group, options.engine, options.folder)
