"""SGLang's attention backends for DeepSeek-V4 with tamis' attention. Importing this module imports SGLang.

Metadata, graphs, compressor, indexer and the cache writes stay SGLang's; only the call that attends is replaced, and
with it the workspace of dequantised rows that SGLang's prefills use.
"""

from typing import Any, cast

from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend, DeepseekV4MultiStepBackend
from sglang.srt.runtime_context import get_exec, get_parallel
from torch import Tensor

from tamis._version import __version__
from tamis.integrations.sglang import announce
from tamis.integrations.sglang.v4_attention import Pages, attend_layer, describe, selected
from tamis.integrations.sglang.v4_options import check_served, is_chosen


class _Attention:
    """The methods that run attention, for a subclass of SGLang's backend. They are SGLang's own if tamis is not chosen.

    `forward` calls `_forward_attention` in SGLang 0.5.23, and does everything itself in SGLang 0.5.17.
    """

    _pages: Pages | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As SGLang's backend. If tamis is chosen and cannot run the model's attention, this raises every reason."""
        super().__init__(*args, **kwargs)
        if is_chosen(get_exec().kernel):
            self_, parallel = cast(Any, self), get_parallel()
            check_served(self_, parallel.attn_cp_size)
            self._pages = Pages(self_.token_to_kv_pool)
            heads = max(1, self_.model_runner.model_config.num_attention_heads // parallel.attn_tp_size)
            ratios = getattr(self_.token_to_kv_pool, "present_ratios", ())
            announce(f"tamis {__version__} serves {describe(heads, self_.device, ratios)}")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attention of one layer, as SGLang's `forward`."""
        usual: Any = super()
        if self._pages is None or hasattr(usual, "_forward_attention"):
            return usual.forward(*args, **kwargs)
        return self._attend(*args, **kwargs)

    def _forward_attention(self, *args: Any, **kwargs: Any) -> Any:
        usual: Any = super()
        return usual._forward_attention(*args, **kwargs) if self._pages is None else self._attend(*args, **kwargs)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        compress_ratio: int,
        save_kv_cache: bool = True,
        attn_sink: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        self_ = cast(Any, self)
        assert self._pages is not None
        if self_.mtp_enabled and forward_batch.forward_mode.is_idle():
            return q.new_zeros((*q.shape[:2], layer.v_head_dim), dtype=q.dtype)
        core = self_.forward_metadata.core_attn_metadata
        if save_kv_cache:
            self_.store_cache(layer.layer_id, k, forward_batch)
        return attend_layer(
            q,
            selected(self._pages, core, layer.layer_id, compress_ratio, len(q)),
            heads=layer.tp_q_head_num,
            scale=self_.softmax_scale,
            value_dim=self_.head_dim_v,
            sink=attn_sink,
        )

    def _use_sparse_prefill(self, *args: Any, **kwargs: Any) -> bool:
        """Whether prefills gather dequantised rows into a workspace: not with tamis, which reads the pages."""
        usual: Any = super()
        return self._pages is None and usual._use_sparse_prefill(*args, **kwargs)


class TamisV4AttnBackend(_Attention, DeepseekV4AttnBackend):  # type: ignore[misc]
    """SGLang's backend for DeepSeek-V4, with tamis' attention if it is chosen."""


class TamisV4MultiStepBackend(_Attention, DeepseekV4MultiStepBackend):  # type: ignore[misc]
    """SGLang's backend for the steps of a draft, each of which is a `TamisV4AttnBackend`."""

    def _make_step_backend(self, model_runner: Any, step_id: int) -> TamisV4AttnBackend:
        return TamisV4AttnBackend(
            model_runner,
            speculative_step_id=step_id,
            topk=self.topk,
            speculative_num_steps=self.speculative_num_steps,
        )


def create_attn_backend(usual: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's `create_deepseek_v4_attn_backend`: tamis' backend if it is chosen."""
    return TamisV4AttnBackend(*args, **kwargs) if is_chosen(get_exec().kernel) else usual(*args, **kwargs)


def create_multistep_backend(usual: Any, *args: Any, **kwargs: Any) -> Any:
    """Around SGLang's `create_deepseek_v4_multistep_backend`: tamis' backend if it is chosen."""
    return TamisV4MultiStepBackend(*args, **kwargs) if is_chosen(get_exec().kernel) else usual(*args, **kwargs)
