"""The commands of docs/vllm.md for two nodes: vLLM's parser and configuration, and its executor on one machine."""

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from bounds import relative_error
from engine_standin import LATENT, NOPE, ROPE, TOPK, VALUE
from rank_cases import Case
from ranks import run_on_ranks

from tamis.integrations.vllm import BACKEND
from tamis.integrations.vllm.versions import divides_prompts

if not divides_prompts():
    pytest.skip("written for the command line and the executor of vLLM 0.32", allow_module_level=True)

DOCUMENT = Path(__file__).parents[2] / "docs" / "vllm.md"
HEADS = 16
MODEL = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "n_shared_experts": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": LATENT,
    "q_lora_rank": 256,
    "qk_rope_head_dim": ROPE,
    "qk_nope_head_dim": NOPE,
    "v_head_dim": VALUE,
    "index_topk": TOPK,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def commands(tmp_path: Path) -> list[str]:
    """What the section about two nodes has after `vllm serve`, in its order, for a model without weights."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    section = DOCUMENT.read_text().split("## Two nodes")[1].split("\n## ")[0].replace("\\\n", " ")
    found = re.findall(r"^vllm serve \S+ (.*)$", section, re.MULTILINE)
    return [f"{tmp_path / 'model'} {options}" for options in found]


def test_vllm_understands_the_commands(commands: list[str], tmp_path: Path) -> None:
    same = {"backend": True, "cache": "fp8_ds_mla", "executor": "mp"}
    tensor: dict[str, Any] = same | {
        "workers": (16, 8),
        "tensor and pipeline": (8, 2),
        "data": (1, 1, 0),
        "experts": False,
    }
    data: dict[str, Any] = same | {
        "workers": (1, 1),
        "tensor and pipeline": (1, 1),
        "address": ("10.0.0.1", 13345),
        "experts": True,
    }
    expected = [
        tensor | {"nodes": (2, 0, "10.0.0.1")},
        tensor | {"nodes": (2, 1, "10.0.0.1")},
        data | {"data": (16, 8, 0)},
        data | {"data": (16, 8, 8)},
    ]
    (found,) = run_on_ranks(1, tmp_path, "node_programs.parallel_configs", commands)
    for config, wanted in zip(found, expected, strict=True):
        assert {name: config[name] for name in wanted} == wanted


def test_workers_of_two_nodes_run_a_step(commands: list[str], tmp_path: Path) -> None:
    """vLLM's executor on two nodes that are one machine: two workers each instead of eight, which load the plugin and
    run a layer with half of the heads, in each of two pipeline stages."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = [
        command.replace("--tensor-parallel-size 8", "--tensor-parallel-size 2").replace("10.0.0.1", "127.0.0.1")
        + f" --master-port {port}"
        for command in commands[:2]
    ]
    case = Case((300, 70, 65), (1, 1, 30), 1, tensor=2, cache_dtype="fp8_ds_mla", heads=HEADS)
    workers, _ = run_on_ranks(2, tmp_path, "node_programs.serve", nodes, case)
    assert [worker["rank"] for worker in workers] == [0, 1, 2, 3]
    assert len({worker["process"] for worker in workers}) == 4
    assert {worker["backend"] for worker in workers} == {BACKEND}
    for stage in (workers[:2], workers[2:]):
        whole = torch.cat([worker["output"] for worker in stage], 1)
        assert relative_error(whole, stage[0]["expected"]) < 2e-6
