"""What benchmarks inside SGLang need: the packed engine, the environment of a process, the plugin of a checkout."""

import os
import subprocess
import sys
from pathlib import Path

from sglang_pack import unpack
from vllm_process import ROOT, write_entry_point


def prepare(folder: Path, archive: Path | None) -> None:
    """Fill a folder with the engine, unless one is installed, and with the plugin's entry point."""
    if archive is not None:
        unpack(archive, folder / "engine")
    write_entry_point(folder / "site")


def child_environment(number: int, folder: Path) -> dict[str, str]:
    """The environment of the process with this number, in a folder that `prepare` has filled."""
    cuda = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    path = [folder / "site", ROOT / "src", folder / "engine", Path(__file__).resolve().parent]
    settings = {
        "SGLANG_PLUGINS": "tamis",
        # Dense attention over short prompts is FlashAttention 3, which is not packed.
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
        "SGLANG_HOST_IP": "127.0.0.1",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_MODULE_LOADING": "LAZY",
        "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
        # Kernels are compiled at their first call; all processes share them.
        "CUDA_HOME": cuda,
        "DG_JIT_CACHE_DIR": str(folder / "deep_gemm"),
        "SGLANG_DG_CACHE_DIR": str(folder / "deep_gemm"),
        "TVM_FFI_CACHE_DIR": str(folder / "tvm_ffi"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        "FLASHINFER_WORKSPACE_BASE": str(folder),
        "SGLANG_CACHE_DIR": str(folder / f"cache{number}"),
        "PATH": f"{cuda}/bin:{os.environ.get('PATH', '')}",
        "PYTHONPATH": os.pathsep.join([*map(str, path), os.environ.get("PYTHONPATH", "")]),
        "PYTHONUNBUFFERED": "1",
    }
    return os.environ | settings


def versions(environment: dict[str, str]) -> dict[str, str]:
    """The device and the versions of a row, as a process of that environment sees them."""
    code = (
        "import torch; from importlib.metadata import version; "
        "print(torch.cuda.get_device_name(), torch.__version__, version('sglang'), sep='|')"
    )
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    found = asked.stdout.strip().rpartition("\n")[2].split("|")
    return dict(zip(("device", "torch", "sglang"), found if len(found) == 3 else ["unknown"] * 3, strict=True))
