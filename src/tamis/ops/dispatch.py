"""From a stage and a backend name to the module that implements it."""

from functools import cache
from importlib import import_module
from typing import Any

import torch

from tamis.backends import backend_for_stage


@cache
def implementation(stage: str, backend: str, device: torch.device) -> Any:
    """The module of `tamis.ops.<stage>` for this backend; all of them offer the same functions."""
    return import_module(f"tamis.ops.{stage}.{backend_for_stage(stage, backend, device).module}")
