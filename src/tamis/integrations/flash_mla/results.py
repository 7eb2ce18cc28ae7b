"""FlashMLA's conventions for what a call returns, and for the output that it writes into."""

import math

import torch
from torch import Tensor

from tamis import checks
from tamis.integrations.flash_mla.selections import Tokens


def decode_lse(lse: Tensor, tokens: Tokens) -> Tensor:
    """The lse [T, H] as [b, h, s_q], +inf where there is nothing to attend to."""
    return empty_is_plus_inf(lse.unflatten(0, tokens).transpose(1, 2).contiguous())


def empty_is_plus_inf(lse: Tensor) -> Tensor:
    """FlashMLA's lse of a row with nothing valid."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def in_base_2(logits: Tensor) -> Tensor:
    """Natural-log units to base 2."""
    return logits / math.log(2)


def flat_output(out: Tensor | None, tokens: Tokens, heads: int, value_dim: int, device: torch.device) -> Tensor | None:
    """A decode step's output [b, s_q, h, d_v], if given, as a view [T, H, V]."""
    if out is None:
        return None
    requests, queries = tokens
    checks.tensor(
        "out", out, "b s_q h d_v", checks.FLOATS, device=device, b=requests, s_q=queries, h=heads, d_v=value_dim
    )
    if min(tokens) > 1 and out.stride(0) != queries * out.stride(1):
        expected = "of tokens at equal distances"
        raise checks.refuse("out", expected, f"strides {out.stride()}", "pass a contiguous one, or one request")
    return out.flatten(0, 1)
