"""The table of what ran under which release of vLLM, from `benchmarks/results/vllm/releases.csv`."""

from tools.docs.markdown import table
from tools.vllm_releases import RELEASES, RUNS, read


def releases() -> str:
    """A line per release, a column per kind of run."""
    found = {(row["release"], row["run"]): f"{row['result']} ({row['date']})" for row in read()}
    lines = [(release, *(found.get((release, run), "-") for run in RUNS)) for release in RELEASES]
    return table(("vLLM", *RUNS), lines, "l" * (1 + len(RUNS)))
