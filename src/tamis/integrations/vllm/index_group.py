"""`IndexGroup`: layers that attend to one indexer's selection, and translate its positions to slots once a step.

vLLM passes a builder of groups to its layers (`index_group_builder`, from 0.30 on). Its own groups have buffers for
translated positions, two events and a stream. tamis' attention looks positions up in the block table by itself, and
translates them beforehand only if ranks share the rows of a request or prefills are gathered. So its groups hold
nothing between steps: slots are kept with the step's record, until the next group replaces them.
"""

from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from tamis.ops.translate.operations import TranslatePositions, translate_positions


class IndexGroup:
    """The layers that attend to one selection. Groups are compared by identity."""


_LATEST: WeakKeyDictionary[Any, IndexGroup] = WeakKeyDictionary()
"""The group of each builder to which its next layer belongs, if that has no indexer."""


def join_group(builder: Any, has_indexer: bool) -> tuple[IndexGroup, bool]:
    """The group of a layer, and whether the layer is its first.

    Layers are constructed in the order in which they run. One with an indexer begins a group, and so does one for which
    the engine has no builder.
    """
    if builder is None:
        return IndexGroup(), True
    leads = has_indexer or builder not in _LATEST
    if leads:
        _LATEST[builder] = IndexGroup()
    return _LATEST[builder], leads


class StepSlots:
    """The translated positions of the group that runs, within one step."""

    def __init__(self) -> None:
        """Nothing is translated yet."""
        self._group: IndexGroup | None = None
        self._slots: dict[tuple[Any, ...], Tensor] = {}

    def translate(self, call: TranslatePositions, *, group: IndexGroup, leads: bool) -> Tensor:
        """The slots of a layer's positions, or of a part of them. The first layer of a group always translates them,
        since its indexer has just written new positions to the same place; the others take what it has found."""
        if group is not self._group:
            self._group, self._slots = group, {}
        positions = call.positions
        key = (positions.data_ptr(), positions.shape, call.page_size, call.rows_per_page, call.shard, call.compact)
        if leads or key not in self._slots:
            self._slots[key] = translate_positions(call)[0]
        return self._slots[key]
