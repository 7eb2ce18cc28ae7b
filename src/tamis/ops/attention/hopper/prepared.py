"""Attention calls whose launches are complete, except for addresses and the softmax scale."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tamis.cache.selection import Selection
from tamis.cuda.device import Rooms, current_stream, device_index
from tamis.cuda.launch import Launch, PreparedLaunch
from tamis.ops.attention.hopper.splits import VALUE_DIM, Outputs, merge_launch
from tamis.ops.attention.operations import Attend

OUTPUTS = ("out", "lse", "max_logits")
SPLITS = ("split_out", "split_lse", "split_max_logits")
ROW_ALIGNMENT = 16
"""Alignment in bytes of a cache's first row, without which other kernels take the call."""


class AttendLaunch(NamedTuple):
    """The launch of an attention kernel for one call."""

    launch: Launch
    grid: tuple[int, int, int]
    params: Any
    """A NamedTuple of parameters with the fields `query` and `output`."""
    selections: tuple[str, ...]
    """The fields of the call's selections. If there are more of them than selections, the last one is repeated."""

    def __call__(self) -> None:
        """Launch on the current stream."""
        self.launch(self.grid, self.params)


def copies_nothing(selections: Sequence[Selection]) -> bool:
    """Whether `selection_params` takes all tensors as they are."""
    for selection in selections:
        lengths, ids, table = selection.lengths, selection.request_ids, selection.block_table
        if (lengths is not None and not lengths.is_contiguous()) or (ids is not None and not ids.is_contiguous()):
            return False
        if table is not None and table.stride(1) != 1:
            return False
    return True


class PreparedAttend:
    """Runs attention calls that differ from one that was prepared in addresses and the softmax scale only."""

    def __init__(
        self,
        call: Attend,
        launches: Sequence[AttendLaunch],
        whole: Outputs,
        splits: Outputs | None,
        *,
        query_alignment: int,
    ) -> None:
        """Prepare the launches of a call.

        Args:
            call: the call. None of its tensors is kept.
            launches: the launches of its kernel, which differ in their grids and numbers.
            whole: the outputs of these launches.
            splits: the outputs of tokens that are split, if any are.
            query_alignment: alignment in bytes that the kernel requires of a query.
        """
        out, sinks, device = call.out, [] if call.sink is None else ["sink"], call.q.device
        self._device = device_index(device)
        self._query_bits, self._out_bits = query_alignment - 1, 4 * out.element_size() - 1
        self._split_rows = 0 if splits is None else splits.lse.numel()
        lse = (tuple(whole.lse.shape), torch.float32)
        room = [((self._split_rows * (VALUE_DIM + 2),), torch.float32)] if self._split_rows else []
        self._into = Rooms(device, lse, lse, *room)
        self._anew = Rooms(device, (tuple(out.shape), out.dtype), lse, lse, *room)
        outputs = [*OUTPUTS, *sinks, *(SPLITS if self._split_rows else ())]
        names, self._rows = ["query.q", *(f"output.{name}" for name in outputs)], []
        fields_of = launches[0].selections
        self._repeated = len(fields_of) - len(call.selections)
        read = 0
        for prefix, selection in zip(fields_of, [*call.selections, *call.selections[:1]], strict=False):
            fields = ["rows", "slots"] + ["lengths"] * (selection.lengths is not None)
            fields += ["request_ids", "block_table"] if selection.block_table is not None else []
            names += [f"{prefix}.{field}" for field in fields]
            self._rows.append(read)
            read += len(fields)
        del self._rows[len(call.selections) :]
        self._launches = [made.launch.prepared(made.grid, made.params, names, "query.scale") for made in launches]
        self._merge: PreparedLaunch | None = None
        if splits is not None and self._split_rows:
            merge, grid, params = merge_launch(splits, call.sink, whole, call.lse_form)
            self._merge = merge.prepared(grid, params, [*OUTPUTS, *sinks, *SPLITS])

    def reshape_output(self, shape: tuple[int, ...]) -> None:
        """Give new outputs another shape of as many elements."""
        self._anew.reshape(0, shape)

    def __call__(
        self, q: Tensor, read: Sequence[Tensor], scale: float, sink: Tensor | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Attend, into a new output if none is given; None if addresses are not aligned as the kernels need them.

        Args:
            q: the queries.
            read: of each selection the cache's storage, the slots, and then those that it has of lengths, request ids
                and block table.
            scale: the softmax scale.
            sink: the sink, contiguous.
            out: the output.
        """
        query_at, addresses = q.data_ptr(), [tensor.data_ptr() for tensor in read]
        misaligned = query_at & self._query_bits
        for place in self._rows:
            misaligned |= addresses[place] & (ROW_ALIGNMENT - 1)
        if misaligned or (out is not None and out.data_ptr() & self._out_bits):
            return None
        if self._repeated:
            addresses += addresses
        # Splits are the last tensor. The name keeps them until the merge is launched.
        made = self._anew() if out is None else [out, *self._into()]
        out, lse, max_logits = made[:3]
        given = [out.data_ptr(), lse.data_ptr(), max_logits.data_ptr()]
        if sink is not None:
            given.append(sink.data_ptr())
        stream = current_stream(self._device)
        if self._merge is not None:
            split_at = made[3].data_ptr()
            lse_at = split_at + self._split_rows * VALUE_DIM * 4
            given += (split_at, lse_at, lse_at + self._split_rows * 4)
        for launch in self._launches:
            launch(stream, [query_at, *given, *addresses], scale)
        if self._merge is not None:
            self._merge(stream, given)
        return out, lse, max_logits
