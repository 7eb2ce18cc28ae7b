"""The cubins that are kept in a folder: listed and removed, for `tamis cache`."""

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from tamis.cuda.cubins import lock, open_folder

_NAME = re.compile(r"(?P<program>.+)-(?P<architecture>sm_\d+[a-z]?)-[0-9a-f]{32}\.cubin(?P<unfinished>\..+)?")
"""The names of our files; those that a process is writing have an ending more."""


@dataclass(frozen=True)
class Kept:
    """One file in the folder."""

    name: str
    program: str
    architecture: str
    bytes: int
    unfinished: bool
    """Whether a process is writing it, or was writing it when it was killed."""


def kept(folder: Path) -> list[Kept]:
    """Our files in a folder, by name; none if there is no such folder. Other files are not mentioned."""
    try:
        with open_folder(folder) as directory:
            return [one for name in sorted(os.listdir(directory)) if (one := _kept(directory, name)) is not None]
    except FileNotFoundError:
        return []


def clear(folder: Path) -> list[Kept]:
    """Remove our files from a folder, those of processes that still write excepted, and return what was removed.

    Other files are left alone, and so is the folder. A process that has loaded a kernel keeps it; the next one compiles
    it again.
    """
    removed = []
    for one in kept(folder):
        with open_folder(folder) as directory, contextlib.suppress(OSError):
            if one.unfinished and _is_locked(directory, one.name):
                continue
            os.unlink(one.name, dir_fd=directory)
            removed.append(one)
    return removed


def _kept(directory: int, name: str) -> Kept | None:
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    try:
        status = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError:  # another process has just removed it
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return Kept(name, found["program"], found["architecture"], status.st_size, found["unfinished"] is not None)


def _is_locked(directory: int, name: str) -> bool:
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    try:
        lock(file)
    except OSError:
        return True
    finally:
        os.close(file)
    return False
