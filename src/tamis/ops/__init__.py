"""The stages, in the order in which a layer runs them: (rotate, compress,) write, (select,) index, translate, (gather,)
attend, combine (, output). Those in brackets belong to DeepSeek-V4 or to gathered prefills.

Each stage is a package: `operations` declares what it computes, `__init__` offers it and checks the arguments,
`reference` is the definition in plain torch, and the modules beside it are the backends' kernels. `library` picks the
backend and makes each operation a torch op for torch.compile.
"""

from tamis.ops.attention import attend, attend_slots
from tamis.ops.combine import Attended, Partials, combine_parts
from tamis.ops.compress import StatePages, compress_kv, pool_kv
from tamis.ops.gather import gather_index, gather_kv, read_kv
from tamis.ops.index import IndexInputs, index_scores, index_topk, ragged_scores, topk_positions
from tamis.ops.index.blocks import index_topk_and_blocks, index_topk_within
from tamis.ops.index.mxfp4 import PackedQuery, pack_index_query, unpack_index_query
from tamis.ops.index.prepare import quantise_index_query, rotate_index, write_index_keys
from tamis.ops.output import Fp8Heads, lower_groups, quantise_blocks, rotate_to_fp8
from tamis.ops.rotate import Rotated, norm_rows, rotate_and_write, rotate_heads, write_rotated
from tamis.ops.select import select_chosen, select_entries, select_gathered, select_groups, select_window
from tamis.ops.translate import Translated, translate_positions
from tamis.ops.write import quantise_per_tensor, write_kv, write_normed_kv

__all__ = [
    "Attended",
    "Fp8Heads",
    "IndexInputs",
    "PackedQuery",
    "Partials",
    "Rotated",
    "StatePages",
    "Translated",
    "attend",
    "attend_slots",
    "combine_parts",
    "compress_kv",
    "gather_index",
    "gather_kv",
    "index_scores",
    "index_topk",
    "index_topk_and_blocks",
    "index_topk_within",
    "lower_groups",
    "norm_rows",
    "pack_index_query",
    "pool_kv",
    "quantise_blocks",
    "quantise_index_query",
    "quantise_per_tensor",
    "ragged_scores",
    "read_kv",
    "rotate_and_write",
    "rotate_heads",
    "rotate_index",
    "rotate_to_fp8",
    "select_chosen",
    "select_entries",
    "select_gathered",
    "select_groups",
    "select_window",
    "topk_positions",
    "translate_positions",
    "unpack_index_query",
    "write_index_keys",
    "write_kv",
    "write_normed_kv",
    "write_rotated",
]
