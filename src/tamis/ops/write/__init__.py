"""Stage `write`: quantises latent rows or index keys and inserts them into a paged cache."""

from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.model.rope import rms_norm, rotate
from tamis.ops import memory
from tamis.ops.pairs import check_pair, joined
from tamis.ops.write import operations
from tamis.ops.write.operations import WriteKv

_KNOWN: memory.Calls[WriteKv, None] = memory.Calls()
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


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
    signature = None
    if not torch.compiler.is_compiling():
        # A default device is a mode, which would put a Python function around every attribute of a tensor.
        with torch._C.DisableTorchFunction():
            signature = _sign(kv, cache, slots, backend)
            known = _KNOWN.find(signature)
            if known is not None:
                return known(write_call(kv, cache, slots, backend))
    checks.instance("cache", cache, PagedCache)
    check_rows(kv, cache)
    call = write_call(kv, cache, slots, backend)
    check_write_kv(call)
    return _KNOWN.run(operations.write_kv, call, signature)


def _sign(kv: Any, cache: Any, slots: Any, backend: object) -> memory.Signature | None:
    """The signature of a call of `write_kv`."""
    try:
        storage = cache.storage
        parts = kv if isinstance(kv, tuple) else (kv,)
        if not memory.remembered_on(storage) or memory.has_gradient(storage, *parts) or checks.frozen(storage):
            return None
        rows = memory.sign(kv) if parts is not kv else (*map(memory.sign, kv),)
        return (backend, rows, memory.sign(slots), *memory.sign_cache(cache))
    except memory.NOT_ARGUMENTS:
        return None


def check_rows(kv: Tensor | tuple[Tensor, Tensor], cache: PagedCache, *, name: str = "kv") -> None:
    """Refuse rows that do not fit a cache. Errors use `name` for the rows."""
    layout, width = cache.layout, cache.layout.width
    if isinstance(kv, tuple):
        check_pair(name, kv)
        widths = [layout.latent, layout.rope]
        if [part.shape[-1] for part in kv] != widths:
            received = [list(part.shape) for part in kv]
            raise checks.refuse(name, f"a pair of widths {widths}", received, f"the rows go to {cache!r}")
        kv, width = kv[0], layout.latent
    checks.tensor(
        name, kv, "T D", checks.FLOATS, D=width, device=cache.device, remedy=lambda: f"the rows go to {cache!r}"
    )


def write_call(kv: Tensor | tuple[Tensor, Tensor], cache: PagedCache, slots: Tensor, backend: str) -> WriteKv:
    """The call that writes rows accepted by `check_rows`. A latent and a rope part of one dtype are not joined."""
    rope = None
    if isinstance(kv, tuple):
        apart = kv[0].dtype == kv[1].dtype and cache.layout.rope
        kv, rope = kv if apart else (joined(kv), None)
    return WriteKv(kv, rope, slots, cache, backend)


def check_write_kv(call: WriteKv, *, name: str = "kv", where: str = "cache") -> None:
    """Refuse what `write_kv` refuses, after `check_rows`. Errors use `name` for the rows and `where` for the cache."""
    check_slots(call.slots, call.cache, name, call.kv.shape[0], where)
    checks.changeable(where, call.cache.storage)
    operations.write_kv.check(call, kv=name, rope=f"{name} (rope part)")


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
        eps: epsilon of the norm.
        interleaved: pairs (2i, 2i+1), as the main attention uses; False: (i, i + R/2).
        backend: a name from `tamis backends`, or "auto".
    """
    checks.flag("interleaved", interleaved)
    check_write_normed_kv(latent, rope, cache, slots, norm_weight, positions, cos_sin, eps)
    layout = cache.layout
    normed = rms_norm(latent.float(), norm_weight.float(), eps)
    rotated = rotate(rope.float(), cos_sin[positions.long()], interleaved=interleaved)
    stored = layout.element if not layout.quantised else torch.bfloat16
    call = write_call((normed.to(stored), rotated.to(stored)), cache, slots, backend)
    operations.write_kv.check(call)
    operations.write_kv(call)


def check_write_normed_kv(
    latent: Tensor,
    rope: Tensor,
    cache: PagedCache,
    slots: Tensor,
    norm_weight: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    eps: float,
) -> None:
    """Refuse what `write_normed_kv` refuses, apart from a backend that does not run here."""
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
    if not torch.compiler.is_compiling():
        checks.no_gradient(latent=latent, rope=rope, norm_weight=norm_weight, cos_sin=cos_sin)


def quantise_per_tensor(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """FP8 numbers under one scale for the whole tensor, and the *inverse* scale: multiply by it to dequantise.

    The largest magnitude, floored at 1e-10, becomes the largest number of `dtype`, which is 448 for e4m3. The inverse
    scale is a one-element float32 tensor, which `PagedCache(..., scale=)` and `attend(q_scale=)` take as it is; these
    read e4m3 only. On the host, numbers that are not finite are refused, since no scale would fit the others.
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
    """Refuse slots that the cache does not have, or more of them than the `total` rows of the argument `name`. Errors
    use `where` for the cache."""
    count = checks.tensor("slots", slots, "S", checks.INTS, device=cache.device)["S"]
    if count > total:
        raise checks.refuse("slots", f"at most {total} long, one per row of {name}", count, "slice it")
    remedy = f"{called(where)} has {cache.rows} rows; use -1 to skip"
    checks.values_between("slots", slots, torch.iinfo(slots.dtype).min, cache.rows - 1, remedy)


def called(name: str) -> str:
    """A cache's name inside a sentence of an error: "the cache", but "caches.latent"."""
    return name if "." in name else f"the {name}"
