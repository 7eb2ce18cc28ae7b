"""Other implementations of the same stages, used where they can be imported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tamis.lab.bench import torch_baseline
from tamis.lab.bench.inputs import InputSet
from tamis.lab.bench.jobs import Job
from tamis.lab.bench.peers.base import Peer, Unsupported
from tamis.lab.bench.peers.deep_gemm import DeepGEMM
from tamis.lab.bench.peers.flash_attention import FlashAttention3
from tamis.lab.bench.peers.flash_mla import FlashMLA
from tamis.lab.bench.peers.gathered import GatheredFlashMLA
from tamis.lab.bench.peers.vllm import VLLM

__all__ = [
    "NAMES",
    "VLLM",
    "DeepGEMM",
    "FlashAttention3",
    "FlashMLA",
    "GatheredFlashMLA",
    "Peer",
    "Torch",
    "Unsupported",
    "find_peers",
]

NAMES = ("flashmla", "flashmla-gather", "fa3", "deepgemm", "vllm", "torch")


def find_peers(wanted: Sequence[str] | None, device: torch.device) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can run here, and the reason for each peer that cannot.

    Args:
        wanted: names of peers; a ValueError gives the reason if one cannot run. None: all peers that can run.
        device: where they would run.
    """
    for name in wanted or ():
        if name not in (*NAMES, "none"):
            raise ValueError(f"--against must be one of {', '.join(NAMES)} or none; got {name!r}.")
    found: list[Peer] = []
    absent: dict[str, str] = {}
    for name in NAMES if wanted is None else [n for n in wanted if n != "none"]:
        try:
            found.append(_MAKERS[name](device))
        except Unsupported as reason:
            absent[name] = str(reason)
    if wanted is not None and absent:
        if device.type != "cuda":
            where = "this machine has none" if not torch.cuda.is_available() else f"--device is {device.type}"
            raise ValueError(f"--against {', '.join(absent)} needs a CUDA GPU; {where}. Use --against torch or none.")
        reasons = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise ValueError(f"--against: {reasons}. Install the package, or leave it out.")
    return found, absent


@dataclass(frozen=True)
class Torch:
    """The same work in plain torch operations."""

    name: str = "torch"
    capturable: bool = True

    @classmethod
    def find(cls, device: torch.device) -> "Torch":
        """This peer can always run."""
        return cls()

    def calls(self, job: Job, sets: Sequence[InputSet]) -> list[Callable[[], Any]]:
        """One call per set."""
        try:
            return [torch_baseline.call_for(item) for item in sets]
        except NotImplementedError as reason:
            raise Unsupported(str(reason)) from reason


_MAKERS: dict[str, Callable[[torch.device], Peer]] = {
    "flashmla": FlashMLA.find,
    "flashmla-gather": GatheredFlashMLA.find,
    "fa3": FlashAttention3.find,
    "deepgemm": DeepGEMM.find,
    "vllm": VLLM.find,
    "torch": Torch.find,
}
