"""What SGLang imports and a machine without a GPU cannot have. Importing this module puts it there, before SGLang."""

import sys
from types import ModuleType

import torch
from transformers import AutoConfig

# torchvision's wheel registers operations in a CUDA library, and declares fakes for them in Python.
_OPERATIONS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATIONS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def _absent(*_arguments: object, **_keywords: object) -> None:
    raise AssertionError("a kernel of FlashMLA was called, which this environment does not have")


def _put(name: str, **names: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(names)
    sys.modules[name] = module
    return module


class FlashMLASchedMeta:
    """The name that SGLang takes from FlashMLA to annotate with."""


# FlashMLA loads a CUDA library when it is imported.
_interface = _put("flash_mla.flash_mla_interface", FlashMLASchedMeta=FlashMLASchedMeta)
_fused = _put("flash_mla.fused_norm_rope_attn_rope_cast")
_put(
    "flash_mla",
    flash_mla_with_kvcache=_absent,
    flash_mla_sparse_fwd=_absent,
    get_mla_metadata=_absent,
    get_mla_decoding_metadata=_absent,
    flash_mla_interface=_interface,
    fused_norm_rope_attn_rope_cast=_fused,
)
# Notebooks: twenty packages for two names.
_display = _put("IPython.display", HTML=object, display=_absent)
_put("IPython", display=_display)

# Configurations that SGLang 0.5.17 brings are part of newer versions of transformers.
_register = AutoConfig.register
AutoConfig.register = staticmethod(lambda *given, exist_ok=False: _register(*given, exist_ok=True))
