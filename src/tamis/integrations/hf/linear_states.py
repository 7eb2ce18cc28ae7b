"""Layers of linear attention, which are the model's own, in batches with padding between or after real tokens.

The state of such a layer takes in every column. Padding is a zero input, from which the state decays. That changes
nothing before a request's first token, where the state is zero, but it would between two of its tokens. So where there
is such padding, the layer runs on the real tokens alone, on all requests with equally many new tokens at once.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Uneven(NamedTuple):
    """The real tokens of a step, in place of a mask."""

    groups: list[tuple[Tensor, Tensor]]
    """The numbers [R] of requests with equally many new tokens, and the columns [R, N] of these tokens."""


def mask_or_tokens(new: Tensor, seen: Tensor, device: torch.device) -> Tensor | Uneven:
    """What layers of linear attention get as a mask.

    Args:
        new: bool [requests, columns], which of the step's tokens are real.
        seen: bool [requests], which requests have tokens in the cache.
        device: the model's device.
    """
    begun = (new.cumsum(1) > 0) | seen.unsqueeze(1)
    if not bool((begun & ~new).any()):
        return new.to(device)
    counts, groups = new.sum(1), []
    for count in counts[counts > 0].unique().tolist():
        requests = (counts == count).nonzero().squeeze(1)
        columns = new[requests].nonzero()[:, 1].view(len(requests), count)
        groups.append((requests.to(device), columns.to(device)))
    return Uneven(groups)


def linear_forward(
    self: Any,
    hidden_states: Tensor,
    cache_params: Any = None,
    attention_mask: Tensor | Uneven | None = None,
    **kwargs: Any,
) -> Tensor:
    """Replaces `Glm5NextTextLinearAttention.forward`."""
    own = type(self).forward
    if not isinstance(attention_mask, Uneven):
        found: Tensor = own(self, hidden_states, cache_params=cache_params, attention_mask=attention_mask, **kwargs)
        return found
    out, state = torch.zeros_like(hidden_states), cache_params.states[self.layer_idx]
    for requests, columns in attention_mask.groups:
        where = (requests.unsqueeze(1), columns)
        some = _Some(state, requests)
        out[where] = own(self, hidden_states[where], cache_params=some, attention_mask=None, **kwargs)
        some.put_back(state, requests, len(hidden_states))
    return out


class _Some:
    """The states of some requests, as a layer of linear attention finds and leaves them in its cache."""

    def __init__(self, state: Any, requests: Tensor) -> None:
        self._part = type(state)()
        if state.has_previous_state[0]:
            self._part.update_conv_state(state.conv_states[0][requests], conv_kernel_size=state.conv_kernel_size[0])
            self._part.update_recurrent_state(state.recurrent_states[0][requests])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        found: Tensor | None = self._part.conv_states[state_idx] if self._part.has_previous_state[state_idx] else None
        return found

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        part = self._part
        found: Tensor | None = part.recurrent_states[state_idx] if part.has_previous_state[state_idx] else None
        return found

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        found: Tensor = self._part.update_conv_state(conv_states, state_idx, **kwargs)
        return found

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        found: Tensor = self._part.update_recurrent_state(recurrent_states, state_idx, **kwargs)
        return found

    @torch.inference_mode(False)  # as in `TamisCache`
    def put_back(self, state: Any, requests: Tensor, batch: int) -> None:
        """Write the states to those of all requests, which start at zero."""
        part = self._part
        if not state.has_previous_state[0]:
            conv, recurrent = part.conv_states[0], part.recurrent_states[0]
            empty = [old.new_zeros((batch, *old.shape[1:]), dtype=old.dtype) for old in (conv, recurrent)]
            state.update_conv_state(empty[0], conv_kernel_size=part.conv_kernel_size[0])
            state.update_recurrent_state(empty[1])
        state.conv_states[0][requests] = part.conv_states[0]
        state.recurrent_states[0][requests] = part.recurrent_states[0]
