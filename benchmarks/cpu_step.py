"""Times one decode step on a CPU: tamis against the same work in plain torch operations.

32 requests, 16 heads, top-k 2048, from 656-byte FP8 rows. The torch version gathers and dequantises the rows and runs
two matrix products and a softmax, without checks, masks or a block table. The results are compared before any time is
printed; the runs are interleaved, and the medians compared.

    python benchmarks/cpu_step.py [--requests 32] [--heads 16] [--topk 2048] [--repeats 7] [--csv FILE]
"""

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tamis import Batch, LayerSpec, Limits, PagedCache, PagePool, Plan, Planner, SparseMLA, __version__
from tamis.arithmetic import ceil_div
from tamis.ops import write_kv

PAGE, SCALE, BAR = 64, 0.1352338, 1.5


def torch_step(q: Tensor, storage: Tensor, slots: Tensor) -> Tensor:
    """Gather, dequantise, two products and a softmax, for exactly this shape."""
    tokens, k = slots.shape
    rows = storage.view(-1, 656).index_select(0, slots.reshape(-1))
    scales = rows[:, 512:528].contiguous().view(torch.float32)
    latent = rows[:, :512].view(torch.float8_e4m3fn).float().view(-1, 4, 128) * scales.unsqueeze(-1)
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).float()
    keys = torch.cat((latent.view(-1, 512), rope), dim=1).view(tokens, k, 576)
    weights = torch.softmax(torch.bmm(q, keys.transpose(1, 2)) * SCALE, dim=-1)
    return torch.bmm(weights, keys[..., :512])


def make_step(
    requests: int, heads: int, topk: int, context: int
) -> tuple[PagedCache, Plan, SparseMLA, Tensor, Tensor, Tensor]:
    """A filled cache, the plan of one decode step, a layer, queries, positions and their slots."""
    spec = LayerSpec(heads=heads, scale=SCALE, topk=topk)
    pages = requests * ceil_div(context, PAGE) + 1
    pool, cache = PagePool(pages, PAGE, seed=0), PagedCache("v32-fp8", pages, PAGE)
    for start in range(0, cache.rows, 8192):
        slots = torch.arange(start, min(start + 8192, cache.rows))
        write_kv(torch.randn(len(slots), 576), cache, slots)
    limits = Limits(requests, requests, context, PAGE)
    batch = Batch.build([1] * requests, [context] * requests, pool)
    plan = Planner(spec, limits).plan(batch)
    positions = torch.stack([torch.randperm(context)[:topk] for _ in range(requests)]).int()
    table = batch.pages.block_table.long()
    slots = table.gather(1, positions.long() // PAGE) * PAGE + positions.long() % PAGE
    return cache, plan, SparseMLA(spec), torch.randn(requests, heads, 576), positions, slots


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--csv", type=Path, help="append one row of results to this file")
    args = parser.parse_args()
    torch.manual_seed(0)
    cache, plan, layer, q, positions, slots = make_step(args.requests, args.heads, args.topk, args.context)
    out = layer(q, None, cache, plan, positions=positions).out
    error = float((out - torch_step(q, cache.storage, slots)).norm() / out.norm())
    if not error < 1e-5:
        print(f"results differ by {error:.1e}: no time is given", file=sys.stderr)
        return 1
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(args.repeats):
        theirs.append(seconds(lambda: torch_step(q, cache.storage, slots)))
        ours.append(seconds(lambda: layer(q, None, cache, plan, positions=positions)))
    mine, baseline = statistics.median(ours), statistics.median(theirs)
    ratio = mine / baseline
    print(
        f"{args.requests} requests, {args.heads} heads, top-k {args.topk}, v32-fp8, {torch.get_num_threads()} threads"
    )
    for name, times in (("torch", theirs), ("tamis", ours)):
        spread = f"{min(times) * 1e3:.0f}..{max(times) * 1e3:.0f}"
        print(f"  {name:8} {statistics.median(times) * 1e3:8.1f} ms  ({spread})")
    print(f"  ratio {ratio:.2f} (at most {BAR}), relative difference {error:.1e}")
    if args.csv is not None:
        append_row(args, mine, baseline, error)
    return 0 if ratio <= BAR else 1


def append_row(args: argparse.Namespace, mine: float, baseline: float, error: float) -> None:
    fields = {
        "version": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "requests": args.requests,
        "heads": args.heads,
        "topk": args.topk,
        "context": args.context,
        "by_hand_ms": f"{baseline * 1e3:.1f}",
        "tamis_ms": f"{mine * 1e3:.1f}",
        "ratio": f"{mine / baseline:.3f}",
        "difference": f"{error:.1e}",
    }
    new = not args.csv.exists()
    with args.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if new:
            writer.writeheader()
        writer.writerow(fields)


if __name__ == "__main__":
    sys.exit(main())
