"""Processes in which vLLM's own groups connect several ranks over gloo, on CPU tensors.

Ranks are forked from one process that has imported vLLM, because importing it takes longer than the tests. In that
process vLLM's Triton kernels run in Triton's interpreter, which is how vLLM merges the results of ranks without a GPU.
"""

import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
"""With no device visible, vLLM keeps its Triton kernels: a driver might become active later."""
_PATIENCE = 120


@cache
def _forking() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_programs", "node_programs", "index_programs"])
    return context


@contextmanager
def _environment() -> Iterator[None]:
    """The environment of the process that ranks are forked from, which starts with the first of them."""
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT, PYTHONPATH=os.pathsep.join(path for path in sys.path if path))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def run_on_ranks(count: int, where: Path, program: str, *arguments: Any) -> list[Any]:
    """What a program ("module.function") returns on every rank for (rank, count, address, *arguments). Errors of ranks
    are raised here."""
    address = f"file://{where / 'rendezvous'}"
    started = []
    with _environment():
        for rank in range(count):
            ours, theirs = multiprocessing.Pipe(duplex=False)
            process = _forking().Process(target=_run, args=(theirs, program, rank, count, address, arguments))
            process.start()
            theirs.close()
            started.append((process, ours))
    try:
        found = [_received(ours) for _, ours in started]
    finally:
        for process, _ in started:
            process.join(5)
            if process.is_alive():  # it waits for a rank that has failed
                process.kill()
    errors = [error for _, error in found if error]
    assert not errors, "\n".join(errors)
    return [result for result, _ in found]


def _received(connection: Connection) -> tuple[Any, str]:
    if not connection.poll(_PATIENCE):
        return None, "a rank did not answer"
    try:
        result, error = pickle.loads(connection.recv_bytes())
    except EOFError:
        return None, "a rank ended without an answer"
    return result, error


def _run(connection: Connection, program: str, rank: int, count: int, address: str, more: Any) -> None:
    result, error = None, ""
    try:
        module, _, function = program.partition(".")
        result = getattr(import_module(module), function)(rank, count, address, *more)
    except BaseException:
        error = f"rank {rank}: {traceback.format_exc()}"
    connection.send_bytes(pickle.dumps((result, error)))  # `send` would share tensors' memory with a rank that ends
    connection.close()
