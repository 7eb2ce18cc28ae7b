"""Kernels compiled for the host, once for all tests and processes of a run."""

import ctypes
import fcntl
import hashlib
import struct
import subprocess
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tamis import cuda
from tamis.cuda.params import params_format

HERE = Path(__file__).parent
HEADERS = Path(cuda.__file__).parent
FINDING_RACES, STRICTLY = "on_host_finding_races", "on_host_finding_races_strictly"
"""Names of folders in which kernels are compiled so that they report races, and those of PTX's rules alone."""

# Several libraries are loaded at once; each must have separate variables.
FLAGS = ["-std=c++20", "-O1", "-w", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique", "-fvisibility=hidden"]
DETECTORS = {FINDING_RACES: [], STRICTLY: ["-DSTRICT"]}
"""The detector's options by the folder's name."""
WATCHED = ["-DFIND_RACES", "-fsanitize=thread", "--param", "tsan-distinguish-volatile=1", "-g"]


class Emulated(NamedTuple):
    """The function of a library that runs a kernel."""

    run: Callable[..., Any]


def load(folder: Path, source: str, options: Sequence[str]) -> Any:
    """Load the library of a source with one function `run`, compiling it if the folder does not have it."""
    flags = [*FLAGS, "-I", str(HERE), "-I", str(HEADERS), *options]
    library = folder / f"{hashlib.sha256(repr((source, flags)).encode()).hexdigest()[:16]}.so"
    with library.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
        if not library.exists():
            file = library.with_suffix(".cpp")
            file.write_text(source)
            if folder.name in DETECTORS:
                parts = [_compiled(file, [*flags, *WATCHED]), _detector(folder)]
                subprocess.run(["g++", "-shared", "-o", library, *parts], check=True)
            else:
                subprocess.run(["g++", *flags, "-shared", "-o", library, file], check=True)
    loaded = ctypes.CDLL(str(library))
    return Emulated(_checked(loaded, library)) if folder.name in DETECTORS else loaded


def _compiled(file: Path, flags: Sequence[str]) -> Path:
    subprocess.run(["g++", *flags, "-c", "-o", file.with_suffix(".o"), file], check=True)
    return file.with_suffix(".o")


def _detector(folder: Path) -> Path:
    """The object of `races.cpp`, which must not be watched itself."""
    with (folder / "races.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = folder / "races.o"
        if not made.exists():
            flags = [*FLAGS, "-O2", "-DFIND_RACES", *DETECTORS[folder.name], "-c", "-o", str(made)]
            subprocess.run(["g++", *flags, str(HERE / "races.cpp")], check=True)
    return made


def _checked(loaded: ctypes.CDLL, library: Path) -> Callable[..., Any]:
    """A library's `run` that raises AssertionError with the lines of all races that it has found."""
    loaded.races_found.restype = ctypes.c_char_p

    def run(*given: Any) -> None:
        loaded.run(*given)
        found = loaded.races_found()
        if found:
            races = [_described(race, library) for race in found.decode().splitlines()]
            raise AssertionError("races in shared memory:\n" + "\n".join(races))

    return run


def _described(race: str, library: Path) -> str:
    """A race with lines of source in place of addresses."""
    where, *accesses = race.split("\t")
    for access in accesses:
        what, places = access.split("@")
        command = ["addr2line", "-i", "-e", str(library), *places.strip(",").split(",")]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        lines = (line.rsplit("/", 1)[-1].split(" ")[0] for line in found.splitlines() if "?" not in line)
        # The emulator's own lines say nothing about the kernel.
        where += f"\n  {what}" + " < ".join(line for line in lines if "emulator" not in line)
    return where


def packed(params: tuple[Any, ...]) -> ctypes.Array[ctypes.c_char]:
    """The bytes of a kernel's parameters, as a launch hands them to the driver."""
    letters, plain, _ = params_format(type(params))
    return ctypes.create_string_buffer(struct.pack(f"@{letters}", *params[:plain], *chain(*params[plain:])))
