"""Cubins on disk, in one folder that belongs to this user.

A cubin is code that the GPU runs, so a file is used only if this user wrote it for exactly these inputs. `read` and
`write` raise OSError if they fail (a full disk, a folder that others can write to, a FIFO under the file's name); the
caller then compiles the program again.
"""

import contextlib
import errno
import hashlib
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

LARGEST = 64 << 20
"""Size in bytes of the largest file that is read; cubins are much smaller."""
_DIGEST_SIZE = hashlib.sha256().digest_size
_UNFINISHED = re.compile(r".+\.cubin.+")
"""The names of files that a process is writing, or was writing when it was killed."""
_ABANDONED_SECONDS = 60
"""Age after which an unlocked unfinished file is removed; the writer of a younger one may not have locked it yet."""
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_folder() -> Path | None:
    """The folder for cubins unless the caller names another: `~/.cache/tamis/cubin` on Linux.

    The system's rule for caches decides, as platformdirs knows it: XDG_CACHE_HOME moves the folder, and macOS has
    another default. tamis itself reads no variable. None for a user without a home, and on Windows.
    """
    if os.name != "posix":
        return None
    from platformdirs import user_cache_path

    # Without a HOME, and with a user id that the system does not know, platformdirs raises; older ones give "~".
    with contextlib.suppress(RuntimeError):
        folder = user_cache_path("tamis", appauthor=False) / "cubin"
        if folder.is_absolute():
            return folder
    return None


def read(folder: Path, name: str, key: bytes) -> bytes | None:
    """The cubin that was written for a key; None if the file contains anything else."""
    with open_folder(folder) as directory:
        # O_NONBLOCK: opening a FIFO that nobody writes to would otherwise wait for ever.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        _check(status, name)
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            return None
        stored = opened.read(LARGEST)
    cubin = stored[_DIGEST_SIZE:]
    return cubin if stored[:_DIGEST_SIZE] == _digest(key, cubin) else None


def write(folder: Path, name: str, key: bytes, cubin: bytes) -> None:
    """Write a cubin under its name; other processes see the complete file or none."""
    _make(folder)
    with open_folder(folder) as directory:
        _remove_unfinished(directory)
        temporary = f"{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o600, dir_fd=directory)
        try:
            with os.fdopen(file, "wb") as opened:
                # The lock ends with the process, so it tells other processes whether this one still writes. On a file
                # system without locks they cannot lock the file either, and do not remove it.
                with contextlib.suppress(OSError):
                    lock(file)
                opened.write(_digest(key, cubin) + cubin)
                opened.flush()
                os.replace(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=directory)
            raise


def refusal(folder: Path | None) -> str | None:
    """The reason why cubins cannot be kept in a folder, or None. The folder is neither made nor changed."""
    if folder is None:
        return "this user has no home folder"
    try:
        with open_folder(folder):
            writable = os.access(folder, os.W_OK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None if writable else "it cannot be written to"


def _digest(key: bytes, cubin: bytes) -> bytes:
    return hashlib.sha256(key + cubin).digest()


def _make(folder: Path) -> None:
    """Make a folder and its missing parents, accessible to this user alone whatever the umask."""
    if not folder.is_dir():
        if not folder.parent.is_dir():
            _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def open_folder(folder: Path) -> Iterator[int]:
    """Open a folder after checking that it belongs to this user.

    Files are opened relative to the descriptor, so that nobody can exchange the folder after the check.
    """
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(os.fstat(directory), str(folder))
        yield directory
    finally:
        os.close(directory)


def _check(status: os.stat_result, name: str) -> None:
    """Refuse a file or folder that belongs to another user, or that another user can write to."""
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, f"it belongs to user {status.st_uid}", name)
    if status.st_mode & _OTHERS_MAY_WRITE:
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(errno.EACCES, f"other users can write to it (its mode is {mode:o})", name)


def lock(file: int) -> None:
    """Lock a file without waiting; raise OSError if another process holds the lock."""
    import fcntl  # Windows does not have it

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_unfinished(directory: int) -> None:
    """Remove files that killed processes left behind. A process that still writes holds a lock on its file."""
    for name in os.listdir(directory):
        if not _UNFINISHED.fullmatch(name):
            continue
        with contextlib.suppress(OSError):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
            try:
                if time.time() - os.fstat(file).st_mtime > _ABANDONED_SECONDS:
                    lock(file)
                    os.unlink(name, dir_fd=directory)
            finally:
                os.close(file)
