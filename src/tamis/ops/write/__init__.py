"""Stage `write`: latent rows or index keys into a paged cache."""

import torch
from torch import Tensor

from tamis import checks
from tamis.arithmetic import without_autocast
from tamis.cache.paged import PagedCache
from tamis.model.rope import rms_norm, rotate
from tamis.ops import old_library as library

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


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
    if first.layout is not torch.strided or second.layout is not torch.strided:
        received = f"{first.layout} and {second.layout}"
        raise checks.refuse_type(name, "a pair of dense tensors", received, "convert them with .to_dense()")
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
        backend: a name from `tamis backends`, or "auto".
    """
    check_write_kv(kv, cache, slots, backend=backend)
    write_kv_unchecked(kv, cache, slots, backend)


def check_write_kv(
    kv: Tensor | tuple[Tensor, Tensor],
    cache: PagedCache,
    slots: Tensor,
    *,
    backend: str = "auto",
    name: str = "kv",
    where: str = "cache",
) -> None:
    """Refuse what `write_kv` refuses; `name` and `where` are what the caller's rows and cache are called."""
    checks.instance(where, cache, PagedCache)
    layout, width, rope = cache.layout, cache.layout.width, None
    if isinstance(kv, tuple):
        check_pair(name, kv)
        widths = [layout.latent, layout.rope]
        if [part.shape[-1] for part in kv] != widths:
            received = [list(part.shape) for part in kv]
            raise checks.refuse(name, f"a pair of widths {widths}", received, f"rows of {cache!r}")
        kv, rope = kv
        width = layout.latent
    total = checks.tensor(
        name, kv, "T D", checks.FLOATS, D=width, device=cache.device, remedy=lambda: f"rows of {cache!r}"
    )["T"]
    check_slots(slots, cache, name, total, where)
    checks.changeable(where, cache.storage)
    library.check_stage("write", backend, cache.device, **{name: kv, f"{name} (rope part)": rope})


def write_kv_unchecked(
    kv: Tensor | tuple[Tensor, Tensor], cache: PagedCache, slots: Tensor, backend: str = "auto"
) -> None:
    """As `write_kv`, for callers who know that `check_write_kv` would pass."""
    rope = None
    if isinstance(kv, tuple):
        # Parts of one dtype are read where they are.
        together = kv[0].dtype == kv[1].dtype and cache.layout.rope
        kv, rope = kv if together else (_joined(kv), None)
    count = slots.shape[0]
    if count < kv.shape[0]:
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
        cos_sin: float32 [max_positions, R] from `tamis.model.rope.Rope.cos_sin_table`.
        eps: of the norm.
        interleaved: pairs (2i, 2i+1), as the main attention uses; False: (i, i + R/2).
        backend: a name from `tamis backends`, or "auto".
    """
    checks.flag("interleaved", interleaved)
    check_write_normed_kv(latent, rope, cache, slots, norm_weight, positions, cos_sin, eps, backend)
    layout = cache.layout
    normed = rms_norm(latent.float(), norm_weight.float(), eps)
    rotated = rotate(rope.float(), cos_sin[positions.long()], interleaved=interleaved)
    stored = layout.element if not layout.quantised else torch.bfloat16
    write_kv_unchecked((normed.to(stored), rotated.to(stored)), cache, slots, backend)


def check_write_normed_kv(
    latent: Tensor,
    rope: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    eps: float,
    backend: str,
) -> None:
    """Refuse what `write_normed_kv` refuses."""
    checks.instance("cache", cache, PagedCache)
    layout, device = cache.layout, cache.device
    total = checks.tensor("latent", latent, "T L", checks.FLOATS, L=layout.latent, device=device)["T"]
    checks.tensor("rope", rope, "T R", checks.FLOATS, T=total, R=layout.rope, device=device)
    check_slots(slots, cache, "latent", total)
    checks.tensor("norm_weight", norm_weight, "L", checks.FLOATS, L=layout.latent, device=device)
    checks.tensor("positions", positions, "T", checks.INTS, T=total, device=device)
    table = checks.tensor("cos_sin", cos_sin, "P R", (torch.float32,), R=layout.rope, device=device)
    checks.values_between("positions", positions, 0, table["P"] - 1, "make a longer cos_sin table")
    checks.finite_rows("cos_sin", cos_sin, positions)
    checks.positive_number("eps", eps)
    checks.changeable("cache", cache.storage)
    given = {"latent": latent, "rope": rope, "norm_weight": norm_weight, "cos_sin": cos_sin}
    library.check_stage("write", backend, device, **given)


def quantise_per_tensor(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """FP8 numbers under one scale for the whole tensor, and the *inverse* scale: multiply by it to dequantise.

    The largest magnitude, floored at 1e-10, becomes the largest number of `dtype`, which is 448 for e4m3. The inverse
    scale is a one-element float32 tensor, which `PagedCache(..., scale=)` and `attend(q_scale=)` take as it is; these
    read e4m3 only. On the host, numbers that are not finite are refused: one of them would leave no other its value.
    """
    checks.option("dtype", dtype, _FP8)
    if not isinstance(x, Tensor) or x.dtype not in checks.FLOATS or x.layout is not torch.strided:
        raise checks.refuse_type("x", "a bfloat16, float16 or float32 tensor", checks.describe(x), "convert it first")
    if x.numel() == 0:
        raise checks.refuse("x", "not empty", list(x.shape), "there is no maximum to scale by")
    smallest, largest = torch.aminmax(x)
    amax = torch.maximum(smallest.abs(), largest.abs()).float().clamp_min(1e-10)
    if checks.visible(amax) and not bool(amax.isfinite()):
        raise checks.refuse("x", "finite", "NaN or infinities", "there is no maximum to scale by")
    most = torch.finfo(dtype).max
    scale = most / amax
    scaled = (x.float() * scale).clamp(-most, most).to(dtype)
    return scaled.contiguous(), scale.reciprocal().reshape(1)


def check_slots(slots: Tensor, cache: PagedCache, name: str, total: int, where: str = "cache") -> None:
    """Refuse slots that the cache does not have, or more of them than the `total` rows of argument `name`; `where` is
    what the caller's cache is called."""
    count = checks.tensor("slots", slots, "S", checks.INTS, device=cache.device)["S"]
    if count > total:
        raise checks.refuse("slots", f"at most {total} long, one per row of {name}", count, "slice it")
    remedy = f"{called(where)} has {cache.rows} rows; use -1 to skip"
    checks.values_between("slots", slots, torch.iinfo(slots.dtype).min, cache.rows - 1, remedy)


def called(name: str) -> str:
    """A cache in the middle of a sentence: an argument by what it is, a part of one by its name."""
    return name if "." in name else f"the {name}"
