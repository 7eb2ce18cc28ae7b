"""What each of two ranks does with a model that is sharded or distributed."""

from typing import Any

import torch
import torch.distributed as dist
from bounds import relative_error
from hf_models import tokens
from hf_training import trainable
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tamis.integrations.hf.forward import language_model
from tamis.integrations.transformers import attach, index_losses, indexer_parameters, take_index_loss

CASES = [
    *(("v32", "sparse", False), ("v32", "warmup", True), ("v4", "sparse", True), ("glm-shared", "frozen", False)),
    ("mistral-large4", "frozen", True),
]
"""Model, what its indexers do, and whether its layers are checkpointed."""


DATA_PARALLEL = [("v32", "sparse", False), ("v32", "sparse", True), ("glm-shared", "frozen", False)]
"""Likewise, for DistributedDataParallel, which waits for a gradient of every parameter that requires one."""


def attached(name: str, stage: Any) -> Any:
    model = trainable(name) if name in ("v4", "mistral-large4") else trainable(name, num_hidden_layers=2)
    own = set(indexer_parameters(model))
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(stage != "warmup" or parameter_name in own)
    attach(model, train=True, indexer=stage, deterministic=False)
    return model


def sharded(name: str, stage: Any, checkpointed: bool, dtype: torch.dtype | None = None) -> Any:
    model = attached(name, stage)
    if checkpointed:
        model.gradient_checkpointing_enable()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (2,)), "mp_policy": MixedPrecisionPolicy(dtype)}
    for layer in language_model(model).layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def differences() -> dict[str, float]:
    """By how much each case's worst gradient differs from the unsharded model's over both ranks' rows."""
    ids, found = tokens(4, 48), {}
    for case in CASES:
        whole, model = attached(*case[:2]), sharded(*case)
        whole(ids, labels=ids).loss.backward()
        mine = ids[2 * dist.get_rank() :][:2]
        model(mine, labels=mine).loss.backward()
        errors = []
        for (name, parameter), (_, expected) in zip(model.named_parameters(), whole.named_parameters(), strict=True):
            assert (parameter.grad is None) == (expected.grad is None), (case, name)
            if parameter.grad is not None and expected.grad is not None:
                errors.append(relative_error(parameter.grad.full_tensor(), expected.grad))
        found[" ".join(map(str, case))] = max(errors)
    return found


def refusal() -> str:
    """The message for indexers that learn alone, in layers whose weights are freed before their backward pass."""
    model, ids = sharded("v32", "warmup", False), tokens(1, 20)
    try:
        model(ids, labels=ids)
    except ValueError as error:
        return str(error)
    return ""


def data_parallel() -> tuple[dict[str, float], set[int], str]:
    """Likewise for DistributedDataParallel; also the layers whose index loss it reports, and how it refuses to be
    attached."""
    torch.use_deterministic_algorithms(False)
    ids, found, layers, refused = tokens(4, 48), {}, set[int](), ""
    mine = ids[2 * dist.get_rank() :][:2]
    for name, stage, checkpointed in DATA_PARALLEL:
        whole, model = attached(name, stage), attached(name, stage)
        if checkpointed:
            model.gradient_checkpointing_enable()
        whole(ids, labels=ids).loss.backward()
        wrapped = DistributedDataParallel(model)
        for _ in range(2):  # the second step fails if the first has left a gradient out
            model.zero_grad()
            wrapped(mine, labels=mine).loss.backward()
        layers |= set(index_losses(wrapped))
        given = zip(model.parameters(), whole.parameters(), strict=True)
        errors = [relative_error(one.grad, other.grad) for one, other in given if other.grad is not None]
        found[f"{name} {stage} {checkpointed}"] = max(errors)
        try:
            attach(wrapped, train=True)
        except ValueError as error:
            refused = str(error)
    return found, layers, refused


def evaluations() -> list[tuple[float, float]]:
    """The norm of the logits of a sharded model in an evaluation and in training: of V4, and of V3.2 in mixed
    precision."""
    ids, found = tokens(2, 48), []
    for model in (sharded("v4", "sparse", False), sharded("v32", "sparse", False, torch.bfloat16)):
        logits = model(ids).logits
        take_index_loss(model)
        logits.sum().backward()  # so that FSDP2 shards the layers again
        with torch.no_grad():
            found.append((float(model.eval()(ids).logits.norm()), float(logits.detach().norm())))
    return found


def all_sharded() -> tuple[dict[str, float], str, list[tuple[float, float]]]:
    torch.use_deterministic_algorithms(False)
    return differences(), refusal(), evaluations()
