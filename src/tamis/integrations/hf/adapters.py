"""Linear layers that are more than their weight, as those with adapters: what they do, read off as one matrix."""

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tamis import checks


def unit_images(name: str, layer: nn.Module, width: int, like: Tensor) -> Tensor:
    """The weight [out, width] of a layer: the images of the unit vectors, whatever adapters or quantisation it has.

    Dropout would act on unit vectors instead of tokens, and a bias would be in every image, so both are refused. Unit
    vectors have the dtype and the device of `like`.
    """
    for part_name, part in layer.named_modules():
        path = f"{name}.{part_name}" if part_name else name
        if isinstance(part, nn.Dropout) and part.training and part.p > 0:
            remedy = f"set lora_dropout=0, leave {name} out of target_modules, or serve after model.eval()"
            raise checks.refuse(path, "without dropout: it acts on unit vectors", part.p, remedy)
        if isinstance(getattr(part, "bias", None), Tensor):
            remedy = f"set lora_bias=False, or leave {name} out of target_modules"
            raise checks.refuse(path, "without a bias: tamis reads off a weight alone", "one with it", remedy)
    unit: Tensor = layer(torch.eye(width, dtype=like.dtype, device=like.device))
    return unit.T


def chosen_adapters(module: nn.Module) -> Iterator[Hashable]:
    """What decides, beside parameters, which adapters act in a module's layers: the names of those that are active,
    whether they are switched off, and their factors."""
    for layer in module.modules():
        # Looked up where submodules are, at every step: asking a module for what it lacks raises and takes longer.
        if "base_layer" in layer._modules:
            found: Any = layer
            factors = getattr(found, "scaling", {})
            yield found.disable_adapters, tuple(found.active_adapters), tuple(sorted(factors.items()))
