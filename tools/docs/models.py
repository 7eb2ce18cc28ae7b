"""The tables of models: their layers, the bytes of their caches, where tamis runs them, and which tests show it.

A model is one entry of `MODELS`. What follows from its config is read from `LayerSpec` and `cache_sizes`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tamis.cache.sizes import cache_sizes, layer_caches
from tamis.integrations.hf.names import MODELS as ATTACHED
from tamis.integrations.hf.train_attach import FORWARDS
from tamis.integrations.sglang.versions import SUPPORTED as SGLANG
from tamis.integrations.vllm.versions import SUPPORTED as VLLM
from tamis.model.hf_config import is_linear
from tamis.model.known import KNOWN
from tamis.model.spec import LayerSpec
from tools.docs.markdown import table

EVERY_VLLM, EVERY_SGLANG, NEWEST = f"{VLLM[0]} to {VLLM[-1]}", ", ".join(SGLANG), SGLANG[-1]
TRANSFORMERS = "tests/integrations/hf/test_transformers.py"
RELATIVES = "tests/integrations/hf/test_transformers_relatives.py"
ROUNDING = "tests/integrations/hf/test_transformers_rounding.py"
TRAINING = "tests/integrations/hf/test_training.py"
V32_ROWS = "656 in FP8, 1,152 in bf16; index key 132"


def attached(name: str) -> tuple[str, ...]:
    """The tests that compare an attached model with the untouched one; `name` is its name in `hf_models`."""
    return (
        f"{TRANSFORMERS}::test_logits[{name}]",
        f"{TRANSFORMERS}::test_greedy_tokens_over_64_steps[{name}]",
        f"{ROUNDING}::test_rounding_is_the_only_difference[fp8-{name}]",
    )


@dataclass(frozen=True)
class Model:
    """One model, or several that differ in numbers only."""

    title: str
    tests: tuple[str, ...]
    """Names of tests, with the parameters that choose the model where there are several."""
    model_type: str | None = None
    """As in its config, if transformers has it."""
    known: tuple[str, ...] = ()
    """Its names in `tamis.model.known`."""
    example: Mapping[str, Any] | None = None
    """Settings besides those of the first known config, so that every kind of layer occurs that the model may have."""
    vllm: str = "-"
    sglang: str = "-"
    layers: str = "-"
    """Its kinds of layers in words, if there is no config to read them from."""
    attention: str = "-"
    """The heads and rows of its attention, likewise."""
    formats: str = "-"
    """The formats of its caches, likewise."""


MODELS = (
    Model(
        "DeepSeek-V3.2",
        (
            *attached("v32"),
            "tests/layers/test_mla_hf.py::test_layer_output",
            f"{TRAINING}::test_loss_and_gradients_are_the_untouched_models[whole-v32]",
            "tests/real_vllm/test_layer.py::test_a_layer_of_vllm_runs_on_tamis",
            "tests/real_sglang/test_dsa.py::test_a_step_agrees_with_float64",
        ),
        "deepseek_v32",
        ("deepseek-v3.2",),
        vllm=EVERY_VLLM,
        sglang=EVERY_SGLANG,
    ),
    Model(
        "GLM-5, 5.1, 5.2",
        (
            *attached("glm-shared"),
            f"{TRAINING}::test_loss_and_gradients_are_the_untouched_models[whole-glm-shared]",
            "tests/ops/index/test_index_hf.py::test_shared_layers_use_the_selection_of_the_layer_before",
            "tests/real_vllm/test_newer.py::test_layers_of_vllms_index_groups_translate_once",
        ),
        "glm_moe_dsa",
        ("glm-5",),
        {"index_topk_freq": 4},
        EVERY_VLLM,
        EVERY_SGLANG,
    ),
    Model(
        "DeepSeek-V4",
        (
            *attached("v4"),
            "tests/layers/test_v4_hf.py::test_layer_output",
            f"{TRAINING}::test_v4s_loss_and_gradients_are_the_untouched_models",
            "tests/real_vllm/test_v4.py::test_the_replaced_layer_attends",
            "tests/real_sglang/test_v4.py::test_window_and_entries_are_attended_to",
        ),
        "deepseek_v4",
        ("deepseek-v4-flash", "deepseek-v4-pro"),
        vllm=EVERY_VLLM,
        sglang=EVERY_SGLANG,
    ),
    Model(
        "A.X-K2",
        (
            *attached("axk2"),
            f"{RELATIVES}::test_rows_of_full_width_have_their_published_sizes",
            f"{TRAINING}::test_loss_and_gradients_are_the_untouched_models[whole-axk2]",
        ),
        "axk2",
        ("a.x-k2-light",),
    ),
    Model(
        "Hy4",
        (
            *attached("hy4"),
            f"{RELATIVES}::test_hy4_with_adjacent_pairs",
            f"{TRAINING}::test_loss_and_gradients_are_the_untouched_models[whole-hy4]",
            "tests/real_vllm/test_hy4.py::test_layers_of_vllm_run_on_tamis",
            "tests/real_sglang/test_dsa.py::test_learnable_sinks",
        ),
        "hy_v4",
        ("hy4",),
        vllm=VLLM[-1],
        sglang=f"{NEWEST}, bf16 cache",
    ),
    Model(
        "Mistral Large 4",
        (
            *attached("mistral-large4"),
            f"{RELATIVES}::test_many_heads_gather_prefills_of_both_widths",
            f"{RELATIVES}::test_a_prompt_with_an_image",
            f"{TRAINING}::test_loss_and_gradients_are_the_untouched_models[whole-mistral-large4]",
        ),
        "mistral_large4",
        ("mistral-large-4",),
        {"kv_source_layers": [0, 1, 0, 3, *range(4, 72)], "indexer_types": ["full", "full", "shared"] * 24},
    ),
    Model(
        "GLM-5.3-Flash",
        (
            *attached("glm5-next"),
            f"{RELATIVES}::test_requests_join_and_leave_a_running_batch[glm5-next]",
            "tests/layers/test_mla_pooled.py::test_continuous_batching",
            f"{TRAINING}::test_pooled_keys_train_as_the_untouched_model",
            "tests/real_vllm/test_no_rope.py::test_a_layer_of_vllm_runs_on_tamis",
            "tests/real_sglang/test_dsa.py::test_rows_without_rope",
            "tests/real_sglang/test_dsa.py::test_indices_with_gaps_and_a_tail",
        ),
        "glm5_next",
        ("glm-5.3-flash",),
        vllm=VLLM[-1],
        sglang=NEWEST,
    ),
    Model(
        "DeepSeek-V4.1",
        (
            "tests/layers/test_v41.py::test_every_layer_in_chunks",
            "tests/ops/index/test_index_blocks.py::test_both_levels_are_exact",
            "tests/real_vllm/test_v41.py::test_vllms_layer_attends",
            "tests/real_vllm/test_v41.py::test_two_level_selection",
            "tests/ops/write/test_v41_rows.py::test_528_bytes_by_hand",
            "tests/ops/write/test_v41_rows.py::test_288_bytes_by_hand",
            "tests/real_sglang/test_v41.py::test_layers_read_their_sources_entries",
        ),
        vllm=f"{VLLM[-1]}, on Hopper",
        sglang=f"{NEWEST}, on Hopper",
        layers="as V4, with entries of 1 or 2 tokens; entries and selections of earlier layers; selects in two levels",
        attention="as V4, with shared entries",
        formats="those of V4 on Hopper; elsewhere 528 or 288",
    ),
    Model(
        "dots3-note",
        ("tests/real_sglang/test_dsa_relatives.py::test_layers_with_an_indexer_run_on_tamis",),
        sglang=f"{NEWEST}, layers with an indexer",
        layers="selects tokens; sliding windows, which are the engine's own",
        attention="rows of 512 + 64; windows of the engine's own",
        formats=V32_ROWS,
    ),
    Model(
        "LongCat-Flash with `index_topk`",
        ("tests/real_sglang/test_dsa_relatives.py::test_longcats_layers_are_those_of_v32",),
        sglang=EVERY_SGLANG,
        layers="selects tokens; uses the selection of an earlier layer",
        attention="rows of 512 + 64",
        formats=V32_ROWS,
    ),
)


def models() -> str:
    """README's table: a line per known size."""
    header = ("model", "attention", "FP8 cache per token, all layers", "transformers", "vLLM", "SGLang")
    return table(header, [line for model in MODELS for line in _sizes(model)], "llrlll")


