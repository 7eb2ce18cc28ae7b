"""Cubins on disk: one folder that belongs to this user, read and written as if others could reach it.

A cubin is code that the GPU runs, so a file is used only if this user wrote it for exactly these inputs. If reading or
writing fails (no home, a full disk, a folder that others can write to, a FIFO under the file's name), the program is
compiled again and nothing else happens: both functions may raise OSError, which means that nothing was read or kept.
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
"""Bytes of the largest file that is read; cubins are thousands of times smaller."""
_DIGEST_SIZE = hashlib.sha256().digest_size
_UNFINISHED = re.compile(r".+\.cubin.+")
"""Names of files that are being written, or that a process was writing when it was killed."""
_ABANDONED_SECONDS = 60
"""A younger file may be one whose writer has not locked it yet."""
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def default_folder() -> Path | None:
    """Where cubins are kept unless the caller says otherwise; None for a user without a home, and on Windows."""
    if os.name != "posix":
        return None
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and a user id that the system does not know
        return None
    return home / ".cache" / "tamis" / "cubin" if home.is_absolute() else None


def read(folder: Path, name: str, key: bytes) -> bytes | None:
    """The cubin that was kept for a key; None if the file holds anything else."""
    with _opened(folder) as place:
        # O_NONBLOCK: a FIFO that nobody writes to would otherwise be waited for.
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
    with os.fdopen(file, "rb") as opened:
        about = os.fstat(file)
        _check(about, name)
        if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST:
            return None
        stored = opened.read(LARGEST)
    cubin = stored[_DIGEST_SIZE:]
    return cubin if stored[:_DIGEST_SIZE] == _digest(key, cubin) else None


def write(folder: Path, name: str, key: bytes, cubin: bytes) -> None:
    """Keep a cubin: other processes see the file complete or not at all."""
    _make(folder)
    with _opened(folder) as place:
        _remove_unfinished(place)
        temporary = f"{name}.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(temporary, flags, 0o600, dir_fd=place)
        try:
            with os.fdopen(file, "wb") as opened:
                # The lock ends with the process, and so tells others that somebody still writes. Where a file system
                # has no locks, nobody else gets one either, and nothing is removed.
                with contextlib.suppress(OSError):
                    _lock(file)
                opened.write(_digest(key, cubin) + cubin)
                opened.flush()
                os.replace(temporary, name, src_dir_fd=place, dst_dir_fd=place)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=place)
            raise


def refusal(folder: Path | None) -> str | None:
    """Why nothing can be kept in a folder, or None; nothing is made or changed."""
    if folder is None:
        return "this user has no home folder"
    try:
        with _opened(folder):
            writable = os.access(folder, os.W_OK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None if writable else "it cannot be written to"


def _digest(key: bytes, cubin: bytes) -> bytes:
    return hashlib.sha256(key + cubin).digest()


def _make(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone whatever the umask."""
    if not folder.is_dir():
        if not folder.parent.is_dir():
            _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


@contextlib.contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """A descriptor of the folder, if it belongs to this user; what is opened through it lies in the checked folder."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(os.fstat(place), str(folder))
        yield place
    finally:
        os.close(place)


def _check(about: os.stat_result, name: str) -> None:
    """Refuse what belongs to somebody else, or what somebody else could have written."""
    if about.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, f"it belongs to user {about.st_uid}", name)
    if about.st_mode & _OTHERS_MAY_WRITE:
        mode = stat.S_IMODE(about.st_mode)
        raise PermissionError(errno.EACCES, f"other users can write to it (its mode is {mode:o})", name)


def _lock(file: int) -> None:
    """Take the lock of a file now, or raise OSError."""
    import fcntl  # Windows does not have it

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _remove_unfinished(place: int) -> None:
    """Remove files that killed processes left behind. A process that still writes holds a lock on its file."""
    for name in os.listdir(place):
        if not _UNFINISHED.fullmatch(name):
            continue
        with contextlib.suppress(OSError):
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=place)
            try:
                if time.time() - os.fstat(file).st_mtime > _ABANDONED_SECONDS:
                    _lock(file)
                    os.unlink(name, dir_fd=place)
            finally:
                os.close(file)
