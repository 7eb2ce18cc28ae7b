"""A group of ranks: what travels between them, and how they make sure that all of them run the same call.

A collective in which one rank takes no part keeps the others waiting. So a rank whose arguments are refused, or whose
own part of the work raises, still takes part in an exchange of one short message per rank, after which all ranks raise.
On the host every call exchanges messages. On a device that would wait for the device, so only calls whose sizes the
group has not yet agreed on do so, and none while a CUDA graph is captured.
"""

from hashlib import blake2b
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor

from tamis import checks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Sizes: TypeAlias = tuple[tuple[str, object], ...]
"""What must be the same on all ranks, by name."""

MESSAGE_BYTES = 1024
"""Bytes of a rank's message: a byte for failure, a digest of a text, then the text in UTF-8, filled up with zeros."""
DIGEST_BYTES = 16
_SEPARATOR = "; "
MOST_AGREED = 1024
"""Sizes of calls that a group remembers. All ranks forget them together, since they agreed on the same ones."""


class Ranks:
    """The ranks of a process group, seen from one of them."""

    def __init__(self, group: "ProcessGroup", name: str = "group") -> None:
        """Take part in a group. `name`: what the caller's argument is called, for errors."""
        checks.instance(name, group, dist.ProcessGroup, "pass a group of torch.distributed that this rank is in")
        # Whoever made the group decides how long it lives.
        self._group, self.size, self.rank = ref(group), group.size(), group.rank()
        self._carried = dist.get_backend_config(group)
        self._agreed: set[Sizes] = set()

    @staticmethod
    def of(group: "ProcessGroup", name: str = "group") -> "Ranks":
        """The ranks of a group, with what they have agreed on."""
        try:
            return _KNOWN[group]
        except (KeyError, TypeError):
            found = Ranks(group, name)
            _KNOWN[group] = found
            return found

    def check_device(self, device: torch.device) -> None:
        """Refuse a group whose backend does not carry tensors of a device."""
        if f"{device.type}:" not in self._carried:
            remedy = "NCCL carries tensors on GPUs and gloo those on the host"
            raise checks.refuse("group", f"one that carries tensors on {device.type}", self._carried, remedy)

    def gather(self, mine: Tensor) -> Tensor:
        """The tensors of all ranks in the order of the ranks, [size, *mine.shape]. All of them have one shape."""
        every = mine.new_empty((self.size, *mine.shape), dtype=mine.dtype)
        if mine.numel():
            _all_gather(every.view(-1), mine.view(-1), group=self._group())
        return every

    def must_agree(self, device: torch.device, sizes: Sizes) -> bool:
        """Whether a call of these sizes exchanges messages before its results travel."""
        return device.type == "cpu" or (sizes not in self._agreed and not is_capturing(device))

    def agree(self, sizes: Sizes | None, failure: Exception | None = None) -> None:
        """Exchange messages, and raise on all ranks if one of them failed or runs a call of other sizes.

        Args:
            sizes: what must be the same on all ranks; None after a failure.
            failure: what this rank refused its arguments with, or raised when it ran its part.
        """
        if failure is not None and is_capturing(None):
            raise failure
        told = f"{type(failure).__name__}: {failure}" if failure is not None else _SEPARATOR.join(_named(sizes))
        # A text that is too long is cut, perhaps within a character. So digests are compared, and texts explain.
        start = 1 + DIGEST_BYTES
        digest = blake2b(told.encode(), digest_size=DIGEST_BYTES).digest()
        message = (bytes([failure is not None]) + digest + told.encode())[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
        # Whatever the arguments are, all ranks send from the same kind of memory, from the host's if the group can.
        device = torch.device("cpu") if "cpu:" in self._carried else torch.device("cuda", torch.cuda.current_device())
        every = self.gather(torch.tensor(list(message), dtype=torch.uint8, device=device)).cpu()
        if failure is not None:
            raise failure
        messages = [bytes(one.tolist()) for one in every]
        texts = [one[start:].rstrip(b"\0").decode(errors="replace") for one in messages]
        for rank in every[:, 0].nonzero().flatten().tolist():
            raise RuntimeError(f"rank {rank} of {self.size} failed, so that no rank has a result: {texts[rank]}")
        for rank, text in enumerate(texts):
            if messages[rank][1:start] != digest:
                pairs = zip_longest(told.split(_SEPARATOR), text.split(_SEPARATOR), fillvalue="nothing")
                own, other = next((pair for pair in pairs if pair[0] != pair[1]), (told, text))
                remedy = f"rank {self.rank} must call as rank {rank} does"
                raise checks.refuse("a call over ranks", f"the same on all, with {other}", own, remedy)
        assert sizes is not None
        if len(self._agreed) >= MOST_AGREED:
            self._agreed.clear()
        self._agreed.add(sizes)


_KNOWN: WeakKeyDictionary[Any, Ranks] = WeakKeyDictionary()

# The name from torch 2.13 on, where the other one warns.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


def is_capturing(device: torch.device | None) -> bool:
    """Whether a CUDA graph is being captured, so that the host may not wait for the device, which may be unknown."""
    there = torch.cuda.is_available() if device is None else device.type == "cuda"
    return there and torch.cuda.is_current_stream_capturing()


def _named(sizes: Sizes | None) -> list[str]:
    return [f"{name} {value}" for name, value in sizes or ()]
