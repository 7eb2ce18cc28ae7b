"""V4's compressor in training: spans of packed requests' tokens pooled into entries."""

from torch import Tensor

from tamis import checks
from tamis.ops.compress import row_operations
from tamis.ops.compress.row_operations import CompressRows
from tamis.train.arguments import DTYPES, refuse_transforms, same_dtype, widened_in_autocast
from tamis.train.pack import Entries


def compress_rows(
    values: Tensor,
    scores: Tensor,
    bias: Tensor,
    entries: Entries,
    *,
    overlapping: bool = False,
    backend: str = "auto",
) -> Tensor:
    """The entries of all complete spans of a pack, one request after another, before norm and rope: [count, D].

    A span has r tokens; a request's first span begins with the request. Per channel, an entry is the mean of the
    values of its span's tokens, weighted by a softmax over their scores; row i of `bias` is added to the scores of the
    i-th token. If spans overlap, every token has two sets of D channels: the second goes into its own span's entry, the
    first into the next one's.

    The result is differentiable in `values`, `scores` and `bias`, once. Entries are float32 (float64 for float64
    values), so that norm and rope come before the only rounding, as in `tamis.ops.compress_kv`. Entry e of a request is
    rotated at position e * r, which `Entries.positions` holds. Under autocast, values and scores of different dtypes
    are converted to float32.

    Args:
        values: [T, C] in bf16, fp16, fp32 or fp64; C is D, or 2D where spans overlap.
        scores: [T, C] in the same dtype, without the bias.
        bias: [r, C].
        entries: the spans of the T tokens, from `Pack.entries(r)`; all layers of a step can share them.
        overlapping: whether spans overlap (V4's entries of 4 tokens) or not (its entries of 128).
        backend: a name from `tamis backends`, or "auto".
    """
    values, scores = widened_in_autocast(values, scores)
    checks.instance("entries", entries, Entries)
    checks.flag("overlapping", overlapping)
    tokens, ratio, device = len(entries.starts), entries.ratio, entries.spans.device
    remedy = "pass one row per token of the pack, on the pack's device"
    channels = checks.tensor("values", values, "T C", DTYPES, T=tokens, device=device, remedy=remedy)["C"]
    if channels == 0 or (overlapping and channels % 2):
        expected = "2D wide, D > 0" if overlapping else "at least one channel wide"
        raise checks.refuse("values", expected, list(values.shape), "check its shape")
    checks.tensor("scores", scores, "T C", DTYPES, T=tokens, C=channels, device=device)
    same_dtype("values", values, scores=scores)
    remedy = "pass one row per token of a span"
    checks.tensor("bias", bias, "r C", DTYPES, r=ratio, C=channels, device=device, remedy=remedy)
    refuse_transforms("compress_rows", values=values, scores=scores, bias=bias)
    call = CompressRows(values, scores, bias, entries.spans, entries.before if overlapping else None, backend)
    row_operations.compress_rows.check(call)
    return row_operations.compress_rows(call)
