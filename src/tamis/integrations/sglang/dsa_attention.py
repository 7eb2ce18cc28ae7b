"""`DsaAttention`: attention over SGLang's pool of latent rows, for the layers that SGLang runs as DSA.

Nothing here imports SGLang. Objects with the attributes of its DSA backend and of that backend's metadata will do.
"""

from typing import Any, Self

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.layout import Layout, named
from tamis.cache.paged import PagedCache
from tamis.cache.selection import Selection
from tamis.choice import choose
from tamis.layers.batch_invariance import fixed_splits
from tamis.model.spec import LayerSpec
from tamis.ops import attend
from tamis.ops.attention import new_output


class DsaAttention:
    """The attention of one backend object of SGLang: all layers of a model, in decode, extend and verify steps.

    Attributes:
        layout: the byte format of the pool's rows.
        kernels: the name of the tamis backend that runs.
    """

    def __init__(
        self,
        *,
        heads: int,
        layout: Layout,
        page_size: int,
        topk: int,
        device: torch.device | str,
        trusts_lengths: bool,
        batch_invariant: bool = False,
    ) -> None:
        """Refuse, with every reason, a layer that no kernel of tamis can run on this device.

        Args:
            heads: query heads on this rank.
            layout: the byte format of the pool's rows.
            page_size: rows per page of the pool.
            topk: how many rows SGLang's indexer selects for a token.
            device: where the pool is.
            trusts_lengths: whether a row of SGLang's indices begins with its valid ones, as many as its metadata says.
            batch_invariant: whether the bits of a token's output must not depend on the other tokens of a step.
        """
        spec = LayerSpec(heads, layout.latent, layout.rope, layout.latent, topk=topk)
        self.layout, self._page_size, self._topk = layout, page_size, topk
        self.kernels = choose(spec, device, layout=layout, page_size=page_size).name
        self._trusts_lengths, self._batch_invariant = trusts_lengths, batch_invariant
        self._caches: dict[int, tuple[int, torch.Size, PagedCache]] = {}

    @classmethod
    def of(cls, backend: Any, *, prefill_cp: bool) -> Self:
        """The attention of a backend of SGLang that has been constructed. What tamis cannot serve is refused.

        Args:
            backend: SGLang's DSA backend.
            prefill_cp: whether SGLang spreads prefills over ranks (context parallelism).
        """
        reasons = _refusals(backend, prefill_cp)
        if reasons:
            raise ValueError(f"tamis cannot serve this model in SGLang: {'; '.join(reasons)}")
        pooled = getattr(backend, "dsa_index_kpool", 1) > 1
        first = backend.use_fused_topk and backend.dsa_topk_backend.is_sgl_kernel()
        return cls(
            heads=backend.num_q_heads,
            layout=_layout(backend),
            page_size=page_size_of(backend),
            topk=backend.dsa_index_topk,
            device=backend.device,
            # Other top-k kernels leave gaps, pooled indices end in a tail of their own, and ranks that share a prefill
            # have their tokens in another order than the metadata.
            trusts_lengths=first and not pooled and not prefill_cp,
            # SGLang sets this to 1 for deterministic inference, and to 0 otherwise.
            batch_invariant=backend.num_splits == 1,
        )

    def __call__(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        selection: Selection,
        *,
        scale: float,
        sink: Tensor | None = None,
    ) -> Tensor:
        """Output [T, H, latent] of absorbed queries [T, H, latent + rope], or of the pair of their parts.

        A selection of fewer rows than T belongs to the first tokens. The others are padding, and give zeros.
        """
        tokens = len(q[0] if isinstance(q, tuple) else q)
        selected, columns = selection.slots.shape
        splits = max(1, fixed_splits(columns)) if self._batch_invariant else None
        value_dim = self.layout.latent
        if selected == tokens > 0:
            return attend(q, selection, scale=scale, value_dim=value_dim, sink=sink, splits=splits).out
        out = new_output(q[0] if isinstance(q, tuple) else q, value_dim).zero_()
        if selected:
            kept = (q[0][:selected], q[1][:selected]) if isinstance(q, tuple) else q[:selected]
            attend(kept, selection, scale=scale, value_dim=value_dim, sink=sink, splits=splits, out=out[:selected])
        return out

    def cache_of(self, layer_id: int, pool: Tensor) -> PagedCache:
        """A layer's rows [slots, 1, row elements] as a cache. SGLang passes the same memory in every step."""
        known = self._caches.get(layer_id)
        if known is not None and known[:2] == (pool.data_ptr(), pool.shape):
            return known[2]
        if pool.shape[0] % self._page_size:
            expected = f"a multiple of the page size {self._page_size}"
            raise checks.refuse("the pool's rows", expected, pool.shape[0], "allocate whole pages")
        cache = PagedCache.wrap(pool.view(-1, self._page_size, pool.shape[-1]), self.layout)
        self._caches[layer_id] = (pool.data_ptr(), pool.shape, cache)
        return cache

    def select(self, cache: PagedCache, indices: Tensor, tokens: int, metadata: Any, *, fused: bool) -> Selection:
        """The rows that a step's tokens attend to.

        Args:
            cache: the layer's rows.
            indices: int32 [`tokens` or fewer, K].
            tokens: the number of query tokens.
            metadata: SGLang's for the step.
            fused: whether indices are slots of the pool, which SGLang's top-k kernel has made of them, and not
                positions in each token's request.
        """
        if len(indices) > tokens:
            expected = f"of at most {tokens} rows, one per query token"
            raise checks.refuse("topk_indices", expected, len(indices), "they belong to another step")
        lengths = self._lengths(indices, metadata)
        if fused:
            return Selection(cache, indices, lengths)
        # A row of the page table is a request or, in steps that verify drafts, one of its tokens. Tokens of padding
        # come after the last row, and have nothing selected.
        ends = metadata.cu_seqlens_q[1:].contiguous()
        ids = torch.arange(len(indices), dtype=torch.int32, device=indices.device)
        ids = torch.searchsorted(ends, ids, right=True, out_int32=True).clamp_max(len(ends) - 1)
        return Selection(cache, indices, lengths, ids, metadata.real_page_table)

    def _lengths(self, indices: Tensor, metadata: Any) -> Tensor | None:
        """How many indices of each row to look at, so that short contexts cost less than full rows of top-k."""
        lengths: Tensor = metadata.dsa_cache_seqlens_int32
        fit = len(lengths) == len(indices) and indices.shape[1] == self._topk
        return lengths if self._trusts_lengths and fit else None


