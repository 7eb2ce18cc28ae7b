"""Stage `write`: latent rows or index keys into a paged cache."""

import torch
from torch import Tensor

from tamis import checks
from tamis.cache import PagedCache
from tamis.layout import E4M3_MAX
from tamis.ops import library
from tamis.products import without_autocast
from tamis.rope import rms_norm, rotate


def join_parts(name: str, value: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    """One tensor from either form callers use: packed, or the pair (latent part, rope part)."""
    if not isinstance(value, tuple):
        return value
    check_pair(name, value)
    return _joined(value)


def _joined(pair: tuple[Tensor, Tensor]) -> Tensor:
    with without_autocast(pair[0].device):
        return torch.cat(pair, dim=-1)


def check_pair(name: str, value: tuple[Tensor, Tensor]) -> None:
    """Refuse parts that do not fit each other."""
    if len(value) != 2:
        raise checks.refuse(name, "one tensor or a pair (latent, rope)", f"{len(value)} parts", "pass two tensors")
    first, second = value
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        received = f"{checks.describe(first)} and {checks.describe(second)}"
        raise checks.refuse_type(name, "a pair of tensors", received, "pass torch.Tensors")
    alike = first.dim() > 0 and first.shape[:-1] == second.shape[:-1] and first.device == second.device
    floats = first.dtype in checks.FLOATS and second.dtype in checks.FLOATS
    if not alike or (first.dtype != second.dtype and not floats):
        expected = "a pair alike in all but the last axis"
        raise checks.refuse(name, expected, f"{checks.describe(first)} and {checks.describe(second)}", "match them")


def write_kv(kv: Tensor | tuple[Tensor, Tensor], cache: PagedCache, slots: Tensor, *, backend: str = "auto") -> None:
    """Quantise rows and insert them at their slots; nothing else in the cache changes.

    Args:
        kv: [T, width] in bf16, fp16 or fp32, or the pair (latent [T, L], rope [T, R]).
        cache: where to write; its layout decides the bytes.
        slots: int32 or int64 [T'] with T' <= T. A negative slot skips its row, and rows past T' are not written (a
            graph-padded batch may carry more rows than slots). Slots that are not negative must be distinct: of two
            rows for one slot the reference keeps the last, while kernels may mix them.
    """
    rope, layout = None, cache.layout
    if isinstance(kv, tuple):
        check_pair("kv", kv)
        widths = [layout.latent, layout.rope]
        if [part.shape[-1] for part in kv] != widths:
            received = [list(part.shape) for part in kv]
            raise checks.refuse("kv", f"a pair of widths {widths}", received, f"rows of {cache!r}")
        # Parts of one dtype are read where they are.
        kv, rope = kv if kv[0].dtype == kv[1].dtype and layout.rope else (_joined(kv), None)
    width = layout.width if rope is None else layout.latent
    sizes = checks.tensor(
        "kv", kv, "T D", checks.FLOATS, D=width, device=cache.device, remedy=lambda: f"rows of {cache!r}"
    )
    count = check_slots(slots, cache, "kv", sizes["T"])
    if count < sizes["T"]:
        kv, rope = kv[:count], None if rope is None else rope[:count]
    library.write_kv(kv, rope, slots, cache, backend)


def write_normed_kv(
    latent: Tensor,
    rope: Tensor,
    cache: PagedCache,
    slots: Tensor,
    *,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    eps: float = 1e-6,
    interleaved: bool = True,
    backend: str = "auto",
) -> None:
    """RMS-normalise the latent part, rotate the rope part at `positions`, round once to bf16 (exactly, for fp32 and
    fp16 caches: to the cache's dtype), then `write_kv`.

    Args:
        latent: [T, L], the projection's output before its norm.
        rope: [T, R], not yet rotated.
        cache: a latent cache of width L + R.
        slots: as in `write_kv`.
        norm_weight: [L].
        positions: integer [T], absolute.
        cos_sin: float32 [max_positions, R] from `tamis.rope.Rope.cos_sin_table`.
        eps: of the norm.
        interleaved: pairs (2i, 2i+1), as the main attention uses; False: (i, i + R/2).
        backend: a name from `tamis backends`, or "auto".
    """
    layout = cache.layout
    total = checks.tensor("latent", latent, "T L", checks.FLOATS, L=layout.latent, device=cache.device)["T"]
    checks.tensor("rope", rope, "T R", checks.FLOATS, T=total, R=layout.rope, device=cache.device)
    checks.tensor("norm_weight", norm_weight, "L", checks.FLOATS, L=layout.latent, device=cache.device)
    checks.tensor("positions", positions, "T", checks.INTS, T=total, device=cache.device)
    table = checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), R=layout.rope, device=cache.device)
    checks.values_between("positions", positions, 0, table["P"] - 1, "make a longer cos_sin table")
    normed = rms_norm(latent.float(), norm_weight.float(), eps)
    rotated = rotate(rope.float(), cos_sin[positions.long()], interleaved=interleaved)
    stored = layout.element if not layout.quantised else torch.bfloat16
    write_kv((normed.to(stored), rotated.to(stored)), cache, slots, backend=backend)


def quantise_per_tensor(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 under one scale for the whole tensor, and the *inverse* scale: multiply by it to dequantise.

    The largest magnitude, floored at 1e-10, becomes 448. The inverse scale is a one-element float32 tensor, which
    `PagedCache(..., scale=)` and `attend(q_scale=)` take as it is.
    """
    if not isinstance(x, Tensor) or x.dtype not in checks.FLOATS:
        raise checks.refuse_type("x", "a bfloat16, float16 or float32 tensor", checks.describe(x), "convert it first")
    if x.numel() == 0:
        raise checks.refuse("x", "not empty", list(x.shape), "there is no maximum to scale by")
    smallest, largest = torch.aminmax(x)
    amax = torch.maximum(smallest.abs(), largest.abs()).float().clamp_min(1e-10)
    scale = E4M3_MAX / amax
    scaled = (x.float() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return scaled.contiguous(), scale.reciprocal().reshape(1)


def check_slots(slots: Tensor, cache: PagedCache, name: str, total: int) -> int:
    """Refuse slots that the cache does not have, or more of them than the `total` rows of argument `name`; how many
    there are."""
    count = checks.tensor("slots", slots, "S", checks.INTS, device=cache.device)["S"]
    if count > total:
        raise checks.refuse("slots", f"at most {total} long, one per row of {name}", count, "slice it")
    remedy = f"the cache has {cache.rows} rows; use -1 to skip"
    checks.values_between("slots", slots, torch.iinfo(slots.dtype).min, cache.rows - 1, remedy)
    return count
