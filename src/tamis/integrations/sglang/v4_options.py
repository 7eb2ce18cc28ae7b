"""Whether a DeepSeek-V4 model of SGLang is to run on tamis, and why it cannot. This module does not import SGLang.

SGLang 0.5.23 has an option of its own for the attention of V4, `--dsv4-attn-backend`. SGLang 0.5.17 has none, and V4
ignores the options of sparse MLA there, so these two choose tamis: `--dsa-prefill-backend tamis --dsa-decode-backend
tamis`.
"""

from collections.abc import Iterator
from typing import Any

from tamis.cache.layout import v4_fp8
from tamis.integrations.sglang.options import FIELDS, NAME, V4_FIELD

_OTHERS = "remove it, or choose another attention backend"


def is_chosen(kernel: Any) -> bool:
    """Whether tamis is to run the attention of V4. Options that name it without effect are refused.

    Args:
        kernel: SGLang's options of kernels, `get_exec().kernel`.
    """
    asked = [name for name in FIELDS.values() if getattr(kernel, name, None) == NAME]
    if not hasattr(kernel, V4_FIELD):
        if len(asked) == 1:
            other = next(name for name in FIELDS.values() if name not in asked)
            raise ValueError(
                f"{_flag(asked[0])} tamis was given without {_flag(other)} tamis; one backend runs both phases of "
                "DeepSeek-V4, so give both or neither"
            )
        return bool(asked)
    chosen = getattr(kernel, V4_FIELD)
    if chosen != NAME and asked:
        raise ValueError(
            f"{_flag(asked[0])} tamis has no effect on DeepSeek-V4, whose attention is {chosen!r}; "
            f"give {_flag(V4_FIELD)} tamis instead"
        )
    return bool(chosen == NAME)


def check_served(backend: Any, context_ranks: int) -> None:
    """Raise, with every reason, if tamis cannot run the attention of a backend that SGLang has constructed.

    Args:
        backend: SGLang's attention backend for V4.
        context_ranks: the number of ranks that share the tokens of a prefill, `get_parallel().attn_cp_size`.
    """
    reasons = [*_pool_refusals(backend.token_to_kv_pool), *_feature_refusals(backend, context_ranks)]
    if reasons:
        raise ValueError(f"tamis cannot run the attention of this DeepSeek-V4 model: {'; '.join(reasons)}")


def _pool_refusals(pool: Any) -> Iterator[str]:
    """Reasons against the format of the cache: tamis reads the rows that SGLang calls V4."""
    ratios = getattr(pool, "present_ratios", ())
    layouts = {"window": _layout(pool, "get_swa_key_layout")}
    layouts |= {f"entries of ratio {ratio}": _layout(pool, "compressed_kv_layout", ratio) for ratio in ratios if ratio}
    for part, layout in layouts.items():
        if layout not in (None, "v4"):
            yield f"its {part} cache has {layout!r} rows and not 'v4' rows; set SGLANG_DSV4_KV_LAYOUT=v4"
    if layouts["window"] is None and pool.swa_kv_pool.kv_cache_total_dim != v4_fp8().row_bytes:
        yield f"its rows have {pool.swa_kv_pool.kv_cache_total_dim} bytes and not {v4_fp8().row_bytes}"


def _layout(pool: Any, name: str, *arguments: Any) -> str | None:
    """The name of a layout; None for versions of SGLang that have one layout only."""
    method = getattr(pool, name, None)
    return None if method is None else str(method(*arguments).value)


def _feature_refusals(backend: Any, context_ranks: int) -> Iterator[str]:
    if backend.hisparse_coordinator is not None:
        yield f"HiSparse keeps entries in host memory (--enable-hisparse); {_OTHERS}"
    decode_ranks = getattr(getattr(backend.model_runner, "server_args", None), "dcp_size", None) or 1
    for flag, ranks in (("--attn-cp-size", context_ranks), ("--dcp-size", decode_ranks)):
        if ranks > 1:
            yield f"context parallelism spreads its tokens over {ranks} ranks ({flag}); {_OTHERS}"
    if getattr(backend, "dsv4_prefill_backend", "auto") == "flashmla_sparse_q8":
        yield "--dsv4-prefill-backend flashmla_sparse_q8 names another kernel for prefills; remove it"


def _flag(field: str) -> str:
    return f"--{field.replace('_', '-')}"
