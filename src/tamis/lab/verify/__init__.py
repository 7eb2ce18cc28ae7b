"""Numeric checks of every stage on this machine, against slow float64 versions on the host.

`tamis verify` prints the results of `run_checks`; `tamis bench` calls it before it measures a time.
"""

from tamis.lab.verify.check import CheckResult, Scope
from tamis.lab.verify.run import STAGES, run_checks

__all__ = ["STAGES", "CheckResult", "Scope", "run_checks"]
