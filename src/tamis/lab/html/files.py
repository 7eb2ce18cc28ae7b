"""`write_whole`: replace a file completely or not at all."""

import contextlib
import os
import secrets
import stat
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a temporary file and rename it to `path`, so that a failure leaves the old file unchanged.

    A path that is not a regular file, such as `/dev/stdout`, is written to directly. Links are followed.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name[:64]}.{secrets.token_hex(8)}")
    try:
        with open(temporary, "xb") as file:
            if path.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(path.stat().st_mode))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
