"""Numeric checks of every stage on this machine, against slow float64 versions on the host.

`run_checks` is what `tamis verify` prints and what `tamis bench` asks before it shows a time.
"""

from tamis.lab.verify.check import CheckResult, Scope
from tamis.lab.verify.run import STAGES, run_checks

__all__ = ["STAGES", "CheckResult", "Scope", "run_checks"]
