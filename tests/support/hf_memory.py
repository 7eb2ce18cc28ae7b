"""A program that prints by how many bytes a pass of a tiny DeepSeek-V3.2 raises this process's memory.

`python hf_memory.py KIND TOKENS ...`, one line for each number of tokens. KIND is `attached` or `untouched` for a
prefill, and `trained` for a training step of an attached model.
"""

import re
import sys
from pathlib import Path

import torch
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from tamis.integrations.transformers import attach

HEADS = {"attached": 2, "untouched": 2, "trained": 8}


def memory(name: str) -> int:
    """A size from the kernel's account of this process."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def main(kind: str, sizes: list[int]) -> None:
    torch.manual_seed(0)
    config = DeepseekV32Config(
        hidden_size=32,
        num_attention_heads=HEADS[kind],
        num_key_value_heads=HEADS[kind],
        num_hidden_layers=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        index_topk=16,
        index_head_dim=16,
        index_n_heads=1,
        first_k_dense_replace=1,
        intermediate_size=32,
        vocab_size=32,
        max_position_embeddings=max(sizes),
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    model = DeepseekV32ForCausalLM(config).eval()
    if kind == "attached":
        attach(model, cache="bf16")
    if kind == "trained":
        attach(model, train=True, indexer="sparse")
    for size in (64, *sizes):  # the first one warms up
        ids = torch.randint(0, config.vocab_size, (1, size))
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        before = memory("VmRSS")
        if kind == "trained":
            model(ids, labels=ids, use_cache=False).loss.backward()
        else:
            with torch.no_grad():
                model(ids, logits_to_keep=1)
        if size in sizes:
            print(memory("VmHWM") - before, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], [int(size) for size in sys.argv[2:]])
