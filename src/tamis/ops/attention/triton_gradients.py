"""Portable attention over rows with gradients in Triton: launches. The forward pass is that of inference.

Several selections are joined into one first: their rows are few beside the queries, so that a copy of them and of the
slots costs little, and every kernel handles one list.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tamis import checks
from tamis.cache.layout import rows as row_layout
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Rows, Selection
from tamis.ops.attention import triton_kernels
from tamis.ops.attention.operations import Attend
from tamis.ops.attention.row_operations import AttendRows, AttendRowsBackward, IndexTarget
from tamis.ops.attention.triton_backward import (
    delta_kernel,
    query_gradient_kernel,
    row_gradient_kernel,
    split_kernel,
    target_kernel,
)
from tamis.ops.lse import LseForm
from tamis.ops.rows.triton_rows import interpreted, launching_on
from tamis.ops.rows.triton_sums import RowSums

MAX_WIDTH = triton_kernels.MAX_LATENT + triton_kernels.MAX_ROPE
"""The widest rows that the kernels hold."""
PAIR_BYTES = 512 << 20
"""Memory for the contributions of some tokens in the deterministic mode."""


SPLIT_BLOCK = 4096
"""Numbers of a program that divides a wide output."""
SCRATCH = 16 << 10
"""Shared memory beside the operands, at most: operands that change their layout pass through it."""


@dataclass(frozen=True)
class Blocks:
    """Heads and columns of a program, and its warps."""

    heads: int
    columns: int
    warps: int

    def query_bytes(self, width: int, value_dim: int, size: int) -> int:
        """Shared memory of the queries' gradient: queries, output gradients and rows of numbers of that size."""
        row, value = _held(width, width), _held(width, value_dim)
        return size * (self.heads * (row + value) + self.columns * row) + SCRATCH

    def row_bytes(self, width: int, size: int) -> int:
        """Shared memory of the rows' gradient: rows, and queries and output gradients interleaved."""
        return size * (self.columns + 2 * self.heads) * _held(width, width) + SCRATCH


def _held(width: int, part: int) -> int:
    """Columns of a program's blocks for the first `part` columns of a row."""
    widths = _widths(width)
    latent: int = widths["BLOCK_L"]
    return latent + widths["BLOCK_T"] if part > widths["LATENT"] else latent


SMALL, SMALL_AMD = Blocks(16, 16, 8), Blocks(16, 16, 4)
"""Fits every GPU in bf16. AMD's wavefronts are twice as wide."""
LARGE_QUERIES, LARGE_ROWS = Blocks(64, 32, 8), Blocks(32, 64, 8)
"""For the matrix instructions of Hopper and Blackwell, whose tiles have 64 rows."""


@lru_cache(256)
def choose_blocks(
    dtype: torch.dtype, heads: int, width: int, value_dim: int, shared_memory: int, amd: bool = False
) -> tuple[Blocks, Blocks]:
    """The blocks of the queries' and of the rows' gradient. They depend on nothing that changes with the batch."""
    small = SMALL_AMD if amd else SMALL
    if dtype != torch.bfloat16 or shared_memory < 200 * 1024:
        return small, small
    queries = LARGE_QUERIES if heads > 16 else small
    queries = queries if queries.query_bytes(width, value_dim, 2) <= shared_memory else small
    return queries, LARGE_ROWS if LARGE_ROWS.row_bytes(width, 2) <= shared_memory else small


