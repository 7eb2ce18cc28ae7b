"""What vLLM's attention costs the host, with tamis and with vLLM's own FlashMLA classes, without a GPU.

    VLLM_TARGET_DEVICE=empty PYTHONPATH=src:. .venv-vllm/bin/python benchmarks/vllm_host.py [--csv FILE] [--only NAME]

Each case is one call of an attention layer's `forward_mqa` with vLLM's own records, or one build of a step's record.
vLLM's Python code is real. `host_profile` says what is stubbed; FlashMLA's C++ functions are stubs too, which allocate
what it allocates.
"""

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

os.environ["VLLM_TARGET_DEVICE"] = "empty"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_PLUGINS"] = ""
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with which vLLM keeps its Triton kernels although there is no device

import torch
from host_profile import Launches, functions_of, pretended_h200, profile
from torch import Tensor

BF16, INT = torch.bfloat16, torch.int32
PAGE, WINDOW_PAGE, WINDOW, TOPK, V32_TOPK = 256, 64, 128, 512, 2048
MAX_TOKENS, MAX_LENGTH, REQUESTS = 256, 4096, 8
STEPS = {"decode": [1] * 8, "prompt": [24, 16, 32], "mixed": [1, 1, 1, 1, 40, 24]}
"""New tokens of each request. Small ones, since the small operations run on a CPU here."""
CONTEXT = 2000


def common(queries: list[int], page: int) -> Any:
    """vLLM's record of a step."""
    from vllm.v1.attention.backend import CommonAttentionMetadata

    requests, tokens = len(queries), sum(queries)
    starts = torch.tensor([0, *queries], dtype=INT).cumsum(0, dtype=INT)
    lengths = torch.full((requests,), CONTEXT, dtype=INT)
    return CommonAttentionMetadata(
        query_start_loc=starts.clone(),
        query_start_loc_cpu=starts,
        seq_lens=lengths.clone(),
        seq_lens_cpu_upper_bound=lengths,
        num_reqs=requests,
        num_actual_tokens=tokens,
        max_query_len=max(queries),
        max_seq_len=CONTEXT,
        block_table_tensor=torch.zeros(requests, MAX_LENGTH // page, dtype=INT),
        slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.arange(tokens),
    )


def config(heads: int, **model: Any) -> Any:
    """As much of a `VllmConfig` as builders read."""
    hf = SimpleNamespace(**model)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=hf,
            hf_text_config=hf,
            max_model_len=MAX_LENGTH,
            dtype=BF16,
            get_num_attention_heads=lambda parallel: heads,
        ),
        cache_config=SimpleNamespace(cache_dtype="fp8_ds_mla", block_size=64),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=MAX_TOKENS, max_num_seqs=REQUESTS),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, cp_kv_cache_interleave_size=1
        ),
        speculative_config=None,
        attention_config=SimpleNamespace(),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )


