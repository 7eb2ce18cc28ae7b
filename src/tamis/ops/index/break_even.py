"""Whether sharing a selection over ranks takes less time than selecting everything on each of them.

The rule knows only shapes, so that all ranks decide alike and a CUDA graph can be captured: how many keys each token
sees is on the device, and the width of the block table stands for it. In seconds, for R ranks, T tokens of B requests
(at most T) with N keys each, and k positions per token:

    select(T, B) = N * max(T * product, B * read), and what any selection takes
    shared = select(T / R, B / R) + latency + T * k * 4 * ((R - 1) / R / link + 2 / memory)

and sharing pays if it takes less than select(T, B). Products bound a prefill, and reading keys bounds decodes. A rank
receives (R - 1) / R of all positions, four bytes each, which are read and written once more when they are put in the
order of the tokens.
"""

from typing import NamedTuple

from tamis.arithmetic import ceil_div


class Costs(NamedTuple):
    """What selecting and sharing take on one kind of device."""

    product: float
    """Seconds per token and key with 64 index heads, selection included."""
    read: float
    """Seconds per request and key, whatever the heads."""
    latency: float
    """Seconds of sharing besides its bytes: the collective and the copies of a rank's rows."""
    link: float
    """Bytes per second that a rank receives from all others."""
    memory: float
    """Bytes per second of its memory."""


DEVICE = Costs(
    product=4.8e-3 / (4096 * 63488),  # 4.8 ms for 4096 tokens with 62K keys on average
    read=322e-6 / (128 * 65536),  # 322 us for 128 decodes with 64K keys, which is 132 bytes at 3.4 TB/s
    latency=12e-6 + 5 * 2e-6,  # NCCL over NVLink, and four gathers of inputs and one of results
    link=350e9,  # NVLink 4: 450 GB/s per direction, less what protocols take
    memory=3.6e12,
)
"""An H200 among others on NVLink."""
HOST = Costs(
    product=2e-6,  # float64 products on one core
    read=0.0,
    latency=1e-3,  # gloo over sockets of one machine
    link=1e9,
    memory=5e9,
)
SHARES = ("auto", "always")
"""What callers may say about it: "auto" follows the rule, "always" shares whatever it says."""
HEADS = 64
"""The heads that `Costs.product` is for."""


def sharing_pays(tokens: int, requests: int, keys: int, heads: int, k: int, ranks: int, *, on_host: bool) -> bool:
    """Whether ranks should share a selection.

    Args:
        tokens: tokens of the step.
        requests: rows of the block table.
        keys: keys that a row of the block table has room for.
        heads: index heads.
        k: positions per token.
        ranks: ranks of the group.
        on_host: whether the step runs on a CPU.
    """
    costs = HOST if on_host else DEVICE

    def select(tokens: int, requests: int) -> float:
        return keys * max(tokens * costs.product * heads / HEADS, requests * costs.read)

    requests = min(requests, tokens)
    saved = select(tokens, requests) - select(ceil_div(tokens, ranks), ceil_div(requests, ranks))
    return saved > costs.latency + tokens * k * 4 * ((ranks - 1) / ranks / costs.link + 2 / costs.memory)