def supported() -> str:
    """The table of the page about models: a line per model."""
    header = ("model", "transformers", "vLLM", "SGLang", "layers", "bytes of a row", "tests")
    lines = [(model.title, *_where(model), _layers(model), _formats(model), _named(model.tests)) for model in MODELS]
    return f'<div class="features models" markdown>\n\n{table(header, lines, "lllllll")}\n\n</div>'


def _where(model: Model) -> tuple[str, str, str]:
    """Versions of transformers, vLLM and SGLang, or a dash."""
    known = ATTACHED.get(model.model_type or "")
    if known is None:
        return "-", model.vllm, model.sglang
    return "`attach`, training" if known.class_name in FORWARDS else "`attach`", model.vllm, model.sglang


def _sizes(model: Model) -> Iterable[tuple[str, ...]]:
    if not model.known:
        yield model.title, model.attention, "-", *_where(model)
    for name in model.known:
        found = KNOWN[name]
        spec = next(spec for spec in _specs(found.config) if spec.index_dim)
        window = f"window {spec.window} + " if spec.window else ""
        sinks = ", sinks" if spec.sink and spec.kind == "tokens" else ""
        width = f"{spec.latent_dim} + {spec.rope_dim}" if spec.rope_dim else f"{spec.latent_dim} without rope"
        pooled = f" in groups of {spec.kpool}" if spec.kpool > 1 else ""
        attention = f"{spec.heads} heads, rows of {width}, {window}top-k {spec.topk}{pooled}{sinks}"
        token = cache_sizes(found.config).bytes_per_token
        yield found.title, attention, f"{float(token):,.0f} bytes", *_where(model)


