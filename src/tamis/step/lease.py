"""`Lease`: which plan of a planner is the latest, and whether a layer is running on it.

All plans of a planner are views of one set of buffers, so only the latest plan describes what the buffers hold. A layer
that ran on an earlier plan would write one request's tokens into another request's pages. Captured graphs are not
affected: their replay runs no Python and reads the buffers, which the latest plan has filled.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import signature
from threading import Lock
from typing import Any, ParamSpec, TypeVar

from tamis import checks

P = ParamSpec("P")
R = TypeVar("R")


class Lease:
    """Numbers the plans of a planner and counts the users of the latest one. The planner and its plans share it.

    A user first registers and then compares the plan's number. A planner first changes the number and then looks for
    users. If two threads do this at the same time, at least one of them sees the other. So using a plan needs no lock,
    which would cost several times as much.
    """

    __slots__ = ("_planning", "_users", "generation")

    def __init__(self, generation: int = 0) -> None:
        """Start without a valid plan."""
        self.generation = generation
        self._planning = Lock()
        self._users: list[None] = []

    def __reduce__(self) -> tuple[type["Lease"], tuple[int]]:
        """Give a copied plan a lease of its own: it has buffers of its own too, so it stays valid."""
        return Lease, (self.generation,)

    @contextmanager
    def renewed(self) -> Iterator["Use"]:
        """The block in which the next plan is written. It ends the validity of earlier plans, even if it fails."""
        if not self._planning.acquire(blocking=False):
            raise _refuse_planning("another plan() under way")
        try:
            self.generation += 1
            if self._users:
                self.generation -= 1
                raise _refuse_planning("a layer still running on the latest plan")
            yield Use(self, self.generation)
        finally:
            self._planning.release()


class Use:
    """The block in which a layer runs on a plan. Blocks of one plan may be nested."""

    __slots__ = ("_lease", "_users", "generation")

    def __init__(self, lease: Lease, generation: int) -> None:
        """Remember the plan's number, its generation."""
        self._lease, self._users, self.generation = lease, lease._users, generation

    def __enter__(self) -> None:
        """Refuse a plan that is not the latest, and keep the planner from planning until the block ends."""
        self._users.append(None)
        if self._lease.generation != self.generation:
            self._users.pop()
            received = f"generation {self.generation} of {self._lease.generation}"
            remedy = "call plan() again, or finish all layers of a step before planning the next"
            raise checks.refuse("plan", "the planner's latest", received, remedy)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Let the planner plan again."""
        self._users.pop()


def _refuse_planning(received: str) -> ValueError:
    remedy = "finish the step first, or give each thread a planner of its own"
    return checks.refuse("planner", "used by one thread at a time", received, remedy)


def needs_latest_plan(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function with an argument `plan` inside a block of `plan.using()`, which refuses a stale plan first."""
    at = list(signature(function).parameters).index("plan")

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        plan: Any = args[at] if at < len(args) else kwargs.get("plan")
        try:
            use = plan.using()
        except AttributeError:
            expected, received = "what a planner's plan() returns", checks.describe(plan)
            raise checks.refuse_type("plan", expected, received, "plan the step") from None
        with use:
            return function(*args, **kwargs)

    return run
