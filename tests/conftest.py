"""Settings of all tests: uninitialised memory is NaN, random numbers repeat, and options choose their seed and the
number of threads."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import on_host
import pytest
import torch
from seeds import choose_run, reseed


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--seed` changes random inputs, `--threads` the order of sums; two options watch emulated kernels for races."""
    parser.addoption("--seed", type=int, default=0, help="what all random inputs are drawn from (0)")
    parser.addoption("--threads", type=int, default=1, help="threads of torch in each process (1)")
    parser.addoption("--races", action="store_true", help="emulated kernels report races in shared memory (slow)")
    strict = "as --races, and wgmma may read what cp.async has copied behind a fence of proxies only, as PTX says"
    parser.addoption("--strict-races", action="store_true", help=strict)


def pytest_configure(config: pytest.Config) -> None:
    """Set the seeds before test modules are imported, since some draw inputs at import; Hypothesis gets a seed too."""
    choose_run(config.getoption("--seed"))
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(config.getoption("--seed"))
    if find_spec("hypothesis"):  # the environment with vLLM has none
        from hypothesis import HealthCheck, settings

        # Examples may be slow, because the machine may be busy.
        settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("unhurried")


def pytest_report_header(config: pytest.Config) -> str:
    """The options that repeat this run."""
    capability = torch.backends.cpu.get_cpu_capability()
    return f"seed {config.getoption('--seed')}, {config.getoption('--threads')} threads, torch's code for {capability}"


pytest_plugins = ("settings",)  # --under


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[Any]:
    """Skip test modules that import Triton where there is none: it has wheels for Linux only."""
    report = yield
    raised = report.call.excinfo
    cause = raised.value.__cause__ if raised else None
    if isinstance(cause, ModuleNotFoundError) and cause.name == "triton":
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, "Skipped: needs Triton, which is not installed")
    return report


@pytest.fixture(autouse=True)
def poisoned_memory(pytestconfig: pytest.Config) -> Iterator[None]:
    """Fill `torch.empty` with NaN, so that an unwritten value cannot pass a test by luck."""
    reseed(0)
    torch.set_num_threads(pytestconfig.getoption("--threads"))  # one: tests run in parallel processes already
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the longest tests first, so that no process is left with one at the end while the others are idle.

    Without a GPU, what needs one is skipped, unless an expression of markers asks for it: `-m gpu` then fails.
    """
    items.sort(key=lambda item: item.path.name != "test_offline.py")
    if not config.option.markexpr and not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu") is not None:
                item.add_marker(pytest.mark.skip(reason="needs a GPU"))


@pytest.fixture(scope="session")
def host_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which kernels for the host are compiled; all processes of a run share it."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    base = tmp_path_factory.getbasetemp()
    name = on_host.FINDING_RACES if request.config.getoption("--races") else "on_host"
    name = on_host.STRICTLY if request.config.getoption("--strict-races") else name
    folder = (base.parent if hasattr(request.config, "workerinput") else base) / name
    folder.mkdir(exist_ok=True)
    return folder
