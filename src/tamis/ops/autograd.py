"""Backward passes of operations that train."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from tamis import checks
from tamis.ops.library import Operation

T = TypeVar("T")
C = TypeVar("C", bound=tuple[Any, ...])


def differentiate(
    operation: Operation[C, T], save: Callable[[Any, C, T], None], backward: Callable[..., dict[str, Any]]
) -> None:
    """Give an operation a backward pass, which is the same with and without torch.compile.

    Args:
        operation: the operation.
        save: `save(ctx, call, result)` keeps on autograd's `ctx` what the backward pass needs.
        backward: `backward(ctx, *gradients)`, with one gradient or None for each tensor of the result, returns the
            gradients of arguments by their names in the schema. Those that it leaves out have none.
    """
    names = [argument.name for argument in operation.overload._schema.arguments]

    def setup(ctx: Any, inputs: Sequence[Any], output: T) -> None:
        # Gradients must have the structure of the arguments: a list of tensors has a list of gradients.
        ctx.absent = [
            [None] * len(value) if isinstance(value, list) and all(isinstance(v, Tensor) for v in value) else None
            for value in inputs
        ]
        ctx.set_materialize_grads(False)
        save(ctx, operation.whole(inputs), output)

    def run(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        found = backward(ctx, *gradients)
        return tuple(found.get(name, absent) for name, absent in zip(names, ctx.absent, strict=True))

    torch.library.register_autograd(operation.overload, run, setup_context=setup)


def save_for_backward(ctx: Any, *tensors: Tensor | None) -> None:
    """Keep arguments for a backward pass. Autograd refuses tensors that were made inside inference_mode, such as the
    selections of a rollout, so these are copied."""
    ctx.save_for_backward(*(x.clone() if x is not None and x.is_inference() else x for x in tensors))


def refuse_second_derivatives(function: str, *tensors: Tensor | None) -> None:
    """Refuse a backward pass that records gradients of its own, given all tensors that it computes with; none if the
    arguments of the forward pass, which require gradients, are not among them."""
    recorded = not tensors or any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if torch.is_grad_enabled() and recorded:
        raise checks.refuse(f"gradients of {function}", "computed once", "create_graph=True", "leave it out")
