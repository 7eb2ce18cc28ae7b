"""`HeldRequests`: the request of each token of a step, the one array that a step of V3.2 copies to the device."""

import numpy as np
import torch
from torch import Tensor

from tamis.step.buffers import Views, staged
from tamis.step.plan import Limits
from tamis.step.split import INT


class HeldRequests:
    """A builder's buffer of request numbers, and its content.

    Attributes:
        buffer: int32 [tokens that a step may have]; 0 past the new tokens.
        ids: the content on the host: the request numbers of the step that filled the buffer last. If only the device
            knows them, each is the same negative number, which no other step has.
    """

    def __init__(self, limits: Limits, device: torch.device) -> None:
        """Allocate the buffer."""
        self.buffer = torch.zeros(limits.max_tokens, dtype=torch.int32, device=device)
        self.ids: INT = np.zeros(0, np.int32)
        self._pinned = device.type == "cuda"
        self._numbers = np.arange(limits.max_requests, dtype=np.int32)
        # What most steps copy: request r has token r. It is never written again, so copies under way see no change.
        self._staged_numbers = staged(torch.from_numpy(self._numbers), device)
        self._views = Views({"buffer": self.buffer, "numbers": self._staged_numbers})
        self._tokens = torch.zeros_like(self.buffer)
        self._unknown = 0

    def fill(self, queries: INT, starts: INT, longest: int) -> None:
        """Write the request of each token. The buffer is written in every step, even if nothing changed: an engine in
        sleep mode loses its content."""
        tokens, before = int(starts[-1]), len(self.ids)
        if longest == 1 and starts[tokens] == tokens:  # one token each, except for padding requests at the end
            self.ids = self._numbers[:tokens]
            self.leading(tokens).copy_(self._views("numbers", tokens), non_blocking=True)
            if tokens < before:
                self.buffer[tokens:before].zero_()
            return
        block = torch.zeros(max(tokens, before), dtype=torch.int32, device="cpu", pin_memory=self._pinned)
        self.ids = block.numpy()[:tokens]
        self.ids[:] = self._numbers[: len(queries)].repeat(queries)
        self.buffer[: len(block)].copy_(block, non_blocking=True)

    def fill_from_device(self, query_starts: Tensor, tokens: int) -> None:
        """Write the request of each token from the device's query starts, int32 [requests + 1], without reading them on
        the host. Empty requests have no token. The tokens' own numbers are written in every step too."""
        self._unknown -= 1
        before, self.ids = len(self.ids), np.full(tokens, self._unknown, np.int32)
        numbers = self._tokens[:tokens]
        torch.arange(tokens, dtype=numbers.dtype, device=numbers.device, out=numbers)
        # Token t belongs to the first request that ends after it.
        torch.searchsorted(query_starts[1:], numbers, right=True, out_int32=True, out=self.leading(tokens))
        if tokens < before:
            self.buffer[tokens:before].zero_()

    def leading(self, tokens: int) -> Tensor:
        """The leading elements of the buffer."""
        return self._views("buffer", tokens)
