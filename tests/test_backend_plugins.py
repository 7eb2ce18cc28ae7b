"""Backends of other packages: found by their entry points, checked, ordered, chosen, run, and refused when broken.

The good one is the package that docs/extending.md shows, written to a folder as pip would install it.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tamis import LayerSpec, backends, choose
from tamis.backends import backend_for_stage, registered
from tamis.cli import main
from tamis.lab.verify import CheckResult, run_checks
from tamis.lab.verify.attend import attend_checks
from tamis.lab.verify.check import Target, judge
from tamis.ops import combine_parts, library
from tamis.ops.combine import Partials

PAGE = (Path(__file__).parents[1] / "docs/extending.md").read_text()
FILES = dict(re.findall(r"^```(?:python|toml)\n# (\S+)\n(.*?)^```$", PAGE, flags=re.M | re.S))
"""The files of the page's package, by name."""
CPU = torch.device("cpu")
SPEC = LayerSpec(heads=4, topk=8)

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install packages into a folder on the path, and forget the backends before and after."""
    monkeypatch.syspath_prepend(tmp_path)
    loaded = set(sys.modules)
    forget = (backends._loaded.cache_clear, library._module.cache_clear)

    def put(project: str, entries: dict[str, str], files: dict[str, str]) -> None:
        points = "".join(f"{name} = {value}\n" for name, value in entries.items())
        info = f"{project.replace('-', '_')}-0.1.dist-info"
        files = files | {f"{info}/entry_points.txt": f"[tamis.backends]\n{points}"}
        files |= {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {project}\nVersion: 0.1\n"}
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        for clear in forget:
            clear()

    yield put
    for clear in forget:
        clear()
    for name in set(sys.modules) - loaded:
        if name.startswith(("toy_", "other_", "broken_")):
            del sys.modules[name]


def install_toy(install: Install, **changes: object) -> None:
    """The page's package, with other values of some fields of its backend."""
    declared = tomllib.loads(FILES["pyproject.toml"])["project"]
    added = "".join(f"    {name}={value!r},\n" for name, value in changes.items())
    modules = {name: text for name, text in FILES.items() if name.endswith(".py")}
    modules["toy_kernels/__init__.py"] = modules["toy_kernels/__init__.py"].removesuffix(")\n") + added + ")\n"
    install(declared["name"], declared["entry-points"]["tamis.backends"], modules)


def test_an_installed_backend_runs_its_stage_and_leaves_the_others_to_its_base(install: Install) -> None:
    install_toy(install)
    assert "toy_kernels" not in sys.modules  # nothing has looked a backend up yet
    assert [b.name for b in registered().backends] == ["hopper", "triton", "reference", "toy"]
    assert backend_for_stage("combine", "toy", "cpu").name == "toy"
    assert backend_for_stage("attend", "toy", "cpu").name == "reference"
    assert backend_for_stage("combine", "auto", "cpu").name == "reference"
    parts, lses = torch.tensor([[[[1.0]]], [[[4.0]]]]), torch.tensor([[[0.0]], [[2.0]]]).log()
    found = combine_parts(Partials(parts, lses, lses), backend="toy")
    assert found.out.item() == 4.0
    choice = choose(SPEC, "cpu", prefer="toy")
    told = choice.explain().splitlines()
    assert told[0] == "toy: chosen (merges split-KV results in plain torch)"
    assert "  combine: toy" in told
    assert "  attend: reference" in told
    assert choose(SPEC, "cpu").passed_over == ("toy",)


def test_an_installed_backend_is_verified_like_the_built_in_ones(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install_toy(install)
    results = run_checks("cpu", "toy", ["combine"], quick=True)
    assert {r.backend for r in results} == {"toy"}
    assert {r.state for r in results} <= {"ok", "not applicable"}, results
    assert sum(r.cases for r in results) > 0
    # The checks see the package's own function: with a mistake in it they fail.
    sys.modules["toy_kernels.combine"].combine_parts = lambda call: call.out.zero_().sum((2,), dtype=torch.float32)
    assert any(r.state == "FAILED" for r in run_checks("cpu", "toy", ["combine"], quick=True))
    assert main(["backends", "--device", "cpu"]) == 0
    assert "toy" in capsys.readouterr().out


def test_a_stage_without_one_of_its_functions_is_refused_by_name(install: Install) -> None:
    install_toy(install)
    assert registered()
    __import__("toy_kernels.combine")
    del sys.modules["toy_kernels.combine"].combine_parts
    parts, lses = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1)
    with pytest.raises(NotImplementedError, match=r"toy_kernels.combine has no function combine_parts; every"):
        combine_parts(Partials(parts, lses, lses), backend="toy")


def test_a_backend_may_ask_to_be_preferred_and_order_follows_names(install: Install) -> None:
    install_toy(install, before="reference")
    plain = 'from tamis.backends import Backend\nB = Backend("a-other", "other_{stage}", "", stages=("combine",), '
    module = {"other_combine.py": ""}
    install("other", {"a-other": "other_one:B"}, {"other_one.py": plain + 'before="reference")\n'} | module)
    assert [b.name for b in registered().backends] == ["hopper", "triton", "a-other", "toy", "reference"]
    assert backend_for_stage("combine", "auto", "cpu").name == "a-other"
    assert choose(SPEC, "cpu").name == "a-other"


