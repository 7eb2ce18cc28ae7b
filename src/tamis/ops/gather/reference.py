"""Reading rows back, in plain torch: by slot, and whole requests by block table."""

import torch
from torch import Tensor

from tamis.cache.layout import Field
from tamis.cache.paged import PagedCache


def fetch_field(cache: PagedCache, field: Field, slots: Tensor) -> Tensor:
    """Raw values [N, count] of one field; slots [N] must be inside the cache."""
    view = cache.field(field)
    span, rest = divmod(cache.page_stride, field.stride)
    if rest:
        return view[slots // cache.page_size, slots % cache.page_size]
    # Pages a whole number of rows apart are one strided list of rows, and one index is faster than two.
    if span != cache.page_size:
        slots = slots // cache.page_size * span + slots % cache.page_size
    flat = torch.as_strided(
        view, ((cache.pages - 1) * span + cache.page_size, field.count), (view.stride(1), 1), view.storage_offset()
    )
    return flat.index_select(0, slots)


def decode_e2m1(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 values [..., D] of packed rows [..., D / 2] under exponent bytes [..., tiles]; see `Layout.packed`."""
    code = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    size = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float32, device=codes.device)
    values = torch.cat((size, -size))[code.long()].unflatten(-1, (exponents.shape[-1], -1))
    factors = torch.exp2(exponents.float() - 127).masked_fill(exponents == 255, torch.nan)
    rows: Tensor = (values * factors.unsqueeze(-1)).flatten(-2)
    return rows


def decode_rows(cache: PagedCache, slots: Tensor) -> Tensor:
    """Dequantised float32 rows [N, width]; slots [N] int64 must be inside the cache."""
    layout = cache.layout
    raw = fetch_field(cache, layout.values, slots)
    if layout.scale_mode == "none":
        return raw.float()
    if layout.packed:
        assert layout.scales is not None
        return decode_e2m1(raw, fetch_field(cache, layout.scales, slots))
    values = raw.view(torch.float8_e4m3fn)
    if layout.scale_mode == "tensor":
        return values.float().mul_(cache.scale)
    assert layout.scales is not None
    scales = fetch_field(cache, layout.scales, slots)
    if layout.scale_mode == "exponent":
        scales = torch.exp2(scales[:, : layout.latent // layout.tile].float() - 127)
    out = torch.empty(slots.shape[0], layout.width, dtype=torch.float32, device=cache.device)
    latent = out[:, : layout.latent].unflatten(1, (-1, layout.tile))
    latent.copy_(values.view(latent.shape)).mul_(scales.unsqueeze(-1))
    if layout.tail is not None:
        out[:, layout.latent :] = fetch_field(cache, layout.tail, slots)
    return out


def read_kv(cache: PagedCache, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [..., width] with zeros where a slot is negative or past the end."""
    flat = slots.reshape(-1).long()
    invalid = (flat < 0) | (flat >= cache.rows)
    rows = decode_rows(cache, flat.masked_fill(invalid, 0))
    rows.masked_fill_(invalid.unsqueeze(-1), 0.0)
    return rows.to(dtype).view(*slots.shape, cache.layout.width)


def request_slots(
    cache: PagedCache, block_table: Tensor, lengths: Tensor, starts: Tensor, first: Tensor, rows: int
) -> Tensor:
    """The slot behind each of `rows` workspace rows, -1 where no request has one. Works without knowing the lengths
    on the host: each row finds its request by a search in `starts`."""
    if block_table.numel() == 0:
        return torch.full((rows,), -1, dtype=torch.int64, device=block_table.device)
    row = torch.arange(rows, dtype=torch.int64, device=block_table.device)
    request = torch.searchsorted(starts.long(), row, right=True) - 1
    known = request.clamp_min(0)
    offset = row - starts.long()[known]
    position = offset + first.long()[known]
    page = position // cache.page_size
    inside = (request >= 0) & (offset < lengths.long()[known]) & (page < block_table.shape[1])
    page_id = block_table[known, page.clamp(0, block_table.shape[1] - 1)].long()
    inside &= (page_id >= 0) & (page_id < cache.pages)
    return torch.where(inside, page_id * cache.page_size + position % cache.page_size, -1)


def gather_kv(
    cache: PagedCache, block_table: Tensor, lengths: Tensor, starts: Tensor, first: Tensor, out: Tensor
) -> None:
    """Fill the covered rows of `out`; the others keep their content."""
    slots = request_slots(cache, block_table, lengths, starts, first, out.shape[0])
    covered = slots >= 0
    out[covered] = decode_rows(cache, slots[covered]).to(out.dtype)


def gather_index(
    cache: PagedCache,
    block_table: Tensor,
    lengths: Tensor,
    starts: Tensor,
    first: Tensor,
    values: Tensor,
    scales: Tensor,
) -> None:
    """As `gather_kv`, without dequantising: keys and their scales as they are stored."""
    slots = request_slots(cache, block_table, lengths, starts, first, values.shape[0])
    covered = slots >= 0
    assert cache.layout.scales is not None
    values.view(torch.uint8)[covered] = fetch_field(cache, cache.layout.values, slots[covered])
    scales.view(-1, cache.layout.scales.count)[covered] = fetch_field(cache, cache.layout.scales, slots[covered])
