"""`Shard`: which rows of a request a rank holds, where ranks divide each request's rows (context parallelism)."""

from dataclasses import dataclass

from torch import Tensor

from tamis import checks
from tamis.arithmetic import ceil_div


@dataclass(frozen=True)
class Shard:
    """The share of each request's rows that this rank holds."""

    ranks: int = 1
    """How many ranks share the rows of each request."""
    rank: int = 0
    """Which of them this is."""
    interleave: int = 1
    """How many consecutive positions a rank holds; the next ones belong to the next rank."""

    def __post_init__(self) -> None:
        """Refuse a rank that is not below the number of ranks."""
        check_shard(self.ranks, self.rank, self.interleave)

    def local_lengths(self, lengths: Tensor) -> Tensor:
        """How many of each request's first `lengths` positions this rank holds, int32; 0 for negative lengths."""
        if self.ranks == 1:
            return lengths
        length, run = lengths.clamp_min(0), self.interleave * self.ranks
        if run > checks.INT32_MAX:
            # No request is that long, so each rank has at most one run.
            return (length.long() - self.rank * self.interleave).clamp_(0, self.interleave).int()
        whole = length // run
        return (length - whole * run - self.rank * self.interleave).clamp_(0, self.interleave) + whole * self.interleave

    def most(self, length: int) -> int:
        """An upper bound of how many of a request's first `length` positions this rank holds."""
        return ceil_div(length, self.interleave * self.ranks) * self.interleave

    def global_positions(self, local: Tensor) -> Tensor:
        """The positions in the request of this rank's rows; where `local` is negative, the result means nothing."""
        inside = local % self.interleave
        return (local - inside) * self.ranks + self.rank * self.interleave + inside


def check_shard(ranks: int, rank: int, interleave: int) -> None:
    """Refuse a rank or an interleave that is out of range."""
    checks.integer("ranks", ranks, low=1)
    checks.integer("rank", rank, low=0, high=ranks - 1)
    checks.integer("interleave", interleave, low=1)