def attend_rows(call: AttendRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `gradients.attend_rows`."""
    return attend_rows_with(call, triton_kernels.attend)


def attend_rows_with(
    call: AttendRows,
    attend: Callable[[Attend], tuple[Tensor, Tensor]],
    attend_with_rest: Callable[[Attend, Tensor], tuple[Tensor, Tensor] | None] = lambda _call, _rest: None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The forward pass by the attention of a backend, which may write the rest of an output by itself."""
    q, rows = call.q.detach(), join(call.selections)
    shape = (*q.shape[:2], call.value_dim)
    if rows.slots.shape[1] == 0 or len(rows.rows) == 0 or len(q) == 0:
        out, lse, max_logits, rest = call.fake()
        return out.zero_(), lse.fill_(-torch.inf), max_logits.fill_(-torch.inf), rest.zero_()
    latent = min(q.shape[2], triton_kernels.MAX_LATENT)
    layout = row_layout(q.dtype, latent=latent, rope=q.shape[2] - latent)
    selection = Selection(PagedCache.rebuilt(rows.rows.unsqueeze(1), layout, 1.0), rows.slots, rows.lengths)
    out = torch.empty(shape, dtype=q.dtype, device=q.device)
    # A number of splits that follows the batch would change a token's bits with it.
    splits = 1 if call.deterministic else None
    given = Attend(q, [selection], call.scale, None, splits, call.sink, out, False, LseForm(), call.backend)
    if not call.has_rest:
        return out, *attend(given), out.new_empty(0, dtype=q.dtype)
    rest = torch.empty_like(out)
    written = attend_with_rest(given, rest)
    if written is not None:
        return out, *written, rest
    found = torch.empty(shape, dtype=torch.float32, device=q.device)
    lse, max_logits = attend(given._replace(out=found))
    with launching_on(q.device):
        split_kernel[(triton.cdiv(found.numel(), SPLIT_BLOCK),)](**split_arguments(found, out, rest))
    return out, lse, max_logits, rest


def attend_rows_backward(call: AttendRowsBackward) -> tuple[Tensor, list[Tensor], Tensor]:
    """As `gradients.attend_rows_backward`."""
    q, rows = contiguous_columns(call.q.detach()), join(call.selections)
    dout = None if call.dout is None else contiguous_columns(call.dout)
    delta = delta_of(call, dout)
    given = Given(q, rows, dout, call.lse, delta, call.dlse, call.sink, call.scale, call.out.shape[2])
    dq = _query_gradient(given) if call.q_wanted else q.new_empty(0, dtype=q.dtype)
    summed = dq
    if call.rows_wanted:
        summed = _ordered_row_gradient(given) if call.deterministic else _row_gradient(given)
    return dq, row_gradients(call, summed), sink_gradient(call, delta)


def row_gradients(call: AttendRowsBackward, summed: Tensor) -> list[Tensor]:
    """The gradients of all selections' rows, in their dtype, from the sums of the joined ones."""
    if not call.rows_wanted:
        return [s.rows.new_empty(0, dtype=call.q.dtype) for s in call.selections]
    return list(summed.to(call.q.dtype).split([len(s.rows) for s in call.selections]))


def index_target(call: IndexTarget) -> Tensor:
    """As `gradients.index_target`."""
    (selection,), q = call.selection, contiguous_columns(call.q.detach())
    rows = join([selection])
    found = torch.zeros(selection.slots.shape, dtype=torch.float32, device=q.device)
    given = Given(q, rows, None, call.lse, None, None, call.sink, call.scale, q.shape[2])
    arguments, options = target_arguments(given, found)
    if found.numel():
        with launching_on(q.device):
            target_kernel[(len(q) * arguments["COLUMN_BLOCKS"],)](**arguments, **options)
    if call.normalise:
        total = found.sum(1, keepdim=True)
        found /= total.masked_fill_(total == 0, 1.0)
    return found


def check_attend_rows(call: AttendRows | AttendRowsBackward | IndexTarget) -> None:
    """Refuse what these kernels cannot do."""
    remedy = "pass backend='reference'"
    width, dtype = call.q.shape[2], call.q.dtype
    if dtype == torch.float64:
        raise checks.refuse_type("q", "at most float32 for the triton backend", "float64", remedy)
    if width > MAX_WIDTH:
        raise checks.refuse("q", f"at most {MAX_WIDTH} wide for the triton backend", width, remedy)
    if dtype != torch.bfloat16 and call.q.device.type == "cuda" and torch.version.hip is None:
        # Products of other dtypes run in float32, whose operands may not fit. (AMD's compiler keeps them in registers.)
        needed, there = SMALL.row_bytes(width, 4), shared_memory_of(call.q.device)
        if needed > there:
            expected = f"bfloat16, or so narrow that {there} bytes of shared memory are enough, for the triton backend"
            received = f"{checks.dtype_name(dtype)} of {width} columns, which take {needed}"
            raise checks.refuse("q", expected, received, f"convert it, or {remedy}")


check_attend_rows_backward = check_index_target = check_attend_rows


class Given(NamedTuple):
    """What the kernels of a backward pass read."""

    q: Tensor
    rows: Rows
    dout: Tensor | None
    lse: Tensor
    delta: Tensor | None
    dlse: Tensor | None
    sink: Tensor | None
    scale: float
    value_dim: int


def join(selections: list[Rows]) -> Rows:
    """One list of rows and slots for all selections, columns next to each other; nothing is copied of a single one."""
    if len(selections) == 1:
        (one,) = selections
        lengths = None if one.lengths is None else one.lengths.contiguous()
        return Rows(contiguous_columns(one.rows.detach()), one.slots, lengths)
    slots, first = [], 0
    for one in selections:
        slots.append(torch.where(counted(one), one.slots + first, -1))
        first += len(one.rows)
    return Rows(torch.cat([one.rows.detach() for one in selections]), torch.cat(slots, dim=1))


def counted(selection: Rows) -> Tensor:
    """Which columns [T, K] count."""
    valid = (selection.slots >= 0) & (selection.slots < len(selection.rows))
    if selection.lengths is not None:
        column = torch.arange(selection.slots.shape[1], dtype=torch.int32, device=selection.slots.device)
        valid &= column < selection.lengths.unsqueeze(1)
    return valid


def counted_slots(selection: Rows) -> Tensor:
    """The slots [T, K]; the number of rows in place of those that do not count."""
    return torch.where(counted(selection), selection.slots, len(selection.rows))


def contiguous_columns(values: Tensor) -> Tensor:
    """A tensor whose last axis is contiguous, as kernels read it."""
    return values if values.stride(-1) == 1 or values.shape[-1] == 1 else values.contiguous()


def delta_of(call: AttendRowsBackward, dout: Tensor | None) -> Tensor | None:
    """The sum of the output times its gradient, of each token and head."""
    if dout is None:
        return None
    delta = torch.empty_like(call.lse)
    if delta.numel():
        arguments = delta_arguments(call.out, call.rest if call.rest.numel() else None, dout, delta)
        with launching_on(dout.device):
            delta_kernel[(delta.numel(),)](**arguments, num_warps=1)
    return delta


def _query_gradient(given: Given) -> Tensor:
    dq = torch.zeros(given.q.shape, dtype=given.q.dtype, device=given.q.device)
    arguments, options = query_arguments(given, dq)
    if dq.numel() and given.rows.slots.shape[1]:
        with launching_on(dq.device):
            query_gradient_kernel[(len(dq) * arguments["HEAD_BLOCKS"],)](**arguments, **options)
    return dq


def _row_gradient(given: Given) -> Tensor:
    drows = torch.zeros(given.rows.rows.shape, dtype=torch.float32, device=given.q.device)
    _launch_rows(given, drows, 0, len(given.q), pairs=False)
    return drows


def _ordered_row_gradient(given: Given) -> Tensor:
    """Chunks of tokens whose pairs fit `PAIR_BYTES`: each pair's gradient is stored, then added up in order."""
    rows, (tokens, columns) = given.rows, given.rows.slots.shape
    width = rows.rows.shape[1]
    sums = RowSums(rows.rows)
    step = max(1, PAIR_BYTES // max(1, 4 * columns * width))
    pairs = torch.empty(min(step, tokens) * columns, width, dtype=torch.float32, device=given.q.device)
    slots = counted_slots(rows)
    for start in range(0, tokens if columns else 0, step):
        end = min(start + step, tokens)
        _launch_rows(given, pairs, start, end, pairs=True)
        sums.add(slots[start:end].flatten(), pairs[: (end - start) * columns])
    return sums.result()


def _launch_rows(given: Given, target: Tensor, start: int, end: int, *, pairs: bool) -> None:
    arguments, options = row_arguments(given, target, start, pairs=pairs)
    programs = (end - start) * arguments["COLUMN_BLOCKS"]
    if programs and target.numel():
        with launching_on(target.device):
            row_gradient_kernel[(programs,)](**arguments, **options)


def sink_gradient(call: AttendRowsBackward, delta: Tensor | None) -> Tensor:
    """The gradient of the sink; empty without one."""
    if call.sink is None:
        return call.lse.new_empty(0, dtype=call.lse.dtype)
    if delta is None:
        return torch.zeros_like(call.sink)
    # An empty row has no share in the sink's gradient.
    empty = call.lse == -torch.inf
    lse = call.lse.masked_fill(empty, 0.0)
    return -(delta.masked_fill(empty, 0.0) * torch.sigmoid(call.sink - lse)).sum(0)


def split_arguments(wide: Tensor, out: Tensor, rest: Tensor) -> dict[str, Any]:
    """Arguments of `split_kernel`."""
    return {"wide": wide, "out": out, "rest": rest, "count": wide.numel(), "BLOCK": SPLIT_BLOCK}


def delta_arguments(out: Tensor, rest: Tensor | None, dout: Tensor, delta: Tensor) -> dict[str, Any]:
    """Arguments of `delta_kernel`."""
    return {
        "out": out,
        "rest": rest,
        "dout": dout,
        "dout_token_stride": dout.stride(0),
        "dout_head_stride": dout.stride(1),
        "dout_column_stride": dout.stride(2),
        "delta": delta,
        "heads": out.shape[1],
        "VALUE_DIM": out.shape[2],
        "BLOCK_V": triton.next_power_of_2(out.shape[2]),
    }


def query_arguments(
    given: Given, dq: Tensor, limits: tuple[int, bool] | None = None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and options of `query_gradient_kernel`; `limits` are a device's shared memory, and whether it is
    AMD's, if they are not those of the tensors' device."""
    blocks, _ = _blocks(given, limits)
    arguments = _common_arguments(given, blocks) | _gradient_arguments(given)
    arguments |= {"dq": dq, "HEAD_BLOCKS": triton.cdiv(given.q.shape[1], blocks.heads)}
    return arguments, {"num_warps": blocks.warps, "num_stages": 1}


def row_arguments(
    given: Given, drows: Tensor, first_token: int, *, pairs: bool, limits: tuple[int, bool] | None = None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and options of `row_gradient_kernel`."""
    _, blocks = _blocks(given, limits)
    arguments = _common_arguments(given, blocks) | _gradient_arguments(given)
    column_blocks = triton.cdiv(given.rows.slots.shape[1], blocks.columns)
    arguments |= {"drows": drows, "first_token": first_token, "PAIRS": pairs, "COLUMN_BLOCKS": column_blocks}
    return arguments, {"num_warps": blocks.warps, "num_stages": 1}


def target_arguments(
    given: Given, target: Tensor, limits: tuple[int, bool] | None = None
) -> tuple[dict[str, Any], dict[str, int]]:
    """Arguments and options of `target_kernel`."""
    _, blocks = _blocks(given, limits)
    column_blocks = triton.cdiv(given.rows.slots.shape[1], blocks.columns)
    arguments = _common_arguments(given, blocks) | {"target": target, "COLUMN_BLOCKS": column_blocks}
    return arguments, {"num_warps": blocks.warps, "num_stages": 1}


def shared_memory_of(device: torch.device) -> int:
    """Bytes of shared memory that a CTA may have; 0 for the host, where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    properties: Any = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)


def _blocks(given: Given, limits: tuple[int, bool] | None) -> tuple[Blocks, Blocks]:
    q = given.q
    limits = (shared_memory_of(q.device), torch.version.hip is not None) if limits is None else limits
    return choose_blocks(q.dtype, q.shape[1], q.shape[2], given.value_dim, *limits)


def _widths(width: int) -> dict[str, Any]:
    """The two parts of a row, as attention divides it."""
    return triton_kernels.row_widths(row_layout(torch.float32, latent=width, rope=0))


def _common_arguments(given: Given, blocks: Blocks) -> dict[str, Any]:
    q, rows, slots = given.q, given.rows.rows, given.rows.slots
    on_host = interpreted(query_gradient_kernel)
    widths = _widths(q.shape[2])
    return {
        "q": q,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "rows": rows,
        "row_stride": rows.stride(0),
        "slots": slots,
        "slots_token_stride": slots.stride(0),
        "slots_column_stride": slots.stride(1),
        "lengths": given.rows.lengths,
        "lse": given.lse,
        "sink": given.sink,
        "scale": given.scale,
        "count": len(rows),
        "heads": q.shape[1],
        "columns": slots.shape[1],
        "COMPUTE": tl.bfloat16 if q.dtype == torch.bfloat16 and not on_host else tl.float32,
        **{name: widths[name] for name in ("LATENT", "BLOCK_L", "TAIL", "BLOCK_T")},
        "BLOCK_H": blocks.heads,
        "BLOCK_N": blocks.columns,
        "INTERPRETED": on_host,
    }


def _gradient_arguments(given: Given) -> dict[str, Any]:
    dout = given.dout
    return {
        "dout": dout,
        "dout_token_stride": 0 if dout is None else dout.stride(0),
        "dout_head_stride": 0 if dout is None else dout.stride(1),
        "delta": given.delta,
        "dlse": None if given.dlse is None else given.dlse.contiguous(),
        "VALUE_DIM": given.value_dim,
    }
