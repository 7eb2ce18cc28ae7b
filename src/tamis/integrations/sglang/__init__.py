"""tamis as an implementation of SGLang's sparse attention.

`register` is the plugin's entry point. `dsa_plugin` serves V3.2, GLM-5 and what else SGLang runs as DSA; `v4_plugin`
serves DeepSeek-V4 through `v4_backend`.

Only `dsa_plugin` and `v4_backend` import SGLang. The other modules take any objects with the attributes of SGLang's,
so that they can be tested without it.
"""

from importlib import import_module
from logging import getLogger

_PARTS = ("tamis.integrations.sglang.dsa_plugin", "tamis.integrations.sglang.v4_plugin")
"""Modules with a function `install`."""


def register() -> None:
    """Let SGLang's options choose tamis: `--dsa-decode-backend tamis --dsa-prefill-backend tamis`.

    SGLang calls this in every process it starts, before it reads its command line. It changes nothing for users who do
    not choose tamis, and touches no device.

    It never raises, because SGLang would only log the exception and go on. Where the plugin cannot work, it logs one
    line that says why, and SGLang's parser then refuses the value "tamis".
    """
    from tamis._version import __version__
    from tamis.integrations.sglang.versions import plugin_refusal

    log = getLogger("tamis")
    try:
        problem = plugin_refusal()
        for part in _PARTS if problem is None else ():
            import_module(part).install()
    except Exception as error:  # a changed SGLang may fail in any way
        problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        log.warning("tamis is not an attention backend of SGLang here: %s", problem)
    else:
        log.info(
            "tamis %s is registered with SGLang: --dsa-decode-backend tamis --dsa-prefill-backend tamis", __version__
        )
