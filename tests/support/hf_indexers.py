"""The queries and keys of untouched indexers, from their own projections and transformers' own rotations."""

import sys
from typing import Any

from torch import Tensor

ADJACENT = ("GlmMoeDsaIndexer", "MistralLarge4TextIndexer")
LAST = ("HYV4Indexer",)


def index_rows(indexer: Any, hidden_states: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Rotated queries [B, S, H, D] and keys [B, S, D] of an indexer that was called with these arguments."""
    q, k, position_embeddings = _projected(indexer, hidden_states, *args)
    rope, library, name = indexer.qk_rope_head_dim, sys.modules[type(indexer).__module__], type(indexer).__name__
    if not getattr(indexer, "use_rope", True):
        return q, k.squeeze(2)
    columns = slice(q.shape[-1] - rope, None) if name in LAST else slice(0, rope)
    turn = library.apply_rotary_pos_emb_interleave if name in ADJACENT else library.apply_rotary_pos_emb
    turned = turn(q[..., columns], k[..., columns], *position_embeddings, unsqueeze_dim=2)
    if name in ADJACENT:  # back to pairs: a Hadamard rotation mixes columns in their order
        turned = tuple(x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2) for x in turned)
    q, k = q.clone(), k.clone()
    q[..., columns], k[..., columns] = turned
    return q, k.squeeze(2)


def _projected(indexer: Any, hidden_states: Tensor, *args: Any) -> tuple[Tensor, Tensor, Any]:
    """Queries [B, S, H, D] and keys [B, S, 1, D] before the rope, and the cosines and sines."""
    k = indexer.k_norm(indexer.wk(hidden_states)).unsqueeze(2)
    shape = (indexer.n_heads, indexer.head_dim)
    if not hasattr(indexer, "softmax_scaling"):
        residual, position_embeddings = args[:2]
        return indexer.wq_b(residual).unflatten(-1, shape), k, position_embeddings
    position_embeddings, _, position_ids = args[:3]
    q = indexer.wq_b(indexer.q_input_norm(hidden_states)).unflatten(-1, shape)
    factor = indexer.softmax_scaling.scale * (position_ids + 1).float().log().unsqueeze(-1)
    return q * (factor + indexer.softmax_scaling.bias).to(q.dtype).unsqueeze(-1), k, position_embeddings
