"""NVRTC, NVIDIA's runtime compiler: where it is found, and what it makes of a program."""

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tamis.cuda.compiler import Program

INSTALL = "install the NVRTC of PyTorch's CUDA version: pip install nvidia-cuda-nvrtc (CUDA 12: nvidia-cuda-nvrtc-cu12)"


class CompileError(RuntimeError):
    """A source does not compile; the message contains the compiler's log."""


class Nvrtc:
    """The compiler library."""

    def __init__(self, library: Any) -> None:
        """Wrap the loaded library `libnvrtc`."""
        self._library = library
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def compile(self, program: "Program", arch: str) -> bytes:
        """The cubin of a program for an architecture such as `sm_90a`."""
        flags = program.flags(arch)
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
