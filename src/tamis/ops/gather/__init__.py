"""Stage `gather`: reads cache rows back into plain tensors, by slot or for whole requests."""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.codec import check_read
from tamis.cache.paged import PagedCache
from tamis.ops.gather import operations
from tamis.ops.gather.operations import GatherIndex, GatherKv, ReadKv


def read_kv(cache: PagedCache, slots: Tensor, *, dtype: torch.dtype = torch.float32, backend: str = "auto") -> Tensor:
    """Dequantised rows [..., width] of integer slots [...]; a negative slot, or one past the end, reads zeros."""
    checks.instance("cache", cache, PagedCache)
    check_read(cache, slots, dtype)
    call = ReadKv(slots, cache, dtype, backend)
    operations.read_kv.check(call)
    return operations.read_kv(call)


def gather_kv(
    cache: PagedCache,
    block_table: Tensor,
    lengths: Tensor,
    *,
    starts: Tensor | None = None,
    first: Tensor | None = None,
    out: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Dequantise whole requests into one flat workspace.

    Row `starts[r] + i` of the workspace receives position `first[r] + i` of request r, for i < lengths[r]. Rows that
    belong to no request keep their content. Rope values are copied bit for bit; the rest is value x scale, rounded
    once.

    Args:
        cache: where to read.
        block_table: int32 [B, pages per request].
        lengths: int32 [B]; 0 is allowed.
        starts: int32 [B], ascending; the running sum of the lengths if not given.
        first: int32 [B], the first position to take; 0 if not given.
        out: [N, width] bf16, fp16 or fp32. If not given, bf16 with exactly the needed rows; this copies the lengths to
            the host, so it is refused under torch.compile.
        backend: a name from `tamis backends`, or "auto".
    """
    check_requests(cache, block_table, lengths, starts, first)
    starts = _running_sum(lengths) if starts is None else starts
    if out is None:
        if torch.compiler.is_compiling():
            raise checks.refuse("out", "given under torch.compile", None, "a trace cannot know how many rows it needs")
        rows = int((starts.long() + lengths).max()) if len(lengths) else 0
        out = torch.zeros(rows, cache.layout.width, dtype=torch.bfloat16, device=cache.device)
    first = torch.zeros_like(lengths) if first is None else first
    call = GatherKv(block_table, lengths, starts, first, cache, out, backend)
    check_workspace(call)
    operations.gather_kv(call)
    return out


def check_gather_kv(call: GatherKv) -> None:
    """Refuse what `gather_kv` refuses."""
    check_requests(call.cache, call.block_table, call.lengths, call.starts, call.first)
    check_workspace(call)


def check_workspace(call: GatherKv) -> None:
    """Refuse a workspace that does not fit requests that `check_requests` has accepted."""
    block_table, lengths, starts, first, cache, out, _ = call
    checks.tensor("out", out, "N D", checks.FLOATS, D=cache.layout.width, device=cache.device)
    checks.writable("out", out, cache.storage, block_table, lengths, starts, first)
    _rows_fit("out", out.shape[0], starts, lengths)
    operations.gather_kv.check(call)


def gather_index(
    cache: PagedCache,
    block_table: Tensor,
    lengths: Tensor,
    *,
    rows: int,
    starts: Tensor | None = None,
    first: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Gather index keys as they are stored: e4m3 [rows, dim] and float32 scales [rows] of an `index-fp8` cache, e2m1
    pairs uint8 [rows, dim / 2] and exponents uint8 [rows, dim / 32] of an `index-mxfp4` one.

    `rows` may be an upper bound: rows past the last request are zeros. Other arguments as in `gather_kv`.
    """
    checks.instance("cache", cache, PagedCache)
    layout = cache.layout
    one_each = layout.scales is not None and layout.scales.dtype == torch.float32 and layout.scales.count == 1
    if layout.rope or not (one_each or (layout.packed and layout.scale_mode == "exponent")):
        expected = "of layout index-fp8 or index-mxfp4"
        raise checks.refuse("cache", expected, repr(layout.name), "use gather_kv for latent rows")
    check_requests(cache, block_table, lengths, starts, first)
    checks.integer("rows", rows, low=0)
    starts = _running_sum(lengths) if starts is None else starts
    first = torch.zeros_like(lengths) if first is None else first
    _rows_fit("rows", rows, starts, lengths)
    call = GatherIndex(block_table, lengths, starts, first, cache, rows, backend)
    operations.gather_index.check(call)
    return operations.gather_index(call)


def check_requests(
    cache: PagedCache, block_table: Tensor, lengths: Tensor, starts: Tensor | None, first: Tensor | None
) -> None:
    """Refuse requests whose rows are not in a cache, or would overlap in a workspace."""
    checks.instance("cache", cache, PagedCache)
    device = cache.device
    count = checks.tensor("block_table", block_table, "B W", (torch.int32,), device=device)["B"]
    checks.tensor(
        "lengths", lengths, "B", (torch.int32,), B=count, device=device, remedy="pass one length per table row"
    )
    for name, value in (("first", first), ("starts", starts)):
        if value is not None:
            checks.tensor(name, value, "B", (torch.int32,), B=count, device=device)
    if not checks.visible(lengths):
        return
    begin = torch.zeros_like(lengths) if first is None else first
    longest = block_table.shape[1] * cache.page_size
    checks.values_between("lengths", lengths, 0, longest, "the block table has no page for more")
    checks.values_between("first", begin, 0, longest, "the block table has no page for more")
    checks.values_between("first + lengths", begin + lengths, 0, longest, "the block table has no page for more")
    page = torch.arange(block_table.shape[1], dtype=torch.int64, device=device).unsqueeze(0) * cache.page_size
    needed = (page < (begin + lengths).unsqueeze(1)) & (page + cache.page_size > begin.unsqueeze(1))
    needed &= lengths.unsqueeze(1) > 0
    remedy = "every page within a request's length must be one of the cache"
    checks.values_between("block_table", block_table[needed], 0, cache.pages - 1, remedy)
    if starts is None:
        return
    checks.values_between("starts", starts, 0, 2**31 - 1, "workspace rows count from 0")
    if bool((starts[1:] < (starts.long() + lengths)[:-1]).any()):
        raise checks.refuse("starts", "ascending, requests not overlapping", starts.tolist(), "use a running sum")


def _running_sum(lengths: Tensor) -> Tensor:
    """The first row of each request if requests follow one another."""
    return (torch.cumsum(lengths, 0) - lengths).int()


def _rows_fit(name: str, rows: int, starts: Tensor, lengths: Tensor) -> None:
    if not checks.visible(lengths) or len(lengths) == 0:
        return
    needed = int((starts.long() + lengths).max())
    if needed > rows:
        raise checks.refuse(name, f"at least {needed} rows", rows, "make the workspace larger")
