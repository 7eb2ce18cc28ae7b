"""Registers tamis' attention for DeepSeek-V4 with SGLang. Importing this module does not import SGLang."""

from importlib import import_module

from tamis.integrations.sglang.options import V4_FIELD, add_choice

_ATTENTION = "sglang.srt.layers.attention"
_FACTORIES = f"{_ATTENTION}.deepseek_v4_trtllm_backend"
"""SGLang 0.5.23 constructs its V4 backends in two functions of this module. SGLang 0.5.17 has neither."""


def install() -> None:
    """Let SGLang choose tamis for DeepSeek-V4, and replace what it constructs then.

    SGLang calls its plugins once per process and applies their hooks afterwards.
    """
    hooks, arguments = import_module("sglang.srt.plugins.hook_registry"), import_module("sglang.srt.server_args")
    backend = import_module("tamis.integrations.sglang.v4_backend")
    register, kinds = hooks.HookRegistry.register, hooks.HookType
    if not hasattr(arguments.ServerArgs, V4_FIELD):
        register(f"{_ATTENTION}.deepseek_v4_backend.DeepseekV4AttnBackend", backend.TamisV4AttnBackend, kinds.REPLACE)
        return
    add_choice(arguments.ServerArgs, V4_FIELD)
    register(f"{_FACTORIES}.create_deepseek_v4_attn_backend", backend.create_attn_backend, kinds.AROUND)
    register(f"{_FACTORIES}.create_deepseek_v4_multistep_backend", backend.create_multistep_backend, kinds.AROUND)
