"""FlashMLA's sparse prefill."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.selection import Selection
from tamis.checks import frozen, is_factor
from tamis.integrations import _arguments
from tamis.integrations.flash_mla.attention import KnownCalls, attend_checked, in_base_2, prefill_form
from tamis.integrations.flash_mla.formats import plain_rows
from tamis.integrations.flash_mla.metadata import check_flags
from tamis.ops import memory
from tamis.ops.combine import Attended
from tamis.ops.lse import LseForm


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    use_legacy: bool = False,
    return_log2_lse: bool | None = None,
    *,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention of each query token over the rows of a flat list that `indices` names (FlashMLA's sparse prefill).

    Args:
        q: [s_q, h, d] in bf16, fp16 or fp32, h from 1 to 128.
        kv: [s_kv, 1, d] in bf16, fp16 or fp32, with any row stride.
        indices: int32 [s_q, 1, topk]; negative ones and ones >= s_kv are skipped, duplicates count twice.
        sm_scale: softmax scale.
        d_v: how many leading columns of a row are its value.
        attn_sink: float32 [h]; scales the output only.
        topk_length: int32 [s_q], how many leading columns of `indices` count; the others are never read.
        use_legacy: changes nothing; sgl-flash-mla chooses between two builds by it.
        return_log2_lse: None for max_logits and lse in natural-log units, True for base 2, False for neither.
        out: [s_q, h, d_v] to write into, as in vLLM's build; otherwise a new tensor of q's dtype.

    Returns:
        out [s_q, h, d_v], max_logits and lse float32 [s_q, h], both after scaling; zeros, -inf and +inf where there is
        nothing to attend to. With `return_log2_lse=False` both are None.
    """
    signature = None
    if not torch.compiler.is_compiling():
        # A default device is a mode, which would put a Python function around every attribute of a tensor.
        with torch._C.DisableTorchFunction():
            options = (d_v, use_legacy, return_log2_lse)
            signature = _sign(q, kv, indices, topk_length, attn_sink, out, sm_scale, (*options, *map(type, options)))
            known = _KNOWN.find(signature)
            if known is not None:
                read = [kv, indices] if topk_length is None else [kv, indices, topk_length]
                found = known.run(q, read, sm_scale, attn_sink, out)
                if found is not None:
                    return _returned(*found, return_log2_lse)
                signature = None
    check_flags(use_legacy=use_legacy)
    if return_log2_lse is not None:
        check_flags(return_log2_lse=return_log2_lse)
    form, names = prefill_form(base_2=return_log2_lse is True), _RowNames("kv", "sm_scale")
    attended = _attend_rows(q, kv, indices, sm_scale, d_v, attn_sink, topk_length, out, form, names, signature)
    assert attended.max_logits is not None
    return _returned(attended.out, attended.lse, attended.max_logits, return_log2_lse)


def _returned(
    out: Tensor, lse: Tensor, max_logits: Tensor, base_2: bool | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if base_2 is False:
        return out, None, None
    return out, in_base_2(max_logits) if base_2 else max_logits, lse


_KNOWN = KnownCalls()


def _sign(
    q: Any, kv: Any, indices: Any, lengths: Any, sink: Any, out: Any, scale: object, options: tuple[object, ...]
) -> memory.Signature | None:
    """The signature of a call of `flash_mla_sparse_fwd`. Its scale is not part of it."""
    try:
        if not memory.remembered_on(q) or memory.has_gradient(q, sink, out) or not is_factor(scale):
            return None
        if kv.requires_grad or (sink is not None and sink.stride() != (1,)) or (out is not None and frozen(out)):
            return None  # what is refused in any case, or copied
        return (*options, *map(memory.sign, (q, kv, indices, lengths, sink, out)))
    except memory.NOT_ARGUMENTS:
        return None


def flash_mla_sparse_prefill(
    q: Tensor, kv_rows: Tensor, indices: Tensor, softmax_scale: float, d_v: int = 512
) -> Tensor:
    """`flash_mla_sparse_fwd` under the name that some vendors' builds use. It returns the output alone.

    The axis of size 1 may be left out: `kv_rows` is [s_kv, d] or [s_kv, 1, d], `indices` [s_q, topk] or [s_q, 1, topk].
    """
    kv_rows = kv_rows.unsqueeze(1) if isinstance(kv_rows, Tensor) and kv_rows.dim() == 2 else kv_rows
    indices = indices.unsqueeze(1) if isinstance(indices, Tensor) and indices.dim() == 2 else indices
    form, names = prefill_form(base_2=False), _RowNames("kv_rows", "softmax_scale")
    return _attend_rows(q, kv_rows, indices, softmax_scale, d_v, None, None, None, form, names).out


class _RowNames(NamedTuple):
    """The names of the same arguments in the two functions, for errors."""

    kv: str
    scale: str


def _attend_rows(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    scale: float,
    d_v: int,
    attn_sink: Tensor | None,
    topk_length: Tensor | None,
    out: Tensor | None,
    form: LseForm,
    names: _RowNames,
    signature: memory.Signature | None = None,
) -> Attended:
    sizes = checks.tensor("q", q, "s_q h d", checks.FLOATS)
    _arguments.head_count("q", sizes["h"])
    checks.tensor(
        names.kv, kv, "s_kv 1 d", checks.FLOATS, device=q.device, remedy="its rows are as wide as q", d=sizes["d"]
    )
    columns = checks.tensor("indices", indices, "s_q 1 topk", (torch.int32,), device=q.device, s_q=sizes["s_q"])["topk"]
    scale = checks.positive_number(names.scale, scale)
    checks.integer("d_v", d_v, low=1, high=sizes["d"])
    _arguments.sink("attn_sink", attn_sink, sizes["h"], q.device)
    if topk_length is not None:
        _arguments.lengths("topk_length", topk_length, sizes["s_q"], columns, q.device)
    # Each row is a page, so that the page stride is the row stride and may be anything.
    cache = _arguments.wrap_pages(names.kv, kv, plain_rows(kv.dtype, sizes["d"]))
    selection = Selection(cache, indices.squeeze(1), topk_length)
    keep = _KNOWN.keep_call(signature, (q, indices), out, (*q.shape[:2], d_v))
    return attend_checked(q, [selection], form, scale=scale, value_dim=d_v, sink=attn_sink, out=out, keep=keep)
