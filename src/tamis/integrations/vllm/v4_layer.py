"""`TamisV4Attention`: vLLM's DeepSeek-V4 layer with tamis' attention. Importing this module imports vLLM."""

from vllm.models.deepseek_v4.nvidia.flashmla import DeepseekV4FlashMLAAttention

from tamis.integrations.vllm.v4_forward import forward_decode, forward_prefill


class TamisV4Attention(DeepseekV4FlashMLAAttention):
    """vLLM's layer with other attention kernels. Projections, caches, compressor, indexer and per-step records stay
    vLLM's."""

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """`num_heads`: no kernel of tamis needs padded heads."""
        return num_heads

    _forward_decode = forward_decode
    _forward_prefill = forward_prefill
