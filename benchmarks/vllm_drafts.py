"""Drafts for the tiny models of the vLLM benchmarks: a drafting layer (MTP) for each, and what its engine needs.

A drafting layer sees the embedding of the newest token and what the model found for the token before. Here it adds the
two, as a layer of the model would have them, and looks for salient tokens once more. Its logits are the earlier votes
plus those of what it finds. So a draft is often what the model chooses next, and often not.
"""

import importlib.util
import json
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm_model
import vllm_v4_model
from safetensors.torch import save_file
from torch import Tensor

DRAFTS = 2
"""How many tokens are drafted per step."""


def v32_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a tiny V3.2 with one drafting layer, which is dense as the others are."""
    return config | {"num_nextn_predict_layers": 1, "first_k_dense_replace": config["num_hidden_layers"] + 1}


def v32_tensors(config: dict[str, Any], seed: int = 20) -> dict[str, Tensor]:
    """The checkpoint of `vllm_model.py`, and a drafting layer that is a copy of the last one."""
    weights = vllm_model.Weights(config, seed)
    tensors, layers = weights.tensors(), weights.layers
    last, draft = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    copied = {name.replace(last, draft): tensor.clone() for name, tensor in tensors.items() if name.startswith(last)}
    from_token, from_hidden = taken(weights, weights.found, weights.length(layers))
    ones = torch.ones(weights.hidden)
    added = {
        "enorm.weight": ones,
        "hnorm.weight": ones,
        "eh_proj.weight": torch.cat([from_token, from_hidden], 1),
        "shared_head.norm.weight": ones,
        "shared_head.head.weight": tensors["lm_head.weight"].clone(),
        "embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
    }
    return tensors | copied | {f"{draft}{name}": tensor.bfloat16().contiguous() for name, tensor in added.items()}


def taken(weights: Any, found: list[Tensor], length: float) -> tuple[Tensor, Tensor]:
    """The projections of a token's normed embedding and of the normed hidden state before it.

    Of the hidden state only what layers found is taken; the rest comes from the embedding. Both norms are undone.
    """
    basis = torch.cat(found, 1)
    kept = basis @ basis.T
    unit = weights.hidden**-0.5
    return (torch.eye(weights.hidden) - kept) * (weights.length(0) * unit), kept * (length * unit)


def write_v32(source: Path, folder: Path) -> None:
    """Write a bf16 checkpoint with a drafting layer for the config in `source`."""
    shutil.copytree(source, folder)
    folder.chmod(0o755)
    path = folder / "config.json"
    path.chmod(0o644)
    config = v32_config(json.loads(path.read_text()))
    path.write_text(json.dumps(config, indent=1))
    save_file(v32_tensors(config), folder / "model.safetensors", metadata={"format": "pt"})


def v4_config(heads: int) -> dict[str, Any]:
    """The config of a tiny V4 with one drafting layer. vLLM gives that layer a window and no compressed entries."""
    return vllm_v4_model.tiny_config(heads) | {"num_nextn_predict_layers": 1}


def v4_tensors(config: dict[str, Any], seed: int = 20) -> dict[str, Tensor]:
    """The weights of `vllm_v4_model.py`, and those of a drafting layer."""
    weights = vllm_v4_model.Weights(config, seed)
    tensors, layers = weights.tensors(), len(weights.ratios)
    block = weights.attention(layers - 1, 0) | weights.experts() | weights.connections()
    from_token, from_hidden = taken(weights, [*weights.found, weights.votes], weights.length(layers))
    ones = torch.ones(weights.hidden)
    added = {
        "enorm.weight": ones,
        "hnorm.weight": ones,
        "e_proj.weight": from_token,
        "h_proj.weight": from_hidden,
        "shared_head.norm.weight": ones,
        "shared_head.head.weight": tensors["lm_head.weight"],
        **{name: tensor for name, tensor in tensors.items() if name.startswith("hc_head_")},
        **{f"mtp_block.{name}": tensor for name, tensor in block.items()},
    }
    return tensors | {f"layers.{layers}.{name}": tensor for name, tensor in added.items()}


def write_v4(folder: Path, heads: int) -> None:
    """Write the config and the weights, which `vllm_v4_model.fill` copies into a model of vLLM."""
    folder.mkdir()
    config = v4_config(heads)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    torch.save(v4_tensors(config), folder / "weights.pt")


def install_v4_parts() -> None:
    """Give V4's drafting model the hyper-connections of `vllm_v4_parts.py`, which must be installed before."""
    import vllm.models.deepseek_v4.nvidia.model as model
    import vllm.models.deepseek_v4.nvidia.mtp as mtp

    for name in ("mhc_post_tilelang", "hc_head_fused_kernel_tilelang"):
        setattr(mtp, name, getattr(model, name))


def install_interpreted_numba() -> None:
    """Let vLLM's n-gram drafter run where numba is missing: the same code, interpreted."""
    if importlib.util.find_spec("numba") is not None:
        return
    module = types.ModuleType("numba")
    known = {"jit": as_it_is, "njit": as_it_is, "prange": range, "get_num_threads": lambda: 1}
    vars(module).update(known | {"set_num_threads": lambda count: None})
    sys.modules["numba"] = module


def as_it_is(*arguments: Any, **options: Any) -> Callable[..., Any]:
    """A decorator with or without options that changes nothing."""
    if arguments and callable(arguments[0]):
        function: Callable[..., Any] = arguments[0]
        return function
    return lambda function: function
