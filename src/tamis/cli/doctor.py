"""`tamis doctor`: shows what is installed, which backend runs, and what to install for the others."""

import argparse
import ctypes
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import Any

from tamis._extras import install_command
from tamis._version import __version__
from tamis.cli.backends import judge
from tamis.cli.data import print_json
from tamis.cli.parser import FAILED, OK, Subcommands, add_command
from tamis.cli.progress import waiting
from tamis.cli.table import render_table
from tamis.cli.text import one_line
from tamis.cli.versions import minimums, older

DETAILS = """\
Reports Python, torch, Triton, the GPU and its driver, optional packages, and which backend would run a DeepSeek-V3.2
layer and a DeepSeek-V4 layer here, with every reason against the others. vLLM and SGLang are imported, each in a
process of its own, and judged as the plugins would judge them; for SGLang, also whether it would load the plugin.
Nothing is changed or fetched.

Exits with 1 if something required is missing or too old, if no backend can run those layers, or if the machine has a
GPU that torch cannot use. Optional packages that are missing are named with what they are for."""

EXAMPLES = """\
tamis doctor
tamis doctor --json"""

PURPOSES = {
    "torch": ("required", "everything"),
    "numpy": ("required", "planning"),
    "packaging": ("required", "versions of packages"),
    "platformdirs": ("required", "the folder of compiled kernels"),
    "rich": ("required", "tables and progress"),
    "shtab": ("required", "`tamis completion`"),
    "triton": ("for GPUs", "portable kernels"),
    "transformers": ("optional", "Hugging Face models, `tamis generate`, `tamis inspect`"),
    "vllm": ("optional", "serving with vLLM"),
    "sglang": ("optional", "serving with SGLang"),
    "matplotlib": ("optional", "`tamis bench --report`"),
}
"""Packages, whether they are required, and their purpose."""

EXTRAS = {"transformers": "transformers", "vllm": "vllm", "sglang": "sglang", "matplotlib": "report"}
"""Packages of extras, and the extras' names."""
ENGINE_SECONDS = 120
SGLANG_GROUP, SGLANG_PLUGIN = "sglang.srt.plugins", "tamis.integrations.sglang:register"
"""The group of entry points in which SGLang looks for plugins, and ours."""
LAYERS = {"DeepSeek-V3.2": (128, "v32-fp8", 2048), "DeepSeek-V4": (64, "v4-fp8", 512)}
"""Heads, cache format and top-k of the layers whose backend is shown."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    name: str
    found: str
    """A version or a description; "-" if nothing was found."""
    state: str
    """ok; missing, too old, refused, broken, left out or not kept for optional things; WRONG for required things,
    and for those that are present but unusable."""
    advice: str = ""
    """Its purpose and what to do, if something should be done."""


@dataclass(frozen=True)
class Gpu:
    """What torch and the driver report about GPUs."""

    built_for: str | None
    """CUDA version of torch's build, "HIP x.y" for AMD, None for a CPU build."""
    usable: str | None
    """Name of the GPU that torch can use."""
    driver: str | None
    """Version of the driver."""
    driver_cuda: tuple[int, int] | None
    """The newest CUDA that the driver can run."""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    add_command(
        subcommands,
        "doctor",
        run,
        summary="Report what is installed, which backend runs and why, and what to install for what is missing",
        details=DETAILS,
        example=EXAMPLES,
    )


def run(options: argparse.Namespace) -> int:
    """Examine the machine, and print the tables or the JSON object."""
    with waiting("checking environment"):
        findings = [_python(), Finding("tamis", __version__, "ok"), *_packages()]
        choices: dict[str, list[dict[str, Any]]] = {}
        if _imports("torch", findings):
            gpu = look_at_gpu()
            findings = [_needed_by(gpu, finding) for finding in findings]
            findings += [judge_gpu(gpu), *_kernels(findings)]
            choices = _choices()
    findings += [
        Finding(f"backend for {layer}", "none", "WRONG", "see the reasons below")
        for layer, verdicts in choices.items()
        if all(v["state"] != "chosen" for v in verdicts)
    ]
    usable = all(finding.state != "WRONG" for finding in findings)
    if options.json:
        print_json("doctor", usable, {"findings": [asdict(f) for f in findings], "choices": choices})
    else:
        _print_report(findings, choices, usable)
    return OK if usable else FAILED


def _print_report(findings: list[Finding], choices: dict[str, list[dict[str, Any]]], usable: bool) -> None:
    print(_findings_table(findings), end="\n\n")
    for layer, verdicts in choices.items():
        heads, layout, topk = LAYERS[layer]
        print(f"{layer} layer: {heads} heads, {layout} pages of 64, top-k {topk}")
        for v in verdicts:
            why = {"chosen": v["summary"], "possible": "another one is preferred"}
            print(f"  {v['name']}: {v['state']}: {why.get(v['state']) or '; '.join(v['reasons'])}")
        print()
    wrong = [f.name for f in findings if f.state == "WRONG"]
    if not usable:
        print(f"FAILED: tamis is not usable here: {', '.join(wrong)}")
        return
    chosen = dict.fromkeys(v["name"] for verdicts in choices.values() for v in verdicts if v["state"] == "chosen")
    gpu = any(f.name == "GPU" and f.found != "none" for f in findings)
    print(f"OK: tamis is ready (backend: {', '.join(chosen) or 'none'}{'' if gpu else ', CPU only'})")


