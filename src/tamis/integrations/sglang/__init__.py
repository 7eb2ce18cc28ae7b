"""tamis as an implementation of SGLang's sparse attention.

`register` is the plugin's entry point. It installs two parts:

- `dsa_plugin` for V3.2, GLM-5 and what else SGLang runs as DSA; the attention itself is in `dsa_attention`;
- `v4_plugin` for DeepSeek-V4, whose backends are in `v4_backend` and its attention in `v4_attention`.

Only `dsa_plugin` and `v4_backend` import SGLang when they are imported. The other modules take any objects with the
attributes of SGLang's, so that they can be tested without it.
"""

from functools import cache
from importlib import import_module
from logging import getLogger

_PARTS = {
    "--dsa-decode-backend and --dsa-prefill-backend": "tamis.integrations.sglang.dsa_plugin",
    "--dsv4-attn-backend": "tamis.integrations.sglang.v4_plugin",
}
"""Options of SGLang, and the modules whose function `install` lets them take "tamis"."""


def register() -> None:
    """Let SGLang's options choose tamis, for example `--dsa-decode-backend tamis --dsa-prefill-backend tamis`.

    SGLang calls this in every process it starts, before it reads its command line. It changes nothing for users who do
    not choose tamis, and touches no device.

    It never raises, because SGLang would only log the exception and go on. Where the plugin cannot work, it logs one
    line that says why, and SGLang's parser then refuses the value "tamis".
    """
    from tamis._version import __version__
    from tamis.integrations.sglang.versions import plugin_refusal

    log, refusal = getLogger("tamis"), plugin_refusal()
    if refusal is not None:
        log.warning("tamis is not an attention backend of SGLang here: %s", refusal)
        return
    for options, module in _PARTS.items():
        try:
            import_module(module).install()
        except Exception as error:  # an SGLang that was changed may fail in any way
            problem = f"{type(error).__name__}: {error}"
            log.warning("tamis is not a value of SGLang's %s here: %s", options, problem)
        else:
            log.info("tamis %s is a value of SGLang's %s", __version__, options)


@cache
def announce(line: str) -> None:
    """Log a line once in a process, which may construct many backends. SGLang itself does not tell of lost plugins."""
    getLogger("tamis").info(line)
