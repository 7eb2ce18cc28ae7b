"""Counts the torch operations of a block: each of them takes microseconds on the host, whatever its size."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_VIEWS = {
    "slice",
    "select",
    "view",
    "unsqueeze",
    "squeeze",
    "expand",
    "as_strided",
    "transpose",
    "detach",
    "t",
    "alias",
}
_VIEWS |= {"permute", "split", "split_with_sizes", "_unsafe_view", "_reshape_alias", "unbind", "lift_fresh"}


class Calls(TorchDispatchMode):
    """The names of the operations that ran, such as "aten.copy_". Views are counted separately."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.views = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            # Inference mode shows operations that are made of others; elsewhere only their parts arrive here.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        name = func._schema.name.replace("::", ".")
        if name.removeprefix("aten.") in _VIEWS:
            self.views += 1
        else:
            self.names.append(name)
        return func(*args, **(kwargs or {}))

    def __enter__(self) -> Self:
        super().__enter__()
        return self
