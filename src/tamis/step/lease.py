"""`Lease`: which plan of a planner is the latest, and whether something runs on it.

All plans of a planner are views of one set of buffers, so only the latest says what lies there. A layer that ran on an
earlier one would write one request's tokens into another's pages. Captured graphs run no Python and are not affected:
they are replayed on the buffers, whatever plan filled them last.
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
    """Shared by a planner and its plans: numbers the plans, and knows whether the latest is in use.

    Whoever uses a plan first says so and then looks at the number; whoever plans first changes the number and then
    looks for users. So at least one of two threads that do this at the same time sees the other, and using a plan takes
    no lock, which would cost several times as much.
    """

    __slots__ = ("_planning", "_users", "generation")

    def __init__(self, generation: int = 0) -> None:
        """Start with no plan that is valid."""
        self.generation = generation
        self._planning = Lock()
        self._users: list[None] = []

    def __reduce__(self) -> tuple[type["Lease"], tuple[int]]:
        """A copy of a plan has buffers of its own and stays valid: it gets a lease of its own."""
        return Lease, (self.generation,)

    @contextmanager
    def renewed(self) -> Iterator["Use"]:
        """The block in which the next plan is written. Earlier plans end with its beginning, even if it fails."""
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
    """The block in which something runs on a plan; blocks of one plan may be nested."""

    __slots__ = ("_lease", "_users", "generation")

    def __init__(self, lease: Lease, generation: int) -> None:
        """Of the plan with this number."""
        self._lease, self._users, self.generation = lease, lease._users, generation

    def __enter__(self) -> None:
        """Refuse a plan that is not the latest; let nobody plan until the block ends."""
        self._users.append(None)
        if self._lease.generation != self.generation:
            self._users.pop()
            received = f"generation {self.generation} of {self._lease.generation}"
            remedy = "call plan() again, or finish all layers of a step before planning the next"
            raise checks.refuse("plan", "the planner's latest", received, remedy)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Let others plan again."""
        self._users.pop()


def _refuse_planning(received: str) -> ValueError:
    remedy = "finish the step first, or give each thread a planner of its own"
    return checks.refuse("planner", "used by one thread at a time", received, remedy)


def needs_latest_plan(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function with an argument `plan` run in a block of `plan.using()`, before which it looks at nothing."""
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
