"""The parameters that attention kernels share: the Python twins of the structs in `params.cuh`.

T is the number of query tokens, H of heads, K of selected columns, S of splits.
"""

from typing import NamedTuple

from torch import Tensor

from tamis.cache.selection import Selection
from tamis.cuda.params import Float, Int, Long, Pointer, pointer
from tamis.ops.attention.hopper.splits import OUT_KINDS, Outputs
from tamis.ops.lse import LseForm


class QueryParams(NamedTuple):
    """The queries and the softmax scale."""

    q: Pointer
    """bfloat16 or float16 [T, H, 576]."""
    token_stride: Long
    head_stride: Long
    heads: Int
    scale: Float
    """The softmax scale."""
    scale_factor: Pointer
    """float32 [1], a second factor of the softmax scale; 0 for none."""


class OutputParams(NamedTuple):
    """The destination of the results: the first `whole` tokens to `out`, `lse`, `max_logits`, the others to splits."""

    out: Pointer
    """float32, bfloat16 or float16 [T, H, 512]."""
    out_kind: Int
    """0 for float32, 1 for bfloat16, 2 for float16."""
    token_stride: Long
    head_stride: Long
    rest: Long
    """How far from an element of out what rounding cuts off it is written; only for kernels with KEEP_REST."""
    lse: Pointer
    """float32 [T / group, H, group], contiguous."""
    max_logits: Pointer
    """float32 [T / group, H, group], contiguous."""
    group: Int
    """Query tokens that are neighbours in lse and max_logits."""
    lse_factor: Float
    """1 for natural logarithms, log2(e) for base 2."""
    empty_lse: Float
    """The lse of a row that attends to nothing."""
    sink: Pointer
    """float32 [H], 0 for none; applied to whole tokens only."""
    split_out: Pointer
    """float32 [S, T - whole, H, 512], contiguous."""
    split_lse: Pointer
    """float32 [S, T - whole, H], contiguous."""
    split_max_logits: Pointer
    """float32 [S, T - whole, H], contiguous."""
    whole: Int
    """Tokens that are not split."""
    split_tokens: Int
    """T - whole."""
    splits: Int


class SelectionParams(NamedTuple):
    """The rows of one cache that the query tokens attend to."""

    rows: Pointer
    """The cache's bytes [pages, page_size, row bytes]."""
    page_stride: Long
    """In bytes."""
    page_size: Int
    pages: Int
    slots: Pointer
    """int32 [T, K]: slots, or with a block table positions; -1 padded."""
    token_stride: Long
    column_stride: Long
    columns: Int
    lengths: Pointer
    """int32 [T], how many columns of a token count; 0 if all do."""
    request_ids: Pointer
    """int32 [T]; 0 without a block table."""
    block_table: Pointer
    """int32 [requests, table_width]; 0 for none."""
    table_stride: Long
    table_width: Int
    requests: Int


class AttendParams(NamedTuple):
    """One launch of `few_heads.cu` or `heads_as_columns.cu`."""

    items: Int
    """Work items: whole tokens, then splits of the others."""
    split_columns: Int
    """Columns of a split."""
    query: QueryParams
    output: OutputParams
    selection: SelectionParams


def query_params(q: Tensor, scale: float | Tensor, held: list[Tensor]) -> QueryParams:
    """Describe queries [T, H, W]; a factor that had to be converted goes to `held`, to be kept until the launch."""
    factor = 0
    if isinstance(scale, Tensor):
        held.append(scale.float())
        scale, factor = 1.0, held[-1].data_ptr()
    return QueryParams(q.data_ptr(), q.stride(0), q.stride(1), q.shape[1], scale, factor)


def output_params(whole: Outputs, splits: Outputs | None, sink: Tensor | None, form: LseForm) -> OutputParams:
    """Describe the outputs of T tokens, and the splits [S, T - whole, H, ...] of those that are split, if any are."""
    out = whole.out
    if splits is None:
        count, split_tokens, addresses = 1, 0, (0, 0, 0)
    else:
        count, split_tokens = splits.lse.shape[:2]
        addresses = splits.out.data_ptr(), splits.lse.data_ptr(), splits.max_logits.data_ptr()
    return OutputParams(
        out.data_ptr(),
        OUT_KINDS[out.dtype],
        out.stride(-3),
        out.stride(-2),
        0,
        whole.lse.data_ptr(),
        whole.max_logits.data_ptr(),
        max(1, form.group),
        form.factor,
        form.empty,
        pointer(sink),
        *addresses,
        out.shape[-3] - split_tokens,
        split_tokens,
        count,
    )


def selection_params(selection: Selection, held: list[Tensor]) -> SelectionParams:
    """Describe a selection; tensors that had to be copied go to `held`, to be kept until the launch."""
    cache, slots, table = selection.cache, selection.slots, selection.block_table
    lengths_at = request_ids_at = table_at = table_stride = table_width = requests = 0
    if selection.lengths is not None:
        held.append(lengths := selection.lengths.contiguous())
        lengths_at = lengths.data_ptr()
    if selection.request_ids is not None:
        held.append(request_ids := selection.request_ids.contiguous())
        request_ids_at = request_ids.data_ptr()
    if table is not None:
        if table.stride(1) != 1:
            held.append(table := table.contiguous())
        table_at, table_stride = table.data_ptr(), table.stride(0)
        requests, table_width = table.shape
    return SelectionParams(
        cache.storage.data_ptr(),
        cache.page_stride,
        cache.page_size,
        cache.pages,
        slots.data_ptr(),
        slots.stride(0),
        slots.stride(1),
        slots.shape[1],
        lengths_at,
        request_ids_at,
        table_at,
        table_stride,
        table_width,
        requests,
    )