def page_size_of(backend: Any) -> int:
    """Rows per page of the pool. Versions of SGLang that pool index keys divide it, and have another name for it."""
    size: int = getattr(backend, "physical_page_size", None) or backend.real_page_size
    return size


def describe(attention: DsaAttention, backend: Any) -> str:
    """What is served, for the log."""
    impls = {"decode": backend.dsa_decode_impl, "prefill": backend.dsa_prefill_impl}
    phases = " and ".join(phase for phase, impl in impls.items() if impl == "tamis")
    kind = "fp8" if attention.layout.quantised else "bf16"
    return (
        f"DSA {phases}: {kind} rows of {attention.layout.row_bytes} bytes, {backend.num_q_heads} heads, "
        f"page size {page_size_of(backend)}, kernels {attention.kernels}"
    )


def _layout(backend: Any) -> Layout:
    latent, rope = backend.kv_lora_rank, backend.qk_rope_head_dim
    if backend.dsa_kv_cache_store_fp8:
        # SGLang's scales are the largest magnitude of a tile divided by 448, and no powers of two.
        return named("v32-fp8", latent=latent, rope=rope, scale_mode="exact")
    return named("v32-bf16", latent=latent, rope=rope)


def _refusals(backend: Any, prefill_cp: bool) -> list[str]:
    reasons = []
    ranks = getattr(backend, "dcp_size", 1)
    if ranks != 1:
        reasons.append(f"rows cannot be spread over {ranks} ranks (decode context parallelism); drop --dcp-size")
    if getattr(backend, "_kv_shard_pool", None) is not None:
        reasons.append("a sharded KV cache is not supported; drop --enable-kv-cache-sharding")
    if backend.hisparse_coordinator is not None:
        reasons.append("rows in host memory (HiSparse) are not supported; drop --enable-hisparse")
    if prefill_cp and not backend.use_fused_topk:
        reasons.append("prefill context parallelism needs the fused top-k; unset SGLANG_DSA_FUSE_TOPK")
    if not backend.dsa_kv_cache_store_fp8 and backend.token_to_kv_pool.dtype != torch.bfloat16:
        dtype = checks.dtype_name(backend.token_to_kv_pool.dtype)
        reasons.append(
            f"rows of {dtype} without scales are not supported, which another backend asked for; "
            "choose tamis for both --dsa-decode-backend and --dsa-prefill-backend"
        )
        return reasons
    layout = _layout(backend)
    if backend.kv_cache_dim != layout.row_elements:
        expected = f"the pool's rows have {backend.kv_cache_dim} elements, and {layout.name} has {layout.row_elements}"
        reasons.append(f"{expected}; use --kv-cache-dtype bfloat16 or fp8_e4m3")
    return reasons
