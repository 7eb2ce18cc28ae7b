"""`SparseImpl`: the attention of one sparse MLA layer, under vLLM's names."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tamis import checks
from tamis.cache.paged import PagedCache
from tamis.cache.shard import Shard
from tamis.integrations.vllm.checked_cache import CheckedCache
from tamis.integrations.vllm.context_parallel import Ranks, attend_gathered
from tamis.integrations.vllm.index_group import join_group
from tamis.integrations.vllm.metadata import SparseMetadata
from tamis.integrations.vllm.row_formats import row_layout, row_rope
from tamis.layers.mla import LayerOutput, SparseMLA
from tamis.layers.mla_checks import Call
from tamis.model.absorb import AbsorbedWeights
from tamis.model.spec import LayerSpec
from tamis.ops import Attended, write_kv
from tamis.ops.attention import new_output
from tamis.ops.pairs import join_pair

_USUAL_TOPK = 2048


class SparseImpl:
    """Sparse MLA in MQA form: prefill, decode and mixed steps all go through `forward_mqa`.

    vLLM's own base class sets the `dcp_*` and `pcp_*` attributes and `need_to_return_lse_for_decode` before the
    constructor runs. The values here are those of a single rank.
    """

    is_sparse: bool = True
    accept_output_buffer: bool = True
    supports_dense_mha_prefill: bool = False
    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_quant_query_input: bool = False
    """The engine need not quantise queries; e4m3 queries are accepted all the same."""
    need_to_return_lse_for_decode: bool = False
    dcp_world_size: int = 1
    dcp_rank: int = 0
    pcp_world_size: int = 1
    cp_kv_cache_interleave_size: int = 1
    dcp_group: torch.distributed.ProcessGroup | None = None
    """The ranks that share the rows of each request; all ranks if not given."""
    tamis_backend: str = "auto"
    """The backend whose kernels run: a name from `tamis backends`, or "auto"."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int = 1,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **mla_args: Any,
    ) -> None:
        """Remember the layer. A layer that tamis cannot run is refused with every reason.

        Args:
            num_heads: query heads on this rank.
            head_size: kv_lora_rank + qk_rope_head_dim.
            scale: softmax scale.
            num_kv_heads: 1.
            alibi_slopes: None.
            sliding_window: None.
            kv_cache_dtype: as in `--kv-cache-dtype`.
            logits_soft_cap: None.
            attn_type: "decoder".
            kv_sharing_target_layer_name: if given, that layer fills the cache, and `forward` writes nothing.
            mla_args: `kv_lora_rank`, `qk_rope_head_dim`, and where they are needed `qk_nope_head_dim`, `v_head_dim`,
                `kv_b_proj` (weights), `indexer` or `topk_indices_buffer` (positions), `index_group_builder` (the layers
                that share positions), `sinks`. Others are ignored, because new versions of vLLM keep adding arguments.
        """
        latent, rope = mla_args.get("kv_lora_rank"), mla_args.get("qk_rope_head_dim")
        reasons = _refusals(num_kv_heads, alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        reasons += _width_refusals(head_size, latent, rope, kv_cache_dtype)
        if self.dcp_world_size > 1 and mla_args.get("sinks") is not None:
            reasons.append("attention sinks under decode context parallelism: every rank would add them to its rows")
        if reasons or latent is None or rope is None:
            raise ValueError(f"tamis cannot run this layer: {'; '.join(reasons)}; choose another attention backend")
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = self.softmax_scale = float(scale)
        self.kv_cache_dtype, self.kv_sharing_target_layer_name = kv_cache_dtype, kv_sharing_target_layer_name
        self.kv_lora_rank: int = latent
        self.qk_rope_head_dim: int = rope
        self.q_lora_rank: int | None = mla_args.get("q_lora_rank")
        self.qk_nope_head_dim: int | None = mla_args.get("qk_nope_head_dim")
        self.v_head_dim: int | None = mla_args.get("v_head_dim")
        self.qk_head_dim: int | None = mla_args.get("qk_head_dim")
        self.kv_b_proj, self.indexer = mla_args.get("kv_b_proj"), mla_args.get("indexer")
        self.sinks: Tensor | None = mla_args.get("sinks")
        self._group, self._leads = join_group(mla_args.get("index_group_builder"), self.indexer is not None)
        # Older versions of vLLM spell the keyword without the s.
        spellings = ("topk_indices_buffer", "topk_indice_buffer")
        self._passed_buffer = next((mla_args[s] for s in spellings if mla_args.get(s) is not None), None)
        self._weights: AbsorbedWeights | None = None
        self._checked: tuple[CheckedCache, str] | None = None
        buffer = self.topk_indices_buffer
        spec = LayerSpec(
            # Context-parallel ranks exchange their queries first, so each rank attends for the heads of several ranks.
            heads=num_heads * Ranks(self.dcp_world_size, self.pcp_world_size).query_groups,
            latent_dim=latent,
            rope_dim=row_rope(kv_cache_dtype, rope),
            value_dim=latent,
            scale=self.scale,
            # With pooled index keys the engine's selections are wider than its top-k, and have gaps.
            topk=_USUAL_TOPK if buffer is None else buffer.shape[-1],
            sink=self.sinks is not None,
        )
        self._attention = self._sharded(spec, self.cp_kv_cache_interleave_size)

    def _sharded(self, spec: LayerSpec, interleave: int) -> SparseMLA:
        """Attention to this rank's rows."""
        shard = Shard(self.dcp_world_size, self.dcp_rank, interleave)
        return SparseMLA(spec, backend=self.tamis_backend, shard=shard)

    @property
    def topk_indices_buffer(self) -> Tensor | None:
        """The indexer's positions or, without an indexer, the passed ones. They are looked up in each call, since an
        engine may replace the buffer."""
        own: Tensor | None = getattr(self.indexer, "topk_indices_buffer", None)
        return self._passed_buffer if own is None else own

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: Tensor | None) -> None:
        """Replace the indexer's buffer, as vLLM does for the drafting layers, which share one buffer."""
        self.indexer, self._passed_buffer = None, buffer

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMetadata,
        layer: Any,
        output: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Latent output [T, H, kv_lora_rank] of absorbed queries, and the natural-log lse [T, H] if it is needed.

        Prefills that attend to the rows of all ranks have no lse: then it has rows for the decodes only.

        Args:
            q: [T, H, head_size], or the pair of its latent and rope part.
            kv_c_and_k_pe_cache: [pages, page size, row], already holding the step's rows.
            attn_metadata: the step's metadata.
            layer: an object with `_k_scale_float`, the scale of a per-tensor FP8 cache, and `_q_scale_float`, the scale
                of an e4m3 query. Both are read in each call, and are 1.0 where they are missing.
            output: [T or more, H, kv_lora_rank], or with the last two axes joined, to write into.
        """
        q = self._joined(q)
        out = None if output is None else _rows_of("output", output, q.shape[0], self._attention.spec.heads)
        call = self._prepare(q, kv_c_and_k_pe_cache, attn_metadata, layer, out)
        if call is not None and call.translate is not None:
            translate = partial(attn_metadata.slots.translate, group=self._group, leads=self._leads)
            if attn_metadata.gathered is not None:
                made = new_output(q, self._attention.spec.value_dim) if out is None else out
                return made, attend_gathered(call, q, made, attn_metadata.gathered, self._gather_ranks, translate)
            call = call._replace(slots=translate(call.translate))
        attended = self._attend(call, q, out)
        return attended.out, attended.lse if self.need_to_return_lse_for_decode else None

    def _prepare(
        self, q: Tensor, kv_cache: Tensor, metadata: SparseMetadata, layer: Any, out: Tensor | None
    ) -> Call | None:
        """The checked attention of a step; None for a step without requests. Nothing is written yet."""
        rows, interleave = q.shape[0], metadata.cp_kv_cache_interleave_size
        # vLLM may decide about this after its layers are built, but before the builder of the metadata is.
        if interleave is not None and interleave != self._attention.shard.interleave:
            self._attention = self._sharded(self._attention.spec, interleave)
        cache = self._wrap(kv_cache, self.kv_cache_dtype, getattr(layer, "_k_scale_float", 1.0))
        if cache.page_size != metadata.block_size:
            expected = f"of the plan's page size {metadata.block_size}"
            raise checks.refuse("caches", expected, cache.page_size, "use one page size for both")
        positions, sink = self._positions(rows), self.sinks
        # A 16-bit query was never divided by the scale, so the engine's number does not apply to it.
        q_scale = getattr(layer, "_q_scale_float", 1.0) if q.dtype == torch.float8_e4m3fn else 1.0
        ids = metadata.request_ids(rows)
        if metadata.num_reqs == 0 or rows == 0:
            return None
        if metadata.gathers:
            plan = metadata.plan_for(rows, positions.shape[1])
            return self._attention.prepare(
                q, None, cache, plan, positions=positions, sink=sink, q_scale=q_scale, out=out
            )
        return self._attention.prepare_positions(
            q, cache, positions, ids, metadata.block_table, sink=sink, q_scale=q_scale, out=out
        )

    def _attend(self, call: Call | None, q: Tensor, out: Tensor | None) -> Attended | LayerOutput:
        return self._nothing(q, out) if call is None else self._attention.run(call)

    def _gather_ranks(self, every: Tensor, mine: Tensor) -> None:
        """Fill `every` with what all ranks pass as `mine`, in their order."""
        torch.distributed.all_gather_into_tensor(every, mine, group=self.dcp_group)

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str | None = None,
        k_scale: float | Tensor = 1.0,
    ) -> None:
        """Write latent rows [T, kv_lora_rank] and rope rows [T, (1,) rope] at their slots.

        Rows with a negative slot and rows past the slots (padding) are skipped. An empty cache, which vLLM passes while
        it profiles memory, takes nothing.
        """
        if kv_cache.numel() == 0:
            return
        cache = self._wrap(kv_cache, kv_cache_dtype or self.kv_cache_dtype, k_scale)
        rope = k_pe.squeeze(1) if k_pe.dim() == 3 else k_pe
        if rope.shape[1] == 0 and self._padding:
            rope = kv_c_normed.new_zeros((len(kv_c_normed), self._padding), dtype=kv_c_normed.dtype)
        write_kv((kv_c_normed, rope), cache, slot_mapping.flatten(), backend=self.tamis_backend)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Split `kv_b_proj`, dequantised if necessary, into its key and value half, in `act_dtype`.

        The halves become `W_UK` [L, H, P], its transpose `W_UK_T` [H, P, L] and `W_UV` [L, H, V].
        """
        if self.kv_b_proj is None or self.qk_nope_head_dim is None or self.v_head_dim is None:
            raise checks.refuse(
                "mla_args", "with kv_b_proj, qk_nope_head_dim and v_head_dim", "not all three", "pass them"
            )
        self._weights = AbsorbedWeights.from_layer(
            self.kv_b_proj,
            heads=self.num_heads,
            nope_dim=self.qk_nope_head_dim,
            value_dim=self.v_head_dim,
            latent_dim=self.kv_lora_rank,
            dtype=act_dtype,
        )
        self.W_UK_T = self._weights.key
        self.W_UK = self._weights.key.permute(2, 0, 1)
        self.W_UV = self._weights.value.transpose(0, 1)

    def _k_up_proj(self, q_nope: Tensor) -> Tensor:
        """[T, H, P] x W_UK -> [T, H, L]."""
        return self._loaded().absorb_query(q_nope)

    def _v_up_proj(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """[T, H, L] x W_UV -> [T, H, V], into `out` (or the same with the last two axes joined) if given."""
        value = self._loaded().project_value(x)
        return value if out is None else _rows_of("out", out, len(value), self.num_heads).copy_(value)

    def forward(
        self,
        layer: Any,
        q: Tensor,
        k_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        attn_metadata: SparseMetadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """The older one-call form: absorb, write, attend, project; returns `output`.

        Args:
            layer: as in `forward_mqa`.
            q: [T, H, nope + rope], not absorbed. In q, k_c_normed and k_pe, rows past the step's tokens are dropped.
            k_c_normed: [T, kv_lora_rank].
            k_pe: [T, (1,) rope].
            kv_cache: empty while the engine profiles memory; nothing is then written or attended to.
            attn_metadata: the step's metadata; None while the engine profiles, which gives an output of zeros.
            output: [T, H, v_head_dim], or with the last two axes joined. Its padded rows keep their content.
            output_scale: None; fused quantisation of the output is not supported.
            output_block_scale: None, for the same reason.
        """
        if output is None:
            raise checks.refuse("output", "given", None, "allocate it; this call writes into it")
        if output_scale is not None or output_block_scale is not None:
            raise checks.refuse(
                "output_scale and output_block_scale", "None", "a scale", "quantise the output in a separate step"
            )
        if attn_metadata is None:
            return output.fill_(0)
        if self.dcp_world_size > 1:
            raise checks.refuse("dcp_world_size", "1 for the one-call form", self.dcp_world_size, "call forward_mqa")
        rows = attn_metadata.num_actual_tokens
        if kv_cache.numel() == 0:
            output[:rows].fill_(0)
            return output
        # Everything is checked before the first write: a refused call leaves cache and output as they were.
        heads, width = _rows_of("q", q, rows, self.num_heads), self._loaded().value.shape[2]
        target = _rows_of("output", output, rows, self.num_heads)
        checks.tensor("output", target, "T H V", checks.FLOATS, device=q.device, V=width)
        nope, rope = heads.split([heads.shape[-1] - self.qk_rope_head_dim, self.qk_rope_head_dim], dim=-1)
        absorbed = self._joined((self._k_up_proj(nope), rope))
        call = self._prepare(absorbed, kv_cache, attn_metadata, layer, None)
        if self.kv_sharing_target_layer_name is None:
            # The engine's slots past the new tokens may hold anything.
            slots = attn_metadata.slot_mapping[: attn_metadata.new_tokens]
            k_scale = getattr(layer, "_k_scale_float", 1.0)
            self.do_kv_cache_update(k_c_normed[:rows], k_pe[:rows], kv_cache, slots, k_scale=k_scale)
        self._v_up_proj(self._attend(call, absorbed, None).out, out=output)
        return output

    def _wrap(self, storage: Tensor, cache_dtype: str, scale: float | Tensor) -> PagedCache:
        known = None if self._checked is None or self._checked[1] != cache_dtype else self._checked[0].find(storage)
        if known is not None:
            return known
        latent, rope = self.kv_lora_rank, self._attention.spec.rope_dim
        # Some backends call packed rows "fp8" as well. Only packed rows are wider than latent + rope bytes.
        packed = cache_dtype in ("fp8", "fp8_e4m3") and storage.shape[-1] != latent + rope
        held = storage.dtype if cache_dtype == "auto" else torch.bfloat16
        layout = row_layout("fp8_ds_mla" if packed else cache_dtype, latent, rope, held)
        if layout.scale_mode == "tensor":
            return PagedCache.wrap(storage, layout, scale=scale)
        cache = PagedCache.wrap(storage, layout)
        self._checked = (CheckedCache(storage, cache), cache_dtype)
        return cache

    def _nothing(self, q: Tensor, out: Tensor | None) -> Attended:
        """The result of a step without requests: all of its rows are padding and attend to nothing."""
        if out is None:
            out = new_output(q, self._attention.spec.value_dim)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        return Attended(out.zero_(), lse, None)

    @property
    def _padding(self) -> int:
        """Columns of zeros that rows have and queries have not: where vLLM keeps rows without a rope in wider ones."""
        return self._attention.spec.rope_dim - self.qk_rope_head_dim

    def _joined(self, q: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        if isinstance(q, tuple) and self.qk_rope_head_dim == 0 and q[1].shape[-1] == 0:
            q = q[0]
        joined = join_pair("q", q)
        if not self._padding:
            return joined
        padded = joined.new_zeros((*joined.shape[:-1], joined.shape[-1] + self._padding), dtype=joined.dtype)
        padded[..., : joined.shape[-1]] = joined
        return padded

    def _positions(self, rows: int) -> Tensor:
        buffer = self.topk_indices_buffer
        if buffer is None:
            raise checks.refuse("indexer or topk_indices_buffer", "given", None, "pass where the positions are")
        return buffer[:rows]

    def _loaded(self) -> AbsorbedWeights:
        if self._weights is None:
            raise checks.refuse("weights", "loaded", None, "call process_weights_after_loading first")
        return self._weights


def _refusals(kv_heads: int, alibi: object, window: object, soft_cap: float | None, attn_type: object) -> list[str]:
    kind = str(getattr(attn_type, "value", attn_type))
    given = {
        f"num_kv_heads is {kv_heads}, latent attention has 1": kv_heads != 1,
        "ALiBi slopes are not supported": alibi is not None,
        "a sliding window is not supported": window is not None,
        "a logit soft cap is not supported": bool(soft_cap),
        f"attention type {kind!r} is not supported, only 'decoder'": kind != "decoder",
    }
    return [reason for reason, applies in given.items() if applies]


def _width_refusals(head_size: int, latent: int | None, rope: int | None, cache_dtype: str) -> list[str]:
    if latent is None or rope is None:
        return [f"kv_lora_rank and qk_rope_head_dim must both be given, got {latent} and {rope}"]
    if latent + rope != head_size:
        return [f"head_size {head_size} is not kv_lora_rank + qk_rope_head_dim = {latent} + {rope}"]
    try:
        row_layout(cache_dtype, latent, rope)
    except ValueError as error:
        return [str(error)]
    return []


def _rows_of(name: str, value: Tensor, rows: int, heads: int) -> Tensor:
    """The first rows of [T, H, D] or [T, H * D], as a view [rows, H, D]."""
    if value.dim() not in (2, 3) or len(value) < rows or (value.shape[1] % heads if value.dim() == 2 else False):
        expected = f"of shape [{rows} or more, {heads}, D] or [{rows} or more, {heads} * D]"
        raise checks.refuse(name, expected, list(value.shape), "check its shape")
    return value[:rows].unflatten(1, (heads, -1)) if value.dim() == 2 else value[:rows]
