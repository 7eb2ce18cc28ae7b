"""Cubins on disk: only files that this user wrote for the same inputs are used; a failure only costs a compilation."""

import errno
import fcntl
import os
import pwd
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tamis.cuda import cubin_files, cubins
from tamis.cuda.compiler import Program, compiled

ADD = Program("add.cu", 'extern "C" __global__ void add(int* x) { x[threadIdx.x] += 1; }')
SUBTRACT = Program("add.cu", 'extern "C" __global__ void add(int* x) { x[threadIdx.x] -= 1; }')


class Counting:
    """A compiler that counts its calls."""

    version = (13, 0)

    def __init__(self) -> None:
        self.calls = 0

    def compile(self, program: Program, arch: str) -> bytes:
        self.calls += 1
        return f"{program.source} for {arch}".encode()


def cubin(folder: Path | None, program: Program = ADD) -> tuple[bytes, int]:
    """The result of a call, and how often it compiled."""
    made = Counting()
    return compiled(program, "sm_90a", folder=folder, compiler=made), made.calls


RESULT = f"{ADD.source} for sm_90a".encode()


def kept(folder: Path) -> Path:
    """Compile a program and return its file."""
    assert cubin(folder) == (RESULT, 1)
    assert cubin(folder) == (RESULT, 0)
    (path,) = folder.iterdir()
    return path


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_folders_and_files_are_for_this_user_alone(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        path = kept(tmp_path / "above" / "folder")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(place.stat().st_mode) for place in (path.parent.parent, path.parent, path)] == [
        *(0o700, 0o700),
        0o600,
    ]


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_a_folder_that_others_can_write_to_is_neither_read_nor_written(tmp_path: Path, mode: int) -> None:
    path = kept(tmp_path)
    tmp_path.chmod(mode)
    assert cubin(tmp_path) == (RESULT, 1)
    path.unlink()
    assert cubin(tmp_path) == (RESULT, 1)
    assert list(tmp_path.iterdir()) == []
    assert "other users can write to it" in (cubins.refusal(tmp_path) or "")


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_can_write_to_is_replaced(tmp_path: Path, mode: int) -> None:
    path = kept(tmp_path)
    path.chmod(mode)
    assert cubin(tmp_path) == (RESULT, 1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert cubin(tmp_path) == (RESULT, 0)


def test_files_of_other_users_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = kept(tmp_path)
    about = os.stat_result
    real = os.fstat

    def owned_by_another(file: int) -> os.stat_result:
        found = list(real(file))
        if stat.S_ISREG(found[0]) or whole:
            found[4] += 1
        return about(found)

    monkeypatch.setattr(cubins.os, "fstat", owned_by_another)
    whole = False  # the file alone
    assert cubin(tmp_path) == (RESULT, 1)
    before = path.stat()
    whole = True
    assert cubin(tmp_path) == (RESULT, 1)
    assert path.stat() == before
    assert "belongs to user" in (cubins.refusal(tmp_path) or "")


def test_another_programs_cubin_under_this_name_is_replaced(tmp_path: Path) -> None:
    path = kept(tmp_path)
    whole = path.read_bytes()
    path.unlink()
    assert cubin(tmp_path, SUBTRACT)[1] == 1
    (other,) = tmp_path.iterdir()
    other.rename(path)
    assert cubin(tmp_path) == (RESULT, 1)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("cut", [0, 1, 31, 32, 33, -1])
def test_a_truncated_file_is_replaced(tmp_path: Path, cut: int) -> None:
    path = kept(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    assert cubin(tmp_path) == (RESULT, 1)
    assert path.read_bytes() == whole


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = kept(tmp_path)
    with path.open("r+b") as file:
        file.truncate(1 << 40)  # a sparse file, which takes no space on the disk
    assert cubin(tmp_path) == (RESULT, 1)
    assert path.stat().st_size < 1000


@pytest.mark.parametrize("kind", ["fifo", "socket", "link", "loop", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    path = kept(folder)
    path.rename(tmp_path / "elsewhere")  # a link will lead to this file, which is valid except for its place
    with socket.socket(socket.AF_UNIX) as place:
        if kind == "fifo":
            os.mkfifo(path, 0o600)
        elif kind == "socket":
            before = Path.cwd()
            os.chdir(folder)  # the path of a socket must be short
            place.bind(path.name)
            os.chdir(before)
            path.chmod(0o600)
        elif kind == "link":
            path.symlink_to(tmp_path / "elsewhere")
        elif kind == "loop":
            path.symlink_to(path)
        else:
            path.mkdir()
        assert cubin(folder) == (RESULT, 1)
    # A folder cannot be replaced by a file, and stays.
    assert cubin(folder) == (RESULT, 1 if kind == "folder" else 0)
    assert [place.name for place in folder.iterdir()] == [path.name]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device")
def test_a_device_is_never_read(tmp_path: Path) -> None:
    path = kept(tmp_path)
    path.unlink()
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero, which never ends
    except PermissionError:
        pytest.skip("devices cannot be made here")
    assert cubin(tmp_path) == (RESULT, 1)


def test_a_folder_behind_a_link_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert cubin(tmp_path / "link") == (RESULT, 1)
    assert list((tmp_path / "real").iterdir()) == []


def test_without_a_home_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert cubins.default_folder() is None
    assert cubin(None) == (RESULT, 1)
    assert cubins.refusal(None) == "this user has no home folder"


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("value", ["relative", "."])
def test_a_relative_folder_is_not_used(
    variable: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own record of the home counts then."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_dir=str(tmp_path / "home")))
    monkeypatch.setenv(variable, value)
    assert cubin(None) == (RESULT, 1)
    assert list((tmp_path / "here").iterdir()) == []
    assert cubins.default_folder() == tmp_path / "home/.cache/tamis/cubin"


def test_the_user_may_move_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "moved"))
    assert cubin(None) == (RESULT, 1)
    assert cubins.default_folder() == tmp_path / "moved/tamis/cubin"
    assert [one.architecture for one in cubin_files.kept(tmp_path / "moved/tamis/cubin")] == ["sm_90a"]


def test_only_our_files_are_listed_and_removed(tmp_path: Path) -> None:
    ours = kept(tmp_path)
    assert cubin(tmp_path, SUBTRACT)[1] == 1
    half = tmp_path / f"{ours.name}.0123456789abcdef"
    half.write_bytes(b"half")
    others = [tmp_path / "notes.txt", tmp_path / "add-sm_90a-0.cubin", tmp_path / f"{ours.stem}.txt"]
    for other in others:
        other.write_text("mine")
    (tmp_path / f"x{ours.name}").symlink_to(others[0])
    (tmp_path / f"y{ours.name}").mkdir()
    found = cubin_files.kept(tmp_path)
    assert len(found) == 3
    assert {(one.program, one.architecture) for one in found} == {("add", "sm_90a")}
    assert {one.name: one.bytes for one in found}[ours.name] == ours.stat().st_size
    with half.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # as the process that writes it does
        assert len(cubin_files.clear(tmp_path)) == 2
    assert [one.name for one in cubin_files.clear(tmp_path)] == [half.name]
    assert cubin_files.kept(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == len(others) + 2
    assert cubin_files.kept(tmp_path / "absent") == []


def test_the_folder_lies_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cubins.refusal(cubins.default_folder()) is None
    assert cubin(None) == (RESULT, 1)
    assert cubin(None) == (RESULT, 0)
    assert cubins.default_folder() == tmp_path / ".cache" / "tamis" / "cubin"
    assert cubins.refusal(cubins.default_folder()) is None


WRITER = """
import os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from tamis.cuda import cubin_files, cubins
def stopped(*arguments, **keywords):
    print("written", flush=True)
    signal.pause()
os.replace = stopped
cubins.write(Path(sys.argv[1]), "add-sm_90a-0.cubin", b"key", b"cubin" * 1000)
"""


def test_only_abandoned_files_are_removed(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        (unfinished,) = tmp_path.iterdir()
        kept_by_an_older_version = tmp_path / "add-sm_90a-1.cubinabcdefgh"
        kept_by_an_older_version.write_bytes(b"part")
        unrelated = tmp_path / "notes.txt"
        unrelated.write_text("of somebody else")
        young = tmp_path / "add-sm_90a-2.cubin.0"
        young.write_bytes(b"")  # its writer may be about to lock it
        for old in (unfinished, kept_by_an_older_version, unrelated):
            os.utime(old, (0, 0))
        try:
            assert cubin(tmp_path) == (RESULT, 1)
            assert unfinished.exists()
            assert young.exists()
            assert not kept_by_an_older_version.exists()
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    assert unfinished.exists()
    assert cubin(tmp_path, SUBTRACT)[1] == 1
    assert not unfinished.exists()
    assert unrelated.exists()
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_processes_that_write_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    code = """
import sys
from pathlib import Path
from types import SimpleNamespace
from tamis.cuda import cubin_files, cubins
for number in range(60):
    for name in range(3):
        folder, content = Path(sys.argv[1]), f"cubin {name}".encode() * 5000
        cubins.write(folder, f"add-{name}.cubin", b"key", content)
        assert cubins.read(folder, f"add-{name}.cubin", b"key") == content
"""
    several = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "new")]) for _ in range(3)]
    assert [process.wait(timeout=120) for process in several] == [0, 0, 0]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"add-{name}.cubin" for name in range(3)]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", ["mkdir", "open", "replace", "flush"])
def test_a_full_or_read_only_disk_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    def refused(*arguments: object, **keywords: object) -> None:
        raise OSError(code, os.strerror(code))

    folder = tmp_path / "new"
    if call == "mkdir":
        monkeypatch.setattr(Path, "mkdir", refused)
    elif call == "flush":
        folder.mkdir(mode=0o700)
        real = os.fdopen
        monkeypatch.setattr(cubins.os, "fdopen", lambda file, mode: _Full(real(file, mode), refused))
    else:
        folder.mkdir(mode=0o700)
        monkeypatch.setattr(cubins.os, call, refused)
    assert cubin(folder) == (RESULT, 1)
    monkeypatch.undo()
    assert not folder.exists() or list(folder.iterdir()) == []


class _Full:
    """A file on a full disk."""

    def __init__(self, file, refused) -> None:
        self.file, self.write, self.flush, self.read = file, file.write, refused, file.read

    def __enter__(self) -> "_Full":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()
