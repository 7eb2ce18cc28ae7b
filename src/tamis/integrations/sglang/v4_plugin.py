"""Registers tamis' attention for DeepSeek-V4 with SGLang. Importing this module does not import SGLang."""

from importlib import import_module
from typing import Any, get_type_hints

from tamis.integrations.sglang.v4_options import OPTION, VALUE

_ATTENTION = "sglang.srt.layers.attention"
_FACTORIES = f"{_ATTENTION}.deepseek_v4_trtllm_backend"
"""SGLang 0.5.23 constructs its V4 backends in two functions of this module. SGLang 0.5.17 has neither."""


def install() -> None:
    """Let SGLang choose tamis for DeepSeek-V4, and replace what it constructs then.

    SGLang calls its plugins once per process and applies their hooks afterwards. On platforms other than CUDA nothing
    is installed, so SGLang's parser refuses the value there.
    """
    platform = import_module("sglang.srt.utils")
    if platform.is_hip() or platform.is_npu() or platform.is_xpu():
        return
    hooks = import_module("sglang.srt.plugins.hook_registry")
    backend = import_module("tamis.integrations.sglang.v4_backend")
    if add_choice(import_module("sglang.srt.server_args").ServerArgs):
        wanted = {
            f"{_FACTORIES}.create_deepseek_v4_attn_backend": backend.create_attn_backend,
            f"{_FACTORIES}.create_deepseek_v4_multistep_backend": backend.create_multistep_backend,
        }
        kind = hooks.HookType.AROUND
    else:
        wanted = {f"{_ATTENTION}.deepseek_v4_backend.DeepseekV4AttnBackend": backend.TamisV4AttnBackend}
        kind = hooks.HookType.REPLACE
    for target, hook in wanted.items():
        hooks.HookRegistry.register(target, hook, kind)


def add_choice(server_args: Any) -> bool:
    """Add tamis to the values of `--dsv4-attn-backend`; False if this version of SGLang has no such option."""
    hint = get_type_hints(server_args, include_extras=True).get(OPTION)
    if hint is None:
        return False
    choices = hint.__metadata__[0].choices
    if VALUE not in choices:
        choices.append(VALUE)
    return True
