"""What `tamis verify` holds every stage to, from its checks."""

import torch

from tamis.lab.verify.check import Check, Target
from tamis.lab.verify.run import STAGES, stage_checks


def bounds() -> str:
    """Per stage: what must hold exactly, and how far the rest may be off."""
    lines = ["| stage | must hold exactly | largest relative error |", "|---|---|---|"]
    for stage in STAGES:
        found = list(stage_checks(stage, Target(torch.device("cpu"), "auto", quick=True)))
        equal = [check.name for check in found if check.bound == 0]
        bounded = [f"{check.name}: {_number(check)}" for check in found if check.bound]
        lines.append(f"| `{stage}` | {'<br>'.join(equal) or '-'} | {'<br>'.join(bounded) or '-'} |")
    return "\n".join(lines)


def _number(check: Check) -> str:
    return f"{check.bound:.1e}"
