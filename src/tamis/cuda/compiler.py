"""From a CUDA C++ source to a cubin: compiled by NVRTC once, then read from disk."""

import contextlib
import ctypes
import hashlib
import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from tamis.cuda import cubins

INSTALL = "install the NVRTC of PyTorch's CUDA version: pip install nvidia-cuda-nvrtc (CUDA 12: nvidia-cuda-nvrtc-cu12)"


class CompileError(RuntimeError):
    """A source does not compile; the message contains the compiler's log."""


@dataclass(frozen=True)
class Program:
    """A source, its headers and the options to compile it with."""

    name: str
    """File name, for messages."""
    source: str
    options: tuple[str, ...] = ()
    """Options for NVRTC besides the architecture, such as `-DTHREADS=512`."""
    headers: tuple[tuple[str, str], ...] = ()
    """Names and texts of the headers that the source includes."""

    @classmethod
    def packaged(cls, package: str, name: str, **defines: int) -> "Program":
        """A `.cu` file of a package, with preprocessor constants and every header that it includes.

        Headers lie beside the source or beside this module.
        """
        folders = resources.files(package), resources.files(__package__)
        source = folders[0].joinpath(name).read_text(encoding="utf-8")
        headers: dict[str, str] = {}
        pending = _included(source)
        while pending:
            header = pending.pop(0)
            if header not in headers:
                path = next(path for path in (folder.joinpath(header) for folder in folders) if path.is_file())
                headers[header] = path.read_text(encoding="utf-8")
                pending += _included(headers[header])
        constants = tuple(f"-D{constant}={value}" for constant, value in defines.items())
        return cls(name, source, constants, tuple(headers.items()))


def _included(text: str) -> list[str]:
    """Names of the headers that a source includes in quotes."""
    return re.findall(r'^#include "(.+)"', text, re.MULTILINE)


def options(program: Program, arch: str) -> list[str]:
    """All options that a program is compiled with."""
    return ["-std=c++17", f"-arch={arch}", *program.options]


class Nvrtc:
    """The compiler library."""

    def __init__(self, library: Any) -> None:
        """Wrap the loaded library `libnvrtc`."""
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def compile(self, program: Program, arch: str) -> bytes:
        """The cubin of a program for an architecture such as `sm_90a`."""
        flags = options(program, arch)
        handle = ctypes.c_void_p()
        names, texts = (_strings([header[part] for header in program.headers]) for part in (0, 1))
        source = program.source.encode(), program.name.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(handle), *source, len(program.headers), texts, names)
        try:
            if self._library.nvrtcCompileProgram(handle, len(flags), _strings(flags)):
                log = self._text("nvrtcGetProgramLog", handle).rstrip(b"\0").decode(errors="replace").strip()
                raise CompileError(f"{program.name} does not compile for {arch} ({' '.join(flags)}):\n{log}")
            return self._text("nvrtcGetCUBIN", handle)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(handle))

    def _text(self, name: str, handle: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"{name}Size", handle, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._call(name, handle, text)
        return text.raw

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with NVRTC status {status}")


def _strings(texts: Sequence[str]) -> Any:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


@cache
def nvrtc() -> Nvrtc:
    """The NVRTC of this installation. PyTorch's CUDA version is preferred to others, and wheels to system libraries."""
    for library, builtins in _candidates():
        try:
            # NVRTC opens its builtins by their bare name, which fails in a wheel, as no search path leads there.
            if builtins is not None:
                ctypes.CDLL(builtins)
            return Nvrtc(ctypes.CDLL(library))
        except (OSError, AttributeError, RuntimeError):
            continue  # the library is missing, is not NVRTC, or does not work
    raise ImportError(f"CUDA C++ kernels need NVRTC, NVIDIA's runtime compiler, which was not found; {INSTALL}")


@cache
def has_nvrtc() -> bool:
    """Whether NVRTC is installed."""
    try:
        nvrtc()
    except ImportError:
        return False
    return True


def _candidates() -> Iterator[tuple[str, str | None]]:
    """The libraries to try, each with the builtins library that must be loaded before it."""
    from packaging.version import Version

    wanted = [f".so.{major}" for major in (Version(torch.version.cuda or "13").major, 13, 12)]
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec is not None else None
    wheels = [path for root in roots or () for path in sorted(Path(root).glob("*/lib/libnvrtc.so.*[0-9]"))]
    for suffix in dict.fromkeys(wanted):
        for library in wheels:
            if library.name.endswith(suffix):
                builtins = sorted(library.parent.glob(f"libnvrtc-builtins{suffix}*"))
                yield str(library), str(builtins[0]) if builtins else None
    for suffix in dict.fromkeys(wanted):
        yield f"libnvrtc{suffix}", None


def compiled(program: Program, arch: str, *, folder: Path | None = None, compiler: Nvrtc | None = None) -> bytes:
    """The cubin of a program, from disk if it has been compiled before.

    The file's name contains a hash of everything the result depends on. The file starts with a digest of these inputs
    and of the cubin, so that an outdated, damaged or renamed file is never used. If no file can be kept (see
    `tamis.cuda.cubins`), the program is compiled again in every process.
    """
    compiler = compiler or nvrtc()
    key = hashlib.sha256(repr((program, options(program, arch), arch, compiler.version)).encode())
    name = f"{Path(program.name).stem}-{arch}-{key.hexdigest()[:32]}.cubin"
    folder = cubins.default_folder() if folder is None else folder
    if folder is not None:
        with contextlib.suppress(OSError):
            stored = cubins.read(folder, name, key.digest())
            if stored is not None:
                return stored
    cubin = compiler.compile(program, arch)
    if folder is not None:
        with contextlib.suppress(OSError):
            cubins.write(folder, name, key.digest(), cubin)
    return cubin


def architecture(capability: tuple[int, int]) -> str:
    """NVRTC's name of a compute capability; from 9.0 on with the suffix for architecture-specific instructions."""
    return f"sm_{capability[0]}{capability[1]}{'a' if capability >= (9, 0) else ''}"
