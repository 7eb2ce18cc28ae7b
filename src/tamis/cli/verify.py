"""`tamis verify`: numeric checks of every stage on this machine."""

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tamis.cli import options as shared
from tamis.cli.data import print_json, with_unit
from tamis.cli.machine import check_backend, describe_machine, let_waiting_threads_sleep, machine_line, pick_device
from tamis.cli.parser import FAILED, OK, Subcommands, add_command
from tamis.cli.progress import Progress
from tamis.cli.table import render_table

if TYPE_CHECKING:
    from tamis.lab.offline.cuda import KernelUse
    from tamis.lab.verify import CheckResult

STAGES = (
    *("rotate", "compress", "write", "gather", "select", "translate", "index", "attend", "combine"),
    *("output", "planner", "layer", "v4-layer"),
)
"""The stages of `tamis.lab.verify`, which is too heavy to import for a help text; a test compares the two."""

DETAILS = """\
Runs each stage on adversarial edge cases (page sizes from 1, empty rows, slots out of range, NaN around the selected
rows, sinks of +-inf, tile maxima from 1e-5 to 1e4, 1 to 128 heads) and compares it with a slow float64 version on the
host: bytes of writes and slots of translations must be equal, attention is bounded by relative error. The same inputs
must give the same bits ten times; a request must give the same bits alone and in a batch; a captured CUDA graph
replayed with other inputs must give the bits of an eager call.

CUDA C++ kernels are listed with their registers, stack and shared memory; a kernel that spills registers to the stack,
needs more shared memory than a CTA may have, or overwrites registers of matrix products that still run, which an
assembler may get wrong, fails. Without a GPU they are compiled only for this check, and not with --quick.

A check that cannot apply here is shown with its reason. Exits with 1 if a check fails, or if none applies."""

EXAMPLES = """\
tamis verify --quick --stage attend
tamis verify --quick --json
tamis verify --device cuda --backend triton"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "verify",
        run,
        summary="Check the numbers of every stage on this machine",
        details=DETAILS,
        example=EXAMPLES,
    )
    shared.add_device(parser)
    shared.add_backend(parser)
    parser.add_argument(
        "--stage",
        action="extend",
        nargs="+",
        choices=STAGES,
        metavar="NAME",
        help=f"check only these of {', '.join(STAGES)}",
    )
    parser.add_argument("--quick", action="store_true", help="check fewer shapes: seconds instead of a minute on a CPU")


def run(options: argparse.Namespace) -> int:
    """Check, and print the table or the JSON object."""
    let_waiting_threads_sleep()
    device = pick_device(options.device)
    check_backend(options.backend, device)
    from tamis.lab.verify import run_checks

    with Progress("cases", "preparing the checks") as progress:
        results = run_checks(device, options.backend, options.stage, options.quick, progress.update)
    machine = describe_machine(device)
    passed = verdict(results)
    kernels = [kernel for result in results for kernel in result.kernels]
    if options.json:
        data = {"machine": machine, "checks": [as_data(r) for r in results]}
        print_json("verify", passed, data | {"kernels": [_kernel_data(kernel) for kernel in kernels]})
    else:
        print(machine_line(machine), end="\n\n")
        print(results_table(results), end="\n\n")
        if kernels:
            print(kernels_table(kernels), end="\n\n")
        print(conclusion(results))
    return OK if passed else FAILED


def verdict(results: "list[CheckResult]") -> bool:
    """Whether something was checked and nothing failed."""
    return all(r.ok for r in results) and any(r.state == "ok" for r in results)


def as_data(result: "CheckResult") -> dict[str, Any]:
    """A result as plain data, without kernels, which are listed apart."""
    data = asdict(result)
    del data["kernels"]
    return data


def _kernel_data(kernel: "KernelUse") -> dict[str, Any]:
    return with_unit(asdict(kernel), "bytes", "stack", "shared", "shared_limit")


def results_table(results: "list[CheckResult]") -> str:
    """One line per check."""
    rows = []
    for r in results:
        worst = "-" if r.error is None else "0" if r.error == 0 else f"{r.error:.1e}"
        bound = "equal" if r.bound == 0 else f"{r.bound:.1e}"
        rows.append((r.stage, r.check, r.backend, r.cases, worst, bound, r.state, r.note))
    header = ("stage", "check", "backend", "cases", "worst error", "bound", "result", "why")
    return render_table(header, rows, "lllrrrll")


def kernels_table(kernels: "list[KernelUse]") -> str:
    """One line per kernel in CUDA C++."""
    header = ("CUDA C++ kernel", "target", "registers", "stack bytes", "shared bytes,\nstatic", "dynamic", "limit")
    rows = [
        (
            f"{k.program}: {k.function}",
            *(k.target, k.registers, k.stack),
            *(k.static_shared, k.dynamic_shared, k.shared_limit),
        )
        for k in kernels
    ]
    return render_table(header, rows, "llrrrrr")


def conclusion(results: "list[CheckResult]") -> str:
    """One line for all checks together."""
    failed = [r for r in results if not r.ok]
    ran = [r for r in results if r.state != "not applicable"]
    cases = sum(r.cases for r in ran)
    if failed:
        return f"FAILED: {len(failed)} of {len(ran)} checks"
    if not ran:
        return "FAILED: no check applies to this backend on this device"
    return f"ok: {len(ran)} checks, {cases} cases; {len(results) - len(ran)} do not apply"
