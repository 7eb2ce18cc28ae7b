# torchrun --standalone --nproc-per-node 2 ranks.py fsdp
# torchrun --standalone --nproc-per-node 2 ranks.py ddp
"""Train on several ranks, and save one checkpoint of the whole model."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from tamis.integrations.transformers import attach

DEVICE = "cpu"  # "cuda" takes a GPU per rank
FOLDER = "trained-on-ranks"


def make_model() -> DeepseekV32ForCausalLM:
    """A tiny model with the same weights on every rank."""
    torch.manual_seed(0)
    config = DeepseekV32Config(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        intermediate_size=64,
        first_k_dense_replace=2,
        index_topk=32,
    )
    return DeepseekV32ForCausalLM(config).to(DEVICE)


def main(way: str) -> None:
    """Train ten steps, save, and load what was saved, untouched by tamis."""
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group()  # gloo for CPUs, NCCL for GPUs
    model = make_model()
    attach(model, train=True, indexer="sparse")  # before it is wrapped

    if way == "fsdp":
        mesh = init_device_mesh(DEVICE, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
    # FSDP2 replaces parameters, so the optimizer comes after it.
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)

    batch = torch.randint(128, (4, 64)).to(DEVICE)
    mine = batch[dist.get_rank() :: dist.get_world_size()]
    for _ in range(10):
        wrapped(mine, labels=mine).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    # Every rank takes part in gathering; rank 0 gets the whole.
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(model, options=whole)
    if dist.get_rank() == 0:
        model.save_pretrained(FOLDER, state_dict=state)
        trained = DeepseekV32ForCausalLM.from_pretrained(
            FOLDER,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            attn_implementation="eager",
        )
        for name, one in {"new": make_model(), "trained": trained}.items():
            with torch.no_grad():
                loss = one.to(DEVICE)(batch, labels=batch).loss
            print(f"{name}: loss {loss.item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
