"""The operation of stage `combine`; see `tamis.ops.library`."""

from typing import NamedTuple

from torch import Tensor

from tamis.ops.library import Operation, Written


class CombineParts(NamedTuple):
    """Merge the partial outputs of splits by their lse."""

    parts: Tensor
    """[S, T, H, V] in float32, float64, bf16 or fp16, each split normalised by itself."""
    lses: Tensor
    """float32 or float64 [S, T, H], natural logarithms; -inf where a split has no row."""
    sink: Tensor | None
    """float32 [H], contiguous."""
    out: Written[Tensor]
    """[T, H, V] in bf16, fp16, fp32 or fp64."""
    backend: str
    """A name from `tamis backends`, or "auto"."""

    @property
    def no_gradient(self) -> tuple[str, ...]:
        """Arguments that may not require a gradient."""
        return "parts", "lses", "sink"

    def fake(self) -> Tensor:
        """The merged lse [T, H], without the sink."""
        return self.lses.new_empty(self.lses.shape[1:], dtype=self.lses.dtype)


combine_parts = Operation("combine", CombineParts, CombineParts.fake)


def contiguous_sink(sink: Tensor | None) -> Tensor | None:
    """A sink as kernels read it, from consecutive addresses. (An expanded one has a single number in memory.)"""
    return sink.contiguous() if isinstance(sink, Tensor) and not sink.is_contiguous() else sink
