"""Kernels compiled for the host, once for all tests and processes of a run."""

import ctypes
import fcntl
import hashlib
import struct
import subprocess
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tamis import cuda
from tamis.cuda.params import params_format

HERE = Path(__file__).parent
HEADERS = Path(cuda.__file__).parent


def load(folder: Path, source: str, options: Sequence[str]) -> ctypes.CDLL:
    """Load the library of a source with one function `run`, compiling it if the folder does not have it."""
    # Several libraries are loaded at once; each must have separate variables.
    flags = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique"]
    flags += ["-fvisibility=hidden", "-I", str(HERE), "-I", str(HEADERS), *options]
    name = hashlib.sha256(repr((source, flags)).encode()).hexdigest()[:16]
    file, library = folder / f"{name}.cpp", folder / f"{name}.so"
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
        if not library.exists():
            file.write_text(source)
            subprocess.run(["g++", *flags, "-o", library, file], check=True)
    return ctypes.CDLL(str(library))


def packed(params: tuple[Any, ...]) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a kernel's parameters, as a launch hands them to the driver."""
    letters, plain, _ = params_format(type(params))
    return ctypes.create_string_buffer(struct.pack(f"@{letters}", *params[:plain], *chain(*params[plain:])))
