"""A DeepSeek-V4 layer of vLLM whose attention is tamis': `TamisV4Attention`. Importing this module imports vLLM's."""

from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

from tamis.integrations.vllm.v4_forward import forward_decode, forward_prefill


class TamisV4Attention(DeepseekV4FlashMLAAttention):
    """vLLM's layer up to its kernels: projections, caches, compressor, indexer and per-step records stay its own."""

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """As many as there are: no kernel here wants more."""
        return num_heads

    _forward_decode = forward_decode
    _forward_prefill = forward_prefill