class V4:
    """V4 layers and builders of vLLM."""

    def __init__(self, heads: int) -> None:
        from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention
        from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLAMetadataBuilder
        from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWAMetadataBuilder
        from vllm.v1.kv_cache_interface import MLAAttentionSpec, SlidingWindowMLASpec

        from tamis.integrations.vllm.v4_layer import TamisV4Attention

        self.heads, self.classes = heads, {"tamis": TamisV4Attention, "FlashMLA": DeepseekV4FlashMLAAttention}
        settings = config(heads, sliding_window=WINDOW, compress_ratios=[0, 4, 128], index_topk=TOPK)
        shared: dict[str, Any] = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
        window = SlidingWindowMLASpec(block_size=WINDOW_PAGE, sliding_window=WINDOW, **shared)
        # Newer releases of vLLM name it after states.
        named = MLAAttentionSpec.__dataclass_fields__
        per_entry = "compress_ratio" if "compress_ratio" in named else "tokens_per_state"
        device = torch.device("cpu")
        self.window = DeepseekSparseSWAMetadataBuilder(window, ["window"], settings, device)
        self.main = {
            ratio: DeepseekV4FlashMLAMetadataBuilder(
                MLAAttentionSpec(block_size=PAGE, **{per_entry: ratio}, **shared), ["attn"], settings, device
            )
            for ratio in (4, 128)
        }

    def layer(self, whose: str, ratio: int) -> Any:
        kind = self.classes[whose]
        layer = kind.__new__(kind)
        torch.nn.Module.__init__(layer)
        padded = kind.get_padded_num_q_heads(self.heads)
        layer.swa_cache_layer = torch.nn.Module()
        layer.swa_cache_layer.prefix = "window"
        layer.swa_cache_layer.kv_cache = torch.zeros(80, WINDOW_PAGE, 584, dtype=torch.uint8)
        layer.attn_sink = torch.nn.Parameter(torch.zeros(padded), requires_grad=False)
        values = {
            "prefix": "attn",
            "padded_heads": padded,
            "compress_ratio": ratio,
            "window_size": WINDOW,
            "scale": 512**-0.5,
            "max_model_len": MAX_LENGTH,
            "max_num_batched_tokens": MAX_TOKENS,
            "max_image_tokens": 0,
            "kv_cache": torch.zeros(40, PAGE // max(ratio, 2), 584, dtype=torch.uint8),
            "kv_cache_torch_dtype": torch.uint8,
            "topk_indices_buffer": torch.zeros(MAX_TOKENS, TOPK, dtype=INT),
        }
        for name, value in values.items():
            setattr(layer, name, value)
        return layer

    def records(self, queries: list[int], ratio: int) -> dict[str, Any]:
        found = {"window": self.window.build(0, common(queries, WINDOW_PAGE))}
        if ratio > 1:
            found["attn"] = self.main[ratio].build(0, common(queries, PAGE))
        return found

    def call(self, whose: str, ratio: int, queries: list[int], first: bool) -> "Case":
        """A layer's attention in a step: the first layer of its kind, or a later one."""
        layer, earlier, tokens = self.layer(whose, ratio), self.layer(whose, ratio), sum(queries)
        q = torch.zeros(tokens, layer.padded_heads, 512, dtype=BF16)
        out, positions = torch.empty_like(q), torch.arange(tokens)
        untouched, context = self.records(queries, ratio), SimpleNamespace(attn_metadata=None)
        waiting: list[dict[str, Any]] = []
        module = sys.modules[type(layer).forward_mqa.__module__]
        names = [name for name in vars(untouched["window"]) if name.startswith("tile_sched")]

        def fresh() -> dict[str, Any]:
            made = {name: copy(record) for name, record in untouched.items()}
            for name in names:  # a builder makes new ones in each step
                if getattr(made["window"], name) is not None:
                    setattr(made["window"], name, type(getattr(made["window"], name))())
            return made

        def prepare(calls: int) -> None:
            module.get_forward_context = lambda: context  # type: ignore[attr-defined]
            waiting.extend(fresh() for _ in range(calls))
            context.attn_metadata = waiting.pop()
            if not first:
                earlier.forward_mqa(q, None, positions, out)

        def run() -> None:
            if first and waiting:
                context.attn_metadata = waiting.pop()
            layer.forward_mqa(q, None, positions, out)

        return Case(run, prepare)

    def build(self, part: str, queries: list[int]) -> "Case":
        """One record of a step. Both engines build the same ones."""
        if part == "window":
            given = common(queries, WINDOW_PAGE)
            return Case(lambda: self.window.build(0, given))
        given, builder = common(queries, PAGE), self.main[int(part)]
        return Case(lambda: builder.build(0, given))


class V32:
    """V3.2's attention and builders: tamis' plugin, and vLLM's FlashMLA."""

    def __init__(self, heads: int, cache_dtype: str) -> None:
        from vllm.v1.attention.backends.mla import flashmla_sparse as own

        from tamis.integrations.vllm import plugin

        self.heads, self.cache_dtype = heads, cache_dtype
        self.settings = config(
            heads, index_topk=V32_TOPK, kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=1536, qk_nope_head_dim=128,
            v_head_dim=128,
        )  # fmt: skip
        self.settings.cache_config.cache_dtype = cache_dtype
        spec, device = SimpleNamespace(block_size=64), torch.device("cpu")
        arguments = (spec, ["attn"], self.settings, device)
        self.builders = {
            "tamis": plugin.Builder(*arguments),
            "FlashMLA": own.FlashMLASparseMetadataBuilder(*arguments),
        }
        given: dict[str, Any] = dict.fromkeys(
            ("alibi_slopes", "sliding_window", "logits_soft_cap", "kv_sharing_target_layer_name")
        )
        given |= {"num_heads": heads, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "attn_type": "decoder"}
        given |= {"kv_cache_dtype": cache_dtype, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
        indexer = SimpleNamespace(topk_indices_buffer=torch.zeros(MAX_TOKENS, V32_TOPK, dtype=INT))
        with patch.object(own, "get_current_vllm_config", lambda: self.settings):
            theirs = own.FlashMLASparseImpl(**given, indexer=indexer)
        self.impls = {"tamis": plugin.Impl(**given, indexer=indexer), "FlashMLA": theirs}
        packed = cache_dtype == "fp8_ds_mla"
        self.cache = torch.zeros(80, 64, 656 if packed else 576, dtype=torch.uint8 if packed else BF16)

    def call(self, whose: str, queries: list[int]) -> "Case":
        tokens = sum(queries)
        record = self.builders[whose].build(0, common(queries, 64))
        q = torch.zeros(tokens, self.heads, 576, dtype=BF16)
        impl, scales = self.impls[whose], SimpleNamespace(_k_scale_float=1.0, _q_scale_float=1.0)
        return Case(lambda: impl.forward_mqa(q, self.cache, record, scales))

    def build(self, whose: str, queries: list[int]) -> "Case":
        given, builder = common(queries, 64), self.builders[whose]
        return Case(lambda: builder.build(0, given))


def no_prepare(calls: int) -> None:
    """Nothing to do before calls."""


class Case(NamedTuple):
    """What is measured, and what is done before so many calls of it."""

    run: Callable[[], object]
    prepare: Callable[[int], None] = no_prepare


def flash_mla(launches: Launches) -> SimpleNamespace:
    """FlashMLA's extension as far as the host sees: what its functions allocate and how many kernels they launch."""

    def decode(q: Tensor, k: Any, indices: Any, lengths: Any, sink: Any, plan: Any, splits: Any, *rest: Any) -> Any:
        out, batch, tokens, heads = rest[-1], *q.shape[:3]
        if plan is None:
            launches.count += 1
            plan, splits = q.new_empty((SMS, 8), dtype=INT), q.new_empty((batch + 1,), dtype=INT)
        launches.count += 2  # attention over splits and their merge
        out = q.new_empty((batch, tokens, heads, 512)) if out is None else out
        lse = q.new_empty((batch, heads, tokens), dtype=torch.float32)
        q.new_empty((batch + SMS, tokens, heads), dtype=torch.float32)
        q.new_empty((batch + SMS, tokens, heads, 8), dtype=torch.float32)  # 512 wide on a GPU
        return out, lse, plan, splits

    def prompt(q: Tensor, kv: Any, indices: Any, scale: float, width: int, sink: Any, lengths: Any, out: Any) -> Any:
        launches.count += 1
        out = q.new_empty((*q.shape[:2], width)) if out is None else out
        return out, q.new_empty(q.shape[:2], dtype=torch.float32), q.new_empty(q.shape[:2], dtype=torch.float32)

    return SimpleNamespace(sparse_decode_fwd=decode, sparse_prefill_fwd=prompt)


SMS = 132


@contextmanager
def engine() -> Iterator[Launches]:
    """vLLM on a pretended H200, with what its attention needs of kernels and settings."""
    for name in ("_C_stable_libtorch", "_flashmla_C", "_flashmla_extension_C"):
        sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    # Under a CUDA platform it would ask vLLM's kernels.
    import vllm.model_executor.layers.quantization.fp8
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):  # type: ignore[misc]
        device_type = "cpu"

        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return SMS

    import vllm.config

    vllm.platforms._current_platform = Hopper()
    from vllm.third_party.flashmla import flash_mla_interface
    from vllm.v1.worker import workspace

    workspace.init_workspace_manager(torch.device("cpu"))
    with (
        patch.object(torch.accelerator, "empty_cache", lambda: None),
        patch.object(torch.Tensor, "pin_memory", lambda tensor: tensor),
        pretended_h200() as launches,
        patch.object(flash_mla_interface, "flash_mla_cuda", flash_mla(launches)),
    ):
        yield launches


def cases(only: str) -> Iterator[tuple[dict[str, str], Case]]:
    """All cases whose names contain `only`."""
    found: list[tuple[tuple[str, ...], Callable[[], Case]]] = []
    v4 = V4(64)
    make: Callable[[], Case]
    for step, ratio, which, whose in product(STEPS, (1, 4, 128), ("first", "next"), v4.classes):
        make = partial(v4.call, whose, ratio, STEPS[step], which == "first")
        found.append((("V4", "layer", "64", step, f"ratio {ratio}, {which}", whose), make))
    for step, part in product(STEPS, ("window", "4", "128")):
        what = "window" if part == "window" else f"ratio {part}"
        found.append((("V4", "build", "64", step, what, "both"), partial(v4.build, part, STEPS[step])))
    for dtype in ("fp8_ds_mla", "auto"):
        v32 = V32(16, dtype)
        for step, whose in product(STEPS, v32.builders):
            found.append((("V3.2", "layer", "16", step, dtype, whose), partial(v32.call, whose, STEPS[step])))
            found.append((("V3.2", "build", "16", step, dtype, whose), partial(v32.build, whose, STEPS[step])))
    for names, make in found:
        if only in " ".join(names):
            yield dict(zip(("model", "call", "heads", "step", "what", "whose"), names, strict=True)), make()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    parser.add_argument("--build", default="", help="what to call the build of tamis in the rows")
    parser.add_argument("--only", default="", help="only cases whose row contains this")
    parser.add_argument("--list", action="store_true", help="print each case's Python functions")
    options = parser.parse_args()
    rows = []
    torch.set_num_threads(1)  # a thread that waits for others counts as busy
    with engine() as launches, torch.inference_mode():
        import vllm

        versions = {"vllm": vllm.__version__, "torch": torch.__version__}
        for names, case in cases(options.only):
            found = profile(case.run, launches, case.prepare)
            measured = {name: text(value) for name, value in asdict(found).items()}
            rows.append({"build": options.build} | names | measured | versions)
            print(*(f"{value:>6}" for value in rows[-1].values()), flush=True)
            if options.list:
                case.run()
                case.run()
                print("\n".join(f"    {name}" for name in functions_of(case.run)))
    if options.csv is not None:
        new = not options.csv.exists()
        with options.csv.open("a", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)


def text(value: float) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
