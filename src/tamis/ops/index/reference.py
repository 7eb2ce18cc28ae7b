"""Index scores and exact top-k, in plain torch."""

import torch
from torch import Tensor

from tamis.cache import PagedCache
from tamis.ops.gather.reference import decode_rows, request_slots


def index_topk(
    q: Tensor, weights: Tensor, cache: PagedCache, request_ids: Tensor, block_table: Tensor, lengths: Tensor, k: int
) -> Tensor:
    """Positions int32 [T, k] of the highest-scored keys, lowest position first among equals, -1 padded."""
    result = torch.full((q.shape[0], k), -1, dtype=torch.int32, device=q.device)
    for request in request_ids.unique().tolist():
        tokens = (request_ids == request).nonzero().squeeze(1)
        visible = lengths[tokens].long()
        context = int(visible.max())
        if context <= 0:
            continue
        one = torch.tensor([context], device=q.device)
        zero = torch.zeros_like(one)
        slots = request_slots(cache, block_table[request : request + 1], one, zero, zero, context)
        keys = decode_rows(cache, slots.clamp_min(0))
        logits = torch.relu(q[tokens].float() @ keys.T)
        scores = torch.einsum("th,ths->ts", weights[tokens].float(), logits)
        hidden = torch.arange(context, device=q.device) >= visible.unsqueeze(1)
        scores.masked_fill_(hidden | (slots < 0), -torch.inf)
        values, order = scores.sort(dim=1, descending=True, stable=True)
        width = min(k, context)
        chosen = torch.where(values[:, :width] == -torch.inf, -1, order[:, :width])
        result[tokens, :width] = chosen.int()
    return result
