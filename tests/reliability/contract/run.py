"""Call number i of a seed: made, judged, and reported in one line from which it can be made again."""

import contextlib
import re
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

from torch import Tensor

from contract.calls import Call, Wrong, changes, copied, leaves
from contract.draw import Draw
from contract.mutate import Spoiled, spoil

Case = Callable[[Draw], Call]
_REFUSAL = re.compile(
    r"(?P<name>.*?) must be .*, got |(no )?backend .*can(not)? run this (?P<layer>layer) on ", re.DOTALL
)
LONGEST_MESSAGE = 2000


@dataclass
class Finding:
    """One call that broke the contract."""

    kind: str
    number: int
    seed: int
    target: str
    text: str

    def __str__(self) -> str:
        options = f"--fuzz-seed {self.seed} --first {self.number} --calls 1"
        again = f"pytest tests/reliability/test_contract.py -k calls {options}"
        return f"[{self.kind}] {self.target}: {self.text}\n    {again}"


@dataclass
class Tally:
    """What happened in a run."""

    calls: int = 0
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(target, "right" | "accepted" | "refused" | "found")"""
    findings: list[Finding] = field(default_factory=list)

    def by_class(self) -> str:
        kinds = Counter((f.kind, f.target) for f in self.findings)
        return "\n".join(f"{count:6} {kind}: {target}" for (kind, target), count in kinds.most_common())


def run(cases: Sequence[Case], seed: int, first: int, count: int, device: str = "cpu") -> Tally:
    """Calls `first` to `first + count - 1` of a seed. On a device only calls that are right, since checks see no values
    there."""
    tally = Tally()
    for number in range(first, first + count):
        draw = Draw(seed, number, device)
        case = draw.pick(cases)
        call = case(draw)
        spoiled = spoil_call(draw, call) if device == "cpu" and draw.chance(0.6) else []
        kind, text = judge(call, spoiled)
        tally.calls += 1
        tally.outcomes[call.target, kind if kind in ("right", "accepted", "refused") else "found"] += 1
        if text:
            how = ", ".join(f"{s.path} <- {s.what} {shown(s.value)}" for s in spoiled)
            tally.findings.append(Finding(kind, number, seed, call.target, f"{text} ({how or 'nothing spoiled'})"))
    return tally


def spoil_call(draw: Draw, call: Call) -> list[Spoiled]:
    """Spoil a call. Records that check themselves when they are made are not spoiled inside: there is a case that makes
    them."""
    for _ in range(4):
        arguments = call.arguments
        try:
            return spoil(draw, call)
        except (ValueError, TypeError):
            call.arguments = arguments
    return []


def judge(call: Call, spoiled: list[Spoiled]) -> tuple[str, str]:
    """The kind of outcome, and for a finding what is wrong."""
    before = copied(call.arguments)
    try:
        result = call.function(**call.arguments)
    except (ValueError, TypeError) as error:
        return _judge_refusal(call, spoiled, before, error)
    except Exception as error:
        if "can't allocate memory" in str(error):
            return "refused", ""  # more than the machine has: torch says so before anything is written
        place = traceback.extract_tb(error.__traceback__)[-1]
        return type(error).__name__, f"{str(error)[:200]!r} at {place.name}:{place.lineno}"
    if any(s.what == "meta" for s in spoiled) and all(t.device.type == "meta" for t in _tensors(result)):
        return "accepted", ""  # a function of one tensor works on tensors without values, too
    must = [s for s in spoiled if s.must_refuse]
    if must:
        return "accepted nonsense", f"{must[0].path} was accepted"
    changed = [path for path in changes(before, call.arguments) if not _written(call, path)]
    if changed:
        return "changed", f"{', '.join(changed)} changed in a call that should only read it"
    if spoiled and call.free:
        return "accepted", ""
    try:
        call.check(result, before, call.arguments)
    except Wrong as wrong:
        return "wrong result", str(wrong)
    except Exception as error:
        if not spoiled:
            raise
        return "accepted nonsense", f"the oracle cannot follow: {type(error).__name__} {str(error)[:200]!r}"
    return ("accepted" if spoiled else "right"), ""


def _judge_refusal(call: Call, spoiled: list[Spoiled], before: dict[str, Any], error: Exception) -> tuple[str, str]:
    text = str(error)
    if not spoiled:
        return "refused a right call", text[:300]
    changed = changes(before, call.arguments)
    if changed:
        return "changed by a refused call", ", ".join(changed)
    found = _REFUSAL.match(text)
    if found is None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} without a name", f"{text[:200]!r} at {place.name}:{place.lineno}"
    words = set(re.findall(r"[A-Za-z_0-9]+", found["name"] or ""))
    if found["layer"] is None and not words & known_names(call):
        return "another name", f"{text[:200]!r} names no argument"
    if len(text) > LONGEST_MESSAGE:
        return "endless message", f"{len(text)} characters: {text[:100]!r}"
    return "refused", ""


def known_names(call: Call) -> set[str]:
    """Names that a refusal may speak of: arguments and the fields of what was passed."""
    names = set(call.arguments) | set(call.names)
    with contextlib.suppress(TypeError, ValueError):
        names |= set(signature(call.function).parameters)
    for path, _ in leaves(call.arguments):
        names |= set(re.findall(r"[A-Za-z_0-9]+", path))
    return names


def _written(call: Call, path: str) -> bool:
    return any(path == name or path.startswith((f"{name}.", f"{name}[")) for name in call.written)


def _tensors(result: Any) -> list[Tensor]:
    return [value for _, value in leaves(result) if isinstance(value, Tensor)]


def shown(value: Any) -> str:
    """A short form of a spoiled value."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)} {value.layout} {value.device}".replace("torch.", "")
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        text = "an int of very many digits"
    return text if len(text) < 60 else text[:57] + "..."