DECLARED = "from tamis.backends import Backend\nB = Backend({})\n"
BROKEN = {
    "absent": ("", "ModuleNotFoundError: No module named 'broken_absent"),
    "raises": ("raise RuntimeError('no\\nlicence')", "loading broken_raises:B failed: RuntimeError: no licence"),
    "leaves": ("raise SystemExit(3)", "SystemExit: 3"),
    "another": ("B = 3", "broken_another:B is a int, not a tamis.backends.Backend"),
    "triton": (DECLARED.format("'triton', 'x.{stage}', ''"), "the name 'triton' belongs to tamis"),
    "auto": (DECLARED.format("'auto', 'x.{stage}', ''"), "the name 'auto' belongs to tamis"),
    "renamed": (DECLARED.format("'named', 'x.{stage}', ''"), "is named 'renamed', but the backend 'named'"),
    "based": (DECLARED.format("'based', 'x.{stage}', '', base='cpu'"), "base must be one of hopper, triton, reference"),
    "sorted": (DECLARED.format("'sorted', 'x.{stage}', '', before='toy'"), "before must be one of hopper, triton"),
    "staged": (DECLARED.format("'staged', 'x.{stage}', '', stages=('sum',)"), "stages must be some of rotate, "),
    "trained": (
        DECLARED.format("'trained', 'x.{stage}', '', trains=('attend',)"),
        "trains must be some of attend_rows",
    ),
    "short": (DECLARED.format("'short', 'broken_short', ''"), "module must be a full name with {stage}"),
    "bare": (DECLARED.format("'bare', 'broken_{stage}', '', stages=('index',)"), "there is no module broken_index"),
}


def test_broken_backends_are_reported_and_refused_and_break_nothing(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install_toy(install)
    for name, (text, _) in BROKEN.items():
        files = {} if name == "absent" else {f"broken_{name}.py": text}
        install(f"broken-{name}", {name: f"broken_{name}:B"}, files)
    install("broken-twin", {"raises": "broken_raises:C"}, {})
    found = {one.label: one.reason for one in registered().broken}
    for name, (_, reason) in BROKEN.items():
        if name != "raises":
            assert reason in found[f"{name} (broken-{name} 0.1)"]
    twins = [found[f"raises (broken-{name} 0.1)"] for name in ("raises", "twin")]
    assert set(twins) == {
        "2 entry points of the group tamis.backends have this name; uninstall all packages but one of them"
    }
    assert [b.name for b in registered().backends] == ["hopper", "triton", "reference", "toy"]
    # What is in order goes on, and the explanation has every reason.
    choice = choose(SPEC, "cpu")
    assert choice.name == "reference"
    assert "another (broken-another 0.1): rejected: broken_another:B is a int" in choice.explain()
    wanted = r"^backend 'another' of broken-another 0.1 cannot be used: broken_another:B is a int, not"
    refused: list[Callable[[], object]] = [
        lambda: choose(SPEC, "cpu", prefer="another"),
        lambda: backend_for_stage("combine", "another", "cpu"),
        lambda: run_checks("cpu", "another", ["combine"]),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=wanted):
            call()
    with pytest.raises(ValueError, match="backend 'triton' cannot run this layer on cpu: needs a cuda device"):
        choose(SPEC, "cpu", prefer="triton")
    capsys.readouterr()
    assert main(["verify", "--device", "cpu", "--backend", "another"]) == 2
    assert "backend 'another' of broken-another 0.1 cannot be used" in capsys.readouterr().err
    assert main(["backends", "--device", "cpu", "--json"]) == 0
    text = capsys.readouterr().out
    assert '"another (broken-another 0.1)"' in text
    assert '"broken"' in text


def test_the_error_of_a_backend_is_told_once_and_in_full(install: Install) -> None:
    install("broken-raises", {"raises": "broken_raises:B"}, {"broken_raises.py": BROKEN["raises"][0]})
    (one,) = registered().broken
    assert one.reason == "loading broken_raises:B failed: RuntimeError: no licence"


def alone() -> CheckResult:
    """The check of batch invariance alone, on the first of its cases."""
    (check,) = [
        c for c in attend_checks(Target(CPU, "other", quick=True)) if c.name == "same bits alone and in a batch"
    ]
    return judge(replace(check, trials=check.trials[:1]), "other", lambda: None)


def test_a_bitwise_failure_says_how_to_declare_it(install: Install) -> None:
    """An attention whose last bits follow the size of the batch fails where it declares otherwise, and only there."""
    module = (
        "from tamis.ops.attention import reference\n"
        "attend_slots = reference.attend_slots\n"
        "def attend(call):\n"
        "    result = reference.attend(call)\n"
        "    call.out.mul_(1 + 2**-7 * (call.out.shape[0] > 1))\n"
        "    return result\n"
    )
    declared = "from tamis.backends import Backend\nB = Backend('other', 'other_{{stage}}', '', stages=('attend',), "
    limits = "base='reference', heads=(8, 16){})\n"
    files = {"other_attend.py": module, "other_one.py": (declared + limits).format("")}
    install("other", {"other": "other_one:B"}, files)
    failed = alone()
    assert failed.state == "FAILED"
    advice = "a backend whose bits may depend on the batch declares Backend(batch_invariant=False), "
    assert failed.note.endswith(f"; {advice}and this check is left out")
    del sys.modules["other_one"]
    install("other", {"other": "other_one:B"}, {"other_one.py": (declared + limits).format(", batch_invariant=False")})
    left_out = alone()
    assert left_out.state == "not applicable"
    assert left_out.note == "other does not claim that a request's bits are independent of its batch"
