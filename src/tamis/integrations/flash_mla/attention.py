"""The attention of checked arguments, whose lse leaves the kernels in FlashMLA's form."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.selection import Selection
from tamis.integrations.flash_mla.selections import Tokens
from tamis.ops import memory
from tamis.ops.attention import Prepared, check_attend, folded_scale, new_output, operations, read_by
from tamis.ops.attention.operations import Attend
from tamis.ops.combine import Attended, check_output
from tamis.ops.combine.operations import contiguous_sink
from tamis.ops.lse import LseForm


def attend_checked(
    q: Tensor,
    selections: list[Selection],
    form: LseForm,
    *,
    scale: float,
    value_dim: int,
    sink: Tensor | None,
    out: Tensor | None,
    q_scale: float | Tensor = 1.0,
    splits: int | None = None,
    keep: Callable[[Attend], None] | None = None,
) -> Attended:
    """What `tamis.ops.attend` does, with arguments that this package has checked and the lse in that form. `keep`, if
    given, is called with the operation's arguments once they have passed all checks."""
    result = new_output(q, value_dim) if out is None else out
    if out is not None:
        check_output(out, (*q.shape[:2], value_dim), q.device, q, sink, *read_by(selections))
    scales = folded_scale(scale, q_scale)
    call = Attend(q, selections, *scales, splits, contiguous_sink(sink), result, False, form, "auto")
    check_attend(call)
    if keep is not None:
        keep(call)
    return Attended(result, *operations.attend(call))


class KnownCalls(memory.Memory[Prepared]):
    """What is remembered of calls of one of FlashMLA's functions."""

    def keep_call(
        self, signature: memory.Signature | None, given: Sequence[Tensor], out: Tensor | None, shape: tuple[int, ...]
    ) -> Callable[[Attend], None] | None:
        """A function that remembers the operation of a call, for `attend_checked`; None without a signature.

        Args:
            signature: the signature of the call.
            given: its query and indices. The operation must read them where they are, and not in copies.
            out: its output, if it was given.
            shape: the shape of new outputs.
        """
        if signature is None:
            return None

        def keep(call: Attend) -> None:
            read = [call.q, *(selection.slots for selection in call.selections)]
            if all(one.data_ptr() == other.data_ptr() for one, other in zip(given, read, strict=True)):
                self.keep(signature, Prepared.of(call, out, shape))

        return keep


def decode_form(tokens: Tokens) -> LseForm:
    """[b, h, s_q], +inf where there is nothing to attend to."""
    return LseForm(tokens.per_request, plus_inf=True)


def prefill_form(base_2: bool) -> LseForm:
    """[s_q, h], +inf where there is nothing to attend to."""
    return LseForm(base_2=base_2, plus_inf=True)


def in_base_2(max_logits: Tensor) -> Tensor:
    """Largest logits in base 2, which kernels return in natural-log units only."""
    return max_logits / math.log(2)


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
