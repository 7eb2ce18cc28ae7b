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
from tamis.lab.bench.peers.flash_mla import BUILDS, FlashMLA
from tamis.lab.bench.peers.gathered import GatheredFlashMLA
from tamis.lab.bench.peers.prompt_indexer import PromptIndexer
from tamis.lab.bench.peers.vllm import VLLM

__all__ = [
    "GROUPS",
    "NAMES",
    "VLLM",
    "DeepGEMM",
    "FlashAttention3",
    "FlashMLA",
    "GatheredFlashMLA",
    "Peer",
    "PromptIndexer",
    "Torch",
    "Unsupported",
    "find_peers",
]

NAMES = (*BUILDS, "flashmla-gather", "fa3", "deepgemm", "vllm", "vllm-gather", "torch")
GROUPS = {"flashmla": tuple(BUILDS)}
"""Names that stand for every peer of a group that is found."""


def find_peers(wanted: Sequence[str] | None, device: torch.device) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can run here, and the reason for each peer that cannot.

    Args:
        wanted: names of peers or groups; a ValueError gives the reason if a peer, or every peer of a group, cannot run.
            None: all peers that can run.
        device: where they would run.
    """
    for name in wanted or ():
        if name not in (*GROUPS, *NAMES, "none"):
            raise ValueError(f"--against must be one of {', '.join((*GROUPS, *NAMES))} or none; got {name!r}.")
    names = NAMES if wanted is None else [n for name in wanted if name != "none" for n in GROUPS.get(name, (name,))]
    found: list[Peer] = []
    absent: dict[str, str] = {}
    for name in dict.fromkeys(names):
        try:
            found.append(_MAKERS[name](device))
        except Unsupported as reason:
            absent[name] = str(reason)
    missing = _missing(wanted or (), absent)
    if missing:
        if device.type != "cuda":
            where = "this machine has none" if not torch.cuda.is_available() else f"--device is {device.type}"
            raise ValueError(f"--against {', '.join(missing)} needs a CUDA GPU; {where}. Use --against torch or none.")
        reasons = "; ".join(f"{name}: {reason}" for name, reason in missing.items())
        raise ValueError(f"--against: {reasons}. Install the package, or leave it out.")
    return found, absent


def _missing(wanted: Sequence[str], absent: dict[str, str]) -> dict[str, str]:
    """The reasons for the wanted names of which nothing can run."""
    missing = {}
    for name in wanted:
        members = GROUPS.get(name, (name,))
        if all(member in absent for member in members):
            missing[name] = "; ".join(dict.fromkeys(absent[member] for member in members))
    return missing


@dataclass(frozen=True)
class Torch:
    """The same work in plain torch operations."""

    name: str = "torch"
    build: str = ""
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
    **BUILDS,
    "flashmla-gather": GatheredFlashMLA.find,
    "fa3": FlashAttention3.find,
    "deepgemm": DeepGEMM.find,
    "vllm": VLLM.find,
    "vllm-gather": PromptIndexer.find,
    "torch": Torch.find,
}
