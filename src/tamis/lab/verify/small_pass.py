"""Runs one small case of every check and every kernel on a GPU, for tools that slow a program down a hundredfold:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m tamis.lab.verify.small_pass
    compute-sanitizer --tool racecheck python -m tamis.lab.verify.small_pass attend index

Arguments restrict it to the named stages. Checks that compare runs with each other are left out, since the tools
examine each launch; so are captured graphs, which need the caching allocator that hides short overruns from memcheck.
"""

import sys

import torch

from tamis.lab.verify.check import Target
from tamis.lab.verify.run import STAGES, stage_checks


def main(stages: list[str]) -> int:
    """Run the first case of each check; 1 if one was wrong."""
    unknown = set(stages) - set(STAGES)
    if unknown or not torch.cuda.is_available():
        what = f"unknown stages: {', '.join(sorted(unknown))}" if unknown else "there is no GPU"
        print(f"{what}; usage: python -m tamis.lab.verify.small_pass [STAGE...]", file=sys.stderr)
        return 2
    target, wrong = Target(torch.device("cuda"), quick=True), 0
    for stage in stages or STAGES:
        for check in stage_checks(stage, target):
            if not check.trials or "runs" in check.name or "graph" in check.name:
                continue
            # Kernels differ by the number of heads and tokens.
            others = [(name, trial) for name, trial in check.trials[1:] if "heads" in name or "130 tokens" in name]
            for name, trial in [*check.trials[:1], *others]:
                found = trial()
                torch.cuda.synchronize()
                ok = found.error <= check.bound
                wrong += not ok
                print(f"{'ok' if ok else 'WRONG':6} {stage:10} {check.name}, {name}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
