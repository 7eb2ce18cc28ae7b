"""From a CUDA C++ source to a cubin: compiled by NVRTC once, then read from disk."""

import contextlib
import hashlib
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tamis.cuda import cubins
from tamis.cuda.nvrtc import Nvrtc, nvrtc


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

    def flags(self, arch: str) -> list[str]:
        """All options that it is compiled with."""
        return ["-std=c++17", f"-arch={arch}", *self.options]


def _included(text: str) -> list[str]:
    """Names of the headers that a source includes in quotes."""
    return re.findall(r'^#include "(.+)"', text, re.MULTILINE)


def compiled(program: Program, arch: str, *, folder: Path | None = None, compiler: Nvrtc | None = None) -> bytes:
    """The cubin of a program, from disk if it has been compiled before.

    The file's name contains a hash of everything the result depends on. The file starts with a digest of these inputs
    and of the cubin, so that an outdated, damaged or renamed file is never used. If no file can be kept (see
    `tamis.cuda.cubins`), the program is compiled again in every process.
    """
    compiler = compiler or nvrtc()
    key = hashlib.sha256(repr((program, program.flags(arch), arch, compiler.version)).encode())
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
