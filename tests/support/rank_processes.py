"""Functions run by several processes that are the ranks of a gloo group."""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)
"""After this a collective fails in which a rank is missing. Starting all ranks may take a busy machine a minute.
Tests that expect an error on all ranks see it at once."""


def run_on_ranks(size: int, run: Callable[[], Any], folder: Path) -> list[Any]:
    """What a function of a module returns on each rank; it finds its rank in `torch.distributed`.

    Args:
        size: how many ranks.
        run: the function.
        folder: an empty one, in which ranks find each other and leave their results.
    """
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_rank, args=(rank, size, run, folder)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(900)
    for process in processes:
        if process.is_alive():
            process.kill()
    errors = [path.read_text() for path in sorted(folder.glob("*.error"))]
    assert not errors, "\n".join(errors)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(size)]


def _rank(rank: int, size: int, run: Callable[[], Any], folder: Path) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"file://{folder}/store", timeout=TIMEOUT, rank=rank, world_size=size)
        torch.save(run(), folder / f"{rank}.pt")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.error").write_text(f"rank {rank}:\n{traceback.format_exc()}")
        raise
