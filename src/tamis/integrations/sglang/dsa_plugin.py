"""SGLang's DSA backend with tamis as one more implementation: `--dsa-decode-backend tamis --dsa-prefill-backend tamis`.

`install` replaces SGLang's class by a subclass of the same behaviour, except where the implementation is "tamis".
"""

from functools import cache
from logging import getLogger
from typing import Any

from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.attention.dsa.utils import is_dsa_enable_prefill_cp
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.server_args import ServerArgs
from torch import Tensor

from tamis import checks
from tamis._version import __version__
from tamis.integrations.sglang.dsa_attention import DsaAttention, describe
from tamis.integrations.sglang.options import NAME, add_choice

FIELDS = {"decode": "dsa_decode_backend", "prefill": "dsa_prefill_backend"}
"""The fields of SGLang's arguments that choose an implementation, by phase."""
BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
BUILD = "sglang.srt.model_executor.model_runner_components.attention_backend_setup.build_attention_backends"
RESOLVE = "sglang.srt.arg_groups.overrides._dsa_split_backend_resolution"
_WITH_SINKS = "flashmla_sparse"
"""The one implementation of SGLang that has learnable sinks."""


def install() -> None:
    """Add the value "tamis" to the options, and register what replaces parts of SGLang."""
    for field in FIELDS.values():
        add_choice(ServerArgs, field)
    HookRegistry.register(BACKEND, TamisSparseAttnBackend, HookType.REPLACE)
    HookRegistry.register(BUILD, check_attention_backends, HookType.AFTER)
    HookRegistry.register(RESOLVE, resolve_backends, HookType.AROUND)


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
            _announce(f"tamis {__version__} serves {describe(self.tamis, self)}")

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
            return self._forward_tamis(q, k if save_kv_cache else None, layer, forward_batch, expanded=True, **mla)
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
            return self._forward_tamis(q, k if save_kv_cache else None, layer, forward_batch, expanded=drafts, **mla)
        out: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **mla)
        return out

    def _forward_tamis(
        self,
        q: Tensor,
        k: Tensor | None,
        layer: Any,
        forward_batch: Any,
        *,
        expanded: bool,
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
            expanded: whether page tables have a row for each token, and not for each request.
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
        selection = self.tamis.select(rows, indices, len(query), metadata, fused=fused, expanded=expanded)
        if k is not None:
            pool.set_mla_kv_buffer(layer, forward_batch.out_cache_loc, k, k_rope)
        return self.tamis(parts, selection, scale=layer.scaling, sink=attn_sink)


def check_attention_backends(built: Any, *, model_runner: Any) -> None:
    """Refuse a model for which "tamis" was chosen and whose attention is not DSA: it would run without tamis.

    Drafts may be other models, so theirs is not looked at.
    """
    if model_runner.is_draft_worker:
        return
    chosen = {"decode": built.decode_attention_backend_str, "prefill": built.prefill_attention_backend_str}
    for phase, field in FIELDS.items():
        # DeepSeek-V4's backend reads these options itself, and refuses them where they have no effect.
        if getattr(model_runner.server_args, field, None) == NAME and chosen[phase] not in ("dsa", "nsa", "dsv4"):
            option = f"--{field.replace('_', '-')}"
            raise ValueError(
                f"{option} {NAME} was chosen, but the attention backend for {phase} is {chosen[phase]!r}, not 'dsa'; "
                f"drop {option}, or for a model with DeepSeek sparse attention choose --attention-backend dsa"
            )


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


@cache
def _announce(line: str) -> None:
    """Log a line once in a process, which may construct many backends."""
    getLogger("tamis").info(line)
