"""`LseForm`: the layout and the convention in which attention returns its lse."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class LseForm(NamedTuple):
    """How attention returns lse and max_logits. By default they are [T, H], natural logarithms, -inf for empty rows."""

    group: int = 0
    """Query tokens of a request. If not 0, both tensors are [T / group, H, group], as FlashMLA returns the lse."""
    base_2: bool = False
    """Whether the lse is in base 2; max_logits are always natural."""
    plus_inf: bool = False
    """Whether a row that attends to nothing has an lse of +inf; its max_logits are -inf in any case."""

    def shape(self, tokens: int, heads: int) -> tuple[int, ...]:
        """The shape of lse and max_logits."""
        return (tokens // self.group, heads, self.group) if self.group else (tokens, heads)

    @property
    def factor(self) -> float:
        """The factor of a natural lse."""
        return math.log2(math.e) if self.base_2 else 1.0

    @property
    def empty(self) -> float:
        """The lse of a row that attends to nothing."""
        return math.inf if self.plus_inf else -math.inf

    def arrange(self, lse: Tensor, max_logits: Tensor) -> tuple[Tensor, Tensor]:
        """Bring both from the default form into this one, for backends whose kernels write the default form."""
        if self.base_2:
            lse = lse * self.factor
        if self.plus_inf:
            lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        if not self.group:
            return lse, max_logits
        return _grouped(lse, self.group), _grouped(max_logits, self.group)


def _grouped(values: Tensor, group: int) -> Tensor:
    tokens, heads = values.shape
    return values.view(tokens // group, group, heads).transpose(1, 2).contiguous()
