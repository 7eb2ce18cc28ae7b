"""Options that several commands share."""

import argparse
import os
import sys
from importlib import metadata
from pathlib import Path

DEVICES = ("cpu", "cuda")
BACKENDS = ("auto", "hopper", "triton", "reference")
"""`auto` and the names in `tamis.backends`, which is too heavy to import for a help text; a test compares the two."""
BACKEND_GROUP = "tamis.backends"
"""The group of entry points by which other packages add backends."""
LATENT_LAYOUTS = (
    *("v32-bf16", "v32-fp16", "v32-fp32", "v32-fp8"),
    *("v4-bf16", "v4-fp16", "v4-fp32", "v4-fp8", "v41-fp8", "v41-fp4", "plain-fp8"),
)
INDEX_LAYOUTS = ("index-fp8", "index-mxfp4")
"""The byte formats of `tamis.cache.layout`; a test compares the two."""
NO_ROPE_LAYOUTS = ("v32-fp8-512", "v32-bf16-512")
"""Rows without a rope for `tamis bench`, as in `tamis.lab.bench.jobs`; a test compares the two."""


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add the option for the device."""
    parser.add_argument("--device", choices=DEVICES, help="where to run (default: the GPU if there is one)")


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add the option for the backend."""
    parser.add_argument(
        "--backend",
        type=backend,
        default="auto",
        metavar="NAME",
        help="backend to use, as tamis backends lists them (default: auto)",
    )


def backend(text: str) -> str:
    """The name of a backend. Where another package adds backends, or torch is loaded anyway, it is judged later, by
    `tamis.cli.machine.check_backend`."""
    judged_later = "tamis.backends" in sys.modules or bool(metadata.entry_points(group=BACKEND_GROUP))
    if text not in BACKENDS and not judged_later:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(BACKENDS)}; got {text!r}.")
    return text


def layout(text: str) -> str:
    """The name of a format of latent rows."""
    if text not in LATENT_LAYOUTS:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(LATENT_LAYOUTS)}; got {text!r}.")
    return text


def check_file(option: str, path: Path | None) -> None:
    """Refuse a file that could not be written in the end, before anything takes time.

    A regular file is written beside its place and moved there, so the folder must be writable, and not the file.
    """
    if path is None:
        return
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{option} must be a file in an existing folder, got {path}; choose another place")
    special = path.exists() and not path.is_file()
    if not os.access(path if special else path.resolve().parent, os.W_OK):
        raise ValueError(f"{option} must be a file that can be written, got {path}; choose another place")
