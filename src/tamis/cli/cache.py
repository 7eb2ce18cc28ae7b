"""`tamis cache`: the folder of compiled CUDA C++ kernels: what is in it, and how to empty it."""

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tamis.cli.data import print_json
from tamis.cli.parser import FAILED, OK, Subcommands, add_command
from tamis.cli.table import render_table
from tamis.cli.text import printable

if TYPE_CHECKING:
    from tamis.cuda.cubin_files import Kept

MOVING = "set XDG_CACHE_HOME; the folder is then $XDG_CACHE_HOME/tamis/cubin, and other programs move theirs too"

DETAILS = """\
CUDA C++ kernels are compiled on first use, which takes seconds each, and kept in a folder of this user for other
processes. A file is used only for the same source, options and compiler, so the folder can be removed at any time, and
old files do no harm. XDG_CACHE_HOME moves it, as it does for other programs: the folder is then
$XDG_CACHE_HOME/tamis/cubin. Triton's kernels are elsewhere: Triton keeps them, in TRITON_CACHE_DIR.

info says where the folder is and what it holds, per architecture; clear removes tamis' own files from it, and nothing
else. clear asks first, unless --yes is given; where nobody can answer, it needs --yes."""

EXAMPLES = """\
tamis cache info
tamis cache info --json
tamis cache clear --yes"""


def register(subcommands: Subcommands) -> None:
    """Add the command."""
    parser = add_command(
        subcommands,
        "cache",
        run,
        summary="Show or empty the folder of compiled CUDA C++ kernels",
        details=DETAILS,
        example=EXAMPLES,
        usage="info|clear [options]",
    )
    parser.add_argument("action", choices=("info", "clear"), metavar="action", help="info or clear")
    parser.add_argument("--yes", action="store_true", help="clear: do not ask")


def run(options: argparse.Namespace) -> int:
    """Show or empty the folder."""
    if options.yes and options.action == "info":
        raise ValueError("--yes must be given with `tamis cache clear` only; leave it out")
    from tamis.cuda import cubin_files, cubins

    folder = cubins.default_folder()
    if folder is None:
        raise ValueError("this user has no home folder, so compiled kernels are not kept; set HOME or XDG_CACHE_HOME")
    refusal = cubins.refusal(folder)
    found = [] if refusal else cubin_files.kept(folder)
    act = _clear if options.action == "clear" else _info
    return act(options, folder, found, refusal)


def _info(options: argparse.Namespace, folder: Path, found: "list[Kept]", refusal: str | None) -> int:
    if options.json:
        print_json("cache", refusal is None, _as_data(folder, found) | {"refusal": refusal})
        return OK if refusal is None else FAILED
    print(f"folder: {printable(folder)}{'' if folder.exists() else ' (not made yet)'}")
    if refusal is not None:
        print(f"FAILED: it is not used: {printable(refusal)}; kernels are compiled again in every process")
        return FAILED
    print(f"files:  {len(found)}, {sum(one.bytes for one in found):,} bytes\n")
    if found:
        rows = [(name, count, f"{size:,}") for name, count, size in _architectures(found)]
        print(render_table(("architecture", "files", "bytes"), rows, "lrr"), end="\n\n")
    print(f"to move it: {MOVING}")
    print("to empty it: tamis cache clear")
    return OK


def _clear(options: argparse.Namespace, folder: Path, found: "list[Kept]", refusal: str | None) -> int:
    from tamis.cuda import cubin_files

    if refusal is not None:
        raise ValueError(f"{folder} is not used and was left alone: {refusal}")
    if found and not options.yes and not _agreed(folder, found):
        print("nothing was removed", file=sys.stderr)
        return FAILED
    removed = cubin_files.clear(folder)
    if options.json:
        print_json("cache", True, {"removed": _as_data(folder, removed)} | _as_data(folder, cubin_files.kept(folder)))
    else:
        total = sum(one.bytes for one in removed)
        print(f"removed {len(removed)} files, {total:,} bytes, from {printable(folder)}")
    return OK


def _agreed(folder: Path, found: "list[Kept]") -> bool:
    if not sys.stdin or not sys.stdin.isatty():
        raise ValueError("`tamis cache clear` asks before it removes files, and nobody can answer here; use --yes")
    total = sum(one.bytes for one in found)
    print(
        f"Remove {len(found)} files, {total:,} bytes, from {printable(folder)}? [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _architectures(found: "list[Kept]") -> list[tuple[str, int, int]]:
    names = sorted({one.architecture for one in found})
    groups = {name: [one.bytes for one in found if one.architecture == name] for name in names}
    return [(name, len(sizes), sum(sizes)) for name, sizes in groups.items()]


def _as_data(folder: Path, found: "list[Kept]") -> dict[str, Any]:
    return {
        "folder": str(folder),
        "files": len(found),
        "bytes": sum(one.bytes for one in found),
        "architectures": [{"name": name, "files": n, "bytes": size} for name, n, size in _architectures(found)],
        "kernels": [asdict(one) for one in found],
        "to_move": MOVING,
    }
