"""FlashMLA's functions that tamis does not have. Programs may import them; calling one says why it is not served."""

from collections.abc import Callable
from typing import Any, NoReturn


def unsupported(name: str, reason: str) -> Callable[..., NoReturn]:
    """A function of that name that refuses every call."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} is not served by tamis: {reason}")

    refuse.__name__ = refuse.__qualname__ = name
    refuse.__doc__ = f"Refused when called: {reason}."
    return refuse


_DENSE = (
    "it is dense attention over keys and values of separate heads, which FlashMLA itself has for SM100 alone; use "
    "torch.nn.functional.scaled_dot_product_attention or FlashAttention"
)

flash_attn_varlen_func = unsupported("flash_attn_varlen_func", _DENSE)
flash_attn_varlen_kvpacked_func = unsupported("flash_attn_varlen_kvpacked_func", _DENSE)
flash_attn_varlen_qkvpacked_func = unsupported("flash_attn_varlen_qkvpacked_func", _DENSE)
