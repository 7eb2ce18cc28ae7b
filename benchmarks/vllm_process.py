"""What every benchmark of the vLLM engine needs: the environment of a process, the plugin of a checkout, answers."""

import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOGPROBS = 5


def write_entry_point(folder: Path) -> None:
    """Write the package metadata of an installation, so that an engine finds the plugin of a checkout."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / "tamis-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tamis\nVersion: 0\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n" + "\n".join(f"{name} = {to}" for name, to in points.items()) for group, points in groups]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def child_environment(number: int, folder: Path) -> dict[str, str]:
    """The environment of the engine with this number. `folder` holds the entry point under `site`.

    Scripts that run side by side need ports of their own (`VLLM_PORT`), and may share what DeepGEMM compiles
    (`DG_JIT_CACHE_DIR`).
    """
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    settings = {
        "VLLM_PLUGINS": "tamis",
        # The engine core runs in the process that is timed.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_PORT": str(int(os.environ.get("VLLM_PORT", "21000")) + 200 * number),
        "VLLM_CACHE_ROOT": str(folder / f"cache{number}"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        "CUDA_MODULE_LOADING": "LAZY",
        "TOKENIZERS_PARALLELISM": "false",
        "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
        # DeepGEMM compiles its kernels with nvcc at the first call; all engines share them.
        "CUDA_HOME": cuda,
        "DG_JIT_CACHE_DIR": os.environ.get("DG_JIT_CACHE_DIR", str(folder / "deep_gemm")),
        "PATH": f"{cuda}/bin:{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    return os.environ | settings


def attention_in_use(config: Any) -> list[str]:
    """The attention backends, implementations and V4 layer classes that the engine's layers use."""
    found = set()
    for key, layer in config.compilation_config.static_forward_context.items():
        backend = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
        if backend is not None:
            found.add(f"{backend.__module__}.{backend.__qualname__}/{type(getattr(layer, 'impl', None)).__name__}")
        if key.endswith(".attn") and not hasattr(layer, "impl"):
            found.add(f"{type(layer).__module__}.{type(layer).__name__}")
    return sorted(found)


def sampling(count: int) -> Any:
    """Greedy sampling of `count` tokens with their logprobs."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False, logprobs=LOGPROBS)


def timed(llm: Any, requests: Sequence[dict[str, list[int]]], count: int) -> tuple[float, list[Any]]:
    """Seconds and outputs of one batch."""
    import torch

    torch.cuda.synchronize()
    began = time.perf_counter()
    outputs = llm.generate(requests, sampling(count), use_tqdm=False)
    torch.cuda.synchronize()
    return time.perf_counter() - began, outputs


def answers(outputs: Sequence[Any]) -> dict[str, Any]:
    """What a result keeps of an engine's outputs."""
    chosen = [output.outputs[0] for output in outputs]
    return {
        "tokens": [list(answer.token_ids) for answer in chosen],
        "logprobs": [
            [step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)]
            for answer in chosen
        ],
        "margins": [[margin(step) for step in answer.logprobs] for answer in chosen],
    }


def margin(step: dict[int, Any]) -> float:
    """Difference of the logprobs of the best and the second best token."""
    best, second = sorted((float(entry.logprob) for entry in step.values()), reverse=True)[:2]
    return best - second


def versions() -> dict[str, str]:
    """The device and the versions of a row, as a fresh process sees them."""
    facts = "torch.cuda.get_device_name(), torch.__version__, vllm.version.__version__"
    code = f"import torch, vllm.version; print({facts}, sep='|')"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    found = asked.stdout.strip().rpartition("\n")[2].split("|")
    return dict(zip(("device", "torch", "vllm"), found if len(found) == 3 else ["unknown"] * 3, strict=True))


def keep_logs(folder: Path, logs: Path | None) -> None:
    """Copy the engines' logs and results out of the temporary folder."""
    if logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        for path in (*folder.glob("*.log"), *folder.glob("*.json")):
            shutil.copy(path, logs)