def _findings_table(findings: list[Finding]) -> str:
    """The findings as a table, or as plain lines if what draws tables is missing: that is a finding as well."""
    rows = [_cells(finding) for finding in findings]
    try:
        return render_table(("what", "found", "state", "what to do"), rows)
    except ImportError:
        return "\n".join(one_line("  ".join(row)) for row in rows)


def _cells(finding: Finding) -> tuple[str, ...]:
    return finding.name, finding.found, finding.state, finding.advice or "-"


def _python() -> Finding:
    return judge_version("Python", platform.python_version(), minimums().get("python"), "required", "everything", "")


def _packages() -> list[Finding]:
    lowest, found = minimums(), []
    for name, (need, purpose) in PURPOSES.items():
        if name == "triton" and sys.platform != "linux":
            continue
        if name in ("vllm", "sglang") and _is_package(name):
            told = _import_engine(name)
            found += [judge_vllm(*told)] if name == "vllm" else [judge_sglang(*told), _sglang_plugin()]
            continue
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        install = install_command(EXTRAS[name]) if name in EXTRAS else f"pip install '{_at_least(name, lowest)}'"
        found.append(judge_version(name, version, lowest.get(name), need, purpose, install))
    return found


def _at_least(name: str, lowest: dict[str, str]) -> str:
    """A requirement that a package which is too old does not fulfil, so that pip replaces it."""
    return f"{name}>={lowest[name]}" if name in lowest else name


def judge_version(
    name: str, version: str | None, minimum: str | None, need: str, purpose: str, install: str
) -> Finding:
    """The finding for a package's version, or its absence."""
    if version is None:
        state = "WRONG" if need == "required" else "missing"
        return Finding(name, "-", state, f"{need}, for {purpose}: {install}")
    if minimum is not None and older(version, minimum):
        state = "WRONG" if need == "required" else "too old"
        return Finding(name, version, state, f"{minimum} or newer is needed for {purpose}: {install or 'upgrade'}")
    return Finding(name, version, "ok")


def _is_package(name: str) -> bool:
    """Whether a package of this name is on the path. A folder of that name without a module, as a checkout has, is
    none."""
    # `importlib.util.find_spec` would ask `sys.modules` first, where such a folder may be already.
    specs = (finder.find_spec(name, None) for finder in sys.meta_path)
    return any(spec is not None and spec.origin is not None for spec in specs)


