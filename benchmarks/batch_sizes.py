"""Times a decode step of FP8 attention for every number of tokens, so that cliffs between sizes show.

    python benchmarks/batch_sizes.py --csv benchmarks/results/h200_batch_sizes.csv [--heads 16,64,128] [--to 264]

All sizes are slices of the same tokens, whose rows exceed the GPU's cache several times over: a call on few tokens is
timed on many slices in turn. The error is that of the first token, in every call of that size. `tamis bench --report`
draws the rows, and this program prints every step of more than 15% from one size to the next.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from tamis.lab.bench.inputs import AttendSet, prepare
from tamis.lab.bench.jobs import SIZES, Job
from tamis.lab.bench.peers import Peer, find_peers
from tamis.lab.bench.record import CsvFile, Row, describe, timestamp
from tamis.lab.bench.roofline import MEASURED, Ceiling, attend_cost
from tamis.lab.bench.timing import cache_bytes, time_in_turn
from tamis.lab.testing import compare
from tamis.step.batch import parse_shape

PAGE, LAYOUT = 64, "v32-fp8"
STEP = 0.15
"""Steps above this part of the smaller size's time are printed."""
COLD_FACTOR = 3
"""How many times the size of the cache the rows of a size's calls have together."""


def slices(whole: Sequence[AttendSet], tokens: int, wanted: int) -> Iterator[AttendSet]:
    """At most so many sets of `tokens` neighbouring tokens; at least two."""
    found = 0
    for one in whole:
        for first in range(0, len(one.q) - tokens + 1, tokens):
            span = slice(first, first + tokens)
            selections = tuple(replace(s, slots=s.slots[span]) for s in one.selections)
            yield replace(
                one,
                q=one.q[span],
                selections=selections,
                block_table=one.block_table[span],
                lengths=one.lengths[span],
            )
            found += 1
            if found >= wanted:
                return


def error_of(result: Tensor, expected: Tensor) -> float:
    """The relative error of the first token."""
    return compare.relative_error(result[:1], expected)


def measure(
    whole: Sequence[AttendSet], tokens: int, job: Job, peer: Peer | None, repeats: int, row: partial[Row]
) -> Row:
    """One row: both versions on the same slices."""
    device, backend = whole[0].q.device, row.keywords["backend"]
    layout = job.row_layout
    queries, lengths = parse_shape(job.shape)
    cost = attend_cost(
        list(zip(queries, lengths, strict=True)),
        heads=whole[0].q.shape[1],
        picks=[row.keywords["topk"]],
        layout=layout,
        value_dim=layout.latent,
    )
    sets = list(slices(whole, tokens, max(2, COLD_FACTOR * cache_bytes(device) // cost.bytes + 1)))
    expected = whole[0].expected[1][:1]
    versions: list[Sequence[Callable[[], object]]] = [[partial(one.run, backend) for one in sets]]
    error, other = error_of(sets[0].run(backend), expected), None
    if not error <= AttendSet.bound:
        raise RuntimeError(f"the result for {tokens} tokens is wrong: error {error:.2e}")
    if peer is not None:
        calls = peer.calls(job, sets)
        other = error_of(calls[0](), expected)
        versions.append(calls)
    ours, *theirs = time_in_turn([(calls, True) for calls in versions], device, repeats)
    made = row(
        time=timestamp(),
        method=ours.method,
        shape=job.shape,
        sets=len(sets),
        median_us=ours.median_us,
        p10=ours.p10,
        p90=ours.p90,
        bytes=cost.bytes,
        flops=cost.flops,
        roofline_us=Ceiling(*MEASURED["H200"], "").seconds(cost) * 1e6,
        error=error,
    )
    if peer is None or not theirs:
        return made
    spread = theirs[0]
    return replace(
        made,
        peer=peer.name,
        peer_us=spread.median_us,
        peer_p10=spread.p10,
        peer_p90=spread.p90,
        peer_error=other,
        ratio=spread.median_us / ours.median_us,
        peer_build=peer.build,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Time all sizes and print the steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--heads", default="16,64,128")
    parser.add_argument("--to", type=int, default=264, help="the largest number of tokens")
    parser.add_argument("--against", default="flashmla-sgl", help="the peer; none for no peer")
    parser.add_argument("--every", type=int, default=8, help="the peer is timed at 1 and at multiples of this")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--backend", default="hopper")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--context", type=int, default=16384, help="rows of a request")
    parser.add_argument("--topk", type=int, default=2048)
    given = parser.parse_args(argv)
    device = torch.device(given.device)
    peers = [] if given.against == "none" else find_peers([given.against], device)[0]
    machine, file = describe(device, ""), CsvFile(given.csv)
    length = f"{given.context // 1024}k" if given.context % 1024 == 0 else str(given.context)
    for heads in map(int, given.heads.split(",")):
        job = Job("decode", "attend", f"{given.to}q1s{length}", LAYOUT, heads, given.topk)
        whole = [one for one in prepare(job, device).sets[:2] if isinstance(one, AttendSet)]
        row = partial(
            Row,
            **asdict(machine),
            backend=given.backend,
            suite=SIZES,
            stage="attend",
            heads=heads,
            topk=given.topk,
            window=0,
            layout=LAYOUT,
            page_size=PAGE,
            repeats=given.repeats,
        )
        before: Row | None = None
        for tokens in range(1, given.to + 1):
            peer = peers[0] if peers and (tokens == 1 or tokens % given.every == 0) else None
            this = replace(job, shape=f"{tokens}q1s{length}")
            found = measure(whole, tokens, this, peer, given.repeats, row)
            file.add([found])
            if before is not None and abs(found.median_us / before.median_us - 1) > STEP:
                times = f"{before.median_us:.1f} to {found.median_us:.1f} us"
                print(f"{heads} heads, {tokens - 1} to {tokens} tokens: {times}")
            before = found
    return 0


if __name__ == "__main__":
    sys.exit(main())
