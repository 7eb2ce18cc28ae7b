"""Computes what several GPUs gain if they share a selection, from times measured on one of them.

For each shape, `index_topk` of all tokens is timed, and what one of the ranks does of it: copying its rows' inputs,
selecting for them, and putting the positions of all ranks in the order of the tokens. The all-gather is not measured:
its time is computed from a stated bandwidth and latency, and so is the time of the shared selection. Before any time is
given, the parts of all ranks must make the whole bit by bit.

    python benchmarks/index_sharing.py [--ranks 8] [--repeats 20] [--backend auto] [--smaller 1]
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tamis import PagedCache
from tamis.lab.bench.timing import time_in_turn
from tamis.ops.index import WORKSPACE_BYTES
from tamis.ops.index.break_even import DEVICE, sharing_pays
from tamis.ops.index.operations import IndexTopk
from tamis.ops.index.prepared import new_positions, run_remembered
from tamis.ops.index.sharing import place_parts, select_part

HEADS, DIM, K, PAGE = 64, 128, 2048, 64
LINK, LATENCY = 350e9, 12e-6
"""Assumed for the all-gather: bytes per second and direction over NVLink 4, and seconds besides."""


class Shape(NamedTuple):
    """A step whose tokens belong to as many requests, all with the same context."""

    tokens: int
    requests: int
    context: int

    @property
    def name(self) -> str:
        kind = "decode" if self.tokens == self.requests else "prefill"
        return f"{kind} {self.tokens} x {self.context // 1024}K"


SHAPES = [Shape(4096, 1, kilo << 10) for kilo in (8, 32, 64, 128)] + [
    Shape(128, 128, 64 << 10),
    Shape(32, 32, 128 << 10),
]


def make_call(shape: Shape, device: torch.device, backend: str) -> IndexTopk:
    """Random FP8 keys and queries. The tokens of a prefill are the last of their request."""
    pages = shape.context // PAGE
    cache = PagedCache("index-fp8", shape.requests * pages, PAGE, device)
    assert cache.layout.scales is not None
    codes, scales = cache.field(cache.layout.values), cache.field(cache.layout.scales)
    codes.copy_(torch.randint(0, 256, codes.shape, dtype=torch.uint8, device=device) & 0xBF)  # no NaN
    scales.copy_(torch.rand(scales.shape, device=device) + 0.5)
    q = torch.randn(shape.tokens, HEADS, DIM, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(shape.tokens, HEADS, device=device)
    new = shape.tokens // shape.requests
    token = torch.arange(shape.tokens, dtype=torch.int32, device=device)
    table = torch.arange(shape.requests * pages, dtype=torch.int32, device=device).view(shape.requests, pages)
    lengths = shape.context - new + 1 + token % new
    where = (token // new, table, lengths, K, WORKSPACE_BYTES, shape.tokens, new_positions(q, K), None, backend)
    return IndexTopk(q, weights, cache, *where)


class Times(NamedTuple):
    """Seconds."""

    whole: float
    part: float
    placing: float

    def shared(self, tokens: int, ranks: int) -> float:
        """Computed: what a rank does, and the all-gather of which it receives the parts of the others."""
        return self.part + self.placing + LATENCY + tokens * K * 4 * (ranks - 1) / ranks / LINK


def measure(call: IndexTopk, ranks: int, repeats: int) -> Times:
    """Time a call as a whole and as rank 0 of several."""
    parts = [select_part(call, ranks, rank) for rank in range(ranks)]
    every = torch.stack(parts)
    run_remembered(call)
    whole = call.out.clone()
    place_parts(call, every, 0)
    if not torch.equal(call.out, whole):
        raise SystemExit("the parts do not make the whole: no time is given")
    runs: list[Callable[[], Tensor | None]] = [partial(run_remembered, call), partial(select_part, call, ranks, 0)]
    runs.append(partial(place_parts, call, every, 0))
    spreads = time_in_turn([([run], True) for run in runs], call.q.device, repeats)
    return Times(*(spread.median_us / 1e6 for spread in spreads))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--smaller", type=int, default=1, help="divide tokens and contexts by this, to try the script")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "a CPU, whose times say nothing of GPUs"
    print(f"index_topk, FP8, {HEADS} index heads, top-k {K}, on {name}; times in us, medians of {args.repeats}")
    print(
        f"all-gather assumed: {LINK / 1e9:.0f} GB/s per direction and {LATENCY * 1e6:.0f} us; its rows are computed\n"
    )
    gathered, shared = "all-gather (computed)", f"{args.ranks} ranks (computed)"
    print(f"{'':22}{'one rank':>10}{'its part':>10}{'placing':>10}{gathered:>24}{shared:>20}{'gain':>7}  auto shares")
    for full in SHAPES:
        shape = Shape(*(max(1, size // args.smaller) for size in full))
        shape = shape._replace(
            requests=min(full.requests, shape.tokens), context=max(PAGE, shape.context // PAGE * PAGE)
        )
        found = measure(make_call(shape, device, args.backend), args.ranks, args.repeats)
        total = found.shared(shape.tokens, args.ranks)
        times = (found.whole, found.part, found.placing)
        gather = total - found.part - found.placing
        pays = sharing_pays(shape.tokens, shape.requests, shape.context, HEADS, K, args.ranks, on_host=False)
        print(
            f"{shape.name:22}" + "".join(f"{time * 1e6:10.1f}" for time in times),
            f"{gather * 1e6:23.1f}{total * 1e6:20.1f}{found.whole / total:6.2f}x  {'yes' if pays else 'no'}",
        )
        rate, known = found.whole / (shape.tokens * shape.context), DEVICE.product
        known = DEVICE.read if shape.tokens == shape.requests else known
        print(f"{'':22}  {rate:.2e} s per token and key; auto assumes {known:.2e}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