def _import_engine(package: str) -> tuple[str | None, str]:
    """The version that an engine reports when it is imported, or None, and the error.

    Package metadata may belong to another installation, or to one that cannot be imported. The engine is imported in a
    separate process, since it loads libraries that may crash and affects later imports.
    """
    command = [sys.executable, "-c", f"from {package}.version import __version__; print('the engine is', __version__)"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ENGINE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    told = re.search(r"^the engine is (\S+)$", done.stdout, flags=re.M)
    if told is not None and done.returncode == 0:
        return told[1], ""
    return None, (done.stderr.strip().splitlines() or [f"it ended with status {done.returncode}"])[-1]


def judge_vllm(version: str | None, error: str) -> Finding:
    """Whether the plugin supports the installed vLLM; if not, it refuses to run under `--attention-backend CUSTOM`."""
    from tamis.integrations.vllm.versions import version_refusal

    if version is None:
        return Finding("vllm", "-", "broken", f"it is installed but cannot be imported: {error}")
    refusal = version_refusal(version)
    if refusal is not None:
        return Finding("vllm", version, "refused", f"{refusal}; --attention-backend CUSTOM does not work with it")
    return Finding("vllm", version, "ok")


def judge_sglang(version: str | None, error: str) -> Finding:
    """Whether the plugin supports the installed SGLang; if not, SGLang's options do not take "tamis"."""
    from tamis.integrations.sglang.versions import version_refusal

    if version is None:
        return Finding("sglang", "-", "broken", f"it is installed but cannot be imported: {error}")
    refusal = version_refusal(version)
    if refusal is not None:
        return Finding("sglang", version, "refused", f"{refusal}; the value tamis of its options does not exist there")
    return Finding("sglang", version, "ok")


def _sglang_plugin() -> Finding:
    """Whether SGLang would load the plugin. It logs, and otherwise ignores, what it cannot load."""
    values = [point.value for point in metadata.entry_points(group=SGLANG_GROUP) if point.name == "tamis"]
    allowed = [name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if SGLANG_PLUGIN not in values:
        advice = "SGLang would not find tamis: install tamis into this environment, or again if it is an older one"
        return Finding("SGLang plugin", ", ".join(values) or "-", "missing", advice)
    if allowed and "tamis" not in allowed:
        advice = f"SGLANG_PLUGINS={','.join(allowed)} leaves tamis out: add it, or unset the variable"
        return Finding("SGLang plugin", SGLANG_PLUGIN, "left out", advice)
    return Finding("SGLang plugin", SGLANG_PLUGIN, "ok")


def _imports(name: str, findings: list[Finding]) -> bool:
    """Whether a package can be imported; adds a finding if it is installed but cannot."""
    try:
        __import__(name)
    except Exception as error:  # a broken installation may raise any error
        installed = any(f.name == name and f.found != "-" for f in findings)
        if installed:
            findings.append(Finding(f"import {name}", type(error).__name__, "WRONG", " ".join(str(error).split())))
        return False
    return True


def look_at_gpu() -> Gpu:
    """Ask torch, the driver's library and nvidia-smi."""
    import torch

    built_for = torch.version.cuda or (f"HIP {torch.version.hip}" if torch.version.hip else None)
    usable = None
    if torch.cuda.is_available():
        usable = torch.cuda.get_device_name()
        if torch.version.hip is None:  # on AMD this is not a CUDA compute capability
            usable += ", compute capability {}.{}".format(*torch.cuda.get_device_capability())
    return Gpu(built_for, usable, _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"), _cuda())


def _cuda() -> tuple[int, int] | None:
    """The newest CUDA version that the installed driver can run. This does not initialise CUDA."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return (version.value // 1000, version.value % 1000 // 10) if version.value else None


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.split("\n")
    return lines[0].strip() or None if done.returncode == 0 else None


def judge_gpu(gpu: Gpu) -> Finding:
    """The finding for the GPU: usable, absent, or present but unusable, with advice."""
    present = gpu.driver is not None
    driver = f"driver {gpu.driver}" if present else "no driver"
    if gpu.usable is not None:
        return Finding("GPU", f"{gpu.usable}, {driver}" if present else gpu.usable, "ok")
    if gpu.built_for is None:
        if present:
            advice = "torch is a build without GPU support: install one for CUDA (see PyTorch's install page)"
            return Finding("GPU", f"{driver}, out of torch's reach", "WRONG", advice)
        return Finding("GPU", "none", "ok", "torch is a build without GPU support, and no NVIDIA driver was found")
    if not present:
        advice = f"torch is built for {_named(gpu.built_for)}; if there is a GPU, install its driver"
        return Finding("GPU", "none", "ok", advice)
    if gpu.driver_cuda is not None and gpu.driver_cuda[0] < _cuda_major(gpu.built_for):
        newest = ".".join(str(number) for number in gpu.driver_cuda)
        advice = f"the driver runs CUDA up to {newest}, torch is built for {gpu.built_for}: update the driver, or "
        return Finding("GPU", driver, "WRONG", advice + f"install a torch built for CUDA {gpu.driver_cuda[0]}")
    advice = f"torch is built for {_named(gpu.built_for)} and sees no device: check CUDA_VISIBLE_DEVICES and nvidia-smi"
    return Finding("GPU", driver, "WRONG", advice)


def _needed_by(gpu: Gpu, finding: Finding) -> Finding:
    """The finding for Triton, which is required only if there is a GPU."""
    needed = finding.name == "triton" and finding.state == "missing" and gpu.usable is not None
    return replace(finding, state="WRONG") if needed else finding


def _cuda_major(built_for: str) -> int:
    found = re.match(r"\d+", built_for)  # nothing for HIP x.y
    return int(found[0]) if found else 0


def _named(built_for: str) -> str:
    return built_for if built_for.startswith("HIP") else f"CUDA {built_for}"


def _kernels(findings: list[Finding]) -> list[Finding]:
    """What compiling CUDA C++ kernels needs; nothing where the packages that find it are missing."""
    needed = ("packaging", "platformdirs")
    missing = any(finding.name in needed and finding.found == "-" for finding in findings)
    return [] if missing else [_nvrtc(), _cubins()]


def _nvrtc() -> Finding:
    from tamis.cuda.nvrtc import INSTALL, has_nvrtc, nvrtc

    if has_nvrtc():
        return Finding("NVRTC", ".".join(str(number) for number in nvrtc().version), "ok")
    return Finding("NVRTC", "-", "missing", f"for the kernels in CUDA C++ (Hopper): {INSTALL}")


def _cubins() -> Finding:
    from tamis.cuda import cubins

    folder = cubins.default_folder()
    refusal = cubins.refusal(folder)
    if refusal is None:
        return Finding("compiled kernels", str(folder), "ok")
    advice = f"{refusal}: kernels in CUDA C++ are compiled again in every process"
    return Finding("compiled kernels", str(folder or "-"), "not kept", advice)


def _choices() -> dict[str, list[dict[str, Any]]]:
    import torch

    from tamis.backends import Need, compute_capability
    from tamis.cache.layout import named
    from tamis.model.spec import LayerSpec

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for name, (heads, layout, topk) in LAYERS.items():
        rows = named(layout)
        spec = LayerSpec(heads, rows.latent, rows.rope, 512, topk=topk, sink=layout.startswith("v4"))
        need = Need(spec, device, compute_capability(device), torch.bfloat16, rows, 64)
        found[name] = [asdict(verdict) for verdict in judge(need)]
    return found
