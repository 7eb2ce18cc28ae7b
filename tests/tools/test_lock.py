"""requirements-lock.txt: the versions of constraints.txt, each with hashes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_lock_has_every_constraint_with_hashes() -> None:
    text = (ROOT / "requirements-lock.txt").read_text()
    locked = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", text, flags=re.M))
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.M))
    del pinned["torch"]  # which comes from another place
    assert {name: locked.get(name) for name in pinned} == pinned, "run `make lock`"
    for entry in re.split(r"\n(?=[\w.-]+==)", text)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), entry
    # Compiled packages have a file for each platform.
    (numpy,) = re.findall(r"^numpy==.*?\n(?=\S)", text, flags=re.M | re.S)
    assert numpy.count("--hash") == 2


# What the metadata of torch's wheels on the package index ask for. The build for CPUs that CI installs asks for none,
# so that a pin of another Triton would go unseen here, and `make setup` would fail wherever pip has the index alone.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-vllm.txt", "constraints-sglang.txt"])
def test_torch_and_triton_can_be_installed_together(name: str) -> None:
    pinned = dict(re.findall(r"^(torch|triton)==(\S+)$", (ROOT / name).read_text(), flags=re.M))
    assert pinned["triton"] == TRITON_OF_TORCH[pinned["torch"]]


def test_the_lock_is_written_from_what_the_index_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT)
    from tools.lock import HEAD, lock

    found = [{"a": "1" * 64, "b": "2" * 64}, {"a": "1" * 64, "b": "3" * 64}]
    expected = f"a==1.0 \\\n    --hash=sha256:{'1' * 64}\nb==2 \\\n    --hash=sha256:{'2' * 64} \\\n"
    assert lock({"a": "1.0", "b": "2"}, found) == f"{HEAD}{expected}    --hash=sha256:{'3' * 64}\n"
