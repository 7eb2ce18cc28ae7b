"""The contract of every public call: right by the oracle, or refused by name with nothing changed.

`pytest tests/reliability/test_contract.py --calls 100000` makes more calls, `--fuzz-seed S --first I --calls 1` makes
call I of seed S again, and `--device cuda` makes the numeric ones on a GPU.
"""

import sys
import warnings
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # the package beside this file

from contract.calls import Call, Wrong, leaves
from contract.cases import ALL, NUMERIC
from contract.draw import Draw
from contract.run import Tally, judge, run, spoil_call

CALLS = 5000
FIXED_SEED = 17
SHOWN = 25
OFTEN = 25
"""From so many calls of a function on, some must be right and some refused."""


def rolling_seed() -> int:
    """Another seed every day."""
    return int(datetime.now(UTC).strftime("%Y%m%d"))


@pytest.mark.parametrize("which", ["fixed", "rolling"])
def test_calls(request: pytest.FixtureRequest, which: str) -> None:
    option = request.config.getoption
    given, device = option("fuzz_seed", None), option("device", None) or "cpu"
    if given is not None and which == "rolling":
        pytest.skip("one seed was given")
    seed = given if given is not None else FIXED_SEED if which == "fixed" else rolling_seed()
    calls = option("calls", None) or CALLS
    count = calls if given is not None else (calls + 1) // 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about some of what is thrown at it
        tally = run(ALL if device == "cpu" else NUMERIC, seed, option("first", None) or 0, count, device)
    print(f"seed {seed}: {summary(tally)}")
    assert not tally.findings, "\n".join([f"seed {seed}: {summary(tally)}", *map(str, tally.findings[:SHOWN])])
    if count >= CALLS // 2 and device == "cpu":
        calls_of = Counter(target for (target, _), count in tally.outcomes.items() for _ in range(count))
        targets = {target for target, count in calls_of.items() if count >= OFTEN}
        for outcome in ("right", "refused"):
            missing = sorted(t for t in targets if not tally.outcomes[t, outcome])
            assert not missing, f"never {outcome}: {', '.join(missing)}"


def summary(tally: Tally) -> str:
    kinds = {kind: sum(n for (_, k), n in tally.outcomes.items() if k == kind) for _, kind in tally.outcomes}
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return f"{tally.calls} calls of {len({t for t, _ in tally.outcomes})} functions: {counts}\n{tally.by_class()}"


def test_a_call_is_the_same_whenever_it_is_made() -> None:
    def made(number: int) -> tuple[str, list[str]]:
        draw = Draw(5, number)
        call = draw.pick(ALL)(draw)
        return call.target, [f"{s.path} {s.what}" for s in spoil_call(draw, call)]

    torch.manual_seed(1)
    first = [made(number) for number in range(40)]
    torch.manual_seed(2)
    assert [made(number) for number in reversed(range(40))] == first[::-1]


def numbers(function, check=lambda found, before, after: None, **more) -> Call:
    return Call("planted", function, {"x": torch.zeros(4), "out": torch.zeros(4)}, check, ("out",), **more)


def test_planted_faults_are_found() -> None:
    """Every kind of fault that a call can have, so that an empty list of findings means something."""
    spoiled = spoil_call(Draw(0, 0), numbers(lambda x, out: None))
    must = [type(spoiled[0])("x", "kind", None, True)]

    def raises(error: Exception, *, change: str = ""):
        def function(x: torch.Tensor, out: torch.Tensor) -> None:
            if change:
                (x if change == "x" else out).add_(1)
            raise error

        return numbers(function)

    def wrong(found: object, before: object, after: object) -> None:
        raise Wrong("another result")

    named = ValueError("x must be a tensor, got None; pass one")
    cases = [
        (raises(AttributeError("no attribute")), must, "AttributeError"),
        (raises(RuntimeError("shape")), must, "RuntimeError"),
        (raises(OverflowError("int too large")), must, "OverflowError"),
        (raises(TypeError("unhashable type")), must, "TypeError without a name"),
        (raises(ValueError("y must be a tensor, got None; pass one")), must, "another name"),
        (raises(ValueError(f"x must be short, got {'x' * 10**5}; cut it")), must, "endless message"),
        (raises(named, change="x"), must, "changed by a refused call"),
        (raises(named, change="out"), must, "changed by a refused call"),
        (raises(named), [], "refused a right call"),
        (raises(named), must, "refused"),
        (numbers(lambda x, out: None), must, "accepted nonsense"),
        (numbers(lambda x, out: x.add_(1)), [], "changed"),
        (numbers(lambda x, out: out.add_(1)), [], "right"),
        (numbers(lambda x, out: None, wrong), [], "wrong result"),
    ]
    for call, how, expected in cases:
        assert judge(call, how)[0] == expected, expected


@pytest.mark.parametrize(
    "name", ["attend", "write_kv", "topk_positions", "select_window", "compress_kv", "index_scores"]
)
def test_an_oracle_notices_one_wrong_number(name: str) -> None:
    """A bound that anything passes would not be one."""
    case = next(c for c in NUMERIC if c.__name__ == name)
    made = noticed = 0
    for number in range(80):
        call = case(Draw(23, number))
        original = call.function

        def off(original=original, call=call, **arguments):
            nonlocal made
            result = original(**arguments)
            written = [value for _, value in leaves([result, *(arguments[name] for name in call.written)])]
            changed = next((t for t in written if isinstance(t, torch.Tensor) and t.numel() and t.dim() > 1), None)
            if changed is not None and changed.element_size() == 1:
                changed = changed.view(torch.uint8)
            finite = None if changed is None else changed.isfinite().nonzero()
            if changed is not None and finite is not None and len(finite):
                made += 1
                # Half of a number's size: more than any rounding that a format does.
                where = tuple(finite[0].tolist())
                changed[where] = changed[where] ^ 64 if changed.dtype == torch.uint8 else changed[where] * 1.5 + 1
            return result

        call.function = off
        noticed += judge(call, [])[0] == "wrong result"
    assert made >= 20
    assert noticed >= 0.7 * made, f"{noticed} of {made} errors were noticed"
