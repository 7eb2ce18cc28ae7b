"""`Shard`: which rows of a request a rank holds, where ranks divide each request's rows (context parallelism)."""

from dataclasses import dataclass

from tamis import checks


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


def check_shard(ranks: int, rank: int, interleave: int) -> None:
    """Refuse a rank or an interleave that is out of range."""
    checks.integer("ranks", ranks, low=1)
    checks.integer("rank", rank, low=0, high=ranks - 1)
    checks.integer("interleave", interleave, low=1)
