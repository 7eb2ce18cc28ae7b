"""DeepSeek-V4.1's layers, as its config describes them: which layer owns entries, which selects, and from what.

A layer of ratio 0 has a window only. One of ratio 1 or 2 also attends to entries that an indexer selects. Only layers
in `kv_source_layer_ids` make entries and index keys, and only those in `index_source_layer_ids` select; the others read
the entries, or take the selection, of the nearest such layer before them. The layer `candidate_source_layer_id` also
selects blocks of entries, and every layer after it that selects does so within these blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tamis import checks
from tamis.model import hf_config

RATIOS = (0, 1, 2)


@dataclass(frozen=True)
class Candidates:
    """How a layer selects in two levels."""

    blocks: int
    """How many blocks of entries are candidates."""
    block_size: int
    """Entries per block."""
    source: bool
    """Whether this layer selects the blocks, from all entries. The others select entries within them."""

    def __post_init__(self) -> None:
        """Refuse numbers that do not describe blocks."""
        checks.integer("candidates.blocks", self.blocks, low=1, high=4096)
        checks.integer("candidates.block_size", self.block_size, low=1)
        checks.flag("candidates.source", self.source)


class Sharing(NamedTuple):
    """A layer's part in what layers share."""

    ratio: int
    """Tokens per entry; 0 for a window only."""
    entries_of: int
    """The layer whose entries it reads; itself if it makes them."""
    selection_of: int
    """The layer whose selection it takes; itself if it has an indexer."""
    candidates: Candidates | None
    """How it selects in two levels; None if it does not, or does not select."""


def sharing(fields: Mapping[str, Any], layer: int) -> Sharing:
    """A layer's part in what layers share. Layers that could not share are refused, for example of two ratios."""
    ratio = _ratio(fields, layer)
    if ratio == 0:
        return Sharing(0, layer, layer, None)
    entries = _source(fields, "kv_source_layer_ids", layer, ratio)
    selection = _source(fields, "index_source_layer_ids", layer, ratio)
    if _source(fields, "kv_source_layer_ids", selection, ratio) != entries:
        expected = f"one since layer {entries}, whose entries layer {layer} reads"
        raise checks.refuse("config.index_source_layer_ids", expected, selection, "fix the config")
    return Sharing(ratio, entries, selection, _candidates(fields, layer, ratio) if selection == layer else None)


def _ratio(fields: Mapping[str, Any], layer: int) -> int:
    """A layer's ratio. Speculative layers have only a window."""
    ratios = hf_config.listed(fields, "compress_ratios")
    if ratios is None:
        raise checks.refuse("config", "one with 'compress_ratios'", "none", "this is not a V4.1 config")
    if layer >= hf_config.whole(fields, "num_hidden_layers", low=0, default=layer + 1) or layer >= len(ratios):
        return 0
    ratio = checks.integer(f"config.compress_ratios[{layer}]", ratios[layer], low=0)
    if ratio not in RATIOS:
        raise checks.refuse(f"config.compress_ratios[{layer}]", "0, 1 or 2", ratio, "this layer kind is unknown")
    return ratio


def _source(fields: Mapping[str, Any], name: str, layer: int, ratio: int) -> int:
    """The nearest layer of a list up to and including a layer, which must have the same ratio."""
    listed = hf_config.listed(fields, name) or ()
    sources = [checks.integer(f"config.{name}[{at}]", number, low=0) for at, number in enumerate(listed)]
    before = [source for source in sources if source <= layer]
    if not before:
        expected = f"one with a layer up to {layer}, which has ratio {ratio}"
        raise checks.refuse(f"config.{name}", expected, list(sources), "fix the config")
    source = max(before)
    if _ratio(fields, source) != ratio:
        expected = f"of layers with the ratio {ratio} of layer {layer}, which reads layer {source}"
        raise checks.refuse(f"config.{name}", expected, f"ratio {_ratio(fields, source)}", "fix the config")
    return source


def _candidates(fields: Mapping[str, Any], layer: int, ratio: int) -> Candidates | None:
    """How a layer with an indexer selects in two levels."""
    named = fields.get("candidate_source_layer_id")
    source = -1 if named is None else checks.integer("config.candidate_source_layer_id", named, low=-1)
    if not 0 <= source <= layer:
        return None
    if _ratio(fields, source) != ratio:
        expected = f"a layer of the ratio {ratio} of layer {layer}, which selects within its blocks"
        raise checks.refuse("config.candidate_source_layer_id", expected, source, "fix the config")
    blocks, size = (hf_config.whole(fields, name) for name in ("candidate_topk_blocks", "candidate_block_size"))
    return Candidates(blocks, size, source == layer)
