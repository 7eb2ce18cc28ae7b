"""The table of error bounds, from the checks of `tamis verify`."""

import torch

from tamis.lab.verify.check import Check, Target
from tamis.lab.verify.run import STAGES, stage_checks


def bounds() -> str:
    """The table: per stage the checks that must be exact, and the bounds of the others."""
    lines = ["| stage | must hold exactly | largest relative error |", "|---|---|---|"]
    for stage in STAGES:
        found = list(stage_checks(stage, Target(torch.device("cpu"), "auto", quick=True)))
        equal = [check.name for check in found if check.bound == 0]
        bounded = [f"{check.name}: {_number(check)}" for check in found if check.bound]
        lines.append(f"| `{stage}` | {'<br>'.join(equal) or '-'} | {'<br>'.join(bounded) or '-'} |")
    return "\n".join(lines)


def _number(check: Check) -> str:
    return f"{check.bound:.1e}"
