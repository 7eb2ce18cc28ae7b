"""A version of a function to be timed: one of tamis' own, or a peer's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "tamis"


@dataclass(frozen=True, eq=False)
class Version:
    """The calls of one version on a cell's input sets, and how a result is judged."""

    door: str
    """The function that is called, one of `cells.DOORS`; for a peer, the function of ours that does the same."""
    name: str
    """`tamis`, perhaps with the way that it takes, or the peer's name."""
    calls: Sequence[Callable[[], Any]]
    """One call per input set, with nothing in it but the function."""
    error: Callable[[Any], float]
    """The error of what the first call returned."""
    bound: float
    """The largest error with which a time is shown."""
    build: str = ""
    """The peer's distribution and version."""
    capturable: bool = True
    note: str = ""
    """What a reader must know about the work, such as padding outside of the time."""

    @property
    def ours(self) -> bool:
        """Whether tamis runs."""
        return self.name.startswith(OURS)


@dataclass(frozen=True, eq=False)
class Versions:
    """What runs on one cell."""

    found: list[Version]
    sets: int
    missing: dict[str, str]
    """Reasons by the name of each peer that cannot do this work."""
