"""As `test_atomicity`, for the functions that write lists of rows into the caller's buffers."""

from functools import cache

import pytest
import torch
from reliability.bad_values import Arguments, Case, faults
from reliability.test_atomicity import PAGE, T, ints, plain

from tamis.ops import select_chosen, select_entries, select_gathered, select_groups, select_window

# The stage `select` looks at no value, and absent pages are skipped everywhere.
SKIPPED = frozenset(
    f"{name} huge"
    for name in (
        *("positions", "request_ids", "block_table", "own", "context", "length", "chosen", "first", "decode_window"),
        "visible",
        *("decode_entries", "decode_lengths", "prefill_entries", "query_starts", "request_lengths", "window_table"),
        "entry_table",
    )
)


def tokens() -> Arguments:
    return {
        "positions": torch.arange(T, dtype=torch.int32),
        "request_ids": ints([0] * T),
        "block_table": ints([[1, 2], [3, 4]]),
        "own": torch.arange(T),
    }


MORE_PAGES = frozenset({f"block_table axis {axis} {how}" for axis in (0, 1) for how in ("longer", "shorter")})


def window() -> Case:
    slots, lengths = torch.full((T, 6), 7).int(), ints([9] * T)
    given = tokens() | {"page_size": PAGE, "window": 5, "slots": slots, "lengths": lengths, "backend": "auto"}
    given |= {"context": ints([0, 0]), "length": ints([5, 0])}

    def run(a: Arguments) -> object:
        return select_window(
            **{n: v for n, v in a.items() if n not in ("context", "length")}, blocks=(a["context"], a["length"])
        )

    free = {"own none", "slots axis 1 longer", "slots axis 1 shorter", "block_table axis 1 longer"}
    free |= {"block_table axis 1 shorter"}
    names = {"context": "blocks[0]", "length": "blocks[1]"}
    return Case(
        run,
        given,
        {"slots": slots, "lengths": lengths},
        frozenset(free) | SKIPPED,
        frozenset({"slots", "lengths"}),
        names=names,
    )


def entries() -> Case:
    buffers = {
        "completed": torch.full((T,), 7),
        "visible": ints([9] * T),
        "lengths": ints([9] * T),
        "every": torch.full((T, 6), 7).int(),
    }
    given = tokens() | buffers | {"ratio": 2, "page_size": PAGE, "columns": 4, "local_from": 3, "backend": "auto"}
    free = MORE_PAGES | {f"{name} none" for name in (*buffers, "own", "columns", "local_from")}
    free |= {"every axis 1 longer", "every axis 1 shorter"}
    return Case(plain(select_entries), given, buffers, free | SKIPPED, frozenset(buffers))


def chosen() -> Case:
    buffers = {"slots": torch.full((T, 6), 7).int(), "lengths": ints([9] * T)}
    given = {n: v for n, v in tokens().items() if n != "positions"} | buffers
    given |= {"chosen": torch.randint(-1, 8, (T, 6)).int(), "page_size": PAGE, "backend": "auto"}
    return Case(plain(select_chosen), given, buffers, MORE_PAGES | SKIPPED | {"own none"}, frozenset(buffers))


def workspace() -> Case:
    buffers = {"slots": torch.full((T, 9), 7).int(), "lengths": ints([9] * T)}
    given = {n: v for n, v in tokens().items() if n in ("positions", "request_ids")} | buffers
    given |= {"first": ints([0, 0]), "chosen": torch.randint(-1, 2, (T, 4)).int(), "first_request": 0}
    given |= {"ratio": 2, "window": 5, "entries": 3, "rows": 9, "columns": 4, "backend": "auto"}
    free = {"chosen none", "first axis 0 longer", "first axis 0 shorter", "slots axis 1 longer"}
    return Case(plain(select_gathered), given, buffers, SKIPPED | free, frozenset(buffers))


def groups() -> Case:
    buffers = {"positions": torch.full((T, 15), 7).int()}
    given = {"chosen": torch.zeros(T, 3).int(), "visible": ints([9] * T), "size": 4, "backend": "auto"} | buffers
    free = {"positions none", "positions axis 1 longer", "chosen axis 1 shorter"}
    return Case(plain(select_groups), given, buffers, SKIPPED | free, frozenset(buffers))


CASES = {made.__name__: cache(made) for made in (window, entries, chosen, workspace, groups)}
ROWS = [(name, argument) for name, made in CASES.items() for argument in made().arguments]


@pytest.mark.parametrize("name", CASES)
def test_good_arguments_are_accepted(name: str) -> None:
    case = CASES[name].__wrapped__()
    before = {key: value.clone() for key, value in case.watched.items()}
    case.run(case.arguments)
    assert all(not torch.equal(value, before[key]) for key, value in case.watched.items()), "it writes nothing"


@pytest.mark.parametrize(("name", "argument"), ROWS)
def test_a_refused_call_changes_nothing(name: str, argument: str) -> None:
    assert faults(CASES[name](), argument) == []