def _specs(config: Mapping[str, Any]) -> list[LayerSpec]:
    """The layers that attend to cached rows."""
    layers = range(config["num_hidden_layers"])
    return [LayerSpec.from_hf(config, layer) for layer in layers if not is_linear(config, layer)]


def _example(model: Model) -> list[LayerSpec]:
    return _specs({**KNOWN[model.known[0]].config, **(model.example or {})})


def _layers(model: Model) -> str:
    """What occurs among a model's layers."""
    if not model.known:
        return model.layers
    specs = _example(model)
    tokens = [spec for spec in specs if spec.kind == "tokens"]
    found = {
        "selects tokens": any(not spec.reuse_topk and spec.kpool == 1 for spec in tokens),
        "selects groups of tokens by pooled keys": any(spec.kpool > 1 for spec in tokens),
        "uses the selection of an earlier layer": any(spec.reuse_topk for spec in tokens),
        "without rope": bool(tokens) and all(spec.rope_dim == 0 for spec in tokens),
        "some without rope": len({spec.rope_dim == 0 for spec in tokens}) == 2,
        "reads the rows of an earlier layer": any(spec.reuse_rows for spec in tokens),
        "window of the last tokens": any(spec.kind == "window" for spec in specs),
        "window and selected entries": any(spec.kind == "overlapping" for spec in specs),
        "window and all entries": any(spec.kind == "plain" for spec in specs),
        "sinks": any(spec.sink for spec in specs),
        "linear attention, which is the model's own": len(specs) < KNOWN[model.known[0]].config["num_hidden_layers"],
    }
    return "; ".join(what for what, there in found.items() if there)


def _formats(model: Model) -> str:
    """The bytes of a layer's rows in each format, those of layers with a rope first."""
    if not model.known:
        return model.formats
    specs = _example(model)

    def sizes(cache: Any, keys: bool) -> str:
        parts = [part for spec in specs for part in layer_caches(spec, cache=cache)]
        wanted = {
            part.layout.row_bytes for part in parts if (part.what == "index keys") == keys and "state" not in part.what
        }
        return " or ".join(f"{size:,}" for size in sorted(wanted, reverse=True))

    return f"{sizes('fp8', False)} in FP8, {sizes('bf16', False)} in bf16; index key {sizes('fp8', True)}"


def _named(tests: tuple[str, ...]) -> str:
    names = "<br>".join(f"`{name}`" for name in tests)
    return f"<details><summary>{len(tests)} test{'' if len(tests) == 1 else 's'}</summary>{names}</details>"
