"""Tests of the CUDA C++ kernels: where those that run on the host are compiled."""

import shutil
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def host_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of a run share."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / "on_host"
    folder.mkdir(exist_ok=True)
    return folder
