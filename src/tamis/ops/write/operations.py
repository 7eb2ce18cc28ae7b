"""The operation of stage `write`; see `tamis.ops.library`."""

from typing import NamedTuple

from torch import Tensor

from tamis.cache.paged import PagedCache
from tamis.ops.library import Operation, Written


class WriteKv(NamedTuple):
    """Quantise rows and insert them at their slots."""

    kv: Tensor
    """[T, width] in bf16, fp16 or fp32; [T, latent] with a rope part."""
    rope: Tensor | None
    """[T, rope] in kv's dtype, the last columns of rows whose two parts are separate tensors."""
    slots: Tensor
    """int32 or int64 [T'], T' <= T; rows with a negative slot, or past T', are not written."""
    cache: Written[PagedCache]
    """A cache of any layout with rows of this width."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return "kv", "rope"

    def fake(self) -> None:
        """Nothing is returned."""


write_kv = Operation("write", WriteKv, WriteKv.fake)
