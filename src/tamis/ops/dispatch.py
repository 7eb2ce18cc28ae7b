"""From a stage and a backend name to the module that implements it."""

from functools import cache
from importlib import import_module
from typing import Any

import torch

from tamis import checks
from tamis.backends import backend_for_stage


def implementation(stage: str, backend: str, device: torch.device) -> Any:
    """The module of `tamis.ops.<stage>` for this backend; all of them offer the same functions."""
    try:
        return _module(stage, backend, device)
    except TypeError:
        # What cannot be hashed cannot be looked up.
        checks.instance("backend", backend, str, "pass 'auto' or a name from `tamis backends`")
        raise


@cache
def _module(stage: str, backend: str, device: torch.device) -> Any:
    return import_module(backend_for_stage(stage, backend, device).stage_module(stage))
