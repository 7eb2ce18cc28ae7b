"""The one style of `--json`: indented by two, beginning with the command, the version and `ok`, numbers as numbers.

Units are part of a key's name (`median_us`, `prefill_seconds`, `bytes`). A value that does not exist is null, and so is
a number that JSON does not have (infinity, NaN). Versions and compute capabilities are texts.
"""

import json
from math import isfinite
from typing import Any

from tamis._version import __version__


def print_json(command: str, ok: bool, data: dict[str, Any]) -> None:
    """Print a command's result as one JSON object. `ok` is whether its exit code is 0."""
    print(json.dumps({"command": command, "version": __version__, "ok": ok} | _finite(data), indent=2, allow_nan=False))


def with_unit(data: dict[str, Any], unit: str, *endings: str) -> dict[str, Any]:
    """The data with a unit added to the names of the keys that end so: `p10` becomes `p10_us`."""
    return {f"{key}_{unit}" if key.endswith(endings) else key: value for key, value in data.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
