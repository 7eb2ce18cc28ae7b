"""SGLang's DSA backend with tamis as one more implementation: `--dsa-decode-backend tamis --dsa-prefill-backend tamis`.

`install` replaces SGLang's class by a subclass of the same behaviour, except where the implementation is "tamis".
"""

from typing import Any

from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa.utils import is_dsa_enable_prefill_cp
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_exec
from sglang.srt.server_args import ServerArgs
from torch import Tensor

from tamis import checks
from tamis._version import __version__
from tamis.integrations.sglang import announce
from tamis.integrations.sglang.dsa_attention import DsaAttention, describe
from tamis.integrations.sglang.options import FIELDS, NAME, add_choice, check_attention_backends

BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
BUILD = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.build_attention_backends"
RESOLVE = "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution"
_WITH_SINKS = "flashmla_sparse"
"""The one implementation of SGLang that has learnable sinks."""


def install() -> None:
    """Register what replaces parts of SGLang, then let the options take "tamis"."""
    HookRegistry.register(BACKEND, TamisSparseAttnBackend, HookType.REPLACE)
    HookRegistry.register(BUILD, check_built, HookType.AFTER)
    HookRegistry.register(RESOLVE, resolve_backends, HookType.AROUND)
    for field in FIELDS.values():
        add_choice(ServerArgs, field)


class TamisSparseAttnBackend(dsa_backend.DeepseekSparseAttnBackend):
    """SGLang's DSA backend, with steps whose implementation is "tamis" on the kernels of tamis.

    Metadata, CUDA graphs, cache writes, and dense attention over short prompts are SGLang's.

    Attributes:
        tamis: the attention; None if neither implementation is "tamis".
    """

    tamis: DsaAttention | None = None

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """Construct SGLang's backend, then refuse what tamis cannot serve."""
        super().__init__(*arguments, **keywords)
        if NAME in (self.dsa_decode_impl, self.dsa_prefill_impl):
            self.tamis = DsaAttention.of(self, prefill_cp=is_dsa_enable_prefill_cp())
            announce(f"tamis {__version__} serves {describe(self.tamis, self)}")

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **mla: Any,
    ) -> Tensor:
        """Attention of one token per request, [T, H, 512]. The arguments are SGLang's."""
        if self.dsa_decode_impl == NAME:
            return self._forward_tamis(q, k if save_kv_cache else None, layer, forward_batch, **mla)
        out: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **mla)
        return out

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **mla: Any,
    ) -> Tensor:
        """Attention of several tokens per request, [T, H, 512]: prefills, and steps that verify or extend drafts."""
        mode = forward_batch.forward_mode
        drafts = bool(mode.is_target_verify() or mode.is_draft_extend_v2())
        if (self.dsa_decode_impl if drafts else self.dsa_prefill_impl) == NAME and not self.use_mha:
            return self._forward_tamis(q, k if save_kv_cache else None, layer, forward_batch, **mla)
        out: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **mla)
        return out

    def _forward_tamis(
        self,
        q: Tensor,
        k: Tensor | None,
        layer: Any,
        forward_batch: Any,
        *,
        q_rope: Tensor | None = None,
        k_rope: Tensor | None = None,
        topk_indices: Tensor | None = None,
        attn_sink: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Write the step's rows, then attend.

        Args:
            q: absorbed queries [T, H * 512] with `q_rope` [T, H * 64], or [T, H * 576] without.
            k: latent rows to write, with their rope part `k_rope`; None if they are in the pool already.
            layer: SGLang's layer.
            forward_batch: SGLang's batch.
            q_rope: see `q`.
            k_rope: see `k`.
            topk_indices: int32 [T or fewer, K]. Layers may share it, so it is only read.
            attn_sink: float32 [H].
            others: further arguments of SGLang, which kernels that rotate queries themselves would need.
        """
        assert self.tamis is not None
        if topk_indices is None:
            raise checks.refuse("topk_indices", "given", None, "the layer needs an indexer or a shared selection")
        for name in ("cos_sin_cache", "llama_4_scaling"):
            if others.get(name) is not None:
                raise checks.refuse(name, "None: queries come rotated and scaled", others[name], "apply it before")
        if layer.is_cross_attention or layer.logit_cap:
            raise checks.refuse("layer", "causal and without a logit cap", layer, "choose another DSA backend")
        heads, width = layer.tp_q_head_num, layer.v_head_dim
        query = q.reshape(-1, heads, layer.head_dim if q_rope is None else width)
        parts = query if q_rope is None else (query, q_rope.reshape(len(query), heads, layer.head_dim - width))
        pool, metadata = self.token_to_kv_pool, self.forward_metadata
        rows = self.tamis.cache_of(layer.layer_id, pool.get_key_buffer(layer.layer_id))
        fused = self.use_fused_topk
        indices = self._get_fused_topk_page_table(topk_indices) if fused else topk_indices
        selection = self.tamis.select(rows, indices, len(query), metadata, fused=fused)
        if k is not None:
            pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        return self.tamis(parts, selection, scale=layer.scaling, sink=attn_sink)


def check_built(built: Any, *, model_runner: Any) -> None:
    """Refuse a choice of tamis that does not apply to the model. Drafts may be other models, and are not looked at."""
    if not model_runner.is_draft_worker:
        check_attention_backends(built, get_exec().kernel)


def resolve_backends(original: Any, view: Any) -> dict[str, Any]:
    """SGLang's choice of the implementations that the user left open.

    For models with learnable sinks SGLang refuses all but one implementation. tamis has sinks too, so it is allowed.
    """
    from sglang.srt.arg_groups import overrides

    given = {field: getattr(view, field) for field in FIELDS.values()}
    config_of = getattr(overrides, "model_config_of", None)  # 0.5.17 has no such models
    sinks = config_of is not None and getattr(config_of(view).hf_config, "learnable_sink", False)
    if not sinks or NAME not in given.values() or set(given.values()) - {NAME, _WITH_SINKS, None}:
        declared: dict[str, Any] = original(view)
        return declared
    return {field: _WITH_SINKS for field, value in given.items() if value is None}
