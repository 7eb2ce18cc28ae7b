"""`python -m tools.lock`: write requirements-lock.txt, the development environment with hashes.

Versions are those of the running environment, which `make setup` made from constraints.txt; hashes come from the
package index, for each platform. torch is left out: development uses its CPU build, which comes from another index and
is pinned in constraints.txt.
"""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

LOCK = Path(__file__).parents[1] / "requirements-lock.txt"
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_28_aarch64")
OLDER = ("manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014", "manylinux_2_5")
LEFT_OUT = {"torch", "tamis", "pip"}
HEAD = """\
# The development environment with hashes, for x86-64 and arm64. Written by `make lock`; see CONTRIBUTING.md.
# torch is apart: its build for CPUs is pinned in constraints.txt. To install:
#   pip install -c constraints.txt torch
#   pip install --no-deps --require-hashes -r requirements-lock.txt
#   pip install --no-deps --no-build-isolation -e .
"""


def installed() -> dict[str, str]:
    """Names and versions of the installed packages, in alphabetical order."""
    found = {str(one.metadata["Name"]).lower().replace("_", "-"): one.version for one in metadata.distributions()}
    return {name: found[name] for name in sorted(found) if name not in LEFT_OUT}


def hashes(wanted: dict[str, str], platform: str) -> dict[str, str]:
    """The hash of each package's file for a platform, from the index; nothing is installed."""
    machine = platform.removeprefix("manylinux_2_28_")
    tags = [platform, *(f"{older}_{machine}" for older in OLDER)]
    version = ".".join(str(number) for number in sys.version_info[:3])
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed"]
    command += ["--only-binary=:all:", "--target", "nowhere", "--python-version", version, "--report", "-"]
    command += [word for tag in tags for word in ("--platform", tag)]
    command += [f"{name}=={number}" for name, number in wanted.items()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return {
        str(one["metadata"]["name"]).lower().replace("_", "-"): one["download_info"]["archive_info"]["hashes"]["sha256"]
        for one in report["install"]
    }


def lock(wanted: dict[str, str], found: list[dict[str, str]]) -> str:
    """The file's text."""
    lines = [HEAD]
    for name, number in wanted.items():
        known = sorted({one[name] for one in found})
        lines.append(" \\\n".join([f"{name}=={number}", *(f"    --hash=sha256:{digest}" for digest in known)]) + "\n")
    return "".join(lines)


if __name__ == "__main__":
    packages = installed()
    LOCK.write_text(lock(packages, [hashes(packages, platform) for platform in PLATFORMS]), encoding="utf-8")
    print(LOCK.name)
