"""`PageBuffers`: block table and slots of one pool, at addresses that captured graphs can rely on."""

import torch

from tamis.arithmetic import ceil_div
from tamis.step.arena import staged
from tamis.step.batch import PageMap
from tamis.step.plan import Limits


class PageBuffers:
    """Room for the largest step of one pool. Elements that the latest step did not write are -1."""

    def __init__(self, limits: Limits, page_size: int, device: torch.device) -> None:
        """Allocate a block table int32 [max_requests, pages of max_length] and slots int64 [max_tokens]."""
        self.page_size = page_size
        self.width = ceil_div(limits.max_length, page_size)
        self._device = device
        self._block_table = torch.full((limits.max_requests, self.width), -1, dtype=torch.int32, device=device)
        self._slots = torch.full((limits.max_tokens,), -1, dtype=torch.int64, device=device)
        self._filled = (0, 0, 0)
        """Requests, pages and slots that the step before has written."""

    def fill(self, pages: PageMap, requests: int, rows: int) -> PageMap:
        """Copy the pages of a step into the buffers, and return views of so many requests and token rows."""
        count, width = len(pages.slots), pages.block_table.shape[1]
        self._block_table[:requests, :width].copy_(staged(pages.block_table, self._device), non_blocking=True)
        self._slots[:count].copy_(staged(pages.slots, self._device), non_blocking=True)
        # Clear what the step before has left outside. A step of the same shape has nothing to clear.
        last_requests, last_width, last_count = self._filled
        if requests < last_requests:
            self._block_table[requests:last_requests, :last_width].fill_(-1)
        if width < last_width:
            self._block_table[:requests, width:last_width].fill_(-1)
        if count < last_count:
            self._slots[count:last_count].fill_(-1)
        self._filled = requests, width, count
        return PageMap(self._block_table[:requests], self._slots[:rows])
